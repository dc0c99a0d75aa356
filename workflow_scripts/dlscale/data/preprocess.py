"""Stage `preprocess`: one piece of one part, streamed from the raw files within a memory bound."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dlscale.core.errors import UserError
from dlscale.core.files import whole
from dlscale.core.progress import Progress
from dlscale.data import parts, store
from dlscale.data.source import Source
from dlscale.data.store import Moments


def main(args: argparse.Namespace) -> None:
    """Write piece `args.piece` of part `args.part` of the dataset in `args.config` to `args.out`."""
    dataset = parts.load_dataset(args.config)
    part = parts.part(dataset, args.part)
    open_source = parts.needed(dataset, "source", "open_source")
    source: Source = open_source(dataset, part, [Path(path) for path in args.source])
    try:
        start, stop = parts.piece_rows(source.fields[0].rows, args.piece, dataset.pieces)
        if stop <= start:
            raise UserError(
                f"{args.part}: {source.fields[0].rows} rows do not fill {dataset.pieces} pieces; lower the dataset's "
                "`pieces`"
            )
        block = max(1, store.MEMORY // source.bytes_per_row)
        with whole(args.out) as out:
            write_piece(source, out, start, stop, block, args.part)
    finally:
        source.close()


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
            del read, values  # before the next are read
            progress.update(last - start)
        for field in source.fields:
            file[field.name].attrs["moments"] = moments[field.name].to_json()
        others = {f"sum/{name}": ("sum", total) for name, total in sums.items()}
        others |= {name: ("same", values) for name, values in source.coordinates.items()}
        others |= {name: ("rows", values[start:stop]) for name, values in source.row_coordinates.items()}
        for name, (join, values) in others.items():
            file.create_dataset(name, data=values).attrs["join"] = join
        file.attrs["others"] = list(others)
        file.attrs["fields"] = [field.name for field in source.fields]
        file.attrs["source"] = json.dumps(dict(source.attributes))
