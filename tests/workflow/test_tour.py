"""A new user's tour of a fresh clone: `tour.sh` prints the output of each step and checks the output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TOUR = Path(__file__).with_name("tour.sh")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout to clone")
def test_tour(tmp_path: Path) -> None:
    """A clone of the committed files passes the tour."""
    clone = tmp_path / "dlscale"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SNAKEMAKE", "PYTEST", "SLURM"))}
    paths = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(clone / "workflow_scripts"),
    }
    with subprocess.Popen(
        ["bash", str(TOUR)],
        cwd=clone,
        env={**kept, **paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as tour:
        try:
            told, _ = tour.communicate(timeout=1700)
        except BaseException:
            os.killpg(tour.pid, signal.SIGKILL)
            raise
    print(told)
    assert tour.returncode == 0, told[-5000:]
    assert told.endswith("==== The end of the tour\n")
