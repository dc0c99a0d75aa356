"""`dali`: NVIDIA DALI's executor, threads and prefetching around the one sample stream.

What follows is `operators: numba`; `dali_native` is the other way. The pipeline is fed by an external source, which
names each sample's place and hands over the mapped file without a copy; an operator compiled by Numba reads the region
of interest and, on a processor, decodes it as well. With a GPU the stored values go there through DALI, and are decoded
on the device. (DALI's own operators cannot do it in one pass: its transpose has one permutation for a whole batch, its
flips and its affine transforms know no float16, and its reader of .npy files visits files in an order of its own.)
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from dlscale.core.errors import UserError
from dlscale.data.loaders.base import AS_DECLARED, Batch, Delivery, Share, on_grids
from dlscale.data.loaders.decode import DecodePlan, StoredField
from dlscale.data.loaders.direct_device import on_device, placed
from dlscale.data.loaders.pace import Pace
from dlscale.data.loaders.settings import DaliLoader as Settings
from dlscale.data.mapped import Layout
from dlscale.data.samples import BoxField, BoxIndex, GridSamples, Samples

#: Cells added to the rows of the operator's buffer; as in `direct_host`.
PAD = 4


class DaliField(StoredField):
    """What the external source hands to the operator of one field."""

    def __init__(self, field: BoxField, pad: int) -> None:
        super().__init__(field)
        types = {str(file.buffer_dtype) for file in self.files}
        if len(types) > 1:
            raise UserError(f"loader.kind: dali needs files of one type, these have {sorted(types)}; use torch")
        self._layouts = [file.layout() for file in self.files]
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
        return self.files[file].box(start, self.shape), np.zeros(3, np.int64)


class DaliLoader:
    """See `dlscale.data.loaders.base.Loader`."""

    def __init__(
        self,
        samples: Samples,
        settings: Settings,
        share: Share,
        device: torch.device,
        delivery: Delivery = AS_DECLARED,
    ) -> None:
        grids = on_grids(samples, settings.kind)
        if settings.device == "gpu" and device.type != "cuda":
            raise UserError("loader.device: gpu, but the model is on a CPU; use auto or cpu")
        self.samples = samples.size
        self._boxes, self._share, self._device, self._delivery = grids.boxes, share, device, delivery
        self._on_host = device.type == "cpu" or settings.device == "cpu"
        self._specs = [grids.input_spec, grids.target_spec]
        self._pace = Pace.of(device, settings.prefetch)
        self._steps: Iterator[int] = iter(())
        self._epoch: BoxIndex | None = None
        self._pipeline = self._build(grids, settings)

    def __len__(self) -> int:
        return self._share.steps(self.samples)

    def _executor(self, settings: Settings) -> dict[str, Any]:
        """Return the settings of DALI's executor."""
        return {
            "batch_size": max(1, len(self._share.indices(0, self.samples))),
            "num_threads": settings.workers,
            "device_id": self._device.index or 0 if self._device.type == "cuda" else None,
            "prefetch_queue_depth": settings.prefetch,
            "exec_dynamic": True,  # every batch owns its memory
        }

    def _build(self, samples: GridSamples, settings: Settings) -> Any:
        """Return the pipeline, built."""
        try:
            from nvidia.dali import fn, pipeline_def, types
            from nvidia.dali.plugin.numba.fn.experimental import numba_function
        except ImportError as error:
            raise not_installed(error) from None
        from dlscale.data.loaders.dali_operator import decode_operator, read_operator

        self._fields = [DaliField(field, PAD if self._on_host else 0) for field in (samples.input, samples.target)]
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

    def _source(self) -> Any:
        """Return the inputs of the next batch; its samples may be fewer than a batch has."""
        step = next(self._steps, None)
        if step is None or self._epoch is None:
            raise StopIteration
        boxes = self._epoch.take(self._share.indices(step, self.samples))
        inputs: list[Any] = []
        for field, starts in zip(self._fields, (boxes.input, boxes.target), strict=True):
            inputs += field.inputs(boxes, starts)
        self._kept.append(inputs)
        return inputs

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield the batches of an epoch from global step `start`."""
        boxes = self._boxes(epoch)
        # A rank without a sample in the last, small batch has nothing to ask of DALI.
        filled = [step for step in range(start, len(self)) if self._share.indices(step, self.samples)]
        self._abandon()  # an epoch that was left unfinished
        self._epoch, self._steps = boxes, iter(filled)
        steps = self._steps
        self._begin(epoch, start)
        try:
            for step in range(start, len(self)):
                batch = boxes.take(self._share.indices(step, self.samples))
                yield self._deliver(self._run() if len(batch) else None, batch)
        finally:
            if steps is self._steps:
                self._abandon()

    def _begin(self, epoch: int, start: int) -> None:
        """Let the source give the samples of an epoch from a step."""

    def _abandon(self) -> None:
        """Throw away what was prefetched of the epoch before, and make the pipeline ready for another."""
        if self._epoch is None:
            return
        self._epoch, self._steps = None, iter(())
        self._begin(0, len(self))
        with contextlib.suppress(StopIteration):
            while True:
                self._pipeline.run()
        self._pipeline.reset()

    def _run(self) -> Any:
        try:
            return self._pipeline.run(self._stream())
        except Exception:
            self._epoch = None  # there is nothing to abandon in a pipeline that failed
            raise

    def _stream(self) -> Any:
        """Return the stream for which outputs are to be ready: without one the host would wait for each batch."""
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _deliver(self, outputs: Any, boxes: BoxIndex) -> Batch:
        if outputs is None:
            batch = [torch.empty(0, device=self._device) for _ in self._specs]
        else:
            batch = [self._values(number, output, boxes) for number, output in enumerate(outputs)]
        x, y = (values.reshape(len(boxes), *spec.shape) for values, spec in zip(batch, self._specs, strict=True))
        self._pace.hold((outputs, x, y))
        return x, y

    def _values(self, number: int, output: Any, boxes: BoxIndex) -> torch.Tensor:
        """Return the decoded values of a field from what the pipeline returned of it."""
        values = from_dlpack(output.as_tensor())
        if self._on_host:
            return values
        field = self._fields[number]
        stored = values.view(field.torch_dtype).reshape(-1)
        (plan,) = placed([field.plan_buffers(boxes, field.values)], stored.device)
        dtype = torch.float32 if number else self._delivery.dtype
        return on_device(stored, plan, field.extent, field.spec.shape, dtype, self._delivery)

    def close(self) -> None:
        """Free the pipeline: its threads end with it."""
        if self._pipeline is not None:
            self._abandon()
            self._pace.close()
        self._pipeline = None


def not_installed(error: ImportError) -> UserError:
    """Return what to say where DALI is missing."""
    return UserError(
        f"loader.kind: dali is not installed ({error}); pip install 'dlscale[dali]', or choose torch or direct"
    )


def build(
    samples: Samples, settings: Settings, share: Share, device: torch.device, delivery: Delivery = AS_DECLARED
) -> DaliLoader:
    """Return the loader with the operators that the settings name."""
    from dlscale.data.loaders.dali_native import NativeDaliLoader  # which builds on this module

    loader = NativeDaliLoader if settings.operators == "native" else DaliLoader
    return loader(samples, settings, share, device, delivery)
