"""dlscale: a PyTorch model and a dataset become a measured, reproducible scaling study.

What the author of a study needs is imported from here: `from dlscale import Study, Metric, DatasetKind`.
"""

from __future__ import annotations

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


def __getattr__(name: str) -> Any:
    from dlscale.core.registry import public

    return public(name)
