"""`dlscale import`: a TensorBoard log of another program, for the page.

`import EVENTS --as NAME --study STUDY` makes the folder `references/NAME` of the results: `reference.json`, which the
page draws, and the event files, which TensorBoard shows.
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
from dlscale.core.board import events, scalar
from dlscale.core.errors import UserError, unknown
from dlscale.core.files import sha256, whole
from dlscale.core.settings import validate
from dlscale.core.text import many, shorten
from dlscale.report.curves import Reference

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Points of a curve that are kept at least, where there are more, and twice as many at most: a page cannot show all.
POINTS = 2000

#: Points of a log that are read at most: they are all in memory.
MOST = 1_000_000

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
    source = Path(args.events)
    files, top = _files(source), source if source.is_dir() else source.parent
    settings: dict[str, Any] = {
        "name": args.name,
        "label": args.label or args.name,
        "study": args.reference_study,
        "plans": args.plans,
        "files": {str(file.relative_to(top)): "" for file in files},
        "counts": counts,
        "batch_size": args.batch_size,
        "epoch_samples": args.epoch_samples,
    }
    for what, text in (
        ("--label", settings["label"]),
        *(("the event file's name", name) for name in settings["files"]),
    ):
        if not text.isascii() and text.encode(errors="replace").decode() != text:
            raise UserError(f"{what}: {text!a} is not UTF-8; write it in that coding")
    validate(Reference, {**settings, "curves": {}}, "import")  # before all is read
    place = results_of(configuration) / "references" / args.name
    with whole(place) as new:
        # The copies are what is read: a log may grow meanwhile.
        copies = [new / file.relative_to(top) for file in files]
        for copy, file in zip(copies, files, strict=True):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        settings["files"] = {str(copy.relative_to(new)): sha256(copy) for copy in copies}
        try:
            curves = read(copies, tags, frozenset() if args.tag else log.percent)
        except UserError as error:
            raise UserError(str(error).replace(str(new), str(top))) from None
        reference = Reference(**settings, curves=curves)
        reference.write(new / "reference.json")
    points = {name: len(curve) for name, curve in curves.items()}
    if args.json:
        print(json.dumps({"reference": str(place), "points": points}))
        return 0
    said = [f"{name} ({many(count, 'point')})" for name, count in points.items()]
    print(f"{place}: {', '.join(said)}")
    missing = [over for over in ("step", "samples") if reference.scale(over) is None]
    if missing:
        needed = "--batch-size" if counts == "step" else "--epoch-samples and --batch-size"
        print(f"not drawn over {' and '.join(missing)}: {needed} would tell how many they are")
    print("the next `snakemake` shows it")
    return 0


def read(files: Sequence[Path], tags: Mapping[str, str], percent: frozenset[str]) -> dict[str, list[Point]]:
    """Return the curves that `tags` (theirs: ours) name, with seconds since training began.

    It began at step 0, where the log has one, or else when its first file did. Of a step that is there twice the later
    value counts. A tag `epoch_…` that has a step 0 is Keras', whose epochs end one later; before the tags of a file in
    a folder `train` or `validation` stands that word. Of a long curve every so many points are kept, and the last.
    """
    found: dict[str, dict[int, tuple[float, float]]] = {}
    others: dict[str, None] = {}
    begun, keras, count = math.inf, set[str](), 0
    for file in files:
        for event in events(file):
            if abs(event.wall_time) > FARTHEST:
                raise UserError(
                    f"{file}: step {event.step} is of {event.wall_time:g} s since 1970-01-01, which no clock shows; "
                    "write the file again, with the seconds at which its events were"
                )
            if math.isnan(event.wall_time) or event.step < 0:
                continue
            begun = min(begun, event.wall_time)
            for value in event.summary.value:
                tag = f"{file.parent.name}/{value.tag}" if file.parent.name in PARTS else value.tag
                number = scalar(value)
                if number is None or tag not in tags:
                    if number is not None and len(others) < 12:
                        others[shorten(tag, 60)] = None
                    continue
                if event.step == 0 and value.tag.startswith("epoch_"):
                    keras.add(value.tag)
                found.setdefault(tag, {})[event.step] = event.wall_time, number / 100 if tag in percent else number
                if (count := count + 1) > MOST:
                    raise UserError(f"{file}: a log of more than {MOST} points; name fewer tags: --tag 'THEIRS=OURS'")
    if not found:
        there = f"it has {', '.join(others)}" if others else "it has no scalars"
        raise UserError(
            f"{files[0]}: none of the tags {', '.join(tags)} is in it; {there}. Name its own: --tag 'THEIRS=OURS'"
        )
    later = {tag: int(tag.rpartition("/")[2] in keras) for tag in found}
    starts = [points[0][0] for tag, points in found.items() if 0 in points and not later[tag]]
    zero = min(starts, default=begun)
    curves = {}
    for tag, ours in tags.items():
        points = sorted(found.get(tag, {}).items())
        stride = -(-len(points) // (2 * POINTS)) or 1
        kept = [*points[::stride], *([points[-1]] if (len(points) - 1) % stride else [])] if points else []
        if kept:
            curves[ours] = [(step + later[tag], round(time - zero, 3), value) for step, (time, value) in kept]
    return curves


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
    tags = {}
    for text in texts:
        theirs, _, ours = text.rpartition("=")
        if not theirs:
            raise UserError(f"--tag: {text}: expected THEIRS=OURS")
        if ours not in QUANTITIES and not (ours.startswith("valid/") and len(ours) > len("valid/")):
            raise UserError(f"--tag: {unknown('quantity of ours', ours, (*QUANTITIES, 'valid/METRIC'))}")
        tags[theirs] = ours
    return tags
