"""Samples of packed images: crops, resized to one size.

Training samples are random resized crops, mirrored at random; validation samples are the middle of the resized image:
torchvision's `RandomResizedCrop` and `RandomHorizontalFlip`, or `Resize` and `CenterCrop`, on images of Pillow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from dlscale.data.manifest import Manifest
from dlscale.data.samples import ArraySpec, CroppedImages, ImageWindows
from dlscale.data.sampling import Visits
from dlscale.datasets.imagenet import crops
from dlscale.datasets.imagenet.pack import Pack, short_edge

if TYPE_CHECKING:
    from dlscale.datasets.imagenet.kind import ImageSamples


class Images(CroppedImages):
    """See `dlscale.data.samples.Samples`. What is drawn for a sample is drawn when it is read."""

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
        """See `CroppedImages`."""
        return self.packs[0].form == "encoded"

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `dlscale.data.samples.Samples`."""
        x, y = np.empty((1, *self.input_spec.shape), np.uint8), np.empty(1, np.int64)
        for write in self.writers(epoch, range(index, index + 1), x, y):
            write()
        return x[0], np.asarray(y[0])

    def windows(self, epoch: int, indices: range) -> ImageWindows:
        """See `CroppedImages`."""
        rows = self._rows(epoch, indices)
        images = [self.packs[pack].stored(row) for pack, row in rows]
        labels = np.array([self.packs[pack].labels[row] for pack, row in rows], np.int64)
        edges_N2 = np.array([self.packs[pack].index[row, 2:] for pack, row in rows], np.int64).reshape(-1, 2)
        return ImageWindows(images, labels, *self._places(epoch, indices.start, edges_N2))

    def _rows(self, epoch: int, indices: range) -> list[tuple[int, int]]:
        """Return pack and row of some samples."""
        packs, rows = (each[indices.start : indices.stop].tolist() for each in self.visits.rows(epoch))
        return list(zip(packs, rows, strict=True))

    def _places(self, epoch: int, first: int, edges_N2: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return where samples `first` and on come from, given the edges of their images: see `ImageWindows`."""
        settings, count = self._settings, len(edges_N2)
        corner_N2, start_N2 = np.zeros((2, count, 2), np.int64)
        if self._training:
            key = self._seed, epoch, first
            crops_N4 = crops.random_crops(*key, edges_N2, settings.scale, settings.ratio)
            resized_N2, flip_N = np.full((count, 2), settings.size), crops.flips(*key, count, settings.flip)
            return crops_N4[:, :2], crops_N4[:, 2:], resized_N2, start_N2, flip_N
        resized = [short_edge(height, width, settings.resize) for height, width in edges_N2.tolist()]
        resized_N2 = np.array(resized, np.int64).reshape(-1, 2)
        start_N2 = np.rint((resized_N2 - settings.size) / 2).astype(np.int64)  # halves to even, as torchvision does
        return corner_N2, edges_N2, resized_N2, start_N2, np.zeros(count, bool)

    def writers(self, epoch: int, indices: range, x: np.ndarray, y: np.ndarray) -> list[Callable[[], None]]:
        """See `WritingSamples`: Pillow decodes and resizes, which other threads need not wait for."""
        chosen = self.windows(epoch, indices)
        y[:] = chosen.labels
        rows = enumerate(self._rows(epoch, indices))
        return [functools.partial(self._write, pack, row, chosen, number, x[number]) for number, (pack, row) in rows]

    def _write(self, pack: int, row: int, chosen: ImageWindows, number: int, out: np.ndarray) -> None:
        """Write one sample into `out`, uint8 [3, size, size]."""
        places = chosen.corner, chosen.extent, chosen.resized, chosen.start
        (top, left), (height, width), (rows, columns), (first_row, first_column) = (
            each[number].tolist() for each in places
        )
        size = self._settings.size
        # Cut out first: the pixels around the crop are not to be seen at its edges.
        crop = self.packs[pack].image(row).crop((left, top, left + width, top + height))
        resized = crop.resize((columns, rows), Image.Resampling.BILINEAR)
        pixels = np.asarray(resized.crop((first_column, first_row, first_column + size, first_row + size)))
        out[...] = (pixels[:, ::-1] if chosen.flip[number] else pixels).transpose(2, 0, 1)


open_samples = Images
