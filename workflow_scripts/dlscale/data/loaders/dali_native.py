"""`dali` with `operators: native`: what users of DALI write, and what a published program does.

Processes read each box with h5py and hand it over; DALI's own operators transpose it, flip it, put its channels in
order and decode it, each in a pass over the values. Its transpose has one permutation for a whole batch: the batch is
parted by DALI's conditionals, and put together again. (Another published program reads `.npy` files with
DALI's own reader in place of these processes, and rotates with interpolation, which changes values by rounding.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from dlscale.core.errors import UserError
from dlscale.data.loaders.dali_loader import DaliLoader, not_installed
from dlscale.data.loaders.dali_source import NativeField, NativeSource
from dlscale.data.loaders.settings import DaliLoader as Settings
from dlscale.data.samples import BoxIndex, GridSamples


class NativeDaliLoader(DaliLoader):
    """See `dlscale.data.loaders.base.Loader`."""

    def _build(self, samples: GridSamples, settings: Settings) -> Any:
        try:
            from nvidia.dali import fn, pipeline_def, types
        except ImportError as error:
            raise not_installed(error) from None
        indices = [self._share.indices(step, self.samples) for step in range(len(self))]
        filled = np.array([(each.start, len(each)) for each in indices if each]).reshape(-1, 2)
        source = self._reading = NativeSource(samples, filled)
        on_device = self._device.type == "cuda" and not self._on_host

        def turned(x: Any, number: Any, choices: list[tuple[int, list[int]]]) -> Any:
            """Return each box transposed as its number says."""
            (first, axes), others = choices[0], choices[1:]
            if not others:
                return fn.transpose(x, perm=axes, output_layout="CDHW")
            if number == first:  # noqa: SIM108 - DALI's conditionals are statements
                result = fn.transpose(x, perm=axes, output_layout="CDHW")
            else:
                result = turned(x, number, others)
            return result

        def decoded(field: NativeField, values: Any, rest: list[Any]) -> Any:
            """Return what the model takes of one field, of what `NativeField.read` hands over."""
            x = values.gpu() if on_device else values
            permutations = [field.permutation(axes) for axes in field.axes]
            if field.turns:
                number, flips, source, *rest = rest
                x = turned(x, number, list(enumerate(permutations)))
            elif permutations[0] != sorted(permutations[0]):
                x = fn.transpose(x, perm=permutations[0])
            x = fn.cast(x, dtype=types.FLOAT) if field.dtype == np.float16 else x
            if field.turns:
                x = fn.flip(x, depthwise=flips[0], vertical=flips[1], horizontal=flips[2])
                x = fn.sequence_rearrange(fn.reinterpret(x, layout="FDHW"), new_order=source)
                x = fn.reinterpret(x, layout="")
            numbers = iter([each.gpu() if on_device else each for each in rest])
            x = x - next(numbers) if field.subtracts else x
            x = x * next(numbers) if field.multiplies else x
            return x + next(numbers) if field.adds else x

        @pipeline_def(
            **self._executor(settings),
            enable_conditionals=True,
            py_num_workers=settings.workers,
            py_start_method="spawn",  # the others do not go together with CUDA
        )
        def pipeline() -> Any:
            inputs = fn.external_source(
                source,
                num_outputs=sum(field.inputs for field in source.fields),
                batch=False,
                parallel=True,
                prefetch_queue_depth=settings.prefetch,
            )
            outputs = []
            for field in source.fields:
                (values, *rest), inputs = inputs[: field.inputs], inputs[field.inputs :]
                outputs.append(decoded(field, values, rest))
            return tuple(
                output.gpu() if self._device.type == "cuda" and not on_device else output for output in outputs
            )

        built = pipeline()
        built.build()
        return built

    def _begin(self, epoch: int, start: int) -> None:
        self._reading.begin(epoch, start)

    def _run(self) -> Any:
        try:
            return super()._run()
        except Exception as error:  # of a process DALI tells the text, not the type
            if f"{UserError.__module__}.{UserError.__name__}: " not in str(error):
                raise
            text = str(error.__cause__)
        raise UserError(text)  # not within: it would hold DALI's error, and so the pipeline and its processes

    def _values(self, number: int, output: Any, boxes: BoxIndex) -> torch.Tensor:
        return from_dlpack(output.as_tensor())[: len(boxes)]

    def close(self) -> None:
        """Free the pipeline: its threads and processes end with it."""
        if self._pipeline is not None:
            super().close()
            self._reading.close()
