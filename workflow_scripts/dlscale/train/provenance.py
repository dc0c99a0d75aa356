"""Provenance of a training: command, sources, versions, machine, data."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shlex
import socket
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from dlscale.core.machine import answer
from dlscale.core.metrics import Best, LossInfo, Metric
from dlscale.core.process import Image
from dlscale.core.record import Record
from dlscale.parallel.records import Device, Links

PACKAGES = ("torch", "numpy", "h5py", "pydantic", "tensorboard", "snakemake")


class Provenance(Record):
    """`provenance.json`, which the train stage writes last."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    command: str | None = None
    started: str | None = None
    finished: str | None = None
    git: dict[str, Any] | None = None
    host: str | None = None
    platform: str | None = None
    python: str | None = None
    packages: dict[str, str | None] = {}
    image: dict[str, str] | None = None
    slurm: dict[str, str] = {}
    device: Device = Device()
    processes: int = 1
    devices: int = 0  #: Processes, or the GPUs that one of them drives; 0: not known.
    cores: int | None = None  #: Usable cores of a node.
    memory_bytes: int | None = None  #: Usable memory of a node.
    seed: int | None = None
    parameters: int | None = None
    training_samples: int | None = None
    validation_samples: int | None = None
    dataset: str | None = None
    manifest: dict[str, Any] = {}  #: Origin of the dataset.
    fingerprint: str | None = None  #: First digits of the run's fingerprint, which name its folder of checkpoints.
    resumed_from_step: int | None = None
    links: Links | None = None  #: Links between several processes, if they were tested.
    best: Best | None = None
    loss: LossInfo = LossInfo()
    metrics: list[Metric] = []  #: Descriptions of the metrics of the run's epochs.


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def git_state() -> dict[str, Any] | None:
    """Return the commit of the package's checkout, and whether it is dirty."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    commit = answer([*git, "rev-parse", "HEAD"], 10)
    status = answer([*git, "status", "--porcelain", "--untracked-files=no"], 10)
    return None if commit is None or status is None else {"commit": commit.strip(), "dirty": bool(status.strip())}


def provenance(**more: Any) -> Provenance:
    """Return the provenance of this process, and `more`; of the environment it has Slurm's job numbers alone."""
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
