"""The workflow on this machine with every stage in a container of its own (profile `docker`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ERA5, ERA5_RUN
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
    """A study from outside, too.

    A new image makes exactly the jobs that use it run again; the same content, or the old one put back, none.
    """
    copy_tree(tmp_path / "w")
    # Results elsewhere, and a folder with a blank, are seen in the containers as well.
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
    assert "FAIL  image: " in said and "snakemake image" in said, "an image that is missing is one message"
    assert not (results / "plans").exists()

    container_engine("tag", cpu_image, image)
    said = snakemake()
    assert (results / "report/index.html").exists(), said[-5000:]
    assert {path.stat().st_uid for path in results.rglob("*")} == {os.getuid()}
    assert "Nothing to be done" in snakemake("-n")

    # Another image: a label more.
    container_engine.run(["sh", "-c", f"printf 'FROM {cpu_image}\nLABEL a=b\n' | podman build --tag {image} -"])
    again = snakemake("-np")
    for rule in ("acquire", "preprocess", "assemble", "describe", "train", "throughput", "collect", "report"):
        assert f"\n{rule} " in again, rule
    assert "Params have changed" in again or "params have changed" in again

    container_engine("tag", cpu_image, image)
    assert "Nothing to be done" in snakemake("-n")
    container_engine("untag", image)
