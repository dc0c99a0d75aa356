"""Series of published speeds, to which the scaling model is fitted."""

from __future__ import annotations

from pydantic import Field

from dlscale.config.resolve import StudyFile
from dlscale.core.record import Record
from dlscale.core.schema import Name
from dlscale.core.settings import validate


class Series(Record):
    """Published speeds of one program on one machine."""

    title: str
    machine: Name  #: Name of the machine in `extensions/predict/machines.yaml`.
    parameters: int = Field(ge=1)
    gradient_bytes: int = Field(4, ge=1)  #: Bytes per gradient element that devices exchange.
    collectives: int | None = Field(
        None, ge=1
    )  #: Published number of collectives per step; None: computed from PyTorch's buckets.
    fit: int = Field(8, ge=1)  #: Figures on up to this number of GPUs are fitted; figures on more GPUs are predicted.
    valid_samples: int | None = Field(None, ge=1)  #: Number of samples of a validation.
    workers: int = Field(1, ge=1)  #: Number of loader workers per device that load separate batches; 1 for DALI.
    loaded: float | None = Field(None, gt=0)  #: Rate of one device's loader, measured with another model, samples/s.
    tokens: tuple[int, int, int] | None = None  #: Tokens of a sample, width of a token, number of blocks.


def series_of(file: StudyFile) -> dict[str, Series]:
    """Return the published series in a study's YAML file, by name."""
    return {name: validate(Series, series, f"series.{name}") for name, series in file.series.items()}
