"""Shared fixtures and helpers of the tests: tiny datasets and runs, made by the real stages."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler
from typing import Any

import pytest

# Tests run in parallel, so waiting threads must not spin. OpenMP reads this variable when it loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are tiny, and tests run in parallel

# If a script starts the tests in the background, all their processes ignore Ctrl-C. Restore Python's handler.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from dlscale import cli
from dlscale.config import resolve as config
from dlscale.config.dataset import DatasetSettings
from dlscale.core.settings import read_yaml
from dlscale.data.reads import load_dataset
from dlscale.extensions.scaffold import study_tests
from dlscale.extensions.scaffold.new_study import TEMPLATE
from tests import changed
from tests.nsys import real_nsys as real_nsys  # a fixture

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # real data, if available

#: Tiny dataset and tiny run of each study, by name, read from `tests/tiny/STUDY.yaml`. Tests of all studies loop over
#: this mapping.
TINY: dict[str, dict[str, Any]] = {file.stem: read_yaml(file) for file in sorted((ROOT / "tests/tiny").glob("*.yaml"))}
COSMO, COSMO_RUN = TINY["cosmo_unet"]["dataset"], TINY["cosmo_unet"]["run"]
ERA5, ERA5_RUN = TINY["era5_vit"]["dataset"], TINY["era5_vit"]["run"]


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "run only tests whose files import, directly or not, a file that differs from this commit"
    parser.addoption("--changed", metavar="COMMIT", help=about)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests that share an expensive fixture one after the other in one process.

    Otherwise each process would make every module fixture and the finished workflow again. nsys tests also share a
    process, because all nsys processes of a machine use the same shared memory. With `--changed`, only tests in files
    that depend on a changed file are kept.
    """
    for item in items:
        # pytest-xdist would combine two groups of a test into a third group.
        if not item.get_closest_marker("xdist_group") and (group := _group(item)):
            item.add_marker(pytest.mark.xdist_group(group))
    # Start the longest group (fixture `finished`) first. If it started last, it would run alone at the end.
    items.sort(key=lambda item: "finished" not in getattr(item, "fixturenames", ()))
    if since := config.getoption("--changed"):
        different = changed.files(since)
        left_out = [item for item in items if not different & changed.reached(item.path)]
        items[:] = [item for item in items if different & changed.reached(item.path)]
        config.hook.pytest_deselected(items=left_out)
        names = sorted({item.path.stem.removeprefix("test_") for item in left_out})
        # print once, because every process collects all tests
        if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
            print(f"\nLeft out, because they import no changed file: {', '.join(names)}", file=sys.__stderr__)


def _group(item: pytest.Item) -> str | None:
    names = getattr(item, "fixturenames", ())
    if "real_nsys" in names:
        return "machine"
    find = item.session._fixturemanager.getfixturedefs
    for made in [found[-1] for name in names if (found := find(name, item))]:
        if made.scope == "module" or (made.scope, made.argname) == ("session", "finished"):
            return f"{made.baseid} {made.argname}"
    return None


def stage(*arguments: object) -> int:
    """Run one stage in this process, as the command line does; return its exit status."""
    return cli.main([str(argument) for argument in arguments])


def make_parts(folder: Path, settings: dict[str, Any]) -> list[Path]:
    """Make a dataset's files with its stages, as the workflow does; return the raw files that are used unchanged."""
    return study_tests.make_parts(_configured(folder, settings), folder)


def make_dataset(folder: Path, settings: dict[str, Any]) -> Path:
    """Make a dataset with its description and preview; return its folder."""
    study_tests.make_dataset(_configured(folder, settings), folder / "manifest.json")
    assert stage("preview", "--manifest", folder / "manifest.json", "--out", folder / "preview.png") == 0
    return folder


def _configured(folder: Path, settings: dict[str, Any]) -> DatasetSettings:
    assert stage("configure", "--settings", json.dumps(settings), "--out", folder / "config.yaml") == 0
    return load_dataset(folder / "config.yaml")


def make_run(folder: Path, study: str, settings: dict[str, Any], dataset: dict[str, Any]) -> Path:
    """Write the config.yaml of a run of `study` on `dataset` into `folder`; return the path."""
    raw = {
        "targets": ["test"],
        "datasets": {"data": dataset},
        "plans": {"test": {"study": study, "settings": {"dataset": "data"}, "runs": {"run": settings}}},
    }
    run = config.load(raw).plans["test"]["run"].run
    assert stage("configure", "--settings", run.model_dump_json(), "--out", folder / "config.yaml") == 0
    return folder / "config.yaml"


def train(folder: Path, manifest: Path, *more: object) -> int:
    """Train the run in `folder`; return the exit status."""
    arguments = ["--config", folder / "config.yaml", "--manifest", manifest, "--checkpoints", folder / "checkpoints"]
    return stage("train", *arguments, "--out", folder, "--threads", 1, *more)


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's epochs, in order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def error_line(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the single error line that a user reads; fail if there is a traceback."""
    err = capfd.readouterr().err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("dlscale")]
    return line


#: Keys of an epoch's record that depend on the clock or the machine.
TIMES = ("epoch_seconds", "samples_per_second", "valid_seconds", "wall_time", "made_with")


def timeless(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's epochs without the keys that differ between two equal trainings."""
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records(folder)]


def variables(**more: str) -> dict[str, str]:
    """Return environment variables with which another process finds dlscale."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts"), **more}


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` fills once for all processes of a test session.

    Tests must not change the folder's contents.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the parent folder contains one folder per process
    folder, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # remove files of a failed process
            make(folder)
            done.touch()
    return folder


@contextlib.contextmanager
def served(answer: Callable[..., BaseRequestHandler]) -> Iterator[str]:
    """Serve HTTP on this machine; yield "host:port"."""
    with ThreadingHTTPServer(("127.0.0.1", 0), answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that maps a study to the folder of its tiny dataset."""
    return lambda study: once(
        tmp_path_factory, f"data_{study}", lambda folder: make_dataset(folder, TINY[study]["dataset"])
    )


@pytest.fixture(scope="session")
def cosmo_data(tiny_data: Callable[[str], Path]) -> Path:
    """Return the folder of a tiny cosmo dataset."""
    return tiny_data("cosmo_unet")


@pytest.fixture(scope="session")
def era5_data(tiny_data: Callable[[str], Path]) -> Path:
    """Return the folder of a tiny era5 dataset."""
    return tiny_data("era5_vit")


@pytest.fixture
def shared() -> Callable[[str], Path]:
    """Return a function that maps a name to a real data file; it skips the test if the file is missing."""

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"real data file missing: {name}")
        return path

    return find


@pytest.fixture(autouse=True)
def _no_outside_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Unload modules that a test imported from its own folder or from the template.

    Otherwise the next test could not import another module of the same name.
    """
    yield
    places = (str(tmp_path_factory.getbasetemp()), str(TEMPLATE / "waves"))
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(places):
            del sys.modules[name]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a file system of one megabyte."""
    place = tmp_path / "full"
    place.mkdir()
    if not (hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("mount")):
        pytest.skip("mounting a small file system needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine does not allow mounting: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
