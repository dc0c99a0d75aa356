"""Writes packs image by image: memory holds one."""

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
#: Shorter edge, in pixels, to which larger images are reduced where pixels are packed.
EDGE = 256


@dataclass(frozen=True)
class Picture:
    """An image file: its name in messages, its class, and how to read its bytes."""

    name: str
    label: int
    read: Callable[[], bytes]


def shard(count: int, number: int, shards: int) -> range:
    """Return which of `count` images are in shard `number`; a shard without any is a `UserError`."""
    images = range(count * number // shards, count * (number + 1) // shards)
    if not images:
        raise UserError(f"{count} images do not fill {shards} packs; lower the dataset's `shards`")
    return images


def write_pack(
    out: Path,
    pictures: Sequence[Picture],
    classes: Sequence[str],
    form: str,
    progress: Callable[[int, int | None], None],
    files: str | None = None,
) -> None:
    """Write a pack of the pictures, in their order, of the `form` `encoded` or `decoded`.

    HDF5 keeps values in one piece only if their number is known: until then they lie in a file without a name. `files`
    is the digest of `folder.looks`.
    """
    index, digest = np.zeros((len(pictures), 4), np.int64), hashlib.sha256()
    with whole(out) as temporary, tempfile.TemporaryFile(dir=out.parent) as gathered:
        for number, picture in enumerate(pictures):
            try:
                values, size = _stored(picture.read(), form)
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
            pack.attrs["form"] = form
            pack.attrs["sha256"] = digest.hexdigest()
            if files is not None:
                pack.attrs["files"] = files


def _stored(file: bytes, form: str) -> tuple[bytes, tuple[int, int]]:
    """Return the bytes to store, and height and width of an image that can be decoded."""
    with open_image(io.BytesIO(file)) as image:
        width, height = image.size
        if image.mode.startswith(DEEP):
            raise ValueError(f"grey of more than 8 bits, mode {image.mode}, of unknown black and white; scale it")
        if form == "encoded":
            image.draft("RGB", (1, 1))  # of a JPEG all is read, but few pixels are computed
            image.load()
            return file, (height, width)
        if min(height, width) > EDGE:
            height, width = short_edge(height, width, EDGE)
        return image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR).tobytes(), (height, width)
