"""TensorBoard on `results/plans` shows each run's measurements once, even after repeated measurements."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from dlscale.core import board as boards
from dlscale.core import telemetry
from dlscale.core.errors import UserError
from dlscale.core.files import open_regular
from dlscale.core.process import only_writer
from dlscale.measure.records import Throughput
from tests.conftest import ROOT, stage, variables
from tests.test_counting import tiny_run
from tests.waiting import PATIENCE

FEW = {"throughput": {"warmup": 0, "trials": 1, "batches": 2}, "profile": {"skip": 1, "steps": 2}}


def scalars(board: EventMultiplexer, run: str) -> dict[str, float]:
    """Return all scalars of a run by name; fail if a scalar has more than one point."""
    found = {}
    for name in board.GetAccumulator(run).Tags()["scalars"]:
        (point,) = board.Scalars(run, name)
        found[name] = point.value
    return found


#: Script that fills a folder's disk, then writes points until an error is raised, and prints the error.
FILLING = """
import sys
from pathlib import Path
from dlscale.core import board

try:
    with board.writer(Path(sys.argv[1])) as writer:
        with open(sys.argv[1] + "/fill", "wb", buffering=0) as file:
            while len(bytes(4096)) == file.write(bytes(4096)): pass
except OSError:
    pass
try:
    with board.writer(Path(sys.argv[1])) as writer:
        for step in range(2000): writer.add_scalar("a" * 100, 1.0, step)
except OSError as error:
    print(error)
"""


def test_a_full_disk_is_one_error(full_disk: Path) -> None:
    """A full disk raises one error. The writing thread does not print a traceback of its own."""
    ended = subprocess.run([sys.executable, "-c", FILLING, full_disk], capture_output=True, text=True, timeout=100)
    assert ended.stdout == "[Errno 28] No space left on device\n" and "Traceback" not in ended.stderr, ended


@pytest.mark.parametrize("mode", ["r", "w", "a", "a+"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "device", "socket"])
def test_only_a_regular_file_is_opened(tmp_path: Path, kind: str, mode: str) -> None:
    """Links, pipes, devices and sockets are refused at once.

    Other users of a shared folder could create any of these at the path of a file.
    """
    path, victim = tmp_path / "it", tmp_path / "victim"
    victim.write_text("mine")
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            server.bind(str(path))
        else:
            path.symlink_to({"link": victim, "dangling link": tmp_path / "none", "device": "/dev/zero"}[kind])
        path = Path("/dev/zero") if kind == "device" else path
        told = f"^{path}: a link, pipe or device; expected a file"
        with pytest.raises(UserError, match=told), open(path, mode, opener=open_regular):
            pass
    assert victim.read_text() == "mine" and not (tmp_path / "none").exists()
    with pytest.raises(IsADirectoryError), open(tmp_path, mode, opener=open_regular):
        pass
    with open(victim, mode, opener=open_regular) as file:
        assert file.fileno()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_is_a_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".lock").symlink_to("victim") if kind == "link" else os.mkfifo(tmp_path / ".lock")
    with pytest.raises(UserError, match=r"/\.lock: a link, pipe or device; expected a file"), only_writer(tmp_path):
        pass
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("place", ["tensorboard", "tensorboard/throughput"])
def test_event_files_behind_a_link_are_kept(tmp_path: Path, place: str) -> None:
    folder, other = tmp_path / "run", tmp_path / "other" / "throughput"
    other.mkdir(parents=True)
    (event := other / "events.out.tfevents.1.of.another").write_text("mine")
    link = folder / place
    link.parent.mkdir(parents=True)
    link.symlink_to(other.parent if place == "tensorboard" else other)
    with pytest.raises(UserError, match=f"{place}: a link, pipe or device; expected a folder"):
        boards.write(folder / "tensorboard" / "throughput", {"value": 1.0})
    assert list(other.iterdir()) == [event]


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    """A second writer is refused; the message names the lock's process. A killed process leaves no lock."""
    code = (
        "import sys; from pathlib import Path; from dlscale.core.process import only_writer\n"
        "with only_writer(Path(sys.argv[1])): print(flush=True), input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables()) as other:
        assert other.stdout and other.stdout.readline()
        with pytest.raises(UserError, match=f"in use by process {other.pid} on "), only_writer(tmp_path):
            pass
        other.kill()
    with only_writer(tmp_path):
        pass


@pytest.mark.slow
def test_only_the_last_measurement_is_shown(tmp_path: Path, tiny_data: Callable[[str], Path]) -> None:
    """After its stages have run twice, a run shows only the second measurement."""
    folder = tmp_path / "plans" / "p" / "r"
    folder.mkdir(parents=True)
    tiny_run("cosmo_unet", folder, **FEW)
    manifest = tiny_data("cosmo_unet") / "manifest.json"
    for _ in range(2):
        for name, out in {"throughput": "throughput.json", "profile": "profile"}.items():
            arguments = ["--config", folder / "config.yaml", "--manifest", manifest, "--threads", 1, "--device", "cpu"]
            watched = folder / "telemetry" / f"{name}.csv"
            assert stage(name, *arguments, "--out", folder / out, "--telemetry", watched) == 0
    board = EventMultiplexer()
    board.AddRunsFromDirectory(str(tmp_path / "plans")).Reload()
    place = "p/r/tensorboard"
    runs = [f"{place}/telemetry/profile", f"{place}/telemetry/throughput", f"{place}/throughput"]
    assert sorted(board.Runs()) == runs

    rates = Throughput.read(folder / "throughput.json")
    assert rates.full and scalars(board, runs[2])["throughput/full"] == pytest.approx(rates.full.mean)
    seen = telemetry.summary(telemetry.read(folder / "telemetry" / "profile.csv"))
    assert scalars(board, runs[0])["telemetry/cpu_run"] == pytest.approx(seen.means["cpu_run"], rel=1e-5)


@pytest.mark.slow
def test_an_open_tensorboard_shows_the_newest_value(tmp_path: Path) -> None:
    """An open TensorBoard, on loopback, shows the value of the file that replaced its event file with the same step."""
    boards.write(tmp_path / "runs" / "r", {"value": 1.0})
    words = ["--logdir", tmp_path / "runs", "--port", 0, "--reload_interval", 1]
    command = [sys.executable, "-m", "tensorboard.main", *map(str, words)]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:

        def shown(value: float) -> bool:
            for _ in range(120):
                time.sleep(0.5)
                assert server.poll() is None, (tmp_path / "log").read_text()
                address = [
                    word for word in (tmp_path / "log").read_text().split() if word.startswith("http://localhost:")
                ]
                if not address:
                    continue
                url = f"{address[0]}data/plugin/scalars/scalars?run=r&tag=value"
                try:
                    with urllib.request.urlopen(url, timeout=10) as answer:
                        points = json.load(answer)
                except OSError:  # TensorBoard has not loaded the run yet
                    continue
                if [point[2] for point in points] == [value]:
                    return True
            return False

        assert shown(1.0)
        there = [each.laddr.ip for each in psutil.Process(server.pid).net_connections("tcp") if each.status == "LISTEN"]
        assert there in (["127.0.0.1"], ["::1"]), "TensorBoard's default must be loopback, and no page may change it"
        pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb"), ROOT / "README.md"]
        commands = [line for page in pages for line in page.read_text().splitlines() if "--logdir" in line]
        assert len(commands) > 3 and not [line for line in commands if "--bind_all" in line or "--host" in line]
        boards.write(tmp_path / "runs" / "r", {"value": 2.0})
        assert shown(2.0)
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize("hub", ["", "/user/me/login-node/"])
def test_the_notebook_starts_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: str) -> None:
    """All cells run in a repository with one log, which TensorBoard shows; on a JupyterHub, through the hub's proxy."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    (tmp_path / "Snakefile").touch()
    with boards.writer(tmp_path / "results/plans/cosmo_demo/baseline/tensorboard") as writer:
        writer.add_scalar("loss/train", 1.0, 1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # TensorBoard lists its processes in this folder
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(ROOT / "docs/examples/start_tensorboard.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    look = nbformat.v4.new_code_cell(
        "import json, urllib.request\n"
        "print(json.load(urllib.request.urlopen(f'http://localhost:{running.port}/data/runs')))"
    )
    notebook.cells.insert(len(notebook.cells) - 1, look)
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", hub)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    (shown,) = (output.data["text/html"] for output in outputs if "text/html" in output.get("data", {}))
    address, logs = (output.text.strip() for output in outputs[-2:])
    assert logs == "['cosmo_demo/baseline/tensorboard']"
    assert re.fullmatch(rf"{hub}proxy/\d+/" if hub else r"http://localhost:\d+/", address)
    assert (address in shown) == bool(hub)
