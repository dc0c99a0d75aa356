"""dlscale's losses and metrics against the published programs' formulas, written down in `programs` and by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dlscale.data.manifest import Manifest
from dlscale.datasets.era5.kind import PairSamples
from dlscale.scores import l1, latitude_weights, mean_square, relative_l2
from dlscale.studies.era5_vit.study import STUDY
from tests.conftest import make_dataset
from tests.published.programs import Pairs, in_order, u10_rmse, unet_loss, vit_loss
from tests.raw_files import era5, write_years


def fields(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def test_losses_by_hand() -> None:
    """Numbers small enough to add up: two samples of two channels on two points."""
    y = torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[1.0, 2.0], [2.0, 0.0]]])
    p = torch.tensor([[[3.0, 1.0], [2.0, 2.0]], [[1.0, 2.0], [2.0, 3.0]]])
    # Errors 0, 1, 2, -2 over a target of norm 5, and 0, 0, 0, 3 over one of norm 3.
    assert relative_l2(p, y).tolist() == pytest.approx([3 / 5, 3 / 3])
    assert vit_loss(p, y).item() == pytest.approx(0.8)
    assert l1(p, y).tolist() == pytest.approx([5 / 4, 3 / 4])
    assert unet_loss(p, y).item() == pytest.approx(1.0)
    p, y = torch.zeros(1, 2, 1), torch.tensor([[[math.log(3) / 14], [0.5]]])  # densities 1 and 3
    assert l1(p, y, 0.1).item() == pytest.approx((math.log(3) / 14 + 0.5) / 2 + 0.1 * 2)
    assert unet_loss(p, y, 0.1).item() == pytest.approx(l1(p, y, 0.1).item())


def test_the_rmse_of_u10_is_the_programs(tmp_path: Path) -> None:
    """Files of 9 rows, 90° to -90°: the mean over samples of each one's root, of standardised fields, by channel."""
    folder = write_years(tmp_path / "raw", {"train": {2001: 6}, "valid": {2003: 9}}, 20, (9, 16))
    manifest = Manifest.read(make_dataset(tmp_path / "data", era5(folder)) / "manifest.json")
    assert manifest.extra["latitude"] == np.linspace(90, -90, 9).tolist()
    ((x, y),) = in_order(Pairs(folder / "valid", folder / "stats", repaired=True), range(8), 8)
    p = y + 0.3 * fields(*y.shape, seed=0) * torch.linspace(0.5, 2, 8)[:, None, None, None]
    metrics = STUDY.metrics(SimpleNamespace(samples=PairSamples(kind="pairs")), manifest, torch.device("cpu"))
    means = {name: value.mean(dim=0) for name, value in (metrics.per_sample(x, y, p) | metrics.naive(range(8))).items()}
    found = metrics.summarise(means)
    expected = u10_rmse(p, y)
    for channel, name in enumerate(manifest.fields["fields"].channels):
        assert found[f"rmse_normalised/{name}"] == pytest.approx(expected[channel].item(), rel=1e-5)


def test_the_published_grid_has_other_latitudes_than_its_program_believes() -> None:
    """Of 361 rows the last, the pole, is cut off; the program spreads 360 from pole to pole, dlscale does not.

    That moves a weight by no more than 0.014 of their mean, and the RMSE, of errors that are three times as large at
    one pole as at the other, by less than 0.3 %: figures compare.
    """
    y, p = (fields(2, 1, 360, 32, seed=seed) for seed in (0, 1))
    error = (p - y) * (1 + 0.5 * torch.cos(torch.linspace(0, math.pi, 360)))[:, None]
    weights = latitude_weights(90.0 - 0.5 * torch.arange(360))
    ours = mean_square(error, weights).sqrt().mean(dim=0)
    assert 1e-4 < abs(ours.item() / u10_rmse(y + error, y).item() - 1) < 3e-3
    believed = torch.cos(torch.deg2rad(torch.linspace(90, -90, 360)))
    assert float((weights[:, 0] - believed / believed.mean()).abs().max()) < 0.014
