"""Choose the trials of a sweep for the next rung of successive halving (stage `promote`).

The sweep's metric ranks the trials of the rung before. The best trials that did not diverge are promoted (Jamieson and
Talwalkar 2016, arXiv:1502.07943).
"""

from __future__ import annotations

import argparse
import logging
import math

from dlscale.config.records import Rung
from dlscale.core.text import number
from dlscale.results import read_plan


def main(args: argparse.Namespace) -> None:
    """Write the trials promoted to rung `args.rung` into `args.out`."""
    plan = read_plan(args.plan, args.rung - 1)
    assert plan.record.sweep is not None  # the workflow calls this stage only for sweeps
    ranked, metric = plan.ranked, plan.record.sweep.metric
    scores = {run.name: plan.score(run)[0] for run in ranked}
    best = [run.name for run in ranked if math.isfinite(scores[run.name])][: plan.record.sweep.rungs[args.rung][1]]
    for name in best:
        logging.info("%s is promoted: %s %s", name, metric, number(scores[name]))
    Rung(metric=metric, scores=scores, trials=best).write(args.out)
