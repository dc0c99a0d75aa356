"""`dali` with `operators: numba`: DALI's executor around one operator of this project.

An external source names each sample's place and hands over the mapped file without a copy; the operator, compiled by
Numba, reads the region of interest and, on a processor, decodes it as well. With a GPU the stored values go there
through DALI, and are decoded on the device. (DALI's own operators cannot do it in one pass: its transpose has one
permutation for a whole batch, its flips and its affine transforms know no float16, and its reader of .npy files visits
files in an order of its own.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from dlscale.data.loaders.dali_loader import DaliLoader, not_installed
from dlscale.data.loaders.decode import DecodePlan, StoredField
from dlscale.data.loaders.direct_device import on_device, placed
from dlscale.data.loaders.settings import DaliLoader as Settings
from dlscale.data.mapped import Layout
from dlscale.data.samples import BoxField, BoxIndex, GridSamples

#: Cells added to the rows of the operator's buffer; as in `direct_host`.
PAD = 4


class DaliField(StoredField):
    """What the external source hands to the operator of one field."""

    def __init__(self, field: BoxField, pad: int) -> None:
        super().__init__(field)
        # The operator reads values of one type: of float16 among float32, boxes are copied to it.
        self._layouts = [file.layout() if file.buffer_dtype == self.dtype else None for file in self.files]
        last = self.order[-1] == 0
        count, a, b, c = self.shape
        row = (c + pad) * (count if last else 1)
        #: Values from one to the next along [C, a, b, c] in the operator's buffer, and how many it holds.
        self.pitch = np.array([1, b * row, row, count] if last else [a * b * row, b * row, row, 1])
        self.values = a * b * row * (1 if last else count)

    def inputs(self, boxes: BoxIndex, starts: np.ndarray) -> tuple[list[np.ndarray], ...]:
        """Return the operator's inputs (see `dali_operator`), each a list with an array for every one of B samples.

        `starts` are the boxes' first cells, int64 [B, 3].
        """
        layouts = [self._layout(file, start) for file, start in zip(boxes.file, starts, strict=True)]
        bits, chunks = [layout.bits for layout, _ in layouts], [layout.chunks for layout, _ in layouts]
        where = [np.concatenate([each.edges, each.strides, start, self.pitch, self.shape]) for each, start in layouts]
        plan = self.plan_buffers(boxes, 0)
        steps = list(np.column_stack([plan.base, plan.step, plan.channel]))
        numbers = list(np.stack([plan.shift, plan.factor, plan.offset], axis=1))
        return bits, chunks, where, steps, numbers

    def plan_buffers(self, boxes: BoxIndex, distance: int) -> DecodePlan:
        """Return how to decode what lies in the operator's buffers, which begin `distance` values from each other."""
        return self.plan(boxes.file, boxes.symmetry, distance * np.arange(len(boxes)), self.pitch[None])

    def _layout(self, file: int, start: np.ndarray) -> tuple[Layout, np.ndarray]:
        layout = self._layouts[file]
        if layout is not None:
            return layout, start
        # Compressed, say: read through the library here, and handed over as a box of its own.
        return self.files[file].box(start, self.shape, self.dtype), np.zeros(3, np.int64)


class NumbaDaliLoader(DaliLoader):
    """See `dlscale.data.loaders.base.Loader`."""

    def _build(self, samples: GridSamples, settings: Settings) -> Any:
        try:
            from nvidia.dali import fn, pipeline_def, types
            from nvidia.dali.plugin.numba.fn.experimental import numba_function
        except ImportError as error:
            raise not_installed(error) from None
        from dlscale.data.loaders.dali_operator import decode_operator, read_operator

        self._fields = [DaliField(field, PAD if self._on_host else 0) for field in (samples.input, samples.target)]
        self._batches: Iterator[BoxIndex] = iter(())
        self._kept: deque[Any] = deque(maxlen=settings.prefetch + 2)  # DALI reads them without a copy
        words = {2: types.UINT16, 4: types.UINT32}

        @pipeline_def(**self._executor(settings))
        def pipeline() -> Any:
            inputs = fn.external_source(self._source, num_outputs=5 * len(self._fields), batch=True, no_copy=True)
            outputs = []
            for number, field in enumerate(self._fields):
                item = field.dtype.itemsize
                last = field.order[-1] == 0
                decode = decode_operator(item, field.shape, last) if self._on_host else read_operator(field.values)
                run, setup = decode
                values: Any = numba_function(
                    *inputs[5 * number : 5 * number + 5],
                    run_fn=run,
                    setup_fn=setup,
                    out_types=[types.FLOAT if self._on_host else words[item]],
                    in_types=[words[item], types.INT64, types.INT64, types.INT64, types.FLOAT],
                    outs_ndim=[4 if self._on_host else 1],
                    ins_ndim=[1, 3, 1, 1, 2],
                    batch_processing=False,
                )
                outputs.append(values if self._device.type == "cpu" else values.gpu())
            return tuple(outputs)

        built = pipeline()
        built.build()
        return built

    def _begin(self, epoch: int, start: int) -> None:
        shares = [self._share.indices(step, self.samples) for step in range(start, len(self))]
        self._batches = map(self._boxes(epoch).take, filter(len, shares)) if shares else iter(())

    def _source(self) -> Any:
        """Return the inputs of the next batch; its samples may be fewer than a batch has."""
        boxes = next(self._batches)
        inputs: list[Any] = []
        for field, starts in zip(self._fields, (boxes.input, boxes.target), strict=True):
            inputs += field.inputs(boxes, starts)
        self._kept.append(inputs)
        return inputs

    def _values(self, number: int, output: Any, boxes: BoxIndex) -> torch.Tensor:
        values = from_dlpack(output.as_tensor())
        if self._on_host:
            return values
        field = self._fields[number]
        stored = values.view(field.torch_dtype).reshape(-1)
        (plan,) = placed([field.plan_buffers(boxes, field.values)], stored.device)
        dtype = torch.float32 if number else self._delivery.dtype
        return on_device(stored, plan, field.extent, field.spec.shape, dtype, self._delivery)
