"""Manifests of files that a test has written itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlscale.data.manifest import FieldInfo, File, Manifest
from dlscale.data.store import Field


def manifest_of(
    folder: Path, kind: str, fields: Sequence[Field], splits: dict[str, list[tuple[str, int]]], **info: Any
) -> Manifest:
    """Describe files as the describe stage would, without statistics.

    Parameters
    ----------
    fields
        What the first file holds.
    splits
        Name and rows of each file of a split.
    info
        What differs in all `FieldInfo`s.
    """
    infos = {
        field.name: FieldInfo(
            **{
                "channels": list(field.channels),
                "units": list(field.units),
                "grid": list(field.grid),
                "transforms": list(field.transforms),
                "stored": "model",
                "mean": [],
                "std": [],
                "dtype": field.dtype,
                "channel_axis": field.channel_axis,
                **info,
            }
        )
        for field in fields
    }
    described = {
        split: [File(path=name, rows=rows, bytes=(folder / name).stat().st_size, digest=name) for name, rows in files]
        for split, files in splits.items()
    }
    return Manifest(kind=kind, fields=infos, splits=described, folder=folder)
