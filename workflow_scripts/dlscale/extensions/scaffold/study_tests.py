"""Tests for any study; a study's test file contains `from dlscale.extensions.scaffold.study_tests import *`.

That file defines STUDY (name), DATASET (settings of a tiny dataset) and RUN (settings of a run). Tests of optional
parts that a study lacks are skipped. A function in that file replaces the test of the same name.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlscale.config import resolve
from dlscale.config.dataset import DatasetSettings
from dlscale.core import registry
from dlscale.core.stages import STAGES
from dlscale.data import parts
from dlscale.data.loaders.base import read_batch
from dlscale.data.samples import samples_in, tree_map
from dlscale.parallel.world import World
from dlscale.train.build import Session, open_session

#: Inputs and targets of a batch: tensors [batch, ...], or tuples and dicts of such tensors.
Batch = tuple[Any, Any]


def study_beside(test: str) -> str:
    """Return NAME, the study that `test_NAME.py` tests; register `NAME.py` if it is in the same folder."""
    name = Path(test).stem.removeprefix("test_")
    if (file := Path(test).with_name(f"{name}.py")).is_file():
        registry.add(name, file)
        if getattr(sys.modules.get(name), "__file__", "") is None:
            del sys.modules[name]  # pytest imported a folder with the study's name as a package
    return name


def tiny_session(study: str, dataset: dict[str, Any], run: dict[str, Any], folder: Path) -> Session:
    """Return a study's model, loss and loaders with the settings `run`; make its dataset in `folder` if absent."""
    plan = {"study": study, "settings": {**run, "dataset": "tiny"}, "runs": {"run": {}}}
    read = resolve.load({"targets": ["tiny"], "datasets": {"tiny": dataset}, "plans": {"tiny": plan}})
    manifest = folder / "manifest.json"
    if not manifest.exists():
        make_dataset(read.workflow.datasets["tiny"], manifest)
    return open_session(read.plans["tiny"]["run"].run, manifest, World())


def make_dataset(dataset: DatasetSettings, manifest: Path) -> None:
    """Make a dataset's files, then its manifest, with the stages of the workflow."""
    sources = make_parts(dataset, manifest.parent)
    _stage(dataset, "describe", source=sources, manifest=manifest, stats=manifest.parent / "stats")


def make_parts(dataset: DatasetSettings, folder: Path) -> list[Path]:
    """Make all parts of a dataset; return the raw files of a prepared dataset, which are used unchanged."""
    paths = {}
    for name, raw in parts.raws(dataset).items():
        acquired = parts.acquired(dataset, raw)
        paths[name] = folder / "source" / name if acquired else Path(raw.origin)
        if acquired:
            _stage(dataset, "acquire", file=name, out=paths[name])
    if parts.kind_of(dataset).prepared(dataset):
        return list(paths.values())
    for part in parts.parts(dataset):
        pieces = [folder / "pieces" / f"{part.label}-{piece}.h5" for piece in range(dataset.pieces)]
        raws = [paths[raw.name] for raw in part.raws]
        for piece, out in enumerate(pieces):
            _stage(dataset, "preprocess", part=part.label, piece=piece, source=raws, out=out)
        _stage(dataset, "assemble", pieces=pieces, out=folder / f"{part.label}.h5")
    return []


def _stage(dataset: DatasetSettings, name: str, **options: Any) -> None:
    registry.load(STAGES[name].module).main(Namespace(config=dataset.model_dump_json(), **options))


@pytest.fixture
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Return the study with fresh weights, on a tiny dataset."""
    its = request.module
    return tiny_session(its.STUDY, its.DATASET, its.RUN, tmp_path_factory.getbasetemp() / its.STUDY)


@pytest.fixture
def batch(session: Session) -> Batch:
    """Return inputs and targets of the first batch, read sample by sample."""
    return read_batch(session.samples("train"), 0, range(session.run.batch_size))


def single(tree: Any, index: int) -> Any:
    """Return one sample of a batch, as a batch."""
    return tree_map(lambda values: values[index : index + 1], tree)


def joined(trees: Iterable[Any]) -> Any:
    """Join batches along their first axis."""
    return tree_map(lambda *values: torch.cat(values), *trees)


def is_number(tree: Any) -> bool:
    """Return whether targets are a tensor of floats: not labels, and not several tensors."""
    return isinstance(tree, torch.Tensor) and tree.is_floating_point()


def test_a_sample_is_predicted_alone(session: Session, batch: Batch) -> None:
    """In evaluation mode, the prediction for a sample does not depend on the other samples of the batch.

    If the target is numeric, the prediction has the target's shape.
    """
    x, y = batch
    together = session.step.predict(x)
    alone = joined(session.step.predict(single(x, index)) for index in range(samples_in(x)))
    if is_number(y):  # else targets are labels, and predictions may be scores of each class
        assert together.shape == y.shape, f"predictions {list(together.shape)}, targets {list(y.shape)}"
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_the_loss_is_of_each_sample(session: Session, batch: Batch) -> None:
    """The loss is one number per sample, and does not depend on the other samples of the batch.

    If the target is numeric, the loss is lower for a better prediction.
    """
    x, y = batch
    prediction = session.step.predict(x)
    loss = session.step.network.loss  # raises `UserError` unless the study's loss returns one number per sample
    losses = loss(prediction, y)
    alone = torch.cat([loss(single(prediction, index), single(y, index)) for index in range(samples_in(y))])
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-6)
    if is_number(y):
        assert (loss((prediction + y) / 2, y) < losses).all(), (
            "the loss did not decrease after moving the prediction half-way to the target"
        )


def test_the_metrics_are_described(session: Session, batch: Batch) -> None:
    """The metrics return exactly the numbers that they describe."""
    (x, y), metrics = batch, session.study.metrics(session.run, session.manifest, torch.device("cpu"))
    if not metrics.described:
        pytest.skip("the study has no metrics")
    found = metrics.per_sample(x, y, session.step.predict(x)) | metrics.naive(range(samples_in(y)), "train")
    numbers = metrics.summarise({name: values.mean(dim=0) for name, values in found.items()})
    names = [metric.name for metric in metrics.described]
    assert sorted(numbers) == sorted(names), (
        f"`described` must list exactly {sorted(numbers)}, but lists {sorted(names)}"
    )


def test_flops_are_those_of_the_operators(session: Session, batch: Batch) -> None:
    """The formula for FLOPs equals PyTorch's count of FLOPs."""
    formula = session.study.flops(session.run, session.manifest)
    if formula is None:
        pytest.skip("the study has no formula for FLOPs")
    with FlopCounterMode(display=False) as counter:
        session.step.predict(batch[0])
    counted = counter.get_total_flops() / samples_in(batch[0])
    assert formula == counted, f"formula {formula:,.0f}, counted {counted:,.0f} per sample"


def test_every_parameter_learns(session: Session, batch: Batch) -> None:
    """Each parameter gets a finite, non-zero gradient."""
    session.step.gradients(*batch)
    for name, parameter in session.step.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), f"{name}: no finite gradient"
        assert parameter.grad.abs().max() > 0, f"{name}: its gradient is zero"


def test_one_batch_can_be_learnt(session: Session, batch: Batch) -> None:
    """A plain training loop learns a single batch; otherwise the model or the loss has a bug."""
    network, loss, (x, y) = session.step.network.train(), session.study.loss(session.run), batch
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    errors = []
    for _ in range(200):
        optimizer.zero_grad()
        error = loss(network.predict(x), y).mean()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 0.3 * errors[0], (
        f"the loss fell only from {errors[0]:.4g} to {errors[-1]:.4g} in {len(errors)} steps"
    )
