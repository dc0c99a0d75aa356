"""Compare predicted with allocated memory of a small ViT's step, with each kind of activation checkpointing."""

import torch

from tests.test_memory import CPU, Case, allocated, predicted

case = Case("era5_vit", {"patch": 16, "embed_dim": 192, "depth": 6, "heads": 3}, (128, 256), 16)
for over in (
    {},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": True},
    {"compile": {"mode": "default"}},
    {"compile": {"mode": "default", "memory_budget": 0.5}},
):
    torch.compiler.reset()  # drop code that was compiled with another memory budget
    step, (x, y) = case.step(CPU, **over), case.batch(CPU)
    batch, found = x.nbytes + y.nbytes, predicted(case, **over)
    at, most = allocated(step, x, y)
    kept, peak = at["forward"] + batch, most + batch + found.parameters + found.optimizer
    print(f"{over}: activations {found.activations / 1e6:.1f} predicted, {kept / 1e6:.1f} MB measured;", end=" ")
    print(f"peak {found.peak / 1e6:.1f} predicted, {peak / 1e6:.1f} MB measured", flush=True)
