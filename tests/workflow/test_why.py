"""`dlscale why` and the end of a dry run, after real changes; how a call meets its user: by the real workflow."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable

import pytest

from tests.workflow.conftest import RESULTS, Tree
from tests.workflow.test_changes import PACKAGE, append, configure, delete


def why(output: str) -> list[str]:
    """Return the lines at the end of a dry run."""
    found = re.search(r"\nWhy:\n((?:  .*\n?)*)", output)
    return [line.strip() for line in found[1].splitlines()] if found else []


def reasons(tree: Tree) -> list[str]:
    done = tree.snakemake("--dry-run", "--", "plan_era5")
    assert done.status == 0, done.output
    return why(done.output)


def test_what_changed_is_named(clone: Tree) -> None:
    """Settings by key, sources by file, both in one line; what is gone, and what was never there."""
    kept = r"; to keep them: a run of its own{} \(from: era5\.vit\)"
    model = f"{PACKAGE}/studies/era5_vit/model.py"
    for edit, lines in (
        (
            configure("plans.era5.settings.training.epochs", 3),
            r"era5\.vit \(train\): training\.epochs \d+ → 3\nand what follows from that: collect, report_plan\n"
            rf"replaces the results of era5\.vit \(train\){kept.format('')}",
        ),
        (
            configure("datasets.years.source.days", 4),
            r"(.+\n)+replaces the results of era5\.vit \(train, throughput\)"
            rf"{kept.format(', on a dataset of its own')}",
        ),
        (append(model), r"era5\.vit \(train, throughput\): studies/era5_vit/model\.py changed\n.+"),
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
def test_what_was_cut_short_was_not_asked_for(make_tree: Callable[..., Tree]) -> None:
    """Snakemake marks the outputs of a job that runs, and forces it where the mark is found later."""
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
    """In words, and as JSON."""
    configure("plans.era5.settings.training.epochs", 3)(clone)
    asked = "python -m dlscale why --configfile tiny.yaml"
    done = clone.shell(f"{asked} -- plan_era5")
    assert done.returncode == 0 and done.stdout.splitlines()[0].startswith("era5.vit (train): training.epochs "), done
    told = json.loads(clone.shell(f"{asked} --json -- plan_era5").stdout)
    assert told == {"reasons": done.stdout.splitlines(), "lost": []}


@pytest.mark.slow
def test_another_image_makes_all_again(clone: Tree) -> None:
    """What was computed natively is computed again in a container, and says so; fetched files stay."""
    (clone.path / "image.sif").write_bytes(b"an image")
    configure("site", {"engine": "apptainer", "image": "image.sif"})(clone)
    done = clone.snakemake("--dry-run", "-p", "--", "plan_era5")
    assert {"preprocess", "describe", "train", "throughput", "collect"} <= {job.rule for job in done.jobs}
    assert any("data years (" in line and "image none → " in line for line in why(done.output)), done.output


# ---- how a call meets its user -------------------------------------------------------------------------


def test_what_is_typed_is_what_snakemake_is_told(make_tree: Callable[..., Tree]) -> None:
    """A plan by its name, a dotted key, files, and options of Snakemake's behind."""
    tree = make_tree()
    run = "python -m dlscale run --configfile tiny.yaml"
    typed = tree.shell(f"{run} era5 -n training.epochs=3")
    told = tree.shell(
        """snakemake -n --configfile tiny.yaml --config 'plans={"era5": {"settings": {"training": {"epochs": 3}}}}' """
        "-- plan_era5"
    )
    assert typed.returncode == told.returncode == 0, typed
    free = re.compile(r"space: \S+ .?B of")  # of the disk, which others fill and empty meanwhile
    assert free.sub("", typed.stderr) == free.sub("", told.stderr) and typed.stdout == told.stdout
    assert why(typed.stderr)[0].startswith("data years (") and "until the end" in typed.stderr.splitlines()[-1]
    assert why(tree.shell(f"{run} plan_era5 -n training.epochs=3 --cores 1").stderr) == why(typed.stderr)


def test_a_call_is_shown(make_tree: Callable[..., Tree]) -> None:
    """How far it is, and what we say; not what Snakemake says of each job, which is in its log."""
    tree = make_tree()
    run = "python -m dlscale run --configfile tiny.yaml data_waves"
    done = tree.shell(run)
    assert done.returncode == 0 and done.stdout == "", done
    lines = done.stderr.splitlines()
    assert any(re.match(r"\d+\s% after .*; about .* left; \d+ of \d+ jobs", line) for line in lines)
    assert lines[-1] == f"Preview: {tree.results}/data/waves/preview.png"
    assert not any(word in done.stderr for word in ("Job stats", "Finished jobid", "Select jobs", "Building DAG"))
    (log,) = (tree.path / ".snakemake/log").iterdir()
    assert "Finished jobid" in log.read_text()
    tree.config["plans"]["era5"]["settings"]["seed"] = 4711  # while its jobs wait in a queue
    tree.write()
    job = "snakemake --mode remote -n -p --cores 1 --configfile tiny.yaml -- plan_era5"
    told = tree.shell(f"DLSCALE_CALLED=$PWD/.snakemake/called.json {job}"), tree.shell(job)
    assert ["4711" in each.stdout + each.stderr for each in told] == [False, True], told
    again = tree.shell(run)
    assert again.returncode == 0 and "Nothing to be done" in again.stderr and lines[-1] in again.stderr
    listed = tree.shell(f"{run} --cores 1 --summary")  # it makes nothing, and prints by itself
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
