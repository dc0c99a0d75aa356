"""The page that a call ends with, Snakemake's own report, and data that are not where they were."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dlscale.core.files import OLDEST
from tests.workflow.conftest import Outcome, Tree
from tests.workflow.test_why import why

SETTINGS = {"dataset": "squares", "batch_size": 8, "model": {"hidden": 8}, "loader": {"workers": 0}}
NAMED = {"study": "starter_cnn", "measure": ["train"]}
PLAN = {**NAMED, "settings": {**SETTINGS, "training": {"epochs": 1}}}
SOURCE = {"kind": "arrays", "all": {"input": "mine.npz", "target": "mine.npz"}, "shares": {"train": 0.5, "valid": 0.5}}
#: `results` is that of config.yaml: its `index.html` belongs to the targets there.
CONFIG: dict[str, Any] = {
    "results": "results",
    "targets": ["one", "other"],
    "datasets": {"squares": {"kind": "starter", "source": SOURCE}},
    "plans": {"one": {**PLAN, "runs": {"a": {}}}, "other": {**NAMED, "runs": {"same": {"use": "one.a"}}}},
}
OWN = "report/one+other.html"


@pytest.fixture(scope="module")
def small(make_tree: Callable[..., Tree]) -> Tree:
    """Return a finished study, of arrays of a user's own."""
    tree = make_tree(CONFIG)
    values = np.random.default_rng(0).random((16, 1, 8, 8), dtype=np.float32)
    np.savez(tree.path / "mine.npz", input=values, target=values)
    (tree.results / "report").mkdir(parents=True)
    (tree.results / "report/index.html").write_text("of all plans")
    done = tree.snakemake("--cores", "2")
    assert done.status == 0, done.output[-3000:]
    assert shown(tree, done) == [OWN]
    return tree


def shown(tree: Tree, done: Outcome) -> list[str]:
    """Return what a call ends with: pages and pictures, inside the folder of results."""
    return [
        line.removeprefix(f"{tree.results.resolve()}/")
        for line in re.findall(r"^(?:Report|Preview): (.+)$", done.output, re.MULTILINE)
    ]


@pytest.mark.slow
def test_the_end_names_the_page_of_what_was_asked(small: Tree) -> None:
    """Also where nothing was to be done; the page of the targets in config.yaml stays as it is."""
    for targets, pages in (
        ([], [OWN]),
        (["plan_one", "plan_other"], ["plans/one/report.html", "plans/other/report.html"]),
        (["data_squares"], ["data/squares/preview.png"]),
    ):
        for _ in range(2):
            done = small.snakemake("--cores", "2", "--", *targets)
            assert (done.status, shown(small, done)) == (0, pages), (targets, done.output)
        assert "Nothing to be done" in done.output
    assert shown(small, small.snakemake("--cores", "2", "--config", 'targets=["other"]')) == ["report/other.html"]
    assert (small.results / "report/index.html").read_text() == "of all plans"


@pytest.mark.slow
def test_a_page_that_failed_is_written_by_the_next_call(small: Tree) -> None:
    """The one before stays, and does not pass for it: of its inputs the table alone is newer."""
    page, table, preview = (small.results / file for file in (OWN, "plans/one/summary.csv", "data/squares/preview.png"))
    before, made, drawn = page.read_bytes(), preview.stat().st_mtime_ns, preview.read_bytes()
    table.write_text(table.read_text() + "\n")
    preview.unlink()
    preview.mkdir()
    os.utime(preview, ns=(made, made))
    done = small.snakemake("--cores", "2")
    assert done.status == 1 and f"{preview.name}: a file stands where a folder is needed" in done.output
    assert page.read_bytes() == before and page.stat().st_mtime > OLDEST, "filled over by none"
    preview.rmdir()
    preview.write_bytes(drawn)
    os.utime(preview, ns=(made, made))
    assert "report (report): changed: " in small.snakemake("--dry-run").output
    done = small.snakemake("--cores", "2")
    assert (done.status, [job.rule for job in done.jobs if job.command]) == (0, ["report"])


@pytest.mark.slow
def test_snakemakes_own_report_says_what_is_unfinished(small: Tree) -> None:
    """It is made of finished plans, whatever else is in results; of others it is refused in one sentence."""
    more = 'plans={"other": {"from": "one.a", "runs": {"new": {"seed": 5}}}}'
    (small.results / "plans/half/made").mkdir(parents=True, exist_ok=True)
    (small.results / "plans/half/made/prediction.png").write_bytes(b"")
    for arguments in (["--report", "own.html", "--", "plan_one"], ["--report=own.html", "--", "data_squares"]):
        done = small.snakemake("--cores", "2", "--", *arguments[-1:])
        done = small.snakemake("--config", more, *arguments)
        assert done.status == 0 and "Report created." in done.output, done.output
    refused = small.snakemake("--config", more, "--report", "none.html")
    assert refused.status == 2 and not (small.path / "none.html").exists()
    assert refused.output.splitlines()[-1] == (
        "--report: unfinished: plan other (results/plans/other/new/prediction.png is not there); run the same command "
        "without --report first, or name finished targets, such as plan_NAME"
    )


@pytest.mark.slow
def test_what_is_gone_is_told(small: Tree) -> None:
    """Whatever a job makes again, and what none does: a folder that no rule names, what nothing asked for needs."""
    run, stats = small.results / "plans/one/a", small.results / "data/squares/stats"
    for gone in (run / "tensorboard", stats):
        gone.rename(small.path / gone.name)
    lost = (
        "is gone, and nothing asked for needs that; to make it again: snakemake --configfile tiny.yaml --force results/"
    )
    told = [
        f"one.a: tensorboard/ {lost}plans/one/a/metrics.jsonl",
        f"data squares: stats/ {lost}data/squares/manifest.json",
    ]
    assert why(small.snakemake("--dry-run").output) == told
    asked = small.shell("python -m dlscale why --configfile tiny.yaml")
    assert asked.stdout.splitlines() == ["Nothing would run.", *told]
    for file in ("model.pt", "metrics.jsonl"):
        (run / file).rename(small.path / file)
    dry = why(small.snakemake("--dry-run").output)
    assert dry[:2] == ["data squares (describe): stats/ is gone", "one.a (train): metrics.jsonl, model.pt are gone"], (
        dry
    )
    done = small.snakemake("--cores", "2")
    assert done.status == 0 and stats.is_dir() and (run / "tensorboard").is_dir(), done.output
