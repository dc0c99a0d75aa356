"""Paired timing of an external program: all processes of the program are stopped while the other run is timed."""

from __future__ import annotations

import bisect
import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from dlscale.config.run import load_run
from dlscale.core.errors import UserError, brief
from dlscale.extensions.programs import logs
from dlscale.extensions.programs import steps as seen
from dlscale.extensions.programs.keeper import KeptProgram, temporary_folder
from dlscale.extensions.programs.run_program import RunProgram
from dlscale.extensions.programs.running import watched
from dlscale.measure.turns import PATIENCE, TURN, TimedRunSettings, TurnFailed

#: Warm-up steps before a program is timed, and minimum steps of a turn.
WARM_UP_STEPS, MIN_TURN_STEPS = 10, 4

#: Seconds between checks of a program's steps.
LOOK = 0.02


class ProgramSubject:
    """A run's program in its own session: a `dlscale.measure.turns.Subject`."""

    def __init__(self, timed: TimedRunSettings) -> None:
        self._timed, self._folder = timed, temporary_folder("dlscale-program")
        self._process: KeptProgram | None = None
        self._tail: seen.Tail | None = None
        self._size, self._rate = 1.0, 1.0  # samples per step, steps/s
        self._look = 0.0  # time at which the program's log is read again, on the monotonic clock
        self._logged: list[list[logs.Point]] = []

    def open(self) -> None:
        """Start the program afresh."""
        self._end()
        place = Path(self._folder.name)
        try:
            program = RunProgram(load_run(self._timed.config, "throughput"), None, place / "out", place / "steps")
        except UserError as error:
            raise TurnFailed(brief(error)) from None
        if program.pattern:
            raise TurnFailed(
                "a program with printed rates (program.rate) cannot be paused, because its own clock does not stop"
            )
        self._program = program
        environment, nowhere = watched(program.steps, program.environment, quick=True), subprocess.DEVNULL
        try:
            self._process = KeptProgram(program.command, program.folder, environment, nowhere, nowhere, session=True)
        except OSError as error:
            raise TurnFailed(f"a program cannot be started: {error.strerror}") from None

    def wait(self) -> None:
        """Wait until the program has made its warm-up steps; then determine its pace and its samples per step."""
        self._wait(self._warm)
        ends = self._ends()[WARM_UP_STEPS:]
        self._rate = (len(ends) - 1) / (ends[-1] - ends[0])
        own = seen.pace([self._tail.process]) if self._tail else None
        delivered = (own and own.samples and own.batch_size) or 0
        size = max(delivered, self._program.batch_size or 0)
        if not size:
            raise TurnFailed("a program's samples per step are unknown; put {batch_size} into program.command")
        self._size = float(size)

    def _warm(self) -> bool:
        ends = self._ends()
        if not ends and self._program.log and time.monotonic() > self._look:
            self._look = time.monotonic() + 1
            with contextlib.suppress(UserError):  # the log does not exist yet
                before, self._logged = self._logged, logs.logged(self._program.log, self._program.log_start)
                # The log is checked twice, because the hook may write steps shortly after the program writes its log.
                if max(map(len, before), default=0) > WARM_UP_STEPS:
                    raise TurnFailed("a program's steps are only in its log, which is read too late for paired timing")
        return len(ends) > WARM_UP_STEPS and ends[-1] - ends[WARM_UP_STEPS] >= TURN

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def turn(self, seconds: float = TURN) -> float:
        """Let the program run for about `seconds`, but at least for `MIN_TURN_STEPS` steps; return samples/s.

        The time from the end of the first step to the end of the last step counts. A program that has ended with status
        0 is started once more.
        """
        steps = max(MIN_TURN_STEPS, round(seconds * self._rate))
        for _ in range(2):
            begin = time.time()
            self._signal(signal.SIGCONT)
            with contextlib.suppress(TurnFailed):
                self._wait(lambda since=begin: len(self._ends(since)) > steps)  # type: ignore[misc]
            ended, ends = self._process is None or self._process.poll() is not None, self._ends(begin)
            if ended and (self._process is None or self._process.poll()):
                raise TurnFailed("a program failed during paired timing")
            if ended:
                self.open()
                self.wait()
            self.pause()
            if len(ends) > MIN_TURN_STEPS:
                return self._size * (len(ends) - 1) / (ends[-1] - ends[0])
        raise TurnFailed(
            "a program ended before the paired timing, or made too few steps during it. Let the program make more steps"
        )

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
        for place in Path(self._folder.name).glob("*"):
            shutil.rmtree(place, ignore_errors=True)
        self._process, self._tail, self._logged = None, None, []

    def _ends(self, since: float = 0.0) -> list[float]:
        """Return the end times, after `since`, of the steps of the program's first process."""
        if self._tail is None:
            files = [file for way in seen.WAYS for file in seen.files(self._program.steps, way)]
            self._tail = next((tail for tail in map(seen.Tail, files) if tail.process.steps), None)
        if self._tail is None:
            return []
        self._tail.read()
        steps = seen.without_validations(self._tail.process).steps
        return steps[bisect.bisect_right(steps, since) :]

    def _wait(self, done: Callable[[], bool]) -> None:
        assert self._process
        end = time.monotonic() + PATIENCE
        while not done():
            if (status := self._process.poll()) is not None:
                raise TurnFailed(f"a program ended with status {status} during paired timing")
            if time.monotonic() > end:
                raise TurnFailed(f"a program made too few steps in {PATIENCE:.0f} s")
            time.sleep(LOOK)

    def _signal(self, number: int) -> None:
        assert self._process
        self._process.signal(number, descendants=True)
