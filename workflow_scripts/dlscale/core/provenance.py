"""What a result was made with: command, sources, versions, machine, data."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shlex
import socket
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dlscale.core.machine import answer
from dlscale.core.records import Provenance

PACKAGES = ("torch", "numpy", "h5py", "pydantic", "tensorboard", "snakemake")


@dataclass(frozen=True)
class Image:
    """The container image of a stage, as the workflow's first process found it.

    It travels in the environment, `DLSCALE_IMAGE`, to all that this process starts: nodes may know of no image.
    """

    engine: str
    name: str
    identity: str

    @staticmethod
    def read() -> Image | None:
        """Return the one in the environment, if there is one."""
        name, _, identity = os.environ.get("DLSCALE_IMAGE", "").partition("=")
        engine, _, image = name.partition(":")
        return Image(engine, image, identity) if engine and image and identity else None

    def write(self) -> None:
        """Put it into the environment."""
        os.environ["DLSCALE_IMAGE"] = f"{self.engine}:{self.name}={self.identity}"


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def git_state() -> dict[str, Any] | None:
    """Return the commit of the package's checkout and whether it is dirty; None outside of one."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    commit = answer([*git, "rev-parse", "HEAD"], 10)
    status = answer([*git, "status", "--porcelain", "--untracked-files=no"], 10)
    return None if commit is None or status is None else {"commit": commit.strip(), "dirty": bool(status.strip())}


def provenance(**more: Any) -> Provenance:
    """Return what is known of this process, and `more`. Of the environment only Slurm's job numbers are kept."""
    image = Image.read()
    return Provenance(
        command=shlex.join([sys.executable.rsplit("/", 1)[-1], "-m", "dlscale", *sys.argv[1:]]),
        finished=now(),
        git=git_state(),
        host=socket.gethostname(),
        platform=platform.platform(),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        image=asdict(image) if image else None,
        slurm={key: os.environ[key] for key in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST") if key in os.environ},
        **more,
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
