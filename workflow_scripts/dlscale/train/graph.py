"""A whole step as a CUDA graph: recorded once, then replayed with one call from the host.

Some ordinary steps on a side stream come first: libraries choose their kernels, and the optimiser makes its state. All
ranks must record, replay or run a step alike ("Using NCCL with CUDA Graphs" in NCCL's user guide), so that this must
not depend on what one rank sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

Body = Callable[..., torch.Tensor]

#: Ordinary steps of a shape before it is recorded, on one rank and on several: DistributedDataParallel orders its
#: buckets after its first backward pass, and times its first ten with events.
EAGER_STEPS, EAGER_STEPS_OF_RANKS = 3, 11


class Graphed:
    """Calls `body(x, y)`, a whole training step, by a graph for each shape of batch.

    The first `eager_steps` batches of a shape train without a graph, so that a rare shape gets none.
    """

    def __init__(self, body: Body, backend: CudaBackend, eager_steps: int = EAGER_STEPS) -> None:
        self._body, self._backend, self._eager_steps = body, backend, eager_steps
        self.reset()

    def reset(self) -> None:
        """Drop all graphs, as is needed when memory that they use is replaced."""
        self._backend.reset()
        self._seen: Counter[Any] = Counter()
        self._graphs: dict[Any, tuple[Callable[[], Any], torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Train on one batch and return its loss; a batch that ranks share unequally gets no graph.

        A rank's weight is 1 if and only if all ranks' are (`Share`): all decide alike.
        """
        if weight != 1.0:
            return self._backend.run(partial(self._body, weight=weight), x, y)
        shape = (x.shape, y.shape)
        if shape not in self._graphs:
            self._seen[shape] += 1
            if self._seen[shape] <= self._eager_steps:
                return self._backend.run(self._body, x, y)
            static_x, static_y = x.clone(), y.clone()
            self._graphs[shape] = (*self._backend.record(self._body, static_x, static_y), static_x, static_y)
        replay, loss, static_x, static_y = self._graphs[shape]
        static_x.copy_(x)
        static_y.copy_(y)
        replay()
        return loss.clone()  # the next replay writes there


class CudaBackend:
    """CUDA graphs on one side stream, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.reset()

    def reset(self) -> None:
        """Take a new pool of memory for the next graphs."""
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work on the side stream, in the order of the current one."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def run(self, body: Body, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Run a body now, on the side stream."""
        with self.aside():
            return body(x, y)

    def record(self, body: Body, x: torch.Tensor, y: torch.Tensor) -> tuple[Callable[[], Any], torch.Tensor]:
        """Record a body without running it; return its replay, and the memory of its result."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: a loader's thread may pin memory meanwhile, which is none of the graph's business.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            loss = body(x, y)
        return graph.replay, loss
