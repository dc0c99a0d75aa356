"""An ordered set of runs that answers one question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SkipValidation

from dlscale.runtime.schema.base import Name, Strict, partial
from dlscale.runtime.schema.run import Run

#: Overrides of a run's keys, or `{use: plan.run}`; they are validated once merged.
if TYPE_CHECKING:
    Settings = dict[str, Any]
else:
    Settings = SkipValidation[partial(Run)]

Measurement = Literal["train", "throughput"]


class Plan(Strict):
    """Runs of one study."""

    study: Name
    kind: Literal["set", "ladder"] = Field(
        "set",
        description="set: each run stands on the plan's settings; ladder: each keeps what those before it changed.",
    )
    title: str | None = Field(None, description="What the report calls the plan; its name if absent.")
    from_: str | None = Field(None, alias="from", description="Start from the settings of this run, written plan.run.")
    settings: Settings = Field({}, description="Settings common to all runs of the plan.")
    measure: list[Measurement] = Field(
        ["train", "throughput"], min_length=1, description="Stages that each run goes through."
    )
    runs: dict[Name, Settings] = Field(
        min_length=1, description="Settings by run, in order; `{use: plan.run}` names a run that another plan has."
    )
