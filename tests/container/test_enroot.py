"""Containers that the real enroot starts, from a small image with this machine's Python."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dlscale.config.run import Geometry
from dlscale.config.site import Site
from dlscale.launch.launcher import ContainerMounts, launch
from tests.conftest import ROOT, variables
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.container, pytest.mark.timeout(600)]
SOURCES = str(ROOT / "workflow_scripts")

#: Stage that replaces `dlscale`: prints its variables, which files it can write, its rights, then received signals.
STAGE = """
import os, signal, sys, time
def heard(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(75)
signal.signal(signal.SIGTERM, heard)
signal.signal(signal.SIGUSR2, heard)
def writable(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    return True
names = ("RANK", "LOCAL_RANK", "OTHER", "FROM", "A", "GONE", "HOME")
rights = [line.split() for line in open("/proc/self/status") if line.startswith(("CapEff", "NoNewPrivs"))]
print([os.environ.get(name) for name in names], [writable(path) for path in sys.argv[2:]], rights, flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    time.sleep(0.1)
sys.exit(7)
"""


@pytest.fixture
def place(tmp_path: Path) -> ContainerMounts:
    """Return mounts with this machine's Python, and with a working folder whose name has a blank."""
    results = tmp_path / "my work/results"
    results.mkdir(parents=True)
    data = ("/usr", sys.prefix, sys.base_prefix, str(ROOT))
    return ContainerMounts(str(results.parent), SOURCES, os.getuid(), os.getgid(), data, str(results))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return a site whose image has no programs but those of a mounted /usr; skip the test if enroot does not work."""
    for program in ("enroot", "squashfuse", "unsquashfs", "mksquashfs"):
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")
    root, image = tmp_path / "root", tmp_path / "small.sqsh"
    for name in ("dev", "etc", "proc", "run", "sys", "tmp", "usr", "var"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        if not Path(f"/{name}").is_symlink():
            pytest.skip(f"/{name} of this machine is not a link into /usr, which the image needs")
        (root / name).symlink_to(f"usr/{name}")
    path = f"PATH={Path(sys.executable).parent}:/usr/bin"
    (root / "etc/environment").write_text(f"{path}\nFROM=image\nGONE=image\nNVIDIA_VISIBLE_DEVICES=all\n")
    (root / "etc/profile").write_text("PATH=/nowhere\n")  # as in Debian, a login shell resets PATH
    subprocess.run(["mksquashfs", root, image, "-all-root", "-quiet", "-no-progress"], check=True)
    probe = ["enroot", "start", "--env", "NVIDIA_VISIBLE_DEVICES=void", "--mount", "/usr:/usr", str(image), "true"]
    done = subprocess.run(probe, capture_output=True, text=True, env={**os.environ, "ENROOT_LOGIN_SHELL": "no"})
    if done.returncode:
        pytest.skip(f"enroot cannot start a container here: {done.stderr[-300:]}")
    environment = {"A": "b 'c'", "GONE": None}
    return Site(engine="enroot", image=str(image), starter="direct", gpu=False, environment=environment)


@pytest.fixture
def stage(site: Site, place: ContainerMounts) -> Iterator[subprocess.Popen[str]]:
    """Yield a stage that waits in a container."""
    command = [*launch(site, place, Geometry())[:-2], "-c", STAGE, "1000"]
    with subprocess.Popen(command, env=variables(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline().startswith("[")
        yield process
        process.kill()


def servers(site: Site) -> list[psutil.Process]:
    """Return the running processes that serve the site's image."""
    found = [each for each in psutil.process_iter(["cmdline", "status"]) if site.image in (each.info["cmdline"] or [])]
    return [each for each in found if each.info["status"] != psutil.STATUS_ZOMBIE]


def ends(site: Site) -> None:
    until("the end of the image's server", lambda: not servers(site), said=lambda: str(servers(site)))


def test_a_stage_in_a_container(site: Site, place: ContainerMounts) -> None:
    """A stage gets its folders, its variables and those of the image; the exit status is the stage's."""
    assert place.results
    paths = ["results/a", "b", "/usr/c", "/d", "/tmp/e", f"{SOURCES}/f"]
    command = [*launch(site, place, Geometry())[:-2], "-c", STAGE, "0", *paths]
    environment = variables(RANK="2", LOCAL_RANK="1", OTHER="x", ENROOT_LOGIN_SHELL="yes", ENROOT_ROOTFS_WRITABLE="yes")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", timeout=PATIENCE)
    assert done.returncode == 7, done.stderr
    seen = ["2", "1", None, "image", "b 'c'", None, "/tmp"]
    rights = [["CapEff:", "0" * 16], ["NoNewPrivs:", "1"]]  # enroot has no option for rights: it drops all
    assert done.stdout == f"{seen} {[True, False, False, False, True, False]} {rights}\n"
    assert [path.name for path in Path(place.results).iterdir()] == ["a"] and not Path("/tmp/e").exists()
    ends(site)


def test_two_ranks_in_a_container(site: Site, place: ContainerMounts) -> None:
    torchrun = site.model_copy(update={"starter": "torchrun"})
    command = [*launch(torchrun, place, Geometry(gpus_per_node=2)), "--version"]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2, done.stderr


def test_signals_reach_the_stage(stage: subprocess.Popen[str], site: Site) -> None:
    assert stage.stdout and len(servers(site)) == 1
    for name in ("SIGUSR2", "SIGTERM"):  # the signals of Slurm
        stage.send_signal(getattr(signal, name))
        assert stage.stdout.readline() == f"heard {name}\n"
    assert stage.wait(PATIENCE) == 75
    ends(site)


def test_a_killed_stage_leaves_no_process(stage: subprocess.Popen[str], site: Site) -> None:
    stage.kill()
    assert stage.wait(PATIENCE) == -signal.SIGKILL
    ends(site)


@pytest.mark.parametrize("gpu", [True, False])
def test_only_runs_on_gpus_get_the_driver(gpu: bool, site: Site, place: ContainerMounts, tmp_path: Path) -> None:
    """enroot's hook calls `nvidia-container-cli` for runs on GPUs only, although the image asks for GPUs."""
    (tool := tmp_path / "nvidia-container-cli").write_text(f"#!/bin/sh\necho $* >{tmp_path}/called\n")
    tool.chmod(0o755)
    command = [*launch(site.model_copy(update={"gpu": gpu}), place, Geometry()), "--version"]
    environment = {**variables(PATH=f"{tmp_path}:{os.environ['PATH']}")}
    environment.pop("NVIDIA_VISIBLE_DEVICES", None)  # the hook prefers the caller's value
    subprocess.run(command, env=environment, check=True, timeout=PATIENCE)
    assert (tmp_path / "called").exists() is gpu
    if gpu:
        assert {"configure", "--device=all", "--compute", "--utility"} < {*(tmp_path / "called").read_text().split()}
