"""`dlscale cost` after real runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.workflow.conftest import Tree
from tests.workflow.test_changes import configure
from tests.workflow.test_sweep import PLAN


def priced(tree: Tree, plan: str, *words: str) -> list[str]:
    """Return the names and stages that the table lists, or its one line."""
    done = tree.shell(" ".join(["python -m dlscale cost --configfile tiny.yaml", *words, "--", plan]))
    assert done.returncode == 0 and not done.stderr, done
    head, *rows = done.stdout.splitlines()
    return [" ".join(row.split()[:2]) for row in rows if row.split()[0].startswith(plan)] if rows else [head]


@pytest.mark.slow
def test_a_measurement_of_the_workflow_counts_while_the_work_is_the_same(clone: Tree) -> None:
    """More epochs are the same step; a wider model is another one."""
    (clone.results / "plans/era5/vit/provenance.json").unlink()
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
