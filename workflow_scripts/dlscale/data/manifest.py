"""`manifest.json`: the files, fields and provenance of a dataset, for later stages."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field

from dlscale.core.errors import UserError
from dlscale.core.files import reading, stamp
from dlscale.core.record import Record


@dataclass(frozen=True)
class Transform:
    """`model = (g(physical) - offset) / scale`, with g the identity (`linear`) or the natural logarithm (`log`).

    `offset` and `scale` (> 0) are in units of g(physical). Before the logarithm, values below `floor` (physical units)
    are raised to `floor`.
    """

    kind: Literal["linear", "log"] = "linear"
    offset: float = 0.0
    scale: float = 1.0
    floor: float = 1e-30

    def forward(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Map physical to model units, float32, in the shape of `x`; write the result into `out` if given.

        `out` may be `x`.
        """
        out = np.empty(x.shape, np.float32) if out is None else out
        if self.kind == "log":
            x = np.log(np.maximum(x, np.float32(self.floor), out=out), out=out)
        np.subtract(x, np.float32(self.offset), out=out)
        return np.divide(out, np.float32(self.scale), out=out)

    def inverse(self, x: Any) -> Any:
        """Map model to physical units; `x` is a numpy array or a torch tensor of any shape."""
        y = x * self.scale + self.offset
        return y if self.kind == "linear" else np.exp(y) if isinstance(y, np.ndarray) else y.exp()


#: Transform that leaves values unchanged.
IDENTITY = Transform()


class File(Record):
    """One data file."""

    path: str  # absolute, or relative to the manifest
    rows: int
    bytes: int  # size when the file was described, bytes
    digest: str  # SHA-256 that identifies the content: of the file's bytes, or of path, size and time
    verifiable: bool = False  # whether `digest` is the SHA-256 of the file's bytes

    @classmethod
    def of(cls, path: Path, folder: Path, rows: int, digest: str | None = None, verifiable: bool = False) -> File:
        """Describe the file at `path`; `folder` is the folder of the manifest.

        If no digest is given, the content is identified by path, size and modification time, because reading terabytes
        takes hours.
        """
        (size, time), place, folder = stamp(path), path.resolve(), folder.resolve()
        digest = digest or hashlib.sha256(f"{place} {size} {time}".encode()).hexdigest()
        inside = place.is_relative_to(folder)
        name = str(place.relative_to(folder) if inside else place)
        return cls(path=name, rows=rows, bytes=size, digest=digest, verifiable=verifiable)


class FieldInfo(Record):
    """One field (HDF5 dataset) of all files; `dlscale.data.store.Field` describes a field of one file."""

    channels: list[str]  # channel names; one name if there is no channel axis
    units: list[str]  # physical unit of each channel
    grid: list[int]  # shape without rows and channels; for volumes, whose sizes may differ, the first file's [D, H, W]
    transforms: list[Transform]  # transform of each channel from physical to model units
    stored: Literal["model", "physical"]  # units on disk; readers transform physical values
    mean: list[float]  # mean of each channel over the training part, in stored units
    std: list[float]  # standard deviation, like `mean`
    minimum: list[float] = []  # smallest value, like `mean`; empty if unknown
    maximum: list[float] = []  # largest value, like `mean`; empty if unknown
    dtype: str = "float32"  # type as read: float32 for all floating-point numbers, else the stored type
    channel_axis: int | None = None  # 0 for [C, D, H, W], 1 for [N, C, ...], None for [N, ...] without channels
    classes: int | None = None  # number of classes of labels (one integer per row) in all splits

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row: (C, *grid), or the grid without an axis of channels."""
        return tuple(self.grid) if self.channel_axis is None else (len(self.channels), *self.grid)

    def standardised(self) -> FieldInfo:
        transforms = [Transform("linear", m, s) for m, s in zip(self.mean, self.std, strict=True)]
        return self.model_copy(update={"transforms": transforms, "stored": "physical"})

    def check_varies(self, where: str) -> None:
        for channel, std in zip(self.channels, self.std, strict=True):
            if not std > 0:
                raise UserError(
                    f"{where}: channel '{channel}' is constant over the training part (variance 0), so it cannot be "
                    "normalised; remove the channel or correct the input"
                )


class Manifest(Record):
    """Content of `manifest.json`."""

    kind: str  # kind of dataset
    rows: str = "rows"  # noun for a file's rows on the page, such as "images"
    fields: dict[str, FieldInfo]  # name of the HDF5 dataset → field
    splits: dict[str, list[File]]
    facts: list[str] = []  # short facts for the report
    extra: dict[str, Any] = {}  # additions by the kind of dataset
    provenance: dict[str, Any] = {}  # the dataset's `settings`, and `raws`: path of a raw file → size and time
    own: str = ""  # SHA-256 of the manifest without this key, which reveals later changes of the file
    folder: Path = Field(Path(), exclude=True)  # folder of the manifest; not in the file

    def path(self, file: File | str) -> Path:
        return self.folder / (file if isinstance(file, str) else file.path)

    def files(self, split: str) -> list[File]:
        if not self.splits.get(split):
            there = ", ".join(name for name, files in self.splits.items() if files)
            raise UserError(f"{self.folder}: the dataset has no {split} part; its splits: {there}")
        return self.splits[split]

    def check_files(self) -> None:
        """Refuse a missing file, or a file whose size differs from the manifest.

        If an open file is truncated, HDF5 reads zeros for the missing end, so training would continue without an error.
        """
        for file in (file for files in self.splits.values() for file in files):
            path = self.path(file)
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
            if found != f"{file.bytes} bytes":
                raise UserError(
                    f"{path}: {found}, expected {file.bytes} bytes: the file changed after the manifest was written; "
                    f"put the original file back, or delete {self.folder / 'manifest.json'} and run the workflow again"
                )

    def write(self, path: str | Path) -> None:
        super(Manifest, self.sealed()).write(path)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a manifest that `write` wrote; raise `UserError` if the file was changed later."""
        manifest = super().read(path).model_copy(update={"folder": Path(path).resolve().parent})
        with reading(path, "the manifest was changed after it was written; delete it and run the workflow again"):
            if manifest.own != manifest.sealed().own:  # text that is not UTF-8 raises, too
                raise ValueError("the digest does not fit the content")
        return manifest
