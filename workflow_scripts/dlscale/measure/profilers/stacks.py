"""`stacks`: a flame graph of this process, its loader's processes and all their threads, by py-spy.

py-spy looks into the processes from outside, two hundred times a second, and sees Python's frames alone: time in a
library counts for the line that called it. (Its `--native` frames end at kernels that bring no tables for unwinding,
as those of matrix products, and lose their callers.) Threads that wait are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from dlscale.measure.profilers.records import ProfiledTool, TopEntry
from dlscale.measure.profilers.tool import Found, Unavailable, report

RATE = 200  #: Samples a second.
#: Seconds that py-spy is given to write its report.
PATIENCE = 30.0
DENIED = (
    "py-spy may not look into this process: ptrace is forbidden here. In a container, allow it: --cap-add SYS_PTRACE; "
    "elsewhere kernel.yama.ptrace_scope must be 0 or 1"
)
_SET_PTRACER, _ANY, _NOBODY = 0x59616D61, ctypes.c_ulong(-1), ctypes.c_ulong(0)

#: A stack, outermost frame first, and the samples that ended there.
Stacks = Counter[tuple[str, ...]]


class StackSampler:
    """See `dlscale.measure.profilers.tool.Tool`."""

    name = "stacks"

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._rank = report(folder, self.name, rank, "svg"), rank

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Have py-spy look at this process."""
        words = [str(Path(sysconfig.get_path("scripts"), "py-spy")), "record", "--pid", str(os.getpid())]
        words += ["--subprocesses", "--threads", "--rate", str(RATE), "--output", str(self._path)]
        with _seen_by_children():
            try:
                spy = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            except OSError as error:
                raise Unavailable(f"py-spy cannot be started ({error}); install it: pip install py-spy") from None
            try:
                assert spy.stdout is not None
                said = ""
                while "Sampling process" not in said:
                    said += (line := spy.stdout.readline())
                    if not line:
                        raise Unavailable(DENIED if re.search("ermission|not permitted", said) else _ended(said))
                yield
                spy.send_signal(signal.SIGINT)
                said, _ = spy.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                raise Unavailable(f"py-spy has written nothing in {PATIENCE:.0f} s") from None
            finally:
                spy.kill()
                spy.wait()
        if not self._path.is_file():
            raise Unavailable(_ended(said))

    def found(self, seconds: list[float]) -> Found:
        """Read the flame graph."""
        tool = ProfiledTool(
            name=self.name,
            version=metadata.version("py-spy"),
            steps=len(seconds),
            seconds_per_step=statistics.median(seconds),
            complete=True,
            files={f"flame graph of rank {self._rank}": self._path.name},
        )
        return tool, rows(read(self._path), seconds, self._rank)


def read(path: Path) -> Stacks:
    """Return the stacks of a flame graph as py-spy draws it: each frame's width is its samples."""
    frames = []
    for group in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}g"):
        title, box = group.find("{*}title"), group.find("{*}rect")
        if title is not None and title.text and box is not None:
            number, width = (int(box.get(f"{{http://github.com/jonhoo/inferno}}{key}", 0)) for key in "xw")
            name = re.sub(r" \([\d,]+ samples?, [\d.]+%\)$", "", title.text)
            frames.append((number, float(box.get("y", 0)), width, name))
    stacks: Stacks = Counter()
    above: list[tuple[int, str]] = []  # frames that hold the next one: where they end, their names
    for number, _, width, name in sorted(frames):  # each frame before those that it called
        while above and above[-1][0] <= number:
            above.pop()
        calling = tuple(caller for _, caller in above)
        above.append((number + width, name))
        stacks[(*calling, name)] += width
        if calling:
            stacks[calling] -= width
    stacks.pop(("all",), None)
    return Stacks({stack: samples for stack, samples in stacks.items() if samples > 0})


def rows(stacks: Stacks, seconds: list[float], rank: int) -> list[TopEntry]:
    """Return a row for each function: the time that it took itself, by the thread that it ran in.

    The spread is that of counting n samples that come independently: their number's standard deviation is sqrt(n).
    """
    own: Counter[tuple[str, str]] = Counter()
    for stack, samples in stacks.items():
        own[re.sub(r":\d+\)$", ")", stack[-1]), _place(stack)] += samples
    step = statistics.fmean(seconds)
    found = []
    for (name, place), samples in own.most_common():
        mean = samples / RATE / len(seconds)
        row = {"seconds": mean, "std": (samples / len(seconds)) ** 0.5 / RATE, "share": mean / step}
        found.append(TopEntry(tool="stacks", rank=rank, kind="function", name=name, calls=0, note=place, **row))
    return found


def _place(stack: tuple[str, ...]) -> str:
    """Return where a stack was: nothing for this process's main thread."""
    process = [frame for frame in stack if frame.startswith("process ")]
    if len(process) > 1 or not any(frame.startswith(f"process {os.getpid()}:") for frame in process):
        return "another process, as a loader's"
    thread = next((frame for frame in stack if frame.startswith("thread (")), "")
    name = thread.partition(": ")[2] or thread
    return "" if name == "MainThread" or f"({os.getpid()})" in thread else f"thread {name}"


@contextlib.contextmanager
def _seen_by_children() -> Iterator[None]:
    """Let any process of this user look into this one, where the kernel's Yama lets only its parents do so."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *words: 0
    prctl(_SET_PTRACER, _ANY, _NOBODY, _NOBODY, _NOBODY)
    try:
        yield
    finally:
        prctl(_SET_PTRACER, _NOBODY, _NOBODY, _NOBODY, _NOBODY)


def _ended(said: str) -> str:
    return "py-spy has ended: " + (" ".join(said.replace("py-spy>", "").split())[-300:] or "it said nothing")
