"""Loss and metrics over all samples of a loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dlscale.core.errors import UserError, unknown
from dlscale.core.metrics import VALID_LOSS, Metric
from dlscale.data.loaders.base import Loader, Share
from dlscale.data.samples import samples_in
from dlscale.parallel.world import World
from dlscale.studies.base import Metrics
from dlscale.train.loop import Hook, run_steps
from dlscale.train.step import Step


class MetricSum:
    """Sums of per-sample values by name, float64 on the values' device."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._count = 0

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add per-sample values [B, ...], if any, all with the same B."""
        for name, value in values.items():
            total = value.detach().double().sum(dim=0)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._count += len(next(iter(values.values()), ()))

    def means(self, over_all: Callable[[torch.Tensor], torch.Tensor] = lambda sums: sums) -> dict[str, torch.Tensor]:
        """Return the mean of each value over samples, [...], on the host; `over_all` sums tensors over processes."""
        if not self._sums:
            return {}
        device = next(iter(self._sums.values())).device
        count = int(over_all(torch.tensor(self._count, device=device)))
        return {name: (over_all(total) / count).cpu() for name, total in self._sums.items()}


def naive_means(
    metrics: Metrics, loader: Loader, share: Share, world: World, hooks: Sequence[Hook] = (), split: str = "valid"
) -> dict[str, torch.Tensor]:
    """Return the mean errors of the baselines without learning over a split; each rank computes its part."""
    sums = MetricSum()
    shares = ((share.indices(number, loader.samples),) for number in range(len(loader)))
    run_steps(lambda indices: sums.add(metrics.naive(indices, split)), shares, range(len(loader)), hooks)
    return sums.means(world.sum)


def validate(
    study: str,
    step: Step,
    metrics: Metrics,
    loader: Loader,
    world: World,
    hooks: Sequence[Hook] = (),
    naive: Mapping[str, torch.Tensor] | None = None,
) -> tuple[float, dict[str, float]]:
    """Return loss and metrics over all samples on all ranks; each sample counts once. `naive` is from `naive_means`."""
    sums = MetricSum()
    # Batch normalisation's statistics differ by rank. Use the statistics of the first rank, which are also saved.
    world.broadcast(step.model.buffers())

    def add(x: Any, y: Any) -> None:
        prediction, samples = step.predict(x), samples_in(x)
        losses = {VALID_LOSS.name: step.network.loss(prediction, y)}
        values = metrics.per_sample(x, y, prediction)
        if wrong := [name for name, value in values.items() if name in losses or value.shape[:1] != (samples,)]:
            raise UserError(
                f"study {study}: metric {wrong[0]}: expected a unique name, and a value for each of "
                f"the {samples} samples, got shape {tuple(values[wrong[0]].shape)}"
            )
        sums.add(losses | values)

    run_steps(add, loader.epoch(0), range(len(loader)), hooks)
    means = {**(naive or {}), **sums.means(world.sum)}
    loss = float(means.pop(VALID_LOSS.name))
    numbers = metrics.summarise(means)
    if missing := {metric.name for metric in metrics.described} - numbers.keys():
        raise UserError(
            f"study {study}: metrics in `described` have no value: {', '.join(sorted(missing))}; "
            f"`per_sample` and `summarise` return: {', '.join(numbers) or 'no metrics'}"
        )
    return loss, numbers


def metric_called(name: str, metrics: Metrics, key: str) -> Metric:
    """Return the metric of this name, or the validation loss; `key` is the setting that names it."""
    known = {metric.name: metric for metric in (VALID_LOSS, *metrics.described)}
    if name not in known:
        raise UserError(f"{key}: {unknown('metric', name, known)}")
    return known[name]
