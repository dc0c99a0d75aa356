"""Tensor, sequence and context parallelism around a model that knows nothing of them.

Between two modules (`Sharding.first`, `Sharding.last`) each device has 1 / (cp x tp) of a sample's tokens, padded where
they do not divide: 4050 on 8 devices are 4056. Tokens are gathered over tp before attention and MLP, keys and values
over cp (Korthikanti et al. 2022, arXiv:2205.05198).

A device's loss has the weight 1 / tp. Each exchange of the backward pass is the adjoint of the forward pass's; so the
sum over tp of the gradients of weights in common, and the mean of all over dp x cp, are those of one device. Devices
draw the same random numbers outside of the divided part, and each its own within.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from dlscale.core.errors import UserError
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.shards import Cut
from dlscale.parallel.world import Mesh, Pretended, PretendedAxes

#: Devices that exchange something.
Axes = DeviceMesh | PretendedAxes

TOKENS = 1  #: Dimension of tokens in [B, N, E].
TOKENS_OF_HEADS = 2  #: Dimension of tokens in [B, heads, N, head dimension].


def named(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules whose names match, in the model's order; `*` matches one part of a name."""
    wanted = [pattern.split(".") for pattern in patterns]

    def matches(name: str) -> bool:
        parts = name.split(".")
        return any(len(parts) == len(w) and all(map(fnmatch.fnmatchcase, parts, w)) for w in wanted)

    return {name: module for name, module in model.named_modules() if matches(name)}


def cut_layers(model: nn.Module, sharding: Sharding) -> list[tuple[str, nn.Module, int]]:
    """Return the layers that tensor-parallel devices cut, with names, and the dimension in which they cut weights."""
    columns = [(name, module, 0) for name, module in named(model, sharding.columns).items()]
    return columns + [(name, module, 1) for name, module in named(model, sharding.rows).items()]


def tied(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def drawing(model: nn.Module) -> str | None:
    """Return the name of the first of PyTorch's layers that draws random numbers in training, if any."""
    for name, module in model.named_modules():
        dropped = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
        if isinstance(module, nn.RReLU) or (isinstance(dropped, float) and dropped > 0):
            return f"{name or 'model'} ({type(module).__name__})"
    return None


class ModelParallel:
    """A model of which each device of a mesh holds its part, with the exchanges between them.

    The model changes in place, and must have the same weights on all devices. Parameters become this device's part of
    each; their names stay.

    Parameters
    ----------
    device
        Device on which the model will compute.
    seed
        Seed of this device for the divided part; None if the model draws no random numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        sharding: Sharding,
        mesh: Mesh | Pretended,
        device: torch.device,
        seed: int | None = None,
    ) -> None:
        self._mesh, self._sharding = mesh, sharding
        assert mesh.model is not None
        self._tp, self._cp, self._both = mesh.along("tp"), mesh.along("cp"), mesh.model
        self.tp_group: Any = self._tp.get_group() if self._tp else None  #: process group of tensor-parallel devices
        self.parts = mesh.size("cp") * mesh.size("tp")
        self._each = -(-sharding.tokens // self.parts)  # tokens of each device
        self.cuts: dict[str, tuple[Cut, ...]] = {}  #: how tensor-parallel devices share a parameter, by name
        self.loss_weight = 1.0 / mesh.size("tp")  #: of this device
        if self._tp:
            self._cut(model)
        self._exchange(model)
        self.draws = seed is not None
        #: This device's random state in the divided part, on the host.
        self.random_state = self._outside = torch.empty(0, dtype=torch.uint8)
        if seed is not None:
            self._draw_apart(model, device, seed)

    # ---- weights ---------------------------------------------------------------------------------

    def _cut(self, model: nn.Module) -> None:
        assert self._tp is not None
        shared = {name: names for names in tied(model) for name in names}
        for layer_name, layer, dim in cut_layers(model, self._sharding):
            for name, p in layer.named_parameters(recurse=False):
                if p.dim() > dim:  # the bias of rows is added once, to the sum
                    if names := shared.get(f"{layer_name}.{name}"):
                        raise UserError(
                            f"geometry.tp: the model has one tensor as {' and '.join(names)}, and tensor-parallel "
                            "devices would cut it for one of its modules alone; such layers cannot be among `columns` "
                            "and `rows` of the study's sharding; use geometry.tp 1"
                        )
                    cut = Cut(self._tp, dim, p.shape)  # type: ignore[arg-type]  # of the pretended, its size alone
                    self.cuts[f"{layer_name}.{name}"] = (cut,)
                    layer._parameters[name] = nn.Parameter(cut.part(p.detach()).clone(), p.requires_grad)
        for name, layer in named(model, self._sharding.rows).items():
            model.set_submodule(name, _Rows(layer, self._tp))

    def sum_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        """Sum the gradients of the parameters that are not cut over the tensor-parallel devices."""
        if not self._tp:
            return
        gradients = [p.grad for name, p in parameters.items() if name not in self.cuts and p.grad is not None]
        tensors = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        if not tensors:
            return
        flat = torch.cat([each.reshape(-1).float() for each in tensors])
        dist.all_reduce(flat, group=self.tp_group)
        sums = flat.split([each.numel() for each in tensors])
        torch._foreach_copy_(tensors, [part.view_as(each) for part, each in zip(sums, tensors, strict=True)])

    # ---- tokens ----------------------------------------------------------------------------------

    def _exchange(self, model: nn.Module) -> None:
        first, last = (model.get_submodule(name) for name in (self._sharding.first, self._sharding.last))
        first.register_forward_hook(lambda module, inputs, output: self._divide(output))
        last.register_forward_hook(lambda module, inputs, output: self._unite(output))
        if self._tp:
            for module in named(model, self._sharding.gather).values():
                module.register_forward_pre_hook(lambda module, inputs: (self._gather(inputs[0]),))
        if self._cp or self._each * self.parts != self._sharding.tokens:
            for module in named(model, self._sharding.attend).values():
                module.register_forward_pre_hook(lambda module, inputs: self._keys_and_values(*inputs))

    def _divide(self, x_BNE: torch.Tensor) -> torch.Tensor:
        place = self._mesh.rank("cp") * self._mesh.size("tp") + self._mesh.rank("tp")
        begin, end = (min(n * self._each, self._sharding.tokens) for n in (place, place + 1))
        return F.pad(x_BNE[:, begin:end], (0, 0, 0, self._each - (end - begin))).contiguous()

    def _unite(self, y_BNE: torch.Tensor) -> torch.Tensor:
        """Return all tokens. All devices go on with them alike; each gets the gradient of its own."""
        y_BNE = _gathered(_Adjoint.apply(y_BNE, self.parts), self._both, TOKENS, Replicate())
        if self._mesh.places != sorted(self._mesh.places):
            parts = y_BNE.chunk(self.parts, TOKENS)
            y_BNE = torch.cat([parts[place] for place in self._mesh.places], TOKENS)
        return y_BNE[:, : self._sharding.tokens]

    def _gather(self, x_BNE: torch.Tensor) -> torch.Tensor:
        assert self._tp is not None
        kind = x_BNE.device.type
        if torch.is_autocast_enabled(kind):  # what follows would compute in 16 bits: half as much is sent
            x_BNE = x_BNE.to(torch.get_autocast_dtype(kind))
        return _gathered(x_BNE, self._tp, TOKENS, Partial())

    def _keys_and_values(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the queries, and keys and values of all tokens without padding."""
        if self._cp:
            k, v = (_gathered(x, self._cp, TOKENS_OF_HEADS, Partial()) for x in (k, v))
        return q, *(x.narrow(TOKENS_OF_HEADS, 0, self._sharding.tokens) for x in (k, v))

    # ---- random numbers --------------------------------------------------------------------------

    def _draw_apart(self, model: nn.Module, device: torch.device, seed: int) -> None:
        """Register the hooks by which this device draws its own random numbers in the divided part."""
        get, set_ = (
            (partial(torch.cuda.get_rng_state, device), partial(torch.cuda.set_rng_state, device=device))
            if device.type == "cuda"
            else (torch.get_rng_state, torch.set_rng_state)
        )
        outside = get()
        (torch.cuda.manual_seed if device.type == "cuda" else torch.manual_seed)(seed)
        self.random_state = get()
        set_(outside)

        def enter(module: nn.Module, *values: Any) -> None:
            if module.training:
                self._outside = get()
                set_(self.random_state)

        def leave(module: nn.Module, *values: Any) -> None:
            if module.training:
                self.random_state = get()
                set_(self._outside)

        model.get_submodule(self._sharding.first).register_forward_hook(enter)
        model.get_submodule(self._sharding.last).register_forward_hook(leave)


class _Adjoint(torch.autograd.Function):
    """The values themselves; their gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def _gathered(x: torch.Tensor, mesh: Axes, dim: int, gradient: Placement) -> torch.Tensor:
    """Gather the parts of a mesh's devices, equal in size, along a dimension.

    The mesh has one dimension. `gradient` tells whether the gradients of the result are summands (`Partial`) or equal
    (`Replicate`).
    """
    if isinstance(mesh, PretendedAxes):
        whole: torch.Tensor = _Pretend.apply(x, mesh.size(), dim, True, gradient.is_partial())
        return whole
    parts = DTensor.from_local(x, mesh, [Shard(dim)], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])


def _scattered(x: torch.Tensor, mesh: Axes, dim: int) -> torch.Tensor:
    """Return this device's part, along a dimension, of the sum over a mesh's devices."""
    if isinstance(mesh, PretendedAxes):
        part: torch.Tensor = _Pretend.apply(x, mesh.size(), dim, False, True)
        return part
    summands = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return summands.redistribute(placements=[Shard(dim)]).to_local()


class _Pretend(torch.autograd.Function):
    """Has the shapes and the memory of `_gathered`, or else of `_scattered`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: int, dim: int, gather: bool, summed: bool) -> torch.Tensor:
        ctx.parts, ctx.dim, ctx.gather, ctx.summed = parts, dim, gather, summed
        return _whole_like(x, parts, dim) if gather else _part_like(x, parts, dim, True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, parts, dim = gradients[0], ctx.parts, ctx.dim
        x = _part_like(y, parts, dim, ctx.summed) if ctx.gather else _whole_like(y, parts, dim)
        return x, None, None, None, None


def _whole_like(x: torch.Tensor, parts: int, dim: int) -> torch.Tensor:
    return torch.cat(x.new_empty((parts * len(x), *x.shape[1:])).chunk(parts), dim)


def _part_like(x: torch.Tensor, parts: int, dim: int, summed: bool) -> torch.Tensor:
    pieces = x.chunk(parts, dim)
    if summed:  # they are sent side by side
        torch.cat(pieces)
    return torch.empty_like(pieces[0])


class _Rows(nn.Module):
    """A linear layer of some inputs, whose outputs are summed over devices and scattered among them."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, layer: nn.Module, mesh: Axes) -> None:
        super().__init__()
        assert isinstance(layer, nn.Linear)
        self._parameters = layer._parameters  # the same names, for all who ask for them
        self._mesh = mesh

    def forward(self, x_BNE: torch.Tensor) -> torch.Tensor:
        y_BNE = _scattered(F.linear(x_BNE, self.weight), self._mesh, TOKENS)
        return y_BNE if self.bias is None else y_BNE + self.bias.to(y_BNE.dtype)
