"""Runs another program as it is, and says what its steps come to."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import signal
import stat
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from dlscale.core import machine, telemetry
from dlscale.core.environment import environment
from dlscale.core.errors import UserError, brief
from dlscale.core.noise import interval
from dlscale.core.text import duration, many
from dlscale.extensions.programs import logs
from dlscale.extensions.programs import steps as seen
from dlscale.extensions.programs.keeper import Kept
from dlscale.extensions.programs.printed import MAX_SECONDS, PER_STEP, Finder
from dlscale.extensions.programs.timed import EVERY, FOLDER
from dlscale.launch.contain import FORWARDED, GRACE
from dlscale.measure.records import Outside, Throughput, Trials, Usage
from dlscale.measure.telemetry import bus_ids
from dlscale.parallel.records import Device

#: Free space below which a disk counts as full, bytes.
MIN_FREE_BYTES = 65536

#: How steps were seen, in words.
WAYS = {
    "timed": "timed by the program",
    "seen": "seen in PyTorch",
    "log": "from its log",
    "rate": "as it prints them",
}

#: File of the numbers that a program printed, among its steps.
PRINTED = "printed"

HOOK = Path(__file__).with_name("hook")

#: Seconds between looks at whether a program has made enough steps.
LOOK = 0.5

#: Statuses of a shell for a command that is not there, and for a file that is none.
NOT_FOUND, NO_PROGRAM = 127, 126


def say(text: str) -> None:
    """Print a line on standard error, if it still takes one: a program's run does not depend on it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # its disk is full, or nobody reads it; Python would try again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


# ---- running it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A program's run."""

    status: int
    begin: float  #: Seconds since 1970-01-01 UTC.
    seconds: float
    stalled: float | None  #: Share of the time in which processes of this machine waited for memory.
    queued: float | None  #: The same for cores.
    printed: list[tuple[float, float]]  #: Rates that it printed, with their times.
    losses: dict[str, list[tuple[float, float]]]  #: Other numbers that it printed, by what was looked for.
    stopped: bool = False  #: Whether it was ended since it had made enough steps.
    signals: tuple[int, ...] = ()  #: Passed on to it.
    frameworks: frozenset[str] = frozenset()  #: Those of FRAMEWORKS that it loaded.
    users: frozenset[int] = frozenset()  #: Numbers of the users that its processes ran as.
    in_steps: bool = False  #: Whether printed rates are steps/s; else samples/s.
    refused: str = ""  #: First text that fits the pattern of rates, but is no rate.


def watched(
    steps: Path, environment: Mapping[str, str] | None = None, contained: bool = False, quick: bool = False
) -> dict[str, str]:
    """Return the environment that this process was started with, in which a program writes its steps into a folder.

    Parameters
    ----------
    environment
        Further variables.
    contained
        Whether it may be in a container of Apptainer, which starts from an empty environment.
    quick
        Whether it is to write ten times a second.
    """
    own = {**(environment or {}), FOLDER: str(steps.absolute())}
    own["PYTHONPATH"] = with_hook(own.get("PYTHONPATH", machine.given().get("PYTHONPATH")))
    own |= {EVERY: "0.1"} if quick else {}
    return {**machine.given(), **own, **{f"APPTAINERENV_{name}": value for name, value in own.items() if contained}}


def with_hook(path: str | None) -> str:
    """Return a PYTHONPATH with the hook before its folders."""
    return os.pathsep.join([str(HOOK), *filter(None, [path])])


def warn_of_lost_hook(command: Sequence[str], reading: Reading) -> None:
    """Warn of a word of a command that replaces the PYTHONPATH with the hook, if steps are read from the hook."""
    word = next((word for word in command if word.startswith("PYTHONPATH=")), None)
    if word and not (reading.rate or reading.log):
        say(
            f"dlscale: the command sets {word}, which leaves dlscale's hook out: PyTorch's steps are not seen. Set it "
            "before the command instead (PYTHONPATH=… dlscale measure -- …; in a plan program.environment), or name a "
            "log of its steps (--steps; program.log) or what it prints (--rate; program.rate)"
        )


def run_command(
    command: Sequence[str],
    steps: Path,
    pattern: re.Pattern[str] | None,
    folder: str | None = None,
    environment: Mapping[str, str] | None = None,
    enough: Callable[[int], bool] | None = None,
    losses: Mapping[str, re.Pattern[str]] | None = None,
    beside: Callable[[int], contextlib.AbstractContextManager[None]] | None = None,
    contained: bool = False,
    warn: bool = True,
) -> Outcome:
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
    losses
        Patterns of other numbers that it prints, by name.
    beside
        From its process's number to a context that lasts as long as the program.
    contained
        Whether it may be in a container of its own.
    warn
        Whether to warn after a minute without a step, unless rates are looked for.
    """
    looked = {**(losses or {}), **({"": pattern} if pattern else {})}
    pipe = subprocess.PIPE if looked else None
    # Python holds back what goes into a pipe.
    environment = {**({"PYTHONUNBUFFERED": "1"} if looked else {}), **(environment or {})}
    finder = Finder(looked, steps / PRINTED) if looked else None
    found = finder.found if finder else {"": [], PER_STEP: []}
    before = set(psutil.Process().children(recursive=True))
    with contextlib.closing(finder) if finder else contextlib.nullcontext(), _reaping():
        waits, begin, start = _waits(), time.time(), time.perf_counter()
        try:
            process = Kept(command, folder, watched(steps, environment, contained), pipe)
        except OSError as error:
            missing = error.errno == errno.ENOENT
            # Where the file is there, its interpreter is not.
            said = "no such command" if missing and not Path(command[0]).exists() else error.strerror
            say(f"dlscale measure: {command[0]}: {said}")
            raise SystemExit(NOT_FOUND if missing else NO_PROGRAM) from None
        with _forwarding(process) as signals, beside(process.pid) if beside else contextlib.nullcontext():
            copies = [
                threading.Thread(target=_copy, args=(stream, out.fileno(), finder), daemon=True)
                for stream, out in zip(process.streams, (sys.stdout, sys.stderr), strict=True)
                if stream
            ]
            watch = Watch(process.pid, steps, warn and "" not in looked)
            for thread in [*copies, watch]:
                thread.start()
            stopped = enough is not None and _wait(process, lambda: enough(len(found[""]) + len(found[PER_STEP])))
            status = process.wait()
            watch.close()
        seconds = time.perf_counter() - start
        _end_rest(before, told=not stopped)
        for copy in copies:
            copy.join(GRACE)
        stalled, queued = (
            None if one is None or now is None else (now - one) / seconds
            for one, now in zip(waits, _waits(), strict=True)
        )
    if finder:
        _report_unread(finder, looked)
    rates = {PER_STEP: found.pop(PER_STEP), "": found.pop("")}
    # Rates of a progress bar may be among those of samples.
    in_steps = not rates[""]
    printed = rates[PER_STEP if in_steps else ""]
    if finder and finder.refusals and printed:
        say(
            f"dlscale measure: {many(finder.refusals, 'text')} left out that fit {looked[''].pattern}: "
            f"{no_rate(finder.refused)}"
        )
    return Outcome(
        *(status, begin, seconds, stalled, queued, printed, found, stopped, tuple(signals)),
        frameworks=frozenset(watch.frameworks),
        users=frozenset(watch.users),
        in_steps=in_steps,
        refused=finder.refused if finder else "",
    )


#: Libraries that do not train by PyTorch's optimisers: names in the paths of their files, and how their steps are seen.
FRAMEWORKS = {
    "Keras or TensorFlow": ("/tensorflow/", "a callback that calls dlscale.extensions.programs.timed.begun and ended"),
    "JAX": ("/jaxlib/", "`for batch in dlscale.timed(loader)`"),
}

#: Time without a step after which a warning is printed, s.
UNSEEN_SECONDS = 60.0


class Watch(threading.Thread):
    """Looks at a program until its first step is seen, for a minute at most, after which it may `warn`."""

    def __init__(self, pid: int, steps: Path, warn: bool) -> None:
        super().__init__(daemon=True)
        self._pid, self._steps, self._warn, self._ended = pid, steps, warn, threading.Event()
        self.frameworks, self.users = set[str](), set[int]()

    def run(self) -> None:
        begin = time.monotonic()
        while not self._ended.wait(LOOK):
            if any(each for way in seen.WAYS for each in self._steps.glob(f"{way}.*")):
                return
            self._look()
            if time.monotonic() - begin > UNSEEN_SECONDS:
                break
        if self._warn and not self._ended.is_set():
            say(
                f"dlscale measure: no training step was seen in {duration(UNSEEN_SECONDS)}; the program continues. "
                f"{options(self.frameworks)}"
            )

    def close(self) -> None:
        self._ended.set()
        self.join(GRACE)

    def _look(self) -> None:
        with contextlib.suppress(psutil.Error):
            program = psutil.Process(self._pid)
            for each in [program, *program.children(recursive=True)]:
                with contextlib.suppress(psutil.Error, OSError):
                    self.users.add(each.uids().effective)
                    files = Path(f"/proc/{each.pid}/maps").read_text(errors="replace")
                    self.frameworks |= {name for name, (path, _) in FRAMEWORKS.items() if path in files}


def options(frameworks: Collection[str]) -> str:
    """Return how steps can be seen that are not of PyTorch's optimisers."""
    if frameworks:
        return " ".join(
            f"It uses {name}: use {FRAMEWORKS[name][1]}, a log of its steps (--steps FILE; in a plan program.log), or "
            "what it prints (--rate PATTERN; program.rate)."
            for name in sorted(frameworks)
        )
    return (
        "Any other loop's are by `for batch in dlscale.timed(loader)`, by a log of its steps (--steps FILE; in a plan "
        "program.log), or by what it prints (--rate 'avg (\\S+) samples/sec'; program.rate)"
    )


def no_rate(text: str) -> str:
    """Return why a printed text counts neither steps nor samples."""
    return (
        f"`{text}`. Expected samples/s, or steps by it/s, s/it or ms/step; a time needs its unit and `/step`, after "
        "the number or in the label before it"
    )


def _report_unread(finder: Finder, looked: Mapping[str, re.Pattern[str]]) -> None:
    for name in finder.slow:
        say(
            f"dlscale measure: the pattern {looked[name].pattern} takes more than {MAX_SECONDS:.0f} s on some lines, "
            "which were skipped; begin it with a fixed text"
        )
    if finder.missed:
        say(f"dlscale measure: {many(finder.missed, 'line')} printed too fast to be read")


def _wait(process: Kept, enough: Callable[[], bool]) -> bool:
    """Wait until a program ends, or has made enough steps, and end it then; return whether it was ended."""
    while process.poll() is None:
        if enough():
            process.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            process.signal(signal.SIGKILL)
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK)
    return False


@contextlib.contextmanager
def _reaping() -> Iterator[None]:
    """Adopt what a program leaves running when it ends, and its keeper with it."""
    machine.adopt_orphans()
    try:
        yield
    finally:
        machine.adopt_orphans(False)


@contextlib.contextmanager
def _forwarding(process: Kept) -> Iterator[list[int]]:
    """Pass signals on to the program, and list them; one that ignores SIGTERM is killed after half a minute."""
    passed = list[int]()
    killer = threading.Timer(GRACE, process.signal, (signal.SIGKILL,))
    killer.daemon = True

    def forward(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        # A terminal sends Ctrl-C to both.
        if not (number == signal.SIGINT and _in_front()):
            process.signal(number)
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
        with contextlib.suppress(psutil.Error):  # gone, or another user's
            each.terminate()
    _, alive = psutil.wait_procs(rest, 5)
    for each in alive:
        with contextlib.suppress(psutil.Error):
            each.kill()
    psutil.wait_procs(alive, 5)
    if rest and told:
        say(f"dlscale measure: the program left {many(len(rest), 'process')} running: they were ended")


def _copy(stream: IO[bytes], out: int, finder: Finder) -> None:
    """Copy a stream as it comes, into a file line by line, and have numbers looked for in its lines."""
    rest, kept = b"", b""
    in_lines = stat.S_ISREG(os.fstat(out).st_mode)  # a log, to which the program's other stream is copied, too
    while data := os.read(stream.fileno(), 65536):
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 if in_lines and len(kept) < 65536 else len(data)
        if end:
            _write(out, kept + data[:end])
        kept = data[end:] if end else kept + data
        *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
        finder.look(time.time(), lines)
        rest = rest[:65536]
    _write(out, kept)
    finder.look(time.time(), [rest])


def _write(out: int, data: bytes) -> None:
    """Write all bytes; an error, such as a reader that has ended, is ignored."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(out, data) :]


def _waits() -> list[float | None]:
    """Return the seconds for which some process of this machine waited for memory, and for a core.

    They are Linux's pressure stall information.
    """
    texts = [machine.text_of(Path("/proc/pressure", what)) for what in ("memory", "cpu")]
    found = [re.search(r"^some .*total=(\d+)", text) for text in texts]
    return [int(one[1]) / 1e6 if one else None for one in found]


# ---- what it comes to --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """How a program's speed is read."""

    batch_size: int | None = None  #: Samples of a step; replaces what the program's own batches show.
    of_run: bool = False  #: Whether the batch size is a run's setting, which may leave out accumulated batches.
    rate: str | None = None  #: Pattern of the rates that it prints.
    log: Path | None = None  #: Log of its own.
    log_start: logs.Start | None = None  #: State of that log before the program started.
    log_first: bool = False  #: Whether the log counts where steps are seen, too.


class Unseen(UserError):
    """A program made no steps that have a rate."""


def measured(
    command: Sequence[str],
    steps: Path,
    telemetry_file: Path,
    run: Outcome,
    reading: Reading,
    apart: Sequence[seen.Span] = (),
) -> tuple[Throughput, list[seen.Process]]:
    """Return what a program's steps come to, without those of spans `apart`, and who made them.

    It is a `UserError` where they cannot be read, and `Unseen` where there were none.
    """
    try:
        return _measured(command, steps, telemetry_file, run, reading, apart)
    except UserError:
        raise
    except Exception as error:  # a run may have taken days: its other records are kept
        raise UserError(f"its steps cannot be read ({type(error).__name__}: {brief(error)}): report it") from error


def _measured(
    command: Sequence[str],
    steps: Path,
    telemetry_file: Path,
    run: Outcome,
    reading: Reading,
    apart: Sequence[seen.Span],
) -> tuple[Throughput, list[seen.Process]]:
    nodes = telemetry.read_nodes(telemetry_file)
    way, processes = seen.read(steps)
    for each in processes:
        if each.damaged:
            logging.warning("%s: line %d is damaged: what follows it is left out", each.file, each.damaged)
    reading = _with_delivered(reading, processes)
    first = "rate" if reading.rate else "log" if reading.log and (reading.log_first or not processes) else way
    try:
        found, profiled, trainings = _pace_by(first, reading, run, steps, processes, apart)
    except UserError as error:
        if first == way or not processes:
            raise
        found, profiled, trainings = _pace_by(way, reading, run, steps, processes, apart)
        say(f"dlscale measure: {error}. The steps that were {WAYS[way]} count instead")
    else:
        way = first
    apart = () if profiled else apart
    mean = interval(found.rates)[0]  # as it is told
    full = Trials(
        trial_throughput=found.rates,
        trial_time=found.seconds,
        avg_iter_throughput=found.rates,
        mean=mean,
        std=statistics.stdev(found.rates) if len(found.rates) > 1 else 0.0,
        rank_throughput=found.of_ranks,
        usage=_usage(nodes[0], found.begin, found.end, apart) if nodes else None,
    )
    throughput = Throughput(
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
            gradient_bytes=found.gradients or None,
            waiting=found.waiting,
            training=min(found.training, 1.0),
            stalled=run.stalled,
            queued=run.queued,
            rank_waiting=found.waits_of_ranks,
            rank_cores=found.cores_of_ranks,
            profiled=profiled,
            trainings=trainings,
            stopped=seen.stopped(steps) if way in seen.WAYS else None,
        ),
    )
    return throughput, processes


def _with_delivered(reading: Reading, processes: Sequence[seen.Process]) -> Reading:
    """Compare the stated samples of a step with those that loaders certainly delivered, and warn of a difference.

    A run's setting gives way to a larger number, as of gradient accumulation.
    """
    own = seen.pace(processes) if reading.batch_size and processes else None
    if not (reading.batch_size and own and own.samples and own.batch_size):
        return reading
    if abs(own.batch_size - reading.batch_size) <= 0.1 * reading.batch_size:
        return reading
    counts = own.batch_size if reading.of_run and own.batch_size > reading.batch_size else reading.batch_size
    stated = f"{'batch_size' if reading.of_run else '--batch-size'} is {reading.batch_size}"
    say(
        f"dlscale measure: {stated}, but the data loaders of all processes delivered {own.batch_size} samples a step "
        f"(gradient accumulation? several processes?); {counts} counts"
    )
    return replace(reading, batch_size=counts)


def _pace_by(
    way: str,
    reading: Reading,
    run: Outcome,
    steps: Path,
    processes: Sequence[seen.Process],
    apart: Sequence[seen.Span],
) -> tuple[seen.Pace, bool, int]:
    """Return the pace by a way, if profiled steps count for lack of others, and the number of trainings."""
    trainings, several = 1, seen.longest_training(processes)
    if way == "rate":
        begin, printed = run.begin, run.printed
        if several and (own := seen.printed_in(printed, several[0], processes[0])):
            (begin, _), trainings, printed = *several, own
        come_to = partial(seen.pace_of_rates, printed, begin, reading.batch_size, steps=run.in_steps)
    elif way == "log" and reading.log:
        start = reading.log_start or logs.Start(run.begin)
        found = logs.logged(reading.log, start, run.begin + run.seconds)
        come_to = partial(seen.pace_of_log, max(found, key=len, default=[]), reading.batch_size)
        trainings = len([training for training in found if len(training) > 2])
    else:
        come_to = partial(seen.pace, processes, reading.batch_size)
        trainings = several[1] if several else 1
    if pace := come_to(apart=apart):
        if way == "rate" and trainings > 1:
            pace = replace(pace, first_step=run.printed[0][0])
        return pace, False, trainings
    if apart and (pace := come_to()):
        return pace, True, trainings
    raise Unseen(_unseen(way, reading, steps, run, processes))


def _unseen(way: str, reading: Reading, folder: Path, run: Outcome, processes: Sequence[seen.Process]) -> str:
    """Say why a program has no rate."""
    if run.signals:
        names = ", ".join(signal.Signals(each).name for each in dict.fromkeys(run.signals))
        asked = f"it was asked to end by {names}, and did with status {run.status}"
        return f"{asked} after {duration(run.seconds)}, before it trained"
    if run.status:
        ended = f"it ended with status {run.status} after {duration(run.seconds)}"
        return f"{ended}, before a step was seen; steps are written once a second"
    if reason := seen.stopped(folder):
        return f"dlscale's hook stopped before a step was seen: {reason}"
    if way == "rate":
        if run.refused:
            return f"nothing that fits {reading.rate} is a rate: {no_rate(run.refused)}"
        return f"nothing that it printed has a rate that fits {reading.rate}"
    if way == "log":
        return f"fewer than three steps since it began are in the log {reading.log}"
    if processes:
        count = max(len(process.steps) for process in processes)
        return f"it made {many(count, 'step')}, too few for a rate: the first {seen.FEWEST} warm up"
    if not folder.exists():
        return "it removed the folder of results, to which its steps were written"
    if shutil.disk_usage(folder).free < MIN_FREE_BYTES:
        return f"the disk of {folder.parent} is full: no step could be written. Make space, or use another folder"
    if foreign := run.users - {os.getuid()}:
        users = ", ".join(map(str, sorted(foreign)))
        return (
            f"the program ran as another user (uid {users}), who cannot write its steps to {folder.parent}: call "
            "`dlscale measure` as that user"
        )
    hidden = not (folder / "hook").exists()
    why = (
        "no Python there had dlscale's hook, which PYTHONPATH brings: a script that sets it, `python -I`, `-E`, `-S`, "
        "`env -i` and containers leave it out; set it before `dlscale measure`"
        if hidden
        else "steps of PyTorch's optimisers are seen, unless they are compiled"
    )
    quick = "" if hidden else ". Steps of a process that ends by `os._exit` or a signal within a second are not written"
    return f"no training step was seen in {duration(run.seconds)}: {why}{quick}. {options(run.frameworks)}"


def _usage(samples: Sequence[telemetry.Sample], begin: float, end: float, apart: Sequence[seen.Span]) -> Usage | None:
    """Return the use of the machine's cores between two times, without spans `apart`."""
    inside = [
        each
        for each in samples
        if begin <= (middle := each.time - each.seconds / 2) <= end
        and each.cpu_run is not None
        and not any(since <= middle <= until for since, until in apart)
    ]
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
        first = bus_ids(1)  # NVML alone counts GPUs that are hidden, too
        name = first and machine.nvml(lambda nvml: nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByPciBusId(first[0])))
        return Device(kind="cuda", name=str(name or "GPU"))
    return Device(kind="cpu", name=environment().processor)
