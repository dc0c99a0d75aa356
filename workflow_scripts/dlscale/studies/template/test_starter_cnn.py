"""`starter_cnn` against slower truths, on a tiny dataset; change it, and them, with your data and your metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dlscale.preflight.tiny import study_beside, tiny_session
from dlscale.train.build import Session

STUDY = study_beside(__file__)
#: Of the shapes of your data: the network of the tests is made for them.
DATASET: dict[str, Any] = {
    "kind": "starter",
    "source": {"kind": "simulated", "size": 16, "train": 16, "valid": 8, "seed": 3},
}
RUN: dict[str, Any] = {"batch_size": 8, "model": {"hidden": 8}, "loader": {"workers": 0}, "precision": "fp32"}


@pytest.fixture
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Return the study with fresh weights, on a tiny dataset."""
    return tiny_session(STUDY, DATASET, RUN, tmp_path_factory.getbasetemp() / STUDY)


@pytest.fixture
def batch(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of the first batch, read sample by sample."""
    samples = session.samples("train")
    pairs = [samples.read(0, index) for index in range(session.run.batch_size)]
    x, y = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*pairs, strict=True))
    return x.float(), y


def test_a_sample_is_predicted_alone(session: Session, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """In evaluation it does not depend on the samples that are in its batch, and it has its target's shape."""
    model, (x, y) = session.step.model.eval(), batch
    with torch.no_grad():
        together = model(x)
        alone = torch.cat([model(sample[None]) for sample in x])
    assert together.shape == y.shape
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_the_loss_is_of_each_sample(session: Session, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """One number each, which does not depend on the others of its batch, and is less where the prediction is better."""
    x, y = batch
    with torch.no_grad():
        prediction = session.step.model(x)
    loss = session.study.loss(session.run)
    losses = loss(prediction, y)
    alone = torch.cat([loss(p[None], t[None]) for p, t in zip(prediction, y, strict=True)])
    assert losses.shape == (len(y),)
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-6)
    assert (loss((prediction + y) / 2, y) < losses).all()


def test_the_metrics_are_right(session: Session, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Against NumPy; every number is described, and the naive answer is the better one of the two."""
    x, y = batch
    prediction = y + torch.linspace(-1, 1, len(y)).reshape(-1, *[1] * (y.dim() - 1))
    metrics = session.study.metrics(session.run, session.manifest, torch.device("cpu"))
    found = metrics.summarise({name: v.mean(dim=0) for name, v in metrics.per_sample(x, y, prediction).items()})
    assert list(found) == [metric.name for metric in metrics.described]
    mean = np.reshape(session.manifest.fields["target"].mean, (-1, 1, 1))

    def rmse(answer: Any) -> float:
        return float(np.sqrt(np.mean((answer - y.double().numpy()) ** 2)))

    assert found["rmse"] == pytest.approx(rmse(prediction.double().numpy()))
    assert found["rmse_of_naive"] == pytest.approx(min(rmse(mean), rmse(x.double().numpy())), rel=1e-5)


def test_flops_are_those_of_the_operators(session: Session, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The formula against PyTorch's count of what really runs."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        session.step.model(batch[0])
    assert session.study.flops(session.run, session.manifest) == counter.get_total_flops() / len(batch[0])


def test_every_parameter_learns(session: Session, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Each gets a gradient that is finite and not zero."""
    session.step.gradients(*batch)
    for name, parameter in session.step.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_one_batch_can_be_learnt(session: Session, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
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
    assert errors[-1] < 0.3 * errors[0]
