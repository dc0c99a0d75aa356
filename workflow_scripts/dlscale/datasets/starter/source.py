"""Sources of the rows of a part: simulated samples, or users' NumPy and HDF5 files."""

from __future__ import annotations

import contextlib
import functools
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dlscale.config.dataset import SPLITS
from dlscale.core.errors import UserError, unknown
from dlscale.core.files import reading
from dlscale.data import store
from dlscale.data.kind import Part, share
from dlscale.data.source import Source
from dlscale.data.store import Field
from dlscale.datasets.starter.kind import HDF5

#: Largest number of channels of an image; a sample [C, H, W] with more channels may be a volume.
IMAGE_CHANNELS = 4
#: Length scale of a simulated field, pixels: its power spectrum falls as exp(-k^2 LENGTH^2).
LENGTH = 3.0


def open_source(dataset: Any, part: Part, paths: list[Path]) -> Source:
    """Open the inputs and targets of a part."""
    return FileSource(dataset.source, part, *paths) if paths else SimulatedSource(dataset.source, part)


@functools.cache
def _amplitude(size: int) -> np.ndarray:
    """Return the factor of each Fourier mode, [size, size // 2 + 1]: power spectrum exp(-k^2 LENGTH^2), variance 1."""
    kx, ky = np.fft.rfftfreq(size) * 2 * np.pi, np.fft.fftfreq(size) * 2 * np.pi
    filtered = np.exp(-(kx[None, :] ** 2 + ky[:, None] ** 2) * LENGTH**2 / 2)
    whole = np.exp(-(ky[None, :] ** 2 + ky[:, None] ** 2) * LENGTH**2 / 2)
    return np.asarray(filtered / np.sqrt((whole**2).mean()))


def pair(seed: list[int], size: int, target: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the input and the target of one sample, float32 [size, size]: a smooth random field and its steepness.

    The steepness is an even function of the field, so no linear filter predicts it better than the mean of all targets.
    With target `noise`, input and target are independent random numbers from 0 to 1.
    """
    rng = np.random.default_rng(seed)
    if target == "noise":
        both = rng.random((2, size, size), np.float32)
        return both[0], both[1]
    field = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((size, size))) * _amplitude(size), s=(size, size))
    steepness = LENGTH * np.hypot(*np.gradient(field))
    return field.astype(np.float32), steepness.astype(np.float32)


class SimulatedSource(Source):
    """Source of simulated images, float32 [N, 1, H, W]; each sample has its own random state."""

    def __init__(self, source: Any, part: Part) -> None:
        self._source, self._split = source, SPLITS.index(part.split)
        shape = (getattr(source, part.split), 1, source.size, source.size)
        names = {"input": "field", "target": source.target}
        self.fields = tuple(Field(key, (name,), ("1",), shape, 1) for key, name in names.items())
        self.bytes_per_row = 2 * (4 + 16) * source.size**2  # the values, and two float64 copies for their statistics
        self.attributes = {"simulated": source.target}

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        s = self._source
        images = np.stack([pair([s.seed, self._split, row], s.size, s.target) for row in range(start, stop)])
        return {"input": images[:, 0, None], "target": images[:, 1, None]}


class FileSource(Source):
    """Source of the arrays `input` and `target` of one part: floats become float32, booleans uint8."""

    def __init__(self, source: Any, part: Part, *paths: Path) -> None:
        self._files, self._paths = contextlib.ExitStack(), paths
        self._arrays = {}
        for key, path in zip(("input", "target"), paths, strict=True):
            self._arrays[key] = _open(path, getattr(source, key).array or key, self._files)
        counts = [len(values) for values in self._arrays.values()]
        if counts[0] != counts[1]:
            raise UserError(f"{paths[1]}: {counts[1]} targets, but {counts[0]} inputs in {paths[0]}")
        self._first, rows = share(counts[0], part, paths[0])
        self.fields = tuple(
            _field(key, values.shape, values.dtype, rows, getattr(source, key), path)
            for (key, values), path in zip(self._arrays.items(), paths, strict=True)
        )
        self._last = {key for key in self._arrays if getattr(source, key).channel_axis == "last"}
        # Memory per row: values as stored, as returned, and two float64 copies for their statistics.
        self.bytes_per_row = sum((v.dtype.itemsize + 20) * math.prod(v.shape[1:]) for v in self._arrays.values())
        self.attributes = {key: path.name for key, path in zip(self._arrays, paths, strict=True)}

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        rows, found = slice(self._first + start, self._first + stop), dict[str, np.ndarray]()
        for field, values, path in zip(self.fields, self._arrays.values(), self._paths, strict=True):
            with reading(path):  # HDF5 notices damaged compressed values only here
                read = np.asarray(values[rows]).astype(field.dtype)
            read = np.moveaxis(read, -1, 1) if field.name in self._last else read
            found[field.name] = read.reshape(-1, *field.shape[1:])
        return found

    def close(self) -> None:
        self._files.close()


def _open(path: Path, name: str, stack: contextlib.ExitStack) -> Any:
    """Open the array `name`, to be read on demand; an array of a .npz file is read completely."""
    names, values = [name], None
    if path.is_dir():
        raise UserError(f"{path}: a folder; expected a file. Name one file in this folder")
    if path.suffix in HDF5:
        file = stack.enter_context(store.open_file(path))
        with reading(path):
            store.check_link(file, name)
            values, names = file.get(name), store.names(file)
            if isinstance(values, h5py.Group):
                raise UserError(
                    f"{path}: '{name}' is a group; name one of its arrays in `array`: {', '.join(names[:20])}"
                )
            if isinstance(values, h5py.Dataset) and values.file.filename != file.filename:
                raise UserError(
                    f"{path}: '{name}' lies in another file, which is not read; copy the values into this file"
                )
    else:
        with reading(
            path,
            f"expected {path.suffix} with numbers, not Python objects such as ragged lists; replace the file",
        ):
            values = np.load(path, mmap_mode="r", allow_pickle=False)
            if path.suffix == ".npz":
                with values as arrays:
                    names = arrays.files
                    size = sum(
                        each.file_size for each in arrays.zip.infolist() if each.filename in (name, f"{name}.npy")
                    )
                    if size > store.MEMORY:
                        raise UserError(
                            f"{path}: '{name}' has {size / 1e6:.0f} MB, but an array of a .npz file is read at once "
                            f"and may have at most {store.MEMORY / 1e6:.0f} MB; save the array as .npy"
                        )
                    values = arrays[name] if name in names else None
    if not isinstance(values, h5py.Dataset | np.ndarray):
        raise UserError(f"{path}: {unknown('array', name, names)}; name the array in `array` of the source")
    with reading(path):
        if isinstance(values, h5py.Dataset):
            store.check_values(values)
        dtype, shape = values.dtype, values.shape
    if dtype.kind not in "fiub" or not shape or not math.prod(shape):
        raise UserError(f"{path}: '{name}' has type {dtype}, shape {shape}; expected numbers, one sample per row")
    return values


def _field(key: str, stored: tuple[int, ...], dtype: np.dtype, rows: int, info: Any, path: Path) -> Field:
    grid = stored[1:]
    axis = info.channel_axis or _evident_axis(grid, len(info.channels))
    if axis is None or (axis in ("first", "last") and not grid):
        fact = f"a sample has no {axis} axis" if axis else "its channel axis is unknown"
        raise UserError(
            f"{path}: '{info.array or key}' has shape {list(stored)}, {fact}. Set `source.{key}.channel_axis` to none "
            "(no channels), first or last (position of the channel axis in a sample), or new (adds an axis for one "
            "channel)"
        )
    shape = {"none": grid, "first": grid, "last": (*grid[-1:], *grid[:-1]), "new": (1, *grid)}[axis]
    count = 1 if axis == "none" else shape[0]
    channels = tuple(info.channels) or ((key,) if count == 1 else tuple(f"{key} {n}" for n in range(count)))
    if len(channels) != count:
        raise UserError(
            f"{path}: source.{key}.channels: {len(channels)} names for {count} channels (shape {list(stored)}, "
            f"channel_axis {axis})"
        )
    name = {"f": "float32", "b": "uint8"}.get(dtype.kind, str(dtype.newbyteorder("=")))
    return Field(key, channels, (info.unit,) * count, (rows, *shape), None if axis == "none" else 1, dtype=name)


def _evident_axis(grid: tuple[int, ...], named: int) -> str | None:
    """Return the channel axis if the shape of a sample and the number of named channels show it, else None."""
    if named and grid[:1] == (named,) and (len(grid) == 1 or grid[-1] != named):
        return "first"
    if len(grid) < 2:
        return "none"
    return "first" if len(grid) > 2 and grid[0] <= IMAGE_CHANNELS and grid[0] < min(grid[1:]) else None
