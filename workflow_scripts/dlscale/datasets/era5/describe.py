"""Manifests of atmospheric states: grid, time step, normalisation, climatology."""

from __future__ import annotations

import datetime as dt
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from dlscale.config.dataset import SPLITS
from dlscale.core.errors import UserError
from dlscale.core.files import reading, sha256
from dlscale.data import sampling, store
from dlscale.data.describe import new_manifest
from dlscale.data.manifest import FieldInfo, File, Manifest
from dlscale.data.source import rows_within
from dlscale.datasets.era5.extra import Extra
from dlscale.datasets.era5.kind import Era5Dataset, Era5Prepared, Era5Simulated
from dlscale.datasets.era5.months import months_apart
from dlscale.datasets.era5.published import CHANNELS

#: Days at most that the mean of an hour of day is taken over, evenly spread: of years of large fields more would only
#: take longer to read.
DAYS = 64


def describe_prepared(dataset: Era5Dataset, sources: list[Path], folder: Path) -> Manifest:
    """Describe a folder in the published layout; its statistics are taken from its `stats/`."""
    assert isinstance(dataset.source, Era5Prepared)
    root = Path(dataset.source.path)
    splits: dict[str, list[File]] = {split: [] for split in SPLITS}
    shape: tuple[int, ...] | None = None
    latitude: list[float] = []
    longitude: list[float] = []
    names: list[str] = []
    units: list[str] = []
    starts: dict[str, float] = {}
    for split in SPLITS:
        for path in sorted((root / split).glob("*.h5")):
            with reading(path), store.open_file(path) as file:
                fields = store.dataset(file, "fields", ndim=4)
                there = fields.shape
                if "latitude" in file and "longitude" in file:
                    latitude, longitude = file["latitude"][()].tolist(), file["longitude"][()].tolist()
                names, units = ([str(name) for name in fields.attrs.get(key, [])] for key in ("channels", "units"))
                times = store.dataset(file, "time")[()] if "time" in file else None
            if shape is not None and there[1:] != shape[1:]:
                raise UserError(f"{path}: fields {there} differ from those of other files {shape}")
            shape = there
            splits[split].append(File.of(path, folder, shape[0]))
            if (start := _start(times, path, shape[0], dataset.source.step_hours)) is not None:
                starts[splits[split][-1].digest] = start
    for split in ("train", "valid"):
        if not splits[split]:
            raise UserError(
                f"{root / split}: no *.h5 files; expected the published layout (train/YYYY.h5, valid/, stats/)"
            )
    assert shape is not None
    # A state, and the mean of an hour of day.
    rows_within(dataset.memory_mb, 12 * math.prod(shape[1:]), str(root))
    channels = dataset.channels or names or _names(shape[1])
    if len(channels) != shape[1]:
        raise UserError(
            f"{root}: files hold {shape[1]} channels, the configuration names {len(channels)}; name them all in order"
        )
    units = units or [CHANNELS.get(name, "unknown") for name in channels]
    rows, columns = dataset.crop or shape[2:]
    if rows > shape[2] or columns > shape[3]:
        raise UserError(
            f"{root}: crop {rows} x {columns} is larger than the fields ({shape[2]} x {shape[3]}); choose a smaller one"
        )
    mean, std = (_statistic(root / "stats" / f"global_{name}.npy", channels) for name in ("means", "stds"))
    for channel, value in zip(channels, std, strict=True):
        if not value > 0:
            raise UserError(
                f"{root}/stats/global_stds.npy: channel '{channel}' has standard deviation {value:g}; expected more "
                "than 0"
            )
    if not latitude:
        # The published grid: equal steps around the globe, the first row at the north pole.
        step = 360.0 / shape[3]
        latitude = [90.0 - step * row for row in range(rows)]
        longitude = [step * column for column in range(columns)]
    info = FieldInfo(
        channels=channels,
        units=units,
        grid=[rows, columns],
        transforms=[],
        stored="physical",
        mean=mean,
        std=std,
        channel_axis=1,
    )
    climatology = root / "stats" / "time_means.npy"
    extra = Extra(latitude=latitude[:rows], longitude=longitude[:columns], step_hours=dataset.source.step_hours)
    extra = _timed(extra, splits, starts)
    if climatology.is_file():
        _check_climatology(climatology, (len(channels), rows, columns))
        extra = extra.model_copy(update={"climatology": str(climatology.resolve())})
    manifest = new_manifest(dataset, {"fields": info}, splits, folder)
    return manifest.model_copy(update={"extra": extra.model_dump()})


def _names(count: int) -> list[str]:
    """Return the names of channels in files that name none: the published ones, if there are as many."""
    if count != len(CHANNELS):
        return [f"channel{index:02d}" for index in range(count)]
    logging.info("the files name no channels; 20 are taken for the published ones: %s", ", ".join(CHANNELS))
    return list(CHANNELS)


def complete(dataset: Era5Dataset, manifest: Manifest, stats: Path, name: str) -> Manifest:
    """Add grid, time step, climatology, and the transforms that standardise each channel when it is read."""
    for split in ("train", "valid"):
        if all(file.rows < 2 for file in manifest.files(split)):
            raise UserError(
                f"{manifest.folder}: {split}: no file (of a year) holds two times, so there is no pair of states; give "
                f"{split} a longer period, or a smaller step_hours"
            )
    info = manifest.fields["fields"]
    info.check_varies(f"{manifest.folder}: fields")
    prepared = isinstance(dataset.source, Era5Prepared)
    series = not isinstance(dataset.source, Era5Simulated)  # each simulated year is a trajectory of its own
    extra = Extra.of(manifest) if prepared else _extra(manifest, stats, name, series)
    extra = _with_hour_means(manifest, extra, stats, name)
    if extra.climatology:
        means = Path(extra.climatology) if prepared else stats / Path(extra.climatology).name
        extra = extra.model_copy(update={"climatology_sha256": sha256(means)})
    facts = [f"a state every {extra.ahead(1)}"] if extra.timed else []
    for axis in ("latitude", "longitude"):
        if degrees := getattr(extra, axis):
            facts.append(f"{axis} {degrees[0]:g}° to {degrees[-1]:g}°".replace("-", "−"))
    update = {"fields": {"fields": info.standardised()}, "facts": facts, "extra": extra.model_dump()}
    return manifest.model_copy(update=update)


def _extra(manifest: Manifest, stats: Path, name: str, series: bool) -> Extra:
    """Read grid and times from our own files, and write the climatology: the mean over all training times.

    `series` says that files with consecutive times are parts of one series.
    """
    grid: dict[str, list[float]] = {}
    steps: set[float] = set()
    months: set[int] = set()
    split_of: dict[float, str] = {}  # by time: of what is a month, all in one split
    starts: dict[str, float] = {}
    total: Any = 0.0
    rows = 0
    for split, files in manifest.splits.items():
        for described in files:
            path = manifest.path(described)
            with reading(path), store.open_file(path) as file:
                axes = {axis: file[axis][()].tolist() for axis in ("latitude", "longitude")}
                hours = file["time"][()].astype(np.float64)
                starts[described.digest] = float(hours[0])
                if split == "train":
                    total = total + file["sum/fields"][()]
                    rows += len(hours)
            for axis, degrees in axes.items():
                if grid.setdefault(axis, degrees) != degrees:
                    raise UserError(f"{path}: its {axis}s differ from those of other files; expected one grid")
            apart = months_apart((3600 * hours).astype("datetime64[s]")) if len(hours) > 1 else None
            if series and (shared := [hour for hour in hours.tolist() if split_of.setdefault(hour, split) != split]):
                raise UserError(
                    f"{path}: {np.datetime64(0, 's') + int(3600 * shared[0])} is in {split_of[shared[0]]} and "
                    f"{split}: of months, let a split begin and end with a whole one"
                )
            if apart:
                months.add(apart)
            else:
                steps |= set(np.diff(hours).tolist())
            if len(steps) + len(months) > 1:
                there = ", ".join([*(f"{n} months" for n in months), *(f"{step:g} h" for step in sorted(steps))])
                raise UserError(f"{path}: steps of {there} in one dataset; give them one `step_hours`")
    np.save(stats / "time_means.npy", (total / rows).astype(np.float32)[None])
    logging.info("climatology: mean over %d training times", rows)
    extra = Extra(
        **grid,
        step_hours=min(steps, default=None),
        step_months=min(months, default=None),
        climatology=f"{name}/time_means.npy",
    )
    return _timed(extra, manifest.splits, starts, series)


def _start(times: np.ndarray | None, path: Path, rows: int, step_hours: int) -> float | None:
    """Return the time of a prepared file's first state, hours since 1970; None where nobody knows.

    The published files have no `times`: each is named after its year, and begins with it. Where there are times they
    must be `step_hours` apart: pairs, clocks and means are made by counting rows.
    """
    if times is not None:
        if times.shape != (rows,):
            raise UserError(f"{path}: time: shape {times.shape}, expected ({rows},), one time for each row of fields")
        steps = np.diff(times.astype(np.float64))
        # What is not a number is no step either.
        wrong = np.flatnonzero(~(np.abs(steps - step_hours) < 0.01 * step_hours))
        if wrong.size:
            row, step = int(wrong[0]), float(steps[wrong[0]])
            even = wrong.size == steps.size and bool((steps == step).all()) and step > 0 and step.is_integer()
            advice = f"set source.step_hours: {step:g}" if even else "begin another file after a gap"
            raise UserError(
                f"{path}: time: row {row + 1} is {step:g} h after row {row}, expected {step_hours} h (step_hours); "
                f"{advice}, or leave `time` (hours since 1970) out"
            )
        if rows:
            return float(times[0])
    if len(path.stem) == 4 and path.stem.isdecimal() and path.stem != "0000":
        return float((dt.date(int(path.stem), 1, 1) - dt.date(1970, 1, 1)).days * 24)
    return None


def _timed(extra: Extra, splits: dict[str, list[File]], starts: dict[str, float], series: bool = True) -> Extra:
    """Add what is known of times: of all files or of none; and, in a `series`, which file begins where another ends."""
    files = [file for split in splits.values() for file in split]
    if not extra.timed or len(starts) < len(files):
        return extra
    extra = extra.model_copy(update={"starts": starts})
    ends = {float(extra.hours(file, np.array(file.rows))): file.digest for file in files}
    before = {file: ends[start] for file, start in starts.items() if start in ends} if series else {}
    return extra.model_copy(update={"before": before})


def _with_hour_means(manifest: Manifest, extra: Extra, stats: Path, name: str) -> Extra:
    """Write the mean state of each hour of day over the training days, where times are known and tell all hours."""
    files, info = manifest.files("train"), manifest.fields["fields"]
    if not extra.starts or extra.day is None:
        return extra
    number = np.concatenate([np.full(file.rows, index) for index, file in enumerate(files)])
    row = np.concatenate([np.arange(file.rows) for file in files])
    slot = np.concatenate([extra.slots(extra.hours(file, np.arange(file.rows))) for file in files])
    if len(np.unique(slot)) < extra.day:
        return extra
    readers = [store.Reader(manifest.path(file), "fields") for file in files]
    height, width = info.grid
    shape = (extra.day, len(info.channels), height, width)
    means = np.lib.format.open_memmap(stats / "hour_means.npy", mode="w+", dtype=np.float32, shape=shape)
    for hour in range(extra.day):
        (there,) = np.nonzero(slot == hour)
        chosen = there[sampling.evenly(len(there), DAYS)]
        total = np.zeros(shape[1:])
        for which in chosen:
            first = int(row[which])
            total += readers[number[which]][first : first + 1, :, :height, :width][0]
        means[hour] = total / len(chosen)
    means.flush()
    digest = sha256(stats / "hour_means.npy")
    return extra.model_copy(update={"hour_means": f"{name}/hour_means.npy", "hour_means_sha256": digest})


def _array(path: Path) -> np.ndarray:
    """Map a .npy file."""
    with reading(path, "the published layout has it, shape [1, C, 1, 1]: fetch it again"):
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype.kind not in "fiu":
        raise UserError(f"{path}: values of type {array.dtype}; expected real numbers")
    return array


def _statistic(path: Path, channels: list[str]) -> list[float]:
    """Read one number for each channel from a .npy file [1, C, 1, 1]."""
    array = _array(path)
    values = array.astype(np.float64).ravel()[: len(channels)]
    if values.size < len(channels) or not np.isfinite(values).all():
        raise UserError(f"{path}: expected {len(channels)} finite values, shape [1, C, 1, 1], got shape {array.shape}")
    numbers: list[float] = values.tolist()
    return numbers


def _check_climatology(path: Path, needed: tuple[int, int, int]) -> None:
    """Refuse a file [1, C, H, W] of other channels, of a smaller grid, or with values that are not finite."""
    values = _array(path)
    shape = values.shape
    good = len(shape) == 4 and shape[1] == needed[0] and all(a >= b for a, b in zip(shape[2:], needed[1:], strict=True))
    if not good:
        raise UserError(f"{path}: expected means of the {needed[0]} channels, shape {(1, *needed)}, got shape {shape}")
    if not all(np.isfinite(values[:, channel]).all() for channel in range(shape[1])):
        raise UserError(f"{path}: holds values that are not finite; expected means of the {needed[0]} channels")
