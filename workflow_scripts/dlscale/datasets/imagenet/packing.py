"""Packs are written image by image, whatever their number: memory holds one."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from dlscale.core.errors import UserError
from dlscale.core.files import whole
from dlscale.datasets.imagenet.pack import open_image, short_edge

#: How Pillow calls numbers of more than 8 bits.
DEEP = ("I", "F")
#: Bytes that are copied at a time.
BLOCK = 2**24


@dataclass(frozen=True)
class Picture:
    """An image file: its name in messages, its class, and how to read its bytes."""

    name: str
    label: int
    read: Callable[[], bytes]


def write_pack(
    out: Path,
    pictures: Sequence[Picture],
    classes: Sequence[str],
    edge: int | None,
    progress: Callable[[int, int | None], None],
    files: str | None = None,
) -> None:
    """Write a pack of the pictures, in their order, as they are or, given an `edge`, decoded and reduced to it.

    HDF5 keeps values in one piece only if it is told beforehand how many there are: they lie in a file without a name
    until then. A file that is no image, or a damaged one, is a `UserError`. `files` tells how they look
    (`listing.look`).
    """
    index, digest = np.zeros((len(pictures), 4), np.int64), hashlib.sha256()
    with whole(out) as temporary, tempfile.TemporaryFile(dir=out.parent) as gathered:
        for number, picture in enumerate(pictures):
            try:
                values, size = _stored(picture.read(), edge)
            except Exception as error:  # Pillow raises what its decoders stumble upon
                reason = getattr(error, "strerror", None) or " ".join(str(error).split())
                raise UserError(f"{picture.name}: not a readable image ({reason}); mend or remove it") from None
            index[number] = gathered.tell(), len(values), *size
            gathered.write(values)
            digest.update(values)
            progress(number + 1, len(pictures))
        total = gathered.tell()
        gathered.seek(0)
        with h5py.File(temporary, "w") as pack:
            stored = pack.create_dataset("bytes", (total,), "u1", fill_time="never")
            for first in range(0, total, BLOCK):
                stored[first : first + BLOCK] = np.frombuffer(gathered.read(BLOCK), np.uint8)
            for name, numbers in (("index", index), ("labels", np.array([each.label for each in pictures], np.int64))):
                pack[name] = numbers
                digest.update(numbers.data)
            pack["classes"] = list(classes)
            digest.update("\0".join(classes).encode())
            pack.attrs["form"] = "encoded" if edge is None else "decoded"
            pack.attrs["sha256"] = digest.hexdigest()
            if files is not None:
                pack.attrs["files"] = files


def _stored(file: bytes, edge: int | None) -> tuple[bytes, tuple[int, int]]:
    """Return the bytes to store, and height and width of the image; it is decoded to see that it can be."""
    with open_image(io.BytesIO(file)) as image:
        width, height = image.size
        if image.mode.startswith(DEEP):
            raise ValueError(f"grey of more than 8 bits, mode {image.mode}, of unknown black and white; scale it")
        if edge is None:
            image.draft("RGB", (1, 1))  # of a JPEG all is read, but few pixels are computed
            image.load()
            return file, (height, width)
        if min(height, width) > edge:
            height, width = short_edge(height, width, edge)
        return image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR).tobytes(), (height, width)
