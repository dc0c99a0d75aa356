"""`dlscale predict RUN …`: a run on other devices, and which of them are fastest and cheapest.

The model of `dlscale.measure.scaling` is fitted to what was measured of the runs, on one device or several; what it
says of others has a band that grows with the distance. `--validate` shows how well it predicts published figures.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dlscale.config.places import run_folder
from dlscale.config.resolve import study_files
from dlscale.core.errors import UserError
from dlscale.core.text import NONE, duration, many, number, percent, shorten, size
from dlscale.measure.scaling import validation
from dlscale.measure.scaling.fit import Prediction
from dlscale.measure.scaling.model import STEPS, Job, Measure, Step, memory, seconds, step
from dlscale.preflight.measured import Study, read

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Options that are numbers, and the greatest that one may be.
NUMBERS = "devices", "tp", "cp", "batch_size", "per_node", "storage", "memory", "price", "epochs", "target_samples"
MOST = 1e15
#: Error of the fit that is said.
MISSED = 0.1


@dataclass(frozen=True)
class Row:
    """What a job would do."""

    job: Job
    nodes: int
    rate: Prediction  #: Samples/s over all devices.
    efficiency: float  #: Of as many times one device.
    memory: float | None  #: Bytes of a device.
    seconds: float | None  #: Of the training.
    node_hours: float | None
    parts: Step
    ideal: float  #: Seconds that computing would take if each device did its share as fast as one alone.
    measured: float | None  #: Samples/s that were measured of this very job.

    @property
    def lost(self) -> str:
        """What costs most of what one device alone does not pay."""
        parts = {
            "computing (shared host, small batch, split layers)": self.parts.compute - self.ideal,
            "waiting for the slowest device": self.parts.waiting,
            "communication": self.parts.slowed + self.parts.exposed,
            "loading": self.parts.loading,
        }
        most = max(parts, key=parts.__getitem__)
        share = parts[most] / self.parts.seconds
        return f"{most} {percent(share)}" if share >= 0.005 else NONE


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print predictions of the runs `args.runs` on other devices, or how well published figures are predicted."""
    if args.validate:
        print("\n".join(validated()))
        return 0
    if not args.runs:
        raise UserError("RUN: expected runs that were measured, as PLAN.RUN or their folders; or --validate")
    for flag in NUMBERS:
        given = getattr(args, flag)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not 0 < value <= MOST:
                got = shorten(str(value), 20)
                raise UserError(f"--{flag.replace('_', '-')}: got {got}; expected more than 0, at most {MOST:.0e}")
    if sys.stderr.isatty():  # it takes seconds
        print("fitting the model to what was measured …", file=sys.stderr)
    study = read([run_folder(name, configuration) for name in args.runs], args.machine, args.storage or math.inf)
    rows, left_out = table(study, args)
    if not rows:
        raise UserError(f"--devices: nothing is left to predict: {'; '.join(left_out)}")
    if args.json:
        print(json.dumps([{**_json(row), "busy": study.busy} for row in rows], indent=2))
    else:
        text = [*head(study), "", *lines(rows), "", *words(study, rows, args)]
        print("\n".join([*text, *(f"Left out: {each}" for each in left_out)]))
    return 0


def validated() -> list[str]:
    """Return the table of published figures that the model must predict, in Markdown, and what it comes to."""
    checks = [
        check
        for file in study_files().values()
        for name, series in file.series.items()
        for check in validation.check(name, series, file.published)
    ]
    rows = ["| " + " | ".join(row) + " |" for row in validation.table(checks)]
    return [rows[0], "|" + "---|" * rows[0].count(" | ") + "---|", *rows[1:], "", *validation.summary(checks)]


# ---- what would be ---------------------------------------------------------------------------------


def table(study: Study, args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Return what each job would do that is asked for, and why others are left out, a line for each reason."""
    rows, left_out = list[Row](), dict[str, list[int]]()

    def leave(devices: int, reason: str) -> None:
        left_out.setdefault(reason, []).append(devices)

    for devices in args.devices:
        for tp in args.tp:
            for cp in args.cp:
                try:
                    row = _row(study, args, devices, tp, cp)
                except UserError as error:
                    leave(devices, str(error))
                    continue
                limit = args.memory * 1e9 if args.memory else math.inf
                if (row.memory or 0) > limit:
                    needed = f"{size(row.memory)} a device where --memory allows {args.memory:g} GB"
                    leave(devices, needed + f" (tp {tp}, cp {cp})" * (tp * cp > 1))
                else:
                    rows.append(row)
    return rows, [f"{_counts(devices)}: {reason}" for reason, devices in left_out.items()]


def _counts(devices: Sequence[int]) -> str:
    """Return numbers of devices in words, each once."""
    *others, last = dict.fromkeys(devices)
    return ", ".join([*(f"{each:,}" for each in others), f"{last:,} device{'' if devices == [1] else 's'}"])


def _row(study: Study, args: argparse.Namespace, devices: int, tp: int, cp: int) -> Row:
    fitted, here = study.fit, args.per_node or study.fit.machine.per_node
    if devices % (tp * cp):
        raise UserError(f"not divided by tp x cp = {tp * cp}")
    if devices > here and devices % here:
        raise UserError(f"no whole nodes of {here}")
    if (tp > 1 or cp > 1) and fitted.work.tokens is None:
        raise UserError(f"study {study.run.study} does not support tp or cp: its devices cannot share a model")
    dp = devices // (tp * cp)
    batch = args.batch_size / dp if args.batch_size else study.batch
    if batch < 1:
        raise UserError(f"--batch-size {args.batch_size}: less than a sample for each of {dp} groups of devices")
    job = Job(devices, batch, tp, cp, min(devices, here))
    rate = fitted.rate(job)
    alone = Job(1, study.batch)
    one = fitted.rate(alone).value
    ideal = step(fitted.machine, fitted.work, fitted.costs, alone).compute * batch / study.batch / (tp * cp)
    measured = next((point.rate for point in fitted.points if (point.job, point.of) == (job, STEPS)), None)
    total, nodes = _seconds(study, args, job, rate.value), math.ceil(devices / here)
    hours = None if total is None else nodes * total / 3600
    parts = step(fitted.machine, fitted.work, fitted.costs, job)
    return Row(
        job, nodes, rate, rate.value / devices / one, memory(fitted.work, job), total, hours, parts, ideal, measured
    )


def _seconds(study: Study, args: argparse.Namespace, job: Job, rate: float) -> float | None:
    """Return how long the training takes: its epochs with their validations, or so many samples alone."""
    if args.target_samples:
        return float(args.target_samples / rate)
    training, validating = study.epoch
    epochs = args.epochs or study.run.training.epochs
    if not (training and epochs):
        return None
    both = Measure("BOTH", training, validating or 0)
    fitted = study.fit
    return epochs * fitted.predict(lambda costs: seconds(fitted.machine, fitted.work, costs, job, both)).value


# ---- in words --------------------------------------------------------------------------------------


def head(study: Study) -> list[str]:
    """Return the measurements that predictions stand on."""
    points = study.fit.points
    most = max(point.job.devices for point in points)
    kind = f"{study.run.parallel.kind} on {study.device}, links of {study.machine}"
    links = study.links
    return [
        f"{study.run.study}, {kind}: fitted to {many(len(points), 'measurement')} on up to {many(most, 'device')}",
        *([f"Links as {links.processes} processes measured them: {links.line()}"] if links else []),
        f"Efficiency: the share of as many times one device, with a batch of {study.batch:g}.",
    ]


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the rows as aligned text."""
    known = any(row.measured for row in rows)
    heads = ("devices", "nodes", "dp x cp x tp", "batch", "samples/s", "90 % band")
    cells = [
        (*heads, *["measured"][:known], "efficiency", "memory", "time", "node-hours", "most is lost to"),
    ]
    for row in rows:
        job = row.job
        cells.append(
            (
                *(f"{job.devices:,}", f"{row.nodes:,}", f"{job.dp} x {job.cp} x {job.tp}", f"{job.samples:,.0f}"),
                *(number(row.rate.value), f"{number(row.rate.low)} to {number(row.rate.high)}"),
                *[number(row.measured)][:known],
                *(percent(row.efficiency), size(row.memory), duration(row.seconds)),
                *(number(row.node_hours), row.lost),
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            f"{cell:{'<' if place == last else '>'}{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def words(study: Study, rows: Sequence[Row], args: argparse.Namespace) -> list[str]:
    """Return which job is fastest, which the cheapest, and how far to trust it."""
    training = None if args.target_samples else study.epoch[0]
    large = [row for row in rows if training and row.job.samples > training]
    possible = [row for row in rows if row not in large] or rows
    fastest = max(possible, key=lambda row: row.rate.value)
    cheapest = min(possible, key=lambda row: (_cost(row), -row.rate.value))
    text = [f"Fastest: {_named(fastest)}, {number(fastest.rate.value)} samples/s{_costs(fastest, args)}."]
    if cheapest is fastest:
        text.append("It is also the cheapest: no other needs fewer node-hours.")
    else:
        dearer = _cost(fastest) / _cost(cheapest)
        text += [
            f"Cheapest: {_named(cheapest)}, {number(cheapest.rate.value)} samples/s{_costs(cheapest, args)}.",
            f"The fastest is {number(fastest.rate.value / cheapest.rate.value)} times as fast as the cheapest, for "
            f"{number(dearer)} times the node-hours.",
        ]
    if large:
        text.append(
            f"{_counts([row.job.devices for row in large])}: a step has more samples than the {training:,} of the "
            "training data; name a smaller --batch-size, or --target-samples for other data."
        )
    if any(row.job.shared > 1 for row in rows):
        text.append("The memory of devices that share a model is rough: its own page predicts it.")
    text += [f"{said}." for said in study.busy]
    text += misfits(study)
    furthest = max(rows, key=lambda row: study.fit.doublings(row.job))
    if (beyond := study.fit.doublings(furthest.job)) > 3:
        text.append(
            f"{furthest.job.devices:,} devices are {beyond:.0f} doublings beyond what was measured: measure a node or "
            "two, and the bands get narrower."
        )
    return text


def misfits(study: Study) -> list[str]:
    """Return which measurements the fit misses by more than a tenth, the worst three in words."""
    found = []
    for point in study.fit.points:
        fitted = study.fit.rate(point.job, point.of).value
        error = fitted / point.rate - 1
        if abs(error) > MISSED and point.of.mode != "VALIDATION":
            job = point.job
            at = f"{point.of.mode} on {many(job.devices, 'device')} with {job.samples:g} samples a step"
            rates = f"{number(fitted)} samples/s for {number(point.rate)} measured"
            found.append((abs(error), f"The fit misses {at} by {percent(abs(error))}: {rates}."))
    worst = [line for _, line in sorted(found, reverse=True)[:3]]
    return [*worst, "Measure again on a quiet machine, or ask for these runs one by one."] if worst else []


def _cost(row: Row) -> float:
    """Return node-hours of the training; where nothing says how long that is, node-seconds a sample."""
    return row.nodes / row.rate.value if row.node_hours is None else row.node_hours


def _named(row: Row) -> str:
    shared = f", tp {row.job.tp}, cp {row.job.cp}" if row.job.shared > 1 else ""
    return f"{row.job.devices:,} device{'' if row.job.devices == 1 else 's'}{shared}"


def _costs(row: Row, args: argparse.Namespace) -> str:
    if row.seconds is None or row.node_hours is None:
        return ""
    price = f", {row.node_hours * args.price:,.2f} at {args.price:g} a node-hour" if args.price else ""
    return f", trained in {duration(row.seconds)} for {number(row.node_hours)} node-hours{price}"


def _json(row: Row) -> dict[str, Any]:
    rate = {"low": row.rate.low, "samples_per_second": row.rate.value, "high": row.rate.high}
    return {
        **asdict(row.job),
        "dp": row.job.dp,
        **rate,
        **{key: value for key, value in asdict(row).items() if key not in ("job", "rate")},
    }
