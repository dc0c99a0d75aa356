"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from bisect import bisect

from dlscale.config.run import Schedule


def peak_rate(schedule: Schedule, lr: float, batch_size: int) -> float:
    """Return the learning rate after warm-up.

    The rate is `lr` times a factor: the batch size divided by the base batch size, the square root of this ratio, or 1.
    """
    if schedule.scaling == "none":
        return lr
    assert schedule.base_batch_size is not None
    ratio = batch_size / schedule.base_batch_size
    return lr * (ratio if schedule.scaling == "linear" else math.sqrt(ratio))


def learning_rate(schedule: Schedule, peak: float, step: int, total: int, steps_per_epoch: int) -> float:
    """Return the learning rate of optimiser step `step` (0-based) of `total`.

    After a linear warm-up to `peak`, the rate depends on the kind of schedule:

    - `constant`: the rate is `peak`.
    - `step`: the rate is multiplied by `gamma` after every `step_epochs` epochs, or at the epochs in `milestones`.
    - `exponential`: after the warm-up, the rate is multiplied by `gamma` ** (1 / steps per epoch) at each step.
    - `cosine`, `linear`, `polynomial`: the rate falls from `peak` to `end_lr` at step == total, as half a cosine, as a
      line, or as the square of the fraction of steps left.
    """
    warmup = min(schedule.warmup_steps or schedule.warmup_epochs * steps_per_epoch, total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "step":
        epoch = step // steps_per_epoch
        milestones = schedule.milestones
        return float(
            peak * schedule.gamma ** (bisect(milestones, epoch) if milestones else epoch // schedule.step_epochs)
        )
    if schedule.kind == "exponential":
        return float(peak * schedule.gamma ** ((step - warmup) / steps_per_epoch))
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    if schedule.kind == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = (1.0 - progress) ** (2.0 if schedule.kind == "polynomial" else 1.0)
    return schedule.end_lr + (peak - schedule.end_lr) * share
