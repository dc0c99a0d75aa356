"""What a loader asks of a dataset: how many samples there are, what arrays they are, and sample (epoch, index) itself.

Samples on grids are boxes of stored arrays. `GridSamples` says where the boxes lie and how stored values become the
model's, so that a loader may fetch and decode them as it likes; `read` returns one sample, and every loader is tested
against it. Samples of another form may write themselves into a batch's memory, in threads: `WritingSamples`. Of those
that are windows of images, `CroppedImages` says which images and where, for loaders that decode and resize themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dlscale.data.manifest import FieldInfo, Manifest
from dlscale.data.store import Reader

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ArraySpec:
    """What one sample's input or target is."""

    shape: tuple[int, ...]  #: (C, ...), channels first, for fields and images; () for a label or another scalar
    dtype: str = "float32"  #: `uint8` for images, `int64` for labels
    classes: int | None = None  #: labels are 0 ... classes - 1; None for what is no label


def decoding(info: FieldInfo, scaling: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
    """Return shift, factor, offset, float32 [3, C]: model value = (stored - shift) * factor + offset.

    Values that are stored as they are (`scaling` is None) keep their digits: the large mean of a pressure goes first.
    """
    transforms = info.transforms if info.stored == "physical" else []
    mean, std = (  # in the digits that the published statistics have
        np.array([getattr(t, key) for t in transforms] or [plain] * len(info.channels), np.float32).astype(float)
        for key, plain in (("offset", 0.0), ("scale", 1.0))
    )
    if scaling is None:
        numbers = mean, 1 / std, 0 * mean
    else:
        offset, scale = (values.astype(float) for values in scaling)
        numbers = 0 * mean, scale / std, (offset - mean) / std
    return np.stack(numbers).astype(np.float32)


class Samples(Protocol):
    """The samples of one split."""

    size: int  #: samples in an epoch
    input_spec: ArraySpec  #: what the model is given
    target_spec: ArraySpec  #: what it is to answer

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return input and target of sample `index` (0 ... size - 1) of `epoch`, of the declared shapes and dtypes.

        Fields are in model units. The same arguments give the same arrays in any process.
        """
        ...


class WritingSamples(ABC):
    """Samples that write themselves into batches. See `Samples`."""

    size: int
    input_spec: ArraySpec
    target_spec: ArraySpec

    @abstractmethod
    def writers(self, epoch: int, indices: range, x: np.ndarray, y: np.ndarray) -> list[Callable[[], None]]:
        """Return what writes the samples `indices` of `epoch` into `x` and `y`, [n, ...] as they are declared.

        Threads call them, in any order. What little there is to write may have been written on return.
        """


class TableSamples(WritingSamples):
    """Samples that are rows of two arrays, which may be held whole where the model computes."""

    bytes: int  #: of all rows

    @abstractmethod
    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all inputs and all targets, [N, ...] as they are declared."""

    @abstractmethod
    def order(self, epoch: int) -> np.ndarray:
        """Return which row each sample of an epoch is, int64 [size]."""


@dataclass(frozen=True)
class ImageWindows:
    """What n samples are made of: windows of images, resized; a square of each, maybe mirrored, is a sample."""

    images: list[np.ndarray]  #: of each its file, uint8 [bytes], or its pixels, uint8 [H, W, 3]
    labels: np.ndarray  #: int64 [n]
    corner: np.ndarray  #: first row and column of the window, int64 [n, 2]
    extent: np.ndarray  #: its height and width, int64 [n, 2]
    resized: np.ndarray  #: height and width that it then has, int64 [n, 2]
    start: np.ndarray  #: first row and column of the square in that, int64 [n, 2]
    flip: np.ndarray  #: whether it is mirrored, left to right, bool [n]

    def __len__(self) -> int:
        return len(self.images)


class CroppedImages(WritingSamples):
    """Samples that are windows of images, uint8 [3, size, size], with a label. See `Samples`.

    Who decodes and resizes them by other means than the samples themselves gets other roundings.
    """

    @property
    @abstractmethod
    def encoded(self) -> bool:
        """Whether images are files, JPEG or PNG, and not pixels."""

    @abstractmethod
    def windows(self, epoch: int, indices: range) -> ImageWindows:
        """Return what the samples `indices` of `epoch` are made of."""


@dataclass(frozen=True)
class BoxIndex:
    """Where the boxes of n samples lie."""

    file: np.ndarray  #: number of the file, int64 [n]
    input: np.ndarray  #: first cell of the boxes along each axis but the channels', int64 [n, 3]
    target: np.ndarray  #: as input
    symmetry: np.ndarray  #: number of the symmetry that is then applied, int64 [n]

    def __len__(self) -> int:
        return len(self.file)

    def take(self, indices: range) -> BoxIndex:
        """Return the index of consecutive samples."""
        s = slice(indices.start, indices.stop)
        return BoxIndex(self.file[s], self.input[s], self.target[s], self.symmetry[s])


class Symmetries(Protocol):
    """Symmetries of boxes, by number; 0 leaves everything as it is."""

    axes: np.ndarray  #: axis of the box that each axis of the result walks along, int64 [S, 3]
    flips: np.ndarray  #: whether it does so backwards, bool [S, 3]
    source: np.ndarray  #: channel that each channel of the result comes from, int64 [S, C]
    sign: np.ndarray  #: of each channel, float32 [S, C]

    def apply(self, number: int, x: np.ndarray) -> np.ndarray:
        """Return a transformed copy of the box [C, a, b, c]."""
        ...


class BoxField:
    """Input or target of samples on grids: boxes of one size in one field of every file.

    Parameters
    ----------
    name
        Of the field in the files: volumes [C, D, H, W] or series [T, C, H, W].
    extent
        Size of a box along each of the three axes but the channels'.
    symmetries
        What boxes may be transformed by; None if they never are.

    Attributes
    ----------
    shape
        Of a stored box, channels first: (C, *extent).
    spec
        Of a delivered box, float32, channels first; a single time has no axis of its own.
    """

    def __init__(
        self,
        manifest: Manifest,
        split: str,
        name: str,
        extent: tuple[int, int, int],
        symmetries: Symmetries | None = None,
    ) -> None:
        self._info = manifest.fields[name]
        assert self._info.channel_axis is not None
        self.readers = [Reader(manifest.path(file), name) for file in manifest.files(split)]
        self.extent, self.symmetries, self.channel_axis = extent, symmetries, self._info.channel_axis
        self.shape = (len(self._info.channels), *extent)
        single = self.channel_axis == 1 and extent[0] == 1
        self.spec = ArraySpec((len(self._info.channels), *extent[single:]))
        self._decoding: dict[int, np.ndarray] = {}

    def decoding(self, file: int) -> np.ndarray:
        """Return what `decoding` returns for a file, computed once."""
        if file not in self._decoding:
            self._decoding[file] = decoding(self._info, self.readers[file].scaling)
        return self._decoding[file]

    def read(self, file: int, start: np.ndarray, symmetry: int) -> np.ndarray:
        """Return the box at `start` [3] as the model takes it: float32, of shape `spec.shape`, axes in any order.

        Values that are stored as the model takes them are not decoded: it costs no pass over them that the published
        loaders do not make.
        """
        values = self.stored(file, start).astype(np.float32, copy=False)
        shift, factor, offset = self.decoding(file)
        for operation, numbers, neutral in ((np.subtract, shift, 0), (np.multiply, factor, 1), (np.add, offset, 0)):
            if (numbers != neutral).any():
                operation(values, numbers[:, None, None, None], out=values)
        if symmetry:
            assert self.symmetries is not None
            values = self.symmetries.apply(symmetry, values)
        return values.reshape(self.spec.shape)

    def stored(self, file: int, start: np.ndarray) -> np.ndarray:
        """Return the box at `start` [3] as it is stored, axes as `shape` has them."""
        box = [slice(int(first), int(first) + size) for first, size in zip(start, self.extent, strict=True)]
        box.insert(self.channel_axis, slice(None))
        return np.moveaxis(self.readers[file].stored(tuple(box)), self.channel_axis, 0)


class GridSamples(ABC):
    """Samples that are boxes of stored arrays. See `Samples`."""

    size: int

    def __init__(self, input: BoxField, target: BoxField) -> None:
        self.input, self.target = input, target
        self.input_spec, self.target_spec = input.spec, target.spec

    @abstractmethod
    def boxes(self, epoch: int) -> BoxIndex:
        """Return where the boxes of an epoch's samples lie."""

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Samples`."""
        boxes = self.boxes(epoch)
        file, symmetry = int(boxes.file[index]), int(boxes.symmetry[index])
        x = self.input.read(file, boxes.input[index], symmetry)
        return x, self.target.read(file, boxes.target[index], symmetry)


class ArrangedSamples(ABC):
    """Samples on grids whose input is made of a box and a few numbers, where the model is. See `Samples`.

    Loaders fetch the boxes as they fetch any; `dlscale.data.loaders.base.ArrangedLoader` does the rest for all of them.
    """

    def __init__(self, boxes: GridSamples, input_spec: ArraySpec) -> None:
        self.boxes, self.size = boxes, boxes.size
        self.input_spec, self.target_spec = input_spec, boxes.target_spec

    @abstractmethod
    def numbers(self, epoch: int) -> np.ndarray:
        """Return the numbers of all samples of an epoch, float32 [size, n]."""

    @abstractmethod
    def arrange(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return the inputs of B samples, in new memory, from their boxes [B, ...] and numbers [B, n]."""

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Samples`."""
        import torch

        x, y = self.boxes.read(epoch, index)
        numbers = torch.from_numpy(self.numbers(epoch)[index : index + 1])
        return self.arrange(torch.from_numpy(x)[None], numbers)[0].numpy(), y
