"""Stage `checkout`: fetch a revision of an external program's repository into a new folder."""

from __future__ import annotations

import argparse

from dlscale.core.files import atomic_write
from dlscale.extensions.programs.revision import fetch


def main(args: argparse.Namespace) -> None:
    """Fetch `args.revision` of `args.repository` into `args.out`."""
    with atomic_write(args.out) as folder:
        fetch(args.repository, args.revision, folder, f"program.repository {args.repository}")
