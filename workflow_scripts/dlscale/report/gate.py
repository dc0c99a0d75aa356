"""Whether runs became slower than they were on this machine (`dlscale compare --gate FILE`).

The reference holds earlier measurements, by machine and run. Two figures are held against it: samples/s, and how much
faster a run is than its plan's first one, from turns, which a busy machine changes less. Their spread is that of the
measurements in the reference, of all runs together; what lies below their mean by more than nineteen of twenty such
looks show by chance is a loss. Beside a single measurement the spread of the trials counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from dlscale.core.errors import UserError
from dlscale.core.files import sha256
from dlscale.core.noise import CONFIDENCE, interval, pooled
from dlscale.core.record import Positive, Record
from dlscale.core.text import many
from dlscale.measure.records import Throughput
from dlscale.report.diagnosis import disturbed
from dlscale.report.results import RunResult
from dlscale.report.speedup import APART, FLOOR, spread_of

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
    allowed: float  #: How far it may lie below; infinite where a single trial says nothing of noise.
    count: int  #: Measurements in the reference.
    busy: str | None = None  #: What speaks against a quiet machine while it was measured.

    @property
    def lost(self) -> bool:
        return self.change < -self.allowed

    def plain(self) -> dict[str, Any]:
        """Return it as values of JSON."""
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


def read(path: Path, update: bool) -> Reference:
    """Read a reference; an empty one, if there is none and one is to be made. Another file is a `UserError`."""
    if not path.exists() and update:
        return Reference(machines={})
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a reference, which --update makes")
    try:
        return Reference.read(path)
    except UserError as error:
        problem = str(error).rpartition("; ")[0]  # without what to do about a stage's own record
        raise UserError(f"{problem}; no reference: name another file, which --update makes") from None


def _place(measured: Throughput) -> str:
    """Return what a measurement is of: figures of other machines are not held against it."""
    device = measured.device
    threads = f", {many(device.threads, 'thread')}" if device.kind == "cpu" and device.threads else ""
    return f"{many(measured.nranks, 'device')}: {device.name or device.kind}{threads}"


def _known(reference: Reference, key: str, run: RunResult) -> Kept | None:
    """Return what a reference knows of a run: nothing if it did other work then."""
    kept = reference.machines.get(_place(run.throughput), {}).get(key) if run.throughput else None
    return kept if kept and kept.compute == run.compute else None


def _measured(run: RunResult) -> Measurement:
    assert run.throughput and run.speed
    beside = run.throughput.beside
    gain = statistics.fmean(beside.ratios) if beside else None
    return Measurement(file=sha256(run.folder / "throughput.json"), rate=run.speed, gain=gain)


@dataclass(frozen=True)
class _Figure:
    """A figure of a run, beside those of the reference; logarithms all."""

    run: str
    value: float
    before: list[float]
    alone: float  #: How far it may lie below a single one.


def held(reference: Reference, runs: Mapping[str, RunResult]) -> Iterator[Look]:
    """Yield each figure of these runs that the reference knows, with how far it may be below by chance."""
    figures: dict[str, list[_Figure]] = {"samples/s": [], "over the first run": []}
    busy = disturbed(runs)
    for key, run in runs.items():
        if not (kept := _known(reference, key, run)):
            continue
        # A measurement that was noted already is not held against itself, unless it is all that there is.
        now = _measured(run)
        noted = [each for each in kept.measured if each.file != now.file] or kept.measured
        # Of the trials then only the mean is kept: they are taken to have varied as those now.
        alone = math.hypot(math.sqrt(2) * spread_of(run), APART)
        rates = [math.log(each.rate) for each in noted]
        figures["samples/s"].append(_Figure(key, math.log(now.rate), rates, alone))
        beside, gains = run.throughput and run.throughput.beside, [each.gain for each in noted if each.gain is not None]
        if now.gain is not None and beside and gains and beside.compute == kept.first != run.compute:
            alone = math.sqrt(2) * math.hypot(interval(beside.ratios)[1], FLOOR)
            figures["over the first run"].append(_Figure(key, now.gain, gains, alone))
    # One in twenty by chance, of all looks together (Bonferroni); only a loss counts.
    level = 1 - (1 - CONFIDENCE) / max(sum(map(len, figures.values())), 1)
    for what, each in figures.items():
        spread, freedom = pooled([figure.before for figure in each])
        for figure in each:
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
        assert run.throughput
        first = run.throughput.beside.compute if run.throughput.beside else None
        kept, own = _known(reference, key, run), _measured(run)
        before = kept.measured if kept else []
        if kept and kept.first != first:
            before = [each.model_copy(update={"gain": None}) for each in before]
        several = [*(each for each in before if each.file != own.file), own][-KEEP:]
        machines.setdefault(_place(run.throughput), {})[key] = Kept(compute=run.compute, first=first, measured=several)
    return Reference(machines=machines)
