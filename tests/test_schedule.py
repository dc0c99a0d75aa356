"""The learning rate at every step, compared with formulas and with PyTorch's schedulers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dlscale.config.run import Schedule
from dlscale.core.errors import UserError
from dlscale.core.settings import validate
from dlscale.train.trainer import learning_rate, peak_rate


def rates(total: int, peak: float = 1.0, steps_per_epoch: int = 10, **settings: Any) -> list[float]:
    """Return the learning rates of `total` steps, and the rate after the last step."""
    schedule = Schedule(**settings)
    return [learning_rate(schedule, peak, step, total, steps_per_epoch) for step in range(total + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 128, 900])
@pytest.mark.parametrize("end", [0.0, 1e-3])
def test_the_cosine_reaches_the_end_rate(warmup: int, end: float) -> None:
    """The cosine ends at `end_lr`. The SC22 tutorial ignores the warm-up, so it ends at 4 % of the peak rate."""
    found = rates(1000, warmup_steps=warmup, end_lr=end)
    assert found[-1] == pytest.approx(end, abs=1e-15)
    last = 1 - math.cos(math.pi / (1000 - warmup))  # the last step is one step before the end of the cosine
    assert found[-2] == pytest.approx(end + (1 - end) * 0.5 * last, rel=1e-9)
    assert found[-2] < end + 3e-4
    assert max(found) == found[warmup] == 1.0
    assert all(a > b for a, b in zip(found[warmup:], found[warmup + 1 :], strict=False))


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({"gamma": 0.7}, lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.7)),
        ({"gamma": 0.1, "step_epochs": 3}, lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=3, gamma=0.1)),
        ({"gamma": 0.1, "milestones": [3, 6, 8]}, lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 6, 8])),
    ],
    ids=["each", "third", "milestones"],
)
def test_steps_are_pytorchs(settings: dict[str, Any], theirs: Any) -> None:
    """PyTorch's schedulers count epochs, dlscale counts steps: all steps of an epoch have the epoch's rate."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler, expected = theirs(optimizer), list[float]()
    for _ in range(9):
        expected += [optimizer.param_groups[0]["lr"]] * 4
        optimizer.step()
        scheduler.step()
    ours = rates(36, peak=0.5, steps_per_epoch=4, kind="step", **settings)
    np.testing.assert_allclose(ours[:36], expected, rtol=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("settings", "after"),
    [
        ({"kind": "linear"}, lambda o, n: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=n)),
        (
            {"kind": "linear", "end_lr": 0.02},
            lambda o, n: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.02 / 0.5, total_iters=n),
        ),
        (
            {"kind": "polynomial"},
            lambda o, n: torch.optim.lr_scheduler.PolynomialLR(o, total_iters=n, power=2.0),
        ),
        (
            {"kind": "exponential", "gamma": 0.3},
            lambda o, n: torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.3 ** (1 / 8)),
        ),
        (
            {"kind": "cosine", "end_lr": 0.01},
            lambda o, n: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=n, eta_min=0.01),
        ),
        ({"kind": "constant"}, lambda o, n: torch.optim.lr_scheduler.ConstantLR(o, factor=1.0)),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_each_form_after_each_warm_up_is_pytorchs(settings: dict[str, Any], after: Any, warmup: int) -> None:
    """The reference is a sequence of PyTorch's schedulers over 40 steps, in epochs of 8 steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    rest = after(optimizer, 40 - warmup)
    scheduler = rest
    if warmup:
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=max(warmup - 1, 1))
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, rest], [warmup])
    theirs = []
    for _ in range(40):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    ours = rates(40, peak=0.5, steps_per_epoch=8, warmup_steps=warmup, **settings)
    np.testing.assert_allclose(ours[:40], theirs, rtol=1e-9, atol=1e-15)


def test_the_schedule_of_published_image_classifiers() -> None:
    """The rate rises for five epochs and is divided by 10 at epochs 30, 60 and 80, as in PyTorch's ImageNet example."""

    def restated(epoch: int, step: int, of: int) -> float:
        factor = epoch // 30 + (1 if epoch >= 80 else 0)
        rate = 0.8 * 0.1**factor
        return rate * (1 + step + epoch * of) / (5.0 * of) if epoch < 5 else rate

    settings: dict[str, Any] = {"kind": "step", "milestones": [30, 60, 80], "warmup_epochs": 5}
    ours = rates(90 * 7, peak=0.8, steps_per_epoch=7, **settings)
    theirs = [restated(epoch, step, 7) for epoch in range(90) for step in range(7)]
    np.testing.assert_allclose(ours[: 90 * 7], theirs, rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup_steps": 3, "warmup_epochs": 1}, "either warmup_steps or warmup_epochs"),
        ({"kind": "step", "milestones": [30, 20]}, "each epoch must come after"),
        ({"kind": "step", "milestones": [30, 30]}, "each epoch must come after"),
    ],
)
def test_contradictory_schedules_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        validate(Schedule, settings)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_scaling_with_the_batch(scaling: str, factor: float) -> None:
    schedule = Schedule(scaling=scaling, base_batch_size=64)
    assert peak_rate(schedule, 5e-4, 256) == pytest.approx(5e-4 * factor, rel=1e-12)
    assert peak_rate(schedule, 5e-4, 64) == pytest.approx(5e-4, rel=1e-12)
    assert peak_rate(schedule, 5e-4, 16) == pytest.approx(5e-4 / factor, rel=1e-12)
