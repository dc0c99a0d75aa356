"""What keeps runs of this machine from starting is said before the first job, not by the job that meets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workflow.conftest import Tree
from tests.workflow.test_changes import configure


def failures(tree: Tree, command: str) -> list[str]:
    done = tree.shell(f"{command} --configfile tiny.yaml -- plan_era5")
    assert done.returncode == 1
    if "-n" in command:
        assert done.stderr.endswith("\n1 check fails: nothing would start\n"), done.stderr
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("FAIL")]


@pytest.mark.slow
def test_weights_that_are_not_there_are_said_with_their_key(make_tree: Callable[..., Tree]) -> None:
    tree = make_tree()
    configure("plans.era5.settings.training.weights", "nothing.pt")(tree)
    done = tree.shell("snakemake -n --configfile tiny.yaml -- plan_era5")
    assert done.returncode != 0
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("FAIL")]
    assert said == [
        "FAIL  run era5.vit: nothing.pt: no such file or folder; name others in plans.era5.runs.vit.training.weights"
    ]


@pytest.mark.slow
def test_what_a_run_needs_is_asked_before_the_first_job(make_tree: Callable[..., Tree]) -> None:
    """And told at the end of a dry run, whose status says so; nothing is made."""
    tree = make_tree()
    configure("plans.era5.settings.cuda_graph", True)(tree)
    said = [
        "FAIL  run era5.vit: cuda_graph: only GPUs have graphs, and none is here; set it to false, or run where there "
        "is a GPU"
    ]
    without = "CUDA_VISIBLE_DEVICES= "
    assert failures(tree, f"{without}snakemake -n") == said
    assert failures(tree, f"{without}snakemake --cores 1") == said
    assert not list(tree.results.rglob("*.h5")) and not list(tree.results.rglob("manifest.json"))
    configure("plans.era5.settings.cuda_graph", False)(tree)
    configure("plans.era5.settings.precision", "fp16")(tree)
    done = tree.shell(f"{without}snakemake -n --configfile tiny.yaml -- plan_era5")
    assert done.returncode == 0 and "It would start, but:\n" in done.stderr, done.stderr
    assert "warn  run era5.vit: precision: most processors do not compute in fp16" in done.stderr


@pytest.mark.slow
def test_a_disk_without_space_is_said_before_the_first_job(make_tree: Callable[..., Tree], full_disk: Path) -> None:
    tree = make_tree()
    configure("results", str(full_disk))(tree)
    for command in ("snakemake -n", "snakemake --cores 1"):
        (said,) = failures(tree, command)
        assert said.startswith("FAIL  space: ") and f"free at {full_disk}" in said and "`results`" in said
    assert not list(full_disk.rglob("*.h5"))
