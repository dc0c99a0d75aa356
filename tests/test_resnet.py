"""ResNets: torchvision's parameters under its names, and its numbers against layers called one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dlscale.studies.imagenet_resnet50.model import DEPTHS, ResNet, cross_entropy

PARAMETERS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160}
NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def torchvisions(depth: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes in torchvision's state dict, written down from its published weights."""
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
    """Return names and shapes of a batch normalisation."""
    return {f"{name}.{what}": () if what == "num_batches_tracked" else (channels,) for what in NORM}


@pytest.mark.parametrize("depth", DEPTHS)
def test_parameters_are_torchvisions(depth: int) -> None:
    """Their number, names, order and shapes; what normalises the images is not among them."""
    with torch.device("meta"):
        model = ResNet(depth, mean=(0.5,) * 3, std=(0.2,) * 3)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[depth]
    found = {name: tuple(values.shape) for name, values in model.state_dict().items()}
    assert list(found.items()) == list(torchvisions(depth).items())


def plain(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The network once more, from its state dict alone, as He et al. describe it and torchvision places its strides."""

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
    """Give every layer numbers of its own: statistics at rest hide a layer that is missing."""
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
    """Channels last changes no gradient; bf16 leaves all finite, and the last layer's in its direction."""
    torch.manual_seed(0)
    model = ResNet(depth, classes=5, width=8).double()  # of few values, which normalisation makes of rounding errors
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
