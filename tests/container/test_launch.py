"""Containers that the launcher starts: signals, exit status and files; no container is left over."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlscale.config.run import Geometry
from dlscale.config.site import Site
from dlscale.launch import image
from dlscale.launch.launcher import ContainerMounts, launch
from tests.conftest import ERA5_RUN, ROOT, make_run
from tests.container.conftest import Engine
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.container, pytest.mark.timeout(1800), pytest.mark.xdist_group("machine")]
STAND_INS = Path(__file__).parent / "stand_ins"
SOURCES = str(ROOT / "workflow_scripts")

#: Stage that replaces `dlscale` and reports the signals that it receives.
STAGE = """
import os, signal, sys, time
from dlscale.launch.contain import exit_with_stdin
def heard(number, frame):
    open(signal.Signals(number).name, "w").close()  # the printed line is lost if the client has ended
    print("heard", signal.Signals(number).name, flush=True)
    if number != signal.SIGUSR2:
        sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    signal.signal(number, heard)
exit_with_stdin()
print("ready", os.environ.get("SLURM_PROCID"), flush=True)
open("made", "w").write("x")
for _ in range(int(sys.argv[1]) * 10):
    time.sleep(0.1)
sys.exit(7)
"""


@pytest.fixture
def prefix(container_engine: Engine, cpu_image: str, tmp_path: Path) -> list[str]:
    """Return a command that starts Python in a container; the caller appends the stage."""
    site = Site(engine="podman", image=cpu_image, starter="direct", gpu=False)
    place = ContainerMounts(str(tmp_path), SOURCES, os.getuid(), os.getgid(), (str(ROOT),), results=str(tmp_path))
    words = launch(site, place, Geometry())
    assert words[-4:] == ["python", "-P", "-m", "dlscale"]
    return [sys.executable, *words[1:-2]]


@pytest.fixture
def start(container_engine: Engine, prefix: list[str], tmp_path: Path) -> Iterator[Any]:
    """Yield a function that starts the stage for some seconds."""
    processes = []

    def started(seconds: int) -> subprocess.Popen[str]:
        with (tmp_path / "said").open("w") as said:
            process = subprocess.Popen(
                [*prefix, "-c", STAGE, str(seconds)],
                cwd=tmp_path,
                env={**container_engine.environment, "PYTHONPATH": SOURCES, "SLURM_PROCID": "3"},
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        processes.append(process)
        return process

    yield started
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def containers(engine: Engine) -> list[str]:
    return engine("ps", "--all", "--filter=name=^dlscale-", "--format={{.Names}}").split()


def said(folder: Path, text: str) -> str:
    printed = folder / "said"
    until(f"the stage to say '{text}'", lambda: text in printed.read_text(), said=printed.read_text)
    return printed.read_text()


def test_status_and_files(start: Any, container_engine: Engine, tmp_path: Path) -> None:
    assert start(0).wait(PATIENCE) == 7, "expected the exit status of the stage"
    assert "ready 3" in said(tmp_path, "ready"), "the stage must get the variables of its rank"
    made = (tmp_path / "made").stat()
    assert (made.st_uid, made.st_gid) == (os.getuid(), os.getgid())
    assert containers(container_engine) == []


#: Stage that prints its rights, and for each write the number of the error, or 0 if the write succeeds.
RIGHTS = """
import sys
def write(path):
    try:
        open(path, "a").close()
    except OSError as error:
        return error.errno
    return 0
rights = [line.split() for line in open("/proc/self/status") if line.startswith(("CapEff", "NoNewPrivs"))]
print(rights, [write(path) for path in sys.argv[1:]])
"""


@pytest.mark.parametrize("engine", ["podman", "podman-hpc"])
def test_a_stage_has_no_rights_but_to_write_results(
    engine: str, container_engine: Engine, cpu_image: str, tmp_path: Path
) -> None:
    """The kernel reports neither capabilities nor new privileges, and refuses writes outside of the results."""
    (results := tmp_path / "results").mkdir()
    site = Site(engine=engine, image=cpu_image, starter="direct", gpu=False)
    place = ContainerMounts(str(tmp_path), SOURCES, os.getuid(), os.getgid(), (str(ROOT),), results=str(results))
    paths = [f"{SOURCES}/dlscale/core/files.py", f"{tmp_path}/made", f"{results}/made"]
    path = f"{STAND_INS}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = [f"PATH={path}", f"PYTHONPATH={SOURCES}", "PODMANHPC_USE_DEFAULT_ARGS=false", "USER=tester"]
    words = launch(site, place, Geometry())
    printed = container_engine.run(["env", f"--chdir={tmp_path}", *variables, *words[:-2], "-c", RIGHTS, *paths])
    told = f"{[['CapEff:', '0' * 16], ['NoNewPrivs:', '1']]} {[errno.EROFS, errno.EROFS, 0]}"
    assert told in printed.splitlines(), printed
    assert [path.name for path in tmp_path.iterdir()] == ["results"] and (results / "made").exists()


def test_signals_reach_the_stage_by_name(start: Any, container_engine: Engine, tmp_path: Path) -> None:
    process = start(1000)
    said(tmp_path, "ready")
    process.send_signal(signal.SIGUSR2)
    said(tmp_path, "heard SIGUSR2")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 75
    assert "heard SIGTERM" in said(tmp_path, "SIGTERM") and containers(container_engine) == []


def test_ctrl_c_reaches_it_once(start: Any, container_engine: Engine, tmp_path: Path) -> None:
    process = start(1000)
    said(tmp_path, "ready")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    assert process.wait(PATIENCE) == 75
    assert said(tmp_path, "heard").count("heard SIGINT") == 1 and containers(container_engine) == []


@pytest.mark.parametrize("who", ["supervisor", "client", "both"])
def test_no_process_outlives_a_killed_caller(start: Any, container_engine: Engine, tmp_path: Path, who: str) -> None:
    process = start(1000)
    said(tmp_path, "ready")
    (client,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[:1]
    for pid in {"supervisor": [process.pid], "client": [int(client)], "both": [process.pid, int(client)]}[who]:
        os.kill(pid, signal.SIGKILL)
    until("the container's end", lambda: not containers(container_engine), said=lambda: container_engine("ps", "--all"))
    assert (tmp_path / "SIGTERM").exists(), "the stage must get SIGTERM, so that it can save"
    if who == "client":
        assert process.wait(PATIENCE) in (75, 128 + signal.SIGKILL), (
            "expected the stage's status, or 128 + SIGKILL if the container was removed first"
        )


def test_a_failing_engine_is_reported(container_engine: Engine, prefix: list[str], tmp_path: Path) -> None:
    missing = [word if "dlscale:tests" not in word else "localhost/nosuch:1" for word in prefix]
    environment = {**container_engine.environment, "PYTHONPATH": SOURCES}
    command = [*missing, "-m", "dlscale", "train"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path)
    assert done.returncode == 125 and "nosuch" in done.stderr and "Traceback" not in done.stderr
    assert "podman did not start the container (status 125)" in done.stderr


# ---- a stage in every engine that works on this machine ---------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["podman", "podman-hpc", "shifter"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_in_a_container_equals_one_outside(
    engine: str, ranks: int, container_engine: Engine, cpu_image: str, era5_data: Path, tmp_path: Path
) -> None:
    """In containers, losses and metrics agree with values outside, to the accuracy of another build of PyTorch."""
    from tests.conftest import ERA5, records, train

    if engine == "shifter" and any(path.is_relative_to("/var") for path in (ROOT, era5_data, tmp_path)):
        pytest.skip("Shifter cannot mount below /var, where this checkout or the temporary folder is")
    settings = {**ERA5_RUN, "loader": {"workers": 1}, "geometry": {"gpus_per_node": ranks}}
    for name in ("outside", "inside"):
        make_run(tmp_path / name, "era5_vit", settings if name == "inside" else {**settings, "geometry": {}}, ERA5)
    assert train(tmp_path / "outside", era5_data / "manifest.json") == 0
    mounts = {str(era5_data): str(era5_data), str(ROOT): str(ROOT)} if engine == "shifter" else {}
    site = Site(engine=engine, image=cpu_image, starter="torchrun", gpu=False, mounts=mounts)
    folder, data = str(tmp_path), (str(era5_data), str(ROOT))
    place = ContainerMounts(folder, SOURCES, os.getuid(), os.getgid(), data, results=folder)
    arguments = ["--config", tmp_path / "inside/config.yaml", "--manifest", era5_data / "manifest.json"]
    arguments += ["--checkpoints", tmp_path / "inside/checkpoints", "--out", tmp_path / "inside"]
    command = [*launch(site, place, Geometry(gpus_per_node=ranks)), "train", *map(str, arguments), f"--threads={ranks}"]
    path = f"{STAND_INS}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    # podman-hpc's default storage needs fuse-overlayfs, which some machines lack. podman's storage also works.
    variables = [f"PATH={path}", f"PYTHONPATH={SOURCES}", "PODMANHPC_USE_DEFAULT_ARGS=false", "USER=tester"]
    container_engine.run(["env", f"--chdir={tmp_path}", *variables, *command])
    for a, b in zip(records(tmp_path / "outside"), records(tmp_path / "inside"), strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-4)
        assert a["metrics"] == pytest.approx(b["metrics"], rel=1e-3, abs=1e-6)
    assert json.loads((tmp_path / "inside/provenance.json").read_text())["processes"] == ranks
    assert containers(container_engine) == []


def test_shifters_rules_are_enforced(container_engine: Engine, cpu_image: str) -> None:
    """The stand-in for Shifter refuses invalid command lines."""
    for wrong in (["--gpu"], ["--env=A="], ["--volume=/tmp:/etc/x"], ["--volume=/tmp:/opt"]):
        command = [STAND_INS / "shifter", f"--image={cpu_image}", *wrong, "true"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode and done.stderr.startswith("shifter: "), wrong


# ---- the image's identity --------------------------------------------------------------------------


def test_identity(container_engine: Engine, cpu_image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in container_engine.environment.items():
        monkeypatch.setenv(key, value)
    found = image.identity("podman", cpu_image)
    assert found and len(found.removeprefix("sha256:")) == 64
    assert image.identity("podman", "localhost/nosuch:1") is None
    container_engine("tag", cpu_image, "localhost/dlscale:another")
    assert image.identity("podman", "localhost/dlscale:another") == found, (
        "the identity must depend on the content instead of the name"
    )
    container_engine("untag", "localhost/dlscale:another", "localhost/dlscale:another")
    monkeypatch.setenv("PATH", f"{STAND_INS}:{os.environ['PATH']}")
    assert image.identity("shifter", cpu_image) == found


def test_an_image_that_is_not_migrated_is_reported(
    container_engine: Engine, cpu_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`podman-hpc migrate` may report success without effect, so dlscale checks podman-hpc's list of images."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for key, value in {**container_engine.environment, "PATH": path, "USER": "tester"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PODMANHPC_USE_DEFAULT_ARGS", "false")
    assert image.identity("podman-hpc", cpu_image) == image.identity("podman", cpu_image)
    assert not image.migrated(cpu_image)
