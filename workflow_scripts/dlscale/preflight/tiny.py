"""A study on a tiny dataset, in this process: what the tests of a study begin with."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from dlscale.config import resolve
from dlscale.config.dataset import DatasetSettings
from dlscale.core import registry
from dlscale.core.stages import STAGES
from dlscale.data import parts
from dlscale.parallel.world import World
from dlscale.train.build import Session, open_session


def study_beside(test: str) -> str:
    """Return the name of the study that a file `test_NAME.py` tests; make it known if it stands beside the test."""
    name = Path(test).stem.removeprefix("test_")
    if (file := Path(test).with_name(f"{name}.py")).is_file():
        registry.add(name, file)
        if getattr(sys.modules.get(name), "__file__", "") is None:
            del sys.modules[name]  # the folder, if it is called as the study: pytest took it for a package
    return name


def tiny_session(study: str, dataset: dict[str, Any], run: dict[str, Any], folder: Path) -> Session:
    """Return a study's model, loss and loaders, with the settings `run`, on a dataset that is made in `folder` once."""
    plan = {"study": study, "settings": {**run, "dataset": "tiny"}, "runs": {"run": {}}}
    read = resolve.load({"targets": ["tiny"], "datasets": {"tiny": dataset}, "plans": {"tiny": plan}})
    manifest = folder / "manifest.json"
    if not manifest.exists():
        make_dataset(read.workflow.datasets["tiny"], manifest)
    return open_session(read.plans["tiny"]["run"].run, manifest, World())


def make_dataset(dataset: DatasetSettings, manifest: Path) -> None:
    """Bring a dataset's files into being, and last its manifest, by the stages that the workflow calls."""
    config, folder = dataset.model_dump_json(), manifest.parent

    def stage(name: str, **options: Any) -> None:
        registry.load(STAGES[name].module).main(Namespace(config=config, **options))

    paths = {}
    for name, raw in parts.raws(dataset).items():
        acquired = parts.acquired(dataset, raw)
        paths[name] = folder / "source" / name if acquired else Path(raw.origin)
        if acquired:
            stage("acquire", file=name, out=paths[name])
    prepared = parts.kind_of(dataset).prepared(dataset)
    for part in [] if prepared else parts.parts(dataset):
        pieces = [folder / "pieces" / f"{part.label}-{piece}.h5" for piece in range(dataset.pieces)]
        for piece, out in enumerate(pieces):
            stage("preprocess", part=part.label, piece=piece, source=[paths[raw.name] for raw in part.raws], out=out)
        stage("assemble", pieces=pieces, out=folder / f"{part.label}.h5")
    stage("describe", source=list(paths.values()) if prepared else [], manifest=manifest, stats=folder / "stats")
