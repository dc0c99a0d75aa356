"""`dlscale cost` prices what the workflow itself would run, after real changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.workflow.conftest import Tree
from tests.workflow.test_changes import PACKAGE, append, configure
from tests.workflow.test_sweep import PLAN


def priced(tree: Tree, plan: str, *words: str) -> list[str]:
    """Return the names and stages that the table lists, or its one line."""
    done = tree.shell(" ".join(["python -m dlscale cost --configfile tiny.yaml", *words, "--", plan]))
    assert done.returncode == 0 and not done.stderr, done
    head, *rows = done.stdout.splitlines()
    return [" ".join(row.split()[:2]) for row in rows if row.split()[0].startswith(plan)] if rows else [head]


@pytest.mark.slow
def test_what_changed_would_run_though_its_results_are_there(clone: Tree) -> None:
    assert priced(clone, "era5") == ["Nothing to run: all results are there, and as they were asked for."]
    undo = configure("plans.era5.settings.training.epochs", 3)(clone)
    assert priced(clone, "era5") == ["era5.vit train"]
    undo()
    undo = append(f"{PACKAGE}/studies/era5_vit/model.py")(clone)
    assert priced(clone, "era5") == ["era5.vit throughput", "era5.vit train"]
    undo()


@pytest.mark.slow
def test_a_measurement_of_the_workflow_counts_while_the_work_is_the_same(clone: Tree) -> None:
    """More epochs are the same step; a wider model is another one."""
    for settings, basis in (({"training.epochs": 3}, "measured"), ({"model.embed_dim": 96}, "limit")):
        for key, value in settings.items():
            configure(f"plans.era5.settings.{key}", value)(clone)
        done = clone.shell("python -m dlscale cost --configfile tiny.yaml -- era5")
        (row,) = [line for line in done.stdout.splitlines() if line.startswith("era5.vit") and " train " in line]
        assert basis in row.split() and "1 node x 1 process" in row and "GPU" not in done.stdout, done


@pytest.mark.slow
def test_rungs_to_come_are_priced(make_tree: Callable[..., Tree]) -> None:
    """Which trials come there nobody knows yet, but how many; on a site that is named by its path, too."""
    swept: dict[str, Any] = json.loads(json.dumps(PLAN))
    tree = make_tree({"results": "results", "plans": {"swept": swept}, "targets": ["swept"]})
    tree.config["plans"]["swept"]["settings"]["dataset"] = "mnist_simulated"
    tree.write()
    trials = ["swept.lr-0p5-rung0 train", "swept.lr-1e30-rung0 train", "swept.lr-0p5-rung1 train"]
    for site in ((), ("--profile", "perlmutter"), ("--profile", "profiles/perlmutter/site.yaml")):
        assert sorted(priced(tree, "swept", *site)) == sorted(trials)
    (tree.path / "mysite").mkdir()
    (tree.path / "profiles/perlmutter/site.yaml").rename(tree.path / "mysite/site.yaml")
    assert sorted(priced(tree, "swept", "--profile", "mysite/site.yaml")) == sorted(trials)


@pytest.mark.slow
def test_where_the_workflow_cannot_say(make_tree: Callable[..., Tree]) -> None:
    """Files of others are not there yet: what lacks results is priced, and that is said."""
    tree = make_tree({"results": "results"})
    done = tree.shell("python -m dlscale cost --configfile tiny.yaml -- mnist_t10k")
    assert done.returncode == 0 and "mnist_t10k." in done.stdout, done
    assert "t10k-images-idx3-ubyte" in done.stderr and "The workflow cannot say what would run" in done.stderr
