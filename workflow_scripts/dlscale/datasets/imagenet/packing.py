"""Packs are written image by image, whatever their number: memory holds one."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import h5py
import numpy as np
from PIL import Image

from dlscale.core.errors import UserError
from dlscale.core.files import whole
from dlscale.datasets.imagenet.geometry import resized, short_edge
from dlscale.datasets.imagenet.listing import shard
from dlscale.datasets.imagenet.pack import open_image

#: The longer edge by the shorter one, at most. Photographs are far below it. Validation resizes all of an image before
#: it cuts out the middle: 20 MB at this bound, with the default `resize`, and gigabytes of a line of pixels.
ELONGATION = 100
#: How Pillow calls numbers of more than 8 bits.
DEEP = ("I", "F")


@dataclass(frozen=True)
class Picture:
    """An image file: its name in messages, its class, and how to open it."""

    name: str
    label: int
    open: Callable[[], IO[bytes]]


def filled(count: int, number: int, shards: int, what: str) -> range:
    """Return which of `count` images are in shard `number`; `what` they are, for a message if there are none."""
    images = shard(count, number, shards)
    if not images:
        raise UserError(f"{what}: {count} images do not fill {shards} packs; lower the dataset's `shards`")
    return images


def write_pack(
    out: Path,
    pictures: Sequence[Picture],
    classes: Sequence[str],
    edge: int | None,
    progress: Callable[[int, int | None], None],
    files: str | None = None,
) -> None:
    """Write a pack of the pictures, in their order, as they are or, given an `edge`, decoded and reduced to it.

    The files are opened twice: HDF5 keeps values in one piece only if it is told beforehand how many there are. A file
    that is no image, or a damaged one, is a `UserError`. `files` is a digest of how they look (`listing.digest`).
    """
    count, digest = len(pictures), hashlib.sha256()
    index = np.zeros((count, 4), np.int64)
    for number, picture in enumerate(pictures):
        with _named(picture), picture.open() as file:
            index[number, 1] = file.seek(0, io.SEEK_END) if edge is None else 3 * int(np.prod(_size(file, edge)))
        progress(number + 1, 2 * count)
    index[:, 0] = np.cumsum(index[:, 1]) - index[:, 1]
    with whole(out) as temporary, h5py.File(temporary, "w") as pack:
        stored = pack.create_dataset("bytes", (int(index[:, 1].sum()),), "u1", fill_time="never")
        for number, picture in enumerate(pictures):
            with _named(picture), picture.open() as file:
                values, index[number, 2:] = _encoded(file) if edge is None else _decoded(file, edge)
                if len(values) != index[number, 1]:
                    raise ValueError("it changed while it was read")
            first = int(index[number, 0])
            stored[first : first + len(values)] = values
            digest.update(values.data)
            progress(count + number + 1, 2 * count)
        labels = np.array([picture.label for picture in pictures], np.int64)
        for name, numbers in (("index", index), ("labels", labels)):
            pack[name] = numbers
            digest.update(numbers.data)
        pack["classes"] = list(classes)
        digest.update("\0".join(classes).encode())
        pack.attrs["form"] = "encoded" if edge is None else "decoded"
        pack.attrs["sha256"] = digest.hexdigest()
        if files is not None:
            pack.attrs["files"] = files


def _encoded(file: IO[bytes]) -> tuple[np.ndarray, tuple[int, int]]:
    """Return a file's bytes, uint8 [n], and height and width of its image; it is decoded to see that it can be."""
    data = file.read()
    with _opened(io.BytesIO(data)) as image:
        width, height = image.size
        image.draft("RGB", (1, 1))  # of a JPEG all is read, but few pixels are computed
        image.load()
    return np.frombuffer(data, np.uint8), (height, width)


def _decoded(file: IO[bytes], edge: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Return an image's pixels, uint8 [n], RGB whatever they were, and height and width."""
    height, width = _size(file, edge)
    file.seek(0)
    with _opened(file) as image:
        pixels = np.asarray(resized(image.convert("RGB"), height, width))
    return pixels.reshape(-1), (height, width)


def _opened(file: IO[bytes]) -> Image.Image:
    """Open an image; refuse what cannot become pixels of 8 bits, or a validation sample in little memory."""
    image = open_image(file)
    if image.mode.startswith(DEEP):
        raise UserError(
            f"grey of more than 8 bits (Pillow's mode {image.mode}), and which numbers are black and white is not "
            "known; scale it to 8 bits"
        )
    if max(image.size) > ELONGATION * min(image.size):
        width, height = image.size
        raise UserError(
            f"{width} x {height} pixels; expected a longer edge of at most {ELONGATION} times the shorter one; crop or "
            "remove it"
        )
    return image


def _size(file: IO[bytes], edge: int) -> tuple[int, int]:
    """Return height and width of an image that is reduced to the shorter edge `edge`; smaller ones stay as they are."""
    with _opened(file) as image:
        width, height = image.size
    return short_edge(height, width, edge) if min(height, width) > edge else (height, width)


@contextlib.contextmanager
def _named(picture: Picture) -> Iterator[None]:
    """Have whatever is wrong with a picture said with its name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{picture.name}: {error}") from None
    except Exception as error:  # Pillow raises what its decoders stumble upon
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{picture.name}: not a readable image ({reason}); mend or remove it") from None
