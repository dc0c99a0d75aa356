"""Boxes for DALI: processes read them with h5py, as a published program does, and operators decode them.

The processes import this module and what samples need, not torch: they are to start quickly.
"""

from __future__ import annotations

import multiprocessing
import operator
import os
import threading
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from dlscale.core.errors import UserError
from dlscale.data.loaders import DaliLoader as Settings
from dlscale.data.loaders import outlive_signals
from dlscale.data.samples import BoxField, GridSamples


class NativeField:
    """Boxes of one field as inputs of DALI's operators.

    Attributes
    ----------
    axes
        Ways to transpose boxes, three axes each; empty if they never are.
    parts
        Which of shift (0), factor (1), offset (2) matter for any sample.
    inputs
        Number of arrays that `read` returns.
    """

    def __init__(self, field: BoxField) -> None:
        self._field, turns = field, field.symmetries
        numbers = np.stack([field.decoding(file) for file in range(len(field.readers))])  # [files, 3, C]
        self.axes: list[list[int]] = [] if turns is None else np.unique(turns.axes, axis=0).tolist()
        if turns is not None and (turns.sign != 1).any():
            numbers[:, 1] = np.nan  # there is a factor for some
        self.parts = [part for part, neutral in enumerate((0, 1, 0)) if (numbers[:, part] != neutral).any()]
        self.inputs = 1 + 3 * bool(self.axes) + len(self.parts)

    def read(self, file: int, start: np.ndarray, symmetry: int) -> list[np.ndarray]:
        """Return the inputs of one box at `start` [3].

        These are its values [C, a, b, c]; if boxes are turned, the number in `axes`, flips int32 [3], source channels
        int32 [C]; the numbers of `parts`, float32 [C, 1, 1, 1].
        """
        inputs = [np.ascontiguousarray(self._field.stored(file, start), self._field.dtype)]
        numbers = self._field.decoding(file)
        if (turns := self._field.symmetries) is not None:
            source, sign = turns.source[symmetry], turns.sign[symmetry]
            turn = self.axes.index(turns.axes[symmetry].tolist())
            inputs += [np.array(turn, np.int32), turns.flips[symmetry].astype(np.int32), source.astype(np.int32)]
            numbers = numbers[:, source] * np.stack([np.ones_like(sign), sign, sign])
        return inputs + [numbers[part].reshape(-1, 1, 1, 1) for part in self.parts]

    def decoded(self, fn: Any, types: Any, given: list[Any], gpu: bool) -> Any:
        """Return the graph that makes the model's values of what `read` returns, an operator a pass."""
        x, *rest = given
        x = x.gpu() if gpu else x
        if self.axes:
            number, flips, source, *rest = rest
            x = turned(fn, x, number, list(enumerate(self.axes)))
        x = fn.cast(x, dtype=types.FLOAT) if self._field.dtype == np.float16 else x
        if self.axes:
            x = fn.flip(x, depthwise=flips[0], vertical=flips[1], horizontal=flips[2])
            x = fn.sequence_rearrange(fn.reinterpret(x, layout="FDHW"), new_order=source)
            x = fn.reinterpret(x, layout="")
        for part in self.parts:
            numbers, *rest = rest
            x = (operator.sub, operator.mul, operator.add)[part](x, numbers.gpu() if gpu else numbers)
        return x


def turned(fn: Any, x: Any, number: Any, choices: list[tuple[int, list[int]]]) -> Any:
    """Return each box transposed as its number says; DALI's transpose has one permutation for a whole batch."""
    (first, axes), others = choices[0], choices[1:]
    perm = [0, *(1 + axis for axis in axes)]
    if not others:
        return fn.transpose(x, perm=perm, output_layout="CDHW")
    if number == first:  # noqa: SIM108 - DALI's conditionals are statements
        result = fn.transpose(x, perm=perm, output_layout="CDHW")
    else:
        result = turned(fn, x, number, others)
    return result


def _end_with_training() -> None:
    """End this process after the one that started it, even if that was killed."""
    if (training := multiprocessing.parent_process()) is not None:
        training.join()
        os._exit(1)


class Boxes:
    """Inputs and operators of a pipeline of boxes; DALI calls it in processes of its own for every sample.

    They learn the epoch from shared memory: DALI tells them only how many batches were asked for, and throws away what
    is on its way when the epoch changes. `indices` are this rank's samples of each step.
    """

    def __init__(self, samples: GridSamples, indices: list[range], settings: Settings, gpu: bool) -> None:
        self._samples, self._indices = samples, [each for each in indices if each]
        self._prefetch, self._gpu = settings.prefetch, gpu
        self._fields = [NativeField(field) for field in (samples.input, samples.target)]
        self._memory = SharedMemory(create=True, size=16)
        #: Options of the pipeline. Forked processes do not go together with CUDA.
        self.options = {"enable_conditionals": True, "py_num_workers": settings.workers, "py_start_method": "spawn"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a process of DALI's, which has no other hook for what is to be done there first."""
        outlive_signals()
        threading.Thread(target=_end_with_training, daemon=True).start()
        self.__dict__ = state

    @property
    def _place(self) -> np.ndarray:
        return np.ndarray(2, np.int64, self._memory.buf)

    def begin(self, epoch: int, start: int) -> None:
        self._place[:] = epoch, start

    def outputs(self, fn: Any, types: Any) -> list[Any]:
        """Return the graph that makes input and target of a full batch: a smaller one repeats its last sample."""
        x, y = self._fields
        inputs = fn.external_source(
            self, num_outputs=x.inputs + y.inputs, batch=False, parallel=True, prefetch_queue_depth=self._prefetch
        )
        return [
            x.decoded(fn, types, inputs[: x.inputs], self._gpu),
            y.decoded(fn, types, inputs[x.inputs :], self._gpu),
        ]

    def __call__(self, info: Any) -> tuple[np.ndarray, ...]:
        """Return the inputs of both fields for sample `info.idx_in_batch` of batch `info.iteration`."""
        epoch, start = self._place.tolist()
        if start + info.iteration >= len(self._indices):
            raise StopIteration
        indices = self._indices[start + info.iteration]
        index = indices[min(info.idx_in_batch, len(indices) - 1)]
        boxes = self._samples.boxes(epoch)
        file, symmetry = int(boxes.file[index]), int(boxes.symmetry[index])
        x, y = (
            field.read(file, starts[index], symmetry)
            for field, starts in zip(self._fields, (boxes.input, boxes.target), strict=True)
        )
        return (*x, *y)

    def explain(self, error: Exception) -> str | None:
        """Return the message for the user of an error of the pipeline; DALI tells a process's text, not its type."""
        name = f"{UserError.__module__}.{UserError.__name__}: "
        return str(error.__cause__) if name in str(error) else None

    def close(self) -> None:
        self._memory.close()
        self._memory.unlink()
