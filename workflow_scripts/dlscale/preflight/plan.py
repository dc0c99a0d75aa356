"""`dlscale plan RUN …`: what a run would do on other devices, and which of them are fastest and cheapest.

The model of `dlscale.measure.scaling` is fitted to what was measured of the runs, on one device or several; what it
says of others has a band that grows with the distance. `--validate` shows how well it predicts published figures.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dlscale.config.places import folder, results_of
from dlscale.config.resolve import study_files
from dlscale.core.errors import UserError
from dlscale.core.text import NONE, duration, number, percent, shorten, size
from dlscale.measure.scaling import validation
from dlscale.measure.scaling.fit import Prediction
from dlscale.measure.scaling.model import Job, Measure, Step, memory, seconds, step
from dlscale.preflight.measured import Study, read

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Of anything that is asked for.
MOST = 1e15


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

    @property
    def lost(self) -> str:
        """What costs most beside computing."""
        parts = {
            "waiting for the slowest device": self.parts.waiting,
            "communication": self.parts.slowed + self.parts.exposed,
            "loading": self.parts.loading,
        }
        most = max(parts, key=parts.__getitem__)
        share = parts[most] / self.parts.seconds
        return f"{most} {percent(share)}" if share >= 0.005 else NONE


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print what the runs `args.runs` would do on other devices, or how well published figures are predicted."""
    if args.validate:
        print("\n".join(validated()))
        return 0
    if not args.runs:
        raise UserError("RUN: expected runs that were measured, as PLAN.RUN or their folders; or --validate")
    for flag in (
        "devices",
        "tp",
        "cp",
        "batch_size",
        "per_node",
        "storage",
        "memory",
        "price",
        "epochs",
        "target_samples",
    ):
        given = getattr(args, flag)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not 0 < value <= MOST:
                got = shorten(str(value), 20)
                raise UserError(f"--{flag.replace('_', '-')}: got {got}; expected more than 0, at most {MOST:.0e}")
    results = results_of(configuration)
    study = read([folder(name, results) for name in args.runs], args.machine, args.storage or math.inf)
    rows, left_out = table(study, args)
    if not rows:
        raise UserError(f"--devices: nothing is left to plan: {'; '.join(left_out)}")
    if args.json:
        print(json.dumps([_json(row) for row in rows], indent=2))
    else:
        print(
            "\n".join(
                [
                    *head(study),
                    "",
                    *lines(rows),
                    "",
                    *words(study, rows, args),
                    *(f"Left out: {each}" for each in left_out),
                ]
            )
        )
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
    """Return what each job would do that is asked for, and why others are left out."""
    rows, left_out = list[Row](), list[str]()
    for devices in args.devices:
        for tp in args.tp:
            for cp in args.cp:
                try:
                    row = _row(study, args, devices, tp, cp)
                except UserError as error:
                    left_out.append(f"{devices} devices, tp {tp}, cp {cp}: {error}")
                    continue
                limit = args.memory * 1e9 if args.memory else math.inf
                if (row.memory or 0) > limit:
                    left_out.append(
                        f"{devices} devices, tp {tp}, cp {cp}: {size(row.memory)} a device where "
                        f"--memory allows {args.memory:g} GB"
                    )
                else:
                    rows.append(row)
    return rows, left_out


def _row(study: Study, args: argparse.Namespace, devices: int, tp: int, cp: int) -> Row:
    fitted, here = study.fit, args.per_node or study.fit.machine.per_node
    if devices % (tp * cp):
        raise UserError(f"{devices} devices do not divide by tp x cp = {tp * cp}")
    if devices > here and devices % here:
        raise UserError(f"{devices} devices are no whole nodes of {here}")
    if (tp > 1 or cp > 1) and fitted.work.tokens is None:
        raise UserError(f"study {study.run.study} does not support tp or cp: its devices cannot share a model")
    dp = devices // (tp * cp)
    batch = args.batch_size / dp if args.batch_size else study.batch
    if batch < 1:
        raise UserError(f"--batch-size {args.batch_size}: less than a sample for each of {dp} groups of devices")
    job = Job(devices, batch, tp, cp, min(devices, here))
    rate = fitted.rate(job)
    one = fitted.rate(Job(1, study.batch)).value
    total, nodes = _seconds(study, args, job, rate.value), math.ceil(devices / here)
    hours = None if total is None else nodes * total / 3600
    parts = step(fitted.machine, fitted.work, fitted.costs, job)
    return Row(job, nodes, rate, rate.value / devices / one, memory(fitted.work, job), total, hours, parts)


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
    """Return what the plan stands on."""
    points = study.fit.points
    most = max(point.job.devices for point in points)
    text = f"{study.run.study} on {study.device}: fitted to {len(points)} measurements on up to {most} device"
    links = study.links
    return [
        text + ("" if most == 1 else "s"),
        *([f"Links as {links.processes} processes measured them: {links.line()}"] if links else []),
    ]


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the rows as aligned text."""
    heads = ("devices", "nodes", "dp x cp x tp", "batch", "samples/s", "90 % band", "efficiency", "memory", "time")
    cells = [(*heads, "node-hours", "most is lost to")]
    for row in rows:
        job = row.job
        cells.append(
            (
                *(f"{job.devices:,}", f"{row.nodes:,}", f"{job.dp} x {job.cp} x {job.tp}", f"{job.samples:,.0f}"),
                *(number(row.rate.value), f"{number(row.rate.low)} to {number(row.rate.high)}"),
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
    fastest = max(rows, key=lambda row: row.rate.value)
    cheapest = min(rows, key=lambda row: (_cost(row), -row.rate.value))
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
    furthest = max(rows, key=lambda row: study.fit.doublings(row.job))
    if (beyond := study.fit.doublings(furthest.job)) > 3:
        text.append(
            f"{furthest.job.devices:,} devices are {beyond:.0f} doublings beyond what was measured: measure a node or "
            "two, and the bands get narrower."
        )
    return text


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
