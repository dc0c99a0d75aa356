"""Databases of Nsight Systems, as `nsys export --type sqlite` makes them.

NVIDIA documents the schema in "SQLite Schema Reference" and the numbers of kinds in "SQLite Schema Event Values" of the
Nsight Systems Analysis Guide (https://docs.nvidia.com/nsight-systems/AnalysisGuide/index.html). Times there are
nanoseconds. Tables are made only when there is something in them.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from dlscale.core.errors import UserError
from dlscale.core.ranges import RANGES
from dlscale.measure.profilers.intervals import gaps, index_at
from dlscale.measure.profilers.records import ProfiledTool, TopEntry
from dlscale.measure.profilers.trace import RANGE, UNKNOWN, WAIT, WORK, Trace, spans, summarise, table

#: NVTX_EVENTS.eventType of ranges: pushed and popped by one thread; started, and ended perhaps by another.
PUSHED, STARTED = 59, 60
#: CUPTI_ACTIVITY_KIND_MEMCPY.copyKind (ENUM_CUDA_MEMCPY_OPER); others have their number for a name.
COPIES = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device", 10: "Peer-to-Peer"}
TO_DEVICE = (1, 3, 11)
#: Its srcKind and dstKind (ENUM_CUDA_MEM_KIND).
MEMORIES = {0: "pageable", 1: "pinned", 2: "device", 4: "managed"}
PAGEABLE = 0
#: The functions of the C library (OSRT_API) in which a thread waits for another.
BLOCKING_CALLS = re.compile(r"pthread_cond_(timed|clock)?wait|pthread_join|sem_(timed|clock)?wait|pthread_barrier_wait")

CALLS = "start, end, globalTid, (SELECT value FROM StringIds WHERE id = nameId), correlationId"
SYSTEM = "start, end, globalTid, (SELECT value FROM StringIds WHERE id = nameId)"
MARKS = "start, end, globalTid, COALESCE(text, (SELECT value FROM StringIds WHERE id = textId)), eventType"
#: By table: the kind of its work; name, bytes and kinds of copies and their memories.
DEVICE = {
    "KERNEL": ("kernel", "(SELECT value FROM StringIds WHERE id = demangledName), 0, 0, -1, -1"),
    "MEMCPY": ("copy", "NULL, bytes, copyKind, COALESCE(srcKind, -1), COALESCE(dstKind, -1)"),
    "MEMSET": ("memset", "'Memset', bytes, 0, -1, -1"),
    "GRAPH_TRACE": ("graph", "'graph', 0, 0, -1, -1"),
}


class _Database:
    """What is asked of the tables that are there."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def rows(self, name: str, columns: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(f"SELECT {columns} FROM {name}").fetchall() if name in self.tables else []


def summarize(path: Path, rank: int = 0) -> tuple[ProfiledTool, list[TopEntry]]:
    """Return what a database says of a rank's steps; what is none, or has no steps in it, is a `UserError`."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            return summarise(_trace(_Database(connection)), "nsys", rank)
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: not a database of Nsight Systems that can be read ({error})") from None


def _trace(database: _Database) -> Trace:
    marks = database.rows("NVTX_EVENTS", MARKS)
    ranges = table(
        (
            (begin, end, thread, name, kind == PUSHED)
            for begin, end, thread, name, kind in marks
            if kind in (PUSHED, STARTED) and name in RANGES and end is not None and end >= begin
        ),
        RANGE,
    )
    calls = sorted(database.rows("CUPTI_ACTIVITY_KIND_RUNTIME", CALLS))
    first: dict[int, tuple[int, int, int]] = {}
    for number, (begin, _, thread, _, correlation) in enumerate(calls):
        if correlation:
            first.setdefault(correlation, (begin, thread, number))
    work = list[tuple[Any, ...]]()
    for name, (kind, columns) in DEVICE.items():
        found = database.rows(f"CUPTI_ACTIVITY_KIND_{name}", f"start, end, correlationId, {columns}")
        for begin, end, correlation, named, size, copied, source, target in found:
            launch, thread, call = first.get(correlation, (begin, UNKNOWN, UNKNOWN))
            to_device = kind == "copy" and copied in TO_DEVICE
            known = named or _copy(copied, source, target)
            work.append((begin, end, thread, known, kind, launch, call, size, to_device, source == PAGEABLE))
    steps, called = ranges[ranges.name == "step"], table(call[:4] for call in calls)
    main = int(steps.sort_values("begin").thread.iloc[0]) if len(steps) else UNKNOWN
    return Trace(
        ranges=ranges,
        work=table(work, WORK),
        threads=_autograd(ranges, called, main),
        waits=_matching(WAIT, called) if "CUPTI_ACTIVITY_KIND_RUNTIME" in database.tables else None,
        computing=_computing(database, main) if "OSRT_API" in database.tables else None,
    )


def _matching(names: re.Pattern[str], events: pd.DataFrame) -> pd.DataFrame:
    return events[[bool(names.match(name)) for name in events.name]]


def _copy(kind: int, *places: int) -> str:
    memories = [MEMORIES[place] for place in places if place in MEMORIES]
    return COPIES.get(kind, f"copy of kind {kind}") + (f" ({' to '.join(memories)})" if memories else "")


def _autograd(ranges: pd.DataFrame, calls: pd.DataFrame, main: int) -> set[int]:
    """Return the threads that make backward passes for the thread of the steps.

    They call the device in each of its ranges `backward`, and nowhere else; a loader's threads call it at other times,
    or have ranges of their own.
    """
    steps, backward = ((ranges[(ranges.name == name) & (ranges.thread == main)]) for name in ("step", "backward"))
    passes = spans(backward)
    calls = calls[calls.begin.between(steps.begin.min(), steps.end.max())]
    found = set[int]()
    for thread in set(calls.thread.tolist()) - {main, *ranges.thread[ranges.pushed == 1].tolist()}:
        within = index_at(passes, calls.begin[calls.thread == thread].to_numpy())
        if set(within.tolist()) == set(range(len(passes))):
            found.add(thread)
    return found


def _computing(database: _Database, thread: int) -> np.ndarray:
    """Return when a thread did not wait for others."""
    calls = _matching(BLOCKING_CALLS, table(database.rows("OSRT_API", SYSTEM)))
    return gaps(spans(calls[calls.thread == thread]), -np.inf, np.inf)
