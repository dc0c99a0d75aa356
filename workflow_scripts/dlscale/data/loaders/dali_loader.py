"""`dali`: NVIDIA DALI's executor, threads and prefetching around the one sample stream.

The pipeline is fed by an external source, which names each sample's place and hands over the mapped file without a
copy; an operator compiled by Numba reads the region of interest and, on a processor, turns and decodes it as well.
With a GPU the stored values go there through DALI, and are turned and decoded on the device. (DALI's own operators
cannot do it in one pass: its transpose has one permutation for a whole batch, its flips and its affine transforms know
no float16, and its reader of .npy files visits files in an order of its own.)
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
from dlscale.data.loaders.base import Batch, Share, on_grids
from dlscale.data.loaders.decode import Recipe, Recipes
from dlscale.data.loaders.direct_device import on_device
from dlscale.data.loaders.settings import DaliLoader as Settings
from dlscale.data.mapped import Raw, common_type
from dlscale.data.samples import BoxField, BoxIndex, GridSamples, Samples

#: Cells added to the rows of the operator's buffer; see `raw.buffer`.
PAD = 4


class Feed:
    """What the external source hands to the operator of one side.

    Attributes
    ----------
    size
        Of a box, [C, a, b, c].
    itemsize
        Of stored values, bytes.
    pitch
        Values from one to the next along [C, a, b, c] in the operator's buffer, int64 [4].
    values
        Of such a buffer.
    """

    def __init__(self, side: BoxField, pad: int) -> None:
        self.side = side
        raws = [Raw(reader, side.channel_axis) for reader in side.readers]
        types = {common_type([file]) for file in raws}
        if len(types) > 1:
            raise UserError(
                f"loader.kind: dali needs files of one type, these have {sorted(map(str, types))}; use torch"
            )
        self.itemsize = types.pop().itemsize
        self._recipes = Recipes(side)
        self._layouts = [raw.layout() for raw in raws]
        self._raws = raws
        last = raws[0].order[-1] == 0
        self.size = count, a, b, c = side.shape[0], *side.extent
        row = (c + pad) * (count if last else 1)
        self.pitch = np.array([1, b * row, row, count] if last else [a * b * row, b * row, row, 1])
        self.values = a * b * row * (1 if last else count)

    def samples(self, places: BoxIndex, starts: np.ndarray, base: np.ndarray) -> tuple[list[np.ndarray], ...]:
        """Return the operator's inputs (see `dali_operator`), each a list with an array for every one of B samples.

        `starts` are the boxes' first cells, int64 [B, 3]; `base` is where each begins in the operator's buffer, [B].
        """
        layouts = [self._layout(file, start) for file, start in zip(places.file, starts, strict=True)]
        where = [
            np.concatenate([layout.edges, layout.strides, start, self.pitch, self.size]) for layout, start in layouts
        ]
        recipe = self.recipe(places, base)
        steps = list(np.column_stack([recipe.base, recipe.step, recipe.channel]))
        numbers = list(np.stack([recipe.shift, recipe.factor, recipe.offset], axis=1))
        return [layout.bits for layout, _ in layouts], [layout.chunks for layout, _ in layouts], where, steps, numbers

    def recipe(self, places: BoxIndex, base: np.ndarray) -> Recipe:
        """Return how to decode what lies in buffers that begin at `base` [B]."""
        stride = np.tile(self.pitch, (len(places.file), 1))
        return self._recipes.make(places.file, places.symmetry, base, stride)

    def _layout(self, file: int, start: np.ndarray) -> tuple[Any, np.ndarray]:
        layout = self._layouts[file]
        if layout is not None:
            return layout, start
        # Compressed, say: read through the library here, and handed over as a box of its own.
        return self._raws[file].box(start, self.size), np.zeros(3, np.int64)


class DaliLoader:
    """See `dlscale.data.loaders.base.Loader`."""

    def __init__(self, samples: GridSamples, settings: Settings, share: Share, device: torch.device) -> None:
        self.samples = samples.size
        self._places, self._share, self._device = samples.boxes, share, device
        self._here = device.type == "cpu" or settings.device == "cpu"
        self._feeds = [Feed(side, PAD if self._here else 0) for side in (samples.input, samples.target)]
        self._kept: deque[Any] = deque(maxlen=settings.prefetch + 2)  # DALI reads them without a copy
        self._handed: deque[Any] = deque(maxlen=settings.prefetch + 2)  # the device may not be done with them
        self._steps: Iterator[int] = iter(())
        self._epoch: BoxIndex | None = None
        self._pipeline = self._build(settings)

    def __len__(self) -> int:
        return self._share.steps(self.samples)

    def _build(self, settings: Settings) -> Any:
        try:
            from nvidia.dali import fn, pipeline_def, types
            from nvidia.dali.plugin.numba.fn.experimental import numba_function
        except ImportError as error:
            raise UserError(
                f"loader.kind: dali is not installed ({error}); pip install 'dlscale[dali]', or choose torch or direct"
            ) from None
        from dlscale.data.loaders.dali_operator import decode_operator, read_operator

        kinds = {2: types.UINT16, 4: types.UINT32}

        @pipeline_def(
            batch_size=max(1, len(self._share.indices(0, self.samples))),
            num_threads=settings.workers,
            device_id=self._device.index or 0 if self._device.type == "cuda" else None,
            prefetch_queue_depth=settings.prefetch,
            exec_dynamic=True,  # every batch owns its memory
        )
        def pipeline() -> Any:
            inputs = fn.external_source(self._source, num_outputs=5 * len(self._feeds), batch=True, no_copy=True)
            outputs = []
            for number, feed in enumerate(self._feeds):
                operator = decode_operator(feed.itemsize, feed.size) if self._here else read_operator(feed.values)
                run, setup = operator
                found: Any = numba_function(
                    *inputs[5 * number : 5 * number + 5],
                    run_fn=run,
                    setup_fn=setup,
                    out_types=[types.FLOAT if self._here else kinds[feed.itemsize]],
                    in_types=[kinds[feed.itemsize], types.INT64, types.INT64, types.INT64, types.FLOAT],
                    outs_ndim=[4 if self._here else 1],
                    ins_ndim=[1, 3, 1, 1, 2],
                    batch_processing=False,
                )
                outputs.append(found if self._device.type == "cpu" else found.gpu())
            return tuple(outputs)

        built = pipeline()
        built.build()
        return built

    def _source(self) -> Any:
        """Return the inputs of the next batch; its samples may be fewer than a batch has."""
        step = next(self._steps, None)
        if step is None or self._epoch is None:
            raise StopIteration
        places = self._epoch.take(self._share.indices(step, self.samples))
        inputs: list[Any] = []
        for feed, starts in zip(self._feeds, (places.input, places.target), strict=True):
            inputs += feed.samples(places, starts, np.zeros(len(places.file), np.int64))
        self._kept.append(inputs)
        return inputs

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield the batches of an epoch from global step `start`."""
        places = self._places(epoch)
        # A rank without a sample in the last, small batch has nothing to ask of DALI.
        filled = [step for step in range(start, len(self)) if self._share.indices(step, self.samples)]
        self._abandon()  # an epoch that was left unfinished
        self._epoch, self._steps = places, iter(filled)
        steps = self._steps
        try:
            for step in range(start, len(self)):
                part = places.take(self._share.indices(step, self.samples))
                yield self._deliver(self._pipeline.run() if len(part.file) else None, part)
        finally:
            if steps is self._steps:
                self._abandon()

    def _abandon(self) -> None:
        """Throw away what was prefetched of the epoch before, and make the pipeline ready for another."""
        if self._epoch is None:
            return
        self._epoch, self._steps = None, iter(())
        with contextlib.suppress(StopIteration):
            while True:
                self._pipeline.run()
        self._pipeline.reset()

    def _deliver(self, outputs: Any, places: BoxIndex) -> Batch:
        found = []
        for number, feed in enumerate(self._feeds):
            shape = feed.side.spec.shape
            if outputs is None:
                values = torch.empty(0, *shape, device=self._device)
            else:
                values = from_dlpack(outputs[number].as_tensor())
                if not self._here:
                    stored = values.view(torch.float16 if feed.itemsize == 2 else torch.float32).reshape(-1)
                    recipe = feed.recipe(places, np.arange(len(places.file)) * feed.values)
                    values = on_device(stored, recipe, feed.side.extent)
            found.append(values.reshape(-1, *shape))
        self._handed.append((outputs, found))
        x, y = found
        return x, y

    def close(self) -> None:
        """Free the pipeline: its threads end with it."""
        if self._pipeline is not None:
            self._abandon()
        self._pipeline = None


def build(samples: Samples, settings: Settings, share: Share, device: torch.device) -> DaliLoader:
    """Make the loader."""
    if settings.device == "gpu" and device.type != "cuda":
        raise UserError("loader.device: gpu, but the model is on a CPU; use auto or cpu")
    return DaliLoader(on_grids(samples, "dali"), settings, share, device)
