"""Reruns after edits: each edit reruns exactly the listed jobs, and undoing the edit leaves no job to run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from dlscale.config.dataset import dataset_type
from dlscale.config.run import load_run
from dlscale.core import registry
from dlscale.core.fingerprint import GUARDS, data_modules, reachable, run_modules
from dlscale.core.settings import validate
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.data import parts
from dlscale.data.reads import load_dataset
from tests.conftest import TINY
from tests.workflow.conftest import CONFIG, OUTSIDE, RESULTS, TARGETS, TITLE, Outcome, Tree
from tests.workflow.jobs import (
    ALL,
    EVERYTHING,
    PREPROCESSED,
    REPORTS,
    STUDY,
    pages,
    previews,
    profiled,
    runs,
    since,
    tables,
    timed,
    trained,
    tuned,
)

PACKAGE = "workflow_scripts/dlscale"

# ---- edits: each edit changes a tree and returns a function that undoes the change --------------------

Undo = Callable[[], object]
Edit = Callable[[Tree], Undo]


def changed(file: str, change: Callable[[str], str]) -> Edit:
    def edit(tree: Tree) -> Undo:
        path = tree.path / file
        before = path.read_text()
        path.write_text(change(before))
        return lambda: path.write_text(before)

    return edit


def append(file: str, text: str = "\n\nEDITED = True\n") -> Edit:
    """Append a harmless text to a file, by default a statement."""
    return changed(file, lambda before: before + text)


def replace(file: str, old: str, new: str) -> Edit:
    """Replace the first occurrence of a text in a file."""

    def change(before: str) -> str:
        assert old in before, f"{file} no longer contains {old!r}: adapt this row"
        return before.replace(old, new, 1)

    return changed(file, change)


def create(file: str, text: str = "EDITED = True\n") -> Edit:
    """Add a file."""

    def edit(tree: Tree) -> Undo:
        path = tree.path / file
        assert not path.exists()
        path.write_text(text)
        return path.unlink

    return edit


def touch(file: str) -> Edit:
    """Set a file's modification time to now, without changing its content."""

    def edit(tree: Tree) -> Undo:
        path = tree.path / file.replace("results", tree.config["results"])
        before = path.stat()
        path.touch()
        return lambda: os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return edit


def delete(*files: str) -> Edit:
    """Move result files or folders away, as if the purge of a scratch disk had deleted them."""

    def edit(tree: Tree) -> Undo:
        moved = {tree.results / file: tree.path / "purged" / file for file in files}
        for path, place in moved.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)
        return lambda: [place.rename(path) for path, place in moved.items()]

    return edit


def configure(key: str, value: Any) -> Edit:
    """Set a key of the configuration, given as a dotted path; None removes the key."""

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
    """Apply several edits."""

    def edit(tree: Tree) -> Undo:
        with contextlib.ExitStack() as undos:  # undo earlier edits if one fails
            for each in edits:
                undos.callback(each(tree))
            return undos.pop_all().close

    return edit


def extended(module: str, record: str) -> Edit:
    """Add a field to a record class."""
    begin = f"\n\nclass {record}(Record):\n"
    return replace(f"{PACKAGE}/{module}", begin, f"{begin}    edited: int = 0\n")


#: Modules that start, log or end a training.
AROUND = ("train", "logs")


def file_of(module: str) -> str:
    """Return the path of a dlscale module in a tree."""
    return f"workflow_scripts/{module.replace('.', '/')}.py"


def reorder(tree: Tree) -> Undo:
    """Reverse the order of the configuration's keys, except in runs and targets, because their order has a meaning."""

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
    """An edit, the jobs that the edit reruns, and additional arguments of Snakemake."""

    name: str
    edit: Edit
    jobs: list[str]
    arguments: tuple[str, ...] = ()
    slow: bool = False  #: Only for the slow tests, because a similar row is always tested.


def components() -> Iterator[Row]:
    """Yield rows for the files of each study and its kind of dataset; a newly registered study adds rows."""
    for name, study in [(name, study) for name, study in STUDY.items() if name != "waves"]:
        own = registry.studies()[study].file
        source, kind = own.read_text(), registry.study(study).dataset
        file = f"{PACKAGE}/{own.relative_to(registry.PACKAGE)}"
        dataset = validate(dataset_type(), CONFIG["datasets"][name])
        yield Row(f"study {study}", append(file), runs(name))
        for model in dict.fromkeys(re.findall(r"from dlscale\.models\.(\w+) import [A-Z]", source)):
            yield Row(f"model {model}", append(f"{PACKAGE}/models/{model}.py"), runs(name), slow=name in TINY)
        jobs = {
            "samples": runs(name),
            "source": since("preprocess", name),
            "describe": since("describe", name),
            "preview": previews(name),
            parts.kind_of(dataset).acquirer(dataset): since("acquire", name),
        }
        for role, expected in jobs.items():
            module = role and registry.module_of(kind, role)
            if module and module not in registry.DEFAULTS.values():
                yield Row(f"{kind}: {role}", append(file_of(module)), expected, slow=name in TINY)


def users(module: str) -> list[str]:
    """Return the datasets of the studies that import a dlscale module."""
    files = {name: registry.studies()[study].file for name, study in STUDY.items() if name != "waves"}
    return [name for name, file in files.items() if f"from dlscale.{module} import" in file.read_text()]


#: Jobs that rerun if a setting changes how `cosmo.unet` learns, but not a step's work. Plan `again` reuses the run.
LEARNT = ["train cosmo unet", *tables("cosmo", "again")]
COLLECT = '    "collect": Stage('
ROWS = [
    *components(),
    # An external study with separate files for its model and its data.
    Row("an external study", append(f"../{OUTSIDE}/waves.py"), runs("waves")),
    Row(
        "its data",
        replace(f"../{OUTSIDE}/waves_data.py", "curve += dataset.noise", "curve += 2 * dataset.noise"),
        since("preprocess", "waves"),
    ),
    Row(
        "its title",
        replace(f"../{OUTSIDE}/waves.yaml", "title: ", "title: Edited "),
        ["configure_plan waves_ladder", *tables("waves_ladder")],
    ),
    Row(
        "settings of an external study",
        replace(f"../{OUTSIDE}/waves.yaml", "lr: 1.0e-2", "lr: 2.0e-2"),
        [*trained("waves")],
    ),
    Row("a file next to an external study", create(f"../{OUTSIDE}/unused.py"), []),
    # Files that studies share affect all their runs, including measurements.
    Row("shared metrics", append(f"{PACKAGE}/studies/scores.py"), runs(*users("studies.scores"))),
    Row("base of studies", append(f"{PACKAGE}/studies/base.py"), runs(*ALL)),
    # The sample stream also chooses the days whose hourly means are statistics of `years` (stage describe).
    Row("sample stream", append(f"{PACKAGE}/data/sampling.py"), [*runs(*ALL), *since("describe", "years")]),
    # Loaders affect only the runs that use them.
    Row(
        "torch loader",
        append(f"{PACKAGE}/data/loaders/torch_loader.py"),
        # The run with the synthetic loader has a paired timing with a run that uses the torch loader.
        [job for job in runs(*ALL) if job != "train cosmo ceiling"],
    ),
    Row(
        "synthetic loader",
        append(f"{PACKAGE}/data/loaders/synthetic_loader.py"),
        ["train cosmo ceiling", "throughput cosmo ceiling", *tables("cosmo")],
    ),
    # Code for data affects all later jobs of the dataset. Pieces are temporary files, so assembling also reruns
    # the jobs that make the pieces.
    Row("base of kinds", append(f"{PACKAGE}/data/kind.py"), since("preprocess", *ALL)),
    Row("preprocessing and assembling", append(f"{PACKAGE}/data/preprocess.py"), since("preprocess", *PREPROCESSED)),
    Row("describing", append(f"{PACKAGE}/data/describe.py"), since("describe", *ALL)),
    # Training and measuring are independent of each other, but both execute steps.
    Row("trainer", append(f"{PACKAGE}/train/trainer.py"), trained(*ALL)),
    Row("checkpoints", append(f"{PACKAGE}/train/checkpoint.py"), trained(*ALL), slow=True),
    Row("schedule", append(f"{PACKAGE}/train/trainer.py"), trained(*ALL), slow=True),
    Row("precision", append(f"{PACKAGE}/train/precision.py"), runs(*ALL), slow=True),
    Row("optimiser", append(f"{PACKAGE}/train/step.py"), runs(*ALL), slow=True),
    Row("throughput", append(f"{PACKAGE}/measure/throughput.py"), timed(*ALL)),
    Row("profile", append(f"{PACKAGE}/extensions/profile/trace.py"), profiled(*ALL)),
    Row("tuning", append(f"{PACKAGE}/extensions/tune/tune.py"), tuned(*ALL)),
    # Code around a stage does not affect the stage's results. Exception: core/text.py formats numbers on pages.
    Row("guards", both(*(append(file_of(name)) for name in sorted(GUARDS) if name != "dlscale.core.text")), []),
    Row("numbers in words", append(f"{PACKAGE}/core/text.py"), tables(*CONFIG["plans"])),
    Row("code around a training", both(*(append(file_of(f"dlscale.train.{name}")) for name in AROUND)), []),
    Row("provenance", append(f"{PACKAGE}/train/provenance.py"), tables(*CONFIG["plans"]), slow=True),
    # Code that writes telemetry affects no result. Resource use is part of timings; tables read telemetry.
    Row("usage", append(f"{PACKAGE}/measure/processes.py"), timed(*ALL)),
    Row("telemetry", append(f"{PACKAGE}/measure/telemetry.py"), []),
    Row("rows of telemetry", append(f"{PACKAGE}/core/telemetry.py"), tables(*CONFIG["plans"]), slow=True),
    # Descriptions, messages and log lines affect no result; defaults, bounds and validators do.
    Row(
        "a key's description", replace(f"{PACKAGE}/config/run.py", "Ranks of the profiled", "The ranks of profiled"), []
    ),
    Row(
        "a message, a log line",
        both(
            replace(f"{PACKAGE}/train/trainer.py", "asked to end; saved after", "ended; saved after"),
            replace(f"{PACKAGE}/train/trainer.py", "before training: valid loss", "untrained: valid loss"),
        ),
        [],
    ),
    Row("a key's default", replace(f"{PACKAGE}/config/run.py", "Field(5, desc", "Field(4, desc"), runs(*ALL)),
    Row(
        "a key's bound",
        replace(f"{PACKAGE}/config/run.py", "Field([0], min_length=1", "Field([0], min_length=2"),
        runs(*ALL),
        slow=True,
    ),
    Row(
        "a validator",
        replace(f"{PACKAGE}/config/run.py", "for kind in kinds if kind not", "for kind in kinds[1:] if kind not"),
        runs(*ALL),
        slow=True,
    ),
    # In the table of stages, a stage's description or an additional stage affects no job.
    Row("a stage's text", replace(f"{PACKAGE}/core/stages.py", "Train one run; resume", "Train a run; resume"), []),
    Row(
        "an additional stage",
        replace(f"{PACKAGE}/core/stages.py", COLLECT, f'    "new": Stage("dlscale.new", "New.", "page"),\n{COLLECT}'),
        [],
    ),
    # A changed record affects the stages that write it, and the pages or tables that read it.
    Row(
        "tuning's record",
        extended("extensions/tune/records.py", "Duel"),
        [*tuned(*ALL), *pages(*CONFIG["plans"]), "report"],
    ),
    Row("a plan's record", extended("config/records.py", "PlanRecord"), tables(*CONFIG["plans"]), slow=True),
    # A picture is a result of the stage that draws the picture.
    Row("preview", append(f"{PACKAGE}/data/preview.py"), previews(*ALL)),
    # Code of pages affects only pages. Code of tables, and published figures, also affect tables.
    Row("report page", append(f"{PACKAGE}/report/report.py"), REPORTS),
    Row(
        "report template", append(f"{PACKAGE}/report/templates/report.html.j2", "<!-- edited -->\n"), REPORTS, slow=True
    ),
    Row("report style", append(f"{PACKAGE}/report/templates/style.css", "/* edited */\n"), REPORTS, slow=True),
    Row("report's plots", append(f"{PACKAGE}/report/figures.py"), REPORTS, slow=True),
    Row(
        "published figure",
        replace(
            f"{PACKAGE}/extensions/era5_vit/study.yaml",
            "\npublished:\n",
            "\npublished:\n  - {label: edited, samples_per_second: 1.0, source: nobody}\n",
        ),
        ["configure_plan era5", *tables("era5")],
    ),
    Row("table", append(f"{PACKAGE}/report/collect.py"), tables(*CONFIG["plans"])),
    # These edits affect no result.
    Row("unused module", create(f"{PACKAGE}/data/unused.py"), []),
    Row("unused download", replace(f"{PACKAGE}/data/acquire.py", '"""', '"""Edited. '), []),
    Row("unused Zarr reader", append(f"{PACKAGE}/extensions/era5_vit/era5/zarr.py"), [], slow=True),
    Row("command line", append(f"{PACKAGE}/cli.py"), []),
    Row("README", append("README.md", "Edited.\n"), []),
    Row("touched source", touch(f"{PACKAGE}/extensions/cosmo_unet/model.py"), []),
    Row("touched package", touch(f"{PACKAGE}/__init__.py"), [], slow=True),
    Row("touched configuration", touch("config.yaml"), [], slow=True),
    Row("touched manifest", touch("results/data/boxes/manifest.json"), []),
    Row("comment in a rule", append("rules/train.smk", "\n# Edited.\n"), []),
    Row("comment in the Snakefile", append("Snakefile", "\n# Edited.\n"), [], slow=True),
    Row("a rule's message", replace("rules/train.smk", '"Train ', '"Edited: train '), []),
    Row("a rule's threads", replace("rules/train.smk", "threads: RUNS.train_threads", "threads: 32"), []),
    Row("number of cores", touch("config.yaml"), [], ("--cores", "1")),
    Row(
        "a profile's value", replace("profiles/local/profile.yaml", "latency-wait: 2", "latency-wait: 3"), [], slow=True
    ),
    Row("another profile", touch("config.yaml"), [], ("--profile", "perlmutter")),
    Row(
        "a dataset that no run uses", configure("datasets.more", {"kind": "cosmo", "source": {"kind": "simulated"}}), []
    ),
    Row("site's GPUs: the commands have another --device", configure("site", {"gpu": True}), []),
    Row(
        "a tuned run's learning rate",
        configure("plans.tuned.runs.mine.optimizer.lr", 5e-3),
        [],
    ),
    # These two edits come after all other harmless edits of the configuration, which would overwrite tiny.yaml.
    Row("order of keys", reorder, []),
    Row("comment in the configuration", append("tiny.yaml", "\n# Edited.\n"), []),
    # Snakemake's own code trigger detects a changed command of a rule.
    Row(
        "a rule's command",
        replace("rules/measure.smk", "{params.launch:q} throughput", "{params.launch:q} throughput --device cpu"),
        timed(*ALL),
    ),
    # A key of the configuration affects the stages that use the key.
    Row(
        "a study's learning rate",
        configure("studies.era5_vit.optimizer.lr", 2e-3),
        [*trained("years")],
    ),
    # Keys that do not change the work of a step rerun only the training. Weight decay adds work.
    Row(
        "a seed, a schedule, betas",
        configure(
            "plans.cosmo.runs.unet",
            {"label": TITLE, "seed": 5, "schedule": {"kind": "constant"}, "optimizer": {"betas": [0.8, 0.99]}},
        ),
        LEARNT,
    ),
    Row(
        "weight decay instead of none",
        configure("plans.cosmo.runs.unet.optimizer.weight_decay", 0.1),
        [*LEARNT, "throughput cosmo unet", "profile cosmo unet", "throughput cosmo ceiling"],
    ),
    Row(
        "a run's learning rate",
        configure("plans.again.runs.faster.optimizer.lr", 5e-3),
        ["train again faster", "collect again", "report_plan again", "report"],
    ),
    Row(
        "weights of another run",
        configure("plans.again.runs.faster.training.weights", f"{RESULTS}/plans/cosmo/unet/model.pt"),
        ["train again faster", "collect again", "report_plan again", "report"],
    ),
    Row(
        "epochs",
        configure("plans.era5.settings.training.epochs", 3),
        [*trained("years")],
    ),
    Row(
        "number of trials",
        configure("plans.era5.settings.throughput.trials", 3),
        [*timed("years")],
    ),
    Row(
        "values that tuning tries",
        configure("plans.tuned.settings.tune.workers", [0, 2]),
        [*tuned("boxes")],
    ),
    Row(
        "two settings that swap their values",
        configure("plans.era5.settings.throughput", {"warmup": 0, "trials": 3, "batches": 2}),
        [*timed("years")],
    ),
    Row(
        "numbers of samples that swap their values",
        configure("plans.cosmo.runs.unet.samples", {"train": 8, "valid": 12}),
        [
            *("train cosmo unet", "throughput cosmo unet", "profile cosmo unet"),
            *tables("cosmo", "again"),  # plan `again` reuses this run
        ],
    ),
    # The plan's second run, `ceiling`, has a paired timing with the first run, `unet`. The timing of `ceiling` reruns
    # only if the steps of `unet` do other work.
    Row(
        "the first run's learning rate",
        configure("plans.cosmo.runs.unet.optimizer.lr", 5e-3),
        LEARNT,
    ),
    Row(
        "the first run's batch size",
        configure("plans.cosmo.runs.unet.batch_size", 2),
        [
            *("train cosmo unet", "throughput cosmo unet", "profile cosmo unet"),
            *("throughput cosmo ceiling", *tables("cosmo", "again")),
        ],
    ),
    Row("batch size", configure("plans.era5.settings.batch_size", 2), [*runs("years")]),
    Row("report's title", configure("report.title", "Edited"), ["report"]),
    Row(
        "plan's title",
        configure("plans.era5.title", "Edited"),
        ["configure_plan era5", *tables("era5")],
    ),
    Row(
        "run's label",
        configure("plans.era5.runs.vit.label", "Edited"),
        ["configure_plan era5", *tables("era5")],
    ),
    Row(
        "downsampling",
        configure("datasets.years.downsample", 2),
        [*since("preprocess", "years")],
    ),
    Row(
        "storage type",
        configure("datasets.boxes.storage.dtype", "float16"),
        [*since("preprocess", "boxes")],
    ),
    Row(
        "pieces",
        configure("datasets.boxes.pieces", 1),
        [*(job for job in since("preprocess", "boxes") if not job.endswith(" 1"))],
    ),
    Row(
        "simulator's seed",
        configure("datasets.years.source.seed", 4),
        [*since("acquire", "years")],
    ),
    Row(
        "one more year",
        configure("datasets.years.source.train", [2001, 2003]),
        [
            "acquire years 2003.nc",
            *("preprocess years train 2003 0", "assemble years train 2003"),
            *since("describe", "years"),
        ],
    ),
    Row(
        "one more run",
        configure("plans.era5.runs.more", {"model": {"depth": 1}}),
        [
            *("configure_plan era5", "train era5 more", "throughput era5 more"),
            *tables("era5"),
        ],
    ),
    Row(
        "one run less",
        # also remove the plan's settings, which only this run uses
        both(configure("plans.again.settings", None), configure("plans.again.runs.faster", None)),
        ["configure_plan again", "collect again", "report_plan again", "report"],
    ),
    # On a purged disk, a missing file is made again if a job needs the file; all jobs that depend on the file follow.
    Row("raw file purged", delete("data/boxes/source/box000.h5"), []),
    Row("data file purged", delete("data/boxes/train/box000.h5"), []),
    Row(
        "data file purged, and needed",
        both(delete("data/boxes/train/box000.h5"), append(f"{PACKAGE}/extensions/cosmo_unet/model.py")),
        [
            *("preprocess boxes train box000 0", "preprocess boxes train box000 1", "assemble boxes train box000"),
            *since("describe", "boxes"),
        ],
    ),
    Row(
        "data file and raw file purged, and needed",
        both(
            delete("data/boxes/train/box000.h5", "data/boxes/source/box000.h5"),
            append(f"{PACKAGE}/extensions/cosmo_unet/model.py"),
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
    Row("weights purged", delete("plans/era5/vit/model.pt"), trained("years")),
    Row("statistics purged", delete("data/years/stats"), []),
    Row(
        "statistics purged, and needed",
        both(delete("data/years/stats"), append(f"{PACKAGE}/extensions/era5_vit/model.py")),
        since("describe", "years"),
    ),
    Row("page purged", delete("report/index.html"), ["report"]),
]


#: Edits that rerun no job and need no arguments; `test_harmless_edits_rerun_no_job` applies all of them together.
HARMLESS = [row for row in ROWS if not (row.jobs or row.arguments)]


def test_harmless_edits_rerun_no_job(finished: tuple[Tree, Outcome]) -> None:
    """Harmless edits, all at once, make no job run. If a job would run, the failed assertion shows its reason."""
    tree, _ = finished
    undo = both(*(row.edit for row in HARMLESS))(tree)
    try:
        text = (tree.path / "tiny.yaml").read_text()
        assert text.startswith("site:") and text.endswith("# Edited.\n"), "one of the edits has undone another edit"
        planned = tree.planned()
    finally:
        undo()
    assert planned.names == [], {str(job): job.reason for job in planned.jobs}
    assert len(HARMLESS) > 20


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.slow] if row.slow else [], id=row.name)
        for row in ROWS
        if row not in HARMLESS
    ],
)
def test_an_edit_reruns_exactly_the_affected_jobs(row: Row, finished: tuple[Tree, Outcome]) -> None:
    tree, _ = finished
    undo = row.edit(tree)
    try:
        planned = tree.planned(*row.arguments)
    finally:
        undo()
    reasons = {str(job): job.reason for job in planned.jobs}
    assert planned.names == sorted(set(row.jobs)), reasons
    # The next row's test, or the last test, checks that the edit was undone.


def test_undone_edits_rerun_no_job(finished: tuple[Tree, Outcome]) -> None:
    """No job would run after all edits were undone."""
    assert finished[0].planned().names == []


@pytest.mark.slow
def test_jobs_of_the_dry_run_are_executed(clone: Tree) -> None:
    """The jobs of the dry run are executed, then nothing is left to do. Undoing the edit reruns the same jobs."""
    undo = configure("plans.era5.settings.throughput.trials", 1)(clone)
    planned = clone.planned().names
    done = clone.snakemake("--cores", "2", "--", *TARGETS)
    assert done.status == 0, done.output
    assert done.names == planned == sorted([*timed("years")])
    assert "replaces the results of era5.vit (throughput); to keep them, define a new run" in done.output
    measured = json.loads((clone.results / "plans/era5/vit/throughput.json").read_text())
    assert len(measured["FULL"]["trial_throughput"]) == 1
    assert clone.planned().names == []
    undo()
    assert clone.planned().names == planned


def test_table_covers_all_jobs(finished: tuple[Tree, Outcome]) -> None:
    """`EVERYTHING`, with which rows name their jobs, has exactly the jobs of the workflow. If not, adapt `jobs.py`."""
    assert finished[1].names == sorted(set(EVERYTHING))


# ---- fingerprints, compared with the modules that the stages of the finished workflow imported ---------


def test_a_fingerprint_contains_exactly_the_imported_modules(
    finished: tuple[Tree, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage's fingerprint contains exactly the modules that the stage imported.

    Exceptions are guards, definitions that the stage does not use, modules of the command line, code that only fetches
    a raw file, and a study's parts for other stages.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_added", {})
    registry.add("waves", finished[0].path / f"../{OUTSIDE}/waves.py")
    own = set(finished[0].python("import dlscale.cli, json, sys; print(json.dumps(list(sys.modules)))"))
    # Settings import the modules of all kinds of dataset. `reachable` below adds the external module waves_data.
    kinds = [module for module in registry.kinds().values() if module != "waves_data"]
    own |= {
        "dlscale.datasets",
        *kinds,
        *(f"{module}.kind" for module in kinds),
        *(settings.__module__ for settings in registry.loader_settings()),
        *reachable(["waves"], whole=True),
        # Settings of programs, which the settings of a run contain; the self-test before the first step; the watch on
        # memory, which changes no result; the watchdog's texts, which are loaded if a step takes seconds.
        *reachable(
            [
                module
                for name in ("Program", "self_test", "watch_training", "waiting_place")
                for module in registry.provider(name)
            ],
            whole=True,
        ),
    }
    stages_seen = []
    for file in finished[0].imports.iterdir():
        process = json.loads(file.read_text())
        name, imported = process["arguments"][0], set(process["modules"])
        modules = entries(finished[0], process["arguments"])
        expected = set(reachable(modules))
        whole = set(reachable([*modules, STAGES[name].module], whole=True))
        if name == "acquire":
            whole |= set(reachable(["dlscale.data.acquire", "dlscale.data.parts", "dlscale.core.progress"], whole=True))
            whole |= {"dlscale.data.acquire", "dlscale.core.settings"}
        if name == "collect":  # `collect` writes the live page; the report stage writes the complete page
            whole |= set(reachable(["dlscale.report.report", *registry.page_modules()], whole=True))
        assert imported - own <= whole, f"{name}: the stage imported modules that its fingerprint lacks"
        brought = set(reachable({study.module for study in registry.studies().values()} & set(modules)))
        assert expected - brought - own <= imported, f"{name}: the fingerprint has modules that the stage does not need"
        stages_seen.append(name)
    # No job of these stages runs here: the container engine detects changes of an image, `test_sweep.py` tests sweeps,
    # and `test_programs.py` tests programs.
    assert set(stages_seen) == set(STAGES) - {"image", "promote", "program", "checkout", "headroom"}
    assert len(stages_seen) == len(finished[1].names)


def entries(tree: Tree, arguments: list[str]) -> list[str]:
    """Return the modules of a stage's fingerprint, given the stage's command-line arguments."""
    name = arguments[0]
    config = arguments[arguments.index("--config") + 1] if "--config" in arguments else ""
    if name in RUN_STAGES:
        run = load_run(config, name)
        return [*run_modules(name, run.study, *run.loaders(name)), *STAGES[name].imports(run)]
    if name == "preview":
        manifest = tree.path / arguments[arguments.index("--manifest") + 1]
        return data_modules(name, json.loads(manifest.read_text())["kind"])
    if name in ("acquire", "preprocess", "describe"):
        dataset = load_dataset(config)
        return data_modules(name, dataset.kind, parts.kind_of(dataset).maker(dataset))
    return [STAGES[name].module, *(registry.page_modules() if name == "report" else [])]


def test_the_copied_package_runs(finished: tuple[Tree, Outcome]) -> None:
    place = finished[0].python("import dlscale, json; print(json.dumps(dlscale.__file__))")
    assert place == str(finished[0].path / PACKAGE / "__init__.py")
