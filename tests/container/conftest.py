"""A container engine, and the image `cpu`, which is built once for all tests that use these fixtures.

Tests are skipped without an engine. DLSCALE_CONTAINER_TESTS=1 (`make test-container`) installs an engine.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = Path(__file__).parent / "engine.sh"
IMAGE = "localhost/dlscale:tests"


@dataclass(frozen=True)
class Engine:
    """Podman with settings that work on this machine; an engine is called with podman's arguments."""

    environment: dict[str, str]

    def __call__(self, *words: object, check: bool = True, timeout: float = 900) -> str:
        """Run podman; return its output, including errors."""
        return self.run(["podman", *map(str, words)], check, timeout)

    def build(self, folder: Path, tag: str, *words: str) -> str:
        """Build target `cpu` of `folder`/docker/Dockerfile as image `tag`; `words` are further options of podman."""
        return self.run(["bash", str(SCRIPT), "build", str(folder), tag, *words], timeout=1800)

    def run(self, command: list[str], check: bool = True, timeout: float = 900) -> str:
        """Run a command that may call podman; return its output."""
        done = subprocess.run(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, f"{shlex.join(command)}: {done.returncode}\n{done.stdout[-5000:]}"
        return done.stdout


def lacking() -> str | None:
    """Return the reason why no engine can run on this machine; None if an engine can run, or can be installed."""
    if os.geteuid():
        return "the container tests need root: rootless podman may not make a base image"
    tools = ["podman"] if "DLSCALE_BASE_IMAGE" in os.environ else ["podman", "mmdebstrap"]
    missing = " and ".join(tool for tool in tools if not shutil.which(tool))
    if missing and os.environ.get("DLSCALE_CONTAINER_TESTS") != "1":
        return f"missing: {missing}; run `make test-container`, which installs missing packages"
    if missing and not shutil.which("apt-get"):
        return f"missing: {missing}; apt-get is missing, too"
    return None


@pytest.fixture(scope="session")
def container_engine() -> Engine:
    """Return a working podman. Its `environment` has the variables with which other processes find its images."""
    if reason := lacking():
        pytest.skip(reason)
    script = Engine(dict(os.environ))
    if os.environ.get("DLSCALE_CONTAINER_TESTS") == "1":
        script.run(["bash", str(SCRIPT), "install"], timeout=900)
    said = script.run(["bash", str(SCRIPT), "env"])
    exports = dict(shlex.split(line)[1].split("=", 1) for line in said.splitlines())
    return Engine({**os.environ, **exports})


@pytest.fixture(scope="session")
def cpu_image(container_engine: Engine) -> str:
    """Return the name of the image `cpu`, which is built from this checkout."""
    # The processes of a test session build one after the other, so later processes find the finished image.
    with Path(container_engine.environment["CONTAINERS_STORAGE_CONF"]).with_name("build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        container_engine.build(ROOT, IMAGE, "--build-arg=REVISION=tested")
    return IMAGE
