"""Files that `torch.save` wrote, read as they were written or not at all."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch


def load(path: str | Path, legacy: bool = False) -> Any:
    """Return what is in a file of `torch.save`, tensors on the host; one that is damaged is a `BadZipFile`.

    Nothing in it is executed. With `legacy` it may be of before PyTorch 1.6: no archive, hence without checksums.
    """
    with open(path, "rb") as file:
        archive = file.read(4) == b"PK\x03\x04"  # as torch.load tells them apart
    if archive or not legacy:
        _check(path)
    # On the host: a device that is full or gone is no fault of the file.
    return torch.load(path, map_location="cpu", weights_only=True)


def _check(path: str | Path) -> None:
    """Compare the checksums in an archive, at which `torch.load` does not look."""
    try:
        with zipfile.ZipFile(path) as archive:
            # Of what has the mark of a folder torch.load reads nothing, and takes what was in memory.
            folders = [each.filename for each in archive.infolist() if each.external_attr & 0x10 and each.file_size]
            damaged = archive.testzip() or next(iter(folders), None)
    except (OSError, zipfile.BadZipFile):
        raise
    except Exception as error:  # a damaged header asks for any decompression, or for a password
        raise zipfile.BadZipFile(f"not readable: {error}") from None
    if damaged:
        raise zipfile.BadZipFile(f"{damaged}: not as it was written")
