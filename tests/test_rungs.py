"""Each optimisation (rung) of the single-device ladder trains like the plain float32 step, except for rounding."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import os
import shutil
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlscale.config import resolve as config
from dlscale.config.run import RunCore, stage_class
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.machine import missing
from dlscale.core.settings import validate
from dlscale.data.loaders.base import Share
from dlscale.extensions.cosmo_unet.model import UNet3D
from dlscale.extensions.cosmo_unet.scores import l1
from dlscale.extensions.era5_vit.model import ViT
from dlscale.extensions.era5_vit.scores import relative_l2
from dlscale.parallel import strategy
from dlscale.parallel.rendezvous import join
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.world import World
from dlscale.train import attention
from dlscale.train import step as step_
from dlscale.train.attention import attention_context
from dlscale.train.build import build_optimizer, build_step
from dlscale.train.checkpoint import CheckpointRecord, Checkpoints
from dlscale.train.precision import compute_dtype, weight_dtype
from dlscale.train.step import EAGER_STEPS, EAGER_STEPS_OF_RANKS, Graphed, Step, make_state, set_learning_rate
from tests.ranks import spawn

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def need_compiler() -> None:
    """Skip the test if `torch.compile` cannot work; otherwise clear earlier compilations."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.exists() or not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("torch.compile needs a C++ compiler and Python's headers; install g++ and python3-dev")
    torch.compiler.reset()


# --- a tiny step of each study ----------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "cosmo_unet": {
        "model": {"kind": "unet3d", "widths": [8, 12]},
        "samples": {"kind": "crops", "crop": 8},
        "loss": {"kind": "l1"},
    },
    "era5_vit": {
        "model": {"kind": "vit", "patch": 4, "embed_dim": 16, "depth": 1, "heads": 2},
        "samples": {"kind": "pairs"},
        "loss": {"kind": "relative_l2"},
    },
}
#: Optimiser whose update is linear in the gradient. Adam would make a full step of either sign for a gradient near
#: zero.
SGD: dict[str, Any] = {"kind": "sgd", "lr": 0.05, "momentum": 0.9}
SHAPES = {"cosmo_unet": ((4, 8, 8, 8), (5, 8, 8, 8)), "era5_vit": ((3, 8, 16), (3, 8, 16))}
studies = pytest.mark.parametrize("study", RUNS)


def settings(study: str, **over: Any) -> RunCore:
    base = {"study": study, "dataset": "any", "batch_size": 6, "optimizer": dict(SGD), "throughput": {}}
    return validate(stage_class(study, "throughput"), config.merge({**copy.deepcopy(RUNS[study]), **base}, over))


def build(study: str, run: RunCore) -> nn.Module:
    """Return the model as the study builds it; all parameters have random values."""
    torch.manual_seed(0)
    model: nn.Module
    if study == "cosmo_unet":
        model = UNet3D(
            *(4, 5, (8, 12)), checkpointing=run.activation_checkpointing, space_to_depth=run.model.space_to_depth
        )
    else:
        chosen = {name: getattr(run.model, name) for name in ("depth", "dropout")}
        model = ViT((8, 16), (4, 4), 3, 3, 16, heads=2, checkpointing=run.activation_checkpointing, **chosen)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return model


def loss_of(study: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return l1 if study == "cosmo_unet" else relative_l2


def make_step(study: str, **over: Any) -> Step:
    run = settings(study, **over)
    return build_step(run, lambda: build(study, run), loss_of(study))


def batch(study: str, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(size, *shape, generator=generator) for shape in SHAPES[study])
    return x, 0.3 * y


def gradients(step: Step, x: torch.Tensor, y: torch.Tensor) -> Tensors:
    """Return the gradients of a batch in float32, without the loss scale; weights are not changed."""
    step.gradients(x, y)
    scale = step.scaler.get_scale()
    return {name: p.grad.float() / scale for name, p in step.model.named_parameters() if p.grad is not None}


# --- the ladder -------------------------------------------------------------------------------------------------


@dataclass
class Rung:
    """Settings of a rung, and the allowed errors relative to the values of the plain step."""

    over: dict[str, Any]
    value: float = 2e-6  # allowed error of prediction and loss
    gradient: float = 2e-5
    studies: tuple[str, ...] = ("cosmo_unet", "era5_vit")
    slow: bool = False
    plain: dict[str, Any] = field(default_factory=dict)


# Float32 rungs sum in another order: a few hundred roundings of 2^-24 each. In bf16 (8 significant bits), each of about
# ten operations rounds by up to 0.4 %; in fp16 (11 significant bits), by up to 0.05 %. Gradients have twice as many
# roundings, and the sign of the L1 loss may flip for p - t near zero.
BF16: dict[str, Any] = {"value": 0.02, "gradient": 0.12}
FP16: dict[str, Any] = {"value": 0.004, "gradient": 0.06}
ADAM = {"kind": "adam", "lr": 1e-2, "weight_decay": 0.1}
ADAMW = {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1}
COMPILE = {"mode": "default"}
VIT, UNET = ("era5_vit",), ("cosmo_unet",)

RUNGS = {
    "tf32": Rung({"precision": "tf32"}, value=0, gradient=0),  # no effect on a CPU, so the step must be equal
    "fp16": Rung({"precision": "fp16"}, **FP16),
    "bf16": Rung({"precision": "bf16"}, **BF16),
    "fp16_master": Rung({"precision": "fp16_master"}, **FP16),
    "bf16_master": Rung({"precision": "bf16_master"}, **BF16),
    "fp16_pure": Rung({"precision": "fp16_pure"}, **FP16),
    "bf16_pure": Rung({"precision": "bf16_pure"}, **BF16),
    "fused adam": Rung({"optimizer": {**ADAM, "fused": True}}, plain={"optimizer": ADAM}),
    "fused adamw": Rung({"optimizer": {**ADAMW, "fused": True}}, plain={"optimizer": ADAMW}),
    "fused sgd": Rung({"optimizer": {"fused": True}}),
    "channels_last": Rung({"memory_format": "channels_last"}),
    "space_to_depth": Rung({"model": {"space_to_depth": True}}, studies=UNET),
    "flash": Rung({"attention": "flash"}, studies=VIT),
    "math": Rung({"attention": "math"}, studies=VIT, gradient=4e-5),  # relative error with PyTorch 2.11: 3.1e-5
    "auto": Rung({"attention": "auto"}, studies=VIT),
    "accumulation 2": Rung({"accumulation_steps": 2}),
    "accumulation 3": Rung({"accumulation_steps": 3}),
    "accumulation 4": Rung({"accumulation_steps": 4}),  # 6 samples give micro-batches of 2, 2, 1 and 1
    "checkpointing": Rung({"activation_checkpointing": True}, value=0, gradient=0),
    "selective checkpointing": Rung({"activation_checkpointing": "selective"}, studies=VIT, value=0, gradient=0),
    "selective checkpointing, compiled": Rung(
        {"activation_checkpointing": "selective", "compile": COMPILE}, studies=VIT, slow=True
    ),
    "memory budget": Rung({"compile": {**COMPILE, "memory_budget": 0.3}}, slow=True),
    "compile": Rung({"compile": COMPILE}, slow=True),
    "all in bf16": Rung(
        {
            "precision": "bf16",
            "compile": COMPILE,
            "memory_format": "channels_last",
            "accumulation_steps": 2,
            "activation_checkpointing": True,
            "optimizer": {"fused": True},
        },
        slow=True,
        **BF16,
    ),
    "master, in blocks, in parts": Rung(
        {
            "precision": "fp16_master",
            "memory_format": "channels_last",
            "model": {"space_to_depth": True},
            "accumulation_steps": 2,
            "activation_checkpointing": True,
            "optimizer": {"fused": True},
        },
        studies=UNET,
        **FP16,
    ),
    "master, attention, in parts": Rung(
        {
            "precision": "bf16_master",
            "attention": "math",
            "accumulation_steps": 2,
            "activation_checkpointing": True,
            "optimizer": {"fused": True},
        },
        studies=VIT,
        **BF16,
    ),
}
#: Slow case that `make test` runs: settings that work alone may fail together.
TOGETHER = ("era5_vit", "all in bf16")
CASES = [
    pytest.param(
        study, name, id=f"{study}-{name}", marks=[pytest.mark.slow] * (rung.slow and (study, name) != TOGETHER)
    )
    for name, rung in RUNGS.items()
    for study in rung.studies
]


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the relative error: the norm of the difference over the norm of the truth."""
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize(("study", "name"), CASES)
def test_each_rung_trains_like_the_plain_step(study: str, name: str) -> None:
    rung = RUNGS[name]
    if "compile" in rung.over:
        need_compiler()
    plain, step = make_step(study, **rung.plain), make_step(study, **rung.over)
    assert torch.backends.cudnn.benchmark
    assert [p.shape for p in plain.model.parameters()] == [p.shape for p in step.model.parameters()]
    for x, y in (batch(study, 6), batch(study, 5, seed=1)):  # a full batch, then a smaller last batch
        start = copy.deepcopy(plain.weights.state_dict())
        assert distance(step.predict(x), plain.predict(x)) <= rung.value
        expected, found = gradients(plain, x, y), gradients(step, x, y)
        truth, loss = plain(x, y), step(x, y)
        assert loss.dtype == torch.float32 and not loss.requires_grad
        assert abs(float(loss - truth)) <= rung.value * float(truth)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            # the gradient of this bias is mathematically zero, so only rounding remains
            if not key.endswith("attention.k.bias"):
                assert distance(found[key], value) <= rung.gradient, key
        weights = step.weights.state_dict()
        for key, value in plain.weights.state_dict().items():
            assert weights[key].dtype == torch.float32
            if "pure" in name:  # the rounding of weights exceeds the updates
                assert distance(weights[key], value) <= rung.value, key
            elif not key.endswith("attention.k.bias"):
                rounding = torch.finfo(torch.float32).eps * value.norm()  # weights are near 1 and change by 1e-4
                assert (weights[key] - value).norm() <= rung.gradient * (value - start[key]).norm() + rounding, key
        step.load(plain.shards(), step.scaler.state_dict())  # both steps continue with the same weights


@studies
@pytest.mark.parametrize("name", ["bf16", "fp16_master", "accumulation 3", "checkpointing", "channels_last"])
def test_a_step_keeps_no_memory_of_the_batch(study: str, name: str) -> None:
    """After a step, the loader may reuse or release the memory of its batch."""
    step = make_step(study, **RUNGS[name].over)
    x, y = batch(study, 6)
    step(x, y)
    seen = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert [ref() for ref in seen] == [None, None]


def test_checkpointing_repeats_the_same_drop_out() -> None:
    """Checkpointing drops the same values in the recomputed pass, and ends with the random state of a plain step."""
    found = []
    for checkpointing in (False, True):
        step = make_step("era5_vit", activation_checkpointing=checkpointing, model={"dropout": 0.3, "depth": 3})
        torch.manual_seed(3)
        found.append((gradients(step, *batch("era5_vit", 6)), torch.get_rng_state()))
    (plain, state), (twice, again) = found
    assert all(torch.equal(plain[key], twice[key]) for key in plain)
    assert torch.equal(state, again)


# --- number formats ---------------------------------------------------------------------------------------------


@studies
@pytest.mark.parametrize(
    ("precision", "weights", "compute", "scaled"),
    [
        ("fp32", torch.float32, torch.float32, False),
        ("tf32", torch.float32, torch.float32, False),
        ("fp16", torch.float32, torch.float16, True),
        ("bf16", torch.float32, torch.bfloat16, False),
        ("fp16_master", torch.float16, torch.float16, True),
        ("bf16_master", torch.bfloat16, torch.bfloat16, False),
        ("fp16_pure", torch.float16, torch.float16, False),
        ("bf16_pure", torch.bfloat16, torch.bfloat16, False),
    ],
)
def test_formats_of_weights_and_products(
    study: str, precision: str, weights: torch.dtype, compute: torch.dtype, scaled: bool
) -> None:
    step = make_step(study, precision=precision)
    assert (weight_dtype(precision), compute_dtype(precision)) == (weights, compute)
    assert step.scaler.is_enabled() == scaled
    seen: set[torch.dtype] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.convolution, torch.ops.aten.addmm, torch.ops.aten.mm):
                seen.update(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with Watch():
        step(*batch(study, 6))
    assert seen == {compute}
    for module in step.model.modules():
        exact = isinstance(module, nn.LayerNorm) and not precision.endswith("pure")
        assert {p.dtype for p in module.parameters(recurse=False)} <= {torch.float32 if exact else weights}
    pure = precision.endswith("pure")
    assert {p.dtype for p in step.weights.updated} == {weights if pure else torch.float32}
    for state in step.optimizer.state.values():
        assert state["momentum_buffer"].dtype == (weights if pure else torch.float32)
    assert {value.dtype for value in step.weights.state_dict().values()} == {torch.float32}


def test_master_weights_take_updates_that_rounding_would_lose() -> None:
    """Master weights keep small updates: bf16 (8 significant bits) rounds 1 - 1e-3 to 1; 100 updates give 0.9."""

    def trained(precision: str) -> torch.Tensor:
        run = settings("era5_vit", precision=precision, optimizer={"lr": 1e-3, "momentum": 0.0})
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        step = build_step(run, lambda: model, lambda p, t: p.sum(dim=1))
        for _ in range(100):
            step(torch.ones(1, 1), torch.ones(1, 1))
        return step.weights.state_dict()["weight"]

    assert trained("bf16_pure").item() == 1.0
    assert trained("bf16_master").item() == pytest.approx(0.9, rel=1e-5)


def without_part(**over: Any) -> Step:
    """Return a step of a model that has a weight without effect on the loss."""
    model = nn.Linear(1, 1, bias=False)
    model.unused = nn.Parameter(torch.ones(3))
    return build_step(settings("era5_vit", **over), lambda: model, lambda p, t: p.sum(dim=1))


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
def test_a_weight_without_part_in_the_loss_stays_as_it_is(precision: str) -> None:
    """An unused weight stays unchanged despite weight decay, with and without master weights; a used one learns."""
    step = without_part(precision=precision, optimizer={"kind": "adamw", "lr": 1e-3, "weight_decay": 0.1})
    before = copy.deepcopy(step.weights.state_dict())
    step(torch.ones(1, 1), torch.ones(1, 1))
    after = step.weights.state_dict()
    assert torch.equal(after["unused"], before["unused"]) and not torch.equal(after["weight"], before["weight"])


@pytest.mark.parametrize("optimizer", [SGD, {"kind": "adamw", "lr": 1e-3}])
def test_a_training_with_an_empty_shard_continues(optimizer: dict[str, Any]) -> None:
    one, other, x = without_part(optimizer=optimizer), without_part(optimizer=optimizer), torch.ones(1, 1)
    one.load(one.shards(), one.scaler.state_dict())  # as if saved before the optimiser's first step
    one(x, x)
    make_state(other.optimizer)
    assert other.shards().keys() == one.shards().keys()
    other.load({name: shard.copy("cpu") for name, shard in one.shards().items()}, one.scaler.state_dict())
    for step in (one, other):
        step(x, x)
    assert all(torch.equal(value, one.weights.state_dict()[key]) for key, value in other.weights.state_dict().items())


def test_loaded_weights_are_used_for_computing() -> None:
    """Loaded weights, including frozen weights, are used for computing, even if no weight has a master copy."""
    run = settings("era5_vit", precision="bf16_master")
    for frozen in ("weight", "bias"), ("weight",):
        model = nn.Linear(2, 1)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        model.add_module("norm", nn.LayerNorm(1))
        step = build_step(run, lambda model=model: model, lambda p, t: p.sum(dim=1))
        step.weights.load_state_dict({name: 3.0 * torch.ones_like(p) for name, p in step.weights.state_dict().items()})
        assert all((p == 3.0).all() for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_that_overflows_changes_no_weight(fused: bool) -> None:
    step = make_step("era5_vit", precision="fp16_master", optimizer={"fused": fused})
    before, scale = copy.deepcopy(step.weights.state_dict()), step.scaler.get_scale()
    x, y = batch("era5_vit", 6)
    step(x, 1e-9 * y)  # smaller targets give larger losses, because the loss is relative to the target
    assert step.scaler.get_scale() == scale / 2
    assert all(torch.equal(value, before[key]) for key, value in step.weights.state_dict().items())
    step(x, y)
    assert not any(torch.equal(value, before[key]) for key, value in step.weights.state_dict().items() if "norm" in key)


@pytest.mark.parametrize("precision", ["fp16", "fp16_master"])
def test_a_constant_loss_scale_trains_as_the_dynamic_scale_of_this_value(precision: str) -> None:
    """Updates equal those of PyTorch's dynamic scaler; the constant scale survives growth, overflow and checkpoint.

    The dynamic scale begins at 65536, which is the constant scale of this test.
    """
    x, y = batch("era5_vit", 6)
    dynamic, constant, restored = (
        make_step("era5_vit", precision=precision, **over) for over in ({}, *({"loss_scale": 65536.0},) * 2)
    )
    small = make_step("era5_vit", precision=precision, loss_scale=128.0)
    assert (dynamic.scaler.get_scale(), small.scaler.get_scale()) == (65536.0, 128.0)
    constant.scaler.set_growth_interval(1)
    for _ in range(3):
        assert torch.equal(dynamic(x, y), constant(x, y))
    a, b = dynamic.weights.state_dict(), constant.weights.state_dict()
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    b = copy.deepcopy(b)
    constant(x, 1e-9 * y)  # overflows, because smaller targets give larger losses
    assert all(torch.equal(value, b[name]) for name, value in constant.weights.state_dict().items())
    make_state(restored.optimizer)
    restored.load({name: shard.copy("cpu") for name, shard in constant.shards().items()}, constant.scaler.state_dict())
    for step in (restored, constant, dynamic):
        step(x, y)
        assert step.scaler.get_scale() == 65536.0
        assert all(
            torch.equal(value, step.weights.state_dict()[key]) for key, value in restored.weights.state_dict().items()
        )


def test_kept_norms_compute_as_those_of_master_weights() -> None:
    """With `keep_norms_fp32`, prediction and loss equal those of fp16_master, which has its norms in 32 bits."""

    def step(precision: str, **over: Any) -> Step:
        def make() -> nn.Module:
            norms = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Flatten(), nn.LayerNorm(672)
            model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), *norms, nn.Linear(672, 4))
            for norm in (1, 2, 4):
                nn.init.uniform_(model[norm].weight, 0.5, 2.0)
            return model

        run = settings("era5_vit", precision=precision, **over)
        return build_step(run, make, lambda p, t: (p - t[:, 0, 0, :4]).square().mean(1))

    x, y = batch("era5_vit", 6)
    kept, master, pure = step("fp16_pure", keep_norms_fp32=True), step("fp16_master"), step("fp16_pure")
    values = kept.predict(x)
    assert torch.equal(values, master.predict(x)) and not torch.equal(values, pure.predict(x))
    formats = [next(layer.parameters(), x).dtype for layer in kept.model]
    assert formats == [torch.float16, *[torch.float32] * 4, torch.float16]  # `Flatten` has no weights
    before = copy.deepcopy(kept.weights.state_dict())
    loss = kept(x, y)
    assert torch.equal(loss, master(x, y)) and loss.isfinite() and kept.predict(x).isfinite().all()
    assert not any(torch.equal(v, before[name]) for name, v in kept.weights.state_dict().items() if name[0] in "124")


def test_a_scaled_gradient_is_clipped_after_unscaling() -> None:
    """The gradient is clipped after unscaling; the norm of the scaled gradient is thousands of times greater."""
    moved = []
    for precision in ("fp32", "fp16"):
        step = make_step("era5_vit", precision=precision, optimizer={"clip_norm": 0.01})
        before = copy.deepcopy(step.weights.state_dict())
        step(*batch("era5_vit", 6))
        moved.append(torch.cat([(v - before[name]).flatten() for name, v in step.weights.state_dict().items()]))
    assert distance(moved[1], moved[0]) <= 0.01


@studies
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("precision", ["fp16", "bf16_master", "fp16_master", "bf16_pure"])
def test_a_restored_step_continues_bit_by_bit(study: str, precision: str, fused: bool, tmp_path: Path) -> None:
    over = {"precision": precision, "optimizer": {**ADAM, "fused": fused}, "memory_format": "channels_last"}
    batches = [batch(study, 6, seed) for seed in range(4)]
    straight, first, second = (make_step(study, **over) for _ in range(3))
    for x, y in batches:
        straight(x, y)
    for x, y in batches[:2]:
        first(x, y)
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(CheckpointRecord(scaler=first.scaler.state_dict()), first.shards())
    for x, y in batches[:2]:
        first(x, y)  # these steps must not change the saved state, however long the write takes
    checkpoints.wait()
    make_state(second.optimizer)
    loaded = checkpoints.load(lambda record: {name: shard.empty() for name, shard in second.shards().items()})
    second.load(loaded[1], loaded[0].scaler)
    for x, y in batches[2:]:
        second(x, y)
    a, b = straight.weights.state_dict(), second.weights.state_dict()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert all(torch.equal(p, q) for p, q in zip(straight.model.parameters(), second.model.parameters(), strict=True))
    assert straight.scaler.state_dict() == second.scaler.state_dict()
    assert torch.equal(straight.predict(x), second.predict(x))


# --- order in memory, few channels ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_layers_of_few_channels_are_computed_on_blocks_of_cells(layout: str) -> None:
    """On blocks of 2^3 cells, 4 input channels become 32, 5 output channels become 40; copies are in bf16."""
    step = make_step("cosmo_unet", model={"space_to_depth": True}, memory_format=layout, precision="bf16")
    kernels: list[tuple[int, ...]] = []
    copies: list[torch.dtype] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket is torch.ops.aten.convolution:
                kernels.append(tuple(args[1].shape))
                # On a CPU without bfloat16 instructions, PyTorch chooses the layout of results.
                for value in () if missing(["bf16"]) else (args[0], result):
                    assert value.is_contiguous(memory_format=torch.channels_last_3d) == (layout == "channels_last")
            elif (
                func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.constant_pad_nd) and args[0].shape[0] == 3
            ):
                copies.append(result.dtype)
            return result

    x, y = batch("cosmo_unet", 3)
    with Watch():
        step(x, y)
    assert kernels == [(8, 32, 2, 2, 2), (12, 8, 4, 4, 4), (12, 8, 4, 4, 4), (16, 40, 2, 2, 2)]
    # Each of the two convolutions on blocks copies three times: padded input and cropped output in the forward pass,
    # and padded gradient in the backward pass. The network's input needs no gradient.
    assert copies == [torch.bfloat16] * 6


# --- attention --------------------------------------------------------------------------------------------------

SHAPE = (2, 2, 32, 8)


def test_auto_selects_the_fastest_and_reports_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = {"flash": 3e-3, "math": 2e-3, "cudnn": 4e-3}

    def pretended(name: str, *rest: Any) -> float:
        if name not in seconds:
            raise RuntimeError("no such kernel")
        return seconds[name]

    monkeypatch.setattr(attention, "_seconds", pretended)
    with caplog.at_level(logging.INFO):
        context = attention_context("auto", SHAPE, torch.bfloat16, CPU)
    assert context.args == ("math",)  # type: ignore[attr-defined]
    assert "attention math" in caplog.text
    context = attention_context("auto", SHAPE, torch.bfloat16, CPU, agreed=lambda mine: "flash")
    assert context.args == ("flash",), "all ranks must use the same kernel"  # type: ignore[attr-defined]
    assert "cudnn 4.00 ms, flash 3.00 ms, math 2.00 ms" in caplog.text


@pytest.mark.parametrize("kind", ["auto", "flash"])
def test_too_little_memory_for_any_kernel_is_reported(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def failed(*values: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention, "_seconds", failed)
    with pytest.raises(torch.OutOfMemoryError):
        attention_context(kind, SHAPE, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"attention": "efficient"}, "attention: efficient cannot compute .* or one of: flash, math"),
        ({"attention": "cudnn"}, "attention: cudnn cannot compute .* or one of: flash, math"),
        ({"cuda_graph": True, "optimizer": {"fused": True}}, "cuda_graph: the device is cpu"),
    ],
    ids=["efficient", "cudnn", "graph"],
)
def test_gpu_features_are_refused_on_a_cpu(over: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_step("era5_vit", **over)


@pytest.mark.parametrize(("kind", "flash"), [("default", True), ("flash", True), ("math", False)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_chosen_kernel_computes_both_passes(kind: str, flash: bool, checkpointing: bool) -> None:
    step = make_step("era5_vit", attention=kind, activation_checkpointing=checkpointing)
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    x, y = batch("era5_vit", 6)
    with Watch():
        step(x, y)
    # The count includes the recomputed pass.
    assert seen.count("aten._scaled_dot_product_flash_attention_for_cpu") == flash * (1 + checkpointing)
    assert seen.count("aten._scaled_dot_product_flash_attention_for_cpu_backward") == flash
    seen.clear()
    with Watch():
        step.predict(x)
    assert seen.count("aten._scaled_dot_product_flash_attention_for_cpu") == flash


def test_an_empty_batch_runs_without_kernels() -> None:
    """Prediction of an empty batch uses neither the chosen attention kernel nor compiled code."""
    step, (x, y) = make_step("cosmo_unet"), batch("cosmo_unet", 2)

    def refused(*values: Any) -> Any:
        raise AssertionError

    step.attention = step._predict = refused
    assert step.predict(x[:0]).shape == (0, *y.shape[1:]) and not step.model.training


@pytest.mark.slow
def test_the_chosen_kernel_is_compiled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen kernel is compiled even if the disk cache has the same model with another kernel."""
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for kind, flash in (("default", True), ("math", False), ("flash", True), ("default", True)):
        need_compiler()
        _, codes = run_and_get_code(make_step("era5_vit", attention=kind, compile=COMPILE), *batch("era5_vit", 6))
        assert len(codes) == 2, "expected one forward and one backward graph"
        assert ["flash_attention" in code for code in codes] == [flash, flash], kind


# --- compilation ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "math"])
def test_each_shape_is_compiled_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs with a smaller last batch compile four graphs: two batch sizes, each for training and prediction."""
    inductor = torch.compile

    def traced(function: Any, mode: str, dynamic: bool) -> Any:
        # the eager backend suffices, because Dynamo decides when to compile
        return inductor(function, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr(step_, "check_compiler", lambda mode: None)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    step = make_step("era5_vit", compile=COMPILE, attention=kind)
    counts = []
    for epoch in range(3):
        for size in (6, 6, 4):
            set_learning_rate(step.optimizer, 0.1 / (epoch + size))
            step(*batch("era5_vit", size))
        for size in (6, 4):
            step.predict(batch("era5_vit", size)[0])
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    step.predict(batch("era5_vit", 1)[0], once=True)
    counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    assert counts == [4, 4, 4, 4]
    assert not torch._dynamo.utils.counters["graph_break"]


def test_without_a_compiler_there_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    with monkeypatch.context() as patched:
        patched.setattr(cpp_builder, "get_cpp_compiler", none)
        with pytest.raises(UserError, match=r"compile.mode default: .* lacks a C\+\+ compiler .* Install g\+\+"):
            make_step("era5_vit", compile=COMPILE)


# --- CUDA graphs ------------------------------------------------------------------------------------------------


class Recorder:
    """Stand-in for CUDA graphs: it replays the recorded function on static memory, and logs the calls."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def reset(self) -> None:
        self.log.append(("reset", 0))

    def run(self, body: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.log.append(("run", len(x)))
        return body(x, y)

    def record(self, body: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor]:
        self.log.append(("record", len(x)))
        result = torch.zeros(())

        def replay() -> None:
            self.log.append(("replay", len(x)))
            result.copy_(body(x, y))

        return replay, result


def test_graphs_are_chosen_by_shape_and_rare_shapes_have_none() -> None:
    recorder = Recorder()
    graphed = Graphed(lambda x, y: (x * y).sum(), recorder)  # type: ignore[arg-type]
    kept = []
    for epoch in range(2):
        for size in (4, 4, 4, 2):
            x, y = torch.full((size, 1), float(epoch + 1)), torch.full((size, 1), float(len(kept)))
            kept.append(graphed(x, y))
            x.fill_(math.nan)  # overwrite the batch, as the loader does with its next batch
    assert [loss.item() for loss in kept] == [
        size * (epoch + 1) * (4 * epoch + i) for epoch in range(2) for i, size in enumerate((4, 4, 4, 2))
    ], "later replays must not change earlier losses"
    assert EAGER_STEPS == 3
    assert recorder.log == [
        *[("reset", 0), ("run", 4), ("run", 4), ("run", 4), ("run", 2)],
        *[("record", 4), ("replay", 4), ("replay", 4), ("replay", 4), ("run", 2)],
    ]
    graphed.reset()
    graphed(torch.ones(4, 1), torch.ones(4, 1))
    assert recorder.log[-2:] == [("reset", 0), ("run", 4)]


class Tape(Recorder):
    """Simulation of a CUDA graph on the CPU: it records operations, and repeats them on the same memory.

    Decisions in Python, and all numbers passed from Python, stay as recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replays, self.waits = 0, 0

    def record(self, body: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor]:
        done: list[tuple[Any, Any, Any, list[Any]]] = []

        class Note(TorchDispatchMode):
            def __torch_dispatch__(note, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.waits += func.overloadpacket is torch.ops.aten._local_scalar_dense
                result = func(*args, **(kwargs or {}))
                done.append((func, args, kwargs or {}, tree_leaves(result)))
                return result

        with Note():
            loss = body(x, y)
        replays = itertools.count()

        @torch.no_grad()
        def replay() -> None:
            if next(replays):  # skip the first replay: the recording has already run the same batch
                self.replays += 1
                for func, args, kwargs, results in done:
                    for old, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                            old.copy_(new)

        return replay, loss


def capturable(study: str, **over: Any) -> Step:
    """Return a step as `cuda_graph` builds it, but on the CPU."""
    step = make_step(study, **over)
    step.optimizer = build_optimizer(step.weights.updated, settings(study, **over).optimizer, CPU)
    return step


@pytest.mark.parametrize(
    "over",
    [
        {"optimizer": {**ADAM, "fused": True}},
        {"optimizer": {"fused": True}, "precision": "fp16"},
        {"optimizer": {**ADAM, "fused": True}, "precision": "fp16", "accumulation_steps": 2},
        {"optimizer": {**ADAMW, "fused": True}, "precision": "fp16_master"},
        {"optimizer": {**ADAM, "fused": True}, "precision": "bf16_master", "memory_format": "channels_last"},
    ],
    ids=str,
)
def test_a_replayed_step_equals_the_plain_step(over: dict[str, Any]) -> None:
    """Replayed and plain steps agree bitwise, even if gradients overflow: the graph scales losses and skips updates."""
    (plain, graphed), tape = (capturable("era5_vit", **over) for _ in range(2)), Tape()
    graphed.capture(tape)  # type: ignore[arg-type]
    for step in (plain, graphed):
        step.scaler.set_growth_interval(4)
    scales = []
    for number in range(14):
        x, y = batch("era5_vit", 4 if number % 5 == 4 else 6, seed=number)
        if number in (8, 11):
            y = 1e-9 * y  # smaller targets give larger losses, because the loss is relative to the target
        for step in (plain, graphed):
            set_learning_rate(step.optimizer, 1e-3 * (number + 1))
        assert torch.equal(plain(x, y), graphed(x, y)), number
        assert plain.scaler.state_dict() == graphed.scaler.state_dict(), number
        scales.append(plain.scaler.get_scale())
        a, b = plain.weights.state_dict(), graphed.weights.state_dict()
        assert all(torch.equal(a[key], b[key]) for key in a), number
    assert tape.replays >= 7 and tape.waits == 0
    if plain.scaler.is_enabled():
        # The replays must include an overflow and a growth of the loss scale.
        assert {after / before for before, after in itertools.pairwise(scales)} == {0.5, 1.0, 2.0}


def test_gradient_averaging_is_created_on_the_graphs_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    @contextmanager
    def aside() -> Iterator[None]:
        log.append("aside")
        yield
        log.append("back")

    def averaging(network: nn.Module, **options: Any) -> Any:
        log.append(options["bucket_cap_mb"])
        return SimpleNamespace(_set_ddp_runtime_logging_sample_rate=log.append)

    monkeypatch.setattr(strategy, "DistributedDataParallel", averaging)
    two = strategy.strategy_of(settings("era5_vit"), World(0, 2))
    two.wrap(make_step("era5_vit").network, Sharding(), aside)
    assert log == ["aside", None, "back", 2**31 - 1] and two.exchanges


def _train_graphed(rank: int, port: int, folder: str, tp: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    run, recorder = settings("era5_vit", geometry={"gpus_per_node": 2, "tp": tp}), Recorder()
    with join(run.geometry, "cpu") as world:
        divide = registry.study("era5_vit").sharding
        step = build_step(run, lambda: build("era5_vit", run), relative_l2, world, divide)
        assert (step.divided is not None) == (tp > 1)
        for group in step.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        step.capture(recorder)  # type: ignore[arg-type]
        share = Share(6, world.data_rank, world.data_size)
        for number in range(SHARED):
            for part, samples in enumerate((6, 5)):
                x, y = batch("era5_vit", samples, seed=2 * number + part)
                own = share.indices(0, samples)
                step(x[own.start : own.stop], y[own.start : own.stop], share.weight(0, samples))
        kinds = [(what, size if what != "run" else 0) for what, size in recorder.log]
        torch.save((kinds, step.weights.state_dict()), Path(folder, f"{rank}.pt"))


SHARED = 14  #: Number of full batches, each followed by a batch in which one rank has one sample more.


@pytest.mark.parametrize("tp", [1, 2], ids=["data parallel", "tensor parallel"])
def test_ranks_record_and_replay_alike(tmp_path: Path, tp: int) -> None:
    """Two processes, even with unequal numbers of samples, record and replay at the same steps, and train like one."""
    spawn(_train_graphed, (20000 + os.getpid() % 20000, str(tmp_path), tp), 2)
    (kinds, weights), (others, same) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert kinds == others
    assert (EAGER_STEPS, EAGER_STEPS_OF_RANKS) == (3, 11)
    if tp == 1:
        assert kinds == [("reset", 0)] + [("run", 0)] * 22 + [("record", 3)] + [("replay", 3), ("run", 0)] * 3
    else:  # both processes have all samples, so each size of batch has a graph
        recorded = [("record", 6), ("replay", 6), ("record", 5), ("replay", 5)]
        assert kinds == [("reset", 0)] + [("run", 0)] * 6 + recorded + [("replay", 6), ("replay", 5)] * 10
    plain = make_step("era5_vit")
    for number in range(SHARED):
        for part, samples in enumerate((6, 5)):
            plain(*batch("era5_vit", samples, seed=2 * number + part))
    for key, value in plain.weights.state_dict().items():
        assert torch.equal(weights[key], same[key])
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@studies
@pytest.mark.parametrize(
    "over",
    [
        {"optimizer": ADAM},
        {"optimizer": {**ADAM, "fused": True}},
        {"optimizer": {"fused": True}},
        {"precision": "bf16", "accumulation_steps": 2},
        {"precision": "bf16_master", "memory_format": "channels_last"},
        {"precision": "fp16"},
        {"precision": "fp16_master", "optimizer": {**ADAM, "fused": True}},
        {"activation_checkpointing": True},
        {"compile": {"mode": "default"}},
    ],
    ids=str,
)
def test_a_cuda_graph_trains_like_the_eager_step(study: str, over: dict[str, Any]) -> None:
    device = torch.device("cuda")
    over = config.merge({"optimizer": {"fused": True}}, over)
    steps = []
    for graph in (False, True):
        run = settings(study, **over, cuda_graph=graph)
        steps.append(build_step(run, partial(build, study, run), loss_of(study), World(device=device)))
    for number in range(12):
        x, y = (t.to(device) for t in batch(study, 4 if number % 2 else 6, seed=number))
        losses = []
        for step in steps:
            set_learning_rate(step.optimizer, 1e-3 * (number + 1))
            losses.append(float(step(x, y)))
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
        x.fill_(math.nan)
    a, b = (step.weights.state_dict() for step in steps)
    # Gradients are summed in any order, and Adam turns a gradient near zero into a full step of either sign: see
    # `graph_equals_eager` in bench/gpu_checks.py. A stale batch or learning rate would give a relative error of 0.1.
    assert all(distance(b[key], a[key]) < 2e-2 for key in a if not key.endswith("attention.k.bias"))


# --- invalid combinations ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "over", "said"),
    [
        ("era5_vit", {"optimizer": {"kind": "adam", "momentum": 0.9}}, "unknown key 'momentum'"),
        ("era5_vit", {"optimizer": {"kind": "sgd", "betas": [0.9, 0.99]}}, "unknown key 'betas'"),
        ("era5_vit", {"optimizer": {"kind": "sgdd"}}, "did you mean 'sgd'"),
        ("era5_vit", {"model": {"space_to_depth": True}}, "model: unknown key 'space_to_depth'"),
        ("cosmo_unet", {"attention": "flash"}, "attention: the model of study cosmo_unet does not support"),
        ("cosmo_unet", {"accumulation_steps": 7}, "accumulation_steps 7 is more than the 6 samples"),
        (
            "cosmo_unet",
            {"accumulation_steps": 2, "compile": {"mode": "max-autotune"}},
            "accumulation_steps and compile",
        ),
        ("cosmo_unet", {"precision": "fp16_pure", "optimizer": {"kind": "adam"}}, "optimizer.eps 1e-08 is zero"),
        ("cosmo_unet", {"precision": "bf16", "loss_scale": 128.0}, "only fp16 and fp16_master scale the loss"),
        ("cosmo_unet", {"precision": "fp16_pure", "loss_scale": 128.0}, "loss_scale and precision fp16_pure"),
        ("cosmo_unet", {"precision": "fp16", "loss_scale": 0.0}, "loss_scale"),
        ("cosmo_unet", {"precision": "fp16_master", "keep_norms_fp32": True}, "keep_norms_fp32 and precision"),
        (
            "cosmo_unet",
            {"precision": "bf16_pure", "keep_norms_fp32": True, "parallel": {"kind": "fsdp"}},
            "keep_norms_fp32 and parallel.kind fsdp",
        ),
        ("cosmo_unet", {"cuda_graph": True}, "optimizer.fused"),
        ("cosmo_unet", {"cuda_graph": True, "compile": {"mode": "max-autotune"}}, "compile.mode max-autotune"),
        ("cosmo_unet", {"cuda_graph": True, "compile": {"mode": "reduce-overhead"}}, "compile.mode reduce-overhead"),
        ("cosmo_unet", {"cuda_graph": True, "precision": "fp16"}, "precision fp16 need optimizer.fused"),
        ("cosmo_unet", {"cuda_graph": True, "precision": "fp16_master"}, "or use precision bf16 or bf16_master"),
        (
            "era5_vit",
            {
                "cuda_graph": True,
                "optimizer": {"fused": True},
                "activation_checkpointing": True,
                "model": {"dropout": 0.1},
            },
            "cuda_graph and activation_checkpointing",
        ),
    ],
)
def test_what_cannot_be_is_refused(study: str, over: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        settings(study, **over)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ({}, partial(torch.optim.Adam, lr=2e-4)),
        ({"kind": "adamw", "eps": 1e-7}, partial(torch.optim.AdamW, lr=2e-4, eps=1e-7, weight_decay=0.0)),
        ({"kind": "sgd", "momentum": 0.9}, partial(torch.optim.SGD, lr=2e-4, momentum=0.9)),
        ({"kind": "adadelta", "lr": 1.0}, partial(torch.optim.Adadelta, lr=1.0)),
        ({"kind": "adadelta", "lr": 0.5}, partial(torch.optim.Adadelta, lr=0.5)),
    ],
    ids=str,
)
def test_the_optimiser_is_pytorchs_own(written: dict[str, Any], plain: Any) -> None:
    raw = {**copy.deepcopy(RUNS["era5_vit"]), "study": "era5_vit", "dataset": "any", "throughput": {}}
    run: RunCore = validate(stage_class("era5_vit", "throughput"), raw | {"optimizer": written})
    step, model = build_step(run, lambda: build("era5_vit", run), relative_l2), build("era5_vit", run)
    optimizer = plain(model.parameters())
    assert step.optimizer.defaults == optimizer.defaults, "all defaults must equal PyTorch's"
    for seed in range(3):
        x, y = batch("era5_vit", 6, seed)
        step(x, y)
        optimizer.zero_grad()
        relative_l2(model(x), y).mean().backward()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), model.parameters(), strict=True))


# --- inputs of the model -----------------------------------------------------------------------------------------


def test_indices_reach_the_model_as_indices() -> None:
    step = build_step(
        settings("era5_vit", precision="bf16_pure"), lambda: nn.Embedding(9, 3), lambda p, t: p.mean((1, 2))
    )
    assert step.predict(torch.randint(0, 9, (6, 4))).shape == (6, 4, 3)
