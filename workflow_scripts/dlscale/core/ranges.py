"""Named ranges of a step, for whichever profiler is at work; free without one.

The ranges are `step`, and within it `data` (the wait for a batch), `copy` (host to device), `forward`, `backward`,
`optimizer`, and `comm` (sums over ranks, which overlap `backward`).

The watchdog asks how far a process has come, and in which kind of range: each kind may take its own time.
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
    """Say that this process has come to what is called so, to which all come in the same order."""
    global entered, at
    entered, at = entered + 1, name


@contextlib.contextmanager
def part(name: str, kind: str | None = None) -> Iterator[None]:
    """Say that this process is in a part of the run in this context: all are, and who has left it is ahead.

    `kind` is that of what it does there; absent: as before.
    """
    outer = at
    advance(name)
    with patience(kind or _kinds[-1]):
        try:
            yield
        finally:
            advance(outer)


@contextlib.contextmanager
def patience(kind: str = OPENING) -> Iterator[None]:
    """Say that what this process does in this context, it perhaps alone, is of another kind: compiling, opening."""
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
