"""`dlscale why`, the end of a dry run after changes, and the output of a call, with the real workflow."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Callable

import numpy as np
import pytest

from tests.workflow.conftest import RESULTS, Tree
from tests.workflow.test_changes import PACKAGE, append, configure, delete


def why(output: str) -> list[str]:
    """Return the reasons at the end of a dry run, one per line."""
    found = re.search(r"\nWhy:\n((?:  .*\n?)*)", output)
    return [line.strip() for line in found[1].splitlines()] if found else []


def reasons(tree: Tree) -> list[str]:
    done = tree.snakemake("--dry-run", "--", "plan_era5")
    assert done.status == 0, done.output
    return why(done.output)


@pytest.mark.slow
def test_changed_settings_and_sources_are_named(clone: Tree) -> None:
    """Changed settings are named by key, changed sources by file; deleted results and results never made are listed."""
    kept = r"; to keep them, {} \(`from: era5\.vit`\)"
    model = f"{PACKAGE}/extensions/era5_vit/model.py"
    for edit, lines in (
        (
            configure("plans.era5.settings.training.epochs", 3),
            r"era5\.vit \(train\): training\.epochs \d+ → 3\nand jobs that depend on these: collect, report_plan\n"
            rf"replaces the results of era5\.vit \(train\){kept.format('define a new run')}",
        ),
        (
            configure("datasets.years.source.days", 4),
            r"(.+\n)+replaces the results of era5\.vit \(train, throughput\)"
            rf"{kept.format('give the changed dataset a new name, and use it in a new run')}",
        ),
        (append(model), r"era5\.vit \(train, throughput\): extensions/era5_vit/model\.py changed\n.+"),
        (append(model, "\n# A comment.\n"), ""),
        (delete("plans/era5/vit/throughput.json"), r"era5\.vit \(throughput\): throughput\.json is gone(\n.+)*"),
        (
            configure("plans.era5.runs.more", {"model": {"depth": 1}}),
            r"(.+\n)*era5\.more \(train, throughput\): never made(\n.+)*",
        ),
    ):
        undo = edit(clone)
        told = "\n".join(reasons(clone))
        undo()
        assert re.fullmatch(lines, told), told


@pytest.mark.slow
def test_an_interrupted_job_reruns(make_tree: Callable[..., Tree]) -> None:
    """Snakemake marks the outputs of a running job. If a later call finds the mark, the job reruns."""
    tree = make_tree()
    output = tree.results / "plans/era5/vit/throughput.json"
    output.parent.mkdir(parents=True)
    output.touch()
    mark = tree.path / ".snakemake/incomplete"
    mark /= base64.urlsafe_b64encode(str(output.relative_to(tree.path)).encode()).decode()
    mark.parent.mkdir(parents=True)
    mark.touch()
    assert "era5.vit (throughput): interrupted" in reasons(tree)


@pytest.mark.slow
def test_the_question(clone: Tree) -> None:
    """`dlscale why` prints the reasons as text and as JSON."""
    configure("plans.era5.settings.training.epochs", 3)(clone)
    asked = "python -m dlscale why --configfile tiny.yaml"
    done = clone.shell(f"{asked} -- plan_era5")
    assert done.returncode == 0 and done.stdout.splitlines()[0].startswith("era5.vit (train): training.epochs "), done
    told = json.loads(clone.shell(f"{asked} --json -- plan_era5").stdout)
    assert told == {"reasons": done.stdout.splitlines(), "lost": []}


@pytest.mark.slow
def test_another_image_reruns_all_stages(clone: Tree) -> None:
    """If a container is configured, results computed without it are recomputed, with the reason."""
    (clone.path / "image.sif").write_bytes(b"an image")
    configure("site", {"engine": "apptainer", "image": "image.sif"})(clone)
    done = clone.snakemake("--dry-run", "-p", "--", "plan_era5")
    assert {"preprocess", "describe", "train", "throughput", "collect"} <= {job.rule for job in done.jobs}
    assert any("data years (" in line and "image none → " in line for line in why(done.output)), done.output


# ---- output of a call ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_dlscale_run_passes_arguments_to_snakemake(make_tree: Callable[..., Tree]) -> None:
    """`dlscale run` passes a plan's name, a dotted key, files and Snakemake's options on to Snakemake."""
    tree = make_tree()
    run = "python -m dlscale run --configfile tiny.yaml"
    typed = tree.shell(f"{run} era5 -n training.epochs=3")
    told = tree.shell(
        """snakemake -n --configfile tiny.yaml --config 'plans={"era5": {"settings": {"training": {"epochs": 3}}}}' """
        "-- plan_era5"
    )
    assert typed.returncode == told.returncode == 0, typed
    # Ignore the line that names the profile, which `dlscale run` leaves out, and the free space, which changes.
    free = re.compile(r"^Using .*\n|space: \S+ .?B of", re.MULTILINE)
    assert free.sub("", typed.stderr) == free.sub("", told.stderr) and typed.stdout == told.stdout
    assert why(typed.stderr)[0].startswith("data years (") and typed.stderr.endswith("no such job has run here\n")
    assert why(tree.shell(f"{run} plan_era5 -n training.epochs=3 --cores 1").stderr) == why(typed.stderr)


@pytest.mark.slow
def test_the_terminal_shows_progress_and_messages(make_tree: Callable[..., Tree]) -> None:
    """The terminal shows progress and dlscale's messages; Snakemake's log has its messages about jobs."""
    tree = make_tree()
    run = "python -m dlscale run --configfile tiny.yaml data_waves"
    done = tree.shell(run)
    assert done.returncode == 0 and done.stdout == "", done
    lines = done.stderr.splitlines()
    assert any(re.match(r"\d+\s% after .*(at least .* left|time left unknown); \d+ of 6 jobs", line) for line in lines)
    assert lines[-1] == f"Preview: {tree.results}/data/waves/preview.png"
    assert not any(word in done.stderr for word in ("Job stats", "Finished jobid", "Select jobs", "Building DAG"))
    (log,) = (tree.path / ".snakemake/log").iterdir()
    assert "Finished jobid" in log.read_text()
    tree.config["plans"]["era5"]["settings"]["seed"] = 4711  # simulate a change while jobs wait in a queue
    tree.write()
    job = "snakemake --mode remote -n -p --cores 1 --configfile tiny.yaml -- plan_era5"
    told = tree.shell(f"DLSCALE_CALLED=$PWD/.snakemake/called.json {job}"), tree.shell(job)
    assert ["4711" in each.stdout + each.stderr for each in told] == [False, True], told
    again = tree.shell(run)
    assert again.returncode == 0 and "Nothing to be done" in again.stderr and lines[-1] in again.stderr
    listed = tree.shell(f"{run} --cores 1 --summary")  # `--summary` makes no file and prints Snakemake's own output
    assert listed.returncode == 0 and listed.stdout.startswith("output_file\t"), listed
    told = tree.shell(f"{run} -p --forcerun preview")
    assert told.returncode == 0 and "Finished jobid" in told.stderr
    assert f"Shell command: {sys.executable} -P -m dlscale " in told.stderr
    (tree.results / "data/waves/manifest.json").unlink()
    (tree.results / "data/waves/preview.png").unlink()
    locked = tree.path / ".snakemake/locks"
    locked.mkdir(parents=True, exist_ok=True)
    (locked / "0.output.lock").write_text(f"{RESULTS}/data/waves/manifest.json\n")
    wrong = tree.shell(run)
    assert wrong.returncode == 1 and wrong.stderr.startswith("LockException:\n") and "--unlock" in wrong.stderr


@pytest.mark.slow
def test_raw_files_that_are_replaced_are_seen(make_tree: Callable[..., Tree]) -> None:
    """A replaced raw file is detected even if it is older, also in a study's own kind of dataset.

    If a raw file is missing, its dataset is kept. A file that the study opens without naming it in `parts` is an error.
    """
    array = {"channels": ["f"]}
    arrays = {"kind": "arrays", "all": {"input": "mine.npz", "target": "mine.npz"}, "input": array, "target": array}
    starter = {"kind": "starter", "source": {**arrays, "shares": {"train": 0.5, "valid": 0.5}}}
    datasets = {"squares": starter, "curves": {"kind": "own"}}
    tree = make_tree({"results": "results", "studies": {"own": "own.py"}, "datasets": datasets})
    (tree.path / "own.yaml").write_text("settings: {}\n")
    named = """
from typing import Literal
import numpy as np
from dlscale import ArraySource, DatasetKind, DatasetSettings, Part, RawFile, Strict

class Settings(DatasetSettings):
    kind: Literal["own"]

class Own(DatasetKind):
    name, Settings = "own", Settings
    def parts(self, dataset):
        raw = RawFile("y.npy", "y.npy")
        return [Part("train", "train", (raw,), (0, 0.5)), Part("valid", "valid", (raw,), (0.5, 1))]

def open_source(dataset, part, paths):
    y = np.load(paths[0])
    return ArraySource({"y": y[: len(y) // 2] if part.split == "train" else y[len(y) // 2 :]})

class Study:
    dataset, Model, Loss = "own", Strict, Strict

KINDS, STUDY = [Own()], Study()
"""
    (tree.path / "own.py").write_text(named)

    def write(factor: float, age: int = 0) -> None:
        values = np.arange(16.0, dtype=np.float32).reshape(4, 1, 2, 2) * factor
        np.savez(tree.path / "mine.npz", input=values, target=values)
        np.save(tree.path / "y.npy", values[:, 0, 0, 0])
        for name in ("mine.npz", "y.npy"):
            os.utime(tree.path / name, (1.7e9 - age, 1.7e9 - age))

    def maximum(name: str, field: str) -> float:
        manifest = json.loads((tree.results / f"data/{name}/manifest.json").read_text())
        return float(manifest["fields"][field]["maximum"][0])

    targets = ["data_squares", "data_curves"]
    write(1)
    done = tree.snakemake("--cores", "2", "--", *targets)
    assert done.status == 0, done.output[-3000:]
    write(10, age=1000)
    planned = tree.snakemake("--dry-run", "--", *targets)
    lines = why(planned.output)
    assert all(any(name in line for line in lines) for name in ("files.mine.npz", "files.y.npy")), planned.output
    assert tree.snakemake("--cores", "2", "--", *targets).status == 0
    assert maximum("squares", "input") == 70 and maximum("curves", "y") == 40
    for name in ("mine.npz", "y.npy"):
        (tree.path / name).unlink()
    planned = tree.snakemake("--dry-run", "--", *targets)
    assert (
        planned.status == 0 and "using the dataset that was made from it" in planned.output and not why(planned.output)
    )
    write(10, age=1000)
    (tree.path / "own.py").write_text(named.replace("np.load(paths[0])", "np.load('y.npy') + 0 * np.load('z.npy')"))
    np.save(tree.path / "z.npy", np.zeros(4))
    refused = tree.snakemake("--cores", "2", "--", *targets)
    assert refused.status != 0 and "z.npy: opened by the study's own code, but not named in `parts`" in refused.output
