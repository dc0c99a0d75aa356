"""What installs dlscale, and beside what: ranges, the lock, an environment whose PyTorch stays, CI's files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from dlscale.preflight.doctor import LEAST
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(line) for lines in [PROJECT["dependencies"], *EXTRAS.values()] for line in lines]
LOCK = dict(re.findall(r"^(\S+)==(\S+)  # via", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
CORE = {Requirement(line).name for line in PROJECT["dependencies"]}


def test_pyproject_pins_nothing_and_the_lock_all() -> None:
    for each in REQUIREMENTS:
        assert not re.search(r"==|~=|@", str(each.specifier)), f"{each}: exact versions stand in the lock alone"
        locked = LOCK.get(canonicalize_name(each.name))
        assert locked is None or each.specifier.contains(locked, prereleases=True), f"{each}, but {locked} is locked"
        assert each.name not in CORE or (locked and ">=" in str(each.specifier)), f"{each} has no oldest version"
    wanted = [*EXTRAS["dev"], *EXTRAS["dali"], *EXTRAS["trackers"]]
    assert {canonicalize_name(Requirement(line).name) for line in wanted} - {"dlscale"} <= LOCK.keys()


def test_doctor_asks_for_the_same_versions() -> None:
    ranges = {each.name: each.specifier for each in REQUIREMENTS if each.name in LEAST}
    ranges["python"] = SpecifierSet(PROJECT["requires-python"])
    assert {name: f">={'.'.join(map(str, least))}" for name, least in LEAST.items()} == {
        name: str(specifier) for name, specifier in ranges.items()
    }


def test_the_workflow_asks_for_the_same_snakemake() -> None:
    (least,) = re.findall(r'^min_version\("(.*)"\)$', (ROOT / "Snakefile").read_text(), re.MULTILINE)
    assert f"snakemake>={least},<10" in PROJECT["dependencies"]


def test_one_cuda_in_the_gpu_image() -> None:
    (major,) = re.findall(r"^# PyTorch .*CUDA (\d+)\.\d", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert re.findall(r"nvidia-dali-cuda(\d+)0==", (ROOT / "docker/requirements-gpu.txt").read_text()) == [major]


@pytest.mark.slow
def test_an_environments_own_pytorch_stays(tmp_path: Path) -> None:
    """`make install` over an environment with another PyTorch than the lock's; all else is there, too."""
    for name in ("Makefile", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tmp_path)
    (tmp_path / "requirements.lock").write_text(f"torch=={LOCK['torch']}\n")  # the others' versions are what is here
    shutil.copytree(ROOT / "workflow_scripts/dlscale/core", tmp_path / "workflow_scripts/dlscale")
    words = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages"]  # pip is among what is there
    subprocess.run([*words, tmp_path / ".venv"], check=True)
    # What the environment has: this one's packages, and before them a PyTorch of an older, early build.
    theirs = tmp_path / "theirs/torch-2.12.0a0+site.dist-info"
    theirs.mkdir(parents=True)
    metadata = str(distribution("torch").read_text("METADATA"))
    (theirs / "METADATA").write_text(re.sub(r"^Version: .*", "Version: 2.12.0a0+site", metadata, flags=re.MULTILINE))
    (theirs / "INSTALLER").write_text("site\n")
    (packages,) = (tmp_path / ".venv/lib").glob("python*/site-packages")
    (packages / "site.pth").write_text(f"{theirs.parent}\n{sysconfig.get_path('purelib')}\n")

    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        ["make", "-C", tmp_path, "install"], env={**environment, **offline}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = (tmp_path / ".venv/install.log").read_text()
    assert re.findall(r"^Successfully installed (.*)$", said, re.MULTILINE) == [f"dlscale-{PROJECT['version']}"]
