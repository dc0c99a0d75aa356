"""`dlscale measure --profile`: profile a program with PyTorch's profiler, then with py-spy.

PyTorch's profiler (`window.py`) records ten steps of the first rank. Then py-spy samples all Python processes of the
program for some seconds, without changing the program. Steps during the two profiles do not count in the program's
pace, unless the program makes too few other steps.
"""

from __future__ import annotations

import contextlib
import gzip
import html
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlscale.core.errors import UserError, brief
from dlscale.core.files import atomic_write, open_regular, write_text
from dlscale.core.machine import command_output
from dlscale.core.record import Measured, Positive, Record
from dlscale.core.text import aligned, percent
from dlscale.extensions.profile.machine import PARTS, of_tool
from dlscale.extensions.profile.profile import first_rows, write
from dlscale.extensions.profile.torch_profiler import REFUSED, read
from dlscale.extensions.profile.trace import DEVICE, summarise
from dlscale.extensions.programs.steps import SETTLING, WAYS, Process, Span, files
from dlscale.extensions.programs.window import FIRST, STEPS
from dlscale.measure.profilers import Found, Profile, ProfiledTool, TopEntry, overhead
from dlscale.measure.records import Throughput

#: Rate of py-spy, samples per second, and duration of its profile, seconds.
RATE, SECONDS = 100, 10

#: Seconds from the first step (without steps: from the program's start) to the start of py-spy: LATE if the program has
#: imported PyTorch's optimisers, otherwise EARLY. py-spy starts earlier if the window of PyTorch's profiler has ended.
EARLY, LATE = 10.0, 60.0

#: Maximum number of plain steps, before and after a window, with which the profiled steps are compared.
BESIDE = 10

MISSING = "py-spy: not found. Put it on PATH, or install it with dlscale: pip install 'dlscale[profile]'"
ENDED = "the program ended before py-spy sampled it"
UNBEGUN = "the program ended before py-spy sampled its steps; the stacks show only its start"
FORBIDDEN = (
    "py-spy is not allowed to read other processes. Set kernel.yama.ptrace_scope to 1 or 0; in a container add "
    "--cap-add SYS_PTRACE"
)


#: Pattern of the hook's stack frames, which are dropped from the program's stacks.
OURS = r"Watcher\..*\(sitecustomize\.py:\d+\)"


class Window(Record):
    """Profiled steps of a process, which `window.py` writes; times are seconds since 1970-01-01 UTC."""

    begin: Measured
    end: Measured
    version: str = ""
    cuda: bool = False
    seconds: list[Positive] = []  #: Duration of each profiled step, seconds.
    problem: str | None = None  #: Reason why there is no profile.


class Profilers:
    """Profile one run of a program, and collect the results."""

    def __init__(self, folder: Path) -> None:
        self.use(folder)
        self._folder.mkdir()
        self._span: Span | None = None
        self._problem: str | None = ENDED
        self._tool = shutil.which("py-spy") or shutil.which(str(Path(sys.executable).with_name("py-spy"))) or ""
        self._ended = threading.Event()
        self._spy: subprocess.Popen[str] | None = None

    def use(self, folder: Path) -> None:
        """Use `folder` as the run's folder from now on, because it was moved."""
        self._steps, self._folder = folder / "steps", folder / "profile"
        self._stacks = self._folder / "py-spy.folded"

    @contextlib.contextmanager
    def sample_stacks(self, program: int) -> Iterator[None]:
        """Sample a process and its descendants with py-spy during the block, as soon as `_due` returns True."""
        if not self._tool:
            self._problem = MISSING
            yield
            return
        looking = threading.Thread(target=self._look, args=(program,), daemon=True)
        looking.start()
        try:
            yield
        finally:
            self._ended.set()
            looking.join(SECONDS / 2)
            if self._spy and self._spy.poll() is None:
                self._spy.kill()
            looking.join()

    def _look(self, program: int) -> None:
        """Sample the program once after its first step; if it starts slowly, also once before this step."""
        start, stepped = time.monotonic(), False
        while not self._ended.wait(0.2):
            if not stepped and any(each for way in WAYS for each in files(self._steps, way)):
                start, stepped = time.monotonic(), True
            if (stepped or not self._span) and self._due(time.monotonic() - start):
                self._sample(program)
                if stepped:
                    return

    def _sample(self, program: int) -> None:
        self._stacks.unlink(missing_ok=True)  # drop the stacks of the program's start
        words = ["record", f"--pid={program}", "--subprocesses", "--threads", "--idle", f"--rate={RATE}"]
        words += [f"--duration={SECONDS}", "--format=raw", f"--output={self._stacks}"]
        begin = time.time()
        # The separate session protects py-spy from a terminal's Ctrl-C, which is for the program.
        self._spy = subprocess.Popen(
            [self._tool, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        said = self._spy.communicate()[1]
        self._span, self._problem = (begin, time.time()), None
        if not (self._stacks.exists() and self._stacks.stat().st_size):
            refused = re.search("permission|ptrace|not permitted", said, re.IGNORECASE)
            last = next((line for line in reversed(said.splitlines()) if line.strip()), "py-spy printed no message")
            self._problem = FORBIDDEN if refused else f"py-spy made no profile: {last.strip()}"

    def _due(self, seconds: float) -> bool:
        """Return whether py-spy must start, `seconds` after the first step or the program's start."""
        if any(self._steps.glob("torch.*.window")):
            return True
        return seconds > (LATE if any(self._steps.glob("torch.*.there")) else EARLY)

    @property
    def excluded_spans(self) -> list[Span]:
        """Spans of time in which a profiler ran."""
        known = [(each["begin"], each["end"]) for each in self._windows()]
        return [*known, *([self._span] if self._span else [])]

    def _windows(self) -> list[dict[str, Any]]:
        found = list[dict[str, Any]]()
        for file in sorted(self._steps.glob("torch.*.window")):
            with contextlib.suppress(UserError):  # a damaged file
                found.append({**Window.read(file).model_dump(), "trace": file.with_suffix(".json")})
        return found

    # ---- results ---------------------------------------------------------------------------------------

    def write_profile(self, processes: Sequence[Process], throughput: Throughput) -> Profile:
        """Write the profilers' results into the run's folder `profile`, and return the record."""
        found, plain = [self._by_torch(processes), self._by_spy(processes)], list[float]()
        for window in self._windows():
            before, after = _around(window, processes)
            plain += before + after
        rows = [row for _, told in found for row in told]
        record = Profile(
            device=throughput.device,
            nranks=throughput.nranks,
            batch_size=throughput.batch_size,
            seconds_per_step=plain,
            tools=[tool for tool, _ in found],
            top=first_rows(rows, 0),
        )
        write(record, rows, self._folder)
        return record

    def _by_torch(self, processes: Sequence[Process]) -> Found:
        windows = self._windows()
        window = next((each for each in windows if not each["problem"]), windows[0] if windows else None)
        if window is None or window["problem"]:
            there = any(self._steps.glob("torch.*.there"))
            short = f"the program made fewer than {FIRST + STEPS} steps of PyTorch's optimisers in one process"
            reason = window["problem"] if window else short if there else "no optimiser of PyTorch was seen"
            return ProfiledTool(name="torch", problem=reason), []
        try:
            with open(window["trace"], "rb", opener=open_regular) as file:
                trace = file.read()
            events = read(json.loads(trace)["traceEvents"])
            tool, rows = summarise(events, "torch")
        except Exception as error:
            return ProfiledTool(name="torch", problem=f"PyTorch's profiler left no complete trace ({brief(error)})"), []
        device = events.kind.isin(DEVICE).any()
        if window["cuda"] and not device:
            return ProfiledTool(name="torch", problem=REFUSED), []
        kept = self._folder / "torch.rank0.json.gz"
        with atomic_write(kept) as temporary:
            temporary.write_bytes(gzip.compress(trace, 3))
        before, after = _around(window, processes)
        cost = overhead(before, window["seconds"], after) if before and window["seconds"] and after else None
        known = {"version": window["version"], "overhead": cost, "files": {"trace, for Perfetto": kept.name}}
        return tool.model_copy(update=known), rows

    def _by_spy(self, processes: Sequence[Process]) -> Found:
        if self._problem or not self._span:
            return ProfiledTool(name="py-spy", problem=self._problem), []
        version = re.search(r"\d+(\.\d+)+", command_output([self._tool, "--version"]) or "")
        stacks, picture = read_stacks(self._stacks), self._stacks.with_suffix(".svg")
        first = next((process.steps for process in processes), [])
        begin, end = self._span
        steps = sum(begin < each <= end for each in first)
        seconds = (end - begin) / max(steps, 1)
        if not stacks or (first and end < first[0]):
            return ProfiledTool(name="py-spy", problem=ENDED if not stacks else UNBEGUN), []
        tool = ProfiledTool(
            name="py-spy",
            version=version.group() if version else "",
            steps=steps,
            seconds_per_step=seconds if steps else None,
            files={"flame graph": picture.name, "stacks, for speedscope": self._stacks.name},
        )
        write_text(picture, flames(stacks))
        return tool, functions(stacks, processes, seconds)


def _around(window: dict[str, Any], processes: Sequence[Process]) -> tuple[list[float], list[float]]:
    """Return the durations of up to `BESIDE` steps before a window, and of up to `BESIDE` steps after it, seconds.

    The first `SETTLING` steps after the window are skipped.
    """
    host, _, number = window["trace"].stem.removeprefix("torch.").rpartition(".")
    ends = next((each.steps for each in processes if (each.host, each.pid) == (host, int(number))), [])
    lengths = [(end, end - begin) for begin, end in itertools.pairwise(ends)]
    before = [length for end, length in lengths if end <= window["begin"]]
    after = [length for end, length in lengths if end > window["end"]]
    return before[-BESIDE:], after[SETTLING:][:BESIDE]


# ---- stacks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """Call stack of a process's main thread in `count` samples."""

    processes: tuple[int, ...]  #: Process ids, from the program's first process to this one.
    frames: tuple[str, ...]  #: Functions as `NAME (FILE:LINE)`, beginning with the outermost function.
    count: int


def read_stacks(path: Path) -> list[Stack]:
    """Read the stacks of main threads from a file in py-spy's folded format.

    Each line consists of `process 1:"sh";process 2:"python";thread (2): NAME;…` and the number of samples.
    """
    found = list[Stack]()
    with open(path, encoding="utf-8", errors="replace", opener=open_regular) as lines:
        for line in lines:
            head, _, rest = line.rstrip("\n").rpartition(";thread (")
            text, _, count = rest.rpartition(" ")
            thread, *every = text.split(";")
            frames = [frame for frame in every if not re.fullmatch(OURS, frame)]
            number, _, name = thread.partition(")")
            processes = re.findall(r'(?:^|;)process (\d{1,9}):"', head)  # a command line may contain a semicolon
            counted = re.fullmatch(r"[1-9]\d{0,9}", count)
            if counted and processes and (name == ": MainThread" or number == processes[-1]) and frames:
                found.append(Stack(tuple(map(int, processes)), tuple(frames), int(count)))
    return found


def training(stacks: Sequence[Stack], processes: Sequence[Process]) -> dict[int, int]:
    """Return the ranks of the training processes, by process id.

    A training process is a sampled process of this machine that made steps. Without such processes, the topmost
    sampled process of each process tree counts.
    """
    here = {stack.processes[-1] for stack in stacks}
    known = {each.pid: each.rank for each in processes if each.host == os.uname().nodename and each.pid in here}
    outermost = [next(each for each in stack.processes if each in here) for stack in stacks]
    return known or {pid: rank for rank, pid in enumerate(dict.fromkeys(outermost))}


def functions(stacks: Sequence[Stack], processes: Sequence[Process], seconds: float) -> list[TopEntry]:
    """Return the functions of training processes and of their workers, with the time spent in each function.

    `share` and `total` are fractions of the main thread's samples, including samples in which the thread waited.
    The time of a row is `share` times the duration `seconds` of a step.
    """
    ranks = training(stacks, processes)
    own, whole = defaultdict[Any, int](int), defaultdict[Any, int](int)
    looks = defaultdict[Any, int](int)
    for stack in stacks:
        trainer = next((pid for pid in reversed(stack.processes) if pid in ranks), None)
        if trainer is None:
            continue
        group = ranks[trainer], "function" if trainer == stack.processes[-1] else "worker"
        names = [re.sub(r":\d+\)$", ")", frame) for frame in stack.frames]
        looks[group] += stack.count
        own[group, names[-1]] += stack.count
        for name in set(names):
            whole[group, name] += stack.count
    rows = list[TopEntry]()
    for (group, name), count in whole.items():
        share, kind = own[group, name] / looks[group], group[1]
        row = {"rank": group[0], "name": name, "share": share, "total": count / looks[group]}
        rows.append(TopEntry(tool="py-spy", kind=kind, seconds=share * seconds, **row))
    return sorted(rows, key=lambda row: (row.rank, row.kind, -row.share, -(row.total or 0)))


def flames(stacks: Sequence[Stack], width: int = 1200, height: int = 17) -> str:
    """Draw stacks as SVG.

    A function is as wide as its fraction of samples; the functions that it calls are below.
    """
    looks, drawn, deepest = sum(stack.count for stack in stacks) or 1, list[str](), 0
    #: Number of samples by call path: process, calling functions from the outermost, called function.
    paths = defaultdict[tuple[str, ...], int](int)
    for stack in stacks:
        path = (f"process {stack.processes[-1]}", *(re.sub(r":\d+\)$", ")", frame) for frame in stack.frames))
        for depth in range(len(path)):
            paths[path[: depth + 1]] += stack.count
    begins, inside = dict[tuple[str, ...], float](), defaultdict[tuple[str, ...], float](float)
    for path in sorted(paths):
        outer, wide = path[:-1], width * paths[path] / looks
        begins[path] = begins.get(outer, 0.0) + inside[outer]
        inside[outer] += wide
        if wide < 1:
            continue
        deepest, hue = max(deepest, len(path)), sum(map(ord, path[-1])) % 40 + 15
        place = f'x="{begins[path]:.1f}" y="{height * (len(path) - 1)}"'
        title = f"{html.escape(path[-1])}, {percent(paths[path] / looks)}"
        drawn.append(
            f'<svg {place} width="{wide:.1f}" height="{height}"><title>{title}</title><rect width="100%" height="100%" '
            f'fill="hsl({hue} 80% 70%)" stroke="white"/><text x="3" y="12">{html.escape(path[-1])}</text></svg>'
        )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height * deepest}" font-family="sans-serif"'
    )
    return "\n".join([f'{head} font-size="11">', *drawn, "</svg>\n"])


# ---- output ------------------------------------------------------------------------------------------

#: Number of functions shown on the terminal.
SHOWN = 5


def lines(profile: Profile) -> list[str]:
    """Return the profilers' results as lines for a terminal."""
    said = list[str]()
    for tool in profile.tools:
        cost = f"; {tool.overhead.words}" if tool.overhead else ""
        if tool.problem:
            said.append(f"  {tool.name}: no profile: {tool.problem}")
        elif tool.ranges:
            parts = of_tool(tool)
            whole = sum(parts.values()) or 1.0
            named = ", ".join(f"{PARTS[part][0]} {percent(seconds / whole)}" for part, seconds in parts.items())
            said.append(f"  {tool.name}, {tool.steps} steps: {named}{cost}")
        for kind, of in (("function", "functions of the main thread"), ("worker", "functions of worker processes")):
            rows = [row for row in profile.top if (row.tool, row.kind) == (tool.name, kind)][:SHOWN]
            if rows:
                said.append(f"  {tool.name}, {of} (time without callees, with callees):")
                cells = [(percent(row.share), percent(row.total or 0.0), row.name) for row in rows]
                said += [f"    {line}" for line in aligned(cells, right=(0, 1))]
    return said
