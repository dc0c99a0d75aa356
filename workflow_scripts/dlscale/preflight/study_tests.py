"""Tests of any study, for the file of a study's tests: `from dlscale.preflight.study_tests import *`.

That file says what is tested: STUDY, a DATASET of the right shapes, and settings of a RUN. What a study leaves out is
skipped; a function of the same name there takes the place of one of these.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlscale.config import resolve
from dlscale.config.dataset import DatasetSettings
from dlscale.core import registry
from dlscale.core.stages import STAGES
from dlscale.data import parts
from dlscale.parallel.world import World
from dlscale.train.build import Session, open_session

#: Inputs and targets of a batch.
Batch = tuple[torch.Tensor, torch.Tensor]


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
    sources = make_parts(dataset, manifest.parent)
    _stage(dataset, "describe", source=sources, manifest=manifest, stats=manifest.parent / "stats")


def make_parts(dataset: DatasetSettings, folder: Path) -> list[Path]:
    """Bring all parts of a dataset into being; return raw files that are used as they are."""
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
    samples = session.samples("train")
    read = [samples.read(0, index) for index in range(session.run.batch_size)]
    x, y = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*read, strict=True))
    return x.float(), y


def test_a_sample_is_predicted_alone(session: Session, batch: Batch) -> None:
    """In evaluation it does not depend on the samples that are in its batch; of numbers it has its target's shape."""
    model, (x, y) = session.step.model.eval(), batch
    with torch.no_grad():
        together = model(x)
        alone = torch.cat([model(sample[None]) for sample in x])
    if y.is_floating_point():  # else they are labels, of which it may say how likely each is
        assert together.shape == y.shape, f"predictions {list(together.shape)}, targets {list(y.shape)}"
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_the_loss_is_of_each_sample(session: Session, batch: Batch) -> None:
    """One number each, which does not depend on the others of its batch, and is less where the prediction is better."""
    x, y = batch
    with torch.no_grad():
        prediction = session.step.model(x)
    loss = session.study.loss(session.run)
    losses = loss(prediction, y)
    alone = torch.cat([loss(p[None], t[None]) for p, t in zip(prediction, y, strict=True)])
    assert losses.shape == (len(y),), f"losses {list(losses.shape)} of {len(y)} samples"
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-6)
    if y.is_floating_point():
        assert (loss((prediction + y) / 2, y) < losses).all(), "half-way to the targets it is not less"


def test_the_metrics_are_described(session: Session, batch: Batch) -> None:
    """Each number that they come to, and no other."""
    (x, y), metrics = batch, session.study.metrics(session.run, session.manifest, torch.device("cpu"))
    if not metrics.described:
        pytest.skip("the study has no metrics")
    with torch.no_grad():
        prediction = session.step.model(x)
    found = metrics.per_sample(x, y, prediction) | metrics.naive(range(len(y)), "train")
    numbers = metrics.summarise({name: values.mean(dim=0) for name, values in found.items()})
    names = [metric.name for metric in metrics.described]
    assert list(numbers) == names, f"numbers {list(numbers)}, described {names}"


def test_flops_are_those_of_the_operators(session: Session, batch: Batch) -> None:
    """The formula against PyTorch's count of what really runs."""
    formula = session.study.flops(session.run, session.manifest)
    if formula is None:
        pytest.skip("the study has no formula for FLOPs")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        session.step.model(batch[0])
    counted = counter.get_total_flops() / len(batch[0])
    assert formula == counted, f"formula {formula:,.0f}, counted {counted:,.0f} a sample"


def test_every_parameter_learns(session: Session, batch: Batch) -> None:
    """Each gets a gradient that is finite and not zero."""
    session.step.gradients(*batch)
    for name, parameter in session.step.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), f"{name}: no finite gradient"
        assert parameter.grad.abs().max() > 0, f"{name}: its gradient is zero"


def test_one_batch_can_be_learnt(session: Session, batch: Batch) -> None:
    """By a plain loop over a single batch; what cannot do that has a mistake in its model or its loss."""
    model, loss, (x, y) = session.step.model.train(), session.study.loss(session.run), batch
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    errors = []
    for _ in range(200):
        optimizer.zero_grad()
        error = loss(model(x), y).mean()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 0.3 * errors[0], f"a loss of {errors[0]:.4g} came to {errors[-1]:.4g} in {len(errors)} steps"
