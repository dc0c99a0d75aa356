"""Models equal explicit formulas, have the published numbers of parameters, and evaluate without drop-out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dlscale.config.run import stage_class
from dlscale.core.errors import UserError
from dlscale.extensions.cosmo_unet.model import UNet3D
from dlscale.extensions.cosmo_unet.scores import l1
from dlscale.extensions.era5_vit.model import Attention, ViT, _Patches
from dlscale.extensions.imagenet_resnet50.model import DEPTHS, ResNet, cross_entropy
from dlscale.train.build import build_step
from dlscale.train.precision import CONVOLUTIONS, check_channels_last, check_convolutions
from tests.test_rungs import need_compiler


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def vit(**settings: object) -> ViT:
    """Return a small ViT whose grid and patches are not square."""
    chosen = {"image_size": (8, 18), "patch": (2, 3), "in_channels": 3, "out_channels": 3, "embed_dim": 16}
    return ViT(**{**chosen, "depth": 2, "heads": 4, **settings})  # type: ignore[arg-type]


def unet(**settings: object) -> UNet3D:
    return UNet3D(**{"in_channels": 4, "out_channels": 5, "widths": (4, 6, 8), **settings})  # type: ignore[arg-type]


def roughened(model: nn.Module, seed: int = 1) -> nn.Module:
    """Add random numbers to every parameter, so that a formula without a bias, norm or position gives other values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


# --- numbers of parameters --------------------------------------------------------------------------------------


def test_the_published_unet_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = UNet3D(4, 5)
    assert count(model) == 116_977_029


@pytest.mark.parametrize(("embed_dim", "parameters"), [(384, 23_832_960), (1024, 157_926_400)])
def test_the_published_vits_have_their_parameters(embed_dim: int, parameters: int) -> None:
    with torch.device("meta"):
        model = ViT((360, 720), (8, 8), 20, 20, embed_dim=embed_dim)
    assert count(model) == parameters


def test_the_parameters_of_a_unet_equal_the_sum_over_layers() -> None:
    a, b, c, cells = 7, 11, 3, 4**3
    expected = (2 * a + a * b + b * c + c * b + 2 * b * a + 2 * a * 5) * cells  # weights on the way down, then up
    assert count(UNet3D(2, 5, widths=(a, b, c))) == expected + a + b + c + b + a + 5


# --- initial weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.02, 0.1])
def test_unet_weights_are_normal_and_biases_zero(std: float) -> None:
    torch.manual_seed(0)
    model = unet(widths=(32, 64, 64), **({} if std == 0.02 else {"init_std": std}))
    seen = 0
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
            continue
        w = p.detach().double() / std
        n = w.numel()
        # The limits are five standard errors of the mean, the standard deviation and the fourth moment of normal
        # numbers.
        assert abs(w.mean()) < 5 / math.sqrt(n), name
        assert abs(w.std() - 1) < 5 / math.sqrt(2 * n), name
        assert abs((w**4).mean() - 3) < 5 * math.sqrt(96 / n), name
        seen += 1
    assert seen == 2 * 3


def test_vit_linear_weights_are_normal_and_biases_zero() -> None:
    torch.manual_seed(0)
    model = vit(embed_dim=64, image_size=(32, 36))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert abs(module.weight.detach().std() - 0.02) < 0.001, name
            assert abs(module.weight.detach().mean()) < 0.002, name
            assert module.bias is None if name == "head" else not module.bias.any(), name
    assert abs(model.position.detach().std() - 0.02) < 0.001


# --- evaluation and drop-out ------------------------------------------------------------------------------------


def test_dropouts_act_in_training_and_are_off_in_evaluation() -> None:
    plain, dropping = roughened(vit()), vit(dropout=0.5)
    dropping.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3, 8, 18)
    assert torch.equal(dropping.eval()(x), plain.eval()(x))
    torch.manual_seed(3)
    first, second = dropping.train()(x), dropping(x)
    assert not torch.equal(first, second)
    assert not torch.allclose(first, plain.train()(x), rtol=0.01)
    assert torch.equal(plain(x), plain.eval()(x))


# --- explicit formulas ------------------------------------------------------------------------------------------


def conv_down(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Compute a convolution (kernel 4, stride 2, padding 1) as an explicit sum.

    x is [C, D, H, W], weight is [O, C, 4, 4, 4].
    """
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (1, 1)))
    y = np.empty((len(weight), *(n // 2 for n in x.shape[1:])))
    for i, j, k in np.ndindex(y.shape[1:]):
        window = padded[:, 2 * i : 2 * i + 4, 2 * j : 2 * j + 4, 2 * k : 2 * k + 4]
        y[:, i, j, k] = [(window * w).sum() for w in weight] + bias
    return y


def conv_up(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Compute a transposed convolution (kernel 4, stride 2, padding 1): spread cells over 4^3, then crop the rim."""
    y = np.zeros((weight.shape[1], *(2 * n + 2 for n in x.shape[1:])))
    for i, j, k in np.ndindex(x.shape[1:]):
        spread = (x[:, i, j, k][:, None, None, None, None] * weight).sum(axis=0)
        y[:, 2 * i : 2 * i + 4, 2 * j : 2 * j + 4, 2 * k : 2 * k + 4] += spread
    return y[:, 1:-1, 1:-1, 1:-1] + bias[:, None, None, None]


@pytest.mark.parametrize(
    ("widths", "grid"), [((2,), (8, 16, 8)), ((2, 3, 4), (8, 16, 8)), ((2, 3, 4), (8, 8, 8))], ids=str
)  # in the last case, the lowest level has a single cell
def test_unet_equals_an_explicit_implementation(widths: tuple[int, ...], grid: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = roughened(UNet3D(2, 3, widths=widths).double())
    x = torch.randn(1, 2, *grid, dtype=torch.float64)
    weights = {key: value.numpy() for key, value in model.state_dict().items()}

    def parameters(layer: str) -> tuple[np.ndarray, np.ndarray]:
        return weights[f"{layer}.weight"], weights[f"{layer}.bias"]

    levels = len(widths)
    skips = [x[0].numpy()]
    for level in range(levels):
        y = conv_down(skips[-1], *parameters(f"down.{level}.0"))
        skips.append(np.where(y > 0, y, 0.01 * y))
    y = skips[levels]
    for level in range(levels - 1):
        y = np.maximum(conv_up(y, *parameters(f"up.{level}.0")), 0)
        y = np.concatenate([y, skips[levels - 1 - level]])
    expected = np.tanh(conv_up(y, *parameters("last")))
    np.testing.assert_allclose(model(x)[0].detach().numpy(), expected, rtol=0, atol=1e-12)
    assert expected.std() > 0.1, "the expected values must not be almost constant"


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize(
    ("settings", "grid"),
    [
        ({}, (8, 8, 8)),
        ({}, (8, 24, 16)),
        ({"widths": (5,)}, (2, 4, 6)),
        ({"in_channels": 1, "out_channels": 1}, (8, 8, 8)),
        ({"checkpointing": True}, (16, 8, 8)),
    ],
    ids=str,
)
def test_unet_on_blocks_is_the_plain_one(
    settings: dict[str, Any], grid: tuple[int, ...], layout: torch.memory_format
) -> None:
    """With `space_to_depth`, the U-Net loads the plain U-Net's weights and has its predictions and gradients."""
    torch.manual_seed(0)
    plain = roughened(unet(**settings).double())
    blocks = unet(space_to_depth=True, **settings).double()
    blocks.load_state_dict(plain.state_dict())
    values = torch.randn(3, plain.down[0][0].in_channels, *grid, dtype=torch.float64)  # type: ignore[index, union-attr]
    target = torch.randn(3, plain.last.out_channels, *grid, dtype=torch.float64)  # type: ignore[union-attr]
    found = []
    for model in (plain, blocks):
        model.to(memory_format=layout)  # type: ignore[call-overload]
        x = values.clone().to(memory_format=layout).requires_grad_()
        y = model(x)
        (y * target).sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        assert float((one - other).abs().max()) <= 1e-12 * max(1.0, float(one.abs().max())), (
            "the error is relative to at least 1, because sums may cancel"
        )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_unet_on_blocks_keeps_the_memory_format_and_accepts_an_empty_batch(layout: torch.memory_format) -> None:
    models = [unet(space_to_depth=each).to(memory_format=layout) for each in (False, True)]  # type: ignore[call-overload]
    x = torch.randn(2, 4, 8, 8, 16).to(memory_format=layout)
    assert models[0](x).stride() == models[1](x).stride()
    models[1](x[:0]).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in models[1].parameters())


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def explicit_attention(x: np.ndarray, w: dict[str, np.ndarray], heads: int) -> np.ndarray:
    """Compute softmax(q k^T / sqrt(K)) v for each head; x is [N, E]."""
    q, k, v = (x @ w[f"{name}.weight"].T + w[f"{name}.bias"] for name in "qkv")
    width = x.shape[1] // heads
    parts = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        parts.append(softmax(q[:, part] @ k[:, part].T / math.sqrt(width)) @ v[:, part])
    return np.concatenate(parts, axis=1) @ w["projection.weight"].T + w["projection.bias"]


def test_attention_equals_the_formula() -> None:
    torch.manual_seed(0)
    attention = roughened(Attention(12, 3, 0.0).double()).eval()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    weights = {key: value.numpy() for key, value in attention.state_dict().items()}
    expected = np.stack([explicit_attention(sample, weights, 3) for sample in x.numpy()])
    np.testing.assert_allclose(attention(x).detach().numpy(), expected, rtol=0, atol=1e-12)


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + 1e-6) * weight + bias


@pytest.mark.parametrize("residual", [False, True, "linear"])
def test_vit_equals_an_explicit_implementation(residual: bool | str) -> None:
    torch.manual_seed(0)
    model = roughened(vit(in_channels=3, out_channels=2, residual=residual).double()).eval()
    with torch.no_grad():  # the tokens are so small that the epsilon of the norms (1e-6) matters
        for p in (*model.embedding.parameters(), model.position):
            p.mul_(2e-3)
    x = torch.randn(3, 8, 18, dtype=torch.float64)
    w = {key: value.numpy() for key, value in model.state_dict().items()}
    fields, (rows, columns), grid = x.numpy(), (2, 3), (4, 6)

    tokens = []
    for i, j in np.ndindex(grid):
        patch = fields[:, rows * i : rows * (i + 1), columns * j : columns * (j + 1)]
        tokens.append((w["embedding.weight"] * patch).sum(axis=(1, 2, 3)) + w["embedding.bias"])
    y = np.array(tokens) + w["position"][0]
    assert y.std(axis=1).max() < 5e-3
    for block in range(2):
        own = {key.removeprefix(f"blocks.{block}."): value for key, value in w.items()}
        attention = {key.removeprefix("attention."): value for key, value in own.items()}
        y = y + explicit_attention(layer_norm(y, own["norm1.weight"], own["norm1.bias"]), attention, 4)
        hidden = layer_norm(y, own["norm2.weight"], own["norm2.bias"]) @ own["mlp.0.weight"].T + own["mlp.0.bias"]
        hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
        y = y + hidden @ own["mlp.3.weight"].T + own["mlp.3.bias"]
    y = layer_norm(y, w["norm.weight"], w["norm.bias"]) @ w["head.weight"].T
    expected = np.empty((2, 8, 18))
    for (i, j), token in zip(np.ndindex(grid), y, strict=True):
        for r, c, channel in np.ndindex(rows, columns, 2):
            expected[channel, rows * i + r, columns * j + c] = token[(r * columns + c) * 2 + channel]
    if residual == "linear":
        expected = expected + np.einsum("oi,ihw->ohw", w["linear.weight"][:, :, 0, 0], fields)
        expected = expected + w["linear.bias"][:, None, None]
    elif residual:
        expected = expected + fields[:2]
    np.testing.assert_allclose(model(x[None])[0].detach().numpy(), expected, rtol=0, atol=1e-10)


def test_the_linear_part_begins_as_the_state() -> None:
    torch.manual_seed(0)
    model, x = vit(in_channels=4, out_channels=2, residual="linear").eval(), torch.randn(2, 4, 8, 18)
    state = vit(in_channels=4, out_channels=2, residual=True).eval()
    state.load_state_dict({key: value for key, value in model.state_dict().items() if "linear" not in key})
    torch.testing.assert_close(model(x), state(x))
    model(x).sum().backward()
    assert model.linear is not None and model.linear.weight.grad is not None
    torch.testing.assert_close(model.linear.weight.grad[0, :, 0, 0], x.sum(dim=(0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_static_fields_are_further_inputs() -> None:
    torch.manual_seed(0)
    x, fixed = torch.randn(2, 3, 8, 18), torch.randn(2, 8, 18)
    model, wide = (
        vit(in_channels=channels, residual="linear", **more).eval()
        for channels, more in ((3, {"static": fixed}), (5, {}))
    )
    wide.load_state_dict(roughened(model).state_dict())  # the static fields are not weights
    torch.testing.assert_close(model(x), wide(torch.cat([x, fixed.expand(2, -1, -1, -1)], dim=1)))


# --- compiled steps ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "vit"])
def test_a_compiled_step_is_the_eager_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    need_compiler()
    build, shape = {
        "unet": (lambda: unet(widths=(4, 6), space_to_depth=True), (2, 4, 4, 4, 4)),
        "vit": (lambda: vit(depth=1, residual=True), (2, 3, 8, 18)),
    }[name]
    found: dict[str, list[torch.Tensor]] = {}
    for mode in ("none", "default"):
        torch._dynamo.utils.counters.clear()
        run = stage_class("era5_vit", "throughput").model_validate(
            {
                "study": "era5_vit",
                "dataset": "any",
                "model": {"kind": "vit"},
                "samples": {"kind": "pairs"},
                "loss": {"kind": "relative_l2"},
                "optimizer": {"lr": 1e-2},
                "compile": {"mode": mode},
                "throughput": {},
            }
        )
        torch.manual_seed(0)
        model, x = roughened(build()), torch.randn(shape)
        step = build_step(run, lambda model=model: model, l1)
        y = torch.randn_like(step.predict(x))
        predicting = torch._dynamo.utils.counters["frames"]["ok"]
        losses = [step(x, y) for _ in range(3)]
        training = torch._dynamo.utils.counters["frames"]["ok"] - predicting
        found[mode] = [step.predict(x), *losses, *(p.grad for p in model.parameters() if p.grad is not None)]
        assert losses[2] < losses[0]
        assert bool(predicting) == bool(training) == (mode == "default"), "training and prediction must be compiled"
    torch.compiler.reset()
    for eager, compiled_ in zip(found["none"], found["default"], strict=True):
        assert torch.allclose(compiled_, eager, rtol=1e-3, atol=1e-3 * eager.abs().max().item() + 1e-6)


# ---- the residual network ------------------------------------------------------------------------------


PARAMETERS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160}
NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def torchvisions(depth: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes in torchvision's state dict, which its published weights have."""
    blocks, convolutions = {18: ([2, 2, 2, 2], 2), 34: ([3, 4, 6, 3], 2)}.get(depth, ([3, 4, 6, 3], 3))
    blocks = [3, 4, 23, 3] if depth == 101 else blocks
    found = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
    inner = 64
    for stage, count in enumerate(blocks, 1):
        width = 32 * 2**stage
        outer = width if convolutions == 2 else 4 * width
        for block in range(count):
            prefix = f"layer{stage}.{block}"
            if convolutions == 2:
                layers = [(inner, width, 3), (width, width, 3)]
            else:
                layers = [(inner, width, 1), (width, width, 3), (width, outer, 1)]
            for number, (channels, filters, edge) in enumerate(layers, 1):
                found[f"{prefix}.conv{number}.weight"] = filters, channels, edge, edge
                found |= norm(f"{prefix}.bn{number}", filters)
            if block == 0 and (stage > 1 or convolutions == 3):
                found[f"{prefix}.downsample.0.weight"] = outer, inner, 1, 1
                found |= norm(f"{prefix}.downsample.1", outer)
            inner = outer
    return {**found, "fc.weight": (1000, inner), "fc.bias": (1000,)}


def norm(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the values of a batch normalisation."""
    return {f"{name}.{what}": () if what == "num_batches_tracked" else (channels,) for what in NORM}


@pytest.mark.parametrize("depth", DEPTHS)
def test_parameters_are_torchvisions(depth: int) -> None:
    """The state dict has torchvision's names, order and shapes, and lacks the images' mean and std."""
    with torch.device("meta"):
        model = ResNet(depth, mean=(0.5,) * 3, std=(0.2,) * 3)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[depth]
    found = {name: tuple(values.shape) for name, values in model.state_dict().items()}
    assert list(found.items()) == list(torchvisions(depth).items())


def plain(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Compute the network from its state dict as He et al. describe, with torchvision's strides."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        mean, var, weight, bias = (
            state[f"{name}.{what}"][:, None, None] for what in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / torch.sqrt(var + 1e-5) * weight + bias

    x = F.relu(norm(F.conv2d(x, state["conv1.weight"], stride=2, padding=3), "bn1"))
    x = F.max_pool2d(x, 3, 2, 1)
    deep = "layer1.0.conv3.weight" in state
    for stage in range(1, 5):
        block = 0
        while (prefix := f"layer{stage}.{block}") + ".conv1.weight" in state:
            stride, shortcut, y = 2 if stage > 1 and block == 0 else 1, x, x
            for number in (1, 2, 3) if deep else (1, 2):
                weight = state[f"{prefix}.conv{number}.weight"]
                steps = stride if number == (2 if deep else 1) else 1
                y = norm(F.conv2d(y, weight, stride=steps, padding=weight.shape[2] // 2), f"{prefix}.bn{number}")
                y = F.relu(y) if number < (3 if deep else 2) else y
            if f"{prefix}.downsample.0.weight" in state:
                shortcut = F.conv2d(x, state[f"{prefix}.downsample.0.weight"], stride=stride)
                shortcut = norm(shortcut, f"{prefix}.downsample.1")
            x = F.relu(y + shortcut)
            block += 1
    return F.linear(x.mean(dim=(2, 3)), state["fc.weight"], state["fc.bias"])


def awake(model: ResNet) -> ResNet:
    """Give batch normalisations random values, because their default values would hide a missing layer."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(values, 0.5, 1.5)
    return model


@pytest.mark.parametrize("depth", DEPTHS)
def test_logits_are_those_of_the_layers_one_by_one(depth: int) -> None:
    torch.manual_seed(0)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    model = awake(ResNet(depth, classes=7, width=8, mean=mean, std=std).double()).eval()
    x = torch.randint(0, 256, (2, 3, 65, 50)).double()
    normal = (x / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    with torch.no_grad():
        expected = plain(model.state_dict(), normal)
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("depth", [18, 50])
def test_it_trains_with_channels_last_in_bf16(depth: int) -> None:
    """Channels-last changes no gradient. Gradients in bf16 are finite; that of the last layer keeps its direction."""
    torch.manual_seed(0)
    # Use double precision, because a normalisation over few values amplifies rounding errors.
    model = ResNet(depth, classes=5, width=8).double()
    x, y = torch.randn(8, 3, 64, 64).double(), torch.arange(8) % 5

    def gradients(x: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        cross_entropy(model(x), y).mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    exact = gradients(x)
    assert len(exact) == len(list(model.parameters()))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.to(memory_format=torch.channels_last)
    for name, gradient in gradients(x).items():
        torch.testing.assert_close(gradient, exact[name], rtol=0, atol=1e-8 * float(exact[name].abs().max()))
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gradients(x.float())
        assert model(x.float()).dtype == torch.bfloat16
    assert all(gradient.isfinite().all() for gradient in rounded.values()) and len(rounded) == len(exact)
    last, of_exact = (each["fc.weight"].double().ravel() for each in (rounded, exact))
    assert F.cosine_similarity(last, of_exact, dim=0) > 0.8


# ---- convolutions in bf16 on a processor -------------------------------------------------------------


def test_patches_in_bf16_equal_products_in_float64() -> None:
    """Products use the same rounded numbers. oneDNN's convolution on AMX errs by over 100 %."""
    torch.manual_seed(0)
    layer, x = _Patches(20, 48, kernel_size=(8, 8), stride=(8, 8)), torch.randn(2, 20, 32, 64)
    exact, rounded = nn.Conv2d(20, 48, 8, 8).double(), x.bfloat16()
    exact.load_state_dict({name: value.bfloat16().double() for name, value in layer.state_dict().items()})
    assert torch.equal(layer(x), nn.functional.conv2d(x, layer.weight, layer.bias, stride=8)), (
        "in float32 the layer must equal PyTorch's convolution"
    )
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(rounded)
    expected = exact(rounded.double())
    y.float().square().sum().backward()
    expected.square().sum().backward()
    pairs = [(y, expected), (layer.weight.grad, exact.weight.grad), (layer.bias.grad, exact.bias.grad)]
    for found, wanted in pairs:
        assert (found.double() - wanted).norm() < 0.01 * wanted.norm()


def test_a_convolution_that_the_processor_computes_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correct convolutions pass, and the check draws no random numbers. A wrong function simulates oneDNN on AMX."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 2, 2), nn.Conv2d(8, 8, 1), _Patches(8, 8, 2, 2))
    state = torch.get_rng_state()
    check_convolutions(model)
    assert torch.equal(torch.get_rng_state(), state)

    def wrong(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return nn.functional.conv2d(x, *rest) * (1.2 if x.dtype == torch.bfloat16 else 1)

    monkeypatch.setitem(CONVOLUTIONS, nn.Conv2d, wrong)
    with pytest.raises(UserError, match=r"the layer 1 wrong on this processor .*ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
        check_convolutions(model)


def test_a_gradient_that_the_processor_computes_wrong_in_channels_last_is_refused() -> None:
    """oneDNN writes outside its memory for strided 1×1 convolutions of few channels, so the check only reads shapes."""
    fine = [nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, stride=2), nn.Conv2d(16, 8, 1, stride=2), nn.Conv2d(4, 8, 2, 2)]
    check_channels_last(nn.Sequential(*fine))
    for wrong in (
        nn.Conv2d(4, 8, 1, stride=2),
        nn.Conv3d(8, 8, 1, stride=(1, 1, 2)),
        nn.Conv2d(64, 64, 1, 2, groups=8),
    ):
        with pytest.raises(UserError, match=r"channels_last: .* the layer 4 .*memory_format: contiguous"):
            check_channels_last(nn.Sequential(*fine, wrong))


@pytest.mark.parametrize("channels", [16, 24])
def test_gradients_of_allowed_convolutions_are_those_of_contiguous_memory(channels: int) -> None:
    """Strided 1×1 convolutions that dlscale allows in channels-last memory have the gradients of contiguous memory."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(channels, 8, 1, stride=2, bias=False), torch.randn(8, channels, 10, 10)

    def gradient() -> torch.Tensor:
        layer.zero_grad()
        layer(x.to(memory_format=torch.channels_last if last else torch.contiguous_format)).square().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    last = False
    expected, last = gradient(), True
    layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(gradient(), expected)
