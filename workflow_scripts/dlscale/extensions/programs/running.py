"""Run an external program unchanged, and compute its speed from its steps."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import shutil
import signal
import stat
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from dlscale.core import machine, registry, telemetry
from dlscale.core.errors import UserError, brief
from dlscale.core.noise import interval
from dlscale.core.text import duration, many, number, percent
from dlscale.extensions.programs import logs
from dlscale.extensions.programs import steps as seen
from dlscale.extensions.programs.keeper import KeptProgram, adopt_orphans
from dlscale.extensions.programs.launch import HOOKS
from dlscale.extensions.programs.printed import MAX_SECONDS, PER_STEP, Finder
from dlscale.extensions.programs.settings import RATES
from dlscale.extensions.programs.timed import EVERY, FOLDER
from dlscale.launch.contain import FORWARDED, GRACE
from dlscale.measure.records import SAMPLE_RATE, STEP_RATE, Outside, Throughput, Trials, Usage
from dlscale.measure.telemetry import bus_ids
from dlscale.parallel.records import Device

#: Free space below which a disk counts as full, bytes.
MIN_FREE_BYTES = 65536

#: Description of each way of detecting steps, for the terminal.
WAYS = {
    "timed": "timed by the program",
    "seen": "seen in PyTorch",
    "log": "from the program's log",
    "rate": "printed by the program",
}

#: Name of the file with the numbers that a program printed, in the folder of its steps.
PRINTED = "printed"

HOOK = Path(__file__).resolve().with_name("hook")

#: Folder of dlscale's extensions; in a container, the folder may have another path.
EXTENSIONS = HOOK.parents[1]

#: Seconds between checks of a running program.
LOOK = 0.5

#: Exit statuses of a shell for a missing command, and for a file that cannot be executed.
NOT_FOUND, NO_PROGRAM = 127, 126


def say(text: str) -> None:
    """Print a line on standard error; ignore errors of the stream, so that the program's run continues."""
    try:
        # On a terminal, a row of spaces moves the cursor below a progress bar, but not below an empty row.
        begin = (
            f"{' ' * (os.get_terminal_size(sys.stderr.fileno()).columns - 1)}\r\033[K" if sys.stderr.isatty() else ""
        )
        print(f"{begin}{text}\n", end="", file=sys.stderr, flush=True)  # one write, which a bar cannot overwrite
    except OSError:  # a full disk, or a closed pipe: discard the text, or Python would write it again at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


# ---- running -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Result of a program's run."""

    status: int
    begin: float  #: Seconds since 1970-01-01 UTC.
    seconds: float
    stalled: float | None  #: Fraction of the run during which any process of this machine waited for memory.
    queued: float | None  #: Fraction of the run during which any process of this machine waited for a CPU.
    printed: list[tuple[float, float]]  #: Printed rates: time (seconds since 1970-01-01 UTC) and value.
    losses: dict[str, list[tuple[float, float]]]  #: Other printed numbers, by the name of their pattern: time, value.
    stopped: bool = False  #: Whether dlscale ended the program because it had made enough steps.
    signals: tuple[int, ...] = ()  #: Signals that were forwarded to the program.
    frameworks: frozenset[str] = frozenset()  #: Libraries loaded before the first step is seen, keys of FRAMEWORKS.
    users: frozenset[int] = frozenset()  #: Effective user ids of the processes before the first step is seen.
    in_steps: bool = False  #: Whether printed rates are steps/s; otherwise samples/s.
    refused: str = ""  #: First text that matches the pattern of rates, but is not a rate.
    ranks: tuple[str, ...] = ()  #: Labels of ranks in lines with rates.
    bars: Mapping[str, Sequence[float]] = field(default_factory=dict)  #: Printed rates, by the words before the rate.
    ambiguous: str = ""  #: First printed rate with a mark, if each mark may separate thousands or decimals.


def watched(
    steps: Path, environment: Mapping[str, str] | None = None, contained: bool = False, quick: bool = False
) -> dict[str, str]:
    """Return the environment of a program that writes its steps into the folder `steps`.

    The result is dlscale's initial environment, plus the hook and further variables.

    Parameters
    ----------
    environment
        Further variables.
    contained
        Whether the program may run in an Apptainer container, which starts from an empty environment.
    quick
        Whether the program writes its steps ten times a second (default: once a second).
    """
    own = {**(environment or {}), FOLDER: str(steps.absolute())}
    own["PYTHONPATH"] = with_hook(own.get("PYTHONPATH", machine.given().get("PYTHONPATH")))
    own |= {EVERY: "0.1"} if quick else {}
    own[HOOKS] = os.pathsep.join(
        str(file.relative_to(EXTENSIONS) if file.is_relative_to(EXTENSIONS) else file)
        for file, variable in registry.hooks().items()
        if variable in own
    )
    return {**machine.given(), **own, **{f"APPTAINERENV_{name}": value for name, value in own.items() if contained}}


def with_hook(path: str | None) -> str:
    """Return a PYTHONPATH that starts with the hook's folder, followed by `path`."""
    return os.pathsep.join([str(HOOK), *filter(None, [path])])


def warn_of_lost_hook(command: Sequence[str], reading: Reading) -> None:
    """Warn if a command sets PYTHONPATH, which removes the hook, and steps can only come from the hook."""
    word = next((word for word in command if word.startswith("PYTHONPATH=")), None)
    if word and not (reading.rate or reading.log):
        say(
            f"dlscale: the command sets {word}, which removes dlscale's hook, so steps of PyTorch cannot be seen. Set "
            "PYTHONPATH before the command (PYTHONPATH=… dlscale measure -- …; in a plan: program.environment). Or "
            "name a log of the steps (--steps; program.log), or give a pattern of the printed rate (--rate; "
            "program.rate)"
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
    grace: float | None = None,
) -> Outcome:
    """Run a command with this process's input, output and signals; leave no process running.

    Parameters
    ----------
    steps
        Folder into which the program writes its steps.
    pattern
        Pattern of printed rates; its group is the number.
    folder
        Working folder (default: this process's).
    environment
        Further variables.
    enough
        Function of the number of printed rates; the program is ended when the function returns True.
    losses
        Patterns of other printed numbers, by name.
    beside
        Function that takes the program's process id and returns a context, which is open while the program runs.
    contained
        Whether the program may run in a container.
    warn
        Whether to print a warning if no step was seen in the first minute; ignored if `pattern` is given.
    grace
        Seconds after SIGTERM until the program is killed (default: never, as without dlscale).
    """
    looked = {**(losses or {}), **({"": pattern} if pattern else {})}
    pipe = subprocess.PIPE if looked else None
    # Without PYTHONUNBUFFERED, Python buffers output into a pipe, which would delay the numbers.
    environment = {**({"PYTHONUNBUFFERED": "1", "DLSCALE_READ": "1"} if looked else {}), **(environment or {})}
    finder = Finder(looked, steps / PRINTED) if looked else None
    found = finder.found if finder else {"": [], PER_STEP: []}
    before = set(psutil.Process().children(recursive=True))
    with contextlib.closing(finder) if finder else contextlib.nullcontext(), _reaping():
        waits, begin, start = _waits(), time.time(), time.perf_counter()
        try:
            process = KeptProgram(command, folder, watched(steps, environment, contained), pipe)
        except OSError as error:
            missing = error.errno == errno.ENOENT
            # If the file exists, the interpreter in its first line is missing.
            said = "no such command" if missing and not Path(command[0]).exists() else str(error.strerror)
            if error.errno == errno.ENOEXEC:
                said += f". If it is a script without #! line, start it with its shell: sh {command[0]}"
            say(f"dlscale measure: {command[0]}: {said}")
            raise SystemExit(NOT_FOUND if missing else NO_PROGRAM) from None
        with _forwarding(process, grace) as signals, beside(process.pid) if beside else contextlib.nullcontext():
            copies = [
                threading.Thread(target=_copy, args=(stream, out.fileno(), finder), daemon=True)
                for stream, out in zip(process.streams, (sys.stdout, sys.stderr), strict=True)
                if stream
            ]
            watch = StartWatch(process.pid, steps, warn and "" not in looked)
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
    # A progress bar may print steps/s between rates in samples/s. If there are both, only rates in samples/s count.
    in_steps = not rates[""]
    printed = sorted(rates[PER_STEP if in_steps else ""])  # inverted rates of a bar may be found late
    for name, (text, count) in finder.refused.items() if finder else ():
        if name or printed:
            say(
                f"dlscale measure: the pattern {looked[name].pattern} also matched {many(count, 'printed text')} "
                f"without a {'number' if name else 'rate'}, which dlscale skipped. The first is "
                + (f"`{text}`. {COMPLETE}" if name else no_rate(text))
            )
    return Outcome(
        *(status, begin, seconds, stalled, queued, printed, found, stopped, tuple(signals)),
        frameworks=frozenset(watch.frameworks),
        users=frozenset(watch.users),
        in_steps=in_steps,
        refused=finder.refused.get("", [""])[0] if finder else "",
        ranks=tuple(finder.ranks()) if finder else (),
        bars=dict(finder.bars[PER_STEP if in_steps else ""]) if finder else {},
        ambiguous=finder.texts.get("ambiguous", "") if finder and "clear" not in finder.texts else "",
    )


#: Library that does not use PyTorch's optimisers → part of the paths of its files, and code with which a program can
#: time its steps.
FRAMEWORKS = {
    "Keras or TensorFlow": ("/tensorflow/", "a callback that calls dlscale.extensions.programs.timed.begun and ended"),
    "JAX": ("/jaxlib/", "`for batch in dlscale.timed(loader)`"),
}

#: Time after a program's start at which a warning is printed if no step was seen, seconds.
UNSEEN_SECONDS = 60.0


class StartWatch(threading.Thread):
    """Thread that watches a program until its first step, for a minute at most.

    If `warn` is true, a minute without a step causes a warning.
    """

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
    """Return advice on timing a program whose steps do not use PyTorch's optimisers."""
    if frameworks:
        return " ".join(
            f"The program uses {name}: time its steps with {FRAMEWORKS[name][1]}, name a log of its steps (--steps "
            "FILE; in a plan: program.log), or give a pattern of the printed rate (--rate PATTERN; program.rate)."
            for name in sorted(frameworks)
        )
    return (
        "For a loop without PyTorch's optimisers use `for batch in dlscale.timed(loader)`, name a log of the steps "
        "(--steps FILE; in a plan: program.log), or give a pattern of the printed rate (--rate 'avg (\\S+) "
        "samples/sec'; program.rate)"
    )


#: Remedy for patterns.
COMPLETE = "The group must match the complete number, with its sign and all digits"


def no_rate(text: str) -> str:
    """Return a message for a printed text that is not a rate of steps or samples."""
    return (
        f"`{text}`. Expected samples/s, or steps in it/s, s/it or ms/step, of all devices: not per GPU or process, and "
        "not micro-batches. A duration needs its unit and `/step`, after the number or in the label before it. "
        f"{COMPLETE}"
    )


def _report_unread(finder: Finder, looked: Mapping[str, re.Pattern[str]]) -> None:
    for name in finder.slow:
        say(
            f"dlscale measure: skipped lines on which the pattern {looked[name].pattern} took more than "
            f"{MAX_SECONDS:.0f} s, and after several such lines all further lines. Begin the pattern with a fixed text"
        )
    if finder.missed:
        say(f"dlscale measure: skipped {many(finder.missed, 'line')} that the program printed too fast to be searched")


def _wait(process: KeptProgram, enough: Callable[[], bool]) -> bool:
    """Wait until a program ends, or until `enough` returns True; then end the program.

    Return whether this function ended the program.
    """
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
    """Adopt the processes that a program and its keeper leave running when they end."""
    adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(False)


@contextlib.contextmanager
def _forwarding(process: KeptProgram, grace: float | None) -> Iterator[list[int]]:
    """Forward signals to the program, and yield the list of forwarded signals.

    With `grace`, kill the program if it still runs so many seconds after SIGTERM.
    """
    passed = list[int]()
    killer = threading.Timer(grace or 0, process.signal, (signal.SIGKILL,))
    killer.daemon = True

    def forward(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        # A terminal sends Ctrl-C to the program as well, so this signal is not forwarded.
        if not (number == signal.SIGINT and _in_front()):
            process.signal(number)
        if grace and number == signal.SIGTERM and not killer.is_alive() and not killer.finished.is_set():
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
    """End the processes that the program left running, except those in `before`; print their number if `told`."""
    rest = [each for each in psutil.Process().children(recursive=True) if each not in before]
    _, rest = psutil.wait_procs(rest, 1)  # a container's monitor ends shortly after its container
    for each in rest:
        with contextlib.suppress(psutil.Error):  # the process has ended, or belongs to another user
            each.terminate()
    _, alive = psutil.wait_procs(rest, 5)
    for each in alive:
        with contextlib.suppress(psutil.Error):
            each.kill()
    psutil.wait_procs(alive, 5)
    if rest and told:
        say(f"dlscale measure: the program left {many(len(rest), 'process')} running, which dlscale has ended")


def _copy(stream: IO[bytes], out: int, finder: Finder) -> None:
    """Copy a stream to `out` as the data arrive, and search the stream's lines for numbers.

    A regular file gets complete lines, except for a very long line and an unfinished last line.
    """
    rest, kept = b"", b""
    in_lines = stat.S_ISREG(os.fstat(out).st_mode)  # parts of lines of the two streams would mix in a shared log
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
    """Write all bytes; ignore errors, such as a closed pipe."""
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(out, data) :]
            except BlockingIOError:  # a full pipe of a caller that does not let writers wait
                select.select([], [out], [])


def _waits() -> list[float | None]:
    """Return for how many seconds since boot any process of this machine waited for memory, and for a CPU.

    The numbers are from Linux's pressure stall information; a missing number is None.
    """
    texts = [machine.text_of(Path("/proc/pressure", what)) for what in ("memory", "cpu")]
    found = [re.search(r"^some .*total=(\d+)", text) for text in texts]
    return [int(one[1]) / 1e6 if one else None for one in found]


# ---- speed -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Settings that decide how a program's speed is read."""

    #: Samples per step, which replace the number that the program's batches show. Exception: with `of_run`, a larger
    #: number in the batches counts.
    batch_size: int | None = None
    of_run: bool = False  #: Whether the batch size is a run's setting, which might not count gradient accumulation.
    rate: str | None = None  #: Pattern of the printed rates.
    log: Path | None = None  #: The program's own log.
    log_start: logs.Start | None = None  #: State of that log before the program started.
    log_first: bool = False  #: Whether the rate uses the log even if steps were detected.


class Unseen(UserError):
    """A program made no steps from which a rate can be computed."""


def measured(
    command: Sequence[str],
    steps: Path,
    telemetry_file: Path,
    run: Outcome,
    reading: Reading,
    apart: Sequence[seen.Span] = (),
) -> tuple[Throughput, list[seen.Process]]:
    """Return a program's throughput, and the processes that made its steps.

    Steps in the spans `apart` count only if there are too few other steps.

    Raises
    ------
    Unseen
        A rate cannot be computed from the steps.
    UserError
        The steps cannot be read.
    """
    try:
        return _measured(command, steps, telemetry_file, run, reading, apart)
    except UserError:
        raise
    except Exception as error:  # a run may have taken days, so its other records must be kept
        raise UserError(
            f"the program's steps cannot be read ({type(error).__name__}: {brief(error)}): an error of dlscale, please "
            "report it"
        ) from error


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
            logging.warning("%s: line %d is damaged; skipped this line and all later lines", each.file, each.damaged)
    if any(each.unclear for each in processes):
        say(
            "dlscale measure: the program uses `timed` with several loaders, and the steps of all loops count. If some "
            "of these loops are validations, use `timed` only with the training's loader"
        )
    reading = _with_delivered(reading, processes)
    first = "rate" if reading.rate else "log" if reading.log and (reading.log_first or not processes) else way
    try:
        found, profiled, trainings = _pace_by(first, reading, run, steps, processes, apart)
    except UserError as error:
        if first == way or not processes:
            raise
        found, profiled, trainings = _pace_by(way, reading, run, steps, processes, apart)
        say(f"dlscale measure: {error}. The rate uses the steps that were {WAYS[way]} instead")
    else:
        way = first
    apart = () if profiled else apart
    mean = interval(found.rates)[0]  # trimmed, like the mean that the terminal shows
    if found.regular:
        every, added = found.regular
        alone = f"{number(mean / (1 - added))} {SAMPLE_RATE if found.samples else STEP_RATE}"
        say(
            f"dlscale measure: regular long steps, {every} steps apart, take {percent(added)} of the time in the rate. "
            f"If they contain a validation or a checkpoint, the training alone makes {alone}"
        )
    full = Trials(
        trial_throughput=found.rates,
        trial_time=found.seconds,
        avg_iter_throughput=found.rates,
        mean=mean,
        std=statistics.stdev(found.rates) if len(found.rates) > 1 else 0.0,
        rank_throughput=found.rank_rates,
        usage=usage_between(nodes[0], found.begin, found.end, apart) if nodes else None,
    )
    throughput = Throughput(
        nranks=found.processes,
        batch_size=found.batch_size,
        device=device_of(nodes),
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
            between_epochs=found.between_epochs,
            pauses=found.pauses,
            stalled=run.stalled,
            queued=run.queued,
            rank_waiting=found.waits_of_ranks,
            rank_cores=found.cores_of_ranks,
            profiled=profiled,
            trainings=trainings,
            stopped=seen.stopped(steps) if way in seen.WAYS else None,
        ),
    )
    training = [seen.training_iterators(each) for each in processes]
    registry.provided("write_health", lambda *_: None)(steps, processes, training)
    return throughput, processes


def _with_delivered(reading: Reading, processes: Sequence[seen.Process]) -> Reading:
    """Compare the stated samples per step with the delivered samples; warn if they differ by more than 10 %.

    Delivered samples are compared only if their number is certain. A larger number of delivered samples replaces a
    run's `batch_size`, which might not count gradient accumulation, but never the option `--batch-size`.
    """
    own = seen.pace(processes) if reading.batch_size and processes else None
    if not (reading.batch_size and own and own.samples and own.batch_size):
        return reading
    if abs(own.batch_size - reading.batch_size) <= 0.1 * reading.batch_size:
        return reading
    counts = own.batch_size if reading.of_run and own.batch_size > reading.batch_size else reading.batch_size
    stated = f"{'batch_size' if reading.of_run else '--batch-size'} is {reading.batch_size}"
    say(
        f"dlscale measure: {stated}, but the data loaders of all processes delivered {own.batch_size} samples per step "
        f"(gradient accumulation? several processes?). The rate uses {counts} samples per step"
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
    """Return the pace, whether the pace includes profiled steps, and the number of trainings.

    `way` is the way of detecting steps. Profiled steps count only if there are too few other steps.
    """
    several = seen.longest_training(processes)
    trainings = (several[1] if several else 1) + sum(len(each.others) for each in processes)
    if way == "rate":
        begin, printed = run.begin, run.printed
        if several and (inside := seen.printed_in(printed, several[0], processes[0])):
            (begin, _), printed = several[0], inside
        own = seen.pace(processes, reading.batch_size, apart)
        _check_ranks(printed, run, own, len(processes))
        _check_bars(run, reading)
        _check_steps(printed, run, reading, own)
        compute_pace = partial(seen.pace_of_rates, printed, begin, reading.batch_size, steps=run.in_steps)
    elif way == "log" and reading.log:
        start = reading.log_start or logs.Start(run.begin)
        found = logs.logged(reading.log, start, run.begin + run.seconds, seen.processes(steps, ("python",)))
        longest = max(found, key=len, default=[])
        if wrong := processes and seen.log_counts_other(longest, processes[0]):
            raise UserError(f"{reading.log}: {wrong}")
        evaluated = seen.evaluations(processes[0]) if processes else []
        _check_log(seen.pace_of_log(longest, reading.batch_size, apart, evaluated), reading, processes, apart)
        compute_pace = partial(seen.pace_of_log, longest, reading.batch_size, evaluated=evaluated)
        trainings = len([training for training in found if len(training) > 2])
    else:
        compute_pace = partial(seen.pace, processes, reading.batch_size)
    if pace := compute_pace(apart=apart):
        if way == "rate" and trainings > 1:
            pace = replace(pace, first_step=run.printed[0][0])
        return pace, False, trainings
    if apart and (pace := compute_pace()):
        return pace, True, trainings
    raise Unseen(_unseen(way, reading, steps, run, processes))


def _check_ranks(printed: Sequence[tuple[float, float]], run: Outcome, own: seen.Pace | None, processes: int) -> None:
    """Refuse rates in samples/s that each process prints for itself; warn if they may be rates of one process.

    `own` is the pace of the steps that were seen. If the samples per step are certain, this pace decides.
    """
    count, total = max(processes, len(run.ranks)), sum(own.rank_rates) if own and own.samples else 0.0
    # Accept rates in steps/s, and rates that are nearer to the rate of all processes than to the rate of one process.
    if (
        run.in_steps
        or not printed
        or count < 2
        or statistics.fmean(rate for _, rate in printed) * count**0.5 > total > 0
    ):
        return
    what = (
        f"lines with rates are labelled {', '.join(run.ranks[:4])}{', …' * (count > 4)}"
        if run.ranks[1:]
        else f"{count} processes made steps"
    )
    remedy = "Let one process print the rate of all, and match only its lines, or leave out --rate (program.rate)"
    if total or (run.ranks[1:] and (processes > 1 or not run.ranks[0].isdecimal())):
        raise UserError(f"{what}, and each process seems to print its own rate. {remedy}")
    say(f"dlscale measure: {what}. A printed rate counts as the rate of all processes. If it is not: {remedy}")


#: Minimum number of a bar's rates, and minimum fraction of all rates, for comparing the bar with other bars.
MIN_BAR_RATES, MIN_BAR_FRACTION = 3, 0.1

#: Maximum ratio of the rates of several bars, and of a printed or logged rate and the rate of the steps that were seen.
MAX_RATIO = 1.3

#: Ratio of a log's rate and the rate of seen steps up to which both agree, whatever their intervals.
MAX_LOG_RATIO = 1.1

#: Minimum fraction of the time in validations, and minimum relative difference of a log's rate and the rate of seen
#: steps, for which validations matter.
MIN_VALIDATING = 0.02


def _check_bars(run: Outcome, reading: Reading) -> None:
    """Refuse rates of several progress bars or phases that disagree, such as training and validation."""
    least = max(MIN_BAR_RATES, MIN_BAR_FRACTION * sum(map(len, run.bars.values())))
    usual = {words: statistics.median(rates) for words, rates in run.bars.items() if len(rates) >= least}
    if usual and max(usual.values()) > MAX_RATIO * min(usual.values()):
        names = [f"`{words or 'no text'}` {number(rate)}" for words, rate in usual.items()]
        first = next(iter(usual)).split(" ")[0] or "train"
        raise UserError(
            f"the pattern {reading.rate} matches lines of different speeds ({', '.join(names[:4])}), such as training "
            f"and validation. Put the text of the training's lines into the pattern, such as '{first}.*?…'"
        )


def _check_steps(printed: Sequence[tuple[float, float]], run: Outcome, reading: Reading, own: seen.Pace | None) -> None:
    """Refuse rates that disagree with the steps that were seen; if rates cannot be compared, warn of ambiguous marks.

    `own` is the pace of the steps that were seen. Rates are compared with at least `MIN_TRAINING_STEPS` steps; rates in
    samples/s only if the samples per step are certain.
    """
    if own and own.steps >= seen.MIN_TRAINING_STEPS and printed and (own.samples or run.in_steps):
        rate = interval(own.rates)[0] / ((own.batch_size if run.in_steps and own.samples else None) or 1)
        usual, unit = statistics.median(each for _, each in printed), STEP_RATE if run.in_steps else SAMPLE_RATE
        if not 1 / MAX_RATIO <= usual / rate <= MAX_RATIO:
            raise UserError(f"the program printed {number(usual)} {unit}, but made {number(rate)} {unit}")
    elif run.ambiguous and reading.rate not in RATES:
        separates = "thousands" if "," in run.ambiguous else "decimals"
        say(
            f"dlscale measure: the mark in `{run.ambiguous}` counts as a separator of {separates}. If it is not, print "
            "rates with another number of digits after the mark"
        )


def _check_log(
    found: seen.Pace | None, reading: Reading, processes: Sequence[seen.Process], apart: Sequence[seen.Span]
) -> None:
    """Refuse a log's rate that disagrees with the steps that were seen.

    Reasons are validations between two logged steps, and step numbers that count micro-batches. With several optimisers
    the number of seen steps may be wrong, so the log is refused only if the samples per step are certain. The log may
    agree with the samples that the loaders delivered instead, because the stated samples may be those of a micro-batch.
    """
    delivered, stated = (seen.pace(processes, size, apart) for size in (None, reading.batch_size or 1))
    certain = delivered is not None and delivered.samples
    if not found or not stated or stated.steps < seen.MIN_TRAINING_STEPS:
        return
    if not certain and any(len(process.optimizers) > 1 for process in processes):
        return
    own = [stated, *([delivered] if delivered and certain and found.samples else [])]
    if not any(_is_same_rate(found.rates, each.rates, _validating(each)) for each in own):
        unit = SAMPLE_RATE if found.samples else STEP_RATE
        logged, made = (number(interval(each.rates)[0]) for each in (found, own[-1]))
        raise UserError(
            f"{reading.log}: the logged steps give {logged} {unit}, but the program made {made} {unit}. The log's "
            "times include validations, or its steps are not those of the optimiser"
        )


def _validating(pace: seen.Pace) -> float:
    """Return the fraction of the time of a program's steps and validations in which the program validates."""
    other, trained = pace.pauses.get("other", 0.0), pace.training * (pace.end - pace.begin)
    return other / max(other + trained, 1e-9)


def _is_same_rate(logged: Sequence[float], made: Sequence[float], validating: float) -> bool:
    """Return whether two rates differ by at most 10 %, or by at most 30 % within their 95 % intervals.

    The rates also differ if the logged rate is at least 2 % lower, and nearer to the rate of steps and validations
    together.
    """
    (one, reach), (other, around) = interval(logged), interval(made)
    most = max(one, other) / min(one, other)
    if validating >= MIN_VALIDATING and one < other * (1 - max(validating / 2, MIN_VALIDATING)):
        return False
    return most <= MAX_LOG_RATIO or (most <= MAX_RATIO and abs(one - other) <= reach + around)


def _unseen(way: str, reading: Reading, folder: Path, run: Outcome, processes: Sequence[seen.Process]) -> str:
    """Return the reason why a program has no rate."""
    if run.signals:
        names = ", ".join(signal.Signals(each).name for each in dict.fromkeys(run.signals))
        asked = f"the program received {names} and ended with status {run.status}"
        return f"{asked} after {duration(run.seconds)}, before enough steps were seen"
    if run.status:
        ended = f"the program ended with status {run.status} after {duration(run.seconds)}"
        return f"{ended}, before enough steps were seen. Steps are written once a second; the last steps may be missing"
    if reason := seen.stopped(folder):
        return f"dlscale's hook stopped before enough steps were seen: {reason}"
    if way == "rate":
        if run.refused:
            return f"the pattern {reading.rate} matched text that is not a rate: {no_rate(run.refused)}"
        return f"the program printed no rate that matches {reading.rate}"
    if way == "log":
        return f"the log {reading.log} has fewer than three steps, at different times, since the program started"
    if processes:
        count = max(len(process.steps) for process in processes)
        if count > seen.MIN_TRAINING_STEPS:
            return (
                f"the program made {many(count, 'step')}, but dlscale cannot separate them from validations, pauses or "
                f"steps that were not noted. {options(run.frameworks)}"
            )
        return (
            f"the program made {many(count, 'step')}, too few for a rate: at least {seen.MIN_WARM_UP_STEPS} are "
            "warm-up. Let the program make more steps"
        )
    if not folder.exists():
        return f"the program removed {folder}, the folder for its steps"
    if shutil.disk_usage(folder).free < MIN_FREE_BYTES:
        return f"the disk of {folder.parent} is full: no step could be written. Free some space, or use another folder"
    if foreign := run.users - {os.getuid()}:
        users = ", ".join(map(str, sorted(foreign)))
        return (
            f"the program ran as another user (uid {users}), so its steps could not be written to {folder.parent}. "
            "Run `dlscale measure` as that user"
        )
    hidden = not (folder / "pytorch").exists()
    lost = (
        "which is on PYTHONPATH. Containers, `python -I`, `-E`, `-S`, `env -i`, and scripts or launchers that set "
        "PYTHONPATH remove the hook. Set PYTHONPATH before `dlscale measure` instead"
    )
    why = "only steps of PyTorch's optimisers are seen, except compiled steps"
    if not (folder / "hook").exists():
        why = f"no Python process loaded dlscale's hook, {lost}"
    elif hidden:
        why = (
            "no process with dlscale's hook imported PyTorch's optimisers. If the program uses PyTorch, its process "
            f"lacks the hook, {lost}"
        )
    quick = "" if hidden else ". A process that ends by `os._exit` or a signal within a second writes no steps"
    return f"no training step was seen in {duration(run.seconds)}: {why}{quick}. {options(run.frameworks)}"


def usage_between(
    samples: Sequence[telemetry.Sample], begin: float, end: float, apart: Sequence[seen.Span]
) -> Usage | None:
    """Return the use of CPUs and disks between two times, outside the spans `apart`; None without samples."""
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


def device_of(nodes: Sequence[Sequence[telemetry.Sample]]) -> Device:
    """Return the device that a program used: a GPU if any GPU of the first node was busy, or else the processor."""
    used = any(gpu.utilization for sample in (nodes[0] if nodes else []) for gpu in sample.gpus)
    if used:
        first = bus_ids(1)  # not an index: NVML's indices also count GPUs that CUDA_VISIBLE_DEVICES hides
        name = first and machine.nvml(lambda nvml: nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByPciBusId(first[0])))
        return Device(kind="cuda", name=str(name or "GPU"))
    return Device(kind="cpu", name=machine.processor())
