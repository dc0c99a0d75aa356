"""The configuration file: its sections, and the plans of runs."""

from __future__ import annotations

import functools
import posixpath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, Union

from pydantic import (
    AfterValidator,
    Field,
    SerializeAsAny,
    SkipValidation,
    StringConstraints,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from dlscale.config.blocks import Convergence, Parts, Scaling, Sweep, label
from dlscale.config.dataset import DatasetSettings, dataset_type
from dlscale.config.laws import Law, Lawful
from dlscale.config.records import PlanKind
from dlscale.config.run import LOCAL_BATCH_SIZE, Run, components
from dlscale.config.site import Site
from dlscale.core import registry
from dlscale.core.errors import unknown
from dlscale.core.machine import NEEDS
from dlscale.core.schema import BatchSize, Name, NonNegativeFloat, Strict
from dlscale.core.settings import nested
from dlscale.core.stages import RUN_STAGES, STAGES

if TYPE_CHECKING:
    Measurement: TypeAlias = str
    Need: TypeAlias = str
else:
    #: A program runs where a plan says `train`.
    Measurement, Need = Literal[tuple(name for name in RUN_STAGES if name != "program")], Literal[tuple(NEEDS)]

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


def _of_programs(study: object) -> bool:
    return study in registry.studies() and bool(registry.study(str(study)).programs)


class Plan(Lawful):
    """Runs of one study.

    The settings are validated once they are merged; the JSON schema has their keys (`workflow_class`).
    """

    study: Name = Field(description="The study whose runs they are.")
    kind: PlanKind = Field(
        "set",
        description="set: each run changes the plan's settings; ladder: each run keeps the changes of those before "
        "it; tune: a set for the stage tune; sweep: a set that `sweep` makes and that trains; "
        "weak_scaling, strong_scaling: a set on more and more devices that `scaling` makes, measured for "
        "throughput; convergence: a set of larger and larger batches that `convergence` makes and that "
        "trains; parallelism: a set whose runs share the model in several ways, measured for throughput "
        "and memory. `measure` may name other stages.",
    )
    title: str | None = Field(None, description="What the report calls the plan; its name if absent.")
    from_: str | None = Field(
        None, alias="from", description="Run whose settings the plan starts from, written plan.run."
    )
    settings: Any = Field({}, description="Settings common to all runs of the plan.")
    measure: list[Measurement] = Field(
        [name for name in RUN_STAGES if STAGES[name].usual],
        min_length=1,
        description="Stages that each run goes through.",
    )
    only: dict[Measurement, list[Name]] = Field(
        {}, description="By stage of `measure`: the only runs that go through it; the others skip it."
    )
    repeat: int = Field(
        1,
        ge=1,
        le=100,
        description="Number of trainings of each run, with its seed and the following ones: the page shows their mean "
        "and spread. Throughput and profiles are measured for the first one alone.",
    )
    sweep: Sweep | None = Field(
        None, description="For kind sweep: the settings that its trials vary; each trial is a run."
    )
    scaling: Scaling | None = Field(
        None, description="For kinds weak_scaling and strong_scaling: numbers of devices, and batch sizes."
    )
    convergence: Convergence | None = Field(
        None, description="For kind convergence: batch sizes, rules for the learning rate, and seeds."
    )
    runs: dict[Name, Any] = Field(
        {},
        min_length=1,
        validate_default=True,
        description="Settings by run, in order; `{use: plan.run}` names a run of another plan. A sweep makes its runs "
        "itself. `scaling` and `convergence` make runs beside these; `{use: plan.run}` under the name of "
        "one of them replaces it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("measure") is None and str(data.get("kind")) in USUAL:
            data = {**data, "measure": USUAL[data["kind"]]}
        scaling = data.get("scaling") if isinstance(data, dict) else None
        if isinstance(scaling, dict) and "variants" not in scaling and _of_programs(data.get("study")):
            data = {**data, "scaling": {**scaling, "variants": {"program": {}}}}  # which cannot leave out an exchange
        return data

    @field_validator("runs", mode="before")
    @classmethod
    def _made(cls, runs: Any, info: ValidationInfo) -> Any:
        """Put the runs that a block makes before those that are written."""
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
        own: dict[str, Any] = {name: {} for name in made.runs(kind)}
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
            lambda its: its.kind == "sweep" and "train" not in its.measure,
            "measure: a sweep ranks trials that train; add train, or write the runs in a plan of kind set",
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
            if wrong := [name for name in names if name not in self.runs]:
                raise ValueError(f"only.{stage}: {unknown('run', wrong[0], self.runs)}")
        if idle := [name for name in self.runs if not self.stages(name)]:
            raise ValueError(f"only: run {idle[0]} goes through no stage; leave the run out, or name it there")
        return self

    @property
    def halves(self) -> bool:
        return self.sweep is not None and self.sweep.method == "halving"

    @functools.cached_property
    def _made_by_block(self) -> dict[str, Parts]:
        block = self.scaling or self.convergence
        return block.runs(self.kind) if block else {}

    def parts(self, run: str) -> list[tuple[str, Any]]:
        """Return what a run changes, each part with the key of the plan where it is written."""
        settings = self.runs[run]
        if self.kind == "sweep":
            return [("sweep.over", settings)]
        made = self._made_by_block.get(run)
        if made is None or "use" in settings:
            return [(f"runs.{run}", settings)]
        return [(f"{BLOCKS[self.kind][0]}.{where}", part) for where, part in made.items()]

    def stages(self, run: str) -> list[str]:
        return [stage for stage in self.measure if run in self.only.get(stage, [run])]


def _settings_class() -> Any:
    """Return a model of overrides: the keys of a run, each component any study's."""
    kinds: dict[str, list[Any]] = {}
    for study in registry.studies():
        for key, (annotation, _) in components(study).items():
            kinds.setdefault(key, []).append(annotation)
    unions: dict[str, Any] = {key: (Union[tuple(dict.fromkeys(each))], ...) for key, each in kinds.items()}  # noqa: UP007
    use = "Of a run of a plan: the name of another plan's run, written plan.run, in place of all other keys."
    needs = "Of a run of a plan: leave it out, and say so, where this machine lacks one of these."
    more: dict[str, Any] = {
        "local_batch_size": (BatchSize | None, Field(None, description=LOCAL_BATCH_SIZE)),
        "use": (str | None, Field(None, description=use)),
        "needs": (list[Need], Field([], description=needs)),
    }
    own: dict[str, Any] = {name: (field.annotation, field) for name, field in Run.model_fields.items()}
    del own["study"]
    return create_model(
        "RunSettings", __base__=Strict, __doc__="Changes of a run to its study's settings.", **{**own, **unions, **more}
    )


class ReportPage(Strict):
    """The report's page."""

    title: str = Field("dlscale report", description="Heading of the page.")


class Budget(Strict):
    """Greatest estimated cost of one call on a site with a scheduler; more is refused before anything is submitted."""

    gpu_hours: NonNegativeFloat | None = Field(None, description="GPUs x hours.")
    charged_hours: NonNegativeFloat | None = Field(None, description="Node-hours times the charge of their QOS.")


class Workflow(Strict):
    """All that `snakemake` reads from `config.yaml`, `--configfile` and `--config`."""

    # As Snakemake writes its files: of `./out/` it would know none.
    results: Annotated[str, AfterValidator(posixpath.normpath)] = Field(
        "results",
        pattern=r"^[^{}*?\[\]\n]+$",  # braces and stars are wildcards to Snakemake
        description="Folder of all results.",
    )

    targets: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9*][A-Za-z0-9_*-]*$")]] = Field(
        min_length=1, description="Plans that a bare `snakemake` runs and reports, by name or pattern (`*_demo`)."
    )
    datasets: dict[Name, SerializeAsAny[DatasetSettings]] = Field(
        {}, description="Datasets by name, beside those that the studies ship."
    )
    studies: dict[Name, Any] = Field(
        {},
        description="By study: changes to its default run settings; or, to add a study, the path of its Python file "
        "(relative to the folder of this file), with a YAML file of the same name beside it.",
    )
    plans: dict[Name, Plan] = Field({}, description="Plans by name, beside those that the studies ship.")
    report: ReportPage = ReportPage()
    site: Site = Field(Site(), description="Where and how commands run; usually from a profile's site.yaml.")
    budget: Budget = Budget()


def workflow_class(*, of_runs: bool = True) -> type[Workflow]:
    """Return the class of configurations with the studies and kinds of datasets that are registered now.

    `of_runs`: with the keys of runs, which the JSON schema and messages need; making it takes as long as all the rest.
    """
    own: dict[str, Any] = {
        "datasets": (dict[Name, dataset_type()], Workflow.model_fields["datasets"]),  # type: ignore[misc]
    }
    if of_runs:
        unchecked: Any = SkipValidation  # until they are merged
        settings: Any = unchecked[_settings_class() | None]
        variants = (dict[Name, settings], Scaling.model_fields["variants"])
        scaling: Any = create_model("Scaling", __base__=Scaling, __doc__=Scaling.__doc__, variants=variants)
        of_plan: dict[str, Any] = {
            "settings": (settings, Plan.model_fields["settings"]),
            "scaling": (scaling | None, Plan.model_fields["scaling"]),
            "runs": (dict[Name, settings], Plan.model_fields["runs"]),
        }
        plan: Any = create_model("Plan", __base__=Plan, __doc__="Runs of one study.", **of_plan)
        own["studies"] = (dict[Name, unchecked[settings | str]], Workflow.model_fields["studies"])
        own["plans"] = (dict[Name, plan], Workflow.model_fields["plans"])
    return create_model("Workflow", __base__=Workflow, __doc__=Workflow.__doc__, **own)
