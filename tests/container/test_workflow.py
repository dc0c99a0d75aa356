"""The workflow on this machine; every stage runs in its own container (profile `docker`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlscale.config.run import Geometry
from dlscale.config.site import Site
from dlscale.launch.launcher import PYTHON, ContainerMounts, launch
from tests import test_nsys as profiler
from tests.conftest import ERA5, ERA5_RUN, ROOT
from tests.container.conftest import Engine
from tests.workflow.conftest import OUTSIDE, copy_tree

pytestmark = [pytest.mark.container, pytest.mark.timeout(1800), pytest.mark.xdist_group("machine")]

CONFIG: dict[str, Any] = {
    "targets": ["tiny", "waves_ladder"],
    "studies": {"waves": f"../{OUTSIDE}/waves.py"},
    "datasets": {"years": {**ERA5, "source": {**ERA5["source"], "days": 3, "train": [2001], "valid": [2002]}}},
    "plans": {"tiny": {"study": "era5_vit", "settings": {**ERA5_RUN, "dataset": "years"}, "runs": {"run": {}}}},
}


def test_every_stage_in_a_container(container_engine: Engine, cpu_image: str, tmp_path: Path) -> None:
    """Every stage runs in a container, even the stages of an external study.

    A new image reruns the jobs of all stages. If the name refers to the old image again, no job runs.
    """
    copy_tree(tmp_path / "w")
    # A results folder outside the tree, with a blank in its name, must also be visible in the containers.
    results = tmp_path / "other place"
    image = "localhost/dlscale:workflow"
    config = {**CONFIG, "results": str(results), "site": {"engine": "podman", "image": image, "gpu": False}}
    (tmp_path / "w/tiny.yaml").write_text(yaml.safe_dump(config))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def snakemake(*arguments: str) -> str:
        command = [sys.executable, "-m", "snakemake", "--workflow-profile", "profiles/docker", "--cores", "2"]
        variables = ["env", f"--chdir={tmp_path}/w", f"PATH={path}", f"PYTHONPATH={tmp_path}/w/workflow_scripts"]
        words = [*variables, *command, *arguments, "--configfile", "tiny.yaml"]
        return container_engine.run(words, check=False, timeout=900)

    said = snakemake()
    assert "FAIL  image: " in said and "snakemake image" in said, (
        "a missing image must be reported with the command that makes it"
    )
    assert not (results / "plans").exists()

    container_engine("tag", cpu_image, image)
    said = snakemake()
    assert (results / "report/index.html").exists(), said[-5000:]
    assert {path.stat().st_uid for path in results.rglob("*")} == {os.getuid()}
    assert "Nothing to be done" in snakemake("-n")

    # build an image that differs from the first only by a label
    container_engine.run(["sh", "-c", f"printf 'FROM {cpu_image}\nLABEL a=b\n' | podman build --tag {image} -"])
    again = snakemake("-np")
    for rule in ("acquire", "preprocess", "assemble", "describe", "train", "throughput", "collect", "report"):
        assert f"\n{rule} " in again, rule
    assert "Params have changed" in again or "params have changed" in again

    container_engine("tag", cpu_image, image)
    assert "Nothing to be done" in snakemake("-n")
    container_engine("untag", image, image)  # without the name argument, podman would remove all names of the image


# ---- profiling with the real nsys, which is mounted instead of installed --------------------------------


def test_profiled_in_a_container(
    container_engine: Engine,
    cpu_image: str,
    real_nsys: Path,
    cosmo_data: Path,
    tmp_path: Path,
) -> None:
    """nsys profiles a stage in a container. If nsys lacks libraries for its report, its recorded file is kept."""
    profiler.configure(tmp_path)
    words = profiler.stage_words(tmp_path, cosmo_data / "manifest.json")
    root = real_nsys.parents[2]  # the folder that contains usr/bin/nsys
    site = Site(engine="podman", image=cpu_image, starter="direct", gpu=False, environment={"NSYS": str(real_nsys)})
    place = ContainerMounts(
        str(tmp_path),
        str(ROOT / "workflow_scripts"),
        os.getuid(),
        os.getgid(),
        (str(ROOT), str(cosmo_data), str(root)),
        results=str(tmp_path),
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
