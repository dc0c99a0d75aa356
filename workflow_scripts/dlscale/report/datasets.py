"""Datasets as the report shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dlscale.core.text import size, unit
from dlscale.data.manifest import FieldInfo, Manifest, Transform
from dlscale.report.drawing import picture


def view(folder: Path, name: str) -> dict[str, Any]:
    """Return what the page shows of the dataset in `folder`: its `manifest.json` and `preview.png`."""
    manifest = Manifest.read(folder / "manifest.json")
    settings = manifest.provenance.get("settings") or {}
    splits = [
        (split, len(files), sum(file.rows for file in files), sum(file.bytes for file in files))
        for split, files in manifest.splits.items()
        if files
    ]
    return {
        "name": name,
        "kind": manifest.kind,
        "source": (settings.get("source") or {}).get("kind"),
        "facts": [*manifest.facts, size(sum(split[3] for split in splits))],
        "preview": picture(folder / "preview.png"),
        "fields": [_field(key, info) for key, info in manifest.fields.items()],
        "rows": manifest.rows,
        "splits": splits,
        "settings": yaml.safe_dump(settings, sort_keys=False, allow_unicode=True) if settings else None,
    }


def _field(name: str, info: FieldInfo) -> dict[str, Any]:
    # The published layout comes without extremes.
    statistics = [getattr(info, key) or [None] * len(info.channels) for key in ("mean", "std", "minimum", "maximum")]
    units = [unit(of) or "1" for of in info.units]
    return {
        "name": name,
        "grid": f"{' × '.join(map(str, info.grid))} points" if info.grid else "one value a row",
        "physical": info.stored == "physical",
        "rows": list(zip(info.channels, units, map(_formula, info.transforms), *statistics, strict=True)),
    }


def _formula(transform: Transform) -> str:
    """Return how physical values x become what the model sees."""
    x = "ln x" if transform.kind == "log" else "x"
    if transform.offset:
        x = f"({x} {'−' if transform.offset > 0 else '+'} {abs(transform.offset):.4g})"
    return x if transform.scale == 1 else f"{x} / {transform.scale:.4g}"
