"""Stages `preprocess` and `assemble`: write the pieces of a part, and join the pieces into the part's file.

Data are streamed from the raw files, so files may be larger than memory; only a single row must fit into memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dlscale.config.dataset import DatasetSettings
from dlscale.core.errors import UserError
from dlscale.core.files import atomic_write
from dlscale.core.progress import Progress
from dlscale.data import parts, reads, store
from dlscale.data.source import Source, check_structure
from dlscale.data.store import Field, Moments


def main(args: argparse.Namespace) -> None:
    """Write one piece of a part to `args.out`, or join the pieces `args.pieces` into the part's file `args.out`.

    `args.config` has the dataset's settings.
    """
    dataset = reads.load_dataset(args.config)
    if "pieces" in args:
        assemble(dataset, args.pieces, args.out)
    else:
        preprocess(dataset, args)


def preprocess(dataset: DatasetSettings, args: argparse.Namespace) -> None:
    """Write piece `args.piece` of part `args.part`, in model units, to `args.out`."""
    part = parts.part(dataset, args.part)
    open_source = parts.needed(dataset, "source", "open_source")
    paths = [Path(path) for path in args.source]
    check_structure(paths)
    with reads.only_named(dataset.kind, args.source), contextlib.ExitStack() as stack:
        source: Source = open_source(dataset, part, paths)
        stack.callback(source.close)
        start, stop = parts.piece_rows(source.fields[0].rows, args.piece, dataset.pieces)
        if stop <= start:
            raise UserError(
                f"{args.part}: {source.fields[0].rows} rows do not fill {dataset.pieces} pieces; set the dataset's "
                "`pieces` to at most the number of rows"
            )
        block = max(1, store.MEMORY // source.bytes_per_row)
        with atomic_write(args.out) as out:
            write_piece(source, out, start, stop, block, args.part)


def write_piece(source: Source, out: Path, start: int, stop: int, block: int, label: str) -> None:
    """Stream rows [start, stop) of `source`, `block` rows at a time, into a new HDF5 file `out`."""
    moments = {field.name: Moments.empty(len(field.channels)) for field in source.fields}
    sums: dict[str, Any] = {}
    with h5py.File(out, "w") as file, Progress(f"preprocessing {label}", stop - start, "rows") as progress:
        for field in source.fields:
            store.create(file, field.resized(stop - start))
        for first in range(start, stop, block):
            last = min(first + block, stop)
            read = source.read(first, last)
            for field in source.fields:
                values = read[field.name]
                store.check_finite(values, field, label, first)
                moments[field.name] = moments[field.name].merged(Moments.of(values, field.channel_axis))
                if field.name in source.summed:
                    sums[field.name] = sums.get(field.name, 0) + values.sum(axis=0, dtype=np.float64)
                file[field.name][field.select(first - start, last - start)] = values
            del read, values  # frees memory for the next block
            progress.update(last - start)
        for field in source.fields:
            file[field.name].attrs["moments"] = moments[field.name].to_json()
        others = {f"sum/{name}": ("sum", total) for name, total in sums.items()}
        others |= {name: ("same", values) for name, values in source.coordinates.items()}
        others |= {name: ("rows", values[start:stop]) for name, values in source.row_coordinates.items()}
        for name, (join, values) in others.items():
            file.create_dataset(name, data=values).attrs["join"] = join
        file.attrs.update(
            others=list(others),
            fields=[field.name for field in source.fields],
            source=json.dumps(dict(source.attributes), default=str),
            part=label,
        )


def assemble(dataset: DatasetSettings, paths: Sequence[str | Path], out: str | Path) -> None:
    """Join the pieces of a part, given in order, into the part's file, with the type and layout in `storage`."""
    pieces = [store.open_file(path) for path in paths]
    # HDF5's chunk cache (by default 8 MB per dataset) is off, because most chunks are written once and completely. A
    # chunk is written in parts if two pieces share the chunk, or if a block (see `_join`) is smaller than the chunk.
    with atomic_write(out) as temporary, h5py.File(temporary, "w", rdcc_nbytes=0) as file:
        for name in pieces[0].attrs["fields"]:
            _join(dataset, [piece[name] for piece in pieces], file, str(out))
        for name in pieces[0].attrs["others"]:
            values = [piece[name][()] for piece in pieces]
            join = pieces[0][name].attrs["join"]
            file[name] = sum(values) if join == "sum" else np.concatenate(values) if join == "rows" else values[0]
        file.attrs.update({name: pieces[0].attrs[name] for name in ("fields", "source", "part")})
        settings = dataset.model_dump(mode="json", exclude={"source", "split", "pieces"})
        file.attrs["settings"] = json.dumps(settings)


def _join(dataset: DatasetSettings, pieces: list[h5py.Dataset], file: h5py.File, label: str) -> None:
    rows = [Field.of(piece).rows for piece in pieces]
    field = Field.of(pieces[0]).resized(sum(rows))
    moments = Moments.empty(len(field.channels))
    for piece in pieces:
        moments = moments.merged(Moments.from_json(piece.attrs["moments"]))
    half = dataset.storage.dtype == "float16" and field.floating
    # For float16, subtract the mean and divide by the deviation, to lose few digits. A constant channel stays exact.
    scale = np.where(moments.std > 0, moments.std, 1.0)
    target = store.create(
        file,
        field,
        dtype=dataset.storage.dtype if field.floating else None,
        chunk=dataset.storage.chunk,
        channels_last=dataset.storage.channels == "last" and field.channel_axis == 0,
        scaling=(moments.mean, scale) if half else None,
    )
    target.attrs["moments"] = moments.to_json()
    offset_c, scale_c = (field.per_channel(values) for values in (moments.mean, scale))
    axes = tuple(axis for axis in range(len(field.shape)) if axis != field.channel_axis)
    # A block needs memory for its values, scaled values and errors. A block that is larger than a chunk has a multiple
    # of the chunk's rows, so that most chunks are written once.
    block = max(1, store.MEMORY // (4 * 4 * int(np.prod(field.shape)) // field.rows))
    rows_of_chunk = store.channels_first(target, target.chunks)[field.row_axis] if target.chunks else 1
    block -= block % rows_of_chunk if block > rows_of_chunk else 0
    error, done = np.zeros(len(field.channels)), 0
    with Progress(f"assembling {label}: {field.name}", field.rows, "rows", part=True) as progress:
        for piece, count in zip(pieces, rows, strict=True):
            for first in range(0, count, block):
                last = min(first + block, count)
                values = piece[field.select(first, last)]
                if half:
                    exact, values = values, ((values - offset_c) / scale_c).astype(np.float16)
                    exact -= values * scale_c + offset_c  # `exact` is now the error of the values that readers decode
                    error = np.maximum(error, np.abs(exact, out=exact).max(axis=axes))
                    del exact
                store.write(target, field.select(done + first, done + last), values)
                del values  # frees memory for the next block
                progress.update(done + last)
            done += count
    if half:
        target.attrs["float16_max_error"] = error
