"""What the processes of DALI's pipeline of boxes do: read them with h5py, as those of a published program do.

They import this module and what samples need, not torch: they are to start quickly.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from dlscale.data.loaders import outlive_signals
from dlscale.data.samples import BoxField, BoxIndex, GridSamples


class NativeField:
    """How boxes of one field are handed over, and what DALI's operators are to do with them.

    Attributes
    ----------
    dtype
        Of a box: float16 if all files have it, else float32.
    axes
        By which the results walk, a tuple for each of the ways to turn boxes; empty if they never are.
    parts
        Which of shift (0), factor (1), offset (2) in (stored - shift) factor + offset matter for any sample.
    inputs
        How many arrays `read` returns.
    """

    def __init__(self, field: BoxField) -> None:
        self._field = field
        half = all(reader.dataset.dtype == np.float16 for reader in field.readers)
        self.dtype = np.dtype(np.float16 if half else np.float32)
        numbers = np.stack([field.decoding(file) for file in range(len(field.readers))])  # [files, 3, C]
        self.axes: list[tuple[int, ...]] = []
        if (symmetries := field.symmetries) is not None:
            self.axes = [tuple(axes) for axes in np.unique(symmetries.axes, axis=0).tolist()]
            if (symmetries.sign != 1).any():
                numbers[:, 1] = np.nan  # there is a factor for some
        self.parts = [part for part, neutral in enumerate((0, 1, 0)) if (numbers[:, part] != neutral).any()]
        self.inputs = 1 + 3 * bool(self.axes) + len(self.parts)

    def read(self, file: int, start: np.ndarray, symmetry: int) -> list[np.ndarray]:
        """Return DALI's inputs of one box at `start` [3].

        They are its values [C, a, b, c]; if boxes are turned, the number in `axes`, flips int32 [3] and source channels
        int32 [C]; and the numbers of `parts`, float32 [C, 1, 1, 1].
        """
        inputs = [np.ascontiguousarray(self._field.stored(file, start), self.dtype)]
        numbers = self._field.decoding(file)
        if (symmetries := self._field.symmetries) is not None:
            source, sign = symmetries.source[symmetry], symmetries.sign[symmetry]
            turn = self.axes.index(tuple(symmetries.axes[symmetry].tolist()))
            inputs += [np.array(turn, np.int32), symmetries.flips[symmetry].astype(np.int32), source.astype(np.int32)]
            numbers = numbers[:, source] * np.stack([np.ones_like(sign), sign, sign])
        return inputs + [numbers[part].reshape(-1, 1, 1, 1) for part in self.parts]


def _end_with_training() -> None:
    """End this process after the one that started it: one that is killed takes none along."""
    if (training := multiprocessing.parent_process()) is not None:
        training.join()
        os._exit(1)


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
        threading.Thread(target=_end_with_training, daemon=True).start()
        self.__dict__ = state

    @property
    def _place(self) -> np.ndarray:
        return np.ndarray(2, np.int64, self._memory.buf)

    def begin(self, epoch: int, start: int) -> None:
        """Let samples be those of an epoch from step `start`; from the last on there are none."""
        self._place[:] = epoch, start

    def __call__(self, info: Any) -> tuple[np.ndarray, ...]:
        """Return the inputs of all fields for sample `info.idx_in_batch` of batch `info.iteration` of the epoch.

        A batch with fewer samples repeats its last.
        """
        epoch, start = self._place.tolist()
        if start + info.iteration >= len(self._firsts):
            raise StopIteration
        first, count = self._firsts[start + info.iteration]
        boxes: BoxIndex = self._samples.boxes(epoch)
        index = int(first + min(info.idx_in_batch, count - 1))
        file, symmetry = int(boxes.file[index]), int(boxes.symmetry[index])
        x, y = (
            field.read(file, starts[index], symmetry)
            for field, starts in zip(self.fields, (boxes.input, boxes.target), strict=True)
        )
        return (*x, *y)

    def close(self) -> None:
        """Free the shared memory."""
        self._memory.close()
        self._memory.unlink()
