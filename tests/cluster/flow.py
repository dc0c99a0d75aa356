"""The workflow on a test cluster: `snakemake --profile perlmutter`, with a few test settings on top."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.cluster import Cluster
from tests.conftest import ERA5, ERA5_RUN
from tests.waiting import PATIENCE, until

#: Options for short waits. Their frequent queries would burden a production site.
QUICK = ["--dlscale-init-seconds-before-status-checks=3", "--latency-wait=5"]

#: Configuration with one dataset, runs on different numbers of nodes and GPUs, and a long run. The runs in `shapes` are
#: short, because the tests are about jobs.
CONFIG: dict[str, Any] = {
    "targets": ["shapes"],
    "datasets": {"years": {**ERA5, "source": {**ERA5["source"], "days": 3, "train": [2001], "valid": [2002]}}},
    "plans": {
        "shapes": {
            "study": "era5_vit",
            "settings": {
                **ERA5_RUN,
                "dataset": "years",
                "batch_size": 8,
                "loader": {"workers": 0},
                "training": {"epochs": 1},
                "throughput": {"warmup": 0, "trials": 1, "batches": 2, "seconds": 0, "beside": 1},
            },
            "runs": {
                "one": {},
                "pair": {"geometry": {"nodes": 2}},
                "eight": {"geometry": {"nodes": 2, "gpus_per_node": 4}},
                "mesh": {"geometry": {"nodes": 2, "gpus_per_node": 2, "tp": 2}},
            },
        },
        "long": {
            "study": "era5_vit",
            "measure": ["train"],
            "from": "shapes.one",
            "settings": {"training": {"steps": 1000, "checkpoint_epochs": 100_000}},
            "runs": {"run": {}},
        },
    },
    "site": {"engine": "none", "gpu": False, "scheduler": {"warning_seconds": 30}},
}


@dataclass
class Flow:
    """A folder with the workflow, and the cluster that runs its jobs."""

    path: Path
    cluster: Cluster
    config: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *arguments: str, profile: str | None = "perlmutter") -> subprocess.Popen[str]:
        """Start Snakemake in its own process group; its output goes to the file `output`."""
        config = {key: value for key, value in self.config.items() if profile or key != "site"}
        (self.path / "tiny.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        named = ["--profile", profile, *QUICK] if profile else ["--workflow-profile", "none", "--cores", "2"]
        with open(self.path / "output", "w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "snakemake", *named, *arguments, "--configfile", "tiny.yaml"],
                cwd=self.path,
                env={
                    **os.environ,
                    **self.cluster.environment(),
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "PYTHONPATH": str(self.path / "workflow_scripts"),
                    "SBATCH_ACCOUNT": "m0000",
                    "OMP_NUM_THREADS": "1",
                    **self.environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """Output of the last call."""
        return (self.path / "output").read_text()

    def run(self, *arguments: str, timeout: float = 900, profile: str | None = "perlmutter") -> int:
        """Run Snakemake to its end; return its exit status."""
        with self.running(*arguments, profile=profile) as process:
            return process.wait(timeout)

    @contextlib.contextmanager
    def running(self, *arguments: str, profile: str | None = "perlmutter") -> Iterator[subprocess.Popen[str]]:
        """Start Snakemake; on exit, kill Snakemake's process group if Snakemake still runs."""
        process = self.start(*arguments, profile=profile)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def until(
        self, what: str, ready: Callable[[], Any], process: subprocess.Popen[str], seconds: float = PATIENCE
    ) -> Any:
        """Wait until `ready` returns a true value, and return this value; fail if the process ends before."""
        return until(what, ready, process, lambda: self.output[-5000:], seconds)

    def log(self, run: str = "long/run") -> str:
        """Return the log of a run's training."""
        path = self.path / f"results/logs/train/{run}.log"
        return path.read_text() if path.exists() else ""

    def jobs(self, *columns: str) -> list[list[str]]:
        """Return a row per job of this folder that Slurm remembers.

        `columns` are squeue's long names; the last column is always the working folder.
        """
        listed = self.cluster.run("squeue", "--states=all", "--noheader", f"--Format={','.join(columns)},workdir:200")
        return [line.split() for line in listed.stdout.splitlines() if str(self.path) in line]

    def provenance(self, run: str) -> dict[str, Any]:
        """Return the provenance record of a run's training."""
        return json.loads((self.path / "results/plans" / run / "provenance.json").read_text())

    def checkpoints(self, run: str = "long/run") -> list[int]:
        """Return the steps of a run's saved checkpoints."""
        return sorted(
            int(path.name.split("-")[1]) for path in (self.path / "results/checkpoints" / run).glob("*/step-*")
        )


def repository(path: Path) -> Path:
    """Copy the files that the workflow needs; links stay links."""
    from tests.workflow.conftest import copy_tree

    copy_tree(path)
    return path
