"""One optimiser step, in training or in a measurement, with CUDA graphs and compilation."""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from dlscale.config.run import RunCore
from dlscale.core.errors import UserError
from dlscale.core.ranges import mark, patience
from dlscale.data.samples import samples_in, tree_leaves, tree_map
from dlscale.parallel.model import ModelParallel
from dlscale.parallel.shards import Shard
from dlscale.parallel.strategy import Gradients, Scaler, Strategy
from dlscale.studies.base import SampleLoss
from dlscale.train.attention import Context
from dlscale.train.precision import SCALED, Weights, autocast, weight_dtype

#: Memory format → number of axes of the tensors that can have this format.
AXES = {torch.channels_last: 4, torch.channels_last_3d: 5}

Function = TypeVar("Function", bound=Callable[..., Any])


class Network(nn.Module):
    """Model and loss as one module, to be wrapped by DDP and compiled.

    `layout` is the memory format of the model's inputs. `scores` maps prediction and target to metrics of each training
    sample, [B, n].
    """

    def __init__(
        self,
        model: nn.Module,
        loss: SampleLoss,
        precision: str,
        layout: torch.memory_format,
        scores: SampleLoss | None = None,
    ) -> None:
        super().__init__()
        self.model, self.loss, self._scores = model, loss, scores
        self._precision, self._input_dtype = precision, weight_dtype(precision)
        self._layout, self._layout_axes = layout, AXES.get(layout)

    def forward(self, x: Any, y: Any) -> torch.Tensor:
        """Return the mean of `losses` over a batch; for an empty batch, return a scalar 0 whose gradients are 0."""
        if not samples_in(x):
            return 0.0 * torch.stack([values.sum() for values in tree_leaves(self.predict(x))]).sum()
        losses = self.losses(x, y)
        return losses.mean() if self._scores is None else losses.mean(dim=0)

    def losses(self, x: Any, y: Any) -> torch.Tensor:
        """Return the loss of each sample, float32 [B]; with scores, return loss and scores, [B, 1 + n]."""
        prediction, target = self.predict(x), tree_map(self._arranged, y)
        loss = self.loss(prediction, target)
        if self._scores is None:
            return loss
        return torch.cat([loss[:, None], self._scores(tree_map(torch.Tensor.detach, prediction), target)], dim=1)

    def predict(self, x: Any) -> Any:
        """Return the prediction of inputs [B, ...], float32: what the model returns, a tensor or a tree."""
        x = tree_map(self._converted, x)
        with autocast(self._precision, tree_leaves(x)[0].device):
            prediction = self.model(x)
        return tree_map(torch.Tensor.float, prediction)

    def _converted(self, x: torch.Tensor) -> torch.Tensor:
        # Integers other than uint8 are indices, and keep their type.
        return self._arranged(x, self._input_dtype if x.is_floating_point() or x.dtype == torch.uint8 else None)

    def _arranged(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        layout = self._layout if values.dim() == self._layout_axes else torch.preserve_format
        return values.to(dtype or values.dtype, memory_format=layout)


class Step:
    """Optimiser step that `build_step` makes: forward pass, backward pass and update.

    The host waits for the device in two cases. First, with a scaled loss or after `skip_bad`, if the optimiser is not
    `fused`. Second, with synchronised batch normalisation outside of a CUDA graph. Each data-parallel rank computes its
    part of the batch. Gradients are averaged over these ranks during the backward pass. Then each rank updates the
    weights that it holds: all weights with DDP, its shards with FSDP or tensor parallelism. From `run`, this class
    reads only precision, loss scale and accumulation steps.
    """

    def __init__(
        self,
        run: RunCore,
        weights: Weights,
        network: Network,
        strategy: Strategy,
        gradients: Gradients,
        optimizer: torch.optim.Optimizer,
        attention: Context,
        divided: ModelParallel | None = None,
    ) -> None:
        self.divided = divided  #: tensor and context parallelism of the model, if any
        self.weights, self.model, self.network, self.strategy = weights, weights.model, network, strategy
        self.device, self.attention = strategy.world.device, attention
        self.optimizer, self.scaler = optimizer, Scaler(gradients, run.precision in SCALED, run.loss_scale)
        self._gradients, self._accumulation = gradients, run.accumulation_steps
        #: Whether a loss or update was NaN or infinite: 0 or 1, float32 [] on the device. Before `skip_bad`: in any
        #: step so far on this rank; after `skip_bad`: in the last step on any rank. Gradients of a scaled loss do not
        #: count, because loss scaling expects overflows.
        self.bad, self.skips = gradients.bad, False  #: `skips`: whether to leave out bad steps
        #: Weights to check; empty with a scaled loss.
        self._trained = numbers(
            [p.detach() for p in weights.updated if p.requires_grad and run.precision not in SCALED]
        )
        self._overwritten = False  #: whether the next step overwrites the loss's memory
        self._known = set[object]()  #: keys of earlier calls: the batch's shape, with `predict` for predictions
        self._train: Callable[..., torch.Tensor] = self._train_eagerly
        self._loss_of: Callable[..., torch.Tensor] = strategy.wrapped
        self._predict: Callable[..., torch.Tensor] = strategy.predict(network)

    @property
    def joint(self) -> bool:
        """Whether several ranks make a prediction together."""
        return self.divided is not None or self.strategy.gathers

    def skip_bad(self) -> None:
        """From now on, leave out each step that is bad on any rank: weights, buffers and optimiser keep their bits."""
        self.skips = True
        make_state(self.optimizer)  # if the first step is left out, a fused SGD would not initialise its momentum

    def compile(self, mode: str) -> None:
        """Compile the forward pass with the loss, and the forward pass of predictions, in the run's `compile.mode`."""
        self._overwritten = mode in ("reduce-overhead", "max-autotune")  # these modes reuse memory in CUDA graphs
        self._loss_of = compiled(self.strategy.wrapped, mode, self.device)
        self._predict = compiled(self._predict, mode, self.device)

    def capture(self, graphs: CudaBackend) -> None:
        """Record and replay complete steps as CUDA graphs."""
        steps = EAGER_STEPS_OF_RANKS if self.strategy.exchanges else EAGER_STEPS
        self._train = Graphed(self._train_eagerly, graphs, steps)

    def __call__(self, x: Any, y: Any, weight: float = 1.0) -> torch.Tensor:
        """Train on one batch and return its loss on the device, detached: a scalar, or with scores [1 + n].

        `weight` is the weight of this rank's loss: the rank's number of samples divided by the mean number over ranks.
        """
        with self._first(*shapes(x)):
            return self._train(x, y, weight)

    def _first(self, *key: object) -> AbstractContextManager[object]:
        """Return the context of a call: the first call of a shape, which may compile, has a longer watchdog timeout."""
        if key in self._known:
            return nullcontext()
        self._known.add(key)
        return patience()

    def _train_eagerly(self, x: Any, y: Any, weight: float = 1.0) -> torch.Tensor:
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()] if self.skips else []
        loss = self.gradients(x, y, weight)
        with mark("optimizer"):
            self._gradients.complete()
            self.weights.collect_gradients()
            if self.skips:
                trained = self.weights.updated if self._trained else ()
                self._gradients.check(loss, numbers([p.grad for p in trained if p.grad is not None]), True)
                self.scaler.left_out = self.bad
            if self._gradients.clips:
                self.scaler.unscale_(self.optimizer)
                self._gradients.clip(self.weights.updated)
            if self.scaler.is_enabled() or self.scaler.left_out is None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                update_unless(self.scaler.left_out, self.optimizer)
            if not self.skips:  # NaN gradients make weights NaN, which are checked faster than gradients
                self._gradients.check(loss, self._trained, False)
            self.weights.distribute()
            bad = self.bad > 0
            for buffer, value in kept:
                torch.where(bad, value, buffer, out=buffer)
        return loss

    def gradients(self, x: Any, y: Any, weight: float = 1.0) -> torch.Tensor:
        """Return the loss of one batch, and leave its gradients (times the loss scale) in the model's parameters."""
        if not self.model.training:  # `train` at every step would walk through all modules
            self.model.train()
        self.weights.clear_gradients()
        # A small last batch may have fewer samples than parts. With FSDP, all ranks need equal numbers of passes.
        samples = samples_in(x)
        parts = self._accumulation if self.strategy.gathers else min(self._accumulation, samples)
        if parts <= 1:
            return self._backward(x, y, 1.0, weight)
        # Each part is weighted by its number of samples. Only the last part exchanges gradients with other ranks.
        leaves, tree = tree_flatten((x, y))
        batches = map(tree.unflatten, zip(*(values.tensor_split(parts) for values in leaves), strict=True))
        losses = [
            self._backward(a, b, samples_in(a) / max(samples, 1), weight, last=number == parts)
            for number, (a, b) in enumerate(batches, 1)
        ]
        return sum(losses[1:], losses[0])

    def _backward(self, x: Any, y: Any, fraction: float, weight: float, last: bool = True) -> torch.Tensor:
        """Add the gradients of `fraction` times `weight` times the loss; return `fraction` times the loss."""
        unsynchronised = nullcontext() if last else self.strategy.accumulating()
        weight *= self._gradients.loss_weight
        # A rank may have no sample of a small last batch, but other ranks still wait for its gradients. Code is not
        # compiled for this case, and the chosen attention kernel may not support empty batches.
        with self.attention() if (samples := samples_in(x)) else nullcontext(), unsynchronised:
            with mark("forward"):
                loss = self._loss_of(x, y) if samples else self.strategy.wrapped(x, y)
            if fraction != 1.0:
                loss = loss * fraction
            with mark("backward"):
                alone = loss[0] if loss.dim() else loss  # without the scores
                self.scaler.scale(alone * weight if weight != 1.0 else alone).backward()
        return loss.detach().clone() if self._overwritten else loss.detach()

    @torch.no_grad()
    def predict(self, x: Any, once: bool = False) -> Any:
        """Return the prediction in evaluation mode, float32; with `once`, do not compile code for this prediction."""
        if self.model.training:
            self.model.eval()
        if not samples_in(x):  # a small last batch may have no sample for this rank, as in `_backward`
            return self.network.predict(x)
        with self._first(*shapes(x), "predict"), self.attention():
            return self.network.predict(x) if once else self._predict(x)

    def shards(self) -> dict[str, Shard]:
        """Return this device's shards of the model and the optimiser, without copies of their memory.

        Only the optimiser's step counters are copied, into one tensor `optimizer.step`, in the order of parameters.
        """
        shards = {f"model.{name}": shard for name, shard in self.weights.shards().items()}
        counters: list[torch.Tensor] = []
        states = self.optimizer.state
        for name, p in zip(self.weights.named, self.weights.updated, strict=True):
            # For a weight that had no gradient yet, save zeros, as other weights had before their first step.
            known = p in states or not p.requires_grad
            for kind, value in (states.get(p, {}) if known else next(iter(states.values()), {})).items():
                if kind == "step":
                    counters.append(torch.as_tensor(value if known else 0, dtype=torch.float32))
                elif value is not None:  # None for a momentum of 0
                    its = value if known else torch.zeros_like(p, dtype=value.dtype)
                    shards[f"optimizer.{kind}.{name}"] = self.weights.shard(name, its)
        if counters:
            shards["optimizer.step"] = Shard(torch.stack(counters))
        return shards

    def load(self, shards: Mapping[str, Shard], scaler: Mapping[str, float]) -> None:
        """Load the result of `shards()` and the loss scaler's state; clear an optimiser state that `shards` lacks."""
        if any(name.startswith("optimizer.") for name in shards):
            make_state(self.optimizer)
        else:
            self.optimizer.state.clear()
        with torch.no_grad():
            for name, shard in self.shards().items():
                shard.tensor.copy_(shards[name].tensor)
            self.weights.distribute(frozen=True)
            counters = iter(shards["optimizer.step"].tensor if "optimizer.step" in shards else ())
            for p in self.weights.updated:
                if "step" in self.optimizer.state.get(p, {}):  # indexing `state` would add an empty state
                    self.optimizer.state[p]["step"].copy_(next(counters))
        known = self.scaler.state_dict()  # counts are integers here, floats in `scaler`
        self.scaler.load_state_dict({name: type(value)(scaler[name]) for name, value in known.items()})
        if isinstance(self._train, Graphed):
            self._train.reset()


# ---- CUDA graphs -------------------------------------------------------------------------------------
#
# A complete step is recorded once, then replayed with one call from the host. Before that, some ordinary steps run on a
# side stream, so that libraries choose their kernels, and the optimiser makes its state. All ranks must record, replay
# or run a step at the same time ("Using NCCL with CUDA Graphs" in NCCL's user guide), so the choice between the three
# must not depend on values of a single rank.

Body = Callable[..., torch.Tensor]


def numbers(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return dense tensors of real numbers, in the same memory if possible."""
    dense = (each for each in tensors if each.layout == torch.strided)
    return [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in dense]


def shapes(tree: Any) -> tuple[torch.Size, ...]:
    """Return the shapes of a tree's tensors."""
    return tuple(values.shape for values in tree_leaves(tree))


#: Number of ordinary steps of a shape before recording, on one rank and on several ranks. Several ranks need more
#: steps, because DistributedDataParallel reorders its buckets after the first backward pass, and uses CUDA events to
#: time the first ten passes.
EAGER_STEPS, EAGER_STEPS_OF_RANKS = 3, 11


class Graphed:
    """Callable that runs `body(x, y)`, a complete training step, as a CUDA graph for each shape of batch.

    The first `eager_steps` batches of a shape train without a graph, so that no graphs are made for rare shapes.
    """

    def __init__(self, body: Body, backend: CudaBackend, eager_steps: int = EAGER_STEPS) -> None:
        self._body, self._backend, self._eager_steps = body, backend, eager_steps
        self.reset()

    def reset(self) -> None:
        """Drop all graphs, which is necessary if memory that a graph uses was replaced."""
        self._backend.reset()
        self._seen: Counter[Any] = Counter()
        self._graphs: dict[Any, tuple[Callable[[], Any], torch.Tensor, list[torch.Tensor]]] = {}

    def __call__(self, x: Any, y: Any, weight: float = 1.0) -> torch.Tensor:
        """Train on one batch and return its loss; use no graph if ranks have different numbers of samples.

        Either every rank has weight 1, or no rank has weight 1 (see `Share`), so all ranks make the same choice.
        """
        if weight != 1.0:
            return self._backend.run(partial(self._body, weight=weight), x, y)
        given = [*tree_leaves(x), *tree_leaves(y)]
        shape = shapes(given)
        if shape not in self._graphs:
            self._seen[shape] += 1
            if self._seen[shape] <= self._eager_steps:
                return self._backend.run(self._body, x, y)
            static = tree_map(torch.clone, (x, y))
            self._graphs[shape] = (*self._backend.record(self._body, *static), tree_leaves(static))
        replay, loss, memory = self._graphs[shape]
        for values, new in zip(memory, given, strict=True):
            values.copy_(new)
        replay()
        return loss.clone()  # the next replay overwrites `loss`


class CudaBackend:
    """Recorder of CUDA graphs, which all use one side stream and one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.reset()

    def reset(self) -> None:
        """Use a new memory pool for the next graphs."""
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run this context's work on the side stream, after earlier and before later work of the current stream."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def run(self, body: Body, x: Any, y: Any) -> torch.Tensor:
        """Run `body` on the side stream, without a graph."""
        with self.aside():
            return body(x, y)

    def record(self, body: Body, x: Any, y: Any) -> tuple[Callable[[], Any], torch.Tensor]:
        """Record `body` without running it; return a function that replays it, and the tensor that gets its result."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as a loader's, may pin memory during the recording without an error.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            loss = body(x, y)
        return graph.replay, loss


# ---- compilation -------------------------------------------------------------------------------------


def compiled(function: Function, mode: str, device: torch.device) -> Function:
    """Return the function, compiled in this mode (the run's `compile.mode`) for each shape of batch."""
    if mode == "none":
        return function
    if device.type == "cpu":
        check_compiler(mode)
    return cast(Function, torch.compile(function, mode=mode, dynamic=False))


def check_compiler(mode: str) -> None:
    """Raise a `UserError` if code for a CPU cannot be built."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
        usable = Path(sysconfig.get_path("include"), "Python.h").exists()
    except exc.InvalidCxxCompiler:
        usable = False
    if not usable:
        raise UserError(
            f"compile.mode {mode}: torch.compile builds C++ code for a CPU, but this machine lacks a C++ compiler or "
            "Python's headers. Install g++ (or name a compiler in CXX) and python3-dev, or set compile: {mode: none}"
        )


# ---- optimisers --------------------------------------------------------------------------------------


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next update."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def update_unless(left_out: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Update the weights and the optimiser's state, unless `left_out`, float32 [], is 1 instead of 0.

    A fused optimiser decides this on the device, with the attributes that `GradScaler` sets. Otherwise the host waits.
    """
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer.grad_scale, optimizer.found_inf = None, left_out if fused else None  # type: ignore[attr-defined]
    if fused or not left_out.item():
        optimizer.step()


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimiser's state before the first step, unless the state exists; a weight of -0 may become 0."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    # Reset counters, which are 1 now, and moments, which may contain weight decay or be None (momentum 0).
    for value in (each for state in optimizer.state.values() for each in state.values() if each is not None):
        value.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p, gradient in zip((p for group in optimizer.param_groups for p in group["params"]), gradients, strict=True):
        p.grad = gradient
