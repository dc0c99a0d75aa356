"""Torchvision's image classifiers, which `imagenet_resnet50` trains by name if torchvision is installed."""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dlscale.config.run import stage_class
from dlscale.core.errors import UserError
from dlscale.extensions.imagenet_resnet50 import torchvision_networks
from dlscale.extensions.imagenet_resnet50.model import DEPTHS, MEAN, STD, ResNet
from dlscale.extensions.imagenet_resnet50.study import TORCHVISION
from tests.conftest import TINY, make_run, records, train

try:
    import torchvision
except (ImportError, RuntimeError, OSError):  # torchvision is missing, or belongs to another torch
    torchvision = None
# No extra lists torchvision, because PyPI has only wheels for CUDA: with torch 2.13.0+cpu, importing torchvision 0.28.0
# fails with "operator torchvision::nms does not exist" (2026-11-30). The job `test` of nightly.yml installs it.
real = pytest.mark.skipif(torchvision is None, reason="needs a torchvision that fits to torch's build")

#: Network → smallest size of images that the tests train on.
SIZES = {
    "alexnet": 64,
    "vgg16": 32,
    "vgg16_bn": 32,
    "mobilenet_v2": 40,
    "densenet121": 40,
    "inception_v3": 299,  # the auxiliary classifier needs 17 x 17 values
    "googlenet": 40,
    "efficientnet_b0": 40,
    "vit_b_16": 32,
    "squeezenet1_0": 40,
    "swin_t": 40,
    "maxvit_t": 224,
}


def settings(name: str, **over: Any) -> dict[str, Any]:
    return {"study": "imagenet_resnet50", "dataset": "any", "model": {"kind": "torchvision", "name": name}, **over}


# ---- with any torchvision, or without --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0", r"pip install 'torchvision==0\.28\.\*'\. Without"),
        ("2.13.0+cpu", r"pip install 'torchvision==0\.28\.\*' --index-url https://download\.pytorch\.org/whl/cpu\. "),
    ],
)
@pytest.mark.parametrize("error", [ImportError("No module named 'torchvision'"), RuntimeError("torchvision::nms")])
def test_a_missing_torchvision_is_one_message(
    monkeypatch: pytest.MonkeyPatch, version: str, expected: str, error: Exception
) -> None:
    """Without torchvision, or with a torchvision for another torch, the message has the command that installs it."""
    plain = builtins.__import__

    def refuse(name: str, *others: Any) -> Any:
        if name == "torchvision":
            raise error
        return plain(name, *others)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(UserError, match=expected) as caught:
        torchvision_networks.build("alexnet", 10, 64)
    assert str(error) in str(caught.value)


def test_a_wrong_name_is_refused_without_torchvision() -> None:
    with pytest.raises(ValueError, match=r"no classifier of torchvision is called 'vgg_16' \(did you mean 'vgg16'\?\)"):
        stage_class("imagenet_resnet50", "throughput").model_validate(
            settings("vgg_16", samples={"kind": "images"}, loss={"kind": "cross_entropy"}, loader={"kind": "torch"})
        )


class StandIn(nn.Module):
    """Network with an auxiliary classifier that refuses images below 8 x 8 points, like torchvision's networks."""

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__()
        self.options, self.layer, self.aux = options, nn.Linear(3, num_classes), nn.Linear(3, num_classes)

    def forward(self, x: torch.Tensor) -> Any:
        if x.shape[-1] < 8:
            raise RuntimeError("Kernel size can't be greater than actual input size")
        x = x.mean(dim=(2, 3))
        return (self.layer(x), self.aux(x), None) if self.training else self.layer(x)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torchvision by a module with one network."""
    module: Any = ModuleType("torchvision")
    preset = SimpleNamespace(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), crop_size=[299])
    weights = SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: preset))
    module.models = SimpleNamespace(
        get_model=lambda name, **options: StandIn(**options), get_model_weights=lambda name: weights
    )
    monkeypatch.setitem(sys.modules, "torchvision", module)


@pytest.mark.usefixtures("stand_in")
def test_images_are_normalised_and_auxiliary_classifiers_are_trained() -> None:
    """The model normalises by its preset; its loss includes auxiliary logits; names of weights do not change."""
    torch.manual_seed(0)
    model, x = torchvision_networks.build("inception_v3", 4, 8), torch.randint(0, 256, (5, 3, 8, 8)).float()
    assert list(model.state_dict()) == ["layer.weight", "layer.bias", "aux.weight", "aux.bias"]
    assert model.options == {"aux_logits": True, "init_weights": True, "transform_input": True}
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
    inner, labels = ((x / 255 - mean) / std).mean(dim=(2, 3)), torch.tensor([0, 1, 2, 3, 0])
    main, other = model.layer(inner), model.aux(inner)
    torch.testing.assert_close(model.eval()(x), main)
    found = torchvision_networks.auxiliary_cross_entropy(model.train()(x), labels, 0.4)
    expected = [F.cross_entropy(logits, labels, reduction="none") for logits in (main, other)]
    torch.testing.assert_close(found, expected[0] + 0.4 * expected[1])


@pytest.mark.usefixtures("stand_in")
def test_images_that_a_network_refuses_are_one_message() -> None:
    with pytest.raises(UserError, match=r"^samples\.size 7: .* 7 x 7 \(Kernel size .*\); .* samples\.size 299$"):
        torchvision_networks.build("alexnet", 4, 7)


# ---- with torchvision ----------------------------------------------------------------------------------


@real
def test_all_classifiers_are_known() -> None:
    assert sorted(TORCHVISION) == torchvision.models.list_models(module=torchvision.models)


@real
@pytest.mark.parametrize("depth", DEPTHS)
def test_our_resnets_are_torchvisions(depth: int) -> None:
    """With torchvision's weights, our network has the same names, shapes and gradients, and bitwise equal logits."""
    torch.manual_seed(0)
    theirs, ours = torchvision_networks.build(f"resnet{depth}", 7, 64), ResNet(depth, 7, mean=MEAN, std=STD)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randint(0, 256, (3, 3, 64, 64)).float()
    found, expected = ours(x), theirs(x)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@real
@pytest.mark.slow
@pytest.mark.long
def test_each_classifier_is_torchvisions() -> None:
    """Weights have the names and shapes of torchvision's own call with 1,000 classes and its default size of images."""
    for name in set(TORCHVISION) - {"regnet_y_128gf"}:  # it would take 3 GB, since RegNets are not made on `meta`
        weights = torchvision.models.get_model_weights(name).DEFAULT
        size = weights.transforms().crop_size[0]
        options = {"image_size": size} if name.startswith("vit_") else {}
        with torch.device("cpu" if name.startswith("regnet") else "meta"):
            found = torchvision_networks.build(name, 1000, size)
            expected = torchvision.models.get_model(name, **options)
        shapes = [{key: values.shape for key, values in model.state_dict().items()} for model in (found, expected)]
        assert list(shapes[0].items()) == list(shapes[1].items()), name
        if name not in torchvision_networks.AUXILIARY:  # published without auxiliary classifiers
            assert sum(p.numel() for p in found.parameters()) == weights.meta["num_params"], name


@real
def test_the_try_draws_no_random_numbers() -> None:
    """The initial weights equal those of torchvision's constructor after the same seed."""
    torch.manual_seed(3)
    found, state = torchvision_networks.build("mobilenet_v3_small", 10, 40), torch.get_rng_state()
    torch.manual_seed(3)
    expected = torchvision.models.mobilenet_v3_small(num_classes=10)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


@real
@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_classifier_trains_from_torchvisions_weights(
    tmp_path: Path, tiny_data: Callable[[str], Path], name: str
) -> None:
    """Two steps from a file of torchvision's `state_dict` change all weights, and the result loads into torchvision."""
    size, model = SIZES[name], {"kind": "torchvision", "name": name}
    options = {"image_size": size} if name.startswith("vit") else {}
    options |= {"aux_logits": True, "init_weights": False} if name in torchvision_networks.AUXILIARY else {}
    theirs = torchvision.models.get_model(name, num_classes=10, **options)
    torch.save(theirs.state_dict(), tmp_path / "given.pth")
    over = {
        **TINY["imagenet_resnet50"]["run"],
        "model": model,
        "batch_size": 4,
        "samples": {"size": size, "resize": size, "train": 8, "valid": 4},
        "optimizer": {"lr": 1e-3},
        "training": {"epochs": 1, "weights": str(tmp_path / "given.pth")},
    }
    make_run(tmp_path / "run", "imagenet_resnet50", over, TINY["imagenet_resnet50"]["dataset"])
    assert train(tmp_path / "run", tiny_data("imagenet_resnet50") / "manifest.json") == 0
    assert math.isfinite(records(tmp_path / "run")[-1]["train_loss"]) and records(tmp_path / "run")[-1]["step"] == 2
    state = torch.load(tmp_path / "run/model.pt", weights_only=True)
    assert not [key for key, before in theirs.named_parameters() if torch.equal(state[key], before)]
    theirs.load_state_dict(state)


@real
@pytest.mark.parametrize(("name", "size"), [("vit_b_16", 40), ("inception_v3", 64), ("squeezenet1_0", 16)])
def test_a_size_that_torchvision_refuses_is_one_message(name: str, size: int) -> None:
    with pytest.raises(UserError, match=rf"^samples\.size {size}: torchvision's {name} does not accept images"):
        torchvision_networks.build(name, 10, size)
