"""An ordered set of runs that answers one question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

from pydantic import Field, PositiveInt, SkipValidation, ValidationInfo, create_model, field_validator, model_validator

from dlscale.config.run import LOCAL_BATCH_SIZE, Run, components
from dlscale.config.sweep import Sweep, label
from dlscale.core import registry
from dlscale.core.errors import unknown
from dlscale.core.machine import NEEDS
from dlscale.core.schema import Name, Strict, partial
from dlscale.core.settings import nested
from dlscale.core.stages import RUN_STAGES, STAGES

if TYPE_CHECKING:
    Measurement: TypeAlias = str
    Need: TypeAlias = str
else:
    Measurement, Need = Literal[RUN_STAGES], Literal[tuple(NEEDS)]


class Plan(Strict):
    """Runs of one study.

    The settings are validated once they are merged; `plan_class` says in the JSON schema what they may be.
    """

    study: Name
    kind: Literal["set", "ladder", "tune", "sweep"] = Field(
        "set",
        description="set: each run stands on the plan's settings; ladder: each keeps what those before it changed; "
        "tune: a set whose runs go through the stage tune, unless `measure` says another; sweep: a set whose runs "
        "`sweep` makes, and that train, unless `measure` says more.",
    )
    title: str | None = Field(None, description="What the report calls the plan; its name if absent.")
    from_: str | None = Field(None, alias="from", description="Start from the settings of this run, written plan.run.")
    settings: Any = Field({}, description="Settings common to all runs of the plan.")
    measure: list[Measurement] = Field(
        [name for name in RUN_STAGES if STAGES[name].usual],
        min_length=1,
        description="Stages that each run goes through.",
    )
    only: dict[Measurement, list[Name]] = Field(
        {}, description="Runs that alone go through a stage of `measure`, by stage; the others skip it."
    )
    sweep: Sweep | None = Field(None, description="Of kind sweep: what its trials, which are its runs, vary.")
    runs: dict[Name, Any] = Field(
        {},
        min_length=1,
        validate_default=True,
        description="Settings by run, in order; `{use: plan.run}` names a run that another plan has. Of a sweep "
        "its trials.",
    )

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, data: Any) -> Any:
        usual = {"tune": ["tune"], "sweep": ["train"]}
        if isinstance(data, dict) and data.get("kind") in usual and data.get("measure") is None:
            return {**data, "measure": usual[data["kind"]]}
        return data

    @field_validator("runs", mode="before")
    @classmethod
    def _trials(cls, runs: Any, info: ValidationInfo) -> Any:
        if info.data.get("kind") != "sweep":
            if runs == {}:
                raise ValueError("a plan needs runs: their names, each with the settings that are its own, if any")
            return runs
        if runs:
            raise ValueError("a sweep makes its runs itself; leave them out, or use kind set")
        if "sweep" not in info.data:  # it is wrong, which is said already
            return {"unknown": {}}
        if info.data["sweep"] is None:
            raise ValueError("a sweep needs the key sweep; for example {over: {optimizer.lr: [1e-3, 1e-2]}}")
        trials = info.data["sweep"].runs.items()
        return {name: {"label": label(values), **nested(values)} for name, values in trials}

    @model_validator(mode="after")
    def _swept(self) -> Plan:
        if self.sweep is not None and self.kind != "sweep":
            raise ValueError(f"sweep: a plan of kind {self.kind} has none; write kind: sweep")
        if self.halves and (self.measure != ["train"] or self.only):
            raise ValueError("measure: successive halving trains, no more; measure the best trial in a plan of its own")
        return self

    @model_validator(mode="after")
    def _only_what_is_there(self) -> Plan:
        for stage, names in self.only.items():
            if stage not in self.measure:
                raise ValueError(f"only.{stage}: the plan does not measure it; add {stage} to measure")
            for name in names:
                if name not in self.runs:
                    raise ValueError(f"only.{stage}: {unknown('run', name, self.runs)}")
        return self

    @property
    def halves(self) -> bool:
        """Whether only the best of its runs train to the end."""
        return self.sweep is not None and self.sweep.method == "halving"

    def stages(self, run: str) -> list[str]:
        """Return the stages that a run of the plan goes through."""
        return [stage for stage in self.measure if run in self.only.get(stage, [run])]


def study_settings() -> Any:
    """Return what may stand for a study: changes to its runs' settings, or the path of a study from outside."""
    overrides: Any = _overrides()
    unchecked: Any = SkipValidation  # until it is merged
    return unchecked[overrides | str | None]


def plan_class() -> type[Plan]:
    """Return the class of plans with the settings of all studies that are registered now."""
    settings: Any = _overrides()
    unchecked: Any = SkipValidation  # until it is merged
    needs = "Leave the run out, and say so, where the machine that runs the workflow lacks one of these."
    use = "Name a run of another plan, written plan.run, instead of its keys."
    fields: dict[str, Any] = {
        "use": (str | None, Field(None, description=use)),
        "needs": (list[Need], Field([], description=needs)),
    }
    named: Any = create_model("NamedRunSettings", __base__=settings, **fields)
    own: dict[str, Any] = {
        "settings": (unchecked[settings | None], Plan.model_fields["settings"]),
        "runs": (dict[Name, unchecked[named | None]], Plan.model_fields["runs"]),
    }
    return create_model("Plan", __base__=Plan, __doc__="Runs of one study.", **own)


def _overrides() -> Any:
    """Return a model of overrides: every key of a run optional, each component any study's."""
    kinds: dict[str, list[Any]] = {}
    for study in registry.studies():
        for key, (annotation, _) in components(study).items():
            kinds.setdefault(key, []).append(annotation)
    unions: dict[str, Any] = {key: (Union[tuple(dict.fromkeys(each))], ...) for key, each in kinds.items()}  # noqa: UP007
    settings: Any = partial(create_model("Run", __base__=Run, **unions), without=("study",))
    local: Any = (PositiveInt | None, Field(None, description=LOCAL_BATCH_SIZE))
    return create_model("RunSettings", __base__=settings, __doc__=settings.__doc__, local_batch_size=local)
