"""Data parallelism: replicate or shard a model, average gradients, synchronise batch normalisation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dlscale.config.run import DDP, DP, FSDP, RunCore
from dlscale.core.errors import UserError
from dlscale.parallel.model import ModelParallel, named, tied
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.world import World

#: PyTorch's default size of a bucket of gradients, MB (`torch.nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB`).
BUCKET_MB = 25

#: Name, in this version of PyTorch, of the option of `DistributedDataParallel` that broadcasts buffers.
BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)

#: Function that averages a bucket of gradients, as `DistributedDataParallel.register_comm_hook` expects it.
CommHook = Callable[[Any, Any], Any]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Strategy:
    """Strategy without data-parallel exchanges; base class of all strategies. Call `wrap` before the other methods."""

    exchanges = False  #: whether ranks exchange gradients during the backward pass
    gathers = False  #: whether ranks with different samples wait for each other in a forward pass

    def __init__(self, world: World) -> None:
        self.world = world
        self.wrapped: nn.Module = nn.Identity()  #: module that the training calls: the network or its wrapper

    def wrap(self, network: Any, sharding: Sharding, stream: Callable[[], AbstractContextManager[object]]) -> None:
        """Wrap `network`; FSDP changes the network's model in place.

        `stream` returns a context (a CUDA stream) in which hooks of the backward pass must be created.
        """
        self.wrapped = network

    def predict(self, network: Any) -> Any:
        """Return the function that maps inputs to predictions."""
        return network.predict

    def accumulating(self) -> AbstractContextManager[object]:
        """Return a context in which backward passes add up gradients without exchanging them."""
        return nullcontext()

    def unsynchronised(self) -> AbstractContextManager[object]:
        """Return a context in which ranks do not exchange gradients, and each rank updates its own weights."""
        return nullcontext()

    def around_averaging(self, hook: Callable[[CommHook], CommHook]) -> None:
        """Replace the function that averages buckets of gradients, if any, by `hook(function)`.

        Call this before the first step.
        """


class Replicated(Strategy):
    """Replicated weights, with PyTorch's `DistributedDataParallel` (DDP)."""

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
        if settings.first_bucket_mb is not None:  # the last size applies to all further buckets
            options["bucket_cap_mb_list"] = [settings.first_bucket_mb, settings.bucket_mb or BUCKET_MB]
        # DDP creates the autograd nodes that accumulate gradients, and each node runs on the stream that created it.
        with stream():
            self.wrapped = DistributedDataParallel(network, **options)
        # By default, DDP times every hundredth step with CUDA events. The host waits for these events, and a CUDA graph
        # does not allow such events.
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
        # DDP accepts only one hook, so the registered hook looks up `self._hook`. It is a lambda, because DDP refuses
        # functions whose annotations are strings, as all annotations of this file are.
        self.wrapped.register_comm_hook(self.wrapped.process_group, lambda group, bucket: self._hook(group, bucket))


class Sharded(Strategy):
    """Sharded weights, with PyTorch's `fully_shard` (FSDP2)."""

    exchanges = gathers = True

    def __init__(self, world: World, settings: FSDP) -> None:
        super().__init__(world)
        self._settings = settings
        self._root: Any = None

    def _mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks that have shards or copies of this rank's weights.

        Along the axis `shard`, neighbouring ranks shard the weights. If there are several groups of such ranks, the
        groups are copies of each other, along the axis `copies`.
        """
        world = self.world
        ranks = world.mesh.ranks if world.mesh else torch.arange(world.size)[None]
        shard = self._settings.shard or ranks.shape[1]
        mesh = DeviceMesh(world.device.type, ranks.unflatten(1, (-1, shard)), mesh_dim_names=("tp", "copies", "shard"))
        return mesh["shard"] if shard == ranks.shape[1] else mesh["copies", "shard"]

    def wrap(self, network: Any, sharding: Sharding, stream: Callable[[], AbstractContextManager[object]]) -> None:
        settings = self._settings
        if settings.cpu_offload and self.world.device.type == "cpu":
            raise UserError("parallel.cpu_offload: this run is on the CPU already. Remove this key, or train on GPUs")
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
                f"parallel.kind fsdp: {' and '.join(shared[0])} are one tensor of the model (tied weights), but FSDP "
                "would split it into several tensors. Use parallel.kind ddp"
            )
        for module in named(network.model, sharding.units).values():
            fully_shard(module, reshard_after_forward=settings.reshard, **options)
        self._root = fully_shard(network.model, reshard_after_forward=False, **options)
        if self.world.device.type == "cpu":  # gloo can sum, but not average
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


class DataParallelNetwork(nn.Module):
    """Network that one process copies to several GPUs (DataParallel); each copy computes a part of the batch."""

    def __init__(self, network: Any, devices: list[int]) -> None:
        super().__init__()
        self.copies = DataParallel(_Each(network), device_ids=devices)

    def forward(self, x: Any, y: Any) -> torch.Tensor:
        """Return the mean loss over the samples of a batch; GPUs may compute different numbers of samples."""
        return self.copies(x, y).mean()

    def predict(self, x: Any) -> Any:
        return self.copies(x)


class _Each(nn.Module):
    """Module that DataParallel copies; it returns the loss of each sample, or the prediction if `y` is None."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any, y: Any = None) -> Any:
        return self.network.predict(x) if y is None else self.network.losses(x, y)


class DataParallelStrategy(Strategy):
    """One process for all GPUs of a node, with PyTorch's `DataParallel`, or one process on a CPU."""

    def __init__(self, world: World, gpus: int) -> None:
        super().__init__(world)
        self._gpus = gpus

    def wrap(self, network: Any, sharding: Sharding, stream: Callable[[], AbstractContextManager[object]]) -> None:
        self.wrapped = network
        if self.world.device.type != "cuda":
            return
        if self._gpus > (there := torch.cuda.device_count()):
            raise UserError(
                f"geometry.gpus_per_node: this run needs {self._gpus} GPUs, but PyTorch sees {there} here. "
                "Request more GPUs, or lower this key"
            )
        self.wrapped = DataParallelNetwork(network, list(range(self._gpus)))

    def predict(self, network: Any) -> Any:
        return self.wrapped.predict


def strategy_of(run: RunCore, world: World) -> Strategy:
    """Return the strategy of a run on these ranks."""
    parallel = run.parallel
    if isinstance(parallel, DP):
        return DataParallelStrategy(world, run.geometry.gpus_per_node)
    copies = world.mesh.ranks.shape[1] if world.mesh else world.data_size
    if isinstance(parallel, FSDP):
        return Sharded(world, parallel) if copies > 1 else Strategy(world)
    return Replicated(world, parallel) if copies > 1 and parallel.sync else Strategy(world)


# ---- gradients -------------------------------------------------------------------------------------


class Gradients:
    """Gradients of named parameters; `clip` scales them down if their norm exceeds `clip_norm`."""

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        world: World,
        model: ModelParallel | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self._parameters, self._world, self._model, self._clip_norm = parameters, world, model, clip_norm
        self.clips = clip_norm is not None
        #: Result of `check`, 0 or 1, float32 [] on the device.
        self.bad, self._one = torch.zeros((), device=world.device), torch.ones((), device=world.device)
        self.loss_weight = model.loss_weight if model else 1.0  #: weight of this device's loss
        #: Process groups of devices with different shards, by kind: `tp` for tensor-parallel layers, `fsdp` for all
        #: weights.
        self.groups: dict[str, Any] = {"tp": model.tp_group} if model and model.tp_group else {}
        for p in parameters.values():
            if isinstance(p, DTensor):
                self.groups["fsdp"] = p.device_mesh.get_group("shard")

    def complete(self) -> None:
        """Sum the gradients of unsharded parameters over the tensor-parallel devices."""
        if self._model:
            self._model.sum_gradients(self._parameters)

    def clip(self, updated: Sequence[torch.Tensor]) -> torch.Tensor:
        """Scale the gradients down if their norm exceeds `clip_norm`; return the norm before scaling.

        `updated` has the tensors that the optimiser updates, in the order of the parameters. The norm is over all
        gradients together, float32, as in `torch.nn.utils.clip_grad_norm_`.
        """
        assert self._clip_norm is not None
        cuts = self._model.cuts if self._model else {}
        uncut: list[torch.Tensor] = []
        cut: list[torch.Tensor] = []  # gradients of tp-sharded parameters: this device has a part of each
        for name, p in zip(self._parameters, updated, strict=True):
            if p.grad is not None:
                (cut if name in cuts else uncut).append(p.grad)
        squares = torch.stack([_square_sum(each, self._world.device) for each in (uncut, cut)])
        for kind, group in self.groups.items():
            dist.all_reduce(squares if kind == "fsdp" else squares[1:], group=group)
        norm = squares.sum().sqrt()
        gradients = [*uncut, *cut]
        if gradients:
            torch._foreach_mul_(gradients, (self._clip_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device))
        return norm

    def check(self, loss: torch.Tensor, values: Sequence[torch.Tensor], agreed: bool) -> None:
        """Set `bad` to 1 if the loss (its first number), or a tensor of `values`, is NaN or infinite.

        The host does not wait. With `agreed`, `bad` describes this step on all ranks. Otherwise `bad` describes all
        steps so far on this rank: a 1 stays.
        """
        if agreed:
            self.bad.zero_()
        device = values[0].device if values else loss.device  # with `cpu_offload`, weights are on the host
        here, alone = self.bad.to(device), loss[:1] if loss.dim() else loss
        # GradScaler's check reads all tensors in one call, which is fastest, also on CPUs; it multiplies them by 1.
        torch._amp_foreach_non_finite_check_and_unscale_([*values, alone.to(device)], here, self._one.to(device))
        if here is not self.bad:
            self.bad.copy_(here)
        if agreed and self._world.size > 1:
            dist.all_reduce(self.bad, dist.ReduceOp.MAX)


def _square_sum(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(gradients, 2.0, torch.float32)).square().sum().to(device)


class Scaler(torch.amp.GradScaler):
    """Loss scaler; after an overflow on one device, all devices that share the model skip the update."""

    def __init__(self, gradients: Gradients, enabled: bool, scale: float | None = None) -> None:
        super().__init__(gradients.bad.device.type, scale or 2.0**16, enabled=enabled)
        for set_factor in (self.set_growth_factor, self.set_backoff_factor) if scale else ():
            set_factor(1.0)
        self._groups = [*gradients.groups.values()]
        self.left_out: torch.Tensor | None = None  #: 1 to skip the update even if no gradient overflowed, float32 []

    def _unscale_grads_(self, *arguments: Any, **options: Any) -> dict[torch.device, torch.Tensor]:
        # PyTorch's ShardedGradScaler overrides this private method, too.
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(*arguments, **options)
        for group in self._groups:
            for overflow in found.values():
                dist.all_reduce(overflow, dist.ReduceOp.MAX, group=group)
        for overflow in found.values() if self.left_out is not None else ():
            overflow.copy_(torch.maximum(overflow, self.left_out.to(overflow.device)))  # type: ignore[union-attr]
        return found


# ---- batch normalisation ----------------------------------------------------------------------------


class OnCPU(_BatchNorm):
    """Equivalent of PyTorch's `SyncBatchNorm` for CPUs; ranks may have different numbers of samples, also zero."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass

    @torch.compiler.disable  # compiled code could begin the exchanges in a different order on each rank
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise [B, C, ...] by mean and variance of each channel over all ranks.

        The backward pass includes the gradients of all ranks.
        """
        if not self.training:
            known = self.running_mean, self.running_var
            return F.batch_norm(input, *known, self.weight, self.bias, self.running_mean is None, eps=self.eps)
        axes, shape = (0, *range(2, input.dim())), (1, -1, *(1,) * (input.dim() - 2))
        x = input.float()
        here = torch.full((1,), float(x.numel() // x.shape[1]))
        count, total = all_reduce(torch.cat([here, x.sum(axes)])).split([1, x.shape[1]])
        mean = total / count
        centred = x - mean.view(shape)
        variance = all_reduce(centred.square().sum(axes)) / count
        self._follow(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        y = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class OnGPU(nn.SyncBatchNorm):
    """PyTorch's `SyncBatchNorm`, extended for ranks without samples, as in a small last batch."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise as PyTorch does, in float32 if this rank has no samples.

        On a rank without samples, PyTorch would exchange 16-bit numbers although the other ranks exchange float32.
        """
        return super().forward(input) if len(input) else super().forward(input.float()).to(input.dtype)


def synchronised(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace a model's batch normalisation by synchronised modules with the same parameters and names."""
    kind: Callable[..., Any] = OnGPU if device.type == "cuda" else OnCPU
    for name, module in model.named_children():
        model.add_module(name, synchronised(module, device))
    if not isinstance(model, _BatchNorm) or isinstance(model, OnCPU | OnGPU):
        return model
    new = kind(model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats)
    new.train(model.training)
    new._parameters, new._buffers = model._parameters, model._buffers
    return new
