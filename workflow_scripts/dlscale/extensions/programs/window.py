"""Profile some steps of an unchanged program with PyTorch's profiler, in Python 3.8 and later."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

#: Environment variable: process id of `dlscale measure --profile`.
PROFILED = "DLSCALE_PROFILE"

#: Number of steps before the window of profiled steps, and in the window.
FIRST, STEPS = 20, 10


class Window:
    """Window of profiled steps of a process; only the first rank opens a window.

    The trace is written into the file `torch.HOST.PID.json` in the folder `steps`, and the window's times and problems
    into `torch.HOST.PID.window`. The file `torch.HOST.PID.there` exists from the start, and shows that a window may
    follow.
    """

    def __init__(self, steps: str) -> None:
        self._place = Path(steps, f"torch.{os.uname().nodename}.{os.getpid()}")
        self._count, self._process = 0, os.getpid()
        self._profile: Any = None
        self._step: Any = None
        self._optimizer: Any = None
        self._after = False  # whether the optimiser first calls a closure with the backward pass
        self._known: dict[str, Any] = {"seconds": []}
        with contextlib.suppress(OSError):  # the program may have removed the folder
            self._file("there").touch()

    def _file(self, kind: str) -> Path:
        return self._place.with_name(f"{self._place.name}.{kind}")

    @property
    def open(self) -> bool:
        """Whether the window is open."""
        return self._profile is not None

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Mark the work of the block as `name` in the trace; call this method only while the window is open."""
        with contextlib.ExitStack() as opened:
            with self._guarded():
                opened.callback(self._exit, self._entered(name))
            yield

    def optimizing(self, arguments: Iterable[Any]) -> None:
        """Note that an optimiser's step begins.

        If `arguments` contain a closure, as with Lightning, the optimiser first calls the closure, which runs the
        forward and the backward pass; the optimiser's own work begins afterwards.
        """
        if not self.open:
            return
        with self._guarded():
            self._after = any(map(callable, arguments))
            if not self._after:
                self._optimizer = self._entered("optimizer")

    def step(self) -> None:
        """Note that a step has ended; open the window after `FIRST` steps, and close it after `STEPS` further steps."""
        self._count += 1
        if not self.open and self._count != FIRST:
            return
        with self._guarded():
            if os.getpid() != self._process:
                return
            if self.open:
                self._next()
            else:
                self._begin()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Close the window after an error in the profiling code, so that the program continues."""
        try:
            yield
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}")

    # ---- the window ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        import torch

        self._known["begin"], self._known["version"] = time.time(), torch.__version__
        dist = torch.distributed
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if rank:
            self._file("there").unlink()
            return
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            self._end("the program itself uses PyTorch's profiler, and only one profiler can run at a time")
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._record = torch.profiler.record_function
        with torch.profiler.profile(activities=kinds):  # the first start is slow: it loads the device's profiler
            torch.zeros(1)
        self._known["cuda"] = len(kinds) > 1
        self._profile = torch.profiler.profile(activities=kinds)
        atexit.register(self._abandon)  # PyTorch crashes if Python ends during a profile
        self._profile.start()
        self._backward, torch.autograd.backward = torch.autograd.backward, self._wrapped(torch.autograd.backward)
        self._step, self._since = self._entered("step"), time.perf_counter()

    def _next(self) -> None:
        now = time.perf_counter()
        self._known["seconds"].append(now - self._since)
        self._left("_optimizer")
        self._left("_step")
        self._after = False
        if len(self._known["seconds"]) < STEPS:
            self._step, self._since = self._entered("step"), now
            return
        profile = self._profile
        self._restore()
        profile.stop()
        profile.export_chrome_trace(str(self._file("json")))
        self._end()

    def _abandon(self) -> None:
        if self.open and os.getpid() == self._process:
            profile = self._profile
            self._left("_optimizer")
            self._left("_step")
            self._end("the program ended during the profiled steps")
            with contextlib.suppress(Exception):
                profile.stop()

    def _end(self, problem: str | None = None) -> None:
        with contextlib.suppress(Exception):
            self._restore()
        with contextlib.suppress(Exception):
            partial = self._file("partial")
            partial.write_text(json.dumps({**self._known, "end": time.time(), "problem": problem}))
            partial.replace(self._file("window"))

    def _restore(self) -> None:
        if self._profile is not None:
            self._profile = None
            sys.modules["torch"].autograd.backward = self._backward

    def _wrapped(self, backward: Any) -> Any:
        def within(*args: Any, **kwargs: Any) -> Any:
            if not self.open:  # the program kept this function, and calls it after the window
                return backward(*args, **kwargs)
            with self._guarded():
                self._left("_optimizer")
            with self.range("backward"):
                found = backward(*args, **kwargs)
            if self._after and self.open:
                with self._guarded():
                    self._optimizer = self._entered("optimizer")
            return found

        return within

    def _entered(self, name: str) -> Any:
        opened = self._record(name)
        opened.__enter__()
        return opened

    def _left(self, name: str) -> None:
        opened = getattr(self, name)
        setattr(self, name, None)
        if opened is not None:
            self._exit(opened)

    def _exit(self, opened: Any) -> None:
        with self._guarded():
            opened.__exit__(None, None, None)
