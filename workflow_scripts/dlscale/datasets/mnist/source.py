"""IDX files (http://yann.lecun.com/exdb/mnist), gzipped or not: images uint8 [N, H, W], labels uint8 [N]."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import IO, Any

import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import reading
from dlscale.data.kind import Part
from dlscale.data.source import Source
from dlscale.data.store import Field

CLASSES = 10


def open_source(dataset: Any, part: Part, paths: list[Path]) -> IdxSource:
    """Open the images and labels of a part."""
    return IdxSource(part, *paths)


class IdxFile:
    """One IDX file of unsigned bytes, read row by row from any row on; memory holds what is asked for.

    Attributes
    ----------
    shape
        Of the array in it.
    """

    def __init__(self, path: Path, ndim: int) -> None:
        self.path = path
        with reading(path), open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        self._file: IO[bytes] = gzip.open(path) if zipped else open(path, "rb")  # type: ignore[assignment]  # noqa: SIM115
        magic = self._bytes(4)
        if magic[:3] != b"\0\0\x08" or magic[3] != ndim:
            raise UserError(
                f"{path}: not an IDX file of unsigned bytes with {ndim} axes (it begins with {magic.hex()}, expected "
                f"{bytes([0, 0, 8, ndim]).hex()}); images and labels may be swapped"
            )
        self.shape = struct.unpack(f">{ndim}I", self._bytes(4 * ndim))
        if not all(self.shape):
            raise UserError(f"{path}: its shape is {self.shape}; expected at least one row, of at least one value")
        self._start = 4 + 4 * ndim
        self._row = math.prod(self.shape[1:])
        self._check_end()

    def _check_end(self) -> None:
        """Read on to the end: the file holds the rows that it declares and no more, and gzip compares its checksum."""
        left = self.shape[0] * self._row
        while left:
            left -= len(self._bytes(min(left, 2**20)))
        with reading(self.path):
            more = self._file.read(1)
        if more:
            raise UserError(f"{self.path}: goes on after its {self.shape[0]} rows; fetch it again")

    def _bytes(self, count: int) -> bytes:
        with reading(self.path):
            data = self._file.read(count)
        if len(data) < count:
            raise UserError(f"{self.path}: ends before its last row; it is truncated, fetch it again")
        return data

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop), uint8."""
        self._file.seek(self._start + start * self._row)
        data = self._bytes((stop - start) * self._row)
        return np.frombuffer(data, np.uint8).reshape(stop - start, *self.shape[1:])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class IdxSource(Source):
    """Images uint8 [N, 1, H, W] and labels int64 [N] of one part."""

    def __init__(self, part: Part, images: Path, labels: Path) -> None:
        self._images, self._labels = IdxFile(images, 3), IdxFile(labels, 1)
        count, height, width = self._images.shape
        if self._labels.shape[0] != count:
            raise UserError(f"{labels}: {self._labels.shape[0]} labels for the {count} images of {images}")
        low, high = part.fraction
        self._first = math.ceil(low * count - 1e-9)
        rows = math.floor(high * count + 1e-9) - self._first
        if rows < 1:
            raise UserError(f"{images}: split '{part.split}' is empty: {count} images, shares {low:g} to {high:g}")
        self.fields = (
            Field("images", ("intensity",), ("1",), (rows, 1, height, width), 1, dtype="uint8"),
            Field("labels", ("digit",), ("1",), (rows,), None, dtype="int64"),
        )
        self.bytes_per_row = 2 * height * width + 16
        self.attributes = {"images": images.name, "labels": labels.name}

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        rows = self._first + start, self._first + stop
        labels = self._labels.read(*rows)
        if labels.max() >= CLASSES:
            row = rows[0] + int(np.argmax(labels >= CLASSES))
            raise UserError(f"{self._labels.path}: label {labels.max()} in row {row}; expected digits, 0 to 9")
        return {"images": self._images.read(*rows)[:, None], "labels": labels.astype(np.int64)}

    def close(self) -> None:
        self._images.close()
        self._labels.close()
