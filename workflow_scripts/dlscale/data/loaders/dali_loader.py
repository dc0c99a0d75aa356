"""`dali`: NVIDIA DALI's executor, threads and prefetching around the one sample stream.

This is what all its pipelines share. Of boxes on grids `dali_numba` has one operator of this project and `dali_native`
DALI's own; `dali_images` decodes images.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any

import torch

from dlscale.core.errors import UserError
from dlscale.data.loaders.base import AS_DECLARED, Batch, Delivery, Share, on_grids
from dlscale.data.loaders.pace import Pace
from dlscale.data.loaders.settings import DaliLoader as Settings
from dlscale.data.samples import BoxIndex, CroppedImages, Samples


class DaliLoader(ABC):
    """See `dlscale.data.loaders.base.Loader`."""

    def __init__(
        self,
        samples: Samples,
        settings: Settings,
        share: Share,
        device: torch.device,
        delivery: Delivery = AS_DECLARED,
    ) -> None:
        if settings.device == "gpu" and device.type != "cuda":
            raise UserError("loader.device: gpu, but the model is on a CPU; use auto or cpu")
        self.samples = samples.size
        self._samples: Any = samples
        self._share, self._device, self._delivery = share, device, delivery
        self._on_host = device.type == "cpu" or settings.device == "cpu"
        self._specs = [samples.input_spec, samples.target_spec]
        self._pace = Pace.of(device, settings.prefetch)
        self._running: object | None = None  # what stands for the epoch that the pipeline is in
        self._pipeline = self._build(samples, settings)

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

    @abstractmethod
    def _build(self, samples: Any, settings: Settings) -> Any:
        """Return the pipeline, built."""

    def _choose(self, epoch: int) -> Callable[[range], Any]:
        """Return what chooses samples of an epoch: of grids, their boxes. Its results have a length."""
        return self._boxes(epoch).take

    def _boxes(self, epoch: int) -> BoxIndex:
        boxes: BoxIndex = self._samples.boxes(epoch)
        return boxes

    @abstractmethod
    def _begin(self, epoch: int, start: int) -> None:
        """Let the source give the batches of an epoch from step `start`, but those without a sample of this rank."""

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """Yield the batches of an epoch from global step `start`."""
        choose = self._choose(epoch)
        self._abandon()  # an epoch that was left unfinished
        running = self._running = object()
        self._begin(epoch, start)
        try:
            for step in range(start, len(self)):
                batch = choose(self._share.indices(step, self.samples))
                yield self._deliver(self._run() if len(batch) else None, batch)
        finally:
            if running is self._running:
                self._abandon()

    def _abandon(self) -> None:
        """Throw away what was prefetched of the epoch before, and make the pipeline ready for another."""
        if self._running is None:
            return
        self._running = None
        self._begin(0, len(self))
        with contextlib.suppress(StopIteration):
            while True:
                self._pipeline.run()
        self._pipeline.reset()

    def _run(self) -> Any:
        try:
            return self._pipeline.run(self._stream())
        except Exception:
            self._running = None  # there is nothing to abandon in a pipeline that failed
            raise

    def _stream(self) -> Any:
        """Return the stream for which outputs are to be ready: without one the host would wait for each batch."""
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _deliver(self, outputs: Any, chosen: Any) -> Batch:
        if outputs is None:
            batch = [torch.empty(0, dtype=getattr(torch, spec.dtype), device=self._device) for spec in self._specs]
        else:
            batch = [self._values(number, output, chosen) for number, output in enumerate(outputs)]
        x, y = (values.reshape(len(chosen), *spec.shape) for values, spec in zip(batch, self._specs, strict=True))
        self._pace.hold((outputs, x, y))
        return x, y

    @abstractmethod
    def _values(self, number: int, output: Any, chosen: Any) -> torch.Tensor:
        """Return the decoded values of input (0) or target (1) from what the pipeline returned of it."""

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
    """Return the loader of images, or that of grids with the operators that the settings name."""
    from dlscale.data.loaders.dali_images import ImageDaliLoader  # all build on this module
    from dlscale.data.loaders.dali_native import NativeDaliLoader
    from dlscale.data.loaders.dali_numba import NumbaDaliLoader

    if isinstance(samples, CroppedImages):
        return ImageDaliLoader(samples, settings, share, device, delivery)
    loader = NativeDaliLoader if settings.operators == "native" else NumbaDaliLoader
    return loader(on_grids(samples, settings.kind), settings, share, device, delivery)
