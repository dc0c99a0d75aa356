"""What the processes of DALI's `native` operators do: read boxes with h5py, as those of a published program do.

They import this module and what samples need, not torch: they are to start quickly.
"""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

import numpy as np

from dlscale.data.loaders.processes import end_with_training, outlive_signals
from dlscale.data.samples import BoxField, BoxIndex, GridSamples


class SampleInfo(Protocol):
    """What DALI tells of the sample that it asks for."""

    idx_in_batch: int
    iteration: int  #: of the epoch


class NativeField:
    """How boxes of one field are handed over, and what DALI's operators are to do with them.

    Attributes
    ----------
    dtype, order
        Of a box: float16 if all files have it, else float32; its axes [C, a, b, c] by number, slowest first. Without
        symmetries those of one cell are left out.
    axes
        By which the boxes of the result walk, a tuple for each of the ways to turn them.
    subtracts, multiplies, adds
        Which parts of (stored - shift) factor + offset are not the identity for all samples.
    """

    def __init__(self, field: BoxField) -> None:
        self._field = field
        kinds = {reader.dataset.dtype == np.float16 for reader in field.readers}
        self.dtype = np.dtype(np.float16 if kinds == {True} else np.float32)
        rest = list(range(1, 4))
        rest.insert(field.channel_axis, 0)  # the field's axes, of which the stored ones are an order
        stored = [rest[axis] for axis in field.readers[0].order]
        symmetries = field.symmetries
        self.order = [axis for axis in stored if symmetries or field.shape[axis] > 1]
        self.axes = (
            [tuple(map(int, axes)) for axes in np.unique(symmetries.axes, axis=0)] if symmetries else [(0, 1, 2)]
        )
        numbers = np.stack([field.decoding(file) for file in range(len(field.readers))])  # [files, 3, C]
        signs = bool(symmetries and (symmetries.sign != 1).any())
        self.subtracts, self.adds = bool(numbers[:, 0].any()), bool(numbers[:, 2].any())
        self.multiplies = signs or bool((numbers[:, 1] != 1).any())

    @property
    def inputs(self) -> int:
        """How many arrays `read` returns."""
        return 1 + 3 * self.turns + self.subtracts + self.multiplies + self.adds

    @property
    def turns(self) -> bool:
        """Whether boxes are transformed."""
        return self._field.symmetries is not None

    def permutation(self, axes: tuple[int, ...]) -> list[int]:
        """Return the axis of a box as it is handed over for each axis of the result [C, ...]."""
        return [self.order.index(axis) for axis in (0, *(1 + axis for axis in axes)) if axis in self.order]

    def read(self, file: int, start: np.ndarray, symmetry: int) -> list[np.ndarray]:
        """Return DALI's inputs of one box at `start` [3].

        They are its values in `order`; if boxes are transformed, the number in `axes`, flips int32 [3] and source
        channels int32 [C]; and shift, factor, offset, float32 [C, 1, ...], as far as they are needed.
        """
        field = self._field
        box = [slice(int(first), int(first) + size) for first, size in zip(start, field.extent, strict=True)]
        box.insert(field.channel_axis, slice(None))
        boxes = np.moveaxis(field.readers[file].stored(tuple(box)), field.channel_axis, 0)
        left_out = tuple(axis for axis in range(4) if axis not in self.order)
        kept = [axis for axis in range(4) if axis in self.order]
        values = boxes.squeeze(left_out).transpose([kept.index(axis) for axis in self.order])
        inputs = [np.ascontiguousarray(values, self.dtype)]
        numbers = field.decoding(file)
        if (symmetries := field.symmetries) is not None:
            source, sign = symmetries.source[symmetry], symmetries.sign[symmetry]
            turn = self.axes.index(tuple(symmetries.axes[symmetry].tolist()))
            inputs += [np.array(turn, np.int32), symmetries.flips[symmetry].astype(np.int32), source.astype(np.int32)]
            numbers = numbers[:, source] * np.stack([np.ones_like(sign), sign, sign])
        wanted = (self.subtracts, self.multiplies, self.adds)
        shape = (-1,) + (1,) * (values.ndim - 1)
        return inputs + [row.reshape(shape) for row, needed in zip(numbers, wanted, strict=True) if needed]


class NativeSource:
    """Called by DALI, in processes of its own, for every sample of an epoch.

    What epoch that is they learn from memory that all share: DALI says how many batches were asked for, no more. What
    is still on its way when the epoch changes, DALI throws away.

    Parameters
    ----------
    firsts
        The first sample of this rank in each step, and how many it has, int64 [steps, 2].
    """

    def __init__(self, samples: GridSamples, firsts: np.ndarray) -> None:
        self._samples, self._firsts = samples, firsts
        self.fields = [NativeField(field) for field in (samples.input, samples.target)]
        self._memory = SharedMemory(create=True, size=16)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a process of DALI's, which has no hook of its own for what is to be done there first."""
        outlive_signals()
        end_with_training()
        self.__dict__ = state

    @property
    def _place(self) -> np.ndarray:
        return np.ndarray(2, np.int64, self._memory.buf)

    def begin(self, epoch: int, start: int) -> None:
        """Let samples be those of an epoch from step `start`; from the last on there are none."""
        self._place[:] = epoch, start

    def __call__(self, info: SampleInfo) -> tuple[np.ndarray, ...]:
        """Return the inputs of all fields; a batch with fewer samples repeats its last."""
        epoch, start = self._place.tolist()
        if start + info.iteration >= len(self._firsts):
            raise StopIteration
        first, count = self._firsts[start + info.iteration]
        boxes: BoxIndex = self._samples.boxes(epoch)
        index = int(first + min(info.idx_in_batch, count - 1))
        file, symmetry = int(boxes.file[index]), int(boxes.symmetry[index])
        inputs: list[np.ndarray] = []
        for field, starts in zip(self.fields, (boxes.input, boxes.target), strict=True):
            inputs += field.read(file, starts[index], symmetry)
        return tuple(inputs)

    def close(self) -> None:
        """Free the shared memory."""
        self._memory.close()
        self._memory.unlink()
