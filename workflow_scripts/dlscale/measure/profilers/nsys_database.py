"""Databases of Nsight Systems, as `nsys export --type sqlite` makes them.

NVIDIA documents the schema in "SQLite Schema Reference" and the numbers of kinds in "SQLite Schema Event Values" of the
Nsight Systems Analysis Guide (https://docs.nvidia.com/nsight-systems/AnalysisGuide/index.html). Times there are
nanoseconds. Tables are made only when there is something in them, and columns come and go with versions: what is not
there is taken to be unknown.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from urllib.parse import quote

import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.ranges import RANGES
from dlscale.measure.profilers.intervals import Intervals, gaps, index_at
from dlscale.measure.profilers.records import ProfiledTool, TopEntry
from dlscale.measure.profilers.trace import UNKNOWN, WAIT, Chosen, Events, Ranges, Trace, Work, summarise

#: NVTX_EVENTS.eventType of ranges: pushed and popped by one thread; started, and ended perhaps by another.
PUSHED, STARTED = 59, 60
#: CUPTI_ACTIVITY_KIND_MEMCPY.copyKind (ENUM_CUDA_MEMCPY_OPER).
COPIES = {
    **{0: "Unknown", 1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 4: "Array-to-Host"},
    **{5: "Array-to-Array", 6: "Array-to-Device", 7: "Device-to-Array", 8: "Device-to-Device", 9: "Host-to-Host"},
    **{10: "Peer-to-Peer", 11: "Unified Host-to-Device", 12: "Unified Device-to-Host", 13: "Unified Device-to-Device"},
}
TO_DEVICE = (1, 3, 11)
#: Its srcKind and dstKind (ENUM_CUDA_MEM_KIND).
MEMORIES = {
    **{0: "pageable", 1: "pinned", 2: "device", 3: "array", 4: "managed", 5: "device static", 6: "managed static"},
    **{7: "unknown"},
}
PAGEABLE = 0
#: The functions of the C library (OSRT_API) in which a thread waits for another.
BLOCKING_CALLS = re.compile(r"pthread_cond_(timed|clock)?wait|pthread_join|sem_(timed|clock)?wait|pthread_barrier_wait")


class Database:
    """The tables that are there, with what is asked of their columns."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        self._strings: dict[int, str] = {}
        if "StringIds" in self.tables:
            self._strings = dict(connection.execute("SELECT id, value FROM StringIds"))

    def numbers(self, table: str, *columns: str) -> list[list[int]]:
        """Return columns of integers by row; -1 where a column or a value is missing, no row where the table is."""
        known = {row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")}
        asked = ", ".join(f'"{name}"' if name in known else "NULL" for name in columns)
        rows = self._connection.execute(f"SELECT {asked} FROM {table}") if table in self.tables else []
        return [[UNKNOWN if value is None else int(value) for value in row] for row in rows]

    def texts(self, table: str, *columns: str) -> list[str]:
        """Return the first of these columns that has a text in each row; a number is that of a text."""
        known = {row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")}
        asked = ", ".join(f'"{name}"' for name in columns if name in known)
        if not asked:
            return [""] * len(self.numbers(table, "start"))
        rows = self._connection.execute(f"SELECT {asked} FROM {table}")
        named = ((self._strings.get(v, "") if isinstance(v, int) else v for v in row if v is not None) for row in rows)
        return [next(filter(None, values), "") for values in named]


def read(path: Path) -> Trace:
    """Read a database; what is none, or has no steps in it, is a `UserError`."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            return _trace(Database(connection), path)
    except (sqlite3.Error, ValueError, OverflowError) as error:
        raise UserError(f"{path}: not a database of Nsight Systems that can be read ({error})") from None


def summarize(path: Path, rank: int = 0) -> tuple[ProfiledTool, list[TopEntry]]:
    """Return what a database says of a rank's steps; a `UserError` where it says nothing."""
    return summarise(read(path), "nsys", rank)


def _trace(database: Database, path: Path) -> Trace:
    found = []
    names = database.texts("NVTX_EVENTS", "text", "textId")
    for row, name in zip(database.numbers("NVTX_EVENTS", "start", "end", "globalTid", "eventType"), names, strict=True):
        start, end, _, kind = row
        if kind in (PUSHED, STARTED) and name in RANGES and end >= start:
            found.append((*row[:3], name, kind == PUSHED))
    ranges = Ranges.of(found)
    steps = ranges[ranges.name == "step"]
    if not len(steps):
        raise UserError(f"{path}: no step is in it: nsys did not see the NVTX ranges of the process")
    main, traced = int(steps.thread[steps.begin.argmin()]), "CUPTI_ACTIVITY_KIND_RUNTIME" in database.tables
    calls = _events(database, "CUPTI_ACTIVITY_KIND_RUNTIME")
    return Trace(
        ranges=ranges,
        work=_work(database),
        threads=_autograd(ranges, calls, main),
        waits=calls[_are(WAIT, calls)] if traced else None,
        computing=_computing(database, main) if "OSRT_API" in database.tables else None,
    )


def _events(database: Database, table: str) -> Events:
    """Return calls of functions."""
    rows = database.numbers(table, "start", "end", "globalTid")
    return Events.of((*row, name) for row, name in zip(rows, database.texts(table, "nameId"), strict=True))


def _are(names: re.Pattern[str], events: Events) -> Chosen:
    return np.array([bool(names.match(name)) for name in events.name], bool)


def _work(database: Database) -> Work:
    """Return what the device did, and which call of the host gave it out."""
    found = list[tuple[str, str, list[int]]]()
    columns = ("start", "end", "correlationId", "globalPid", "bytes", "copyKind", "srcKind", "dstKind")
    for kind, table in [("kernel", "KERNEL"), ("copy", "MEMCPY"), ("memset", "MEMSET"), ("graph", "GRAPH_TRACE")]:
        table = f"CUPTI_ACTIVITY_KIND_{table}"
        rows = database.numbers(table, *columns)
        names = [kind if kind == "graph" else kind.capitalize()] * len(rows)
        if kind == "kernel":
            names = database.texts(table, "demangledName", "shortName", "name")
        elif kind == "copy":
            names = [_copy(*row[5:]) for row in rows]
        found += [(kind, name, row) for name, row in zip(names, rows, strict=True)]
    # A process's number is in the upper bits of its threads' numbers; the lower 24 are the thread's own.
    known = all(row[3] != UNKNOWN for _, _, row in found)
    calls = dict[tuple[int, int], tuple[int, int, int]]()
    rows = database.numbers("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "globalTid", "correlationId")
    for number, (start, thread, correlation) in enumerate(sorted(rows)):
        if correlation > 0:
            calls.setdefault((thread >> 24 if known else 0, correlation), (start, thread, number))
    work = []
    for kind, name, (start, end, correlation, process, size, copy, source, _) in found:
        key = process >> 24 if known else 0, correlation
        launch, thread, call = calls.get(key, (start, UNKNOWN, UNKNOWN))
        pageable = UNKNOWN if source == UNKNOWN else source == PAGEABLE
        to_device = kind == "copy" and copy in TO_DEVICE
        work.append((start, end, thread, name, kind, launch, call, max(size, 0), to_device, pageable))
    return Work.of(work)


def _copy(kind: int, *places: int) -> str:
    memories = [MEMORIES[place] for place in places if place in MEMORIES]
    return COPIES.get(kind, COPIES[0]) + (f" ({' to '.join(memories)})" if memories else "")


def _autograd(ranges: Ranges, calls: Events, main: int) -> set[int]:
    """Return the threads that make backward passes for the thread of the steps.

    They call the device in each of its ranges `backward`, and nowhere else; a loader's threads call it at other times,
    or have ranges of their own.
    """
    steps, backward = ((ranges[(ranges.name == name) & (ranges.thread == main)]) for name in ("step", "backward"))
    passes = backward.spans
    calls = calls[(calls.begin >= steps.begin.min()) & (calls.begin <= steps.end.max())]
    found = set[int]()
    for thread in set(calls.thread.tolist()) - {main, UNKNOWN, *ranges.thread[ranges.pushed == 1].tolist()}:
        within = index_at(passes, calls.begin[calls.thread == thread])
        if set(within.tolist()) == set(range(len(passes))):
            found.add(thread)
    return found


def _computing(database: Database, thread: int) -> Intervals:
    """Return when a thread did not wait for others."""
    calls = _events(database, "OSRT_API")
    return gaps(calls[_are(BLOCKING_CALLS, calls) & (calls.thread == thread)].spans, -np.inf, np.inf)
