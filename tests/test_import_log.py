"""`dlscale import`: other programs' TensorBoard logs next to dlscale's runs, on the page and in TensorBoard."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto
from torch.utils.tensorboard import SummaryWriter

from dlscale.config.resolve import study_files
from dlscale.core.errors import UserError
from dlscale.extensions.logs.events import scalar
from dlscale.extensions.logs.reference import Reference
from dlscale.extensions.programs import logs
from dlscale.report.curves import Over
from tests.conftest import COSMO, COSMO_RUN, error_line, make_run, stage, train
from tests.test_report import Results

START = 1_600_000_000.0
Values = dict[str, float]


def write(path: Path, rows: list[tuple[int, float, Values]], start: float = START, make: Any = None) -> Path:
    """Write an event file from (step, seconds since `start`, values); `make(tag, value)` returns a summary value."""
    make = make or (lambda tag, value: Summary.Value(tag=tag, simple_value=value))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=start - 30, file_version="brain.Event:2").SerializeToString())
        for step, seconds, values in rows:
            for tag, value in values.items():
                event = Event(wall_time=start + seconds, step=step, summary=Summary(value=[make(tag, value)]))
                writer.write(event.SerializeToString())
    return path


def as_tensor(tag: str, value: float) -> Summary.Value:
    """Return a scalar in the form that TensorFlow 2 writes."""
    return Summary.Value(tag=tag, tensor=TensorProto(dtype=DT_FLOAT, float_val=[value]))


def unet(path: Path, **more: Any) -> Path:
    """Write a log of 3 epochs of 8 steps, like the program of SC22's U-Net."""
    rows: list[tuple[int, float, Values]] = [(0, 0.0, {"Loss/train": 0.5, "Loss/valid": 0.5})]
    for epoch in (1, 2, 3):
        rows.append((8 * epoch, 10.0 * epoch, {"Loss/train": 0.4 / epoch, "Learning Rate": 1e-3}))
        rows.append((8 * epoch, 10.0 * epoch + 1, {"Loss/valid": 0.25 / epoch}))
    return write(path, rows, **more)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the results folder, `results` in the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def bring(events: Path, *more: object, name: str = "theirs", study: str = "cosmo_unet") -> int:
    return stage("import", events, "--as", name, "--study", study, *more)


def test_a_log_becomes_a_reference(results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = unet(tmp_path / "theirs" / "events.out.tfevents.1.host.2.0")
    assert bring(log.parent, "--batch-size", 64, "--label", "Theirs, A100") == 0
    said = capfd.readouterr().out
    assert "loss/train (4 points), loss/valid (4 points), learning_rate (3 points)" in said
    assert "not drawn" not in said
    found = Reference.read(results / "references/theirs/reference.json")
    assert (found.label, found.study, found.batch_size) == ("Theirs, A100", "cosmo_unet", 64)
    expected: dict[Over, list[tuple[float, float]]] = {
        "step": [(0, 0.5), (8, 0.25), (16, 0.125), (24, 0.25 / 3)],
        "samples": [(0, 0.5), (512, 0.25), (1024, 0.125), (1536, 0.25 / 3)],
        "time": [(0, 0.5), (11, 0.25), (21, 0.125), (31, 0.25 / 3)],
    }
    for over, curve in expected.items():
        assert points(found, "loss/valid", over) == [pytest.approx(point) for point in curve]
    assert (results / "references/theirs" / log.name).read_bytes() == log.read_bytes()


def test_numbers_as_tensors_and_files_in_turn(results: Path, tmp_path: Path) -> None:
    """Scalars in TensorFlow 2's form are read. Steps that a restarted program repeats count once."""
    folder = tmp_path / "theirs"
    write(folder / "events.out.tfevents.1.a", [(n, n, {"Loss/valid": 1.0}) for n in (8, 16, 24)], make=as_tensor)
    write(folder / "events.out.tfevents.2.a", [(n, 90 + n, {"Loss/valid": 0.5}) for n in (24, 32)])
    assert bring(folder) == 0
    found = Reference.read(results / "references/theirs/reference.json")
    # Without a step 0, time counts from the beginning of the first file, 30 s before `START`.
    assert found.curves == {"loss/valid": [(8, 38, 1.0), (16, 46, 1.0), (24, 144, 0.5), (32, 152, 0.5)]}


@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "int32", "int64"])
def test_numbers_of_each_type_count(kind: str) -> None:
    assert scalar(Summary.Value(tensor=make_tensor_proto(np.array(3, kind)))) == 3.0
    assert scalar(Summary.Value(tensor=make_tensor_proto(np.array([3], kind)))) is None
    assert scalar(Summary.Value(tensor=make_tensor_proto("3"))) is None


def test_epochs_and_per_cent(results: Path, tmp_path: Path) -> None:
    rows: list[tuple[int, float, Values]] = [(n, n, {"Top1/val": 20.0 * n, "Loss/val": 1 / n}) for n in (1, 2)]
    log = write(tmp_path / "events.out.tfevents.1", rows)
    assert bring(log, "--epoch-samples", 1000, "--batch-size", 50, study="imagenet_resnet50") == 0
    found = Reference.read(results / "references/theirs/reference.json")
    assert points(found, "valid/top1", "step") == [(20, pytest.approx(0.2)), (40, pytest.approx(0.4))]
    assert points(found, "loss/valid", "samples") == [(1000, 1.0), (2000, 0.5)]


@pytest.mark.parametrize(
    ("steps", "first", "message"),
    [
        (
            {"Val": (0, 1, 2), "Train": (0, 1, 2)},
            1,
            "the log counts epochs from 0: point 0 is drawn after the first",
        ),
        ({"Val": (0, 1, 2), "Train": ()}, 1, "the log counts epochs from 0"),
        ({"Val": (1, 3), "Train": (0, 1, 2, 3)}, 2, "the log counts epochs from 0"),
        ({"Val": (0, 1, 2), "Train": (1, 2)}, 0, "point 0 is drawn as the untrained model\n"),
        ({"Val": (1, 2), "Train": (1, 2)}, 1, ""),
    ],
)
def test_epochs_from_zero_end_after_the_first_one(
    results: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    steps: dict[str, tuple[int, ...]],
    first: int,
    message: str,
) -> None:
    """In a log that counts epochs from 0, point 0 is drawn after the first epoch.

    Epoch e ends 100 (e + 1) s after the writer began.
    """
    rows = [(step, 100.0 * (step + 1) - 30, {tag: 1.0}) for tag, every in steps.items() for step in every]
    log = write(tmp_path / "events.out.tfevents.1", rows)
    more = ["--counts", "epoch", "--epoch-samples", 500, "--tag", "Val=loss/valid", "--tag", "Train=loss/train"]
    assert bring(log, *more) == 0
    printed = capfd.readouterr().out
    assert message in printed if message else "point 0" not in printed
    found = Reference.read(results / "references/theirs/reference.json")
    shift = int("from 0" in printed)
    assert points(found, "loss/valid", "samples") == [(500 * (step + shift), 1.0) for step in steps["Val"]]
    assert points(found, "loss/valid", "samples")[0][0] == 500 * first
    begin = 0 if first else 100  # the writer's start, or the time of point 0 (untrained model)
    assert [x for x, _ in points(found, "loss/valid", "time")] == [100 * (step + 1) - begin for step in steps["Val"]]


def test_point_0_of_a_published_program_is_the_untrained_model(
    results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "events.out.tfevents.1", [(n, n, {"Loss/val": 1.0}) for n in (0, 1)])
    assert bring(log, "--epoch-samples", 1000, study="imagenet_resnet50") == 0
    assert "--counts epoch" in capfd.readouterr().out
    found = Reference.read(results / "references/theirs/reference.json")
    assert points(found, "loss/valid", "samples") == [(0, 1.0), (1000, 1.0)]


# ---- points that are left out, and why --------------------------------------------------------------------


def curve(*steps: int, value: float = 1.0) -> list[tuple[int, float, Values]]:
    return [(step, float(number), {"Loss/valid": value}) for number, step in enumerate(steps)]


#: Points of each file of a log, kept values, and words of the message, by name of the case.
LOGS: dict[str, tuple[dict[str, Any], list[float], str]] = {
    "two trainings": (
        {"1": curve(*range(0, 101, 10)), "2": curve(*range(0, 81, 10), value=2.0)},
        [2.0] * 9,
        "loss/valid: 11 points left out, of an earlier training",
    ),
    "a resumed training": (
        {"1": curve(0, 10, 20, 30), "2": curve(20, 30, 40, value=2.0)},
        [1.0, 1.0, 2.0, 2.0, 2.0],
        "loss/valid: 2 points left out, of an abandoned try",
    ),
    "a resumed training that logs other steps": (
        {"1": curve(*range(0, 91, 10)), "2": curve(*range(55, 106, 10), value=2.0)},
        [1.0] * 6 + [2.0] * 6,
        "loss/valid: 4 points left out, of an abandoned try",
    ),
    "two trainings in one file": (
        {"1": [*curve(*range(10)), *[(step, 40.0 + step, {"Loss/valid": 2.0}) for step in range(5)]]},
        [2.0] * 5,
        "loss/valid: 10 points left out, of an earlier training",
    ),
    "an evaluation beside the training": (
        {"1": [(step, float(n), {"Loss/valid": float(n)}) for n, step in enumerate((0, 10, 20, 15, 30, 25, 40))]},
        [0.0, 1.0, 3.0, 2.0, 5.0, 4.0, 6.0],
        "",
    ),
    "a last point of another writer": (
        {"1": curve(10, 20, 30), "2": curve(0, value=2.0), "3": curve(30, value=3.0)},
        [2.0, 1.0, 1.0, 3.0],
        "loss/valid: 1 point left out, of a step that is logged again later",
    ),
    "no steps": (
        {"1": curve(*[0] * 11)},
        [1.0],
        "loss/valid: 10 points left out, because all points have the same step",
    ),
    "bad steps": (
        {"1": [*curve(0, 1), (-1, 1.0, {"Loss/valid": 7.0}), (2, math.nan, {"Loss/valid": 8.0})]},
        [1.0, 1.0],
        "loss/valid: 2 points left out, with a negative step or an impossible time",
    ),
    "all": ({"1": curve(0, 1), "2": curve(2, 3)}, [1.0] * 4, ""),
}


@pytest.mark.parametrize("log", LOGS)
def test_points_left_out_are_counted(
    results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], log: str
) -> None:
    files, kept, message = LOGS[log]
    for number, (name, rows) in enumerate(files.items()):
        write(tmp_path / f"log/events.out.tfevents.{name}", rows, start=START + 1000 * number)
    (tmp_path / "log/events.out.tfevents.9").touch()  # of a writer that was killed before its first event
    assert bring(tmp_path / "log") == 0
    printed = capfd.readouterr().out
    assert printed.count("left out") == bool(message) and message in printed
    found = Reference.read(results / "references/theirs/reference.json").curves["loss/valid"]
    assert [value for _, _, value in found] == kept


@pytest.mark.parametrize("first", [[], curve(*range(10, 101, 10))])
def test_time_begins_with_the_first_file_that_counts(
    results: Path, tmp_path: Path, first: list[tuple[int, float, Values]]
) -> None:
    """Time begins with the first file that has valid points.

    A try that ended before its first point does not count, nor does a training that a later training replaces.
    """
    write(tmp_path / "log/events.out.tfevents.1", [*first, (1, 0.0, {"note": 1.0})])
    write(tmp_path / "log/events.out.tfevents.2", curve(10, 20), start=START + 5000)
    assert bring(tmp_path / "log") == 0
    found = Reference.read(results / "references/theirs/reference.json").curves["loss/valid"]
    assert [seconds for _, seconds, _ in found] == [30.0, 31.0]  # the file's first event is 30 s before its first point


@pytest.mark.parametrize(("seconds", "is_wrong"), [(-500.0, True), (-30.0, False)])
def test_a_clock_that_was_set_back_is_reported(
    results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], seconds: float, is_wrong: bool
) -> None:
    """The values are right, but points would be drawn before the start of the training."""
    write(tmp_path / "log/events.out.tfevents.1", curve(0, 10, 20))
    write(tmp_path / "log/events.out.tfevents.2", curve(30, 40), start=START + seconds)
    assert bring(tmp_path / "log") == 0
    assert ("loss/valid: the time decreases at step 30, so" in capfd.readouterr().out) == is_wrong


@pytest.mark.parametrize("every", [1, 25, 34])
def test_validations_by_epoch_among_iterations_are_named(
    results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], every: int
) -> None:
    """Validations that count epochs are reported if the training counts iterations.

    Otherwise both would be drawn over the same axis.
    """
    rows: list[tuple[int, float, Values]] = [(step, float(step), {"Loss/train": 1.0}) for step in range(1, 101)]
    rows += [(every * number, 25.0 * number, {"Loss/valid": 1.0}) for number in range(1, 5)]
    write(tmp_path / "log/events.out.tfevents.1", sorted(rows, key=lambda row: row[1]))
    assert bring(tmp_path / "log", "--counts", "step") == 0
    assert ("loss/valid: the last step is 4, " in capfd.readouterr().out) == (every == 1)


def test_links_to_logs_are_followed(results: Path, tmp_path: Path) -> None:
    """Links that a user names are followed, unlike links in a results folder, which another user may have made."""
    path = write(tmp_path / "elsewhere/events.out.tfevents.1", curve(0, 1))
    for link, target in ((tmp_path / "log/events.out.tfevents.1", path), (tmp_path / "folder", path.parent)):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target)
    for number, given in enumerate((tmp_path / "log", tmp_path / "log" / path.name, tmp_path / "folder")):
        assert bring(given, name=f"theirs{number}") == 0


def add(folder: Path, steps: range, value: float, **more: Any) -> None:
    """Log like PyTorch's writer; the name of the new file sorts after the names of the existing files."""
    with SummaryWriter(str(folder), **more) as writer:
        for step in steps:
            writer.add_scalar("Loss/valid", value, step)
    new = next(file for file in folder.glob("events.*") if not file.name.endswith(".kept"))
    new.rename(folder / f"events.out.tfevents.{len([*folder.glob('*.kept')])}.kept")


@pytest.mark.parametrize("purge", [None, 0, 55, 60, 121])
def test_abandoned_points_equal_tensorboards(
    results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], purge: int | None
) -> None:
    add(tmp_path / "log", range(0, 121, 10), 1.0)
    add(tmp_path / "log", range(55, 86, 10), 2.0, purge_step=purge)
    truth = EventAccumulator(str(tmp_path / "log")).Reload().Scalars("Loss/valid")
    expected = sorted((event.step, event.value) for event in truth)
    assert len(expected) == {None: 17, 0: 4, 55: 10, 60: 10, 121: 17}[purge]
    assert bring(tmp_path / "log") == 0
    found = Reference.read(results / "references/theirs/reference.json").curves["loss/valid"]
    # TensorBoard keeps abandoned points unless the writer has `purge_step`. An imported curve never contains abandoned
    # points.
    counts = expected[:6] + [(step, 2.0) for step in range(55, 86, 10)] if len(expected) == 17 else expected
    assert [(step, value) for step, _, value in found] == counts
    void, printed = 17 - len(counts), capfd.readouterr().out
    assert f"loss/valid: {void} points left out, of an abandoned try" in printed
    seen = logs.values(tmp_path / "log", {"Loss/valid": "loss/valid"}, logs.Start(0.0))["loss/valid"]
    assert sorted((step, value) for _, step, value in seen) == expected
    # TensorBoard treats a folder inside the log as another run. `_rows` keeps abandoned steps, which count for speed.
    add(tmp_path / "log/beside", range(3), 3.0, purge_step=0)
    with pytest.raises(UserError, match=r"Loss/valid is in several folders: \., beside"):
        logs.values(tmp_path / "log", {"Loss/valid": "loss/valid"}, logs.Start(0.0))
    assert len(logs._rows(tmp_path / "log", logs.Start(0.0))) == 17 + 3


def test_points_of_two_writers_at_the_same_time_are_joined(results: Path, tmp_path: Path) -> None:
    for number, steps in enumerate((range(1, 20, 2), range(2, 21, 2))):
        rows: list[tuple[int, float, Values]] = [(step, float(step), {"Loss/valid": 1.0 + number}) for step in steps]
        write(tmp_path / f"log/events.out.tfevents.{number}", rows)
    assert bring(tmp_path / "log") == 0
    found = Reference.read(results / "references/theirs/reference.json").curves["loss/valid"]
    assert [(step, value) for step, _, value in found] == [(step, 2.0 - step % 2) for step in range(1, 21)]


@pytest.mark.parametrize("valid", [{}, {600: 0.5}, {600: 0.5, 700: 0.4}], ids=["none", "one", "two"])
@pytest.mark.parametrize("first", [520, 0], ids=["resumed", "from the start"])
def test_a_curve_with_few_points_after_a_restart_has_none_of_the_abandoned_try(
    results: Path, tmp_path: Path, first: int, valid: dict[int, float]
) -> None:
    """The curve of the training shows that the program resumed, or began again; an evaluator's log stays complete."""
    train = [(step, step / 2, {"train": 1.0}) for step in range(0, 1061, 20)]
    write(
        tmp_path / "log/events.out.tfevents.1", [*train, *((s, s / 2, {"valid": 1.0}) for s in range(100, 1001, 100))]
    )
    write(tmp_path / "log/events.out.tfevents.2", [(s, s / 3, {"other": 3.0}) for s in range(0, 2001, 100)])
    more = [(step, 5000 + step / 2, {"train": 2.0}) for step in range(first, 741, 20)]
    again = [(step, 5000 + step / 2, {"valid": value}) for step, value in valid.items()]
    write(tmp_path / "log/events.out.tfevents.3", [*more, *again])
    tags = ("--tag", "train=loss/train", "--tag", "valid=loss/valid", "--tag", "other=samples_per_second")
    assert bring(tmp_path / "log", *tags, "--counts", "step") == 0
    found = {
        name: [(step, value) for step, _, value in points]
        for name, points in Reference.read(results / "references/theirs/reference.json").curves.items()
    }
    kept = [(step, 1.0) for step in range(0, first, 20)]
    assert found["loss/train"] == kept + [(step, 2.0) for step in range(first, 741, 20)]
    expected = [(step, 1.0) for step in range(100, first, 100)] + [*valid.items()]
    assert found.get("loss/valid", []) == [(step, pytest.approx(value)) for step, value in expected]
    assert found["samples_per_second"] == [(step, 3.0) for step in range(0, 2001, 100)]


def test_the_times_of_a_second_training_in_one_file_begin_with_it(results: Path, tmp_path: Path) -> None:
    second = [(step, 40.0 + step, {"Loss/valid": 2.0}) for step in range(5)]
    write(tmp_path / "log/events.out.tfevents.1", [*curve(*range(10)), *second])
    assert bring(tmp_path / "log") == 0
    found = Reference.read(results / "references/theirs/reference.json").curves["loss/valid"]
    assert [seconds for _, seconds, _ in found] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_log_of_abandoned_points_only_is_refused(
    results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    add(tmp_path / "log", range(3), 1.0)
    add(tmp_path / "log", range(0), 1.0, purge_step=0)
    assert bring(tmp_path / "log") == 2
    assert "all points are of an abandoned try" in error_line(capfd)


def test_thinning_of_a_long_curve_is_reported(results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "events.out.tfevents.1", curve(*range(9001)))
    assert bring(tmp_path / "events.out.tfevents.1", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["points"] == {"loss/valid": 3001}
    (dropped,) = found["dropped"]["loss/valid"].values()
    assert dropped == 9001 - 3001


def test_folders_below_are_named(results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """If a folder has no scalars, the message names its subfolders with scalars.

    Keras and PyTorch's add_scalars write such folders.
    """
    for part in ("train", "validation"):
        unet(tmp_path / "keras" / part / "events.out.tfevents.1")
    assert bring(tmp_path / "keras") == 2
    folders = ", ".join(str(tmp_path / "keras" / part) for part in ("train", "validation"))
    assert f"event files are in {folders}: import each" in error_line(capfd)
    write(tmp_path / "keras/events.out.tfevents.1", [(1, 1.0, {})])
    with (tmp_path / "keras/events.out.tfevents.1").open("wb") as file:
        RecordWriter(file).write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
    assert bring(tmp_path / "keras") == 2
    assert f"no scalars; event files are in {folders}" in error_line(capfd)
    (tmp_path / "empty").mkdir()
    assert bring(tmp_path / "empty") == 2
    assert "empty: no event file in this folder" in error_line(capfd)


# ---- damaged and hostile ------------------------------------------------------------------------------------


def flipped(content: bytes) -> bytes:
    """Change one byte of the second record."""
    start = content.index(b"Loss/train")
    return content[:start] + b"l" + content[start + 1 :]


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda file: file.write_bytes(b""), "has no events; expected an event file"),
    "text": (
        lambda file: file.write_text("epoch 1: loss 0.5\n" * 9),
        "not an event file of TensorBoard (it begins with b'epoch 1: los'",
    ),
    "csv": (lambda file: file.write_text("step,loss\n0,1.0\n"), "PyTorch's SummaryWriter.add_scalar(tag, value, step)"),
    "trainer_state.json": (lambda file: file.write_text('{"log_history": []}'), "not an event file of TensorBoard"),
    "short": (lambda file: file.write_text("{}"), "not an event file of TensorBoard, or cut short (b'{}')"),
    "damaged later": (lambda file: file.write_bytes(flipped(file.read_bytes())), "record 2 is damaged;"),
    "missing": (lambda file: file.unlink(), "no such file"),
    "other tags": (lambda file: write(file, [(1, 1.0, {"accuracy": 1.0})]), "it has accuracy. Name its tags: --tag"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_message(results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str) -> None:
    log = unet(tmp_path / "events.out.tfevents.1")
    change, message = DAMAGES[damage]
    change(log)
    assert bring(log) == 2
    line = error_line(capfd)
    assert message in line and str(log) in line
    assert not list(results.glob("references/*")), "a reference must be complete or missing"


def test_a_tensor_larger_than_memory_is_not_made(results: Path, tmp_path: Path) -> None:
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=2**40)])

    def bomb(tag: str, value: float) -> Summary.Value:
        return Summary.Value(tag=tag, tensor=TensorProto(dtype=DT_FLOAT, tensor_shape=shape, float_val=[value]))

    rows: list[tuple[int, float, Values]] = [(1, 1.0, {"Loss/valid": 1.0})]
    write(tmp_path / "log" / "events.out.tfevents.1", rows, make=bomb)
    nowhere = [(2, math.nan, {"Loss/valid": 7.0}), (-3, 1.0, {"Loss/valid": 8.0}), (4, 1.5e308, {"Loss/valid": 9.0})]
    write(tmp_path / "log" / "events.out.tfevents.2", nowhere)
    unet(tmp_path / "log" / "events.out.tfevents.3")
    assert bring(tmp_path / "log") == 0
    curve = Reference.read(results / "references/theirs/reference.json").curves["loss/valid"]
    assert [step for step, _, _ in curve] == [0, 8, 16, 24]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--as", "../theirs"], "name: got '../theirs'; expected 1 to 64 letters"),
        (["--study", "cosmo_unit"], "--study: no study is called 'cosmo_unit' (did you mean 'cosmo_unet'?)"),
        (["--study", "mnist_cnn"], "does not declare the tags of a log"),
        (["--batch-size", 0], "batch_size: got 0; expected greater than or equal to 1"),
        (["--tag", "Loss"], "--tag: Loss: expected THEIRS=OURS"),
        (
            ["--tag", "a=loss/valid", "--tag", "b=loss/valid"],
            "--tag: b=loss/valid: another --tag has the same",
        ),
        (["--tag", "a=loss/vald"], "no quantity is called 'loss/vald' (did you mean 'loss/valid'?)"),
    ],
)
def test_mistakes(
    results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], more: list[object], message: str
) -> None:
    assert bring(unet(tmp_path / "events.out.tfevents.1"), *more) == 2 and message in error_line(capfd)


def test_plans_of_another_study_are_refused(results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("targets: [mnist_sweep]\n")
    assert bring(unet(tmp_path / "events.out.tfevents.1"), "--plans", "mnist_sweep") == 2
    assert "--plans: mnist_sweep is a plan of study mnist_cnn, not of cosmo_unet" in error_line(capfd)


def points(reference: Reference, quantity: str, over: Over) -> list[tuple[float, float]]:
    return [(row[over], row["value"]) for row in reference.rows(quantity)]


# ---- the page -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_draws_an_imported_log_next_to_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page draws an imported log and a run on one scale, over steps, samples and seconds."""
    monkeypatch.chdir(tmp_path)
    made = Results(tmp_path / "results")
    made.run("p", "a", triplet=None, epochs=3)
    made.plan("p", {"a": "ours"}, study="era5_vit", measure=("train",))
    assert "Compared with other programs" not in made.report()
    for name, more in (("<b>", ()), ("elsewhere", ("--plans", "q"))):
        log = unet(tmp_path / name / "events.out.tfevents.1")
        number = str(len(made.references))
        assert bring(log, "--batch-size", 16, "--label", name, *more, name=f"n{number}", study="era5_vit") == 0
        made.references.append(tmp_path / f"results/references/n{number}/reference.json")
    unet(tmp_path / "other" / "events.out.tfevents.1")
    assert bring(tmp_path / "other", name="other") == 0
    made.references.append(tmp_path / "results/references/other/reference.json")
    html = made.report()
    assert "Compared with other programs" in html and "elsewhere" not in html and "&lt;b&gt;: events.out" in html
    spec = re.search(r'(?s)Compared with other programs.*?json">(.*?)</script>', html)
    rows = json.loads(spec[1])["layer"][0]["data"]["values"]
    ours, theirs = ([row for row in rows if row["run"] == run] for run in ("a · ours", "<b>"))
    assert all({"step", "samples", "time"} <= row.keys() for row in rows)
    # The run has steps 8, 16 and 24; the reference has the same steps after its step 0.
    assert [row["step"] for row in ours] == [row["step"] for row in theirs[1:]] == [8, 16, 24]
    assert max(theirs, key=lambda row: row["value"]) is theirs[0]


# ---- TensorBoard --------------------------------------------------------------------------------------------


@pytest.fixture
def beside(results: Path, tmp_path: Path, cosmo_data: Path, shared: Callable[[str], Path]) -> Path:
    """Return a results folder with a run and the imported log of SC22's U-Net."""
    folder = results / "plans" / "p" / "r"
    make_run(folder, "cosmo_unet", COSMO_RUN, COSMO)
    assert train(folder, cosmo_data / "manifest.json") == 0
    assert bring(shared("reference_runs/sc22_base"), "--batch-size", 64, name="sc22_base") == 0
    return results


@pytest.mark.slow
def test_the_published_log_and_ours_share_their_tags(beside: Path) -> None:
    """TensorBoard shows SC22's log and a run under the same tags, over iterations from step 0."""
    board = EventMultiplexer()
    board.AddRunsFromDirectory(str(beside)).Reload()
    ours, theirs = "plans/p/r/tensorboard", "references/sc22_base"
    assert {ours, theirs} <= set(board.Runs())
    tags = {run: set(board.GetAccumulator(run).Tags()["scalars"]) for run in (ours, theirs)}
    assert tags[theirs] == {"Loss/train", "Loss/valid", "Learning Rate", "Avg iters per sec"} <= tags[ours]
    for tag in ("Loss/train", "Loss/valid"):
        assert board.Scalars(ours, tag)[0].step == board.Scalars(theirs, tag)[0].step == 0
    found = Reference.read(beside / "references/sc22_base/reference.json")
    # 10 epochs of 65,536 crops took about two hours; the last validation loss is 4.84e-3.
    assert [x for x, _ in points(found, "loss/valid", "samples")] == [65536 * epoch for epoch in range(11)]
    assert points(found, "loss/valid", "step")[-1] == (10240, pytest.approx(4.84e-3, abs=1e-4))
    assert 1.5 < points(found, "loss/valid", "time")[-1][0] / 3600 < 2.5
    assert points(found, "steps_per_second", "step")[-1][1] == pytest.approx(1.34, abs=0.1)


@pytest.mark.parametrize(("gpus", "top1", "rate"), [(8, 0.763, 5735), (64, 0.751, None)])
def test_the_published_logs_of_resnet50(
    results: Path, shared: Callable[[str], Path], gpus: int, top1: float, rate: float | None
) -> None:
    log = shared(f"reference_runs/hal_resnet50_gpux{gpus}")
    arguments = ["--epoch-samples", 1_281_167, "--batch-size", 208 * gpus]
    assert bring(log, *arguments, name=f"gpux{gpus}", study="imagenet_resnet50") == 0
    found = Reference.read(results / f"references/gpux{gpus}/reference.json")
    assert len(found.curves["loss/valid"]) == 90
    figures = study_files()["imagenet_resnet50"].published
    speeds = {each.gpus: each.value for each in figures if each.metric == "validation_speed"}
    assert speeds.keys() == {2, 4, 8, 16, 32, 64}
    speed, seconds = (
        [value for _, _, value in found.curves[name]] for name in ("valid_samples_per_second", "valid_seconds_per_step")
    )
    assert statistics.median(speed[1:]) == pytest.approx(speeds[gpus], abs=0.05)
    steps = -(-50_000 // (208 * gpus))
    assert steps * statistics.median(seconds[1:]) == pytest.approx(50_000 / (speeds[gpus] or 0.0), rel=0.07)
    curve = points(found, "valid/top1", "samples")
    assert curve[-1][0] == 90 * 1_281_167 and max(value for _, value in curve) == pytest.approx(top1, abs=2e-3)
    if rate:
        rates = [value for _, value in points(found, "samples_per_second", "step")]
        assert sum(rates) / len(rates) == pytest.approx(rate, rel=0.05)
