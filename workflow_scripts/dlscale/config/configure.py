"""Stage `configure`: write the resolved settings of one dataset or run where its stages read them."""

from __future__ import annotations

import argparse
import json

import yaml

from dlscale.core.errors import UserError
from dlscale.core.files import write_text


def main(args: argparse.Namespace) -> None:
    """Write `args.settings` (JSON) as YAML to `args.out`."""
    try:
        settings = json.loads(args.settings)
    except json.JSONDecodeError as error:
        raise UserError(f"--settings: not valid JSON ({error}); pass what the workflow prints") from None
    header = "# Written by the workflow: the resolved settings. Change config.yaml instead.\n"
    write_text(args.out, header + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
