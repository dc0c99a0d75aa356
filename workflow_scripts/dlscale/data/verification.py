"""That data files still hold what they held when they were described, by the SHA-256 in the manifest.

Files keep their size and their time when a disk or a copy damages them. They are read once, by the stage that first
needs them; what was found lies beside the manifest, by size and times of each file, so that nothing is read again until
one changes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

from dlscale.core.errors import UserError
from dlscale.core.files import read_json, sha256, write_json
from dlscale.core.machine import VERIFY
from dlscale.core.progress import tracked
from dlscale.data.manifest import File, Manifest

#: once: a file that changed, or was never verified; always: by every stage that needs it; never.
Verify = Literal["once", "always", "never"]

#: Beside the manifest.
RECORD = "verified.json"


def told() -> Verify:
    """Return what the environment says of it."""
    given = os.environ.get(VERIFY, "once")
    for known in get_args(Verify):
        if given == known:
            return known
    raise UserError(f"{VERIFY}: '{given}': expected one of {', '.join(get_args(Verify))}")


def unverified(manifest: Manifest, splits: Sequence[str], verify: Verify) -> list[File]:
    """Return the files of `splits` that have to be read: those whose digest is of what they hold, and not known yet."""
    if verify == "never":
        return []
    files = [file for split in splits for file in manifest.splits.get(split, []) if file.verifiable]
    record = {} if verify == "always" else _record(manifest)
    return [file for file in files if record.get(file.path) != _seen(manifest, file)]


def damaged(manifest: Manifest, files: Sequence[File]) -> list[str]:
    """Read `files` and return a message for each that holds something else than when it was described."""
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
        record = _record(manifest) | {file.path: _seen(manifest, file) for file in files}
        try:
            write_json(manifest.folder / RECORD, record)
        except UserError:
            return


def _record(manifest: Manifest) -> dict[str, Any]:
    path = manifest.folder / RECORD
    try:
        found = read_json(path) if path.exists() else {}
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def _seen(manifest: Manifest, file: File) -> list[Any]:
    """Return what changes whenever somebody writes to a file: who sets its time back changes that of its status."""
    status = manifest.path(file).stat()
    return [file.digest, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
