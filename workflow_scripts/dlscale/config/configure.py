"""Resolved settings, written as YAML for whoever reads the results: stage `configure`, of a plan."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from dlscale.core.errors import UserError
from dlscale.core.files import write_text

HEADER = "# Written by the workflow: the resolved settings. Change config.yaml instead.\n"


def main(args: argparse.Namespace) -> None:
    """Write `args.settings` (JSON) as YAML to `args.out`."""
    try:
        settings = json.loads(args.settings)
    except json.JSONDecodeError as error:
        raise UserError(f"--settings: not valid JSON ({error}); pass what the workflow prints") from None
    keep(settings, args.out)


def keep(settings: dict[str, Any], out: str | Path) -> None:
    """Write settings to a YAML file."""
    write_text(out, HEADER + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
