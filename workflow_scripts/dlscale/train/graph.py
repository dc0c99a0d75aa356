"""A whole step as a CUDA graph: recorded once, then replayed with one call from the host.

`torch.cuda.graph` demands static memory for inputs, no wait for the device, and the learning rate and the optimiser's
counters on the device. Some ordinary steps on a side stream come first, in which libraries choose their kernels and
the optimiser makes its state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: Ordinary steps of a shape before it is recorded. (DistributedDataParallel needs 11.)
EAGER_STEPS = 3


class Graphed:
    """Calls `body(x, y)`, a whole training step, by a graph for each shape of batch.

    The first `EAGER_STEPS` batches of a shape train without a graph, the next is recorded; all are ordinary steps of
    the training. A rare shape, such as an epoch's last batch, gets no graph. Autocast's cache of converted weights
    lives only within the body and needs no care.
    """

    def __init__(self, body: Body, make_backend: Callable[[], CudaBackend]) -> None:
        self._body, self._make_backend = body, make_backend
        self.reset()

    def reset(self) -> None:
        """Drop all graphs, as is needed when memory that they use is replaced; the next have a pool of their own."""
        self._backend = self._make_backend()
        self._seen: Counter[Any] = Counter()
        self._graphs: dict[Any, tuple[Callable[[], Any], torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train on one batch and return its loss."""
        shape = (x.shape, y.shape)
        if shape not in self._graphs:
            self._seen[shape] += 1
            if self._seen[shape] <= EAGER_STEPS:
                return self._backend.run(self._body, x, y)
            static_x, static_y = x.clone(), y.clone()
            self._graphs[shape] = (*self._backend.record(self._body, static_x, static_y), static_x, static_y)
        replay, loss, static_x, static_y = self._graphs[shape]
        static_x.copy_(x)
        static_y.copy_(y)
        replay()
        return loss.clone()  # the next replay writes there


class CudaBackend:
    """CUDA graphs that share one pool of memory: they are never replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, body: Body, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Run a body now, on the side stream, where autograd's nodes will also be recorded."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = body(x, y)
        current.wait_stream(self._stream)
        return loss

    def record(self, body: Body, x: torch.Tensor, y: torch.Tensor) -> tuple[Callable[[], Any], torch.Tensor]:
        """Record a body without running it; return what replays it, and where its result then lies."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: a loader's thread may pin memory meanwhile, which is none of the graph's business.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            loss = body(x, y)
        return graph.replay, loss
