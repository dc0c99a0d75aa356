"""Verification of data files by the SHA-256 in the manifest: a damaged file may keep its size and time.

A stage reads a file that no stage has verified; a record beside the manifest has size and times of sound files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from dlscale.core.errors import UserError
from dlscale.core.files import read_json, sha256, write_json
from dlscale.core.progress import tracked
from dlscale.data.manifest import File, Manifest

#: Beside the manifest.
RECORD = "verified.json"


def unverified(manifest: Manifest, splits: Sequence[str]) -> list[File]:
    """Return the files of `splits` to read: those that nobody read before, or that changed since."""
    files = [file for split in splits for file in manifest.splits.get(split, []) if file.verifiable]
    record = _record(manifest)
    return [file for file in files if record.get(file.path) != _seen(manifest, file)]


def damaged(manifest: Manifest, files: Sequence[File]) -> list[str]:
    """Read `files` and return a message for each with other content than when it was described."""
    messages = []
    for file in tracked(files, "verifying data", len(files), "files"):
        path = manifest.path(file)
        if (found := sha256(path)) != file.digest:
            messages.append(
                f"{path}: damaged: its content changed since it was described (SHA-256 {found[:16]}..., expected "
                f"{file.digest[:16]}...); put it back, or delete it and run the workflow again to make it anew"
            )
    return messages


def remember(manifest: Manifest, files: Sequence[File]) -> None:
    """Record that `files` hold what the manifest says; where nothing can be written they are read again."""
    if files:
        with contextlib.suppress(UserError):
            seen = {file.path: _seen(manifest, file) for file in files}
            write_json(manifest.folder / RECORD, _record(manifest) | seen)


def _record(manifest: Manifest) -> dict[str, Any]:
    found = {}
    with contextlib.suppress(UserError):
        found = read_json(manifest.folder / RECORD)
    return found if isinstance(found, dict) else {}


def _seen(manifest: Manifest, file: File) -> list[Any]:
    """Return digest, size and both times of a file: who sets one back changes the other."""
    status = manifest.path(file).stat()
    return [file.digest, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
