"""Measure the speed-up of a program with a loader that costs nothing.

In a copy of the program, plain turns and turns with replayed batches alternate (`replay.py`). For `dlscale measure
--replay`, the copy cannot change the program's files (`scratch.py`). In plans, the copy writes into its own folder,
like the program that is timed for `throughput`.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dlscale.config.run import load_run
from dlscale.core.errors import UserError, brief
from dlscale.core.files import read_text
from dlscale.core.machine import free_memory
from dlscale.core.noise import interval
from dlscale.core.text import duration
from dlscale.extensions.headroom import replay, scratch
from dlscale.extensions.headroom.records import Headroom
from dlscale.extensions.headroom.replay import REPLAY
from dlscale.extensions.programs import steps as seen
from dlscale.extensions.programs.keeper import KeptProgram, temporary_folder
from dlscale.extensions.programs.run_program import RunProgram
from dlscale.extensions.programs.running import watched

#: Number of kept batches in plans; maximum fraction of the free memory for the kept batches of one process.
BATCHES, MEMORY = 16, 0.05

#: Duration of a turn, s, and minimum number of batches of a turn.
TURN, MIN_BATCHES = 0.5, 4

#: Number of batches before the first turn.
WARM_UP = 10

#: The timing ends after at least MIN_PAIRS pairs of turns, if the half-width of the 95 % interval of the logarithmic
#: speed-up is at most ERROR. After SECONDS, FEWEST_PAIRS are enough.
MIN_PAIRS, ERROR, SECONDS = 8, 0.02, 60.0

#: Minimum number of pairs of turns if the program ends early, or if SECONDS have passed.
FEWEST_PAIRS = 4

#: Maximum seconds: of the timing; without a new batch; of steps without a batch from a loader that can be replayed.
LATEST, PATIENCE, STEPS_ONLY = 600.0, 600.0, 20.0

#: Loaders whose batches can be replayed.
REPLAYED = "PyTorch's DataLoader or dlscale.timed; other loaders cannot be replayed"

#: Time between two reads of the turns, s.
LOOK = 0.1

#: Commands that start processes outside of the scratch copy; these processes could overwrite the program's results.
ELSEWHERE = ("srun", "sbatch", "salloc", "ssh", "flux", "jsrun", "aprun", "docker")

#: Environment variables that switch off experiment trackers, from the trackers' documentation.
TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "file:/dev/null",
}


class NoHeadroom(Exception):
    """The headroom of a program could not be measured; the message has the reason."""


def of_command(command: Sequence[str], count: int, log: Path) -> Headroom:
    """Measure a command's headroom in a scratch copy; the copy's output goes to `log`.

    Raises
    ------
    UserError
        `count` is below 1, the command cannot be started, or the program's results cannot be protected here.
    NoHeadroom
        The program's headroom cannot be measured.
    """
    if count < 1:
        raise UserError(f"--replay: {count}: expected the number of batches to keep, at least 1")
    if word := next((word for word in map(os.path.basename, command) if word in ELSEWHERE), None):
        raise UserError(
            f"--replay: {word} starts processes outside of the scratch copy, so they could overwrite the program's "
            f"results. Call dlscale within {word} instead: {word} … dlscale measure --replay {count} -- python train.py"
        )
    with temporary_folder("dlscale-replay") as folder:
        steps, layers = Path(folder, "steps"), Path(folder, "files")
        steps.mkdir()
        layers.mkdir()
        start = [sys.executable, "-I", str(scratch.__file__), str(layers), str(steps), *_written(command), "--"]
        with (
            log.open("w") as out,
            ProgramCopy([*start, *command], None, TRACKERS_OFF, steps, count, out.fileno(), scratch=folder) as copy,
        ):
            try:
                return time_turns(copy, steps)
            except NoHeadroom as failed:
                if (steps / scratch.REASON).exists():
                    raise UserError(
                        f"--replay: {failed}. Without a scratch copy, the program's results could be overwritten. "
                        "Scratch copies need Linux 5.12 or later, and user namespaces unless you are root. Measure "
                        "without --replay, or write a plan with `measure: [headroom]`, whose program writes into {out}"
                    ) from None
                raise NoHeadroom(f"{failed}{_reason(log)}") from None


def main(args: argparse.Namespace) -> None:
    """Measure the headroom of the program of the run in `args.config`; write the record `args.out`."""
    run, out = load_run(args.config, "headroom"), Path(args.out)
    if not run.program:
        raise UserError(
            "headroom: the run is not an external program; the stage throughput compares its training with and without "
            "loading. Remove headroom from the plan's measure, or restrict it to programs (only: {headroom: [...]})"
        )
    with temporary_folder(".headroom", out.parent) as folder:
        program = RunProgram(run, args.start, Path(folder, "out"), Path(folder, "steps"))
        environment = {**program.environment, **TRACKERS_OFF}
        with ProgramCopy(
            program.command, program.folder, environment, program.steps, BATCHES, None, program.contained
        ) as copy:
            try:
                found = time_turns(copy, program.steps)
            except NoHeadroom as failed:
                raise UserError(f"headroom: {failed}") from None
    logging.info("%s", found.text)
    found.write(out)


def _written(command: Sequence[str]) -> list[str]:
    """Return the folders to which a program probably writes.

    These are the working folder, the home and temporary folders, folders that environment variables name, and folders
    of absolute paths in the command.
    """
    words = [part for word in command for part in (word, word.partition("=")[2]) if part.startswith("/")]
    named = [*words, *map(os.path.dirname, words)]
    variables = [value for value in os.environ.values() if value.startswith("/") and ":" not in value]
    folders = [os.getcwd(), str(Path.home()), tempfile.gettempdir(), "/tmp", "/var/tmp", *variables, *named]  # noqa: PTH109
    return [folder for folder in dict.fromkeys(folders) if os.access(folder, os.W_OK)]


class ProgramCopy:
    """A copy of a program that replays batches; its processes end with the context."""

    def __init__(
        self,
        command: Sequence[str],
        folder: str | None,
        environment: Mapping[str, str],
        steps: Path,
        count: int,
        out: int | None,
        contained: bool = False,
        scratch: str | None = None,
    ) -> None:
        limit = int(MEMORY * free_memory())
        own = watched(steps, {**environment, REPLAY: f"{count} {limit}"}, contained)
        try:
            self._process = KeptProgram(command, folder, own, out, subprocess.DEVNULL, session=True, scratch=scratch)
        except OSError as error:
            raise UserError(f"{command[0]}: cannot be started: {error.strerror}") from None

    def __enter__(self) -> KeptProgram:
        return self._process

    def __exit__(self, *error: object) -> None:
        self._process.signal(signal.SIGKILL, descendants=True)
        self._process.wait()


def time_turns(copy: KeptProgram, steps: Path) -> Headroom:
    """Time turns of the copy until the interval of the speed-up is narrow, or the copy ends.

    After SECONDS, FEWEST_PAIRS pairs of turns are enough. Raise `NoHeadroom` for fewer pairs at the end of the copy or
    after LATEST seconds.
    """
    schedule = steps / "schedule"
    first, plain = measure_pace(copy, steps)
    # The speed with replayed batches is unknown, so the first two turns have the same number of batches.
    length = _length(plain)
    _plan(schedule, first, length, length)
    _wait(copy, steps, lambda: len(_pairs(steps, first)) >= 1)
    replayed = _pairs(steps, first)[0][1]
    first = _number(steps) + math.ceil(2 * replayed) + 4 * length
    _plan(schedule, first, length, _length(replayed))
    begin = time.monotonic()

    def enough() -> bool:
        pairs, passed = _pairs(steps, first), time.monotonic() - begin
        if passed >= SECONDS:
            return len(pairs) >= (FEWEST_PAIRS if passed < LATEST else 0)
        return len(pairs) >= MIN_PAIRS and interval([math.log(fast / slow) for slow, fast in pairs])[1] <= ERROR

    try:
        _wait(copy, steps, enough)
    except NoHeadroom:
        if len(_pairs(steps, first)) < FEWEST_PAIRS:
            raise
    pairs, rows = _pairs(steps, first), _rows(steps)
    if len(pairs) < FEWEST_PAIRS:
        raise NoHeadroom(f"the steps are too slow: {len(pairs)} pairs of turns in {duration(LATEST)}")
    return Headroom(
        turns=pairs,
        batches=min(int(row[4]) for row in rows),
        bytes=max(int(row[5]) for row in rows),
        processes=len([*steps.glob("turns.*.now")]),
        seconds=time.monotonic() - begin,
        copied=any(int(row[6]) for row in rows),
        others=any(int(row[7]) for row in rows),
    )


def _length(rate: float) -> int:
    return max(MIN_BATCHES, math.ceil(TURN * rate))


def _plan(schedule: Path, first: int, plain: int, replayed: int) -> None:
    with schedule.open("a") as file:
        file.write(f"{first} {plain} {replayed}\n")


def measure_pace(copy: KeptProgram, steps: Path) -> tuple[int, float]:
    """Return the number of a batch that no process has reached yet, and the batches/s after the warm-up."""
    _wait(copy, steps, lambda: _number(steps) >= WARM_UP)
    begin, since = _number(steps), time.monotonic()
    _wait(copy, steps, lambda: _number(steps) >= begin + MIN_BATCHES and time.monotonic() - since >= TURN)
    rate = (_number(steps) - begin) / (time.monotonic() - since)
    return _number(steps) + math.ceil(2 * rate) + 1, rate


def _number(steps: Path) -> int:
    """Return the maximum over the processes of the number of used batches."""
    found = (re.match(r"\d{1,18} ", read_text(file, errors="replace")) for file in steps.glob("turns.*.now"))
    return max((int(number[0]) for number in found if number), default=0)


def _rows(steps: Path) -> list[list[str]]:
    """Return the turns of all processes: the words of each line that `Replay._leave` has written."""
    found = list[list[str]]()
    for file in steps.glob("turns.*"):
        if file.suffix not in (".now", ".new"):
            lines = read_text(file, errors="replace").split("\n")
            whole = (line for line in lines[:-1] if re.fullmatch(r"(\d{1,18} ){3}\d{1,9}\.\d+( \d{1,18}){4}", line))
            found += [line.split() for line in whole]
    return found


def _pairs(steps: Path, first: int) -> list[tuple[float, float]]:
    """Return the batches/s of the pairs of turns (plain, replayed) of the schedule that begins at batch `first`.

    The batches/s are means over the processes.
    """
    rates = defaultdict[int, list[float]](list)
    for row in _rows(steps):
        if int(row[0]) == first and int(row[2]) and float(row[3]) > 0:
            rates[int(row[1])].append(int(row[2]) / float(row[3]))
    means = {number: sum(values) / len(values) for number, values in rates.items()}
    return [(means[turn], means[turn + 1]) for turn in sorted(means) if turn % 2 == 0 and turn + 1 in means]


def _wait(copy: KeptProgram, steps: Path, done: Callable[[], bool]) -> None:
    """Wait until `done` returns True; raise `NoHeadroom` if the copy ends early, fails, or makes no progress."""
    before, since = -1, time.monotonic()
    while not done():
        status = copy.poll()
        for file in (steps / scratch.REASON, steps / replay.UNSUPPORTED):
            if file.exists():
                raise NoHeadroom(read_text(file))
        if status is not None and not done():
            raise NoHeadroom(_ended(status, steps))
        if (now := _number(steps)) != before:
            before, since = now, time.monotonic()
        if before == 0 and _stepping(steps) > STEPS_ONLY:
            raise NoHeadroom(f"in {duration(STEPS_ONLY)} of steps, no batch came from {REPLAYED}")
        if time.monotonic() - since > PATIENCE:
            raise NoHeadroom(f"the program used no batch of its training loader for {duration(PATIENCE)}")
        time.sleep(LOOK)


def _ended(status: int, steps: Path) -> str:
    if not any(steps.glob("turns.*.now")):
        return f"the program ended with status {status} before a training step whose batch came from {REPLAYED}"
    return f"the program ended with status {status} before enough turns. Let it make more steps"


def _stepping(steps: Path) -> float:
    """Return the seconds since the copy's first step; 0 before this step, and after a batch that can be replayed."""
    first = min((each.steps[0] for each in seen.read(steps)[1]), default=math.inf)
    return 0.0 if any(steps.glob("turns.*.now")) else max(0.0, time.time() - first)


def _reason(log: Path) -> str:
    """Return the probable reason why a copy failed, or its last line of output; empty without output."""
    text = log.read_text(errors="replace")[-4000:]
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    if "Read-only file system" in text:
        return f". The program writes to a folder that --replay does not copy: {brief(OSError(last))}"
    if "Value too large for defined data type" in text:
        return f". The program writes to files of another user or group, which cannot be copied: {last[:200]}"
    return f". Its last line: {last[:200]}" if last else ""
