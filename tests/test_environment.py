"""The record of machine and software during a measurement, and the differences between two records."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from dlscale.core import environment
from dlscale.core.environment import Environment, Gpu, differences
from tests.conftest import ROOT

H200 = Gpu(name="NVIDIA H200", memory_bytes=150_754_820_096, watts=700.0, sm_mhz=1980, ecc=True, mig=False)
BEFORE = Environment(
    time="2026-11-26T12:00:00+00:00",
    host="nid001",
    kernel="6.4.0",
    processor="AMD EPYC 7763",
    python="3.12.3",
    versions={"torch": "2.11.0", "NCCL": "2.28.9", "driver": "570.1"},
    gpus=[H200, H200],
    git={"commit": "0" * 40, "dirty": False},
    packages=["a directory", "h5py==3.15", "numpy==2.1.0", "torch==2.11.0"],
    variables={"NCCL_SOCKET_IFNAME": "hsn"},
)


def test_the_record_agrees_with_pip_git_and_the_machine(tmp_path: Path) -> None:
    """The record contains only the listed variables, and no secret. Packages with damaged metadata are left out."""
    code = "import torch; from dlscale.core.environment import environment; print(environment().text())"
    kept = {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    secrets = {name: "secret" for name in ("WANDB_API_KEY", "MY_NCCL_KEY", "NCCL_NET_TOKEN", "FI_X_AUTH_KEY")}
    secrets |= {"NCCL_SOCKET_IFNAME": "lo"}  # not recorded, because dlscale sets this value on a single node
    secrets |= {"TORCH_HUB": "https://me:secret@host/weights", "UCX_ODD": "\udcff"}
    for name, content in {"none-1": b"", "odd-2": b"\xff"}.items():
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info/METADATA").write_bytes(content)
    variables = os.environ | kept | secrets | {"PYTHONPATH": f"{ROOT / 'workflow_scripts'}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables, cwd=tmp_path
    )
    found = Environment.model_validate_json(done.stdout)
    assert "secret" not in done.stdout and kept.items() <= found.variables.items()
    assert "NCCL_SOCKET_IFNAME" not in found.variables
    assert found.versions["torch"] == torch.__version__ and not found.gpus
    freeze = [sys.executable, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    listed = subprocess.run(freeze, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()
    same = [{re.sub(r"[-_.]+", "-", each).lower() for each in packages} for packages in (found.packages, listed)]
    assert same[0] == same[1]
    calls = ["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]
    head, changed = (
        subprocess.run(["git", "-C", str(ROOT), *call], capture_output=True, text=True).stdout.strip() for call in calls
    )
    assert found.commit() == f"{head}{' with local changes' * bool(changed)}"
    assert found.kernel == os.uname().release and found.host == os.uname().nodename


def test_values_of_a_gpu_are_converted_to_the_units_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, device = Mock(), Mock(total_memory=H200.memory_bytes)
    device.name = H200.name
    driver.nvmlDeviceGetEnforcedPowerLimit.return_value = 700_000  # mW
    driver.nvmlDeviceGetEccMode.return_value, driver.nvmlDeviceGetMigMode.return_value = (1, 1), (0, 0)
    driver.nvmlDeviceGetMaxClockInfo.side_effect = lambda _, kind: {driver.NVML_CLOCK_SM: 1980}.get(kind, 2619)
    monkeypatch.setattr(environment, "nvml", lambda ask: ask(driver))
    assert environment._gpu(device) == H200.model_copy(update={"memory_mhz": 2619})


def test_reading_the_state_of_a_checkout_runs_no_foreign_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, script = tmp_path / "theirs", tmp_path / "script"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    script.chmod(0o755)

    def git(*words: str) -> None:
        known = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(folder), *known, *words], check=True, capture_output=True)

    folder.mkdir()
    git("init", "--quiet")
    (folder / "environment.py").write_text("one")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    (folder / ".git/info/attributes").write_text("* filter=evil\n")
    for key in ("core.fsmonitor", "filter.evil.clean", "filter.evil.process"):
        git("config", key, str(script))
    git("config", "filter.evil.required", "true")
    (folder / "environment.py").write_text("two")
    monkeypatch.setattr(environment, "__file__", str(folder / "environment.py"))
    state = environment.git_state()
    assert state and len(state["commit"]) == 40 and state["dirty"]
    (folder / "environment.py").write_text("one")
    assert environment.git_state() == {**state, "dirty": False} and not (tmp_path / "ran").exists()


def test_a_stage_finishes_without_an_environment_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "train.json").write_text("an earlier try's")
    monkeypatch.setattr(environment, "_versions", lambda: 1 / 0)
    environment.record(file)
    assert not file.exists()


def test_differences_are_named_and_further_ones_counted() -> None:
    assert differences(BEFORE, BEFORE.model_copy(update={"host": "nid002", "time": "2027"})) == []
    after = BEFORE.model_copy(
        update={
            "versions": {"torch": "2.11.0", "NCCL": "2.31.1", "driver": "580.2"},
            "gpus": [H200, H200.model_copy(update={"watts": 500.0})],
            "variables": {},
            "packages": ["a directory", "h5py==3.16", "numpy==2.5.2", "torch==2.11.0", "a==1", "b==1"],
        }
    )
    assert differences(BEFORE, after) == [
        "GPUs 2 × NVIDIA H200, 700 W, 1980 MHz, ECC on, MIG off → 1 × NVIDIA H200, 700 W, 1980 MHz, ECC on, MIG off; "
        "1 × NVIDIA H200, 500 W, 1980 MHz, ECC on, MIG off",
        "NCCL 2.28.9 → 2.31.1",
        "driver 570.1 → 580.2",
        "NCCL_SOCKET_IFNAME hsn → none",
        "a none → 1",
        "b none → 1",
        "h5py 3.15 → 3.16",
        "1 other packages",
    ]
