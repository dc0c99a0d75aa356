"""Table of stages: the subcommands of dlscale that the workflow's jobs run.

The table also defines the allowed values of a plan's key `measure`, params of rules, and the cost, time limit and Slurm
request of each job. To add a stage that measures a run, add a row, a module, and a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dlscale.core import registry
from dlscale.core.stage import START, Stage, option, path, training_work


def throughput_trials(run: Any) -> int:
    """Return the number of warm-up and counted trials over all modes.

    The modes are loading, computing and training. If dp > 1 and the settings allow it, training without communication
    is a fourth mode.
    """
    modes = 3 + (run.geometry.dp > 1 and run.can_step_alone)
    return int(modes * (run.throughput.warmup + run.throughput.trials))


def throughput_work(run: Any, train: int | None, valid: int | None) -> float | None:
    """Return trials x batches x batch size; in each mode, a sample counts as much as in training."""
    return float(throughput_trials(run) * run.throughput.batches * run.batch_size)


def throughput_seconds(run: Any) -> float:
    """Return the minimum time of trials and paired timing on an idle machine, s."""
    return float(throughput_trials(run) * run.throughput.seconds) + turns_seconds(run)


def turns_seconds(run: Any) -> float:
    """Return the planned time of a run's paired timing, s; 0 for a run of several processes."""
    return float(run.throughput.beside) if run.processes.world_size == 1 else 0.0


_PAGE = option(
    "--page", "options of the stage report, as JSON; this stage then also writes a live page", False, metavar="JSON"
)
_DATASET = path("--config", "the dataset's config.yaml, or its settings as JSON")
_RECORD = path("--record", "YAML file to which --config is written", required=False)

#: Options of every stage of a run.
RUN_OPTIONS = (
    path("--config", "the run's config.yaml, or its settings as JSON"),
    path("--manifest", "manifest.json of the run's dataset"),
    option("--device", "device that computes", False, choices=("auto", "cpu", "cuda"), default="auto"),
    option("--threads", "CPU threads per node, divided among the node's processes", False, type=int, metavar="N"),
    path(
        "--telemetry",
        "CSV file for telemetry of the first node, one row per second; further nodes write NAME.nodeN.csv next to it",
        required=False,
    ),
    _RECORD,
)

STAGES: dict[str, Stage] = {
    "image": Stage(
        "dlscale.launch.image",
        "Build or pull the image that stages run in; migrate it for podman-hpc.",
        "image",
        (
            option("--engine", "container engine", metavar="NAME"),
            option(
                "--image",
                "name of the image (localhost/... is built, other names are pulled); for apptainer and enroot, an "
                "existing image file",
                metavar="NAME",
            ),
            option("--target", "build target in docker/Dockerfile", False, default="cpu", choices=("cpu", "gpu")),
            option("--build-arg", "argument of the build", False, action="append", default=[], metavar="NAME=VALUE"),
        ),
    ),
    "configure": Stage(
        "dlscale.config.places",
        "Write the list of a plan's runs, as YAML.",
        "plan",
        (path("--out", "YAML file to write"), option("--settings", "the plan's settings, as JSON", metavar="JSON")),
    ),
    "acquire": Stage(
        "dlscale.data.acquire",
        "Simulate or fetch one raw file of a dataset; fetching needs the network.",
        "raw",
        (_DATASET, option("--file", "name of the raw file", metavar="NAME"), path("--out", "file to write")),
        nodes="cpu",
    ),
    "preprocess": Stage(
        "dlscale.data.preprocess",
        "Downsample and transform one piece of a dataset part, a few rows at a time.",
        "piece",
        (
            _DATASET,
            option("--part", "name of the part", metavar="SPLIT/NAME"),
            option("--piece", "number of the piece, from 0", False, type=int, default=0, metavar="N"),
            path("--source", "raw files of the part", required=False, nargs="*", default=[]),
            path("--out", "HDF5 file to write"),
        ),
        nodes="cpu",
    ),
    "assemble": Stage(
        "dlscale.data.preprocess",
        "Join the pieces of one part into its final file.",
        "part",
        (_DATASET, path("--pieces", "files of the pieces, in order", nargs="+"), path("--out", "HDF5 file to write")),
        nodes="cpu",
    ),
    "describe": Stage(
        "dlscale.data.describe",
        "Write a dataset's statistics and manifest.",
        "dataset",
        (
            _DATASET,
            path("--source", "files of a dataset that is used unchanged", required=False, nargs="*", default=[]),
            path("--manifest", "manifest.json to write, in the dataset's folder"),
            path("--stats", "folder of .npy files to write"),
            _RECORD,
        ),
        nodes="cpu",
    ),
    "preview": Stage(
        "dlscale.data.preview",
        "Draw a preview of a dataset's channels.",
        "dataset",
        (path("--manifest", "the dataset's manifest.json"), path("--out", "PNG file to write"), _PAGE),
    ),
    "train": Stage(
        "dlscale.train.train",
        "Train one run; resume where an earlier try stopped.",
        "run",
        (
            path("--checkpoints", "folder of this run's checkpoints"),
            option(
                "--sources",
                "fingerprint of the source code; a checkpoint of other code is not resumed",
                False,
                default="",
                metavar="SHA256",
            ),
            path("--out", "the run's folder"),
        ),
        settings=("training", "schedule"),
        outputs=("provenance.json", "metrics.jsonl", "model.pt", "prediction.png", "telemetry/train.csv"),
        usual=True,
        nodes="geometry",
        work=training_work,
        minutes=720,
        warned=True,
        science="dlscale.train.trainer",
    ),
    "throughput": Stage(
        "dlscale.measure.throughput",
        "Measure a run's throughput (samples/s) in loading, computing and training; for a program, only in training.",
        "run",
        (
            path("--beside", "config.yaml or JSON of the plan's first timed run, for paired timing", required=False),
            path(
                "--beside-manifest",
                "manifest.json of the first timed run's dataset, if the datasets differ",
                required=False,
            ),
            path("--out", "JSON file to write"),
            START,
        ),
        settings=("throughput",),
        outputs=("throughput.json", "telemetry/throughput.csv"),
        usual=True,
        nodes="geometry",
        work=throughput_work,
        imports=lambda run: registry.provider("predict_memory"),
        seconds=throughput_seconds,
    ),
    "collect": Stage(
        "dlscale.report.collect",
        "Write the table of a plan's runs.",
        "plan",
        (
            path("--plan", "the plan's plan.yaml"),
            path("--out", "CSV file to write"),
            _PAGE,
        ),
    ),
    "report": Stage(
        "dlscale.report.report",
        "Write the page of the report.",
        "page",
        (
            option("--title", "heading of the page"),
            path("--plans", "plan.yaml files", nargs="+"),
            path("--datasets", "dataset folders", nargs="+"),
            path("--references", "reference.json files", required=False, nargs="*", default=[]),
            option(
                "--call",
                "shell command that starts the workflow, for commands on the page",
                False,
                default="snakemake",
                metavar="WORDS",
            ),
            path("--out", "HTML file to write"),
        ),
    ),
}

for _name, _row in registry.table("STAGES", STAGES).items():
    _at = [*STAGES].index(_row.after) + 1 if _row.after else len(STAGES)
    STAGES = {**dict([*STAGES.items()][:_at]), _name: _row, **dict([*STAGES.items()][_at:])}
for _name, _module in registry.table("PROGRAM_STAGES").items():
    if _name in STAGES:  # the extension with this stage may be missing
        STAGES[_name] = replace(STAGES[_name], program=_module)

#: Stages of a run that a plan may name in `measure`, in the order of the table.
RUN_STAGES = tuple(name for name, stage in STAGES.items() if stage.scope == "run")
#: Stages that make a dataset on CPU nodes.
DATA_STAGES = tuple(name for name, stage in STAGES.items() if stage.nodes == "cpu")


def stage_of(rule: str) -> str:
    """Return the stage of a rule, such as `report` for `report_plan`."""
    return "acquire" if rule == "fetch" else rule if rule in STAGES else rule.partition("_")[0]


def job_name(rule: str, wildcards: Mapping[str, str]) -> tuple[str, str]:
    """Return the two parts of a job's label, such as (`PLAN.`, `RUN`) or (`data `, `NAME`)."""
    if "run" in wildcards:
        return f"{wildcards['plan']}.", wildcards["run"]
    for key, group in (("plan", "plan "), ("dataset", "data ")):
        if key in wildcards:
            return group, wildcards[key]
    return "", rule
