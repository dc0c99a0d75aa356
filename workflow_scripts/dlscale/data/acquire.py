"""Stage `acquire`: bring one raw file into a dataset's `source/` folder.

It is simulated, fetched (resumable and checked) or read out of a Zarr store. It needs the network
for the last two: run it on a login or transfer node.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from pathlib import Path
from typing import Any

from dlscale.data import parts
from dlscale.data.download import download, redacted
from dlscale.data.parts import Raw
from dlscale.runtime.errors import UserError, nearest
from dlscale.runtime.progress import Progress
from dlscale.runtime.schema.dataset import CosmoSimulated, Dataset, Era5Dataset, Era5Simulated


def main(args: argparse.Namespace) -> None:
    """Make `args.out`, the raw file called `args.file`, of the dataset in `args.config`."""
    dataset = parts.load_dataset(args.config)
    raws = parts.raws(dataset)
    if args.file not in raws:
        raise UserError(f"--file {args.file}: no such raw file{nearest(args.file, raws)}; there are: {', '.join(raws)}")
    raw, out = raws[args.file], Path(args.out)
    if not raw.acquired:
        raise UserError(f"--file {args.file}: lies at {raw.origin} and needs no acquisition")
    with Progress(f"acquiring {raw.name}", None, "bytes" if parts.is_url(raw.origin) else "steps") as progress:
        if raw.period is None and parts.is_url(raw.origin):
            expected: dict[str, Any] = getattr(dataset.source, "sha256", {})
            digest = download(raw.origin, out, sha256=expected.get(raw.file_name), progress=progress.update)
            checked = "as expected" if raw.file_name in expected else "not checked: the configuration names none"
            logging.info("%s: SHA-256 %s (%s), from %s", out, digest, checked, redacted(raw.origin))
        else:
            make(dataset, raw, out, progress)


def make(dataset: Dataset, raw: Raw, out: Path, progress: Progress) -> None:
    """Simulate a raw file, or read it out of a store; each simulator is imported when it is needed."""
    source = dataset.source
    if isinstance(source, CosmoSimulated):
        from dlscale.data.cosmo_simulator import simulate_box

        phases = itertools.count(1)
        simulate_box(
            out,
            grid=source.grid,
            box_mpc_h=source.box_mpc_h,
            seed=source.seed,
            index=raw.index,
            redshift=source.redshift,
            progress=lambda phase: progress.update(next(phases), 7),
        )
    elif isinstance(source, Era5Simulated):
        from dlscale.data.era5_simulator import simulate_year

        simulate_year(
            out,
            year=raw.index,
            latitudes=source.latitudes,
            longitudes=source.longitudes,
            days=source.days,
            seed=source.seed,
            progress=progress.update,
        )
    else:
        from dlscale.data import era5_zarr

        assert isinstance(dataset, Era5Dataset)
        era5_zarr.acquire(dataset, raw, out, progress.update)
