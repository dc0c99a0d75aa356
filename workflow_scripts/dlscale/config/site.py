"""Settings of a site (a profile's `site.yaml`): container engine, starter, nodes and queues."""

from __future__ import annotations

import functools
import logging
import os
import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from dlscale.config.laws import Law, Lawful
from dlscale.core.errors import unknown
from dlscale.core.machine import NEEDS, WATCHDOG
from dlscale.core.schema import Name, NonNegativeFloat, NonNegativeInt, PositiveInt, Seconds, Strict
from dlscale.core.settings import validate
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.core.urls import has_secret

Engine = Literal["none", "auto", "docker", "podman", "podman-hpc", "shifter", "apptainer", "enroot"]
Starter = Literal["auto", "direct", "torchrun", "srun", "mpirun"]

#: Kind of a job: a stage of a run, or `data` for the stages that make a dataset.
if TYPE_CHECKING:
    Job: TypeAlias = str
else:
    Job = Literal[("data", *RUN_STAGES)]

#: Absolute path without colon, semicolon, comma and line end, which some engines do not accept in options.
Path_ = Annotated[str, StringConstraints(pattern=r"^/[^:;,\n\r]*$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Value = Annotated[str, StringConstraints(pattern=r"^[^\n\r]+$")]  # Shifter does not accept empty values


def _target(path: str) -> str:
    if re.match(r"^/(etc|var)(/|$)", path) or path.rstrip("/") in ("", "/opt"):
        raise ValueError(f"{path}: a container does not allow mounts at /, /opt, /etc or /var; choose another path")
    return path


#: Options for the numbers of nodes, tasks, CPUs and GPUs; dlscale sets these options from a run's geometry.
_COUNTS = (
    "--(nodes|ntasks|ntasks-per-(node|gpu|socket)|tasks-per-node|cpus-per-(task|gpu)|gpus|gpus-per-(node|task|socket))"
    r"(?![\w-])|-[NncGK](?![a-zA-Z-])"
)
#: Options of srun and of sbatch that users cannot add, because dlscale sets them.
SET_FOR_SRUN = re.compile(rf"(?<!\S)(?:{_COUNTS}|--kill-on-bad-exit(?![\w-]))")
SET_FOR_SBATCH = re.compile(
    rf"(?<![^\s'\"])(?:{_COUNTS}|--(account|partition|qos|constraint|gres|mem|mem-per-(cpu|gpu)|time|signal|requeue)"
    r"(?![\w-])|-[ApqCt](?![a-zA-Z-]))"
)


class Limits(Strict):
    """Timeouts after which the watchdog ends a run because a process is gone or hangs."""

    silent: Annotated[Seconds, Field(ge=5)] = Field(
        25.0,
        description="Timeout, seconds, for the heartbeat of a process that another process of its node reports as "
        "ended or stopped.",
    )
    stuck: Annotated[Seconds, Field(ge=5)] = Field(
        45.0,
        description="Minimum timeout, seconds, for progress in a loop of steps; also the timeout for the heartbeat of "
        "a process whose state no other process can observe.",
    )
    between: Annotated[Seconds, Field(ge=5)] = Field(
        600.0,
        description="Timeout, seconds, for progress between epochs, when results and checkpoints are written. "
        "While data are opened and code is compiled, the timeout is three times as long, at most 30 minutes.",
    )

    def __str__(self) -> str:
        return ":".join(f"{name}={value:g}" for name, value in self)

    @classmethod
    def from_environment(cls) -> Limits | None:
        """Return the limits from the environment; None if the watchdog is off."""
        text = os.environ.get(WATCHDOG, "")
        if text == "off":
            return None
        limits = (word.partition("=") for word in text.split(":") if word)
        return validate(cls, {name: value for name, _, value in limits}, where=WATCHDOG)


class Queue(Strict):
    """Partition and quality of service (QOS) of jobs, with limits and charge; absent limits are not checked."""

    partition: Annotated[str, StringConstraints(pattern=r"^[^\s:;|]+$")] | None = Field(
        None, description="Partition (sbatch -p), or several partitions, such as a,b. Absent: Slurm's default."
    )
    qos: str | None = Field(None, description="QOS (sbatch --qos). Absent: Slurm's default.")
    max_nodes: PositiveInt | None = Field(None, description="Maximum number of nodes per job.")
    max_gpus: PositiveInt | None = Field(
        None, description="Maximum number of GPUs per job; if the nodes have no GPUs, maximum number of processes."
    )
    max_minutes: PositiveInt | None = Field(None, description="Maximum time limit of a job, minutes.")
    min_minutes: PositiveInt = Field(1, description="Minimum time limit of a job, minutes.")
    max_jobs: PositiveInt | None = Field(
        None,
        description="Maximum number of submitted jobs per user; further jobs of a call wait. Absent: no limit.",
    )
    charge: NonNegativeFloat = Field(1.0, description="Factor by which the cost of a node-hour is multiplied.")
    full_charge_minutes: NonNegativeInt = Field(
        0, description="Minutes at the beginning of each job for which the cost is not multiplied by `charge`."
    )
    whole_nodes: bool = Field(
        False, description="Whether jobs get and pay for complete nodes, even if they use only a part."
    )


class Nodes(Strict):
    """Resources of one kind of node."""

    constraint: str | None = Field(None, description="Features that select these nodes (sbatch -C).")
    account_suffix: str = Field("", description="Suffix that is appended to the account for jobs on these nodes.")
    cpus: PositiveInt = Field(description="CPUs of a node; like Slurm, count each hardware thread as a CPU.")
    memory_mb: PositiveInt | None = Field(
        None,
        description="Memory of a node for jobs, MB. A job requests a fraction of this memory (sbatch --mem), equal to "
        "the fraction of the node's GPUs or CPUs that the job uses. Absent: jobs without `geometry.memory_mb` "
        "request no memory, so Slurm's default applies.",
    )
    gpus: NonNegativeInt = Field(0, description="Number of GPUs of a node.")
    fixed_share: bool = Field(
        False,
        description="Whether Slurm gives each GPU a fixed number of CPUs and a fixed amount of memory. If true, runs "
        "with geometry.cpus or geometry.memory_mb are refused.",
    )
    gres: str = Field("gpu", description="Name of the GPUs in --gres, such as gpu or gpu:a100.")
    gpu: str | None = Field(
        None,
        description="Part of the GPUs' name, such as A100. Costs on this site are not estimated from measurements on "
        "other GPUs. Absent: the name in `gres`.",
    )

    @property
    def gpu_name(self) -> str:
        """Part of the GPUs' name as the driver reports it.

        The name is empty if the nodes have no GPUs, or if neither `gpu` nor `gres` contains a name.
        """
        if not self.gpus:
            return ""
        known = re.search(r"[a-z]+\d+", self.gres.partition(":")[2].lower())
        return self.gpu or (known[0] if known else "")


#: Former keys of `scheduler`. `queues` replaces them, and the former key `partition` of `cpu_nodes` and `gpu_nodes`.
OLD_KEYS = ("data_qos", "part_qos", "whole_qos", "qos")
_warn_once = functools.cache(logging.warning)


def _with_queues(raw: Any) -> Any:
    # Before `queues` existed, runs on part of a node took `part_qos`, up to its `max_gpus`. Other runs took
    # `whole_qos`, and paid for full nodes if the two QOS differed.
    try:
        nodes = {key: dict(raw[key]) for key in ("cpu_nodes", "gpu_nodes")}
        limits = {name: dict(each or {}) for name, each in dict(raw.get("qos") or {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return raw  # a key is missing or has a wrong type, which the validation reports
    at = {f"{key}.partition": each.pop("partition") for key, each in nodes.items() if "partition" in each}
    if not (old := [key for key in OLD_KEYS if key in raw] + [*at]):
        return raw
    if {"queues", "run_queues", "data_queue"} & raw.keys():
        raise ValueError(f"{', '.join(old)}: cannot be combined with queues; set run_queues or data_queue instead")
    data, part, whole, _ = (raw.get(key) for key in OLD_KEYS)

    def queue(qos: str | None, kind: str = "gpu_nodes", **more: Any) -> dict[str, Any]:
        limit = {"partition": at.get(f"{kind}.partition"), "qos": qos, **limits.get(qos or "", {})}
        return {key: value for key, value in {**limit, **more}.items() if value}

    most = min(int(gpus := nodes["gpu_nodes"].get("gpus", 0)) - 1, int(limits.get(part, {}).get("max_gpus") or gpus))
    small = {part: queue(part, max_nodes=1, max_gpus=most)} if part and part != whole and most > 0 else {}
    large = {whole or "no_qos": queue(whole, whole_nodes=bool(whole) and whole != part)}
    queues = {name: queue(name) for name in limits if name} | small | large
    name = data if data in queues and at.get("cpu_nodes.partition") == at.get("gpu_nodes.partition") else "data_stages"
    queues.setdefault(name, queue(data, "cpu_nodes", whole_nodes=bool(data) and data == whole != part))
    new = {"queues": queues, "run_queues": [*small, *large], "data_queue": name}
    _warn_once(f"site.scheduler: {', '.join(old)}: replaced by queues (docs/sites.md). Write {new}")
    return {key: value for key, value in {**raw, **nodes, **new}.items() if key not in OLD_KEYS}


class Scheduler(Strict):
    """Resources that jobs request from Slurm."""

    account: str | None = Field(None, description="Project that is charged. Absent: $SBATCH_ACCOUNT.")
    cpu_nodes: Nodes = Field(description="Nodes for data stages.")
    gpu_nodes: Nodes = Field(description="Nodes for runs.")
    data_cpus: PositiveInt = Field(
        32,
        description="CPUs per job of a data stage. If gpu_nodes have no GPUs, also the CPUs per process of a run "
        "without geometry.cpus.",
    )
    queues: dict[str, Queue] = Field({}, description="Queues, by names of your choice.")
    run_queues: list[str] = Field(
        [],
        description="Queues of runs, in order of preference: a run takes the first queue that allows its numbers of "
        "nodes and GPUs, whatever its time limit. Absent: Slurm's defaults.",
    )
    data_queue: str | None = Field(None, description="Queue of data stages. Absent: Slurm's defaults.")
    minutes: dict[Job, PositiveInt] = Field(
        {},
        description="Time limits, minutes, by stage, for jobs whose speed is unknown. The key `data` sets the limit of "
        "all data stages.",
    )
    warning_seconds: PositiveInt = Field(
        120,
        description="Time before the job's limit, seconds, at which training gets a signal to save (sbatch --signal).",
    )
    acquire: Literal["here", "job"] = Field(
        "here",
        description="Where files are downloaded. here: on the node where `snakemake` runs, for compute nodes without "
        "a network. job: in a job on a compute node.",
    )

    _before_queues = model_validator(mode="before")(_with_queues)

    @model_validator(mode="after")
    def _names_queues(self) -> Scheduler:
        for name in sorted({*self.run_queues, *filter(None, [self.data_queue])} - self.queues.keys()):
            raise ValueError(f"run_queues, data_queue: {unknown('queue', name, self.queues)}")
        return self

    def limit(self, job: Job) -> int:
        """Return the time limit, minutes, of a job whose speed is unknown."""
        return self.minutes.get(job) or (STAGES[job].minutes if job in STAGES else 60)


class Build(Strict):
    """Options with which `snakemake image` builds a local image."""

    target: Literal["cpu", "gpu"] = Field("cpu", description="Build target in docker/Dockerfile.")
    arguments: dict[Variable, Annotated[str, StringConstraints(pattern=r"^[^\n\r]*$")]] = Field(
        {}, description="Build arguments, such as BASE_IMAGE."
    )


class Site(Lawful):
    """Machine and launcher of all stages: containers, processes, nodes and queues."""

    engine: Engine = Field(
        "none",
        description="Container engine. auto: the first of shifter, podman-hpc, apptainer, enroot, podman and docker "
        "that works here, else none.",
    )
    image: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9/][A-Za-z0-9._/:@+-]*$",
        description="Container image of the stages: a name, or for apptainer and enroot the path of a .sif or .sqsh "
        "file. `snakemake image` builds an image called localhost/… and pulls an image with another name.",
    )
    build: Build = Build()
    starter: Starter = Field(
        "auto",
        description="Launcher of runs with several processes. auto: srun with a scheduler, otherwise torchrun. "
        "torchrun: dlscale's own launcher, which starts a process per device. direct: no launcher, so only one process "
        "starts.",
    )
    start: list[Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\n\r]*$")]] = Field(
        [],
        description="Command or options of the starter. mpirun: the command that starts all processes of a run "
        "(absent: mpirun -n {ranks}). torchrun: the command that starts the launcher once on each node of a run on "
        "several nodes. srun: further options. {ranks}, {ranks_per_node} and {nodes} are replaced by numbers.",
    )
    rendezvous: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.\[\]:-]+:[0-9]+$",
        description="Host name and free port of the first node (HOST:PORT), for torchrun on several nodes.",
    )
    local_disk: str | None = Field(
        None,
        pattern=r"^[/$][^:;,\n\r]*$",
        description="Folder on each node's local disk, for loader.staging local; may contain a job's environment "
        "variables.",
    )
    watchdog: Limits | None = Field(
        Limits(),
        description="Timeouts after which a run ends because one of its processes is gone or hangs. null: no "
        "watchdog; a run ends only if an exchange fails.",
    )
    log_seconds: Annotated[Seconds, Field(ge=0.1, le=60)] = Field(
        10.0, description="Interval at which a stage logs its progress and updates `dlscale status`, seconds."
    )
    gpu: bool | None = Field(
        None,
        description="true: containers of runs get access to the GPUs, and a run without a visible GPU fails. false: "
        "containers get no access; without containers, runs still use visible GPUs. Absent: true if the scheduler's "
        "gpu_nodes have GPUs; without a scheduler, runs use this machine's GPUs, if any.",
    )
    gpu_order: list[NonNegativeInt] | None = Field(
        None,
        description="Numbers of a node's GPUs in the order of local ranks, for runs on full nodes. The first GPU "
        "should be the closest to the node's first CPUs. Absent: GPUs in the order of their numbers.",
    )
    grams_per_kwh: NonNegativeFloat | None = Field(
        None,
        description="CO₂ emission of the site's electricity, g/kWh; scaling plans then show emissions next to the "
        "energy.",
    )
    modules: list[Name] = Field(
        [], description="Modules of Shifter (--module=a,b) or podman-hpc (--a --b) for containers with GPUs."
    )
    provides: list[Literal[tuple(NEEDS)]] | None = Field(  # type: ignore[valid-type]
        None,
        description="With containers: requirements (`needs` of runs) that the image or its node meets. On other nodes "
        "without containers: requirements that the nodes meet; the packages of dali and fp8 must also be installed "
        "here. Absent: the requirements that this machine meets.",
    )
    mounts: dict[Path_, Annotated[Path_, AfterValidator(_target)]] = Field(
        {},
        description="Additional folders for containers: a key is a path on the host, its value is the path in the "
        "container. The working folder and the data are always mounted.",
    )
    host_suffix: str = Field(
        "",
        pattern=r"^[A-Za-z0-9.-]*$",
        description="Suffix of node names in the network between nodes, such as -hsn0. Ranks on several nodes connect "
        "to the first node, whose address is its name with this suffix.",
    )
    fabric: Literal["slingshot", "infiniband", "ethernet"] | None = Field(
        None,
        description="Network between nodes. With slingshot or infiniband, a run on several nodes fails before its "
        "first step if NCCL uses TCP.",
    )
    environment: dict[Variable, Value | None] = Field(
        {},
        description="Environment variables of every stage. The value null unsets a variable that an image or module "
        "sets.",
    )
    packages: Annotated[Path_, AfterValidator(_target)] | None = Field(
        None,
        description="Folder with additional Python packages for all stages (pip install --target FOLDER NAME). "
        "Packages in the image or environment take precedence.",
    )
    scheduler: Scheduler | None = None

    @property
    def ordered(self) -> int:
        order = self.gpu_order or []
        return self.scheduler.gpu_nodes.gpus if self.scheduler and order else len(order)

    @model_validator(mode="after")
    def _keeps_secrets(self) -> Site:
        for name, value in self.environment.items():
            if value is None:
                continue
            if has_secret(value) or re.search("(TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY)$", name, re.IGNORECASE):
                raise ValueError(
                    f"environment.{name}: looks like a secret or an address with a login, which every command line "
                    "would show; export it before the call"
                )
        return self

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            # The executor hides the Slurm variables from which mpirun would learn the job's nodes.
            lambda site: site.scheduler and site.starter in ("torchrun", "mpirun"),
            "starter: {its.starter} is for machines without a scheduler; use srun",
        ),
        (
            lambda site: site.scheduler and site.engine == "auto",
            "engine: auto may choose different engines on different nodes; name one engine",
        ),
        (
            lambda site: site.start and site.starter not in ("mpirun", "torchrun", "srun"),
            "start: only for starter srun, mpirun or torchrun, but starter is {its.starter}; remove start or change "
            "starter",
        ),
        (
            lambda site: site.rendezvous and site.starter != "torchrun",
            "rendezvous: only for starter torchrun, but starter is {its.starter}; remove rendezvous or change starter",
        ),
        (
            lambda site: "$" in (site.local_disk or "") and site.engine not in ("none", "shifter"),
            "local_disk: {its.local_disk}: containers of {its.engine} do not get the job's variables; write a path "
            "without variables",
        ),
        (
            lambda site: {*re.findall(r"\{\w+\}", " ".join(site.start))} - {"{ranks}", "{ranks_per_node}", "{nodes}"},
            "start: {its.start}: expected only {{ranks}}, {{ranks_per_node}} or {{nodes}} in braces",
        ),
        (
            lambda site: site.starter == "srun" and SET_FOR_SRUN.search(" ".join(site.start)),
            "start: {its.start}: dlscale sets srun's numbers of nodes, tasks, CPUs and GPUs from each run's geometry, "
            "and --kill-on-bad-exit; remove these options",
        ),
        (
            lambda site: (
                site.gpu_order
                and site.starter == "srun"
                and re.search(r"(?<!\S)(--distribution|--gpu-bind|-m)\b", " ".join(site.start))
            ),
            "start: {its.start}: with gpu_order, dlscale sets --distribution and --gpu-bind of srun; remove these "
            "options or gpu_order",
        ),
        (
            lambda site: site.scheduler and any(re.match("(SBATCH|SRUN|SLURM)_", name) for name in site.environment),
            "environment: variables of sbatch and srun (SBATCH_…, SRUN_…, SLURM_…) would reach the stages only; write "
            "options of srun into start, or export the variable before the call",
        ),
        (
            lambda site: sorted(site.gpu_order or []) != [*range(site.ordered)],
            "gpu_order: {its.gpu_order}: expected the numbers of a node's {its.ordered} GPUs, each once",
        ),
    )
