"""`manifest.json`: everything that reading a dataset needs, and what it was made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import read_json, write_json
from dlscale.data.transforms import Transform


@dataclass(frozen=True)
class File:
    """One data file: `path` (absolute, or relative to the manifest), its rows, size and identity."""

    path: str
    rows: int
    bytes: int
    identity: str


@dataclass(frozen=True)
class FieldInfo:
    """What one HDF5 dataset holds in every file.

    Attributes
    ----------
    channels, units
        Of each of the C channels; units are physical.
    grid
        Spatial shape to read: (D, H, W) is given by the files for volumes; (H, W) for time series.
    transforms
        Physical to model units, by channel.
    stored
        `model`: values on disk are in model units; `physical`: readers apply `transforms`.
    mean, std, minimum, maximum
        Of the training part, by channel, in stored units.
    """

    channels: list[str]
    units: list[str]
    grid: list[int]
    transforms: list[Transform]
    stored: str
    mean: list[float]
    std: list[float]
    minimum: list[float]
    maximum: list[float]

    def model_mean_std(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation [C] in model units (exact for stored model units and linear transforms)."""
        mean, std = np.array(self.mean), np.array(self.std)
        if self.stored == "model":
            return mean, std
        offset, scale = (np.array([getattr(t, key) for t in self.transforms]) for key in ("offset", "scale"))
        return (mean - offset) / scale, std / scale


@dataclass(frozen=True)
class Manifest:
    """See the module."""

    kind: str
    fields: dict[str, FieldInfo]
    splits: dict[str, list[File]]
    extra: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    def path(self, file: File | str) -> Path:
        """Return where a file lies."""
        return self.folder / (file if isinstance(file, str) else file.path)

    def files(self, split: str) -> list[File]:
        """Return a split's files; it is a `UserError` if there are none."""
        if not self.splits.get(split):
            found = ", ".join(name for name, files in self.splits.items() if files)
            raise UserError(f"{self.folder}: the dataset has no {split} part; its splits: {found}")
        return self.splits[split]

    def check_files(self) -> None:
        """Raise a `UserError` if a file is not there or has another size than when it was described.

        HDF5 reads what is missing at a file's end as zeros, so a file that was cut would train on in silence.
        """
        for file in (file for files in self.splits.values() for file in files):
            path = self.path(file)
            if not path.is_file():
                raise UserError(f"{path}: no such file; run the workflow again to make or fetch it")
            if path.stat().st_size != file.bytes:
                raise UserError(
                    f"{path}: {path.stat().st_size} bytes, expected {file.bytes}; it changed since it was described; "
                    f"put it back, or delete {self.folder / 'manifest.json'} and run the workflow again"
                )

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        values = asdict(self)
        del values["folder"]
        write_json(path, values)

    @staticmethod
    def read(path: str | Path) -> Manifest:
        """Read what `write` wrote."""
        values = read_json(path)
        try:
            fields = {
                name: FieldInfo(**{**info, "transforms": [Transform(**t) for t in info["transforms"]]})
                for name, info in values.pop("fields").items()
            }
            splits = {split: [File(**file) for file in files] for split, files in values.pop("splits").items()}
            return Manifest(fields=fields, splits=splits, folder=Path(path).resolve().parent, **values)
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: not a manifest of this version ({error}); delete it and run the workflow again"
            ) from None
