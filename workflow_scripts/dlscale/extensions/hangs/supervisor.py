"""Watch the steps of a program; if all processes hang, report where, and end the program.

The processes write the time since their last step or batch, and reports on request (`inside.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil

from dlscale.core.files import write_text
from dlscale.extensions.hangs.collect import Collected, collect, family_of, is_gone, py_spy, read
from dlscale.extensions.hangs.finding import SILENT, describe
from dlscale.extensions.hangs.inside import AFTER, STATUS, TICK
from dlscale.extensions.hangs.record import FINDING

#: Exit status of `dlscale measure` after a hang, equal to that of coreutils' `timeout`.
HUNG = 124

#: Limits of `--hang-after`, seconds.
MIN_SECONDS, MAX_SECONDS = 3.0, 1e6

#: Limit before the first step, as a multiple of the limit between steps.
BEFORE_FIRST_STEP = 10

#: Longest waits, seconds: for PyTorch's analysis; for the end of processes after SIGTERM.
ANALYSIS, GRACE = 60.0, 10.0

#: Seconds after which a warning is printed if processes record steps but write no status.
UNSEEN = 10 * TICK


class HangSupervisor:
    """Thread that watches one run of a program."""

    def __init__(
        self, steps: Path, folder: Path, seconds: float, say: Callable[[str], None], before_first_step: bool = True
    ) -> None:
        """Prepare the thread.

        Parameters
        ----------
        steps
            Folder into which the program writes its steps.
        folder
            Folder of the run; reports and stacks are written into its subfolder `hang`.
        seconds
            Time without a step or batch after which the program is ended.
        say
            Function that prints a line for the user.
        before_first_step
            Whether the program is also ended if its first batch or step takes `BEFORE_FIRST_STEP` times `seconds`.
        """
        self._steps, self._limit, self._say = steps, seconds, say
        self.folder, self._finding = folder / FINDING.parent, folder / FINDING
        self._before = before_first_step
        self.environment = {AFTER: f"{seconds:g}"}  #: Environment variables to set for the program.
        self.finding = ""  #: The hang that ended the program; empty without one.
        self._statuses: dict[Path, dict[str, Any]] = {}
        self._ages: dict[Path, float] = {}
        self._ticks, self._unseen = 0.0, 0.0
        self._closed, self._asked = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def watch(self, program: int) -> Iterator[None]:
        """Watch the process `program` and its descendants during the block; SIGQUIT prints a finding."""
        faulthandler.unregister(signal.SIGQUIT)  # the handler of `dlscale.cli`
        before = signal.signal(signal.SIGQUIT, lambda *_: self._asked.set())
        thread = threading.Thread(target=self._run, args=(program,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._closed.set()
            thread.join()
            signal.signal(signal.SIGQUIT, before)
            faulthandler.register(signal.SIGQUIT, file=2)

    def _run(self, program: int) -> None:
        try:
            while not (self._closed.wait(TICK) or self.finding):
                self._ticks += TICK  # counted, because the time in which this process is stopped must not count
                self._look()
                idle, limit = self._idle()
                if idle >= limit or self._asked.is_set():
                    self._asked.clear()
                    self._find(program, idle, idle >= limit)
        except Exception as error:  # the program continues
            self._say(
                "dlscale measure: hangs of the program are no longer watched (--hang-after; in a plan: site.watchdog): "
                f"{type(error).__name__}: {error}"
            )

    def _look(self) -> None:
        """Read the statuses of all processes that record steps."""
        for file in self._steps.glob(f"{STATUS}.*[0-9]"):
            status = read(file)
            if status and status != self._statuses.get(file):
                self._statuses[file], self._ages[file] = status, 0.0
            elif file in self._ages:
                self._ages[file] += TICK

    def _idle(self) -> tuple[float, float]:
        """Return the seconds since the last step or batch of any process, and their limit."""
        live = {file: each for file, each in self._statuses.items() if not (each.get("ended") or is_gone(each))}
        if live:
            idle = min(each["idle"] + self._ages[file] for file, each in live.items())
            stepped = any(each["stepped"] for each in live.values())
            return idle, self._limit * (1 if stepped else BEFORE_FIRST_STEP)
        # Time does not count after the training, if steps cannot be seen, or without `before_first_step`.
        idle = 0.0 if self._statuses or self._is_blind() or not self._before else self._ticks
        return idle, self._limit * BEFORE_FIRST_STEP

    def _is_blind(self) -> bool:
        """Return whether processes record steps but write no status; warn once if this lasts."""
        blind = any(each for way in ("seen", "timed") for each in self._steps.glob(f"{way}.*"))
        self._unseen += TICK if blind else 0.0
        if self._unseen == UNSEEN:
            self._say(
                "dlscale measure: hangs of this program cannot be watched: its processes record steps, but write no "
                "status. Replace old copies of timed.py, or free disk space"
            )
        return blind

    def _find(self, program: int, idle: float, ends: bool) -> None:
        """Print where all processes hang; if `ends` is true, also end the program."""
        found = collect(self._steps, program, {each["pid"]: each for each in self._statuses.values()}, ends)
        if self._closed.is_set() or (ends and any(map(self._has_moved, found.reports.values()))):
            return
        found.keep(self.folder)
        what = f"no step for {idle:.0f} s: {self._describe(found)}"
        if ends:
            self.finding = what
            write_text(self._finding, f"{what}\n")
        kept = f"Stacks of all processes: {self.folder}"
        self._say(f"dlscale measure: {what}. {kept}{'. dlscale ends the program' * ends}")
        if ends:
            _end(program)

    def _has_moved(self, report: dict[str, Any]) -> bool:
        """Return whether a process has made a step after all."""
        return bool(report["stepped"]) and report["idle"] < self._limit / 2

    def _describe(self, found: Collected) -> str:
        known = {each.called for process in found.processes for each in process.waiting}
        said = [describe(found.processes), *_mismatches(self.folder, found, known)]
        silent = [each.name for each in found.processes if each.state == SILENT and each.pid not in found.stacks]
        if silent and not py_spy():
            said.append(f"No stacks of {', '.join(silent)}; py-spy may read them (pip install 'dlscale[profile]')")
        return ". ".join(said)


def _mismatches(folder: Path, found: Collected, known: Collection[str]) -> list[str]:
    """Return a sentence per process group about the first operation that differs between ranks, by PyTorch's analysis.

    A group is omitted if the finding already names its operations (`known`).
    """
    files = [str(folder / f"report.{pid}.json") for pid, each in found.reports.items() if each.get("entries")]
    if len(files) < 2:
        return []
    command = [sys.executable, "-P", "-m", "dlscale.extensions.hangs.matching", *files]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANALYSIS, check=True)
    except (OSError, subprocess.SubprocessError):  # the analysis is private to PyTorch, and may fail
        return []
    return [
        f"Before the hang, according to PyTorch's Flight Recorder, some ranks began {each['called']}, but "
        + " and ".join(f"rank {rank} {called}" for rank, called in each["others"].items())
        for each in json.loads(done.stdout)
        if each["others"] and not {each["called"], *each["others"].values()} <= {*known}
    ]


def _end(program: int) -> None:
    """End a process and its descendants: SIGTERM, a bounded wait, SIGKILL."""
    family = list[psutil.Process]()
    for pid in family_of(program):
        with contextlib.suppress(psutil.Error):
            family.append(psutil.Process(pid))
    for each in family:
        with contextlib.suppress(psutil.Error):
            each.terminate()
            each.resume()
    for each in psutil.wait_procs(family, GRACE)[1]:
        with contextlib.suppress(psutil.Error):
            each.kill()
