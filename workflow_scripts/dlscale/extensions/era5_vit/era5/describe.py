"""Manifests of atmospheric states: grid, time step, normalisation, climatology."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dlscale.config.dataset import SPLITS
from dlscale.core.errors import UserError
from dlscale.core.files import reading, sha256
from dlscale.data import sampling, store
from dlscale.data.describe import new_manifest
from dlscale.data.manifest import FieldInfo, File, Manifest
from dlscale.extensions.era5_vit.era5.extra import Extra
from dlscale.extensions.era5_vit.era5.kind import Era5Dataset, Era5Prepared, Era5Simulated

#: Unit of times in prepared files.
HOURS = re.compile(r"h(ours?|rs?)?( since 1970-0?1-0?1[T ]?[0:.]*( ?(Z|UTC|[+-]00:?00))?)?", re.IGNORECASE)

#: Units of the published channels by name, in the order of FourCastNet (Pathak et al. 2022, arXiv:2202.11214;
#: `parallel_copy_small_set.py` in FourCastNet's code). The tutorials' name of u10 is u10m; the t2m in their figure is
#: channel 2.
CHANNELS = {
    "u10": "m s**-1",
    "v10": "m s**-1",
    "t2m": "K",
    "sp": "Pa",
    "msl": "Pa",
    "t@850": "K",
    "u@1000": "m s**-1",
    "v@1000": "m s**-1",
    "z@1000": "m**2 s**-2",
    "u@850": "m s**-1",
    "v@850": "m s**-1",
    "z@850": "m**2 s**-2",
    "u@500": "m s**-1",
    "v@500": "m s**-1",
    "z@500": "m**2 s**-2",
    "t@500": "K",
    "z@50": "m**2 s**-2",
    "r@500": "%",
    "r@850": "%",
    "tcwv": "kg m**-2",
}


def describe_prepared(dataset: Era5Dataset, sources: list[Path], folder: Path) -> Manifest:
    """Describe a folder in the published layout; statistics are read from the subfolder `stats/`."""
    assert isinstance(dataset.source, Era5Prepared)
    root, step = Path(dataset.source.path), dataset.source.step_hours
    splits: dict[str, list[File]] = {split: [] for split in SPLITS}
    shape: tuple[int, ...] = ()
    axes: dict[str, list[float]] = {}
    said: dict[str, list[str]] = {}
    hours: list[tuple[Path, File, np.ndarray | None]] = []
    for split in SPLITS:
        for path in sorted((root / split).glob("*.h5")):
            with reading(path), store.open_file(path) as file:
                fields = store.dataset(file, "fields", ndim=4)
                if shape and fields.shape[1:] != shape[1:]:
                    raise UserError(
                        f"{path}: fields have the shape {fields.shape[1:]} per time; expected {shape[1:]}, as in other "
                        "files"
                    )
                shape = fields.shape
                names = {key: np.atleast_1d(fields.attrs.get(key, [])) for key in ("channels", "units")}
                said = {k: [n.decode() if isinstance(n, bytes) else str(n) for n in its] for k, its in names.items()}
                axes = {axis: file[axis][()].tolist() for axis in ("latitude", "longitude") if axis in file}
                times = _hours(store.dataset(file, "time")) if "time" in file else None
            splits[split].append(File.of(path, folder, shape[0]))
            hours.append((path, splits[split][-1], _published_times(path, shape[0], step) if times is None else times))
    for split in ("train", "valid"):
        if not splits[split]:
            raise UserError(
                f"{root / split}: no *.h5 files; expected the published layout (train/YYYY.h5, valid/, stats/)"
            )
    # Unnamed channels are taken for the published channels if their number is the same.
    numbered = [f"channel{index:02d}" for index in range(shape[1])]
    channels = dataset.channels or said["channels"] or (list(CHANNELS) if shape[1] == len(CHANNELS) else numbered)
    rows, columns = dataset.crop or shape[2:]
    if len(channels) != shape[1] or rows > shape[2] or columns > shape[3]:
        raise UserError(
            f"{root}: files contain {shape[1]} channels of {shape[2]} x {shape[3]} points, but there are "
            f"{len(channels)} channel names, and crop is {rows} x {columns}. Name all channels in the files' order, "
            "and choose a crop within the grid"
        )
    if len(axes) < 2:
        # The published grid has equal steps around the globe, and the first row at the north pole.
        steps = 360.0 / shape[3] * np.arange(max(rows, columns))
        axes = {"latitude": (90.0 - steps).tolist(), "longitude": steps.tolist()}
    units = said["units"] or [CHANNELS.get(name, "unknown") for name in channels]
    if len(units) != len(channels) or len(axes["latitude"]) < rows or len(axes["longitude"]) < columns:
        raise UserError(
            f"{root}: files name {len(units)} units, {len(axes['latitude'])} latitudes, {len(axes['longitude'])} "
            f"longitudes, but contain {len(channels)} channels of {rows} x {columns} points. Complete "
            "these lists in the files, or remove them"
        )
    mean, std = (_means(root / "stats" / f"global_{name}.npy", len(channels)).tolist() for name in ("means", "stds"))
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
    info.check_varies(f"{root}/stats/global_stds.npy")
    climatology = root / "stats" / "time_means.npy"
    if known := climatology.is_file():
        _means(climatology, len(channels), (rows, columns))
    extra = Extra(
        latitude=axes["latitude"][:rows],
        longitude=axes["longitude"][:columns],
        step_hours=step,
        climatology=str(climatology.resolve()) if known else None,
    )
    manifest = new_manifest(dataset, {"fields": info}, splits, folder)
    return manifest.model_copy(update={"extra": _timed(extra, hours).model_dump()})


def _hours(times: h5py.Dataset) -> np.ndarray:
    """Return times as hours since 1970; raise `UserError` for other units."""
    units = times.attrs.get("units", "hours since 1970-01-01")
    text = units.decode(errors="replace") if isinstance(units, bytes) else str(units)
    if not HOURS.fullmatch(text.strip()):
        raise UserError(
            f"{times.file.filename}: time: the unit is '{text}'; expected 'hours since 1970-01-01'. Convert the times"
        )
    hours: np.ndarray = times[()]
    return hours


def _means(path: Path, channels: int, grid: tuple[int, int] = (1, 1)) -> np.ndarray:
    """Return the first value of each channel [C] from a .npy file [1, C, H, W].

    Raise `UserError` if the file has fewer points than `grid`, other channels, or values that are not finite.
    """
    with reading(path, f"expected an array, shape {(1, channels, *grid)}; fetch the file again"):
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    fits = array.ndim == 4 and array.shape[1] == channels and array.shape[2] >= grid[0] and array.shape[3] >= grid[1]
    # Channels are checked one at a time, since large fields may not fit into memory.
    if not fits or array.dtype.kind not in "fiu" or not all(np.isfinite(array[:, c]).all() for c in range(channels)):
        raise UserError(
            f"{path}: expected finite numbers for the {channels} channels, shape {(1, channels, *grid)}, got shape "
            f"{array.shape} of {array.dtype}"
        )
    return np.asarray(array[0, :, 0, 0], np.float64)


def _published_times(path: Path, rows: int, step_hours: int) -> np.ndarray | None:
    """Return the times of a file that is named after its year, hours since 1970; None for other names."""
    if len(path.stem) != 4 or not path.stem.isdecimal() or path.stem == "0000":
        return None
    return np.datetime64(f"{path.stem}-01-01T00", "h").astype(np.int64) + step_hours * np.arange(rows)


def _timed(extra: Extra, files: list[tuple[Path, File, np.ndarray | None]], series: bool = True) -> Extra:
    """If all times are known, add the start time of each file; in a `series`, also add the preceding file.

    The times in a file must have the manifest's step, because pairs, clocks and means compute times from rows.
    """
    step = extra.step_hours
    starts, ends = dict[str, float](), dict[float, str]()
    for path, file, hours in files:
        if hours is not None:
            steps = np.diff(hours.astype(np.float64))
            # The comparison is false for NaN, so NaN is refused, too.
            if hours.shape != (file.rows,) or not (abs(steps - step) < 0.01 * step).all():
                raise UserError(
                    f"{path}: time: expected {file.rows} times, {step} h apart, got {hours.size} times with steps of "
                    f"{np.unique(steps)} h. Use the same `step_hours` in all files, and start a new file after a gap. "
                    "Prepared files may omit the HDF5 dataset `time` (hours since 1970)"
                )
            starts[file.digest] = float(hours[0])
            ends[float(hours[0]) + step * file.rows] = file.digest
    if len(starts) < len(files):
        return extra
    before = {file: ends[start] for file, start in starts.items() if start in ends} if series else {}
    return extra.model_copy(update={"starts": starts, "before": before})


def complete(dataset: Era5Dataset, manifest: Manifest, stats: Path, name: str) -> Manifest:
    """Add grid, times, climatology and mean states of each hour to a manifest.

    Raise `UserError` if a part lacks pairs of states, or if a channel never varies.
    """
    for split in ("train", "valid"):
        if all(file.rows < 2 for file in manifest.files(split)):
            raise UserError(
                f"{manifest.folder}: {split}: each file (of a year) contains fewer than two times, so pairs of states "
                f"are missing. Give {split} a longer period or files with more times, or reduce step_hours"
            )
    info = manifest.fields["fields"]
    info.check_varies(f"{manifest.folder}: fields")
    prepared = isinstance(dataset.source, Era5Prepared)
    # Simulated years are not a series, but independent trajectories.
    series = not isinstance(dataset.source, Era5Simulated)
    extra = Extra.of(manifest) if prepared else _extra(manifest, stats, name, series)
    extra = _with_hour_means(manifest, extra, stats, name)
    if extra.climatology:
        means = Path(extra.climatology) if prepared else stats / Path(extra.climatology).name
        extra = extra.model_copy(update={"climatology_sha256": sha256(means)})
    facts = [f"a state every {extra.step_hours:g} h"]
    for axis in ("latitude", "longitude"):
        degrees = getattr(extra, axis)
        facts.append(f"{axis} {degrees[0]:g}° to {degrees[-1]:g}°".replace("-", "−"))
    return manifest.model_copy(update={"facts": facts, "extra": extra.model_dump()})


def _extra(manifest: Manifest, stats: Path, name: str, series: bool) -> Extra:
    """Read grid and times from files that dlscale wrote, and write the climatology.

    The climatology is the mean over all training times.
    """
    grid: dict[str, list[float]] = {}
    files: list[tuple[Path, File, np.ndarray | None]] = []
    total: Any = 0.0
    for split, its in manifest.splits.items():
        for described in its:
            path = manifest.path(described)
            with reading(path), store.open_file(path) as file:
                axes = {axis: file[axis][()].tolist() for axis in ("latitude", "longitude")}
                hours = file["time"][()]
                total = total + (file["sum/fields"][()] if split == "train" else 0.0)
            if (grid := grid or axes) != axes:
                raise UserError(f"{path}: the grid differs from the grid of other files; expected the same grid")
            files.append((path, described, hours))
    rows = sum(file.rows for file in manifest.files("train"))
    np.save(stats / "time_means.npy", (total / rows).astype(np.float32)[None])
    logging.info("climatology: mean over %d training times", rows)
    step = next(float(hours[1] - hours[0]) for _, _, hours in files if hours is not None and len(hours) > 1)
    return _timed(Extra(**grid, step_hours=step, climatology=f"{name}/time_means.npy"), files, series)


def _with_hour_means(manifest: Manifest, extra: Extra, stats: Path, name: str) -> Extra:
    """Write the mean training state of each hour of day.

    Nothing is written if times are unknown or do not cover all hours, or if the step does not divide a day.
    """
    files, info = manifest.files("train"), manifest.fields["fields"]
    if not extra.starts or extra.day is None:
        return extra
    rows = [(file, row) for file in files for row in range(file.rows)]
    slot = np.concatenate([extra.slots(file, np.arange(file.rows)) for file in files])
    if len(np.unique(slot)) < extra.day:
        return extra
    readers = {file.digest: store.Reader(manifest.path(file), "fields") for file in files}
    shape = (extra.day, len(info.channels), *info.grid)
    means = np.lib.format.open_memmap(stats / "hour_means.npy", mode="w+", dtype=np.float32, shape=shape)
    for hour in range(extra.day):
        (there,) = np.nonzero(slot == hour)
        # At most 64 evenly spaced days are read, because more days would take longer without a benefit.
        chosen = [rows[index] for index in there[sampling.evenly(len(there), 64)]]
        total = np.zeros(shape[1:])
        for file, row in chosen:
            total += readers[file.digest][row : row + 1, :, : shape[2], : shape[3]][0]
        means[hour] = total / len(chosen)
    means.flush()
    digest = sha256(stats / "hour_means.npy")
    return extra.model_copy(update={"hour_means": f"{name}/hour_means.npy", "hour_means_sha256": digest})
