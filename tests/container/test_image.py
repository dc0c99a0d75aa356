"""The real image `cpu`: its contents, the users that can run the image, and the workflow inside the image."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import COSMO, COSMO_RUN, ROOT
from tests.container.conftest import Engine
from tests.workflow.conftest import copy_tree

#: The timeout is long, because the first build installs PyTorch, and may first install podman and a base image.
pytestmark = [pytest.mark.container, pytest.mark.timeout(1800), pytest.mark.xdist_group("machine")]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: User and group that the image does not know.
USER, GROUP = 4242, 4343
RUN = ["run", "--rm", "--init", "--network=none", "--no-healthcheck", "--pull=never"]
#: RUN as a user without an entry in /etc/passwd, as with docker; podman would add an entry.
STRANGER = [*RUN, f"--user={USER}:{GROUP}", "--passwd=false"]


@pytest.fixture(scope="session")
def inspected(container_engine: Engine, cpu_image: str) -> dict[str, Any]:
    """Return the engine's description of the image."""
    return json.loads(container_engine("image", "inspect", cpu_image))[0]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the repository that can build the image."""
    copy_tree(tmp_path / "checkout")
    for name in ("pyproject.toml", "LICENSE", "Makefile", ".dockerignore"):
        shutil.copy2(ROOT / name, tmp_path / "checkout")
    shutil.copytree(ROOT / "docker", tmp_path / "checkout/docker")
    return tmp_path / "checkout"


def test_configuration(inspected: dict[str, Any]) -> None:
    config = inspected["Config"]
    label = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert label["version"] == PROJECT["version"]
    assert label["revision"] == "tested"
    assert label["licenses"] == PROJECT["license"]
    assert {"title", "description", "source", "base.name"} <= set(label)
    assert config["User"] == "10001:10001"
    assert not config.get("Entrypoint")  # Shifter ignores an entry point, and podman-hpc fails with an entry point
    assert config["WorkingDir"] == "/dlscale"
    assert "doctor" in str(inspected["Healthcheck"])


def test_torch_is_the_projects() -> None:
    (torch,) = re.findall(r"^torch==\S+", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    text = (ROOT / "docker/Dockerfile").read_text()
    assert f"ARG TORCH={torch}\n" in text
    assert text.count(f"ARG VERSION={PROJECT['version']}\n") == 2


def test_nothing_is_left_behind(container_engine: Engine, cpu_image: str, inspected: dict[str, Any]) -> None:
    print(f"{cpu_image}: {inspected['Size'] / 1e9:.2f} GB")
    assert inspected["Size"] < 3e9
    # ignore empty files, which are apt's locks, and the shell's files, which are part of Debian
    folders = "/root /tmp /run/secrets /var/lib/apt/lists /var/cache/apt /var/log"
    find = "find $folder -type f -size +0 ! -name .bashrc ! -name .profile"
    loop = f"set -e; for folder in {folders}; do [ ! -e $folder ] || {find}; done"
    assert "/tmp/left" in container_engine(*RUN, "--user=0", cpu_image, "sh", "-c", f"echo x >/tmp/left; {loop}")
    assert container_engine(*RUN, "--user=0", cpu_image, "sh", "-c", loop) == ""
    listed = container_engine(*RUN, cpu_image, "ls", "-A", "/dlscale").split()
    assert not {".git", ".venv", ".snakemake", "tests", "data"} & set(listed), listed
    assert container_engine(*RUN, cpu_image, "ls", "-A", "results") == ""


def test_distributed_operations_work(container_engine: Engine, cpu_image: str) -> None:
    """DistributedDataParallel works with the image's PyTorch, which may differ from the PyTorch of this environment."""
    mount = f"--volume={ROOT}/tests/container/inside.py:/tmp/inside.py:ro"
    assert "ok: PyTorch " in container_engine(*STRANGER, mount, cpu_image, "python", "/tmp/inside.py", "numba")


@pytest.mark.parametrize("more", [[], ["--env=HOME=/nowhere", "--env=USER=", "--read-only"]], ids=["as is", "no home"])
def test_any_user(container_engine: Engine, cpu_image: str, more: list[str]) -> None:
    run = [*STRANGER, *more, cpu_image]
    assert container_engine(*run, "python", "-m", "dlscale", "--version").strip() == PROJECT["version"]
    code = "import torch; assert torch.compile(lambda x: x + 1)(torch.ones(2)).sum() == 4; import matplotlib.pyplot"
    assert container_engine(*run, "python", "-W", "error::UserWarning", "-c", code) == ""
    assert "usage" in container_engine(*run, "snakemake", "--help")


@pytest.mark.slow
def test_the_workflow(container_engine: Engine, cpu_image: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    plan = {"study": "cosmo_unet", "settings": {**COSMO_RUN, "dataset": "boxes"}, "runs": {"unet": {}}}
    boxes = {**COSMO, "source": {**COSMO["source"], "boxes": {"train": 1, "valid": 1, "test": 0}}}
    config = {"targets": ["tiny"], "datasets": {"boxes": boxes}, "plans": {"tiny": plan}}
    (results / "tiny.yaml").write_text(yaml.safe_dump(config))
    shutil.chown(results, USER, GROUP)
    command = ["snakemake", "--cores", "2", "--configfile", "results/tiny.yaml"]
    said = container_engine(*STRANGER, f"--volume={results}:/dlscale/results", cpu_image, *command, timeout=900)
    made = [path for path in results.rglob("*") if path.name != "tiny.yaml"]
    assert results / "report/tiny.html" in made, said[-3000:]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(USER, GROUP)}


def test_make_demo(container_engine: Engine, cpu_image: str, checkout: Path) -> None:
    """`make demo` needs no Python on the host: a container runs the checkout's code, and nothing is installed."""
    words = ["ENGINE=podman", f"IMAGE={cpu_image}", "ARGS=--dry-run --quiet"]
    said = container_engine.run(["make", "-C", str(checkout), "demo", *words])
    assert re.search(r"cosmo_demo\.\{?baseline", said), "a dry run must list its jobs"
    assert f"/dlscale in the container is {checkout}\n" in said
    assert not (checkout / ".venv").exists()
    assert container_engine("ps", "--all", "--quiet", "--filter=name=dlscale-demo") == ""


@pytest.fixture(scope="module")
def gpu_image(container_engine: Engine) -> str:
    """Return the name of the image `gpu`, built without NVIDIA's registry.

    The base image is the base of `cpu`, PyTorch is the CPU build, and nsys is left out. All other steps, such as the
    locked packages with their hashes, equal the real image's.
    """
    container_engine.build(ROOT, "localhost/dlscale:tests-gpu", "--target=gpu", "--build-arg=NSYS=")
    return "localhost/dlscale:tests-gpu"


@pytest.mark.long
def test_all_packages_of_the_gpu_image_can_be_imported(container_engine: Engine, gpu_image: str) -> None:
    config = json.loads(container_engine("image", "inspect", gpu_image))[0]["Config"]
    assert config["User"] == "10001:10001" and not config.get("Entrypoint")
    assert config["Labels"]["org.opencontainers.image.base.name"] == "nvidia/cuda (CUDA 12)"
    mount = f"--volume={ROOT}/tests/container/inside.py:/tmp/inside.py:ro"
    said = container_engine(*STRANGER, mount, gpu_image, "python", "/tmp/inside.py", "nvidia.dali", "h5py", "numba")
    assert "ok: PyTorch " in said
    listed = container_engine(*STRANGER, gpu_image, "pip", "list", "--format=freeze")
    assert "nvidia-dali-cuda120==" in listed and "nvidia-dali-cuda130" not in listed


@pytest.mark.long
def test_two_processes_of_the_gpu_image_exchange_values(container_engine: Engine, gpu_image: str) -> None:
    code = "import torch, torch.distributed as d; d.init_process_group('gloo'); x = torch.ones(1); d.all_reduce(x); "
    words = ["torchrun", "--standalone", "--nproc-per-node=2", "--no-python", "python", "-c"]
    said = container_engine(
        *STRANGER, "--env=GLOO_SOCKET_IFNAME=lo", gpu_image, *words, code + "assert x == 2; print('both', flush=True)"
    )
    assert said.count("both") == 2


@pytest.mark.long
def test_the_gpu_image_runs_a_mounted_nsys(container_engine: Engine, gpu_image: str, real_nsys: Path) -> None:
    root = real_nsys.parents[2]  # the folder that contains usr/bin/nsys
    mounted = [f"--volume={root}:{root}:ro", f"--env=NSYS={real_nsys}"]
    assert "NVIDIA Nsight Systems version" in container_engine(*STRANGER, *mounted, gpu_image, real_nsys, "--version")
