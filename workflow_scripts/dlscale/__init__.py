"""dlscale: a PyTorch model and a dataset become a measured, reproducible scaling study.

What the author of a study needs is imported from here: `from dlscale import Study, Metric, DatasetKind`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlscale.config.dataset import DatasetSettings as DatasetSettings
    from dlscale.core.errors import Refused as Refused
    from dlscale.core.errors import UserError as UserError
    from dlscale.core.metrics import LossInfo as LossInfo
    from dlscale.core.metrics import Metric as Metric
    from dlscale.core.schema import Strict as Strict
    from dlscale.data.kind import DatasetKind as DatasetKind
    from dlscale.data.kind import Outline as Outline
    from dlscale.data.kind import Part as Part
    from dlscale.data.kind import RawFile as RawFile
    from dlscale.data.kind import RowSamples as RowSamples
    from dlscale.data.manifest import Manifest as Manifest
    from dlscale.data.source import ArraySource as ArraySource
    from dlscale.parallel.sharding import Sharding as Sharding
    from dlscale.studies.base import Metrics as Metrics
    from dlscale.studies.base import PublishedLog as PublishedLog
    from dlscale.studies.base import SampleLoss as SampleLoss
    from dlscale.studies.base import Study as Study

#: Modules of the names above, each imported when it is asked for.
PLACES = {
    **dict.fromkeys(("Study", "Metrics", "SampleLoss", "PublishedLog"), "dlscale.studies.base"),
    **dict.fromkeys(("Metric", "LossInfo"), "dlscale.core.metrics"),
    **dict.fromkeys(("UserError", "Refused"), "dlscale.core.errors"),
    **dict.fromkeys(("DatasetKind", "Part", "RawFile", "RowSamples", "Outline"), "dlscale.data.kind"),
    "ArraySource": "dlscale.data.source",
    "DatasetSettings": "dlscale.config.dataset",
    "Manifest": "dlscale.data.manifest",
    "Sharding": "dlscale.parallel.sharding",
    "Strict": "dlscale.core.schema",
}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'dlscale' has no attribute {name!r}")
    return getattr(importlib.import_module(PLACES[name]), name)
