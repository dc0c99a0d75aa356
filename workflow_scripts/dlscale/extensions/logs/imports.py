"""`dlscale import`: import a TensorBoard log of an external program into the folder `references/NAME`."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.config.places import results_of
from dlscale.core import registry
from dlscale.core.errors import UserError, unknown
from dlscale.core.files import atomic_write, no_pipe, sha256
from dlscale.core.settings import validate
from dlscale.core.text import many, shorten
from dlscale.extensions.logs.events import events, is_restart, scalar
from dlscale.extensions.logs.reference import Reference

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: An imported curve with more than 2 * POINTS points is thinned, but keeps at least POINTS points.
POINTS = 2000

#: Maximum number of points of a log, since all points are kept in memory.
MAX_LOG_POINTS = 1_000_000

#: Maximum distance of an event's time from 1970, seconds; points of other events are left out.
FARTHEST = 1e15

#: Maximum decrease of time between steps that is not reported, seconds; clocks of several writers may differ.
CLOCK_SECONDS = 60.0

#: Names that `dlscale.train.logs` uses for the quantities of every run; the name of a metric is `valid/NAME`.
QUANTITIES = ("loss/train", "loss/valid", "learning_rate", "samples_per_second", "steps_per_second")

#: Reasons for leaving out points of a log; they complete messages such as `3 points left out, REASON`.
REPEATED = "of a step that is logged again later; the later point counts"
RESTARTED = "of an earlier training, or another process, in the same folder; import that file separately"
ABANDONED = "of an abandoned try: the program resumed from an earlier step"
STEPLESS = "because all points have the same step; log values with a step: add_scalar(tag, value, global_step)"
UNDATED = "with a negative step or an impossible time"
NO_NUMBER = "that are not a number"
THINNED = f"evenly, since the curve has more than {2 * POINTS} points"

#: Number of points left out, by curve and reason.
Dropped = dict[str, Counter[str]]

#: Prefixes of validation quantities, which a program may also log before its training.
VALIDATION = ("loss/valid", "valid/")

#: A point: step, seconds since the start of the training, value.
Point = tuple[int, float, float]


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Import the log `args.events` as the reference `args.name`; return the exit status."""
    if args.reference_study not in registry.studies():
        raise UserError(f"--study: {unknown('study', args.reference_study, registry.studies())}")
    if configuration and (strange := [plan for plan in args.plans if plan not in configuration.plans]):
        raise UserError(f"--plans: {unknown('plan', strange[0], configuration.plans)}")
    study_of = {plan: configuration.workflow.plans[plan].study for plan in args.plans} if configuration else {}
    if others := [plan for plan, study in study_of.items() if study != args.reference_study]:
        raise UserError(f"--plans: {others[0]} is a plan of study {study_of[others[0]]}, not of {args.reference_study}")
    log = registry.study(args.reference_study).published_log
    tags, counts = _given(args.tag) or log.tags, args.counts or log.over
    if not tags:
        raise UserError(
            f"study {args.reference_study} does not declare the tags of a log (`published_log`). Name the log's tags: "
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
    validate(Reference, {**settings, "curves": {}}, "import")  # check the options before the log is read, which is slow
    percent = frozenset[str]() if args.tag else log.percent
    curves, dropped, from_zero = read(files, tags, percent, epochs=args.counts == "epoch")
    place = results_of(configuration) / "references" / args.name
    with atomic_write(place) as new:
        new.mkdir()
        for file in files:
            settings["files"][file.name] = sha256(shutil.copyfile(file, new / file.name))
        reference = Reference(**settings, curves=curves)
        reference.write(new / "reference.json")
    if args.json:
        points = {name: len(curve) for name, curve in curves.items()}
        print(json.dumps({"reference": str(place), "points": points, "dropped": dropped}))
        return 0
    said = [f"{name} ({many(len(curve), 'point')})" for name, curve in curves.items()]
    print(f"{place}: {', '.join(said)}")
    for name, reasons in dropped.items():
        for reason, count in reasons.items():
            print(f"{name}: {many(count, 'point')} left out, {reason}")
    if from_zero:
        print("the log counts epochs from 0: point 0 is drawn after the first epoch, not as the untrained model")
    elif counts == "epoch" and any(curve[0][0] == 0 for curve in curves.values()):
        remedy = "" if args.counts else "; if point 0 belongs to the first epoch, add --counts epoch"
        print(f"point 0 is drawn as the untrained model{remedy}")
    for name, curve in curves.items():
        if back := [
            step for (_, before, _), (step, time, _) in itertools.pairwise(curve) if time < before - CLOCK_SECONDS
        ]:
            print(f"{name}: the time decreases at step {back[0]}, so the curve over time is wrong; was a clock reset?")
    for name in _too_short(curves):
        print(
            f"{name}: the last step is {curves[name][-1][0]}, but in the same time the training has many more steps. "
            f"If this curve counts epochs, import it separately: --counts epoch --tag 'TAG={name}'"
        )
    missing = [over for over in ("step", "samples") if reference.scale(over) is None]
    if missing:
        needed = "--batch-size" if counts == "step" else "--epoch-samples and --batch-size"
        print(f"the log cannot be drawn over {' and '.join(missing)}. Give {needed}")
    print("the next `dlscale run` adds the log to the page")
    return 0


@dataclass
class _Try:
    """Points of a curve from one file, in the order of the file."""

    begin: float  #: Earliest known time of the try, seconds since 1970-01-01 UTC.
    file: int  #: Number of the file.
    points: dict[int, tuple[float, float]] = field(default_factory=dict)  #: Time and value, by step.
    last: int = 0  #: Step of the newest point.

    def drop(self, step: int, before: float = math.inf) -> int:
        """Drop the points from `step` on that are older than `before`; return their number."""
        void = [each for each, (time, _) in self.points.items() if each >= step and time < before]
        for each in void:
            del self.points[each]
        return len(void)


def _joined(tries: Sequence[_Try], dropped: Counter[str]) -> tuple[dict[int, tuple[float, float]], float]:
    """Join the tries of a curve; return the points that count, and the start of their training.

    A try with several points starts a new training if its first step is at or before the curve's first step. Otherwise,
    if all points of the curve from this step on are older, the try resumed the training; if not, two processes wrote
    the curve at the same time.
    """
    joined = _Try(tries[0].begin, tries[0].file, dict(tries[0].points))
    for each in tries[1:]:
        first, (time, _) = next(iter(each.points.items()))
        if joined.points and len(each.points) > 1 and first <= min(joined.points):
            dropped[RESTARTED] += joined.drop(0)
            joined.begin = math.inf
        elif len(each.points) > 1 and all(at <= time for step, (at, _) in joined.points.items() if step >= first):
            dropped[ABANDONED] += joined.drop(first)
        joined.begin = min(joined.begin, each.begin)
        dropped[REPEATED] += len(each.points.keys() & joined.points.keys())
        joined.points.update(each.points)
    return joined.points, joined.begin


def _drop_with(tag: str, tries: Mapping[str, Sequence[_Try]], dropped: Mapping[str, Counter[str]]) -> None:
    """Drop the points of other curves that the tries of the curve `tag` replace.

    The program that wrote the curve `tag` into a file also wrote the file's other curves. The next try's file may lack
    points of the other curves, for example if no validation has ended yet.
    """
    known, files = dict[int, tuple[float, float]](), set[int]()
    for each in (one for one in tries[tag] if one.points):
        first, (time, _) = next(iter(each.points.items()))
        reason = RESTARTED if known and first <= min(known) else ABANDONED
        several = len(each.points) > 1 and each.file not in files
        if several and all(at <= time for step, (at, _) in known.items() if step >= first):
            for other, its in tries.items():
                if other != tag:
                    start = 0 if reason == RESTARTED else first
                    dropped[other][reason] += sum(one.drop(start, time) for one in its if one.file in files)
        known.update(each.points)
        files.add(each.file)


def read(
    files: Sequence[Path], tags: Mapping[str, str], percent: frozenset[str], epochs: bool = False
) -> tuple[dict[str, list[Point]], Dropped, bool]:
    """Return curves by dlscale's names, the number of dropped points, and whether the log counts epochs from 0.

    `tags` maps the log's tags to dlscale's names. The time of a point is in seconds since the start of the training
    (step 0 or, if missing, the first event). Values of tags in `percent` become fractions. If a step is repeated, the
    later value counts. A new try of a curve begins in each file, and when the step decreases to a step that the file
    already has, or to a step before all others. A new training replaces all earlier points; a resumed try replaces the
    points from its first step on. A restart event of TensorBoard (`purge_step`) drops earlier points from the event's
    step on. If `epochs` is true, epochs counted from 0 become epochs counted from 1, unless only validation has a
    point 0.
    """
    tries = dict[str, list[_Try]]()
    dropped: Dropped = {ours: Counter() for ours in tags.values()}
    others: dict[str, None] = {}
    count = 0
    # A killed writer may leave an empty file.
    for number_of_file, file in enumerate([file for file in files if file.stat().st_size] or files):
        begin = math.inf
        current: dict[str, _Try] = {}
        for event in events(file.resolve()):
            dated = abs(event.wall_time) < FARTHEST and event.step >= 0
            begin = min(begin, event.wall_time) if dated else begin
            if is_restart(event):
                for tag, its in tries.items():
                    dropped[tags[tag]][ABANDONED] += sum(one.drop(event.step) for one in its)
            for value in event.summary.value:
                number, tag = scalar(value), value.tag
                if tag not in tags:
                    if number is not None and len(others) < 12:
                        others[shorten(tag, 60)] = None
                    continue
                if number is None or not dated:
                    dropped[tags[tag]][NO_NUMBER if number is None else UNDATED] += 1
                    continue
                goes_on = current.get(tag)
                # An evaluation in parallel with the training may log a smaller step late; a new try repeats steps.
                if not goes_on or (
                    event.step < goes_on.last
                    and (event.step in goes_on.points or event.step < min(goes_on.points, default=0))
                ):
                    current[tag] = _Try(event.wall_time if goes_on else begin, number_of_file)
                    tries.setdefault(tag, []).append(current[tag])
                current[tag].last, points = event.step, current[tag].points
                dropped[tags[tag]][REPEATED] += event.step in points
                points[event.step] = event.wall_time, number / 100 if tag in percent else number
                count += 1
            if count > MAX_LOG_POINTS:
                raise UserError(
                    f"{files[0]}: the log has more than {MAX_LOG_POINTS} points. Name fewer tags, such as "
                    "--tag 'Val Loss=loss/valid'"
                )
    for tag in tries:
        _drop_with(tag, tries, {each: dropped[tags[each]] for each in tries})
    found, begins = dict[str, dict[int, tuple[float, float]]](), dict[str, float]()
    for tag, its in tries.items():
        found[tag], begins[tag] = _joined([one for one in its if one.points] or its[:1], dropped[tags[tag]])
    if found and not any(found.values()):
        raise UserError(f"{files[-1]}: all points are {ABANDONED}, and did not log any point afterwards")
    if not found:
        there = f"it has {', '.join(others)}. Name its tags: --tag 'TAG=loss/valid'" if others else "it has no scalars"
        below = "" if others else _below(files[0].parent)
        raise UserError(f"{files[0]}: the log does not have the tags {', '.join(tags)}; {there}{below}")
    found = {tag: points for tag, points in found.items() if points}
    begun = min(begins[tag] for tag in found)
    training = [tag for tag in found if not tags[tag].startswith(VALIDATION)]
    at_zero = [tag for tag, points in found.items() if 0 in points]
    from_zero = epochs and bool(at_zero) and all(tag in at_zero for tag in training)
    zero = begun if from_zero else min((found[tag][0][0] for tag in at_zero), default=begun)
    curves = {}
    for tag, points in found.items():
        every = [(step + from_zero, round(time - zero, 3), value) for step, (time, value) in sorted(points.items())]
        stride = -(-len(every) // (2 * POINTS))
        curves[tags[tag]] = every[::stride] + every[-1:] * bool((len(every) - 1) % stride)
        if len(every) == 1 and (same := dropped[tags[tag]].pop(REPEATED, 0)):
            dropped[tags[tag]][STEPLESS] = same
        dropped[tags[tag]][THINNED] += len(every) - len(curves[tags[tag]])
    ordered = {ours: curves[ours] for ours in tags.values() if ours in curves}
    return ordered, {ours: +dropped[ours] for ours in ordered if +dropped[ours]}, from_zero


def _too_short(curves: Mapping[str, Sequence[Point]]) -> list[str]:
    """Return the names of validation curves whose steps seem to be epochs.

    Such a curve covers most of the training's time, but less than a third of the training's steps.
    """
    training = [points for name, points in curves.items() if not name.startswith(VALIDATION)]
    steps, seconds = (max((points[-1][column] for points in training), default=0) for column in (0, 1))
    return [
        name
        for name, points in curves.items()
        if name.startswith(VALIDATION) and 3 * (points[-1][0] + 1) < steps and points[-1][1] > 0.8 * seconds > 0
    ]


def _files(path: Path) -> list[Path]:
    """Return the event file `path`, or all event files in the folder `path`.

    A folder may have several event files, since a restarted program writes another file.
    """
    if path.is_dir():
        files = [file for file in sorted(path.glob("*.tfevents.*")) if file.is_file()]
        if not files:
            below = _below(path) or "; expected event files of TensorBoard, events.out.tfevents.*"
            raise UserError(f"{path}: no event file in this folder{below}")
        return files
    if not path.exists():
        raise UserError(f"{path}: no such file; expected an event file of TensorBoard, or a folder of event files")
    no_pipe(path, "an event file of TensorBoard")
    return [path]


def _below(folder: Path) -> str:
    """Return a remedy that names the subfolders with event files; empty without such subfolders."""
    found = sorted({str(file.parent) for file in itertools.islice(folder.glob("*/**/*.tfevents.*"), 1000)})
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return f"; event files are in {', '.join(found[:10])}{more}: import each folder separately" if found else ""


def _given(texts: Sequence[str]) -> dict[str, str]:
    tags = dict[str, str]()
    for text in texts:
        theirs, _, ours = text.rpartition("=")
        if not theirs:
            raise UserError(f"--tag: {text}: expected THEIRS=OURS, such as 'Val Loss=loss/valid'")
        if ours not in QUANTITIES and not (ours.startswith("valid/") and len(ours) > len("valid/")):
            raise UserError(f"--tag: {unknown('quantity', ours, (*QUANTITIES, 'valid/METRIC'))}")
        if theirs in tags or ours in tags.values():
            raise UserError(f"--tag: {text}: another --tag has the same tag or quantity. Give each once")
        tags[theirs] = ours
    return tags
