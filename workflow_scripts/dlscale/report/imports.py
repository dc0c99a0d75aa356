"""`dlscale import`: a TensorBoard log of another program as `references/NAME`, for the page and TensorBoard."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.config.places import results_of
from dlscale.core import registry
from dlscale.core.board import events, scalar
from dlscale.core.errors import UserError, unknown
from dlscale.core.files import sha256, whole
from dlscale.core.settings import validate
from dlscale.core.text import many, shorten
from dlscale.report.curves import Reference

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Least points of a longer curve that are kept; at most twice as many.
POINTS = 2000

#: Most points of a log: they are all in memory.
MOST = 1_000_000

#: Greatest distance from 1970 of an event's time, s; others are left out.
FARTHEST = 1e15

#: Quantities of every run, as `dlscale.train.logs` calls them; metrics are `valid/NAME`.
QUANTITIES = ("loss/train", "loss/valid", "learning_rate", "samples_per_second", "steps_per_second")

#: A point: step, seconds since 1970-01-01 UTC, value.
Point = tuple[int, float, float]


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Import the log `args.events` as the reference `args.name`; return the exit status."""
    if args.reference_study not in registry.studies():
        raise UserError(f"--study: {unknown('study', args.reference_study, registry.studies())}")
    if configuration and (strange := [plan for plan in args.plans if plan not in configuration.plans]):
        raise UserError(f"--plans: {unknown('plan', strange[0], configuration.plans)}")
    study_of = {plan: configuration.workflow.plans[plan].study for plan in args.plans} if configuration else {}
    if others := [plan for plan, study in study_of.items() if study != args.reference_study]:
        raise UserError(f"--plans: {others[0]} is of study {study_of[others[0]]}, not of {args.reference_study}")
    log = registry.study(args.reference_study).published_log
    tags, counts = _given(args.tag) or log.tags, args.counts or log.over
    if not tags:
        raise UserError(
            f"study {args.reference_study} declares no published tags; name those of the log: "
            "--tag 'Loss/valid=loss/valid'"
        )
    files = _files(Path(args.events))
    settings: dict[str, Any] = {
        "name": args.name,
        "label": args.label or args.name,
        "study": args.reference_study,
        "plans": args.plans,
        "files": dict[str, str](),
        "counts": counts,
        "batch_size": args.batch_size,
        "epoch_samples": args.epoch_samples,
    }
    validate(Reference, {**settings, "curves": {}}, "import")  # before all is read
    curves = read(files, tags, frozenset() if args.tag else log.percent)
    place = results_of(configuration) / "references" / args.name
    with whole(place) as new:
        new.mkdir()
        for file in files:
            settings["files"][file.name] = sha256(shutil.copyfile(file, new / file.name))
        reference = Reference(**settings, curves=curves)
        reference.write(new / "reference.json")
    if args.json:
        print(json.dumps({"reference": str(place), "points": {name: len(curve) for name, curve in curves.items()}}))
        return 0
    said = [f"{name} ({many(len(curve), 'point')})" for name, curve in curves.items()]
    print(f"{place}: {', '.join(said)}")
    missing = [over for over in ("step", "samples") if reference.scale(over) is None]
    if missing:
        needed = "--batch-size" if counts == "step" else "--epoch-samples and --batch-size"
        print(f"not drawn over {' and '.join(missing)}: {needed} would tell how many they are")
    print("the next `snakemake` shows it")
    return 0


def read(files: Sequence[Path], tags: Mapping[str, str], percent: frozenset[str]) -> dict[str, list[Point]]:
    """Return the curves that `tags` (theirs: ours) name, with seconds since training began, in `percent` as shares.

    Training began at step 0, or else with the first file. Of a repeated step the later value counts. A long curve is
    thinned out.
    """
    found: dict[str, dict[int, tuple[float, float]]] = {}
    others: dict[str, None] = {}
    begun, count = math.inf, 0
    for event in itertools.chain.from_iterable(map(events, files)):
        if not abs(event.wall_time) < FARTHEST or event.step < 0:
            continue
        begun = min(begun, event.wall_time)
        for value in event.summary.value:
            number = scalar(value)
            if number is not None and value.tag in tags:
                scaled = number / 100 if value.tag in percent else number
                found.setdefault(value.tag, {})[event.step] = event.wall_time, scaled
                count += 1
            elif number is not None and len(others) < 12:
                others[shorten(value.tag, 60)] = None
        if count > MOST:
            raise UserError(f"{files[0]}: a log of more than {MOST} points; name fewer tags: --tag 'THEIRS=OURS'")
    if not found:
        there = f"it has {', '.join(others)}" if others else "it has no scalars"
        raise UserError(
            f"{files[0]}: none of the tags {', '.join(tags)} is in it; {there}. Name its own: --tag 'THEIRS=OURS'"
        )
    zero = min((points[0][0] for points in found.values() if 0 in points), default=begun)
    curves = {}
    for tag, points in found.items():
        every = [(step, round(time - zero, 3), value) for step, (time, value) in sorted(points.items())]
        stride = -(-len(every) // (2 * POINTS))
        curves[tags[tag]] = every[::stride] + every[-1:] * bool((len(every) - 1) % stride)
    return {ours: curves[ours] for ours in tags.values() if ours in curves}


def _files(path: Path) -> list[Path]:
    """Return an event file, or all of a folder: a program that was started again writes another one."""
    files = [file for file in (sorted(path.glob("*.tfevents.*")) if path.is_dir() else [path]) if file.is_file()]
    if not files:
        raise UserError(f"{path}: no such file; expected an event file of TensorBoard, or a folder with some")
    return files


def _given(texts: Sequence[str]) -> dict[str, str]:
    tags = dict[str, str]()
    for text in texts:
        theirs, _, ours = text.rpartition("=")
        if not theirs:
            raise UserError(f"--tag: {text}: expected THEIRS=OURS")
        if ours not in QUANTITIES and not (ours.startswith("valid/") and len(ours) > len("valid/")):
            raise UserError(f"--tag: {unknown('quantity of ours', ours, (*QUANTITIES, 'valid/METRIC'))}")
        if theirs in tags or ours in tags.values():
            raise UserError(f"--tag: {text}: one of the two stands in another --tag, too; give each once")
        tags[theirs] = ours
    return tags
