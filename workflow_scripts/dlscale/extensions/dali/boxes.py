"""Read boxes for DALI's operators: processes read with h5py, or DALI's threads read from `.npy` mirrors.

NERSC's tutorials use both ways. The processes import this module and the modules of samples, but not torch, so
that the processes start quickly.
"""

from __future__ import annotations

import multiprocessing
import operator
import os
import threading
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from dlscale.core.errors import UserError
from dlscale.data.loaders import outlive_signals
from dlscale.data.samples import BoxField, GridSamples
from dlscale.extensions.dali.mirrors import mirror
from dlscale.extensions.dali.settings import DaliLoader as Settings


class NativeField:
    """Boxes of a field as inputs of DALI's operators.

    `last` is whether the channels are the last axis of the boxes, as in mirrors.

    Attributes
    ----------
    inputs
        Number of arrays that `numbers` returns.
    """

    def __init__(self, field: BoxField, last: bool = False) -> None:
        self._field, self._last, turns = field, last, field.symmetries
        self._numbers = np.stack([field.decoding(file) for file in range(len(field.readers))])  # [files, 3, C]
        self._turns = turns = None if turns is None or len(turns.axes) == 1 else turns
        plain = [[0, 1, 2]]
        #: Possible transpositions of boxes, each a permutation of three axes; only [0, 1, 2] without symmetries.
        self._axes: list[list[int]] = plain if turns is None else np.unique(turns.axes, axis=0).tolist()
        self._mixed = turns is not None and bool((turns.source != np.arange(field.shape[0])).any())
        signed = turns is not None and bool((turns.sign != 1).any())
        neutral = self._numbers == np.array([[0], [1], [0]])
        #: Which of shift (0), factor (1) and offset (2) change at least some samples.
        self._parts = [part for part in range(3) if (signed and part == 1) or not neutral[:, part].all()]
        self.inputs = (len(self._axes) > 1) + (turns is not None) + self._mixed + len(self._parts)

    def read(self, file: int, start: np.ndarray, symmetry: int) -> list[np.ndarray]:
        """Return the values [C, a, b, c] of the box at `start` [3], and the box's `numbers`."""
        values = np.ascontiguousarray(self._field.stored(file, start), self._field.dtype)
        return [values, *(np.asarray(each[0]) for each in self.numbers(np.array([file]), np.array([symmetry])))]

    def numbers(self, file: np.ndarray, symmetry: np.ndarray) -> list[np.ndarray]:
        """Return the inputs of the operators for n boxes, in addition to the values.

        `file` and `symmetry` [n] have the meaning of `BoxIndex`. Only inputs that can differ between boxes, or change
        values, are returned: the number of the transposition, int32 [n]; whether each axis is reversed, int32 [n, 3];
        the source of each channel, int32 [n, C]; shift, factor and offset, each float32 [n, C, 1, 1, 1].
        """
        found, numbers = list[np.ndarray](), self._numbers[file]
        if (turns := self._turns) is not None:
            source, sign = turns.source[symmetry], turns.sign[symmetry]
            if len(self._axes) > 1:
                found.append(np.array([self._axes.index(axes) for axes in turns.axes[symmetry].tolist()], np.int32))
            found.append(turns.flips[symmetry].astype(np.int32))
            if self._mixed:
                found.append(source.astype(np.int32))
            numbers = np.take_along_axis(numbers, source[:, None], axis=2)
            numbers[:, 1:] *= sign[:, None]
        return found + [np.ascontiguousarray(numbers[:, part, :, None, None, None]) for part in self._parts]

    def decoded(self, fn: Any, types: Any, x: Any, numbers: list[Any], gpu: bool) -> Any:
        """Return the graph of operators that turns stored values and `numbers` into the values for the model."""
        x, rest = x.gpu() if gpu else x, numbers
        ways = [[3, *axes] if self._last else [0, *(1 + axis for axis in axes)] for axes in self._axes]
        if len(ways) > 1:
            number, *rest = rest
            x = turned(fn, x, number, list(enumerate(ways)))
        elif self._last:
            x = fn.transpose(x, perm=ways[0])
        x = fn.cast(x, dtype=types.FLOAT) if self._field.dtype == np.float16 else x
        if self._turns is not None:
            flips, *rest = rest
            x = fn.reinterpret(x, layout="CDHW")
            x = fn.flip(x, depthwise=flips[0], vertical=flips[1], horizontal=flips[2])
        if self._mixed:
            source, *rest = rest
            x = fn.sequence_rearrange(fn.reinterpret(x, layout="FDHW"), new_order=source)
        x = fn.reinterpret(x, layout="")
        for part in self._parts:
            operand, *rest = rest
            x = (operator.sub, operator.mul, operator.add)[part](x, operand.gpu() if gpu else operand)
        return x


def turned(fn: Any, x: Any, number: Any, choices: list[tuple[int, list[int]]]) -> Any:
    """Transpose each box with the permutation of its `number`; `choices` are pairs (number, permutation).

    DALI's `transpose` applies a single permutation to all boxes, so conditionals choose it.
    """
    (first, perm), others = choices[0], choices[1:]
    if not others:
        return fn.transpose(x, perm=perm)
    if number == first:  # noqa: SIM108 - DALI's conditionals are statements
        result = fn.transpose(x, perm=perm)
    else:
        result = turned(fn, x, number, others)
    return result


def _end_with_training() -> None:
    """End this process when the process that started it ends or is killed."""
    if (training := multiprocessing.parent_process()) is not None:
        training.join()
        os._exit(1)


class Boxes:
    """Inputs and operators of a pipeline of boxes; DALI calls an instance for every sample, in separate processes.

    The processes read the epoch and its first step from shared memory, because DALI counts epochs and batches by
    itself. DALI discards prefetched batches when the epoch changes. `indices` are this rank's samples of each step.
    """

    def __init__(self, samples: GridSamples, indices: list[range], settings: Settings, gpu: bool) -> None:
        self._samples, self._indices = samples, [each for each in indices if each]
        self._prefetch, self._gpu = settings.prefetch, gpu
        self._fields = [NativeField(field) for field in (samples.input, samples.target)]
        self._memory = SharedMemory(create=True, size=16)
        #: Options of the pipeline. Processes are spawned, since CUDA does not work in forked processes.
        self.options = {"enable_conditionals": True, "py_num_workers": settings.workers, "py_start_method": "spawn"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set up a process of DALI; only unpickling can run code before DALI's first request."""
        outlive_signals()
        threading.Thread(target=_end_with_training, daemon=True).start()
        self.__dict__ = state

    @property
    def _place(self) -> np.ndarray:
        return np.ndarray(2, np.int64, self._memory.buf)

    def begin(self, epoch: int, start: int) -> None:
        self._place[:] = epoch, start

    def outputs(self, fn: Any, types: Any) -> list[Any]:
        """Return the graph that makes input and target of a full batch.

        A batch with fewer samples repeats its last sample.
        """
        x, y = self._fields
        given = fn.external_source(
            self, num_outputs=2 + x.inputs + y.inputs, batch=False, parallel=True, prefetch_queue_depth=self._prefetch
        )
        split = 1 + x.inputs
        return [
            x.decoded(fn, types, given[0], given[1:split], self._gpu),
            y.decoded(fn, types, given[split], given[split + 1 :], self._gpu),
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
        """Return the message of a `UserError` in a process; None for other errors.

        DALI passes on the text of an error, but not its type.
        """
        name = f"{UserError.__module__}.{UserError.__name__}: "
        return str(error.__cause__) if name in str(error) else None

    def close(self) -> None:
        self._memory.close()
        self._memory.unlink()


class Regions:
    """Inputs and operators of a pipeline that reads boxes from mirrors; Python gives only positions and `numbers`."""

    def __init__(self, samples: GridSamples, indices: list[range], settings: Settings, gpu: bool) -> None:
        self._samples, self._indices, self._gpu = samples, indices, gpu
        boxes = samples.input, samples.target
        mirrors = [mirror(field) for field in boxes]
        self._paths, self._first = [str(each.path) for each in mirrors], [each.first for each in mirrors]
        self._fields, self._extents = (
            [NativeField(field, last=True) for field in boxes],
            [list(b.extent) for b in boxes],
        )
        self._size = max(1, *map(len, indices))
        self._batches: Iterator[tuple[int, range]] = iter(())
        self.options: dict[str, Any] = {"enable_conditionals": True}

    def begin(self, epoch: int, start: int) -> None:
        self._batches = iter([(epoch, indices) for indices in self._indices[start:] if indices])

    def outputs(self, fn: Any, types: Any) -> list[Any]:
        """Return the graph that makes input and target of a full batch, as `Boxes.outputs` does."""
        x, y = self._fields
        given = fn.external_source(self._source, num_outputs=2 + x.inputs + y.inputs, batch=True)
        split = 1 + x.inputs
        return [
            x.decoded(fn, types, self._read(fn, 0, given[0]), given[1:split], self._gpu),
            y.decoded(fn, types, self._read(fn, 1, given[split]), given[split + 1 :], self._gpu),
        ]

    def _read(self, fn: Any, number: int, start: Any) -> Any:
        box = {"roi_start": start, "roi_shape": self._extents[number], "roi_axes": [0, 1, 2]}
        return fn.readers.numpy(files=[self._paths[number]], cache_header_information=True, **box)

    def _source(self) -> list[np.ndarray]:
        """Return the next batch's first cells and `numbers`: of the input boxes, then of the target boxes.

        A batch with fewer samples than a full batch repeats its last sample.
        """
        epoch, indices = next(self._batches)
        boxes = self._samples.boxes(epoch)
        some = np.minimum(np.arange(indices.start, indices.start + self._size), indices.stop - 1)
        file, symmetry, found = boxes.file[some], boxes.symmetry[some], list[np.ndarray]()
        for field, starts, first in zip(self._fields, (boxes.input, boxes.target), self._first, strict=True):
            start = starts[some]
            start[:, 0] += first[file]
            found += [start.astype(np.int32), *field.numbers(file, symmetry)]
        return found

    def explain(self, error: Exception) -> str | None:
        """Return None, because errors of this pipeline contain no messages of dlscale."""
        return None

    def close(self) -> None:
        """Do nothing, because this pipeline has no resources to free."""
