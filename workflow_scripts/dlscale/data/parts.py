"""Files of a dataset of any kind: raw files, parts (files made from raw files), and pieces (rows of a part).

The workflow calls these functions while it builds its graph, so they must be pure and quick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlscale.config.dataset import DatasetSettings
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.data.kind import DatasetKind, Part, RawFile, is_url


def kind_of(dataset: DatasetSettings) -> DatasetKind:
    """Return the kind of a dataset."""
    kind: DatasetKind = registry.kind(dataset.kind)
    return kind


def role(dataset: DatasetSettings | str, module: str, function: str) -> Callable[..., Any] | None:
    """Return a function in a kind's module (see `dlscale.data.kind`); None if the kind lacks it."""
    name = registry.module_of(dataset if isinstance(dataset, str) else dataset.kind, module)
    return getattr(registry.load(name), function, None) if name else None


def needed(dataset: DatasetSettings, module: str, function: str) -> Callable[..., Any]:
    """Return a function as `role` does; raise a `UserError` if it is missing."""
    there = role(dataset, module, function)
    if there is None:
        raise UserError(
            f"datasets of kind {dataset.kind}: the function `{function}` is missing; define it in the kind's module"
        )
    return there


def acquired(dataset: DatasetSettings, raw: RawFile) -> bool:
    """Return whether the stage `acquire` makes this raw file."""
    return kind_of(dataset).acquirer(dataset) is not None or is_url(raw.origin)


def fetched(dataset: DatasetSettings) -> bool:
    """Return whether any raw file is read over the network."""
    return any(acquired(dataset, raw) and "://" in raw.origin for raw in raws(dataset).values())


def parts(dataset: DatasetSettings) -> list[Part]:
    """Return the parts that preprocessing makes, in the manifest's order."""
    kind = kind_of(dataset)
    found = kind.parts(dataset)
    missing = {"train", "valid"} - {part.split for part in found}
    if missing and not kind.prepared(dataset):  # splits of prepared files are known only after reading
        raise UserError(
            f"dataset of kind {dataset.kind}: no part has the split {', '.join(sorted(missing))}; add a part with this "
            "split"
        )
    return found


def part(dataset: DatasetSettings, label: str) -> Part:
    """Return the part called `SPLIT/NAME`."""
    known = {part.label: part for part in parts(dataset)}
    if label not in known:
        raise UserError(f"--part {label}: no such part; the dataset has: {', '.join(known)}")
    return known[label]


def raws(dataset: DatasetSettings) -> dict[str, RawFile]:
    """Return all raw files of a dataset, as name → raw file."""
    return {raw.name: raw for part in parts(dataset) for raw in part.raws}


def piece_rows(rows: int, piece: int, pieces: int) -> tuple[int, int]:
    """Return the rows [start, stop) of piece `piece` (from 0) of `pieces`; pieces are disjoint and complete."""
    return rows * piece // pieces, rows * (piece + 1) // pieces
