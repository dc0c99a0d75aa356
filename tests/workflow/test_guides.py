"""docs/adding.md, followed to the letter."""

from __future__ import annotations

import json

import pytest

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
from dlscale.train.around import entered
from dlscale.train.build import open_session


def main(args: argparse.Namespace) -> None:
    """Count, and write `args.out`."""
    run = load_run(args.config, "sizes")
    with entered(run, args.manifest, args.device) as (world, _):
        session = open_session(run, args.manifest, world, args.threads)
        with contextlib.closing(session.loader("train")) as loader:
            write_json(args.out, {"epochs": run.training.epochs, "sizes": [len(x) for x, _ in loader.epoch(0)]})
'''


@pytest.mark.slow
@pytest.mark.long
def test_a_stage_that_measures_a_run(clone: Tree) -> None:
    """A row, a module and a thin rule; the command line and `measure` know it, and nothing else runs again."""
    package = clone.path / "workflow_scripts/dlscale"
    table = (package / "core/stages.py").read_text()
    (package / "core/stages.py").write_text(table.replace('    "collect": Stage(', f'{ROW}    "collect": Stage(', 1))
    (package / "measure/sizes.py").write_text(MODULE)
    rules = clone.path / "rules/measure.smk"
    first, _, _ = rules.read_text().partition("\n\n\nrule ")
    # What throughput alone has is another run that is timed beside.
    first = first.replace("throughput_params", 'run_params("throughput")').replace(" {params.beside:q}", "")
    first = "\n".join(
        line for line in first.splitlines() if not line.endswith(("=JOBS.first_data,", "=JOBS.throughput_beside,"))
    )
    rule = first.replace("throughput", "sizes").replace("Measure sizes", "Count batches")
    rules.write_text(f"{rules.read_text()}\n\n{rule.replace('samples/s: IO alone, SYNTHETIC, FULL', 'batches')}")
    assert clone.planned().names == []
    assert "Count the samples" in clone.shell("python -m dlscale sizes --help").stdout
    run = clone.config["plans"]["cosmo"]["settings"]
    plan = {**clone.config["plans"]["cosmo"], "measure": ["sizes"], "only": {}, "runs": {"unet": {}}}
    clone.config["plans"]["counted"] = plan
    clone.write()
    outcome = clone.snakemake("--cores", "2", "--", "plan_counted")
    assert outcome.status == 0, outcome.output[-3000:]
    assert "sizes counted unet" in outcome.names and not any(name.startswith("train") for name in outcome.names)
    sizes = json.loads((clone.results / "plans/counted/unet/sizes.json").read_text())
    assert sizes == {"epochs": run["training"]["epochs"], "sizes": [run["batch_size"]] * 3}
    assert (clone.results / "plans/counted/report.html").exists()


KIND = '''"""Kind `pulses`: bell curves of random heights."""

from typing import Any, Literal

from dlscale import DatasetKind, DatasetSettings, Part, RowSamples


class PulsesDataset(DatasetSettings):
    """How many pulses each split has."""

    kind: Literal["pulses"]
    train: int = 6
    valid: int = 2


class Pulses(DatasetKind):
    """One file a split, made in memory."""

    name, Settings, Samples = "pulses", PulsesDataset, RowSamples

    def parts(self, dataset: Any) -> list[Part]:
        return [Part("train", "pulses"), Part("valid", "pulses")]


KIND = Pulses()
'''
SOURCE = '''"""Pulses of a part."""

from pathlib import Path
from typing import Any

import numpy as np

from dlscale.data.kind import Part
from dlscale.data.source import ArraySource


def open_source(dataset: Any, part: Part, paths: list[Path]) -> ArraySource:
    """Make pulses [N, 16] and their heights [N]."""
    height = np.random.default_rng(part.split == "valid").uniform(1, 2, getattr(dataset, part.split))
    return ArraySource({"pulse": height[:, None] * np.exp(-(np.linspace(-3, 3, 16) ** 2)), "height": height})
'''


@pytest.mark.slow
@pytest.mark.long
def test_a_kind_of_dataset_inside(clone: Tree) -> None:
    """Two modules in a folder of its own: the stages of data serve it, and nothing else runs again."""
    folder = clone.path / "workflow_scripts/dlscale/datasets/pulses"
    folder.mkdir()
    for name, text in {"__init__": "", "kind": KIND, "source": SOURCE}.items():
        (folder / f"{name}.py").write_text(text)
    assert clone.planned().names == []
    options = """--config '{"kind": "pulses"}' --part train/pulses --out piece.h5"""
    done = clone.shell(f"python -m dlscale preprocess {options}")
    assert done.returncode == 0 and (clone.path / "piece.h5").exists(), done.stderr
    clone.config["datasets"]["pulses"] = {"kind": "pulses", "train": 10}
    clone.write()
    outcome = clone.snakemake("--cores", "2", "--", "data_pulses")
    assert outcome.status == 0, outcome.output[-3000:]
    manifest = json.loads((clone.results / "data/pulses/manifest.json").read_text())
    assert [sum(file["rows"] for file in manifest["splits"][split]) for split in ("train", "valid")] == [10, 2]
    assert (clone.results / "data/pulses/preview.png").exists()
