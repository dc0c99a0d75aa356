"""Plans that pair the tutorials' programs with dlscale's studies: their commands, and measurements of stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from dlscale.config import resolve
from dlscale.config.run import Run
from dlscale.config.site import Site
from dlscale.core import machine
from dlscale.core.metrics import Epoch, read_epochs
from dlscale.extensions.programs import steps
from dlscale.extensions.programs.launch import launch_program
from dlscale.extensions.programs.printed import rate_of
from dlscale.extensions.programs.settings import Words
from dlscale.launch import launcher
from dlscale.measure.records import Throughput
from dlscale.report.published import speeds_of, values
from tests.conftest import ROOT, stage
from tests.workflow.conftest import copy_tree

STAND_INS = ROOT / "tests/published/stand_ins"


def runs(plan: str, settings: dict[str, Any] | None = None, program: dict[str, Any] | None = None) -> dict[str, Run]:
    """Return the runs of a shipped plan, with additional settings and additional keys of its program."""
    own = {"settings": settings or {}, "runs": {"program": {"program": program or {}}}}
    found = resolve.load({"targets": [plan], "plans": {plan: own}}).plans[plan]
    return {name: each.run for name, each in found.items()}


# ---- commands and outputs in the documents -----------------------------------------------------------

APEX = "python -m torch.distributed.launch --nproc_per_node=4 imagenet_ddp_apex.py -a resnet50 --b 208 --workers 20"
#: The tutorial's command (OUT: the run's output folder), and the run of dlscale with the same settings, by plan.
COMMANDS = {
    "cosmo_published_program": ("python train.py --config=short --num_epochs 4 --run_num=00", "cosmo_published.short"),
    "era5_published_program": ("python train.py --config=short --run_num=00", "era5_published.short"),
    "starter_published_program": ("python train_single_gpu.py --root_dir OUT", "starter_published.single"),
    "mnist_published_program": (
        "python mnist_classify.py --epochs=3 --batch-size=64 --lr=1.0 --gamma=0.7",
        "mnist_workers.one",
    ),
    "imagenet_published_program": (
        f"{APEX} --opt-level O2 --epochs 90 /home/shared/imagenet/raw/",
        "imagenet_published.gpu4",
    ),
    "imagenet_published_program_single": (
        "python imagenet_ddp.py -a resnet50 --batch-size 256 --workers 4 --dist-url file://OUT/meet "
        "--dist-backend nccl --world-size 1 --rank 0 /home/shared/imagenet/raw/",
        "imagenet_published_ladder.single",
    ),
    "imagenet_published_program_ddp": (
        "python imagenet_ddp.py -a resnet50 --batch-size 1024 --workers 4 --dist-url file://OUT/meet "
        "--dist-backend nccl --world-size 1 --rank 0 --desired-acc 0.75 /home/shared/imagenet/raw/",
        "imagenet_published_ladder.ddp",
    ),
}


@pytest.mark.parametrize("plan", COMMANDS)
def test_a_plan_pairs_the_documents_command_with_a_run_of_equal_settings(plan: str) -> None:
    command, like = COMMANDS[plan]
    found, (other, run) = runs(plan), like.split(".")
    assert list(found) == ["program", "ours"]
    program = found["program"].program
    assert program and " ".join(Words(program, "OUT").command) == command
    settings = [each.model_dump(exclude={"program", "label"}) for each in found.values()]
    assert settings[0] == settings[1]
    assert settings[1]["precision"] != "fp32", "a program without settings of precision computes convolutions in TF32"
    assert settings[1] == resolve.load({"targets": [other]}).plans[other][run].run.model_dump(
        exclude={"program", "label"}
    )


@pytest.mark.parametrize(("tp", "cp", "order"), [(4, 1, "tp-cp-dp"), (1, 4, "cp-tp-dp"), (2, 4, "cp-tp-dp")])
def test_the_program_with_transformer_engine_runs_next_to_the_same_mesh(tp: int, cp: int, order: str) -> None:
    """SC25's commands on 16 GPUs, and dlscale's run with the settings of `mp_short`.

    The program names its folder after the tp × cp GPUs that share a model.
    """
    mesh = {"tp": tp, "cp": cp, "order": order}
    found = runs("era5_published_program_te", {"geometry": mesh})
    program = found["program"].program
    assert program
    words = Words(program, "OUT")
    options = f"--tensor_parallel={tp} --context_parallel={cp} --parallel_order={order} --run_num=00"
    assert " ".join(words.command) == f"python train_mp.py --config=mp_te_short {options}"
    assert words.log == f"/logs/mp_te_short/{tp * cp}MP/00/logs"
    settings, ours = (each.model_dump(exclude={"program", "label"}) for each in found.values())
    published = resolve.load({"targets": ["era5_published_sc25"]}).plans["era5_published_sc25"]["mp_short"].run
    like = published.model_dump(exclude={"program", "label"})
    like["geometry"] |= {"nodes": 4, "gpus_per_node": 4, **mesh}
    assert settings == ours == like


def test_the_program_with_transformer_engine_has_its_published_figures() -> None:
    """Figures name the short program: for its memory in `runs`, for speed and losses of full epochs in `like`."""
    run = ("era5_published_program_te", "program")
    figures = resolve.study_files()["era5_vit"].published
    assert [figure.speed for figure in speeds_of(figures, *run)] == [156.8]
    assert [figure.value for figure in values(figures, *run, "memory")] == [21.3]
    named = [figure for figure in figures if ".".join(run) in (*figure.runs, *figure.like)]
    metrics = ["", "memory", "train_loss", "valid_loss", "validation_time"]
    assert [figure.metric for figure in named] == metrics
    assert named == [figure for figure in figures if "Transformer Engine" in figure.label]


def test_the_program_for_model_parallelism_runs_as_published() -> None:
    """SC23's two commands on 4 and 16 GPUs, each with dlscale's run of the same settings and its published figures."""
    plan = "era5_published_program_mp"
    found, figures = runs(plan), resolve.study_files()["era5_vit"].published
    published = resolve.load({"targets": ["era5_published"]}).plans["era5_published"]["mp"].run
    for suffix, tp, nodes, rate in (("", 1, 1, 48.0), ("_tp4", 4, 4, 114.4)):
        program = found[f"program{suffix}"].program
        assert program
        words = Words(program, "OUT")
        assert " ".join(words.command) == f"python train_mp.py --config=mp --row_parallel_size={tp} --run_num=00"
        assert words.log == f"/logs/mp/{tp}MP/00/logs" and words.folder == "sc23-dl-tutorial"
        like = published.model_dump(exclude={"program", "label"})
        like["geometry"] |= {"nodes": nodes, "gpus_per_node": 4, "tp": tp}
        like["compile"]["mode"] = "none"  # without flags, the program sets `enable_jit` and `enable_fused` to false
        like["optimizer"]["fused"] = False
        for name in ("program", "ours"):
            assert found[name + suffix].model_dump(exclude={"program", "label"}) == like
        assert [each.speed for each in speeds_of(figures, plan, f"program{suffix}") if each.source == "SC23"] == [rate]


@pytest.mark.parametrize(
    ("plan", "script", "log"),
    [
        ("cosmo_published_program", "train_graph.py", "/logs/short/1GPU/again/logs"),
        ("era5_published_program", None, "/logs/short/1GPU/again/logs"),
        ("era5_published_program_mp", "train_mp_graphs.py", "/logs/mp/1MP/again/logs"),
        ("era5_published_program_te", "train_mp_graphs.py", "/logs/mp_te_short/4MP/again/logs"),
    ],
)
def test_a_repetition_and_a_script_with_graphs_can_be_chosen(plan: str, script: str | None, log: str) -> None:
    """The programs put the option `--run_num` into the path of their log."""
    values = {"run_num": "again"} | ({"script": script} if script else {})
    program = runs(plan, {}, {"values": values})["program"].program
    assert program
    words = Words(program, "OUT")
    assert words.log == log and "--run_num=again" in words.command
    assert words.command[1] == (script or "train.py")


def test_rates_are_read_from_the_documents_output() -> None:
    """The rate pattern `nersc` reads the samples/s from a line that the tutorials' programs print."""
    line = (
        "2022-11-09 15:34:28,412 - root - INFO - Time taken for epoch 2 is 48.7 sec, avg 84.05503431279347 samples/sec"
    )
    match = steps.pattern("nersc").search(line)
    assert match and rate_of(match) == ("", pytest.approx(84.055, abs=0.001))


def test_the_command_contains_the_settings_of_the_run() -> None:
    found = runs(
        "mnist_published_program", {"batch_size": 128, "optimizer": {"lr": 0.5}}, {"values": {"options": ["-x"]}}
    )
    program = found["program"].program
    assert program and Words(program, "OUT").command[3:] == ["--batch-size=128", "--lr=0.5", "--gamma=0.7", "-x"]
    kernprof = {"python": ["kernprof", "-l", "-o", "{out}/mnist.lprof"]}
    program = runs("mnist_published_program", {}, {"values": kernprof})["program"].program
    assert program and Words(program, "OUT").command[:5] == [
        *("kernprof", "-l", "-o", "OUT/mnist.lprof", "mnist_classify.py")
    ]


# ---- stand-ins ---------------------------------------------------------------------------------------


@dataclass
class Measured:
    """The record that a stage wrote for a program, and the program's own figures."""

    record: Throughput
    epochs: list[Epoch]
    own: list[dict[str, float]]

    def check(self) -> None:
        """Check that validation losses agree, and that the rate is within 10 % of the range of the epochs' rates."""
        trained = [each for each in self.own if each["rate"]]
        assert self.record.full and len(self.epochs) == len(trained)
        rates = [each["rate"] for each in trained]
        assert 0.9 * min(rates) < self.record.full.mean < 1.1 * max(rates)
        for epoch, each in zip(self.epochs, trained, strict=True):
            assert epoch.valid_loss == pytest.approx(each["valid"], abs=6e-5)


@dataclass
class Checkout:
    """A folder like a tutorial's repository, in which stand-ins replace the programs."""

    path: Path
    files: dict[str, str]  #: Names of the stand-ins by their file names in the repository.
    config: dict[str, Any] = field(default_factory=dict)

    def make(self) -> None:
        self.path.mkdir()
        for name, file in {"tiny.py": "tiny.py", **self.files}.items():
            shutil.copy(STAND_INS / file, self.path / name)
        for name, settings in self.config.items():
            (self.path / name).parent.mkdir(exist_ok=True)
            (self.path / name).write_text(yaml.safe_dump(settings))

    def run(self, run: Run, start: list[str] | None = None) -> Measured:
        """Run the stage `program` of a run; return the stage's record and the program's figures."""
        out = self.path.parent / "run"
        (self.path / "stopwatch.jsonl").unlink(missing_ok=True)
        words = ["--config", run.model_dump_json(), "--manifest", "none", "--sources", "digest", "--keep", out / "out"]
        words += ["--start", json.dumps(start)] if start else []
        telemetry = out / "telemetry/program.csv"
        assert stage("program", *words, "--out", out, "--telemetry", telemetry, "--threads", 1) == 0
        own = [json.loads(line) for line in (self.path / "stopwatch.jsonl").read_text().splitlines()]
        return Measured(Throughput.read(out / "program.json"), read_epochs(out / "program.jsonl"), own)


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., Checkout]:
    def make(name: str, files: dict[str, str], config: dict[str, Any] | None = None) -> Checkout:
        made = Checkout(tmp_path / name, files, config or {})
        made.make()
        return made

    return make


def at_scale(checkout: Callable[..., Checkout], tmp_path: Path, name: str, config: str) -> Checkout:
    short = {"global_batch_size": 16, "Nsamples": 160, "expdir": str(tmp_path / "logs")}
    return checkout(name, {"train.py": "at_scale.py"}, {config: {"short": short}})


@pytest.mark.slow
def test_sc22(checkout: Callable[..., Checkout], tmp_path: Path) -> None:
    """The rate comes from PyTorch's steps, or from printed lines. Events of other processes are ignored."""
    place = at_scale(checkout, tmp_path, "sc22-dl-tutorial", "config/UNet.yaml")
    program: dict[str, Any] = {"folder": str(place.path), "values": {"logs": str(tmp_path / "logs")}}
    found = place.run(runs("cosmo_published_program", {"batch_size": 16}, program)["program"])
    found.check()
    assert found.record.outside and (found.record.outside.way, found.record.batch_size) == ("seen", 16)
    assert [epoch.step for epoch in found.epochs] == [10, 20, 30, 40]
    assert [epoch.train_loss for epoch in found.epochs] == pytest.approx([each["train"] for each in found.own])
    assert [epoch.learning_rate for epoch in found.epochs] == [pytest.approx(1e-2)] * 4
    # A second run has more flags; another process writes to the same folder during the run.
    flags = ["--enable_apex", "--amp_mode", "fp16", "--num_data_workers", "{workers}"]
    program |= {"rate": "nersc", "values": {**program["values"], "options": flags}}
    with SummaryWriter(str(tmp_path / "logs/short/1GPU/00/logs")) as board:
        board.add_scalar("Loss/valid", 1.0, 10, walltime=time.time() + 600)
    run = runs("cosmo_published_program", {"batch_size": 16, "training": {"epochs": 5}}, program)["program"]
    again = place.run(run)
    assert again.record.outside and again.record.outside.way == "rate"
    assert [epoch.step for epoch in again.epochs] == [10, 20, 30, 40, 50], "epochs of the other process must not count"


@pytest.mark.slow
def test_sc23(checkout: Callable[..., Checkout], tmp_path: Path) -> None:
    """The program's losses before the first step are recorded for the untrained model."""
    place = at_scale(checkout, tmp_path, "sc23-dl-tutorial", "config/ViT.yaml")
    program = {"folder": str(place.path), "values": {"logs": str(tmp_path / "logs")}}
    found = place.run(runs("era5_published_program", {}, program)["program"])
    found.check()
    untrained = found.epochs[0].untrained
    assert untrained and untrained.valid_loss == pytest.approx(found.own[0]["valid"])
    assert untrained.train_loss == pytest.approx(found.own[0]["train"])
    for epoch in found.epochs:
        assert epoch.metrics == {"rmse_normalised/u10": pytest.approx(epoch.valid_loss**0.5)}


@pytest.mark.slow
def test_mnist(checkout: Callable[..., Checkout]) -> None:
    """The program's losses are read from its output, and values in per cent become fractions."""
    place = checkout("Running-DL-Applications", {"mnist_classify.py": "mnist_classify.py"})
    settings = {"batch_size": 16, "optimizer": {"lr": 0.5}}
    found = place.run(runs("mnist_published_program", settings, {"folder": str(place.path)})["program"])
    found.check()
    assert [epoch.step for epoch in found.epochs] == [20, 40, 60]
    assert [epoch.metrics for epoch in found.epochs] == [{"accuracy": pytest.approx(0.93)}] * 3


@pytest.mark.slow
def test_imagenet(checkout: Callable[..., Checkout], tmp_path: Path) -> None:
    """Two processes that the program itself starts are one run; its log counts epochs and has values in per cent."""
    place = checkout("distributed-pytorch", {"imagenet_ddp_apex.py": "imagenet.py"})
    (tmp_path / "raw/train").mkdir(parents=True)
    settings = {"batch_size": 16, "geometry": {"gpus_per_node": 2}, "training": {"epochs": 5}}
    program = {"folder": str(place.path), "values": {"data": str(tmp_path / "raw")}}
    run = runs("imagenet_published_program", settings, program)["program"]
    found = place.run(run)
    found.check()
    assert found.record.outside and found.record.outside.way == "rate"
    assert (found.record.nranks, found.record.batch_size) == (2, 16)
    assert [epoch.step for epoch in found.epochs] == [20, 40, 60, 80, 100]
    assert found.epochs[-1].metrics == {"top1": pytest.approx(0.75), "top5": pytest.approx(0.93)}


#: Script that starts processes with the variables of srun or mpirun, and without PyTorch's variables.
STARTER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
for rank in 0 1; do RANKNAME=$rank LOCALNAME=$rank SIZENAME=2 "$@" & done
wait
"""


@pytest.fixture(params=["srun", pytest.param("mpirun", marks=pytest.mark.slow)])
def starter(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    names = {
        "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
        "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    }[request.param]
    text = STARTER
    for old, new in zip(("RANKNAME", "LOCALNAME", "SIZENAME"), names, strict=True):
        text = text.replace(old, new)
    file = tmp_path / "bin" / request.param
    file.parent.mkdir()
    file.write_text(text if request.param == "srun" else text.replace("while", "shift 2\nwhile", 1))
    file.chmod(0o755)
    monkeypatch.setenv(
        "PATH", os.pathsep.join([*map(str, (file.parent, Path(sys.executable).parent)), os.environ["PATH"]])
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "workflow_scripts"))
    monkeypatch.setattr(machine, "GIVEN", dict(os.environ))  # as `python -m dlscale` does
    yield request.param


@pytest.mark.slow
def test_on_several_devices(checkout: Callable[..., Checkout], starter: str) -> None:
    """dlscale translates the variables of srun and mpirun to PyTorch's, like the tutorial's export_DDP_vars.sh."""
    place = checkout("nersc-dl-multigpu", {"train_multi_gpu.py": "starter.py"})
    program = {"folder": str(place.path), "values": {"script": "train_multi_gpu.py"}}
    run = runs("starter_published_program", {"geometry": {"gpus_per_node": 2}}, program)["program"]
    site = Site.model_validate({"engine": "none", "starter": starter, "gpu": False})
    here = launcher.ContainerMounts(str(place.path), str(ROOT / "workflow_scripts"), uid=os.getuid(), gid=os.getgid())
    found = place.run(run, launch_program(site, here, run)[1])
    found.check()
    assert (found.record.nranks, found.record.batch_size) == (2, 32)


@pytest.mark.slow
def test_in_turns_on_one_page(tmp_path: Path) -> None:
    """The complete workflow runs a tutorial's program. If its folder is missing, a message names the repository."""
    tree = tmp_path / "a repository"
    copy_tree(tree)
    plan = {
        "measure": ["throughput"],
        "settings": {
            "dataset": "starter_small",
            "model": {"hidden": 8},
            "loader": {"workers": 0},
            "throughput": {"warmup": 1, "trials": 2, "batches": 5, "seconds": 0.1, "beside": 2, "error": 0.2},
            "precision": "fp32",
        },
    }
    (tree / "mine.yaml").write_text(yaml.safe_dump({"plans": {"starter_published_program": plan}}))

    def snakemake(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "SLURM"))}
        environment |= {"PYTHONPATH": str(tree / "workflow_scripts"), "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        command = [sys.executable, "-m", "snakemake", "plan_starter_published_program", "--configfile", "mine.yaml"]
        return subprocess.run([*command, *words], cwd=tree, env=environment, capture_output=True, text=True)

    refused = snakemake("-n")
    assert refused.returncode == 2 and "nersc-dl-multigpu: no such folder" in refused.stderr
    assert "plans.starter_published_program.runs.program.program.folder" in refused.stderr
    place = Checkout(tree / "nersc-dl-multigpu", {"train_single_gpu.py": "starter.py"})
    place.make()
    done = snakemake("--cores", "1", "--quiet")
    assert done.returncode == 0, done.stderr
    results = tree / "results/plans/starter_published_program"
    records = {name: Throughput.read(results / name / "throughput.json") for name in ("program", "ours")}
    assert records["ours"].beside and records["ours"].beside.openings, "the runs must have a paired timing"
    theirs = [own["rate"] for own in map(json.loads, (place.path / "stopwatch.jsonl").read_text().splitlines())]
    assert records["program"].full and records["program"].batch_size == 32
    turns = [first for opening in records["ours"].beside.openings for _, first in opening]
    for rate in (records["program"].full.mean, statistics.median(turns)):
        assert 0.85 * min(theirs) < rate < 1.1 * max(theirs)
    assert not (place.path / "outputs").exists(), "a run must not write to the user's folder"
    page = (results / "report.html").read_text()
    assert "train_single_gpu.py, as published" in page
