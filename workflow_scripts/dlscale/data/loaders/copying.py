"""Copies of batches to a device, beside the step that the device is busy with."""

from __future__ import annotations

import torch

from dlscale.core.ranges import mark
from dlscale.data.loaders.base import Batch


class Copier:
    """Copies batches on a stream of its own, as the published programs' prefetcher does.

    The host does not wait for a step: it asks for the next batch while the device works on this one. In the model's
    stream the copy would wait for that work; here it goes on beside it. On a processor nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> Batch:
        """Return a batch on the device, ready for the current stream there."""
        with mark("copy"):
            if self.stream is None:
                return x.to(self._device), y.to(self._device)
            with torch.cuda.stream(self.stream):
                batch = x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self.stream)
            for values in batch:
                values.record_stream(current)  # their memory is the model's until its stream has come past them
            return batch
