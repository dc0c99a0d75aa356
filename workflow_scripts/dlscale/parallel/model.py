"""Tensor, sequence and context parallelism for a model that contains no parallel code.

Between the modules `Sharding.first` and `Sharding.last`, each device has 1 / (cp x tp) of a sample's tokens. Padding is
added if the number of tokens is not divisible by the number of devices: 4050 tokens on 8 devices become 4056. Before
attention and MLP, tokens are gathered over tp; in attention, keys and values are gathered over cp (Korthikanti et al.
2022, arXiv:2205.05198).

Each device's loss has the weight 1 / tp, and each exchange of the backward pass is the adjoint of the forward exchange.
Therefore the gradients equal the gradients on one device after two operations: the gradients of unsharded weights are
summed over tp, and all gradients are averaged over dp x cp. Outside the divided part, devices that share a model draw
the same random numbers. Inside the divided part, each device draws different random numbers.
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

#: Mesh of devices that exchange tensors, or its stand-in for predictions.
Axes = DeviceMesh | PretendedAxes

TOKENS = 1  #: Dimension of tokens in [B, N, E].
TOKENS_OF_HEADS = 2  #: Dimension of tokens in [B, heads, N, head dimension].


def named(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules whose names match a pattern, by name, in the model's order.

    `*` matches any text within one part of a dotted name.
    """
    wanted = [pattern.split(".") for pattern in patterns]

    def matches(name: str) -> bool:
        parts = name.split(".")
        return any(len(parts) == len(w) and all(map(fnmatch.fnmatchcase, parts, w)) for w in wanted)

    return {name: module for name, module in model.named_modules() if matches(name)}


def cut_layers(model: nn.Module, sharding: Sharding) -> list[tuple[str, nn.Module, int]]:
    """Return name, module, and dimension along which the weight is sharded, of each tensor-parallel layer."""
    columns = [(name, module, 0) for name, module in named(model, sharding.columns).items()]
    return columns + [(name, module, 1) for name, module in named(model, sharding.rows).items()]


def tied(model: nn.Module) -> list[list[str]]:
    """Return the list of names of each tied parameter (a parameter with several names)."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def drawing(model: nn.Module) -> str | None:
    """Return name and type, as one text, of the first PyTorch layer that draws random numbers in training.

    Return None without such a layer.
    """
    for name, module in model.named_modules():
        dropped = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
        if isinstance(module, nn.RReLU) or (isinstance(dropped, float) and dropped > 0):
            return f"{name or 'model'} ({type(module).__name__})"
    return None


class ModelParallel:
    """Divide a model's weights and tokens over the devices of a mesh, and add the exchanges between them.

    The model must have the same weights on all devices. Each parameter that tensor parallelism shards is replaced
    by this device's part, under the same name.

    Parameters
    ----------
    device
        Device on which the model will compute.
    seed
        Seed of this device's random numbers in the divided part; None if the model does not draw random numbers.
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
        self._each = -(-sharding.tokens // self.parts)  # number of tokens per device
        self.cuts: dict[str, tuple[Cut, ...]] = {}  #: name of a parameter → its tensor-parallel cuts
        self.loss_weight = 1.0 / mesh.size("tp")  #: weight of this device's loss
        if self._tp:
            self._cut(model)
        self._exchange(model)
        self.draws = seed is not None
        #: State of this device's random generator inside the divided layers, as a tensor on the host.
        self.random_state = self._outside = torch.empty(0, dtype=torch.uint8)
        if seed is not None:
            self._draw_apart(model, device, seed)

    # ---- weights ---------------------------------------------------------------------------------

    def _cut(self, model: nn.Module) -> None:
        assert self._tp is not None
        shared = {name: names for names in tied(model) for name in names}
        for layer_name, layer, dim in cut_layers(model, self._sharding):
            for name, p in layer.named_parameters(recurse=False):
                if p.dim() > dim:  # the bias of a layer in `rows` is not sharded: it is added once, to the sums
                    if names := shared.get(f"{layer_name}.{name}"):
                        raise UserError(
                            f"geometry.tp: {' and '.join(names)} are tied (one tensor of the model), and tensor "
                            "parallelism would shard this tensor in only one of its modules. Set geometry.tp to 1, or "
                            "remove these layers from `columns` and `rows` of the study's sharding"
                        )
                    cut = Cut(self._tp, dim, p.shape)  # type: ignore[arg-type]  # PretendedAxes has the methods that Cut calls
                    self.cuts[f"{layer_name}.{name}"] = (cut,)
                    layer._parameters[name] = nn.Parameter(cut.part(p.detach()).clone(), p.requires_grad)
        for name, layer in named(model, self._sharding.rows).items():
            model.set_submodule(name, _Rows(layer, self._tp))

    def sum_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        """Sum the gradients of unsharded parameters over the tensor-parallel devices."""
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
                module.register_forward_pre_hook(lambda module, inputs: (self._gather(inputs[0]), *inputs[1:]))
        if self._cp or self._each * self.parts != self._sharding.tokens:
            for module in named(model, self._sharding.attend).values():
                module.register_forward_pre_hook(lambda module, inputs: self._keys_and_values(*inputs))

    def _divide(self, x_BNE: torch.Tensor) -> torch.Tensor:
        place = self._mesh.rank("cp") * self._mesh.size("tp") + self._mesh.rank("tp")
        begin, end = (min(n * self._each, self._sharding.tokens) for n in (place, place + 1))
        return F.pad(x_BNE[:, begin:end], (0, 0, 0, self._each - (end - begin))).contiguous()

    def _unite(self, y_BNE: torch.Tensor) -> torch.Tensor:
        """Gather all tokens on every device.

        In the backward pass each device gets the gradient of its own tokens.
        """
        y_BNE = _gathered(_Adjoint.apply(y_BNE, self.parts), self._both, TOKENS, Replicate())
        if self._mesh.places != sorted(self._mesh.places):
            parts = y_BNE.chunk(self.parts, TOKENS)
            y_BNE = torch.cat([parts[place] for place in self._mesh.places], TOKENS)
        return y_BNE[:, : self._sharding.tokens]

    def _gather(self, x_BNE: torch.Tensor) -> torch.Tensor:
        assert self._tp is not None
        kind = x_BNE.device.type
        if torch.is_autocast_enabled(kind):  # the next layers cast to 16 bits: casting here halves the sent bytes
            x_BNE = x_BNE.to(torch.get_autocast_dtype(kind))
        return _gathered(x_BNE, self._tp, TOKENS, Partial())

    def _keys_and_values(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
        """Return this device's queries (unchanged), the keys and values of all tokens, without padding, and `rest`."""
        if self._cp:
            k, v = (_gathered(x, self._cp, TOKENS_OF_HEADS, Partial()) for x in (k, v))
        return q, *(x.narrow(TOKENS_OF_HEADS, 0, self._sharding.tokens) for x in (k, v)), *rest

    # ---- random numbers --------------------------------------------------------------------------

    def _draw_apart(self, model: nn.Module, device: torch.device, seed: int) -> None:
        """Register hooks that switch to this device's own random state in the divided part."""
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
    """Identity in the forward pass; multiplies the gradient by a factor in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def _gathered(x: torch.Tensor, mesh: Axes, dim: int, gradient: Placement) -> torch.Tensor:
    """Gather the parts of all devices of a one-dimensional mesh along `dim`; the parts have equal shapes.

    `gradient` is the placement of the result's gradient: `Partial` if each device has a summand of the gradient,
    `Replicate` if all devices have the same gradient.
    """
    if isinstance(mesh, PretendedAxes):
        gathered: torch.Tensor = _Pretend.apply(x, mesh.size(), dim, True, gradient.is_partial())
        return gathered
    parts = DTensor.from_local(x, mesh, [Shard(dim)], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])


def _scattered(x: torch.Tensor, mesh: Axes, dim: int) -> torch.Tensor:
    """Sum a tensor over a mesh's devices, and return this device's part of the sum along `dim`."""
    if isinstance(mesh, PretendedAxes):
        part: torch.Tensor = _Pretend.apply(x, mesh.size(), dim, False, True)
        return part
    summands = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return summands.redistribute(placements=[Shard(dim)]).to_local()


class _Pretend(torch.autograd.Function):
    """Stand-in for `_gathered` and `_scattered`: the same shapes and memory, without exchanges."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: int, dim: int, gather: bool, summed: bool) -> torch.Tensor:
        ctx.parts, ctx.dim, ctx.gather, ctx.summed = parts, dim, gather, summed
        return _gathered_like(x, parts, dim) if gather else _part_like(x, parts, dim, True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, parts, dim = gradients[0], ctx.parts, ctx.dim
        x = _part_like(y, parts, dim, ctx.summed) if ctx.gather else _gathered_like(y, parts, dim)
        return x, None, None, None, None


def _gathered_like(x: torch.Tensor, parts: int, dim: int) -> torch.Tensor:
    return torch.cat(x.new_empty((parts * len(x), *x.shape[1:])).chunk(parts), dim)


def _part_like(x: torch.Tensor, parts: int, dim: int, summed: bool) -> torch.Tensor:
    pieces = x.chunk(parts, dim)
    if summed:  # a real exchange sends the pieces as one contiguous tensor, which needs memory
        torch.cat(pieces)
    return torch.empty_like(pieces[0])


class _Rows(nn.Module):
    """Row-parallel linear layer: each device has a part of the input features.

    The outputs are summed over the devices, and each device keeps the sums of a part of the tokens.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, layer: nn.Module, mesh: Axes) -> None:
        super().__init__()
        assert isinstance(layer, nn.Linear)
        self._parameters = layer._parameters  # so that parameters keep their names
        self._mesh = mesh

    def forward(self, x_BNE: torch.Tensor) -> torch.Tensor:
        y_BNE = _scattered(F.linear(x_BNE, self.weight), self._mesh, TOKENS)
        return y_BNE if self.bias is None else y_BNE + self.bias.to(y_BNE.dtype)
