"""What a loader asks of a dataset: how many samples there are, where each lies, and sample (epoch, index) itself.

Samples on grids are boxes of stored arrays. `GridSamples` says where the boxes lie and what turns stored
values into the model's, so that a loader may fetch and turn them as it likes; `read` is the plain way, and
what every loader is tested against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dlscale.data.manifest import FieldInfo
from dlscale.data.store import Reader


class Samples(Protocol):
    """The samples of one split.

    Attributes
    ----------
    size
        Samples in an epoch.
    """

    size: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample, channels first."""
        ...

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Of one sample, channels first."""
        ...

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return input and target of sample `index` (0 ... size - 1) of `epoch`, float32, in model units.

        The same arguments give the same arrays in any process.
        """
        ...


@dataclass(frozen=True)
class Places:
    """Where the n samples of an epoch lie.

    Attributes
    ----------
    file
        Number of the file, int64 [n].
    input, target
        First cell of the boxes along each axis but the channels', int64 [n, 3].
    symmetry
        Number of the symmetry of the cube that is then applied, int64 [n].
    """

    file: np.ndarray
    input: np.ndarray
    target: np.ndarray
    symmetry: np.ndarray

    def part(self, indices: range) -> Places:
        """Return the places of consecutive samples."""
        s = slice(indices.start, indices.stop)
        return Places(self.file[s], self.input[s], self.target[s], self.symmetry[s])


class Turning(Protocol):
    """Symmetries of boxes, by number; 0 leaves everything as it is.

    Attributes
    ----------
    axes
        Axis of the box that each axis of the result walks along, int64 [S, 3].
    flips
        Whether it does so backwards, bool [S, 3].
    source, sign
        Channel that each channel of the result comes from, int64 [S, C], and its sign, float32 [S, C].
    """

    axes: np.ndarray
    flips: np.ndarray
    source: np.ndarray
    sign: np.ndarray

    def apply(self, number: int, x: np.ndarray) -> np.ndarray:
        """Return the turned box [C, a, b, c]."""
        ...


class Side:
    """Input or target: boxes of one size in one field of every file.

    Parameters
    ----------
    readers
        One for each file.
    info
        The field's channels and units.
    extent
        Size of a box along each of the three axes but the channels'.
    channel_axis
        0 for volumes [C, D, H, W], 1 for series [T, C, H, W].
    turning
        Symmetries that boxes may be turned by; None if they never are.

    Attributes
    ----------
    shape
        Of a delivered box, channels first; a single time has no axis of its own.
    """

    def __init__(
        self,
        readers: list[Reader],
        info: FieldInfo,
        extent: tuple[int, int, int],
        channel_axis: int,
        turning: Turning | None = None,
    ) -> None:
        self.readers, self.extent, self.channel_axis, self.turning = readers, extent, channel_axis, turning
        self.shape: tuple[int, ...] = (len(info.channels), *extent[channel_axis:])
        self._info = info
        self._decoding: dict[int, tuple[np.ndarray, ...]] = {}

    def decoding(self, file: int) -> tuple[np.ndarray, ...]:
        """Return shift, factor, offset, each [C] float32: model value = (stored - shift) * factor + offset.

        Values that are stored as they are keep their digits: the large mean of a pressure goes first.
        """
        if file not in self._decoding:
            transforms = self._info.transforms if self._info.stored == "physical" else []
            mean, std = (  # in the digits that the published statistics have
                np.array([getattr(t, key) for t in transforms] or [plain] * self.shape[0], dtype=np.float32).astype(
                    np.float64
                )
                for key, plain in (("offset", 0.0), ("scale", 1.0))
            )
            scaling = self.readers[file].scaling
            found: tuple[np.ndarray, ...]
            if scaling is None:
                found = mean, 1 / std, 0 * mean
            else:
                offset, scale = (part.astype(np.float64) for part in scaling)
                found = 0 * mean, scale / std, (offset - mean) / std
            self._decoding[file] = tuple(part.astype(np.float32) for part in found)
        return self._decoding[file]

    def box(self, start: np.ndarray) -> tuple[slice, ...]:
        """Index of the box at `start` [3] in a file's field."""
        grid = [slice(int(first), int(first) + size) for first, size in zip(start, self.extent, strict=True)]
        return (*grid[: self.channel_axis], slice(None), *grid[self.channel_axis :])

    def read(self, file: int, start: np.ndarray, symmetry: int) -> np.ndarray:
        """Return one box as the model takes it, float32 of shape `shape`."""
        stored = np.moveaxis(self.readers[file].stored(self.box(start)), self.channel_axis, 0)
        shift, factor, offset = (part.reshape(-1, 1, 1, 1) for part in self.decoding(file))
        values = (stored.astype(np.float32) - shift) * factor + offset
        if symmetry:
            assert self.turning is not None
            values = self.turning.apply(symmetry, values)
        return np.ascontiguousarray(values).reshape(self.shape)


class GridSamples(ABC):
    """Samples that are boxes of stored arrays. See `Samples`."""

    size: int
    input: Side
    target: Side

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample, channels first."""
        return self.input.shape

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Of one sample, channels first."""
        return self.target.shape

    @abstractmethod
    def places(self, epoch: int) -> Places:
        """Return where the samples of an epoch lie."""

    def read(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return input and target of one sample, float32."""
        places = self.places(epoch)
        file, symmetry = int(places.file[index]), int(places.symmetry[index])
        x = self.input.read(file, places.input[index], symmetry)
        return x, self.target.read(file, places.target[index], symmetry)
