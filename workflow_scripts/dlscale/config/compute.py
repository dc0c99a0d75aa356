"""Settings of a run that decide how long a step takes.

Two runs with the same compute settings do the same work, so their measurements are pooled, or one measurement serves
both. Settings that only affect the training result (learning rate, seed, names) are not included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

#: Settings of a run that affect the time of a step.
KEYS = (
    *("study", "dataset", "batch_size", "model", "loss", "samples", "loader", "optimizer", "precision", "compile"),
    *("cuda_graph", "memory_format", "attention", "accumulation_steps", "activation_checkpointing", "threads"),
    *("geometry", "parallel", "program"),
)
#: Switches that affect the time of a step; false and absent are equal, so digests of older versions stay valid.
SWITCHES = ("keep_norms_fp32",)
#: Keys of these sections that do not affect the time of a step.
WITHOUT = {
    "optimizer": ("lr", "betas", "eps"),
    "samples": ("train", "valid"),
    "parallel": ("selftest",),
    "geometry": ("memory_mb",),
}
#: Section → keys for which only zero or non-zero matters, because the values 0 and null skip an operation.
WHETHER = {"optimizer": ("weight_decay", "momentum", "clip_norm")}


def compute_settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a run's `config.yaml` that decide how long a step takes."""
    settings = {}
    for key in (*KEYS, *(key for key in SWITCHES if run.get(key))):
        value = run.get(key)
        if isinstance(value, Mapping):
            value = {part: kept for part, kept in value.items() if part not in WITHOUT.get(key, ())}
            value |= {part: bool(value[part]) for part in WHETHER.get(key, ()) if part in value}
        settings[key] = value
    return settings


def compute_digest(run: Mapping[str, Any]) -> str:
    """Return a digest of `compute_settings`, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(compute_settings(run), sort_keys=True).encode()).hexdigest()[:16]
