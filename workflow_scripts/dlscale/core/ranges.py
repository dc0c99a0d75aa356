"""Named ranges of a step for profilers, and progress of a process for the watchdog.

Without a profiler and a watchdog, the ranges cost almost no time.

A `step` contains `data` (the wait for a batch), `copy` (host to device), `forward`, `backward`, `optimizer`, and `comm`
(sums over ranks, which overlap `backward`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

RANGES = ("step", "data", "copy", "forward", "backward", "optimizer", "comm")

#: Kind of work: a loop of similar steps.
STEPS = "steps"
#: Kind of work: writing, validating or waiting between two loops of steps.
BETWEEN = "between"
#: Kind of work: testing the communication before the first step.
REHEARSAL = "self-test"
#: Kind of work: everything else, such as opening data and compiling code.
OPENING = "opening"

#: Part in which a process waits for a checkpoint, which threads of all processes write together.
SAVING = "checkpoint"

#: Number of ranges at the start of a process that count as `OPENING` instead of `STEPS`, because they set up devices,
#: libraries and files.
FIRST = 16

#: Function that returns the context of a range, given the range's name.
Marker = Callable[[str], AbstractContextManager[object]]

_OFF = contextlib.nullcontext()
_marker: Marker | None = None

entered = 0  #: Number of calls of `advance`: one at the start of a range, and at the start and end of a part.
at = ""  #: Name of the range or part that this process reached last.
_marked = 0  #: Number of ranges entered.
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
    """Record, during the block, that this process is in the part `name` of the run, which all ranks reach.

    `kind` is the kind of work in this part; None keeps the current kind.
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
    """Set the kind of this process's work during the block.

    Other ranks may do other work, for example while this rank compiles.
    """
    _kinds.append(kind)
    try:
        yield
    finally:
        _kinds.pop()


def kind() -> str:
    """Return the kind of this process's current work."""
    return OPENING if _kinds[-1] == STEPS and _marked < FIRST else _kinds[-1]


@contextlib.contextmanager
def marking(marker: Marker) -> Iterator[None]:
    """Let `mark` open ranges with `marker` within this context."""
    global _marker
    before, _marker = _marker, marker
    try:
        yield
    finally:
        _marker = before
