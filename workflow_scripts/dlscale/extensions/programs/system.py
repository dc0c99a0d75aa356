"""Folders and processes that an ended program leaves behind."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path

from dlscale.core.files import HOST, remove_left


def temporary_folder(name: str, parent: str | os.PathLike[str] | None = None) -> tempfile.TemporaryDirectory[str]:
    """Make a folder in `parent` that is removed when its context ends.

    The default of `parent` is the system's temporary folder. Also remove folders of this name that killed processes
    left behind.
    """
    parent, stem = Path(parent or tempfile.gettempdir()), f"{name}.{HOST}"
    remove_left(parent, stem)
    return tempfile.TemporaryDirectory(dir=parent, prefix=f"{stem}.{os.getpid()}.")


def adopt_orphans(adopt: bool = True) -> None:
    """Let Linux make this process the parent of orphaned descendants; if `adopt` is false, stop this."""
    ctypes.CDLL(None).prctl(36, int(adopt), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
