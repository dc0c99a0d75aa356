"""A real Slurm cluster, started once for all tests that need it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

from tests.cluster import cluster as slurm


@pytest.fixture(scope="session")
def cluster() -> Iterator[slurm.Cluster]:
    """Yield a running cluster. Tests must leave its queue empty and its nodes up.

    Slurm is only installed with `DLSCALE_CLUSTER_TESTS=1`, so tests do not change a machine without permission.
    """
    if why := slurm.obstacle():
        pytest.skip(f"a cluster cannot run here: {why}")
    if slurm.missing() and os.environ.get("DLSCALE_CLUSTER_TESTS") != "1":
        pytest.skip(f"packages are missing: {', '.join(slurm.missing())}; set DLSCALE_CLUSTER_TESTS=1 to install them")
    slurm.RECORDS.mkdir(exist_ok=True)
    # Each process of a test session has its own cluster; number 0 is for interactive use.
    number = 1 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    with (slurm.RECORDS / f"tests{number}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # wait for other sessions on this machine
        with (slurm.RECORDS / "install.lock").open("w") as installing:
            fcntl.flock(installing, fcntl.LOCK_EX)
            slurm.install()
        slurm.Cluster(number).stop()  # stop a cluster that a killed session left
        with slurm.Cluster(number) as running:
            yield running
