"""Part of the sheet that derives the requested hours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dlscale.core.paths import Results
from dlscale.core.progress import job_seconds
from dlscale.core.stages import STAGES
from dlscale.core.text import count, duration, many, number
from dlscale.extensions.sheet.evidence import Evidence, named, nodes_of
from dlscale.extensions.sheet.parts import Basis, Fact, fact
from dlscale.preflight import cost
from dlscale.report.speedup import spread
from dlscale.results import reached


@dataclass(frozen=True)
class Amount:
    """A quantity with its interval, and the origin of the quantity."""

    value: float
    low: float
    high: float
    basis: Basis

    def times(self, factor: float, more: float = 0.0) -> Amount:
        """Return the amount times a positive factor, plus `more`."""
        value, low, high = (end * factor + more for end in (self.value, self.low, self.high))
        return Amount(value, low, high, self.basis)


def request(evidence: Evidence) -> Iterator[Fact]:
    """Yield the steps from the samples of a training to the requested node-hours."""
    run, samples, todo = evidence.trained, evidence.samples, evidence.remedy("train")
    found, wanted = reached(run) if run else None, evidence.args.trainings
    what = "until the target" if found else "all its samples, because no target is set"
    note = f"{named(run)}, {what}" if run else ""
    remedy = "reach the target: train longer, or set another target" if found else todo
    yield fact("1  Samples of a training", samples, remedy, count, note)

    rate, on = _rate(evidence), many(evidence.production, "device")
    note = f"{on}; {number(rate.low)} to {number(rate.high)}" if rate else ""
    note += _disturbed(evidence) if rate and rate.basis == "predicted" else ""
    shown = f"{number(rate.value)} samples/s" if rate else None
    yield fact("2  Rate", shown, evidence.remedy("throughput"), note=note, basis=rate.basis if rate else "open")

    speed, spent = run.training_speed if run else None, found.seconds if found else None
    spent = spent if found else run.training_seconds if run else None
    factor = spent * speed / samples if spent and speed and samples else None
    note = "time of the training × its rate ÷ its samples: first batches, validations"
    yield fact("3  Waits, validations", factor and f"factor {number(factor)}", todo, note=note)

    nodes, time = _nodes(evidence), None
    note = "1 ÷ 2 × 3"
    if run and spent and run.devices == evidence.production and not run.foreign_cpu_fraction:
        time, note = Amount(spent, spent, spent, "measured"), f"{named(run)}; one training, without an interval"
    elif samples and rate and factor:
        value, low, high = (samples / each * factor for each in (rate.value, rate.high, rate.low))
        time = Amount(value, low, high, "predicted")
        note += f"; {duration(time.low)} to {duration(time.high)}"
    basis: Basis = time.basis if time else "open"
    yield fact("4  Time of a training", time and time.value, todo, duration, note, basis)
    hours = time.times(nodes / 3600) if time and nodes else None
    note = f"4 × {many(nodes or 0, 'node')}"
    yield fact("5  Node-hours of a training", hours and hours.value, todo, number, note, basis)
    yield Fact("6  Trainings", count(wanted), "setting", "--trainings; the applicant explains the number")
    rest, why, mark = _remaining(evidence)
    yield fact(
        "7  Measurements to run",
        None if rest is None else f"{mark}{number(rest)} node-hours",
        why,
        note=why,
        basis="predicted",
    )
    total = hours.times(wanted, rest or 0.0) if hours and rest is not None else None
    ends = [number(total.low), number(total.high)] if total else []
    span = f", {' to '.join(ends)}" if len({*ends}) > 1 else ""
    shown = f"{mark}{number(total.value)} node-hours" if total else None
    note = f"5 × 6 + 7{span}; a reserve for failures is the applicant's decision{_disturbed(evidence)}"
    yield fact("Request", shown, "close the open lines above", note=note, basis="predicted")
    yield fact(
        "Spent on the measurements",
        _spent(evidence),
        "keep the folder `benchmarks` of the results",
        note="node-hours of all finished jobs of these runs",
    )


def _disturbed(evidence: Evidence) -> str:
    return "; other programs disturbed the measurements: measure again" * evidence.production_forecast[0].disturbed


def _rate(evidence: Evidence) -> Amount | None:
    """Return the samples/s in production: measured without disturbance on these devices, or else predicted."""
    runs = [run for run in evidence.rated if run.devices == evidence.production and not run.foreign_cpu_fraction]
    trials = next((trials for run in runs if (trials := run.trials("FULL"))), None)
    if trials and (error := spread(trials)) < 1:
        return Amount(trials.mean, trials.mean * (1 - error), trials.mean * (1 + error), "measured")
    row = evidence.predicted
    return Amount(row.rate.value, row.rate.low, row.rate.high, "predicted") if row else None


def _nodes(evidence: Evidence) -> int | None:
    """Return the nodes of a training in production."""
    own = [nodes_of(run) for run in evidence.runs if run.devices == evidence.production]
    return next(iter(own), evidence.predicted.nodes if evidence.predicted else None)


def _remaining(evidence: Evidence) -> tuple[float | None, str, str]:
    """Return the node-hours of jobs without results (None if unknown), their explanation, and «≤» for a bound.

    Hours on CPU nodes of another account are only in the explanation.
    """
    works = cost.works(evidence.configuration, [plan.name for plan in evidence.plans])
    scheduler = evidence.configuration.workflow.site.scheduler
    if not works:
        return 0.0, "all runs of these plans have results", ""
    if scheduler is None:
        return None, f"{many(len(works), 'job')} left; name the site (--profile), or dlscale run {evidence.names}", ""
    apart = cost.by_account(cost.price(works, scheduler, evidence.results))
    data = cost.total(apart.get("CPU nodes", []), "node_hours")
    more = f"; in addition {number(data)} node-hours on CPU nodes" if data else ""
    rows = apart.get("GPU nodes", apart.get("", []))
    return cost.total(rows, "node_hours"), f"{many(len(works), 'job')} left, dlscale cost{more}", cost.bound_mark(rows)


def _spent(evidence: Evidence) -> float | None:
    """Return the node-hours of the finished jobs of all runs; None if no duration is known."""
    paths, total = Results(evidence.results), 0.0
    for owner, run in {run.owner: run for run in evidence.runs}.items():
        files = [paths.benchmark(stage, *owner.split("/", 1)) for stage in STAGES]
        total += sum(job_seconds(file) or 0.0 for file in files) * nodes_of(run) / 3600
    return total or None
