"""`dlscale why` and the end of a dry run: the real workflow, after real changes."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable

import pytest

from tests.workflow.conftest import Tree
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
