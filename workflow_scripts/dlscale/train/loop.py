"""Loop over batches for training, validation and measurements; hooks do other work, such as saving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from dlscale.core import ranges
from dlscale.core.ranges import mark, patience

#: Arguments of a step: usually input and target, and in training also the weight of this rank's loss.
Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Hook:
    """Functions that a loop calls at every step; they must not keep the batch, because its memory is reused."""

    #: Called with the step's number, before its batch is loaded.
    before_step: Callable[[int], None] = lambda number: None
    #: Called with number, batch and result of the step.
    after_step: Callable[[int, Batch, Any], None] = lambda number, batch, result: None


def run_steps(
    step: Callable[..., Any], batches: Iterator[Batch], numbers: Iterable[int], hooks: Sequence[Hook] = ()
) -> None:
    """For each of `numbers`, call `step(*batch)` with the next batch, and call the hooks before and after the step."""
    around = ranges.kind()
    with ranges.part("steps", ranges.STEPS):
        for count, number in enumerate(numbers):
            with mark("step"):
                for hook in hooks:
                    hook.before_step(number)
                with mark("data"), patience(around) if count == 0 else nullcontext():  # the first batch starts workers
                    batch = next(batches)
                result = step(*batch)
                for hook in hooks:
                    hook.after_step(number, batch, result)
