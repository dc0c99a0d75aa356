"""Stage `throughput` of an external program: the speed alone, then paired timing with the plan's first run."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlscale.config.compute import compute_digest
from dlscale.config.run import load_run
from dlscale.core.errors import UserError
from dlscale.core.files import temporary_folder
from dlscale.core.noise import interval
from dlscale.core.text import duration, number
from dlscale.extensions.programs import logs
from dlscale.extensions.programs import steps as seen
from dlscale.extensions.programs.run_program import RunProgram
from dlscale.measure.records import Beside
from dlscale.measure.turns import TimedRunSettings, TurnFailed, Turns


def main(args: argparse.Namespace) -> None:
    """Measure the program of the run in `args.config`, and write the record `args.out`.

    If `args.beside` is given, paired timing with that run follows.
    """
    run, out = load_run(args.config, "throughput"), Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        turns = None
        if args.beside:
            own = TimedRunSettings(args.config, args.manifest, args.device, args.threads)
            first = replace(own, config=args.beside, manifest=args.beside_manifest or args.manifest)
            turns = stack.enter_context(contextlib.closing(Turns(own, first)))
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
        beside = None
        if turns:
            try:
                rounds = turns.rounds(run.throughput.beside, run.throughput.error)
            except TurnFailed as problem:
                logging.warning("no paired timing with the plan's first run: %s", problem)
            else:
                settings = load_run(args.beside, "throughput").model_dump(mode="json")
                beside = Beside(compute=compute_digest(settings), openings=rounds)
                ratio, error = interval(beside.ratios)
                logging.info(
                    "paired timing with the plan's first run (both opened %d times): %.3f times as fast, ± %.3f",
                    *(len(rounds), math.exp(ratio), error),
                )
        digest = compute_digest(run.model_dump(mode="json"))
        found.model_copy(update={"beside": beside, "compute": digest, "settings": run.throughput.model_dump()}).write(
            out
        )


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
    least = min(ends, key=len)
    warm = settings.warmup * settings.batches
    wanted = warm + settings.trials * settings.batches
    return len(least) >= wanted and least[-1] - least[warm] >= settings.trials * settings.seconds
