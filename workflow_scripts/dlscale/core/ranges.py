"""Named ranges of a step: what the code is at, for whichever profiler is at work; free where none is.

The ranges are `step`, and within it `data` (the wait for a batch), `copy` (host to device), `forward`, `backward`,
`optimizer`, and `comm` (sums over ranks, which overlap `backward`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

RANGES = ("step", "data", "copy", "forward", "backward", "optimizer", "comm")

#: What a process is at before any step, while it tests what it exchanges with the others.
REHEARSAL = "self-test"

#: Opens a range of this name: a context that closes it.
Marker = Callable[[str], AbstractContextManager[object]]

_OFF = contextlib.nullcontext()
_marker: Marker | None = None

# For the watchdog, which asks how far a process has come.
entered = 0  #: How many ranges have been entered,
rehearsed = 0  #: of which in the self-test, before any step.
at = ""  #: The last of them.
loops = 0  #: How many loops of steps this process is in.
patient = 0  #: How many contexts of `patience` it is in.


def mark(name: str) -> AbstractContextManager[object]:
    """Return the context of a range called `name`, one of `RANGES`."""
    global entered, at
    entered, at = entered + 1, name
    return _OFF if _marker is None else _marker(name)


def rehearse() -> None:
    """Say that the self-test has come to its next part, which all processes have in the same order."""
    global entered, rehearsed, at
    entered, rehearsed, at = entered + 1, rehearsed + 1, REHEARSAL


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Say that the self-test goes on in this context; who has left it is ahead of who is in it."""
    global at
    rehearse()
    yield
    rehearse()
    at = ""


@contextlib.contextmanager
def looping() -> Iterator[None]:
    """Say that steps follow one another in this context."""
    global loops
    loops += 1
    try:
        yield
    finally:
        loops -= 1


def in_step() -> bool:
    """Return whether steps follow one another now, so that one that takes long stands out."""
    return bool(loops) and not patient


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """Say that what is done in this context may take as long as it likes: compiling, the first batch, saving."""
    global patient
    patient += 1
    try:
        yield
    finally:
        patient -= 1


@contextlib.contextmanager
def marking(marker: Marker) -> Iterator[None]:
    """Have `mark` open ranges with `marker` within this context."""
    global _marker
    before, _marker = _marker, marker
    try:
        yield
    finally:
        _marker = before
