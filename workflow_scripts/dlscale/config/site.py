"""Where and how commands run (a profile's `site.yaml`): engine, starter, nodes, queues."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from dlscale.config.laws import Law, Lawful
from dlscale.core.machine import NEEDS, WATCHDOG
from dlscale.core.schema import Name, NonNegativeFloat, NonNegativeInt, PositiveInt, Seconds, Strict
from dlscale.core.settings import validate
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.core.urls import has_secret

Engine = Literal["none", "auto", "docker", "podman", "podman-hpc", "shifter", "apptainer"]
Starter = Literal["auto", "direct", "torchrun", "srun", "mpirun"]

#: What a job does: a stage of a run, or one of the stages that make a dataset.
if TYPE_CHECKING:
    Job: TypeAlias = str
else:
    Job = Literal[("data", *RUN_STAGES)]

#: What an engine's options can carry: no engine's separators, no line ends.
Path_ = Annotated[str, StringConstraints(pattern=r"^/[^:;,\n\r]*$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Value = Annotated[str, StringConstraints(pattern=r"^[^\n\r]+$")]  # Shifter takes no empty ones


def _target(path: str) -> str:
    if re.match(r"^/(etc|var)(/|$)", path) or path.rstrip("/") in ("", "/opt"):
        raise ValueError(f"{path}: nothing may be mounted at /, /opt, /etc or /var of a container")
    return path


class Limits(Strict):
    """When the watchdog ends a run of several processes, one of which is gone or hangs."""

    silent: Annotated[Seconds, Field(ge=5)] = Field(
        25.0, description="Seconds without a sign of life of a process that its node reports as gone or stopped."
    )
    stuck: Annotated[Seconds, Field(ge=5)] = Field(
        45.0,
        description="Least seconds without progress in a loop of steps, or without a sign of life of a process that "
        "no other process can see.",
    )
    between: Annotated[Seconds, Field(ge=5)] = Field(
        600.0,
        description="Seconds without progress between epochs, while results and checkpoints are written.",
    )

    def __str__(self) -> str:
        return ":".join(f"{name}={value:g}" for name, value in self)

    @classmethod
    def told(cls) -> Limits | None:
        """Return the limits of the environment; None: the watchdog is off."""
        text = os.environ.get(WATCHDOG, "")
        if text == "off":
            return None
        limits = (word.partition("=") for word in text.split(":") if word)
        return validate(cls, {name: value for name, _, value in limits}, where=WATCHDOG)


class Qos(Strict):
    """What a quality of service allows and costs; absent limits are not checked."""

    max_nodes: PositiveInt | None = Field(None, description="Most nodes of a job.")
    max_gpus: PositiveInt | None = Field(None, description="Most GPUs of a job.")
    max_minutes: PositiveInt | None = Field(None, description="Most minutes of a job.")
    max_jobs: PositiveInt | None = Field(
        None, description="Maximum number of submitted jobs of a user; further jobs of a call wait. Absent: no limit."
    )
    charge: NonNegativeFloat = Field(1.0, description="Factor on the cost of a node-hour.")


class Nodes(Strict):
    """One kind of node."""

    partition: Annotated[str, StringConstraints(pattern=r"^[^\s:;|]+$")] | None = Field(
        None, description="Partition of these nodes (sbatch -p), or several: a,b; Slurm's default if absent."
    )
    constraint: str | None = Field(None, description="Features that select these nodes (sbatch -C).")
    account_suffix: str = Field("", description="End of the account's name for jobs on these nodes.")
    cpus: PositiveInt = Field(description="CPUs of a node, as Slurm counts them (hardware threads).")
    memory_mb: PositiveInt | None = Field(
        None,
        description="Memory of a node that jobs may ask for: each asks for a share equal to its share of the GPUs or "
        "CPUs (sbatch --mem). Absent: jobs ask for none, and Slurm's default holds.",
    )
    gpus: NonNegativeInt = Field(0, description="GPUs of a node.")
    gres: str = Field("gpu", description="Name of a GPU in --gres, such as gpu or gpu:a100.")
    gpu: str | None = Field(
        None,
        description="Part of the GPUs' name, such as A100: rates measured on other GPUs do not count here. If absent, "
        "the name in `gres`.",
    )

    @property
    def gpu_name(self) -> str:
        """Part of the GPUs' name, as the driver has it; empty where the site does not say."""
        if not self.gpus:
            return ""
        known = re.search(r"[a-z]+\d+", self.gres.partition(":")[2].lower())
        return self.gpu or (known[0] if known else "")


class Scheduler(Strict):
    """Slurm: what to ask for."""

    account: str | None = Field(None, description="Project to charge; $SBATCH_ACCOUNT if absent.")
    cpu_nodes: Nodes = Field(description="Nodes of data stages.")
    gpu_nodes: Nodes = Field(description="Nodes of runs.")
    data_cpus: PositiveInt = Field(32, description="CPUs of a data stage.")
    data_qos: str | None = Field(None, description="QOS of data stages.")
    part_qos: str | None = Field(None, description="QOS of runs on part of a node.")
    whole_qos: str | None = Field(None, description="QOS of runs on whole nodes, and of parts too large for part_qos.")
    qos: dict[str, Qos] = Field({}, description="Limits and charges by QOS.")
    minutes: dict[Job, PositiveInt] = Field(
        {},
        description="Greatest time limits, in minutes, of stages whose speed is unknown; `data`: of all data stages.",
    )
    warning_seconds: PositiveInt = Field(
        120, description="Seconds before its time limit at which training is told to save (sbatch --signal)."
    )
    acquire: Literal["here", "job"] = Field(
        "here",
        description="Where files are fetched: beside Snakemake (for compute nodes without a network), or in a job.",
    )

    def limit(self, job: Job) -> int:
        """Return the default time limit of a job, in minutes."""
        return self.minutes.get(job) or (STAGES[job].minutes if job in STAGES else 60)


class Build(Strict):
    """How `snakemake image` builds a local image."""

    target: Literal["cpu", "gpu"] = Field("cpu", description="Target of docker/Dockerfile.")
    arguments: dict[Variable, Annotated[str, StringConstraints(pattern=r"^[^\n\r]*$")]] = Field(
        {}, description="Build arguments, such as BASE_IMAGE."
    )


class Site(Lawful):
    """Where and how commands run."""

    engine: Engine = Field("none", description="Container engine; auto: the first that works here.")
    image: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9/][A-Za-z0-9._/:@+-]*$",
        description="Image of the stages; `snakemake image` builds (localhost/…) or pulls it.",
    )
    build: Build = Build()
    starter: Starter = Field(
        "auto", description="What starts several processes; auto: srun with a scheduler, else torchrun."
    )
    start: list[Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\n\r]*$")]] = Field(
        [],
        description="For mpirun: the words that start all processes of a run; mpirun -n {ranks} if absent. For "
        "torchrun on several nodes: the words that start it on each node. {ranks}, {ranks_per_node} and "
        "{nodes} are replaced.",
    )
    rendezvous: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.\[\]:-]+:[0-9]+$",
        description="For torchrun on several nodes: name and a free port of the first node, where they meet.",
    )
    local_disk: str | None = Field(
        None,
        pattern=r"^[/$][^:;,\n\r]*$",
        description="Folder on each node's own disk, for loader.staging local; may contain variables of the job.",
    )
    watchdog: Limits | None = Field(
        Limits(),
        description="When a run ends one of whose processes is gone or hangs; null: it waits.",
    )
    gpu: bool | None = Field(
        None,
        description="Whether runs are on GPUs: their containers get them, and a stage that sees none ends. Absent: "
        "true if the nodes, or without a scheduler this machine, have any.",
    )
    gpu_order: list[NonNegativeInt] | None = Field(
        None,
        description="Numbers of a node's GPUs, the one nearest to the first CPUs first: local ranks of runs on whole "
        "nodes take them in this order. Absent: in the order of their numbers.",
    )
    grams_per_kwh: NonNegativeFloat | None = Field(
        None, description="CO₂ of the site's electricity, g/kWh: pages tell it beside the energy of scaling."
    )
    modules: list[Name] = Field(
        [], description="Modules of Shifter (--module=a,b) or podman-hpc (--a --b), for containers with GPUs."
    )
    provides: list[Literal[tuple(NEEDS)]] | None = Field(  # type: ignore[valid-type]
        None,
        description="Which of runs' `needs` the containers have, from the image or the node; absent: those of this "
        "machine.",
    )
    mounts: dict[Path_, Annotated[Path_, AfterValidator(_target)]] = Field(
        {},
        description="Further folders for containers, beside the working folder and the data: path here -> path in the "
        "container.",
    )
    environment: dict[Variable, Value] = Field({}, description="Environment variables of every stage.")
    packages: Annotated[Path_, AfterValidator(_target)] | None = Field(
        None,
        description="Folder of further Python packages for all stages (pip install --target FOLDER NAME). They hide "
        "no package of the image or environment.",
    )
    scheduler: Scheduler | None = None

    @property
    def ordered(self) -> int:
        order = self.gpu_order or []
        return self.scheduler.gpu_nodes.gpus if self.scheduler and order else len(order)

    @model_validator(mode="after")
    def _keeps_secrets(self) -> Site:
        for name, value in self.environment.items():
            if has_secret(value) or re.search("(TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY)$", name, re.IGNORECASE):
                raise ValueError(
                    f"environment.{name}: a secret, or an address with a login, which every command line would show; "
                    "export it before the call"
                )
        return self

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            # The executor takes from a job's command the variables by which mpirun would know the job's nodes.
            lambda its: its.scheduler and its.starter in ("torchrun", "mpirun"),
            "starter: {its.starter} is for machines without a scheduler; use srun",
        ),
        (
            lambda its: its.scheduler and its.engine == "auto",
            "engine: auto may mean another engine on each node; name one",
        ),
        (
            lambda its: its.start and its.starter not in ("mpirun", "torchrun"),
            "start: these words are those of starter mpirun or torchrun; it is {its.starter}",
        ),
        (
            lambda its: its.rendezvous and its.starter != "torchrun",
            "rendezvous: only torchrun meets there; the starter is {its.starter}",
        ),
        (
            lambda its: "$" in (its.local_disk or "") and its.engine not in ("none", "shifter"),
            "local_disk: {its.local_disk}: a container of {its.engine} has none of the job's variables",
        ),
        (
            lambda its: {*re.findall(r"\{\w+\}", " ".join(its.start))} - {"{ranks}", "{ranks_per_node}", "{nodes}"},
            "start: {its.start}: in braces expected {{ranks}}, {{ranks_per_node}} or {{nodes}}",
        ),
        (
            lambda its: sorted(its.gpu_order or []) != [*range(its.ordered)],
            "gpu_order: {its.gpu_order}: expected each of a node's {its.ordered} GPUs once, from 0",
        ),
    )
