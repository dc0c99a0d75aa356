"""The variables of atmospheric files: NetCDF files and Zarr stores through xarray, GRIB files through cfgrib.

Notation: `T` times, or fields where a file has several at one time, `L` levels of a variable, `H` latitudes (north to
south), `W` longitudes. Times are numpy `datetime64[s]`, UTC. Levels of pressure are in hPa, whatever the file
counts in; others, such as hybrid ones, are numbers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from dlscale.core import files
from dlscale.core.errors import UserError
from dlscale.core.files import TORN
from dlscale.data import store
from dlscale.datasets.era5.humidity import with_humidity
from dlscale.datasets.era5.variable import Variable

if TYPE_CHECKING:
    import xarray as xr

GRID = "expected a regular grid: one axis of latitudes and one of longitudes; interpolate it, e.g. with `cdo remapbil`"
# what the axes are called: by CF, ECMWF's two generations of NetCDF, cfgrib, ARCO-ERA5 and WeatherBench2
TIMES = ("valid_time", "time")
LATITUDES = ("latitude", "lat")
LONGITUDES = ("longitude", "lon")
#: Of forecasts: when they begin, and how far they look ahead.
BASES = ("time", "forecast_reference_time")
LEADS = ("step", "forecast_period", "prediction_timedelta", "lead_time", "leadtime")
LEVELS = ("isobaricInhPa", "isobaricInPa", "pressure_level", "level", "plev", "lev")
#: What the standard calendar is called by CF.
CALENDARS = ("standard", "gregorian", "proleptic_gregorian")
#: Keys of GRIB that tell fields of one time apart.
TRAITS = ("number", "typeOfLevel", "stepType", "step", "stepRange", "dataType", "expver")
#: When the mean of a month is valid, of seasonal forecasts and of others: their valid time is a day off, or a month.
MONTHS = ("verifying_time", "valid_month")
#: From east to west; down columns, not along rows; every second line backwards.
SCANNING = ("iScansNegatively", "jPointsAreConsecutive", "alternativeRowScanning")
_Message = tuple[int | None, Any, tuple[Any, ...]]  # seconds since 1970, place in the file, values of its traits
#: What NetCDF's library leaves in places that nobody wrote, by type (netcdf.h, NC_FILL_*); bytes have no such value.
UNWRITTEN = {
    **{"i2": -32767, "u2": 65535, "i4": -2147483647, "u4": 4294967295},
    **{"i8": -9223372036854775806, "u8": 18446744073709551614, "f4": 9.969209968386869e36, "f8": 9.969209968386869e36},
}


def _regular(variable: Variable) -> Variable:
    """Return the variable with latitudes north to south and ascending longitudes; refuse other grids."""
    latitude, longitude = variable.latitude, variable.longitude
    if (abs(np.diff(longitude)) > 180.0).any():  # ..., 355, 0, 5: continue with 360, 365
        longitude = np.unwrap(longitude, period=360.0)
    north_first = latitude[0] >= latitude[-1]
    ordered = (np.diff(latitude if north_first else latitude[::-1]) < 0).all() and (np.diff(longitude) > 0).all()
    if not (ordered and np.isfinite(latitude).all() and np.isfinite(longitude).all()):
        name = variable.channels[0]
        raise UserError(f"{variable.origin}: '{name}': latitudes or longitudes are not in order; {GRID}")
    if abs(latitude).max() > 90.0 + 1e-3:
        raise UserError(
            f"{variable.origin}: '{variable.channels[0]}': latitudes from {latitude.min():g} to {latitude.max():g}; "
            "expected degrees from -90 to 90: mend the axis, e.g. with `cdo setgrid`"
        )
    if north_first:
        return replace(variable, longitude=longitude)

    load, missing, height = variable.load, variable.missing, latitude.size

    def flipped(times: np.ndarray, levels: list[int], rows: slice, columns: slice) -> np.ndarray:
        return load(times, levels, slice(height - rows.stop, height - rows.start), columns)[..., ::-1, :]

    def why(time: int, level: int, row: int, column: int) -> str:
        return missing(time, level, height - 1 - row, column)

    return replace(variable, latitude=latitude[::-1], longitude=longitude, load=flipped, missing=why)


def _usable(makers: Mapping[str, Callable[[], Variable]], wanted: Collection[str], origin: str) -> list[Variable]:
    """Describe each variable or `name@level`; leave out what cannot be, unless it is wanted or nothing is left."""
    variables: list[Variable] = []
    refusal = UserError(f"{origin}: holds no variables; {TORN}")
    for name, make in makers.items():
        try:
            variables.append(make())
        except UserError as error:
            if name in wanted or name.partition("@")[0] in wanted:
                raise
            refusal = error
    if not variables:
        raise refusal
    return variables


@contextlib.contextmanager
def reading(origin: str | os.PathLike[str], advice: str = TORN) -> Iterator[None]:
    """Read a file as `files.reading` has it, and silence what its library warns of."""
    with files.reading(origin, advice), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def open_netcdf(path: Path, engine: str, wanted: Collection[str], stack: contextlib.ExitStack) -> list[Variable]:
    """List the variables of a NetCDF file or a local Zarr store."""
    import xarray as xr

    with reading(path):
        if engine == "zarr":
            opened = stack.enter_context(xr.open_dataset(path, engine=engine, decode_times=False, cache=False))
            return gridded(opened, str(path), wanted)
        if engine == "h5netcdf":
            store.open_file(path).close()  # refuses what leads to other files
        options: Any = {"decode_times": False, "mask_and_scale": False, "cache": False}
        raw = stack.enter_context(xr.open_dataset(path, engine=engine, **options))
        for variable in raw.data_vars.values():
            unwritten = UNWRITTEN.get(variable.dtype.str[1:])
            if unwritten is not None and not {"_FillValue", "missing_value"} & variable.attrs.keys():
                variable.attrs["_FillValue"] = variable.dtype.type(unwritten)
        return gridded(xr.decode_cf(raw, decode_times=False), str(path), wanted)


def gridded(dataset: xr.Dataset, origin: str, wanted: Collection[str], advice: str = TORN) -> list[Variable]:
    """List the variables of an xarray dataset that lie on time, latitude and longitude, and perhaps level.

    `dataset` is opened lazily with `decode_times=False` and `cache=False`. `wanted` and `origin`: see `_usable`;
    `advice`: see `Variable`.
    """
    times = functools.cache(functools.partial(_valid_times, dataset, origin))  # once for all variables
    names = [str(name) for name in dataset.data_vars]
    makers = {name: functools.partial(_gridded, dataset, name, times, origin, advice) for name in names}
    return with_humidity(_usable(makers, wanted, origin), wanted)


def _gridded(
    dataset: xr.Dataset, name: str, times: Callable[[str, str | None], xr.Variable], origin: str, advice: str
) -> Variable:
    """Describe one variable, or say why it is not a series of states on a regular grid.

    Its fields are all entries of all dimensions besides level, latitude and longitude.
    """
    array = dataset[name]

    def refused(problem: str) -> UserError:
        axes = ", ".join(f"{dim} ({size})" for dim, size in array.sizes.items()) or "none"
        return UserError(f"{origin}: '{name}' {problem}; its dimensions: {axes}")

    def coordinate(candidates: Sequence[str], ndim: Sequence[int] = (1,)) -> str | None:
        """Return the first of these that belongs to the variable; an axis rather than a single value."""
        known = {key: dataset.variables[key] for key in candidates if key in dataset.variables}
        fitting = [key for key, axis in known.items() if axis.ndim in ndim and set(axis.dims) <= set(array.dims)]
        return max(fitting, key=lambda key: known[key].ndim, default=None)

    named = {
        "latitude": coordinate(LATITUDES),
        "longitude": coordinate(LONGITUDES),
        "level": coordinate(LEVELS, (0, 1)),
    }
    coordinates = {key: dataset.variables[other] for key, other in named.items() if other is not None}
    axes = {key: variable.dims[0] for key, variable in coordinates.items() if variable.ndim}
    if len({axes.get("latitude"), axes.get("longitude")} - {None}) < 2:
        raise refused(f"is not on axes {' / '.join(LATITUDES)} and {' / '.join(LONGITUDES)}; {GRID}")
    clock, lead = coordinate(TIMES, (0, 1, 2)), coordinate(LEADS, (0, 1))
    if clock == "valid_time" and lead and set(dataset.variables[lead].dims) <= set(dataset.variables[clock].dims):
        lead = None  # is in the valid times already
    base = coordinate(BASES, (0, 1)) if lead else clock
    if base is None:
        raise refused(f"has no time axis; expected {' or '.join(TIMES)}")
    if not array.size:
        raise refused("holds no values")
    valid_times = times(base, lead)
    rest = [dim for dim in array.dims if dim not in axes.values()]
    main = max(rest, key=lambda dim: (dim in valid_times.dims, array.sizes[dim]), default=None)
    rest.sort(key=lambda dim: dim == main)  # the last: fields that follow one another in the file do so in T
    sizes = {dim: array.sizes[dim] for dim in rest}

    channels: tuple[str, ...] = (name,)
    if "level" in coordinates:
        level = coordinates["level"]
        hectopascals = np.atleast_1d(level.values) / (100.0 if level.attrs.get("units") == "Pa" else 1.0)
        channels = tuple(f"{name}@{value:g}" for value in hectopascals)

    values, valid = array.variable, _valid(array.variable)
    order = [axes[key] for key in ("level", "latitude", "longitude") if key in axes]

    def part(fields: np.ndarray, levels: list[int], rows: slice, columns: slice) -> np.ndarray:
        """Read fields [t] that differ in their place along the main dimension alone, as decoded: [t, l, h, w]."""
        places = dict(zip(rest, np.unravel_index(fields, tuple(sizes.values())) if rest else (), strict=True))
        index: dict[Any, Any] = {dim: int(along[0]) for dim, along in places.items()}
        if main is not None:
            index[main] = _compact(places[main])
        asked = {"level": _compact(levels), "latitude": rows, "longitude": columns}
        index |= {axes[key]: asked[key] for key in axes}
        # transposed only once it is read: a lazy transposition would make the library read point by point
        read = values.isel(index).load().transpose(*([] if main is None else [main]), *order).values
        return read.reshape(len(fields), len(levels), rows.stop - rows.start, -1)

    def load(fields: np.ndarray, levels: list[int], rows: slice, columns: slice) -> np.ndarray:
        run = np.asarray(fields) // (sizes[main] if main is not None else 1)
        starts = [0, *(np.flatnonzero(np.diff(run)) + 1)]
        read = [part(some, levels, rows, columns) for some in np.split(np.asarray(fields), starts[1:])]
        every = read[0] if len(read) == 1 else np.concatenate(read)
        if valid is not None:
            every = np.where((every >= valid[0]) & (every <= valid[1]), every, np.nan)
        return np.asarray(every, np.float32)

    def missing(time: int, level: int, row: int, column: int) -> str:
        found = part(np.array([time]), [level], slice(row, row + 1), slice(column, column + 1)).item()
        if valid is not None and np.isfinite(found):
            return f"{found:g} is beyond the valid range of {valid[0]:g} to {valid[1]:g}"
        return _filled(values)

    chunks = dict.fromkeys(array.dims, 1) | values.encoding.get("preferred_chunks", {})
    height, width = (array.sizes[axes[key]] for key in ("latitude", "longitude"))
    stored = np.dtype(values.encoding.get("dtype", values.dtype)).itemsize

    def footprint(levels: list[int], rows: slice, columns: slice) -> tuple[int, int]:
        selected = len(levels) * (rows.stop - rows.start) * (columns.stop - columns.start)
        indices = {"level": levels, "latitude": range(height)[rows], "longitude": range(width)[columns]}
        touched = 1  # stored values: whole chunks
        for key in axes.keys() & indices.keys():
            chunk = chunks[axes[key]]
            touched *= min(len({index // chunk for index in indices[key]}) * chunk, array.sizes[axes[key]])
        for dim in rest[:-1]:
            touched *= min(chunks[dim], sizes[dim])
        # both kinds twice, while they are unpacked and then masked and scaled; and the result
        return 2 * stored * touched, (2 * values.dtype.itemsize + 4) * selected

    return _regular(
        Variable(
            origin,
            channels,
            str(array.attrs.get("units", "")),
            str(array.attrs.get("long_name", array.attrs.get("standard_name", name))),
            _spread(valid_times, sizes),
            coordinates["latitude"].values.astype(np.float64),
            coordinates["longitude"].values.astype(np.float64),
            load,
            footprint,
            1 if main is None else chunks[main],
            advice,
            missing,
            _traits(array, sizes, {base, lead, *named.values()}, origin),
        )
    )


def _spread(variable: xr.Variable, sizes: Mapping[Any, int]) -> np.ndarray:
    """Return the value that belongs to each field of these dimensions, [T]."""
    return np.asarray(variable.set_dims(dict(sizes)).transpose(*sizes).values).ravel()


def _traits(array: xr.DataArray, sizes: Mapping[Any, int], axes: Collection[Any], origin: str) -> dict[str, np.ndarray]:
    """Return what tells a variable's fields apart: its other coordinates, its dimensions without any, its GRIB keys."""
    traits: dict[str, np.ndarray] = {}
    for key, coordinate in array.coords.items():
        if set(coordinate.dims) <= sizes.keys() and key not in {*axes, *TIMES, *BASES} - {*LEADS}:
            variable = _hours(coordinate.variable, origin) if key in LEADS else coordinate.variable
            if variable.dtype.kind == "S":
                variable = variable.astype(str)
            traits[str(key)] = _spread(variable, sizes)
    for dim, size in sizes.items():
        if dim not in array.coords and size > 1:
            traits[str(dim)] = _spread(type(array.variable)((dim,), np.arange(size)), sizes)
    for key in ("stepType", "typeOfLevel", "dataType"):
        if f"GRIB_{key}" in array.attrs:
            traits[key] = np.full(math.prod(sizes.values()), str(array.attrs[f"GRIB_{key}"]))
    return traits


def _filled(values: xr.Variable) -> str:
    """Return why a value is NaN once it is decoded: what may stand in its place in the file."""
    fills = {key: values.encoding[key] for key in ("_FillValue", "missing_value") if key in values.encoding}
    if not fills:
        return "NaN is stored there"
    number = np.ravel(next(iter(fills.values())))[0]
    stored = np.dtype(values.encoding.get("dtype", values.dtype))
    nobody = ", which NetCDF's library leaves where nobody wrote" if number == UNWRITTEN.get(stored.str[1:]) else ""
    nan = "NaN or " if stored.kind == "f" and np.isfinite(number) else ""  # once decoded, nothing tells them apart
    return f"{nan}its {' or '.join(fills)} is stored there ({number:g}{nobody})"


def _valid(values: xr.Variable) -> tuple[float, float] | None:
    """Return the lowest and the highest valid value of a variable, as it is decoded; None if it names none.

    `valid_range`, `valid_min` and `valid_max` are stored as the values are (NetCDF Users Guide, appendix A): those of
    packed values in the integers that these are packed into, else in the units of the variable.
    """

    def given(key: str, count: int) -> np.ndarray | None:
        found = np.ravel(np.asarray(values.attrs.get(key, ())))
        return found if found.size == count and found.dtype.kind in "iuf" else None

    ends = given("valid_range", 2)
    if ends is None:
        low, high = given("valid_min", 1), given("valid_max", 1)
        if low is None and high is None:
            return None
        ends = np.array([-np.inf if low is None else low[0], np.inf if high is None else high[0]])
        kind = (low if low is not None else high).dtype.kind  # type: ignore[union-attr]
    else:
        kind = ends.dtype.kind
    stored = np.dtype(values.encoding.get("dtype", values.dtype))
    scale, offset = (float(values.encoding.get(key, other)) for key, other in (("scale_factor", 1), ("add_offset", 0)))
    unpacked = kind == "f" and stored.kind in "iu"  # the ends are of the values themselves
    low_end, high_end = sorted(float(end) if unpacked else float(end) * scale + offset for end in ends)
    # Decoding rounds: half of what packed values differ by, or the last digits of a float.
    room = abs(scale) / 2 if stored.kind in "iu" else 1e-6 * max(abs(e) for e in (low_end, high_end) if np.isfinite(e))
    return low_end - room, high_end + room


def _valid_times(dataset: xr.Dataset, origin: str, clock: str, lead: str | None) -> xr.Variable:
    """Return when fields are valid, datetime64[s]: what a clock shows, and of forecasts the hours that they lead."""
    decoded = dataset.variables[clock].copy(data=_decoded_times(dataset.variables[clock], origin))
    if lead is None:
        return decoded
    hours = _hours(dataset.variables[lead], origin)
    return decoded + hours.copy(data=(3600 * hours.values).round().astype("timedelta64[s]"))


def _hours(lead: xr.Variable, origin: str) -> xr.Variable:
    """Return how far a forecast looks ahead, in hours."""
    unit = str(lead.attrs.get("units", "hours")).lower().rstrip("s")
    hours = {"hour": 1.0, "hr": 1.0, "h": 1.0, "day": 24.0, "minute": 1 / 60, "second": 1 / 3600}
    hours |= {"millisecond": 1 / 3.6e6, "microsecond": 1 / 3.6e9, "nanosecond": 1 / 3.6e12}
    if unit not in hours or lead.dtype.kind not in "iuf":
        raise UserError(f"{origin}: forecast steps in '{lead.attrs.get('units')}' cannot be read; expected hours")
    ahead = lead.values * hours[unit]
    if not (np.abs(ahead) < 1e8).all():  # no time would come of it, and the field would be left out in silence
        worst = ahead.ravel()[np.abs(ahead).argmax()]  # NaN, if there is one
        raise UserError(f"{origin}: a forecast step is {worst:g} hours; expected numbers; {TORN}")
    return lead.copy(data=ahead)


def _decoded_times(clock: xr.Variable, origin: str) -> np.ndarray:
    """Decode CF times to datetime64[s], of the same shape."""
    import xarray as xr

    calendar = str(clock.attrs.get("calendar", "standard"))
    if calendar.lower() not in CALENDARS:
        raise UserError(
            f"{origin}: its calendar is '{calendar}', which has other days than ours; expected the standard one: "
            "convert it, with `cdo setcalendar,standard` where all dates exist, as of monthly means, else with "
            "xarray's `convert_calendar('standard', align_on='date')`"
        )
    try:
        coder = xr.coders.CFDatetimeCoder(use_cftime=False, time_unit="s")
        times = np.asarray(xr.conventions.decode_cf_variable("time", clock, decode_times=coder).values)
    except Exception as error:
        raise UserError(f"{origin}: the time axis cannot be read ({' '.join(str(error).split())[:200]})") from error
    if times.dtype.kind != "M" or np.isnat(times).any():
        units, calendar = (clock.attrs.get(key, "none") for key in ("units", "calendar"))
        raise UserError(
            f"{origin}: the time axis holds no dates of the standard calendar (units: {units}, calendar: {calendar}); "
            "expected, e.g., 'hours since 1900-01-01'"
        )
    nearest_second = times.astype("datetime64[ms]") + np.timedelta64(500, "ms")  # hours as float32 are a little off
    return np.asarray(nearest_second.astype("datetime64[s]"))


def _compact(indices: Sequence[int] | np.ndarray) -> slice | np.ndarray:
    """Return a slice in place of evenly spaced, ascending indices: every format reads these fast."""
    indices = np.asarray(indices)
    steps = np.unique(np.diff(indices))
    if steps.size > 1 or (steps.size == 1 and steps[0] <= 0):
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1, int(steps[0]) if steps.size else 1)


def open_grib(path: Path, wanted: Collection[str], keys: Iterable[str] = ()) -> list[Variable]:
    """List the variables of a GRIB file, each level of each as one, through cfgrib's index of messages.

    `keys` are further ones that tell fields apart. xarray's view of the index does not do here: it makes one hypercube
    of what may be several, fills messages that are not there with NaN, and takes the first of two at one time without a
    word.
    """
    try:
        from cfgrib import cfmessage, messages
    except ImportError as error:
        raise UserError(f"{path}: GRIB is not installed ({error}); pip install 'dlscale[grib]'") from None

    _silence_eccodes()
    stream = messages.FileStream(str(path), errors="raise")
    told = tuple(dict.fromkeys((*TRAITS, *keys)))
    own = ["cfVarName", "shortName", "typeOfLevel", "level", "md5GridSection"]
    with reading(path):
        index = messages.FileIndex.from_fieldset(stream, [*own, *MONTHS, "valid_time", *told], cfmessage.COMPUTED_KEYS)
        _check_end(stream, (offset for _, offsets in index.iter_index() for offset in offsets))
    series: dict[tuple[str, str, float, str], list[_Message]] = {}
    for (cf_name, short, kind, level, grid, *values), offsets in index.iter_index():
        name = short if cf_name in ("unknown", "undef") else cf_name
        time = next((time for time in values[: len(MONTHS) + 1] if time != "undef"), None)
        traits = tuple(None if value == "undef" else value for value in values[len(MONTHS) + 1 :])
        series.setdefault((name, kind, level, grid), []).extend((time, offset, traits) for offset in offsets)

    levels: dict[tuple[str, str], set[float]] = {}
    for name, kind, level, _ in series:
        levels.setdefault((name, kind), set()).add(level)
    makers = {}
    for (name, kind, level, grid), entries in series.items():
        hectopascals = level / 100.0 if kind == "isobaricInPa" else level
        levelled = kind.startswith("isobaric") or len(levels[name, kind]) > 1
        channel = f"{name}@{hectopascals:g}" if levelled else name
        makers[f"{channel}@{kind}@{grid}"] = functools.partial(_message_series, path, stream, channel, told, entries)
    with reading(path):
        return _usable(makers, wanted, str(path))


def _check_end(stream: Any, offsets: Iterable[int | tuple[int, int]]) -> None:
    """Refuse a file with more messages after the last in its index: ecCodes takes a damaged one for the end."""
    # A field that shares its message with others has its number beside the byte at which the message begins.
    last = max(offset[0] if isinstance(offset, tuple) else offset for offset in offsets)
    with open(stream.path, "rb") as file:
        file.seek(last + stream[last]["totalLength"])
        if any(b"GRIB" in block for block in iter(lambda: file.read(2**20), b"")):
            raise UserError(f"{stream.path}: the message after byte {last} cannot be decoded; {TORN}")


def _message_series(
    path: Path, stream: Any, channel: str, told: tuple[str, ...], entries: Sequence[_Message]
) -> Variable:
    """Describe the GRIB messages of one variable and level, which the values of the keys `told` tell apart."""
    from cfgrib.messages import MISSING_VAUE_INDICATOR as MISSING  # cfgrib's spelling

    times, offsets, traits = zip(*entries, strict=True)
    if None in times:
        raise UserError(f"{path}: '{channel}' has messages without a time; expected one at each time")
    first = stream[offsets[0]]
    if first["gridType"] not in ("regular_ll", "regular_gg"):
        raise UserError(f"{path}: '{channel}' is on a grid of type {first['gridType']}; {GRID}")
    latitude, longitude = (
        np.array(first[key], np.float64, ndmin=1) for key in ("distinctLatitudes", "distinctLongitudes")
    )
    west, down, turning = (first.get(key) for key in SCANNING)
    if west:  # ascending numbers, whatever the order: from the westernmost on, across the meridian
        longitude = longitude[np.argsort((longitude - first["longitudeOfLastGridPointInDegrees"] + 1e-6) % 360.0)]

    def values(message: Any) -> np.ndarray:
        """Return a message's values [H, W] from west to east, in the order of `latitude`."""
        height, width = latitude.size, longitude.size
        lines: np.ndarray = np.reshape(message["values"], (width, height) if down else (height, width))
        if turning:
            lines[1::2] = lines[1::2, ::-1].copy()
        lines = lines.T if down else lines
        return lines[:, ::-1] if west else lines

    def message(file: IO[bytes], field: int) -> Any:
        return stream.message_from_file(file, offset=offsets[field])

    def load(fields: np.ndarray, levels: list[int], rows: slice, columns: slice) -> np.ndarray:
        out = np.empty((len(fields), 1, rows.stop - rows.start, columns.stop - columns.start), np.float32)
        with open(path, "rb") as file:
            for place, field in enumerate(fields):
                out[place, 0] = values(message(file, field))[rows, columns]
        out[out == MISSING] = np.nan
        return out

    def footprint(levels: list[int], rows: slice, columns: slice) -> tuple[int, int]:
        size = 24 * latitude.size * longitude.size  # packed, and as float64 in ecCodes and here; one at a time
        return size, 5 * len(levels) * (rows.stop - rows.start) * (columns.stop - columns.start)

    def missing(time: int, level: int, row: int, column: int) -> str:
        with open(path, "rb") as file:
            bitmap = message(file, time)["bitmapPresent"]
        return "the bitmap of its GRIB message leaves it out" if bitmap else "its GRIB message holds NaN there"

    def keys(time: int) -> dict[str, Any]:
        """Return what the message says of its field, those keys first by which archives are searched."""
        with reading(path), open(path, "rb") as file:
            whole = message(file, time)
            of_field = itertools.takewhile(lambda key: key != "md5Section4", whole.message_grib_keys())
            names = [key for key in of_field if "Length" not in key and not key.startswith("md5")]
            return {key: value for key in names if np.ndim(value := whole.get(key)) == 0}

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
            missing=missing,
            keys=keys,
            traits={key: _objects(column) for key, column in zip(told, zip(*traits, strict=True), strict=True)},
        )
    )


def _objects(values: Sequence[Any]) -> np.ndarray:
    """Return values of any types, None among them, as an array."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


@functools.cache
def _silence_eccodes() -> IO[str]:
    """Send what ecCodes prints to nowhere: its errors arrive as exceptions. Cached, so that the file stays open."""
    import eccodes

    nowhere = open(os.devnull, "w")  # noqa: SIM115
    eccodes.codes_context_set_logging(nowhere)
    return nowhere
