"""Fetches a period of some channels from a Zarr store, such as ARCO-ERA5 or WeatherBench2, into a NetCDF file."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from dlscale.core import urls
from dlscale.core.errors import UserError
from dlscale.core.files import Forgiving, whole
from dlscale.data.kind import RawFile
from dlscale.datasets.era5.cf import create_series
from dlscale.datasets.era5.kind import Era5Dataset
from dlscale.datasets.era5.source import Era5Source
from dlscale.datasets.era5.variable import wanted_names
from dlscale.datasets.era5.variables import gridded

if TYPE_CHECKING:
    import xarray as xr

_ATTEMPTS = 4  # at a block from a remote store, with pauses from 1 s up: hours of reading should survive a hiccup
_LONGEST_WAIT_S = 30.0
_NETWORK = "check the address; compute nodes have no network: run acquisition on a login or transfer node"
_DAMAGED = "the store may be incomplete or damaged: copy it again"
# public archives are read without an account, unless fsspec's own configuration names one
_PUBLIC: dict[str, dict[str, Any]] = {"gs": {"token": "anon"}, "gcs": {"token": "anon"}, "s3": {"anon": True}}
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "http": "aiohttp", "https": "aiohttp"}


def acquire(dataset: Era5Dataset, raw: RawFile, out: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Copy `dataset.channels` over `raw.period` from the store `raw.origin` to the NetCDF-4 file `out`.

    Only the needed variables, levels and times (`dataset.step_hours`) are fetched, some chunks of times at a time,
    within `dataset.memory_mb` or one chunk, whichever is more. They are cropped and averaged as the dataset asks: what
    is kept is little beside what is read. The file has [time, latitude, longitude], north to south. A `name@level`
    becomes a variable of that very name, and `dlscale.datasets.era5.source.open_source` finds the same channels in the
    file. The store is a folder, or a URL of any kind that fsspec knows, consolidated or not. One that is absent, out of
    reach, or lacks a channel, level or time is a `UserError`.
    """
    import h5netcdf

    remote = "://" in raw.origin
    store = _opened(raw.origin, remote)
    with contextlib.closing(store):
        wanted = wanted_names(dataset.channels)
        variables = gridded(store, raw.origin, wanted, advice=_NETWORK if remote else _DAMAGED)
        source = Era5Source(dataset, variables, raw.period, raw.name)
        with whole(out) as temporary, Forgiving(temporary) as file_, h5netcdf.File(file_, "w") as file:
            field = source.fields[0]
            described = zip(field.channels, field.units, source.attributes["long_names"], strict=True)
            hours, grid = source.row_coordinates["time"], source.coordinates
            created = create_series(file, hours, grid["latitude"], grid["longitude"], described)
            file.attrs["source"] = ", ".join(source.attributes["source_files"])
            for start, stop in source.blocks(dataset.memory_mb * 10**6):
                values = _read(source, start, stop, _ATTEMPTS if remote else 1)
                _check_there(values, source, start, raw.origin)
                for position, variable in enumerate(created):
                    variable[start:stop] = values[:, position]
                if progress:
                    progress(stop, field.rows)


def _opened(origin: str, remote: bool) -> xr.Dataset:
    """Open a store lazily."""
    import xarray as xr
    import zarr

    options: dict[str, Any] = {}
    if remote:
        import fsspec.config

        scheme = urlsplit(origin).scheme
        options = {"storage_options": {**_PUBLIC.get(scheme, {}), **fsspec.config.conf.get(scheme, {})}}
    elif not Path(origin).is_dir():
        raise UserError(f"{origin}: no such Zarr store; check the dataset's `source.store` (a folder or a URL)")
    try:
        with warnings.catch_warnings():  # that it is not consolidated, e.g.
            warnings.simplefilter("ignore")
            at = urls.whole(origin) if remote else origin
            return xr.open_dataset(at, engine="zarr", chunks=None, cache=False, decode_times=False, **options)
    except ImportError as error:
        package = _PACKAGES.get(urlsplit(origin).scheme, "a package that is not installed")
        raise UserError(f"{origin}: addresses of this kind need {package} ({error}); pip install it") from None
    except (FileNotFoundError, zarr.errors.GroupNotFoundError):
        hint = f"; {_NETWORK}" if remote else ", a folder with zarr.json or .zgroup at its top"
        raise UserError(f"{origin}: there is no Zarr store; expected the address of a group{hint}") from None
    except Exception as error:
        text = urls.hidden_in(" ".join(str(error).split()))[:200] or type(error).__name__
        advice = _NETWORK if remote else _DAMAGED
        raise UserError(f"{origin}: the Zarr store cannot be opened ({text}); {advice}") from error


def _read(source: Era5Source, start: int, stop: int, attempts: int) -> np.ndarray:
    """Read times [start, stop), again after a pause if that fails: [t, C, H, W]."""
    import tenacity

    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_exponential(multiplier=1, max=_LONGEST_WAIT_S),
        retry=tenacity.retry_if_exception_type(UserError),
        reraise=True,
    )
    return retrying(source.read_what_is_there, start, stop)["fields"]


def _check_there(values: np.ndarray, source: Era5Source, start: int, origin: str) -> None:
    """Refuse a state that is missing altogether: stores declare more times than they hold, and hold NaN there."""
    empty = np.argwhere(np.isnan(values).all(axis=(2, 3)))
    if empty.size:
        row, position = empty[0]
        channel, time = source.fields[0].channels[position], source.times[start + row].astype("datetime64[m]")
        raise UserError(f"{origin}: '{channel}' holds no data at {time}; choose a `split` within what the store covers")
