"""Named ranges of a step, for profilers, and the progress of a process, for the watchdog; free without either.

Within `step` are `data` (the wait for a batch), `copy` (host to device), `forward`, `backward`, `optimizer`, and `comm`
(sums over ranks, which overlap `backward`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

RANGES = ("step", "data", "copy", "forward", "backward", "optimizer", "comm")

#: Kinds of what a process is at. Steps follow one another, and are alike;
STEPS = "steps"
#: between loops of them something is written, validated, or waited for;
BETWEEN = "between"
#: before any step processes test what they exchange;
REHEARSAL = "self-test"
#: and all else, which takes as long as it likes: data are opened, code is compiled.
OPENING = "opening"

#: Range of a process that waits for its checkpoint, which a thread of each process writes together with the others'.
SAVING = "checkpoint"

FIRST = 16  #: Ranges of steps that are to be done until that ends, in which devices, libraries and files are set up.

#: Opens a range of this name: a context that closes it.
Marker = Callable[[str], AbstractContextManager[object]]

_OFF = contextlib.nullcontext()
_marker: Marker | None = None

entered = 0  #: How many ranges, and parts of the run, have been entered or left,
at = ""  #: and in which one this process is.
_marked = 0  #: How many ranges have been entered.
_kinds = [OPENING]


def mark(name: str) -> AbstractContextManager[object]:
    """Return the context of a range called `name`, one of `RANGES`."""
    global _marked
    _marked += 1
    advance(name)
    return _OFF if _marker is None else _marker(name)


def advance(name: str) -> None:
    """Record that this process reached `name`; all ranks reach names in the same order."""
    global entered, at
    entered, at = entered + 1, name


@contextlib.contextmanager
def part(name: str, kind: str | None = None) -> Iterator[None]:
    """Record that this process is in a part of the run, as all ranks will be; `kind` is that of its work."""
    outer = at
    advance(name)
    with patience(kind or _kinds[-1]):
        try:
            yield
        finally:
            advance(outer)


@contextlib.contextmanager
def patience(kind: str = OPENING) -> Iterator[None]:
    """Mark this process's work as of another kind, perhaps on this rank alone: compiling, opening."""
    _kinds.append(kind)
    try:
        yield
    finally:
        _kinds.pop()


def kind() -> str:
    """Return the kind of what this process is at."""
    return OPENING if _kinds[-1] == STEPS and _marked < FIRST else _kinds[-1]


@contextlib.contextmanager
def marking(marker: Marker) -> Iterator[None]:
    """Have `mark` open ranges with `marker` within this context."""
    global _marker
    before, _marker = _marker, marker
    try:
        yield
    finally:
        _marker = before
