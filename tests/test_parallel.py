"""Several processes train like one process: same samples, losses, metrics and weights; only rank 0 writes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from dlscale import cli
from dlscale.config.run import FSDP, Geometry
from dlscale.core import telemetry
from dlscale.core.errors import UserError
from dlscale.core.process import MEET
from dlscale.parallel import rendezvous
from dlscale.parallel.rendezvous import join
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.strategy import Sharded
from dlscale.parallel.world import World
from tests.conftest import COSMO, COSMO_RUN, ERA5, ERA5_RUN, ROOT, TINY, make_run, records, train, variables
from tests.ranks import spawn
from tests.waiting import PATIENCE

STUDIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cosmo_unet": (COSMO, {**COSMO_RUN, "loader": {"workers": 0}}),
    "era5_vit": (ERA5, {**ERA5_RUN, "loader": {"workers": 0}}),
    "imagenet_resnet50": (TINY["imagenet_resnet50"]["dataset"], TINY["imagenet_resnet50"]["run"]),
}


def launch(stage: str, ranks: int, *arguments: object, env: dict[str, str] | None = None) -> Any:
    """Run a stage in `ranks` processes, as the workflow does."""
    starter = ["-m", "dlscale.launch.ranks", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *starter, "-m", "dlscale", stage, *map(str, arguments)]
    more = variables(**(env or {}))
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=more, cwd=ROOT)


def train_by(ranks: int, folder: Path, data: Path) -> None:
    """Train the run in `folder` with `ranks` processes on one node."""
    arguments = [
        *("--config", folder / "config.yaml", "--manifest", data / "manifest.json", "--threads", ranks),
        *("--checkpoints", folder / "checkpoints", "--out", folder, "--log", folder / "train.log"),
    ]
    with tempfile.TemporaryDirectory() as meet:
        spawn(_stage, (ranks, meet, ["train", *map(str, arguments)]), ranks)


def _stage(rank: int, ranks: int, meet: str, words: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ[MEET] = f"{meet}/meet"
    assert cli.main(words) == 0, Path(words[-1]).read_text()


def configure(folder: Path, study: str, ranks: int, **changes: Any) -> Path:
    dataset, settings = STUDIES[study]
    shared = {name: changes.pop(name, {}) if ranks > 1 else {} for name in ("geometry", "parallel")}
    shared["geometry"] = {"gpus_per_node": ranks, **shared["geometry"]}
    make_run(folder, study, {**settings, **changes, **shared}, dataset)
    return folder


def close(one: Path, other: Path, tolerance: float) -> None:
    """Compare two trainings: progress, learning rate, losses and metrics of every epoch, and all weights."""
    for a, b in zip(records(one), records(other), strict=True):
        for key in ("epoch", "step", "samples", "learning_rate"):
            assert a[key] == b[key], key
        assert bool(a["untrained"]) == bool(b["untrained"])
        before = [(a["untrained"], b["untrained"])] if a["untrained"] else []  # values before the first step
        for left, right in [(a, b), *before]:
            for key in ("train_loss", "valid_loss"):
                assert left[key] == pytest.approx(right[key], rel=tolerance), key
            assert left["metrics"] == pytest.approx(right["metrics"], rel=10 * tolerance, abs=1e-6)
    weights = [torch.load(folder / "model.pt", weights_only=True) for folder in (one, other)]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(
    ("study", "ranks", "changes"),
    [
        # 13 samples in batches of 4 leave one sample for the last batch, in which the second process has no sample.
        pytest.param(
            *("cosmo_unet", 2, {"samples": {"crop": 16, "train": 13, "valid": 7}}),
            id="last batch of one",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            # Each of the two processes has the base batch size, so linear scaling doubles the learning rate.
            *("era5_vit", 2, {"schedule": {"kind": "constant", "scaling": "linear", "base_batch_size": 2}}),
            id="scaled rate",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("era5_vit", 2, {"accumulation_steps": 2, "loader": {"kind": "direct", "workers": 1}}),
            id="in parts",
            marks=pytest.mark.slow,
        ),
        pytest.param(*("era5_vit", 2, {"geometry": {"tp": 2}}), id="tensor parallel"),
        pytest.param(*("era5_vit", 2, {"geometry": {"cp": 2}}), id="context parallel", marks=pytest.mark.slow),
        pytest.param(*("cosmo_unet", 2, {"parallel": {"kind": "fsdp"}}), id="sharded"),
        pytest.param(
            *("era5_vit", 4, {"geometry": {"tp": 2}, "parallel": {"kind": "fsdp"}}),
            id="tensor parallel and sharded",
            marks=pytest.mark.parallel,
        ),
        pytest.param(
            *("era5_vit", 4, {"optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}}),
            id="four",
            marks=pytest.mark.parallel,
        ),
    ],
)
def test_several_train_as_one_does(
    tmp_path: Path, cosmo_data: Path, era5_data: Path, study: str, ranks: int, changes: dict[str, Any]
) -> None:
    """Losses, metrics and weights equal those of one process with the same global batch, except for rounding."""
    data = cosmo_data if study == "cosmo_unet" else era5_data
    alone = configure(tmp_path / "alone", study, 1, **changes)
    assert train(alone, data / "manifest.json") == 0
    together = configure(tmp_path / "together", study, ranks, **changes)
    train_by(ranks, together, data)
    close(alone, together, 2e-5)
    first = records(together)[0]
    assert first["untrained"]["train_loss"] > 0, "the losses before the first step must be recorded"
    if "schedule" in changes:
        assert first["learning_rate"] == 2 * ERA5_RUN["optimizer"]["lr"]
    made_with = json.loads((together / "provenance.json").read_text())
    assert made_with["processes"] == made_with["links"]["processes"] == ranks
    assert sorted(path.name for path in together.glob("*.log")) == [
        "train.log",
        *(f"train.rank{rank}.log" for rank in range(1, ranks)),
    ]
    assert len(list((together / "tensorboard").iterdir())) == 2, (
        "expected two TensorBoard files, both from one process: epochs, and end of the run"
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "shared", [{}, {"geometry": {"tp": 2}}, {"geometry": {"cp": 2}}, {"parallel": {"kind": "fsdp"}}], ids=str
)
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path, era5_data: Path, shared: dict[str, Any]) -> None:
    """A resumed training gives bitwise the weights of an uninterrupted training, even with drop-out on each rank."""
    drops = {"model": {**ERA5_RUN["model"], "dropout": 0.2}}
    through = configure(tmp_path / "through", "era5_vit", 2, **drops, **shared, training={"epochs": 3})
    train_by(2, through, era5_data)
    newest = sorted(through.glob("checkpoints/*/step-*"))
    assert len(newest) == 2
    for path in newest[-1].glob("*.safetensors"):
        path.unlink()  # as if the training had ended after the second epoch
    whole = (through / "model.pt").read_bytes()
    train_by(2, through, era5_data)
    assert json.loads((through / "provenance.json").read_text())["resumed_from_step"] == records(through)[1]["step"]
    assert (through / "model.pt").read_bytes() == whole


@pytest.mark.slow
def test_throughput_counts_all_processes(tmp_path: Path, era5_data: Path) -> None:
    folder = configure(tmp_path, "era5_vit", 2)
    arguments = [
        *("--config", folder / "config.yaml", "--manifest", era5_data / "manifest.json", "--threads", 2),
        *("--telemetry", folder / "telemetry/throughput.csv", "--device", "cpu"),
    ]
    done = launch("throughput", 2, *arguments, "--out", folder / "throughput.json", "--log", folder / "log")
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "throughput.json").read_text())
    assert found["nranks"] == 2 and found["batch_size"] == 4
    for mode in ("IO", "SYNTHETIC", "FULL"):
        for rate, seconds in zip(found[mode]["trial_throughput"], found[mode]["trial_time"], strict=True):
            assert rate * seconds == pytest.approx(2 * 4)  # a trial has two steps of the global batch size, 4
        assert found[mode]["usage"]["cpu_seconds"] >= 0
    # One process per node records telemetry, for all processes of the node.
    assert sorted(path.name for path in (folder / "telemetry").iterdir()) == ["throughput.csv", "throughput.json"]
    rows = telemetry.read(folder / "telemetry/throughput.csv")
    assert rows and rows[-1].cpu_others is not None, "telemetry must cover both processes"
    assert max(row.rss_bytes or 0 for row in rows) > 1.5 * found["peak_memory_bytes"]


@pytest.mark.slow
def test_an_error_in_one_process_ends_all_with_one_message(tmp_path: Path, era5_data: Path) -> None:
    folder = configure(tmp_path, "era5_vit", 2, optimizer={"lr": 1e30}, precision="fp32")
    arguments = [
        *("--config", folder / "config.yaml", "--manifest", era5_data / "manifest.json", "--threads", 2),
        *("--checkpoints", folder / "checkpoints", "--out", folder),
    ]
    done = launch("train", 2, *arguments)
    assert done.returncode != 0
    assert "is NaN or infinite" in done.stderr and "lower optimizer.lr" in done.stderr
    assert not (folder / "provenance.json").exists()


def test_one_device_runs_without_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on one device ignores Slurm's variables, because the run may be one task of a larger job."""
    for name, value in {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}.items():
        monkeypatch.setenv(name, value)
    with join(Geometry(), "cpu") as alone:
        assert (alone.rank, alone.size, alone.data_rank, alone.data_size, alone.main) == (0, 1, 0, 1, True)
        values = torch.ones(3)
        assert alone.sum(values) is values and alone.max(2.5, 1) == [2.5, 1] and alone.gather("x") == ["x"]
        alone.barrier()


#: Beginning of a message about a run on two nodes of four devices; variables of a job with two tasks, one per node.
FEW = r"geometry: this run needs 8 processes \(2 nodes x 4\), but"
TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("devices", "environment", "message"),
    [
        (4, {}, rf"{FEW} 1 were started"),
        (4, {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}, rf"{FEW} 3 were started"),
        (4, {"SLURM_NTASKS": "8"}, rf"{FEW} 1 were started"),
        (1, TASK, "MASTER_ADDR and MASTER_PORT are not set"),
        # With a job number, only the address is missing: all nodes derive the port from the number.
        (1, {**TASK, "SLURM_JOB_ID": "4711"}, "MASTER_ADDR is not set"),
        (1, {**TASK, "MASTER_ADDR": "node1"}, "MASTER_PORT is not set"),
    ],
)
def test_too_few_processes_or_no_rendezvous_give_one_message(
    monkeypatch: pytest.MonkeyPatch, devices: int, environment: dict[str, str], message: str
) -> None:
    for name in (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"),
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message), join(Geometry(nodes=2, gpus_per_node=devices), "cpu"):
        pass


def test_ports_of_two_jobs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []
    for job in ("4711", "4712"):
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "")  # set the variable so that monkeypatch restores it
            monkeypatch.delenv(name)
        monkeypatch.setenv("SLURM_JOB_ID", job)
        rendezvous._rendezvous(Geometry(gpus_per_node=2))
        ports.append(int(os.environ["MASTER_PORT"]))
    assert ports[0] != ports[1] and all(20000 <= port < 40000 for port in ports)


def test_weights_that_would_be_kept_where_they_are() -> None:
    strategy = Sharded(World(size=2), FSDP(kind="fsdp", cpu_offload=True))
    with pytest.raises(UserError, match=r"parallel.cpu_offload: .*CPU"):
        strategy.wrap(None, Sharding(), contextlib.nullcontext)


def test_gloo_uses_the_interface_that_reaches_the_first_node() -> None:
    """The interface is that of the route to the first node; an unknown host gives None."""
    assert rendezvous._interface_to("127.0.0.1") == "lo"
    assert rendezvous._interface_to("no-such-host.invalid") is None
