"""Stage `acquire`: simulate one raw file, fetch it, or read it out of a store, into a dataset's `source/` folder."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from dlscale.core import urls
from dlscale.core.errors import UserError, nearest
from dlscale.core.progress import Progress
from dlscale.data import parts
from dlscale.data.download import download
from dlscale.data.kind import file_name, is_url


def main(args: argparse.Namespace) -> None:
    """Make `args.out`, the raw file `args.file` of the dataset in `args.config`."""
    dataset = parts.load_dataset(args.config)
    raws = parts.raws(dataset)
    if args.file not in raws:
        raise UserError(f"--file {args.file}: no such raw file{nearest(args.file, raws)}; there are: {', '.join(raws)}")
    raw, out = raws[args.file], Path(args.out)
    if not parts.acquired(dataset, raw):
        raise UserError(f"--file {args.file}: lies at {raw.origin} and needs no acquisition")
    with Progress(f"acquiring {raw.name}", None, "bytes" if is_url(raw.origin) else "steps") as progress:
        if raw.period is None and is_url(raw.origin):
            expected: dict[str, Any] = getattr(dataset.source, "sha256", {})
            sha256 = expected.get(file_name(raw.origin))
            digest = download(urls.whole(raw.origin), out, sha256=sha256, progress=progress.update)
            checked = "as expected" if sha256 else "not checked: the configuration names none"
            logging.info("%s: SHA-256 %s (%s), from %s", out, digest, checked, urls.hidden(raw.origin))
        else:
            acquire = parts.needed(dataset, parts.kind_of(dataset).acquirer(dataset) or "", "acquire")
            acquire(dataset, raw, out, progress.update)
