"""Choice of the kernel that computes attention."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlscale.core.errors import UserError
from dlscale.parallel.world import synchronize

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

#: Largest number of elements of the score matrices [B, H, T, T] for which a trial includes the kernel `math`, which
#: stores these matrices. If no other kernel works, `math` is always tried.
MAX_SCORES = 2**28

#: Function that returns a context for the forward and backward pass. The backward pass needs the context, too, because
#: recomputed activations choose a kernel again.
Context = Callable[[], AbstractContextManager[object]]


def attention_context(
    kind: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    agreed: Callable[[str], str] = lambda kind: kind,
) -> Context:
    """Return a function for contexts in which attention uses the kernel `kind` (the run's `attention`).

    With `default`, PyTorch chooses the kernel of each call. With `auto`, all calls use the fastest kernel of a trial;
    `agreed` returns the first rank's choice on all ranks, because times differ by chance between ranks, and kernels
    round differently. `shape` is the shape of queries: samples, heads, tokens, head dimension.
    """
    if kind == "default":
        return nullcontext
    if kind == "auto":
        times = trial(shape, dtype, device)
        kind = agreed(min(times, key=times.__getitem__))
        shown = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in sorted(times.items()))
        logging.info("attention %s for %s, %s: %s", kind, "x".join(map(str, shape)), dtype, shown)
    else:
        try:
            _seconds(kind, shape, dtype, device)
        except RuntimeError:
            usable = trial(shape, dtype, device, repeats=1)
            raise UserError(
                f"attention: {kind} cannot compute {dtype} with {shape[2]} tokens, head dimension {shape[3]}, on "
                f"{device.type}. Use default, auto or one of: {', '.join(usable)}"
            ) from None
    return partial(only, kind)


@contextmanager
def only(kind: str) -> Iterator[None]:
    """Run attention on one kernel; code compiled in this context is cached under the kernel's name.

    Without this name, PyTorch 2.13 would load cached code of the same model, compiled with another kernel.
    """
    settings: Any = torch.compiler.config
    with sdpa_kernel(BACKENDS[kind]), settings.patch(cache_key_tag=f"attention {kind}"):
        yield


def trial(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, repeats: int = 5
) -> dict[str, float]:
    """Time each usable kernel: return its name → shortest of `repeats` times of a forward and backward pass, s."""
    times: dict[str, float] = {}
    for name in BACKENDS:
        if name == "math" and times and math.prod(shape[:3]) * shape[2] > MAX_SCORES:
            continue
        # Kernels that are missing or need too much memory are skipped. If no kernel works, `math` raises its error.
        with nullcontext() if name == "math" and not times else suppress(RuntimeError):
            _seconds(name, shape, dtype, device)  # warms up
            times[name] = min(_seconds(name, shape, dtype, device) for _ in range(repeats))
    if device.type == "cuda":  # the trial must not count as the run's memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return times


def _seconds(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> float:
    """Time one forward and backward pass on random values, laid out in memory like a linear layer's output."""
    samples, heads, tokens, width = shape

    def random(count: int) -> list[torch.Tensor]:
        """Return `count` tensors [B, H, T, D], interleaved in memory."""
        values = torch.randn(samples, tokens, count, heads, width, dtype=dtype, device=device)
        return [each.transpose(1, 2) for each in values.unbind(2)]

    with torch.random.fork_rng([device] if device.type == "cuda" else []), only(name):
        (q, k, v), (gradient,) = random(3), random(1)
        for x in (q, k, v):
            x.requires_grad_()
        synchronize(device)
        start = time.perf_counter()
        F.scaled_dot_product_attention(q, k, v).backward(gradient)
        synchronize(device)
        return time.perf_counter() - start
