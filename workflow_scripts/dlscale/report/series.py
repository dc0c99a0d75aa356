"""Runs of a scaling plan by what they share: rates, ideal, efficiency, and what communication costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlscale.core.settings import flat
from dlscale.measure.records import Trials
from dlscale.report.diagnosis import uncertainty
from dlscale.report.results import PlanResult, RunResult

#: The kinds of plans that ask for it.
KINDS = ("weak_scaling", "strong_scaling")

#: Settings in which the runs of a series may differ: where and with how many samples they compute, and what changes
#: nothing in how long a step takes.
_OWN = ("batch_size", "label", "seed", "optimizer.lr", "geometry.nodes", "geometry.gpus_per_node", "parallel.sync")
_LATER = ("training", "schedule", "throughput", "profile", "tune")

#: Noise of a ratio that leaves little to read from it.
WIDE_NOISE = 0.2

#: Settings by dotted key.
Flat = dict[str, Any]


@dataclass(frozen=True)
class Ratio:
    """A ratio of two measured rates, or 1 minus it, and how far noise may move it to either side."""

    value: float
    noise: float

    @property
    def doubtful(self) -> bool:
        """Whether noise says more of it than scaling does: a wide interval, or one beyond what scaling can give."""
        return self.noise > WIDE_NOISE or self.value - self.noise > 1 or self.value + self.noise < 0


@dataclass(frozen=True)
class Point:
    """A run at one number of devices."""

    run: RunResult
    base: RunResult  #: Of the same series, that with the fewest devices.
    twin: RunResult | None  #: The same computation without averaged gradients.

    @property
    def devices(self) -> int:
        return self.run.devices

    def ideal(self, mode: str) -> float | None:
        """Return the samples/s that as many devices would have if each were as fast as those of the base."""
        base = self.base.trials(mode)
        return base.mean * self.devices / self.base.devices if base else None

    def efficiency(self, mode: str) -> Ratio | None:
        """Return samples/s relative to the ideal; weak and strong scaling share the formula."""
        own, base, ideal = self.run.trials(mode), self.base.trials(mode), self.ideal(mode)
        if not (own and base and ideal):
            return None
        value = own.mean / ideal
        return Ratio(value, value * uncertainty(base, own) if self.run is not self.base else 0.0)

    def communication(self, mode: str) -> Ratio | None:
        """Return the share of a step's time that is communication: 1 - time of the twin / time."""
        return _share(self.run.trials(mode), self.twin.trials(mode) if self.twin else None)

    @property
    def alone(self) -> Ratio | None:
        """The same of SYNTHETIC, measured by one call of the stage: without sums over ranks against with them."""
        return _share(self.run.trials("SYNTHETIC"), self.run.trials("alone"), within=True)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return int(self.run.settings.get("batch_size") or 0)

    def seconds(self, mode: str) -> float | None:
        """Return the time of a step, s."""
        trials = self.run.trials(mode)
        return self.batch / trials.mean if trials and trials.mean else None

    def ideal_seconds(self, mode: str) -> float | None:
        """Return the time of a step at the ideal rate, s."""
        rate = self.ideal(mode)
        return self.batch / rate if rate else None


@dataclass(frozen=True)
class Series:
    """Runs that differ in their number of devices alone, from few to many."""

    label: str
    batch: int  #: Samples of a step: of weak scaling on each device (or those that share a model), else on all.
    points: list[Point]


def series(plan: PlanResult) -> list[Series]:
    """Return the plan's measured runs that average gradients, by batch and settings.

    A run's twin has as many devices, the same batch and the same settings, those of `parallel` left out: where nothing
    is averaged they do nothing.
    """
    weak = plan.record.kind == "weak_scaling"
    shared: dict[str, Flat] = {}
    found: dict[str, dict[int, RunResult]] = {}
    twins: dict[tuple[str, int], RunResult] = {}
    for run in plan.runs:
        if run.throughput is None:
            continue
        settings, batch = _shared(run), _batch(run, weak)
        if run.averages:
            key = _key(settings, batch)
            shared.setdefault(key, settings)
            found.setdefault(key, {}).setdefault(run.devices, run)
        else:
            twins.setdefault((_key(_bare(settings), batch), run.devices), run)
    made = []
    for key, runs in found.items():
        base, settings = runs[min(runs)], shared[key]
        batch = _batch(base, weak)
        # What FSDP sends is no sum of gradients alone, and has no twin.
        alike = _key(_bare(settings), batch) if settings.get("parallel.kind", "ddp") == "ddp" else ""
        points = [Point(run, base, twins.get((alike, devices))) for devices, run in sorted(runs.items())]
        others = [shared[other] for other, theirs in found.items() if _batch(theirs[min(theirs)], weak) == batch]
        made.append(Series(_label(batch, weak, settings, others), batch, points))
    return made


def _shared(run: RunResult) -> Flat:
    """Return the settings that all runs of a series have."""
    return {k: v for k, v in flat(run.settings).items() if k not in _OWN and k.partition(".")[0] not in _LATER}


def _bare(settings: Flat) -> Flat:
    return {key: value for key, value in settings.items() if not key.startswith("parallel.")}


def _key(settings: Flat, batch: int) -> str:
    return json.dumps([batch, settings], sort_keys=True, default=str)


def _batch(run: RunResult, weak: bool) -> int:
    """Return the samples of a step that the plan keeps: on each device, or those that share a model, or on all."""
    batch = int(run.settings.get("batch_size") or 0)
    geometry = run.settings.get("geometry") or {}
    return batch * geometry.get("tp", 1) * geometry.get("cp", 1) // run.devices if weak else batch


def _label(batch: int, weak: bool, settings: Flat, alike: Sequence[Flat]) -> str:
    """Return what tells a series from the others: its batch, and its settings that differ among those of that batch."""
    keys = [key for key in settings if len({str(other.get(key)) for other in alike}) > 1]
    said = [f"{key.rpartition('.')[2]} {'none' if settings[key] is None else settings[key]}" for key in keys]
    return "; ".join([f"{batch} samples {'a device' if weak else 'a step'}", *said])


def _share(together: Trials | None, apart: Trials | None, within: bool = False) -> Ratio | None:
    """Return 1 - time apart / time together, from rates of as many samples."""
    if not (together and apart and apart.mean):
        return None
    ratio = together.mean / apart.mean
    return Ratio(1 - ratio, ratio * uncertainty(apart, together, within))
