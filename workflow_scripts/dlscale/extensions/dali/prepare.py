"""Make and verify mirrors before a stage begins."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from dlscale.core.errors import UserError
from dlscale.core.files import atomic_write, remove, sha256, translate_error, write_json
from dlscale.core.process import turn
from dlscale.core.progress import tracked
from dlscale.core.text import size
from dlscale.data.manifest import Manifest
from dlscale.data.samples import BoxField
from dlscale.data.staging import RECORD, file_state, free_bytes, read_record
from dlscale.extensions.dali import mirrors


def make_mirrors(manifest: str | Path) -> None:
    """Make the missing mirrors of a dataset's volumes; only one process makes mirrors, and parallel processes wait."""
    found = Manifest.read(manifest)
    for split in (split for split, files in found.splits.items() if files):
        for name, info in found.fields.items():
            if info.channel_axis == 0:
                make_mirror(BoxField(found, split, name, (1, 1, 1)))


def make_mirror(field: BoxField) -> None:
    """Make the mirror of a field if it is missing; verify the mirror if its file has changed since the last call.

    A damaged mirror of dlscale is made again. A mirror that dlscale has not made is compared with the field's file; if
    the values differ, raise `UserError`.
    """
    made, record = mirrors.locate(field), field.stem.parent / RECORD
    if _is_known(made.path, record):
        return
    try:
        record.parent.mkdir(exist_ok=True)
        with turn(record.parent / "lock"):
            if _is_known(made.path, record):
                return
            digest = ""
            if made.own:
                digest, *_ = read_record(record).get(str(made.path), [""])
                if not made.path.is_file() or sha256(made.path) != digest:
                    _write_mirror(made, field)
                    digest = sha256(made.path)
            elif what := mirrors.compare(made, field):
                raise UserError(
                    f"{made.path}: damaged: {what} than {field.readers[0].path}. Remove this file, so that a mirror is "
                    f"made; or {mirrors.INSTEAD}"
                )
            with contextlib.suppress(UserError):
                write_json(record, read_record(record) | {str(made.path): file_state(made.path, digest)})
    except OSError as error:
        raise translate_error(error, made.path) from error


def _is_known(path: Path, record: Path) -> bool:
    """Return whether a mirror has not changed since it was verified."""
    known = read_record(record).get(str(path))
    return known is not None and path.is_file() and known == file_state(path, known[0])


def _write_mirror(made: mirrors.NpyMirror, field: BoxField) -> None:
    for former in made.path.parent.glob(f"{field.stem.name}-*.npy"):  # mirrors of former contents
        remove(former)
    needed, free = mirrors.bytes_of(made, field), free_bytes(made.path.parent)
    if needed > free:
        raise UserError(
            f"loader.reader: numpy: the mirror {made.path} needs {size(needed, ' ')}, but only "
            f"{size(free, ' ')} are free on the disk. Free space, or {mirrors.INSTEAD}"
        )
    parts = mirrors.slabs(made, field)
    with atomic_write(made.path) as temporary, open(temporary, "wb") as out:
        mirrors.write(made, field, tracked(parts, f"making {made.path.name}", len(parts), "slabs"), out)
    logging.info("made %s (%s)", made.path, size(needed))


def prepare(loader: dict[str, Any], manifest: str) -> None:
    """Make the mirrors that a loader with these settings reads; called before the loader's stage begins."""
    if loader.get("reader") == "numpy":
        make_mirrors(manifest)
