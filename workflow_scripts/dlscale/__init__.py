"""dlscale: turn a PyTorch model and a dataset into a measured, reproducible scaling study.

A study imports the names in `__all__` from here, such as `from dlscale import Study, Metric, DatasetKind`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlscale.config.dataset import DatasetSettings
    from dlscale.core.errors import Refused, UserError
    from dlscale.core.metrics import LossInfo, Metric
    from dlscale.core.schema import Strict
    from dlscale.data.kind import DatasetKind, Outline, Part, RawFile, RowSamples
    from dlscale.data.manifest import Manifest
    from dlscale.data.source import ArraySource
    from dlscale.extensions.programs.timed import timed
    from dlscale.parallel.sharding import Sharding
    from dlscale.studies.base import Metrics, PublishedLog, SampleLoss, Study

__all__ = [
    "ArraySource",
    "DatasetKind",
    "DatasetSettings",
    "LossInfo",
    "Manifest",
    "Metric",
    "Metrics",
    "Outline",
    "Part",
    "PublishedLog",
    "RawFile",
    "Refused",
    "RowSamples",
    "SampleLoss",
    "Sharding",
    "Strict",
    "Study",
    "UserError",
    "timed",
]


def __getattr__(name: str) -> Any:
    from dlscale.core.registry import PLACES, load

    if name not in PLACES:
        raise AttributeError(f"module 'dlscale' has no attribute {name!r}")
    return getattr(load(PLACES[name]), name)
