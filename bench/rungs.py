"""Speed, samples/s, of every rung of the ladder that a CPU supports, compared with the plain step of the same study."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cases import Case
from bench.measure import Options, Row, in_turns
from bench.training import CPU, NAMES, counts, label, one_thread, rate
from dlscale.core.errors import UserError
from dlscale.measure.throughput import compilation

UNET = Case("cosmo_unet", {"widths": [32, 64, 128]}, (32, 32, 32), batch_size=4)
VIT = Case("era5_vit", {"patch": 8, "embed_dim": 192, "depth": 4, "heads": 4}, (96, 192), batch_size=2)
TINY_UNET = Case("cosmo_unet", {"widths": [4, 8]}, (16, 16, 16), batch_size=2)
TINY_VIT = Case("era5_vit", {"patch": 8, "embed_dim": 32, "depth": 1, "heads": 2}, (16, 32), batch_size=2, channels=3)

RUNGS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "compile default": {"compile": {"mode": "default"}},
    "channels_last": {"memory_format": "channels_last"},
    "fused": {"optimizer": {"fused": True}},
    "bf16 + channels_last + fused": {
        "precision": "bf16",
        "memory_format": "channels_last",
        "optimizer": {"fused": True},
    },
}


def has_bf16() -> bool:
    """Return whether the CPU multiplies bf16 natively; CPUs that first convert bf16 to float32 are slower."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16"} & flags)


def rungs(options: Options) -> list[Row]:
    """Measure each rung alternately with its own plain step."""
    count, turns = (2, 2) if options.quick else (3, 3 * options.repetitions)
    rows = []
    with one_thread():
        for case in (TINY_UNET, TINY_VIT) if options.quick else (UNET, VIT):
            batch = case.batch(CPU)
            for name, over in RUNGS.items():
                if options.quick and "compile" in over and case.study == "cosmo_unet":
                    continue  # one study is enough for a quick run
                torch.compiler.reset()
                plain = case.step(CPU)
                try:
                    step = case.step(CPU, **over)
                except UserError as error:  # for example, the compiler is missing
                    print(f"skipped: {NAMES[case.study]}, {name}: {error}")
                    continue
                counted = counts(case, step.model, count)
                if "compile" in over:
                    seconds = compilation(step, batch, CPU)
                    counted |= {"cold s": seconds["cold_seconds"], "warm s": seconds["warm_seconds"]}
                found = in_turns(
                    turns, {"rung": partial(rate, step, batch, count), "plain": partial(rate, plain, batch, count)}
                )
                target = 1.0 if name == "compile default" or (name == "bf16" and has_bf16()) else None
                title = f"{label(case)}, {name}"
                rows.append(Row(title, "samples/s", found["rung"], "the plain step", found["plain"], counted, target))
    return rows
