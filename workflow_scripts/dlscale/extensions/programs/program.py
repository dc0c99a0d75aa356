"""Stage `program`: run an external program to its end, in place of dlscale's training."""

from __future__ import annotations

import argparse
import bisect
import contextlib
import itertools
import json
import logging
import math
import shutil
import signal
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlscale.config.compute import compute_digest
from dlscale.config.run import load_run
from dlscale.core import registry
from dlscale.core.errors import Stopped, UserError
from dlscale.core.files import read_text, reading, write_text
from dlscale.core.metrics import Epoch, Untrained, epoch_lines
from dlscale.core.process import keep_log
from dlscale.core.text import duration, many
from dlscale.extensions.programs import logs
from dlscale.extensions.programs import steps as seen
from dlscale.extensions.programs.run_program import RunProgram
from dlscale.extensions.programs.running import PRINTED
from dlscale.extensions.programs.settings import Words
from dlscale.launch.contain import FORWARDED
from dlscale.measure.records import Throughput

#: Name of the file with the digest (`--sources`) of the code and settings that made the files in the folder `--keep`.
SOURCES = "out.sha256"

#: Name of the file with the losses that the program logged, in the format of `metrics.jsonl`.
LOSSES = "program.jsonl"

#: Name of the file with the losses that earlier tries of the run printed.
CURVES = "out.losses.json"

#: Point of a curve: seconds since 1970-01-01 UTC, step, value.
Point = tuple[float, int, float]

#: Printed value: time (seconds since 1970-01-01 UTC) and value.
Printed = tuple[float, float]


def main(args: argparse.Namespace) -> None:
    """Run the program of `args.config`; write `program.json`.

    If `program.losses` is set, also write the losses that the program logged or printed into `program.jsonl`.
    """
    run, folder, keep = load_run(args.config, "program"), Path(args.out), Path(args.keep)
    steps, known = folder / "steps", folder / SOURCES
    resumed = resumes(run.program, keep) and known.exists() and read_text(known) == args.sources
    if keep.exists() and not resumed:
        logging.info(
            "the program cannot resume from %s: program.resume is not set, files are missing, or sources have changed. "
            "Removed this folder; starting afresh",
            keep,
        )
        keep.unlink() if keep.is_symlink() else shutil.rmtree(keep)
    printed = bool(run.program.losses) and not run.program.log
    before = earlier(folder, keep, run.program) if resumed and printed else Earlier()
    shutil.rmtree(steps, ignore_errors=True)
    if not resumed:
        write_text(known, str(args.sources))
        (folder / CURVES).unlink(missing_ok=True)
    begun = known.stat().st_mtime
    kept = folder / f"{keep.name}.log"
    keep_log(kept, resumed)
    program = RunProgram(run, args.start, keep, steps, resumed)
    ended = program.go()
    # Slurm may send a signal to the program only, so the program's status counts as well. A program that saves its
    # state after a signal may end with status 0.
    asked = signal.SIGTERM in ended.signals or (ended.status and (ended.signals or ended.status - 128 in FORWARDED))
    if ended.status or asked:
        what = f"the program ended with status {ended.status} after {duration(ended.seconds)}"
        if ended.signals:
            what = f"a signal ended the program after {duration(ended.seconds)} (status {ended.status})"
        elif asked:  # srun and torchrun end the other processes if one fails, and may then report their status
            what += ", perhaps because another of its processes failed first"
        if asked and resumes(run.program, keep):
            raise Stopped(f"{what}. Run the stage again: the program resumes from {keep}")
        raise UserError(f"{what}. The program's last lines are in the log")
    try:
        found = program.record(ended, args.telemetry)
    except UserError as error:
        raise UserError(f"{error}. The program's files are kept in {keep}") from error
    found = found.model_copy(update={"compute": compute_digest(run.model_dump(mode="json"))})
    if run.program.losses:
        own = seen.read(steps)[1]
        ends = own[0].steps if own else []
        losses = of_ranks(ended.losses, max(len(own), len(ended.ranks)), ended.begin)
        curves = before.merged(losses, ends) if resumed else _by_row(losses)
        if program.log:
            percent, start = registry.study(run.study).published_log.percent, program.log_start
            writers = () if resumed else seen.processes(steps) or seen.processes(steps, ("python",))
            start = start if not resumed else logs.Start(begun)  # values of earlier tries count as well
            curves = logs.values(program.log, run.program.losses, start, writers, ended.begin + ended.seconds)
            if not resumed:
                curves = logs.counted_on(program.log, curves, start, ended.begin + ended.seconds)
            for tag in percent & run.program.losses.keys():
                name = run.program.losses[tag]
                curves[name] = [(time, step, value / 100) for time, step, value in curves.get(name, [])]
        # After a restart from a checkpoint a step may have two values: the last value counts.
        last = {name: sorted({point[1]: point for point in points}.values()) for name, points in curves.items()}
        for name in () if resumed else last:
            if again := len(curves[name]) - len(last[name]):
                logging.warning(
                    "%s: %s left out, because a later point has the same step. This is right after a restart; "
                    "otherwise log a step number that increases through all epochs",
                    name,
                    many(again, "point"),
                )
        curves = last
        epochs = epochs_of(curves, [] if printed and resumed else ends, found, ended.begin, rows=printed)
        warn_of_divergence(epochs)
        write_text(folder / LOSSES, epoch_lines(epochs))
    shutil.rmtree(steps)
    found.write(folder / "program.json")
    for file in (known, kept, folder / CURVES):  # the program has ended: no later try resumes
        file.unlink(missing_ok=True)


def resumes(program: Any, keep: Path) -> bool:
    """Return whether an earlier try left files in the folder `keep` from which the program can resume.

    `program.resume` must be set. All files in `keep` that `program.resume` names must exist; if `program.resume` names
    no files in `keep`, any file is enough.
    """
    words, here = Words(program, str(keep.absolute()), resumed=True).resume, f"{keep.absolute()}/"
    named = [Path(word[word.index(here) :]) for word in words if here in word]
    return bool(words) and keep.is_dir() and all(each.exists() for each in named) and any(keep.iterdir())


# ---- earlier tries -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Earlier:
    """Losses that earlier tries printed, and the step of the checkpoint from which the program resumes."""

    step: int = 0
    counted: bool = True  #: Whether points have step numbers; otherwise points are numbered consecutively.
    curves: dict[str, list[Point]] = field(default_factory=dict)
    until: float = 0.0  #: Time of the last step or loss of these tries.

    def merged(self, losses: Mapping[str, list[tuple[float, float]]], ends: list[float]) -> dict[str, list[Point]]:
        """Return the curves, extended by the `losses` of a later try; the later try's steps ended at times `ends`."""
        if not (self.counted and ends):
            both = {name: [(time, value) for time, _, value in points] for name, points in self.curves.items()}
            return _by_row({name: [*both.get(name, []), *points] for name, points in losses.items()})
        found = {name: [point for point in points if point[1] <= self.step] for name, points in self.curves.items()}
        marks = [time for time, _ in losses.get("loss/valid", [])]
        for name, points in losses.items():
            new = [(time, self.step + steps_until(time, ends, marks), value) for time, value in points]
            found[name] = [*found.get(name, []), *new]
        return found


def of_ranks(losses: Mapping[str, list[Printed]], processes: int, begin: float) -> Mapping[str, list[Printed]]:
    """Return printed values; if each process printed its validations, return the means over the processes, and warn.

    Each process is assumed to print its validations if groups of `processes` values last less than a quarter of the
    time since the previous group. Training losses are returned unchanged.
    """
    found = dict(losses)
    for name in losses if processes > 1 else ():
        points = sorted(losses[name])
        groups = [points[at : at + processes] for at in range(0, len(points), processes)]
        if name.startswith("loss/train") or not groups or len(groups[-1]) < processes:
            continue
        before = [begin, *(group[-1][0] for group in groups)]
        if all(
            4 * (group[-1][0] - group[0][0]) < group[0][0] - last for last, group in zip(before, groups, strict=False)
        ):
            logging.warning("%s: each of %d processes printed its value; their means count", name, processes)
            found[name] = [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]
    return found


def _by_row(losses: Mapping[str, list[Printed]]) -> dict[str, list[Point]]:
    return {
        name: [(time, row, value) for row, (time, value) in enumerate(points, 1)] for name, points in losses.items()
    }


def earlier(folder: Path, keep: Path, program: Any) -> Earlier:
    """Return the losses that earlier tries printed, and save the losses for later tries.

    Call this function before the last try's steps are removed. Points count up to the last checkpoint. The checkpoint's
    time is the time of the newest file that `program.resume` names; without such a file, the time of the newest file in
    `keep`. If a validation ended at about this time, the validation's time counts.
    """
    file, steps = folder / CURVES, folder / "steps"
    known = Earlier()
    if file.exists():
        with reading(file, "delete this file, then losses of earlier tries are left out"):
            kept = json.loads(read_text(file))
            points = (
                (name, [(_time(t), int(n), float(x)) for t, n, x in each]) for name, each in kept["curves"].items()
            )
            until = _time(kept.get("until", 0.0))  # files of earlier versions lack this key
            known = Earlier(int(kept["step"]), bool(kept["counted"]), dict(points), until)
    losses = defaultdict[str, list[tuple[float, float]]](list)
    with contextlib.suppress(FileNotFoundError):
        for line in read_text(steps / PRINTED, errors="replace").splitlines():
            # Skip an incomplete line, written when the disk was full.
            with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
                name, time, value = json.loads(line)
                losses[name].append((_time(time), float(value)))
    own = seen.read(steps)[1]
    ends = own[0].steps if own else []
    until = max([*ends, *(time for points in losses.values() for time, _ in points)], default=0.0)
    # The last try ended before its first step, or its losses are already saved: a later try may have been killed
    # before it removed the steps.
    if until <= known.until:
        return known
    curves = known.merged({name: losses[name] for name in program.losses.values()}, ends)
    names = [Path(word) for word in Words(program, str(keep.absolute()), resumed=True).resume]
    files = [each for each in names if each.is_file()] or [each for each in keep.rglob("*") if each.is_file()]
    saved = max((each.stat().st_mtime for each in files), default=0.0)
    marks = [time for time, _ in losses["loss/valid"]]
    # Most programs save a checkpoint just before or after a validation: the validation's time is then more exact.
    spacing = min((b - a for a, b in itertools.pairwise(marks)), default=0.0)
    near = [time for time in marks if abs(time - saved) < spacing / 4]
    step = steps_until(near[-1] if near else saved, ends, marks) if ends else 0
    found = Earlier(known.step + step, known.counted and bool(ends), curves, until)
    write_text(file, json.dumps(asdict(found)))
    return found


def _time(seconds: Any) -> float:
    if not abs(float(seconds)) < seen.MAX_SECONDS:
        raise ValueError(f"{seconds}: expected seconds")
    return float(seconds)


def steps_until(time: float, ends: list[float], marks: list[float]) -> int:
    """Return the number of steps that ended by a time.

    A killed process does not write the steps of its last second. The number of these steps is estimated from the pace,
    or from the usual number of steps between validations (`marks`) if `time` follows a validation in that second.
    """
    if time <= ends[-1] or len(ends) < 2:
        return bisect.bisect_right(ends, time)
    pace = (len(ends) - 1) / max(ends[-1] - ends[0], 1e-9)
    guess = len(ends) + round((time - ends[-1]) * pace)
    at = [bisect.bisect_right(ends, mark) for mark in marks if mark <= ends[-1]]
    late = [mark for mark in marks if ends[-1] < mark <= time]
    if not (at and late):
        return guess
    usual = statistics.mode([b - a for a, b in itertools.pairwise([0, *at])])
    return min((len(ends), at[-1] + usual * len(late)), key=lambda count: abs(count - guess))


# ---- the record --------------------------------------------------------------------------------------


def epochs_of(
    curves: dict[str, list[Point]], ends: list[float], found: Throughput, begin: float, rows: bool = False
) -> list[Epoch]:
    """Return an epoch for each validation that a program logged.

    Parameters
    ----------
    curves
        Logged values by dlscale's names: `loss/valid`, `loss/train`, `learning_rate`, `valid/NAME`.
    ends
        End of each step, seconds since 1970-01-01 UTC; empty if no steps were seen. The step numbers of the validations
        are computed from these times (see `steps_at`), since a log may count epochs.
    found
        The program's speed.
    begin
        Start of the last try, seconds since 1970-01-01 UTC; points before this time are from earlier tries.
    rows
        Whether the points' step numbers are only the numbers of the printed values.
    """
    assert found.full and found.outside
    size, speed = found.batch_size, found.full.mean if found.outside.samples else None
    rate = _step_rate(found, ends)
    epochs, before, since, untrained = list[Epoch](), 0, -math.inf, None
    points = curves.get("loss/valid", [])
    trained_by = _trained(curves.get("loss/train", []), points, rows)
    pair = _by_time if rows else _by_step
    measured = {name: pair(curve, points) for name, curve in curves.items() if name.startswith("valid/")}
    counted = steps_at(points, ends, begin)
    # A log that counts epochs from 0 also has training values at 0.
    if not ends and counted == [*range(len(counted))] and any(not step for _, step, _ in curves.get("loss/train", [])):
        counted = [step + 1 for step in counted]
    for number, ((time, step, value), done) in enumerate(zip(points, counted, strict=True)):
        trained = trained_by[number]
        rates = [each for when, _, each in curves.get("learning_rate", []) if when <= time]
        metrics = {name.partition("/")[2]: values[step] for name, values in measured.items() if step in values}
        train_loss = statistics.fmean(trained) if trained else math.nan
        if not (number or done):  # before the first step
            untrained, since = Untrained(train_loss=train_loss, valid_loss=value, metrics=metrics), time
            continue
        seconds = max(done - before, 0) / rate if rate else time - max(since, begin)
        epochs.append(
            Epoch(
                epoch=len(epochs) + 1,
                step=done,
                samples=done * size if size else None,
                learning_rate=rates[-1] if rates else math.nan,
                train_loss=train_loss,
                valid_loss=value,
                epoch_seconds=seconds,
                samples_per_second=speed,
                valid_seconds=max(time - since - seconds, 0.0) if since > 0 else 0.0,
                wall_time=time,
                metrics=metrics,
                untrained=None if epochs else untrained,
            )
        )
        before, since = done, time
    if not epochs:
        there = ", ".join(f"{name} ({len(points)})" for name, points in curves.items()) or "nothing"
        raise UserError(f"program.losses: no value of loss/valid was logged or printed; found {there}")
    if points[0][0] < begin:  # the wait between two tries is not validation time
        usual = statistics.median(each.valid_seconds for each in epochs)
        epochs = [each.model_copy(update={"valid_seconds": usual}) for each in epochs]
    return epochs


def warn_of_divergence(epochs: list[Epoch]) -> None:
    """Log a warning if validation losses are NaN or infinite."""
    if wrong := [each.epoch for each in epochs if not math.isfinite(each.valid_loss)]:
        logging.warning(
            "the training diverged: the program's validation loss is not finite from epoch %d on (in %d of %s)",
            wrong[0],
            len(wrong),
            many(len(epochs), "epoch"),
        )


def _step_rate(found: Throughput, ends: list[float]) -> float | None:
    """Return a program's steps/s; None if the rate is in samples/s and neither batch size nor steps are known."""
    assert found.full and found.outside
    if found.batch_size or not found.outside.samples:
        return found.full.mean / (found.batch_size or 1)
    steps = [after - before for before, after in itertools.pairwise(ends)]
    usual = statistics.median(steps) if steps else 0.0
    return 1 / usual if usual else None


def _by_step(curve: list[Point], points: list[Point]) -> dict[int, float]:
    """Return a metric's values by the step numbers of the validations.

    If the metric and the validations do not have a step number in common, the n-th value is paired with the n-th
    validation.
    """
    values = {step: value for _, step, value in curve}
    if values.keys() & {step for _, step, _ in points}:
        return values
    return {step: value for (_, step, _), (_, _, value) in zip(points, curve, strict=False)}


def _trained(curve: list[Point], points: list[Point], rows: bool) -> list[list[float]]:
    """Return the training losses that belong to each validation.

    With as many losses as validations, the n-th loss belongs to the n-th validation. Otherwise the losses since the
    previous validation belong to a validation, by step if possible: Lightning, for example, logs the mean of an epoch
    after the epoch's validation, but with the same step.
    """
    if len(curve) == len(points):
        return [[value] for _, _, value in curve]
    by_step = not rows and {step for _, step, _ in points} <= {step for _, step, _ in curve}
    marks = [each[by_step] for each in points]
    return [
        [each[2] for each in curve if last < each[by_step] <= mark]
        for last, mark in itertools.pairwise([-math.inf, *marks])
    ]


def _by_time(curve: list[Point], points: list[Point]) -> dict[int, float]:
    """Return a metric's printed values by the numbers of the validations.

    Unless there are as many values as validations, a value belongs to the validation that was printed nearest to it.
    """
    if len(curve) == len(points):
        return {step: value for (_, step, _), (_, _, value) in zip(points, curve, strict=True)}
    nearest = [min(points, key=lambda point: abs(point[0] - time)) for time, _, _ in curve]
    # If a metric is printed more often, the value nearest to a validation counts.
    order = sorted(zip(curve, nearest, strict=True), key=lambda pair: -abs(pair[0][0] - pair[1][0]))
    return {point[1]: value for (_, _, value), point in order}


def steps_at(points: list[Point], ends: list[float], begin: float) -> list[int]:
    """Return the number of steps until each point, counted by the steps' end times `ends`.

    With points of earlier tries, without `ends`, or if the log's times cannot be read, return the step numbers in the
    log, multiplied by the last try's steps per logged step number, because a log may count epochs.
    """
    counted = [bisect.bisect_right(ends, time) for time, _, _ in points]
    here = [(count, step) for count, (time, step, _) in zip(counted, points, strict=True) if time >= begin]
    if ends and len(here) == len(points):
        return counted
    if (
        ends and points and points[-1][0] < logs.OLDEST <= begin
    ):  # points' numbers replace unreadable times (`logs.values`)
        return [round(step * len(ends) / (points[-1][1] or 1)) for _, step, _ in points]
    made, numbers = (here[-1][0] - here[0][0], here[-1][1] - here[0][1]) if here else (0, 0)
    each = made / numbers if made > 0 and numbers > 0 else 1.0  # more than 1 if the log counts epochs
    return [round(step * each) for _, step, _ in points]
