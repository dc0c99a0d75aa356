"""Stage `describe`: write the statistics of the training data, and the manifest."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from dlscale.config.dataset import SPLITS, DatasetSettings
from dlscale.core.errors import UserError
from dlscale.core.files import atomic_write, reading, sha256, stamp
from dlscale.core.progress import tracked
from dlscale.data import parts, reads, staging, store
from dlscale.data.manifest import FieldInfo, File, Manifest
from dlscale.data.source import check_structure
from dlscale.data.store import Field, Moments


def main(args: argparse.Namespace) -> None:
    """Write the manifest `args.manifest` and the statistics `args.stats` of the dataset in `args.config`."""
    dataset = reads.load_dataset(args.config)
    folder = Path(args.manifest).resolve().parent
    if parts.kind_of(dataset).prepared(dataset):
        prepared = parts.needed(dataset, "describe", "describe_prepared")
        paths = [Path(path) for path in args.source]
        check_structure(paths)
        with reads.only_named(dataset.kind, args.source):
            manifest: Manifest = prepared(dataset, paths, folder)
    else:
        manifest = describe_own(dataset, folder)
    check_disjoint(manifest)
    complete = parts.role(dataset, "describe", "complete")
    with atomic_write(args.stats) as stats:
        stats.mkdir()
        if complete is not None:
            with reads.only_named(dataset.kind, [folder, *args.source]):
                manifest = complete(dataset, manifest, stats, Path(args.stats).name)
        if parts.kind_of(dataset).standardised:
            fields = {name: info.standardised() for name, info in manifest.fields.items()}
            manifest = manifest.model_copy(update={"fields": fields})
        # Statistics as .npy files, [1, C, 1, 1] each. A dataset with one field uses the names global_*.
        for name, info in manifest.fields.items():
            prefix = "global" if len(manifest.fields) == 1 else name
            for key, values in (("means", info.mean), ("stds", info.std)):
                np.save(stats / f"{prefix}_{key}.npy", np.asarray(values, dtype=np.float32).reshape(1, -1, 1, 1))
    own = [file for files in manifest.splits.values() for file in files if file.verifiable]
    staging.remember(manifest.model_copy(update={"folder": folder}), own)
    manifest.write(Path(args.manifest))  # last, because later stages wait for the manifest


def describe_own(dataset: DatasetSettings, folder: Path) -> Manifest:
    """Return the manifest of the files that `assemble` made."""
    splits: dict[str, list[File]] = {split: [] for split in SPLITS}
    fields: dict[str, Field] = {}
    training: dict[str, Moments] = {}
    every: dict[str, Moments] = {}
    files = parts.parts(dataset)
    for part in tracked(files, "describing", len(files), "files"):
        path = folder / part.split / f"{part.name}.h5"
        with reading(path), store.open_file(path) as file:
            read = [Field.of(file[name]) for name in file.attrs["fields"]]
            measured = [Moments.from_json(file[field.name].attrs["moments"]) for field in read]
            found = file.attrs["part"]
        if found != f"{part.split}/{part.name}":
            raise UserError(f"{path}: has the data of {found}; delete this file and run the workflow again")
        names = [field.name for field in read]
        if fields and fields.keys() != set(names):
            raise UserError(
                f"{path}: holds the fields {', '.join(names)}, expected {', '.join(fields)}, as in the other files"
            )
        for field, its in zip(read, measured, strict=True):
            check_alike(path, field, fields.setdefault(field.name, field))
            for moments in (training, every) if part.split == "train" else (every,):
                moments[field.name] = moments[field.name].merged(its) if field.name in moments else its
        splits[part.split].append(File.of(path, folder, read[0].rows, sha256(path), True))
    infos = {name: describe_field(field, training[name]) for name, field in fields.items()}
    for name, field in fields.items():
        if len(field.shape) == 1 and not field.floating and every[name].minimum[0] >= 0:
            infos[name] = infos[name].model_copy(update={"classes": int(every[name].maximum[0]) + 1})
    return new_manifest(dataset, infos, splits, folder)


def new_manifest(
    dataset: DatasetSettings, fields: dict[str, FieldInfo], splits: dict[str, list[File]], folder: Path
) -> Manifest:
    """Return a new manifest, to which the kind of the dataset may add."""
    provenance: dict[str, Any] = {"settings": dataset.model_dump(mode="json")}
    raws = {raw.origin: Path(raw.origin) for raw in parts.raws(dataset).values() if "://" not in raw.origin}
    provenance["raws"] = {origin: stamp(path) for origin, path in raws.items() if path.exists()}
    return Manifest(
        kind=dataset.kind,
        rows=parts.kind_of(dataset).rows,
        fields=fields,
        splits=splits,
        provenance=provenance,
        folder=folder,
    )


def describe_field(field: Field, moments: Moments) -> FieldInfo:
    """Return the description of a field stored in model units, with the statistics `moments`."""
    statistics = {key: getattr(moments, key).tolist() for key in ("mean", "std", "minimum", "maximum")}
    return FieldInfo(
        channels=list(field.channels),
        units=list(field.units),
        grid=list(field.grid),
        transforms=list(field.transforms),
        stored="model",
        dtype=field.dtype,
        channel_axis=field.channel_axis,
        **statistics,
    )


def check_alike(path: Path, field: Field, first: Field) -> None:
    """Refuse a field whose channels, type or row shape differ from the first file's; volumes may differ in size."""
    rows_differ = field.row_axis == 0 and field.shape[1:] != first.shape[1:]
    if rows_differ or (field.channels, field.dtype) != (first.channels, first.dtype):
        raise UserError(
            f"{path}: {field.name}: {len(field.channels)} channels, type {field.dtype}, shape {field.shape}; the first "
            f"file has {len(first.channels)} channels, type {first.dtype}, shape {first.shape}. Expected the same "
            "channel names and type in all files, and the same grid (except for volumes)"
        )


def check_disjoint(manifest: Manifest) -> None:
    """Refuse a file that is in two splits, also under different names if the digests are of the files' content."""
    seen: dict[str, str] = {}
    for split, files in manifest.splits.items():
        for file in files:
            if seen.setdefault(file.digest, split) != split:
                raise UserError(
                    f"{manifest.path(file)}: the same file is in {seen[file.digest]} and {split}, so validation would "
                    "see training data; give each split its own files"
                )
