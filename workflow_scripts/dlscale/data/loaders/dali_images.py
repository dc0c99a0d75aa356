"""`dali` for images: DALI's own operators decode, resize and mirror the windows that the sample stream names.

Its decoder makes no more of a JPEG than the window needs; for a model on a GPU it works there ("mixed"), and what
crosses the bus are the files. Bytes are delivered, as the samples declare them: the model normalises. Decoder and
filter are not Pillow's: from samples of the loader `torch` these differ by rounding (see docs/ladder.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from dlscale.core.errors import UserError
from dlscale.data.loaders.dali_loader import DaliLoader, not_installed
from dlscale.data.loaders.settings import DaliLoader as Settings
from dlscale.data.samples import CroppedImages, ImageWindows


class ImageDaliLoader(DaliLoader):
    """See `dlscale.data.loaders.base.Loader`."""

    def _build(self, samples: CroppedImages, settings: Settings) -> Any:
        try:
            from nvidia.dali import fn, pipeline_def, types
        except ImportError as error:
            raise not_installed(error) from None
        self._batches: Iterator[tuple[int, range]] = iter(())
        #: What DALI reads without a copy, and of which samples it is: batches that are on their way.
        self._kept: deque[tuple[int, range, Any]] = deque(maxlen=settings.prefetch + 2)
        on_device = self._device.type == "cuda" and not self._on_host
        size = samples.input_spec.shape[-1]

        @pipeline_def(**self._executor(settings))
        def pipeline() -> Any:
            images, labels, corner, extent, resized, x, y, flip = fn.external_source(
                self._source, num_outputs=8, batch=True, no_copy=True
            )
            window = {"start": corner, "shape": extent, "axis_names": "HW"}
            if samples.encoded:
                images = fn.decoders.image_slice(
                    images,
                    **window,
                    device="mixed" if on_device else "cpu",
                    output_type=types.RGB,
                    adjust_orientation=False,  # torchvision does not turn images either
                    jpeg_fancy_upsampling=True,  # the colours of a GPU's decoder are then those of a processor's
                )
            else:
                images = fn.slice(fn.reinterpret(images, layout="HWC"), **window)
                images = images.gpu() if on_device else images
            images = fn.resize(images, size=resized, interp_type=types.INTERP_LINEAR, antialias=True)
            square = {"crop": (size, size), "crop_pos_x": x, "crop_pos_y": y}
            images = fn.crop_mirror_normalize(images, **square, mirror=flip, dtype=types.UINT8, output_layout="CHW")
            return tuple(each.gpu() if self._device.type == "cuda" else each for each in (images, labels))

        built = pipeline()
        built.build()
        return built

    def _choose(self, epoch: int) -> Callable[[range], range]:
        return lambda indices: indices

    def _begin(self, epoch: int, start: int) -> None:
        shares = [self._share.indices(step, self.samples) for step in range(start, len(self))]
        self._batches = iter([(epoch, indices) for indices in shares if indices])

    def _source(self) -> Any:
        """Return the inputs of the next batch; its samples may be fewer than a batch has."""
        epoch, indices = next(self._batches)
        inputs = _inputs(self._samples.windows(epoch, indices), self._specs[0].shape[-1])
        self._kept.append((epoch, indices, inputs))
        return inputs

    def _run(self) -> Any:
        try:
            return super()._run()
        except RuntimeError as error:
            text = str(error)
        for epoch, indices, _ in self._kept:  # Pillow names an image that cannot be decoded
            for index in indices:
                self._samples.read(epoch, index)
        raise UserError(f"loader.kind: dali cannot decode an image that Pillow can; use torch or direct ({text})")

    def _values(self, number: int, output: Any, chosen: range) -> torch.Tensor:
        return from_dlpack(output.as_tensor())


def _inputs(windows: ImageWindows, size: int) -> list[Any]:
    """Return what the pipeline is given of a batch; DALI says by a share where a square of `size` pixels begins."""
    room = np.maximum(windows.resized - size, 1)
    row, column = (windows.start / room).astype(np.float32).T
    corner, extent, flip = (each.astype(np.int32) for each in (windows.corner, windows.extent, windows.flip))
    return [
        windows.images,
        windows.labels,
        corner,
        extent,
        windows.resized.astype(np.float32),
        np.ascontiguousarray(column),
        np.ascontiguousarray(row),
        flip,
    ]
