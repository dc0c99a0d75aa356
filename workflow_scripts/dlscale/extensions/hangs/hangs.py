"""Line of this process's main thread, its unfinished collective operations, and all stacks.

PyTorch's Flight Recorder records each collective operation with its Python stack (`torch.distributed.flight_recorder`).
The function that reads the recorder is private to PyTorch, and was tested with gloo only.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback

from dlscale.extensions.hangs.inside import main_line, operation, unfinished

#: Maximum waits, seconds: for the stacks that one child process writes into the log; for those of all children.
CHILD, CHILDREN = 1.0, 5.0


def waiting_place() -> str:
    """Return the operation for which this process waits, or else the line that its main thread executes.

    Examples: `all_gather #412 at study.py:88`, and `at study.py:88`.
    """
    waiting = next(unfinished(), None)
    return operation(waiting) if waiting else main_line()


def stacks() -> str:
    """Return the unfinished collective operations, and the stacks of all other threads.

    Child processes, such as loader processes, write their own stacks into the log.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"unfinished: {operation(entry)}\n" for entry in unfinished()]
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():  # the calling thread only collects the stacks
            parts.append(f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}")
    until = time.monotonic() + CHILDREN
    for child in multiprocessing.active_children():
        ask(child.pid or 0, min(CHILD, until - time.monotonic()))
    return f"Stacks of process {os.getpid()}:\n{''.join(parts).rstrip()}"


def ask(child: int, seconds: float) -> None:
    """Let a child process write its stacks into the log; wait for them, at most `seconds`.

    The child's `faulthandler` writes word by word, so lines of two children that write at once would be mixed. A
    stopped child writes nothing.
    """
    before, until = os.fstat(2).st_size, time.monotonic() + seconds
    last = before
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGQUIT)  # registered in `dlscale.cli`
    while time.monotonic() < until:
        time.sleep(0.1)
        if before < last == os.fstat(2).st_size:
            break
        last = os.fstat(2).st_size
