"""A real Slurm cluster, started once for all tests that ask for it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster import cluster as slurm


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """Return a running cluster; tests leave its queue empty and its nodes up.

    Where Slurm is not installed it takes `DLSCALE_CLUSTER_TESTS=1` to install it: no test changes a machine unasked.
    """
    why = slurm.obstacle()
    if why:
        pytest.skip(f"no cluster here: {why}")
    if slurm.missing():
        if os.environ.get("DLSCALE_CLUSTER_TESTS") != "1":
            names = ", ".join(slurm.missing())
            pytest.skip(f"not installed: {names} (DLSCALE_CLUSTER_TESTS=1 installs them)")
        slurm.install()
    with slurm.Cluster.claim(owner=os.getpid()) as running:
        yield running
