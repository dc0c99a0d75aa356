"""The verdict: each cause is named from the figures that show it, and silent without; dlscale explain prints it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlscale.core.records import (
    Activity,
    Device,
    Peaks,
    Profile,
    ProfiledTool,
    SampleWork,
    Throughput,
    Trials,
    Usage,
)
from dlscale.core.telemetry import Summary
from dlscale.report import verdict as module
from dlscale.report.verdict import CAUSES, Evidence, verdict
from tests.conftest import stage

#: A clean run: large operators on a GPU, loading twice as fast as computing.
SETTINGS: dict[str, Any] = {
    "loader": {"kind": "torch", "workers": 2},
    "precision": "fp32",
    "compile": {"mode": "none"},
    "optimizer": {"kind": "adam", "fused": False},
    "cuda_graph": False,
}
WORK = SampleWork(forward_flops=1e9, backward_flops=2e9, bytes=1e7, operators=100, source="formula")
PEAKS = Peaks(dtype="float32", flops=1e12, bytes_per_second=1e11, operator_seconds=5e-6)


def usage(own: float = 1.0, machine: float | None = None, read: int = 0, cores: int = 4) -> Usage:
    """Of ten seconds: cores that the run, and all programs, kept busy."""
    busy = own if machine is None else machine
    return Usage(seconds=10.0, cores=cores, cpu_seconds=10 * own, machine_cpu_seconds=10 * busy, read_bytes=10 * read)


def trials(rate: float, used: Usage | None = None, ranks: tuple[float, ...] = ()) -> Trials:
    return Trials(mean=rate, usage=used, rank_throughput=list(ranks))


def measured(
    io: float = 200.0, synthetic: float = 100.0, full: float = 99.0, used: Usage | None = None, **more: Any
) -> Throughput:
    return Throughput(
        device=Device(kind=more.pop("device", "cuda")),
        batch_size=10,
        io=trials(io, used),
        synthetic=trials(synthetic, used),
        full=trials(full, used),
        **{"work": WORK, "peaks": PEAKS, **more},
    )


def profiled(**activity: float) -> Profile:
    tool = ProfiledTool(name="torch", activity=Activity(**activity))
    return Profile(device=Device(kind="cuda"), seconds_per_step=[0.1, 0.1, 0.1], tools=[tool])


def causes(throughput: Throughput | None, profile: Profile | None = None, **settings: Any) -> list[str]:
    return [each.cause for each in verdict(Evidence({**SETTINGS, **settings}, throughput, profile)).findings]


WAITS, BUSY, FULL_UP = usage(0.1, read=10**6), usage(1.9), usage(3.9)
FOUR = {"loader": {"kind": "torch", "workers": 4}}
CASES: dict[str, tuple[Throughput, Profile | None, dict[str, Any]]] = {
    "storage": (measured(20, full=19, used=WAITS), None, {}),
    "workers": (measured(20, full=19, used=BUSY), None, {}),
    "loader": (measured(20, full=19, used=FULL_UP), None, FOUR),
    "overlap": (measured(110, full=52), None, {"loader": {"kind": "torch", "workers": 0}}),
    "straggler": (measured(nranks=4, alone=trials(100, ranks=(30, 30, 20, 30))), None, {}),
    "communication": (measured(nranks=4, alone=trials(150, ranks=(37, 37, 38, 38))), None, {}),
    "launches": (measured(), profiled(device_busy=0.4, launches=900), {}),
    "sync": (measured(), profiled(items=1, syncs=2, sync_seconds=0.03, device_busy=0.5), {}),
    "memory": (measured(work=WORK.model_copy(update={"bytes": 6e8})), None, {}),
    "copies": (measured(), profiled(copy_bytes=1e8, pageable_bytes=1e8, copy_seconds=0.02, device_busy=0.9), {}),
    "neighbour": (measured(used=usage(1.0, 2.0)), None, {}),
    "throttled": (measured(), None, {}),
}
HELD = Summary(seconds=10, throttled_seconds=3, throttle_reasons={"power": 3.0})


def test_every_cause_has_a_case() -> None:
    assert set(CASES) == set(CAUSES)


@pytest.mark.parametrize("cause", CASES)
def test_a_cause_is_named_first_and_alone(cause: str) -> None:
    throughput, profile, settings = CASES[cause]
    held = HELD if cause == "throttled" else None
    found = verdict(Evidence({**SETTINGS, **settings}, throughput, profile, held)).findings
    assert [each.cause for each in found] == [cause]
    assert found[0].share >= 0.1 and found[0].why.endswith(".") and found[0].todo.endswith(".")


def test_a_clean_run_has_no_findings() -> None:
    busy = profiled(
        device_busy=0.97, launches=50, items=0, syncs=0.2, sync_seconds=0.001, copy_bytes=1e6, pageable_bytes=0
    )
    assert causes(measured(used=usage(1.5)), busy) == []
    assert causes(measured()) == causes(None) == causes(Throughput()) == []


@pytest.mark.parametrize(
    ("throughput", "profile"),
    [
        pytest.param(measured(200, used=WAITS), None, id="storage that is waited for, and fast enough"),
        pytest.param(measured(nranks=2, alone=trials(100, ranks=(50, 46))), None, id="ranks that differ a little"),
        pytest.param(measured(nranks=2, alone=trials(104, ranks=(52, 52))), None, id="communication that is hidden"),
        pytest.param(measured(work=WORK.model_copy(update={"bytes": 2e8})), None, id="memory at a fifth of its rate"),
        pytest.param(measured(used=usage(1.0, 1.2)), None, id="a neighbour that does little"),
        pytest.param(measured(), profiled(copy_bytes=1e8, pageable_bytes=1e3, copy_seconds=0.02), id="pinned copies"),
        pytest.param(measured(20, full=19), None, id="loading, of which nothing else is known"),
        pytest.param(
            measured(),
            profiled(items=1, syncs=1, sync_seconds=0.09, device_busy=0.98),
            id="a wait in which the device is busy: a loader that keeps pace, a number read of a long step",
        ),
    ],
)
def test_what_costs_little_is_not_told(throughput: Throughput, profile: Profile | None) -> None:
    assert causes(throughput, profile) == []


def test_a_short_wait_does_not_explain_an_idle_device() -> None:
    """One number is read of a step of tiny kernels: it costs less than they do."""
    assert causes(measured(), profiled(items=1, syncs=1, sync_seconds=0.001, device_busy=0.2, launches=900)) == [
        "launches"
    ]


def test_a_processors_operators_count_as_a_devices_launches() -> None:
    small = WORK.model_copy(update={"forward_flops": 1e6, "backward_flops": 2e6, "operators": 10_000.0})
    assert causes(measured(device="cpu", work=small)) == ["launches"]
    # Of code that is compiled the operators are not known.
    assert causes(measured(device="cpu", work=small), compile={"mode": "default"}) == []


def test_a_neighbour_is_told_before_all_else() -> None:
    """It makes every other figure uncertain."""
    found = causes(measured(20, full=19, used=usage(1.9, 3.9)))
    assert found[0] == "neighbour"


def test_what_to_try_next_is_what_the_run_has_not() -> None:
    plain = verdict(Evidence(SETTINGS, measured()))
    assert plain.todo.startswith(
        "precision: bf16, compile: {mode: default}, optimizer: {fused: true}, cuda_graph: true"
    )
    top = {"precision": "bf16", "compile": {"mode": "default"}, "optimizer": {"fused": True}, "cuda_graph": True}
    assert verdict(Evidence({**SETTINGS, **top}, measured())).todo.startswith("All rungs are taken")
    loading = verdict(Evidence(SETTINGS, measured(20, full=19)))
    assert loading.todo == "loader: {kind: direct} loads with far less work."


def test_the_limit_is_the_lower_roof() -> None:
    """The roofs over 3e9 FLOP and 1e7 bytes: 1e12 / 3e9 = 333 and 1e11 / 1e7 = 10,000 samples/s."""
    assert "FULL reaches 30 %" in module.limit(Evidence(SETTINGS, measured())).replace("\N{NO-BREAK SPACE}", " ")
    assert "arithmetic: at most 333 samples/s" in module.limit(Evidence(SETTINGS, measured()))
    moving = measured(work=WORK.model_copy(update={"bytes": 1e9}))
    assert "memory: at most 100 samples/s" in module.limit(Evidence(SETTINGS, moving))


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    CASES["storage"][0].write(folder / "throughput.json")


def test_explain_prints_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "results/plans/p/r")
    assert stage("explain", "p.r") == 0
    printed = capsys.readouterr().out
    assert "p.r: bound by data loading" in printed and "slow storage" in printed and "Try next: " in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert stage("explain", tmp_path / "results/plans/p/r", "p.r", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["findings"][0]["cause"] for each in found.values()] == ["storage"] * 2


def test_a_run_that_is_not_there_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "results/plans/p/r")
    assert stage("explain", "p.q") == 2
    assert "p.q: no such run; expected PLAN.RUN, or a run's folder; there are: p.r" in capsys.readouterr().err
    (tmp_path / "results/plans/p/r/throughput.json").unlink()
    assert stage("explain", "p.r") == 2
    assert "neither throughput nor a profile was measured" in capsys.readouterr().err
