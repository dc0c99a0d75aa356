"""Stage `throughput` of an external program: the speed alone, then paired timing with the plan's first run."""

from __future__ import annotations

import argparse
import contextlib
import logging
from pathlib import Path
from typing import Any

from dlscale.config.compute import compute_digest
from dlscale.config.run import load_run
from dlscale.core.errors import UserError
from dlscale.core.text import duration, number
from dlscale.extensions.programs import logs
from dlscale.extensions.programs import steps as seen
from dlscale.extensions.programs.keeper import temporary_folder
from dlscale.extensions.programs.run_program import RunProgram
from dlscale.measure.turns import paired


def main(args: argparse.Namespace) -> None:
    """Measure the program of the run in `args.config`, and write the record `args.out`.

    If `args.beside` is given, paired timing with that run follows.
    """
    run, out = load_run(args.config, "throughput"), Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        turns = stack.enter_context(paired(args))
        place = Path(stack.enter_context(temporary_folder(".program", out.parent)))
        program = RunProgram(run, args.start, place / "out", place / "steps")
        ended = program.go(lambda printed: enough(run.throughput, program, printed))
        if ended.status and not ended.stopped:
            raise UserError(
                f"the program ended with status {ended.status} after {duration(ended.seconds)}. See the end of the "
                "program's output in the log"
            )
        found = program.record(ended, args.telemetry)
        assert found.full
        logging.info(
            "training: %s (standard deviation %s) %s", number(found.full.mean), number(found.full.std, 2), found.unit
        )
        beside = turns and turns.paired_timing(run.throughput)
        digest = compute_digest(run.model_dump(mode="json"))
        known = {"beside": beside, "compute": digest, "settings": run.throughput.model_dump()}
        found.model_copy(update=known).write(out)


def enough(settings: Any, program: RunProgram, printed: int) -> bool:
    """Return whether enough steps were made for the settings `warmup` and `trials`.

    Steps that were seen must also last as many seconds as the settings require. Printed rates and logged steps are only
    counted.
    """
    if program.pattern:
        return printed > settings.warmup + settings.trials
    ends = [process.steps for process in seen.read(program.steps)[1]]
    if not ends and program.log:
        with contextlib.suppress(UserError):  # the log does not exist yet
            return (
                max(map(len, logs.logged(program.log, program.log_start)), default=0)
                > settings.warmup + settings.trials
            )
    if not ends:
        return False
    least, warm = min(ends, key=len), settings.warmup * settings.batches
    wanted = warm + settings.trials * settings.batches
    return len(least) >= wanted and least[-1] - least[warm] >= settings.trials * settings.seconds
