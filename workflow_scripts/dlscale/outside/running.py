"""Runs another program as it is, and says what its steps come to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from dlscale.core import machine, telemetry
from dlscale.core.environment import environment
from dlscale.core.errors import UserError
from dlscale.core.text import duration, many
from dlscale.launch.contain import FORWARDED, GRACE
from dlscale.measure.records import Outside, Throughput, Trials, Usage
from dlscale.outside import steps as seen
from dlscale.outside.timed import FOLDER
from dlscale.parallel.records import Device

HOOK = Path(__file__).with_name("hook")

#: Seconds between looks at whether a program has made enough steps.
LOOK = 0.5

# ---- running it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A program's run."""

    status: int
    begin: float  #: Seconds since 1970-01-01 UTC.
    seconds: float
    stalled: float | None  #: Share of the time in which processes of this machine waited for memory.
    printed: list[tuple[float, float]]  #: Rates that it printed, with their times.
    stopped: bool = False  #: Whether it was ended since it had made enough steps.
    signals: tuple[int, ...] = ()  #: Passed on to it.


def watched(steps: Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, and in it what has a program write its steps into a folder.

    All that is not this process's own is there for Apptainer as well, which starts from an empty one.
    """
    own = {**(environment or {}), FOLDER: str(steps.absolute())}
    path = [str(HOOK), *filter(None, [own.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
    own["PYTHONPATH"] = os.pathsep.join(path)
    there = {name: value for name, value in os.environ.items() if (name, value) != ("PYTHONSAFEPATH", "dlscale")}
    return {**there, **own, **{f"APPTAINERENV_{name}": value for name, value in own.items()}}


def run_command(
    command: Sequence[str],
    steps: Path,
    pattern: re.Pattern[str] | None,
    folder: str | None = None,
    environment: Mapping[str, str] | None = None,
    enough: Callable[[int], bool] | None = None,
) -> Ended:
    """Run a command with this process's input, output and signals; nothing that it started stays behind.

    Parameters
    ----------
    steps
        Folder for its steps.
    pattern
        Of rates that it prints; its group is the number.
    folder
        Its working folder; this process's if absent.
    environment
        Further variables.
    enough
        Tells, from the number of rates that were printed, when the program is to be ended.
    """
    pipe = subprocess.PIPE if pattern else None
    printed, parent, before = list[tuple[float, float]](), os.getpid(), set(psutil.Process().children(recursive=True))
    with _reaping():
        stalled, begin, start = _stalled(), time.time(), time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=watched(steps, environment),
            stdout=pipe,
            stderr=pipe,
            preexec_fn=lambda: _begin(parent),
        )
        with _forwarding(process) as signals:
            copies = [
                threading.Thread(target=_copy, args=(stream, out.fileno(), pattern, printed), daemon=True)
                for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
                if stream and pattern
            ]
            for copy in copies:
                copy.start()
            stopped = enough is not None and _wait(process, lambda: enough(len(printed)))
            status = process.wait()
        seconds = time.perf_counter() - start
        _end_rest(before, told=not stopped)
        for copy in copies:
            copy.join(GRACE)
        share = None if stalled is None else ((_stalled() or 0.0) - stalled) / seconds
    return Ended(status if status >= 0 else 128 - status, begin, seconds, share, printed, stopped, tuple(signals))


def _begin(parent: int) -> None:
    """In the program's process: end with the parent, and hear Slurm's warnings, which dlscale's commands ignore."""
    machine.with_parent(parent, signal.SIGTERM)
    for warning in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(warning, signal.SIG_DFL)


def _wait(process: subprocess.Popen[bytes], enough: Callable[[], bool]) -> bool:
    """Wait until a program ends, or has made enough steps, and end it then; return whether it was ended."""
    while process.poll() is None:
        if enough():
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            process.kill()
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK)
    return False


@contextlib.contextmanager
def _reaping() -> Iterator[None]:
    """Have processes whose parents end become this one's children."""
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    try:
        yield
    finally:
        prctl(36, 0, 0, 0, 0)


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass signals on to the program, and list them; one that ignores SIGTERM is killed after half a minute."""
    passed = list[int]()
    killer = threading.Timer(GRACE, process.kill)
    killer.daemon = True

    def forward(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        # A terminal sends Ctrl-C to both.
        if not (number == signal.SIGINT and _in_front()):
            process.send_signal(number)
        if number == signal.SIGTERM and not killer.is_alive() and not killer.finished.is_set():
            killer.start()

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield passed
    finally:
        killer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_front() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _end_rest(before: set[psutil.Process], told: bool) -> None:
    """End what the program left running, which was not there `before`, and say so if that is to be told."""
    rest = [each for each in psutil.Process().children(recursive=True) if each not in before]
    _, rest = psutil.wait_procs(rest, 1)  # a container's monitor ends after it
    for each in rest:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    _, alive = psutil.wait_procs(rest, 5)
    for each in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(alive, 5)
    if rest and told:
        print(
            f"dlscale measure: the program left {many(len(rest), 'process')} running, which were ended",
            file=sys.stderr,
        )


def _copy(stream: IO[bytes], out: int, pattern: re.Pattern[str], printed: list[tuple[float, float]]) -> None:
    """Copy a stream as it comes, and note the rates in it."""
    rest = b""
    while data := os.read(stream.fileno(), 65536):
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(out, data)
        *whole_lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
        for line in whole_lines:
            match = pattern.search(line.decode(errors="replace"))
            if match and (rate := seen.number_in(match[1])):
                printed.append((time.time(), rate))
        rest = rest[-65536:]


def _stalled() -> float | None:
    """Return the seconds for which processes of this machine waited for memory (Linux's pressure stall information)."""
    found = re.search(r"^some .*total=(\d+)", machine.text_of(Path("/proc/pressure/memory")))
    return int(found[1]) / 1e6 if found else None


# ---- what it comes to --------------------------------------------------------------------------------


def measured(
    command: Sequence[str],
    steps: Path,
    telemetry_file: Path,
    run: Ended,
    batch_size: int | None,
    pattern: bool,
    log: Path | None,
    log_first: bool = False,
) -> Throughput:
    """Return what a program's steps come to; a `UserError` where none were seen.

    Parameters
    ----------
    batch_size
        Samples of a step, where the program's own batches do not tell it.
    pattern
        Whether its rate is what it prints.
    log
        Log of its own; `log_first`: whether that counts where its steps are seen, too.
    """
    nodes = telemetry.read_nodes(telemetry_file)
    way, processes = seen.read(steps)
    if pattern:
        way, found = "rate", seen.pace_of_rates(run.printed, run.begin, batch_size)
    elif log and (log_first or not processes):
        way, found = "log", seen.pace_of_log(seen.logged(log, run.begin), batch_size)
    else:
        found = seen.pace(processes, batch_size)
    if found is None:
        if run.status:
            raise UserError(f"it ended with status {run.status} after {duration(run.seconds)}, before it trained")
        raise UserError(
            f"no training step was seen in {duration(run.seconds)}. Steps of PyTorch's optimisers are seen; any "
            "other loop's by `for batch in dlscale.timed(loader)`, by a log of its steps (--steps FILE), or by what it "
            "prints (--rate 'avg (\\S+) samples/sec')"
        )
    mean = statistics.fmean(found.rates)
    full = Trials(
        trial_throughput=found.rates,
        trial_time=found.seconds,
        avg_iter_throughput=found.rates,
        mean=mean,
        std=statistics.stdev(found.rates) if len(found.rates) > 1 else 0.0,
        rank_throughput=found.of_ranks,
        usage=_usage(nodes[0], found.begin, found.end) if nodes else None,
    )
    return Throughput(
        nranks=found.processes,
        batch_size=found.batch_size,
        device=_device(nodes),
        full=full,
        outside=Outside(
            command=list(command),
            way=way,
            samples=found.samples,
            steps=found.steps,
            status=run.status,
            seconds=run.seconds,
            first_step_seconds=max(0.0, found.first_step - run.begin),
            waiting=found.waiting,
            training=min(found.training, 1.0),
            stalled=run.stalled,
        ),
    )


def _usage(samples: Sequence[telemetry.Sample], begin: float, end: float) -> Usage | None:
    """Return the use of the machine's cores between two times."""
    inside = [each for each in samples if begin <= each.time - each.seconds / 2 <= end and each.cpu_run is not None]
    seconds = sum(each.seconds for each in inside)
    if not inside:
        return None

    def total(column: str) -> float:
        return sum((getattr(each, column) or 0.0) * each.cores * each.seconds for each in inside)

    read = sum((each.disk_read_bytes_per_second or 0.0) * each.seconds for each in inside)
    return Usage(
        begin=begin,
        seconds=seconds,
        cores=len(os.sched_getaffinity(0)),
        cpu_seconds=total("cpu_run"),
        cores_cpu_seconds=total("cpu"),
        read_bytes=round(read),
    )


def _device(nodes: Sequence[Sequence[telemetry.Sample]]) -> Device:
    used = any(gpu.utilization for sample in (nodes[0] if nodes else []) for gpu in sample.gpus)
    if used:
        name = machine.nvml(lambda driver: driver.nvmlDeviceGetName(driver.nvmlDeviceGetHandleByIndex(0)))
        return Device(kind="cuda", name=str(name or "GPU"))
    return Device(kind="cpu", name=environment().processor)
