"""What this process is doing: the line of its main thread, its unfinished collective operations, and all stacks.

PyTorch's Flight Recorder notes each collective operation with its Python stack (`torch.distributed.flight_recorder`).
Tested with gloo only, because the function that reads the recorder is private.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import torch

from dlscale.core.fingerprint import ROOT

#: Seconds for loader processes to write their stacks into the log.
CHILDREN = 1.0


def waiting_place() -> str:
    """Return the operation for which this process waits, or else the line that its main thread executes.

    Examples: `all_gather #412 at study.py:88`, and `at study.py:88`.
    """
    if waiting := next(_unfinished(), ""):
        return waiting
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _line(_places(frame))


def stacks() -> str:
    """Return the stacks of all threads, and the unfinished operations; loader processes write theirs into the log."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"unfinished: {operation}\n" for operation in _unfinished()]
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():  # this thread only makes this text
            parts.append(f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}")
    children = [child.pid for child in multiprocessing.active_children() if child.pid]
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGQUIT)  # `faulthandler` writes their stacks (`dlscale.cli`)
    time.sleep(CHILDREN if children else 0.0)
    return f"Stacks of process {os.getpid()}:\n{''.join(parts).rstrip()}"


def _unfinished() -> Iterator[str]:
    """Yield the collective operations that have begun but not finished, the first operation first."""
    recorder = getattr(torch._C, "_distributed_c10d", None)
    if recorder is None:  # PyTorch without distributed operations
        return
    for entry in pickle.loads(recorder._dump_fr_trace(True, True, True)).get("entries", []):
        if not entry["retired"]:
            name = entry["profiling_name"].rpartition(":")[2]
            place = _line((frame["filename"], frame["line"]) for frame in entry["frames"])
            yield f"{name} #{entry['collective_seq_id']} {place}".rstrip()


def _places(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _line(places: Iterable[tuple[str, int]]) -> str:
    """Return the innermost place that is not in a library, as `at FILE:LINE`; empty without such a place."""
    library = sysconfig.get_path("stdlib")
    for file, line in places:
        installed = "site-packages" in file and not Path(file).is_relative_to(ROOT)
        if not (file.startswith(("<", library)) or installed):
            return f"at {Path(file).name}:{line}"
    return ""
