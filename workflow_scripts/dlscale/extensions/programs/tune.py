"""Stage `tune` of an external program: find the fastest values of its command's placeholders."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

from dlscale.config.run import load_run
from dlscale.core.errors import UserError
from dlscale.core.progress import Progress
from dlscale.extensions.programs.turns import ProgramSubject
from dlscale.extensions.tune.tune import compete, write
from dlscale.measure.turns import TimedRunSettings, TurnFailed


def main(args: argparse.Namespace) -> None:
    """Tune the program of the run in `args.config`; write `tune.json` and `tuned.yaml` into `args.out`."""
    run, candidates = load_run(args.config, "tune"), json.loads(args.candidates or "[]")
    if len(candidates) < 2:
        raise UserError(
            "--candidates (set by the workflow): expected at least two candidates, the run's own settings first"
        )
    found = compete(
        run.tune, [changes for changes, _ in candidates], lambda progress: _Trials(args, candidates, progress)
    )
    write(found.model_copy(update={"run": args.run}), args, run.study)


class _Trials:
    """Rates of candidate programs by the candidate's number; used as a `dlscale.extensions.tune.tune.Measure`.

    A program is started for each turn. If `keeps` is true, the program is started once, and paused between its turns.
    """

    def __init__(
        self, args: argparse.Namespace, candidates: list[tuple[dict[str, Any], dict[str, Any]]], progress: Progress
    ) -> None:
        self._timed = [
            TimedRunSettings(json.dumps(run), args.manifest, args.device, args.threads) for _, run in candidates
        ]
        self._changes, self._progress = [changes for changes, _ in candidates], progress
        self._open = dict[int, ProgramSubject]()
        self.problems: dict[int, str] = {}
        self.keeps = False  #: Whether a program is paused after a turn, and kept for its next turn.

    def __enter__(self) -> _Trials:
        return self

    def __exit__(self, *error: object) -> None:
        for subject in self._open.values():
            subject.close()

    def __call__(self, number: int, seconds: float) -> float | None:
        """Return the samples/s of a candidate.

        If a candidate cannot be measured, note the problem and return None. If the run itself (number 0) cannot be
        measured, raise `UserError`.
        """
        self._progress.update(self._progress.done + 1)
        subject = self._open.pop(number, None)
        try:
            if subject is None:
                subject = ProgramSubject(self._timed[number])
                subject.open()
                subject.wait()
                subject.pause()
            rate = subject.turn(seconds)
        except TurnFailed as ended:
            if subject:
                subject.close()
            if number == 0:
                raise UserError(f"program: {ended}") from None
            self.problems[number] = str(ended)
            logging.info("%s: skipped: %s", self._changes[number], ended)
            return None
        if self.keeps:
            self._open[number] = subject
        else:
            subject.close()
        return rate
