"""An ordered set of runs that answers one question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SkipValidation, create_model

from dlscale.runtime.machine import NEEDS
from dlscale.runtime.schema.base import Name, Strict, partial
from dlscale.runtime.schema.run import Run

#: Overrides of a run's keys; those of one run may be `{use: plan.run}` instead. They are validated once merged.
if TYPE_CHECKING:
    Settings = dict[str, Any]
    RunSettings = dict[str, Any]
else:
    _settings = partial(Run, without=("study",))
    _use = (str | None, Field(None, description="Name a run of another plan, written plan.run, instead of its keys."))
    _needs = (
        list[Literal[tuple(NEEDS)]],  # type: ignore[valid-type]
        Field(
            [],
            description="Leave the run out, and say so, where the machine that runs the workflow lacks one of these.",
        ),
    )
    Settings = SkipValidation[_settings | None]
    RunSettings = SkipValidation[create_model("NamedRunSettings", __base__=_settings, use=_use, needs=_needs) | None]

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
    runs: dict[Name, RunSettings] = Field(
        min_length=1, description="Settings by run, in order; `{use: plan.run}` names a run that another plan has."
    )
