"""The one loop over batches: training, validation and measurements run it. Whatever else they do is a hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

#: What `step` takes: input and target, and in training the weight of this rank's loss.
Batch = tuple[Any, ...]


class Hook:
    """Something that happens at every step of a loop. A hook that reads `result` makes the host wait for the device."""

    def before_step(self, number: int) -> None:
        """Act before step `number`; its batch is not loaded yet."""

    def after_step(self, number: int, batch: Batch, result: Any) -> None:
        """Act after step `number`, which has returned `result`; the batch's memory is reused after that."""


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
