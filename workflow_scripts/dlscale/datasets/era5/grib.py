"""Variables of GRIB files, through cfgrib's index of messages.

xarray's view of the index does not do here: it makes one hypercube of what may be several, fills messages that are
not there with NaN, and takes the first of two at one time without a word.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

import numpy as np

from dlscale.core.errors import UserError
from dlscale.datasets.era5.variables import GRID, TORN, Variable, reading, regular, usable


def open_grib(path: Path, wanted: Collection[str]) -> list[Variable]:
    """List the variables of a GRIB file, each level of each as one, through cfgrib's index of messages.

    xarray's view of the index does not do here: it makes one hypercube of what may be several, fills
    messages that are not there with NaN, and takes the first of two at one time without a word.
    """
    from cfgrib import cfmessage, messages

    _silence_eccodes()
    stream = messages.FileStream(str(path), errors="raise")
    keys = ["cfVarName", "shortName", "typeOfLevel", "level", "valid_time", "md5GridSection"]
    with reading(path):
        index = messages.FileIndex.from_fieldset(stream, keys, cfmessage.COMPUTED_KEYS)  # leaves no file behind
        _check_end(stream, max((offset for _, offsets in index.iter_index() for offset in offsets), key=_position))
    series: dict[tuple[str, str, float, str], list[tuple[int, Any]]] = {}
    for (cf_name, short, kind, level, time, grid), offsets in index.iter_index():
        name = short if cf_name in ("unknown", "undef") else cf_name
        series.setdefault((name, kind, level, grid), []).extend((time, offset) for offset in offsets)

    levels: dict[tuple[str, str], set[float]] = {}
    for name, kind, level, _ in series:
        levels.setdefault((name, kind), set()).add(level)
    makers: dict[str, Callable[[], Variable]] = {}
    for (name, kind, level, grid), entries in series.items():
        hectopascals = level / 100.0 if kind == "isobaricInPa" else level
        levelled = kind.startswith("isobaric") or len(levels[name, kind]) > 1
        channel = f"{name}@{hectopascals:g}" if levelled else name
        makers[f"{channel}@{kind}@{grid}"] = functools.partial(_message_series, path, stream, channel, entries)
    with reading(path):
        return usable(makers, wanted, str(path))


def _position(offset: int | tuple[int, int]) -> int:
    """Byte at which a field's message begins; a field that shares its message with others has its number, too."""
    return offset[0] if isinstance(offset, tuple) else offset


def _check_end(stream: Any, last: int | tuple[int, int]) -> None:
    """Refuse a file with more messages after the last that was found: ecCodes takes a damaged one for the end."""
    with open(stream.path, "rb") as file:
        file.seek(_position(last) + stream[_position(last)]["totalLength"])
        if any(b"GRIB" in block for block in iter(lambda: file.read(2**20), b"")):
            raise UserError(f"{stream.path}: the message after byte {_position(last)} cannot be decoded; {TORN}")


def _message_series(path: Path, stream: Any, channel: str, entries: list[tuple[int, Any]]) -> Variable:
    """Describe the GRIB messages of one variable and level: (seconds since 1970, offset in the file) each."""
    from cfgrib.messages import MISSING_VAUE_INDICATOR as MISSING  # cfgrib's spelling

    times, offsets = zip(*entries, strict=True)
    if "undef" in times:
        raise UserError(f"{path}: '{channel}' has messages without a time; expected one at each time")
    first = stream[offsets[0]]
    unusual = [key for key in ("iScansNegatively", "jPointsAreConsecutive", "alternativeRowScanning") if first.get(key)]
    if first["gridType"] not in ("regular_ll", "regular_gg") or unusual:
        problem = f"scanned in an unusual order ({unusual[0]})" if unusual else f"on a grid of type {first['gridType']}"
        raise UserError(f"{path}: '{channel}' is {problem}; {GRID}")
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

    return regular(
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
