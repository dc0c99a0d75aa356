"""Module next to a program that imports it."""

import json
import os
from pathlib import Path


def note_environment() -> None:
    """Write this process's environment to a file in the working folder."""
    Path(f"environment.{os.getpid()}.json").write_text(json.dumps(dict(os.environ)))
