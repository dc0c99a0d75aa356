"""Summaries of a profiler's trace equal sets of integers, values computed by hand, and PyTorch's own sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dlscale.core.ranges import mark
from dlscale.extensions.profile.machine import StepTime
from dlscale.extensions.profile.section import _about
from dlscale.extensions.profile.torch_profiler import TorchProfiler, read
from dlscale.extensions.profile.trace import OUTSIDE, index_at, overlap, summarise, total, union

# ---- intervals: compared with the sets of integers that they cover -------------------------------------------------

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def intervals(pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, float).reshape(-1, 2)


def instants(x: np.ndarray) -> set[int]:
    return {instant for begin, end in x.astype(int).tolist() for instant in range(begin, end)}


@given(PAIRS)
def test_a_union_covers_the_same_in_disjoint_pieces(pairs: list[tuple[int, int]]) -> None:
    x = intervals(pairs)
    pieces = union(x)
    assert instants(pieces) == instants(x)
    assert (pieces[1:, 0] > pieces[:-1, 1]).all() and (pieces[:, 1] > pieces[:, 0]).all()
    assert total(x) == len(instants(x))


@given(PAIRS, PAIRS)
def test_an_overlap_is_the_share_that_both_cover(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b = intervals(one), intervals(other)
    mine, both = instants(a), instants(a) & instants(b)
    assert overlap(a, b) == (pytest.approx(len(both) / len(mine)) if mine else None)


@given(PAIRS, st.lists(st.floats(-1, 45)))
def test_the_interval_that_holds_a_time(pairs: list[tuple[int, int]], times: list[float]) -> None:
    x = union(intervals(pairs))
    for time, found in zip(times, index_at(x, np.array(times)), strict=True):
        holding = [i for i, (begin, end) in enumerate(x.tolist()) if begin <= time <= end]
        assert (found in holding) if holding else found == -1


# ---- traces of a GPU, written by hand ----------------------------------------------------------------------------

MAIN, ENGINE, LOADER = 1, 2, 3


def event(name: str, category: str, begin: float, end: float, thread: int = MAIN, **args: Any) -> dict[str, Any]:
    """Return a complete event in Kineto's format from times in microseconds."""
    shown = {"ph": "X", "cat": category, "name": name, "pid": 10, "tid": thread, "ts": begin, "dur": end - begin}
    return {**shown, "args": args}


def launch(number: int, at: float, thread: int, work: list[dict[str, Any]], name: str = "cudaLaunchKernel") -> Any:
    """Return a CUDA call and the device's work that the call launched."""
    for one in work:
        one["args"]["correlation"] = number
    return [event(name, "cuda_runtime", at, at + 2, thread, correlation=number), *work]


def kernel(name: str, begin: float, end: float, stream: int = 7) -> dict[str, Any]:
    return event(name, "kernel", begin, end, thread=stream, device=0, stream=stream)


def copy(kind: str, begin: float, end: float, size: int) -> dict[str, Any]:
    return event(f"Memcpy {kind}", "gpu_memcpy", begin, end, thread=13, device=0, stream=13, bytes=size)


def gpu_trace() -> list[dict[str, Any]]:
    """Return a trace of two steps, 0 to 100 and 100 to 200 µs on the host; the device finishes later."""
    events: list[dict[str, Any]] = []
    for step, t in enumerate((0, 100)):
        n = 10 * step
        events += [
            event("step", "user_annotation", t, t + 100),
            event("step", "gpu_user_annotation", t + 20, t + 140, thread=7),  # not a range of the host
            event("data", "user_annotation", t, t + 10),
            event("copy", "user_annotation", t + 2, t + 8, LOADER),
            event("forward", "user_annotation", t + 10, t + 40),
            event("backward", "user_annotation", t + 40, t + 80),
            event("optimizer", "user_annotation", t + 80, t + 100),
            event("aten::linear", "cpu_op", t + 10, t + 30),
            event("aten::addmm", "cpu_op", t + 12, t + 22),
            event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", t + 42, t + 60, ENGINE),
            event("aten::mm", "cpu_op", t + 44, t + 50, ENGINE),
            event("nccl:all_reduce", "user_annotation", t + 60, t + 64, ENGINE),
            *launch(n + 1, t + 3, LOADER, [copy("HtoD (Pageable -> Device)", t + 5, t + 15, 1000)], "cudaMemcpyAsync"),
            *launch(n + 2, t + 5, LOADER, [copy("HtoD (Pinned -> Device)", t + 15, t + 25, 3000)], "cudaMemcpyAsync"),
            # The loader's thread launches work outside its range `copy`, while the model computes. This work does not
            # belong to the model.
            *launch(n + 3, t + 20, LOADER, [kernel("decode", t + 25, t + 30, 13)]),
            *launch(n + 4, t + 14, MAIN, [kernel("gemm", t + 20, t + 50)]),
            *launch(n + 5, t + 46, ENGINE, [kernel("gemm", t + 50, t + 90)]),
            *launch(n + 6, t + 61, ENGINE, [kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", t + 70, t + 100, 20)]),
            # Both kernels run after the host has left the step.
            *launch(
                n + 7,
                t + 82,
                MAIN,
                [kernel("adam", t + 120, t + 122), kernel("adam", t + 122, t + 124)],
                "cudaGraphLaunch",
            ),
            event("aten::_local_scalar_dense", "cpu_op", t + 90, t + 99),
            event("cudaStreamSynchronize", "cuda_runtime", t + 92, t + 98),
            # The loader thread waits for the device in parallel with the steps; this wait must not count as a wait of
            # a step.
            event("cudaEventSynchronize", "cuda_runtime", t + 30, t + 90, LOADER),
            # Reading the optimiser's step counter on the host does not wait for the device.
            event("aten::_local_scalar_dense", "cpu_op", t + 84, t + 85),
        ]
    events += [
        event("cudaDeviceSynchronize", "cuda_runtime", 201, 214),  # outside all steps
        event("PyTorch Profiler (0)", "Trace", 0, 220),
        {"ph": "M", "name": "process_name", "pid": 10, "tid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 4, "cat": "ac2g", "name": "ac2g", "pid": 10, "tid": MAIN, "ts": 14},
    ]
    return events


US = 1e-6


def test_ranges_of_a_gpu() -> None:
    ranges = summarise(read(gpu_trace()), "torch")[0].ranges
    assert {name: time.seconds / US for name, time in ranges.items()} == pytest.approx(
        {"step": 100, "data": 10, "copy": 6, "forward": 30, "backward": 40, "optimizer": 20, "comm": 4}
    )
    assert {name: (time.device_seconds or 0) / US for name, time in ranges.items()} == pytest.approx(
        # Work launched in each range: `copy` has two copies of 10 µs; `forward` has the first product; `backward` has
        # the second product and the all-reduce.
        {"step": 129, "data": 0, "copy": 20, "forward": 30, "backward": 70, "optimizer": 4, "comm": 30}
    )
    assert all(time.std == pytest.approx(0, abs=1e-9) for time in ranges.values())


def test_activity_of_a_gpu() -> None:
    activity = summarise(read(gpu_trace()), "torch")[0].activity
    assert activity.launches == 7, "the launch of a graph must count once"
    assert (activity.syncs, activity.items, activity.sync_seconds) == (1, 1, pytest.approx(6 * US))
    assert (activity.copy_bytes, activity.pageable_bytes) == (4000, 1000)
    assert activity.copy_seconds == pytest.approx(20 * US)
    assert activity.copy_overlap == pytest.approx(5 / 20), "copies run from 5 to 25 µs, and a kernel from 20 µs on"
    # The device is busy from 5 to 100, 105 to 200 and 220 to 224 µs, of 0 to 224 µs.
    assert activity.device_busy == pytest.approx((95 + 95 + 4) / 224)
    idle = {name: seconds / US for name, seconds in activity.idle_seconds.items()}
    assert idle == pytest.approx({"data": 5, OUTSIDE: 10}) and sum(idle.values()) == pytest.approx((224 - 194) / 2)
    assert (activity.comm_seconds, activity.comm_overlap) == (pytest.approx(30 * US), pytest.approx(20 / 30))


def test_rows_of_a_gpu() -> None:
    _, rows = summarise(read(gpu_trace()), "torch", 3)
    assert {row.rank for row in rows} == {3}
    kernels = {row.name: (row.calls, row.seconds / US) for row in rows if row.kind == "kernel"}
    assert kernels == {
        "gemm": (2, pytest.approx(70)),
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": (1, pytest.approx(30)),
        "decode": (1, pytest.approx(5)),
        "adam": (2, pytest.approx(4)),
    }
    assert next(iter(kernels)) == "gemm", "the longest kernel must be first"
    own = {row.name: row.seconds / US for row in rows if row.kind == "operator"}
    assert own["aten::linear"] == pytest.approx(10) and own["aten::addmm"] == pytest.approx(10)
    assert own["autograd::engine::evaluate_function: AddmmBackward0"] == pytest.approx(12)
    assert {row.name: row.seconds / US for row in rows if row.kind == "copy"} == {
        "Memcpy HtoD (Pageable -> Device)": pytest.approx(10),
        "Memcpy HtoD (Pinned -> Device)": pytest.approx(10),
    }
    idle = {row.name: (row.calls, row.seconds / US) for row in rows if row.kind == "gap"}
    # The device is idle from 0 to 5 and 100 to 105 µs, and from 200 to 220 µs, after the host has left the last step.
    assert idle == {OUTSIDE: (0.5, pytest.approx(10)), "data": (1, pytest.approx(5))}
    (step,) = [row for row in rows if row.name == "step"]
    assert step.share == pytest.approx(100 / 112), "the device finishes both steps at 224 µs"


def test_steps_that_differ_have_a_spread() -> None:
    trace = [
        event("step", "user_annotation", 0, 10),
        event("step", "user_annotation", 20, 50),
        event("aten::mm", "cpu_op", 1, 3),
        event("aten::mm", "cpu_op", 21, 27),
        event("aten::mm", "cpu_op", 12, 18),
    ]
    tool, rows = summarise(read(trace), "torch")
    step, activity = tool.ranges["step"], tool.activity
    assert (step.seconds, step.std) == pytest.approx((20 * US, np.std([10, 30], ddof=1) * US))
    (mm,) = [row for row in rows if row.kind == "operator"]
    # A step lasts until the next step begins. The times are 2 + 6 and 6 µs, of 50 µs for both steps.
    assert (mm.calls, mm.seconds, mm.share) == (1.5, pytest.approx(7 * US), pytest.approx(7 / 25))
    assert mm.std == pytest.approx(np.std([8, 6], ddof=1) * US)
    assert (activity.launches, activity.device_busy, activity.comm_seconds) == (None, None, None), (
        "a trace without a device must not have figures for a device"
    )


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="contains no range with the name step"):
        summarise(read([event("forward", "user_annotation", 0, 10)]), "torch")


@st.composite
def random_traces(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the events and the device's work of a 100 µs step: kernels, copies and all-reduces on several streams."""
    trace, device = [event("step", "user_annotation", 0, 100)], []
    for number in range(1, draw(st.integers(2, 13))):
        begin, length = draw(st.integers(0, 150)), draw(st.integers(1, 40))
        stream = draw(st.integers(7, 10))
        work = draw(
            st.sampled_from(
                [
                    kernel("gemm", begin, begin + length, stream),
                    kernel("ncclDevKernel_AllReduce", begin, begin + length, stream),
                    copy("HtoD (Pinned -> Device)", begin, begin + length, 8),
                ]
            )
        )
        device.append(work)
        trace += launch(number, draw(st.integers(0, 100)), MAIN, [work])
    return trace, device


@given(random_traces())
def test_overlaps_are_those_of_every_microsecond(found: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    """Overlaps and busy time equal counts of microseconds."""
    trace, device = found
    activity = summarise(read(trace), "torch")[0].activity

    def when(*words: str) -> set[int]:
        mine = [one for one in device if any(word in one["name"] for word in words)]
        return {instant for one in mine for instant in range(one["ts"], one["ts"] + one["dur"])}

    end = max(100, *(one["ts"] + one["dur"] for one in device))
    assert activity.device_busy == pytest.approx(len(when("gemm", "nccl", "HtoD")) / end)
    for share, those, others in (
        (activity.copy_overlap, when("HtoD"), when("gemm", "nccl")),
        (activity.comm_overlap, when("nccl"), when("gemm")),
    ):
        assert share == (pytest.approx(len(those & others) / len(those)) if those else None)


# ---- a real trace, compared with PyTorch's own sums ----------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchProfiler, Any]:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(16, 32)
    tool = TorchProfiler(tmp_path_factory.mktemp("trace"), 0, torch.device("cpu"))
    with tool.attached():
        for _ in range(3):
            with mark("step"):
                with mark("forward"):
                    loss = model(x).square().mean()
                with mark("backward"):
                    loss.backward()
                loss.item()
    return tool, tool.found([0.1, 0.3, 0.2])


def test_operators_are_those_that_pytorch_counts(profiled: tuple[TorchProfiler, Any]) -> None:
    tool, (found, rows) = profiled
    assert tool._profile is not None
    counted = {one.key: one for one in tool._profile.key_averages() if not one.is_user_annotation}
    mine = {row.name: row for row in rows if row.kind == "operator"}
    assert set(mine) == set(counted) and len(mine) > 10
    for name, row in mine.items():
        assert row.calls * 3 == pytest.approx(counted[name].count), name
        assert row.seconds * 3 == pytest.approx(counted[name].self_cpu_time_total * US, abs=2 * US), name
    assert found.activity.items == 1, "reading the loss must count once per step"
    assert (found.steps, found.seconds_per_step) == (3, 0.2)


def test_ranges_are_those_that_pytorch_recorded(profiled: tuple[TorchProfiler, Any]) -> None:
    tool, (found, _) = profiled
    assert tool._profile is not None
    counted = {one.key: one for one in tool._profile.key_averages() if one.is_user_annotation}
    assert set(found.ranges) == {"step", "forward", "backward"} == set(counted)
    for name, time in found.ranges.items():
        assert time.seconds * 3 == pytest.approx(counted[name].cpu_time_total * US, abs=2 * US)
        assert time.device_seconds is None


def test_only_profiled_steps_are_described_as_profiled() -> None:
    """Without a profile, the parts of a step follow from the rates of loading, computing and training."""
    profiled = StepTime("torch", {"data": 1.0, "compute": 2.0}, 3.0, 8)
    estimated = StepTime("throughput", {"data": 1.0, "compute": 2.0, "unexplained": 0.0}, 3.0, 8)
    for steps, said in (([profiled], "profiler runs"), ([estimated], "computing is a step of computing alone")):
        text = _about(False, steps)
        assert said in text and ("measured while the profiler runs" in text) is (steps == [profiled])
