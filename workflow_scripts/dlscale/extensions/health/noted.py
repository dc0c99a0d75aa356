"""Read the memory and the compilations of this process, and record them next to the steps of an external program.

dlscale's hook loads this file into external programs: Python 3.8 and later, no dependencies. Modules that the program
has not imported are not imported here. All numbers of this file are read on the host, without waiting for a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

# Keep the original functions, because a program may replace them in their modules.
clock, thread_clock, now_utc, getpid = time.perf_counter, time.thread_time, time.time, os.getpid
open_file, read_file, close_file = os.open, os.read, os.close

#: Beginning of the name of the file `health.HOST.PID` with the notes of a process, in the folder of steps.
NAME = "health"

#: File with the state of PyTorch's allocator after a GPU ran out of memory, for https://pytorch.org/memory_viz.
SNAPSHOT = "memory_snapshot.pickle"

#: Lines of `/proc/self/status`: peak resident memory; own memory, which is anonymous, shared or swapped out.
STATUS = re.compile(rb"^(VmHWM|RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", re.MULTILINE)

#: Maximum fraction of the time for notes, and seconds that notes may take in addition. Only the processor time of the
#: thread that writes the notes counts.
MAX_FRACTION, FREE_SECONDS = 1e-3, 0.01

#: Beginnings of the paths of Python's own files, and parts of the paths of installed packages.
STANDARD, INSTALLED = ("<", os.path.dirname(os.__file__) + os.sep), ("/site-packages/", "/dist-packages/")  # noqa: PTH120

#: Maximum number of functions of libraries whose callers are kept.
MAX_CALLERS = 64

#: Maximum length of a reason, characters.
MAX_REASON = 400


def host_memory() -> tuple[int, int] | None:
    """Return the process's own memory, and its peak resident memory, bytes; None if Linux does not report both.

    Own memory excludes pages of files, which Linux can drop: reading a memory-mapped file is not a leak.
    """
    place = open_file("/proc/self/status", os.O_RDONLY)
    try:
        found = {name: 1024 * int(kilobytes) for name, kilobytes in STATUS.findall(read_file(place, 16384))}
    finally:
        close_file(place)
    peak = found.pop(b"VmHWM", 0)
    return (sum(found.values()), peak) if peak and b"RssAnon" in found else None


def gpu_memory() -> tuple[int, int, int, int, int] | None:
    """Return the bytes of PyTorch's allocator on the current GPU; None if the program does not use a GPU.

    The numbers are: allocated, peak of allocated, reserved, inactive parts of split blocks, and the GPU's memory.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    stats = cuda.memory_stats()
    names = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current")
    allocated, peak, reserved = (int(stats[name]) for name in names)
    total = int(cuda.get_device_properties(cuda.current_device()).total_memory)
    return allocated, peak, reserved, int(stats.get("inactive_split_bytes.all.current", 0)), total


class Compilations:
    """Reader of the compilations that torch.compile records in this process from now on."""

    def __init__(self) -> None:
        self._last: Any = None
        self._callers: dict[str, str] = {}  # PyTorch's number of a compiled function → line of the program
        self._listening = False
        self.new()
        self._before = self._known = _graph_breaks()

    def new(self) -> list[dict[str, Any]]:
        """Return the compilations since the last call, the oldest first.

        PyTorch keeps the last 64 compilations. Fields that an older PyTorch lacks are empty or zero.
        """
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is not None and not self._listening:
            self._listening = True
            handler.register_start_callback(self._begin)
        every: list[Any] = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", list)()
        if not every or every[-1] is self._last:
            return []
        known = next((place for place, each in enumerate(every) if each is self._last), -1)
        self._last = every[-1]
        # Entries that are written while the program runs, such as of autotuning, are not compilations.
        found = [_described(each) for each in every[known + 1 :] if not getattr(each, "is_runtime", False)]
        return [{**each, "caller": self._callers.get(each["frame"], "")} for each in found]

    def _begin(self, *arguments: Any) -> None:
        """Record the line of the program that calls a function, just before PyTorch compiles the function."""
        try:
            frame = str(arguments[0].compile_id).rpartition("/")[0]
            if frame not in self._callers and len(self._callers) < MAX_CALLERS:
                self._callers[frame] = line_of_program(sys._getframe(1))
        except Exception:  # an older PyTorch passes no arguments
            return

    def breaks(self) -> dict[str, int] | None:
        """Return the graph breaks since this object was created, by reason; None if unchanged since the last call."""
        found = _graph_breaks()
        if found == self._known:
            return None
        self._known = found
        more = {reason: count - self._before.get(reason, 0) for reason, count in found.items()}
        return {short(reason): count for reason, count in more.items() if count > 0}


def _graph_breaks() -> dict[str, int]:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return {str(reason): int(count) for reason, count in dict(counters.get("graph_break", {})).items()}


def _described(entry: Any) -> dict[str, Any]:
    def of(name: str) -> Any:
        return getattr(entry, name, None)

    frame, _, attempt = str(of("compile_id") or of("frame_key") or "").rpartition("/")
    microseconds, reason = of("duration_us"), of("recompile_reason")
    return {
        "time": float(of("start_time") or (of("start_time_us") or 0) / 1e6),
        "seconds": float(of("entire_frame_compile_time_s") or 0) or (microseconds or 0) / 1e6,
        "frame": frame or attempt,
        "again": bool(reason) or attempt.partition("_")[0] not in ("", "0"),
        "forward": of("is_forward") is not False,
        "function": str(of("co_name") or ""),
        "file": str(of("co_filename") or ""),
        "line": int(of("co_firstlineno") or 0),
        "reason": short(str(reason or "").partition(": ")[2]),
        "refused": "recompile limit" in str(of("fail_reason") or "")[:200],
    }


def line_of_program(frame: Any) -> str:
    """Return the innermost line in the program's own files, as `FILE:LINE`; empty without such a line."""
    torch = os.path.dirname(str(sys.modules["torch"].__file__)) + os.sep  # noqa: PTH120
    libraries = (*INSTALLED, torch)
    while frame:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith(STANDARD) and not any(part in file for part in libraries):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def short(reason: str) -> str:
    """Return the first line of a reason of PyTorch, without the comment that quotes the source."""
    line = next(iter(reason.strip().splitlines()), "").partition("  # ")[0]
    return " ".join(line.split())[:MAX_REASON]


class Notes:
    """File `health.HOST.PID` with a process's memory and compilations, written when its steps are written.

    `log` has the process's steps. An error ends these notes; the program continues, and its steps are still noted.
    """

    def __init__(self, log: Any) -> None:
        self._log = log
        self._begin, self._spent, self._pid = clock(), 0.0, 0
        self._compilations = Compilations()

    def look(self) -> None:
        """Record the memory and new compilations, unless notes have already taken too much time."""
        if self._spent > FREE_SECONDS + MAX_FRACTION * (clock() - self._begin):
            return
        begin = thread_clock()
        try:
            host, gpu = host_memory(), gpu_memory()
            text = f"m {clock():.6f} {' '.join(map(str, (*(host or (0, 0)), *(gpu or ()))))}\n"
            text += "".join(f"c {json.dumps(each)}\n" for each in self._compilations.new())
            breaks = self._compilations.breaks()
            text += f"k {json.dumps(breaks)}\n" if breaks else ""
            if self._pid != getpid():  # the first note, or the first in a forked process
                self._pid = getpid()
                text = f"begin {now_utc():.6f} {clock():.6f}\n{text}"
            self._log.append(NAME, text)
        except Exception:  # an unknown version of PyTorch, a full disk: the program continues
            self._spent = float("inf")
        self._spent += thread_clock() - begin


def write_at_exhaustion(log: Any) -> None:
    """Write a snapshot next to the folder of steps if the program ends because a GPU ran out of memory."""
    original = sys.excepthook

    def ended(kind: Any, error: Any, trace: Any) -> None:
        if kind.__name__ == "OutOfMemoryError":
            with contextlib.suppress(Exception):  # a full disk, or a device other than CUDA
                name = f"{f'rank{log.rank}_' * bool(log.rank)}{SNAPSHOT}"
                sys.modules["torch"].cuda.memory._dump_snapshot(str(Path(log.folder).with_name(name)))
        original(kind, error, trace)

    sys.excepthook = ended


def start(log: Any) -> dict[str, Any]:
    """Prepare this process to write notes with the steps, and the allocator's state if a GPU runs out of memory.

    dlscale's hook calls this function.
    """
    write_at_exhaustion(log)
    log.on_write.append(Notes(log).look)
    return {}
