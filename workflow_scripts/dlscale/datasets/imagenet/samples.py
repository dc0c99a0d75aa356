"""Samples of packed images: crops, resized to one size.

Training samples are random resized crops, mirrored at random; validation samples are the middle of the resized image:
torchvision's `RandomResizedCrop` and `RandomHorizontalFlip`, or `Resize` and `CenterCrop`, on images of Pillow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from dlscale.data import sampling
from dlscale.data.manifest import Manifest
from dlscale.data.samples import ArraySpec, WritingSamples
from dlscale.datasets.imagenet import crops, geometry
from dlscale.datasets.imagenet.kind import ImageSamples
from dlscale.datasets.imagenet.pack import Pack
from dlscale.datasets.imagenet.resample import resample


class Images(WritingSamples):
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
        place = self._places(epoch, index, np.array([[image.height, image.width]]))[0].tolist()
        top, left, height, width, rows, columns, first_row, first_column, flip = place
        # Cut out first: the pixels around the crop are not to be seen at its edges.
        crop = image.crop((left, top, left + width, top + height))
        pixels = np.asarray(geometry.resized(crop, rows, columns))
        pixels = pixels[first_row : first_row + size, first_column : first_column + size]
        pixels = pixels[:, ::-1] if flip else pixels
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), np.asarray(self.packs[pack].labels[row])

    def _places(self, epoch: int, first: int, edges_N2: np.ndarray) -> np.ndarray:
        """Return where samples `first` and on come from, given the edges of their images: int64 [N, 9].

        They are top, left, height and width of the crop, height and width to which it is resized, row and column with
        which the sample begins in that, and whether it is mirrored.
        """
        settings, count = self._settings, len(edges_N2)
        places = np.zeros((count, 9), np.int64)
        if self._training:
            key = self._seed, epoch, first
            places[:, :4] = crops.random_crops(*key, edges_N2, settings.scale, settings.ratio)
            places[:, 4:6] = settings.size
            places[:, 8] = crops.flips(*key, count, settings.flip)
            return places
        places[:, 2:4] = edges_N2
        for place, (height, width) in zip(places, edges_N2.tolist(), strict=True):
            place[4:6] = edges = geometry.short_edge(height, width, settings.resize)
            place[6:8] = geometry.centre(*edges, settings.size)
        return places

    def writers(self, epoch: int, indices: range, x: np.ndarray, y: np.ndarray) -> list[Callable[[], None]]:
        """See `WritingSamples`: pixels are resized by a compiled kernel, files decoded and resized by Pillow."""
        chosen = [each[indices.start : indices.stop].tolist() for each in self.rows(epoch)]
        images = [(self.packs[pack], row) for pack, row in zip(*chosen, strict=True)]
        y[:] = [pack.labels[row] for pack, row in images]
        if not all(pack.form == "decoded" for pack, _ in images):
            return [functools.partial(self._write, epoch, index, out) for index, out in zip(indices, x, strict=True)]
        index_N4 = np.array([pack.index[row] for pack, row in images]).reshape(-1, 4)
        tasks: list[Callable[[], None]] = []
        places = self._places(epoch, indices.start, index_N4[:, 2:])
        for (pack, _), index, place, out in zip(images, index_N4.tolist(), places.tolist(), x, strict=True):
            pixels = pack.bytes[index[0] : index[0] + index[1]]
            parts = tuple(place[:4]), tuple(place[4:6]), tuple(place[6:8]), bool(place[8])
            tasks.append(functools.partial(resample, pixels, index[3], *parts, out))
        return tasks

    def _write(self, epoch: int, index: int, out: np.ndarray) -> None:
        out[...] = self.read(epoch, index)[0]


open_samples = Images
