"""Checks of an image, or of any environment, without a GPU: `python tests/container/inside.py`.

The file needs only PyTorch and dlscale and is mounted, or read from standard input, because images contain no tests.
Further arguments name packages to import, such as `nvidia.dali`.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist

from dlscale.config.run import DDP
from dlscale.extensions.selftest import selftest
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.strategy import Replicated
from dlscale.parallel.world import World


class Network(torch.nn.Module):
    """A layer, and a batch normalisation whose buffers are broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the squared outputs."""
        return self.model(x).square().sum()


def main(packages: list[str]) -> None:
    """Import packages, compute gradients with DistributedDataParallel, and run the self-test's operations."""
    faulthandler.dump_traceback_later(300, exit=True)  # if the process hangs, print where
    for name in packages:
        importlib.import_module(name)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    strategy = Replicated(World(), DDP())
    strategy.wrap(Network(), Sharding(), nullcontext)
    strategy.wrapped(torch.randn(4, 3)).backward()
    if any(p.grad is None for p in strategy.wrapped.parameters()):
        sys.exit("DistributedDataParallel leaves no gradients")
    if wrong := selftest.collected(World(), selftest.Group("all processes", None, (0,))):
        sys.exit(f"the self-test's operations give wrong values: {wrong}")
    dist.destroy_process_group()
    print(f"ok: PyTorch {torch.__version__} (CUDA {torch.version.cuda}), {', '.join(packages) or 'no other package'}")


if __name__ == "__main__":
    main(sys.argv[1:])
