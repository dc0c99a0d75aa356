"""`dlscale measure -- COMMAND`: run any program as it is, and say how fast it trains, and what bounds it."""

from __future__ import annotations

import argparse
import contextlib
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

#: Status of a shell for a command that is not there.
NOT_FOUND = 127


def main(args: argparse.Namespace, configuration: object = None) -> int:
    """Run `args.command` to its end, and return its own exit status."""
    pattern = seen.pattern(args.rate) if args.rate else None
    if not shutil.which(args.command[0]):
        print(f"dlscale measure: {args.command[0]}: no such command", file=sys.stderr)
        return NOT_FOUND
    plan = results_of(None) / "plans" / PLAN
    name, run = _name(args.name or _called(args.command), plan), None
    try:
        with whole(plan / name) as folder:
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
    page = _page(plan)
    said = lines(plan / name, throughput, of(read_run(plan / name)))
    print("\n".join([*said, *(profile_lines(profile) if profile else [])]), file=sys.stderr)
    print(f"Page: {page}", file=sys.stderr, flush=True)
    return run.status


def _called(command: Sequence[str]) -> str:
    """Return a name for a command: that of its script, or else of its program."""
    scripts = [word for word in command if word.endswith(".py")]
    module = [after for word, after in itertools.pairwise(command) if word == "-m"]
    word = [*scripts, *module[-1:], command[0]][0]
    return re.sub(r"[^a-z0-9_]+", "_", Path(word).stem.lower()).strip("_") or "program"


def _name(name: str, plan: Path) -> str:
    """Return the name, with a number where it is taken: what was measured before stays."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise UserError(f"--name: {name}: expected up to 40 lower-case letters, digits and underscores")
    taken, count = {path.name for path in plan.glob("*")} if plan.exists() else set(), 1
    while (name if count == 1 else f"{name}_{count}") in taken:
        count += 1
    return name if count == 1 else f"{name}_{count}"


# ---- running it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A program's run."""

    status: int
    begin: float  #: Seconds since 1970-01-01 UTC.
    seconds: float
    stalled: float | None  #: Share of the time in which processes of this machine waited for memory.
    printed: list[tuple[float, float]]  #: Rates that it printed, with their times.


def run_command(
    command: Sequence[str], folder: Path, pattern: re.Pattern[str] | None, profilers: Profilers | None = None
) -> Ended:
    """Run a command with this process's input, output, folder and signals; nothing that it started stays behind."""
    path = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, FOLDER: str((folder / "steps").absolute()), "PYTHONPATH": os.pathsep.join(path)}
    if profilers:  # Kineto, PyTorch's profiler, would print what it does among what the program prints
        environment = {"KINETO_LOG_LEVEL": "99", **environment, PROFILED: str(os.getpid())}
    pipe = subprocess.PIPE if pattern else None
    printed = list[tuple[float, float]]()
    with _reaping(), telemetry.sampled(folder / "telemetry/throughput.csv", os.getpid(), 1, machine.gpus()):
        stalled, begin, start = _stalled(), time.time(), time.perf_counter()
        parent = os.getpid()
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=pipe,
            stderr=pipe,
            preexec_fn=lambda: machine.with_parent(parent, signal.SIGTERM),
        )
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
        share = None if stalled is None else ((_stalled() or 0.0) - stalled) / seconds
    return Ended(status if status >= 0 else 128 - status, begin, seconds, share, printed)


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
            f"dlscale measure: the program left {many(len(rest), 'process')} running, which were ended",
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
            profiled=profiled,
        ),
    )
    return throughput, processes


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
    text = [f"{folder.name}: {said} ({many(outside.steps, 'step')}{batch}{ranks}; {WAYS[outside.way]})"]
    text.append(f"  first step after {duration(outside.first_step_seconds)}; all took {duration(outside.seconds)}")
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
    runs = sorted((path.parent for path in plan.glob("*/throughput.json")), key=lambda path: path.stat().st_mtime)
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
    return page


def _measured(*runs: Path) -> list[Any]:
    """Return the stages that runs have records of."""
    return ["throughput", *(["profile"] if any((run / "profile/profile.json").exists() for run in runs) else [])]
