"""Lays the variables of atmospheric files side by side, as one stream of states [T, C, H, W].

Files are opened without their values and checked: every channel once at every time, at one step, on one grid. Then only
the wanted variables, levels, times and windows are read.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlscale.core.errors import UserError, nearest
from dlscale.core.files import TORN
from dlscale.data.kind import Part
from dlscale.data.source import Source, block_average
from dlscale.data.store import Field
from dlscale.datasets.era5.kind import SIMULATED_CHANNELS, Era5Dataset, Era5Zarr
from dlscale.datasets.era5.variables import Variable, base, open_variables, reading, short, with_humidity

Period = tuple[dt.date, dt.date]  # first and last day, inclusive

#: Larger values are none: 3.4e38 (GRIB) and 9.97e36 (NetCDF) stand where nothing is.
LARGEST = 1e30
_NONE = np.timedelta64(0, "s")


def wanted_names(dataset: Era5Dataset) -> set[str]:
    """Return the short names of the variables that a dataset's channels are made of."""
    names = {base(channel) for channel in dataset.channels}
    return names | {"t", "q"} if "r" in names else names


def open_source(dataset: Era5Dataset, part: Part, paths: list[Path]) -> Era5Source:
    """Open the raw files of one part, GRIB or NetCDF."""
    if isinstance(dataset.source, Era5Zarr):  # cropped and averaged when they were fetched
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
    """A variable in a source: `levels` [c] are the channels `positions` [c], times `indices` [t] the `rows` [t]."""

    variable: Variable
    levels: list[int]
    positions: list[int]
    indices: np.ndarray
    rows: np.ndarray  # ascending


class Era5Source(Source):
    """One field `fields` [T, C, H, W] in physical units, cropped and averaged as the dataset asks.

    Its times are those of the period at multiples of `step_hours` from midnight UTC; None: all. Missing or repeated
    channels or times, and grids that differ or are smaller than the crop, are a `UserError`.
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
        self.files = contextlib.ExitStack()  # open files, closed with the source
        self._label, self._advice, self._downsample = label, advice, dataset.downsample
        channels = [short(channel) for channel in dataset.channels]
        holders = _holders(channels, with_humidity(variables, channels), names, label)
        used = list(dict.fromkeys(variable for its in holders.values() for variable in its))
        first = _alike(used)
        height, width = dataset.crop or (first.latitude.size, first.longitude.size)
        rows, columns = (size // self._downsample for size in (height, width))
        if height > first.latitude.size or width > first.longitude.size or not (rows and columns):
            raise UserError(
                f"{label}: crop {height} x {width} or downsample {self._downsample} does not fit the grid of "
                f"{first.latitude.size} latitudes and {first.longitude.size} longitudes; choose smaller ones"
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
        self.summed = ("fields",)  # for the climatology
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
        """Bound the bytes that one row of a segment needs while it is read and averaged."""
        variable, asked = segment.variable, len(segment.levels)
        levels = min(asked * variable.held, len(variable.channels))
        read = variable.point_bytes * levels * variable.latitude.size * variable.longitude.size
        return read + 8 * asked * self._window[0].stop * self._window[1].stop * (self._downsample > 1)

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return times [start, stop) as `fields` [stop - start, C, H, W], float32; a missing value is a `UserError`."""
        out = np.empty((stop - start, *self.fields[0].shape[1:]), np.float32)
        for segment in self._segments:
            low, high = np.searchsorted(segment.rows, (start, stop))
            if low == high:
                continue
            place = (segment.rows[low:high, None] - start, segment.positions)
            with reading(segment.variable.origin, self._advice):
                # The values get no name, so that they are gone before the next ones come.
                out[place] = block_average(
                    segment.variable.load(segment.indices[low:high], segment.levels, *self._window),
                    self._downsample,
                    (2, 3),
                )
        if not (out.max() < LARGEST and out.min() > -LARGEST):  # false of NaN, too
            self._refuse_missing(out, start)
        return {"fields": out}

    def _refuse_missing(self, values: np.ndarray, start: int) -> None:
        bad = np.argwhere(~(abs(values) < LARGEST))
        row, channel, line, column = bad[0]
        raise UserError(
            f"{self._label}: channel '{self.fields[0].channels[channel]}' has no value at "
            f"{_text(self.times[start + row])} at latitude {self.coordinates['latitude'][line]:g}, longitude "
            f"{self.coordinates['longitude'][column]:g} ({len(bad)} such values in this block); set `split` around "
            "such times, `crop` such places, or fill them"
        )

    def close(self) -> None:
        self.files.close()


def _holders(channels: list[str], variables: list[Variable], names: list[str], label: str) -> dict[str, list[Variable]]:
    """Return the variables that hold each channel."""
    holders = {channel: [v for v in variables if channel in v.channels] for channel in channels}
    for channel in (channel for channel, its in holders.items() if not its):
        levels = dict.fromkeys(each for v in variables for each in v.channels if base(each) == base(channel))
        there = list(levels or dict.fromkeys(names))
        most = ", ".join(there[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
        raise UserError(f"{label}: no file holds the channel '{channel}'{nearest(channel, there)}; there are: {most}")
    return holders


def _alike(variables: list[Variable]) -> Variable:
    """Return the first variable; others on another grid, or a channel in other units, are refused."""
    first, units = variables[0], dict[str, Variable]()
    for other in variables:
        same = first.latitude.shape == other.latitude.shape and first.longitude.shape == other.longitude.shape
        if same:  # up to the rounding of file formats, and to whole turns
            east = (first.longitude - other.longitude + 180.0) % 360.0 - 180.0
            same = max(abs(first.latitude - other.latitude).max(), abs(east).max()) < 1e-3
        if not same:
            grids = (f"{v.latitude.size} x {v.longitude.size} from {v.latitude[0]:g}, {v.longitude[0]:g} in {v.origin}"
                     for v in (other, first))  # fmt: skip
            raise UserError(f"'{other.channels[0]}' is on another grid: {', but '.join(grids)}; bring all to one grid")
        for channel in other.channels:
            one = units.setdefault(channel, other)
            if one.units.replace("**", "") != other.units.replace("**", ""):  # m s**-1 is m s-1
                raise UserError(
                    f"{other.origin}: '{channel}' has units '{other.units}', but '{one.units}' in {one.origin}; "
                    "convert one of them"
                )
    return first


def _common_times(
    holders: dict[str, list[Variable]], period: Period | None, step_hours: int | None, label: str
) -> np.ndarray:
    """Return the times [T], ascending, that every channel has exactly once, at one step."""
    kept: dict[str, np.ndarray] = {}
    for channel, variables in holders.items():
        times = np.sort(np.concatenate([variable.times for variable in variables]))
        if period:
            first, end = np.datetime64(period[0], "D"), np.datetime64(period[1], "D") + 1
            if times[0] >= first + 1 or times[-1] < end - 1:
                raise UserError(
                    f"{label}: needs {period[0]} to {period[1]}, but '{channel}' covers {_text(times[0])} to "
                    f"{_text(times[-1])}; set the dataset's `split` within that, or add files"
                )
            times = times[(times >= first) & (times < end)]
        if step_hours:
            times = times[times.astype(np.int64) % (3600 * step_hours) == 0]
        if not times.size:
            raise UserError(
                f"{label}: '{channel}' has no time in the period at a multiple of step_hours ({step_hours}) from "
                "midnight UTC; change `split` or `step_hours`"
            )
        if (twice := times[1:][np.diff(times) == np.timedelta64(0)]).size:
            places = dict.fromkeys(variable.origin for variable in variables if twice[0] in variable.times)
            raise UserError(
                f"{label}: channel '{channel}' stands twice at {_text(twice[0])}, in {' and '.join(list(places)[:2])}; "
                "give each time once: of several members, forecast steps or types of levels choose one beforehand, "
                "of GRIB with `grib_copy -w number=0 IN OUT`"
            )
        kept[channel] = times
    every = functools.reduce(np.union1d, kept.values())
    for channel, times in kept.items():
        if (missing := np.setdiff1d(every, times)).size:
            raise UserError(
                f"{label}: channel '{channel}' is missing at {_text(missing[0])} ({missing.size} such times), where "
                "others are there; add the file that holds it"
            )
    steps, counts = np.unique(np.diff(every), return_counts=True)
    step = np.timedelta64(3600 * step_hours, "s") if step_hours else steps[counts.argmax()] if steps.size else _NONE
    if (odd := np.flatnonzero(np.diff(every) != step)).size:
        raise UserError(
            f"{label}: {_text(every[odd[0] + 1])} follows {_text(every[odd[0]])}, expected one step of "
            f"{step / np.timedelta64(1, 'h'):g} h; add the file with the times between, set `split` around the gap, or "
            "set `step_hours` (months have none: means over months are not supported)"
        )
    return every


def _text(time: np.datetime64) -> str:
    return str(time.astype("datetime64[m]")).replace("T", " ")
