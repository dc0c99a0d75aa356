"""Tests of `waves` on a tiny dataset. The imported tests skip parts that the study lacks; add tests below."""

from __future__ import annotations

from typing import Any

from dlscale.extensions.scaffold.study_tests import *  # noqa: F403
from dlscale.extensions.scaffold.study_tests import study_beside

STUDY = study_beside(__file__)
#: Tiny dataset with the shapes of your data, for which the tests build the network.
DATASET: dict[str, Any] = {"kind": "waves", "train": 16, "valid": 8}
#: Settings that replace settings in `waves.yaml`.
RUN: dict[str, Any] = {"batch_size": 8, "loader": {"kind": "torch", "workers": 0}}
