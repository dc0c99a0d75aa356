"""The verdict: each cause is found from its figures, and only from them; `dlscale explain` prints the verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlscale.core.fingerprint import ROOT as PACKAGE
from dlscale.core.telemetry import Summary
from dlscale.extensions.explain.explain import lines
from dlscale.extensions.programs.steps import Process, _pauses
from dlscale.measure.profilers import Activity, Profile, ProfiledTool
from dlscale.measure.records import Outside, Peaks, SampleWork, Throughput, Trials, Usage
from dlscale.parallel.records import Device
from dlscale.report.evidence import Evidence, Finding, bound
from dlscale.report.verdict import limit, verdict
from dlscale.results import UNKNOWN
from tests.conftest import stage
from tests.test_report import Results

#: Settings of a run that nothing slows. `measured` adds large operators on a GPU, and loading twice as fast as
#: computing.
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
    """Return the usage of ten seconds from the numbers of cores that the run and all programs keep busy."""
    busy = own if machine is None else machine
    return Usage(seconds=10.0, cores=cores, cpu_seconds=10 * own, cores_cpu_seconds=10 * busy, read_bytes=10 * read)


def trials(rate: float, used: Usage | None = None, ranks: tuple[float, ...] = (), std: float = 0.0) -> Trials:
    return Trials(mean=rate, std=std, trial_time=[1.0] * 4, usage=used, rank_throughput=list(ranks))


def measured(
    io: float = 200.0, synthetic: float = 100.0, full: float = 99.0, used: Usage | None = None, **more: Any
) -> Throughput:
    return Throughput(
        device=Device(kind=more.pop("device", "cuda"), network=more.pop("network", None)),
        batch_size=10,
        io=trials(io, used),
        synthetic=more.pop("computing", trials(synthetic, used)),
        full=trials(full, used),
        **{"work": WORK, "peaks": PEAKS, **more},
    )


def profiled(seconds: float = 0.1, **activity: Any) -> Profile:
    """Return a profile of steps of 0.1 s, which took `seconds` with the profiler."""
    tool = ProfiledTool(name="torch", seconds_per_step=seconds, activity=Activity(**activity))
    return Profile(device=Device(kind="cuda"), seconds_per_step=[0.1, 0.1, 0.1], tools=[tool])


def causes(throughput: Throughput | None, profile: Profile | None = None, **settings: Any) -> list[str]:
    return [each.cause for each in verdict(Evidence({**SETTINGS, **settings}, throughput, profile)).findings]


WAITS, BUSY, FULL_UP = usage(0.1, read=10**6), usage(1.9), usage(3.9)
FOUR = {"loader": {"kind": "torch", "workers": 4}}
IN_GRAPH = profiled(comm_seconds=0.05, comm_overlap=0.2, device_busy=1.0)

#: Measurements, profile, settings, cause of the slowness, and the fraction of time that it costs (by hand), by name.
CASES: dict[str, tuple[Throughput, Profile | None, dict[str, Any], str, float | None]] = {
    # Without the wait for storage, the speed would be 100 samples/s instead of 19.
    "storage": (measured(20, full=19, used=WAITS), None, {}, "storage", 0.81),
    "storage on a large node whose daemons do a little": (
        measured(20, full=19, used=usage(0.1, 0.45, cores=128)),
        None,
        {},
        "storage",
        0.81,
    ),
    "storage that the eight workers of four processes wait for": (
        measured(20, full=19, used=usage(1.9, cores=16)),
        None,
        {"geometry": {"gpus_per_node": 4}},
        "storage",
        0.81,
    ),
    "workers": (measured(20, full=19, used=BUSY), None, {}, "workers", 0.81),
    "loader": (measured(20, full=19, used=FULL_UP), None, FOUR, "loader", 0.81),
    "loader of more workers than cores": (
        measured(20, full=19, used=usage(3.9)),
        None,
        {"loader": {"kind": "torch", "workers": 16}},
        "loader",
        0.81,
    ),
    # A sample takes 1/110 s to load and 1/100 s to compute.
    "overlap": (measured(110, full=52), None, {"loader": {"kind": "torch", "workers": 0}}, "overlap", 100 / 210),
    "straggler": (measured(nranks=4, alone=trials(100, ranks=(30, 30, 20, 30))), None, {}, "straggler", 1 / 3),
    "straggler of two": (measured(nranks=2, alone=trials(100, ranks=(30, 20))), None, {}, "straggler", 1 / 3),
    "communication": (measured(nranks=4, alone=trials(150, ranks=(37,) * 4)), None, {}, "communication", 1 / 3),
    # A fifth of the 50 ms of communication in a 100 ms step is hidden.
    "communication in a graph": (measured(nranks=4), IN_GRAPH, {"cuda_graph": True}, "communication", 0.4),
    "launches": (measured(), profiled(device_busy=0.4, launches=900), {}, "launches", 0.6),
    # The device is busy for 0.2 × 0.25 s of a step, which takes 0.1 s without the profiler.
    "launches, with a profiler that slows the host": (measured(), profiled(0.25, device_busy=0.2), {}, "launches", 0.5),
    "launches, not the wait for data": (
        measured(),
        profiled(device_busy=0.4, idle_seconds={"data": 0.02, "forward": 0.04}),
        {},
        "launches",
        0.4,
    ),
    "sync": (measured(), profiled(items=1, syncs=2, sync_seconds=0.03, device_busy=0.5), {}, "sync", 0.5),
    "sync on a processor": (measured(device="cpu"), profiled(items=2), {}, "sync", None),
    # A sample takes 10 ms; at peak, its transfers take 6 ms (60 %), its arithmetic 3 ms. The cost is 6 - 3 ms: 30 %.
    "memory": (measured(work=WORK.model_copy(update={"bytes": 6e8})), None, {}, "memory", 0.3),
    "copies": (
        measured(),
        profiled(copy_bytes=1e8, pageable_bytes=1e8, copy_seconds=0.02, device_busy=0.9),
        {},
        "copies",
        0.2,
    ),
    "network": (measured(network="Socket"), None, {}, "network", None),
    "neighbour": (measured(used=usage(1.0, 2.0)), None, {}, "neighbour", None),
    "throttled": (measured(), None, {}, "throttled", 0.3),
    "throttled by its power cap": (measured(), None, {}, "throttled", 0.2),
}
WATCHED = {
    "throttled": Summary(
        seconds=10, throttled_seconds=3, throttle_reasons={"temperature (hardware)": 3.0}, clock_loss=0.05
    ),
    "throttled by its power cap": Summary(
        seconds=10,
        throttled_seconds=9,
        throttle_reasons={"power cap": 9.0, "temperature (software)": 1.0},
        clock_loss=0.2,
    ),
}


def program(
    used: Usage | None = None, batch: int | None = 10, rate: float = 100.0, rates: Sequence[float] = (), **seen: Any
) -> Throughput:
    """Return the record of an external program with steps of 0.1 s, which by default keeps one of four cores busy."""
    plain: dict[str, Any] = {"command": ["train"], "way": "seen", "steps": 99, "status": 0, "seconds": 20}
    outside = Outside(**{**plain, "first_step_seconds": 1, "waiting": 0.05, "training": 1.0, **seen})
    nranks = max(1, len(outside.rank_cores))
    full = trials(rate, used or usage(1.0)).model_copy(update={"trial_throughput": list(rates)})
    return Throughput(device=Device(kind="cpu"), batch_size=batch, nranks=nranks, full=full, outside=outside)


#: Records of external programs, and the causes that slow each program.
OUTSIDE: list[tuple[Throughput, list[str]]] = [
    (program(), []),
    (program(waiting=0.6), ["workers"]),
    (program(usage(3.9), waiting=0.6), ["loader"]),
    (program(usage(0.2), waiting=0.6), ["storage"]),
    (program(usage(0.2, 3.9), waiting=0.6), ["neighbour"]),  # the reason for the wait is unknown
    (program(usage(0.2)), ["idle"]),
    (program(usage(0.2, 3.9)), ["neighbour"]),
    (program(rate=9000.0), ["launches"]),
    (program(usage(0.2), rate=9000.0), ["idle"]),
    (program(rate=9000.0, batch=None), []),  # a printed rate does not give the duration of a step
    (program(rate=900.0, batch=None, samples=False), ["launches"]),
    (program(training=0.4), ["besides"]),
    (program(between_epochs=0.6), ["epochs"]),
    (program(between_epochs=0.17), []),
    (program(usage(4.0), queued=0.9), ["threads"]),
    (program(usage(1.0), queued=0.9), []),
    (program(usage(4.0), queued=0.9, waiting=0.9), ["loader"]),  # the loader's workers are queued
    (program(rates=[150, 140, 160, 90, 100, 100, 90, 70, 75, 71]), ["slowing"]),
    (program(rates=[150, 140, 160, 90, 100, 100, 90, 70, 75, 141]), []),
    (program(rates=[100, 101, 102, 100, 100, 100, 99, 98, 98]), []),
    (program(stopped="OSError: no space left on device"), ["unwatched"]),
    (program(stalled=0.12), ["swapping"]),
    (program(stalled=0.12, waiting=0.6), ["swapping", "workers"]),
    (program(usage(1.5), rank_cores=[0.5, 1.0], rank_waiting=[0.0, 0.0]), ["straggler"]),
    (program(usage(2.0), rank_cores=[1.0, 1.0], rank_waiting=[0.0, 0.5], waiting=0.25), ["straggler", "workers"]),
    (program(usage(2.0), rank_cores=[1.0, 0.9], rank_waiting=[0.1, 0.0]), []),
]


@pytest.mark.parametrize("network", ["Socket", "AWS Libfabric", None])
def test_tcp_between_nodes_is_named_before_the_averaging_that_it_slows(network: str | None) -> None:
    slow = measured(nranks=4, alone=trials(150, ranks=(37,) * 4), network=network)
    found = [each.cause for each in verdict(Evidence(SETTINGS, slow, None, None)).findings]
    assert found == ["network"] * (network == "Socket") + ["communication"]


def test_every_cause_has_a_case() -> None:
    """Causes of other extensions have tests next to the tests of these extensions."""
    files = [*PACKAGE.glob("report/causes/*.py"), PACKAGE / "extensions/programs/causes.py"]
    known = {case[3] for case in CASES.values()}.union(*(causes for _, causes in OUTSIDE))
    assert known == {cause for file in files for cause in re.findall(r'Finding\(\s*"(\w+)"', file.read_text())}


@pytest.mark.parametrize("name", CASES)
def test_a_single_cause_is_named_with_the_cost(name: str) -> None:
    throughput, profile, settings, cause, share = CASES[name]
    (found,) = verdict(Evidence({**SETTINGS, **settings}, throughput, profile, WATCHED.get(name))).findings
    assert found.cause == cause and found.why.endswith(".") and found.todo.endswith(".")
    assert found.share == (None if share is None else pytest.approx(share))


def test_gradient_averaging_is_described_by_both_rates() -> None:
    throughput, *_ = CASES["communication"]
    (found,) = verdict(Evidence(SETTINGS, throughput)).findings
    assert found.why == (
        "Gradient averaging over 4 processes lowers the rate of computing alone from 150 to 100 samples/s."
    )
    assert "If memory is short, raise accumulation_steps, because gradients are averaged once per step." in found.todo


@pytest.mark.parametrize(
    ("throughput", "profile"),
    [
        pytest.param(
            measured(used=usage(1.5)),
            profiled(
                device_busy=0.97, launches=50, items=0, syncs=0.2, sync_seconds=0.001, copy_bytes=1e6, pageable_bytes=0
            ),
            id="a clean run",
        ),
        pytest.param(measured(), None, id="a clean run without a profile"),
        pytest.param(None, None, id="nothing measured"),
        pytest.param(Throughput(), None, id="no rates"),
        pytest.param(measured(200, used=WAITS), None, id="a wait for storage that is fast enough"),
        pytest.param(measured(nranks=2, alone=trials(100, ranks=(50, 46))), None, id="ranks that differ a little"),
        pytest.param(measured(nranks=2, alone=trials(104, ranks=(52, 52))), None, id="communication that is hidden"),
        pytest.param(measured(work=WORK.model_copy(update={"bytes": 2e8})), None, id="memory at a fifth of its rate"),
        pytest.param(measured(used=usage(1.0, 1.2)), None, id="a neighbour that does little"),
        pytest.param(measured(), profiled(copy_bytes=1e8, pageable_bytes=1e3, copy_seconds=0.02), id="pinned copies"),
        pytest.param(measured(20, full=19), None, id="slow loading without figures of the cores"),
        pytest.param(measured(110, full=65, used=BUSY), None, id="loading that is no slower than computing"),
        pytest.param(measured(used=usage(1.0, 1.24, cores=2)), None, id="a neighbour of a quarter of a core"),
        pytest.param(
            measured(65, full=60),
            profiled(items=1, syncs=1, sync_seconds=0.03, device_busy=0.6),
            id="a host wait in a step with an idle device",
        ),
        pytest.param(measured(nranks=4, alone=trials(113, std=20)), None, id="a difference within the trials' spread"),
        pytest.param(measured(used=usage(1.0, 1.35, cores=128)), None, id="daemons of a large node"),
        pytest.param(
            measured(65, full=60),
            profiled(device_busy=0.6, idle_seconds={"data": 0.4}),
            id="a device that waits for data",
        ),
        pytest.param(
            measured(work=WORK.model_copy(update={"operators": 8000.0})),
            None,
            id="calls that take half of a GPU's step",
        ),
        pytest.param(measured(), profiled(0.2, device_busy=0.5), id="a device that is idle only under the profiler"),
        pytest.param(
            measured(),
            profiled(items=1, syncs=1, sync_seconds=0.09, device_busy=0.98),
            id="a wait while the device is busy",
        ),
    ],
)
def test_small_costs_are_not_reported(throughput: Throughput | None, profile: Profile | None) -> None:
    assert causes(throughput, profile) == []


SMALL = WORK.model_copy(update={"forward_flops": 1e6, "backward_flops": 2e6, "operators": 10_000.0})


@pytest.mark.parametrize(
    ("throughput", "profile", "settings", "expected"),
    [
        pytest.param(
            measured(),
            profiled(items=1, syncs=1, sync_seconds=0.001, device_busy=0.2, launches=900),
            {},
            ["launches"],
            id="reading one number costs less than launching tiny kernels",
        ),
        pytest.param(measured(device="cpu", work=SMALL), None, {}, ["launches"], id="a processor's operators"),
        pytest.param(
            measured(device="cpu", work=SMALL),
            None,
            {"compile": {"mode": "default"}},
            [],
            id="the operators of compiled code are unknown",
        ),
        pytest.param(
            measured(work=SMALL.model_copy(update={"operators": 20_000.0})),
            None,
            {},
            ["launches"],
            id="on a GPU, launches cost time only if they fill the step: 20,000 x 5 us of 0.1 s",
        ),
        pytest.param(
            measured(),
            profiled(device_busy=0.4, launches=3),
            {"cuda_graph": True},
            [],
            id="a step in a CUDA graph has no launches to save",
        ),
        # A neighbour makes every other figure uncertain.
        pytest.param(
            measured(20, full=19, used=usage(1.9, 2.9)),
            None,
            {},
            ["neighbour", "workers"],
            id="a neighbour is reported first",
        ),
        pytest.param(
            measured(20, full=19, used=usage(1.9, 3.9)),
            None,
            {},
            ["neighbour"],
            id="a neighbour used the loader's cores: whether the loader is slow is unknown",
        ),
    ],
)
def test_causes_are_reported_in_order(
    throughput: Throughput, profile: Profile | None, settings: dict[str, Any], expected: list[str]
) -> None:
    assert causes(throughput, profile, **settings) == expected


def test_a_model_without_products_has_no_arithmetic_roof() -> None:
    nothing = WORK.model_copy(update={"forward_flops": 0.0, "backward_flops": 0.0})
    assert "memory bandwidth were the only limit, this model would reach 10,000 samples/s" in limit(
        Evidence(SETTINGS, measured(work=nothing))
    )
    assert limit(Evidence(SETTINGS, measured(work=nothing.model_copy(update={"bytes": None})))) == ""


@pytest.mark.parametrize(
    ("batches", "other", "longest", "words"),
    [
        ([(4.0, "1"), (5.0, "1")], 5.0, 1.0, "For 5.00\u00a0s, a loader other than the training's was read"),
        ([], 0.0, 6.0, "The longest time without a batch or a step is 6.00\u00a0s."),
    ],
)
def test_pauses_are_described_by_what_was_seen(
    batches: list[tuple[float, str]], other: float, longest: float, words: str
) -> None:
    """Between the steps at 3 s and 10 s, the program reads another loader, or does something unknown."""
    every = [(1.0, "0"), (2.0, "0"), (3.0, "0"), *batches, (9.0, "0"), (10.0, "0")]
    process = Process(0, steps=[1, 2, 3, 10, 11], batches=[(time, name, 0.0, 8) for time, name in every])
    pauses = _pauses(process, {"0"}, (1.0, 11.0), [])
    assert pauses == {"other": pytest.approx(other), "longest": pytest.approx(longest)}
    (finding,) = verdict(Evidence(SETTINGS, program(training=0.4, pauses=pauses))).findings
    assert words in finding.why and "checkpoint" not in finding.why


def test_a_leak_is_not_hidden_by_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy for a leak, whose cost is unknown, precedes the remedy for the most expensive cause."""
    costly = Finding("launches", "tiny steps", "", "Use a larger batch.", 0.5)
    for cause, share, todo in (
        ("leak", None, "Mend it. Then: Use a larger batch."),
        ("breaks", None, "Use a larger batch."),
    ):
        found = [costly, Finding(cause, "", "", "Mend it.", share)]
        monkeypatch.setattr("dlscale.report.verdict.findings", lambda evidence, found=found: found)
        assert verdict(Evidence(SETTINGS, measured())).todo == todo


def test_impossible_rates_report_only_the_disturbance() -> None:
    """FULL reached 242 samples/s although computing alone reached 143. Only another program, if any, is reported."""
    for used, seen in ((None, []), (usage(1.0, 2.0), ["neighbour"])):
        found = verdict(Evidence(SETTINGS, measured(1000, 143, 242, used), profiled(device_busy=0.4, launches=900)))
        assert [each.cause for each in found.findings] == seen and found.limit == ""
        assert found.todo.startswith("Measure again") and "unreliable" in found.todo
        said = " ".join(" ".join(lines("p.r", found)).split())
        assert "p.r: its limit is not known" in said and "more than noise" in said and "within" not in said
        assert "Try next: Measure again" in said and "unreliable" in said


def test_trials_that_differ_too_much_give_no_limit() -> None:
    """The trials of computing differ by half of their rate: the slower of loading and computing is not known."""
    for std, known in ((1.0, True), (50.0, False)):
        noisy = measured(200, 100, 99, computing=trials(100, std=std))
        assert (found := bound(noisy)) and (found.what == "computation") is known
    assert "varies by 50" in found.why and found.what == UNKNOWN


def test_a_noisy_training_is_not_blamed_on_competition() -> None:
    """Loading and computing take turns at 3,728 samples/s. Training reaches 3,104 ± 800, so the difference is noise."""
    for std, said in ((10.0, "compete for the same cores"), (500.0, "within noise")):
        full = trials(3104, std=std)
        found = bound(measured(23359, 4436, 3104).model_copy(update={"full": full}))
        assert found and found.what == "computation" and said in found.why and "Taking turns" not in found.why
        assert ("compete" in found.why) is (std == 10.0)


def test_a_neighbour_does_not_hide_other_causes() -> None:
    """Loading alternates with computing and takes 27 % of the time; a neighbour does not hide this cause."""
    measured_ = measured(270, 100, 73, usage(1.0, 2.0))
    found = verdict(Evidence({"loader": {"kind": "torch", "workers": 0}}, measured_))
    assert [each.cause for each in found.findings] == ["neighbour", "overlap"]
    assert found.bound and found.bound.what == "missing overlap"
    assert found.findings[1].share == pytest.approx(0.27)
    assert found.todo.startswith("Measure again on an idle machine") and "loader: {workers: 1} or more" in found.todo
    assert found.rung == "loader: {workers: 1}"


@pytest.mark.parametrize(
    ("rates", "reached"),
    [
        ((1000.0, 686.0, 714.0), "Training reaches 714 samples/s, as fast as computing alone, within noise."),
        ((100.0, 1000.0, 104.0), "Training reaches 104 samples/s, as fast as loading alone, within noise."),
        ((1000.0, 100.0, 100.0), "Training reaches 100 % of computing alone, the slower of the two."),
    ],
)
def test_full_above_the_slower_part_is_noise(rates: tuple[float, float, float], reached: str) -> None:
    found = bound(measured(*rates))
    assert found and reached in found.why.replace("\u00a0", " ")


def test_a_remark_comes_after_a_cause() -> None:
    """On a CPU, the finding `sync` follows the finding `loader`, because `.item()` costs nothing there."""
    found = verdict(
        Evidence({**SETTINGS, **FOUR}, measured(20, full=19, used=FULL_UP, device="cpu"), profiled(items=2))
    )
    assert [each.cause for each in found.findings] == ["loader", "sync"]
    assert found.todo == found.findings[0].todo


def test_the_bytes_of_a_compiled_step_are_unknown() -> None:
    compiled = Evidence(
        {**SETTINGS, "compile": {"mode": "default"}}, measured(work=WORK.model_copy(update={"bytes": 6e9}))
    )
    assert verdict(compiled).findings == []
    assert "If arithmetic were the only limit, this model would reach 333 samples/s" in limit(compiled)


def test_suggestions_are_settings_that_the_run_does_not_use() -> None:
    assert verdict(Evidence(SETTINGS, measured())).todo.startswith(
        "`precision: bf16`; after that `compile: {mode: default}`, `optimizer: {fused: true}`, `cuda_graph: true`."
    )
    top = {"precision": "bf16", "compile": {"mode": "default"}, "optimizer": {"fused": True}, "cuda_graph": True}
    assert verdict(Evidence({**SETTINGS, **top}, measured())).todo.startswith("No further setting is suggested.")
    refused = {"parallel": {"kind": "dp"}, "optimizer": {"kind": "adadelta"}}
    assert verdict(Evidence({**SETTINGS, **refused}, measured())).todo == "`precision: bf16`."
    loading = verdict(Evidence(SETTINGS, measured(20, full=19)))
    assert loading.todo.startswith("loader: {kind: direct} ")


def test_the_limit_is_the_lower_roof() -> None:
    """With 3e9 FLOP and 1e7 bytes per sample, the limits are 1e12 / 3e9 = 333 and 1e11 / 1e7 = 10,000 samples/s."""
    assert "Training reaches 30 %" in limit(Evidence(SETTINGS, measured())).replace("\N{NO-BREAK SPACE}", " ")
    assert "If arithmetic were the only limit, this model would reach 333 samples/s" in limit(
        Evidence(SETTINGS, measured())
    )
    assert "memory bandwidth were the only limit, this model would reach 100 samples/s" in limit(
        Evidence(SETTINGS, measured(work=WORK.model_copy(update={"bytes": 1e9})))
    )
    four = limit(Evidence(SETTINGS, measured(nranks=4)))
    assert (
        "of the 4,000 GFLOP/s that matrix products in float32 reach on 4 devices" in four
        and "If arithmetic were the only limit, this model would reach 1,333 samples/s" in four
    )
    assert "Training reaches 7 %" in four.replace("\N{NO-BREAK SPACE}", " ")


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
    assert [each["findings"][0]["cause"] for each in json.loads(capsys.readouterr().out).values()] == ["storage"] * 2
    (tmp_path / "results/plans/p/r/throughput.json").unlink()
    assert stage("explain", "p.r") == 2
    assert "neither a throughput nor a profile yet. Add `throughput` or `profile`" in capsys.readouterr().err


def test_explain_reports_runs_without_results_and_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run must be in the configuration. The results of a run that `use` names are found in its own plan."""
    monkeypatch.chdir(tmp_path)
    plans = {
        "p": {"study": "era5_vit", "settings": {"dataset": "d"}, "runs": {"r": {}, "s": {"seed": 1}}},
        "q": {"study": "era5_vit", "runs": {"same": {"use": "p.r"}, "other": {"use": "p.s"}}},
    }
    datasets = {"d": {"kind": "era5", "source": {"kind": "simulated", "train": [2001], "valid": [2002]}}}
    Path("config.yaml").write_text(yaml.safe_dump({"targets": ["p"], "datasets": datasets, "plans": plans}))
    write(tmp_path / "results/plans/p/r")
    assert stage("explain", "q.same") == 0
    capsys.readouterr()
    for name, said in (
        ("p.s", r"p\.s has no results yet.* snakemake plan_p"),
        ("q.other", r"q\.other has no results yet.* snakemake plan_p"),
        ("p", r"p: no such run.* PLAN\.RUN.* p\.r"),
        ("p.t", r"p\.t: no such run.* PLAN\.RUN.* p\.r"),
    ):
        assert stage("explain", name) == 2
        assert re.search(f": {said}$", capsys.readouterr().err), name


@pytest.mark.parametrize(("measured", "expected"), OUTSIDE)
def test_the_limit_of_an_external_program(measured: Throughput, expected: list[str]) -> None:
    found = verdict(Evidence({}, measured)).findings
    assert [each.cause for each in found] == expected
    assert all(each.why and each.todo for each in found)


@pytest.mark.parametrize("waiting", [0.05, None])
def test_the_card_of_a_program_has_the_findings_of_the_terminal(tmp_path: Path, waiting: float | None) -> None:
    """The card does not ask for loading alone and computing alone, which a program does not have."""
    results, found = Results(tmp_path / "results"), program(waiting=waiting, training=0.4)
    told = " ".join(" ".join(lines("p.r", verdict(Evidence({}, found)))).split())
    assert "much time outside training: about 60 %" in told
    found.write(results.run("p", "r", epochs=0) / "throughput.json")
    results.plan("p", {"r": "R"}, measure=("throughput",))
    card = results.report().partition("<h4>What bounds it?</h4>")[2].partition("<h4>How good?</h4>")[0]
    assert "<b>Much time outside training, about 60\u00a0%:</b>" in card and "Not measured" not in card
    assert f'<p class="big word">{"not known" if waiting is None else "computation"}</p>' in card


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"rank_cores": [0.5, 1.0], "rank_waiting": [0.0, 0.0]}, "computes for 100 % of a step (100 % is one core), "),
        ({"rank_cores": [1.0, 1.0], "rank_waiting": [0.0, 0.5]}, "waits for batches for 50 % of a step, "),
    ],
)
def test_only_a_computing_rank_is_counted_in_cores(seen: dict[str, Any], words: str) -> None:
    found = verdict(Evidence({}, program(usage(1.5), **seen))).findings[0]
    assert found.why.replace("\xa0", " ").startswith(f"Rank 1 {words}while")


def test_code_in_a_verdict_is_formatted_on_the_page(tmp_path: Path) -> None:
    results = Results(tmp_path / "results")
    found, _, *_ = CASES["workers"]
    found.write(results.run("p", "r", epochs=0) / "throughput.json")
    results.plan("p", {"r": "R"}, measure=("throughput",))
    assert "The stage <code>tune</code> finds the best number of workers" in results.report()
