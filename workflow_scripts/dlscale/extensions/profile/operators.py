"""FLOPs, bytes and time of each operator of a step, by module, for a roofline diagram."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from dlscale.config.run import DDP
from dlscale.core.ranges import marking
from dlscale.data.loaders.base import Batch
from dlscale.measure.records import OperatorWork
from dlscale.measure.roofline import OperatorCount, best_of, tensors_in
from dlscale.parallel.world import synchronize
from dlscale.train.build import Session
from dlscale.train.step import Network

#: Number of timed steps, after one warm-up step.
STEPS = 3
#: Seconds of work that a GPU gets before a step, so that the operators of the step are queued before they run.
AHEAD = 0.25


def operator_work(session: Session, batch: Batch) -> list[OperatorWork]:
    """Return FLOPs, bytes and time of a step's operators, means over `STEPS` steps; call on all ranks.

    The list is empty if Python does not call the operators one by one (compiled steps, CUDA graphs), with strategies
    other than DDP, or if several devices share a model.
    """
    run = session.run
    whole = run.compile.mode == "none" and not run.cuda_graph and isinstance(run.parallel, DDP)
    if not whole or run.geometry.model_size > 1:
        return []
    for steps in (1, STEPS):
        found = TimedOperators(session.step.network, session.world.device)
        with found.modules.followed(), marking(found.phase):
            for _ in range(steps):
                found.keep_busy()
                with found:
                    session.step(*batch)
                synchronize(session.world.device)
    return found.work(STEPS)


class TimedOperators(OperatorCount):
    """Context that sums work and time of all operators that are called within the context, by operator and module.

    On a GPU the time is device time between CUDA events.
    """

    def __init__(self, network: Network, device: torch.device) -> None:
        super().__init__()
        self.modules, self._device = ModuleAt(network), device
        self._times = list[tuple[Any, Any, Any]]()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin = self._now()
        result = func(*args, **kwargs)
        self._times.append((self.key(func), begin, self._now()))
        return result

    def key(self, func: Any) -> tuple[str, str]:
        passing = self._phase in ("forward", "backward")
        return str(func._overloadpacket), (passing and self.modules.name) or self._phase

    def keep_busy(self) -> None:
        """Queue matrix products on a GPU, so that the host stays ahead of the GPU.

        Without this queue, the GPU would reach an event before the host has launched the next operator, and the time
        between events would include the host's time.
        """
        if self._device.type == "cuda":
            x = torch.randn(4096, 4096, device=self._device)
            for _ in range(math.ceil(AHEAD / best_of(partial(torch.mm, x, x), self._device, 0.01))):
                torch.mm(x, x)

    def work(self, steps: int) -> list[OperatorWork]:
        """Return work and time per step of all operators that move bytes, except communication between processes."""
        seconds, calls = Counter[Any](), Counter[Any]()
        for key, begin, end in self._times:
            seconds[key] += 1e-3 * begin.elapsed_time(end) if self._device.type == "cuda" else end - begin
            calls[key] += 1
        return [
            OperatorWork(
                operator=operator.removeprefix("aten."),
                module=module,
                calls=calls[key] / steps,
                seconds=time / steps,
                flops=self.flops[key] / steps,
                bytes=self.bytes[key] / steps,
            )
            for key, time in seconds.most_common()
            for operator, module in [key]
            if self.bytes[key] and not operator.startswith(("c10d", "_c10d"))
        ]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class ModuleAt:
    """Tracker of the module that is computing, in the forward pass and in the backward pass."""

    def __init__(self, network: Network) -> None:
        self.name = ""  #: Name of the module that is computing; empty outside of the network's modules.
        self._names = _names(network.model)
        self._outer, self._claimed = list[str](), set[Any]()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Keep `name` up to date within this context."""
        with (
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave),
        ):
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._outer.append(self.name if self._outer else "")  # `name` may be left from a backward pass
        self.name = self._names.get(module, self._outer[-1])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Assign to the module the autograd nodes between its inputs and outputs, except nodes of inner modules."""
        seen: set[Any] = {None, *(tensor.grad_fn for tensor in tensors_in(args))}
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
        while nodes:
            if (node := nodes.pop()) not in seen:
                seen.add(node)
                nodes += [each for each, _ in node.next_functions]
                if node not in self._claimed:
                    self._claimed.add(node)  # keep the node alive, so that its id is not reused
                    node.register_prehook(partial(self._at, self.name))
        self.name = self._outer.pop()
        if not self._outer:
            self._claimed.clear()

    def _at(self, name: str, gradients: Any) -> None:
        self.name = name


def _names(module: nn.Module, name: str = "") -> dict[nn.Module, str]:
    """Return module → "name (class)", for a module and all modules in it; equal parts of a container are named `*`."""
    kind = type(module).__name__
    found, parts = {module: f"{name} ({kind})" if name else kind}, dict(module.named_children())
    forms = {(type(part), *(p.shape for p in part.parameters())) for part in parts.values()}
    alike = len(parts) > len(forms) == 1 and all(key.isdigit() for key in parts)
    for key, part in parts.items():
        found = _names(part, f"{name}.{'*' if alike else key}".lstrip(".")) | found
    return found
