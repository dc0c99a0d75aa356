"""Torchvision's image classifiers, with torchvision's parameter names, so that its published weights fit.

Shape suffixes: B batch, C channels, H W the image, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dlscale.core.errors import UserError, brief

#: Weight of the loss of each auxiliary classifier, by network (Szegedy et al. 2014, arXiv:1409.4842, section 5; 2015,
#: arXiv:1512.00567, as in Google's training program).
AUXILIARY = {"googlenet": 0.3, "inception_v3": 0.4}


def build(name: str, classes: int, size: int) -> nn.Module:
    """Return a network for square images of `size` points, with values from 0 to 255.

    The network normalises images with the mean and standard deviation of its published weights. A network with
    auxiliary classifiers returns, in training, a tuple: logits [B, K], then the logits of each auxiliary classifier.
    """
    models = _torchvision().models
    preset = models.get_model_weights(name).DEFAULT.transforms()
    options: dict[str, Any] = {"num_classes": classes}
    if name in AUXILIARY:
        # Published weights of these networks expect another normalisation, which `transform_input` computes.
        options |= {"aux_logits": True, "init_weights": True, "transform_input": True}
    if name.startswith("vit_"):
        options["image_size"] = size
    if name.startswith("maxvit_"):
        options["input_size"] = (size, size)
    try:
        # RegNet's constructor reads values of tensors, which tensors on `meta` lack.
        with torch.device("cpu") if name.startswith("regnet_") else nullcontext():
            model: nn.Module = models.get_model(name, **options)
        _normalise(model, preset.mean, preset.std)
        _try(model, size)
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:
        raise UserError(
            f"samples.size {size}: torchvision's {name} does not accept images of {size} x {size} ({brief(error)}); "
            f"its published weights are for samples.size {preset.crop_size[0]}"
        ) from None
    return model


def auxiliary_cross_entropy(logits: Any, label_B: torch.Tensor, weight: float) -> torch.Tensor:
    """Return the cross entropy of each sample, [B], in nats; auxiliary logits, if any, count with `weight`."""
    main, *others = logits if isinstance(logits, tuple) else (logits,)
    loss_B = F.cross_entropy(main, label_B, reduction="none")
    for each in others:
        loss_B = loss_B + weight * F.cross_entropy(each, label_B, reduction="none")
    return loss_B


def _torchvision() -> ModuleType:
    try:
        import torchvision
    except (ImportError, RuntimeError, OSError) as error:  # mismatched versions raise errors of all three types
        version, _, local = torch.__version__.partition("+")
        minor = int(version.split(".")[1]) + 15  # torchvision 0.15 fits torch 2.0, and so on
        index = f" --index-url https://download.pytorch.org/whl/{local}" if local else ""
        raise UserError(
            f"model.kind torchvision: torchvision for torch {torch.__version__} cannot be imported ({brief(error)}); "
            f"run: pip install 'torchvision==0.{minor}.*'{index}. Without torchvision, use model.kind resnet"
        ) from None
    return torchvision


def _normalise(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
    """Let a model normalise its inputs, without changing the names in its state dict."""
    for name, values in (("pixel_mean", mean), ("pixel_std", std)):
        model.register_buffer(name, 255 * torch.tensor(values).reshape(-1, 1, 1), persistent=False)
    model.register_forward_pre_hook(_normalised)
    model.register_forward_hook(_plain)


def _normalised(model: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    return (inputs[0] - model.pixel_mean) / model.pixel_std


def _plain(model: nn.Module, inputs: Any, logits: Any) -> Any:
    """Return the logits, or in training a plain tuple of the logits of all classifiers, the main classifier first."""
    return logits if isinstance(logits, torch.Tensor) else tuple(each for each in logits if each is not None)


def _try(model: nn.Module, size: int) -> None:
    """Raise torchvision's error if the model in training does not accept images of this size; compute nothing."""
    state = {name: values.to("meta") for name, values in (*model.named_parameters(), *model.named_buffers())}
    torch.func.functional_call(model, state, torch.empty(2, 3, size, size, device="meta"))
