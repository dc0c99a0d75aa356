"""Striping of files on Lustre."""

from __future__ import annotations

import shutil

from dlscale.core import machine
from dlscale.core.text import size

#: Timeout of `lfs`, seconds.
LFS_SECONDS = 10.0


def striping(file: str) -> str:
    """Return the striping of a file on Lustre as text; empty without Lustre."""
    if not shutil.which("lfs"):
        return ""
    found = [machine.command_output(["lfs", "getstripe", option, file], LFS_SECONDS) for option in ("-c", "-S")]
    counts = [text.strip() for text in found if text and text.strip().isdecimal()]
    if len(counts) < 2:
        return ""
    return f"{counts[0]} Lustre stripe{'s' * (counts[0] != '1')} of {size(int(counts[1]))}"
