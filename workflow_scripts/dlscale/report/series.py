"""Runs of a scaling plan by what they share: rates, ideal, efficiency, and what communication costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dlscale.core.records import Trials
from dlscale.core.settings import flat
from dlscale.report.diagnosis import uncertainty
from dlscale.report.results import PlanResult, RunResult

#: The kinds of plans that ask for it.
KINDS = ("weak_scaling", "strong_scaling")

#: Settings in which the runs of a series may differ: where and with how many samples they compute, and what does not
#: change how long a step takes.
_OUTSIDE = (
    "batch_size", "label", "optimizer.lr", "seed", "geometry.nodes", "geometry.gpus_per_node", "parallel.sync"
)  # fmt: skip
_LATER = ("training", "schedule", "throughput", "profile", "tune")


@dataclass(frozen=True)
class Ratio:
    """A ratio of two measured rates, or 1 minus it, with half of the interval that noise leaves it."""

    value: float
    noise: float


@dataclass(frozen=True)
class Point:
    """A run at one number of devices."""

    run: RunResult
    devices: int
    base: RunResult  #: Of the same series, that with the fewest devices.
    base_devices: int
    twin: RunResult | None  #: The same computation without averaged gradients.

    def ideal(self, mode: str) -> float | None:
        """Return the samples/s that as many devices would have if each were as fast as those of the base."""
        base = self.base.trials(mode)
        return base.mean * self.devices / self.base_devices if base else None

    def efficiency(self, mode: str) -> Ratio | None:
        """Return samples/s relative to the ideal: weak and strong scaling share the formula."""
        own, base = self.run.trials(mode), self.base.trials(mode)
        if not (own and base and base.mean):
            return None
        value = own.mean / base.mean * self.base_devices / self.devices
        return Ratio(value, value * uncertainty(base, own) if self.run is not self.base else 0.0)

    def communication(self, mode: str) -> Ratio | None:
        """Return the share of a step's time that is communication: 1 - time of the twin / time."""
        return _share(self.run.trials(mode), self.twin.trials(mode) if self.twin else None)

    @property
    def alone(self) -> Ratio | None:
        """The same of SYNTHETIC, measured within one call: without sums over ranks against with them."""
        return _share(self.run.trials("SYNTHETIC"), self.run.trials("alone"), within=True)

    def seconds(self, mode: str) -> float | None:
        """Return the time of a step, s."""
        trials, batch = self.run.trials(mode), self.run.settings.get("batch_size")
        return batch / trials.mean if trials and trials.mean and batch else None


@dataclass
class Series:
    """Runs that differ in their number of devices, and in the batch as the plan's kind has it."""

    batch: int  #: Samples of a step: of weak scaling on each device (or those that share a model), else on all.
    settings: dict[str, Any]  #: What its runs share, by dotted key.
    together: dict[int, RunResult] = field(default_factory=dict)  #: By devices, those that average gradients.
    label: str = ""

    @cached_property
    def base(self) -> int:
        return min(self.together)


def series(plan: PlanResult) -> list[tuple[Series, list[Point]]]:
    """Return the plan's measured runs by what they share, from few devices to many.

    A run's twin is that of as many devices with the same batch and settings, those of `parallel` left out: without
    averaging they do nothing.
    """
    found: dict[str, Series] = {}
    twins: dict[tuple[str, int], RunResult] = {}
    for run in plan.runs:
        if run.throughput is None:
            continue
        settings = {k: v for k, v in flat(run.settings).items() if k not in _OUTSIDE and k.split(".")[0] not in _LATER}
        batch = _batch(run, weak=plan.record.kind == "weak_scaling")
        if run.averages:
            known = found.setdefault(_key(settings, batch), Series(batch, settings))
            known.together.setdefault(run.devices, run)
        else:
            twins.setdefault((_key(_without_parallel(settings), batch), run.devices), run)
    named = [each for each in found.values()]
    for each in named:
        each.label = _label(each, named, weak=plan.record.kind == "weak_scaling")
    return [(each, _points(each, twins)) for each in named]


def _points(of: Series, twins: dict[tuple[str, int], RunResult]) -> list[Point]:
    averaged = of.settings.get("parallel.kind", "ddp") == "ddp"
    key = _key(_without_parallel(of.settings), of.batch)
    return [
        Point(run, many, of.together[of.base], of.base, twins.get((key, many)) if averaged and many > 1 else None)
        for many, run in sorted(of.together.items())
    ]


def _batch(run: RunResult, weak: bool) -> int:
    batch = int(run.settings.get("batch_size") or 0)
    geometry = run.settings.get("geometry") or {}
    shared = geometry.get("tp", 1) * geometry.get("cp", 1)
    return batch * shared // run.devices if weak else batch


def _without_parallel(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if not key.startswith("parallel.")}


def _key(settings: dict[str, Any], batch: int) -> str:
    return json.dumps([batch, settings], sort_keys=True, default=str)


def _label(one: Series, all_: Sequence[Series], weak: bool) -> str:
    """Return what tells a series from the others: its batch, and what it alone has."""
    alike = [other for other in all_ if other.batch == one.batch]
    keys = list(dict.fromkeys(key for other in alike for key in other.settings))
    differing = [key for key in keys if len({str(other.settings.get(key)) for other in alike}) > 1]
    said = [f"{key.rpartition('.')[2]} {one.settings[key]}" for key in differing if key in one.settings]
    return ", ".join([f"{one.batch} samples {'a device' if weak else 'a step'}", *said])


def _share(together: Trials | None, apart: Trials | None, within: bool = False) -> Ratio | None:
    """Return 1 - time apart / time together, from rates of as many samples."""
    if not (together and apart and apart.mean):
        return None
    ratio = together.mean / apart.mean
    return Ratio(1 - ratio, ratio * uncertainty(apart, together, within))
