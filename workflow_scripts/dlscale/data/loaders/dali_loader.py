"""`dali`: NVIDIA DALI's executor, threads, prefetching and operators around the one sample stream.

Boxes on grids: what users of DALI write, and what a published program does. Processes read each box with h5py and hand
it over; DALI's operators transpose it, flip it, put its channels in order and decode it, each in a pass over the
values. Its transpose has one permutation for a whole batch: the batch is parted by DALI's conditionals, and put
together again. (Another published program reads `.npy` files with DALI's own reader in place of these processes, and
rotates with interpolation, which changes values by rounding.)

Images: DALI decodes, resizes and mirrors the windows that the sample stream names. Its decoder makes no more of a JPEG
than the window needs; for a model on a GPU it works there ("mixed"), and what crosses the bus are the files. Bytes are
delivered, as the samples declare them: the model normalises. Decoder and filter are not Pillow's: from samples of the
loader `torch` these differ by rounding (see docs/ladder.md).
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from dlscale.core.errors import UserError
from dlscale.data.loaders.base import AS_DECLARED, Batch, Delivery, Share, on_grids
from dlscale.data.loaders.dali_source import NativeField, NativeSource
from dlscale.data.loaders.settings import DaliLoader as Settings
from dlscale.data.samples import CroppedImages, GridSamples, ImageWindows, Samples


class Pace:
    """Holds what batches are made of while the device may read it, of at most `ahead` batches before the present one.

    The host waits only where it is further ahead than that. `record` returns an event that comes after all work given
    to the device so far.
    """

    def __init__(self, ahead: int, record: Callable[[], Any]) -> None:
        self._ahead, self._record = ahead, record
        self._held: deque[Any] = deque()
        self._events: deque[Any] = deque()  # after the work on all that is held but the last

    def hold(self, what: Any) -> None:
        """Hold what the work reads that is given to the device from now until the next call."""
        if self._held:
            self._events.append(self._record())
        self._held.append(what)
        while len(self._events) > self._ahead:
            self._events.popleft().synchronize()
            self._held.popleft()  # only now

    def close(self) -> None:
        """Wait until the device has done all work, and hold nothing any more."""
        self._record().synchronize()
        self._events.clear()
        self._held.clear()


class Boxes:
    """What a pipeline of boxes is fed with, and its operators: `indices` are this rank's share of each step."""

    def __init__(self, samples: GridSamples, indices: list[range], settings: Settings, gpu: bool) -> None:
        filled = np.array([(each.start, len(each)) for each in indices if each]).reshape(-1, 2)
        self._source, self._prefetch, self._gpu = NativeSource(samples, filled), settings.prefetch, gpu
        self.begin, self.close = self._source.begin, self._source.close
        #: Of the pipeline, beside those of the executor. Processes that are not spawned do not go together with CUDA.
        self.options = {
            "enable_conditionals": True,
            "py_num_workers": settings.workers,
            "py_start_method": "spawn",
        }

    def outputs(self, fn: Any, types: Any) -> list[Any]:
        """Return the graph that makes input and target of a batch, whole: a smaller one repeats its last sample."""
        x, y = self._source.fields
        inputs = fn.external_source(
            self._source,
            num_outputs=x.inputs + y.inputs,
            batch=False,
            parallel=True,
            prefetch_queue_depth=self._prefetch,
        )
        return [
            _decoded(fn, types, x, inputs[: x.inputs], self._gpu),
            _decoded(fn, types, y, inputs[x.inputs :], self._gpu),
        ]

    def explain(self, error: Exception) -> str | None:
        """Return what to tell the user of an error of the pipeline; of a process DALI tells the text, not the type."""
        name = f"{UserError.__module__}.{UserError.__name__}: "
        return str(error.__cause__) if name in str(error) else None


def _decoded(fn: Any, types: Any, field: NativeField, given: list[Any], gpu: bool) -> Any:
    """Return what the model takes of one field, of what `NativeField.read` hands over."""
    x, *rest = given
    x = x.gpu() if gpu else x
    if field.axes:
        number, flips, source, *rest = rest
        x = _turned(fn, x, number, list(enumerate(field.axes)))
    x = fn.cast(x, dtype=types.FLOAT) if field.dtype == np.float16 else x
    if field.axes:
        x = fn.flip(x, depthwise=flips[0], vertical=flips[1], horizontal=flips[2])
        x = fn.sequence_rearrange(fn.reinterpret(x, layout="FDHW"), new_order=source)
        x = fn.reinterpret(x, layout="")
    for part in field.parts:
        numbers, *rest = rest
        x = (operator.sub, operator.mul, operator.add)[part](x, numbers.gpu() if gpu else numbers)
    return x


def _turned(fn: Any, x: Any, number: Any, choices: list[tuple[int, tuple[int, ...]]]) -> Any:
    """Return each box transposed as its number says."""
    (first, axes), others = choices[0], choices[1:]
    perm = [0, *(1 + axis for axis in axes)]
    if not others:
        return fn.transpose(x, perm=perm, output_layout="CDHW")
    if number == first:  # noqa: SIM108 - DALI's conditionals are statements
        result = fn.transpose(x, perm=perm, output_layout="CDHW")
    else:
        result = _turned(fn, x, number, others)
    return result


class Images:
    """What a pipeline of images is fed with, and its operators: see `Boxes`."""

    def __init__(self, samples: CroppedImages, indices: list[range], settings: Settings, gpu: bool) -> None:
        self._samples: Any = samples
        self._indices, self._gpu = indices, gpu
        self._batches: Iterator[tuple[int, range]] = iter(())
        #: What DALI reads without a copy, and of which samples it is: batches that are on their way.
        self._kept: deque[tuple[int, range, Any]] = deque(maxlen=settings.prefetch + 2)
        self.options: dict[str, Any] = {}

    def begin(self, epoch: int, start: int) -> None:
        """Give the batches of an epoch from step `start`, but those without a sample of this rank."""
        self._batches = iter([(epoch, indices) for indices in self._indices[start:] if indices])

    def outputs(self, fn: Any, types: Any) -> list[Any]:
        """Return the graph that makes images and labels of a batch."""
        size = self._samples.input_spec.shape[-1]
        images, labels, corner, extent, resized, x, y, flip = fn.external_source(
            self._source, num_outputs=8, batch=True, no_copy=True
        )
        window = {"start": corner, "shape": extent, "axis_names": "HW"}
        if self._samples.encoded:
            images = fn.decoders.image_slice(
                images,
                **window,
                device="mixed" if self._gpu else "cpu",
                output_type=types.RGB,
                adjust_orientation=False,  # torchvision does not turn images either
                jpeg_fancy_upsampling=True,  # the colours of a GPU's decoder are then those of a processor's
            )
        else:
            images = fn.slice(fn.reinterpret(images, layout="HWC"), **window)
            images = images.gpu() if self._gpu else images
        images = fn.resize(images, size=resized, interp_type=types.INTERP_LINEAR, antialias=True)
        square = {"crop": (size, size), "crop_pos_x": x, "crop_pos_y": y}
        images = fn.crop_mirror_normalize(images, **square, mirror=flip, dtype=types.UINT8, output_layout="CHW")
        return [images, labels]

    def _source(self) -> Any:
        """Return the inputs of the next batch; its samples may be fewer than a batch has."""
        epoch, indices = next(self._batches)
        inputs = _inputs(self._samples.windows(epoch, indices), self._samples.input_spec.shape[-1])
        self._kept.append((epoch, indices, inputs))
        return inputs

    def explain(self, error: Exception) -> str | None:
        """Return what to tell the user of an error of the pipeline; or Pillow names an image that it cannot decode."""
        for epoch, indices, _ in self._kept:
            for index in indices:
                self._samples.read(epoch, index)
        return f"loader.kind: dali cannot decode an image that Pillow can; use torch or direct ({error})"

    def close(self) -> None:
        """Nothing to free."""


def _inputs(windows: ImageWindows, size: int) -> list[Any]:
    """Return what the pipeline is given of a batch; DALI says by a share where a square of `size` pixels begins."""
    room = np.maximum(windows.resized - size, 1)
    row, column = np.ascontiguousarray((windows.start / room).astype(np.float32).T)
    corner, extent, flip = (each.astype(np.int32) for each in (windows.corner, windows.extent, windows.flip))
    resized = windows.resized.astype(np.float32)
    return [windows.images, windows.labels, corner, extent, resized, column, row, flip]


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
        gpu = device.type == "cuda"
        self.samples = samples.size
        self._share, self._device, self._specs = share, device, (samples.input_spec, samples.target_spec)
        self._pace = Pace(settings.prefetch, lambda: torch.cuda.current_stream(device).record_event()) if gpu else None
        self._running: object | None = None  # what stands for the epoch that the pipeline is in
        try:
            from nvidia.dali import fn, pipeline_def, types
        except ImportError as error:
            raise UserError(
                f"loader.kind: dali is not installed ({error}); pip install 'dlscale[dali]', or choose torch or direct"
            ) from None
        work = [share.indices(step, samples.size) for step in range(len(self))], settings, gpu
        self._feed: Boxes | Images
        if isinstance(samples, CroppedImages):
            self._feed = Images(samples, *work)
        else:
            self._feed = Boxes(on_grids(samples, settings.kind), *work)
        feed = self._feed

        @pipeline_def(
            batch_size=max(1, len(share.indices(0, samples.size))),
            num_threads=settings.workers,
            device_id=device.index or 0 if gpu else None,
            prefetch_queue_depth=settings.prefetch,
            exec_dynamic=True,  # every batch owns its memory
            **feed.options,
        )
        def pipeline() -> Any:
            return tuple([output.gpu() if gpu else output for output in feed.outputs(fn, types)])

        self._pipeline = pipeline()
        self._pipeline.build()

    def __len__(self) -> int:
        return self._share.steps(self.samples)

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield the batches of an epoch from global step `start`."""
        self._abandon()  # an epoch that was left unfinished
        running = self._running = object()
        self._feed.begin(epoch, start)
        try:
            for step in range(start, len(self)):
                yield self._next(len(self._share.indices(step, self.samples)))
        finally:
            if running is self._running:
                self._abandon()

    def _next(self, count: int) -> Batch:
        """Return a batch of so many samples; of none the pipeline knows nothing."""
        outputs = self._run() if count else None
        if outputs is None:
            sides = [torch.empty(0, dtype=getattr(torch, spec.dtype), device=self._device) for spec in self._specs]
        else:
            sides = [from_dlpack(output.as_tensor())[:count] for output in outputs]
        x, y = (values.reshape(count, *spec.shape) for values, spec in zip(sides, self._specs, strict=True))
        if self._pace is not None:
            self._pace.hold((outputs, x, y))
        return x, y

    def _run(self) -> Any:
        # Outputs are to be ready for the model's stream: without it the host would wait for each batch.
        stream = torch.cuda.current_stream(self._device) if self._pace else None
        try:
            return self._pipeline.run(stream)
        except Exception as error:
            self._running = None  # there is nothing to abandon in a pipeline that failed
            if (message := self._feed.explain(error)) is None:
                raise
        raise UserError(message)  # not within: it would hold DALI's error, and so the pipeline and its processes

    def _abandon(self) -> None:
        """Throw away what was prefetched of the epoch before, and make the pipeline ready for another."""
        if self._running is None:
            return
        self._running = None
        self._feed.begin(0, len(self))
        with contextlib.suppress(StopIteration):
            while True:
                self._pipeline.run()
        self._pipeline.reset()

    def close(self) -> None:
        """Free the pipeline: its threads and processes end with it."""
        if self._pipeline is None:
            return
        self._abandon()
        if self._pace is not None:
            self._pace.close()
        self._pipeline = None
        self._feed.close()


build = DaliLoader
