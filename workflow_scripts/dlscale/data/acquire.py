"""Stage `acquire`: bring one raw file into a dataset's `source/` folder.

It is simulated, fetched (resumable and checked) or read out of a Zarr store. It needs the network
for the last two: run it on a login or transfer node.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from dlscale.data import parts
from dlscale.data.download import download, redacted
from dlscale.runtime import plugins
from dlscale.runtime.errors import UserError, nearest
from dlscale.runtime.progress import Progress
from dlscale.runtime.settings import load_dataset


def main(args: argparse.Namespace) -> None:
    """Make `args.out`, the raw file called `args.file`, of the dataset in `args.config`."""
    dataset = load_dataset(args.config)
    raws = parts.raws(dataset)
    if args.file not in raws:
        raise UserError(f"--file {args.file}: no such raw file{nearest(args.file, raws)}; there are: {', '.join(raws)}")
    raw, out = raws[args.file], Path(args.out)
    module = plugins.acquisition(dataset)
    if module is not None:
        logging.info("%s: from %s", out, redacted(raw.origin))
        with Progress(f"acquiring {raw.name}", None, "steps") as progress:
            plugins.plugin(module).acquire(dataset, raw, out, progress.update)
    elif parts.is_url(raw.origin):
        expected: dict[str, Any] = getattr(dataset.source, "sha256", {})
        with Progress(f"fetching {raw.name}", None, "bytes") as progress:
            digest = download(raw.origin, out, sha256=expected.get(raw.name), progress=progress.update)
        logging.info(
            "%s: SHA-256 %s%s", out, digest, "" if raw.name in expected else " (not checked: none in the config)"
        )
    else:
        raise UserError(f"--file {args.file}: lies at {raw.origin} and needs no acquisition")
