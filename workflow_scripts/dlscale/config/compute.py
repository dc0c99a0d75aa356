"""Settings of a run that decide how long a step takes.

Two runs that share the former do the same work: a rate of one may stand for the other, their measurements are pooled,
and none is repeated. What a step learns (learning rate, seed, names) is not among them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

#: Settings of a run that the time of a step depends on.
KEYS = (
    *("study", "dataset", "batch_size", "model", "loss", "samples", "loader", "optimizer", "precision", "compile"),
    *("cuda_graph", "memory_format", "attention", "accumulation_steps", "activation_checkpointing", "threads"),
    *("geometry", "parallel", "program"),
)
#: Parts of these that it does not depend on: numbers that are multiplied by whatever they are, how many samples an
#: epoch has, what is tested before all.
WITHOUT = {
    "optimizer": ("lr", "betas", "eps"),
    "samples": ("train", "valid"),
    "parallel": ("selftest",),
    "geometry": ("memory_mb",),
}
#: Of these it matters only whether they are there: 0 and null leave an operation out.
WHETHER = {"optimizer": ("weight_decay", "momentum", "clip_norm")}


def compute_settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run (as its `config.yaml` holds them) that decide how long a step takes."""
    settings = {}
    for key in KEYS:
        value = run.get(key)
        if isinstance(value, Mapping):
            value = {part: kept for part, kept in value.items() if part not in WITHOUT.get(key, ())}
            value |= {part: bool(value[part]) for part in WHETHER.get(key, ()) if part in value}
        settings[key] = value
    return settings


def compute_digest(run: Mapping[str, Any]) -> str:
    """Return a short name of `compute_settings`."""
    words = json.dumps(compute_settings(run), sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:16]
