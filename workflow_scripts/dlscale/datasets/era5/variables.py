"""A variable of an atmospheric file on a regular grid, whatever the file's format.

Notation: `T` times, `L` levels of a variable, `H` latitudes (north to south), `W` longitudes. Times are numpy
`datetime64[s]`, UTC. Levels are in hPa, whatever the file counts in.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dlscale.core.errors import UserError

TORN = "the file may be torn or damaged: fetch or make it again"
GRID = "expected a regular grid: one axis of latitudes and one of longitudes; interpolate it, e.g. with `cdo remapbil`"


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
    advice: str = TORN


def regular(variable: Variable) -> Variable:
    """Return the variable with latitudes north to south and ascending longitudes; refuse other grids."""
    latitude, longitude = variable.latitude, variable.longitude
    if (abs(np.diff(longitude)) > 180.0).any():  # ..., 355, 0, 5: continue with 360, 365
        longitude = np.unwrap(longitude, period=360.0)
    north_first = latitude[0] >= latitude[-1]
    ordered = (np.diff(latitude if north_first else latitude[::-1]) < 0).all() and (np.diff(longitude) > 0).all()
    if not (ordered and np.isfinite(latitude).all() and np.isfinite(longitude).all()):
        name = variable.channels[0]
        raise UserError(f"{variable.origin}: '{name}': latitudes or longitudes are not in order; {GRID}")
    if north_first:
        return replace(variable, longitude=longitude)

    load, height = variable.load, latitude.size

    def flipped(times: np.ndarray, levels: list[int], rows: slice, columns: slice) -> np.ndarray:
        return load(times, levels, slice(height - rows.stop, height - rows.start), columns)[..., ::-1, :]

    return replace(variable, latitude=latitude[::-1], longitude=longitude, load=flipped)


def usable(makers: Mapping[str, Callable[[], Variable]], wanted: Collection[str], origin: str) -> list[Variable]:
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
