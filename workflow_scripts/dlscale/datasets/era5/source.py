"""Reads atmospheric files - GRIB, NetCDF, Zarr - as one stream of states [T, C, H, W].

Each file is catalogued first (names, levels, times and grid, without the values). Then the times of all
files are laid side by side and checked: every channel once at every time, at one step, on one grid. Values
are read only where they are asked for: the wanted variables, levels, times and window.

Notation: `C` channels, the rest as in `dlscale.datasets.era5.variables`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlscale.core.errors import UserError, nearest
from dlscale.core.files import TORN, no_pipe
from dlscale.data.kind import Part
from dlscale.data.source import Source, block_average
from dlscale.data.store import Field
from dlscale.datasets.era5 import selection
from dlscale.datasets.era5.kind import Era5Dataset, Era5Zarr
from dlscale.datasets.era5.months import begin, months_apart
from dlscale.datasets.era5.variable import Variable, names_of, wanted_names
from dlscale.datasets.era5.variables import open_grib, open_netcdf, reading

Period = tuple[dt.date, dt.date]  # first and last day, inclusive


@dataclass(frozen=True, eq=False)
class _Segment:
    """What a source takes from one variable.

    Its `levels` [c] become the channels `positions` [c], its times `indices` [t] the `rows` [t] (ascending).
    """

    variable: Variable
    levels: list[int]
    positions: list[int]
    indices: np.ndarray
    rows: np.ndarray


def open_source(dataset: Era5Dataset, part: Part, paths: list[Path]) -> Era5Source:
    """Open the raw files of one part: GRIB, NetCDF (3 or 4) or Zarr, told apart by their content.

    Together they hold every channel at every time of the part; how channels and times are spread over them does not
    matter. A `UserError` says what is missing, torn, of another kind, or twice there.
    """
    if isinstance(dataset.source, Era5Zarr):  # selected, cropped and averaged when they were fetched
        fetched = dataset.source.model_copy(update={"select": {}})
        dataset = dataset.model_copy(update={"source": fetched, "crop": None, "downsample": 1})
    with contextlib.ExitStack() as stack:
        wanted = wanted_names(dataset.channels)
        keys = list(getattr(dataset.source, "select", {}))
        variables: list[Variable] = []
        for path in paths:
            variables += _catalogue(path, wanted, keys, stack)
        source = Era5Source(dataset, variables, part.period, f"part {part.label}")
        source.files = stack.pop_all()
    return source


def _catalogue(
    path: Path, wanted: Collection[str], keys: Collection[str], stack: contextlib.ExitStack
) -> list[Variable]:
    """List the variables of a file of any format; `stack` will close it.

    What does not fit (other axes, other grids) is left out, unless it is `wanted`: then it is a `UserError`.
    """
    if path.is_dir():
        if not any((path / marker).exists() for marker in ("zarr.json", ".zgroup", ".zmetadata")):
            raise UserError(f"{path}: a folder, but not a Zarr store; give GRIB or NetCDF files, or a Zarr store")
        return open_netcdf(path, "zarr", wanted, stack)
    try:
        no_pipe(path, "a file")
        with open(path, "rb") as file:
            head = file.read(1024)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the dataset's `source.paths`, or run the acquire stage") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error.strerror}); check the permissions") from None
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return open_netcdf(path, "h5netcdf", wanted, stack)
    if head.startswith((b"CDF\x01", b"CDF\x02")):
        return open_netcdf(path, "scipy", wanted, stack)
    if b"GRIB" in head:  # bulletins may have a heading before it
        return open_grib(path, wanted, keys)
    if head.startswith(b"CDF\x05"):
        raise UserError(f"{path}: NetCDF in the CDF-5 format is not supported; convert it: nccopy -k nc4 IN OUT")
    if head.startswith((b"\x1f\x8b", b"PK\x03\x04")):
        raise UserError(f"{path}: a compressed archive; unpack it first")
    content = f"begins with {head[:8]!r}" if head else "is empty"
    raise UserError(f"{path}: neither GRIB nor NetCDF nor Zarr: it {content}; {TORN}")


class Era5Source(Source):
    """Channels at regular times from any number of variables in any number of files.

    One field `fields` [T, C, H, W] in physical units: the dataset's channels (all that there are, if it names none),
    cropped and averaged as it asks. Its times are those of the period whose distance from midnight UTC is a multiple
    of the dataset's `step_hours`; all times where these are None. Of fields of one time those count that the source's
    `select` takes. A channel, level or time that is missing or stands twice, and grids that differ or are smaller than
    the crop, are a `UserError`.
    """

    def __init__(self, dataset: Era5Dataset, variables: list[Variable], period: Period | None, label: str) -> None:
        self.files = contextlib.ExitStack()  # what is open, and closed with the source
        downsample = self._downsample = dataset.downsample
        names = _resolved(dataset.channels, variables, label)
        used = [variable for variable in variables if not set(variable.channels).isdisjoint(names)]
        latitude, longitude = _one_grid(used)
        rows, columns = self._window = _window(dataset.crop, downsample, (latitude.size, longitude.size), label)
        select = getattr(dataset.source, "select", {})
        selection.check_keys(used, select, label)
        for name in names:
            selection.check_chosen(name, [variable for variable in used if name in variable.channels], select, label)
        taken = {variable: selection.chosen(variable, select) for variable in used}
        self.times, kept = _common_times(names, used, taken, period, dataset.step_hours, label)
        units = tuple(_one_unit(name, used) for name in names)
        segments = (_segment(variable, names, kept[variable], self.times) for variable in used)
        self._segments = [segment for segment in segments if segment.rows.size]

        shape = (self.times.size, len(names), rows.stop // downsample, columns.stop // downsample)
        self.fields: tuple[Field, ...] = (Field("fields", tuple(dataset.channels or names), units, shape, 1),)
        self.bytes_per_row = 4 * math.prod(shape[1:]) + max(map(self._footprint, self._segments), default=0)
        self.coordinates = {
            "latitude": _averaged(latitude[rows], downsample),
            "longitude": _averaged(longitude[columns], downsample),
        }
        self.row_coordinates = {"time": self.times.astype(np.int64) / 3600.0}
        self.summed = ("fields",)  # for the climatology
        self.attributes: dict[str, Any] = {
            "long_names": [next(v.long_name for v in used if name in v.channels) for name in names],
            "source_files": list(dict.fromkeys(segment.variable.origin for segment in self._segments)),
            "conventions": "latitude north to south, longitude west to east (degrees); time in hours since 1970-01-01",
        }
        if months := months_apart(self.times):
            self.attributes["step_months"] = months
        elif self.times.size > 1:
            self.attributes["step_hours"] = float(np.diff(self.times[:2])[0].astype(np.int64)) / 3600.0

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return times [start, stop) as `fields` [stop - start, C, H, W], float32, physical units.

        Memory: `bytes_per_row` for each, and one chunk of the file. A missing value is a `UserError`.
        """
        return self.read_what_is_there(start, stop, complete=True)

    def read_what_is_there(self, start: int, stop: int, complete: bool = False) -> dict[str, np.ndarray]:
        """Return the same, with NaN where values are missing; `complete`: these are refused."""
        _, channels, height, width = self.fields[0].shape
        out = np.empty((stop - start, channels, height, width), np.float32)
        for segment in self._segments:
            low, high = np.searchsorted(segment.rows, (start, stop))
            if low == high:
                continue
            variable, place = segment.variable, (segment.rows[low:high, None] - start, segment.positions)
            indices = segment.indices[low:high]
            with reading(variable.origin, variable.advice):
                # the values get no name, so that they are gone before the next ones come
                out[place] = block_average(
                    _values(variable, indices, segment.levels, self._window, complete), self._downsample, (2, 3)
                )
        return {"fields": out}

    def close(self) -> None:
        self.files.close()

    def blocks(self, memory: int) -> Iterator[tuple[int, int]]:
        """Cut the times into [start, stop) that `memory` bytes suffice for, at the ends of chunks where possible."""
        limit = max(1, memory // self.bytes_per_row)
        coarsest = max(self._segments, key=lambda segment: segment.variable.chunk)
        ends = coarsest.rows[1:][np.diff(coarsest.indices // coarsest.variable.chunk) != 0]
        start, rows = 0, self.times.size
        while start < rows:
            stop = min(start + limit, rows)
            inside = ends[(ends > start) & (ends <= stop)]
            stop = int(inside[-1]) if stop < rows and inside.size else stop
            yield start, stop
            start = stop

    def _footprint(self, segment: _Segment) -> int:
        """Bytes that one row of a segment needs while it is read and averaged; a chunk of many rows, its share."""
        rows, columns = self._window
        stored, decoded = segment.variable.footprint(segment.levels, rows, columns)
        averaging = 8 * len(segment.levels) * rows.stop * columns.stop if self._downsample > 1 else 0
        # where every sixth time of a chunk is wanted, each bears the cost of the six that are unpacked with it
        apart = abs(int(np.median(np.diff(segment.indices)))) if segment.indices.size > 1 else 1
        return stored * min(max(apart, 1), segment.variable.chunk) + decoded + averaging


def _values(
    variable: Variable, indices: np.ndarray, levels: list[int], window: tuple[slice, slice], complete: bool
) -> np.ndarray:
    """Return a variable's values at these times, float32 [t, l, h, w]; `complete`: a missing one is a `UserError`."""
    values = variable.load(indices, levels, *window)
    if not complete or np.isfinite(values.sum(dtype=np.float64)):
        return values
    bad = np.argwhere(~np.isfinite(values))
    time, level, row, column = (int(place) for place in bad[0])
    reason = variable.missing(int(indices[time]), levels[level], window[0].start + row, window[1].start + column)
    north, east = variable.latitude[window[0]][row], variable.longitude[window[1]][column]
    raise UserError(
        f"{variable.origin}: channel '{variable.channels[levels[level]]}' has no value at "
        f"{_text(variable.times[indices[time]])} at latitude {north:g}, longitude {east:g} ({len(bad)} such values in "
        f"this block): {reason}; set `split` around such times, `crop` such places, or fill them"
    )


def _resolved(channels: list[str], variables: list[Variable], label: str) -> list[str]:
    """Return the catalogue's name of each channel; `name` alone will do for a variable of one level.

    A short name stands for the long one, too, where the catalogue has that alone.
    """
    known = list(dict.fromkeys(name for variable in variables for name in variable.channels))
    bases = list(dict.fromkeys(name.partition("@")[0] for name in known))
    origins = _listed(variable.origin for variable in variables)
    names = []
    for channel in channels or known:
        base, at, level = channel.partition("@")
        base = next((name for name in names_of(base) if name in bases), base)
        with contextlib.suppress(ValueError):
            level = f"{float(level):g}"
        name = channel if channel in known else base + at + level
        levels = [other.partition("@")[2] for other in known if other.startswith(f"{base}@")]
        if not at and name not in known and len(levels) == 1:
            name = f"{base}@{levels[0]}"
        if name not in known:
            if levels and at:
                problem = f"no level {level}; its levels: {', '.join(levels)}"
            elif levels:
                problem = f"it has the levels {', '.join(levels)}; name one: '{base}@{levels[0]}'"
            elif base in known:
                problem = f"this variable has no pressure levels; write '{base}'"
            else:
                problem = f"no such variable{nearest(base, bases)}; there are: {_listed(bases)}"
            raise UserError(f"{label}: channel '{channel}': {problem}; looked in {origins}")
        names.append(name)
    return names


def _listed(names: Iterable[str], most: int = 20) -> str:
    """Enumerate names once each, for a message; an archive has hundreds."""
    once = list(dict.fromkeys(names))
    return ", ".join(once[:most]) + (f" and {len(once) - most} more" if len(once) > most else "")


def _one_grid(variables: list[Variable]) -> tuple[np.ndarray, np.ndarray]:
    """Return the latitudes and longitudes that all variables share, up to the rounding of file formats."""
    first = variables[0]
    for other in variables[1:]:
        same = first.latitude.shape == other.latitude.shape and first.longitude.shape == other.longitude.shape
        if same:
            east = (first.longitude - other.longitude + 180.0) % 360.0 - 180.0
            apart = np.concatenate([first.latitude - other.latitude, east])
            spacing = min(abs(np.diff(axis)).min(initial=1.0) for axis in (first.latitude, first.longitude))
            same = bool(abs(apart).max() < 0.01 * spacing)
        if not same:
            raise UserError(
                f"{other.origin}: '{other.channels[0]}' is on another grid ({_grid_text(other)}) than "
                f"'{first.channels[0]}' of {first.origin} ({_grid_text(first)}); bring all channels to one grid"
            )
    return first.latitude, first.longitude


def _grid_text(variable: Variable) -> str:
    axes = {"latitudes": variable.latitude, "longitudes": variable.longitude}
    return ", ".join(f"{axis.size} {name} {axis[0]:g} to {axis[-1]:g}" for name, axis in axes.items())


def _window(crop: tuple[int, int] | None, downsample: int, grid: tuple[int, int], label: str) -> tuple[slice, slice]:
    """Return the rows and columns to read: from the north-west corner, a multiple of `downsample`."""
    asked = crop or grid
    if asked[0] > grid[0] or asked[1] > grid[1]:
        raise UserError(
            f"{label}: crop [{asked[0]}, {asked[1]}] is larger than the grid of {grid[0]} latitudes and {grid[1]} "
            f"longitudes; ask for at most [{grid[0]}, {grid[1]}]"
        )
    if downsample > min(asked):
        raise UserError(f"{label}: downsample {downsample} leaves nothing of {asked[0]}x{asked[1]} points; lower it")
    rows, columns = (size // downsample * downsample for size in asked)
    return slice(0, rows), slice(0, columns)


def _segment(variable: Variable, names: list[str], stamps: np.ndarray, times: np.ndarray) -> _Segment:
    """Match a variable's levels with channels and its fields, of which NaT are not taken, with rows."""
    positions = [position for position, name in enumerate(names) if name in variable.channels]
    levels = [variable.channels.index(names[position]) for position in positions]
    indices = np.flatnonzero(~np.isnat(stamps))
    rows = np.searchsorted(times, stamps[indices])
    order = np.argsort(rows)
    return _Segment(variable, levels, positions, indices[order], rows[order])


def _one_unit(name: str, variables: list[Variable]) -> str:
    """Return the units of a channel, the same in all files."""
    first, *others = (variable for variable in variables if name in variable.channels)
    for other in others:
        one, two = (variable.units.replace("**", "").replace("^", "") for variable in (first, other))
        if one != two:  # m s**-1 is m s-1
            raise UserError(
                f"{other.origin}: '{name}' has units '{other.units}', but '{first.units}' in {first.origin}; convert "
                "one of them"
            )
    return first.units


def _averaged(axis: np.ndarray, factor: int) -> np.ndarray:
    """Centres of blocks of `factor` points, float64: `block_average` would round coordinates to float32."""
    return np.asarray(axis.astype(np.float64).reshape(-1, factor).mean(axis=1))


def _kept(times: np.ndarray, period: Period | None, step_hours: int | None) -> np.ndarray:
    """Return which times lie in the period and at the step: bool [T]."""
    keep = np.ones(times.shape, bool)
    if period:
        first, last = (np.datetime64(day, "D") for day in period)
        keep &= (times >= first) & (times < last + 1)
    if step_hours:
        keep &= times.astype(np.int64) % (3600 * step_hours) == 0
    return keep


def _common_times(
    names: list[str],
    variables: list[Variable],
    taken: dict[Variable, np.ndarray],
    period: Period | None,
    step_hours: int | None,
    label: str,
) -> tuple[np.ndarray, dict[Variable, np.ndarray]]:
    """Return the times [T], ascending, that every channel has exactly once; or say what is amiss.

    `taken` are the fields that count, and returned with the times is when each of these is valid, datetime64[s]; NaT
    for all others. Where all channels have one field a month, that is the beginning of the month.
    """
    holders = {name: [variable for variable in variables if name in variable.channels] for name in names}
    stamps = {variable: np.where(taken[variable], variable.times, _NEVER) for variable in variables}
    every = {name: np.unique(_there(np.concatenate([stamps[v] for v in its]))) for name, its in holders.items()}
    if monthly := all(months_apart(times) for times in every.values()):
        if step_hours:
            raise UserError(f"{label}: the times are calendar months, of no constant hours; leave step_hours out")
        stamps = {variable: np.where(taken[variable], begin(times), _NEVER) for variable, times in stamps.items()}
    for name, times in every.items():
        first, last = ((begin(end[None])[0] if monthly else end) for end in times[[0, -1]])
        days = [day.replace(day=1) for day in period] if period and monthly else period
        if days and (first.astype("datetime64[D]") > np.datetime64(days[0]) or last < np.datetime64(days[1])):
            assert period
            raise UserError(
                f"{label}: needs {period[0]} to {period[1]}, but '{name}' covers {_text(times[0])} to "
                f"{_text(times[-1])}; set the dataset's `split` within that, or add files"
            )
    if period and monthly:  # a mean of a month belongs to all of its days, wherever in it the stamp is
        period = (period[0].replace(day=1), period[1])
    kept = {variable: np.where(_kept(its, period, step_hours), its, _NEVER) for variable, its in stamps.items()}
    times_of: dict[str, np.ndarray] = {}
    for name, its in holders.items():
        selection.check_one_series(name, [(variable, ~np.isnat(kept[variable])) for variable in its], label)
        times_of[name], counts = np.unique(_there(np.concatenate([kept[v] for v in its])), return_counts=True)
        if (counts > 1).any():
            twice = times_of[name][counts > 1][0]
            fields = [(variable, int(at)) for variable in its for at in np.flatnonzero(kept[variable] == twice)]
            raise selection.told_apart(name, fields, _text(twice), label)
    union = np.unique(np.concatenate(list(times_of.values())))
    if not union.size:
        which = f"none is a multiple of step_hours ({step_hours}) from midnight UTC"
        if period and not step_hours:
            which = f"none lies in {period[0]} to {period[1]}; set `split` to days that the files have"
        raise UserError(f"{label}: no time is left: {which}")
    for name, times in times_of.items():
        missing = np.setdiff1d(union, times)
        if missing.size:
            other = next(other for other, has in times_of.items() if missing[0] in has)
            raise UserError(
                f"{label}: channel '{name}' is missing at {_text(missing[0])} ({missing.size} such times), "
                f"where '{other}' is there; add the file that holds it"
            )
    if not monthly:
        _check_step(union, step_hours, label)
    return union, kept


_NEVER = np.datetime64("NaT", "s")


def _there(times: np.ndarray) -> np.ndarray:
    return times[~np.isnat(times)]


def _check_step(times: np.ndarray, step_hours: int | None, label: str) -> None:
    """Refuse times that do not follow one another at one step: the asked one, or else the commonest."""
    if times.size < 2:
        return
    steps, counts = np.unique(np.diff(times), return_counts=True)
    step = np.timedelta64(3600 * step_hours, "s") if step_hours else steps[counts.argmax()]
    expected = np.arange(times[0], times[-1] + step, step)
    hours = step / np.timedelta64(1, "h")
    missing, extra = np.setdiff1d(expected[expected <= times[-1]], times), np.setdiff1d(times, expected)
    days = np.unique(times.astype("datetime64[D]"))
    if days.size < times.size and months_apart(days.astype(times.dtype)):
        raise UserError(
            f"{label}: {_text(times[0])} to {_text(times[-1])} are hours of one day in each month, as means by hour of "
            "day have them; choose one hour, of GRIB by source: {select: {dataTime: 0}}"
        )
    if missing.size:
        raise UserError(
            f"{label}: {_text(missing[0])} is missing ({missing.size} of {expected.size} times, every {hours:g} h "
            f"from {_text(times[0])} to {_text(times[-1])}); add the file that holds it, or set `split` around the gap"
        )
    if extra.size:
        raise UserError(f"{label}: {_text(extra[0])} breaks the step of {hours:g} h; set `step_hours`, or remove it")


def _text(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]")).replace("T", " ")
