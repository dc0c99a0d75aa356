"""The one loop over batches: training, validation and measurements run it. Whatever else they do is a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: What `step` takes: input and target, and in training the weight of this rank's loss.
Batch = tuple[Any, ...]


def _nothing(*told: Any) -> None:
    pass


@dataclass(frozen=True)
class Hook:
    """Something that happens at every step of a loop.

    A batch's memory is reused after the step; to read a number from the device makes the host wait.
    """

    before_step: Callable[[int], None] = _nothing  #: called with the step's number; its batch is not loaded yet
    after_step: Callable[[int, Batch, Any], None] = _nothing  #: called with number, batch and what the step returned


def run_steps(
    step: Callable[..., Any], batches: Iterator[Batch], numbers: Iterable[int], hooks: Sequence[Hook] = ()
) -> None:
    """Call `step(*batch)` with the next batch for each of `numbers`, which hooks are told."""
    for number in numbers:
        for hook in hooks:
            hook.before_step(number)
        batch = next(batches)
        result = step(*batch)
        for hook in hooks:
            hook.after_step(number, batch, result)
