"""Pack the images in folders of classes, DIR/CLASS/**/*.jpg, and detect changes of the images.

Images have the order of torchvision's ImageFolder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import h5py

from dlscale.core.errors import UserError
from dlscale.core.files import no_pipe, stamp
from dlscale.core.text import many
from dlscale.extensions.imagenet_resnet50.imagenet.pack import Picture, counted, shard, write_pack

#: Suffixes of images, in lower or upper case. The format of a file, one of `pack.FORMATS`, is read from its content.
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp", ".tif", ".tiff", ".bmp"),
    *(".jp2", ".j2k", ".ppm", ".pgm", ".pbm", ".pnm"),
)
#: Names of files and folders that operating systems add; such files are ignored without a report.
JUNK = re.compile(r"\._.*|\.ds_store|thumbs\.db|desktop\.ini|__macosx", re.IGNORECASE)
#: Maximum number of skipped files that a log names for each reason.
MAX_NAMED_FILES = 1000
REMEDY = "add images of this class, or remove its folder from both splits"

#: A skipped file: reason, and path relative to the split's folder.
Skipped = tuple[str, Path]


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Pack a shard of a split: the raw file's index is the number of the shard."""
    source, split = dataset.source, raw.name.partition("-")[0]
    classes, folder = check_classes(source.train, source.valid), Path(getattr(source, split))
    found, skipped = pictures(folder, classes)
    if raw.index == 0:  # log skipped files once for each split
        _log_skipped(folder, skipped)
    part = shard(len(found), raw.index, getattr(dataset.shards, split))
    chosen = found[part.start : part.stop]
    files = _digest(
        classes, [_line(folder, Path(picture.name)) for picture in chosen]
    )  # digest of this pack's files only
    write_pack(out, chosen, classes, dataset.form, progress, files, Counter(reason for reason, _ in skipped))


@functools.lru_cache
def check_classes(train: str, valid: str) -> list[str]:
    """Return the names of the classes; raise `UserError` if the classes of the splits differ, or are fewer than two."""
    classes, other = class_names(Path(train)), class_names(Path(valid))
    if classes != other:
        missing = {valid: set(classes) - set(other), train: set(other) - set(classes)}
        lacks = [f"{folder} has no {', '.join(sorted(names)[:5])}" for folder, names in missing.items() if names]
        alike = {unicodedata.normalize("NFC", name) for name in classes}
        if alike == {unicodedata.normalize("NFC", name) for name in other}:
            lacks.append("these names differ only in Unicode normalisation (macOS may use NFD): rename the folders")
        raise UserError(
            f"{train} and {valid} differ in their classes: {'; '.join(lacks)}; give each class a folder with images "
            "in both splits, or remove its folder from the other split"
        )
    if len(classes) < 2:
        raise UserError(
            f"{train}: contains only the folder {classes[0]}; expected a folder for each class, at least two"
        )
    return classes


def class_names(folder: Path) -> list[str]:
    """Return the sorted names of the subfolders of a folder, without hidden and system folders.

    Links to folders, and broken links, count as subfolders.
    """
    try:
        entries = [
            entry for entry in os.scandir(folder) if not entry.is_file() and (entry.is_dir() or entry.is_symlink())
        ]
    except OSError as error:
        _refuse(error)
    names = sorted(entry.name for entry in entries if entry.name[0] != "." and not JUNK.fullmatch(entry.name))
    if not names:
        raise UserError(
            f"{folder}: contains no folders; expected a folder for each class, with the images of the class"
        )
    return names


def images(folder: Path, name: str) -> tuple[list[Path], list[Skipped]]:
    """Return the images and the skipped files of a class; raise `UserError` if the class has no images.

    Subfolders are searched, too.
    """
    found, skipped = _listing(folder, name)
    if not found:
        why = f"; {_summary(skipped)}" if skipped else f" ({', '.join(SUFFIXES)})"
        raise UserError(f"{folder / name}: no images in this folder{why}; {REMEDY}")
    return found, skipped


def pictures(folder: Path, classes: list[str]) -> tuple[list[Picture], list[Skipped]]:
    """Return the images of a split, class by class, and the skipped files."""
    found, skipped = list[Picture](), _outside(folder)
    for label, name in enumerate(classes):
        paths, others = images(folder, name)
        found += [Picture(str(path), label, functools.partial(_content, path)) for path in paths]
        skipped += others
    return found, skipped


def _outside(folder: Path) -> list[Skipped]:
    """Return the files of a split that are not in the folder of a class."""
    skipped = list[Skipped]()
    for path in sorted(folder.iterdir()):
        hidden = path.name[0] == "."
        if hidden and path.is_dir():
            skipped += _listing(folder, path.name)[1]
        elif not path.is_dir() and not JUNK.fullmatch(path.name):
            skipped.append(("hidden" if hidden else "not in a class folder", Path(path.name)))
    return skipped


def _listing(folder: Path, name: str) -> tuple[list[Path], list[Skipped]]:
    """Return the images and the skipped files below `folder / name`, in the order of torchvision."""
    found, skipped = list[Path](), list[Skipped]()
    for root, folders, names in sorted(os.walk(folder / name, onerror=_refuse)):
        inner = Path(root).relative_to(folder)
        if any(JUNK.fullmatch(part) for part in inner.parts):
            continue
        hidden = any(part[0] == "." for part in inner.parts)
        skipped += [("link to a folder", inner / each) for each in sorted(folders) if Path(root, each).is_symlink()]
        for each in sorted(each for each in names if not JUNK.fullmatch(each)):
            suffix = Path(each).suffix.lower()
            if hidden or each[0] == ".":
                skipped.append(("hidden", inner / each))
            elif suffix not in SUFFIXES:
                skipped.append((f"format {suffix}" if suffix else "no suffix", inner / each))
            else:
                found.append(Path(root, each))
    return found, skipped


def _summary(skipped: list[Skipped]) -> str:
    """Count skipped files by reason."""
    return f"{many(len(skipped), 'file')} skipped: {counted(Counter(reason for reason, _ in skipped))}"


def _log_skipped(folder: Path, skipped: list[Skipped]) -> None:
    """Log a warning with the number of skipped files, and the files' names."""
    if skipped:
        logging.warning("%s: %s", folder, _summary(skipped))
    for reason in dict.fromkeys(reason for reason, _ in skipped):
        names = [str(path) for its, path in skipped if its == reason]
        more = f" and {len(names) - MAX_NAMED_FILES} more" if len(names) > MAX_NAMED_FILES else ""
        logging.info("skipped, %s: %s%s", reason, ", ".join(names[:MAX_NAMED_FILES]), more)


def _content(path: Path) -> bytes:
    no_pipe(path, "an image")
    return path.read_bytes()


@functools.lru_cache
def shard_digests(folder: str, shards: int) -> list[str]:
    """Return a digest of each shard of a split, from the classes and the names, sizes and times of the images."""
    split = Path(folder)
    names = class_names(split)
    with ThreadPoolExecutor(8) as pool:  # threads, since each access to a network file system is slow
        found = pool.map(lambda name: [_line(split, path) for path in images(split, name)[0]], names)
        lines = [line for of_class in found for line in of_class]
    if len(lines) < shards:  # too few images: the stage reports this error; a dry run must not fail
        return [_digest(names, lines)] * shards
    shares = (shard(len(lines), number, shards) for number in range(shards))
    return [_digest(names, lines[share.start : share.stop]) for share in shares]


def packed(pack: Path) -> str | None:
    """Return the digest of the files from which a pack was made; None if the pack is missing or has no digest."""
    with contextlib.suppress(OSError), h5py.File(no_pipe(pack)) as file:
        return file.attrs.get("files")
    return None


def _digest(names: list[str], lines: list[str]) -> str:
    return hashlib.sha256(os.fsencode("\0".join([*names, *lines]))).hexdigest()


def _line(folder: Path, path: Path) -> str:
    try:
        return "/".join((str(path.relative_to(folder)), *map(str, stamp(path))))
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot read this file's size and time ({error.strerror}). Repair or remove the file"
        ) from None


def _refuse(error: OSError) -> NoReturn:
    """Raise `UserError` for a folder that cannot be listed."""
    raise UserError(f"{error.filename}: cannot read this folder ({error.strerror})") from None
