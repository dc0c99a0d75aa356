"""Figures from Nsight Systems databases of all versions equal a count per nanosecond; damaged files are refused."""

from __future__ import annotations

import math
import sqlite3
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlscale.core.errors import UserError
from dlscale.core.ranges import RANGES
from dlscale.extensions.nsys.nsys import events
from dlscale.extensions.profile.trace import OUTSIDE, WAIT, summarise
from dlscale.measure.profilers import ProfiledTool, TopEntry
from tests.nsys_databases import VERSIONS, Recording


def summarize(path: Path, rank: int = 0) -> tuple[ProfiledTool, list[TopEntry]]:
    return summarise(events(path), "nsys", rank)


#: Two training steps of 100 ns on a GPU. Thread 0 launches the forward pass, thread 5 (autograd) the backward pass and
#: the all-reduce, whose kernels overlap.
TWO_STEPS = Recording(
    ranges=[
        *[(base, base + 100, "step", 0, True) for base in (1000, 1100)],
        *[(base + 2, base + 12, "data", 0, True) for base in (1000, 1100)],
        *[(base + 6, base + 10, "copy", 0, True) for base in (1000, 1100)],
        *[(base + 15, base + 40, "forward", 0, True) for base in (1000, 1100)],
        *[(base + 40, base + 80, "backward", 0, True) for base in (1000, 1100)],
        *[(base + 60, base + 65, "comm", 5, False) for base in (1000, 1100)],
        *[(base + 80, base + 95, "optimizer", 0, True) for base in (1000, 1100)],
    ],
    calls=[
        *[(base + 7, base + 8, 0, base + 1, "cudaMemcpyAsync_v3020") for base in (1000, 1100)],
        *[(base + 20, base + 21, 0, base + 2, "cudaLaunchKernel_v7000") for base in (1000, 1100)],
        *[(base + 45, base + 46, 5, base + 3, "cudaLaunchKernel_v7000") for base in (1000, 1100)],
        *[(base + 61, base + 62, 5, base + 4, "cudaLaunchKernelExC_v11060") for base in (1000, 1100)],
        *[(base + 82, base + 83, 0, base + 5, "cudaLaunchKernel_v7000") for base in (1000, 1100)],
    ],
    copies=[(base + 10, base + 20, base + 1, 4096, 1, source, 2) for base, source in ((1000, 0), (1100, 1))],
    kernels=[
        *[(base + 25, base + 55, base + 2, "convolution<float>(int)") for base in (1000, 1100)],
        *[(base + 60, base + 90, base + 3, "gradient<float>(int)") for base in (1000, 1100)],
        *[(base + 80, base + 95, base + 4, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)") for base in (1000, 1100)],
        *[(base + 95, base + 105, base + 5, "update<float>(int)") for base in (1000, 1100)],
    ],
    waits=[(1050, 1058, 3, 0), (1051, 1052, 2, 0), (1210, 1220, 4, 0)],
)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_step_as_drawn(version: str, tmp_path: Path) -> None:
    """The figures agree with figures from a hand-drawn timeline."""
    tool, top = summarize(TWO_STEPS.write(tmp_path / "nsys.sqlite", version), 3)
    ns = 1e-9
    # the steps last from 1000 to 1100 ns and from 1100 to 1205 ns
    assert tool.steps == 2 and tool.seconds_per_step == pytest.approx(102.5 * ns)
    assert {name: round(one.seconds / ns) for name, one in tool.ranges.items()} == {
        **{"step": 100, "data": 10, "copy": 4, "forward": 25, "backward": 40, "optimizer": 15, "comm": 5}
    }
    # Within the backward pass of thread 0, autograd's thread launches 30 ns of gradients and 15 ns of all-reduces.
    assert {name: round((one.device_seconds or 0) / ns) for name, one in tool.ranges.items()} == {
        **{"step": 95, "data": 10, "copy": 10, "forward": 30, "backward": 45, "optimizer": 10, "comm": 15}
    }
    seen = tool.activity
    assert (seen.launches, seen.syncs, seen.items) == (5, 0.5, None)
    assert seen.sync_seconds == pytest.approx(4 * ns)  # 8 ns in one of two steps; later waits do not count
    # the device is busy at 10-20, 25-55 and 60-105 ns of each step; both steps together last from 1000 to 1205 ns
    assert seen.device_busy == pytest.approx(2 * (10 + 30 + 45) / 205)
    assert (seen.copy_bytes, seen.pageable_bytes) == (4096, 2048)
    assert seen.copy_seconds == pytest.approx(10 * ns) and seen.copy_overlap == 0
    assert seen.comm_seconds == pytest.approx(15 * ns) and seen.comm_overlap == pytest.approx(10 / 15)
    assert {row.rank for row in top} == {3} and {row.tool for row in top} == {"nsys"}
    kernels = [row for row in top if row.kind == "kernel"]
    assert [row.name.split("(")[0] for row in kernels[:2]] in (
        ["convolution<float>", "gradient<float>"],
        ["gradient<float>", "convolution<float>"],
    )
    assert kernels[0].seconds == pytest.approx(30 * ns) and kernels[0].share == pytest.approx(30 / 102.5)
    copies = {row.name: row for row in top if row.kind == "copy"}
    assert set(copies) == {"Host-to-Device (pageable to device)", "Host-to-Device (pinned to device)"}
    assert copies["Host-to-Device (pinned to device)"].calls == 0.5
    idle = {row.name: row.seconds / ns for row in top if row.kind == "gap"}
    # The device is idle at 0-10 ns of the first step, and at 20-25 and 55-60 ns of both steps. The second step begins
    # at 1100 ns; until 1105 ns, the device still computes the first step.
    assert idle == pytest.approx(
        {"step": (2 + 0) / 2, "data": (4 + 1) / 2, "copy": (4 + 4) / 2, "forward": 5, "backward": 5}
    )
    assert {name: 1e9 * each for name, each in seen.idle_seconds.items()} == pytest.approx(idle)
    assert sum(idle.values()) * 2 == pytest.approx(205 * (1 - seen.device_busy))


def test_calls_that_wait() -> None:
    for name in ("cudaStreamSynchronize_v3020", "cuCtxSynchronize", "cudaDeviceSynchronize", "cuEventSynchronize"):
        assert WAIT.match(name)
    assert not any(WAIT.match(name) for name in ("cudaStreamWaitEvent_v3020", "cudaMemcpyAsync_v3020"))
    assert WAIT.match("cudaMemcpy_v3020")


# ---- invalid reports ---------------------------------------------------------------------------------


def test_no_database_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nosuch"):
        summarize(tmp_path / "nosuch.sqlite")
    for name, content in {"empty": b"", "text": b"no database, but long enough to be one" * 9}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            summarize(tmp_path / name)


def test_a_cut_database_is_one_message(tmp_path: Path) -> None:
    many = Recording(ranges=[(10 * n, 10 * n + 9, "step", 0, True) for n in range(3000)])
    whole = many.write(tmp_path / "nsys.sqlite").read_bytes()
    for size in (len(whole) // 2, len(whole) - 4096):
        (tmp_path / "cut.sqlite").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"cut\.sqlite"):
            summarize(tmp_path / "cut.sqlite")


def test_a_report_without_steps_is_refused(tmp_path: Path) -> None:
    """A report without steps is refused, for example if nsys cannot see the process's `nvtx`."""
    path = Recording(calls=[(1, 2, 0, 1, "cudaLaunchKernel")]).write(tmp_path / "nsys.sqlite")
    with pytest.raises(ValueError, match="contains no range with the name step"):
        summarize(path)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE NVTX_EVENTS")
    with pytest.raises(ValueError, match="contains no range with the name step"):
        summarize(path)


# ---- compared with a count of every nanosecond --------------------------------------------------------


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Return consecutive steps with ranges; the device and other threads have arbitrary activity."""
    recording = Recording()
    now = draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 3))):
        cuts = [0, *sorted(draw(st.sets(st.integers(1, 30), min_size=4, max_size=8)))]
        times = [now + cut for cut in cuts]
        recording.ranges.append((times[0], times[-1] + 2, "step", 0, True))
        inner = draw(st.permutations(["data", "forward", "backward", "optimizer"]))
        for name, start, end in zip(inner, times[1:], times[2:], strict=False):
            recording.ranges.append((start, end, name, 0, True))
            if name == "data" and end - start > 2:
                recording.ranges.append((start + 1, end - 1, "copy", 0, True))
        now = times[-1] + 2 + draw(st.integers(0, 3))
    time = st.integers(0, now + 8)

    def spans(most: int, *more: st.SearchStrategy[Any]) -> list[tuple[Any, ...]]:
        drawn = draw(st.lists(st.tuples(time, st.integers(0, 12), *more), max_size=most))
        return [(start, start + long, *rest) for start, long, *rest in drawn]

    recording.ranges += [(*span, "comm", thread, False) for *span, thread in spans(3, st.sampled_from([5, 6]))]
    recording.ranges += [(*span, "copy", 7, True) for span in spans(2)]
    recording.calls = [
        (start, end, thread, number, "cudaLaunchKernel")
        for number, (start, end, thread) in enumerate(spans(8, st.sampled_from([0, 5, 7])), 1)
    ]
    number = st.integers(0, 8)  # number of the call that launched the work; 0: no call
    recording.kernels = spans(8, number, st.sampled_from(["a", "b", "ncclDevKernel_AllReduce"]))
    kinds = st.tuples(st.integers(1, 1000), st.sampled_from([1, 2, 8]), st.sampled_from([0, 1, 2]), st.just(2))
    recording.copies = [(start, end, call, *kind) for start, end, call, kind in spans(5, number, kinds)]
    recording.memsets = spans(2, number)
    recording.waits = spans(4, st.sampled_from([1, 2, 3, 4]), st.sampled_from([0, 5, 6, 7]))
    return recording


class Truth:
    """Reference figures, counted for each nanosecond and each event."""

    def __init__(self, recording: Recording) -> None:
        self.r = recording
        self.steps = [r for r in recording.ranges if r[2] == "step"]
        self.n = len(self.steps)
        self.engine = self.backward_threads()
        calls = {number: (start, thread) for start, _, thread, number, _ in recording.calls}
        works = [(s, e, c, "kernel", name, None) for s, e, c, name in recording.kernels]
        works += [(s, e, c, "copy", "", rest) for s, e, c, *rest in recording.copies]
        works += [(s, e, c, "memset", "", None) for s, e, c in recording.memsets]
        self.work = []  # columns: start, end, call, kind, name, rest, launch, thread, step
        for work in works:
            launch, thread = calls.get(work[2], (work[0], None))
            if (step := self.step(launch)) is not None:
                self.work.append((*work, launch, thread, step))
        self.first, self.last = self.steps[0][0], max([self.steps[-1][1], *(work[1] for work in self.work)])
        self.instants = range(self.first, self.last)

    def step(self, time: int) -> int | None:
        """Return the number of the step in which an event at `time` began."""
        begun = [number for number, step in enumerate(self.steps) if step[0] <= time]
        return begun[-1] if begun and time <= self.steps[-1][1] else None

    def backward_threads(self) -> set[int]:
        """Return the threads without ranges that use the device in each backward pass of thread 0, and only there."""
        calls = [(start, thread) for start, _, thread, *_ in self.r.calls]
        calls += [(start, thread) for start, _, _, thread in self.r.waits]
        calls = [(start, thread) for start, thread in calls if self.step(start) is not None]
        passes = [row for row in self.r.ranges if row[2] == "backward"]
        found = {thread for _, thread in calls} - {
            row[3] for row in self.r.ranges if row[4] and self.step(row[0]) is not None
        }
        for start, thread in calls:
            if not any(row[0] <= start <= row[1] for row in passes):
                found.discard(thread)
        for row in passes:
            found &= {thread for start, thread in calls if row[0] <= start <= row[1]}
        return found

    def covered(self, spans: list[Any]) -> set[int]:
        return {time for span in spans for time in range(span[0], span[1])}

    def open(self, name: str) -> float:
        """Return the mean time per step in which a range was open, ns."""
        rows = [row for row in self.r.ranges if row[2] == name]
        return sum(len(self.covered([r for r in rows if self.step(r[0]) == n])) for n in range(self.n)) / self.n

    def inside(self, name: str, launch: int, thread: int | None) -> bool:
        if name == "step":
            return True
        if thread is None:
            return False

        def at(row: Any, thread: int) -> bool:
            # A range outside all steps does not count, and an empty range contains no work.
            return row[3] == thread and row[0] <= launch <= row[1] and row[0] < row[1] and self.step(row[0]) is not None

        named = [row for row in self.r.ranges if row[2] == name]
        of_steps = thread in self.engine and any(at(row, 0) for row in named if row[4])
        return any(at(row, thread) for row in named) or of_steps

    def device(self, name: str) -> float:
        return sum(work[1] - work[0] for work in self.work if self.inside(name, work[6], work[7])) / self.n

    def innermost(self, time: int) -> str:
        rows = [row for row in self.r.ranges if row[3] == 0 and row[4] and row[0] <= time < row[1]]
        return max(rows, key=lambda row: (row[0], -row[1]))[2] if rows else OUTSIDE

    def idle(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        busy = self.covered(self.work)
        for time in self.instants:
            if time not in busy:
                found[self.innermost(time)] += 1 / self.n
        return found

    def activity(self) -> dict[str, float | None]:
        kernels = [work for work in self.work if work[3] == "kernel"]
        if not self.work:
            comm = [r for r in self.r.ranges if r[2] == "comm" and self.step(r[0]) is not None]
            sums = self.covered(comm)
            return {"comm_seconds": len(sums) / self.n if sums else None}
        copies = [work for work in self.work if work[3] == "copy" and work[5][1] == 1]
        copied, computed = self.covered(copies), self.covered(kernels)
        sums = self.covered([work for work in kernels if work[4].startswith("nccl")])
        others = self.covered([work for work in kernels if not work[4].startswith("nccl")])
        mine = {0, *self.engine}
        waits = [row for row in self.r.waits if row[2] != 2 and row[3] in mine and self.step(row[0]) is not None]
        return {
            "launches": len({work[2] for work in self.work if work[7] is not None}) / self.n,
            "syncs": len(waits) / self.n,
            "sync_seconds": sum(row[1] - row[0] for row in waits) / self.n,
            "device_busy": len(self.covered(self.work)) / (self.last - self.first),
            "copy_bytes": sum(work[5][0] for work in copies) / self.n,
            "pageable_bytes": sum(work[5][0] for work in copies if work[5][2] == 0) / self.n,
            "copy_seconds": len(copied) / self.n,
            "copy_overlap": len(copied & computed) / len(copied) if copied else None,
            "comm_seconds": len(sums) / self.n if sums else None,
            "comm_overlap": len(sums & others) / len(sums) if sums else None,
        }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(recording=recordings())
def test_every_figure_is_a_count(recording: Recording) -> None:
    truth = Truth(recording)
    with tempfile.TemporaryDirectory() as folder:
        tool, top = summarize(recording.write(Path(folder) / "nsys.sqlite"))
    assert tool.steps == truth.n
    if truth.work:
        assert (tool.seconds_per_step or 0) * 1e9 == pytest.approx((truth.last - truth.first) / truth.n)
    for name in RANGES:
        if name not in tool.ranges:
            assert truth.open(name) == 0
            continue
        assert tool.ranges[name].seconds * 1e9 == pytest.approx(truth.open(name)), name
        if truth.work:
            assert (tool.ranges[name].device_seconds or 0) * 1e9 == pytest.approx(truth.device(name)), name
    expected = truth.activity()
    for name, value in tool.activity.model_dump(exclude={"idle_seconds"}).items():
        known = expected.get(name)
        if known is None or value is None:
            assert value == known, name
        else:
            assert value * (1e9 if name.endswith("_seconds") else 1) == pytest.approx(known), name
    gaps = {row.name: row.seconds * 1e9 for row in top if row.kind == "gap"}
    assert gaps == pytest.approx(truth.idle() if truth.work else {})
    assert {name: 1e9 * each for name, each in tool.activity.idle_seconds.items()} == pytest.approx(gaps)
    for kind, kinds in {"kernel": ["kernel"], "copy": ["copy", "memset"]}.items():
        spent = sum(work[1] - work[0] for work in truth.work if work[3] in kinds) / truth.n
        assert math.fsum(row.seconds for row in top if row.kind == kind) * 1e9 == pytest.approx(spent)
