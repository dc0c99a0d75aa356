"""Read IDX files (http://yann.lecun.com/exdb/mnist), gzipped or not: images uint8 [N, H, W], labels uint8 [N]."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import reading
from dlscale.data.kind import Part, share
from dlscale.data.source import Source
from dlscale.data.store import Field

CLASSES = 10
#: Types of values in IDX files, except unsigned bytes, by code.
TYPES = {9: "signed bytes", 11: "16-bit integers", 12: "32-bit integers", 13: "32-bit floats", 14: "64-bit floats"}
#: Maximum size of a file after unpacking, bytes.
LARGEST = 10**9


def open_source(dataset: Any, part: Part, paths: list[Path]) -> IdxSource:
    """Open the images and labels of a part."""
    images, labels = paths
    return IdxSource(part, images, labels)


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Return the unsigned bytes of an IDX file with `ndim` axes; raise `UserError` for other or too large files."""
    if path.is_dir():
        raise UserError(f"{path}: a folder; expected an IDX file")
    with reading(path), open(path, "rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        # Read to the end of the file, where gzip verifies the checksum.
        data = (gzip.GzipFile(fileobj=raw) if zipped else raw).read(LARGEST + 1)
    if len(data) > LARGEST:
        raise UserError(
            f"{path}: larger than {LARGEST / 1e9:g} GB after unpacking, the maximum for reading into memory. Split the "
            "file"
        )
    if data[:2] == b"\0\0" and len(data) > 3 and data[2] in TYPES:
        raise UserError(
            f"{path}: expected an IDX file of unsigned bytes with {ndim} axes, got {TYPES[data[2]]} with {data[3]} "
            "axes. From QMNIST's extended labels, extract the first column, the digit, as bytes"
        )
    if data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * ndim or data[3] != ndim:
        cause = "colour images are not supported" if data[3:4] == b"\4" else "images and labels may be swapped"
        raise UserError(
            f"{path}: not an IDX file of unsigned bytes with {ndim} axes (it begins with {data[:4].hex()}, expected "
            f"{bytes([0, 0, 8, ndim]).hex()}); {cause}"
        )
    shape, count = struct.unpack_from(f">{ndim}I", data, 4), len(data) - 4 - 4 * ndim
    if not all(shape) or count != math.prod(shape):
        cause = "may be truncated" if count <= math.prod(shape) else "is longer than its header states"
        raise UserError(
            f"{path}: {count} values, expected shape {shape}, at least one value; the file {cause}: fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape)


class IdxSource(Source):
    """Images uint8 [N, 1, H, W] and labels int64 [N] of a part of a dataset."""

    def __init__(self, part: Part, images: Path, labels: Path) -> None:
        self._images, self._labels = read_idx(images, 3), read_idx(labels, 1)
        count, height, width = self._images.shape
        if self._labels.size != count:
            raise UserError(
                f"{labels}: {self._labels.size} labels for the {count} images of {images}; expected a label per image"
            )
        if self._labels.max() >= CLASSES:
            row = int(np.argmax(self._labels >= CLASSES))
            raise UserError(f"{labels}: label {self._labels[row]} in row {row}; expected digits, 0 to 9")
        self._first, rows = share(count, part, images)
        self.fields = (
            Field("images", ("intensity",), ("1",), (rows, 1, height, width), 1, dtype="uint8"),
            Field("labels", ("digit",), ("1",), (rows,), None, dtype="int64"),
        )
        self.bytes_per_row = 2 * height * width + 16
        self.attributes = {"images": images.name, "labels": labels.name}

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        rows = slice(self._first + start, self._first + stop)
        return {"images": self._images[rows, None], "labels": self._labels[rows].astype(np.int64)}
