"""Stage `assemble`: join the pieces of one part into its file, in the stored type and layout."""

from __future__ import annotations

import argparse
import json

import h5py
import numpy as np

from dlscale.config.dataset import DatasetSettings
from dlscale.core.files import whole
from dlscale.core.progress import Progress
from dlscale.data import store
from dlscale.data.parts import load_dataset
from dlscale.data.store import Field, Moments


def main(args: argparse.Namespace) -> None:
    """Join `args.pieces`, in order, into `args.out` as the dataset in `args.config` asks."""
    dataset = load_dataset(args.config)
    pieces = [store.open_file(path) for path in args.pieces]
    # Whole chunks are written once, so a cache of chunks (8 MB a dataset by default) would only take memory.
    with whole(args.out) as out, h5py.File(out, "w", rdcc_nbytes=0) as file:
        for name in pieces[0].attrs["fields"]:
            _join(dataset, [piece[name] for piece in pieces], file, str(args.out))
        for name in pieces[0].attrs["others"]:
            values = [piece[name][()] for piece in pieces]
            join = pieces[0][name].attrs["join"]
            file[name] = sum(values) if join == "sum" else np.concatenate(values) if join == "rows" else values[0]
        file.attrs["fields"] = pieces[0].attrs["fields"]
        file.attrs["source"] = pieces[0].attrs["source"]
        settings = dataset.model_dump(mode="json", exclude={"source", "split", "pieces"})
        file.attrs["settings"] = json.dumps(settings)


def _join(dataset: DatasetSettings, pieces: list[h5py.Dataset], file: h5py.File, label: str) -> None:
    rows = [Field.of(piece).rows for piece in pieces]
    field = Field.of(pieces[0]).resized(sum(rows))
    moments = Moments.empty(len(field.channels))
    for piece in pieces:
        moments = moments.merged(Moments.from_json(piece.attrs["moments"]))
    half = dataset.storage.dtype == "float16" and field.floating
    # Centred and scaled, every channel uses half precision where it is dense; a constant one stays exact.
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
    # Values as read, and while they are scaled and compared; whole chunks are written.
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
                    exact -= values * scale_c + offset_c  # as a reader will find them
                    error = np.maximum(error, np.abs(exact, out=exact).max(axis=axes))
                    del exact
                store.write(target, field.select(done + first, done + last), values)
                del values  # before the next are read
                progress.update(done + last)
            done += count
    if half:
        target.attrs["float16_max_error"] = error
