"""HDF5 layout of preprocessed data, and readers of any HDF5 file.

Each field is one HDF5 dataset, and attributes describe the field. Volumes are [C, D, H, W], or [D, H, W, C] with the
attribute `channels_last`. Volumes may have chunks: cubes with all channels. All other fields are contiguous, row by
row: [N, C, H, W], [N, K], [N]. Floats are stored as float32, or as (x - offset) / scale in float16, with the attributes
`offset` and `scale` [C]. Readers return values with channels first.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import TORN, reading, unreadable
from dlscale.data.manifest import IDENTITY, Transform

#: Size of the buffers of a data stage, bytes, whatever the size of its input; a single row may need more.
MEMORY = 512_000_000
#: Number of a registered HDF5 filter → its name.
FILTERS = {
    **{4: "szip", 307: "bzip2", 32000: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32010: "fpzip"},
    **{32013: "zfp", 32015: "zstd", 32017: "sz", 32018: "fcidecomp", 32022: "bitgroom", 32023: "granular bitround"},
    **{32024: "sz3", 32026: "blosc2", 32028: "sperr"},
}
#: Name of an attribute that packs values, reduced to small letters → value that leaves values unchanged.
PLAIN = {
    **dict.fromkeys(("scale", "scalefactor", "scalingfactor", "slope", "gain"), 1),
    **dict.fromkeys(("offset", "addoffset", "intercept", "bias"), 0),
}
#: Names of attributes that mark missing values, reduced to small letters.
MARKS = {
    *("fill", "fillvalue", "missing", "missingvalue", "missingdata", "nodata", "nodatavalue"),
    *("validmin", "validmax", "validrange"),
}
#: Number of values for which statistics are computed at once, so that they fit into the processor's cache.
BLOCK = 2**16


@dataclass(frozen=True)
class Field:
    """One field (HDF5 dataset) of one file; `dlscale.data.manifest.FieldInfo` describes a field of all files."""

    name: str
    channels: tuple[str, ...]  # channel names; one name if there is no channel axis
    units: tuple[str, ...]  # physical unit of each channel
    shape: tuple[int, ...]  # shape with rows and channels, channels first
    channel_axis: int | None  # 0: [C, D, H, W] with rows along axis 1; 1: [N, C, ...]; None: [N, ...]
    transforms: tuple[Transform, ...] = ()  # transform of each channel; the identity if absent
    dtype: str = "float32"  # type before conversion to the stored type: float32 or an integer type

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", self.transforms or (IDENTITY,) * len(self.channels))

    @property
    def floating(self) -> bool:
        return np.dtype(self.dtype).kind == "f"

    @property
    def row_axis(self) -> int:
        """Axis along which files are streamed and cut into pieces."""
        return 1 if self.channel_axis == 0 else 0

    @property
    def rows(self) -> int:
        return self.shape[self.row_axis]

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape without channels and rows; for volumes [D, H, W], although their rows are along D."""
        return self.shape[1:] if self.channel_axis is None else self.shape[self.channel_axis + 1 :]

    def resized(self, rows: int) -> Field:
        shape = tuple(rows if axis == self.row_axis else size for axis, size in enumerate(self.shape))
        return replace(self, shape=shape)

    def select(self, start: int, stop: int) -> tuple[slice, ...]:
        return tuple(slice(start, stop) if axis == self.row_axis else slice(None) for axis in range(len(self.shape)))

    def per_channel(self, values: Any) -> np.ndarray:
        """Return values [C] as float32 with C on the channel axis and 1 on all other axes."""
        shape = [-1 if axis == self.channel_axis else 1 for axis in range(len(self.shape))]
        return np.asarray(values, dtype=np.float32).reshape(shape)

    @staticmethod
    def of(dataset: h5py.Dataset) -> Field:
        attrs = dataset.attrs
        transforms = tuple(Transform(**values) for values in json.loads(attrs["transforms"]))
        channels, units = (tuple(str(value) for value in attrs[key]) for key in ("channels", "units"))
        axis = int(attrs["channel_axis"]) if "channel_axis" in attrs else None
        dtype = "float32" if dataset.dtype.kind == "f" else str(dataset.dtype)
        shape = channels_first(dataset, dataset.shape)
        return Field(dataset.name.lstrip("/"), channels, units, shape, axis, transforms, dtype)


def open_file(path: str | os.PathLike[str]) -> h5py.File:
    """Open an HDF5 file for reading.

    Raise `UserError` for a file that is missing or damaged, or that links to other files.
    """
    if Path(path).is_dir():
        raise UserError(f"{path}: a folder; expected a file. Name the files in the folder")
    with reading(path, "not a readable HDF5 file: it may be truncated or damaged; fetch or make it again"):
        try:
            file = h5py.File(path, "r")
        except OSError as error:
            if unfinished := re.search("already open|consistency flags|unable to lock|truncated file", str(error)):
                raise UserError(
                    f"{path}: incomplete or still being written ({unfinished[0]}); wait until its writer ends, "
                    "or fetch the file again; if its writer was killed, clear the file's flags with `h5clear -s`"
                ) from None
            raise
        _check_own(file)
    return file


def _check_own(file: h5py.File) -> None:
    """Refuse a file whose values are stored in other files, which could be any files of this machine."""
    for name in file:
        if not isinstance(file.get(name, getlink=True), h5py.SoftLink):
            check_link(file, name)


def check_link(file: h5py.File, name: str) -> None:
    """Refuse a name whose values lie in other files, or that links to another file or to a missing object."""
    parts = name.strip("/").split("/")
    for path in ("/".join(parts[: count + 1]) for count in range(len(parts))):
        link = file.get(path, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            target = Path(file.filename).parent / link.filename
            missing = "" if target.exists() else ", which is missing"
            raise UserError(
                f"{file.filename}: '{path}' lies in other files, which are not read: it is a link to '{link.path}' in "
                f"{link.filename}{missing}; copy its values into this file, or name the other file"
            )
        if isinstance(link, h5py.SoftLink) and file.get(path) is None:
            raise UserError(
                f"{file.filename}: '{path}' is a link to '{link.path}', which is missing; name another array"
            )
        # At exit, HDF5 2 crashes if a variable still refers to a virtual dataset.
        if any(isinstance(each, h5py.Dataset) and (each.external or each.is_virtual) for each in [file.get(path)]):
            raise UserError(
                f"{file.filename}: '{path}' lies in other files, which are not read; copy its values into this file, "
                "such as with h5py: `values = file[name][()]; del file[name]; file[name] = values`"
            )


def names(file: h5py.File) -> list[str]:
    """Return the names of all datasets of a file, including datasets in groups."""
    found = list[str]()
    file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
    return found


def check_filters(values: h5py.Dataset) -> None:
    """Refuse values compressed by an HDF5 filter that is missing here."""
    plan = values.id.get_create_plist()
    for code, _, _, own in (plan.get_filter(number) for number in range(plan.get_nfilters())):
        if not h5py.h5z.filter_avail(code):
            name = FILTERS.get(code, own.decode(errors="replace") or "unknown")
            raise UserError(
                f"{values.file.filename}: '{values.name.strip('/')}' is compressed by the filter {code} ({name}), "
                "which is missing on this machine; run `pip install hdf5plugin`, and set HDF5_PLUGIN_PATH to the path "
                "that `python -c 'import hdf5plugin; print(hdf5plugin.PLUGIN_PATH)'` prints; or repack the file with "
                "gzip"
            )


def check_values(values: h5py.Dataset) -> None:
    """Refuse an array whose stored values would be read differently than intended.

    Raises
    ------
    UserError
        A filter is missing, a part is unwritten, the attribute `_Unsigned` contradicts the type, or an attribute of
        `PLAIN` or `MARKS`, in any spelling, packs values or marks missing values.
    """
    check_filters(values)
    where = f"{values.file.filename}: '{values.name.strip('/')}'"
    if values.dtype.kind + (sign := str(values.attrs.get("_Unsigned", "")).lower().strip("b'")) in ("itrue", "ufalse"):
        raise UserError(
            f"{where} has the attribute _Unsigned ({sign}), which dlscale does not apply; store the values with their "
            "true type, e.g. uint8 instead of int8"
        )
    plain = {} if "transforms" in values.attrs else PLAIN  # `Reader` applies `scale` and `offset` of dlscale's files
    for name in values.attrs:
        given = [
            str(each)
            for key in {re.sub("[^a-z]", "", name.lower())} & {*plain, *MARKS}  # such as `SCALE FACTOR`
            for each in np.ravel(values.attrs[name])
            if (isinstance(each, np.number) and np.isfinite(each) and each != plain.get(key))
            or (isinstance(each, str | bytes) and (key in plain or re.search(r"\d", str(each))))
        ]
        if given:
            raise UserError(
                f"{where} has the attribute {name} ({given[0]}), which dlscale does not apply; write unpacked values, "
                "with NaN for missing values, or delete the attribute if all values are plain"
            )
    if values.size and not is_written(values):
        raise UserError(
            f"{where}: a part was never written and would be read as {values.fillvalue}; if its writer ended early, "
            "write the array again; if this value is intended, write all values once (x[...] = x[...])"
        )


def is_written(values: h5py.Dataset) -> bool:
    """Return whether all values were written, or the file's writer chose the fill value."""
    if values.id.get_create_plist().fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED:
        return True
    if values.chunks is None:
        return values.id.get_storage_size() > 0 or values.is_virtual
    return bool(values.id.get_num_chunks() >= math.prod(map(math.ceil, np.divide(values.shape, values.chunks))))


def dataset(file: h5py.File, name: str, channels: int | None = None, ndim: int | None = None) -> h5py.Dataset:
    """Return the numeric dataset `name`; raise `UserError` for any other type or shape.

    With `ndim`, the values must be floats with `ndim` axes. With `channels`, the first axis must have this length.
    """
    with reading(file.filename):
        check_link(file, name)
        if name not in file or not isinstance(values := file[name], h5py.Dataset):
            what = f"'{name}' is a group" if name in file else f"no dataset '{name}'"
            raise UserError(f"{file.filename}: {what}; it holds: {', '.join(names(file)[:20]) or 'nothing'}")
        check_values(values)
        values.dtype, values.shape  # noqa: B018 - fails if the dataset is damaged
    good = values.dtype.kind == "f" if ndim else values.dtype.kind in "fiu"
    if not good or ndim not in (None, values.ndim) or (channels and values.shape[:1] != (channels,)):
        expected = f"{ndim} axes of floating-point numbers" if ndim else "numbers"
        raise UserError(
            f"{file.filename}: {name}: expected {expected}{f', {channels} channels first' * bool(channels)}, got shape "
            f"{values.shape} of {values.dtype}"
        )
    return values


def channels_first(dataset: h5py.Dataset, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Reorder sizes of the stored axes to the order of fields, channels first."""
    return tuple(sizes[stored_order(dataset).index(axis)] for axis in range(len(sizes)))


def stored_order(dataset: h5py.Dataset) -> tuple[int, ...]:
    """Return the stored order of a field's axes, which are numbered channels first."""
    axes = tuple(range(dataset.ndim))
    return (*axes[1:], 0) if dataset.attrs.get("channels_last", False) else axes


def create(
    file: h5py.File,
    field: Field,
    *,
    dtype: str | None = None,
    chunk: int | None = None,
    channels_last: bool = False,
    scaling: tuple[Any, Any] | None = None,
) -> h5py.Dataset:
    """Create the dataset of `field` in `file`, to be filled with `write`.

    `dtype` is the stored type (default: the field's). For volumes [C, D, H, W], `chunk` is the edge of a cubic chunk
    with all channels, and `channels_last` stores [D, H, W, C]. `scaling` is offset and scale, [C] each, if the stored
    values are scaled.
    """
    shape, chunks = field.shape, None
    if chunk is not None and field.channel_axis == 0:
        chunks = (shape[0], *(min(chunk, size) for size in shape[1:]))
    if channels_last:
        shape, chunks = (*shape[1:], shape[0]), chunks and (*chunks[1:], chunks[0])
    # fill_time="never", because filling chunks takes time and memory, and all values will be written anyway.
    created = file.create_dataset(field.name, shape, dtype or field.dtype, chunks=chunks, fill_time="never")
    created.attrs["channels_last"] = channels_last
    created.attrs["channels"], created.attrs["units"] = list(field.channels), list(field.units)
    if field.channel_axis is not None:
        created.attrs["channel_axis"] = field.channel_axis
    created.attrs["transforms"] = json.dumps([asdict(t) for t in field.transforms])
    if scaling is not None:
        created.attrs["offset"], created.attrs["scale"] = (np.asarray(part, dtype=np.float32) for part in scaling)
    return created


def write(target: h5py.Dataset, where: tuple[slice, ...], values: np.ndarray) -> None:
    """Write `values` to the slices `where` of `target`, in the stored order of axes.

    `values` and `where` have the axes of the field, such as [C, D, H, W], [T, C, H, W] or [N].
    """
    order = stored_order(target)
    target[tuple(where[axis] for axis in order)] = values.transpose(order)


class Reader:
    """Reader of one dataset of one file, channels first.

    A reader opens its file on first use in each process, so it may be forked and pickled. The HDF5 library serves one
    thread at a time. If a file can be mapped (`map_chunks`), any number of threads may call `copy`.
    """

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self.path, self.name = str(path), name
        self._opened: tuple[int, h5py.Dataset] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Reader, (self.path, self.name)

    @property
    def dataset(self) -> h5py.Dataset:
        """The open dataset, axes as stored."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), dataset(open_file(self.path), self.name)
        return self._opened[1]

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Stored order of the field's axes, which are numbered channels first."""
        with reading(self.path):
            return stored_order(self.dataset)

    @property
    def shape(self) -> tuple[int, ...]:
        return channels_first(self.dataset, self.dataset.shape)

    @property
    def scaling(self) -> tuple[np.ndarray, np.ndarray] | None:
        """`offset` and `scale` [C], float32, if the stored values are (x - offset) / scale."""
        attrs = self.dataset.attrs
        with reading(self.path):
            return (attrs["offset"], attrs["scale"]) if {"scale", "transforms"} <= attrs.keys() else None

    @functools.cached_property
    def chunks(self) -> dict[tuple[int, ...], np.ndarray]:
        """First cell of each chunk → mapped values of the chunk, channels first; see `map_chunks`."""
        axes = np.argsort(self.order)
        return {
            tuple(int(corner[axis]) for axis in axes): values.transpose(axes)
            for corner, values in map_chunks(self.dataset).items()
        }

    @functools.cached_property
    def mapped(self) -> np.ndarray | None:
        """All values, channels first, if they are contiguous in the mapped file, else None."""
        return next(iter(self.chunks.values()), None) if self.dataset.chunks is None else None

    def stored(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return the selected values with their stored type and scaling, channels first, read by the HDF5 library.

        Axes without a slice are read completely. Raise `UserError` for damaged values.
        """
        opened, order = self.dataset, self.order
        index = (*index, *[slice(None)] * (len(order) - len(index)))
        try:
            values: np.ndarray = opened[tuple(index[axis] for axis in order)]
        except MemoryError:  # memory is short; the file is not damaged
            raise
        except Exception as error:
            raise unreadable(self.path, error, f"{self.name}: {TORN}") from None
        return values.transpose([order.index(axis) for axis in range(values.ndim)])

    def copy(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Copy the selected values into `out` [C, D, H, W] or [T, C, H, W], and convert them to the type of `out`."""
        if not self.chunks:
            np.copyto(out, self.stored(index))
            return
        edges = next(iter(self.chunks.values())).shape
        bounds = [(each.start or 0, (each.start or 0) + size) for each, size in zip(index, out.shape, strict=True)]
        spans = [range(first // edge * edge, end, edge) for (first, end), edge in zip(bounds, edges, strict=True)]
        for corner in itertools.product(*spans):
            source, target = [], []
            for begin, edge, (first, end) in zip(corner, edges, bounds, strict=True):
                low, high = max(begin, first), min(begin + edge, end)
                source.append(slice(low - begin, high - begin))
                target.append(slice(low - first, high - first))
            np.copyto(out[tuple(target)], self.chunks[corner][tuple(source)])

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return the selected values as a new array: integers, or float32 after the stored scaling is undone.

        `index` has only slices, so the result keeps all axes.
        """
        values = self.stored(index)
        if values.dtype.kind == "f":
            values = values.astype(np.float32, copy=False)
        if self.scaling is not None:
            axis = self.dataset.attrs.get("channel_axis")
            shape = [-1 if a == axis else 1 for a in range(values.ndim)]
            offset, scale = (part.reshape(shape) for part in self.scaling)
            values = values * scale + offset
        return values


def map_chunks(dataset: h5py.Dataset) -> dict[tuple[int, ...], np.ndarray]:
    """Map a dataset's file, and return first cell → values of each chunk, axes as stored.

    Contiguous data count as one chunk. The result is empty if the dataset is empty, if the file has a user block, or
    if values are compressed, of another type or byte order than in NumPy, not aligned, in another file, in memory, or
    partly not written.
    """
    with reading(dataset.file.filename):
        plan = dataset.id.get_create_plist()
        foreign = (
            dataset.file.driver == "core"
            # Files may have types that NumPy lacks, such as bfloat16 or integers of 12 bits.
            or dataset.id.get_type() != h5py.h5t.py_create(dataset.dtype.newbyteorder("="))
            or plan.get_nfilters()
            or plan.get_external_count()
            or dataset.is_virtual
            or dataset.file.userblock_size
            or not dataset.size
        )
        if foreign:
            return {}
        if dataset.chunks is None:
            offsets = {(0,) * dataset.ndim: dataset.id.get_offset()}
        else:
            infos: list[Any] = []
            dataset.id.chunk_iter(infos.append)
            offsets = {info.chunk_offset: info.byte_offset for info in infos}
        whole, shape, dtype = dataset.shape, dataset.chunks or dataset.shape, dataset.dtype
        file = np.asarray(np.memmap(dataset.file.filename, np.uint8, "r"))
    needed = math.prod(-(-size // edge) for size, edge in zip(whole, shape, strict=True))
    if len(offsets) != needed or any(offset is None or offset % dtype.itemsize for offset in offsets.values()):
        return {}
    size = math.prod(shape) * dtype.itemsize
    if max(offsets.values()) + size > file.size:
        raise UserError(f"{dataset.file.filename}: values of '{dataset.name}' are beyond the file's end; {TORN}")
    return {corner: file[first : first + size].view(dtype).reshape(shape) for corner, first in offsets.items()}


@dataclass
class Moments:
    """Count, mean, sum of squared deviations and extremes of C channels, float64 [C]; `merged` adds other moments.

    The formula of Chan, Golub and LeVeque (1979) avoids overflow and cancellation.
    """

    count: int
    mean: np.ndarray
    m2: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray

    @staticmethod
    def empty(channels: int) -> Moments:
        zeros = np.zeros(channels)
        return Moments(0, zeros, zeros.copy(), np.full(channels, np.inf), np.full(channels, -np.inf))

    @staticmethod
    def of(values: np.ndarray, channel_axis: int | None) -> Moments:
        """Return the moments of finite values, computed in float64 by blocks that fit into the processor's cache."""
        found = Moments.empty(1 if channel_axis is None else values.shape[channel_axis])
        rows = max(1, BLOCK // max(1, values[:1].size)) if channel_axis else max(1, len(values))
        for first in range(0, len(values), rows):
            some = values[first : first + rows]
            flat = (some if channel_axis is None else np.moveaxis(some, channel_axis, 0)).reshape(len(found.mean), -1)
            columns = max(1, BLOCK // len(flat))
            for start in range(0, flat.shape[1], columns):
                x = flat[:, start : start + columns].astype(np.float64)
                mean = x.mean(axis=1)
                m2 = np.square(x - mean[:, None]).sum(axis=1)
                found = found.merged(Moments(x.shape[1], mean, m2, x.min(axis=1), x.max(axis=1)))
        return found

    def merged(self, other: Moments) -> Moments:
        if not self.count or not other.count:
            return other if not self.count else self
        count = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * (other.count / count),
            self.m2 + other.m2 + np.square(delta) * (self.count * other.count / count),
            np.minimum(self.minimum, other.minimum),
            np.maximum(self.maximum, other.maximum),
        )

    @property
    def std(self) -> np.ndarray:
        """Population standard deviation [C]."""
        return np.sqrt(self.m2 / max(self.count, 1))

    def to_json(self) -> str:
        return json.dumps({key: np.asarray(value).tolist() for key, value in vars(self).items()})

    @staticmethod
    def from_json(text: str) -> Moments:
        values = json.loads(text)
        return Moments(values.pop("count"), **{key: np.array(value) for key, value in values.items()})


def check_finite(values: np.ndarray, field: Field, origin: str, first_row: int) -> None:
    """Refuse NaN and infinity in rows of a field; the `UserError` names the first channel and row."""
    if not field.floating or np.isfinite([values.min(), values.max()]).all():
        return
    bad = np.argwhere(~np.isfinite(values))
    place = bad[0]
    channel = field.channels[0 if field.channel_axis is None else place[field.channel_axis]]
    raise UserError(
        f"{origin}: {field.name}: channel '{channel}' is not finite at row {first_row + place[field.row_axis]} "
        f"({len(bad)} such values in this block); correct these values, or leave out this part of the input"
    )
