"""Stage `describe`: statistics of the training part, and the manifest.

It ends preprocessing, and it is where prepared files (the published layouts) enter: they are checked
and described where they lie.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from dlscale.config.dataset import SPLITS, DatasetSettings
from dlscale.core.errors import UserError
from dlscale.core.files import sha256, whole
from dlscale.core.progress import tracked
from dlscale.data import parts, store
from dlscale.data.manifest import FieldInfo, File, Manifest
from dlscale.data.store import Field, Moments
from dlscale.data.transforms import DENSITY, IDENTITY, Transform
from dlscale.datasets.cosmo.channels import CHANNELS
from dlscale.datasets.cosmo.kind import CosmoPrepared
from dlscale.datasets.era5.kind import Era5Dataset, Era5Prepared


def main(args: argparse.Namespace) -> None:
    """Write `args.manifest` and `args.stats` of the dataset in `args.config`."""
    dataset = parts.load_dataset(args.config)
    folder = Path(args.manifest).resolve().parent
    if isinstance(dataset.source, Era5Prepared):
        manifest = _era5_prepared(dataset, folder)
    elif isinstance(dataset.source, CosmoPrepared):
        manifest = _cosmo_prepared(dataset, args.source, folder)
    else:
        manifest = _own(dataset, folder)
    _check_disjoint(manifest)
    with whole(args.stats) as stats:
        stats.mkdir()
        manifest = _write_stats(manifest, stats, folder, Path(args.stats).name)
    manifest.write(Path(args.manifest))  # last: it is what the stages after this one wait for


def _own(dataset: DatasetSettings, folder: Path) -> Manifest:
    """Describe what `assemble` wrote."""
    splits: dict[str, list[File]] = {split: [] for split in SPLITS}
    infos: dict[str, Field] = {}
    moments: dict[str, Moments] = {}
    coordinates: dict[str, Any] = {}
    steps: set[float] = set()
    for part in tracked(parts.parts(dataset), "describing", len(parts.parts(dataset)), "files"):
        path = folder / part.split / f"{part.name}.h5"
        with store.open_file(path) as file:
            names = list(file.attrs["fields"])
            for name in names:
                found = Field.of(file[name])
                # Volumes may differ in size: crops are taken from each as it is.
                if infos.setdefault(name, found).shape[2:] != found.shape[2:] and found.channel_axis == 1:
                    raise UserError(
                        f"{path}: {name}: grid {found.shape} differs from that of other files {infos[name].shape}"
                    )
                if part.split == "train":
                    these = Moments.from_json(json.loads(file[name].attrs["moments"]))
                    moments[name] = moments.get(name, Moments.empty(len(found.channels))).merged(these)
            for key in ("latitude", "longitude"):
                if key in file and coordinates.setdefault(key, file[key][()].tolist()) != file[key][()].tolist():
                    raise UserError(f"{path}: its {key}s differ from those of other files; expected one grid")
            if "time" in file:
                steps |= set(np.diff(file["time"][()]).tolist())
            if len(steps) > 1:
                found_steps = ", ".join(f"{step:g} h" for step in sorted(steps))
                raise UserError(f"{path}: steps of {found_steps} in one dataset; give them one `step_hours`")
            splits[part.split].append(_file(path, folder, Field.of(file[names[0]]).rows, sha256(path)))
    fields = {name: _info(dataset, field, moments[name], str(folder)) for name, field in infos.items()}
    return Manifest(
        dataset.kind,
        fields,
        splits,
        {**coordinates, "step_hours": min(steps)} if steps else {},
        provenance={"settings": dataset.model_dump(mode="json")},
        folder=folder,
    )


def _check_disjoint(manifest: Manifest) -> None:
    """Refuse one file in two splits, under whatever names."""
    seen: dict[str, str] = {}
    for split, files in manifest.splits.items():
        for file in files:
            if seen.setdefault(file.identity, split) != split:
                raise UserError(
                    f"{manifest.path(file)}: the same file is in {seen[file.identity]} and {split}: validation would "
                    "see training data; give each split files of its own"
                )


def _info(dataset: DatasetSettings, field: Field, moments: Moments, where: str) -> FieldInfo:
    for channel, std in zip(field.channels, moments.std, strict=True):
        if not std > 0:
            raise UserError(
                f"{where}: {field.name}: channel '{channel}' is constant over the training part (variance 0), so it "
                "cannot be normalised; remove it or mend the input"
            )
    if isinstance(dataset, Era5Dataset):
        # Standardised with the training part's statistics, when read.
        transforms = [Transform("linear", float(m), float(s)) for m, s in zip(moments.mean, moments.std, strict=True)]
        stored = "physical"
    else:
        transforms, stored = list(field.transforms), "model"
    return FieldInfo(
        list(field.channels),
        list(field.units),
        list(field.shape[2:] if field.channel_axis == 1 else field.shape[1:]),
        transforms,
        stored,
        *(getattr(moments, key).tolist() for key in ("mean", "std", "minimum", "maximum")),
    )


def _cosmo_prepared(dataset: DatasetSettings, sources: list[str], folder: Path) -> Manifest:
    """Describe files in the published layout; statistics take one pass over the training files."""
    splits: dict[str, list[File]] = {split: [] for split in SPLITS}
    moments = {name: Moments.empty(len(spec[0])) for name, spec in CHANNELS.items()}
    grid: dict[str, list[int]] = {}
    described = dict.fromkeys(CHANNELS, True)  # whether every file says how it was transformed, as ours do
    if len(sources) != len(parts.parts(dataset)):
        raise UserError(f"--source: expected the {len(parts.parts(dataset))} files of the configuration, in its order")
    for part, path in zip(parts.parts(dataset), map(Path, sources), strict=True):
        with store.open_file(path) as file:
            found = {name: store.dataset(file, name, len(spec[0])) for name, spec in CHANNELS.items()}
            shapes = {name: values.shape[1:] for name, values in found.items()}
            if len(set(shapes.values())) > 1:
                raise UserError(f"{path}: Nbody and Hydro differ in size ({shapes}); expected the same grid")
            for name, values in found.items():
                grid.setdefault(name, list(values.shape[1:]))
                described[name] &= "transforms" in values.attrs and Field.of(values).transforms == CHANNELS[name][2]
                if part.split == "train":
                    field = Field(name, *CHANNELS[name][:2], values.shape, 0, CHANNELS[name][2])
                    rows = values.shape[1]
                    block = max(1, dataset.memory_mb * 1_000_000 // (12 * int(np.prod(values.shape)) // rows))
                    for first in tracked(
                        range(0, rows, block), f"reading {path.name}: {name}", -(-rows // block), "blocks"
                    ):
                        try:
                            block_values = values[:, first : first + block].astype(np.float32, copy=False)
                        except OSError as error:
                            raise UserError(
                                f"{path}: {name}: cannot read ({error}); the file is damaged, fetch it again"
                            ) from None
                        store.check_finite(block_values, field, str(path), first)
                        moments[name] = moments[name].merged(Moments.of(block_values, 0))
        splits[part.split].append(_file(path, folder, shapes["Nbody"][0]))
    fields = {}
    for name, (channels, units, transforms) in CHANNELS.items():
        if not described[name]:
            # Of the published files only the density's form is known, ln(x)/14; the rest stays in model units.
            transforms = tuple(t if t == DENSITY else IDENTITY for t in transforms)
            units = tuple(u if t == DENSITY else "model units" for u, t in zip(units, transforms, strict=True))
        field = Field(name, channels, units, (len(channels), *grid[name]), 0, transforms)
        fields[name] = info = _info(dataset, field, moments[name], str(folder))
        for channel, transform, highest in zip(channels, transforms, info.maximum, strict=True):
            # Of densities and temperatures the logarithm is stored; physical values would overflow when undone.
            if transform.kind == "log" and highest * transform.scale + transform.offset > np.log(1e30):
                raise UserError(
                    f"{folder}: {name}: channel '{channel}' reaches {highest:g}, but prepared files hold transformed "
                    "values, mostly in (-1, 1); for physical values use source kind files"
                )
    return Manifest(
        dataset.kind, fields, splits, provenance={"settings": dataset.model_dump(mode="json")}, folder=folder
    )


def _era5_prepared(dataset: DatasetSettings, folder: Path) -> Manifest:
    """Describe a folder in the published layout; its statistics are taken from its `stats/`."""
    assert isinstance(dataset, Era5Dataset) and isinstance(dataset.source, Era5Prepared)
    root = Path(dataset.source.path)
    splits: dict[str, list[File]] = {split: [] for split in SPLITS}
    shape: tuple[int, ...] | None = None
    latitude: list[float] = []
    longitude: list[float] = []
    names: list[str] = []
    units: list[str] = []
    for split in SPLITS:
        for path in sorted((root / split).glob("*.h5")):
            with store.open_file(path) as file:
                fields = store.dataset(file, "fields")
                if shape is not None and fields.shape[1:] != shape[1:]:
                    raise UserError(f"{path}: fields {fields.shape} differ from those of other files {shape}")
                shape = fields.shape
                if "latitude" in file and "longitude" in file:
                    latitude, longitude = file["latitude"][()].tolist(), file["longitude"][()].tolist()
                names, units = ([str(name) for name in fields.attrs.get(key, [])] for key in ("channels", "units"))
                splits[split].append(_file(path, folder, fields.shape[0]))
    for split in ("train", "valid"):
        if not splits[split]:
            raise UserError(
                f"{root / split}: no *.h5 files; expected the published layout (train/YYYY.h5, valid/, stats/)"
            )
    assert shape is not None
    channels = dataset.channels or names or [f"channel{index:02d}" for index in range(shape[1])]
    if len(channels) != shape[1]:
        raise UserError(
            f"{root}: files hold {shape[1]} channels, the configuration names {len(channels)}; name them all in order"
        )
    rows, columns = dataset.crop or shape[2:]
    if rows > shape[2] or columns > shape[3]:
        raise UserError(
            f"{root}: crop {rows} x {columns} is larger than the fields ({shape[2]} x {shape[3]}); choose a smaller one"
        )
    means, stds = (_stat(root / "stats" / f"global_{name}.npy", shape[1]) for name in ("means", "stds"))
    for channel, std in zip(channels, stds, strict=True):
        if not std > 0:
            raise UserError(
                f"{root}/stats/global_stds.npy: channel '{channel}' has standard deviation {std:g}; expected more "
                "than 0"
            )
    if not latitude:
        # The published grid: equal steps around the globe, the first row at the north pole.
        step = 360.0 / shape[3]
        latitude = [90.0 - step * row for row in range(rows)]
        longitude = [step * column for column in range(columns)]
    info = FieldInfo(
        list(channels),
        units or ["unknown"] * len(channels),
        [rows, columns],
        [Transform("linear", float(m), float(s)) for m, s in zip(means, stds, strict=True)],
        "physical",
        means.tolist(),
        stds.tolist(),
        [],
        [],
    )
    climatology = root / "stats" / "time_means.npy"
    if climatology.is_file():
        _check_climatology(climatology, (len(channels), rows, columns))
    return Manifest(
        dataset.kind,
        {"fields": info},
        splits,
        {
            "latitude": latitude[:rows],
            "longitude": longitude[:columns],
            "step_hours": float(dataset.source.step_hours),
            "climatology": str(climatology.resolve()) if climatology.is_file() else None,
        },
        {"settings": dataset.model_dump(mode="json")},
        folder,
    )


def _stat(path: Path, channels: int) -> np.ndarray:
    try:
        found = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the published layout has it, shape [1, C, 1, 1]") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: not a readable .npy file ({error})") from None
    values = found.astype(np.float64).ravel()
    if values.size < channels or not np.isfinite(values[:channels]).all():
        raise UserError(f"{path}: expected {channels} finite values, shape [1, C, 1, 1], got shape {found.shape}")
    return values[:channels]


def _check_climatology(path: Path, needed: tuple[int, ...]) -> None:
    try:
        shape = np.load(path, mmap_mode="r", allow_pickle=False).shape
    except (ValueError, EOFError) as error:
        raise UserError(f"{path}: not a readable .npy file ({error})") from None
    values = np.load(path, mmap_mode="r", allow_pickle=False)
    if len(shape) == 4 and not all(np.isfinite(values[:, channel]).all() for channel in range(shape[1])):
        raise UserError(f"{path}: holds values that are not finite; expected means of the {needed[0]} channels")
    good = len(shape) == 4 and shape[1] == needed[0] and all(a >= b for a, b in zip(shape[2:], needed[1:], strict=True))
    if not good:
        raise UserError(f"{path}: expected means of the {needed[0]} channels, shape {(1, *needed)}, got shape {shape}")


def _file(path: Path, folder: Path, rows: int, digest: str | None = None) -> File:
    status = path.stat()
    # Files of others may be terabytes: their size and time stand for their content.
    identity = digest or hashlib.sha256(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()
    return File(store.relative(path, folder), rows, status.st_size, identity)


def _write_stats(manifest: Manifest, stats: Path, folder: Path, name: str) -> Manifest:
    """Write statistics as .npy files; for time series in the published names, so the folder is a prepared one."""
    for key, info in manifest.fields.items():
        prefix = "global" if key == "fields" else key
        shape = (1, -1, 1, 1)
        np.save(stats / f"{prefix}_means.npy", np.asarray(info.mean, dtype=np.float32).reshape(shape))
        np.save(stats / f"{prefix}_stds.npy", np.asarray(info.std, dtype=np.float32).reshape(shape))
    if manifest.kind != "era5" or manifest.extra.get("climatology"):
        return manifest
    total, rows = None, 0
    for file in manifest.files("train"):
        with store.open_file(manifest.path(file)) as opened:
            if "sum/fields" not in opened:
                return manifest  # prepared files without time_means.npy: no anomaly correlation
            these = opened["sum/fields"][()]
            total = these if total is None else total + these
            rows += file.rows
    assert total is not None
    np.save(stats / "time_means.npy", (total / rows).astype(np.float32)[None])
    logging.info("climatology: mean over %d training times", rows)
    values = {**vars(manifest), "extra": {**manifest.extra, "climatology": f"{name}/time_means.npy"}}
    return Manifest(**values)
