"""Only what changed runs again: edit one thing, and exactly these jobs would run; put it back, and none would."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from dlscale.config.run import ThroughputRun, TrainRun, load_run
from dlscale.core import stages
from dlscale.core.fingerprint import reachable
from dlscale.data.parts import load_dataset
from tests.workflow.conftest import TARGETS, Outcome, Tree

PACKAGE = "workflow_scripts/dlscale"

# ---- the jobs of the tiny workflow, by dataset -----------------------------------------------------
# `boxes` serves cosmo.unet, cosmo.ceiling (synthetic loader) and again.faster (training only); `years` serves era5.vit.

DATA = {
    "boxes": {
        "acquire": ["acquire boxes box000.h5", "acquire boxes box001.h5"],
        "preprocess": [
            "preprocess boxes train box000 0",
            "preprocess boxes train box000 1",
            "preprocess boxes valid box001 0",
            "preprocess boxes valid box001 1",
        ],
        "assemble": ["assemble boxes train box000", "assemble boxes valid box001"],
        "describe": ["describe boxes", "preview boxes"],
    },
    "years": {
        "acquire": ["acquire years 2001.nc", "acquire years 2002.nc"],
        "preprocess": ["preprocess years train 2001 0", "preprocess years valid 2002 0"],
        "assemble": ["assemble years train 2001", "assemble years valid 2002"],
        "describe": ["describe years", "preview years"],
    },
}
TRAIN = {
    "boxes": ["train cosmo unet", "train cosmo ceiling", "train again faster"],
    "years": ["train era5 vit"],
}
THROUGHPUT = {
    "boxes": ["throughput cosmo unet", "throughput cosmo ceiling"],
    "years": ["throughput era5 vit"],
}
TABLES = {
    "boxes": ["collect cosmo", "collect again", "report_plan cosmo", "report_plan again", "report"],
    "years": ["collect era5", "report_plan era5", "report"],
}
REPORTS = ["report", "report_plan cosmo", "report_plan again", "report_plan era5"]
CONFIGURE = [
    *("configure_dataset boxes", "configure_dataset years"),
    *("configure_run cosmo unet", "configure_run cosmo ceiling", "configure_run again faster"),
    "configure_run era5 vit",
    *("configure_plan cosmo", "configure_plan again", "configure_plan era5"),
]
BOTH = ("boxes", "years")


def trained(*datasets: str) -> list[str]:
    """Training on these datasets, and what shows its results."""
    return [job for name in datasets for job in TRAIN[name] + TABLES[name]]


def timed(*datasets: str) -> list[str]:
    """Throughput on these datasets, and what shows its results; the plan `again` does not measure it."""
    return [job for name in datasets for job in THROUGHPUT[name] + TABLES[name] if not job.endswith("again")]


def runs(*datasets: str) -> list[str]:
    """All that runs on these datasets."""
    return trained(*datasets) + timed(*datasets)


def since(stage: str, *datasets: str) -> list[str]:
    """All jobs of these datasets from a stage of theirs on."""
    stages = list(DATA["boxes"])
    wanted = stages[stages.index(stage) :]
    return [job for name in datasets for key in wanted for job in DATA[name][key]] + runs(*datasets)


EVERYTHING = [*CONFIGURE, *since("acquire", *BOTH)]

# ---- edits: each changes a tree and returns what puts it back --------------------------------------

Undo = Callable[[], object]
Edit = Callable[[Tree], Undo]


def append(file: str, text: str = "\n\nEDITED = True\n") -> Edit:
    """Add a harmless statement."""

    def edit(tree: Tree) -> Undo:
        path = tree.path / file
        before = path.read_bytes()
        path.write_bytes(before + text.encode())
        return lambda: path.write_bytes(before)

    return edit


def replace(file: str, old: str, new: str) -> Edit:
    """Replace the first occurrence of a text."""

    def edit(tree: Tree) -> Undo:
        path = tree.path / file
        before = path.read_text()
        assert old in before, f"{file} has no {old!r} any more: adapt this row"
        path.write_text(before.replace(old, new, 1))
        return lambda: path.write_text(before)

    return edit


def create(file: str, text: str = "EDITED = True\n") -> Edit:
    """Add a file."""

    def edit(tree: Tree) -> Undo:
        path = tree.path / file
        assert not path.exists()
        path.write_text(text)
        return path.unlink

    return edit


def touch(file: str) -> Edit:
    """Give a file the present time, not another content."""

    def edit(tree: Tree) -> Undo:
        path = tree.path / file.replace("results", tree.config["results"])
        before = path.stat()
        path.touch()
        return lambda: os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return edit


def delete(*files: str) -> Edit:
    """Take result files away, as the purge of a scratch disk does."""

    def edit(tree: Tree) -> Undo:
        moved = {tree.results / file: tree.path / f"purged{number}" for number, file in enumerate(files)}
        for path, place in moved.items():
            path.rename(place)
        return lambda: [place.rename(path) for path, place in moved.items()]

    return edit


def configure(key: str, value: Any) -> Edit:
    """Set a key of the configuration, written with dots; None removes it."""

    def edit(tree: Tree) -> Undo:
        before = json.dumps(tree.config)
        *parents, last = key.split(".")
        here = tree.config
        for parent in parents:
            here = here.setdefault(parent, {})
        if value is None:
            del here[last]
        else:
            here[last] = value
        tree.write()

        def undo() -> None:
            tree.config = json.loads(before)
            tree.write()

        return undo

    return edit


def both(*edits: Edit) -> Edit:
    """Make several edits."""

    def edit(tree: Tree) -> Undo:
        undos = [each(tree) for each in edits]
        return lambda: [undo() for undo in reversed(undos)]

    return edit


def reorder(tree: Tree) -> Undo:
    """Write the same configuration with its keys in another order (that of runs and targets has a meaning)."""

    def turned(value: Any, key: str = "") -> Any:
        if not isinstance(value, dict):
            return value
        items = list(value.items())
        return {name: turned(inner, name) for name, inner in (items if key == "runs" else items[::-1])}

    path = tree.path / "tiny.yaml"
    before = path.read_text()
    path.write_text(yaml.safe_dump(turned(tree.config), sort_keys=False))
    assert path.read_text() != before
    return lambda: path.write_text(before)


# ---- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """An edit, the jobs that it makes run again, and further arguments of Snakemake."""

    name: str
    edit: Edit
    jobs: list[str]
    arguments: tuple[str, ...] = ()


ROWS = [
    # Models, losses, studies, samples: the runs that use them, measuring included.
    Row("ViT model", append(f"{PACKAGE}/models/vit.py"), runs("years")),
    Row("U-Net model", append(f"{PACKAGE}/models/unet3d.py"), runs("boxes")),
    Row("losses", append(f"{PACKAGE}/models/losses.py"), runs(*BOTH)),
    Row("cosmo study", append(f"{PACKAGE}/studies/cosmo_unet.py"), runs("boxes")),
    Row("era5 study", append(f"{PACKAGE}/studies/era5_vit.py"), runs("years")),
    Row("crops", append(f"{PACKAGE}/data/crops.py"), runs("boxes")),
    Row("augmentation", append(f"{PACKAGE}/data/augmentation.py"), runs("boxes")),
    Row("pairs", append(f"{PACKAGE}/data/pairs.py"), runs("years")),
    Row("sample stream", append(f"{PACKAGE}/data/sampling.py"), runs(*BOTH)),
    # Loaders: the runs that have them.
    Row(
        "torch loader",
        append(f"{PACKAGE}/data/loaders/torch_loader.py"),
        [job for job in runs(*BOTH) if job not in ("train cosmo ceiling", "throughput cosmo ceiling")],
    ),
    Row(
        "synthetic loader",
        append(f"{PACKAGE}/data/loaders/synthetic_loader.py"),
        ["train cosmo ceiling", "throughput cosmo ceiling", "collect cosmo", "report_plan cosmo", "report"],
    ),
    # Data: everything after it, of its dataset. Pieces are temporary, so assembling again needs them again.
    Row("cosmo simulator", append(f"{PACKAGE}/data/cosmo_simulator.py"), since("acquire", "boxes")),
    Row("era5 simulator", append(f"{PACKAGE}/data/era5_simulator.py"), since("acquire", "years")),
    Row("cosmo reader", append(f"{PACKAGE}/data/cosmo.py"), since("preprocess", "boxes")),
    Row("era5 reader", append(f"{PACKAGE}/data/era5.py"), since("preprocess", "years")),
    Row("preprocessing", append(f"{PACKAGE}/data/preprocess.py"), since("preprocess", *BOTH)),
    Row("assembling", append(f"{PACKAGE}/data/assemble.py"), since("preprocess", *BOTH)),
    Row("describing", append(f"{PACKAGE}/data/describe.py"), since("describe", *BOTH)),
    # Training and measuring do not touch each other, but both make steps.
    Row("trainer", append(f"{PACKAGE}/train/trainer.py"), trained(*BOTH)),
    Row("checkpoints", append(f"{PACKAGE}/train/checkpoint.py"), trained(*BOTH)),
    Row("schedule", append(f"{PACKAGE}/train/schedule.py"), trained(*BOTH)),
    Row("list of stages", append(f"{PACKAGE}/runtime/stages.py"), []),
    Row("settings of runs", append(f"{PACKAGE}/runtime/schema/run.py"), [*runs(*BOTH), *REPORTS]),
    Row("provenance", append(f"{PACKAGE}/runtime/provenance.py"), trained(*BOTH)),
    Row("precision", append(f"{PACKAGE}/train/precision.py"), runs(*BOTH)),
    Row("optimiser", append(f"{PACKAGE}/train/optimizer.py"), runs(*BOTH)),
    Row("throughput", append(f"{PACKAGE}/measure/throughput.py"), timed(*BOTH)),
    # A picture is a result of the stage that draws it.
    Row("preview", append(f"{PACKAGE}/data/preview.py"), ["preview boxes", "preview years", *REPORTS]),
    Row("picture of a prediction", append(f"{PACKAGE}/studies/figures.py"), runs(*BOTH)),
    # The report.
    Row("report page", append(f"{PACKAGE}/report/report.py"), REPORTS),
    Row("report template", append(f"{PACKAGE}/report/templates/report.html.j2", "<!-- edited -->\n"), REPORTS),
    Row("report style", append(f"{PACKAGE}/report/templates/style.css", "/* edited */\n"), REPORTS),
    Row("report's plots", append(f"{PACKAGE}/report/figures.py"), REPORTS),
    Row("published figure", replace(f"{PACKAGE}/studies/era5_vit.yaml", "published:", "published: "), REPORTS),
    Row("table", append(f"{PACKAGE}/report/collect.py"), [job for name in BOTH for job in TABLES[name]]),
    # What all stages stand on.
    Row("whole files", append(f"{PACKAGE}/runtime/files.py"), EVERYTHING),
    # What no result depends on.
    Row("unused module", create(f"{PACKAGE}/data/unused.py"), []),
    Row("unused download", replace(f"{PACKAGE}/data/download.py", '"""', '"""Edited. '), []),
    Row("unused Zarr reader", append(f"{PACKAGE}/data/era5_zarr.py"), []),
    Row("command line", append(f"{PACKAGE}/cli.py"), []),
    Row("README", append("README.md", "Edited.\n"), []),
    Row("touched source", touch(f"{PACKAGE}/models/unet3d.py"), []),
    Row("touched package", touch(f"{PACKAGE}/__init__.py"), []),
    Row("touched configuration", touch("config.yaml"), []),
    Row("touched manifest", touch("results/data/boxes/manifest.json"), []),
    Row("comment in a rule", append("rules/train.smk", "\n# Edited.\n"), []),
    Row("comment in the Snakefile", append("Snakefile", "\n# Edited.\n"), []),
    Row("comment in the configuration", append("tiny.yaml", "\n# Edited.\n"), []),
    Row("a rule's message", replace("rules/train.smk", '"Train ', '"Edited: train '), []),
    Row("a rule's threads", replace("rules/train.smk", "threads: 64", "threads: 32"), []),
    Row("number of cores", touch("config.yaml"), [], ("--cores", "1")),
    Row("a profile's value", replace("profiles/local/profile.yaml", "latency-wait: 2", "latency-wait: 3"), []),
    Row("another profile", touch("config.yaml"), [], ("--profile", "perlmutter")),
    Row("order of keys", reorder, []),
    Row(
        "a dataset that no run uses", configure("datasets.more", {"kind": "cosmo", "source": {"kind": "simulated"}}), []
    ),
    # A rule's command: Snakemake's own code trigger.
    Row(
        "a rule's command",
        replace("rules/measure.smk", "{params.launch:q} throughput", "{params.launch:q} throughput --device cpu"),
        timed(*BOTH),
    ),
    # Configuration: the stages whose slice holds the key.
    Row(
        "a study's learning rate",
        configure("studies.era5_vit.optimizer.lr", 2e-3),
        ["configure_run era5 vit", *runs("years")],
    ),
    Row(
        "a run's learning rate",
        configure("plans.again.runs.faster.optimizer.lr", 5e-3),
        ["configure_run again faster", "train again faster", "collect again", "report_plan again", "report"],
    ),
    Row(
        "epochs",
        configure("plans.era5.settings.training.epochs", 3),
        ["configure_run era5 vit", *trained("years")],
    ),
    Row(
        "number of trials",
        configure("plans.era5.settings.throughput.trials", 3),
        ["configure_run era5 vit", *timed("years")],
    ),
    Row(
        "two settings that swap their values",
        configure("plans.era5.settings.throughput", {"warmup": 0, "trials": 3, "batches": 2}),
        ["configure_run era5 vit", *timed("years")],
    ),
    Row(
        "numbers of samples that swap their values",
        configure("plans.cosmo.runs.unet.samples", {"train": 8, "valid": 12}),
        [
            *("configure_run cosmo unet", "train cosmo unet", "throughput cosmo unet"),
            *TABLES["boxes"],  # `again` names this run
        ],
    ),
    Row("batch size", configure("plans.era5.settings.batch_size", 2), ["configure_run era5 vit", *runs("years")]),
    Row("report's title", configure("report.title", "Edited"), ["report"]),
    Row(
        "plan's title",
        configure("plans.era5.title", "Edited"),
        ["configure_plan era5", *TABLES["years"]],
    ),
    Row(
        "run's label",
        configure("plans.era5.runs.vit.label", "Edited"),
        ["configure_run era5 vit", "configure_plan era5", *TABLES["years"]],
    ),
    Row(
        "downsampling",
        configure("datasets.years.downsample", 2),
        ["configure_dataset years", *since("preprocess", "years")],
    ),
    Row(
        "storage type",
        configure("datasets.boxes.storage.dtype", "float16"),
        ["configure_dataset boxes", *since("preprocess", "boxes")],
    ),
    Row(
        "pieces",
        configure("datasets.boxes.pieces", 1),
        ["configure_dataset boxes", *(job for job in since("preprocess", "boxes") if not job.endswith(" 1"))],
    ),
    Row("bound on memory", configure("datasets.boxes.memory_mb", 100), ["configure_dataset boxes"]),
    Row(
        "simulator's seed",
        configure("datasets.years.source.seed", 4),
        ["configure_dataset years", *since("acquire", "years")],
    ),
    Row(
        "one more year",
        configure("datasets.years.source.train", [2001, 2003]),
        [
            *("configure_dataset years", "acquire years 2003.nc"),
            *("preprocess years train 2003 0", "assemble years train 2003"),
            *since("describe", "years"),
        ],
    ),
    Row(
        "one more run",
        configure("plans.era5.runs.more", {"model": {"depth": 1}}),
        [
            *("configure_plan era5", "configure_run era5 more", "train era5 more", "throughput era5 more"),
            *TABLES["years"],
        ],
    ),
    Row(
        "one run less",
        configure("plans.again.runs.faster", None),
        ["configure_plan again", "collect again", "report_plan again", "report"],
    ),
    # A purged disk: what is there no more is made again when something needs it, with what has to follow.
    Row("raw file purged", delete("data/boxes/source/box000.h5"), []),
    Row("data file purged", delete("data/boxes/train/box000.h5"), []),
    Row(
        "data file purged, and needed",
        both(delete("data/boxes/train/box000.h5"), append(f"{PACKAGE}/models/unet3d.py")),
        [
            *("preprocess boxes train box000 0", "preprocess boxes train box000 1", "assemble boxes train box000"),
            *since("describe", "boxes"),
        ],
    ),
    Row(
        "data file and raw file purged, and needed",
        both(
            delete("data/boxes/train/box000.h5", "data/boxes/source/box000.h5"),
            append(f"{PACKAGE}/models/unet3d.py"),
        ),
        [
            "acquire boxes box000.h5",
            *("preprocess boxes train box000 0", "preprocess boxes train box000 1", "assemble boxes train box000"),
            *since("describe", "boxes"),
        ],
    ),
    Row(
        "result purged",
        delete("plans/era5/vit/metrics.jsonl"),
        trained("years"),
    ),
    Row("page purged", delete("report/index.html"), ["report"]),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_exactly_what_changed_would_run(row: Row, finished: tuple[Tree, Outcome]) -> None:
    tree, _ = finished
    undo = row.edit(tree)
    try:
        planned = tree.planned(*row.arguments)
    finally:
        undo()
    reasons = {str(job): job.reason for job in planned.jobs}
    assert planned.names == sorted(set(row.jobs)), reasons
    if row.jobs:  # otherwise the next row, or the last test, says so
        assert tree.planned().names == []


def test_what_was_put_back_leaves_nothing_to_do(finished: tuple[Tree, Outcome]) -> None:
    """After all the rows."""
    assert finished[0].planned().names == []


def test_what_would_run_does_run(clone: Tree) -> None:
    """The plan is kept; afterwards nothing is left to do; putting the edit back is a change like any other."""
    undo = configure("plans.era5.settings.throughput.trials", 1)(clone)
    planned = clone.planned().names
    done = clone.snakemake("--cores", "2", "--", *TARGETS)
    assert done.status == 0, done.output
    assert done.names == planned == sorted(["configure_run era5 vit", *timed("years")])
    measured = json.loads((clone.results / "plans/era5/vit/throughput.json").read_text())
    assert len(measured["FULL"]["trial_throughput"]) == 1
    assert clone.planned().names == []
    undo()
    assert clone.planned().names == planned


def test_results_can_be_kept_after_a_harmless_edit(clone: Tree) -> None:
    """`--touch` says: what is there is right. Nothing runs then."""
    append(f"{PACKAGE}/models/unet3d.py")(clone)
    weights = (clone.results / "plans/cosmo/unet/model.pt").read_bytes()
    assert clone.planned().names == sorted(set(runs("boxes")))
    assert clone.snakemake("--cores", "2", "--touch", "--", *TARGETS).status == 0
    assert clone.planned().names == []
    assert (clone.results / "plans/cosmo/unet/model.pt").read_bytes() == weights


def test_table_covers_all_jobs(finished: tuple[Tree, Outcome]) -> None:
    """The names in this table are those of the workflow: a job that no row expects is a row to write."""
    assert finished[1].names == sorted(set(EVERYTHING))


# ---- the fingerprint against what the stages of the finished workflow had really imported -----------


def test_fingerprint_is_of_exactly_what_ran(finished: tuple[Tree, Outcome]) -> None:
    """All that a stage imported is in its fingerprint and all that is in it was imported; but for the command line's
    own modules, and what only carries a raw file from where it comes from.
    """
    own = set(finished[0].python("import dlscale.cli, json, sys; print(json.dumps(list(sys.modules)))"))
    stages_seen = []
    for file in finished[0].imports.iterdir():
        found = json.loads(file.read_text())
        stage, imported = found["arguments"][0], set(found["modules"])
        expected = set(reachable(stages.modules(stage, subject(found["arguments"]))))
        if stage == "acquire":
            expected |= set(reachable(["dlscale.data.download", "dlscale.data.parts", "dlscale.core.progress"]))
            expected |= {"dlscale.data.acquire", "dlscale.core.settings"}
        assert imported - own <= expected, f"{stage}: not in its fingerprint"
        assert expected <= imported, f"{stage}: in its fingerprint, but not needed"
        stages_seen.append(stage)
    assert set(stages_seen) == set(stages.STAGES) - {"image"}  # whose engine knows what is new
    assert len(stages_seen) == len(finished[1].names)


def subject(arguments: list[str]) -> Any:
    """Return the dataset or run that the workflow named when it took the fingerprint."""
    config = arguments[arguments.index("--config") + 1] if "--config" in arguments else ""
    match arguments[0]:
        case "acquire" | "preprocess":
            return load_dataset(config)
        case "train" | "throughput":
            return load_run(config, TrainRun if arguments[0] == "train" else ThroughputRun)
    return None


def test_the_copy_is_what_runs(finished: tuple[Tree, Outcome]) -> None:
    place = finished[0].python("import dlscale, json; print(json.dumps(dlscale.__file__))")
    assert place == str(finished[0].path / PACKAGE / "__init__.py")
