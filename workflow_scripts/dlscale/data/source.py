"""Base classes of readers of raw files, and a check of HDF5 files."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import mmap
import os
import resource
import signal
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import h5py
import numpy as np

from dlscale.core.errors import UserError, unknown
from dlscale.core.files import TORN, no_pipe
from dlscale.data.store import Field

#: Largest CPU time in which HDF5 reads a file's structure, seconds; waiting for a slow file system does not count.
MAX_STRUCTURE_SECONDS = 10
#: Largest number of chunks of a dataset for which `check_structure` reads the chunks' addresses.
MAX_CHUNKS = 10**6


def _walk_hdf5(path: Path, stop: float) -> None:
    with h5py.File(path, "r") as file:
        _read_structure(file, stop)
        file.visititems(lambda _, item: _read_structure(item, stop) or None)


def check_structure(
    paths: Sequence[Path],
    walk: Callable[[Path, float], object] = _walk_hdf5,
    library: str = "HDF5",
    seconds: float | None = None,  # largest CPU time; default: MAX_STRUCTURE_SECONDS
) -> None:
    """Refuse files on which a library loops or crashes, by reading the files' structure in a child process.

    HDF5 may follow a damaged file's addresses in circles. Python's signal handlers run only after HDF5 returns, so a
    loop can be stopped only in another process.
    """
    for path in paths:
        no_pipe(path)
    paths = [path for path in paths if path.is_file() and (walk != _walk_hdf5 or h5py.is_hdf5(path))]
    if not paths:
        return
    current = mmap.mmap(-1, 8)  # shared with the child: the number of the file that the child reads
    with warnings.catch_warnings():
        # Python warns about a fork while threads run. This fork is safe, because the threads do not use the library.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _walk_and_exit(paths, current, walk, seconds or MAX_STRUCTURE_SECONDS)
    try:
        status = os.waitpid(child, 0)[1]
    except BaseException:  # this process is ending, as after Ctrl-C
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # the child has just ended
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise
    if os.WIFSIGNALED(status):
        path = paths[int.from_bytes(current[:], "little")]
        if os.WTERMSIG(status) == signal.SIGKILL:
            raise UserError(
                f"{path}: the process that reads the structure of this file was killed; request more memory"
            )
        raise UserError(
            f"{path}: {library} {'loops' if os.WTERMSIG(status) == signal.SIGXCPU else 'crashes'} while it reads the "
            f"structure of this file; {TORN}"
        )


def _walk_and_exit(
    paths: Sequence[Path], current: mmap.mmap, walk: Callable[[Path, float], object], seconds: float
) -> NoReturn:
    """Read the structure of files, and end this forked process.

    Exceptions are ignored, because the stage's reader of the files will report them.
    """
    try:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
            signal.signal(each, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number, path in enumerate(paths):
            current[:] = number.to_bytes(8, "little")
            stop = time.process_time() + seconds / 2  # earlier than the limit, which only a loop reaches
            with contextlib.suppress(ValueError):  # the hard limit of this process is lower
                resource.setrlimit(
                    resource.RLIMIT_CPU, (math.ceil(stop + seconds / 2), resource.getrlimit(resource.RLIMIT_CPU)[1])
                )
            with contextlib.suppress(Exception):
                walk(path, stop)
    finally:
        os._exit(0)


def _read_structure(item: Any, stop: float) -> bool:
    """Read attributes, members, dimensions and chunk addresses of `item`; return whether CPU time exceeds `stop`."""
    with contextlib.suppress(Exception):
        dict(item.attrs)
    with contextlib.suppress(Exception):
        if isinstance(item, h5py.Group):
            list(item)
        else:
            [list(dim) for dim in item.dims]
            if item.chunks and math.prod(item.shape) <= MAX_CHUNKS * math.prod(item.chunks):
                item.id.get_num_chunks()
    return time.process_time() > stop


class Source(ABC):
    """Raw input of one part, streamed along rows: slabs of a volume, times of a series, or samples."""

    fields: tuple[Field, ...]  # fields of the part at the stored resolution, all with the same number of rows
    bytes_per_row: int  # memory that `read` needs per row, bytes: raw buffers and results
    coordinates: Mapping[str, np.ndarray] = {}  # small arrays stored with the data, equal in all pieces
    row_coordinates: Mapping[str, np.ndarray] = {}  # arrays [rows, ...] stored with the data, such as times
    summed: tuple[str, ...] = ()  # names of fields [N, ...] whose sums over rows are stored as `sum/NAME`, float64
    attributes: Mapping[str, Any] = {}  # provenance of the raw files, which is stored as JSON

    @abstractmethod
    def read(self, start: int, stop: int) -> Mapping[str, np.ndarray]:
        """Return rows [start, stop) of each field, in the field's type, as field name → values.

        The next call may overwrite the values.
        """

    def close(self) -> None:  # noqa: B027 - arrays in memory need no closing
        """Close the raw files."""


def block_average(values: np.ndarray, factor: int, axes: Sequence[int], out: np.ndarray | None = None) -> np.ndarray:
    """Average blocks of `factor` cells of `values` [A, B, H, W] along each of `axes`, which are among the last three.

    Cells beyond the last full block are dropped. Sums are float32, so the error is below factor * 2e-7 times the mean
    magnitude of the values. The result is written into `out` if given. Without `out`, a factor of 1 returns `values`.
    """
    if factor == 1 and out is None:
        return values
    shape = [size // factor if axis in axes else size for axis, size in enumerate(values.shape)]
    out = np.empty(shape, np.float32) if out is None else out
    for row, averaged in zip(values, out, strict=True):  # one row at a time, so that the sums take little memory
        sums = row
        for axis in sorted((axis - 1 for axis in axes), reverse=True):
            whole = np.moveaxis(sums, axis, 0)[: shape[axis + 1] * factor]
            sums = np.moveaxis(sum((whole[place::factor] for place in range(1, factor)), whole[::factor]), 0, axis)
        np.multiply(sums, np.float32(1.0 / factor ** len(axes)), out=averaged)
    return out


class ArraySource(Source):
    """Source of arrays in memory, given as field name → array [N, ...]; booleans become uint8, floats float32.

    Parameters
    ----------
    channels
        Names of the channels along the second axis, for fields that have such an axis.
    units
        Unit of each field; `1` if absent.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        channels: Mapping[str, Sequence[str]] | None = None,
        units: Mapping[str, str] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        for name, values in arrays.items():
            plain = isinstance(values, np.ndarray) and not isinstance(values, np.ma.MaskedArray) and values.ndim > 0
            if not plain or values.dtype.kind not in "biuf":
                what = f"{type(values).__name__} of {getattr(values, 'dtype', 'no dtype')}"
                raise UserError(
                    f"ArraySource: '{name}' is a {what}; expected a NumPy array of numbers [N, ...], unmasked"
                )
        self._arrays = {
            name: values.astype(
                {"f": np.float32, "b": np.uint8}.get(values.dtype.kind, values.dtype.newbyteorder("=")), copy=False
            )
            for name, values in arrays.items()
        }
        self.fields = ()
        for name in {**(channels or {}), **(units or {})}:
            if name not in arrays:
                raise UserError(f"ArraySource: {unknown('array', name, arrays)}")
        for name, values in self._arrays.items():
            if len(values) != len(first := next(iter(self._arrays.values()))):
                raise UserError(f"ArraySource: '{name}' has {len(values)} rows, but the first array has {len(first)}")
            names = tuple((channels or {}).get(name, ()))
            own_units = ((units or {}).get(name, "1"),) * (len(names) or 1)
            axis = 1 if names else None
            if names and values.shape[1:2] != (len(names),):
                raise UserError(
                    f"ArraySource: '{name}': {len(names)} named channels do not fit axis 1 of the shape {values.shape}"
                )
            field = Field(name, names or (name,), own_units, values.shape, axis, dtype=str(values.dtype))
            self.fields += (field,)
        rows = max(1, self.fields[0].rows)
        # Memory per row of the values, and of two float64 copies for their statistics.
        self.bytes_per_row = sum(values.nbytes + 16 * values.size for values in self._arrays.values()) // rows + 1
        self.attributes = attributes or {}

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        return {name: values[start:stop] for name, values in self._arrays.items()}
