"""Combine the variables of atmospheric files into one stream of states [T, C, H, W].

NetCDF and Zarr are opened with xarray, GRIB with cfgrib's index of messages; values are not read yet. Then the files
are checked: each channel must exist exactly once at each time, and all channels must have the same step and grid.
Finally only the wanted variables, levels, times and windows are read.

Notation: `T` times (`datetime64[s]`, UTC), `L` levels (hPa), `H` latitudes (north to south), `W` longitudes (west to
east).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from dlscale.core import files
from dlscale.core.errors import UserError, nearest
from dlscale.core.files import TORN
from dlscale.data import store
from dlscale.data.kind import Part
from dlscale.data.source import Source, block_average, check_structure
from dlscale.data.store import Field
from dlscale.extensions.era5_vit.era5.kind import SIMULATED_CHANNELS, Era5Dataset, Era5Zarr

if TYPE_CHECKING:
    import xarray as xr

#: Names of coordinates by axis, in CF, ECMWF's two generations of NetCDF, cfgrib, ARCO-ERA5 and WeatherBench2.
AXES = {
    "time": ("valid_time", "time"),
    "level": ("isobaricInhPa", "isobaricInPa", "pressure_level", "level", "plev", "lev"),
    "latitude": ("latitude", "lat"),
    "longitude": ("longitude", "lon"),
}
#: Name in ARCO-ERA5 and WeatherBench2 → ECMWF's short name.
SHORT_NAMES = {
    "10m_u_component_of_wind": "u10",
    "10m_v_component_of_wind": "v10",
    "2m_temperature": "t2m",
    "surface_pressure": "sp",
    "mean_sea_level_pressure": "msl",
    "total_column_water_vapour": "tcwv",
    "temperature": "t",
    "u_component_of_wind": "u",
    "v_component_of_wind": "v",
    "geopotential": "z",
    "specific_humidity": "q",
    "relative_humidity": "r",
}
#: Units of pressure levels, lower case, with their factor to hPa; levels without a unit are in hPa.
PRESSURES = {
    **dict.fromkeys(("hpa", "hectopascal", "hectopascals", "mb", "mbar", "millibar", "millibars", ""), 1.0),
    **dict.fromkeys(("pa", "pascal", "pascals"), 0.01),
}
#: Units of latitudes and longitudes, lower case: degrees or no unit, but not degrees south or west.
ANGLE = re.compile(r"(?!.*(south|west|[ _.°][sw]$|ees?w$))((deg|°).*)?")
#: Standard names of the axes of a grid with rotated poles.
ROTATED = {"grid_latitude", "grid_longitude"}
#: Names and standard names of coordinates of a forecast's lead time.
LEADS = {"step", "forecast_period", "prediction_timedelta", "lead_time", "leadtime", "lead", "forecast_hour"}
#: Names of coordinates of an ensemble's members.
MEMBERS = ("number", "realization", "member", "ensemble")
#: GRIB's types of pressure levels → number of the type's units in 1 hPa. Layers between two levels have other types.
PRESSURE_LEVELS = {"isobaricInhPa": 1.0, "isobaricInPa": 100.0}
#: GRIB flags of unsupported orders of points: from east to west, along columns, every second line backwards.
SCANNING = ("iScansNegatively", "jPointsAreConsecutive", "alternativeRowScanning")
#: GRIB keys from which `_grib_traits` makes the properties in which the fields of a channel must agree.
TRAITS = ("edition", "number", "derivedForecast", "stepType", "stepRange")
#: Limit of the CPU time for reading a GRIB file's headers with ecCodes: seconds, plus file size / bytes per second.
GRIB_SECONDS, GRIB_BYTES_PER_SECOND = 10.0, 100_000
GRID = "expected a regular grid: an axis of latitudes, an axis of longitudes; interpolate, e.g. with `cdo remapbil`"

#: Units of temperature and specific humidity, lower case, from which relative humidity is computed.
TEMPERATURES, FRACTIONS = ("K", "k", "kelvin", "kelvins", "degk", ""), ("kg kg-1", "kg/kg", "1", "")

#: Ratio of the molar masses of water vapour and dry air, from the gas constants of the IFS (J/kg/K).
_EPSILON = 287.0597 / 461.5250
_WATER, _ICE = 273.16, 250.16  # K; all condensate is water above _WATER, and ice below _ICE


@dataclass(frozen=True, eq=False)
class Variable:
    """Variable of a file, without its values, which are read later."""

    origin: str  # file or store, shown in messages
    channels: tuple[str, ...]  # `name`, or `name@level` for each of L levels; short names
    units: str
    long_name: str
    times: np.ndarray  # [T], datetime64[s], in any order
    latitude: np.ndarray  # [H], degrees, float64
    longitude: np.ndarray  # [W], degrees, float64
    #: Function `load(times, levels, rows, columns)`, which reads the values at the indices `times` [t] and `levels` [l]
    #: in the window `rows`, `columns`, and returns float32 [t, l, h, w].
    load: Callable[[np.ndarray, list[int], slice, slice], np.ndarray]
    point_bytes: int  #: Bytes per point and level during reading: sum of packed, decoded, masked and float32 values.
    held: int = 1  #: Number of levels in a chunk; all of them are read together.
    #: Member, kind of statistics over time and similar properties, by name; equal in all variables of a channel.
    traits: Mapping[str, str] = field(default_factory=dict)


def short(channel: str) -> str:
    """Normalise `name` or `name@level` for comparison: use the short name, and remove trailing zeros of the level."""
    name, at, level = channel.partition("@")
    with contextlib.suppress(ValueError):
        level = f"{float(level):g}"
    return SHORT_NAMES.get(name, name) + at + level


def base(channel: str) -> str:
    """Return the short name of a channel's variable."""
    return short(channel).partition("@")[0]


@contextlib.contextmanager
def reading(origin: str | os.PathLike[str], advice: str = TORN) -> Iterator[None]:
    """Translate errors as `files.reading` does, and silence warnings of the reading library."""
    with files.reading(origin, advice), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def open_variables(
    path: Path, wanted: Collection[str], stack: contextlib.ExitStack
) -> tuple[list[Variable], list[str]]:
    """Open a GRIB or NetCDF file; return the `wanted` variables and the names of all variables.

    `stack` closes the file.
    """
    if path.is_dir():
        raise UserError(
            f"{path}: a folder; expected a file. List the folder's files in source.paths; for a Zarr store set "
            "source.kind to zarr"
        )
    with reading(path), open(path, "rb") as file:
        head = file.read(1024)
    # A heading of a weather bulletin may precede the word GRIB. Attributes of NetCDF files may contain this word.
    if b"GRIB" in head and not head.startswith((b"\x89HDF", b"CDF")):
        return _open_grib(path, wanted)
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        engine = "h5netcdf"
        with reading(path), store.open_file(path) as opened:  # refuses links to other files
            for name, values in opened.items():
                if base(name) in wanted and hasattr(values, "shape"):
                    store.check_filters(values)
                    _check_written(values)
    elif head.startswith((b"CDF\x01", b"CDF\x02")):
        engine = "scipy"
    else:
        content = f"begins with {head[:8]!r}" if head else "is empty"
        raise UserError(
            f"{path}: neither GRIB nor NetCDF: the file {content}. Unpack an archive, convert other forms of NetCDF "
            "with `nccopy -k nc4 IN OUT`, or fetch an incomplete file again"
        )
    with reading(path):
        return gridded(stack.enter_context(open_xarray(path, engine)), str(path), wanted)


def _check_written(values: Any) -> None:
    """Refuse an array that lacks values, also at the end of an unlimited dimension, and declares no fill value."""
    import h5py

    sizes = [max((len(scale) for _, scale in axis.items()), default=0) for axis in values.dims]
    declared = values.id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED
    if not declared and (any(map(int.__gt__, sizes, values.shape)) or (values.size and not store.is_written(values))):
        raise UserError(
            f"{values.file.filename}: a part of '{values.name.strip('/')}' was never written and would be read as 0. "
            "Write the file again, or copy the completely written times to another file"
        )


def open_xarray(place: str | Path, engine: str, **options: Any) -> xr.Dataset:
    """Open a file or store without reading values or decoding times.

    Integer attributes of `PACKING` become floats. Otherwise xarray would decode to the type of an integer
    `scale_factor`, which drops decimals or overflows.
    """
    import xarray as xr

    stored = xr.open_dataset(place, engine=engine, decode_cf=False, cache=False, **options)
    for variable in stored.variables.values():
        whole = [name for name in PACKING if np.asarray(variable.attrs.get(name, 1.0)).dtype.kind in "iu"]
        variable.attrs.update({name: np.float64(variable.attrs[name]) for name in whole})
    return xr.decode_cf(stored, decode_times=False)


def gridded(dataset: xr.Dataset, origin: str, wanted: Collection[str]) -> tuple[list[Variable], list[str]]:
    """Return the wanted variables of an xarray dataset, and the names of all variables."""
    names = [str(name) for name in dataset.data_vars]
    return [_gridded(dataset[name], origin) for name in names if base(name) in wanted], names


def _gridded(array: xr.DataArray, origin: str) -> Variable:
    """Describe a variable; raise `UserError` unless the variable is a series of states on a regular grid."""
    name, known = str(array.name), [name for names in AXES.values() for name in names]
    array = array.isel({dim: 0 for dim, size in array.sizes.items() if size == 1 and dim not in known})
    axes: dict[str, xr.DataArray] = {}
    for kind, names in AXES.items():
        if there := [array.coords[n] for n in names if n in array.coords and array.coords[n].ndim == 1]:
            axes[kind] = there[0]
    dims = [axis.dims[0] for axis in axes.values()]
    complete = {"time", "latitude", "longitude"} <= axes.keys() and array.size > 0
    # If a forecast has no `valid_time`, its times are start times, which cannot be used.
    called = {str(each) for name, axis in array.coords.items() for each in (name, axis.attrs.get("standard_name"))}
    dated = complete and (axes["time"].name == "valid_time" or LEADS.isdisjoint(called))
    if not dated or sorted(map(str, dims)) != sorted(map(str, array.dims)):
        sizes = ", ".join(f"{dim} ({size})" for dim, size in array.sizes.items()) or "none"
        if "expver" in array.dims:  # ERA5 and ERA5T, its preliminary form, each lack the times of the other
            raise UserError(
                f"{origin}: '{name}' has the dimensions {sizes}; `expver` separates ERA5 from ERA5T, its preliminary "
                f"form. Join both with xarray: `{name}.max('expver')`"
            )
        raise UserError(
            f"{origin}: '{name}' has the dimensions {sizes}; expected time ({' or '.join(AXES['time'])}; forecasts: "
            f"`valid_time`), latitude ({' or '.join(AXES['latitude'])}), longitude ({' or '.join(AXES['longitude'])}), "
            "and no other dimension but pressure levels. Interpolate other grids, e.g. with `cdo remapbil`. Of several "
            "members or forecasts, write one to a file, e.g. with xarray's `isel`"
        )
    units = {kind: str(axis.attrs.get("units", "")).strip().lower() for kind, axis in axes.items()}
    factor = PRESSURES.get(units.get("level", ""))
    if "level" in axes and not units["level"]:
        said = axes["level"].attrs
        standard, long = str(said.get("standard_name", "air_pressure")), str(said.get("long_name", "pressure"))
        factor = factor if standard == "air_pressure" and re.search("pressure|^level$", long.lower()) else None
    if rotated := ROTATED & {str(axis.attrs.get("standard_name")) for axis in axes.values()}:
        raise UserError(f"{origin}: '{name}' is on a rotated grid (standard_name {min(rotated)}); {GRID}")
    is_angle = all(ANGLE.fullmatch(units[kind]) for kind in ("latitude", "longitude"))
    if factor is None or not is_angle:
        raise UserError(
            f"{origin}: '{name}' has axes with the units {units}; expected pressure levels in hPa or Pa, latitudes and "
            "longitudes in degrees north and east. Convert or interpolate the axes, or correct their attributes `units`"
        )
    latitude, longitude, south_first = _regular(
        axes["latitude"].values, axes["longitude"].values, f"{origin}: '{name}'"
    )
    if south_first:
        array = array.isel({axes["latitude"].dims[0]: slice(None, None, -1)})
    channels: tuple[str, ...] = (short(name),)
    if "level" in axes:
        hectopascals = axes["level"].values * factor
        channels = tuple(f"{short(name)}@{value:g}" for value in hectopascals)
        if twice := [channel for channel in channels if channels.count(channel) > 1]:
            raise UserError(
                f"{origin}: '{name}' has several levels at {twice[0].partition('@')[2]} hPa, rounded to six digits; "
                "expected different levels. Select one of them, e.g. with xarray's `isel`"
            )
    values = array.variable
    if values.dtype.kind not in "fiub":
        raise UserError(f"{origin}: '{name}' has the type {values.dtype}; expected real numbers. Convert the values")
    for key, given in values.attrs.items():
        word = re.sub("[^a-z]", "", str(key).lower())
        packs = [each for each in np.ravel(given).tolist() if each == each and each not in (store.PLAIN.get(word), "")]
        if packs and key not in CF_NAMES and word in {*store.PLAIN, *store.MARKS}:
            raise UserError(
                f"{origin}: '{name}' has the attribute {key} ({given}), which is not a name of CF. Rename it to "
                "`scale_factor`, `add_offset`, `_FillValue`, `missing_value` or `valid_range`, or delete it if all "
                "values are plain"
            )
    if (sign := {**values.attrs, **values.encoding}.get("_Unsigned", "true")) not in ("true", "false"):
        raise UserError(f"{origin}: '{name}' has the attribute _Unsigned ({sign}); expected true or false")
    for mark in ("_FillValue", "missing_value"):
        if isinstance(text := values.encoding.get(mark), str) and re.search(r"\d", text):
            raise UserError(
                f"{origin}: '{name}' has the text '{text}' as its attribute {mark}; expected a number. Store the "
                f"number, e.g. with `ncatted -a {mark},{name},o,f,NUMBER FILE`"
            )

    def load(times: np.ndarray, levels: list[int], rows: slice, columns: slice) -> np.ndarray:
        asked = {"time": _compact(times), "level": _compact(levels), "latitude": rows, "longitude": columns}
        # Transpose after reading, because a lazy transposition makes the library read point by point.
        read = values.isel({axes[kind].dims[0]: asked[kind] for kind in axes}).load().transpose(*dims).values
        read = _without_missing(read, values, f"{origin}: '{name}'")
        if array.attrs.get("units") in NEVER_ZERO and (empty := ~read.any(axis=(-2, -1))).any():
            raise UserError(
                f"{origin}: '{name}' is 0 {array.attrs['units']} at all points of {empty.sum()} fields in this block "
                "of times, which may never have been written. Write them again, or exclude their times with `split`"
            )
        return np.asarray(read.reshape(len(times), len(levels), *read.shape[-2:]), np.float32)

    traits = {"stepType": str(array.attrs["GRIB_stepType"])} if "GRIB_stepType" in array.attrs else {}
    if statistics := re.search(r"time: (\w+)", str(array.attrs.get("cell_methods"))):
        traits["cell_methods"] = statistics[0]
    for member in (name for name in MEMBERS if name in array.coords and array.coords[name].size == 1):
        traits["number"] = str(array.coords[member].values.item()).removesuffix(".0")
    for level in (array.coords[name] for name in AXES["level"] if name in array.coords):
        if level.ndim or level.dtype.kind not in "iuf":
            continue
        unit = PRESSURES.get(str(level.attrs.get("units", "")).strip().lower(), 1.0)
        traits["level"] = f"{float(level) * unit:g}"
    chunk = values.encoding.get("preferred_chunks", {})
    stored = np.dtype(values.encoding.get("dtype", values.dtype))
    attrs = array.attrs
    return Variable(
        origin,
        channels,
        str(attrs.get("units", "")),
        str(attrs.get("long_name", attrs.get("standard_name", name))),
        _decoded_times(axes["time"].variable, origin),
        latitude,
        longitude,
        load,
        2 * stored.itemsize + 2 * values.dtype.itemsize + 4,
        chunk.get(axes["level"].dims[0], 1) if "level" in axes else 1,
        traits,
    )


def _without_missing(read: np.ndarray, variable: xr.Variable, where: str) -> np.ndarray:
    """Replace missing values by NaN if xarray does not; refuse values outside the file's valid range.

    NetCDF fills integers by default with a number that xarray masks only if the file repeats it in `_FillValue`. xarray
    takes `missing_value` in packed units, although files may give a float in unpacked units, and ignores `valid_min`,
    `valid_max` and `valid_range`.
    """
    encoding, attrs = variable.encoding, variable.attrs
    stored = np.dtype(encoding.get("dtype", variable.dtype))
    scale, offset = (float(np.ravel(encoding.get(name, plain))[0]) for name, plain in PACKING.items())
    step = abs(scale) if stored.kind in "iu" else 0.0
    is_packed = step > 0.0 and not PACKING.keys().isdisjoint(encoding)

    def unpacked(given: Any) -> list[float]:
        values = np.ravel([] if given is None else given)
        if values.dtype.kind not in "iuf" or (is_packed and values.dtype.kind == "f"):
            return [float(value) for value in values if values.dtype.kind == "f"]
        if "_Unsigned" in encoding:  # marks have the stored type, but values have the other sign
            other = f"{'u' if encoding['_Unsigned'] == 'true' else 'i'}{stored.itemsize}"
            values = values.astype(np.int64 if values.dtype.kind == "i" else np.uint64).astype(other)
        return [float(value) * scale + offset for value in values]

    marks = [encoding.get(name) for name in ("_FillValue", "missing_value")]
    fill = DEFAULT_FILL.get(stored.str[1:])
    missing = [each for given in marks for each in unpacked(given)]
    # The library fills integers whether or not the file has `missing_value`, but all values of a byte may be data.
    if marks[0] is None and (marks[1] is None or stored.itemsize > 1):
        missing += unpacked(fill)
    for value in missing:  # the attribute may have more digits than the values, or fewer
        rounding = step / 2.01 or max(abs(value), abs(offset)) / 2**22
        read = np.where(abs(read - value) <= rounding, np.nan, read)
    span = unpacked(attrs.get("valid_range"))
    if len(span) != 2:
        span = [(unpacked(attrs.get(name)) or [math.nan])[0] for name in ("valid_min", "valid_max")]
    if np.isnan(span).all():
        return read
    # A negative `scale` swaps limits in packed units. A single limit is in packed units if its type is an integer.
    in_stored_units = any(np.asarray(attrs.get(name, 0.0)).dtype.kind in "iu" for name in ("valid_min", "valid_max"))
    is_swapped = scale < 0 and (span[0] > span[1] or (in_stored_units and bool(np.isnan(span).any())))
    low, high = span[::-1] if is_swapped else span
    low, high = -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high
    if not step:  # the file's limits may have more digits than its values
        low, high = (float(read.dtype.type(end)) for end in (low, high))
    if count := int(((read < low - step / 2) | (read > high + step / 2)).sum()):  # comparisons are false for NaN
        raise UserError(
            f"{where}: values are outside the valid range, {low:g} to {high:g} ({count} in this block of times; "
            "attributes valid_min, valid_max, valid_range). Exclude their times with `split` or their points with "
            "`crop`, fill the values, or correct the attributes"
        )
    return read


def _regular(latitude: np.ndarray, longitude: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return latitudes from north to south, longitudes from west to east, and whether the latitudes were reversed.

    Raise `UserError` if the axes are not strictly monotonic, exceed ±90 degrees, or repeat a meridian.
    """
    latitude, longitude = latitude.astype(np.float64), longitude.astype(np.float64)
    if (abs(np.diff(longitude)) > 180.0).any():  # replace …, 355, 0, 5 by …, 355, 360, 365
        longitude = np.unwrap(longitude, period=360.0)
        if (np.diff(longitude) < 0).any():
            raise UserError(
                f"{where}: longitudes jump back at the meridian (0, …, 359), so the region is in two pieces. Sort "
                "the longitudes, e.g. with `cdo sellonlatbox,-180,180,-90,90 IN OUT`"
            )
    south_first = bool(latitude[0] < latitude[-1])
    latitude = latitude[::-1] if south_first else latitude
    # Comparisons are false for NaN, so NaN is refused, too.
    if not ((np.diff(latitude) < 0).all() and (np.diff(longitude) > 0).all() and abs(latitude).max() < 90.001):
        absent = np.isnan(latitude).any() or np.isnan(longitude).any()
        raise UserError(
            f"{where}: latitudes must be strictly monotonic and within ±90 degrees, longitudes strictly increasing"
            f"{'; here values are missing (equal to _FillValue, or in Zarr v2 to fill_value)' * bool(absent)}; {GRID}"
        )
    if np.ptp(longitude) > 359.9999:
        raise UserError(f"{where}: the first and the last longitude are the same meridian; leave out the last one")
    return latitude, longitude, south_first


def _decoded_times(clock: xr.Variable, origin: str) -> np.ndarray:
    """Decode CF times to datetime64[s]; raise `UserError` if this is impossible."""
    import xarray as xr

    units, calendar = (clock.attrs.get(key, "none") for key in ("units", "calendar"))
    try:
        if clock.dtype.kind != "M" and not UNITS.fullmatch(str(units).strip()):
            raise ValueError("unusual units")
        coder = xr.coders.CFDatetimeCoder(use_cftime=False, time_unit="s")
        times = np.asarray(xr.conventions.decode_cf_variable("time", clock, decode_times=coder).values)
        if times.dtype.kind != "M" or np.isnat(times).any():
            raise ValueError("not all times are dates")
    except Exception as error:
        raise UserError(
            f"{origin}: the times cannot be read (units: {units}, calendar: {calendar}); expected dates of the "
            "standard calendar, e.g. 'hours since 1900-01-01 00:00:00 +01:00'. Convert another calendar with xarray's "
            "`convert_calendar('standard', align_on='date')`"
        ) from error
    rounded = times.astype("datetime64[ms]") + np.timedelta64(500, "ms")  # hours in float32 are inexact
    return np.asarray(rounded.astype("datetime64[s]"))


def _compact(indices: Sequence[int] | np.ndarray) -> slice | np.ndarray:
    """Replace evenly spaced, ascending indices by a slice, which is fast in all formats."""
    indices = np.asarray(indices)
    steps = np.unique(np.diff(indices))
    if steps.size > 1 or (steps.size == 1 and steps[0] <= 0):
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1, int(steps[0]) if steps.size else 1)


def _open_grib(path: Path, wanted: Collection[str]) -> tuple[list[Variable], list[str]]:
    """Return the wanted variables of a GRIB file, one for each level, and the names of all variables.

    xarray is not used, because xarray fills missing messages with NaN, and silently takes the first of two messages of
    the same time.
    """
    try:
        from cfgrib import cfmessage, messages
    except ImportError as error:
        raise UserError(f"{path}: GRIB needs cfgrib, which is missing ({error}); pip install 'dlscale[grib]'") from None

    def indexed(path: Path, stop: float = 0.0) -> Any:
        # All keys but the last distinguish variables; the last key distinguishes the times of a variable.
        keys = ["cfVarName", "shortName", "units", "typeOfLevel", "true level", "md5GridSection", *TRAITS, "valid_time"]
        computed = {**cfmessage.COMPUTED_KEYS, "true level": (_level, None)}
        return messages.FileIndex.from_fieldset(stream, keys, computed)

    _silence_eccodes()
    stream = messages.FileStream(str(path), errors="raise")
    # ecCodes may crash on damaged messages, so another process reads the headers first.
    check_structure([path], indexed, "ecCodes", seconds=GRIB_SECONDS + path.stat().st_size / GRIB_BYTES_PER_SECOND)
    with reading(path):
        index = indexed(path)
        _check_end(stream, (offset for _, offsets in index.iter_index() for offset in offsets))
    # time and offset of each message, by channel, unit, grid and traits
    series: dict[tuple[str, str, str, tuple[tuple[str, str], ...]], list[tuple[int, Any]]] = {}
    for (cf_name, own, unit, kind, level, grid, *given, time), offsets in index.iter_index():
        name, traits = own if cf_name in ("unknown", "undef") else cf_name, _grib_traits(kind, level, *given)
        if kind in PRESSURE_LEVELS:
            name = f"{name}@{level:g}"
        series.setdefault((name, unit, grid, tuple(traits.items())), []).extend((time, offset) for offset in offsets)
    names = list(dict.fromkeys(base(name) for name, *_ in series))
    with reading(path):
        return [
            replace(_messages(path, stream, name, its), traits=dict(traits))
            for (name, *_, traits), its in series.items()
            if base(name) in wanted
        ], names


def _grib_traits(kind: str, level: Any, edition: int, number: Any, mean: Any, step: str, span: str) -> dict[str, str]:
    """Return the traits of a message, given `typeOfLevel`, `level` and the values of `TRAITS`."""
    traits = {"number": "0" if number == "undef" else str(number), "derivedForecast": str(mean), "stepType": step}
    if kind not in PRESSURE_LEVELS:
        # GRIB 1 and GRIB 2 name the level of some variables differently: for 2 m temperature, GRIB 1 has `surface`.
        traits[f"typeOfLevel and level (GRIB {edition})"] = f"{kind} {str(level).removesuffix('.0')}"
    if step != "instant" and (ends := re.fullmatch(r"(\d+)(\w*)-(\d+)(\w*)", str(span))):
        traits["length of stepRange"] = f"{int(ends[3]) - int(ends[1])} {ends[4] or 'h'}"
    return traits


def _level(message: Any) -> float:
    """Return the exact level of a GRIB message: hPa on pressure levels, else in the unit of its type.

    ecCodes truncates the levels of a GRIB 2 message: 150 Pa would be 1 hPa.
    """
    kind = message["typeOfLevel"]
    if kind not in PRESSURE_LEVELS:
        return float(message["level:float"])
    if message["edition"] == 2:
        value, exponent = (message[f"{key}OfFirstFixedSurface"] for key in ("scaledValue", "scaleFactor"))
        if abs(exponent) < 128:  # else missing
            return float(value / 10.0**exponent / 100.0)
    return float(message["level"] / PRESSURE_LEVELS[kind])


def _check_end(stream: Any, offsets: Iterable[int | tuple[int, int]]) -> None:
    """Raise `UserError` if messages follow the last message in the index.

    ecCodes takes a damaged message for the end of the file.
    """
    # If a message has several fields, an offset is a pair: first byte of the message, number of the field.
    last = max(offset[0] if isinstance(offset, tuple) else offset for offset in offsets)
    with open(stream.path, "rb") as file:
        file.seek(last + stream[last]["totalLength"])
        if any(b"GRIB" in block for block in iter(lambda: file.read(2**20), b"")):
            raise UserError(
                f"{stream.path}: the message that follows the message at byte {last} cannot be decoded; {TORN}"
            )


def _messages(path: Path, stream: Any, channel: str, entries: list[tuple[int, Any]]) -> Variable:
    """Describe the GRIB messages of a channel on a grid as a variable."""
    first, where = stream[entries[0][1]], f"{path}: '{channel}'"
    kind, order = first["gridType"], [key for key in SCANNING if first.get(key)]
    if kind not in ("regular_ll", "regular_gg"):
        raise UserError(f"{where} is on a grid of type {kind}; {GRID}")
    if order:
        raise UserError(f"{where} is not stored along parallels from west to east ({order[0]} is set); {GRID}")
    # The order of the values; ecCodes sorts `distinctLongitudes`.
    latitudes, longitudes = (np.reshape(first[key], (first["Nj"], first["Ni"])) for key in ("latitudes", "longitudes"))
    latitude, longitude, south_first = _regular(latitudes[:, 0], longitudes[0], where)

    def load(times: np.ndarray, levels: list[int], rows: slice, columns: slice) -> np.ndarray:
        out = np.empty((len(times), 1, rows.stop - rows.start, columns.stop - columns.start), np.float32)
        with open(path, "rb") as file:
            for place, number in enumerate(times):
                values = stream.message_from_file(file, offset=entries[number][1])["values"]
                grid = np.reshape(values, (latitude.size, longitude.size))
                out[place, 0] = (grid[::-1] if south_first else grid)[rows, columns]
        return out

    times = np.array([time for time, _ in entries], "datetime64[s]")
    units, long_name = str(first["units"]), str(first["name"])
    # Copies of a value during reading: packed, float64 in ecCodes, float64 in Python, float32.
    return Variable(str(path), (channel,), units, long_name, times, latitude, longitude, load, point_bytes=29)


@functools.cache
def _silence_eccodes() -> IO[str]:
    """Silence the messages of ecCodes, whose errors also raise exceptions; the cache keeps the file open."""
    import eccodes

    nowhere = open(os.devnull, "w")  # noqa: SIM115
    eccodes.codes_context_set_logging(nowhere)
    return nowhere


def saturation_pressure(temperature: np.ndarray) -> np.ndarray:
    """Return the saturation vapour pressure, Pa, over water, ice or a mixture, for temperatures in K.

    The formula is Tetens', as in ERA5 (ECMWF 2016, IFS Documentation Cy41r2, part IV, eq. 7.4 to 7.6).
    """
    t = np.asarray(temperature, np.float64)
    water = 611.21 * np.exp(17.502 * (t - 273.16) / (t - 32.19))
    ice = 611.21 * np.exp(22.587 * (t - 273.16) / (t + 0.7))
    share = np.clip((t - _ICE) / (_WATER - _ICE), 0.0, 1.0) ** 2
    return np.asarray(share * water + (1.0 - share) * ice)


def relative_humidity(temperature: np.ndarray, specific_humidity: np.ndarray, pressure: float) -> np.ndarray:
    """Return the relative humidity, %, for temperature (K), specific humidity (kg/kg) and pressure (Pa).

    As in ERA5, the relative humidity may be below 0 or above 100.
    """
    q = np.asarray(specific_humidity, np.float64)
    vapour = pressure * q / (_EPSILON + (1.0 - _EPSILON) * q)
    return np.asarray(100.0 * vapour / saturation_pressure(temperature))


def with_humidity(variables: list[Variable], wanted: Collection[str]) -> list[Variable]:
    """Add relative humidity if it is wanted but missing, and temperature and specific humidity are available."""
    by_name = {name: [v for v in variables if base(v.channels[0]) == name] for name in "rtq"}
    if by_name["r"] or not any(base(channel) == "r" for channel in wanted):
        return variables
    same = ("times", "latitude", "longitude")
    pairs = [
        (t, q)
        for t in by_name["t"]
        for q in by_name["q"]
        if t.origin == q.origin and all(np.array_equal(getattr(t, axis), getattr(q, axis)) for axis in same)
    ]
    return [*variables, *(_humidity(t, q) for t, q in pairs)]


def _humidity(t: Variable, q: Variable) -> Variable:
    """Describe relative humidity on the levels that both variables have; its values are computed during reading."""
    for variable, units in ((t, TEMPERATURES), (q, FRACTIONS)):
        if variable.units.lower().replace("**", "").replace("^", "") not in units:
            raise UserError(
                f"{variable.origin}: '{base(variable.channels[0])}' is in '{variable.units}'; expected {units[0]}, to "
                "compute the relative humidity. Convert the unit, or add the relative humidity `r` to the files"
            )
    places = [[channel.partition("@")[2] for channel in variable.channels] for variable in (t, q)]
    levels = [level for level in places[1] if level and level in places[0]]

    def load(times: np.ndarray, chosen: list[int], rows: slice, columns: slice) -> np.ndarray:
        kelvin, moisture = (
            variable.load(times, [its.index(levels[number]) for number in chosen], rows, columns)
            for variable, its in zip((t, q), places, strict=True)
        )
        out = np.empty_like(kelvin)
        for at in np.ndindex(out.shape[:3]):  # a circle of latitude at a time, to save memory for float64
            out[at] = relative_humidity(kelvin[at], moisture[at], 100.0 * float(levels[chosen[at[1]]]))
        return out

    return replace(
        q,
        channels=tuple(f"r@{level}" for level in levels),
        units="%",
        long_name="Relative humidity, from temperature and specific humidity",
        load=load,
        point_bytes=t.point_bytes + q.point_bytes,
        held=max(t.held, q.held),
    )


Period = tuple[dt.date, dt.date]  # first and last day, inclusive

#: NetCDF's default fill values of integers, by type and bytes; a file with such a value as data must set `_FillValue`.
DEFAULT_FILL = {
    **{"i1": -127, "i2": -32767, "i4": -2147483647, "i8": -9223372036854775806},
    **{"u1": 255, "u2": 65535, "u4": 4294967295, "u8": 18446744073709551614},
}

#: Units of times that xarray reads as UDUNITS defines them. Without a sign, UDUNITS and xarray read a zone differently.
UNITS = re.compile(
    r"[a-z]+ since \d{4}-\d{1,2}-\d{1,2}([T ]\d{1,2}(:\d{1,2}){0,2}(\.\d*)?)? ?(Z|UTC|GMT|[+-]\d{1,2}(:?\d\d)?)?",
    re.IGNORECASE,
)

#: CF's names of attributes that pack values or mark missing values; other names, such as ScaleFactor, are refused.
CF_NAMES = ("scale_factor", "add_offset", "_FillValue", "missing_value", "valid_min", "valid_max", "valid_range")

#: Units of fields that are never 0 at all points. HDF5 reads 0 where a part of a chunk was never written.
NEVER_ZERO = ("K", "Kelvin", "kelvin", "Pa", "hPa")

#: Attributes of packed values, with their values for plain values.
PACKING = {"scale_factor": 1.0, "add_offset": 0.0}

#: Maximum valid value; larger values mark missing data (3.4e38 in GRIB, 9.97e36 in NetCDF).
LARGEST = 1e30


def wanted_names(dataset: Era5Dataset) -> set[str]:
    """Return the short names of the variables that are needed for a dataset's channels."""
    names = {base(channel) for channel in dataset.channels}
    return names | {"t", "q"} if "r" in names else names


def open_source(dataset: Era5Dataset, part: Part, paths: list[Path]) -> Era5Source:
    """Open the raw GRIB or NetCDF files of a part of a dataset."""
    if isinstance(dataset.source, Era5Zarr):  # the files were cropped and averaged when they were fetched
        dataset = dataset.model_copy(update={"crop": None, "downsample": 1})
    dataset = dataset.model_copy(update={"channels": dataset.channels or list(SIMULATED_CHANNELS)})
    wanted, names = wanted_names(dataset), list[str]()
    with contextlib.ExitStack() as stack:
        variables: list[Variable] = []
        for path in paths:
            found, its_names = open_variables(path, wanted, stack)
            variables, names = variables + found, names + its_names
        source = Era5Source(dataset, variables, names, part.period, f"part {part.label}")
        source.files = stack.pop_all()
    return source


@dataclass(frozen=True, eq=False)
class _Segment:
    """Part of a source that is read from a variable.

    The variable's `levels` [c] are the source's channels `positions` [c]; the variable's times `indices` [t] are the
    source's times `rows` [t].
    """

    variable: Variable
    levels: list[int]
    positions: list[int]
    indices: np.ndarray
    rows: np.ndarray  # ascending


class Era5Source(Source):
    """Source with the field `fields` [T, C, H, W] in physical units, cropped and averaged as the dataset requires.

    The times are those in the period at multiples of `step_hours` since 1970-01-01T00 UTC; if `step_hours` is None, all
    times in the period.
    Raise `UserError` for missing or repeated channels or times, and for grids that differ or are smaller than the crop.
    """

    def __init__(
        self,
        dataset: Era5Dataset,
        variables: list[Variable],
        names: list[str],
        period: Period | None,
        label: str,
        advice: str = TORN,
    ) -> None:
        self.files = contextlib.ExitStack()  # open files, which are closed with the source
        self._label, self._advice, self._downsample = label, advice, dataset.downsample
        channels = [short(channel) for channel in dataset.channels]
        holders = _holders(channels, with_humidity(variables, channels), names, label)
        used = list(dict.fromkeys(variable for its in holders.values() for variable in its))
        first = used[0]
        _check_alike(holders, first)
        height, width = dataset.crop or (first.latitude.size, first.longitude.size)
        rows, columns = (size // self._downsample for size in (height, width))
        if height > first.latitude.size or width > first.longitude.size or not (rows and columns):
            raise UserError(
                f"{label}: crop {height} x {width} or downsample {self._downsample} does not fit the grid of "
                f"{first.latitude.size} latitudes and {first.longitude.size} longitudes; "
                "reduce crop or downsample"
            )
        self._window = slice(0, rows * self._downsample), slice(0, columns * self._downsample)
        self.times = _common_times(holders, period, dataset.step_hours, label)
        self._segments = [segment for variable in used if (segment := self._segment(variable, channels)).rows.size]
        units = tuple(holders[channel][0].units for channel in channels)
        shape = (self.times.size, len(channels), rows, columns)
        self.fields: tuple[Field, ...] = (Field("fields", tuple(dataset.channels), units, shape, 1),)
        self.bytes_per_row = 4 * math.prod(shape[1:]) + max(map(self._footprint, self._segments))
        axes = {"latitude": first.latitude[self._window[0]], "longitude": first.longitude[self._window[1]]}
        self.coordinates = {name: axis.reshape(-1, self._downsample).mean(axis=1) for name, axis in axes.items()}
        self.row_coordinates = {"time": self.times.astype(np.int64) / 3600.0}
        self.summed = ("fields",)  # the climatology needs sums of this field
        self.attributes: dict[str, Any] = {
            "long_names": [holders[channel][0].long_name for channel in channels],
            "source_files": list(dict.fromkeys(segment.variable.origin for segment in self._segments)),
            "conventions": "latitude north to south, longitude west to east (degrees); time in hours since 1970-01-01",
        }

    def _segment(self, variable: Variable, channels: list[str]) -> _Segment:
        positions = [position for position, channel in enumerate(channels) if channel in variable.channels]
        levels = [variable.channels.index(channels[position]) for position in positions]
        indices = np.flatnonzero(np.isin(variable.times, self.times))
        indices = indices[np.argsort(variable.times[indices])]
        return _Segment(variable, levels, positions, indices, np.searchsorted(self.times, variable.times[indices]))

    def _footprint(self, segment: _Segment) -> int:
        """Return an upper bound of the bytes that a row of a segment needs while it is read and averaged."""
        variable, asked = segment.variable, len(segment.levels)
        levels = min(asked * variable.held, len(variable.channels))
        read = variable.point_bytes * levels * variable.latitude.size * variable.longitude.size
        return read + 8 * asked * self._window[0].stop * self._window[1].stop * (self._downsample > 1)

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return times [start, stop) as `fields` [stop - start, C, H, W], float32.

        Raise `UserError` for missing values.
        """
        out = np.empty((stop - start, *self.fields[0].shape[1:]), np.float32)
        for segment in self._segments:
            low, high = np.searchsorted(segment.rows, (start, stop))
            if low == high:
                continue
            place = (segment.rows[low:high, None] - start, segment.positions)
            with reading(segment.variable.origin, self._advice):
                # The loaded values have no name, so that their memory is freed before the next read.
                out[place] = block_average(
                    segment.variable.load(segment.indices[low:high], segment.levels, *self._window),
                    self._downsample,
                    (2, 3),
                )
        if not (out.max() < LARGEST and out.min() > -LARGEST):  # comparisons are false for NaN
            self._refuse_missing(out, start)
        return {"fields": out}

    def _refuse_missing(self, values: np.ndarray, start: int) -> None:
        bad = np.argwhere(~(abs(values) < LARGEST))
        row, channel, line, column = bad[0]
        raise UserError(
            f"{self._label}: channel '{self.fields[0].channels[channel]}' has no value at "
            f"{_text(self.times[start + row])}, latitude {self.coordinates['latitude'][line]:g}, longitude "
            f"{self.coordinates['longitude'][column]:g} ({len(bad)} missing values in this block of times). Copy an "
            "incomplete file again, exclude the times with `split` or the points with `crop`, or fill the values"
        )

    def close(self) -> None:
        self.files.close()


def _holders(channels: list[str], variables: list[Variable], names: list[str], label: str) -> dict[str, list[Variable]]:
    """Return the variables that contain each channel; raise `UserError` if a channel is missing."""
    holders = {channel: [v for v in variables if channel in v.channels] for channel in channels}
    for channel in (channel for channel, its in holders.items() if not its):
        levels = dict.fromkeys(each for v in variables for each in v.channels if base(each) == base(channel))
        there = list(levels or dict.fromkeys(names)) or ["no variables (groups are not read)"]
        most = ", ".join(there[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
        raise UserError(
            f"{label}: no file contains the channel '{channel}'{nearest(channel, there)}; the files contain: {most}"
        )
    return holders


def _check_alike(holders: dict[str, list[Variable]], first: Variable) -> None:
    """Raise `UserError` unless all variables have the grid of `first`, and those of a channel the same unit and traits.

    Rounding errors, and longitudes that differ by 360 degrees, are allowed.
    """
    for channel, variables in holders.items():
        holder = dict[str, Variable]()  # first variable that has a trait
        for other, trait in ((variable, trait) for variable in variables for trait in variable.traits):
            one = holder.setdefault(trait, other)
            if one.traits[trait] != other.traits[trait]:
                raise UserError(
                    f"'{channel}' has fields of different kinds: {trait} is {one.traits[trait]} in {one.origin}, "
                    f"{other.traits[trait]} in {other.origin}; expected one kind. Copy one kind to another file: GRIB "
                    "with `grib_copy -w KEY=VALUE IN OUT` (keys number, stepType, stepRange, typeOfLevel, level), "
                    "NetCDF with xarray"
                )
        for other in variables:
            alike = (
                other.units.replace("**", "") == variables[0].units.replace("**", "")  # m s**-1 is m s-1
                and (other.latitude.shape, other.longitude.shape) == (first.latitude.shape, first.longitude.shape)
                and abs(first.latitude - other.latitude).max() < 1e-3
                and abs((first.longitude - other.longitude + 180.0) % 360.0 - 180.0).max() < 1e-3
            )
            if not alike:
                found, expected = (
                    f"{v.latitude.size} x {v.longitude.size} from {v.latitude[0]:g}, {v.longitude[0]:g} in {v.origin}"
                    for v in (other, first)
                )
                raise UserError(
                    f"'{channel}' is on another grid or in other units: {found}, in '{other.units}'; expected "
                    f"{expected}, in '{variables[0].units}'. Convert all to the same grid, and each channel to one unit"
                )


def _common_times(
    holders: dict[str, list[Variable]], period: Period | None, step_hours: int | None, label: str
) -> np.ndarray:
    """Return the times [T], ascending, which have a constant step and which each channel has exactly once.

    Raise `UserError` if times are missing or repeated, or if the step changes.
    """
    kept, days = dict[str, np.ndarray](), list[Any]()
    for channel, variables in holders.items():
        there = np.sort(np.concatenate([variable.times for variable in variables]))
        first, last = np.array(period or (there[0], there[-1]), "datetime64[D]")
        times = there[(there >= first) & (there < last + 1)]
        days += times[[0, -1]].astype("datetime64[D]").tolist() if times.size else []
        if step_hours:
            times = times[times.astype(np.int64) % (3600 * step_hours) == 0]
        if there[0] >= first + 1 or not there[-1] >= last or not times.size:
            at = f", at multiples of step_hours ({step_hours}) from midnight UTC" if step_hours else ""
            raise UserError(
                f"{label}: '{channel}' covers {_text(there[0])} to {_text(there[-1])}; expected {first} to {last}"
                f"{at}. Set the dataset's `split` within the covered times, change `step_hours`, add files, or fetch "
                "an incomplete file again"
            )
        kept[channel] = times
    every = np.unique(np.concatenate(list(kept.values())))
    steps, counts = np.unique(np.diff(every), return_counts=True)
    step = np.timedelta64(step_hours or 1, "h") if step_hours or not steps.size else steps[counts.argmax()]
    begin, end = every[0], every[-1] + np.timedelta64(1, "s")
    if period and (step_hours or steps.size):  # the first and the last day must be complete
        begin -= (begin - np.datetime64(min(days))) // step * step
        end = np.datetime64(max(days)) + 1
    expected = np.arange(begin, end, step)
    for channel, times in kept.items():
        twice = times[1:][times[1:] == times[:-1]]
        if (wrong := np.union1d(np.setxor1d(times, expected), twice)).size:
            origins = [variable.origin for variable in holders[channel] if wrong[0] in variable.times]
            overlap = len(origins) > 1 and wrong[0] in twice
            raise UserError(
                f"{label}: '{channel}' at {_text(wrong[0])} is missing, repeated or off the step of "
                f"{step / np.timedelta64(1, 'h'):g} h ({wrong.size} such times; in "
                f"{' and '.join(origins[:2]) or 'no file'}). {'Cut repeated times from one file. ' * overlap}Add "
                "missing files, or set `split` or `step_hours` (monthly means have no step). Of several members, "
                "forecast steps or kinds of levels, select one: for GRIB `grib_copy -w number=0 IN OUT`"
            )
    return expected


def _text(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]")).replace("T", " ")
