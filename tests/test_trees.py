"""Samples that are tuples and dicts of arrays, and samples of different shapes, through loaders and steps."""

from __future__ import annotations

import faulthandler
import os
import re
import textwrap
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dlscale.config.run import Geometry, load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.data import samples as data_samples
from dlscale.data.loaders.base import Share, open_loader, read_batch
from dlscale.extensions.memory.prediction import fake_batch, predict
from dlscale.extensions.scaffold import new_study, study_tests
from dlscale.extensions.scaffold.study_tests import tiny_session
from dlscale.measure.roofline import counted
from dlscale.parallel.rendezvous import join
from dlscale.parallel.sharding import Sharding
from dlscale.parallel.world import Mesh, World
from dlscale.train.build import Session, build_step, open_session
from dlscale.train.step import EAGER_STEPS, Graphed
from tests.conftest import ROOT, TINY, make_run, records, train
from tests.ranks import spawn
from tests.test_ddp import as_rank
from tests.test_parallel import train_by
from tests.test_rungs import Recorder, settings
from tests.waiting import PATIENCE

CPU = torch.device("cpu")

#: A study outside of dlscale whose samples are sequences of different lengths.
SEQUENCES = """
from typing import Any, Literal

import numpy as np

from dlscale import ArraySource, DatasetKind, DatasetSettings, Part, RowSamples, Strict, Study
from dlscale.data.samples import Rows


class Data(DatasetSettings):
    kind: Literal["sequences"]


class Sequences(DatasetKind):
    name, Settings, Samples = "sequences", Data, RowSamples

    def parts(self, dataset):
        return [Part("train", "train"), Part("valid", "valid")]


def open_source(dataset, part, paths):
    rng = np.random.default_rng(part.split == "valid")
    length = rng.integers(1, 6, 13)
    inside = np.arange(5) < length[:, None]
    values = rng.normal(size=(13, 5)) * inside
    return ArraySource({"values": values, "length": length, "total": values.sum(1), "half": values.sum(1) / 2})


class Trimmed(Rows):
    def read(self, epoch, index):
        (values, length), y = super().read(epoch, index)
        return {"values": values[: int(length)]}, y


def open_samples(manifest, split, settings, seed):
    return Trimmed(manifest, split, settings, seed)


class Net(Strict):
    kind: Literal["net"]


class SequencesStudy(Study):
    dataset, Model, Loss = "sequences", Net, Net

    def collate(self, samples):
        import torch
        from torch.nn.utils.rnn import pad_sequence

        values = pad_sequence([x["values"] for x, _ in samples], batch_first=True)
        lengths = torch.tensor([len(x["values"]) for x, _ in samples])
        mask = torch.arange(values.shape[1]) < lengths[:, None]
        y = tuple(torch.stack([part[i] for _, part in samples]) for i in range(2))
        return {"values": values, "mask": mask}, y

    def model(self, run, manifest):
        import torch

        class Sum(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(()))

            def forward(self, x):
                total = (x["values"] * x["mask"] * self.weight).sum(1)
                return {"total": total, "half": total / 2}

        return Sum()

    def loss(self, run):
        return lambda p, y: (p["total"] - y[0]).square() + (p["half"] - y[1]).square()


KINDS, STUDY = [Sequences()], SequencesStudy()
"""
SETTINGS: dict[str, Any] = {
    "batch_size": 4,
    "model": {"kind": "net"},
    "loss": {"kind": "net"},
    "samples": {"kind": "rows", "input": ["values", "length"], "target": ["total", "half"]},
    "loader": {"kind": "torch", "workers": 0},
    "optimizer": {"lr": 0.1},
    "training": {"epochs": 10},
    "precision": "fp32",
}


@pytest.fixture
def sequences(tmp_path: Path) -> Callable[..., Session]:
    """Return a function that opens the study of sequences with changed settings."""
    (tmp_path / "sequences.py").write_text(SEQUENCES)
    (tmp_path / "sequences.yaml").write_text("settings: {dataset: tiny}\n")
    registry.add("sequences", tmp_path / "sequences.py")

    def opened(**over: Any) -> Session:
        return tiny_session("sequences", {"kind": "sequences"}, SETTINGS | over, tmp_path / "data")

    return opened


@pytest.mark.parametrize("workers", [0, 2])
def test_sequences_are_padded_by_the_study(sequences: Callable[..., Session], workers: int) -> None:
    """Batches equal `collate` of the stream's samples. A rank without samples gets empty tensors."""
    session = sequences(loader={"kind": "torch", "workers": workers})
    samples = session.samples("train")
    lengths = set()
    with closing(session.loader("train")) as loader:
        for step, (x, y) in enumerate(loader.epoch(1)):
            wanted = [samples.read(1, index)[0]["values"] for index in range(4 * step, min(4 * step + 4, 13))]
            assert [row[mask].tolist() for row, mask in zip(x["values"], x["mask"], strict=True)] == [
                values.tolist() for values in wanted
            ]
            assert isinstance(y, tuple) and torch.equal(y[0], 2 * y[1])
            lengths.add(x["values"].shape[1])
    assert len(lengths) > 1
    with closing(open_loader(session.run, samples, Share(4, 0, 2), CPU)) as loader:
        x, y = list(loader.epoch(0))[-1]  # the last of 13 samples belongs to the second rank
        assert len(x["values"]) == len(x["mask"]) == len(y[0]) == 0
        session.step(x, y, 0.0)
    with pytest.raises(UserError, match=r"different shapes, such as \[\d\] and \[\d\].* define `collate`"):
        samples.collate = None
        read_batch(samples, 0, range(13))


@pytest.mark.parametrize("kind", ["direct", "dali"])
def test_other_loaders_refuse_a_studys_own_collate(sequences: Callable[..., Session], kind: str) -> None:
    session = sequences(loader={"kind": kind})
    with pytest.raises(UserError, match=f"loader.kind: {kind} .* study sequences .* set loader.kind to torch"):
        session.loader("train")


def test_sequences_are_measured(sequences: Callable[..., Session]) -> None:
    """The loader `synthetic`, predicted memory and counted operators use the first batch of the stream."""
    session = sequences()
    first = read_batch(session.samples("train"), 0, range(4))
    with closing(sequences(loader={"kind": "synthetic"}).loader("train")) as loader:
        for delivered in (next(loader.epoch(0)), next(loader.epoch(3))):
            assert all(map(torch.equal, tree_leaves(delivered), tree_leaves(first)))
    shapes = [values.shape for values in tree_leaves(fake_batch(session.run, session.manifest))]
    assert shapes == [values.shape for values in tree_leaves(first)]
    assert counted(session, first).bytes
    assert predict(session.run, session.manifest, CPU).peak


def test_sequences_are_learnt(sequences: Callable[..., Session], tmp_path: Path) -> None:
    """A study with padded sequences, dicts as predictions and tuples as targets learns."""
    session = sequences()
    make_run(tmp_path / "run", "sequences", SETTINGS, {"kind": "sequences"})
    assert train(tmp_path / "run", session.manifest.folder / "manifest.json") == 0
    losses = [epoch["valid_loss"] for epoch in records(tmp_path / "run")]
    assert losses[-1] < 0.1 * losses[0]
    assert (tmp_path / "run/prediction.png").stat().st_size


# ---- the step ----------------------------------------------------------------------------------------


@pytest.fixture
def ocean(tmp_path: Path, tiny_data: Callable[[str], Path]) -> Callable[..., Session]:
    """Return a function that opens `starter_ocean`, whose inputs and targets are dicts."""

    def opened(**over: Any) -> Session:
        tiny = TINY["starter_ocean"]
        run = load_run(make_run(tmp_path / "run", "starter_ocean", tiny["run"] | over, tiny["dataset"]), "throughput")
        return open_session(run, tiny_data("starter_ocean") / "manifest.json", World())

    return opened


def batch_of(session: Session) -> Any:
    return read_batch(session.samples("train"), 0, range(session.run.batch_size))


def losses(session: Session, steps: int = 3) -> list[torch.Tensor]:
    return [session.step(*batch_of(session)) for _ in range(steps)]


@pytest.mark.parametrize(
    "over",
    [
        {"accumulation_steps": 3},
        {"memory_format": "channels_last"},
        pytest.param({"compile": {"mode": "default"}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_dicts_train_as_on_the_plain_path(ocean: Callable[..., Session], over: dict[str, Any]) -> None:
    plain = losses(ocean())
    torch.testing.assert_close(losses(ocean(**over)), plain, rtol=1e-4, atol=1e-6)
    assert plain[0] > plain[-1]


def test_each_tensor_gets_its_format(ocean: Callable[..., Session]) -> None:
    """Floats and bytes get the model's type, and images the memory format; integers keep their type."""
    session = ocean(precision="bf16_pure", memory_format="channels_last")
    seen: dict[str, torch.Tensor] = {}

    class Seen(nn.Module):
        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            seen.update(x)
            return x["image"]

    session.step.network.model = Seen()
    image, number, token = torch.rand(2, 3, 4, 4), torch.rand(2), torch.arange(2)
    found = session.step.network.predict({"image": image, "number": number, "token": token, "mask": token.byte()})
    assert [seen[name].dtype for name in ("image", "number", "token", "mask")] == [
        *(torch.bfloat16, torch.bfloat16, torch.int64, torch.bfloat16)
    ]
    assert seen["image"].is_contiguous(memory_format=torch.channels_last) and found.dtype == torch.float32


def test_graphs_replay_on_the_tensors_of_dicts() -> None:
    graphed = Graphed(lambda x, y: (x["a"] * y[0]).sum() + x["b"].sum(), Recorder())  # type: ignore[arg-type]
    for n in range(EAGER_STEPS + 3):
        x = {"a": torch.full((2, 1), float(n)), "b": torch.full((2,), 10.0 * n)}
        y = (torch.full((2, 1), n + 1.0),)
        assert graphed(x, y) == 2 * n * (n + 1) + 20 * n


class Pair(NamedTuple):
    first: Any
    second: Any


def test_nodes_keep_their_type() -> None:
    """Named tuples and nested trees keep their structure."""
    tree = {"a": Pair(torch.ones(2), [torch.zeros(2)]), "b": torch.ones(3)}
    found = data_samples.tree_map(lambda values: values + 1, tree)
    assert type(found["a"]) is Pair and found["a"].second[0].tolist() == [1, 1]
    assert data_samples.samples_in(tree) == 2 and len(data_samples.tree_leaves(tree)) == 3


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_train_dicts_as_one(tmp_path: Path, tiny_data: Callable[[str], Path], kind: str) -> None:
    """Trained weights of two processes equal those of one, although a rank has no sample of the last batch."""
    tiny, data, weights = TINY["starter_ocean"], tiny_data("starter_ocean"), []
    for ranks in (1, 2):
        folder = tmp_path / f"{ranks}"
        parallel = {"parallel": {"kind": kind}} if ranks > 1 else {}
        settings = {**tiny["run"], **parallel, "geometry": {"gpus_per_node": ranks}}
        make_run(folder, "starter_ocean", settings, tiny["dataset"])
        train_by(ranks, folder, data)
        weights.append(torch.load(folder / "model.pt", weights_only=True))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


class Attend(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)


class Attention(nn.Module):
    """Attention to the tokens that a mask [B, N] selects; without a mask, to all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.projection = (nn.Linear(8, 8) for _ in range(4))
        self.attend = Attend()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = self.attend(q, k, v, None if mask is None else mask[:, None, None])
        return self.projection(y.transpose(1, 2).flatten(2))


class Masked(nn.Module):
    """Network of five tokens with two inputs and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Linear(2, 8), Attention(), nn.Linear(8, 1)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        values, mask = inputs["values"], inputs["mask"]
        x = self.embed(torch.stack([values, inputs["number"][:, None].expand_as(values)], dim=-1))
        x = x + self.attention(x, mask)
        y = self.head(x + self.mlp(x)).squeeze(-1)
        return {"mean": (y * mask).sum(1) / mask.sum(1)}


def _train_masked(world: World, **geometry: int) -> dict[str, torch.Tensor]:
    """Train on dicts for three steps; return losses and weights."""
    run = settings("era5_vit", batch_size=4, geometry=geometry, optimizer={"kind": "sgd", "lr": 0.1})
    sharding = Sharding(
        tokens=5,
        **{"first": "embed", "last": "head", "gather": ["attention", "mlp"], "attend": ["attention.attend"]},
        columns=["attention.q", "attention.k", "attention.v", "mlp.0"],
        rows=["attention.projection", "mlp.2"],
    )
    step = build_step(run, Masked, lambda p, y: (p["mean"] - y[0]).square(), world, lambda model: sharding)
    generator, found = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for number in range(3):
        x = {"values": torch.randn(4, 5, generator=generator), "number": torch.randn(4, generator=generator)}
        x["mask"] = torch.rand(4, 5, generator=generator).argsort(1) < 3
        loss = step(x, (torch.randn(4, generator=generator),))
        found[f"loss {number}"] = world.sum(loss * 4) / 4
    return found | {name: value.clone() for name, value in step.weights.state_dict().items()}


def _train_masked_together(rank: int, port: int, folder: Path) -> None:
    as_rank(rank, port)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    with join(Geometry(gpus_per_node=2), "cpu") as joined:
        for axis in ("tp", "cp"):
            mesh = Mesh(Geometry(gpus_per_node=2, **{axis: 2}), "cpu")
            found = _train_masked(replace(joined, mesh=mesh), gpus_per_node=2, **{axis: 2})
            torch.save(found, folder / f"{axis}.{rank}.pt")


def test_two_processes_divide_a_model_with_a_mask(tmp_path: Path) -> None:
    """With tensor or context parallelism, losses and weights equal those of one process; the mask is not divided."""
    torch.set_num_threads(1)
    spawn(_train_masked_together, (20000 + (os.getpid() * 7) % 20000, tmp_path), 2)
    alone = _train_masked(World())
    assert alone["loss 0"] > 0
    for file in tmp_path.iterdir():
        torch.testing.assert_close(
            torch.load(file), alone, rtol=1e-4, atol=1e-5, msg=lambda text, f=file: f"{f}: {text}"
        )
    assert len([*tmp_path.iterdir()]) == 4


# ---- the guide ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_guide_makes_a_study_with_dicts(tmp_path: Path) -> None:
    """The code of `docs/from_notebook.md`, put into a new study, trains a network with several inputs."""
    guide = (ROOT / "docs/from_notebook.md").read_text()
    data, settings, network, study, collate = re.findall(
        r"```\w+\n(.*?)```", guide.partition("## Several inputs")[2].partition("## 4.")[0], re.DOTALL
    )
    new_study.write("tides", tmp_path / "tides", images=False)
    for name, pattern, code in (
        ("tides_data.py", r"    return ArraySource\(.*\n", data),
        ("tides.yaml", r"  samples: .*\n", settings),
        ("tides.py", r"(?s:    def model\(.*(?=\nSTUDY))", study),
    ):
        file = tmp_path / "tides" / name
        begin, _, end = re.split(f"({pattern})", file.read_text(), maxsplit=1)
        file.write_text(begin + code + end)
    (tmp_path / "tides/tides_model.py").write_text(network)
    registry.add("tides", tmp_path / "tides/tides.py")
    session = tiny_session("tides", {"kind": "tides"}, {"loader": {"kind": "torch", "workers": 0}}, tmp_path / "data")
    x, y = batch_of(session)
    assert x.keys() == {"curve", "known", "offset"} and y.keys() == {"frequency"}
    first, *_, last = (float(session.step(x, y)) for _ in range(100))
    assert last < 0.2 * first

    made: dict[str, Any] = {}
    exec(textwrap.dedent(collate), made)
    samples = [({"curve": torch.rand(9), "length": torch.tensor(length)}, torch.rand(())) for length in (3, 5)]
    x, y = made["collate"](None, samples)
    assert x["curve"].shape == (2, 5) and y.shape == (2,)


def test_the_order_of_described_metrics_is_free() -> None:
    """A study's test compares the names of the metrics; a difference is one message with both lists."""
    x = y = torch.zeros(2)
    for names, passes in ((["b", "a"], True), (["a"], False)):
        metrics = SimpleNamespace(
            described=[SimpleNamespace(name=name) for name in names],
            per_sample=lambda *_: {"a": x, "b": x},
            naive=lambda *_: {},
            summarise=lambda found: found,
        )
        its = {"study": SimpleNamespace(metrics=lambda *_, metrics=metrics: metrics), "run": None, "manifest": None}
        session: Any = SimpleNamespace(**its, step=SimpleNamespace(predict=lambda x: x))
        if passes:
            study_tests.test_the_metrics_are_described(session, (x, y))
        else:
            with pytest.raises(AssertionError, match=r"`described` must list exactly \['a', 'b'\], but lists \['a'\]"):
                study_tests.test_the_metrics_are_described(session, (x, y))
