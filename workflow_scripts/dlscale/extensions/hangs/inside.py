"""Report the line, the unfinished collective operations and the stacks of a Python process without progress.

dlscale's own processes import this file. In external programs whose hangs are watched (`--hang-after`, or the watchdog
in plans), dlscale's hook loads the file by its path, so the file is for Python 3.8 and later, and has no dependencies.
In each process of these programs that imports PyTorch or records a step, a thread (`Reporter`) writes the time since
the last step or batch, and a report on request.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import json
import os
import pickle
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

#: Environment variable: seconds without a step or batch after which dlscale ends the program.
AFTER = "DLSCALE_HANG_AFTER"

#: Names of files in the folder of steps. `.HOST.PID` follows all names except ASK, the request for reports.
STATUS, REPORT, STACKS, ASK = "hang.status", "hang.report", "hang.stacks", "hang.ask"

#: File with the state of PyTorch's allocator, as in `dlscale.extensions.health.noted`.
SNAPSHOT = "memory_snapshot.pickle"

#: Seconds between two checks for new steps; time between two writes of the status, as a fraction of the time in AFTER.
TICK, WRITES = 1.0, 0.1

#: Longest wait for the stacks of a child, such as a loader process, seconds.
CHILD = 1.0

#: Maximum number of collective operations in a report, which contains the last operations.
MAX_ENTRIES = 500

#: Keys of the Flight Recorder's entries that a report contains; PyTorch's analysis needs them.
KEYS = (
    *("record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "profiling_name"),
    *("time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "state", "retired", "is_p2p"),
)

_PACKAGE = str(Path(__file__).resolve().parents[2])
#: Folder of dlscale's code that runs within programs; its lines do not count as lines of the program.
_HOOK = f"{_PACKAGE}/extensions/programs/"
_LIBRARY = sysconfig.get_path("stdlib")

# Keep the original functions, because a program may replace them in their modules.
_sleep, _frames = time.sleep, sys._current_frames


def process_scope() -> str:
    """Return the host and the PID namespace of this process, within which process ids are unique."""
    try:
        return f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - Python 3.8
    except OSError:
        return os.uname().nodename


def recorded(active: bool = True) -> dict[str, Any]:
    """Return the state of PyTorch's Flight Recorder; empty without a recorder.

    If `active` is true, the state contains only the unfinished operations.
    """
    module: Any = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    dump = getattr(module, "_dump_fr_trace", None)  # private, so it may change; tested with gloo in PyTorch 2.13
    found: dict[str, Any] = pickle.loads(dump(True, True, active)) if dump else {}
    return found


def unfinished() -> Iterator[dict[str, Any]]:
    """Yield the entries of collective operations that have begun but not ended, oldest first."""
    return (entry for entry in recorded().get("entries", []) if not entry["retired"])


def operation(entry: dict[str, Any]) -> str:
    """Return the name, number and line of an entry of the Flight Recorder, such as `all_gather #412 at study.py:88`."""
    name = entry["profiling_name"].rpartition(":")[2]
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    place = line((frame["filename"], frame["line"]) for frame in entry["frames"])
    return f"{name} #{number} {place}".rstrip()


def frames(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """Yield file and line of a frame and its callers, up to the start of a process that `multiprocessing` forked."""
    while frame and not is_start(frame.f_code.co_filename, frame.f_code.co_name):
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def is_start(file: str, function: str) -> bool:
    """Return whether a function is the first of a child process of `multiprocessing`.

    Outer frames belong to the parent that forked the child.
    """
    return function == "_bootstrap" and file.endswith("multiprocessing/process.py")


def line(places: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line that is not in a library, as `at FILE:LINE`; empty without such a line."""
    return next((f"at {Path(file).name}:{number}" for file, number in places if is_own(file)), "")


def is_own(file: str) -> bool:
    """Return whether a file belongs to the program or to dlscale, but not to a library or to dlscale's hook."""
    installed = "site-packages" in file and not file.startswith(f"{_PACKAGE}/")
    return not (installed or file == __file__ or file.startswith(("<", _LIBRARY, _HOOK)))


def main_line() -> str:
    """Return the line that the main thread executes; empty if all its frames are in libraries."""
    return line(frames(_frames().get(threading.main_thread().ident or 0)))


def open_own(file: str, flags: int) -> int:
    """Open a file without following a link or waiting for a pipe, which another user may have created."""
    return os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


class Reporter:
    """Thread that writes the time since the last step or batch of a process, and a report on request.

    After SIGQUIT, the process also writes the stacks of all threads, even if its code holds Python's lock (GIL).
    """

    def __init__(self, log: Any) -> None:
        self._log, self._folder, self._seconds = log, log.folder, float(os.environ[AFTER])
        self._logs: list[Any] = []
        self._thread: Any = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._logs, self._thread = [], None  # a forked process has neither its parent's steps nor the thread

    def begin(self, log: Any = None) -> None:
        """Start the thread, once in each process; `log` is a log in which the process records its steps."""
        if log is not None:
            self._logs.append(log)
        if self._thread is None:
            self._ended = False
            self._open()
            atexit.register(self._end)
            if util := sys.modules.get("multiprocessing.util"):  # forked children end without `atexit`
                util.Finalize(None, self._end, exitpriority=0)
            self._thread = threading.Thread(target=self._watch, name="dlscale hang", daemon=True)
            self._thread.start()

    def _end(self) -> None:
        """Record that this process ends normally, and was not killed."""
        if self._logs and not self._ended:
            self._ended = True
            with contextlib.suppress(Exception):
                self._write(STATUS, {**self._status(0.0), "ended": True})

    def _open(self) -> None:
        """Make SIGQUIT write stacks; a forked child uses its parent's file until it records a step itself."""
        low = open_own(self._file(STACKS), os.O_CREAT | os.O_APPEND | os.O_RDWR | os.O_CLOEXEC)
        # Use a high descriptor: if a program closes all descriptors, its next files get the lowest ones.
        self._stacks = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 500)
        os.close(low)
        faulthandler.register(signal.SIGQUIT, file=self._stacks, all_threads=True)

    def _file(self, name: str) -> str:
        return str(self._log.file(name))

    def _watch(self) -> None:
        noted, idle, written, asked = 0.0, 0.0, float("inf"), self._asked()
        while not self._ended:
            _sleep(TICK)
            with contextlib.suppress(Exception):  # such as a missing folder, or a full disk
                last = max((max(log.fetched, log.stepped) for log in self._logs), default=0.0)
                # Count ticks, because the time in which the process is stopped must not count.
                before, idle = idle, 0.0 if last != noted else idle + TICK
                noted, written = last, written + TICK
                if idle == 2 * TICK:  # a log writes its last steps only when it records the next step
                    for log in self._logs:
                        log.write()
                every = max(TICK, WRITES * self._seconds)
                if self._logs and not self._ended and (written >= every or before - idle >= every):
                    written = 0.0
                    self._write(STATUS, self._status(idle))
                if (now := self._asked()) != asked:
                    asked = now
                    self._report(idle)

    def _asked(self) -> int:
        try:
            return Path(self._folder, ASK).stat().st_mtime_ns
        except OSError:
            return 0

    def _write(self, name: str, content: dict[str, Any]) -> None:
        file = self._file(name)
        with open(f"{file}.new", "w", opener=open_own) as out:
            json.dump(content, out)
        os.replace(f"{file}.new", file)

    def _status(self, idle: float) -> dict[str, Any]:
        return {
            "rank": self._log.rank,
            "place": process_scope(),
            "pid": os.getpid(),
            "parent": os.getppid(),
            "idle": idle,
            "trains": bool(self._logs),
            "stepped": any(log.stepped for log in self._logs),
            "launched": "RANK" in os.environ,
            "line": main_line(),
            "written": time.time(),
        }

    def _report(self, idle: float) -> None:
        """Write stacks, a report, and the report again with operations, because reading the operations may block."""
        faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        report = self._status(idle)
        self._write(REPORT, report)
        report["children"] = self._children()
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed and distributed.is_available() and distributed.is_initialized():
            report.update(rank=distributed.get_rank(), trains=True)
            groups = distributed.distributed_c10d._world.pg_group_ranks
            report["groups"] = {group.group_name: [group.group_desc, sorted(groups[group])] for group in groups}
            every = recorded(active=False)
            entries = every.get("entries", [])[-MAX_ENTRIES:]
            report["version"] = every.get("version", "")
            report["entries"] = [
                {
                    **{key: entry[key] for key in KEYS if key in entry},
                    "called": operation(entry),
                    "frames": [frame for frame in entry["frames"] if is_own(frame["filename"])],
                }
                for entry in entries
            ]
        self._write(REPORT, report)
        with contextlib.suppress(Exception):  # such as a full disk
            self._write_snapshot()
        self._write(REPORT, {**report, "complete": True})

    def _write_snapshot(self) -> None:
        """Write the state of PyTorch's allocator next to the folder of steps, if the program records its history."""
        torch: Any = sys.modules.get("torch")
        if torch and torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled():
            name = f"{f'rank{self._log.rank}_' * bool(self._log.rank)}{SNAPSHOT}"
            torch.cuda.memory._dump_snapshot(str(Path(self._folder).with_name(name)))

    def _children(self) -> dict[str, str]:
        """Return the stacks of this process's children, such as forked loader processes, by process id."""
        found = {}
        for child in children(os.getpid()):
            if catches_quit(child):
                before = os.fstat(self._stacks).st_size
                os.kill(child, signal.SIGQUIT)
                size = before
                for _ in range(int(CHILD / 0.02)):
                    _sleep(0.02)
                    last, size = size, os.fstat(self._stacks).st_size
                    if size == last > before:
                        break
                if size > before:  # otherwise the child is stopped, or has a file of its own
                    found[str(child)] = os.pread(self._stacks, size - before, before).decode(errors="replace")
        return found


def children(process: int) -> list[int]:
    """Return the process ids of a process's children; empty if the process is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += map(int, Path(thread, "children").read_text().split())
    return sorted(found)


def catches_quit(process: int) -> bool:
    """Return whether a process has a handler for SIGQUIT, which would otherwise end the process."""
    try:
        rows = Path(f"/proc/{process}/status").read_text().splitlines()
        caught = next(row.split()[1] for row in rows if row.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught, 16) >> (signal.SIGQUIT - 1) & 1)


_reporter: Any = None


def start(log: Any) -> dict[str, Callable[[Any], None]]:
    """Prepare this process's reporter; `begin` starts the reporter.

    Return the functions that dlscale's hook calls after the imports of modules: `begin` for PyTorch.
    """
    global _reporter
    _reporter = Reporter(log)
    return {"torch.optim.optimizer": lambda module: begin()}


def begin(log: Any = None) -> None:
    """Start the reporter of this process; `log` is a log of `timed.py`. Errors are ignored."""
    with contextlib.suppress(Exception):
        _reporter.begin(log)
