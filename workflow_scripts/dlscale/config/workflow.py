"""Pydantic models of the configuration file, its sections and its plans."""

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
    #: `Measurement`: stages that `measure` may name; for an external program, `train` means the stage `program`.
    #: `Need`: requirements that `needs` may name.
    Measurement, Need = Literal[tuple(name for name in RUN_STAGES if name != "program")], Literal[tuple(NEEDS)]

#: Default of `measure` by kind of plan; for other kinds, the stages with `usual` in the table of stages.
USUAL = {
    "tune": ["tune"],
    "sweep": ["train"],
    "weak_scaling": ["throughput"],
    "strong_scaling": ["throughput"],
    "convergence": ["train"],
    "parallelism": ["throughput"],
}

#: Kind of plan with generated runs → name of the block that generates them, and an example of the block.
BLOCKS = {
    "sweep": ("sweep", "{over: {optimizer.lr: [1e-3, 1e-2]}}"),
    "weak_scaling": ("scaling", "{devices: [1, 2, 4], batch_sizes: [64]}"),
    "strong_scaling": ("scaling", "{devices: [1, 2, 4], batch_sizes: [64]}"),
    "convergence": ("convergence", "{batch_sizes: [64, 256], scaling: [sqrt], seeds: [0, 1]}"),
}

#: Name of a block → kinds of plans whose runs the block generates.
KINDS = {block: [kind for kind, (name, _) in BLOCKS.items() if name == block] for block, _ in BLOCKS.values()}


def _of_programs(study: object) -> bool:
    return study in registry.studies() and bool(registry.study(str(study)).programs)


class Plan(Lawful):
    """Runs of one study.

    The settings of the runs are validated after they are merged with the study's. For the JSON schema, `workflow_class`
    adds the keys of these settings.
    """

    study: Name = Field(description="Study to which all runs of the plan belong.")
    kind: PlanKind = Field(
        "set",
        description="Relation between the runs. set: each run changes the plan's settings. ladder: each run also keeps "
        "the changes of the earlier runs. tune: a set for the stage tune. sweep: a set of trainings, which `sweep` "
        "generates. weak_scaling, strong_scaling: a set with increasing numbers of devices, which `scaling` generates, "
        "for the stage throughput. convergence: a set of trainings with increasing batch sizes, which `convergence` "
        "generates. parallelism: a set whose runs distribute the model in different ways, for the stage throughput. "
        "`measure` may name other stages.",
    )
    title: str | None = Field(None, description="Title of the plan in the report. Absent: the plan's name.")
    from_: str | None = Field(
        None, alias="from", description="Run, written plan.run, on whose settings this plan is based."
    )
    settings: Any = Field({}, description="Settings for all runs of the plan; a run may change these settings.")
    measure: list[Measurement] = Field(
        [name for name in RUN_STAGES if STAGES[name].usual],
        min_length=1,
        description="Stages that run for each run of the plan.",
    )
    only: dict[Measurement, list[Name]] = Field(
        {},
        description="Restriction of stages to some runs: for a stage of `measure`, the list of runs that have the "
        "stage. Other runs skip the stage.",
    )
    repeat: int = Field(
        1,
        ge=1,
        le=100,
        description="Trainings per run, with consecutive seeds (not for kinds sweep and convergence). The page shows "
        "mean and spread. Other stages run only for the first seed.",
    )
    sweep: Sweep | None = Field(None, description="For kind sweep, settings that the trials vary; each trial is a run.")
    scaling: Scaling | None = Field(
        None, description="For kinds weak_scaling and strong_scaling, numbers of devices and batch sizes."
    )
    convergence: Convergence | None = Field(
        None, description="For kind convergence, batch sizes, rules for the learning rate, and seeds."
    )
    runs: dict[Name, Any] = Field(
        {},
        min_length=1,
        validate_default=True,
        description="Settings by name of the run, in the order of tables and ladders; `{use: plan.run}` means a run of "
        "another plan. A sweep generates all of its runs. `scaling` and `convergence` generate further runs; "
        "`{use: plan.run}` under the name of a generated run replaces the generated run.",
    )

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("measure") is None and str(data.get("kind")) in USUAL:
            data = {**data, "measure": USUAL[data["kind"]]}
        scaling = data.get("scaling") if isinstance(data, dict) else None
        if isinstance(scaling, dict) and "variants" not in scaling and _of_programs(data.get("study")):
            # dlscale cannot remove the communication from an external program, so the variant `no_sync` is impossible.
            data = {**data, "scaling": {**scaling, "variants": {"program": {}}}}
        return data

    @field_validator("runs", mode="before")
    @classmethod
    def _made(cls, runs: Any, info: ValidationInfo) -> Any:
        """Put the runs that a block generates before the runs in the file."""
        kind = info.data.get("kind", "set")
        block, example = BLOCKS.get(kind, ("", ""))
        misplaced = any(info.data.get(name) for name, _ in BLOCKS.values() if name != block)
        if not runs and (misplaced or (block and block not in info.data)):
            return {"unknown": {}}  # a placeholder run, so that only the error in the block is reported
        made = info.data.get(block)
        if made is None:
            if block and (kind == "sweep" or not runs):
                raise ValueError(f"a plan of kind {kind} needs the key {block}; for example {example}")
            if runs == {}:
                raise ValueError("a plan needs runs: give each run a name and settings, which may be empty")
            return runs
        if isinstance(made, Sweep):
            if runs:
                raise ValueError("a sweep generates its runs; remove the key runs, or use kind set")
            return {name: {"label": label(values), **nested(values)} for name, values in made.runs.items()}
        own: dict[str, Any] = {name: {} for name in made.runs(kind)}
        for name in own.keys() & runs.keys() if isinstance(runs, dict) else ():
            if not (isinstance(runs[name], dict) and "use" in runs[name]):
                raise ValueError(f"{name}: {block} generates this run; write {{use: plan.run}}, or choose another name")
        return {**own, **runs} if isinstance(runs, dict) else runs

    LAWS: ClassVar[tuple[Law, ...]] = (
        *(
            (
                lambda plan, block=block, kinds=kinds: getattr(plan, block) is not None and plan.kind not in kinds,
                f"{block}: a plan of kind {{its.kind}} does not have this key; write kind: {' or '.join(kinds)}",
            )
            for block, kinds in KINDS.items()
        ),
        (
            lambda plan: plan.repeat > 1 and plan.kind == "convergence",
            "repeat: a plan of kind convergence cannot have this key; list the seeds in convergence.seeds",
        ),
        (
            lambda plan: plan.repeat > 1 and plan.kind == "sweep",
            "repeat: a plan of kind sweep cannot have this key; list the seeds under seed in sweep.over",
        ),
        (
            lambda plan: plan.repeat > 1 and "train" not in plan.measure,
            "repeat: the plan does not train; add train to measure, or remove repeat",
        ),
        (
            lambda plan: plan.kind == "sweep" and "train" not in plan.measure,
            "measure: a sweep ranks trained trials, so it needs the stage train; add train, or write the runs in a "
            "plan of kind set",
        ),
        (
            lambda plan: plan.halves and (plan.measure != ["train"] or plan.only),
            "measure: successive halving only has the stage train, for all trials; remove other stages and the key "
            "'only'. Measure the best trial in a separate plan",
        ),
    )

    @model_validator(mode="after")
    def _only_what_is_there(self) -> Plan:
        for stage, names in self.only.items():
            if stage not in self.measure:
                raise ValueError(f"only.{stage}: the plan lacks this stage; add {stage} to measure")
            if wrong := [name for name in names if name not in self.runs]:
                raise ValueError(f"only.{stage}: {unknown('run', wrong[0], self.runs)}")
        if idle := [name for name in self.runs if not self.stages(name)]:
            raise ValueError(f"only: run {idle[0]} has no stage left; add the run to a list in only, or remove the run")
        return self

    @property
    def halves(self) -> bool:
        return self.sweep is not None and self.sweep.method == "halving"

    @functools.cached_property
    def _made_by_block(self) -> dict[str, Parts]:
        block = self.scaling or self.convergence
        return block.runs(self.kind) if block else {}

    def parts(self, run: str) -> list[tuple[str, Any]]:
        """Return the settings that a run changes, as pairs: key of the plan, and settings that this key sets."""
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
    """Return a pydantic model with all keys of a run.

    A component, such as `model`, accepts the settings of any study.
    """
    kinds: dict[str, list[Any]] = {}
    for study in registry.studies():
        for key, (annotation, _) in components(study).items():
            kinds.setdefault(key, []).append(annotation)
    unions: dict[str, Any] = {key: (Union[tuple(dict.fromkeys(each))], ...) for key, each in kinds.items()}  # noqa: UP007
    use = "Run of another plan, written plan.run, that replaces this run in the plan; excludes all other keys."
    needs = "Requirements of the run; a machine that lacks a requirement skips the run and prints a notice."
    more: dict[str, Any] = {
        "local_batch_size": (BatchSize | None, Field(None, description=LOCAL_BATCH_SIZE)),
        "use": (str | None, Field(None, description=use)),
        "needs": (list[Need], Field([], description=needs)),
    }
    own: dict[str, Any] = {name: (field.annotation, field) for name, field in Run.model_fields.items()}
    del own["study"]
    return create_model(
        "RunSettings",
        __base__=Strict,
        __doc__="Settings of a run. They override the settings of its study.",
        **{**own, **unions, **more},
    )


class ReportPage(Strict):
    """Page of the report."""

    title: str = Field("dlscale report", description="Heading of the page.")


class Budget(Strict):
    """Maximum estimated cost of one call on a site with a scheduler.

    A call with a higher estimated cost is refused.
    """

    gpu_hours: NonNegativeFloat | None = Field(
        None, description="Maximum number of GPU-hours (GPUs x hours). Absent: no limit."
    )
    charged_hours: NonNegativeFloat | None = Field(
        None,
        description="Maximum sum of charged node-hours: node-hours multiplied by the `charge` of the queue (the first "
        "`full_charge_minutes` of a job count in full). If CPU nodes and GPU nodes have different accounts "
        "(`account_suffix`), the maximum applies to each account. Absent: no limit.",
    )


class Workflow(Strict):
    """Complete configuration: `config.yaml`, `--configfile` and `--config`, as merged by `snakemake`."""

    # Normalised, because Snakemake normalises its paths and would not recognise `./out/`.
    results: Annotated[str, AfterValidator(posixpath.normpath)] = Field(
        "results",
        pattern=r"^[^-{}*?\[\]\n][^{}*?\[\]\n]*$",  # wildcards of Snakemake; a leading dash is an option
        description="Folder for all results.",
    )

    targets: list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9*][A-Za-z0-9_*-]*$")]] = Field(
        min_length=1,
        description="Plans, or patterns (`*_demo`), that `snakemake` without arguments runs and reports.",
    )
    datasets: dict[Name, SerializeAsAny[DatasetSettings]] = Field(
        {}, description="Datasets by name, in addition to the datasets of the studies."
    )
    studies: dict[Name, Any] = Field(
        {},
        description="Changes to the default settings of runs, by study. To add a study, give the path of the study's "
        "Python file, relative to the folder of this configuration file. A YAML file of the same name must be next to "
        "the Python file.",
    )
    plans: dict[Name, Plan] = Field({}, description="Plans by name, in addition to the plans of the studies.")
    report: ReportPage = ReportPage()
    site: Site = Field(Site(), description="Machine and launcher of all stages; usually from a profile's site.yaml.")
    budget: Budget = Budget()


def workflow_class(*, of_runs: bool = True) -> type[Workflow]:
    """Return the configuration class for the studies and kinds of datasets that are registered now.

    With `of_runs`, the class includes the keys of runs, which the JSON schema and the messages need. Building these
    keys doubles the time of a command.
    """
    own: dict[str, Any] = {
        "datasets": (dict[Name, dataset_type()], Workflow.model_fields["datasets"]),  # type: ignore[misc]
    }
    if of_runs:
        unchecked: Any = SkipValidation  # settings are validated after they are merged
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
