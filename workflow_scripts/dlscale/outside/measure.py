"""`dlscale measure -- COMMAND`: run any program as it is, and say how fast it trains, and what bounds it."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from dlscale.config.places import results_of
from dlscale.config.records import PlanRecord, RunReference
from dlscale.core import machine, telemetry
from dlscale.core.environment import environment
from dlscale.core.errors import UserError
from dlscale.core.files import whole, write_text
from dlscale.core.noise import interval
from dlscale.core.settings import write_yaml
from dlscale.core.text import duration, many, number
from dlscale.launch.contain import FORWARDED, GRACE
from dlscale.measure.records import Outside, Throughput, Trials, Usage
from dlscale.outside import steps as seen
from dlscale.outside.profile import Profilers
from dlscale.outside.profile import lines as profile_lines
from dlscale.outside.timed import FOLDER
from dlscale.outside.window import PROFILED
from dlscale.parallel.records import Device
from dlscale.report import report
from dlscale.report.results import read_plan, read_run
from dlscale.report.verdict import Verdict, of
from dlscale.report.verdict import told as explained

#: The plan of all programs that were measured, and its study.
PLAN, STUDY = "measured", "program"

HOOK = Path(__file__).with_name("hook")

#: Statuses of a shell for a command that is not there, and for a file that is none.
NOT_FOUND, NO_PROGRAM = 127, 126


def main(args: argparse.Namespace, configuration: object = None) -> int:
    """Run `args.command` to its end, and return its own exit status."""
    pattern = seen.pattern(args.rate) if args.rate else None
    if args.batch_size is not None and args.batch_size < 1:
        raise UserError(f"--batch-size: {args.batch_size}: expected a whole number from 1")
    plan = results_of(None) / "plans" / PLAN
    place, run = _reserved(args.name or _called(args.command), plan), None
    try:
        with whole(place) as folder:
            (folder / "steps").mkdir(parents=True)
            profilers = Profilers(folder) if args.profile else None
            run = run_command(args.command, folder, pattern, profilers)
            throughput, processes = measured(args, folder, run, profilers.apart if profilers else [])
            profile = profilers.told(processes, throughput) if profilers else None
            shutil.rmtree(folder / "steps")
            throughput.write(folder / "throughput.json")
            settings: dict[str, Any] = {"study": STUDY, "command": args.command, "folder": str(Path.cwd())}
            settings |= {"batch_size": throughput.batch_size, "geometry": {"gpus_per_node": throughput.nranks}}
            write_yaml(folder / "config.yaml", settings)
    except UserError as error:
        if run is None:
            raise
        print(f"dlscale measure: {error}", file=sys.stderr)
        return run.status
    finally:
        with contextlib.suppress(OSError):  # only an empty one goes
            place.rmdir()
    said = lines(place, throughput, of(read_run(place)))
    print("\n".join([*said, *(profile_lines(profile) if profile else [])]), file=sys.stderr)
    try:
        page = _page(plan)
    except UserError as error:
        print(f"dlscale measure: no page: {error}", file=sys.stderr)
        return run.status
    print(f"Page: {page}", file=sys.stderr, flush=True)
    return run.status


def _called(command: Sequence[str]) -> str:
    """Return a name for a command: that of its script, or else of its program."""
    scripts = [word for word in command if word.endswith(".py")]
    module = [after for word, after in itertools.pairwise(command) if word == "-m"]
    word = [*scripts, *module[-1:], command[0]][0]
    return re.sub(r"[^a-z0-9]+", "_", Path(word).stem.lower()).lstrip("_0123456789")[:40].strip("_") or "program"


def _reserved(name: str, plan: Path) -> Path:
    """Make a folder of that name, with a number where it is taken: what was measured before stays."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise UserError(f"--name: {name}: expected up to 40 lower-case letters, digits and underscores")
    for count in itertools.count(1):
        place = plan / (name if count == 1 else f"{name}_{count}")
        with contextlib.suppress(FileExistsError):
            place.mkdir(parents=True)
            break
    return place


# ---- running it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A program's run."""

    status: int
    begin: float  #: Seconds since 1970-01-01 UTC.
    seconds: float
    stalled: float | None  #: Share of the time in which processes of this machine waited for memory.
    queued: float | None  #: The same for cores.
    printed: list[tuple[float, float]]  #: Rates that it printed, with their times.


def run_command(
    command: Sequence[str], folder: Path, pattern: re.Pattern[str] | None, profilers: Profilers | None = None
) -> Ended:
    """Run a command with this process's input, output, folder and signals; nothing that it started stays behind."""
    path = [str(HOOK), *filter(None, [machine.GIVEN.get("PYTHONPATH")])]
    environment = {**machine.GIVEN, FOLDER: str((folder / "steps").absolute()), "PYTHONPATH": os.pathsep.join(path)}
    environment |= {PROFILED: str(os.getpid())} if profilers else {}
    pipe = subprocess.PIPE if pattern else None
    printed = list[tuple[float, float]]()
    with _reaping(), telemetry.sampled(folder / "telemetry/throughput.csv", os.getpid(), 1, machine.gpus()):
        waits, begin, start = _waits(), time.time(), time.perf_counter()
        begun = partial(_begun, os.getpid())
        try:
            process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, preexec_fn=begun)
        except OSError as error:
            missing = error.errno == errno.ENOENT
            # Where the file is there, its interpreter is not.
            said = "no such command" if missing and not Path(command[0]).exists() else error.strerror
            print(f"dlscale measure: {command[0]}: {said}", file=sys.stderr)
            raise SystemExit(NOT_FOUND if missing else NO_PROGRAM) from None
        with _forwarding(process), profilers.beside(process.pid) if profilers else contextlib.nullcontext():
            copies = [
                threading.Thread(target=_copy, args=(stream, out.fileno(), pattern, printed), daemon=True)
                for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
                if stream and pattern
            ]
            for copy in copies:
                copy.start()
            status = process.wait()
        seconds = time.perf_counter() - start
        _end_rest()
        for copy in copies:
            copy.join(GRACE)
        stalled, queued = (
            None if one is None or now is None else (now - one) / seconds
            for one, now in zip(waits, _waits(), strict=True)
        )
    return Ended(status if status >= 0 else 128 - status, begin, seconds, stalled, queued, printed)


def _begun(parent: int) -> None:
    """Have a program end with its parent, and heed the signals that it would heed without it."""
    for each in (signal.SIGUSR1, signal.SIGUSR2):  # which the command line ignores
        signal.signal(each, signal.SIG_DFL)
    machine.with_parent(parent, signal.SIGTERM)


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
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on to the program; one that does not end for SIGTERM is killed after half a minute."""
    killer = threading.Timer(GRACE, process.kill)
    killer.daemon = True

    def forward(number: int, frame: FrameType | None) -> None:
        # A terminal sends Ctrl-C to both.
        if not (number == signal.SIGINT and _in_front()):
            process.send_signal(number)
        if number == signal.SIGTERM and not killer.is_alive() and not killer.finished.is_set():
            killer.start()

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        killer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_front() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _end_rest() -> None:
    """End what the program left running."""
    rest = [each for each in psutil.Process().children(recursive=True) if not _is_sampler(each)]
    _, rest = psutil.wait_procs(rest, 1)  # what ends with it needs a moment
    for each in rest:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    _, alive = psutil.wait_procs(rest, 5)
    for each in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(alive, 5)
    if rest:
        print(
            f"dlscale measure: the program left {many(len(rest), 'process')} running: they were ended",
            file=sys.stderr,
        )


def _is_sampler(process: psutil.Process) -> bool:
    try:
        return telemetry.SAMPLER in process.cmdline()
    except psutil.Error:
        return True


def _copy(stream: IO[bytes], out: int, pattern: re.Pattern[str], printed: list[tuple[float, float]]) -> None:
    """Copy a stream as it comes, and note the rates in it."""
    rest = b""
    while data := os.read(stream.fileno(), 65536):
        with contextlib.suppress(OSError):  # nobody reads it
            written = 0
            while written < len(data):
                written += os.write(out, data[written:])
        *whole_lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
        _note(whole_lines, pattern, printed)
        rest = rest[-65536:]
    _note([rest], pattern, printed)


def _note(text: Sequence[bytes], pattern: re.Pattern[str], printed: list[tuple[float, float]]) -> None:
    for line in text:
        match = pattern.search(line.decode(errors="replace"))
        if match and match[1] and (rate := seen.number_in(match[1])):
            printed.append((time.time(), rate))


def _waits() -> list[float | None]:
    """Return the seconds for which some process of this machine waited for memory, and for a core.

    They are Linux's pressure stall information.
    """
    texts = [machine.text_of(Path("/proc/pressure", what)) for what in ("memory", "cpu")]
    found = [re.search(r"^some .*total=(\d+)", text) for text in texts]
    return [int(one[1]) / 1e6 if one else None for one in found]


# ---- what it comes to --------------------------------------------------------------------------------


def measured(
    args: argparse.Namespace, folder: Path, run: Ended, apart: Sequence[seen.Span] = ()
) -> tuple[Throughput, list[seen.Process]]:
    """Return what a program's steps come to, without those of spans `apart`, and who made them.

    It is a `UserError` where none were seen.
    """
    nodes = telemetry.read_nodes(folder / "telemetry/throughput.csv")
    way, processes = seen.read(folder / "steps")
    if args.rate:
        way, come_to = "rate", partial(seen.pace_of_rates, run.printed, run.begin, args.batch_size)
    elif args.steps:
        way, come_to = "log", partial(seen.pace_of_log, seen.logged(Path(args.steps), run.begin), args.batch_size)
    else:
        come_to = partial(seen.pace, processes, args.batch_size)
    found = come_to(apart=apart)
    profiled = found is None and bool(apart)
    if profiled:
        found, apart = come_to(), ()
    if found is None:
        raise UserError(_unseen(args, folder / "steps", run, processes))
    mean = statistics.fmean(found.rates)
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
            command=args.command,
            way=way,
            samples=found.samples,
            steps=found.steps,
            status=run.status,
            seconds=run.seconds,
            first_step_seconds=max(0.0, found.first_step - run.begin),
            waiting=found.waiting,
            training=min(found.training, 1.0),
            stalled=run.stalled,
            queued=run.queued,
            rank_waiting=found.waits_of_ranks,
            rank_cores=found.cores_of_ranks,
            profiled=profiled,
        ),
    )
    return throughput, processes


def _unseen(args: argparse.Namespace, folder: Path, run: Ended, processes: Sequence[seen.Process]) -> str:
    """Say why a program has no rate."""
    if run.status:
        return f"it ended with status {run.status} after {duration(run.seconds)}, before it trained"
    if args.rate:
        return f"nothing that it printed has a rate that fits --rate {args.rate}"
    if args.steps:
        return f"fewer than three steps since it began are in --steps {args.steps}"
    if processes:
        count = max(len(process.steps) for process in processes)
        return f"it made {many(count, 'step')}, too few for a rate: the first {seen.FEWEST} warm up"
    if not folder.exists():
        return "it removed the folder of results, to which its steps were written"
    hidden = not (folder / "hook").exists()
    why = (
        "no Python there had dlscale's hook: `python -I`, `-E`, `-S`, `env -i` and containers leave it out"
        if hidden
        else "steps of PyTorch's optimisers are seen, unless they are compiled"
    )
    return (
        f"no training step was seen in {duration(run.seconds)}: {why}. Any other loop's are by `for batch in "
        "dlscale.timed(loader)`, by a log of its steps (--steps FILE), or by what it prints (--rate 'avg (\\S+) "
        "samples/sec')"
    )


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
        name = machine.nvml(lambda driver: driver.nvmlDeviceGetName(driver.nvmlDeviceGetHandleByIndex(0)))
        return Device(kind="cuda", name=str(name or "GPU"))
    return Device(kind="cpu", name=environment().processor)


# ---- telling it --------------------------------------------------------------------------------------


def lines(folder: Path, throughput: Throughput, verdict: Verdict) -> list[str]:
    """Return what was measured, and the verdict, in lines for a terminal."""
    full, outside = throughput.full, throughput.outside
    assert full and outside
    centre, reach = interval(full.trial_throughput)
    unit = "samples/s" if outside.samples else "steps/s"
    said = f"{number(centre)} {unit}"
    said += f" ± {number(reach, 2)}" if reach < centre else " (too few steps to know how certain)"
    batch = f" of {many(throughput.batch_size, 'sample')}" if throughput.batch_size else ""
    ranks = f", {throughput.nranks} processes" if throughput.nranks > 1 else ""
    count = many(outside.steps, "rate" if outside.way == "rate" else "step")
    text = [f"{folder.name}: {said} ({count}{batch}{ranks}; {WAYS[outside.way]})"]
    ended = f", and ended with status {outside.status}" if outside.status else ""
    first = f"  first step after {duration(outside.first_step_seconds)}; all took {duration(outside.seconds)}{ended}"
    text.append(first)
    if outside.profiled:
        text.append("  the run is so short that profilers were at work in these steps: without --profile it is faster")
    return [*text, *explained(verdict)]


#: How steps were seen, in words.
WAYS = {
    "timed": "timed by the program",
    "seen": "seen in PyTorch",
    "log": "from its log",
    "rate": "as it prints them",
}


def _page(plan: Path) -> Path:
    """Write the page of all programs that were measured, with its plan; return its place."""
    found = set(plan.glob("*/throughput.json"))
    runs = sorted((path.parent for path in found), key=lambda path: path.stat().st_mtime)
    record = PlanRecord(
        plan=PLAN,
        title="Programs, as they are",
        study=STUDY,
        kind="set",
        measure=_measured(*runs),
        runs=[RunReference(name=run.name, plan=PLAN, run=run.name, measure=_measured(run)) for run in runs],
    )
    write_yaml(plan / "plan.yaml", record.model_dump(mode="json"))
    page = plan / "report.html"
    title = record.title or PLAN
    write_text(page, report.page(title, [read_plan(plan / "plan.yaml")], [], plan, call="dlscale measure"))
    # Another call that ended meanwhile may have written its page before.
    return page if set(plan.glob("*/throughput.json")) == found else _page(plan)


def _measured(*runs: Path) -> list[Any]:
    """Return the stages that runs have records of."""
    return ["throughput", *(["profile"] if any((run / "profile/profile.json").exists() for run in runs) else [])]
