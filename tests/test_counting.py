"""FLOPs and bytes of a step: formulas, counted operators and figures by hand agree; peaks, MFU and MBU are right."""

from __future__ import annotations

import copy
import csv
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.cases import Case
from dlscale.config import resolve as config
from dlscale.config.run import Geometry, load_run
from dlscale.core import registry
from dlscale.data.samples import samples_in, tree_map
from dlscale.extensions.memory.prediction import fake_batch
from dlscale.extensions.profile import operators
from dlscale.measure import roofline as peaks
from dlscale.measure.records import Peaks, SampleWork, Throughput
from dlscale.measure.roofline import OperatorCount, sample_work
from dlscale.parallel.world import World
from dlscale.report.collect import summary_csv
from dlscale.report.sections import runs_table
from dlscale.results import read_plan
from dlscale.train.build import open_session
from dlscale.train.memory import FakeStep, fake_step
from dlscale.train.step import Network
from tests.conftest import TINY, make_run, stage
from tests.test_report import Results, with_ladder

CPU = torch.device("cpu")
UNET, VIT, LARGE = (
    Case("cosmo_unet", {}, (64, 64, 64), 2),
    Case("era5_vit", {}, (360, 720), 2),
    Case("era5_vit", {"embed_dim": 1024}, (360, 720), 2),
)


def count(case: Case, **over: Any) -> OperatorCount:
    """Count the operators of a case's step on fake tensors."""
    run, found = case.run(**over), OperatorCount()
    fake = FakeStep(run, partial(case.network, run), case.loss(), CPU)
    x, y = (fake.like(torch.empty(case.batch_size, *shape, device="meta")) for shape in case.shapes)
    fake.train(x, y, found.phase, found)
    return found


# ---- FLOPs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "by_hand"), [(UNET, 81.5e9), (VIT, 1.447e12), (LARGE, 6.15e12)], ids=["unet", "vit", "vit-1024"]
)
def test_formula_operators_and_figures_by_hand_agree(case: Case, by_hand: float) -> None:
    """Counted FLOPs are within 2 % of the formula (forward pass: equal), the formula within 0.2 % of figures by hand.

    Steps are counted on fake tensors, because computing the steps would take minutes and gigabytes.
    """
    found = count(case)
    assert case.flops() == pytest.approx(by_hand, rel=2e-3)
    assert found.flops.total() / case.batch_size == pytest.approx(case.flops(), rel=0.02)
    assert found.flops["forward"] / case.batch_size == case.flops() / 3
    assert found.flops["optimizer"] == 0


def test_formulas_exceed_operator_counts_by_the_input_gradient() -> None:
    """Formulas exceed the counted operators by the gradient of the input.

    By convention, formulas include this gradient, which is one more product of the first layer.
    """
    found = count(UNET)
    assert UNET.flops() - found.flops.total() / UNET.batch_size == 2 * 4**3 * 4 * 64 * 32**3, (
        "the difference must be the FLOPs of the first layer"
    )


#: A tiny run of each study, and a run with more inputs (earlier states, clock, static fields), by name.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {study: (study, {}) for study in TINY} | {
    "told more": (
        "era5_vit",
        {
            "samples": {"history": [1, 4], "clock": ["hour"]},
            "model": {"residual": "linear", "static": ["latitude", "mean"]},
        },
    )
}


@pytest.mark.parametrize(("study", "over"), RUNS.values(), ids=RUNS)
def test_each_studys_formula_equals_the_counted_forward_pass(
    study: str, over: dict[str, Any], tmp_path: Path, tiny_data: Callable[[str], Path]
) -> None:
    """Each study's formula equals PyTorch's count on real tensors.

    Attention is computed by plain products, because PyTorch's counter does not count fused attention.
    """
    session = open_session(tiny_run(study, tmp_path, **over), tiny_data(study) / "manifest.json", World())
    x, y = tree_map(zeros, fake_batch(session.run, session.manifest))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        session.step.network(x, y)
    assert session.study.flops(session.run, session.manifest) == counter.get_total_flops() / samples_in(x)


def test_the_work_of_a_sample_does_not_depend_on_the_devices_that_share_the_model(
    tmp_path: Path, tiny_data: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    session = open_session(tiny_run("era5_vit", tmp_path), tiny_data("era5_vit") / "manifest.json", World())
    batch = fake_batch(session.run, session.manifest)
    shared = session.run.model_copy(update={"geometry": Geometry(gpus_per_node=2, tp=2)})
    with caplog.at_level(logging.WARNING):
        assert sample_work(replace(session, run=shared), batch) == sample_work(session, batch)
    assert "One of the two numbers is wrong" not in caplog.text


def zeros(values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(values.shape, dtype=values.dtype)


def tiny_run(study: str, folder: Path, **over: Any) -> Any:
    make_run(folder, study, config.merge(copy.deepcopy(TINY[study]["run"]), over), TINY[study]["dataset"])
    return load_run(folder / "config.yaml", "throughput")


@pytest.mark.parametrize(("study", "over"), RUNS.values(), ids=RUNS)
def test_a_real_step_has_the_operators_of_the_fake_one(
    study: str, over: dict[str, Any], tmp_path: Path, tiny_data: Callable[[str], Path]
) -> None:
    """A real step and a fake step have equal FLOPs and bytes. Counting leaves the random state unchanged."""
    session = open_session(tiny_run(study, tmp_path, **over), tiny_data(study) / "manifest.json", World())
    shapes = fake_batch(session.run, session.manifest)
    x, y = tree_map(zeros, shapes)
    session.step(x, y)  # after this step the optimiser has its state
    real, fake = OperatorCount(), OperatorCount()
    with real:
        session.step.gradients(x, y)
    state = torch.get_rng_state()
    imagined = fake_step(session.run, session.manifest, CPU, session.step.attention)
    imagined.train(*tree_map(imagined.like, shapes), fake.phase, fake)  # type: ignore[call-arg]
    assert torch.equal(torch.get_rng_state(), state)
    assert real.flops.total() == fake.flops.total() > 0
    if not over:  # with more inputs, only FLOPs are compared
        assert real.bytes.total() == fake.bytes.total() - fake.bytes["optimizer"] > 0


@pytest.mark.parametrize("study", TINY)
def test_each_module_has_the_work_of_its_operators(
    study: str, tmp_path: Path, tiny_data: Callable[[str], Path]
) -> None:
    """Each layer has the FLOPs of its shape, even if branches meet; modules add up to a step's FLOPs and bytes."""
    session = open_session(tiny_run(study, tmp_path), tiny_data(study) / "manifest.json", World())
    x, y = tree_map(zeros, fake_batch(session.run, session.manifest))
    expected, names = Counter[str](), operators._names(session.step.model)

    def layer(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        weight: Any = module.weight
        for product in (True, True, args[0].requires_grad):  # the gradient of the first layer's input is not needed
            expected[names[module]] += product * 2 * output.numel() * weight[0].numel()

    layers = [each for each in session.step.model.modules() if isinstance(each, nn.Conv2d | nn.Conv3d | nn.Linear)]
    hooks = [each.register_forward_hook(layer) for each in layers]
    session.step(x, y)
    for hook in hooks:
        hook.remove()
    with OperatorCount() as counter:
        session.step(x, y)
    found, by_module = operators.operator_work(session, (x, y)), Counter[str]()
    for each in found:
        by_module[each.module] += each.flops  # type: ignore[assignment]
    assert {name: by_module[name] for name in expected} == dict(expected)
    assert sum(each.flops for each in found) == counter.flops.total() > 0
    assert sum(each.bytes for each in found) == pytest.approx(counter.bytes.total())
    assert min(each.seconds for each in found) > 0
    assert any(each.module == "optimizer" and not each.flops for each in found)


class Branches(nn.Module):
    """A module that calls functions of its own between two equal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.parts
        return torch.sigmoid(other(torch.tanh(one(x))))


def test_functions_between_parts_are_the_modules_own() -> None:
    """Functions between parts count for the module itself, also in the backward pass.

    Equal parts are reported together.
    """
    network = Network(Branches(), lambda prediction, target: (prediction - target).abs(), "fp32", torch.preserve_format)
    found = operators.TimedOperators(network, CPU)
    for _ in range(2):
        with found.modules.followed(), found:
            with found.phase("forward"):
                loss = network(torch.ones(3, 4), torch.zeros(3, 4))
            with found.phase("backward"):
                loss.backward()
    where = {each.operator: (each.module, each.calls) for each in found.work(2)}
    assert where["tanh"] == where["tanh_backward"] == where["sigmoid_backward"] == ("Branches", 1)
    assert where["addmm"] == ("parts.* (Linear)", 2) and where["mm"] == ("parts.* (Linear)", 3)
    assert where["abs"] == ("forward", 1) and where["sgn"] == ("backward", 1)


def test_fused_attention_on_a_cpu_counts_like_plain_products() -> None:
    """Fused attention on a CPU counts like the products of attention.

    PyTorch's counter does not count fused attention. Values that a fused kernel recomputes do not count.
    """
    q, k, v = (torch.randn(2, 3, 40, 8, requires_grad=True) for _ in range(3))
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend), OperatorCount() as counter:
            F.scaled_dot_product_attention(q, k, v).sum().backward()
        found[backend] = counter.flops.total()
    assert found[SDPBackend.FLASH_ATTENTION] == found[SDPBackend.MATH] == 12 * 2 * 3 * 40**2 * 8


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions(groups: int, transposed: bool) -> None:
    """Convolutions have the FLOPs computed by hand.

    Every output value (transposed: every input value) takes 3 x 3 multiply-adds per channel of its group. With
    gradients, the FLOPs are three times as many.
    """
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(4, 6, 3, stride=2, groups=groups)
    x = torch.randn(5, 4, 9, 9, requires_grad=True)
    with OperatorCount() as counter:
        y = layer(x)
        y.sum().backward()
    cells = 9 * 9 if transposed else y.shape[2] * y.shape[3]
    assert counter.flops.total() == 3 * 2 * 5 * cells * 9 * 4 * 6 // groups


def test_recomputed_work_is_not_work_of_the_model(tmp_path: Path, tiny_data: Callable[[str], Path]) -> None:
    """Activation checkpointing and micro-batches do not change the model's FLOPs.

    Checkpointing moves more bytes, because it reads values again.
    """

    def work(**over: Any) -> SampleWork:
        run = tiny_run("cosmo_unet", tmp_path, **over)
        session = open_session(run, tiny_data("cosmo_unet") / "manifest.json", World())
        return peaks.counted(session, fake_batch(run, session.manifest))

    plain, again, parts = work(), work(activation_checkpointing=True), work(accumulation_steps=2)
    assert plain.bytes and again.bytes
    assert plain.flops == again.flops == parts.flops
    assert again.bytes > 1.05 * plain.bytes


# ---- bytes -------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """A linear layer, an activation and another linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 11, bias=False), nn.Linear(11, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def absolute(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction - target).abs().mean(dim=1)


def moved(precision: str, **optimizer: Any) -> Counter[str]:
    run = UNET.run(precision=precision, optimizer=optimizer)
    fake, found = FakeStep(run, Perceptron, absolute, CPU), OperatorCount()
    fake.train(*(fake.like(torch.empty(3, width, device="meta")) for width in (7, 5)), found.phase, found)
    return found.bytes


def test_bytes_of_a_step_by_hand() -> None:
    """Bytes of a step equal a sum by hand: 4 bytes (float32) for each element that an operator reads or writes.

    B samples have N inputs, H hidden values and K outputs.
    """
    B, N, H, K = 3, 7, 11, 5
    forward = (
        (B * N + N * H + B * H)  # product
        + 2 * B * H  # tanh
        + (B * H + H * K + B * K)  # product of the second layer
        + 3 * B * K  # difference
        + 2 * B * K  # absolute value
        + (B * K + B)  # mean over outputs
        + (B + 1)  # mean over samples
    )
    backward = (
        1  # ones_like, the gradient of the loss
        + (1 + B)  # division by B for each sample; an expanded tensor is read once
        + (B + B * K)  # division by K for each output
        + 2 * B * K  # sign of the difference
        + 3 * B * K  # product with the gradient
        + (B * K + B * H + H * K)  # gradient of the second weight
        + (B * K + H * K + B * H)  # gradient of the second layer's input
        + 3 * B * H  # tanh
        + (B * H + B * N + N * H)  # gradient of the first weight; the gradient of the first input is not needed
    )
    weights = N * H + H * K
    found = moved("fp32", kind="sgd", lr=0.1, fused=True)
    assert (found["forward"], found["backward"]) == (4 * forward, 4 * backward)
    assert found["optimizer"] == 4 * 3 * weights  # read weight and gradient, write weight


# ---- if nothing can be counted ------------------------------------------------------------------------


def test_uncountable_work_is_left_out(
    tmp_path: Path, tiny_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a study reads values of tensors and has no formula, `work` is missing, but the speed is still measured."""
    study = registry.study("mnist_cnn")
    loss = study.loss(None)

    def asking(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = loss(prediction, target)
        return found if float(found.detach().sum()) >= 0 else -found

    monkeypatch.setattr(type(study), "loss", lambda self, run: asking)
    manifest = tiny_data("mnist_cnn") / "manifest.json"
    run = tiny_run("mnist_cnn", tmp_path)
    session = open_session(run, manifest, World())
    with caplog.at_level(logging.INFO):
        counted, formula = sample_work(session, fake_batch(run, session.manifest))
    assert counted is None and "cannot be counted" in caplog.text
    assert formula and formula.flops > 0 and formula.bytes is None
    monkeypatch.setattr(type(study), "flops", lambda self, run, manifest: None)
    assert sample_work(session, fake_batch(run, session.manifest)) == (None, None)
    monkeypatch.setattr(peaks, "measure_peaks", lambda *arguments: (_ for _ in ()).throw(RuntimeError("no memory")))
    found = throughput(tmp_path, manifest)
    assert (found.work, found.peaks, found.mfu(), found.mbu()) == (None, None, None, None)
    assert found.full and found.full.mean > 0


def test_a_formula_that_is_wrong_is_named(
    tmp_path: Path, tiny_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run("mnist_cnn", tmp_path)
    session = open_session(run, tiny_data("mnist_cnn") / "manifest.json", World())
    with caplog.at_level(logging.WARNING):
        sample_work(session, fake_batch(run, session.manifest))
        assert not caplog.text
        right = session.study.flops(run, session.manifest)
        assert right
        monkeypatch.setattr(type(session.study), "flops", lambda self, run, manifest: 1.03 * right)
        sample_work(session, fake_batch(run, session.manifest))
    assert "One of the two numbers is wrong" in caplog.text


# ---- peaks, and the stage ----------------------------------------------------------------------------


def test_peaks_are_near_rates_of_small_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks are near the rates of a small product and of a copy within the cache.

    The peak of products exceeds 0.8 times the small product's rate; the peak of copies is below 1.5 times the rate of
    the cached copy.
    """
    found = peaks.measure_peaks("fp32", CPU)
    assert found.dtype == "fp32"
    small = torch.ones(96, 96)
    assert found.flops > 0.8 * 2 * 96**3 / peaks.best_of(lambda: torch.mm(small, small), CPU, 0.05)
    monkeypatch.setattr(peaks, "BUFFER", {"cpu": 2**18})
    monkeypatch.setattr(peaks, "MIN_COPY_BYTES", 2**18)
    assert found.bytes_per_second < 1.5 * peaks.copy_rate(CPU)


def test_a_peak_is_at_least_the_speed_of_the_run(
    tmp_path: Path, tiny_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    low = Peaks(dtype="fp32", flops=1000.0, bytes_per_second=1e9)
    assert peaks.at_least(low, 999.0) == low
    monkeypatch.setattr(peaks, "measure_peaks", lambda *arguments: low)
    tiny_run("mnist_cnn", tmp_path, throughput={"warmup": 0, "trials": 2, "batches": 2})
    found = throughput(tmp_path, tiny_data("mnist_cnn") / "manifest.json")
    fastest = max(*found.synthetic.trial_throughput, *found.full.trial_throughput)
    assert found.peaks.flops == pytest.approx(fastest * found.work.flops)
    assert max(found.mfu("SYNTHETIC") or 0, found.mfu("FULL") or 0) <= 1
    assert "more than a matrix product" in caplog.text


def throughput(folder: Path, manifest: Path) -> Throughput:
    arguments = ["--config", folder / "config.yaml", "--manifest", manifest, "--threads", 1, "--device", "cpu"]
    assert stage("throughput", *arguments, "--out", folder / "throughput.json") == 0
    return Throughput.read(folder / "throughput.json")


def test_the_stage_records_mfu_and_mbu(tmp_path: Path, tiny_data: Callable[[str], Path]) -> None:
    """The stage records MFU and MBU by their definitions.

    TensorBoard shows these values once, even after repeated measurements.
    """
    tiny_run("cosmo_unet", tmp_path, throughput={"warmup": 0, "trials": 2, "batches": 2})
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.of.training").write_text("theirs")
    for _ in range(2):
        found = throughput(tmp_path, tiny_data("cosmo_unet") / "manifest.json")
    assert found.work and found.peaks and found.full and found.work.bytes
    assert found.work.source == "formula" and found.work.backward_flops == 2 * found.work.forward_flops
    assert found.mfu() == pytest.approx(found.full.mean * 3 * found.work.forward_flops / found.peaks.flops)
    assert found.mbu() == pytest.approx(found.full.mean * found.work.bytes / found.peaks.bytes_per_second)
    assert 0 < (found.mfu() or 0) < 1
    board = EventAccumulator(str(tmp_path / "tensorboard" / "throughput")).Reload()
    scalars = {name: [event.value for event in board.Scalars(name)] for name in board.Tags()["scalars"]}
    assert scalars == {
        "throughput/io": [pytest.approx(found.io.mean)] if found.io else [],
        "throughput/synthetic": [pytest.approx(found.synthetic.mean)] if found.synthetic else [],
        "throughput/full": [pytest.approx(found.full.mean)],
        "mfu": [pytest.approx(found.mfu())],
        "mbu": [pytest.approx(found.mbu())],
        "peak_memory_bytes": [pytest.approx(found.peak_memory_bytes)],
    }
    assert len(list((tmp_path / "tensorboard" / "throughput").iterdir())) == 1
    assert (tmp_path / "tensorboard" / "events.out.tfevents.of.training").exists()


def test_mfu_and_mbu_are_in_the_table_and_on_the_page(tmp_path: Path) -> None:
    """The table and the page show MFU and MBU for the runs that have them.

    The second run has FLOPs but no bytes. The third run was measured before dlscale counted FLOPs and bytes.
    """
    results = with_ladder(Results(tmp_path))
    work = SampleWork(forward_flops=1e9, backward_flops=2e9, bytes=4e8, source="formula")
    limits = Peaks(dtype="fp32", flops=1e12, bytes_per_second=1e11)
    for name, known in (("baseline", work), ("workers", work.model_copy(update={"bytes": None}))):
        path = tmp_path / "plans" / "ladder" / name / "throughput.json"
        Throughput.read(path).model_copy(update={"work": known, "peaks": limits}).write(path)
    plan = read_plan(results.plans[0])
    rows = list(csv.DictReader(summary_csv(plan).splitlines()))
    assert [row["mfu"] for row in rows] == [str(24 * 3e9 / 1e12), str(110 * 3e9 / 1e12), ""]
    assert [row["mbu"] for row in rows] == [str(24 * 4e8 / 1e11), "", ""]
    columns = list(rows[0])
    assert columns.index("speed_up") < columns.index("mfu") == columns.index("mbu") - 1
    table = runs_table(plan)
    shown = {heading: [row[place].text for row in table.rows] for place, (heading, _) in enumerate(table.columns)}
    assert (shown["MFU"], shown["MBU"]) == (["7\u00a0%", "33\u00a0%", "–"], ["10\u00a0%", "–", "–"])
