"""Fetch a period of some channels from a Zarr store, such as ARCO-ERA5 or WeatherBench2, into a NetCDF file."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import tenacity

from dlscale.core import urls
from dlscale.core.errors import UserError
from dlscale.core.files import atomic_write, reading
from dlscale.data.kind import RawFile
from dlscale.data.store import MEMORY
from dlscale.extensions.era5_vit.era5.deferred import DeferredErrorFile
from dlscale.extensions.era5_vit.era5.kind import Era5Dataset
from dlscale.extensions.era5_vit.era5.simulator import create_series
from dlscale.extensions.era5_vit.era5.source import (
    DEFAULT_FILL,
    Era5Source,
    base,
    gridded,
    open_xarray,
    wanted_names,
)

if TYPE_CHECKING:
    import xarray as xr

_LONGEST_WAIT_S = 30.0
# Stores at these addresses are read without an account, unless fsspec's configuration has an account.
_PUBLIC: dict[str, dict[str, Any]] = {"gs": {"token": "anon"}, "gcs": {"token": "anon"}, "s3": {"anon": True}}


def acquire(dataset: Era5Dataset, raw: RawFile, out: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Copy `dataset.channels` over `raw.period` from the store `raw.origin` to the NetCDF-4 file `out`.

    Only needed variables, levels and times are fetched; then they are cropped and averaged. A block takes at most
    `store.MEMORY`, or the memory of a chunk if a chunk is larger. The store is a folder, or a URL that fsspec supports.
    """
    import h5netcdf

    remote = "://" in raw.origin
    advice = "the store may be incomplete or damaged: copy it again"
    if remote:
        advice = "check the address; most compute nodes have no network: run acquisition on a login or transfer node"
    # Retry each block after pauses of 1 s or more, so that a short failure does not end hours of reading.
    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(4 if remote else 1),
        wait=tenacity.wait_exponential(multiplier=1, max=_LONGEST_WAIT_S),
        retry=tenacity.retry_if_exception_type(UserError),
        reraise=True,
    )
    with contextlib.closing(_opened(raw.origin, remote, advice, wanted_names(dataset))) as store:
        variables, names = gridded(store, raw.origin, wanted_names(dataset))
        if not remote:
            with reading(raw.origin, advice):
                _check_chunks(raw.origin, [store[name] for name in names if base(name) in wanted_names(dataset)])
        source = Era5Source(dataset, variables, names, raw.period, raw.name, advice)
        with atomic_write(out) as temporary, DeferredErrorFile(temporary) as file_, h5netcdf.File(file_, "w") as file:
            field = source.fields[0]
            described = zip(field.channels, field.units, source.attributes["long_names"], strict=True)
            hours, grid = source.row_coordinates["time"], source.coordinates
            created = create_series(file, hours, grid["latitude"], grid["longitude"], described)
            file.attrs["source"] = ", ".join(source.attributes["source_files"])
            block = max(1, MEMORY // source.bytes_per_row)
            for start in range(0, field.rows, block):
                stop = min(start + block, field.rows)
                values = retrying(source.read, start, stop)["fields"]
                for position, variable in enumerate(created):
                    variable[start:stop] = values[:, position]
                if progress:
                    progress(stop, field.rows)


def _opened(origin: str, remote: bool, advice: str, wanted: Collection[str]) -> xr.Dataset:
    """Open a store lazily. In a remote store, reading a missing chunk of a `wanted` variable raises an error.

    A missing chunk within a shard is read as missing values. In a folder, consolidated metadata are ignored, because
    they may be older than the arrays.
    """
    import zarr

    try:
        with warnings.catch_warnings():  # for example a warning that metadata are not consolidated
            warnings.simplefilter("ignore")
            if not remote:
                return open_xarray(origin, "zarr", chunks=None, consolidated=False)
            group = zarr.open_group(urls.full_url(origin), mode="r", storage_options=_storage_options(origin))
            checked = _complete_store(group.store, fills := dict[str, float](), wanted, origin)
            dataset = open_xarray(checked, "zarr", chunks=None)
            for name in dataset.data_vars:
                if base(str(name)) in wanted and (fill := _plain_fill(group[str(name)], dataset[name])) is not None:
                    fills[str(name)] = fill
            return dataset
    except Exception as error:  # for example, a package for such addresses is missing
        text = urls.hidden_in(" ".join(str(error).split()))[:200] or type(error).__name__
        raise UserError(
            f"{origin}: the Zarr store cannot be opened ({text}); expected the folder or address of a Zarr group; "
            f"{advice}"
        ) from error


def _storage_options(origin: str) -> dict[str, Any]:
    """Return fsspec's options for an address: without an account if the address is public and none is configured."""
    import fsspec.config

    scheme = urlsplit(origin).scheme
    own = fsspec.config.conf.get(scheme, {})
    public = {} if own.keys() & {"key", "secret", "profile"} else _PUBLIC.get(scheme, {})
    return {**public, **own}


def _complete_store(store: Any, fills: Mapping[str, float], wanted: Collection[str], origin: str) -> Any:
    """Wrap a Zarr store, to raise an error for a missing chunk of an array in `fills` (name → fill value).

    In the metadata of `wanted` sharded arrays, the fill value becomes a mark of missing values.
    """
    from zarr.storage import WrapperStore

    class CompleteStore(WrapperStore[Any]):
        async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
            found, name = await self._store.get(key, *arguments, **options), key.partition("/")[0]
            if found is not None and key.endswith("zarr.json"):
                about = json.loads(found.to_bytes())
                arrays = {**((about.get("consolidated_metadata") or {}).get("metadata") or {}), name: about}
                for its in (arrays[each] for each in arrays if base(each) in wanted):
                    _mark_fill(its)
                return type(found).from_bytes(json.dumps(about).encode())
            if found is None and name in fills and key[-1].isdecimal():  # names of metadata end with a letter
                raise UserError(
                    f"{origin}: '{name}': the chunk {key} is missing, and would be read as {fills[name]:g}. Exclude "
                    "its times with `split`, or copy the store and write the chunk"
                )
            return found

    return CompleteStore(store)


def _mark_fill(about: dict[str, Any]) -> None:
    """Replace the fill value in the metadata of a sharded array by `_FillValue`, NaN or NetCDF's default."""
    if next((codec.get("name") for codec in about.get("codecs", ())), None) == "sharding_indexed":
        mark = about.get("attributes", {}).get("_FillValue")
        default = DEFAULT_FILL.get(np.dtype(about["data_type"]).str[1:], "NaN")
        about["fill_value"] = mark if isinstance(mark, int) and default != "NaN" else default


def _plain_fill(array: Any, variable: xr.DataArray) -> float | None:
    """Return the value of an array's missing chunks if it does not mark missing values, else None.

    In Zarr 3 the fill value is 0 by default, and marks missing values only if it equals `_FillValue`.
    """
    fill = array.fill_value or 0
    return fill if np.isfinite(fill) and fill != variable.encoding.get("_FillValue") else None


def _check_chunks(folder: str, variables: Sequence[xr.DataArray]) -> None:
    """Refuse arrays with a chunk that was never written and would be read as a number.

    Only folders are checked, because listing the chunks of a remote store takes too long.
    """
    import zarr

    group = zarr.open_group(folder, mode="r", use_consolidated=False)
    for variable in variables:
        array: Any = group[str(variable.name)]
        if not isinstance(array.metadata.attributes, Mapping):  # xarray takes an empty list for no attributes
            raise TypeError(f"{variable.name}: its attributes are not a mapping")
        fill = _plain_fill(array, variable)
        if fill is not None and (lacks := _count_missing(array, Path(folder, array.path))):
            raise UserError(
                f"{folder}: '{variable.name}': {lacks} of {array.nchunks} chunks were never written, and would be read "
                f"as {fill:g}. Write the array again, with one writer per shard. If these chunks contain only this "
                "number, write them, too (write_empty_chunks)"
            )


def _count_missing(array: Any, folder: Path) -> int:
    """Return the number of chunks that were never written, including chunks within shards.

    The index of a shard has the position and size of each of its chunks; a missing chunk has the largest 64-bit number
    as its position.
    """
    codecs = array.metadata.to_dict().get("codecs", ())
    if "sharding_indexed" not in str(codecs):
        return int(array.nchunks - array.nchunks_initialized)
    about = codecs[0].get("configuration", {})
    plain, *others = about.get("index_codecs", [{}])
    endian = {"little": "<u8", "big": ">u8"}.get(plain.get("configuration", {}).get("endian"))
    has_checksum = [codec["name"] for codec in others] == ["crc32c"]
    if str(codecs).count("sharding_indexed") > 1 or len(codecs) > 1 or not endian or len(others) > has_checksum:
        raise UserError(
            f"{folder}: chunks that were never written cannot be found with these codecs: {json.dumps(codecs)[:300]}. "
            "Write the array again, with a single codec of shards, whose index has the codecs bytes and crc32c"
        )
    inner, lacks = tuple(shard // chunk for shard, chunk in zip(array.shards, array.chunks, strict=True)), 0
    for place in np.ndindex(*(-(-size // shard) for size, shard in zip(array.shape, array.shards, strict=True))):
        positions = np.full(inner, 2**64 - 1, np.uint64)
        with (
            contextlib.suppress(FileNotFoundError),
            open(folder / array.metadata.encode_chunk_key(place), "rb") as file,
        ):
            if about["index_location"] == "end":
                file.seek(-16 * positions.size - 4 * has_checksum, 2)
            positions = np.frombuffer(file.read(16 * positions.size), endian)[::2].reshape(inner)
        left = (size - at * shard for size, at, shard in zip(array.shape, place, array.shards, strict=True))
        inside = tuple(slice(-(-size // chunk)) for size, chunk in zip(left, array.chunks, strict=True))
        lacks += int((positions[inside] == 2**64 - 1).sum())
    return lacks
