"""What a training step computes and moves for one sample: from a study's formula, and by counting its operators.

Both count *model* FLOPs, of which MFU is made (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): matrix products
and convolutions, a multiplication and an addition being two; nothing that is computed a second time, be it activations
or the scores of a fused attention. They differ by convention in one thing. A formula has a backward pass of twice the
forward pass. The operators know that nobody needs the gradient of the input: of the first layer they count one product
less.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count, shape_wrapper

from dlscale.core.errors import brief
from dlscale.data.loaders.base import Batch
from dlscale.measure.records import SampleWork
from dlscale.train.build import Session
from dlscale.train.memory import fake_step

aten = torch.ops.aten

#: Beyond this share of the forward pass, which has one convention, the two ways of counting contradict each other.
TOLERANCE = 0.02


def sample_work(session: Session, batch: Batch) -> tuple[SampleWork | None, SampleWork | None]:
    """Return what a sample costs, counted and by the study's formula; None, with a line in the log, where that fails.

    `batch` is one of the run's; only its shapes matter.
    """
    work: SampleWork | None = None
    formula: SampleWork | None = None
    # A model may do anything, and what is left out here is no reason to lose a measurement.
    try:
        work = counted(session, batch)
    except Exception as error:
        logging.info("FLOPs and bytes cannot be counted: %s: %s", type(error).__name__, brief(error))
    try:
        formula = by_formula(session, work)
    except Exception as error:
        logging.info("the study's formula of FLOPs fails: %s: %s", type(error).__name__, brief(error))
    if work and formula and abs(work.forward_flops - formula.forward_flops) > TOLERANCE * formula.forward_flops:
        both = formula.forward_flops, work.forward_flops
        logging.warning("FLOPs of a forward pass: %.4g by the study's formula, %.4g counted; one is wrong", *both)
    return work, formula


def by_formula(session: Session, counted: SampleWork | None = None) -> SampleWork | None:
    """Return what the study's formula says, if it has one, with the bytes and operators of `counted`."""
    forward = session.study.flops(session.run, session.manifest)
    if forward is None:
        return None
    return SampleWork(
        forward_flops=forward,
        backward_flops=2 * forward,
        bytes=counted.bytes if counted else None,
        operators=counted.operators if counted else None,
        source="formula",
    )


def counted(session: Session, batch: Batch) -> SampleWork:
    """Return what the operators of a step compute and move, for each sample of the batch."""
    run = session.run

    def count(checkpointing: bool) -> OperatorCount:
        one = run.model_copy(update={"activation_checkpointing": checkpointing})
        count = OperatorCount()
        fake = fake_step(one, session.manifest, session.world.device, session.step.attention)
        x, y = map(fake.like, batch)
        fake.train(x, y, count.phase, count)
        return count

    plain = count(False)
    moved = (count(True) if run.activation_checkpointing else plain).bytes
    samples = len(batch[0])
    return SampleWork(
        forward_flops=plain.flops["forward"] / samples,
        backward_flops=plain.flops["backward"] / samples,
        bytes=moved.total() / samples,
        operators=plain.calls,
        source="counted",
    )


class OperatorCount(TorchDispatchMode):
    """Adds up the FLOPs and the bytes of all operators within it, by the phase in which they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.bytes, self.calls = Counter[str](), Counter[str](), 0
        self._phase = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is within for the phase `name`."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls += 1
        if formula := FORMULAS.get(func._overloadpacket):
            self.flops[self._phase] += formula(*args, **kwargs, out_val=result)
        self.bytes[self._phase] += bytes_moved(func, args, kwargs, result)
        return result


# ---- FLOPs of operators: PyTorch's formulas, and what they miss --------------------------------------


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **more: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *rest: Any, **more: Any
) -> int:
    """Four products, twice the forward pass; in the fifth, kernels compute the scores again."""
    return 2 * int(sdpa_flop_count(query, key, value))


def _convolution_backward(
    gradient: torch.Size, x: torch.Size, weight: torch.Size, *rest: Any, out_shape: Any = None, **more: Any
) -> int:
    """As many as the forward pass for each of the two gradients that is wanted; PyTorch's own forgets groups."""
    transposed, wanted = rest[4], rest[7]
    places = (x if transposed else gradient)[2:].numel() * x[0]
    return 2 * places * weight.numel() * (int(wanted[0]) + int(wanted[1]))


def _vector(matrix: torch.Size, *rest: Any, **more: Any) -> int:
    return 2 * matrix.numel()


FORMULAS: dict[Any, Any] = {
    **flop_registry,
    **{
        packet: shape_wrapper(formula)
        for formula, names in (
            (_attention, ("_scaled_dot_product_flash_attention_for_cpu",)),
            (
                _attention_backward,
                (
                    "_scaled_dot_product_flash_attention_for_cpu_backward",
                    "_scaled_dot_product_flash_attention_backward",
                    "_scaled_dot_product_efficient_attention_backward",
                    "_scaled_dot_product_cudnn_attention_backward",
                ),
            ),
            (_convolution_backward, ("convolution_backward",)),
            (_vector, ("mv", "dot", "vdot")),
        )
        for name in names
        if (packet := getattr(aten, name, None))
    },
}


# ---- bytes of operators ------------------------------------------------------------------------------

#: Operators that write their first argument and do not read it, beside `..._like` and `new_...`, which read its shape.
WRITE_ONLY = {
    "copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "exponential_", "random_",
    "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip
#: Operators that read of their first argument, or of a table, only what they write.
GATHER = {"gather": "self", "index": "self", "index_select": "self", "embedding": "weight"}


def bytes_moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that one call of an operator reads and writes: each of its tensors once, views for nothing.

    What an operator changes in place is read and written. Values that repeat (expanded tensors) count once.
    """
    name = func._overloadpacket.__name__
    arguments, returns = func._schema.arguments, func._schema.returns
    if func.namespace != "aten" and not any(value is not None for value in _tensors(result)):
        return 0  # a question, a range of a profiler
    if name.startswith(("empty", "new_empty")) or name == "_unsafe_view":
        return 0
    if any(each.alias_info and not each.alias_info.is_write for each in returns):
        return 0  # a view
    written = sum(_size(value) for value in _tensors(result)) if not any(each.alias_info for each in returns) else 0
    total = written
    shape_alone = name.endswith("_like") or name.startswith("new_")
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    for place, argument in enumerate(arguments):
        size = sum(_size(value) for value in _tensors(given.get(argument.name)))
        changed = bool(argument.alias_info and argument.alias_info.is_write)
        if argument.name == "grads" and name.startswith("_fused_") and given.get("grad_scale") is None:
            changed = False  # as the schema says, but they change only with a loss scale
        if GATHER.get(name) == argument.name:
            size = written
        reads = not shape_alone and not (place == 0 and name in WRITE_ONLY)
        total += size * (reads + changed)
    return total


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's different elements."""
    if not tensor.numel():
        return 0
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()
