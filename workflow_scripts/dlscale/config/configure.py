"""Stage `configure`: the runs of a plan, written as YAML for tables and pages."""

from __future__ import annotations

import argparse

from dlscale.core.settings import read_settings, write_yaml


def main(args: argparse.Namespace) -> None:
    """Write `args.settings` (JSON) as YAML to `args.out`."""
    write_yaml(args.out, read_settings(args.settings, "--settings")[0])
