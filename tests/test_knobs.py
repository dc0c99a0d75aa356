"""Best epoch, target, initial weights, `dlscale evaluate` and trackers, each compared with a simpler training."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
import torch

from dlscale.config import resolve as config
from dlscale.config.run import Geometry, load_run
from dlscale.core.errors import UserError
from dlscale.core.metrics import Epoch, Metric
from dlscale.core.settings import flat
from dlscale.core.telemetry import GpuSample, Sample
from dlscale.data.manifest import Manifest
from dlscale.data.sampling import evenly
from dlscale.extensions.cosmo_unet.cosmo.kind import CropSamples
from dlscale.extensions.cosmo_unet.cosmo.samples import Crops
from dlscale.extensions.cosmo_unet.model import UNet3D
from dlscale.extensions.cosmo_unet.scores import l1
from dlscale.extensions.imagenet_resnet50.model import ResNet
from dlscale.extensions.trackers import trackers
from dlscale.results import RunResult, reached
from dlscale.train import build, checkpoint
from dlscale.train import trainer as training
from dlscale.train.checkpoint import read
from dlscale.train.precision import Weights, convert
from dlscale.train.provenance import Provenance
from dlscale.train.train import run_fingerprint
from dlscale.train.trainer import Trainer
from dlscale.train.weight_files import load_weights, read_weights
from tests.conftest import COSMO, COSMO_RUN, ERA5, ERA5_RUN, error_line, make_run, records, stage, train
from tests.test_losses_metrics import naive_answers
from tests.test_report import Results
from tests.test_training import Trap, provenance, scalars

#: Constant learning rate, with which a longer training begins like a shorter one.
STEADY = {"schedule": {"kind": "constant"}}
Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def each_validation_is_that_of_an_epoch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "_begin", lambda self: None)
        patched.setattr(checkpoint, "KEPT", 1)
        yield


@pytest.fixture
def era5(tmp_path: Path, era5_data: Path) -> Make:
    """Return a function that trains the tiny ViT in a named folder, or resumes the training in this folder."""

    def make(name: str = "run", status: int = 0, **over: Any) -> Path:
        make_run(tmp_path / name, "era5_vit", config.merge(config.merge(copy.deepcopy(ERA5_RUN), STEADY), over), ERA5)
        assert train(tmp_path / name, era5_data / "manifest.json") == status
        return tmp_path / name

    return make


def plain(model: torch.nn.Module) -> Weights:
    return Weights(model, convert(model, "fp32"))


def fake_validation_losses(monkeypatch: pytest.MonkeyPatch, losses: Iterable[float], stop: int = 99) -> None:
    """Make this process's validations return the given losses; validation number `stop` (from 0) is interrupted."""
    numbers, real = itertools.count(), training.validate
    known: Iterator[float] = iter(losses)

    def validate(*arguments: Any) -> tuple[float, dict[str, float]]:
        if next(numbers) == stop:
            raise KeyboardInterrupt
        return next(known), real(*arguments)[1]

    monkeypatch.setattr(training, "validate", validate)


# ---- the best epoch ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_best_weights_are_those_of_a_training_that_ended_there(
    era5: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fake_validation_losses(monkeypatch, [3.0, 1.0, 2.0, 1.0])
    folder = era5(training={"epochs": 4})
    assert provenance(folder)["best"] == {"metric": "valid_loss", "value": 1.0, "epoch": 2, "step": 20}, (
        "of equal losses, the first epoch must be the best"
    )
    assert "best: epoch 2 of 4, validation loss 1" in caplog.text
    monkeypatch.undo()
    shorter = era5("shorter", training={"epochs": 2})
    assert (folder / "model_best.pt").read_bytes() == (shorter / "model.pt").read_bytes()
    assert (folder / "model.pt").read_bytes() != (folder / "model_best.pt").read_bytes()


@pytest.mark.slow
def test_the_best_survives_an_interruption_and_a_worse_epoch_after_it(
    era5: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The multi-GPU tutorial's program forgot the best loss on resume and replaced the best model with a worse one."""
    losses = [3.0, 1.0, 2.5, 2.0, 1.5]
    settings = {"epochs": 5}
    fake_validation_losses(monkeypatch, losses)
    whole = era5("whole", training=settings)
    monkeypatch.undo()
    fake_validation_losses(monkeypatch, losses, stop=3)  # epoch 4 trains but is never validated
    broken = era5("broken", status=130, training=settings)
    assert not (broken / "model_best.pt").exists(), "the best weights may only be written with the complete result"
    monkeypatch.undo()
    fake_validation_losses(monkeypatch, losses[3:])
    assert era5("broken", training=settings) == broken
    found = provenance(broken)
    assert (found["resumed_from_step"], found["best"]["epoch"]) == (30, 2)
    for name in ("model.pt", "model_best.pt"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    (checkpoint,) = broken.glob("checkpoints/*/step-*")
    state = read(checkpoint)
    kept = torch.load(whole / "model_best.pt", weights_only=True)
    assert all(torch.equal(state[f"best.{name}"], value) for name, value in kept.items())
    # The training is complete, so the outputs are written again from the checkpoint only.
    (broken / "model_best.pt").unlink()
    era5("broken", training=settings)
    assert (broken / "model_best.pt").read_bytes() == (whole / "model_best.pt").read_bytes()


@pytest.mark.slow
def test_any_metric_can_select_the_best_weights(era5: Make, capfd: pytest.CaptureFixture[str]) -> None:
    folder = era5(training={"epochs": 2, "keep_best": "rmse/t2m"})
    values = [record["metrics"]["rmse/t2m"] for record in records(folder)]
    best = provenance(folder)["best"]
    assert (best["metric"], best["value"], best["epoch"]) == ("rmse/t2m", min(values), 1 + int(np.argmin(values)))
    assert scalars(folder)["best/rmse/t2m"] == {best["step"]: pytest.approx(best["value"])}
    none = era5("none", training={"epochs": 1, "keep_best": None})
    assert provenance(none)["best"] is None and not (none / "model_best.pt").exists()
    capfd.readouterr()
    era5("wrong", status=2, training={"keep_best": "rmse/t2n"})
    assert "training.keep_best: no metric is called 'rmse/t2n' (did you mean 'rmse/t2m'?)" in error_line(capfd)


def test_better_is_lower_or_higher() -> None:
    epochs = [one(number, 1.0, accuracy=value) for number, value in enumerate([0.2, 0.5, float("nan"), 0.5], 1)]
    higher = Metric(name="accuracy", title="accuracy", better="higher")
    lower = higher.model_copy(update={"better": "lower"})
    assert [epoch and epoch.epoch for epoch in (higher.best(epochs), lower.best(epochs))] == [2, 1]
    assert higher.first(epochs, 0.5) == epochs[1] and higher.first(epochs, 0.51) is None
    assert lower.first(epochs, 0.3) == epochs[0]
    assert Metric(name="no", title="no").best(epochs) is None
    assert (higher.aim(0.75), lower.aim(4.7e-3)) == ("accuracy ≥ 0.75", "accuracy ≤ 0.0047")
    assert Metric(name="rmse/t2m", title="RMSE").aim(2) == "t2m RMSE ≤ 2"


# ---- the target ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_ends_with_the_epoch_that_reaches_the_target(
    era5: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    losses = [3.0, 1.9, 1.5, 1.2, 1.0]

    def trained(value: float, begin: int = 0, **more: Any) -> Path:
        caplog.clear()
        with monkeypatch.context() as patched:
            fake_validation_losses(patched, losses[begin:])
            return era5(training={"epochs": 5, "target": {"value": value, **more}})

    folder = trained(2.0)
    assert len(records(folder)) == 2
    assert "target: validation loss ≤ 2: reached after epoch 2, 76 samples" in caplog.text
    assert (folder / "model.pt").read_bytes() == (era5("shorter", training={"epochs": 2}) / "model.pt").read_bytes()
    before = (folder / "metrics.jsonl").read_text()
    trained(2.0, 99)
    assert provenance(folder)["resumed_from_step"] == 20
    assert (folder / "metrics.jsonl").read_text() == before, "no epoch may be trained again"
    # A stricter target continues the training from the end of the looser target.
    trained(1.2, 2)
    assert provenance(folder)["resumed_from_step"] == 20 and len(records(folder)) == 4
    # A looser target was passed earlier, but its weights are gone, so the training begins again.
    trained(2.5)
    assert provenance(folder)["resumed_from_step"] is None and len(records(folder)) == 2
    # The target is not reached, or the training continues after the target.
    trained(0.5, 2)
    assert "target: validation loss ≤ 0.5: not reached; at best 1" in caplog.text and len(records(folder)) == 5
    trained(2.0, 5, stop=False)
    assert "reached after epoch 2" in caplog.text and len(records(folder)) == 5


def one(
    number: int, loss: float, seconds: float = 10.0, valid: float = 2.0, end: float = 0.0, **metrics: float
) -> Epoch:
    losses = {"learning_rate": 1.0, "train_loss": 1.0, "valid_loss": loss}
    times = {"epoch_seconds": seconds, "samples_per_second": 1.0, "valid_seconds": valid, "wall_time": end}
    return Epoch(epoch=number, step=number, samples=50 * number, metrics=metrics, **losses, **times)  # type: ignore[arg-type]


def result(name: str, epochs: list[Epoch], target: Any, watts: list[float] | None = None, **over: Any) -> RunResult:
    """Return a result of four processes; `watts` has the GPU's power for each second from time 1000 on."""
    settings = {"training": {"target": target}}
    nodes = [[Sample(1000.0 + n, 1.0, 2, gpus=(GpuSample(watts=w),)) for n, w in enumerate(watts, 1)]] if watts else []
    return RunResult(
        name, name, Path(name), f"p/{name}", settings, Provenance(processes=4, **over), epochs, None, None, None,
        {"train": nodes},
    )  # fmt: skip


def test_the_cost_of_a_target_ends_with_the_epoch_that_reached_it() -> None:
    # Set-up takes three seconds, an epoch 10 s, and its validation 2 s. The power is 100 W for two epochs, then 50 W.
    epochs = [one(n, 4.0 - n, end=1000 + 3 + 12 * n - 2) for n in (1, 2, 3)]
    watts = [7.0] * 3 + [100.0] * 24 + [50.0] * 20
    found = reached(result("a", epochs, {"metric": "valid_loss", "value": 2.0}, watts))
    assert found and found.epoch == epochs[1] and found.aim == "validation loss ≤ 2"
    assert (found.seconds, found.gpu_hours, found.joules) == (24.0, 24.0 * 4 / 3600, pytest.approx(24 * 100))
    resumed = reached(result("a", epochs, {"metric": "valid_loss", "value": 2.0}, watts, resumed_from_step=1))
    assert resumed and resumed.joules is None and resumed.seconds == 24.0
    missed = reached(result("a", epochs, {"metric": "valid_loss", "value": 0.5}))
    assert missed and missed.epoch is None and missed.nearest == 1.0 and missed.seconds is None
    assert reached(result("a", epochs, None)) is None
    copies = reached(result("a", epochs, {"metric": "valid_loss", "value": 2.0}, devices=8))
    assert copies and copies.gpu_hours == 24.0 * 8 / 3600, (
        "GPU-hours must count the GPUs, because a process may drive several GPUs"
    )
    moved = [epochs[0].model_copy(update={"made_with": None}), *epochs[1:]]
    changed = reached(result("a", moved, {"metric": "valid_loss", "value": 2.0}))
    assert changed and changed.epoch and changed.seconds is None and changed.gpu_hours is None


@pytest.mark.slow
def test_the_table_and_the_page_show_the_cost_of_a_target(tmp_path: Path) -> None:
    results = Results(tmp_path / "results")
    for name, value, speed in (("slow", 0.3, 10.0), ("fast", 0.3, 40.0), ("never", 1e-9, 20.0)):
        target = {"metric": "valid_loss", "value": value, "stop": False}
        results.run("goal", name, speed=speed, training={"epochs": 5, "target": target})
    plan = results.plan("goal", {"slow": "slow", "fast": "fast", "never": "never"}, kind="set")
    rows = {row["run"]: row for row in results.collect(plan)}
    for name, speed in (("slow", 10.0), ("fast", 40.0)):
        epochs = [json.loads(line) for line in (plan.parent / name / "metrics.jsonl").read_text().splitlines()]
        first = next(epoch["epoch"] for epoch in epochs if epoch["valid_loss"] <= 0.3)
        assert 1 < first < 5
        seconds = first * (128 / speed + 1.5)
        assert (rows[name]["target"], rows[name]["target_reached"]) == ("validation loss ≤ 0.3", "yes")
        assert (int(rows[name]["target_epoch"]), int(rows[name]["target_samples"])) == (first, 128 * first)
        took = [float(rows[name][key]) for key in ("target_seconds", "target_gpu_hours")]
        assert took == pytest.approx([seconds, seconds / 3600])
    assert (rows["never"]["target_reached"], rows["never"]["target_seconds"]) == ("no", "")
    page = results.report()
    for words in (
        "reached by 2 of 2 runs, first by <b>fast</b>",
        "<b>Target, validation loss ≤ 1e-09:</b> not reached.",
        "not reached<small>validation loss ≤ 1e-09</small>",
    ):
        assert words in page


# ---- given weights -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_starts_from_anothers_weights(era5: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second run's learning rate is too small to change a bit, so this run validates the given weights."""
    first = era5("first", training={"epochs": 1})
    given = str(first / "model.pt")
    second = era5("second", training={"epochs": 1, "weights": given}, optimizer={"lr": 1e-30}, seed=5)
    assert (second / "model.pt").read_bytes() == (first / "model.pt").read_bytes()
    assert records(second)[0]["valid_loss"] == records(first)[0]["valid_loss"]
    run = load_run(second / "config.yaml", "train")
    manifest = Manifest(kind="none", fields={}, splits={})
    elsewhere = tmp_path / "elsewhere.pt"
    elsewhere.write_bytes((first / "model.pt").read_bytes())
    prints = [run_fingerprint(run, manifest)]
    for changed in (str(elsewhere), str(first / "model_best.pt"), None):
        over = {"training": run.training.model_copy(update={"weights": changed})}
        if changed and "best" in changed:
            torch.save({"other": torch.zeros(1)}, changed)
        prints.append(run_fingerprint(run.model_copy(update=over), manifest))
    assert prints[0] == prints[1] and len(set(prints)) == 3, (
        "the fingerprint must depend on the content and not on the path"
    )
    capfd.readouterr()
    era5("third", status=2, model={"embed_dim": 8}, training={"epochs": 1, "weights": given})
    assert "first/model.pt: not the weights of this model" in error_line(capfd)
    era5("fourth", status=2, training={"epochs": 1, "weights": str(tmp_path / "none.pt")})
    assert "none.pt: no such file" in error_line(capfd)


@pytest.mark.slow
def test_a_run_starts_from_a_checkpoint(era5: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """A checkpoint folder is accepted instead of a weights file; a damaged checkpoint is refused."""
    first = era5("first", training={"epochs": 1})
    (folder,) = first.glob("checkpoints/*/step-*")
    given = {"epochs": 1, "weights": str(folder)}
    second = era5("second", training=given, optimizer={"lr": 1e-30})
    assert (second / "model.pt").read_bytes() == (first / "model.pt").read_bytes()
    (pieces,) = folder.glob("*.safetensors")
    pieces.write_bytes(pieces.read_bytes()[:-1])
    capfd.readouterr()
    era5("third", status=2, training=given)
    assert f"{pieces.name}: changed after it was written" in error_line(capfd)


@pytest.mark.parametrize("form", ["plain", "checkpoint of a wrapped model", "without counters"])
def test_published_weights_load_by_name(tmp_path: Path, form: str) -> None:
    """The files have the form of PyTorch's model collections, or of PyTorch's example of distributed training."""
    torch.manual_seed(1)
    published, model = ResNet(18, classes=7, width=8).eval(), ResNet(18, classes=7, width=8).eval()
    state: dict[str, Any] = dict(published.state_dict())
    for name in state:
        if "running" in name:
            state[name] = torch.rand_like(state[name]) + 0.5
    published.load_state_dict(state)
    if form == "without counters":
        state = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    if form == "checkpoint of a wrapped model":
        state = {
            "epoch": 3,
            "state_dict": {f"_orig_mod.module.{name}": value for name, value in state.items()},
            "best_acc1": 0.5,
        }
    torch.save(state, tmp_path / "published.pth")
    load_weights(plain(model), tmp_path / "published.pth")
    x = torch.randn(2, 3, 40, 40)
    with torch.no_grad():
        assert torch.equal(model(x), published(x))


def test_invalid_weight_files_are_refused_and_never_executed(tmp_path: Path) -> None:
    file, model = tmp_path / "w.pt", plain(ResNet(18, classes=7, width=8))

    def message(content: Any) -> str:
        torch.save(content, file)
        with pytest.raises(UserError, match=r"w\.pt: ") as caught:
            load_weights(model, file)
        assert "weights_only" not in str(caught.value), (
            "the message must not repeat PyTorch's advice to execute the file"
        )
        return str(caught.value)

    assert "not readable as weights" in message({"model": Trap(tmp_path / "executed")})
    assert not (tmp_path / "executed").exists()
    assert "contains no weights" in message([1, 2]) and "contains no weights" in message({"state_dict": {"epoch": 3}})
    state = ResNet(18, classes=9, width=8).state_dict()
    text = message({name: v for name, v in state.items() if not name.startswith("layer4")} | {"head": torch.ones(1)})
    assert "tensors of the model that the file lacks: layer4.0.conv1.weight, " in text and " …" in text
    assert "1 tensor that the model lacks: head" in text
    assert "fc.weight [9, 64] in the file, [7, 64] in the model" in text
    file.write_bytes(b"half a file")
    with pytest.raises(UserError, match="not readable as weights"):
        read_weights(file)


# ---- evaluate ------------------------------------------------------------------------------------------


def test_evaluate_gives_the_values_of_the_training(
    tmp_path: Path,
    cosmo_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, manifest = tmp_path / "results/plans/p/r", cosmo_data / "manifest.json"
    settings = config.merge(copy.deepcopy(COSMO_RUN), {"training": {"epochs": 3, "keep_best": "l1"}})
    make_run(folder, "cosmo_unet", settings, COSMO)
    assert train(folder, manifest) == 0
    best = provenance(folder)["best"]["epoch"]

    def scores(*arguments: object) -> dict[str, Any]:
        capfd.readouterr()
        assert stage("evaluate", *arguments, "--json") == 0
        (found,) = json.loads(capfd.readouterr().out)
        return found

    for which, epoch in (("last", 3), ("best", best)):
        found, record = scores(folder, "--weights", which, "--manifest", manifest), records(folder)[epoch - 1]
        assert (found["loss"], found["metrics"]) == (record["valid_loss"], record["metrics"])
        assert (found["split"], found["samples"]) == ("valid", 8)
    # Compare with a plain loop over samples of data that no training used.
    model = UNet3D(4, 5, widths=(4, 8)).eval()
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    samples = Crops(Manifest.read(manifest), "test", CropSamples(kind="crops", crop=16, valid=8), 0)
    with torch.no_grad():
        losses = [
            float(l1(model(torch.from_numpy(x)[None]), torch.from_numpy(y)[None])[0])
            for x, y in (samples.read(0, index) for index in range(samples.size))
        ]
    (tmp_path / "results/data").mkdir()
    (tmp_path / "results/data/data").symlink_to(cosmo_data)
    monkeypatch.chdir(tmp_path)
    found = scores("p.r", "--split", "test", "--out", tmp_path / "scores.json")
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-6) != records(folder)[-1]["valid_loss"]
    assert json.loads((tmp_path / "scores.json").read_text()) == [found]
    assert stage("evaluate", "p.r") == 0
    out = capfd.readouterr().out
    assert out.startswith(f"p.r: {Path('results/plans/p/r/model.pt')}, 8 samples of valid") and "loss (L1)" in out
    assert not caplog.text
    torch.save({name: value + 1 for name, value in model.state_dict().items()}, folder / "model.pt")
    assert stage("evaluate", "p.r") == 0
    assert "model.pt: the loss is" in caplog.text and "the weights are those of another run" in caplog.text
    (folder / "model_best.pt").unlink()
    assert stage("evaluate", "p.r", "--weights", "best") == 2
    assert "model_best.pt: no such weights" in error_line(capfd)
    assert stage("evaluate", "p.s") == 2
    assert "p.s: no such run; expected PLAN.RUN" in error_line(capfd)


@pytest.mark.parametrize("valid", [None, 3])
def test_evaluate_measures_baselines_on_the_given_split(
    era5: Make, era5_data: Path, tmp_path: Path, valid: int | None
) -> None:
    """`dlscale evaluate` computes baselines, such as persistence, on the evaluated split.

    The test split is the file of 2002; the baselines on the validation file have other values.
    """
    data = tmp_path / "data"
    data.mkdir()
    for path in era5_data.iterdir():
        (data / path.name).symlink_to(path)
    manifest = json.loads((era5_data / "manifest.json").read_text())
    manifest["splits"]["test"] = [file for file in manifest["splits"]["train"] if "2002" in file["path"]]
    (data / "manifest.json").unlink()
    Manifest.model_validate(manifest).write(data / "manifest.json")
    folder = era5(training={"epochs": 1}, samples={"valid": valid})
    assert stage("evaluate", folder, "--manifest", data / "manifest.json", "--split", "test", "--out", data / "s") == 0
    (found,) = json.loads((data / "s").read_text())

    with h5py.File(era5_data / "train" / "2002.h5") as file:
        states = file["fields"][:].astype(np.float64)
    w = np.cos(np.radians(manifest["extra"]["latitude"]))
    w = (w / w.mean())[:, None]
    pairs = len(states) - 1
    chosen = np.arange(pairs) if valid is None else evenly(pairs, valid)
    for name, answer in naive_answers(era5_data, states, 1, w).items():
        rmse = np.sqrt((w * (answer - states[1:])[chosen] ** 2).mean(axis=(0, 2, 3)))
        for channel, expected in zip(manifest["fields"]["fields"]["channels"], rmse, strict=True):
            assert found["metrics"][f"{name}_rmse/{channel}"] == pytest.approx(expected, rel=1e-4), name
    assert found["metrics"]["persistence_rmse/u10"] != pytest.approx(
        records(folder)[0]["metrics"]["persistence_rmse/u10"], rel=1e-3
    )


# ---- trackers ------------------------------------------------------------------------------------------


#: Secret in the form of a Weights & Biases key, because the client checks the form.
SECRET = "0123456789abcdef0123456789abcdef76543210"


def logged(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run: a LevelDB log after a header of 7 bytes, with protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, begun = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # the header of a record is never split over two blocks
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        begun += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of a record
            yield Record.FromString(begun)
            begun = b""


@pytest.mark.slow
def test_wandb_offline_has_the_numbers_of_metrics_jsonl(era5: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline run has each epoch of metrics.jsonl once, even after an interruption.

    The run contains no environment variables.
    """
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("SOME_TOKEN", "a-secret-that-nobody-shall-read")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    settings = {"epochs": 3, "trackers": ["wandb"]}
    with monkeypatch.context() as patched:
        fake_validation_losses(patched, [3.0, 2.0], stop=2)
        era5(status=130, training=settings)
    with monkeypatch.context() as patched:
        fake_validation_losses(patched, [2.5])
        folder = era5(training=settings)
    left = [process.name() for process in psutil.Process().children(recursive=True)]
    assert not any("wandb" in name for name in left), "the file is complete only after the writing process has ended"
    assert provenance(folder)["resumed_from_step"] == 20
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = list(logged(file))
    items = [record.history.item for record in found if record.HasField("history")]
    rows = [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in items]
    epochs = [row for row in rows if "valid_loss" in row]
    assert [row["_step"] for row in epochs] == [10, 20, 30]
    for row, expected in zip(epochs, records(folder), strict=True):
        for name in ("epoch", "step", "samples", "train_loss", "valid_loss", "learning_rate", "samples_per_second"):
            assert row[name] == expected[name], name
        for name, value in expected["metrics"].items():
            assert row[f"valid/{name}"] == value, name
    (image,) = folder.glob("wandb/offline-run-*/files/media/images/valid/prediction*.png")
    assert image.read_bytes() == (folder / "prediction.png").read_bytes()
    (run,) = [record.run for record in found if record.HasField("run")]
    config_ = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config_["optimizer"]["lr"] == 1e-3 and config_["study"] == "era5_vit"
    everything = b"".join(path.read_bytes() for path in folder.rglob("wandb/**/*") if path.is_file())
    assert b"a-secret-that-nobody" not in everything and SECRET.encode() not in everything
    assert not run.host and not run.HasField("git")


def test_a_missing_tracker_package_is_reported(
    era5: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    era5("plain", training={"epochs": 1})
    capfd.readouterr()
    era5(status=2, training={"epochs": 1, "trackers": ["wandb"]})
    assert "training.trackers: wandb is not installed. Run pip install 'dlscale[trackers]'" in error_line(capfd)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'dlscale[trackers]'")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.slow
def test_mlflow_has_one_run_with_the_numbers_of_tensorboard(
    mlflow: Any, era5: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow has one run with TensorBoard's numbers after an interruption, a resumed training and a third call.

    MLflow's client reads the numbers from a database.
    """
    settings = {"epochs": 3, "trackers": ["mlflow"]}
    with monkeypatch.context() as patched:
        fake_validation_losses(patched, [3.0, 2.0], stop=2)
        era5(status=130, training=settings)
    with monkeypatch.context() as patched:
        fake_validation_losses(patched, [2.5])
        folder = era5(training=settings)
    era5(training=settings)  # already complete, so no further step is trained
    assert provenance(folder)["resumed_from_step"] == 30
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name(folder.parent.name).experiment_id])
    assert (run.info.run_name, run.info.status) == (f"{folder.parent.name}.run", "FINISHED")
    expected = flat(load_run(folder / "config.yaml", "train").model_dump(mode="json"))
    assert run.data.params == {key: str(value) for key, value in expected.items()}
    assert run.data.params["optimizer.lr"] == "0.001" and run.data.params["study"] == "era5_vit"
    board = scalars(folder)
    assert {"loss/train", "learning_rate", "valid/rmse/u10", "best/valid_loss"} < run.data.metrics.keys() < board.keys()
    for tag in run.data.metrics:
        logged = client.get_metric_history(run.info.run_id, tag)
        assert len(logged) == len(board[tag]), f"{tag}: each epoch must be logged once"
        assert {each.step: each.value for each in logged} == pytest.approx(board[tag], rel=1e-6), tag


def test_mlflow_accepts_any_name(mlflow: Any, tmp_path: Path) -> None:
    """MLflow logs channels of any name, because special characters are replaced."""
    losses = {"learning_rate": 1.0, "train_loss": 1.0, "valid_loss": 1.0}
    times = {"epoch_seconds": 1.0, "samples_per_second": 1.0}
    epoch = Epoch(epoch=1, step=1, samples=1, **losses, **times, metrics={"rmse/T (K), 95 %": 2.0})  # type: ignore[arg-type]
    trackers.Mlflow(tmp_path / "p/run", {"scale": {"T (K)": 3}}, [epoch], tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'p/mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.data.metrics["valid/rmse/T _K__ 95 _"] == 2 and run.data.params == {"scale.T _K_": "3"}


def test_an_unreachable_mlflow_server_is_reported(
    mlflow: Any, era5: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{SECRET}@127.0.0.1:{deaf.getsockname()[1]}")
        era5(status=2, training={"epochs": 1, "trackers": ["mlflow"]})
    told = error_line(capfd)
    assert "training.trackers: mlflow: " in told and "or remove mlflow" in told and SECRET not in told


@pytest.mark.slow
def test_an_mlflow_database_that_is_lost_for_an_epoch(
    mlflow: Any, era5: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If MLflow's database is locked for an epoch, the training continues, and logs all epochs at the end."""
    database = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)

    def losses() -> Iterator[float]:
        yield 3.0
        database.execute("BEGIN EXCLUSIVE")
        yield 2.0
        database.execute("ROLLBACK")
        yield 1.0

    fake_validation_losses(monkeypatch, losses())
    folder = era5(training={"epochs": 3, "trackers": ["mlflow"]})
    assert [line for line in caplog.messages if "training.trackers: mlflow" in line and "locked" in line]
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name(folder.parent.name).experiment_id])
    logged = client.get_metric_history(run.info.run_id, "loss/valid")
    assert {each.step: each.value for each in logged} == {10: 3.0, 20: 2.0, 30: 1.0}


def test_a_process_counts_only_the_cpus_to_which_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two of four GPUs of a complete node with 128 CPUs, srun binds each process to 32 CPUs."""
    run = SimpleNamespace(threads=None, cpus=None, processes=Geometry(gpus_per_node=2))
    monkeypatch.setattr("dlscale.train.build.os.sched_getaffinity", lambda pid: set(range(32)))
    assert [build.own_cores(run, threads) for threads in (128, 32, 1, None)] == [32, 16, 1, None]
    assert build.own_threads(SimpleNamespace(**{**vars(run), "threads": 64}), 128) == 64
    assert build.own_cores(SimpleNamespace(**{**vars(run), "cpus": 8}), 128) == 8
