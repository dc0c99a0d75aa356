"""Samples of packed images.

Training samples are random resized crops, mirrored at random, like torchvision's `RandomResizedCrop` and
`RandomHorizontalFlip` on Pillow images. Other samples are the middle of the resized image, like `Resize` and
`CenterCrop`. Shape suffix: N images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dlscale.core.errors import UserError
from dlscale.data import sampling
from dlscale.data.manifest import Manifest
from dlscale.data.samples import ArraySpec, CroppedImages, ImageWindows
from dlscale.data.sampling import Visits
from dlscale.extensions.imagenet_resnet50.imagenet import jpeg
from dlscale.extensions.imagenet_resnet50.imagenet.pack import Pack, short_edge
from dlscale.extensions.imagenet_resnet50.imagenet.resize import Box, resize

if TYPE_CHECKING:
    from dlscale.extensions.imagenet_resnet50.imagenet.kind import ImageSamples

#: Smallest and largest aspect ratio (width / height) of a training crop, and fraction of mirrored crops.
RATIO, FLIPPED = (3 / 4, 4 / 3), 0.5


def random_crops(seed: int, epoch: int, first: int, edges_N2: np.ndarray, scale: tuple[float, float]) -> np.ndarray:
    """Return top, left, height and width of the crops from sample `first` on, int64 [N, 4].

    `edges_N2` are heights and widths of the images. As in torchvision's `RandomResizedCrop.get_params`, an area,
    uniform in `scale`, and an aspect ratio, with uniform logarithm, are drawn until the crop fits. If no crop fits in
    ten tries, the crop is the middle of the image.
    """
    count = len(edges_N2)
    height_N, width_N = edges_N2.T
    crops_N4 = np.zeros((count, 4), np.int64)
    missing_N = np.ones(count, bool)
    logs = np.log(RATIO)
    for number in range(10):
        if number % 2 == 0:  # a stream has four random words per sample: enough for two tries
            words = sampling.words(seed, epoch, f"shape{number // 2}", count, first)
        area, log = (_uniform(words[:, 2 * (number % 2) + which]) for which in (0, 1))
        area = height_N * width_N * (scale[0] + (scale[1] - scale[0]) * area)
        shape = np.exp(logs[0] + (logs[1] - logs[0]) * log)
        width, height = (np.rint(np.sqrt(each)).astype(np.int64) for each in (area * shape, area / shape))
        fits = missing_N & (width > 0) & (width <= width_N) & (height > 0) & (height <= height_N)
        crops_N4[fits, 2], crops_N4[fits, 3] = height[fits], width[fits]
        missing_N &= ~fits
        if not missing_N.any():
            break
    place = sampling.words(seed, epoch, "place", count, first)
    for axis, edge_N in enumerate((height_N, width_N)):
        crops_N4[:, axis] = sampling.below(place[:, axis], edge_N - crops_N4[:, 2 + axis] + 1)
    for image in np.flatnonzero(missing_N):
        crops_N4[image] = _middle(int(height_N[image]), int(width_N[image]))
    return crops_N4


def flips(seed: int, epoch: int, first: int, count: int) -> np.ndarray:
    """Return whether the crops from sample `first` on are mirrored, bool [count]."""
    return np.asarray(_uniform(sampling.words(seed, epoch, "place", count, first)[:, 2]) < FLIPPED)


def _uniform(words: np.ndarray) -> np.ndarray:
    """Map random words (uint64) to [0, 1), float64."""
    return (words >> np.uint64(11)) * 2.0**-53


def _middle(height: int, width: int) -> tuple[int, int, int, int]:
    """Return top, left, height, width of the largest central crop that `RATIO` allows."""
    rows, columns = min(height, round(width / RATIO[0])), min(width, round(height * RATIO[1]))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


class Images(CroppedImages):
    """Crops of the images of a split."""

    def __init__(self, manifest: Manifest, split: str, settings: ImageSamples, seed: int) -> None:
        self.packs = [Pack(manifest.path(file)) for file in manifest.files(split)]
        self._settings, self._seed, self._training = settings, seed, split == "train"
        wanted = settings.train if self._training else settings.valid
        self.visits = Visits([file.rows for file in manifest.files(split)], wanted, seed, self._training)
        self.size = self.visits.size
        self.input_spec = ArraySpec((3, settings.size, settings.size), "uint8")
        self.target_spec = ArraySpec((), "int64", manifest.fields["labels"].classes)

    @property
    def encoded(self) -> bool:
        """Whether the packs contain image files instead of pixels."""
        return self.packs[0].form == "encoded"

    def windows(self, epoch: int, indices: range) -> ImageWindows:
        """Return the windows of samples `indices` of `epoch`."""
        rows = self._rows(epoch, indices)
        images = [self.packs[pack].stored(row) for pack, row in rows]
        for (pack, row), image in zip(rows, images, strict=True):
            if self.encoded and not jpeg.is_complete(image):
                self.packs[pack].image(row)  # refuses a truncated image, whose first rows other decoders would accept
        labels = np.array([self.packs[pack].labels[row] for pack, row in rows], np.int64)
        edges_N2 = np.array([self.packs[pack].index[row, 2:] for pack, row in rows], np.int64).reshape(-1, 2)
        count, size = len(rows), self._settings.size
        corner_N2, start_N2 = np.zeros((2, count, 2), np.int64)
        if self._training:
            key = self._seed, epoch, indices.start
            crops_N4 = random_crops(*key, edges_N2, self._settings.scale)
            resized_N2, flip_N = np.full((count, 2), size), flips(*key, count)
            return ImageWindows(images, labels, crops_N4[:, :2], crops_N4[:, 2:], resized_N2, start_N2, flip_N)
        resized = [short_edge(height, width, self._settings.resize) for height, width in edges_N2.tolist()]
        resized_N2 = np.array(resized, np.int64).reshape(-1, 2)
        start_N2 = np.rint((resized_N2 - size) / 2).astype(
            np.int64
        )  # halves are rounded to even numbers, as in torchvision
        return ImageWindows(images, labels, corner_N2, edges_N2, resized_N2, start_N2, np.zeros(count, bool))

    def _rows(self, epoch: int, indices: range) -> list[tuple[int, int]]:
        """Return pack and row of samples `indices`."""
        packs, rows = (each[indices.start : indices.stop].tolist() for each in self.visits.rows(epoch))
        return list(zip(packs, rows, strict=True))

    def writers(self, epoch: int, indices: range, x: np.ndarray, y: np.ndarray) -> list[Callable[[], None]]:
        """Return tasks that write the samples `indices` into `x` [n, 3, H, W]; write `y` [n] immediately."""
        chosen = self.windows(epoch, indices)
        y[:] = chosen.labels
        rows = enumerate(self._rows(epoch, indices))
        return [functools.partial(self._write, pack, row, chosen, number, x[number]) for number, (pack, row) in rows]

    def _write(self, pack: int, row: int, chosen: ImageWindows, number: int, out: np.ndarray) -> None:
        """Write one sample into `out`, uint8 [3, size, size]."""
        places = chosen.corner, chosen.extent, chosen.resized, chosen.start
        (top, left), (height, width), shape, start = (each[number].tolist() for each in places)
        # Cut out the crop before resizing, so that pixels around the crop do not blend into its edges.
        pixels, box = _pixels(self.packs[pack], row, (top, left, height, width))
        resize(pixels, box, tuple(shape), tuple(start), bool(chosen.flip[number]), out)


def _pixels(pack: Pack, row: int, box: Box) -> tuple[np.ndarray, Box]:
    """Return pixels that contain a box of an image, uint8 [H, W, 3], and the box in these pixels."""
    stored = pack.stored(row)
    if pack.form == "decoded":
        return stored, box
    if (part := jpeg.decode_box(stored, box)) is not None and part.shape[:2] == box[2:]:
        return part, (0, 0, *box[2:])
    pixels = np.asarray(pack.image(row))
    if box[0] + box[2] > pixels.shape[0] or box[1] + box[3] > pixels.shape[1]:
        raise UserError(
            f"{pack.path}: image {row} is smaller than the index states; the pack is damaged: delete it and run the "
            "workflow again"
        )
    return pixels, box


open_samples = Images
