"""Provenance of a training: command, machine and data. `dlscale.core.environment` records versions of software."""

from __future__ import annotations

import datetime as dt
import os
import shlex
import socket
import sys
from typing import Any

from pydantic import ConfigDict

from dlscale.core.metrics import Best, LossInfo, Metric
from dlscale.core.record import Record, Time
from dlscale.core.redact import redact
from dlscale.parallel.records import Device, Links


class Provenance(Record):
    """`provenance.json`, which the train stage writes last."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    command: str | None = None
    started: Time | None = None
    finished: Time | None = None
    host: str | None = None
    slurm: dict[str, str] = {}
    device: Device = Device()
    processes: int = 1
    devices: int = 0  #: Number of processes, or of GPUs if one process drives several; 0 if unknown.
    cores: int | None = None  #: Usable logical CPUs of a node.
    memory_bytes: int | None = None  #: Usable memory of a node.
    seed: int | None = None
    epochs: int | None = None  #: Number of lines in `metrics.jsonl`.
    parameters: int | None = None
    training_samples: int | None = None
    validation_samples: int | None = None
    dataset: str | None = None
    manifest: dict[str, Any] = {}  #: Provenance of the dataset, from its manifest.
    fingerprint: str | None = None  #: First digits of the run's fingerprint: the name of its checkpoint folder.
    resumed_from_step: int | None = None
    links: Links | None = None  #: Latency and bandwidth between processes, if the self-test measured them.
    best: Best | None = None
    loss: LossInfo = LossInfo()
    metrics: list[Metric] = []  #: Descriptions of the run's validation metrics.


def now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def provenance(**more: Any) -> Provenance:
    """Return the provenance of this process, with the fields `more`.

    The only recorded environment variables are the id and the nodes of a Slurm job.
    """
    return Provenance(
        command=shlex.join(redact([sys.executable.rsplit("/", 1)[-1], "-m", "dlscale", *sys.argv[1:]])),
        finished=now(),
        host=socket.gethostname(),
        slurm={key: os.environ[key] for key in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST") if key in os.environ},
        **more,
    )
