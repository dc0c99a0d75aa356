"""docs/adding.md, followed to the letter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest

from tests.conftest import ROOT
from tests.workflow.conftest import Tree

ROW = """    "sizes": Stage(
        "dlscale.measure.sizes",
        "Count the samples of an epoch's batches.",
        "run",
        (path("--out", "JSON file to write"),),
        settings=("training",),
        outputs=("sizes.json",),
        nodes="geometry",
    ),
"""
MODULE = '''"""Stage `sizes`: the samples of each batch of the first epoch."""

import argparse
import contextlib

from dlscale.config.run import load_run
from dlscale.core.files import write_json
from dlscale.parallel.world import join
from dlscale.train.build import open_session


def main(args: argparse.Namespace) -> None:
    """Count, and write `args.out`."""
    run = load_run(args.config, "sizes")
    with join(run.geometry, args.device) as world:
        session = open_session(run, args.manifest, world, args.threads)
        with contextlib.closing(session.loader("train")) as loader:
            write_json(args.out, {"epochs": run.training.epochs, "sizes": [len(x) for x, _ in loader.epoch(0)]})
'''


@pytest.mark.slow
def test_a_stage_that_measures_a_run(clone: Tree) -> None:
    """A row, a module and a thin rule; the command line and `measure` know it, and nothing else runs again."""
    package = clone.path / "workflow_scripts/dlscale"
    table = (package / "core/stages.py").read_text()
    (package / "core/stages.py").write_text(table.replace('    "collect": Stage(', f'{ROW}    "collect": Stage(', 1))
    (package / "measure/sizes.py").write_text(MODULE)
    rules = clone.path / "rules/measure.smk"
    rule = rules.read_text().replace("throughput", "sizes").replace("Measure sizes", "Count batches")
    rules.write_text(f"{rules.read_text()}\n\n{rule.replace('samples/s: IO alone, SYNTHETIC, FULL', 'batches')}")
    assert clone.planned().names == []
    assert "Count the samples" in clone.shell("python -m dlscale sizes --help").stdout
    run = clone.config["plans"]["cosmo"]["settings"]
    clone.config["plans"]["counted"] = {**clone.config["plans"]["cosmo"], "measure": ["sizes"], "runs": {"unet": {}}}
    clone.write()
    outcome = clone.snakemake("--cores", "2", "--", "plan_counted")
    assert outcome.status == 0, outcome.output[-3000:]
    assert "sizes counted unet" in outcome.names and not any(name.startswith("train") for name in outcome.names)
    sizes = json.loads((clone.results / "plans/counted/unet/sizes.json").read_text())
    assert sizes == {"epochs": run["training"]["epochs"], "sizes": [run["batch_size"]] * 3}
    assert (clone.results / "plans/counted/report.html").exists()


@pytest.mark.slow
def test_a_study_outside(make_tree: Callable[..., Tree]) -> None:
    """The commands of the guide: copy the example, run it."""
    tree = make_tree()
    for file in (ROOT / "docs/examples").glob("waves.*"):
        shutil.copy(file, tree.path)
    shutil.copy(ROOT / "docs/examples/mine.yaml", tree.path / "tiny.yaml")
    outcome = tree.snakemake("--cores", "2")
    assert outcome.status == 0, outcome.output[-3000:]
    results = tree.path / "results"
    assert "waves_ladder" in (results / "report/index.html").read_text()
    assert len((results / "plans/waves_ladder/summary.csv").read_text().splitlines()) == 3
