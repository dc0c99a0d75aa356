"""Loader `dali`: NVIDIA DALI's executor, threads, prefetching and operators around dlscale's sample stream.

DALI decodes, resizes and flips the windows of images that the sample stream names, on the GPU if the device is a GPU.
The 8-bit pixels differ from Pillow's by rounding (docs/ladder.md). For boxes on grids see `boxes`.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.dlpack import from_dlpack

from dlscale.core.errors import UserError
from dlscale.data.loaders.base import Batch, Loader, Share, on_grids
from dlscale.data.samples import CroppedImages, GridSamples, Samples
from dlscale.extensions.dali.boxes import Boxes, Regions
from dlscale.extensions.dali.settings import DaliLoader as Settings

#: First bytes of the formats that DALI decodes to Pillow's pixels: JPEG, PNG, WebP, BMP.
SAME_PIXELS = re.compile(rb"\xff\xd8|\x89PNG|RIFF....WEBP|BM", re.DOTALL)


def decodable(file: np.ndarray) -> np.ndarray:
    """Return an image file, uint8 [bytes], that DALI decodes to the pixels which Pillow decodes from `file`.

    Formats outside `SAME_PIXELS` are converted: DALI ignores the orientation of a TIFF, the largest value of a PGM,
    and the colours of LAB and JPEG 2000.
    """
    if SAME_PIXELS.match(file[:12].tobytes()):
        return file
    with Image.open(io.BytesIO(file.data), formats=("GIF", "TIFF", "JPEG2000", "PPM")) as image:
        image.convert("RGB").save(pixels := io.BytesIO(), "PPM")
    return np.frombuffer(pixels.getvalue(), np.uint8)


class Pace:
    """Keep batches in memory as long as the device may still read the batches.

    At most `ahead` batches before the present batch are kept. `record` returns an event that occurs when the device has
    done all work launched so far.
    """

    def __init__(self, ahead: int, record: Callable[[], Any]) -> None:
        self._ahead, self._record = ahead, record
        self._held: deque[Any] = deque()
        self._events: deque[Any] = deque()  # events after the work on each kept batch, except the last batch

    def hold(self, what: Any) -> None:
        """Keep data that the device reads in work launched before the next call."""
        if self._held:
            self._events.append(self._record())
        self._held.append(what)
        while len(self._events) > self._ahead:
            self._events.popleft().synchronize()
            self._held.popleft()  # release a batch only after its event

    def close(self) -> None:
        """Wait until the device has done all work, then release the memory."""
        self._record().synchronize()
        self._events.clear()
        self._held.clear()


class Images:
    """Inputs and operators of a pipeline of images, with the methods of `Boxes`."""

    def __init__(self, samples: CroppedImages, indices: list[range], settings: Settings, gpu: bool) -> None:
        self._samples: Any = samples
        self._indices, self._gpu = indices, gpu
        self._batches: Iterator[tuple[int, range]] = iter(())
        #: Epoch, samples and inputs of prefetched batches: DALI does not copy the inputs, so they stay in memory here.
        self._kept: deque[tuple[int, range, Any]] = deque(maxlen=settings.prefetch + 2)
        self.options: dict[str, Any] = {}

    def begin(self, epoch: int, start: int) -> None:
        self._batches = iter([(epoch, indices) for indices in self._indices[start:] if indices])

    def outputs(self, fn: Any, types: Any) -> list[Any]:
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
                adjust_orientation=False,  # torchvision does not rotate JPEG, PNG and WebP either
                jpeg_fancy_upsampling=True,  # gives the same colours on GPU and CPU
            )
        else:
            images = fn.slice(fn.reinterpret(images, layout="HWC"), **window)
            images = images.gpu() if self._gpu else images
        images = fn.resize(images, size=resized, interp_type=types.INTERP_LINEAR, antialias=True)
        square = {"crop": (size, size), "crop_pos_x": x, "crop_pos_y": y}
        images = fn.crop_mirror_normalize(images, **square, mirror=flip, dtype=types.UINT8, output_layout="CHW")
        return [images, labels]

    def _source(self) -> Any:
        """Return the inputs of the next batch.

        The position of a crop is a fraction of the distance by which the crop can move in the resized image.
        """
        epoch, indices = next(self._batches)
        inputs = list[Any]()
        self._kept.append((epoch, indices, inputs))  # `explain` reads this entry if `windows` refuses an image
        windows = self._samples.windows(epoch, indices)
        room = np.maximum(windows.resized - self._samples.input_spec.shape[-1], 1)
        row, column = np.ascontiguousarray((windows.start / room).astype(np.float32).T)
        corner, extent, flip = (each.astype(np.int32) for each in (windows.corner, windows.extent, windows.flip))
        resized = windows.resized.astype(np.float32)
        images = [decodable(image) for image in windows.images] if self._samples.encoded else windows.images
        inputs += [images, windows.labels, corner, extent, resized, column, row, flip]
        return inputs

    def explain(self, error: Exception) -> str | None:
        """Return the message for an error of DALI.

        All prefetched images are read again without DALI; an image that cannot be decoded raises `UserError`.
        """
        for epoch, indices, _ in self._kept:
            for index in indices:
                self._samples.read(epoch, index)
        return f"loader.kind: dali failed on readable images ({error}). Set loader.kind to torch or direct"

    def close(self) -> None:
        """Do nothing, because this pipeline has no resources to free."""


def on_volumes(samples: Samples) -> GridSamples:
    """Return the samples if they are boxes of volumes; otherwise raise `UserError`, since only volumes have mirrors."""
    if isinstance(samples, GridSamples) and samples.input.channel_axis == samples.target.channel_axis == 0:
        return samples
    raise UserError(
        f"loader.reader: numpy reads only boxes of volumes, but samples are {type(samples).__name__}. "
        "Set loader.reader to h5py"
    )


class DaliLoader(Loader):
    """The loader `dali`."""

    def __init__(self, samples: Samples, settings: Settings, share: Share, device: torch.device) -> None:
        gpu = device.type == "cuda"
        super().__init__(samples, share, device)
        self._specs = samples.input_spec, samples.target_spec
        self._pace = Pace(settings.prefetch, lambda: torch.cuda.current_stream(device).record_event()) if gpu else None
        self._failed = False
        try:
            from nvidia.dali import fn, pipeline_def, types
        except ImportError as error:
            raise UserError(
                f"loader.kind: dali is not installed ({error}); pip install 'dlscale[dali]', or choose torch or direct"
            ) from None
        work = [share.indices(step, samples.size) for step in range(len(self))], settings, gpu
        self._feed: Boxes | Images | Regions
        if settings.reader == "numpy":
            self._feed = Regions(on_volumes(samples), *work)
        elif isinstance(samples, CroppedImages):
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

    def _batches(self, epoch: int, start: int) -> Generator[Batch]:
        self._feed.begin(epoch, start)
        try:
            for step in range(start, len(self)):
                yield self._next(len(self._share.indices(step, self.samples)))
        finally:
            if not self._failed:
                self._drain()

    def _next(self, count: int) -> Batch:
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
        # DALI writes outputs in the order of the model's stream, so the host need not wait for each batch.
        stream = torch.cuda.current_stream(self._device) if self._pace else None
        try:
            return self._pipeline.run(stream)
        except Exception as error:
            self._failed = True
            if (message := self._feed.explain(error)) is None:
                raise
        # Raised outside `except`, because otherwise DALI's error would keep the pipeline and its processes alive.
        raise UserError(message)

    def _drain(self) -> None:
        """Discard prefetched batches, and prepare the pipeline for another epoch."""
        self._feed.begin(0, len(self))
        with contextlib.suppress(StopIteration):
            while True:
                self._pipeline.run()
        self._pipeline.reset()

    def close(self) -> None:
        if self._pipeline is None:
            return
        super().close()
        if self._pace is not None:
            self._pace.close()
        self._pipeline = None
        self._feed.close()


build = DaliLoader
