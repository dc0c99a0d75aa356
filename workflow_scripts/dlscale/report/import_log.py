"""`dlscale import-log EVENTS --as NAME --study STUDY`: another program's TensorBoard log, to be shown beside ours.

It makes the folder `references/NAME` of the results: `reference.json`, which the next `snakemake` draws in the page,
and the event files themselves, which `tensorboard --logdir results` shows beside ours. Deleting it takes it back.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.config.places import results_of
from dlscale.core import registry
from dlscale.core.errors import UserError, unknown
from dlscale.core.events import events, scalar
from dlscale.core.files import sha256, whole
from dlscale.core.settings import validate
from dlscale.core.text import many, shorten
from dlscale.report.references import Over, Reference

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Points of a curve that are kept at least, where there are more, and twice as many at most: a page cannot show all.
POINTS = 2000

#: Farthest from 1970 that a clock is, s: beyond, differences are no numbers that a figure can show.
FARTHEST = 1e15

#: Quantities that every run of ours has, as `dlscale.train.logs` calls them; metrics are `valid/NAME`.
QUANTITIES = ("loss/train", "loss/valid", "learning_rate", "samples_per_second", "steps_per_second")

#: Folders of a log of Keras, which has one for each.
PARTS = ("train", "validation")

#: A point: step, seconds since 1970-01-01 UTC, value.
Point = tuple[int, float, float]


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Import the log `args.events` as the reference `args.name`; return the exit status."""
    if args.reference_study not in registry.studies():
        raise UserError(f"--study: {unknown('study', args.reference_study, registry.studies())}")
    if configuration and (strange := [plan for plan in args.plans if plan not in configuration.plans]):
        raise UserError(f"--plans: {unknown('plan', strange[0], configuration.plans)}")
    log = registry.study(args.reference_study).published_log
    tags, counts = _given(args.tag) or log.tags, args.counts or log.over
    if not tags:
        raise UserError(
            f"study {args.reference_study} declares no published tags; name those of the log: "
            "--tag 'Loss/valid=loss/valid'"
        )
    files = _files(Path(args.events))
    top = Path(args.events) if Path(args.events).is_dir() else Path(args.events).parent
    names = [file.relative_to(top) for file in files]
    settings: dict[str, Any] = {
        "name": args.name,
        "label": _text("--label", args.label or args.name),
        "study": args.reference_study,
        "plans": args.plans,
        "files": {_text("the event file's name", str(name)): "" for name in names},
        "counts": counts,
        "batch_size": args.batch_size,
        "epoch_samples": args.epoch_samples,
    }
    validate(Reference, {**settings, "curves": {}}, "import-log")  # before all is read
    folder = results_of(configuration) / "references" / args.name
    with whole(folder) as new:
        new.mkdir()
        # The copies are what is read: a log may grow meanwhile.
        copies = {new / name: file for name, file in zip(names, files, strict=True)}
        for copy, file in copies.items():
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        settings["files"] = {str(copy.relative_to(new)): sha256(copy) for copy in copies}
        try:
            curves, others = read(list(copies), tags, frozenset() if args.tag else log.percent)
        except UserError as error:
            text = str(error)
            for copy, file in copies.items():
                text = text.replace(str(copy), str(file))
            raise UserError(text) from None
        reference = Reference(**settings, curves=curves)
        reference.write(new / "reference.json")
    if args.json:
        print(json.dumps({"reference": str(folder), "points": {name: len(points) for name, points in curves.items()}}))
        return 0
    found = ", ".join(f"{name} ({many(len(points), 'point')})" for name, points in curves.items())
    print(f"{folder}: {found}")
    if others and not args.tag:
        print(f"left out: {', '.join(others)}; name them, too, if they are wanted: --tag 'THEIRS=OURS' …")
    axes: tuple[Over, ...] = ("step", "samples")
    missing = [over for over in axes if reference.scale(over) is None]
    if missing:
        needed = "--batch-size" if counts == "step" else "--epoch-samples and --batch-size"
        print(f"not drawn over {' and '.join(missing)}: {needed} would tell how many they are")
    print("the next `snakemake` shows it")
    return 0


def read(
    files: Sequence[Path], tags: Mapping[str, str], percent: frozenset[str]
) -> tuple[dict[str, list[Point]], list[str]]:
    """Return the curves that `tags` (theirs: ours) name, with seconds since training began; and other scalars' tags.

    That is the moment of step 0, where the log has one, or else that at which its first file was begun. Of a step that
    is there twice the later value counts. A tag `epoch_…` that has a step 0 is Keras', which counts epochs from 0: its
    steps become one more, as its values are of the epochs' ends. Before the tags of a file in a folder `train` or
    `validation` stands that word.
    """
    from_zero = _from_zero(files) if any("epoch_" in tag for tag in tags) else set()
    found: dict[str, Curve] = {}
    others: dict[str, None] = {}
    begun, begin = math.inf, math.inf
    for file in files:
        for event in events(file):
            if math.isfinite(event.wall_time):
                if abs(event.wall_time) > FARTHEST:
                    raise UserError(
                        f"{file}: step {event.step} is of {event.wall_time:g} s since 1970-01-01, which no clock "
                        "shows; write the file again, with the seconds at which its events were"
                    )
                begun = min(begun, event.wall_time)
            for value in event.summary.value:
                step = event.step + (value.tag in from_zero)
                tag = f"{file.parent.name}/{value.tag}" if file.parent.name in PARTS else value.tag
                if tag not in tags:
                    if len(others) < 12 and scalar(value) is not None:
                        others[shorten(tag, 60)] = None
                    continue
                number = scalar(value)
                if number is None or event.step < 0 or not math.isfinite(event.wall_time):
                    continue
                if step == 0:
                    begin = min(begin, event.wall_time)
                number = number / 100 if tag in percent else number
                found.setdefault(tags[tag], Curve()).add((step, event.wall_time, number))
    if not found:
        there = f"it has {', '.join(others)}" if others else "it has no scalars"
        raise UserError(
            f"{files[0]}: none of the tags {', '.join(tags)} is in it; {there}. Name its own: --tag 'THEIRS=OURS'"
        )
    zero = begin if math.isfinite(begin) else begun
    curves = {
        name: [(step, round(time - zero, 3), value) for step, time, value in found[name].points()]
        for name in dict.fromkeys(tags.values())
        if name in found
    }
    return curves, list(others)


def _from_zero(files: Sequence[Path]) -> set[str]:
    """Return the tags `epoch_…` that have a step 0 in any of the files: validation may be of every other epoch."""
    values = (value for file in files for event in events(file) if event.step == 0 for value in event.summary.value)
    return {value.tag for value in values if value.tag.startswith("epoch_")}


class Curve:
    """Points spread evenly over the steps, as many as a page can show: the first of every so many steps, and the last.

    Of a step that comes twice the later point counts.
    """

    def __init__(self) -> None:
        self._stride = 1
        self._kept: dict[int, Point] = {}  # by how many strides are before it
        self._last: Point = (-1, 0.0, 0.0)

    def add(self, point: Point) -> None:
        if point[0] >= self._last[0]:
            self._last = point
        self._keep(point)
        while len(self._kept) > 2 * POINTS:
            self._stride *= 2
            former, self._kept = self._kept, {}
            for each in former.values():
                self._keep(each)

    def _keep(self, point: Point) -> None:
        place = point[0] // self._stride
        if place not in self._kept or point[0] <= self._kept[place][0]:
            self._kept[place] = point

    def points(self) -> list[Point]:
        """Return them by step."""
        return sorted({point[0]: point for point in (*self._kept.values(), self._last)}.values())


def _text(what: str, text: str) -> str:
    """Return `text`; what is not UTF-8, which no JSON holds, is a `UserError`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{what}: {text!a} is not UTF-8; write it in that coding") from None
    return text


def _files(path: Path) -> list[Path]:
    """Return an event file, or all of a folder: a program that was started again writes another one."""
    files = sorted(path.glob("*.tfevents.*")) if path.is_dir() else [path]
    files = files or [file for part in PARTS for file in sorted((path / part).glob("*.tfevents.*"))]
    if not files:
        raise UserError(f"{path}: no event file in it; expected events.out.tfevents.*")
    if not all(file.is_file() for file in files):
        raise UserError(f"{path}: no such file; expected an event file of TensorBoard, or a folder with some")
    return files


def _given(texts: Sequence[str]) -> dict[str, str]:
    """Return the tags of the command line."""
    tags = {}
    for text in texts:
        theirs, _, ours = text.rpartition("=")
        if not theirs:
            raise UserError(f"--tag: {text}: expected THEIRS=OURS")
        if ours not in QUANTITIES and not (ours.startswith("valid/") and len(ours) > len("valid/")):
            known = (*QUANTITIES, "valid/METRIC")
            raise UserError(f"--tag: {unknown('quantity of ours', ours, known)}")
        tags[theirs] = ours
    return tags
