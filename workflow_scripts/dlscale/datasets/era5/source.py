"""Reads atmospheric files - GRIB, NetCDF, Zarr - as one stream of states [T, C, H, W].

Each file is catalogued first (names, levels, times and grid, without the values). Then the times of all
files are laid side by side and checked: every channel once at every time, at one step, on one grid. Values
are read only where they are asked for: the wanted variables, levels, times and window.

Notation: `T` times, `C` channels, `L` levels of a variable, `H` latitudes (north to south), `W` longitudes.
Times are numpy `datetime64[s]`, UTC. Levels are in hPa, whatever the file counts in.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from dlscale.core.errors import UserError, nearest
from dlscale.data.kind import Part
from dlscale.data.source import Source
from dlscale.data.store import Field, block_average
from dlscale.datasets.era5.kind import Era5Dataset

if TYPE_CHECKING:
    import xarray as xr

# what the axes are called: by CF, ECMWF's two generations of NetCDF, cfgrib, ARCO-ERA5 and WeatherBench2
TIMES = ("valid_time", "time")
LATITUDES = ("latitude", "lat")
LONGITUDES = ("longitude", "lon")
LEVELS = ("isobaricInhPa", "isobaricInPa", "pressure_level", "level", "plev", "lev")

_TORN = "the file may be torn or damaged: fetch or make it again"
_GRID = "expected a regular grid: one axis of latitudes and one of longitudes; interpolate it, e.g. with `cdo remapbil`"


@dataclass(frozen=True, eq=False)
class Variable:
    """One variable of one file, its values not read yet.

    Attributes
    ----------
    origin
        The file or store, for messages.
    channels
        `name`, or `name@level` for each of L levels.
    times
        [T], as in the file: sorted or not.
    latitude, longitude
        [H], north to south, and [W], ascending: degrees, float64.
    load
        `load(times, levels, rows, columns)` reads indices [t] and [l] and a window [h, w] of the grid,
        as float32 [t, l, h, w]; missing values are NaN.
    footprint
        `footprint(levels, rows, columns)`: bytes that `load` needs for one time: of stored values (whole
        chunks), and of decoded ones (the selected window).
    chunk
        Times that are stored, and hence read, together.
    advice
        What to do when `load` fails.
    """

    origin: str
    channels: tuple[str, ...]
    units: str
    long_name: str
    times: np.ndarray
    latitude: np.ndarray
    longitude: np.ndarray
    load: Callable[[np.ndarray, list[int], slice, slice], np.ndarray]
    footprint: Callable[[list[int], slice, slice], tuple[int, int]]
    chunk: int = 1
    advice: str = _TORN


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
    """Open the raw files of one part; a `dlscale.data.source.Source`.

    Parameters
    ----------
    paths
        GRIB, NetCDF (3 or 4) or Zarr, told apart by their content. Together they hold every channel at
        every time of the part; how channels and times are spread over them does not matter.

    Returns
    -------
    Era5Source
        One field `fields` [T, C, H, W] in physical units. Its times are those of `part.period` whose
        distance from midnight UTC is a multiple of `dataset.step_hours`; all times where these are None.

    Raises
    ------
    UserError
        A file is missing, torn or of another kind; a channel, level or time is missing or stands twice;
        the grids differ, are not regular, or smaller than the crop.
    """
    with contextlib.ExitStack() as stack:
        wanted = {channel.partition("@")[0] for channel in dataset.channels}
        variables = [variable for path in paths for variable in _catalogue(path, wanted, stack)]
        return Era5Source(
            variables,
            dataset.channels,
            period=part.period,
            step_hours=dataset.step_hours,
            crop=dataset.crop,
            downsample=dataset.downsample,
            label=f"part {part.split}/{part.name}",
            close=stack.pop_all().close,
        )


class Era5Source(Source):
    """Channels at regular times from any number of variables in any number of files.

    Attributes: see `dlscale.data.source.Source`.

    Parameters
    ----------
    variables
        Everything there is; what is not asked for is left alone.
    channels
        In the order of the result; all of `variables` in their order if empty.
    period
        First and last day (inclusive).
    step_hours
        Hours between times, counted from midnight UTC (of 1970-01-01).
    crop
        Rows and columns kept from the north-west corner, at the resolution of the files.
    downsample
        Edge of the blocks that are averaged, in grid points.
    label
        What is being read, for messages.
    close
        Closes the files.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        channels: Sequence[str],
        *,
        label: str,
        period: tuple[dt.date, dt.date] | None = None,
        step_hours: int | None = None,
        crop: tuple[int, int] | None = None,
        downsample: int = 1,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._close = close
        try:
            names = _resolved(channels, variables, label)
            used = [variable for variable in variables if not set(variable.channels).isdisjoint(names)]
            latitude, longitude = _one_grid(used)
            rows, columns = _window(crop, downsample, (latitude.size, longitude.size), label)
            keep = functools.partial(_kept, period=period, step_hours=step_hours)
            self.times = _common_times(names, used, keep, period, step_hours, label)
            units = tuple(_one_value(name, "units", used) for name in names)
        except BaseException:
            close()
            raise
        self._segments = [_segment(variable, names, keep(variable.times), self.times) for variable in used]
        self._segments = [segment for segment in self._segments if segment.rows.size]
        self._window, self._downsample = (rows, columns), downsample

        points = (rows.stop // downsample) * (columns.stop // downsample)
        shape = (self.times.size, len(names), rows.stop // downsample, columns.stop // downsample)
        written = tuple(channels) or tuple(names)
        self.fields: tuple[Field, ...] = (Field("fields", written, units, shape, 1),)
        self.bytes_per_row = 4 * len(names) * points + max(map(self._footprint, self._segments), default=0)
        self.coordinates = {
            "latitude": _averaged(latitude[rows], downsample),
            "longitude": _averaged(longitude[columns], downsample),
        }
        self.row_coordinates = {"time": self.times.astype(np.int64) / 3600.0}
        self.summed = ("fields",)  # for the climatology
        self.attributes: dict[str, Any] = {
            "long_names": [_one_value(name, "long_name", used, strict=False) for name in names],
            "source_files": list(dict.fromkeys(segment.variable.origin for segment in self._segments)),
            "conventions": "latitude north to south, longitude west to east (degrees); time in hours since 1970-01-01",
        }
        if self.times.size > 1:
            self.attributes["step_hours"] = float(np.diff(self.times[:2])[0].astype(np.int64)) / 3600.0

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return times [start, stop) as `fields` [stop - start, C, H, W], float32, physical units.

        Memory: `bytes_per_row` for each, and one chunk of the file.
        """
        _, channels, height, width = self.fields[0].shape
        out = np.empty((stop - start, channels, height, width), np.float32)
        for segment in self._segments:
            low, high = np.searchsorted(segment.rows, (start, stop))
            if low == high:
                continue
            variable, place = segment.variable, (segment.rows[low:high, None] - start, segment.positions)
            with _reading(variable.origin, variable.advice):
                # the values get no name, so that they are gone before the next ones come
                out[place] = block_average(
                    variable.load(segment.indices[low:high], segment.levels, *self._window), self._downsample, (2, 3)
                )
        return {"fields": out}

    def close(self) -> None:
        """Close the files."""
        self._close()

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


# ------------------------------------------------------------------------------- matching what the files hold


def _resolved(channels: Sequence[str], variables: Sequence[Variable], label: str) -> list[str]:
    """Return the catalogue's name of each channel; `name` alone will do for a variable of one level."""
    known = list(dict.fromkeys(name for variable in variables for name in variable.channels))
    origins = _listed(variable.origin for variable in variables)
    names = []
    for channel in channels or known:
        base, at, level = channel.partition("@")
        with contextlib.suppress(ValueError):
            level = f"{float(level):g}"
        name = channel if channel in known else base + at + level
        levels = [other.partition("@")[2] for other in known if other.startswith(f"{base}@")]
        if not at and name not in known and len(levels) == 1:
            name = f"{base}@{levels[0]}"
        if name not in known:
            if levels and at:
                problem = f"no level {level}; its levels (hPa): {', '.join(levels)}"
            elif levels:
                problem = f"it has the levels {', '.join(levels)} (hPa); name one: '{base}@{levels[0]}'"
            elif base in known:
                problem = f"this variable has no pressure levels; write '{base}'"
            else:
                bases = [other.partition("@")[0] for other in known]
                problem = f"no such variable{nearest(base, bases)}; there are: {_listed(bases)}"
            raise UserError(f"{label}: channel '{channel}': {problem}; looked in {origins}")
        names.append(name)
    return names


def _listed(names: Iterable[str], most: int = 20) -> str:
    """Enumerate names once each, for a message; an archive has hundreds."""
    once = list(dict.fromkeys(names))
    return ", ".join(once[:most]) + (f" and {len(once) - most} more" if len(once) > most else "")


def _one_grid(variables: Sequence[Variable]) -> tuple[np.ndarray, np.ndarray]:
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


def _kept(times: np.ndarray, period: tuple[dt.date, dt.date] | None, step_hours: int | None) -> np.ndarray:
    """Return which times lie in the period and at the step: bool [T]."""
    keep = np.ones(times.shape, bool)
    if period:
        first, last = (np.datetime64(day, "D") for day in period)
        keep &= (times >= first) & (times < last + 1)
    if step_hours:
        keep &= times.astype(np.int64) % (3600 * step_hours) == 0
    return keep


def _common_times(
    names: Sequence[str],
    variables: Sequence[Variable],
    keep: Callable[[np.ndarray], np.ndarray],
    period: tuple[dt.date, dt.date] | None,
    step_hours: int | None,
    label: str,
) -> np.ndarray:
    """Return the times [T], ascending, that every channel has exactly once; or say what is amiss."""
    own: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(names):
        holders = [variable for variable in variables if name in variable.channels]
        every = np.concatenate([variable.times for variable in holders])
        first, last = every.min(), every.max()
        if period and (first.astype("datetime64[D]") > period[0] or last.astype("datetime64[D]") < period[1]):
            raise UserError(
                f"{label}: needs {period[0]} to {period[1]}, but '{name}' covers {_text(first)} to {_text(last)}; "
                "set the dataset's `split` within that, or add files"
            )
        times = np.sort(np.concatenate([variable.times[keep(variable.times)] for variable in holders]))
        twice = times[1:][times[1:] == times[:-1]]
        if twice.size:
            places = [variable.origin for variable in holders for _ in range((variable.times == twice[0]).sum())]
            raise UserError(
                f"{label}: channel '{name}' stands twice at {_text(twice[0])}: in {' and '.join(places[:2])}; "
                "give each time once (one file, one ensemble member, one `expver`)"
            )
        own[name] = times
    union = np.unique(np.concatenate(list(own.values())))
    if not union.size:
        raise UserError(f"{label}: no time is left: none is a multiple of step_hours ({step_hours}) from midnight UTC")
    for name, times in own.items():
        missing = np.setdiff1d(union, times)
        if missing.size:
            other = next(other for other, has in own.items() if missing[0] in has)
            raise UserError(
                f"{label}: channel '{name}' is missing at {_text(missing[0])} ({missing.size} such times), "
                f"where '{other}' is there; add the file that holds it"
            )
    _check_step(union, step_hours, label)
    return union


def _check_step(times: np.ndarray, step_hours: int | None, label: str) -> None:
    """Refuse times that do not follow one another at one step: the asked one, or else the commonest."""
    if times.size < 2:
        return
    steps, counts = np.unique(np.diff(times), return_counts=True)
    step = np.timedelta64(3600 * step_hours, "s") if step_hours else steps[counts.argmax()]
    expected = np.arange(times[0], times[-1] + step, step)
    hours = step / np.timedelta64(1, "h")
    missing, extra = np.setdiff1d(expected[expected <= times[-1]], times), np.setdiff1d(times, expected)
    if missing.size:
        raise UserError(
            f"{label}: {_text(missing[0])} is missing ({missing.size} of {expected.size} times, every {hours:g} h "
            f"from {_text(times[0])} to {_text(times[-1])}); add the file that holds it, or set `split` around the gap"
        )
    if extra.size:
        raise UserError(f"{label}: {_text(extra[0])} breaks the step of {hours:g} h; set `step_hours`, or remove it")


def _segment(variable: Variable, names: list[str], keep: np.ndarray, times: np.ndarray) -> _Segment:
    """Match a variable's levels with channels and its times with rows."""
    positions = [position for position, name in enumerate(names) if name in variable.channels]
    levels = [variable.channels.index(names[position]) for position in positions]
    indices = np.flatnonzero(keep)
    rows = np.searchsorted(times, variable.times[indices])
    order = np.argsort(rows)
    return _Segment(variable, levels, positions, indices[order], rows[order])


def _one_value(name: str, attribute: str, variables: Sequence[Variable], strict: bool = True) -> str:
    """Return an attribute of a channel, the same in all files if `strict`."""
    holders = [variable for variable in variables if name in variable.channels]
    for other in holders[1:]:
        one, two = (getattr(holder, attribute).replace("**", "").replace("^", "") for holder in (holders[0], other))
        if strict and one != two:  # m s**-1 is m s-1
            raise UserError(
                f"{other.origin}: '{name}' has {attribute} '{getattr(other, attribute)}', but "
                f"'{getattr(holders[0], attribute)}' in {holders[0].origin}; convert one of them"
            )
    return str(getattr(holders[0], attribute))


def _averaged(axis: np.ndarray, factor: int) -> np.ndarray:
    """Centres of blocks of `factor` points, float64: `block_average` would round coordinates to float32."""
    return np.asarray(axis.astype(np.float64).reshape(-1, factor).mean(axis=1))


def _text(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]")).replace("T", " ")


# ----------------------------------------------------------------------------------------------- file formats


def _catalogue(path: Path, wanted: Collection[str], stack: contextlib.ExitStack) -> list[Variable]:
    """List the variables of a file of any format; `stack` will close it.

    What does not fit (other axes, other grids) is left out, unless it is `wanted`: then it is a `UserError`.
    """
    if path.is_dir():
        if not any((path / marker).exists() for marker in ("zarr.json", ".zgroup", ".zmetadata")):
            raise UserError(f"{path}: a folder, but not a Zarr store; give GRIB or NetCDF files, or a Zarr store")
        return _netcdf(path, "zarr", wanted, stack)
    try:
        with open(path, "rb") as file:
            head = file.read(1024)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the dataset's `source.paths`, or run the acquire stage") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error.strerror}); check the permissions") from None
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return _netcdf(path, "h5netcdf", wanted, stack)
    if head.startswith((b"CDF\x01", b"CDF\x02")):
        return _netcdf(path, "scipy", wanted, stack)
    if b"GRIB" in head:  # bulletins may have a heading before it
        return _grib(path, wanted)
    if head.startswith(b"CDF\x05"):
        raise UserError(f"{path}: NetCDF in the CDF-5 format is not supported; convert it: nccopy -k nc4 IN OUT")
    if head.startswith((b"\x1f\x8b", b"PK\x03\x04")):
        raise UserError(f"{path}: a compressed archive; unpack it first")
    found = f"begins with {head[:8]!r}" if head else "is empty"
    raise UserError(f"{path}: neither GRIB nor NetCDF nor Zarr: it {found}; {_TORN}")


@contextlib.contextmanager
def _reading(origin: str | os.PathLike[str], advice: str = _TORN) -> Iterator[None]:
    """Turn whatever a format's library raises into a `UserError`, and silence what it warns of."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{origin}: cannot be read ({text}); {advice}") from error


def _netcdf(path: Path, engine: str, wanted: Collection[str], stack: contextlib.ExitStack) -> list[Variable]:
    """List the variables of a NetCDF file or a local Zarr store."""
    import xarray as xr

    with _reading(path):
        opened = stack.enter_context(xr.open_dataset(path, engine=engine, decode_times=False, cache=False))
        return gridded(opened, str(path), wanted)


def gridded(dataset: xr.Dataset, origin: str, wanted: Collection[str], advice: str = _TORN) -> list[Variable]:
    """List the variables of an xarray dataset that lie on time, latitude and longitude, and perhaps level.

    Parameters
    ----------
    dataset
        Opened lazily with `decode_times=False` and `cache=False`.
    origin
        For messages.
    wanted
        Names whose variables must be readable: a `UserError` says why they are not. Others are left out.
    advice
        What to do when a read fails later on.
    """
    times = functools.cache(lambda clock: _decoded_times(dataset.variables[clock], origin))  # one for all variables
    return _usable(
        {
            str(name): functools.partial(_gridded, dataset, str(name), times, origin, advice)
            for name in dataset.data_vars
        },
        wanted,
        origin,
    )


def _usable(makers: Mapping[str, Callable[[], Variable]], wanted: Collection[str], origin: str) -> list[Variable]:
    """Describe each variable or `name@level`; leave out what cannot be, unless it is wanted or nothing is left."""
    found: list[Variable] = []
    refusal = UserError(f"{origin}: holds no variables; {_TORN}")
    for name, make in makers.items():
        try:
            found.append(make())
        except UserError as error:
            if name in wanted or name.partition("@")[0] in wanted:
                raise
            refusal = error
    if not found:
        raise refusal
    return found


def _gridded(dataset: xr.Dataset, name: str, times: Callable[[str], np.ndarray], origin: str, advice: str) -> Variable:
    """Describe one variable, or say why it is not a series of states on a regular grid."""
    array = dataset[name]

    def refused(problem: str) -> UserError:
        axes = ", ".join(f"{dim} ({size})" for dim, size in array.sizes.items()) or "none"
        return UserError(f"{origin}: '{name}' {problem}; its dimensions: {axes}")

    def coordinate(candidates: Sequence[str], ndim: Sequence[int] = (1,)) -> str | None:
        """Return the first of these that belongs to the variable; an axis rather than a single value."""
        known = {key: dataset.variables[key] for key in candidates if key in dataset.variables}
        fitting = [key for key, axis in known.items() if axis.ndim in ndim and set(axis.dims) <= set(array.dims)]
        return max(fitting, key=lambda key: known[key].ndim, default=None)

    found = {"latitude": coordinate(LATITUDES), "longitude": coordinate(LONGITUDES)}
    found |= {"time": coordinate(TIMES, (0, 1)), "level": coordinate(LEVELS, (0, 1))}
    coordinates = {key: dataset.variables[other] for key, other in found.items() if other is not None}
    axes = {key: variable.dims[0] for key, variable in coordinates.items() if variable.ndim}
    if len({axes.get("latitude"), axes.get("longitude")} - {None}) < 2:
        raise refused(f"is not on axes {' / '.join(LATITUDES)} and {' / '.join(LONGITUDES)}; {_GRID}")
    if found["time"] is None:
        raise refused(f"has no time axis; expected {' or '.join(TIMES)}")
    if not array.size:
        raise refused("holds no values")
    rest = [dim for dim in array.dims if dim not in axes.values()]
    if further := [dim for dim in rest if array.sizes[dim] > 1]:
        raise refused(f"has the further dimension {further[0]}; select one of its entries, or average over it")

    channels: tuple[str, ...] = (name,)
    if "level" in coordinates:
        level = coordinates["level"]
        hectopascals = np.atleast_1d(level.values) / (100.0 if level.attrs.get("units") == "Pa" else 1.0)
        channels = tuple(f"{name}@{value:g}" for value in hectopascals)

    values = array.variable
    order = [axes[key] for key in ("time", "level", "latitude", "longitude") if key in axes]

    def load(times: np.ndarray, levels: list[int], rows: slice, columns: slice) -> np.ndarray:
        asked = {"time": _compact(times), "level": _compact(levels), "latitude": rows, "longitude": columns}
        index: dict[Any, Any] = {axes[key]: asked[key] for key in axes} | dict.fromkeys(rest, 0)
        # transposed only once it is read: a lazy transposition would make the library read point by point
        read = values.isel(index).load().transpose(*order).values
        return np.asarray(read, np.float32).reshape(len(times), len(levels), rows.stop - rows.start, -1)

    chunks = {axes[key]: 1 for key in axes} | values.encoding.get("preferred_chunks", {})
    height, width = (array.sizes[axes[key]] for key in ("latitude", "longitude"))
    stored = np.dtype(values.encoding.get("dtype", values.dtype)).itemsize

    def footprint(levels: list[int], rows: slice, columns: slice) -> tuple[int, int]:
        selected = len(levels) * (rows.stop - rows.start) * (columns.stop - columns.start)
        indices = {"level": levels, "latitude": range(height)[rows], "longitude": range(width)[columns]}
        touched = 1  # stored values: whole chunks
        for key in axes.keys() & indices.keys():
            chunk = chunks[axes[key]]
            touched *= min(len({index // chunk for index in indices[key]}) * chunk, array.sizes[axes[key]])
        # both kinds twice, while they are unpacked and then masked and scaled; and the result
        return 2 * stored * touched, (2 * values.dtype.itemsize + 4) * selected

    return _regular(
        Variable(
            origin,
            channels,
            str(array.attrs.get("units", "")),
            str(array.attrs.get("long_name", array.attrs.get("standard_name", name))),
            times(found["time"]),
            coordinates["latitude"].values.astype(np.float64),
            coordinates["longitude"].values.astype(np.float64),
            load,
            footprint,
            chunks[axes["time"]] if "time" in axes else 1,
            advice,
        )
    )


def _decoded_times(clock: xr.Variable, origin: str) -> np.ndarray:
    """Decode a CF time axis to datetime64[s], [T]."""
    import xarray as xr

    try:
        coder = xr.coders.CFDatetimeCoder(use_cftime=False, time_unit="s")
        times = xr.conventions.decode_cf_variable("time", clock, decode_times=coder).values
    except Exception as error:
        raise UserError(f"{origin}: the time axis cannot be read ({' '.join(str(error).split())[:200]})") from error
    if times.dtype.kind != "M" or np.isnat(times).any():
        units, calendar = (clock.attrs.get(key, "none") for key in ("units", "calendar"))
        raise UserError(
            f"{origin}: the time axis holds no dates of the standard calendar (units: {units}, calendar: {calendar}); "
            "expected, e.g., 'hours since 1900-01-01'"
        )
    nearest_second = times.astype("datetime64[ms]") + np.timedelta64(500, "ms")  # hours as float32 are a little off
    return np.atleast_1d(nearest_second.astype("datetime64[s]"))


def _compact(indices: Sequence[int] | np.ndarray) -> slice | np.ndarray:
    """Return a slice in place of evenly spaced, ascending indices: every format reads these fast."""
    indices = np.asarray(indices)
    steps = np.unique(np.diff(indices))
    if steps.size > 1 or (steps.size == 1 and steps[0] <= 0):
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1, int(steps[0]) if steps.size else 1)


def _regular(variable: Variable) -> Variable:
    """Return the variable with latitudes north to south and ascending longitudes; refuse other grids."""
    latitude, longitude = variable.latitude, variable.longitude
    if (abs(np.diff(longitude)) > 180.0).any():  # ..., 355, 0, 5: continue with 360, 365
        longitude = np.unwrap(longitude, period=360.0)
    north_first = latitude[0] >= latitude[-1]
    ordered = (np.diff(latitude if north_first else latitude[::-1]) < 0).all() and (np.diff(longitude) > 0).all()
    if not (ordered and np.isfinite(latitude).all() and np.isfinite(longitude).all()):
        name = variable.channels[0]
        raise UserError(f"{variable.origin}: '{name}': latitudes or longitudes are not in order; {_GRID}")
    if north_first:
        return replace(variable, longitude=longitude)

    load, height = variable.load, latitude.size

    def flipped(times: np.ndarray, levels: list[int], rows: slice, columns: slice) -> np.ndarray:
        return load(times, levels, slice(height - rows.stop, height - rows.start), columns)[..., ::-1, :]

    return replace(variable, latitude=latitude[::-1], longitude=longitude, load=flipped)


def _grib(path: Path, wanted: Collection[str]) -> list[Variable]:
    """List the variables of a GRIB file, each level of each as one, through cfgrib's index of messages.

    xarray's view of the index does not do here: it makes one hypercube of what may be several, fills
    messages that are not there with NaN, and takes the first of two at one time without a word.
    """
    from cfgrib import cfmessage, messages

    _silence_eccodes()
    stream = messages.FileStream(str(path), errors="raise")
    keys = ["cfVarName", "shortName", "typeOfLevel", "level", "valid_time", "md5GridSection"]
    with _reading(path):
        index = messages.FileIndex.from_fieldset(stream, keys, cfmessage.COMPUTED_KEYS)  # leaves no file behind
        _check_end(stream, max((offset for _, offsets in index.iter_index() for offset in offsets), key=_position))
    found: dict[tuple[str, str, float, str], list[tuple[int, Any]]] = {}
    for (cf_name, short, kind, level, time, grid), offsets in index.iter_index():
        name = short if cf_name in ("unknown", "undef") else cf_name
        found.setdefault((name, kind, level, grid), []).extend((time, offset) for offset in offsets)

    levels: dict[tuple[str, str], set[float]] = {}
    for name, kind, level, _ in found:
        levels.setdefault((name, kind), set()).add(level)
    makers: dict[str, Callable[[], Variable]] = {}
    for (name, kind, level, grid), entries in found.items():
        hectopascals = level / 100.0 if kind == "isobaricInPa" else level
        levelled = kind.startswith("isobaric") or len(levels[name, kind]) > 1
        channel = f"{name}@{hectopascals:g}" if levelled else name
        makers[f"{channel}@{kind}@{grid}"] = functools.partial(_message_series, path, stream, channel, entries)
    with _reading(path):
        return _usable(makers, wanted, str(path))


def _position(offset: int | tuple[int, int]) -> int:
    """Byte at which a field's message begins; a field that shares its message with others has its number, too."""
    return offset[0] if isinstance(offset, tuple) else offset


def _check_end(stream: Any, last: int | tuple[int, int]) -> None:
    """Refuse a file with more messages after the last that was found: ecCodes takes a damaged one for the end."""
    with open(stream.path, "rb") as file:
        file.seek(_position(last) + stream[_position(last)]["totalLength"])
        if any(b"GRIB" in block for block in iter(lambda: file.read(2**20), b"")):
            raise UserError(f"{stream.path}: the message after byte {_position(last)} cannot be decoded; {_TORN}")


def _message_series(path: Path, stream: Any, channel: str, entries: list[tuple[int, Any]]) -> Variable:
    """Describe the GRIB messages of one variable and level: (seconds since 1970, offset in the file) each."""
    from cfgrib.messages import MISSING_VAUE_INDICATOR as MISSING  # cfgrib's spelling

    times, offsets = zip(*entries, strict=True)
    if "undef" in times:
        raise UserError(f"{path}: '{channel}' has messages without a time; expected one at each time")
    first = stream[offsets[0]]
    unusual = [key for key in ("iScansNegatively", "jPointsAreConsecutive", "alternativeRowScanning") if first.get(key)]
    if first["gridType"] not in ("regular_ll", "regular_gg") or unusual:
        found = f"scanned in an unusual order ({unusual[0]})" if unusual else f"on a grid of type {first['gridType']}"
        raise UserError(f"{path}: '{channel}' is {found}; {_GRID}")
    latitude, longitude = (np.array(first[key], np.float64) for key in ("distinctLatitudes", "distinctLongitudes"))

    def load(times: np.ndarray, levels: list[int], rows: slice, columns: slice) -> np.ndarray:
        out = np.empty((len(times), 1, rows.stop - rows.start, columns.stop - columns.start), np.float32)
        with open(path, "rb") as file:
            for place, time in enumerate(times):
                message = stream.message_from_file(file, offset=offsets[time])
                out[place, 0] = message["values"].reshape(latitude.size, longitude.size)[rows, columns]
        out[out == MISSING] = np.nan
        return out

    def footprint(levels: list[int], rows: slice, columns: slice) -> tuple[int, int]:
        message = 24 * latitude.size * longitude.size  # packed, and as float64 in ecCodes and here; one at a time
        return message, 5 * len(levels) * (rows.stop - rows.start) * (columns.stop - columns.start)

    return _regular(
        Variable(
            str(path),
            (channel,),
            str(first["units"]),
            str(first["name"]),
            np.array(times, "datetime64[s]"),
            latitude,
            longitude,
            load,
            footprint,
        )
    )


@functools.cache
def _silence_eccodes() -> IO[str]:
    """Send what ecCodes prints to nowhere: its errors arrive as exceptions. Cached, so that the file stays open."""
    import eccodes

    nowhere = open(os.devnull, "w")  # noqa: SIM115
    eccodes.codes_context_set_logging(nowhere)
    return nowhere
