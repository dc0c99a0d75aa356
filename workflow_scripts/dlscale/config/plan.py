"""An ordered set of runs that answers one question."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, Union

from pydantic import Field, SkipValidation, ValidationInfo, create_model, field_validator, model_validator

from dlscale.config.laws import Law, Lawful
from dlscale.config.records import PlanKind
from dlscale.config.run import LOCAL_BATCH_SIZE, Run, components
from dlscale.config.scaling import Convergence, Made, Scaling
from dlscale.config.sweep import Sweep, label
from dlscale.core import registry
from dlscale.core.errors import unknown
from dlscale.core.machine import NEEDS
from dlscale.core.schema import BatchSize, Name, partial
from dlscale.core.settings import nested
from dlscale.core.stages import RUN_STAGES, STAGES

if TYPE_CHECKING:
    Measurement: TypeAlias = str
    Need: TypeAlias = str
else:
    Measurement, Need = Literal[RUN_STAGES], Literal[tuple(NEEDS)]

#: What a plan of a kind measures unless it says so; others do what is usual.
USUAL = {
    "tune": ["tune"],
    "sweep": ["train"],
    "weak_scaling": ["throughput"],
    "strong_scaling": ["throughput"],
    "convergence": ["train"],
    "parallelism": ["throughput"],
}

#: The block that makes the runs of a kind, with an example.
BLOCKS = {
    "sweep": ("sweep", "{over: {optimizer.lr: [1e-3, 1e-2]}}"),
    "weak_scaling": ("scaling", "{devices: [1, 2, 4], batch_sizes: [64]}"),
    "strong_scaling": ("scaling", "{devices: [1, 2, 4], batch_sizes: [64]}"),
    "convergence": ("convergence", "{batch_sizes: [64, 256], scaling: [sqrt], seeds: [0, 1]}"),
}

#: The kinds of plans that have a block.
KINDS = {block: [kind for kind, (name, _) in BLOCKS.items() if name == block] for block, _ in BLOCKS.values()}


class Plan(Lawful):
    """Runs of one study.

    The settings are validated once they are merged; `plan_class` says in the JSON schema what they may be.
    """

    study: Name = Field(description="The study whose runs they are.")
    kind: PlanKind = Field(
        "set",
        description="set: each run stands on the plan's settings; ladder: each keeps what those before it changed; "
        "tune: a set whose runs go through the stage tune, unless `measure` says another; sweep: a set whose runs "
        "`sweep` makes, and that train, unless `measure` says more; weak_scaling, strong_scaling: a set on more and "
        "more devices, which `scaling` makes, of which throughput is measured; convergence: a set of larger and larger "
        "batches, which `convergence` makes, and that train; parallelism: a set whose runs share the model in several "
        "ways, of which throughput and memory are measured.",
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
    repeat: int = Field(
        1,
        ge=1,
        le=100,
        description="How many times each run trains, with its seed and those after it: the page shows the mean and how "
        "far the trainings are apart. Throughput and profiles are of the first one alone.",
    )
    sweep: Sweep | None = Field(None, description="Of kind sweep: what its trials, which are its runs, vary.")
    scaling: Scaling | None = Field(
        None, description="Of kind weak_scaling and strong_scaling: on how many devices, with which batches."
    )
    convergence: Convergence | None = Field(
        None, description="Of kind convergence: which batch sizes, rules for the learning rate and seeds."
    )
    runs: dict[Name, Any] = Field(
        {},
        min_length=1,
        validate_default=True,
        description="Settings by run, in order; `{use: plan.run}` names a run that another plan has. Of a sweep "
        "its trials. Beside those that `scaling` or `convergence` makes; `{use: plan.run}` under the name of one of "
        "these takes its place.",
    )

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("measure") is None and str(data.get("kind")) in USUAL:
            return {**data, "measure": USUAL[data["kind"]]}
        return data

    @field_validator("settings")
    @classmethod
    def _are_of_runs(cls, settings: Any) -> Any:
        own = {field.alias or name for name, field in cls.model_fields.items()} - Run.model_fields.keys()
        if isinstance(settings, dict) and (misplaced := sorted(own & settings.keys())):
            keys = " and ".join(misplaced)
            raise ValueError(f"the plan has the key {keys}, its runs do not: write it beside settings")
        return settings

    @field_validator("runs", mode="before")
    @classmethod
    def _made(cls, runs: Any, info: ValidationInfo) -> Any:
        """Put those that a block makes before those that are written."""
        kind = info.data.get("kind", "set")
        block, example = BLOCKS.get(kind, ("", ""))
        misplaced = any(info.data.get(name) for name, _ in BLOCKS.values() if name != block)
        if not runs and (misplaced or (block and block not in info.data)):
            return {"unknown": {}}  # another message says what is wrong
        made = info.data.get(block)
        if made is None:
            if block and (kind == "sweep" or not runs):
                raise ValueError(f"a plan of kind {kind} needs the key {block}; for example {example}")
            if runs == {}:
                raise ValueError("a plan needs runs: their names, each with the settings that are its own, if any")
            return runs
        if isinstance(made, Sweep):
            if runs:
                raise ValueError("a sweep makes its runs itself; leave them out, or use kind set")
            return {name: {"label": label(values), **nested(values)} for name, values in made.runs.items()}
        own = {name: each.needs for name, each in _runs(kind, made).items()}
        for name in own.keys() & runs.keys() if isinstance(runs, dict) else ():
            if not (isinstance(runs[name], dict) and "use" in runs[name]):
                raise ValueError(f"{name}: {block} makes this run; write {{use: plan.run}}, or take another name")
        return {**own, **runs} if isinstance(runs, dict) else runs

    LAWS: ClassVar[tuple[Law, ...]] = (
        *(
            (
                lambda its, block=block, kinds=kinds: getattr(its, block) is not None and its.kind not in kinds,
                f"{block}: a plan of kind {{its.kind}} has none; write kind: {' or '.join(kinds)}",
            )
            for block, kinds in KINDS.items()
        ),
        (
            lambda its: its.repeat > 1 and its.kind == "convergence",
            "repeat: a plan of kind convergence has other seeds by convergence.seeds",
        ),
        (
            lambda its: its.repeat > 1 and its.kind == "sweep",
            "repeat: a plan of kind sweep has other seeds by seed in sweep.over",
        ),
        (
            lambda its: its.repeat > 1 and "train" not in its.measure,
            "repeat: the plan does not train; add train to measure, or leave it out",
        ),
        (
            lambda its: its.halves and (its.measure != ["train"] or its.only),
            "measure: successive halving trains, no more; measure the best trial in a plan of its own",
        ),
    )

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

    @functools.cached_property
    def _of_block(self) -> dict[str, Made]:
        """The runs that a block makes, by name: all are asked for, one after the other."""
        block = self.scaling or self.convergence
        return _runs(self.kind, block) if block else {}

    def parts(self, run: str) -> list[tuple[str, Any]]:
        """Return what a run changes, each part with the key of the plan where it is written."""
        settings = self.runs[run]
        if self.kind == "sweep":
            return [("sweep.over", settings)]
        made = self._of_block.get(run)
        if made is None or "use" in settings:
            return [(f"runs.{run}", settings)]
        key = BLOCKS[self.kind][0]
        return [(f"{key}.{where}", part) for where, part in made.parts.items()]

    def stages(self, run: str) -> list[str]:
        """Return the stages that a run of the plan goes through."""
        return [stage for stage in self.measure if run in self.only.get(stage, [run])]


def _runs(kind: str, block: Scaling | Convergence) -> dict[str, Made]:
    return block.runs() if isinstance(block, Convergence) else block.runs(weak=kind == "weak_scaling")


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
    variants = (dict[Name, unchecked[settings | None]], Scaling.model_fields["variants"])
    scaling: Any = create_model("Scaling", __base__=Scaling, __doc__=Scaling.__doc__, variants=variants)
    own: dict[str, Any] = {
        "settings": (unchecked[settings | None], Plan.model_fields["settings"]),
        "scaling": (scaling | None, Plan.model_fields["scaling"]),
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
    local: Any = (BatchSize | None, Field(None, description=LOCAL_BATCH_SIZE))
    return create_model("RunSettings", __base__=settings, __doc__=settings.__doc__, local_batch_size=local)
