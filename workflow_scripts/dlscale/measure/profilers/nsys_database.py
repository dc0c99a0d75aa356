"""What an SQLite database of Nsight Systems says of the steps in it: time by range, the device's work, its idle times.

NVIDIA documents the schema in "SQLite Schema Reference" and the numbers of kinds in "SQLite Schema Event Values" of the
Nsight Systems Analysis Guide (https://docs.nvidia.com/nsight-systems/AnalysisGuide/index.html). Times there are
nanoseconds. Tables are made only when there is something in them, and columns come and go with versions: what is not
there is taken to be unknown.

An event belongs to the step in which it began, the device's work to the step in which the host gave it out. Device work
belongs to the ranges that were open on the thread that gave it out; or, where that thread has none of its own, as
autograd's has not, to those of the thread that makes the steps, which waits for it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlscale.core.errors import UserError
from dlscale.core.ranges import RANGES
from dlscale.core.records import Activity, ProfiledTool, RangeTime, TopEntry
from dlscale.measure.profilers.intervals import Intervals, gaps, index_at, intersection, total, union

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
#: CUPTI_ACTIVITY_KIND_SYNCHRONIZATION.syncType (ENUM_CUPTI_SYNC_TYPE) for which the host waits: for an event, a stream,
#: a context. For 2, a stream waits for an event.
WAITS = (1, 3, 4)
#: The names of the calls that wait, where that table is missing.
WAITING_CALLS = r"(?:Stream|Event|Device|Ctx|Context)Synchronize"
#: The functions of the C library (OSRT_API) in which a thread waits for another.
BLOCKING_CALLS = r"^(?:pthread_cond_(?:timed|clock)?wait|pthread_join|sem_(?:timed|clock)?wait|pthread_barrier_wait)"

#: Rows of `profile_summary.csv` of kernels, and of copies.
TOP = 20
#: What the host was in where it was in no range.
OUTSIDE = "outside of ranges"

Kind = Literal["range", "kernel", "copy", "gap"]
Times = NDArray[np.int64]
Lengths = NDArray[np.float64]


class Database:
    """The tables that are there, with what is asked of their columns."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        self._strings: dict[int, str] = {}
        if "StringIds" in self.tables:
            self._strings = dict(connection.execute("SELECT id, value FROM StringIds"))

    def numbers(self, table: str, *columns: str) -> pd.DataFrame:
        """Return columns of integers; -1 where a column or a value is missing, no row where the table is."""
        known = {row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")}
        asked = ", ".join(f'"{name}"' if name in known else "NULL" for name in columns)
        rows = self._connection.execute(f"SELECT {asked} FROM {table}").fetchall() if table in self.tables else []
        filled = [[-1 if value is None else int(value) for value in row] for row in rows]
        return pd.DataFrame(np.array(filled, np.int64).reshape(-1, len(columns)), columns=list(columns))

    def texts(self, table: str, *columns: str) -> list[str]:
        """Return the first of these columns that has a text in each row; a number is that of a text."""
        known = {row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")}
        asked = ", ".join(f'"{name}"' for name in columns if name in known)
        if not asked:
            return [""] * len(self.numbers(table, "start"))
        rows = self._connection.execute(f"SELECT {asked} FROM {table}")
        named = ((self._strings.get(v, "") if isinstance(v, int) else v for v in row if v is not None) for row in rows)
        return [next(filter(None, values), "") for values in named]


@dataclass(frozen=True)
class Trace:
    """The steps of one process, and what happened in them. Times are ns."""

    starts: Times  #: Of the steps.
    end: int  #: Of the last step, on the host.
    thread: int  #: That makes the steps.
    ranges: pd.DataFrame  #: start, end, name, thread, pushed, step.
    #: Of the device: start, end, kind (kernel, copy, memset, graph), name, bytes, copy, source, target, call (of the
    #: host's calls, those that gave out the same work alike; -1: unknown), launch (when), thread (which), step.
    work: pd.DataFrame
    waits: pd.DataFrame | None  #: Of the host for the device: start, end, step; None where CUDA was not traced.
    blocked: Intervals | None  #: When the thread waited for other threads; None where the C library was not traced.

    @property
    def window(self) -> tuple[int, int]:
        """From the first step until the last is done on host and device."""
        return int(self.starts[0]), max([self.end, *map(int, self.work.end.nlargest(1))])

    @property
    def times(self) -> Times:
        """Of each step, until the next begins; the device may still be at an earlier one, and the last waits for it."""
        return np.diff(np.r_[self.starts, self.window[1]])


def read(path: Path) -> Trace:
    """Read a database; what is none, or has no steps in it, is a `UserError`."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            return _trace(Database(connection), path)
    except (sqlite3.Error, ValueError, OverflowError) as error:
        raise UserError(f"{path}: not a database of Nsight Systems that can be read ({error})") from None


def _trace(database: Database, path: Path) -> Trace:
    ranges = database.numbers("NVTX_EVENTS", "start", "end", "eventType", "globalTid")
    ranges["name"] = database.texts("NVTX_EVENTS", "text", "textId")
    ranges = ranges[ranges.eventType.isin((PUSHED, STARTED)) & ranges.name.isin(RANGES) & (ranges.end >= ranges.start)]
    ranges = ranges.assign(thread=ranges.globalTid, pushed=ranges.eventType == PUSHED).sort_values("start")
    steps = ranges[ranges.name == "step"]
    if steps.empty:
        raise UserError(f"{path}: no step is in it: nsys did not see the NVTX ranges of the process")
    starts, end = steps.start.to_numpy(), int(steps.end.max())

    def stepped(rows: pd.DataFrame, times: str) -> pd.DataFrame:
        numbers = np.searchsorted(starts, rows[times], "right") - 1
        return rows.assign(step=numbers)[(numbers >= 0) & (rows[times].to_numpy() <= end)].reset_index(drop=True)

    calls = database.numbers("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "end", "globalTid", "correlationId")
    work = _work(database, calls)
    traced = "CUPTI_ACTIVITY_KIND_RUNTIME" in database.tables
    thread = int(steps.thread.iloc[0])
    return Trace(
        starts=starts,
        end=end,
        thread=thread,
        ranges=stepped(ranges, "start"),
        work=stepped(work, "launch"),
        waits=stepped(_waits(database, calls), "start") if traced else None,
        blocked=_blocked(database, thread) if "OSRT_API" in database.tables else None,
    )


def _work(database: Database, calls: pd.DataFrame) -> pd.DataFrame:
    """Return what the device did, and which call of the host gave it out."""
    columns = ("start", "end", "correlationId", "globalPid", "bytes", "copyKind", "srcKind", "dstKind")
    parts = []
    for kind, table in [("kernel", "KERNEL"), ("copy", "MEMCPY"), ("memset", "MEMSET"), ("graph", "GRAPH_TRACE")]:
        part = database.numbers(f"CUPTI_ACTIVITY_KIND_{table}", *columns)
        names = [kind] * len(part)
        if kind == "kernel":
            names = database.texts("CUPTI_ACTIVITY_KIND_KERNEL", "demangledName", "shortName", "name")
        parts.append(part.assign(kind=kind, name=names))
    work = pd.concat(parts, ignore_index=True)
    # A process's number is in the upper bits of its threads' numbers; the lower 24 are the thread's own.
    known = bool((work.globalPid >= 0).all())
    work = work.assign(process=work.globalPid // 2**24 if known else 0)
    calls = calls.assign(process=calls.globalTid // 2**24 if known else 0, call=np.arange(len(calls)))
    calls = calls[calls.correlationId > 0].sort_values("start").drop_duplicates(["process", "correlationId"])
    calls = calls.rename(columns={"start": "launch", "globalTid": "thread"})
    work = work.merge(calls[["process", "correlationId", "launch", "thread", "call"]], "left")
    work = work.assign(launch=work.launch.fillna(work.start), thread=work.thread.fillna(-1), call=work.call.fillna(-1))
    work = work.rename(columns={"copyKind": "copy", "srcKind": "source", "dstKind": "target"})
    return work.astype({"launch": np.int64, "thread": np.int64, "call": np.int64})


def _waits(database: Database, calls: pd.DataFrame) -> pd.DataFrame:
    """Return when the host waited for the device."""
    if "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION" in database.tables:
        waits = database.numbers("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "start", "end", "syncType")
        return waits[waits.syncType.isin(WAITS)]
    names = pd.Series(database.texts("CUPTI_ACTIVITY_KIND_RUNTIME", "nameId"), dtype=str)
    return calls[names.str.contains(WAITING_CALLS, regex=True).to_numpy(bool)]


def _blocked(database: Database, thread: int) -> Intervals:
    """Return when a thread waited for others."""
    calls = database.numbers("OSRT_API", "start", "end", "globalTid")
    names = pd.Series(database.texts("OSRT_API", "nameId"), dtype=str)
    return _union(calls[names.str.contains(BLOCKING_CALLS, regex=True).to_numpy(bool) & (calls.globalTid == thread)])


def summarize(path: Path, rank: int = 0) -> tuple[ProfiledTool, list[TopEntry]]:
    """Return what a database says of a rank's steps; a `UserError` where it says nothing."""
    trace = read(path)
    ranges, top = _ranges(trace, rank)
    if len(trace.work):
        top += [*_kernels(trace, rank), *_copies(trace, rank), *_idle(trace, rank)]
    tool = ProfiledTool(
        name="nsys",
        steps=len(trace.starts),
        seconds_per_step=float(np.median(trace.times)) / 1e9,
        ranges=ranges,
        activity=_activity(trace),
    )
    return tool, top


def _entry(trace: Trace, rank: int, kind: Kind, name: str, calls: int, times: Lengths, note: str = "") -> TopEntry:
    """Return a row of the summary; `calls` are those of all steps, `times` [steps] are ns."""
    return TopEntry(
        tool="nsys",
        rank=rank,
        kind=kind,
        name=name,
        calls=calls / len(trace.starts),
        seconds=float(times.mean()) / 1e9,
        std=_deviation(times),
        share=float(times.mean() / trace.times.mean()),
        note=note,
    )


def _ranges(trace: Trace, rank: int) -> tuple[dict[str, RangeTime], list[TopEntry]]:
    """Return each range's time on the host, in which it was open, and its work on the device."""
    ranges, top = dict[str, RangeTime](), list[TopEntry]()
    given = _given_out(trace)
    for name in RANGES:
        rows = trace.ranges[trace.ranges.name == name]
        if rows.empty:
            continue
        steps = range(len(trace.starts))
        open_ = np.array([total(_union(rows[rows.step == step])) for step in steps])
        work = trace.work[given[name]]
        device = float((work.end - work.start).sum()) / len(steps) / 1e9 if len(trace.work) else None
        ranges[name] = RangeTime(seconds=float(open_.mean()) / 1e9, std=_deviation(open_), device_seconds=device)
        note = "" if device is None else f"{1e3 * device:.4g} ms of work on the device"
        top.append(_entry(trace, rank, "range", name, len(rows), open_, note))
    return ranges, top


def _kernels(trace: Trace, rank: int) -> list[TopEntry]:
    kernels = trace.work[trace.work.kind.isin(("kernel", "graph"))]
    found = [
        _entry(trace, rank, "kernel", str(name), len(rows), _spent(trace, rows))
        for name, rows in kernels.groupby("name")
    ]
    return sorted(found, key=lambda row: -row.seconds)[:TOP]


def _copies(trace: Trace, rank: int) -> list[TopEntry]:
    found, kernels = [], _union(trace.work[trace.work.kind == "kernel"])
    for key, rows in trace.work[trace.work.kind == "copy"].groupby(["copy", "source", "target"]):
        copy, *places = (int(str(kind)) for kind in key)
        memories = [MEMORIES[place] for place in places if place in MEMORIES]
        name = COPIES.get(copy, COPIES[0]) + (f" ({' to '.join(memories)})" if memories else "")
        time = _union(rows)
        hidden = total(intersection(time, kernels)) / total(time) if total(time) else 0.0
        size = rows.bytes.sum() / len(trace.starts) / 1e6
        note = f"{size:.4g} MB a step, {100 * hidden:.0f} % of the time beside kernels"
        found.append(_entry(trace, rank, "copy", name, len(rows), _spent(trace, rows), note))
    return sorted(found, key=lambda row: -row.seconds)[:TOP]


def _spent(trace: Trace, rows: pd.DataFrame) -> Lengths:
    """Return the time of each step's rows, those that ran side by side added up."""
    times = np.zeros(len(trace.starts))
    np.add.at(times, rows.step.to_numpy(), (rows.end - rows.start).to_numpy(np.float64))
    return times


def _idle(trace: Trace, rank: int) -> list[TopEntry]:
    """Return the times in which the device did nothing, by the innermost range that the host was in."""
    idle, found = gaps(_union(trace.work), *trace.window), []
    for name, at in _innermost(trace).items():
        pieces = intersection(idle, at)
        if len(pieces):
            lengths, times = pieces[:, 1] - pieces[:, 0], np.zeros(len(trace.starts))
            np.add.at(times, np.searchsorted(trace.starts, pieces[:, 0], "right") - 1, lengths)
            note = f"longest {lengths.max() / 1e6:.4g} ms"
            found.append(_entry(trace, rank, "gap", name, len(pieces), times, note))
    return sorted(found, key=lambda row: -row.seconds)


def _innermost(trace: Trace) -> dict[str, Intervals]:
    """Return when the thread that makes the steps was in each range, and in none within that."""
    rows = trace.ranges[trace.ranges.pushed & (trace.ranges.thread == trace.thread)]
    # What lies within another range begins later, or ends earlier: of those that are open the last one counts.
    rows = rows.sort_values(["start", "end"], ascending=[True, False])
    points = np.unique(np.r_[trace.window, rows.start, rows.end])
    names = np.full(len(points), OUTSIDE, object)
    for start, end, name in zip(rows.start, rows.end, rows.name, strict=True):
        names[(points >= start) & (points < end)] = name
    pieces = np.stack([points[:-1], points[1:]], axis=1).astype(np.float64)
    return {name: union(pieces[names[:-1] == name]) for name in dict.fromkeys(names[:-1])}


def _union(rows: pd.DataFrame) -> Intervals:
    return union(rows[["start", "end"]].to_numpy(np.float64))


def _within(intervals: Intervals, times: Times) -> NDArray[np.bool_]:
    return np.asarray(index_at(intervals, times) >= 0)


def _deviation(times: Lengths) -> float:
    return float(times.std(ddof=1)) / 1e9 if len(times) > 1 else 0.0


def _given_out(trace: Trace) -> dict[str, NDArray[np.bool_]]:
    """Return for each range which of the device's work was given out within it; to a step belongs all of it."""
    launch, thread = trace.work.launch.to_numpy(np.int64), trace.work.thread.to_numpy(np.int64)
    own = np.zeros(len(launch), bool)  # whether the thread is in a range of its own
    for one in np.unique(thread):
        mine = thread == one
        own[mine] = _within(_union(trace.ranges[trace.ranges.pushed & (trace.ranges.thread == one)]), launch[mine])
    given = {}
    for name in RANGES:
        rows = trace.ranges[trace.ranges.name == name]
        inside = ~own & _within(_union(rows[rows.pushed & (rows.thread == trace.thread)]), launch)
        for one in np.unique(thread):
            inside |= (thread == one) & _within(_union(rows[rows.thread == one]), launch)
        given[name] = inside & (thread >= 0) if name != "step" else np.ones(len(launch), bool)
    return given


def _activity(trace: Trace) -> Activity:
    count = len(trace.starts)
    work, waits = trace.work, trace.waits
    if work.empty:
        sums = _union(trace.ranges[trace.ranges.name == "comm"])
        alone = None if trace.blocked is None else total(intersection(sums, trace.blocked))
        return Activity(
            comm_seconds=total(sums) / count / 1e9 if total(sums) else None,
            comm_overlap=1 - alone / total(sums) if total(sums) and alone is not None else None,
        )
    kernels = work[work.kind == "kernel"]
    nccl = kernels.name.str.startswith("nccl")
    sums, others = _union(kernels[nccl]), _union(kernels[~nccl])
    copies = work[(work.kind == "copy") & work["copy"].isin(TO_DEVICE)]
    copied = _union(copies)
    sources_known = bool((copies.source >= 0).all())
    window = trace.window
    return Activity(
        launches=work.call[work.call >= 0].nunique() / count,
        syncs=None if waits is None else len(waits) / count,
        sync_seconds=None if waits is None else float((waits.end - waits.start).sum()) / count / 1e9,
        device_busy=total(_union(work)) / (window[1] - window[0]),
        copy_bytes=float(copies.bytes.sum()) / count,
        pageable_bytes=float(copies.bytes[copies.source == PAGEABLE].sum()) / count if sources_known else None,
        copy_seconds=total(copied) / count / 1e9,
        copy_overlap=total(intersection(copied, _union(kernels))) / total(copied) if total(copied) else None,
        comm_seconds=total(sums) / count / 1e9 if nccl.any() else None,
        comm_overlap=total(intersection(sums, others)) / total(sums) if total(sums) else None,
    )
