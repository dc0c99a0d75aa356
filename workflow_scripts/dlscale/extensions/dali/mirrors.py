"""Mirrors of volumes: `.npy` files [D, H, W, C] with copies of the volumes' values, from which DALI reads boxes.

If a split is a single HDF5 file, mirrors that SC22's tutorial wrote next to this file are used. Otherwise dlscale makes
a mirror of all volumes of a split, one after another, next to the manifest; `prepare.py` makes this mirror before a
stage begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dlscale.core.errors import UserError, brief
from dlscale.data.samples import BoxField

#: Maximum number of bytes read or written at a time, and number of cells that `difference` compares.
SLAB, CELLS = 64_000_000, 64
#: Names of inputs and targets in the file names of mirrors that SC22's tutorial makes.
NAMES = ("data", "label")
INSTEAD = "set loader.reader to h5py"
#: Result of `difference` for the mirror of another field.
OTHER = "other channels"


@dataclass(frozen=True)
class NpyMirror:
    """Mirror of all volumes of a field in a split; smaller volumes are padded with zeros along H and W."""

    path: Path
    edges: np.ndarray  #: size of each volume, int64 [files, 3]
    own: bool  #: whether dlscale makes the mirror

    @property
    def first(self) -> np.ndarray:
        """First row of each volume along D, int64 [files]."""
        return np.asarray(np.cumsum(self.edges[:, 0]) - self.edges[:, 0])


def locate(field: BoxField) -> NpyMirror:
    """Return a field's mirror, which may not exist yet.

    Raise `UserError` if a file next to the field's file has the name of a mirror, but other contents. The mirror of
    another field is allowed.
    """
    edges = np.array([field.shape_of(file)[1:] for file in range(len(field.readers))])
    original = Path(field.readers[0].path)
    beside = [original.with_name(f"{original.stem}_{name}.npy") for name in NAMES] if len(edges) == 1 else []
    wrong = {path: difference(path, field) for path in beside if path.exists()}
    for path, what in wrong.items():
        if not what:
            return NpyMirror(path, edges, own=False)
    if told := [f"{path.name} has {what}" for path, what in wrong.items() if what != OTHER]:
        raise UserError(
            f"{original}: the file next to it is not a mirror of {field.readers[0].name}: {'; '.join(told)}; expected "
            f"{(*edges[0].tolist(), field.shape[0])} of {field.dtype}. Delete that file, and dlscale makes the mirror; "
            f"or {INSTEAD}"
        )
    content = hashlib.sha256(" ".join([*field.digests, str(field.dtype)]).encode()).hexdigest()[:16]
    return NpyMirror(field.stem.with_name(f"{field.stem.name}-{content}.npy"), edges, own=True)


def mirror(field: BoxField) -> NpyMirror:
    """Return the mirror of a field; raise `UserError` if it does not exist."""
    found = locate(field)
    if not found.path.exists():
        raise UserError(
            f"{found.path}: no such mirror. Start the stage by its command, which first makes the mirror; or {INSTEAD}"
        )
    return found


def difference(path: Path, field: BoxField) -> str:
    """Compare the shape, the type and some cells of a file with the values of a field, which has a single file.

    Return the difference in words; an empty text if the file is a mirror of the field.
    """
    expected = (*field.shape_of(0)[1:], field.shape[0])
    if not path.is_file():
        return "no array of values (not a file)"
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header may also raise errors of Python's tokenizer
        return f"no array of values ({brief(error)})"
    if values.shape[:-1] == expected[:-1] and values.shape != expected:
        return OTHER
    if (values.shape, values.dtype) != (expected, field.dtype):
        return f"{values.shape} of {values.dtype}"
    if not values.flags.c_contiguous:
        return "Fortran order"
    for cell in np.random.default_rng(0).integers(expected[:3], size=(CELLS, 3)):
        own = np.empty((expected[3], 1, 1, 1), field.dtype)
        field.copy(0, cell, own)
        if values[tuple(cell)].tobytes() != own.tobytes():
            return f"other values in cell {tuple(cell.tolist())}"
    return ""


def compare(found: NpyMirror, field: BoxField) -> str:
    """Compare all values of a mirror with its HDF5 file; return the difference; an empty text if equal."""
    values = np.load(found.path, mmap_mode="r", allow_pickle=False)
    for file, start, stop in slabs(found, field):
        if values[start:stop].tobytes() != _slab(found, field, file, start, stop).tobytes():
            return f"other values in the rows {start} to {stop - 1}"
    return ""


def bytes_of(found: NpyMirror, field: BoxField) -> int:
    """Return the size of a mirror's values, bytes."""
    return int(np.prod(_shape(found, field))) * field.dtype.itemsize


def _shape(found: NpyMirror, field: BoxField) -> tuple[int, ...]:
    return (int(found.edges[:, 0].sum()), *found.edges[:, 1:].max(axis=0).tolist(), field.shape[0])


def slabs(found: NpyMirror, field: BoxField) -> list[tuple[int, int, int]]:
    """Return the parts in which a mirror is written, each as file number, first row, end row (exclusive)."""
    _, *row = _shape(found, field)
    rows = max(1, SLAB // (int(np.prod(row)) * field.dtype.itemsize))
    return [
        (file, start, min(start + rows, edge))
        for file, edge in enumerate(found.edges[:, 0].tolist())
        for start in range(0, edge, rows)
    ]


def write(found: NpyMirror, field: BoxField, parts: Iterator[tuple[int, int, int]], out: BinaryIO) -> None:
    """Write a mirror into an open file, slab by slab."""
    shape = _shape(found, field)
    header = {"descr": np.lib.format.dtype_to_descr(field.dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, header)
    for file, start, stop in parts:
        out.write(_slab(found, field, file, start, stop).data)


def _slab(found: NpyMirror, field: BoxField, file: int, start: int, stop: int) -> np.ndarray:
    """Return rows [start, stop) of a volume in the mirror's layout, [rows, H, W, C]."""
    slab = np.zeros((stop - start, *_shape(found, field)[1:]), field.dtype)
    _, height, width = found.edges[file].tolist()
    field.copy(file, np.array([start, 0, 0]), np.moveaxis(slab[:, :height, :width], -1, 0))
    return slab
