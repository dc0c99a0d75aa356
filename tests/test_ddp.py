"""Settings of `parallel`: the exchanges of two processes, and the effect of each setting on training."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from dlscale.config import resolve as config
from dlscale.config.run import DDP, Geometry, RunCore, load_run
from dlscale.core.errors import UserError
from dlscale.data.loaders.base import Share
from dlscale.parallel.rendezvous import join
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.strategy import DataParallelNetwork, OnCPU, OnGPU, Replicated, synchronised
from dlscale.parallel.world import World
from dlscale.train.build import build_step, open_session
from dlscale.train.checkpoint import Checkpoints
from dlscale.train.step import Step
from dlscale.train.trainer import Trainer
from tests.conftest import ERA5, ERA5_RUN, ROOT, make_run, records, train
from tests.ranks import spawn
from tests.test_parallel import configure, train_by
from tests.test_rungs import settings

LAYERS = 6  #: Number of layers. A layer has 256 x 256 float32 weights, a quarter of a MiB.
WARM_UP = 3  #: Steps after which DistributedDataParallel has the final order of its buckets.

#: Settings of `parallel` and number of layers in each bucket (the first bucket begins with the last layer), by name. A
#: bucket is full once it reaches its limit in MiB.
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "PyTorch's own": ({}, [4, 2]),  # the first bucket has 1 MiB, later buckets 25 MiB
    "small": ({"bucket_mb": 0.5}, [2, 2, 2]),
    "large": ({"bucket_mb": 25}, [6]),
    "small first": ({"bucket_mb": 0.5, "first_bucket_mb": 0.25}, [1, 2, 2, 1]),
    "only the first": ({"first_bucket_mb": 0.25}, [1, 5]),
    "copied": ({"bucket_view": False}, [4, 2]),
    "no buffers": ({"broadcast_buffers": False}, [4, 2]),
    "no sync": ({"sync": False}, []),
}


class Layers(nn.Module):
    """Linear layers, and a batch normalisation with buffers but without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(LAYERS)))
        self.norm = nn.BatchNorm1d(256, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The factor 0 keeps statistics of a rank's own samples out of the gradients. Together, both ranks must have the
        # gradients of one process.
        return self.layers(x) + 0.0 * self.norm(x)


def squares(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (prediction - target).square().mean(dim=1)


def step_of(world: World, parallel: dict[str, Any], **over: Any) -> tuple[RunCore, Step]:
    run = settings("era5_vit", geometry={"gpus_per_node": 2}, parallel=parallel, batch_size=8, **over)
    return run, build_step(run, Layers, squares, world)


def samples(number: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 256, generator=generator), torch.randn(size, 256, generator=generator)


def as_rank(rank: int, port: int, ranks: int = 2) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)


def steps(step: Step, share: Share, parts: int = 1) -> dict[str, int]:
    """Train a few steps; return how often the last step called each collective operation."""
    for number in range(WARM_UP + 1):
        x, y = samples(number)
        own = slice(share.indices(0, 8).start, share.indices(0, 8).stop)
        with profile(activities=[ProfilerActivity.CPU]) if number == WARM_UP else nullcontext() as seen:
            step(x[own], y[own])
            if dist.is_initialized():
                dist.barrier()  # gloo's threads record the end of a sum shortly after its result is available
    calls = [event.name for event in seen.events() if event.name.startswith("gloo:")]
    return {name: calls.count(name) for name in set(calls) - {"gloo:barrier"}}


def _observe(rank: int, port: int, folder: str) -> None:
    as_rank(rank, port)
    found: dict[str, Any] = {}
    with join(Geometry(gpus_per_node=2), "cpu") as world:
        for name, (parallel, _) in CASES.items():
            _, step = step_of(world, parallel)
            calls = steps(step, Share(8, rank, 2))
            memory = {p.grad.untyped_storage().data_ptr() for p in step.model.parameters() if p.grad is not None}
            weights = {key: value.clone() for key, value in step.weights.state_dict().items()}
            found[name] = (calls, len(memory), weights)
            with step.strategy.unsynchronised():  # as the throughput stage does at its end
                step(*samples(9, 4))
        found["batch norm"] = _normalised(Share(7, rank, 2))
    torch.save(found, Path(folder, f"{rank}.pt"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ddp")
    spawn(_observe, (20000 + os.getpid() % 20000, str(folder)), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_averaging_calls_is_exact(found: list[dict[str, Any]], name: str) -> None:
    parallel, buckets = CASES[name]
    assert sum(buckets) == (LAYERS if buckets else 0)
    for calls, memory, _ in (rank[name] for rank in found):
        assert calls.get("gloo:all_reduce", 0) == len(buckets)
        # Buffers are broadcast before each step; PyTorch merges buffers of one dtype.
        sent = parallel.get("broadcast_buffers", True) and parallel.get("sync", True)
        assert calls.get("gloo:broadcast", 0) == (2 if sent else 0)
        assert not calls.keys() - {"gloo:all_reduce", "gloo:broadcast"}
        views = parallel.get("bucket_view", True) and parallel.get("sync", True)
        assert memory == (len(buckets) if views else LAYERS)


def test_averaging_begins_while_gradients_are_computed() -> None:
    """The averaging of two of three buckets begins before the first layer's gradient is computed.

    The test needs only one process, because a group of one averages its buckets, too.
    """
    order: list[str] = []

    def noted(hook: Any) -> Any:
        def call(state: Any, bucket: Any) -> Any:
            order.append("bucket")
            return hook(state, bucket)

        return call

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = Layers()
        strategy = Replicated(World(), DDP(kind="ddp", bucket_mb=0.5))
        strategy.wrap(model, Sharding(), nullcontext)
        strategy.around_averaging(noted)
        model.layers[0].register_full_backward_pre_hook(lambda module, gradient: order.append("first layer"))
        for number in range(WARM_UP + 1):
            order.clear()
            x, y = samples(number)
            squares(strategy.wrapped(x), y).mean().backward()
    finally:
        dist.destroy_process_group()
    assert order == ["bucket", "bucket", "first layer", "bucket"]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_like_one_process(found: list[dict[str, Any]], name: str) -> None:
    """Two ranks learn what one process learns from the complete batch.

    Without averaging, each rank learns only from its half of the batch.
    """
    averaged = CASES[name][0].get("sync", True)
    for rank in range(2):
        _, plain = step_of(World(), {})
        steps(plain, Share(8) if averaged else Share(8, rank, 2))
        weights = found[rank][name][2]
        for key, value in plain.weights.state_dict().items():
            if "layers" in key:
                torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-6)
    apart = [rank[name][2] for rank in found]
    assert all(torch.equal(apart[0][key], apart[1][key]) for key in apart[0] if "layers" in key) == averaged


# ---- batch normalisation over ranks ----------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(4, momentum=None))
    )


def _normalised(share: Share) -> Any:
    """Return a rank's outputs and gradients for its slice of a batch of 7 samples, then of a batch of 1 sample.

    Also return the parameters' gradients, the final state, and outputs of an evaluation. The first rank's slice of the
    second batch is empty.
    """
    model, seen = synchronised(network(), torch.device("cpu")), []
    for size in (7, 1):
        x = torch.randn(size, 3, 6, 6, generator=torch.Generator().manual_seed(size), requires_grad=True)
        own = share.indices(0, size)
        part = x[own.start : own.stop].detach().requires_grad_()
        y = model(part)
        (y**3).sum().backward()
        seen += [y.detach(), part.grad]
    gradients = [p.grad for p in model.parameters()]
    return seen, gradients, model.state_dict(), model.eval()(torch.ones(2, 3, 6, 6)).detach()


def test_ranks_normalise_like_one_process(found: list[dict[str, Any]]) -> None:
    """Two ranks compute the same values, gradients and running statistics as one process.

    The slices of the ranks have different sizes, and one slice is empty.
    """
    model, (one, other) = network(), (rank["batch norm"] for rank in found)
    for number, size in enumerate((7, 1)):
        x = torch.randn(size, 3, 6, 6, generator=torch.Generator().manual_seed(size), requires_grad=True)
        y = model(x)
        (y**3).sum().backward()
        for place, whole in ((2 * number, y), (2 * number + 1, x.grad)):
            parts = [rank[0][place] for rank in (one, other) if rank[0][place] is not None]
            torch.testing.assert_close(torch.cat(parts), whole.detach(), rtol=1e-4, atol=1e-5)
    # The gradient of a bias before a normalisation is zero, except for rounding.
    greatest = max(float(p.grad.abs().max()) for p in model.parameters())
    for a, b, p in zip(one[1], other[1], model.parameters(), strict=True):
        torch.testing.assert_close(a + b, p.grad, rtol=1e-4, atol=1e-5 * greatest)
    for rank in (one, other):
        assert list(rank[2]) == list(model.state_dict())
        for key, value in model.state_dict().items():
            torch.testing.assert_close(rank[2][key], value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rank[3], model.eval()(torch.ones(2, 3, 6, 6)).detach(), rtol=1e-4, atol=1e-5)
        model.train()


def test_a_gpu_has_pytorchs_layers() -> None:
    """On a GPU, PyTorch's synchronised layers keep parameters, statistics and settings of the replaced layers."""
    plain = network()
    model = synchronised(network(), torch.device("cuda"))
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert kinds == [OnGPU, OnGPU] and issubclass(OnGPU, nn.SyncBatchNorm) and not issubclass(OnCPU, nn.SyncBatchNorm)
    for (key, value), (name, other) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert key == name and torch.equal(value, other)
    assert [layer.momentum for layer in model.modules() if isinstance(layer, OnGPU)] == [0.1, None]


@pytest.fixture(scope="module")
def imagenet_data(tiny_data: Any) -> Path:
    return tiny_data("imagenet_resnet50")


def test_synchronised_processes_train_like_one_process(tmp_path: Path, imagenet_data: Path) -> None:
    """Two processes with synchronised statistics train the residual network like one process.

    Without synchronisation, each process would use the statistics of its own samples.
    """
    # The small learning rate keeps differences by rounding from growing at a ReLU: with ten times the rate, five steps
    # turn a difference of 1e-7 into 1e-3.
    small: dict[str, Any] = {"optimizer": {"kind": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 1e-4}}
    alone = configure(tmp_path / "alone", "imagenet_resnet50", 1, **small)
    assert train(alone, imagenet_data / "manifest.json") == 0
    together = configure(tmp_path / "together", "imagenet_resnet50", 2, parallel={"sync_batchnorm": True}, **small)
    train_by(2, together, imagenet_data)
    for a, b in zip(records(alone), records(together), strict=True):
        assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-4)
        assert b["valid_loss"] == pytest.approx(a["valid_loss"], rel=1e-4)
    weights = [torch.load(folder / "model.pt", weights_only=True) for folder in (alone, together)]
    for key in weights[0]:
        torch.testing.assert_close(weights[1][key].float(), weights[0][key].float(), rtol=1e-3, atol=1e-4)


def test_processes_validate_with_the_same_statistics(tmp_path: Path, imagenet_data: Path) -> None:
    """All processes validate with the statistics of the saved weights.

    A single process that validates with these weights gets the same loss and accuracy.
    """
    folder = configure(tmp_path, "imagenet_resnet50", 2)
    train_by(2, folder, imagenet_data)
    run = load_run(folder / "config.yaml", "train")
    single = run.model_copy(update={"geometry": Geometry()})
    session = open_session(single, imagenet_data / "manifest.json", World(), 1)
    session.step.weights.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    loaders = session.loader("train"), session.loader("valid")
    metrics = session.study.metrics(run, session.manifest, torch.device("cpu"))
    checkpoints = Checkpoints(tmp_path / "none", 1)
    trainer = Trainer(single, session.step, session.share(), loaders, metrics, checkpoints, World())
    loss, values = trainer.validate()
    last = records(folder)[-1]
    assert (last["valid_loss"], last["metrics"]) == (pytest.approx(loss, rel=1e-5), pytest.approx(values))


# ---- one process, several devices ------------------------------------------------------------------


@pytest.mark.slow
def test_data_parallel_on_a_cpu_runs_one_process(tmp_path: Path, era5_data: Path) -> None:
    """On a CPU, DataParallel does not copy the model, and gives exactly the numbers of plain training."""
    for name, over in (("serial", {}), ("dp", {"parallel": {"kind": "dp"}, "geometry": {"gpus_per_node": 2}})):
        make_run(tmp_path / name, "era5_vit", config.merge({**ERA5_RUN, "loader": {"workers": 0}}, over), ERA5)
        assert train(tmp_path / name, era5_data / "manifest.json") == 0
    one, other = (records(tmp_path / name) for name in ("serial", "dp"))
    for key in ("train_loss", "valid_loss", "metrics"):
        assert [epoch[key] for epoch in one] == [epoch[key] for epoch in other]
    weights = [torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("serial", "dp")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_copies_on_gpus_have_the_loss_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the mean over all five samples, not the mean of the means of two slices of three and two samples."""

    class Cutting(nn.Module):  # replaces DataParallel, which needs GPUs, and computes the slices one after the other
        def __init__(self, module: nn.Module, device_ids: list[int]) -> None:
            super().__init__()
            self.module, self.count = module, len(device_ids)

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.module(*part) for part in zip(*(v.chunk(self.count) for v in values), strict=True)])

    monkeypatch.setattr("dlscale.parallel.strategy.DataParallel", Cutting)
    _, step = step_of(World(), {})
    copied, (x, y) = DataParallelNetwork(step.network, [0, 1]), samples(0, 5)
    torch.testing.assert_close(copied(x, y), step.network(x, y))
    step.model.eval()
    torch.testing.assert_close(copied.predict(x), step.network.predict(x))


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (
            {"parallel": {"kind": "dp"}, "geometry": {"nodes": 2}},
            "parallel.kind dp and geometry.nodes 2: .* on one node; use ddp",
        ),
        ({"parallel": {"kind": "dp"}, "compile": {"mode": "default"}}, "compile.mode and parallel.kind dp"),
        ({"parallel": {"kind": "dp", "bucket_mb": 3}}, "unknown key 'bucket_mb'"),
        ({"parallel": {"sync": False, "sync_batchnorm": True}}, "sync_batchnorm would still exchange statistics"),
        ({"parallel": {"bucket_mb": 0}}, "greater than 0"),
        (
            {"parallel": {"sync_batchnorm": True}, "accumulation_steps": 2},
            "sync_batchnorm and accumulation_steps: ",
        ),
    ],
)
def test_contradictory_ddp_settings_are_refused(over: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings("era5_vit", **over)


def test_training_without_averaging_is_refused(
    tmp_path: Path, era5_data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A training without averaging is refused, also in a plan. Such runs can only be measured."""
    plan: dict[str, Any] = {
        "targets": ["p"],
        "plans": {"p": {"study": "cosmo_unet", "runs": {"a": {"parallel": {"sync": False}}, "b": {}}}},
    }
    with pytest.raises(UserError, match=r"plans\.p\.runs\.a\.parallel\.sync: false: .*remove train from plans"):
        config.load(plan)
    plan["plans"]["p"]["only"] = {"train": ["b"]}
    assert not config.load(plan).plans["p"]["a"].run.averages
    file = make_run(tmp_path, "era5_vit", ERA5_RUN, ERA5)
    text = file.read_text()
    assert "sync: true" in text
    # edited by hand, because a plan would not train this run
    file.write_text(text.replace("sync: true", "sync: false"))
    assert train(tmp_path, era5_data / "manifest.json") == 2
    assert "parallel.sync: false" in capfd.readouterr().err and not (tmp_path / "metrics.jsonl").exists()


#: Script that removes from PyTorch 2.13 what 2.11 lacks, then runs `tests/container/inside.py`.
OLDER = """
import runpy, sys
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
for name in ("all_gather_single", "reduce_scatter_single"):
    if hasattr(dist, name):
        delattr(dist, name)
made = DistributedDataParallel.__init__
def make(
    self, module, device_ids=None, process_group=None, bucket_cap_mb=None, broadcast_buffers=True,
    gradient_as_bucket_view=False,
):
    made(self, module, device_ids, process_group=process_group, broadcast_buffers=broadcast_buffers)
DistributedDataParallel.__init__ = make
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", [[], ["-c", OLDER]], ids=["as it is", "as 2.11"])
def test_distributed_operations_work_with_other_versions(before: list[str]) -> None:
    command = [sys.executable, *before, str(ROOT / "tests/container/inside.py"), "numba"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("ok: PyTorch "), done.stderr
