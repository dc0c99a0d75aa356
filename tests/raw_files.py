"""Small files in the layouts that dlscale reads (raw volumes, the SC22 and SC23 tutorials' files), and manifests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dlscale.data.manifest import FieldInfo, File, Manifest
from dlscale.data.store import Field
from dlscale.extensions.cosmo_unet.cosmo.channels import CHANNELS

CHANNELS_OF = {name: list(spec[0]) for name, spec in CHANNELS.items()}


def volume(shape: tuple[int, int, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Return plausible physical fields `Nbody` [4, D, H, W] and `Hydro` [5, D, H, W], float32."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, channels in CHANNELS_OF.items():
        fields = []
        for channel in channels:
            if "velocity" in channel:
                fields.append(rng.normal(0, 200, shape))
            elif "temperature" in channel:
                fields.append(10 ** rng.normal(4.5, 0.5, shape))
            else:
                fields.append(np.exp(rng.normal(0, 1, shape)) * (rng.random(shape) > 0.05))  # some cells are empty
        found[name] = np.stack(fields).astype(np.float32)
    return found


def published(fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Transform physical fields to the form in SC22's files, in which most values are in (-1, 1)."""
    return {
        name: np.stack([t.forward(channel) for t, channel in zip(CHANNELS[name][2], values, strict=True)])
        for name, values in fields.items()
    }


def write_volume(path: Path, fields: dict[str, np.ndarray]) -> Path:
    """Write fields like SC22's files: contiguous float32, with an attribute as a C program writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.attrs["code"] = np.bytes_("Nyx")
        for name, values in fields.items():
            file.create_dataset(name, data=values)
    return path


def cosmo(train: list[Path], valid: list[Path], kind: str = "files", **more: Any) -> dict[str, Any]:
    """Return the settings of a cosmo dataset that consists of files."""
    paths = {"train": [str(path) for path in train], "valid": [str(path) for path in valid]}
    return {"kind": "cosmo", "source": {"kind": kind, **paths}, **more}


def write_years(
    folder: Path, years: dict[str, dict[int, int]], channels: int = 3, shape: tuple[int, int] = (9, 16), seed: int = 0
) -> Path:
    """Write a folder in SC23's layout: `SPLIT/YEAR.h5` with the given number of times, and `stats/`.

    Fields are smooth in time, so models can learn them. `shape` is the grid in the files (latitudes, longitudes),
    before a crop.
    """
    rng = np.random.default_rng(seed)
    height, width = shape
    scale = 10.0 ** np.arange(channels)[:, None, None]
    waves = rng.normal(size=(channels, height, width)), rng.normal(size=(channels, height, width))
    training = []
    for split, files in years.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for year, times in files.items():
            phase = 0.3 * np.arange(times)[:, None, None, None] + year
            values = scale * (5 + np.cos(phase) * waves[0] + np.sin(phase) * waves[1]).astype(np.float32)
            with h5py.File(folder / split / f"{year}.h5", "w") as file:
                file.create_dataset("fields", data=values, dtype=np.float32)
            if split == "train":
                training.append(values)
    series = np.concatenate(training)
    (folder / "stats").mkdir()
    np.save(folder / "stats" / "global_means.npy", series.mean(axis=(0, 2, 3), keepdims=True).astype(np.float32))
    np.save(folder / "stats" / "global_stds.npy", series.std(axis=(0, 2, 3), keepdims=True).astype(np.float32))
    np.save(folder / "stats" / "time_means.npy", series.mean(axis=0, keepdims=True).astype(np.float32))
    return folder


def era5(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of an ERA5 dataset in SC23's layout."""
    return {"kind": "era5", "source": {"kind": "prepared", "path": str(folder)}, **more}


def manifest_of(
    folder: Path, kind: str, fields: Sequence[Field], splits: dict[str, list[tuple[str, int]]], **info: Any
) -> Manifest:
    """Describe files as the describe stage does, but without statistics.

    Parameters
    ----------
    fields
        Fields of the first file.
    splits
        (name, rows) of each file, by split.
    info
        Values that replace the defaults of every `FieldInfo`.
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
