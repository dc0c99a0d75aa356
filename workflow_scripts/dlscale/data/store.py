"""The HDF5 layout of preprocessed data: one dataset for each field, and attributes that say what it is.

Volumes are [C, D, H, W], chunked in cubes with all channels, because samples of them are cubes. Everything else lies
row by row, contiguous, because a sample is a few whole rows: states and images [N, C, H, W], images without channels
[N, H, W], scalars [N, K], labels [N]. Floating-point values are float32, or float16 of (x - offset) / scale with the
attributes `offset` and `scale` [C]; integers keep their type. Volumes may be stored channels last, [D, H, W, C], marked
by the attribute `channels_last`: the rows of a sample are then C times longer. Readers show channels first.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import h5py
import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import TORN, reading, unreadable
from dlscale.data.manifest import IDENTITY, Transform

#: Values that statistics are taken of at a time.
BLOCK = 2**16


@dataclass(frozen=True)
class Field:
    """One dataset of a file."""

    name: str
    channels: tuple[str, ...]  # one where there is no axis of channels
    units: tuple[str, ...]  # of each channel, like the transforms
    shape: tuple[int, ...]  # of the whole dataset, rows and channels included
    #: 0 ([C, D, H, W], whose rows are along axis 1), 1 ([N, C, ...]) or None ([N, ...]), with rows along axis 0.
    channel_axis: int | None
    transforms: tuple[Transform, ...] = ()
    dtype: str = "float32"  # of the values before they are stored, or an integer type

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", self.transforms or (IDENTITY,) * len(self.channels))

    @property
    def floating(self) -> bool:
        return np.dtype(self.dtype).kind == "f"

    @property
    def row_axis(self) -> int:
        """The axis along which files are streamed and cut into pieces."""
        return 1 if self.channel_axis == 0 else 0

    @property
    def rows(self) -> int:
        return self.shape[self.row_axis]

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape without channels, and but for volumes [C, D, H, W] without rows."""
        return self.shape[1:] if self.channel_axis is None else self.shape[self.channel_axis + 1 :]

    def resized(self, rows: int) -> Field:
        """Return this field with another number of rows."""
        shape = tuple(rows if axis == self.row_axis else size for axis, size in enumerate(self.shape))
        return replace(self, shape=shape)

    def select(self, start: int, stop: int) -> tuple[slice, ...]:
        """Index of rows [start, stop) in the dataset."""
        return tuple(slice(start, stop) if axis == self.row_axis else slice(None) for axis in range(len(self.shape)))

    def per_channel(self, values: Any) -> np.ndarray:
        """Shape C values so that they broadcast over the dataset, as float32."""
        shape = [-1 if axis == self.channel_axis else 1 for axis in range(len(self.shape))]
        return np.asarray(values, dtype=np.float32).reshape(shape)

    def annotate(self, dataset: h5py.Dataset) -> None:
        """Write channels, units and transforms as attributes."""
        dataset.attrs["channels"] = list(self.channels)
        dataset.attrs["units"] = list(self.units)
        if self.channel_axis is not None:
            dataset.attrs["channel_axis"] = self.channel_axis
        dataset.attrs["transforms"] = json.dumps([asdict(t) for t in self.transforms])

    @staticmethod
    def of(dataset: h5py.Dataset) -> Field:
        """Read back what `annotate` wrote."""
        attrs = dataset.attrs
        transforms = tuple(Transform(**values) for values in json.loads(attrs["transforms"]))
        channels, units = (tuple(str(value) for value in attrs[key]) for key in ("channels", "units"))
        axis = int(attrs["channel_axis"]) if "channel_axis" in attrs else None
        dtype = "float32" if dataset.dtype.kind == "f" else str(dataset.dtype)
        shape = channels_first(dataset, dataset.shape)
        return Field(dataset.name.lstrip("/"), channels, units, shape, axis, transforms, dtype)


def open_file(path: str | os.PathLike[str]) -> h5py.File:
    """Open an HDF5 file for reading; what is missing, torn, no such file, or leads to other files is a `UserError`."""
    with reading(path, "not a readable HDF5 file: it may be truncated or damaged, fetch or make it again"):
        file = h5py.File(path, "r")
        _check_own(file)
    return file


def _check_own(file: h5py.File) -> None:
    """Refuse a file whose values lie in other ones, which could be any file of this machine."""
    for name in file:
        outside = isinstance(file.get(name, getlink=True), h5py.ExternalLink)
        item = None if outside else file.get(name)
        if outside or (isinstance(item, h5py.Dataset) and (item.external or item.is_virtual)):
            raise UserError(
                f"{file.filename}: '{name}' lies in other files, which are not read: copy its values into this one, "
                "e.g. with h5repack"
            )


def dataset(file: h5py.File, name: str, channels: int | None = None, ndim: int | None = None) -> h5py.Dataset:
    """Return dataset `name`, checked: numbers; with `ndim`, so many axes of floats, with `channels` on the first."""
    with reading(file.filename):
        if name not in file or not isinstance(values := file[name], h5py.Dataset):
            raise UserError(f"{file.filename}: no dataset '{name}'; it holds: {', '.join(file) or 'nothing'}")
        values.dtype, values.shape  # noqa: B018 - a damaged one has none
    good = values.dtype.kind == "f" if ndim else values.dtype.kind in "fiu"
    if not good or ndim not in (None, values.ndim) or (channels and values.shape[:1] != (channels,)):
        expected = f"{ndim} axes of floating-point numbers" if ndim else "numbers"
        expected += f", {channels} channels first" if channels else ""
        raise UserError(f"{file.filename}: {name}: expected {expected}, got shape {values.shape} of {values.dtype}")
    return values


def channels_first(dataset: h5py.Dataset, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bring what belongs to the stored axes (sizes, slices) into the order that fields have, channels first."""
    return (axes[-1], *axes[:-1]) if _channels_last(dataset) else axes


def as_stored(dataset: h5py.Dataset, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bring what belongs to a field's axes into the order in which they are stored."""
    return (*axes[1:], axes[0]) if _channels_last(dataset) else axes


def _channels_last(dataset: h5py.Dataset) -> bool:
    return bool(dataset.attrs.get("channels_last", False))


def create(
    file: h5py.File,
    field: Field,
    *,
    dtype: str | None = None,
    chunk: int | None = None,
    channels_last: bool = False,
    scaling: tuple[Any, Any] | None = None,
) -> h5py.Dataset:
    """Create the dataset of `field` in `file`; fill it with `write`.

    `dtype` is what to store, the field's own if None. Of [C, D, H, W] alone, `chunk` is the edge of a cubic chunk with
    all channels, and `channels_last` stores [D, H, W, C]. Values scaled with `scaling`, (offset, scale) [C] each,
    are marked by attributes.
    """
    shape, chunks = field.shape, None
    if chunk is not None and field.channel_axis == 0:
        chunks = (shape[0], *(min(chunk, size) for size in shape[1:]))
    if channels_last:
        assert field.channel_axis == 0, "rows lie one after the other"
        shape, chunks = (*shape[1:], shape[0]), chunks and (*chunks[1:], chunks[0])
    # Every value will be written: filling chunks first would cost time, and the memory of a whole chunk.
    created = file.create_dataset(field.name, shape, dtype or field.dtype, chunks=chunks, fill_time="never")
    created.attrs["channels_last"] = channels_last
    field.annotate(created)
    if scaling is not None:
        created.attrs["offset"], created.attrs["scale"] = (np.asarray(part, dtype=np.float32) for part in scaling)
    return created


def write(target: h5py.Dataset, where: tuple[slice, ...], values: np.ndarray) -> None:
    """Write `values`, channels first like `where`, in the order in which `target` stores them."""
    target[as_stored(target, where)] = values.transpose(as_stored(target, tuple(range(values.ndim))))


class Reader:
    """Reads one dataset of one file: scaled float16 as float32, integers as they are.

    The file is opened on first use and once per process, so a Reader may cross a fork or be pickled.
    """

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self.path, self.name = str(path), name
        self._opened: tuple[int, h5py.Dataset, tuple[int, ...]] | None = None

    @property
    def dataset(self) -> h5py.Dataset:
        """The open dataset, as it is stored."""
        return self._open()[0]

    def _open(self) -> tuple[h5py.Dataset, tuple[int, ...]]:
        """Return the dataset and its axes in the order in which they are stored: to ask the file takes a while."""
        if self._opened is None or self._opened[0] != os.getpid():
            opened = dataset(open_file(self.path), self.name)
            with reading(self.path):
                self._opened = (os.getpid(), opened, as_stored(opened, tuple(range(opened.ndim))))
        return self._opened[1:]

    @property
    def order(self) -> tuple[int, ...]:
        """The field's axes, channels first, in the order in which they are stored."""
        return self._open()[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    @property
    def shape(self) -> tuple[int, ...]:
        return channels_first(self.dataset, self.dataset.shape)

    @property
    def scaling(self) -> tuple[np.ndarray, np.ndarray] | None:
        """`offset` and `scale` [C], float32, if the stored values are (x - offset) / scale."""
        attrs = self.dataset.attrs
        with reading(self.path):
            return (attrs["offset"], attrs["scale"]) if "scale" in attrs else None

    def stored(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return the selected values as they are stored, channels first (slices only; axes without one are whole)."""
        opened, order = self._open()
        index = (*index, *[slice(None)] * (len(order) - len(index)))
        try:
            values: np.ndarray = opened[tuple(index[axis] for axis in order)]
        except MemoryError:  # the run's settings may be too much for the machine
            raise
        except Exception as error:
            raise unreadable(self.path, error, f"{self.name}: {TORN}") from None
        return values.transpose([order.index(axis) for axis in range(values.ndim)])

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return the selected values as a fresh array, float32 or integers (all axes kept: slices only)."""
        values = self.stored(index)
        if values.dtype.kind == "f":
            values = values.astype(np.float32, copy=False)
        if self.scaling is not None:
            axis = self.dataset.attrs.get("channel_axis")
            shape = [-1 if a == axis else 1 for a in range(values.ndim)]
            offset, scale = (part.reshape(shape) for part in self.scaling)
            values = values * scale + offset
        return values


@dataclass
class Moments:
    """Running count, mean, sum of squared deviations, extremes of each of C channels (float64), mergeable.

    The update is that of Chan, Golub and LeVeque (1979), which neither overflows nor cancels.
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
        """Moments of an array, taken by blocks that the processor's cache holds in float64."""
        found = Moments.empty(1 if channel_axis is None else values.shape[channel_axis])
        # Of rows with channels, small ones are taken together.
        rows = max(1, BLOCK // max(1, values[:1].size)) if channel_axis else max(1, len(values))
        for first in range(0, len(values), rows):
            some = values[first : first + rows]
            flat = (some if channel_axis is None else np.moveaxis(some, channel_axis, 0)).reshape(len(found.mean), -1)
            columns = max(1, BLOCK // len(flat))
            for start in range(0, flat.shape[1], columns):
                x = flat[:, start : start + columns].astype(np.float64)
                mean = x.mean(axis=1)
                low, high = x.min(axis=1), x.max(axis=1)
                with np.errstate(invalid="ignore"):  # of infinities, which the mean tells
                    m2 = np.square(x - mean[:, None]).sum(axis=1)
                found = found.merged(Moments(x.shape[1], mean, m2, low, high))
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
    def finite(self) -> bool:
        """Whether every value was a finite number: one that is not makes the mean such a one."""
        return bool(np.isfinite(self.mean).all() and np.isfinite(self.m2).all())

    @property
    def std(self) -> np.ndarray:
        """Population standard deviation [C]."""
        return np.sqrt(self.m2 / max(self.count, 1))

    def to_json(self) -> str:
        """Return JSON from which `from_json` restores the moments exactly."""
        arrays = {key: getattr(self, key).tolist() for key in ("mean", "m2", "minimum", "maximum")}
        return json.dumps({"count": self.count, **arrays})

    @staticmethod
    def from_json(text: str) -> Moments:
        values = json.loads(text)
        return Moments(values["count"], *(np.array(values[key]) for key in ("mean", "m2", "minimum", "maximum")))


def check_finite(values: np.ndarray, field: Field, origin: str, first_row: int) -> None:
    """Raise a `UserError` that names the first channel and row of `values` holding NaN or infinity."""
    if not field.floating or np.isfinite(values).all():
        return
    bad = np.argwhere(~np.isfinite(values))
    place = bad[0]
    channel = field.channels[0 if field.channel_axis is None else place[field.channel_axis]]
    raise UserError(
        f"{origin}: {field.name}: channel '{channel}' is not finite at row {first_row + place[field.row_axis]} "
        f"({len(bad)} such values in this block); mend or leave out this part of the input"
    )
