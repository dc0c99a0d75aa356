"""Croissant (https://docs.mlcommons.org/croissant): a dataset's files and fields, as other programs read them."""

from __future__ import annotations

from typing import Any

from dlscale.core.settings import Raw
from dlscale.data.manifest import FieldInfo, Manifest

VERSION = "http://mlcommons.org/croissant/1.1"
HDF5 = ["application/x-hdf5"]


def fits(manifest: Manifest) -> bool:
    """Return whether Croissant can describe a dataset: it asks for the SHA-256 of each file's bytes."""
    return all(file.verifiable for files in manifest.splits.values() for file in files)


def croissant(name: str, manifest: Manifest) -> Raw:
    """Return the description of a dataset: a file object each, and a record set a split, with the manifest's fields.

    Addresses of files are as in the manifest: absolute, or relative to the dataset's folder.
    """
    import mlcroissant as mlc

    distribution, record_sets = list[Any](), list[Any]()
    for split, files in manifest.splits.items():
        if not files:
            continue
        # Numbered: an identifier has no spaces, which a path may have.
        objects = [
            mlc.FileObject(
                id=f"{split}-file-{number}",
                name=file.path,
                content_url=file.path,
                content_size=f"{file.bytes} B",
                encoding_formats=HDF5,
                sha256=file.digest,
            )
            for number, file in enumerate(files)
        ]
        source = {"file_object": objects[0].id}
        if len(files) > 1:
            objects.append(
                mlc.FileSet(id=f"{split}-files", includes=[file.path for file in files], encoding_formats=HDF5)
            )
            source = {"file_set": objects[-1].id}
        distribution += objects
        fields = [
            mlc.Field(
                id=f"{split}/{key}",
                name=key,
                description=", ".join(
                    f"{channel} ({unit or 1})" for channel, unit in zip(info.channels, info.units, strict=True)
                ),
                data_types=[getattr(mlc.DataType, info.dtype.upper())],
                source=mlc.Source(extract=mlc.Extract(column=key), **source),
                **_shape(info),
            )
            for key, info in manifest.fields.items()
        ]
        rows = sum(file.rows for file in files)
        record_sets.append(mlc.RecordSet(id=split, name=split, description=f"{rows} {manifest.rows}", fields=fields))
    context = mlc.Context(conforms_to=VERSION)
    facts = "; ".join([f"Data of kind {manifest.kind}", *manifest.facts])
    described = mlc.Metadata(
        ctx=context, name=name, description=facts, url="./", distribution=distribution, record_sets=record_sets
    )
    found: Raw = described.to_json()
    return found


def _shape(info: FieldInfo) -> Raw:
    """Return the shape of a record's values; that of volumes differs from file to file."""
    shape = (len(info.channels), *(-1 for _ in info.grid)) if info.channel_axis == 0 else info.row_shape
    return {"is_array": True, "array_shape": ",".join(map(str, shape))} if shape else {}
