"""The page that is to come, as far as it can be written: by stages that make what it shows, for who waits for it."""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.files import OLDEST
from dlscale.core.settings import read_settings
from dlscale.report import report

#: Seconds between two fillings of a page: each takes some, for which nothing else is measured.
EVERY = 60.0


def main(options: str) -> None:
    """Write the page of these options of stage `report` (JSON) with what is there, and say what is to come.

    It is there for people alone: it is older than all that it is made of, so that the stage makes it.
    """
    page, _ = read_settings(options)
    out = Path(page["out"])
    if out.exists() and (out.stat().st_mtime > OLDEST or time.time() - out.stat().st_ctime < EVERY):
        return  # that of an earlier call, which stays until the new one is whole; or filled just now
    plans = {path: Path(path).with_name("summary.csv").exists() for path in page["plans"]}
    page["plans"] = [path for path, done in plans.items() if done]
    page["to_come"] = [Path(path).parent.name for path, done in plans.items() if not done]
    needed = ("manifest.json", "preview.png")
    page["datasets"] = [path for path in page["datasets"] if all(Path(path, name).exists() for name in needed)]
    try:
        report.main(argparse.Namespace(**page))
    except UserError as error:  # another plan's runs are just being made anew
        logging.info("the page is not filled: %s", error)
    except Exception:  # nor does that take away what the stage has made; of the stage `report` it is an error
        logging.exception("the page is not filled")
    else:
        os.utime(out, (OLDEST, OLDEST))
