"""Tests of `starter_cnn` on a tiny dataset: general tests of a study, and a test of the RMSE to adapt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dlscale.extensions.scaffold.study_tests import *  # noqa: F403
from dlscale.extensions.scaffold.study_tests import study_beside
from dlscale.train.build import Session

STUDY = study_beside(__file__)
#: Tiny dataset with the shapes of your data, for which the tests build the network.
DATASET: dict[str, Any] = {
    "kind": "starter",
    "source": {"kind": "simulated", "size": 16, "train": 16, "valid": 8, "seed": 3},
}
#: Settings that replace settings in the study's YAML file.
RUN: dict[str, Any] = {"batch_size": 8, "model": {"hidden": 8}, "loader": {"workers": 0}, "precision": "fp32"}


def test_the_rmse_is_right(session: Session, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The RMSE equals NumPy's; `rmse_of_naive` is the smaller RMSE of predicting the mean or the input."""
    x, y = batch
    prediction = y + torch.linspace(-1, 1, len(y)).reshape(-1, *[1] * (y.dim() - 1))
    metrics = session.study.metrics(session.run, session.manifest, torch.device("cpu"))
    if "rmse" not in [metric.name for metric in metrics.described]:
        pytest.skip("the study has no RMSE")
    found = metrics.summarise({name: v.mean(dim=0) for name, v in metrics.per_sample(x, y, prediction).items()})
    mean = np.reshape(session.manifest.fields["target"].mean, (-1, 1, 1))

    def rmse(answer: Any) -> float:
        return float(np.sqrt(np.mean((answer - y.double().numpy()) ** 2)))

    assert found["rmse"] == pytest.approx(rmse(prediction.double().numpy()))
    assert found["rmse_of_naive"] == pytest.approx(min(rmse(mean), rmse(x.double().numpy())), rel=1e-5)
