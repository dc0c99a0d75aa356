"""Samples of packed images: crops, resized to one size.

Training samples are random resized crops, mirrored at random; validation samples are the middle of the resized image:
torchvision's `RandomResizedCrop` and `RandomHorizontalFlip`, or `Resize` and `CenterCrop`, on images of Pillow.
"""

from __future__ import annotations

import functools

import numpy as np

from dlscale.data import sampling
from dlscale.data.manifest import Manifest
from dlscale.data.samples import ArraySpec
from dlscale.datasets.imagenet import geometry
from dlscale.datasets.imagenet.kind import ImageSamples
from dlscale.datasets.imagenet.pack import Pack


class Images:
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

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `dlscale.data.samples.Samples`."""
        pack, row = (int(each[index]) for each in self.rows(epoch))
        image, size = self.packs[pack].image(row), self._settings.size
        if self._training:
            edges_12 = np.array([[image.height, image.width]])
            settings, key = self._settings, (self._seed, epoch, index)
            (crop,) = geometry.random_crops(*key, edges_12, settings.scale, settings.ratio).tolist()
            top, left, height, width = crop
            # Cut out first: the pixels around the crop are not to be seen at its edges.
            image = geometry.resized(image.crop((left, top, left + width, top + height)), size, size)
            pixels = np.asarray(image)
            if geometry.flips(*key, 1, settings.flip)[0]:
                pixels = pixels[:, ::-1]
        else:
            height, width = geometry.short_edge(image.height, image.width, self._settings.resize)
            top, left = geometry.centre(height, width, size)
            pixels = np.asarray(geometry.resized(image, height, width))[top : top + size, left : left + size]
        label = self.packs[pack].labels[row]
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), np.asarray(label)


open_samples = Images
