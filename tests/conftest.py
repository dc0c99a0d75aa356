"""What the tests share: tiny datasets and runs, made by the real stages."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line sets it, before anything loads OpenMP

from dlscale import cli
from dlscale.config import resolve as config
from dlscale.data import parts
from dlscale.data.parts import load_dataset

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # real data, where it is at hand

#: 32^3 boxes with cells of 0.75 Mpc/h: the gas depends on neighbours, and a crop of 16 fits.
COSMO: dict[str, Any] = {
    "kind": "cosmo",
    "source": {
        "kind": "simulated",
        "grid": 32,
        "box_mpc_h": 24.0,
        "boxes": {"train": 2, "valid": 1, "test": 1},
        "seed": 3,
    },
}
ERA5: dict[str, Any] = {
    "kind": "era5",
    "source": {
        "kind": "simulated",
        "latitudes": 16,
        "longitudes": 32,
        "days": 5,
        "train": [2001, 2002],
        "valid": [2003],
        "seed": 3,
    },
}
COSMO_RUN: dict[str, Any] = {
    "batch_size": 4,
    "model": {"widths": [4, 8]},
    "samples": {"crop": 16, "train": 12, "valid": 8},
    "loader": {"workers": 0},
    "optimizer": {"lr": 2e-3},
    "training": {"epochs": 2},
    "precision": "fp32",
    "throughput": {"warmup": 0, "trials": 2, "batches": 2},
}
ERA5_RUN: dict[str, Any] = {
    "batch_size": 4,
    "model": {"patch": 4, "embed_dim": 16, "depth": 2, "heads": 2},
    "loader": {"workers": 0},
    "optimizer": {"lr": 1e-3},
    "training": {"epochs": 2},
    "precision": "fp32",
    "throughput": {"warmup": 0, "trials": 2, "batches": 2},
}


def stage(*arguments: object) -> int:
    """Run one stage in this process, as the command line does; return its exit status."""
    return cli.main([str(argument) for argument in arguments])


def make_parts(folder: Path, settings: dict[str, Any]) -> list[Path]:
    """Bring a dataset's files into being with its stages, as the workflow would; return raw files used as they are."""
    assert stage("configure", "--settings", json.dumps(settings), "--out", folder / "config.yaml") == 0
    dataset = load_dataset(folder / "config.yaml")
    configured = ["--config", folder / "config.yaml"]
    paths = {}
    for name, raw in parts.raws(dataset).items():
        acquired = parts.acquired(dataset, raw)
        paths[name] = folder / "source" / name if acquired else Path(raw.origin)
        if acquired:
            assert stage("acquire", *configured, "--file", name, "--out", paths[name]) == 0
    if parts.kind_of(dataset).prepared(dataset):
        return list(paths.values())
    for part in parts.parts(dataset):
        label, pieces = f"{part.split}/{part.name}", []
        for piece in range(dataset.pieces):
            pieces.append(folder / "pieces" / f"{label}-{piece}.h5")
            raws = [paths[raw.name] for raw in part.raws]
            arguments = ["--part", label, "--piece", piece, "--source", *raws, "--out", pieces[-1]]
            assert stage("preprocess", *configured, *arguments) == 0
        assert stage("assemble", *configured, "--pieces", *pieces, "--out", folder / f"{label}.h5") == 0
    return []


def make_dataset(folder: Path, settings: dict[str, Any]) -> Path:
    """Bring a dataset into being, its description and preview included; return its folder."""
    sources = make_parts(folder, settings)
    manifest = ["--manifest", folder / "manifest.json"]
    configured = ["--config", folder / "config.yaml"]
    sources = ["--source", *sources] if sources else []
    assert stage("describe", *configured, *sources, *manifest, "--stats", folder / "stats") == 0
    assert stage("preview", *manifest, "--out", folder / "preview.png") == 0
    return folder


def make_run(folder: Path, study: str, settings: dict[str, Any], dataset: dict[str, Any]) -> Path:
    """Write the config.yaml of a run of `study` on `dataset` into `folder`; return the file."""
    raw = {
        "targets": ["test"],
        "datasets": {"data": dataset},
        "plans": {"test": {"study": study, "settings": {"dataset": "data"}, "runs": {"run": settings}}},
    }
    run = config.load(raw).plans["test"]["run"].run
    assert stage("configure", "--settings", run.model_dump_json(), "--out", folder / "config.yaml") == 0
    return folder / "config.yaml"


def train(folder: Path, manifest: Path, *more: object) -> int:
    """Train the run in `folder`."""
    arguments = ["--config", folder / "config.yaml", "--manifest", manifest, "--checkpoints", folder / "checkpoints"]
    return stage("train", *arguments, "--out", folder, "--threads", 1, *more)


def records(folder: Path) -> list[dict[str, Any]]:
    """Return a run's epochs."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def cosmo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny cosmo dataset."""
    return make_dataset(tmp_path_factory.mktemp("data") / "cosmo", COSMO)


@pytest.fixture(scope="session")
def era5_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny era5 dataset."""
    return make_dataset(tmp_path_factory.mktemp("data") / "era5", ERA5)


@pytest.fixture
def shared() -> Callable[[str], Path]:
    """Return a function from a name to a real data file; the test is skipped where it is not at hand."""

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"real data are not at hand: {name}")
        return path

    return find


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
