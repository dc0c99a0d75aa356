"""The table of stages: the one place that says what each stage is.

The command line, a plan's `measure`, the params of rules, cost, doctor, time limits and Slurm requests derive from it.
A stage that measures a run is added by a row here, its module, and a thin rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

#: What one job of a stage is for.
Scope = Literal["settings", "raw", "piece", "part", "dataset", "run", "plan", "page", "image"]

#: Where a job runs: on the node of the controller, on part of a CPU node, or on the devices of the run's geometry.
Nodes = Literal["here", "cpu", "geometry"]


@dataclass(frozen=True)
class Option:
    """An option of the command line; `more` goes to `argparse`."""

    flag: str
    text: str
    required: bool = True
    more: dict[str, Any] = field(default_factory=dict)


def path(flag: str, text: str, **more: Any) -> Option:
    """Return an option that takes a path."""
    return Option(flag, text, more={"metavar": "PATH", **more})


def optional(flag: str, text: str, **more: Any) -> Option:
    """Return an option that may be left out."""
    return Option(flag, text, required=False, more=more)


#: A validation sample needs no backward pass, which is two thirds of a training sample's work: of 6 FLOPs a parameter
#: the forward pass takes 2 (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
VALIDATION = 1 / 3


def training_work(run: Any, train: int | None, valid: int | None) -> float | None:
    """Return epochs x (samples + validation samples / 3); the last epoch may be cut short by `steps`."""
    if train is None or valid is None:
        return None
    if run.training.steps is None:
        return float(run.training.epochs * (train + VALIDATION * valid))
    epochs = -(-run.training.steps // -(-train // run.batch_size))
    return float(run.training.steps * run.batch_size + VALIDATION * epochs * valid)


def throughput_work(run: Any, train: int | None, valid: int | None) -> float | None:
    """Return (warm-up + counted trials) x batches x batch size x 3 modes; FULL is the slowest of the three."""
    trials = run.throughput.warmup + run.throughput.trials
    return float(3 * trials * run.throughput.batches * run.batch_size)


@dataclass(frozen=True)
class Stage:
    """One row of the table.

    Attributes
    ----------
    module
        Entry module; its `main(args)` does the work.
    text
        What the stage does, for `--help`.
    scope
        What one job is for.
    options
        Of the command line, beside `--log` and those that every stage of a run has.
    settings
        Of a run: the keys that the stage sees beside the common ones. What it cannot see cannot make it run again.
    outputs
        Of a run: the files that it leaves in the run's folder, the one that shows that it is done first.
    nodes
        Where a job runs.
    work
        Of a run: how much it computes.
    minutes
        Time limit of a job where nothing is known of how long it takes; a site may say another.
    warned
        Whether the job asks to be warned of its time limit.
    """

    module: str
    text: str
    scope: Scope
    options: tuple[Option, ...] = ()
    settings: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    nodes: Nodes = "here"
    work: Callable[[Any, int | None, int | None], float | None] | None = None
    minutes: int = 60
    warned: bool = False


_DATASET = path("--config", "the dataset's config.yaml, or its settings as JSON")

#: Every stage of a run has these.
RUN_OPTIONS = (
    path("--config", "the run's config.yaml, or its settings as JSON"),
    path("--manifest", "manifest.json of the run's dataset"),
    optional("--device", "where to compute", choices=("auto", "cpu", "cuda"), default="auto"),
    optional("--threads", "CPU threads of a node, shared by the processes there", type=int, metavar="N"),
)

STAGES: dict[str, Stage] = {
    "image": Stage(
        "dlscale.launch.image",
        "Build or pull the image that stages run in; migrate it for podman-hpc.",
        "image",
        (
            Option("--engine", "container engine", more={"metavar": "NAME"}),
            Option("--image", "localhost/... is built, others are pulled", more={"metavar": "NAME"}),
            optional("--target", "target of docker/Dockerfile", default="cpu", choices=("cpu", "gpu")),
            optional("--build-arg", "argument of the build", action="append", default=[], metavar="NAME=VALUE"),
        ),
    ),
    "configure": Stage(
        "dlscale.config.configure",
        "Write the resolved settings of a dataset, run or plan as YAML.",
        "settings",
        (path("--out", "YAML file to write"), Option("--settings", "the settings", more={"metavar": "JSON"})),
    ),
    "acquire": Stage(
        "dlscale.data.acquire",
        "Simulate or fetch one raw file of a dataset (fetching needs the network).",
        "raw",
        (_DATASET, Option("--file", "name of the raw file", more={"metavar": "NAME"}), path("--out", "file to write")),
        nodes="cpu",
    ),
    "preprocess": Stage(
        "dlscale.data.preprocess",
        "Stream one piece of one part of a dataset through downsampling and transforms.",
        "piece",
        (
            _DATASET,
            Option("--part", "the part", more={"metavar": "SPLIT/NAME"}),
            optional("--piece", "number of the piece, from 0", type=int, default=0, metavar="N"),
            path("--source", "raw files of the part", nargs="*"),
            path("--out", "HDF5 file to write"),
        ),
        nodes="cpu",
    ),
    "assemble": Stage(
        "dlscale.data.assemble",
        "Join the pieces of one part into its final file.",
        "part",
        (_DATASET, path("--pieces", "the pieces, in order", nargs="+"), path("--out", "HDF5 file to write")),
        nodes="cpu",
    ),
    "describe": Stage(
        "dlscale.data.describe",
        "Write a dataset's statistics and manifest.",
        "dataset",
        (
            _DATASET,
            optional(
                "--source", "files of a prepared dataset, used as they are", nargs="*", default=[], metavar="PATH"
            ),
            path("--manifest", "manifest.json to write, in the dataset's folder"),
            path("--stats", "folder of .npy files to write"),
        ),
        nodes="cpu",
    ),
    "preview": Stage(
        "dlscale.data.preview",
        "Draw a first look at a dataset's channels.",
        "dataset",
        (path("--manifest", "the dataset's manifest.json"), path("--out", "PNG file to write")),
    ),
    "train": Stage(
        "dlscale.train.train",
        "Train one run; resume where an earlier try stopped.",
        "run",
        (
            path("--checkpoints", "folder of this run's checkpoints"),
            optional("--sources", "digest of the sources: another one starts afresh", default="", metavar="SHA256"),
            path("--out", "the run's folder"),
        ),
        settings=("training", "schedule"),
        outputs=("metrics.jsonl", "provenance.json", "prediction.png"),
        nodes="geometry",
        work=training_work,
        minutes=720,
        warned=True,
    ),
    "throughput": Stage(
        "dlscale.measure.throughput",
        "Measure a run's samples/s: IO alone, SYNTHETIC, FULL.",
        "run",
        (path("--out", "JSON file to write"),),
        settings=("throughput",),
        outputs=("throughput.json",),
        nodes="geometry",
        work=throughput_work,
    ),
    "collect": Stage(
        "dlscale.report.collect",
        "Tabulate a plan's runs.",
        "plan",
        (path("--plan", "the plan's plan.yaml"), path("--out", "CSV file to write")),
    ),
    "report": Stage(
        "dlscale.report.report",
        "Write the report's page.",
        "page",
        (
            Option("--title", "heading of the page"),
            path("--plans", "plan.yaml files", nargs="+"),
            path("--datasets", "dataset folders", nargs="+"),
            path("--out", "HTML file to write"),
        ),
    ),
}

#: The stages that a plan may measure its runs with, in order.
RUN_STAGES = tuple(name for name, stage in STAGES.items() if stage.scope == "run")
#: The stages that make a dataset on CPU nodes.
DATA_STAGES = tuple(name for name, stage in STAGES.items() if stage.nodes == "cpu")
