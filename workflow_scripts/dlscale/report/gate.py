"""`dlscale gate --reference FILE`: whether runs became slower than they were on this machine; 1 if one did.

The reference is a JSON file of earlier measurements, by machine and run; `--update` adds those at hand to it. Of a run
two figures are held against it: its samples/s, and how much faster it is than its plan's first run, from turns, which a
busy machine changes less. How much either varies from one measurement to the next is known from those in the reference,
of all runs together; a new one that lies below their mean by more than nineteen of twenty such looks would show by
chance is a loss. A reference of a single measurement knows nothing of that: then the spread of the trials counts, and
what two processes differ by.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from dlscale.config.places import results_of
from dlscale.core.errors import UserError, unknown
from dlscale.core.files import sha256, write_text
from dlscale.core.noise import CONFIDENCE, interval
from dlscale.core.record import Positive, Record
from dlscale.core.text import many
from dlscale.measure.records import Throughput
from dlscale.report.diagnosis import NOISE
from dlscale.report.disturbance import disturbed
from dlscale.report.results import RunResult, read_plan
from dlscale.report.speedup import FLOOR, pooled, trials_error

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Measurements that are kept of each run, the newest.
KEEP = 20


class Measurement(Record):
    """One measurement of a run."""

    file: str  #: SHA-256 of its `throughput.json`: a file counts once.
    rate: Positive  #: FULL, samples/s.
    #: Logarithm of how much faster than the plan's first run, in turns.
    gain: float | None = Field(None, ge=-100, le=100)


class Kept(Record):
    """What a reference knows of a run on a machine."""

    compute: str | None = None  #: Which work it did.
    first: str | None = None  #: And the plan's first run.
    measured: list[Measurement] = Field(min_length=1)


class Reference(Record):
    """Earlier measurements, by machine and by `PLAN.RUN`; a file without them is another one."""

    machines: dict[str, dict[str, Kept]]


@dataclass(frozen=True)
class Look:
    """A figure held against the reference, as a logarithm."""

    run: str
    what: str
    change: float
    allowed: float  #: How far it may lie below.
    count: int  #: Measurements in the reference.
    busy: str | None = None  #: What speaks against a quiet machine while it was measured.

    @property
    def lost(self) -> bool:
        return self.change < -self.allowed

    def plain(self) -> dict[str, Any]:
        """Return it as values of JSON; `allowed` is None where a single trial says nothing of noise."""
        return {**vars(self), "allowed": self.allowed if math.isfinite(self.allowed) else None, "lost": self.lost}

    def line(self) -> str:
        """Return it in words."""
        said = "LOSS" if self.lost else "as before" if abs(self.change) <= self.allowed else "faster"
        least, most = (100 * math.expm1(sign * self.allowed) for sign in (-1, 1))
        noise = f"{least:+.1f} to {most:+.1f} %" if math.isfinite(self.allowed) else "unknown"
        busy = f"; measured on a busy machine: {self.busy}" if self.busy else ""
        return (
            f"{said:9}  {self.run}, {self.what}: {100 * math.expm1(self.change):+.1f} %, "
            f"noise {noise} ({many(self.count, 'measurement')} before){busy}"
        )


def read(path: Path) -> Reference:
    """Read a reference; a file that is none is a `UserError`."""
    try:
        return Reference.read(path)
    except UserError as error:
        problem = str(error).rpartition("; ")[0]  # without what to do about a stage's own record
        raise UserError(f"{problem}; no reference: name another file, which --update makes") from None


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Hold the plans in `args.plans`, or the targets, against `args.reference`; 1 if a run became slower."""
    results, path = results_of(configuration), Path(args.reference)
    names = args.plans or (configuration.workflow.targets if configuration else [])
    runs = dict(_measured(results, names, configuration))
    if not runs:
        raise UserError(f"{results}: no run of {', '.join(names) or 'any plan'} has throughput; run the workflow first")
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: no file; expected a reference, which --update makes")
    if not (path.exists() or args.update):
        raise UserError(f"{path}: no such file; make it with --update")
    reference = read(path) if path.exists() else Reference(machines={})
    looks = list(held(reference, runs))
    if args.json:
        print(json.dumps([look.plain() for look in looks], indent=2))
    else:
        for look in looks:
            print(look.line())
    if args.update:
        write_text(path.resolve(), updated(reference, runs).text() + "\n")
        if not args.json:
            print(f"{path}: {many(len(runs), 'run')} noted: {', '.join(runs)}")
        return 0
    if not looks:
        raise UserError(f"{path}: it has none of these runs on this machine, doing the same work; add them by --update")
    return 1 if any(look.lost for look in looks) else 0


def _measured(results: Path, names: list[str], configuration: Configuration | None) -> Iterator[tuple[str, RunResult]]:
    for name in names:
        plan = results / "plans" / name / "plan.yaml"
        if not plan.exists():
            known = sorted(each.parent.name for each in results.glob("plans/*/plan.yaml"))
            if configuration and name in configuration.plans:
                raise UserError(f"plan {name} has no results yet; name those that have: {', '.join(known) or 'none'}")
            raise UserError(f"{plan}: no such file; {unknown('plan', name, known)}")
        for run in read_plan(plan, stages=["throughput"]).runs:
            if run.throughput and run.speed:
                yield f"{name}.{run.name}", run


def machine(measured: Throughput) -> str:
    """Return what a measurement is of: figures of other machines are not held against it."""
    device = measured.device
    threads = f", {many(device.threads, 'thread')}" if device.kind == "cpu" and device.threads else ""
    return f"{many(measured.nranks, 'device')}: {device.name or device.kind}{threads}"


def _gain(measured: Throughput) -> float | None:
    return statistics.fmean(measured.beside.ratios) if measured.beside else None


def _known(reference: Reference, key: str, run: RunResult) -> Kept | None:
    """Return what a reference knows of a run: nothing if it did other work then."""
    assert run.throughput
    kept = reference.machines.get(machine(run.throughput), {}).get(key)
    return kept if kept and kept.compute == run.compute else None


@dataclass(frozen=True)
class _Figure:
    """A figure of a run, beside those of the reference; logarithms all."""

    run: str
    value: float
    before: list[float]
    alone: float  #: How far it may lie below a single one.


def held(reference: Reference, runs: Mapping[str, RunResult]) -> Iterator[Look]:
    """Yield each figure of these runs that the reference knows, with how far it may be below by chance."""
    rates, gains, busy = [], [], disturbed(runs)
    for key, run in runs.items():
        assert run.throughput and run.speed
        if not (kept := _known(reference, key, run)):
            continue
        # A measurement that was noted already is not held against itself, unless it is all that there is.
        own = sha256(run.folder / "throughput.json")
        noted = [each for each in kept.measured if each.file != own] or kept.measured
        before = [math.log(each.rate) for each in noted]
        # Of the trials then only the mean is kept: they are taken to have varied as those now.
        alone = math.hypot(math.sqrt(2) * trials_error(run), math.log1p(NOISE))
        rates.append(_Figure(key, math.log(run.speed), before, alone))
        gain, beside = _gain(run.throughput), run.throughput.beside
        before = [each.gain for each in noted if each.gain is not None]
        if gain is not None and beside and before and beside.compute == kept.first != run.compute:
            alone = math.sqrt(2) * math.hypot(interval(beside.ratios)[1], FLOOR)
            gains.append(_Figure(key, gain, before, alone))
    # One in twenty by chance, of all looks together (Bonferroni); only a loss counts.
    level = 1 - (1 - CONFIDENCE) / max(len(rates) + len(gains), 1)
    for what, figures in (("samples/s", rates), ("over the first run", gains)):
        spread, freedom = pooled([figure.before for figure in figures])
        for figure in figures:
            count, allowed = len(figure.before), figure.alone
            if freedom:
                from scipy.special import stdtrit

                # That of all figures is known better than one's own; one that varies more than the others has its own.
                widest = max(spread, pooled([figure.before])[0])
                allowed = max(float(stdtrit(freedom, level)) * widest * math.sqrt(1 + 1 / count), FLOOR)
            change = figure.value - statistics.fmean(figure.before)
            yield Look(figure.run, what, change, allowed, count, busy.get(runs[figure.run].folder))


def updated(reference: Reference, runs: Mapping[str, RunResult]) -> Reference:
    """Return a reference with these measurements added; a run that does other work now begins anew."""
    machines = {name: dict(known) for name, known in reference.machines.items()}
    for key, run in runs.items():
        assert run.throughput and run.throughput.full
        first = run.throughput.beside.compute if run.throughput.beside else None
        kept = _known(reference, key, run)
        before = kept.measured if kept else []
        if kept and kept.first != first:
            before = [each.model_copy(update={"gain": None}) for each in before]
        own = Measurement(
            file=sha256(run.folder / "throughput.json"), rate=run.throughput.full.mean, gain=_gain(run.throughput)
        )
        several = [*(each for each in before if each.file != own.file), own][-KEEP:]
        machines.setdefault(machine(run.throughput), {})[key] = Kept(compute=run.compute, first=first, measured=several)
    return Reference(machines=machines)
