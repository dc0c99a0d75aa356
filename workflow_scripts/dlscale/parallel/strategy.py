"""Strategies by which devices that see different samples train one model: one for each kind of `parallel`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dlscale.config.run import DDP, DP, FSDP, RunCore
from dlscale.core.errors import UserError
from dlscale.parallel.model import named, tied
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.world import World

#: PyTorch's own (`torch.nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB`).
BUCKET_MB = 25

#: Option of `DistributedDataParallel` to broadcast buffers, by the older name where PyTorch has no other.
BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)

#: Averages a bucket of gradients, as `DistributedDataParallel.register_comm_hook` takes it.
CommHook = Callable[[Any, Any], Any]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Strategy:
    """One device alone. Others are derived from it; `wrap` comes first.

    Attributes
    ----------
    exchanges
        Whether gradients are exchanged while they are computed.
    gathers
        Whether ranks of different samples wait for each other in a forward pass.
    wrapped
        The network, or what wraps it: what training calls.
    """

    exchanges = gathers = False

    def __init__(self, world: World) -> None:
        self.world = world
        self.wrapped: nn.Module = nn.Identity()

    def wrap(self, network: Any, sharding: Sharding, stream: Callable[[], AbstractContextManager[object]]) -> None:
        """Take a network, whose model it may change in place; hooks of its backward pass are made in `stream`."""
        self.wrapped = network

    def predict(self, network: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that predicts from inputs."""
        predict: Callable[[torch.Tensor], torch.Tensor] = network.predict
        return predict

    def accumulating(self) -> AbstractContextManager[object]:
        """Return the context of a backward pass whose gradients are only added up: another one will exchange them."""
        return nullcontext()

    def unsynchronised(self) -> AbstractContextManager[object]:
        """Return a context in which no rank waits for the gradients of others; each then makes an update of its own."""
        return nullcontext()

    def around_averaging(self, hook: Callable[[CommHook], CommHook]) -> None:
        """Put something around the averaging of each bucket, where there are any; to be called before any step."""


class Replicated(Strategy):
    """`DistributedDataParallel`."""

    exchanges = True
    wrapped: DistributedDataParallel

    def __init__(self, world: World, settings: DDP) -> None:
        super().__init__(world)
        self._settings = settings

    def wrap(self, network: Any, sharding: Sharding, stream: Callable[[], AbstractContextManager[object]]) -> None:
        settings = self._settings
        options: dict[str, Any] = {
            "device_ids": [self.world.device] if self.world.device.type == "cuda" else None,
            "process_group": self.world.replicas,
            "bucket_cap_mb": settings.bucket_mb,
            BUFFERS: settings.broadcast_buffers,
            "gradient_as_bucket_view": settings.bucket_view,
        }
        if settings.first_bucket_mb is not None:  # the last of these holds for all that follow
            options["bucket_cap_mb_list"] = [settings.first_bucket_mb, settings.bucket_mb or BUCKET_MB]
        # It keeps the nodes of autograd that gather gradients, which work on the stream on which they were made.
        with stream():
            self.wrapped = DistributedDataParallel(network, **options)
        # Else it would time every hundredth step by events, for which the host waits, and which a graph must not have.
        self.wrapped._set_ddp_runtime_logging_sample_rate(2**31 - 1)
        self._hook: CommHook = {
            "none": default_hooks.allreduce_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "fp16": default_hooks.fp16_compress_hook,
        }[settings.compression]
        if settings.compression != "none":
            self._register()

    def accumulating(self) -> AbstractContextManager[object]:
        return self.wrapped.no_sync()

    def unsynchronised(self) -> AbstractContextManager[object]:
        return self.wrapped.no_sync()

    def around_averaging(self, hook: Callable[[CommHook], CommHook]) -> None:
        self._hook = hook(self._hook)
        if self._settings.compression == "none":
            self._register()

    def _register(self) -> None:
        # It takes one hook, once, and compares annotations with types.
        self.wrapped.register_comm_hook(self.wrapped.process_group, lambda group, bucket: self._hook(group, bucket))


class Sharded(Strategy):
    """`fully_shard` (FSDP2)."""

    exchanges = gathers = True

    def __init__(self, world: World, settings: FSDP) -> None:
        super().__init__(world)
        self._settings = settings
        self._root: Any = None

    def _mesh(self) -> DeviceMesh:
        """Return the mesh of this rank's replicas: neighbours that share the weights, and copies of such groups."""
        world = self.world
        ranks = world.mesh.ranks if world.mesh else torch.arange(world.size)[None]
        shard = self._settings.shard or ranks.shape[1]
        mesh = DeviceMesh(world.device.type, ranks.unflatten(1, (-1, shard)), mesh_dim_names=("tp", "copies", "shard"))
        return mesh["shard"] if shard == ranks.shape[1] else mesh["copies", "shard"]

    def wrap(self, network: Any, sharding: Sharding, stream: Callable[[], AbstractContextManager[object]]) -> None:
        settings = self._settings
        if settings.cpu_offload and self.world.device.type == "cpu":
            raise UserError("parallel.cpu_offload: all is on the processor already; leave it out, or train on GPUs")
        options: dict[str, Any] = {
            "mesh": self._mesh(),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=DTYPES[settings.param_dtype] if settings.param_dtype != "fp32" else None,
                reduce_dtype=DTYPES[settings.reduce_dtype],
            ),
            "offload_policy": CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy(),
        }
        if shared := tied(network.model):
            raise UserError(
                f"parallel.kind fsdp: the model has one tensor as {' and '.join(shared[0])}, and devices that share "
                "weights would make several of it; use parallel.kind ddp"
            )
        for module in named(network.model, sharding.units).values():
            fully_shard(module, reshard_after_forward=settings.reshard, **options)
        self._root = fully_shard(network.model, reshard_after_forward=False, **options)
        if self.world.device.type == "cpu":  # gloo has no mean
            for module in network.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        self.wrapped = network

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)


class Copied(nn.Module):
    """A network of which one process has copies on several GPUs, each for its share of a batch (DataParallel)."""

    def __init__(self, network: Any, devices: list[int]) -> None:
        super().__init__()
        self.copies = DataParallel(_Each(network), device_ids=devices)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch; shares are unequal where it does not divide."""
        return self.copies(x, y).mean()

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Return the prediction, as `Network.predict` does."""
        return self.copies(x)


class _Each(nn.Module):
    """The module that is copied: returns the loss of each sample, or without targets the prediction."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.network.predict(x) if y is None else self.network.losses(x, y)


class Copies(Strategy):
    """`DataParallel`: one process for all GPUs of a node. A CPU is one device, and has no copies."""

    def __init__(self, world: World, gpus: int) -> None:
        super().__init__(world)
        self._gpus = gpus

    def wrap(self, network: Any, sharding: Sharding, stream: Callable[[], AbstractContextManager[object]]) -> None:
        self.wrapped = network
        if self.world.device.type != "cuda":
            return
        if self._gpus > (there := torch.cuda.device_count()):
            raise UserError(
                f"geometry.gpus_per_node: this run asks for {self._gpus} GPUs, and PyTorch sees {there} here; ask for "
                "as many, or lower it"
            )
        self.wrapped = Copied(network, list(range(self._gpus)))

    def predict(self, network: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        predict: Callable[[torch.Tensor], torch.Tensor] = self.wrapped.predict  # type: ignore[assignment]
        return predict


def strategy_of(run: RunCore, world: World) -> Strategy:
    """Return the strategy that a run asks for, in this world."""
    parallel = run.parallel
    if isinstance(parallel, DP):
        return Copies(world, run.geometry.gpus_per_node)
    copies = world.mesh.ranks.shape[1] if world.mesh else world.data_size
    if isinstance(parallel, FSDP):
        return Sharded(world, parallel) if copies > 1 else Strategy(world)
    return Replicated(world, parallel) if copies > 1 and parallel.sync else Strategy(world)
