"""Read steps and values from a program's own log: TensorBoard files, or a file of JSON lines."""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from dlscale.core.errors import UserError
from dlscale.core.files import irregular, open_regular
from dlscale.core.text import listed, many, shorten
from dlscale.extensions.logs.events import events, is_restart, scalar
from dlscale.extensions.programs.printed import plain
from dlscale.extensions.programs.steps import in_order

#: Number of bytes before the old end of a log that are compared, to detect a replaced log.
TAIL = 4096

#: Upper bound of step numbers: larger ones are not exact as floats.
MAX_STEP = 2**53

#: Seconds by which the clocks of other machines may be ahead.
SKEW_SECONDS = 1.0

#: Units of numeric times: seconds, milliseconds, microseconds, nanoseconds.
UNITS = (1.0, 1e-3, 1e-6, 1e-9)

#: Earliest accepted date in a log, seconds since 1970-01-01 UTC.
OLDEST = 1e9

#: Maximum fraction of a log's points whose step numbers do not increase with time.
MAX_BACKWARD = 0.1

#: Time at which an event file was begun, in its name: seconds since 1970-01-01 UTC.
BEGUN = re.compile(r"\.tfevents\.(\d{1,12})\.")

#: Words in the tags and folders of validations.
VALIDATION = re.compile(
    r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?i:val|valid|validation|eval|evaluation|test|dev)(?![a-z])"
)

#: Word in tags of epochs. Keras, for example, logs `epoch_loss` with the epoch as the step.
EPOCH = re.compile(r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?i:epoch)(?![a-z])")

#: Minimum fraction of the run's duration that a log's times must cover if they count from the start.
MIN_GROWTH = 0.05

#: Units that only an error message names, by their length in seconds. The message names a unit if times in this unit
#: would cover at least the fraction MIN_COVERED of the run.
REFUSED_UNITS, MIN_COVERED = {60.0: "minutes", 3600.0: "hours"}, 0.1

#: Keys of the step number in JSON lines; if a line has several of these keys, the first key counts.
STEP_KEYS = ("step", "global_step", "iteration", "iter", "current_steps")

EXPECTED = (
    "expected a date with time (ISO 8601, or seconds or milliseconds since 1970-01-01 UTC), or seconds since the start"
)

#: Logged step: time (seconds since 1970-01-01 UTC) and step number.
Point = tuple[float, int]

#: Time, step and value of each point, by dlscale's names.
Curves = dict[str, list[tuple[float, int, float]]]

#: Tag, logged time, step and value.
Row = tuple[str, float | datetime, int, float]


@dataclass(frozen=True)
class Start:
    """State of a log before the program starts."""

    begin: float  #: Time of this state, seconds since 1970-01-01 UTC.
    size: int = 0  #: Bytes that earlier runs wrote.
    tail: bytes = b""  #: Last bytes that earlier runs wrote, at most `TAIL`.


def start_of(path: Path) -> Start:
    """Return the current state of a log, which need not exist.

    Refuse a symbolic link, and a path that is neither a file nor a folder.
    """
    begin = time.time()
    if path.is_symlink():
        raise irregular(path, "a file or folder")
    if path.is_dir() or not path.exists():
        return Start(begin)
    with _opened(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - TAIL, 0))
        return Start(begin, size, file.read(TAIL))


def logged(path: Path, start: Start, end: float | None = None, own: Iterable[str] = ()) -> list[list[Point]]:
    """Return the logged points of each training between the start and `end` (default: now).

    A new training begins when the step number falls to or below the first step of the current training. In event files
    only the tag with the most points in a folder counts; tags of epochs and of validations count only if there are no
    other tags. In a file of JSON lines only lines with one of STEP_KEYS and `time` count. `own` is described at
    `values`.

    Raises
    ------
    UserError
        The log cannot be read, it counts epochs, its times are not within this run, or the times do not increase with
        the steps.
    """
    of = defaultdict[str, list[Row]](list)
    for row in _rows(path, start, own=own):
        of[row[0]].append(row)
    # Prefer tags of steps, then tags and folders without a word of validations, then the tag with the most points.
    tag = max(
        of,
        key=lambda each: (
            not EPOCH.search(each.split("\0")[-1]),
            [not VALIDATION.search(part) for part in reversed(each.split("\0"))],
            len(of[each]),
        ),
        default="",
    )
    steps = sorted({row[2] for row in of[tag]})
    if EPOCH.search(name := tag.split("\0")[-1]) and steps[-1] - steps[0] < len(steps):
        raise UserError(
            f"log of steps {path}: the tag {name} counts epochs, not steps. Log each step, or every few steps (Keras: "
            "TensorBoard(update_freq=10))"
        )
    dated = _dated(path, of[tag], start.begin, end)
    found = list[dict[int, float]]()
    for training in _trainings(dated):
        _check_order(path, training)
        found.append({})
        for when, row in training:
            found[-1].setdefault(row[2], when)
    return [sorted((when, step) for step, when in each.items()) for each in found]


def values(
    path: Path, tags: Mapping[str, str], start: Start, own: Iterable[str] = (), end: float | None = None
) -> Curves:
    """Return time, step and value of each logged point between the start and `end` (default: now), by dlscale's names.

    `tags` maps the log's tags, or FOLDER/TAG in a folder of event files, to dlscale's names. A folder may also have
    event files of other tries: if files of the `own` processes (HOST.PID) exist, only these files are read. If the
    times cannot be read or jump back, the number of each point replaces the point's time.
    """
    found = defaultdict[str, list[tuple[float, int, float]]](list)
    rows = _rows(path, start, tags, own)
    try:
        dated = _dated(path, rows, start.begin, end)
        times = {id(row): when for when, row in dated}
        # In a file of JSON lines, local times may jump back with the clock, at the end of summer time.
        if not (path.is_dir() or ".tfevents." in path.name) and any(
            times.get(id(row), -math.inf) < times.get(id(before), math.inf) - SKEW_SECONDS
            for before, row in itertools.pairwise([*rows[:1], *rows])
        ):
            raise UserError(f"log of steps {path}: its times jump back")
    except UserError as error:
        logging.warning("%s. Its times are ignored; its points count in the order of the log", error)
        dated = [(float(number), row) for number, row in enumerate(rows, 1)]
    for when, (tag, _, step, value) in dated:
        found[tags[tag]].append((when, step, value))
    return {name: sorted(points) for name, points in found.items()}


def counted_on(path: Path, curves: Curves, start: Start, end: float) -> Curves:
    """Return curves with increasing steps, even if a log of JSON lines begins to count again, as in each epoch.

    Curves from event files, and from logs without readable times or with several counters, are returned unchanged.
    """
    if path.is_dir() or ".tfevents." in path.name:
        return curves
    try:
        trainings = _trainings(_dated(path, _rows(path, start), start.begin, end))
        for training in trainings:
            _check_order(path, training)
    except UserError:  # without times, or with several counters
        return curves
    if len(trainings) < 2:
        return curves
    logging.warning(
        "log of steps %s: the steps begin again %s, as in each epoch; dlscale counts on from the step before",
        path,
        many(len(trainings) - 1, "time"),
    )
    begins = [training[0][0] for training in trainings]
    before = [0, *itertools.accumulate(max(row[2] for _, row in training) for training in trainings)]
    return {
        name: [
            (when, step + before[max(bisect.bisect_right(begins, when) - 1, 0)], value) for when, step, value in points
        ]
        for name, points in curves.items()
    }


# ---- contents ----------------------------------------------------------------------------------------


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb", opener=open_regular)
    except OSError as error:
        raise UserError(f"log of steps {path}: {error.strerror}") from None


def _rows(path: Path, start: Start, tags: Collection[str] | None = None, own: Iterable[str] = ()) -> list[Row]:
    """Return the rows of a log since the start, with the given tags only.

    If `tags` is None, all tags of event files are returned, as FOLDER, a null character and TAG, and each JSON line
    gives one row with an empty tag. In a folder, event files that were begun before the start are left out.
    """
    files = sorted(path.rglob("*.tfevents.*")) if path.is_dir() else [path]
    if path.is_symlink():
        raise irregular(path, "a file or folder")
    if not files or not all(file.exists() for file in files):
        raise UserError(
            f"log of steps {path}: no such file; expected a file of JSON lines, a TensorBoard file, or a folder of "
            "TensorBoard files"
        )
    files = [
        file
        for file in files
        if file == path or not (named := BEGUN.search(file.name)) or int(named[1]) > start.begin - 1 - SKEW_SECONDS
    ]
    files = [file for file in files if any(f".{process}." in file.name for process in own)] or files
    if path.is_dir() or ".tfevents." in path.name:
        found = defaultdict[Path, list[Row]](list)
        for folder, event in _events(files):
            # A restart repeats steps. `values` (with `tags`) keeps the last try's points; `logged`, for the speed,
            # keeps the first try's points.
            if tags is not None and is_restart(event):
                found[folder] = [row for row in found[folder] if row[2] < event.step]
            for value in event.summary.value:
                parent = folder.relative_to(path) if path.is_dir() else "."
                tag = f"{parent}/{value.tag}" if tags else f"{parent}\0{value.tag}"
                tag = tag if tags is None or tag in tags else value.tag
                if (tags is None or tag in tags) and (number := scalar(value)) is not None:
                    found[folder].append((tag, event.wall_time, event.step, number))
        for tag in tags or ():
            _check_folders(path, tag, found, start)
        return [*itertools.chain.from_iterable(found.values())]
    rows, wrong, known, unread = list[Row](), "", False, list[tuple[str, int, object]]()
    empty, last = dict[int, int](), dict[str, int]()  # line of each null, by row; last row with a number, by tag
    given: Any = None  # time of the last line with a time
    with _opened(path) as lines:
        # If the program has replaced its log, all lines are new.
        lines.seek(max(start.size - len(start.tail), 0))
        if lines.read(len(start.tail)) != start.tail:
            lines.seek(0)
        for number, line in enumerate(lines, 1):
            text = plain(line.decode(errors="replace").removeprefix("\ufeff"))
            try:
                entry = json.loads(text)
                keys = [key for key in STEP_KEYS if key in entry][:1]
                # A line without a time, such as a validation's, has the time of the line before it.
                late = tags is not None and given is not None
                if isinstance(entry, dict) and not (keys and (late or "time" in entry)):
                    wrong = wrong or f"line {number}: {_missing(entry)}"
                    unread += [(tag, number, entry[tag]) for tag in tags or () if tag in entry]
                    continue
                step, given = _step(entry[keys[0]]), entry.get("time", given)
            except (ValueError, TypeError, IndexError, OverflowError, RecursionError, AttributeError):
                # The incomplete last line of a killed program, or a line of other text.
                wrong = wrong or f"line {number}: expected JSON with `step` and `time`"
                unread += [(tag, number, text) for tag in tags or () if f'"{tag}"' in text and text.endswith("\n")]
                continue
            try:
                when = _time(given)
            except (ValueError, OverflowError):
                wrong = wrong or f"line {number}: `time` {shorten(repr(given), 40)}: {EXPECTED}"
                continue
            known = True
            if tags is None:
                rows.append(("", when, step, math.nan))
            else:
                for tag in (tag for tag in tags if tag in entry):
                    try:
                        value = _value(entry[tag])
                    except ValueError:
                        unread.append((tag, number, entry[tag]))
                        continue
                    if entry[tag] is None:
                        empty[len(rows)] = number
                    elif math.isfinite(value):
                        last[tag] = len(rows)
                    rows.append((tag, when, step, value))
    if wrong and not known:
        raise UserError(f"log of steps {path}: {wrong}")
    # If numbers follow a null of a tag, nulls of this tag mean that nothing was measured: skip them.
    sparse = {rows[place][0] for place in empty if place < last.get(rows[place][0], 0)}
    gaps = {place: line for place, line in empty.items() if rows[place][0] in sparse}
    unread += [(rows[place][0], line, None) for place, line in gaps.items()]
    for tag in sorted({each[0] for each in unread}):
        skipped = sorted(((line, value) for name, line, value in unread if name == tag), key=lambda each: each[0])
        logging.warning(
            "log of steps %s: skipped %s of `%s` without a number, a step or a time; the first is %s in line %d",
            path,
            many(len(skipped), "value"),
            tag,
            shorten(json.dumps(skipped[0][1]), 40),
            skipped[0][0],
        )
    return [row for place, row in enumerate(rows) if place not in gaps]


def _missing(found: Mapping[str, object]) -> str:
    """Return a message that lists the missing, existing and accepted keys of a JSON line."""
    names = ", ".join(f"`{key}`" for key in STEP_KEYS)
    has = {f"no step ({names})": any(key in found for key in STEP_KEYS), "no `time`": "time" in found}
    absent = [text for text, there in has.items() if not there]
    return f"{' and '.join(absent)} among its keys {shorten(', '.join(found) or 'none', 100)}; {EXPECTED}"


def _events(files: Sequence[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield folder and event for all events of files.

    A damaged file yields the events before the damage. If all files are damaged, raise the error of the first file.
    """
    damaged = list[UserError]()
    for file in files:
        try:
            yield from ((file.parent, event) for event in events(file))
        except UserError as error:
            damaged.append(error)
    if damaged and len(damaged) == len(files):
        raise damaged[0]


def _check_folders(path: Path, tag: str, found: Mapping[Path, Sequence[Row]], start: Start) -> None:
    """Refuse a tag with points of this run in several folders, unless each folder resumes the previous one."""
    parts = list[tuple[float, float, int, Path]]()
    for folder, rows in found.items():
        own = [(row[1], row[2]) for row in rows if row[0] == tag and isinstance(row[1], float)]
        if own := [each for each in own if each[0] >= start.begin // 1]:
            times = [time for time, _ in own]
            parts.append((min(times), max(times), min(step for _, step in own), folder))
    parts.sort()
    if any(after[0] <= before[1] or after[2] <= before[2] for before, after in itertools.pairwise(parts)):
        names = [str(folder.relative_to(path)) for *_, folder in parts]
        raise UserError(
            f"log of steps {path}: the tag {tag} is in several folders: {listed(names)}. Name folder and tag in "
            f"`losses`, for example `{names[0]}/{tag}`, or set `log` to one of the folders"
        )


def _value(value: object) -> float:
    """Return a logged value; raise ValueError if it is not a number.

    Many writers replace NaN and infinities, which JSON lacks, with null or with texts such as "NaN" and "-inf".
    """
    if value is None:
        return math.nan
    if isinstance(value, str):
        return float(value)
    if not _is_number(value):
        raise ValueError
    return float(value)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < 2**1000


def _step(value: object) -> int:
    """Return a step's number; raise ValueError for a value that is not a whole number."""
    number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    if not (number.is_integer() and abs(number) < MAX_STEP):
        raise ValueError
    return int(number)


def _time(value: object) -> float | datetime:
    """Return a time as a number or a date; raise ValueError for anything else."""
    if isinstance(value, str):
        text = plain(value).strip()
        try:
            value = float(text)
        except ValueError:
            return datetime.fromisoformat(text)
    if not _is_number(value) or not math.isfinite(number := float(value)):  # type: ignore[arg-type]
        raise ValueError
    return number


# ---- times -------------------------------------------------------------------------------------------


def _dated(path: Path, rows: Sequence[Row], begin: float, end: float | None) -> list[tuple[float, Row]]:
    """Return the rows of a run with their times in seconds since 1970-01-01 UTC, in the order of time.

    The log's clock is not known: the clock that puts the most rows into the run is chosen. The clock that counts since
    the machine's boot is chosen only if it puts all rows into the run, because times since the program's start can
    look the same. If no clock fits, the times are read as times since the program's start. The result is empty if all
    rows are older than the run.
    """
    end, begin = time.time() if end is None else end, max(begin, OLDEST)
    best, earlier = list[tuple[float, Row]](), False
    for of_day, clock in _clocks():
        dated = [(when, row) for row in rows if (when := clock(row[1])) is not None]
        inside = [each for each in dated if _floor(begin, each[0]) <= each[0] <= end + SKEW_SECONDS]
        if len(inside) > len(best) and (of_day or len(inside) == len(rows)):
            best = inside
        earlier = earlier or (of_day and bool(dated) and all(OLDEST < when < begin for when, _ in dated))
    if rows and not best and not earlier:
        return _since_start(path, rows, begin, end)
    return sorted(best, key=lambda each: each[0])


def _clocks() -> Iterator[tuple[bool, Callable[[float | datetime], float | None]]]:
    """Yield a log's possible clocks: True (time of day) or False (time since boot), and a conversion to seconds."""
    for zone in (None, UTC):  # dates without a time zone may be local time or UTC
        yield True, partial(_of_date, zone=zone)
    for unit in UNITS:
        yield True, partial(_of_number, zero=0.0, unit=unit)
    yield False, partial(_of_number, zero=time.time() - time.perf_counter(), unit=1.0)


def _of_date(given: float | datetime, zone: tzinfo | None) -> float | None:
    if not isinstance(given, datetime):
        return None
    try:
        return (given if given.tzinfo else given.replace(tzinfo=zone)).timestamp()
    except (ValueError, OverflowError, OSError):  # before 1970, for example
        return None


def _of_number(given: float | datetime, zero: float, unit: float) -> float | None:
    return None if isinstance(given, datetime) else zero + given * unit


def _floor(begin: float, when: float) -> float:
    """Return `begin`, rounded down to whole seconds if `when` is a whole number of seconds."""
    return math.floor(begin) if when.is_integer() else begin


def _since_start(path: Path, rows: Sequence[Row], begin: float, end: float) -> list[tuple[float, Row]]:
    """Return the dated rows of a log whose times count from a moment in the run, in seconds or milliseconds.

    Raise `UserError` for other times, such as the durations of steps.
    """
    times, lasted = [row[1] for row in rows], end - begin
    known = [each for each in times if isinstance(each, float)]
    latest = max(known) if len(known) == len(times) and min(known) >= 0 else math.inf
    fits = [unit for unit in UNITS[:2] if latest * unit <= lasted + SKEW_SECONDS]
    if not fits or latest >= OLDEST or begin <= OLDEST:
        raise UserError(f"log of steps {path}: `time` {times[0]} is outside of the run; {EXPECTED}")
    seconds = [each * fits[0] for each in known]
    # The last entry was logged when the file was last modified; this gives the zero of the log's clock.
    zero = max(min(path.stat().st_mtime, end) - max(seconds), begin)
    dated = [(zero + each, row) for each, row in zip(seconds, rows, strict=True)]
    for tag in {row[0] for row in rows}:
        for training in _trainings([each for each in dated if each[1][0] == tag]):
            _check_order(path, training)
    # Durations of steps also fit into the run, but hardly grow from step to step.
    steps, growth = max(row[2] for row in rows) - min(row[2] for row in rows), max(seconds) - min(seconds)
    if growth < MIN_GROWTH * lasted or (growth < seconds[0] and steps * seconds[0] <= lasted):
        raise UserError(f"log of steps {path}: `time` {times[0]} {_other_clock(known, lasted)}; {EXPECTED}")
    return dated


def _other_clock(times: Sequence[float], lasted: float) -> str:
    """Return a message that guesses the meaning of times which grow too little for a run of `lasted` seconds."""
    growth, latest = max(times) - min(times), max(times)
    for unit, name in REFUSED_UNITS.items():
        if MIN_COVERED * lasted <= growth * unit and latest * unit <= lasted + SKEW_SECONDS:
            return f"seems to be in {name}"
    # Durations of steps cannot add up to more than the duration of the run.
    if sum(times) * (1.0 if latest <= lasted + SKEW_SECONDS else UNITS[1]) > lasted + SKEW_SECONDS:
        return f"is outside of the run, which took {lasted:.3g} s"
    earlier = MIN_GROWTH * lasted <= growth <= lasted + SKEW_SECONDS < latest
    return "seems to be a step's duration" + ", or counts from a time before the run" * earlier


def _trainings(dated: Sequence[tuple[float, Row]]) -> list[list[tuple[float, Row]]]:
    """Split rows into trainings: a training ends when the step number falls to or below the training's first step."""
    found, steps = list[list[tuple[float, Row]]](), set[int]()
    for when, row in dated:
        # Parallel processes that write into the same log are at most one step apart: a return to the first of two steps
        # does not begin a new training.
        if not found or (len(steps) > 2 and row[2] <= found[-1][0][1][2] and row[2] != found[-1][-1][1][2]):
            found.append([])
            steps.clear()
        found[-1].append((when, row))
        steps.add(row[2])
    return found


def _check_order(path: Path, training: Sequence[tuple[float, Row]]) -> None:
    """Refuse times that do not increase with the steps, apart from a fraction `MAX_BACKWARD` of the points."""
    first = {each[1][2]: each for each in reversed(training)}
    points = sorted(first.values(), key=lambda each: (each[0], each[1][2]))
    wrong = len(points) - len(in_order([(when, row[2]) for when, row in points]))
    if len(points) > 2 and (wrong > MAX_BACKWARD * len(points) or points[0][0] == points[-1][0]):
        pairs = (pair for pair in itertools.pairwise(points) if pair[1][1][2] < pair[0][1][2])
        (_, before), (_, after) = next(pairs, points[:2])
        raise UserError(
            f"log of steps {path}: `time` does not increase with `step` ({before[1]} at step {before[2]}, {after[1]} "
            f"at step {after[2]}). Use one clock and one counter of steps per file or folder; {EXPECTED}"
        )
