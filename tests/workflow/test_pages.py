"""Pages named at the end of a call, Snakemake's own report, and changed or missing data."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.workflow.conftest import Outcome, Tree
from tests.workflow.test_why import why

SETTINGS = {"dataset": "squares", "batch_size": 8, "model": {"hidden": 8}, "loader": {"workers": 0}}
NAMED = {"study": "starter_cnn", "measure": ["train"]}
PLAN = {**NAMED, "settings": {**SETTINGS, "training": {"epochs": 1}}}
SOURCE = {"kind": "arrays", "all": {"input": "mine.npz", "target": "mine.npz"}, "shares": {"train": 0.5, "valid": 0.5}}
#: Configuration with the results folder of config.yaml. Its page is `OWN`; `index.html` is the page of config.yaml.
CONFIG: dict[str, Any] = {
    "results": "results",
    "targets": ["one", "other"],
    "datasets": {"squares": {"kind": "starter", "source": SOURCE}},
    "plans": {"one": {**PLAN, "runs": {"a": {}}}, "other": {**NAMED, "runs": {"same": {"use": "one.a"}}}},
}
OWN = "report/one+other.html"


@pytest.fixture(scope="module")
def small(make_tree: Callable[..., Tree]) -> Tree:
    """Return a tree with a finished study on the user's own arrays."""
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
    """Return the pages and pictures that a call prints at its end; paths are relative to the results folder."""
    return [
        line.removeprefix(f"{tree.results.resolve()}/")
        for line in re.findall(r"^(?:Report|Preview): (.+)$", done.output, re.MULTILINE)
    ]


@pytest.mark.slow
def test_a_call_ends_with_the_page_of_the_targets(small: Tree) -> None:
    """The end of a call names its targets' pages, even if no job ran; the page of other targets is unchanged."""
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
    """After a failure, neither a partial page nor the old page remains, and the next call writes only the page."""
    page, table, preview = (small.results / file for file in (OWN, "plans/one/summary.csv", "data/squares/preview.png"))
    made, drawn = preview.stat().st_mtime_ns, preview.read_bytes()
    table.write_text(table.read_text() + "\n")
    preview.unlink()
    preview.mkdir()
    os.utime(preview, ns=(made, made))
    done = small.snakemake("--cores", "2")
    assert done.status == 1 and f"{preview.name}: a file exists in place of a folder" in done.output
    assert not page.exists()
    preview.rmdir()
    preview.write_bytes(drawn)
    os.utime(preview, ns=(made, made))
    assert "report (report): " in small.snakemake("--dry-run").output
    done = small.snakemake("--cores", "2")
    assert (done.status, [job.rule for job in done.jobs if job.command]) == (0, ["report"])


@pytest.mark.slow
def test_snakemakes_report_refuses_unfinished_plans(small: Tree) -> None:
    """Snakemake's report works for finished plans, whatever else is in the results. Unfinished plans give an error."""
    more = 'plans={"other": {"from": "one.a", "runs": {"new": {"seed": 5}}}}'
    (small.results / "plans/half/made").mkdir(parents=True, exist_ok=True)
    (small.results / "plans/half/made/prediction.png").write_bytes(b"")
    for arguments in (["--report", "own.html", "--", "plan_one"], ["--report=own.html", "--", "data_squares"]):
        done = small.snakemake("--cores", "2", "--", *arguments[-1:])
        done = small.snakemake("--config", more, *arguments)
        assert done.status == 0 and "Report created." in done.output, done.output
    refused = small.snakemake("--config", more, "--report", "none.html")
    assert refused.status == 2 and not (small.path / "none.html").exists()
    said = (
        r"--report: unfinished: plan other \(results/plans/other/new/prediction\.png .* without --report .* plan_NAME"
    )
    assert re.match(said, refused.output.splitlines()[-1])


@pytest.mark.slow
def test_missing_files_are_reported(small: Tree) -> None:
    """A line names each missing file that a job makes again, and each missing folder or file that no job needs."""
    run, stats = small.results / "plans/one/a", small.results / "data/squares/stats"
    for gone in (run / "tensorboard", stats):
        gone.rename(small.path / gone.name)
    lost, told = " is gone, .* snakemake --configfile tiny.yaml --force ", why(small.snakemake("--dry-run").output)
    assert len(told) == 2 and re.fullmatch(f"one.a: tensorboard/{lost}results/plans/one/a/metrics.jsonl", told[0])
    assert re.fullmatch(f"data squares: stats/{lost}results/data/squares/manifest.json", told[1])
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


# ---- folders of images: changed images are packed again ------------------------------------------------


@pytest.mark.slow
def test_a_changed_image_is_packed_again(make_tree: Callable[..., Tree], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "valid"):
        for name in ("ape", "bee"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(3):
                pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    source = {"kind": "folder", "train": str(tmp_path / "train"), "valid": str(tmp_path / "valid")}
    photos = {"kind": "imagenet", "source": source, "shards": {"train": 2}}
    digits = {"kind": "mnist", "source": {"kind": "simulated", "train": 20, "valid": 10}}
    tree = make_tree(
        {
            "results": "results",
            "targets": ["imagenet_demo"],
            "datasets": {"photos": photos, "digits": digits},
            "plans": {},
        }
    )
    done = tree.snakemake("--cores", "2", "--", "data_photos")
    assert done.status == 0, done.output[-3000:]
    assert tree.planned(targets=["data_photos"]).names == []

    image = tmp_path / "train/bee/1.png"
    content, stat = image.read_bytes(), image.stat()
    image.write_bytes(content)
    after = ["describe photos", "preview photos"]
    assert tree.planned(targets=["data_photos"]).names == ["acquire photos train-0001.h5", *after]
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert tree.planned(targets=["data_photos"]).names == []
    (tmp_path / "valid/ape/2.png").unlink()
    assert tree.planned(targets=["data_photos"]).names == ["acquire photos valid-0000.h5", *after]
    link = tmp_path / "train/ape/x.png"
    link.symlink_to("nowhere")
    dry = tree.snakemake("-n", "--", "data_photos")
    assert dry.status == 2 and "Traceback" not in dry.output
    broken = f"  data photos: {link}: cannot read "
    assert f"\nFAIL{broken}" in dry.output
    # A broken dataset affects only its own targets.
    other = tree.snakemake("--cores", "2", "--keep-going", "--", "data_photos", "data_digits")
    assert other.status != 0 and "Traceback" not in other.output
    assert f"\nwarn{broken}" in other.output and (tree.results / "data/digits/preview.png").exists()
    link.unlink()
    done = tree.snakemake("--cores", "2", "--", "data_photos")
    assert done.status == 0, done.output[-3000:]
    shutil.rmtree(tmp_path / "valid")
    shutil.rmtree(tmp_path / "train")
    gone = tree.planned(targets=["data_photos"])
    assert gone.names == []
    assert "train: no such file or folder; using the dataset that was made from it" in gone.output
