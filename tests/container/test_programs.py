"""External programs in real containers: in an image without dlscale, and in the project's image."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlscale.config.run import load_run
from dlscale.config.site import Site
from dlscale.extensions.programs.launch import launch_program
from dlscale.launch.launcher import ContainerMounts
from tests.conftest import ROOT, make_run
from tests.container.conftest import Engine
from tests.programs import settings, write_program
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.container, pytest.mark.timeout(1800), pytest.mark.xdist_group("machine")]
SOURCES = str(ROOT / "workflow_scripts")
BASE = os.environ.get("DLSCALE_BASE_IMAGE", "localhost/ci-base:bookworm")
#: Containerfile of the program's image. dlscale must keep the image's own PYTHONPATH.
THEIRS = f"FROM {BASE}\nENV PYTHONPATH=/its\nRUN mkdir /its && echo place = __file__ >/its/its_own.py\n"


@pytest.fixture(scope="module")
def theirs(container_engine: Engine, cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the name of an image with Python and a module, but without dlscale and PyTorch."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "Containerfile").write_text(THEIRS)
    container_engine("build", "--pull=never", "--network=host", "--tag=localhost/theirs:tests", folder)
    yield "localhost/theirs:tests"
    container_engine("rmi", "localhost/theirs:tests")


def containers(engine: Engine) -> list[str]:
    return engine("ps", "--all", "--filter=name=^dlscale-", "--format={{.Names}}").split()


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(container_engine: Engine, cpu_image: str, tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts the stage `program` for a small program outside the run's folder."""
    processes, folder = [], tmp_path / "w"

    def started(
        *more: str, image: str | None = None, gpus: int = 1, again: bool = False, **program: Any
    ) -> subprocess.Popen[str]:
        if not again:
            write_program(tmp_path / "theirs")
            given = settings(tmp_path / "theirs", *more, **program)
            file = make_run(folder, "program", {**given, "geometry": {"gpus_per_node": gpus}}, {"kind": "files"})
            made = yaml.safe_load(file.read_text())  # add the image here: `make_run` has no site, so it refuses images
            file.write_text(yaml.safe_dump({**made, "program": {**made["program"], "image": image}}))
        site = Site(engine="podman", image=cpu_image, starter="torchrun", gpu=False)
        data = (str(ROOT), str(tmp_path / "theirs"))
        place = ContainerMounts(str(folder), SOURCES, os.getuid(), os.getgid(), data)
        outer, inner = launch_program(site, place, load_run(folder / "config.yaml", "program"))
        words = ["--config", folder / "config.yaml", "--manifest", "none", "--threads", 1, "--sources", "a"]
        words += ["--keep", folder / "out", "--out", folder, "--log", folder / "log", "--start", json.dumps(inner)]
        process = subprocess.Popen(
            [sys.executable, *outer[1:], "program", *map(str, words)],
            cwd=folder,
            env={**container_engine.environment, "PYTHONPATH": SOURCES},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield started
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    said = process.communicate(timeout=PATIENCE)[1]
    log = folder / "w/log"
    return process.returncode, said + (log.read_text() if log.exists() else "")


def test_a_program_runs_in_another_image(start: Start, theirs: str, container_engine: Engine, tmp_path: Path) -> None:
    """A program in another image: its steps are detected, its folder is writable, and its variables are set."""
    process = start(
        image=theirs, environment={"A": "b c"}, command=["python3", "first.py", "--out", "{out}"], resume=[]
    )
    (tmp_path / "theirs/first.py").write_text(
        "import its_own, os, runpy\nassert its_own.place.startswith('/its/') and os.environ['A'] == 'b c'\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    code, said = ended(process, tmp_path)
    assert code == 0, said
    found = json.loads((tmp_path / "w/program.json").read_text())
    assert found["outside"]["way"] == "seen" and found["outside"]["command"][0] == "python3"
    assert len((tmp_path / "w/program.jsonl").read_text().splitlines()) == 3
    made = (tmp_path / "theirs/written_where_it_is").stat()
    assert (made.st_uid, made.st_gid) == (os.getuid(), os.getgid())
    assert containers(container_engine) == []


@pytest.mark.slow
def test_in_dlscales_image(start: Start, container_engine: Engine, tmp_path: Path) -> None:
    """The image's torchrun starts two processes, and the steps of both are detected."""
    code, said = ended(start(gpus=2), tmp_path)
    assert code == 0, said
    assert "rank 0 of 2" in said and "rank 1 of 2" in said
    found = json.loads((tmp_path / "w/program.json").read_text())
    assert len(found["FULL"]["rank_throughput"]) == found["nranks"] == 2
    assert (tmp_path / "theirs/written_where_it_is").exists() and containers(container_engine) == []


def test_signals_reach_the_program_and_a_retry_continues(
    start: Start, theirs: str, container_engine: Engine, tmp_path: Path
) -> None:
    process = start("--seconds=0.2", image=theirs)
    until("a checkpoint", (tmp_path / "w/out/saved").exists, process)
    process.send_signal(signal.SIGTERM)
    code, said = ended(process, tmp_path)
    assert code == 75 and "the program resumes from" in said and containers(container_engine) == []
    code, said = ended(start(again=True), tmp_path)
    assert code == 0, said
    found = [json.loads(line) for line in (tmp_path / "w/program.jsonl").read_text().splitlines()]
    assert [each["valid_loss"] for each in found] == [1.0, 1 / 2, 1 / 3]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["it ignores SIGTERM", "all around it is killed"])
def test_nothing_is_left(start: Start, theirs: str, container_engine: Engine, tmp_path: Path, how: str) -> None:
    command = ["sh", "-c", "trap '' TERM; touch there; while :; do sleep 1; done"]
    process = start(image=theirs, command=command, log=None, losses={}, resume=[])
    until("the program", (tmp_path / "theirs/there").exists, process)
    if how == "it ignores SIGTERM":
        process.send_signal(signal.SIGTERM)
        code, said = ended(process, tmp_path)
        assert code == 2 and "the program ended with status 137" in said
        assert containers(container_engine) == []
    else:
        os.killpg(process.pid, signal.SIGKILL)
        until("the container's end", lambda: not containers(container_engine), said=lambda: container_engine("ps"))
