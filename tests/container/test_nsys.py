"""A run profiled by a real nsys inside of its container, where a folder with nsys is mounted and nothing installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dlscale.config.run import Geometry
from dlscale.config.site import Site
from dlscale.launch.launcher import PYTHON, Place, launch
from tests import test_nsys as profiler
from tests.conftest import ROOT
from tests.container.conftest import Engine

pytestmark = [pytest.mark.container, pytest.mark.timeout(1800), pytest.mark.xdist_group("machine")]


def test_profiled_in_a_container(
    container_engine: Engine,
    cpu_image: str,
    real_nsys: Path,
    cosmo_data: Path,
    tmp_path: Path,
) -> None:
    """Where libraries that make the report are missing there, what was recorded is kept."""
    profiler.configure(tmp_path)
    words = profiler.stage_words(tmp_path, cosmo_data / "manifest.json")
    root = real_nsys.parents[2]  # of usr/bin/nsys
    site = Site(engine="podman", image=cpu_image, starter="direct", gpu=False, environment={"NSYS": str(real_nsys)})
    place = Place(
        str(tmp_path), str(ROOT / "workflow_scripts"), os.getuid(), os.getgid(), (str(ROOT), str(cosmo_data), str(root))
    )
    command = [sys.executable, *launch(site, place, Geometry())[1 : -len(PYTHON)], "python", *words[1:]]
    container_engine.run(["env", f"--chdir={tmp_path}", f"PYTHONPATH={ROOT / 'workflow_scripts'}", *command])
    tool, _ = profiler.found(tmp_path)
    print(tool)
    if tool.problem:
        assert "nsys made no report" in tool.problem and "nsys.rank0.qdstrm" in tool.problem, tool
        assert profiler.left(tmp_path) == ["nsys.rank0.qdstrm"]
    else:
        assert profiler.left(tmp_path) == ["nsys.rank0.nsys-rep"]
        assert tool.steps == profiler.STEPS and "backward" in tool.ranges
