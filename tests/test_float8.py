"""Linear layers in 8 bits, compared with the rounding done by hand, with bf16, and with an uncompiled step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from dlscale.config import resolve
from dlscale.core import machine, registry
from dlscale.core.errors import UserError
from dlscale.extensions.fp8 import float8
from dlscale.parallel.world import World
from dlscale.train.build import open_session
from tests.conftest import ROOT, records, train
from tests.test_counting import tiny_run

pytest.importorskip("torchao", reason="torchao is not installed")


def rounded(x: torch.Tensor, kind: torch.dtype, axis: int | None) -> torch.Tensor:
    """Round to 8 bits by hand; one scale for the tensor, or for each line along `axis`."""
    largest = x.abs().amax() if axis is None else x.abs().amax(axis, keepdim=True)
    scale = (torch.finfo(kind).max / largest.double()).float()
    if axis is not None:  # torchao rounds the scales of rows down to powers of 2
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x * scale).to(kind).float() / scale


@pytest.mark.parametrize("precision", float8.RECIPES)
def test_the_products_are_those_of_rounded_factors(precision: str) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 32))
    x, upstream = torch.randn(48, 64, requires_grad=True), torch.randn(48, 32)
    weight, bias = layer[0].weight.detach(), layer[0].bias.detach()
    float8.convert(layer, precision)
    layer(x).backward(upstream)

    forward, backward = torch.float8_e4m3fn, torch.float8_e4m3fn if "row" in precision else torch.float8_e5m2
    across, along = (0, 1) if "row" in precision else (None, None)
    x8, w8 = rounded(x.detach(), forward, along), rounded(weight, forward, along)
    assert torch.allclose(layer(x.detach()), x8 @ w8.T + bias, rtol=1e-4, atol=1e-4)
    w8, g8 = rounded(weight, forward, across), rounded(upstream, backward, along)
    assert torch.allclose(x.grad, g8 @ w8, rtol=1e-4, atol=1e-4)
    x8, g8 = rounded(x.detach(), forward, across), rounded(upstream, backward, across)
    assert torch.allclose(layer[0].weight.grad, g8.T @ x8, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", float8.RECIPES)
def test_a_step_differs_from_bf16_by_the_error_of_the_format(
    precision: str, tmp_path: Path, tiny_data: Callable[[str], Path]
) -> None:
    found = {}
    for kind in ("bf16", precision):
        run = tiny_run("era5_vit", tmp_path / kind, precision=kind)
        session = open_session(run, tiny_data("era5_vit") / "manifest.json", World())
        with_loader = session.loader("train")
        x, y = next(iter(with_loader.epoch(0)))
        loss = session.step.gradients(x, y)
        found[kind] = loss, {name: p.grad.float() for name, p in session.step.model.named_parameters()}
        with_loader.close()
    (loss, gradients), (loss8, gradients8) = found.values()
    assert 0 < abs(loss8 / loss - 1) < 0.02
    assert gradients.keys() == gradients8.keys(), "names in checkpoints must not change"
    error = torch.stack([(gradients8[name] - own).norm() / own.norm() for name, own in gradients.items()])
    assert 0 < error.median() < 0.125  # float8_e5m2 has two mantissa bits, so rounding errs by up to 1/8


@pytest.mark.slow
@pytest.mark.parametrize("over", [{}, {"compile": {"mode": "default"}}], ids=["eager", "compiled"])
def test_a_training_converges_as_in_bf16(
    over: dict[str, Any], tmp_path: Path, tiny_data: Callable[[str], Path]
) -> None:
    losses = {}
    for precision in ("bf16", "fp8", "fp8_rowwise"):
        folder = tmp_path / precision
        tiny_run("era5_vit", folder, precision=precision, training={"epochs": 20}, **over)
        assert train(folder, tiny_data("era5_vit") / "manifest.json") == 0
        losses[precision] = [epoch["valid_loss"] for epoch in records(folder)]
    assert losses["bf16"][-1] < 0.9 * losses["bf16"][0]
    for precision in ("fp8", "fp8_rowwise"):
        assert losses[precision][-1] == pytest.approx(losses["bf16"][-1], rel=0.03)
        assert losses[precision] != losses["bf16"]


def test_runs_without_8_bit_products_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str, model: nn.Module) -> None:
        with pytest.raises(UserError) as error:
            float8.convert(model, "fp8")
        assert words in str(error.value) and "precision: fp8" in str(error.value)

    refused("no linear layer has sizes that are multiples of 16", nn.Sequential(nn.Linear(16, 10)))
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        patched.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
        weight = SimpleNamespace(device=torch.device("cuda"))
        model: Any = SimpleNamespace(parameters=lambda: iter([weight]))
        refused("NVIDIA A100 has no 8-bit matrix products", model)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torchao", None)
        refused("pip install 'dlscale[fp8]'", nn.Sequential(nn.Linear(16, 16)))
    found = registry.table
    for words, over in {
        "precision fp8 and geometry.tp": {"geometry": {"gpus_per_node": 2, "tp": 2}, "loader": {"kind": "direct"}},
        "extension fp8, which is not installed": {},
    }.items():
        if not over:
            monkeypatch.setattr(registry, "table", lambda name, *more: {} if name == "PROVIDES" else found(name, *more))
        with pytest.raises(UserError) as error:
            tiny_run("era5_vit", tmp_path / "refused", precision="fp8", **over)
        assert words in str(error.value)


def test_runs_on_gpus_without_8_bit_products_are_refused_before_their_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dlscale doctor` and each call on a site find the runs; sites with 8-bit products, or without GPUs, are fine."""
    probe = registry.named(registry.table("PROBES")["fp8"])

    def found(precision: str = "fp8", **site: Any) -> list[str]:
        raw = {"targets": ["era5_published"], "plans": {"era5_published": {"settings": {"precision": precision}}}}
        configuration = resolve.load({"site": site, **raw})
        assert probe(configuration, []) == []
        return [str(finding) for finding in probe(configuration)]

    perlmutter = yaml.safe_load((ROOT / "profiles/perlmutter/site.yaml").read_text())
    for precision in float8.RECIPES:
        (line,) = found(precision, **perlmutter)
        assert line.startswith("FAIL  precision fp8: era5_published.base, era5_published.short: needs a GPU with FP8 ")
        assert "the site's nodes (A100-SXM4-40GB)" in line and "; use precision bf16" in line
    assert not found("tf32", **perlmutter)
    assert not found(**perlmutter | {"provides": ["fp8", "dali"]})
    assert not found(**perlmutter | {"provides": None})
    assert not found(**perlmutter | {"gpu": False})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for capability, lines in ((8, 0), 1), ((8, 9), 0):
        monkeypatch.setattr(machine, "nvml", lambda *_, answer=capability: answer)
        assert len(here := found(gpu=True)) == lines
        assert all("this machine" in line and "site.provides" not in line for line in here)
    assert not found(), "a CPU may emulate 8 bits"
