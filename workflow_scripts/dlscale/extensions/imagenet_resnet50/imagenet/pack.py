"""Write and read packs: HDF5 files with many images of any size, written and read one image at a time.

The datasets of a pack:

===========  =============================================================================================
`bytes`      uint8 [total]: the images one after the other, contiguous in the file, so that they can be mapped
`index`      int64 [N, 4]: first byte, byte count, height, width of each image
`labels`     int64 [N]: classes
`classes`    names of the classes, in the order of the labels
===========  =============================================================================================

The attributes of a pack: `form` is `encoded` (unchanged image files) or `decoded` (pixels, RGB [H, W, 3]); `sha256` is
the digest of all datasets; `files` is the digest of the packed files' names, sizes and times; `skipped` is JSON with
the number of the split's files that no pack contains, by reason.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
from PIL import Image

from dlscale.core.errors import UserError, brief
from dlscale.core.files import atomic_write, reading
from dlscale.data import store

#: Formats that Pillow decodes itself. For other formats Pillow may start another program, such as Ghostscript for EPS.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "JPEG2000", "PPM")
#: Shorter edge, in pixels, to which larger images are reduced if pixels are packed.
EDGE = 256


def open_image(file: IO[bytes]) -> Image.Image:
    """Open an image; its pixels are not decoded yet."""
    return Image.open(file, formats=FORMATS)


def short_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return height and width after resizing the shorter edge to `edge`; the longer edge is rounded down."""
    return (edge, int(edge * width / height)) if height <= width else (int(edge * height / width), edge)


class Pack:
    """Open pack: the images are mapped from the file, everything else is in memory."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        with (
            store.open_file(path) as file,
            reading(path, "not a pack of images: delete the file and run the workflow again"),
        ):
            self.form, self.digest = str(file.attrs["form"]), str(file.attrs["sha256"])
            self.skipped: dict[str, int] = json.loads(file.attrs.get("skipped", "{}"))
            self.bytes: np.ndarray = store.map_chunks(file["bytes"])[(0,)]
            self.index: np.ndarray = file["index"][()]
            self.labels: np.ndarray = file["labels"][()]
            self.classes = [name.decode() for name in file["classes"][()]]
            first, count, height, width = self.index.T
            right = count > 0 if self.form == "encoded" else count == height * width * 3
            if (
                not (right & (first >= 0) & (first + count <= len(self.bytes))).all()
                or self.labels.shape != first.shape
            ):
                raise ValueError("the index of the images does not fit the file")

    def __reduce__(self) -> tuple[Any, ...]:
        return Pack, (self.path,)  # pickling the attributes would copy the mapped images

    def stored(self, row: int) -> np.ndarray:
        """Return an image's file, uint8 [bytes], or its pixels, uint8 [H, W, 3]."""
        first, count, height, width = self.index[row].tolist()
        values = self.bytes[first : first + count]
        return values if self.form == "encoded" else values.reshape(height, width, 3)

    def image(self, row: int) -> Image.Image:
        """Return an image, RGB."""
        stored = self.stored(row)
        if self.form == "decoded":
            return Image.fromarray(stored)
        try:
            with open_image(io.BytesIO(stored.data)) as image:
                image.load()
                return image if image.mode == "RGB" else image.convert("RGB")
        except Exception as error:  # Pillow's decoders raise many types
            raise UserError(
                f"{self.path}: image {row} cannot be decoded ({brief(error)}); the pack is damaged: "
                "delete it and run the workflow again"
            ) from None


@dataclass(frozen=True)
class Picture:
    """An image file: its name in messages, its class, and how to read its bytes."""

    name: str
    label: int
    read: Callable[[], bytes]


def shard(count: int, number: int, shards: int) -> range:
    """Return the indices of the images in shard `number`; raise `UserError` if empty."""
    images = range(count * number // shards, count * (number + 1) // shards)
    if not images:
        raise UserError(f"{count} images do not fill {shards} packs; reduce the dataset's `shards`")
    return images


def counted(reasons: Mapping[str, int]) -> str:
    """Return reasons with their counts as a text, beginning with the most frequent reason."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))


def write_pack(
    out: Path,
    pictures: Sequence[Picture],
    classes: Sequence[str],
    form: str,
    progress: Callable[[int, int | None], None],
    files: str | None = None,
    skipped: Mapping[str, int] | None = None,
) -> None:
    """Write the pictures, in their order, into a pack with the `form` `encoded` or `decoded`.

    HDF5 can store contiguous values only after their number is known, so the values are first written into an unnamed
    temporary file. `files` is the digest of the packed files, as in `folder.shard_digests`; None for simulated images.
    """
    index, digest = np.zeros((len(pictures), 4), np.int64), hashlib.sha256()
    with atomic_write(out) as temporary, tempfile.TemporaryFile(dir=out.parent) as gathered:
        for number, picture in enumerate(pictures):
            try:
                values, size = _stored(picture.read(), form)
            except Exception as error:  # Pillow's decoders raise many types
                reason = getattr(error, "strerror", None) or " ".join(str(error).split())
                raise UserError(f"{picture.name}: not a readable image ({reason}); repair or remove the file") from None
            index[number] = gathered.tell(), len(values), *size
            gathered.write(values)
            digest.update(values)
            progress(number + 1, len(pictures))
        total = gathered.tell()
        gathered.seek(0)
        with h5py.File(temporary, "w") as pack:
            stored = pack.create_dataset("bytes", (total,), "u1", fill_time="never")
            block = 2**24  # bytes copied at a time
            for first in range(0, total, block):
                stored[first : first + block] = np.frombuffer(gathered.read(block), np.uint8)
            for name, numbers in (("index", index), ("labels", np.array([each.label for each in pictures], np.int64))):
                pack[name] = numbers
                digest.update(numbers.data)
            pack["classes"] = list(classes)
            digest.update("\0".join(classes).encode())
            pack.attrs["form"] = form
            pack.attrs["sha256"] = digest.hexdigest()
            if files is not None:
                pack.attrs["files"] = files
            pack.attrs["skipped"] = json.dumps(skipped or {})


def _stored(file: bytes, form: str) -> tuple[bytes, tuple[int, int]]:
    """Return the bytes to store, and height and width, of an image; raise an error if the image cannot be decoded."""
    with open_image(io.BytesIO(file)) as image:
        image.verify()  # compares the checksums of a PNG, which decoding ignores; afterwards the image is unusable
    with open_image(io.BytesIO(file)) as image:
        width, height = image.size
        if image.mode.startswith(("I", "F")):  # Pillow's modes of more than 8 bits
            raise ValueError(
                f"grey of more than 8 bits (mode {image.mode}), whose values of black and white are unknown; scale it "
                "to 8 bits"
            )
        if form == "encoded":
            image.draft("RGB", (1, 1))  # check a JPEG quickly: the file is read completely, but few pixels are computed
            image.load()
            return file, (height, width)
        if min(height, width) > EDGE:
            height, width = short_edge(height, width, EDGE)
        return image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR).tobytes(), (height, width)
