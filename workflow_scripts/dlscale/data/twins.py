"""Twins of volumes: their values in a `.npy` file [D, H, W, C], of which DALI reads boxes.

The published program's lie beside its HDF5 files, and are read if they are there. Others are made where they are first
needed, once, of all volumes of a split one after another, beside the manifest: with staging in the copy.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import explained, remove, whole
from dlscale.core.machine import free_memory
from dlscale.core.process import turn
from dlscale.core.progress import tracked
from dlscale.core.text import size
from dlscale.data.samples import BoxField
from dlscale.data.staging import MEMORY

#: Bytes that are written at a time, and cells that are compared of a twin that somebody else made.
SLAB, CELLS = 64_000_000, 64
INSTEAD = "use loader.reader h5py"


@dataclass(frozen=True)
class Twin:
    """A twin of all volumes of a field in a split."""

    path: Path
    first: np.ndarray  #: of each file: where it begins along D, int64 [files]


def twin(field: BoxField, suffix: str) -> Twin:
    """Return the twin of a field; `suffix` is what the published program calls it: `data` or `label`."""
    edges = np.array([field.shape_of(file)[1:] for file in range(len(field.readers))])
    first = np.cumsum(edges[:, 0]) - edges[:, 0]
    original = Path(field.readers[0].path)
    beside = original.with_name(f"{original.stem}_{suffix}.npy")
    if len(edges) == 1 and beside.exists():
        _check(beside, field)
        return Twin(beside, first)
    content = hashlib.sha256(" ".join([*field.digests, str(field.dtype)]).encode()).hexdigest()[:16]
    path = field.stem.with_name(f"{field.stem.name}-{content}.npy")
    if not path.exists():
        try:
            path.parent.mkdir(exist_ok=True)
            with turn(path.parent / "lock"):
                if not path.exists():  # another process may have made it meanwhile
                    _write(path, field, edges)
        except OSError as error:
            raise explained(error, path) from error
    return Twin(path, first)


def _write(path: Path, field: BoxField, edges: np.ndarray) -> None:
    """Write all volumes one after another; smaller ones are padded along H and W."""
    for former in path.parent.glob(f"{field.stem.name}-*.npy"):  # of other content
        remove(former)
    (height, width), depth, channels = edges[:, 1:].max(axis=0).tolist(), int(edges[:, 0].sum()), field.shape[0]
    shape, row = (depth, height, width, channels), height * width * channels * field.dtype.itemsize
    free = shutil.disk_usage(path.parent).free
    if path.is_relative_to(MEMORY):  # a copy's, of which the run itself needs some
        free = min(free, int(0.8 * free_memory()))
    if depth * row > free:
        raise UserError(
            f"loader.reader: numpy: the twin {path} takes {size(depth * row, ' ')}, and there is room for "
            f"{size(free, ' ')}; {INSTEAD}"
        )
    rows = max(1, SLAB // row)

    def slabs() -> Iterator[tuple[int, int, int]]:
        for file, edge in enumerate(edges[:, 0].tolist()):
            yield from ((file, start, min(start + rows, edge)) for start in range(0, edge, rows))

    count = int((-(-edges[:, 0] // rows)).sum())
    with whole(path) as temporary, open(temporary, "wb") as out:
        header = {"descr": np.lib.format.dtype_to_descr(field.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(out, header)
        for file, start, stop in tracked(slabs(), f"making {path.name}", count, "slabs"):
            a, b = edges[file, 1:].tolist()
            slab = np.zeros((stop - start, height, width, channels), field.dtype)
            field.copy(file, np.array([start, 0, 0]), np.moveaxis(slab[:, :a, :b], -1, 0))
            out.write(slab.data)


def _check(path: Path, field: BoxField) -> None:
    """Refuse a file that is not the twin of a field's only file: by its form, and by some of its cells."""
    expected = (*field.shape_of(0)[1:], field.shape[0])
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
        wrong = f"{values.shape} of {values.dtype}" if (values.shape, values.dtype) != (expected, field.dtype) else ""
        wrong = wrong or ("" if values.flags.c_contiguous else "the first axis quickest")
    except (OSError, ValueError) as error:
        wrong = str(error)
    if not wrong:
        for cell in np.random.default_rng(0).integers(expected[:3], size=(CELLS, 3)):
            own = np.empty((expected[3], 1, 1, 1), field.dtype)
            field.copy(0, cell, own)
            if values[tuple(cell)].tobytes() != own.tobytes():
                wrong = f"other values in cell {tuple(cell.tolist())}"
                break
    if wrong:
        raise UserError(
            f"{path}: not the twin of {field.readers[0].path}: {wrong}; expected its {field.readers[0].name}, "
            f"{expected} of {field.dtype}; remove it, and one is made; or {INSTEAD}"
        )
