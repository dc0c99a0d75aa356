"""Samples of packed images: crops, resized to one size.

Training samples are random resized crops, mirrored at random; validation samples are the middle of the resized image:
torchvision's `RandomResizedCrop` and `RandomHorizontalFlip`, or `Resize` and `CenterCrop`, on images of Pillow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dlscale.data import sampling
from dlscale.data.manifest import Manifest
from dlscale.data.samples import ArraySpec, CroppedImages, ImageWindows
from dlscale.datasets.imagenet import crops, geometry
from dlscale.datasets.imagenet.pack import Pack
from dlscale.datasets.imagenet.resample import resample

if TYPE_CHECKING:
    from dlscale.datasets.imagenet.kind import ImageSamples


class Images(CroppedImages):
    """See `dlscale.data.samples.Samples`.

    A training epoch visits all images in a random order, and of more than `settings.train` a new random choice each
    epoch; validation is fixed, in order and evenly spread. What is drawn for a sample is drawn when it is read.
    """

    def __init__(self, manifest: Manifest, split: str, settings: ImageSamples, seed: int) -> None:
        self.packs = [Pack(manifest.path(file)) for file in manifest.files(split)]
        self._counts = np.array([file.rows for file in manifest.files(split)])
        self._settings, self._seed, self._training = settings, seed, split == "train"
        self._available = int(self._counts.sum())
        self.size = min((settings.train if self._training else settings.valid) or self._available, self._available)
        self.input_spec = ArraySpec((3, settings.size, settings.size), "uint8")
        self.target_spec = ArraySpec((), "int64", manifest.fields["labels"].classes)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - an epoch's rows serve all its samples; two epochs overlap
    def rows(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return pack and row of each sample of an epoch, int64 [size] each."""
        return sampling.locate(
            self._counts, sampling.visits(self._seed, epoch, self._available, self.size, self._training)
        )

    @property
    def encoded(self) -> bool:
        """See `CroppedImages`."""
        return self.packs[0].form == "encoded"

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `dlscale.data.samples.Samples`."""
        alone = range(index, index + 1)
        ((pack, row),), chosen, size = self._rows(epoch, alone), self.windows(epoch, alone), self._settings.size
        places = (each[0].tolist() for each in (chosen.corner, chosen.extent, chosen.resized, chosen.start))
        (top, left), (height, width), edges, (first_row, first_column) = places
        # Cut out first: the pixels around the crop are not to be seen at its edges.
        crop = self.packs[pack].image(row).crop((left, top, left + width, top + height))
        pixels = np.asarray(geometry.resized(crop, *edges))
        pixels = pixels[first_row : first_row + size, first_column : first_column + size]
        pixels = pixels[:, ::-1] if chosen.flip[0] else pixels
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), np.asarray(chosen.labels[0])

    def windows(self, epoch: int, indices: range) -> ImageWindows:
        """See `CroppedImages`."""
        rows = self._rows(epoch, indices)
        index_N4 = np.array([self.packs[pack].index[row] for pack, row in rows], np.int64).reshape(-1, 4)
        images = []
        for (pack, _), (first, count, height, width) in zip(rows, index_N4.tolist(), strict=True):
            stored = self.packs[pack].bytes[first : first + count]
            images.append(stored if self.encoded else stored.reshape(height, width, 3))
        labels = np.array([self.packs[pack].labels[row] for pack, row in rows], np.int64)
        return ImageWindows(images, labels, *self._places(epoch, indices.start, index_N4[:, 2:]))

    def _rows(self, epoch: int, indices: range) -> list[tuple[int, int]]:
        """Return pack and row of some samples."""
        packs, rows = (each[indices.start : indices.stop].tolist() for each in self.rows(epoch))
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
        resized = [geometry.short_edge(height, width, settings.resize) for height, width in edges_N2.tolist()]
        start = [geometry.centre(height, width, settings.size) for height, width in resized]
        resized_N2, start_N2 = (np.array(each, np.int64).reshape(-1, 2) for each in (resized, start))
        return corner_N2, edges_N2, resized_N2, start_N2, np.zeros(count, bool)

    def writers(self, epoch: int, indices: range, x: np.ndarray, y: np.ndarray) -> list[Callable[[], None]]:
        """See `WritingSamples`: Pillow decodes files; a compiled kernel resizes, as Pillow does it."""
        chosen = self.windows(epoch, indices)
        y[:] = chosen.labels
        where = chosen.corner, chosen.extent, chosen.resized, chosen.start, chosen.flip
        places = zip(self._rows(epoch, indices), chosen.images, x, *(each.tolist() for each in where), strict=True)
        tasks: list[Callable[[], None]] = []
        for (pack, row), image, out, corner, extent, resized, start, flip in places:
            crop, rest = (*corner, *extent), (tuple(resized), tuple(start), flip, out)
            if self.encoded:
                tasks.append(functools.partial(_decode, self.packs[pack], row, crop, *rest))
            else:
                tasks.append(functools.partial(resample, image.reshape(-1), image.shape[1], crop, *rest))
        return tasks


def _decode(pack: Pack, row: int, crop: tuple[int, ...], *rest: Any) -> None:
    """Decode an image and resize its crop; for `rest` see `resample`."""
    top, left, height, width = crop
    pixels = np.asarray(pack.image(row).crop((left, top, left + width, top + height)))
    resample(pixels.reshape(-1), width, (0, 0, height, width), *rest)


open_samples = Images
