"""The smallest study, the arrays that it reads, and the studies that `dlscale new-study` derives from it.

`test_starter_cnn.py`, which `dlscale new-study` copies into a new study, tests network and loss.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import matplotlib
import matplotlib.image
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dlscale.config import resolve
from dlscale.core.errors import UserError
from dlscale.core.files import write_text
from dlscale.data import parts, store
from dlscale.data.kind import Part
from dlscale.data.manifest import Manifest
from dlscale.data.source import ArraySource
from dlscale.data.store import Reader
from dlscale.datasets.starter.kind import KIND, StarterDataset
from dlscale.datasets.starter.source import LENGTH, open_source, pair
from dlscale.extensions.scaffold import new_study
from dlscale.extensions.scaffold.study_tests import tiny_session
from dlscale.studies.starter_cnn.model import StarterCNN
from tests.conftest import ROOT, TINY, make_dataset, make_run, records, stage, train, variables
from tests.test_parallel import train_by
from tests.test_training import bare_loop

# ---- the network -------------------------------------------------------------------------------------


def test_the_network_is_the_published_one() -> None:
    """The network has five convolutions, 64 channels and LeakyReLU; its output equals a computation layer by layer."""
    model = StarterCNN()
    assert sum(p.numel() for p in model.parameters()) == 640 + 3 * 36_928 + 577
    x = y = torch.randn(2, 1, 9, 7)
    weights = list(model.parameters())
    for layer in range(5):
        y = F.conv2d(y, weights[2 * layer], weights[2 * layer + 1], padding=1)
        y = torch.maximum(y, 0.01 * y)
    torch.testing.assert_close(model(x), y)


def test_the_published_plan_has_the_settings_of_the_scripts() -> None:
    plan = resolve.load({"targets": ["starter_published"]}).plans["starter_published"]
    for resolved in plan.values():
        run = resolved.run
        assert (run.training.epochs, run.model.hidden, run.model.layers) == (25, 64, 5)
        assert (run.optimizer.kind, run.optimizer.lr, run.schedule.kind) == ("adam", 1e-3, "cosine")
    found = {name: (each.run.geometry.world_size, each.run.batch_size) for name, each in plan.items()}
    assert found == {"single": (1, 32), "nodes": (8, 32), "test": (1, 16)}


# ---- simulated data ----------------------------------------------------------------------------------


def test_steepness_pixel_by_pixel() -> None:
    """The target, the steepness, is `LENGTH` times the norm of the central differences, one-sided at an edge."""
    field, target = pair([1, 2, 3], 11, "gradient")
    values = field.astype(float)
    for row in range(11):
        for column in range(11):
            above, below = max(row - 1, 0), min(row + 1, 10)
            left, right = max(column - 1, 0), min(column + 1, 10)
            down = (values[below, column] - values[above, column]) / (below - above)
            across = (values[row, right] - values[row, left]) / (right - left)
            assert target[row, column] == pytest.approx(LENGTH * np.hypot(down, across), rel=1e-4, abs=1e-5)


def test_no_linear_filter_explains_the_target() -> None:
    """The best linear filter of 5 x 5 pixels explains less than 3 % of the target's variance."""
    columns, answers = [], []
    for number in range(20):
        field, target = pair([7, number], 32, "gradient")
        windows = np.lib.stride_tricks.sliding_window_view(field, (5, 5)).reshape(-1, 25)
        columns.append(np.c_[windows, np.ones(len(windows))])
        answers.append(target[2:-2, 2:-2].ravel())
    x, y = np.concatenate(columns), np.concatenate(answers)
    weights, *_ = np.linalg.lstsq(x, y, rcond=None)
    assert np.var(y - x @ weights) > 0.97 * np.var(y)


def test_a_sample_depends_only_on_the_index() -> None:
    """Samples do not depend on the number of samples or on the piece; splits and seeds give different samples."""

    def images(split: str = "train", **changes: Any) -> np.ndarray:
        dataset = StarterDataset.model_validate(
            {"kind": "starter", "source": {"kind": "simulated", "size": 8, "train": 6, "valid": 6, **changes}}
        )
        opened = open_source(dataset, next(part for part in KIND.parts(dataset) if part.split == split), [])
        return np.concatenate([opened.read(start, stop)["input"] for start, stop in ((0, 2), (2, 6))])

    first = images()
    assert first.shape == (6, 1, 8, 8) and len(np.unique(first)) > 300
    np.testing.assert_array_equal(images(train=50), first)
    assert not (images("valid") == first).any() and not (images(seed=1) == first).any()
    noise = images(target="noise")
    assert noise.std() == pytest.approx(12**-0.5, abs=0.03) and 0 <= noise.min() < 0.1 and 0.9 < noise.max() < 1
    assert not (noise == first).any()


def test_a_part_runs_again_when_it_changes_and_only_then() -> None:
    def settings(split: str, source: dict[str, Any]) -> Any:
        dataset = StarterDataset.model_validate({"kind": "starter", "source": source})
        return KIND.part_settings(dataset, next(part for part in KIND.parts(dataset) if part.split == split))

    simulated = {"kind": "simulated", "train": 6, "valid": 3}
    more = {**simulated, "valid": 4}
    assert settings("train", simulated) == settings("train", more)
    assert settings("valid", simulated) != settings("valid", more)
    both = {"train": {"input": "a.npy", "target": "b.npy"}, "valid": {"input": "c.npy", "target": "d.npy"}}
    swapped = {**both, "train": {"input": "b.npy", "target": "a.npy"}}
    arrays: dict[str, Any] = {"kind": "arrays", **both}
    assert settings("train", arrays) != settings("train", {"kind": "arrays", **swapped})
    assert settings("train", arrays) != settings("train", {**arrays, "input": {"unit": "K"}})
    assert settings("valid", arrays) == settings("valid", {"kind": "arrays", **swapped})


def test_changes_of_other_files_do_not_fetch_a_file_again() -> None:
    def settings(source: dict[str, Any]) -> Any:
        dataset = StarterDataset.model_validate({"kind": "starter", "source": {"kind": "arrays", **source}})
        return KIND.raw_settings(dataset, next(iter(parts.raws(dataset).values())))

    def files(name: str) -> dict[str, str]:
        return {key: f"https://example.org/{name}-{key}.npy" for key in ("input", "target")}

    both = {split: files(split) for split in ("train", "valid")}
    assert settings(both) == settings({**both, "test": files("test"), "input": {"unit": "K"}})
    assert settings(both) != settings({**both, "train": files("other")})


# ---- arrays of the user ------------------------------------------------------------------------------


def write(path: Path, **arrays: np.ndarray) -> str:
    """Write arrays in the format of the file's suffix."""
    if path.suffix == ".npy":
        np.save(path, next(iter(arrays.values())))
    elif path.suffix == ".npz":
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    else:
        with h5py.File(path, "w") as file:
            for name, values in arrays.items():
                file.create_dataset(name.replace("__", "/"), data=values, chunks=True, compression="gzip")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".h5"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_arrays_are_stored_as_they_are(tmp_path: Path, suffix: str, pieces: int) -> None:
    """Arrays are stored unchanged in any number of pieces. `channel_axis: new` adds an axis; `shares` divide rows."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(10, 2, 6, 5)), rng.integers(0, 256, (10, 6, 5), dtype=np.uint8)
    files = {"input": write(tmp_path / f"x{suffix}", input=x), "target": write(tmp_path / f"y{suffix}", target=y)}
    source = {
        "kind": "arrays",
        "input": {"channels": ["density", "heat"], "unit": "K"},
        "target": {"channel_axis": "new"},
        "all": files,
        "shares": {"train": 0.7, "valid": 0.3},
    }
    folder = make_dataset(tmp_path / "data", {"kind": "starter", "source": source, "pieces": pieces})
    fields = Manifest.read(folder / "manifest.json").fields
    assert (fields["input"].channels, fields["input"].units) == (["density", "heat"], ["K", "K"])
    for split, rows in (("train", slice(0, 7)), ("valid", slice(7, 10))):
        stored = folder / split / f"{split}.h5"
        np.testing.assert_array_equal(Reader(stored, "input").dataset[()], x[rows].astype(np.float32))
        np.testing.assert_array_equal(Reader(stored, "target").dataset[()], y[rows, None])


def test_one_file_may_hold_both_under_any_name(tmp_path: Path) -> None:
    """One file may contain inputs and targets. Labels have no channels, and booleans are stored as bytes."""
    x, y = np.arange(24.0).reshape(4, 6) > 7, np.array([3, 1, 0, 2])
    files = {
        split: write(tmp_path / f"{split}.h5", group__x=x + (split == "valid"), y=y) for split in ("train", "valid")
    }
    both = {split: {"input": file, "target": file} for split, file in files.items()}
    source = {"kind": "arrays", "input": {"array": "group/x"}, "target": {"array": "y"}, **both}
    folder = make_dataset(tmp_path / "data", {"kind": "starter", "source": source})
    manifest = Manifest.read(folder / "manifest.json")
    assert (manifest.fields["input"].dtype, manifest.fields["target"].classes) == ("uint8", 4)
    np.testing.assert_array_equal(Reader(folder / "train/train.h5", "input").dataset[()], x)


#: Program that reads the array NAME of each FILE, and prints the messages.
READ = """
import sys
from pathlib import Path
from dlscale.core.errors import UserError
from dlscale.data.kind import Part
from dlscale.datasets.starter.kind import StarterDataset
from dlscale.datasets.starter.source import open_source
for word in sys.argv[1:]:
    file, name = word.split("=")
    both = {"all": {"input": file, "target": file}, "shares": {"train": 0.5, "valid": 0.5}}
    source = {"kind": "arrays", "input": {"array": name}, "target": {"array": name}, **both}
    try:
        dataset = StarterDataset.model_validate({"kind": "starter", "source": source})
        open_source(dataset, Part("train", "train"), [Path(file)] * 2)
    except UserError as error:
        print(error)
        kept = error  # with the variables of all functions
"""


def test_values_in_other_files_are_refused(tmp_path: Path) -> None:
    """A process that keeps the message still ends with status 0. HDF5 2 may crash at exit after virtual datasets."""
    with h5py.File(tmp_path / "parts.h5", "w") as file:
        file["x"] = np.ones((4, 3), np.float32)
    layout = h5py.VirtualLayout((4, 3), np.float32)
    layout[:] = h5py.VirtualSource("parts.h5", "x", (4, 3))
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with h5py.File(tmp_path / "group.h5", "w") as file:
        file.create_group("g").create_virtual_dataset("x", layout)
        file["soft"] = h5py.SoftLink("/g/x")
    with h5py.File(tmp_path / "external.h5", "w") as file:
        file.create_dataset("x", (4, 3), np.float32, external=[("raw.bin", 0, 48)])
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["x"] = h5py.ExternalLink("virtual.h5", "x")
    words = ["virtual.h5=x", "group.h5=g/x", "group.h5=soft", "external.h5=x", "link.h5=x"]
    command = [sys.executable, "-c", READ, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    printed = done.stdout.splitlines()
    assert len(printed) == 5 and all(
        line.startswith(f"{word.split('=')[0]}: '{word.split('=')[1]}' lies in other files")
        for word, line in zip(words, printed, strict=True)
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_integers_of_another_byte_order_are_turned(tmp_path: Path) -> None:
    """Big-endian integers are converted, because PyTorch has no types of another byte order."""
    x = np.arange(24, dtype=">i2").reshape(2, 1, 3, 4)
    path = Path(write(tmp_path / "x.npy", x=x))
    both = {split: {"input": f"{split}.npy", "target": f"{split}.npy"} for split in ("train", "valid")}
    dataset = StarterDataset.model_validate({"kind": "starter", "source": {"kind": "arrays", **both}})
    with contextlib.closing(open_source(dataset, Part("train", "train"), [path, path])) as source:
        read = source.read(0, 2)["input"]
        assert source.fields[0].dtype == "int16" and read.dtype.isnative
        np.testing.assert_array_equal(read, x)
    assert ArraySource({"x": x}).fields[0].dtype == "int16"


SHAPES: list[tuple[tuple[int, ...], dict[str, Any], tuple[int, ...], int | None]] = [
    # stored shape, settings, expected shape, channel axis
    ((6,), {}, (6,), None),
    ((6, 5), {}, (6, 5), None),
    ((6, 2), {"channels": ["u", "v"]}, (6, 2), 1),
    ((6, 1, 8, 7), {}, (6, 1, 8, 7), 1),
    ((6, 3, 8, 7), {}, (6, 3, 8, 7), 1),
    ((6, 2, 5, 8, 7), {}, (6, 2, 5, 8, 7), 1),
    ((6, 8, 5, 5), {"channels": list("abcdefgh")}, (6, 8, 5, 5), 1),
    ((6, 7, 13), {"channel_axis": "none"}, (6, 7, 13), None),
    ((6, 7, 13), {"channel_axis": "first"}, (6, 7, 13), 1),
    ((6, 7, 13), {"channel_axis": "last"}, (6, 13, 7), 1),
    ((6, 7, 13), {"channel_axis": "new"}, (6, 1, 7, 13), 1),
    ((6, 7, 13), {"channels": list("abcdefg")}, (6, 7, 13), 1),
    ((6, 8, 7, 3), {"channel_axis": "last", "channels": ["r", "g", "b"]}, (6, 3, 8, 7), 1),
    ((6, 4, 8, 8), {"channel_axis": "none"}, (6, 4, 8, 8), None),
    ((6, 5, 6, 7), {"channel_axis": "new"}, (6, 1, 5, 6, 7), 1),
    ((6, 5), {"channel_axis": "new"}, (6, 1, 5), 1),
]


def arrays(folder: Path, x: np.ndarray, info: dict[str, Any]) -> dict[str, Any]:
    """Return a dataset's settings with the inputs `x`."""
    files = dict.fromkeys(("input", "target"), write(folder / "x.npz", input=x, target=np.arange(float(len(x)))))
    shares = {"train": 0.5, "valid": 0.5}
    return {"kind": "starter", "source": {"kind": "arrays", "input": info, "all": files, "shares": shares}, "pieces": 2}


@pytest.mark.parametrize(("stored", "info", "read", "axis"), SHAPES)
def test_samples_have_the_axis_of_channels_that_is_stated(
    tmp_path: Path, stored: tuple[int, ...], info: dict[str, Any], read: tuple[int, ...], axis: int | None
) -> None:
    x = np.random.default_rng(1).normal(size=stored).astype(np.float32)
    dataset = StarterDataset.model_validate(arrays(tmp_path, x, info))
    with contextlib.closing(open_source(dataset, Part("train", "train"), [tmp_path / "x.npz"] * 2)) as source:
        field = source.fields[0]
        values = np.concatenate([source.read(start, stop)["input"] for start, stop in ((0, 4), (4, 6))])
    expected = np.moveaxis(x, -1, 1) if info.get("channel_axis") == "last" else x.reshape(read)
    assert (expected.shape, field.shape, field.channel_axis) == (read, read, axis)
    assert field.channels == tuple(info.get("channels", field.channels))
    assert len(field.channels) == (1 if axis is None else read[1])
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("axis", ["none", "last", "new"])
def test_samples_of_any_shape_are_prepared(tmp_path: Path, axis: str) -> None:
    """Samples of any shape are prepared in pieces, with statistics per channel, and get a preview."""
    x = np.random.default_rng(1).normal(size=(8, 7, 13)).astype(np.float32)
    folder = make_dataset(tmp_path / "data", arrays(tmp_path, x, {"channel_axis": axis}))
    info = Manifest.read(folder / "manifest.json").fields["input"]
    expected = {"none": x, "last": x.transpose(0, 2, 1), "new": x[:, None]}[axis][:4]
    assert info.row_shape == expected.shape[1:]
    np.testing.assert_array_equal(Reader(folder / "train/train.h5", "input").dataset[()], expected)
    mean = expected.mean(axis=(0, 2), dtype=np.float64) if axis == "last" else expected.mean(dtype=np.float64)
    np.testing.assert_allclose(info.mean, np.ravel(mean), rtol=1e-6)


@pytest.mark.parametrize(
    ("stored", "info"),
    [
        *[(shape, {}) for shape in ((4, 7, 13), (4, 1, 7), (4, 28, 28), (4, 8, 8, 3), (4, 8, 8, 8), (4, 3, 8, 3))],
        *[(shape, {}) for shape in ((4, 20, 32, 32), (4, 3, 3, 3), (4, 5, 6, 7, 8))],
        ((4, 3, 8, 3), {"channels": ["r", "g", "b"]}),  # channels may be the first or the last axis
        ((4, 7, 13), {"channels": ["density"]}),
        *[((4,), {"channel_axis": axis}) for axis in ("first", "last")],
    ],
)
def test_an_ambiguous_shape_is_refused(tmp_path: Path, stored: tuple[int, ...], info: dict[str, Any]) -> None:
    y = write(tmp_path / "y.npy", y=np.zeros(4, np.float32))
    x = write(tmp_path / "x.npy", x=np.zeros(stored, np.float32))
    for key, files in (("input", {"input": x, "target": y}), ("target", {"input": y, "target": x})):
        source = {"kind": "arrays", "all": files, "shares": {"train": 0.5, "valid": 0.5}, key: info}
        dataset = StarterDataset.model_validate({"kind": "starter", "source": source})
        with pytest.raises(UserError, match=rf"x\.npy: '{key}' has shape .* Set `source\.{key}\.channel_axis`"):
            open_source(dataset, Part("train", "train"), [Path(path) for path in files.values()])


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ({"scale_factor": 0.01}, r"has the attribute scale_factor \(0.01\), which dlscale does not apply"),
        ({"add_offset": np.float32([5.0])}, r"add_offset \(5.0\)"),
        ({"_FillValue": np.int16([-32768])}, r"_FillValue \(-32768\)"),
        ({"missing_value": -9999.0}, r"missing_value \(-9999.0\)"),
        ({"missing_value": [np.nan, -9.0]}, r"missing_value \(-9.0\)"),
        ({"scale_factor": "0.5"}, r"scale_factor \(0.5\)"),
        ({"SCALE FACTOR": 0.01}, r"SCALE FACTOR \(0.01\)"),  # AMSR2
        ({"FillValue": -999.0, "ScaleFactor": 1.0}, r"FillValue \(-999.0\)"),
        ({"missing_value": "-999"}, r"missing_value \(-999\)"),
        ({"valid_range": np.float32([150, 350])}, r"valid_range \(150.0\)"),
        ({"_Unsigned": "true"}, r"_Unsigned \(true\)"),
        ({"Slope": 0.1, "Intercept": 0.0}, r"Slope \(0.1\)"),
        ({"gain": np.float32([1.0]), "offset": 3}, r"offset \(3\)"),
        ({"scale": [1.0, 2.0]}, r"scale \(2.0\)"),
        ({"_NoData": -9999}, r"_NoData \(-9999\)"),
        ({"no_data_value": np.uint8(0)}, r"no_data_value \(0\)"),
        ({"missing": -1.0}, r"missing \(-1.0\)"),
        ({"scale": 1.0, "bias": 0, "nodata": np.nan, "missing": "none", "offsets": 4}, ""),
        ({"_Unsigned": "false"}, ""),
        ({"_FillValue": np.float32([np.nan]), "scale_factor": 1.0, "add_offset": 0, "units": "K"}, ""),
        ({"scale_factor": h5py.Empty("f4"), "_FillValue": "none"}, ""),
    ],
)
@pytest.mark.parametrize("kind", ["arrays", "prepared"])
def test_attributes_that_change_values_are_refused(
    tmp_path: Path, attribute: dict[str, Any], words: str, kind: str
) -> None:
    """Attributes that mark packed or missing values (xarray, netCDF) are refused."""
    with h5py.File(path := tmp_path / "x.h5", "w") as file:
        file["x"] = np.zeros((4, 8, 8), np.int8 if "_Unsigned" in attribute else np.float32)
        file["x"].attrs.update(attribute)
    opened = source_of if kind == "arrays" else lambda path: store.dataset(h5py.File(path), "x")
    with pytest.raises(UserError, match=f"x.h5: 'x' .*{words}") if words else contextlib.nullcontext():
        opened(path)


@pytest.mark.parametrize("written", [0, 3, 4])
@pytest.mark.parametrize("chunks", [(1, 8, 8), None])
def test_rows_that_were_never_written_are_refused(tmp_path: Path, chunks: tuple[int, ...] | None, written: int) -> None:
    """Rows that a crashed writer left unwritten are refused; without chunks, only if no row was written."""
    with h5py.File(path := tmp_path / "x.h5", "w") as file:
        values = file.create_dataset("x", (4, 8, 8), np.float32, chunks=chunks)
        values[:written] = 1.0
    refused = written < 4 if chunks else not written
    with pytest.raises(UserError, match="'x': a part was never written") if refused else contextlib.nullcontext():
        source_of(path).close()


def source_of(path: Path) -> Any:
    """Open the array `x` of a file as input and as target."""
    own = {"array": "x", "channel_axis": "none"}
    files = dict.fromkeys(("input", "target"), str(path))
    source = {"kind": "arrays", "input": own, "target": own, "all": files, "shares": {"train": 0.5, "valid": 0.5}}
    dataset = StarterDataset.model_validate({"kind": "starter", "source": source})
    return open_source(dataset, Part("train", "train"), [path] * 2)


def test_bad_files_are_one_message(tmp_path: Path) -> None:
    x = np.zeros((4, 1, 6, 5), np.float32)
    good = Path(write(tmp_path / "x.npy", x=x))
    h5, npz = Path(write(tmp_path / "x.h5", inputs=x)), Path(write(tmp_path / "x.npz", inputs=x))
    (cut := tmp_path / "cut.npy").write_bytes(good.read_bytes()[:-8])
    (torn := tmp_path / "torn.npz").write_bytes(npz.read_bytes()[:-40])
    (text := tmp_path / "text.h5").write_text("no HDF5")
    fewer, words = write(tmp_path / "fewer.npy", x=x[:3]), write(tmp_path / "words.npy", x=np.array(["a"] * 4))
    with h5py.File(linked := tmp_path / "linked.h5", "w") as file:
        file["group/x"] = h5py.ExternalLink(str(h5), "inputs")
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([{}] * 4, dtype=object), allow_pickle=True)

    def opened(
        path: Path | str, target: Path | str = good, fraction: tuple[float, float] = (0, 1), **info: Any
    ) -> None:
        source = {"kind": "arrays", "train": {"input": str(path), "target": str(target)}, **info}
        source["valid"] = {"input": "a.npy", "target": "b.npy"}
        dataset = StarterDataset.model_validate({"kind": "starter", "source": source})
        open_source(dataset, Part("train", "train", fraction=fraction), [Path(path), Path(target)]).close()

    opened(good)
    for arguments, message in (
        (
            (h5,),
            r"no array is called 'input' \(did you mean 'inputs'\?\); there are: inputs; name the array in `array`",
        ),
        ((npz,), r"no array is called 'input' \(did you mean 'inputs'\?\)"),
        ((good, fewer), "3 targets, but 4 inputs in .*"),
        ((cut,), r"cut.npy: cannot be read .*expected .npy"),
        ((torn,), r"torn.npz: cannot be read .*expected .npz"),
        ((text,), r"text.h5: cannot be read .*not a readable HDF5 file"),
        ((objects,), "with numbers, not Python objects such as ragged lists"),
        ((words,), "type <U1, shape .*expected numbers"),
        ((good, good, (0.0, 0.1)), "split 'train' is empty: the file has 4 rows"),
    ):
        with pytest.raises(UserError, match=message):
            opened(*arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"'group/x' .*'inputs' in .*x.h5; copy its"):
        opened(linked, input={"array": "group/x"})
    with h5py.File(linked, "a") as file:
        file["group/gone"] = h5py.ExternalLink("gone.h5", "x")
        file["soft"] = h5py.SoftLink("/nowhere")
        file["group/own"] = x
        file["half"] = x
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_chunk(x.shape)
        plan.set_filter(32001, h5py.h5z.FLAG_OPTIONAL, ())
        h5py.h5d.create(file.id, b"packed", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(x.shape), plan)
    for array, message in (
        ("group/gone", "a link to 'x' in gone.h5, which is missing; copy its values"),
        ("soft", "'soft' is a link to '/nowhere', which is missing; name another array"),
        ("group", "'group' is a group; name one of its arrays in `array`: group/own"),
        ("packed", r"'packed' is compressed by the filter 32001 \(blosc\), which is missing.*HDF5_PLUGIN_PATH"),
    ):
        with pytest.raises(UserError, match=message):
            opened(linked, input={"array": array})
    opened(linked, input={"array": "group/own"})
    (folder := tmp_path / "folder.h5").mkdir()
    with pytest.raises(UserError, match=r"folder.h5: a folder; expected a file"):
        opened(folder)
    (short := tmp_path / "short.h5").write_bytes(h5.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"short.h5: incomplete .*\(truncated file\)"):
        opened(short)
    (marked := tmp_path / "marked.h5").touch()
    with h5py.File(marked, "w", libver="latest") as file:
        file["input"] = x
        file.swmr_mode = True
        file.flush()
        shutil.copy(marked, busy := tmp_path / "busy.h5")  # a killed writer leaves the file in this state
    with pytest.raises(UserError, match=r"busy.h5: incomplete .*h5clear -s"):
        opened(busy)
    with pytest.raises(UserError, match=r"source.input.channels: 2 names for 1 channels"):
        opened(good, input={"channels": ["a", "b"]})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"train": {"input": "a.npy", "target": "b.npy"}}, "give either `train` and `valid`"),
        (
            {split: {"input": f"{split}.npy", "target": f"{split}.npy"} for split in ("train", "valid")}
            | {"shares": {"train": 0.5, "valid": 0.5}},
            "give either `train` and `valid`",
        ),
        (
            {"all": {"input": "a.csv", "target": "b.npy"}, "shares": {"train": 0.5, "valid": 0.5}},
            "a.csv: expected a file",
        ),
        ({"train": {"input": "a.h5", "target": "a.h5"}, "valid": {"input": "b.h5", "target": "a.h5"}}, "in two splits"),
        ({"all": {"input": "a.h5", "target": "a.h5"}, "shares": {"train": 0.8, "valid": 0.3}}, "add up to 1.1"),
        (
            {
                "all": {"input": "a.h5", "target": "a.h5"},
                "shares": {"train": 0.8, "valid": 0.2},
                "sha256": {"a.h5": "0" * 64},
            },
            "no file called 'a.h5' is fetched",
        ),
    ],
)
def test_sources_are_checked(source: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dataset = {"kind": "starter", "source": {"kind": "arrays", **source}}
        resolve.load({"targets": ["starter_demo"], "datasets": {"d": dataset}})


def test_other_arrays_need_another_model(tmp_path: Path) -> None:
    """Vectors, a target of another size, or integers give a message instead of an error in a convolution."""
    x = np.random.default_rng(0).normal(size=(8, 1, 6, 5))
    for number, (inputs, targets) in enumerate([(x[:, 0, 0], x), (x, x[:, :, 1:]), (x.astype(np.int16), x)]):
        files = {
            key: write(tmp_path / f"{key}{number}.npy", v=v) for key, v in (("input", inputs), ("target", targets))
        }
        source = {"kind": "arrays", "all": files, "shares": {"train": 0.5, "valid": 0.5}}
        with pytest.raises(UserError, match=r"expects two images \[C, H, W\]"):
            tiny_session(
                "starter_cnn", {"kind": "starter", "source": source}, TINY["starter_cnn"]["run"], tmp_path / f"{number}"
            )


def test_a_field_that_the_data_lack_is_one_message(tiny_data: Callable[[str], Path]) -> None:
    """A missing field gives one message, even if the study needs the field before it reads a sample."""
    tiny = TINY["starter_cnn"]
    run = {**tiny["run"], "samples": {"input": "inputs"}}
    with pytest.raises(
        UserError, match=r"samples\.input: the dataset has no field 'inputs' \(did you mean 'input'\?\)"
    ):
        tiny_session("starter_cnn", tiny["dataset"], run, tiny_data("starter_cnn"))


# ---- training ----------------------------------------------------------------------------------------


def test_the_stage_trains_like_a_plain_loop(tmp_path: Path, tiny_data: Callable[[str], Path]) -> None:
    """The stage gives the same losses as a plain PyTorch loop with the same initial weights and order of samples."""
    tiny = TINY["starter_cnn"]
    make_run(tmp_path, "starter_cnn", {**tiny["run"], "training": {"epochs": 3}}, tiny["dataset"])
    assert train(tmp_path, tiny_data("starter_cnn") / "manifest.json") == 0
    session = tiny_session("starter_cnn", tiny["dataset"], tiny["run"], tiny_data("starter_cnn"))
    torch.manual_seed(session.run.seed)
    convolutions = [nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise((1, 8, 8, 8, 8, 1))]
    train_losses, valid_losses = bare_loop(
        nn.Sequential(*(layer for each in convolutions for layer in (each, nn.LeakyReLU()))),
        lambda prediction, target: F.mse_loss(prediction, target, reduction="none").mean((1, 2, 3)),
        *(session.samples(split) for split in ("train", "valid")),
        steps_by_epoch=[2, 2, 2],
        batch=8,
        rate=lambda step: 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 6)),
    )
    found = records(tmp_path)
    assert [each["train_loss"] for each in found] == pytest.approx(train_losses, rel=1e-4)
    assert [each["valid_loss"] for each in found] == pytest.approx(valid_losses, rel=1e-4)
    assert found[-1]["metrics"]["rmse"] == pytest.approx(valid_losses[-1] ** 0.5, rel=1e-4)


def plan_run(folder: Path, plan: str, **changes: Any) -> list[dict[str, Any]]:
    """Train the first run of a shipped plan; return the records of its epochs."""
    shipped = resolve.load({"targets": [plan], "plans": {plan: {"settings": changes}}})
    run = next(iter(shipped.plans[plan].values())).run
    data = make_dataset(folder / "data", shipped.workflow.datasets[run.dataset].model_dump(mode="json"))
    assert stage("configure", "--settings", run.model_dump_json(), "--out", folder / "run/config.yaml") == 0
    assert train(folder / "run", data / "manifest.json") == 0
    return records(folder / "run")


@pytest.mark.slow
def test_the_demo_learns(tmp_path: Path) -> None:
    """The demo's RMSE is below 45 % of the best baseline's; a linear filter would hardly be better than the mean."""
    metrics = plan_run(tmp_path, "starter_demo")[-1]["metrics"]
    assert metrics["rmse"] < 0.45 * metrics["rmse_of_naive"]


@pytest.mark.slow
def test_weights_of_two_processes_are_those_of_one(tmp_path: Path, tiny_data: Callable[[str], Path]) -> None:
    """Weights of a run on two processes load into the plain network, without a `module.` prefix."""
    tiny, data, weights = TINY["starter_cnn"], tiny_data("starter_cnn"), []
    for ranks in (1, 2):
        folder = tmp_path / f"{ranks}"
        make_run(folder, "starter_cnn", {**tiny["run"], "geometry": {"gpus_per_node": ranks}}, tiny["dataset"])
        train_by(ranks, folder, data)
        weights.append(torch.load(folder / "model.pt", weights_only=True))
        StarterCNN(hidden=8).load_state_dict(weights[-1], strict=True)
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.long
def test_noise_cannot_be_learnt(tmp_path: Path) -> None:
    """On noise, a smaller version of the published plan learns nothing: its error equals that of the mean."""
    shipped = {
        **{"dataset": "starter_noise", "model": {"hidden": 4}, "training": {"epochs": 12}, "precision": "fp32"},
        "optimizer": {"lr": 1e-2},  # outputs start near 0, the target mean is 0.5: the default lr is too slow
    }
    metrics = plan_run(tmp_path, "starter_published", **shipped)[-1]["metrics"]
    assert metrics["rmse"] == pytest.approx(metrics["rmse_of_naive"], rel=0.05)
    assert metrics["rmse_of_naive"] == pytest.approx(12**-0.5, rel=0.02)


@pytest.mark.slow
def test_channels_of_any_name_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A $ in a channel's name is shown in the preview, although matplotlib uses $ for mathematics."""
    x = np.random.default_rng(0).normal(size=(4, 2, 6, 5)).astype(np.float32)
    files = {"input": write(tmp_path / "x.npy", x=x), "target": write(tmp_path / "y.npy", x=x[:, :1])}
    source = {"kind": "arrays", "all": files, "shares": {"train": 0.5, "valid": 0.5}}
    pictures, known = [], matplotlib.rc_context
    for names in (["a$_$b", "p$x$q"], [r"a\$_\$b", r"p\$x\$q"]):
        dataset = {"kind": "starter", "source": {**source, "input": {"channels": names, "unit": names[1]}}}
        folder = make_dataset(tmp_path / f"{len(pictures)}/data", dataset)
        pictures.append(matplotlib.image.imread(folder / "preview.png"))
        monkeypatch.setattr(matplotlib, "rc_context", lambda style: known({**style, "text.parse_math": True}))
    assert np.array_equal(*pictures)


# ---- new studies -------------------------------------------------------------------------------------


def dlscale(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command line like a user; return the completed process."""
    environment = variables(OMP_NUM_THREADS="1")
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "expected up to 40 lower-case letters") for name in ("my-study", "2d", "class", "on", "", "a" * 41)),
        *((name, "Python module, has this name") for name in ("starter_cnn", "mnist", "numpy")),
    ],
)
def test_invalid_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        new_study.check_name(name)


def test_existing_files_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of the files exists, or a file cannot be written, no new file is left."""
    monkeypatch.chdir(tmp_path)
    assert stage("new-study", "ripples") == 0
    before = {path: path.read_text() for path in (tmp_path / "ripples").iterdir()}
    assert len(before) == 5
    (tmp_path / "ripples/ripples.py").unlink()
    assert stage("new-study", "ripples") == 2
    assert stage("new-study", "ripples", "--at", tmp_path / "ripples") == 2
    assert {path.name for path in (tmp_path / "ripples").iterdir()} == {p.name for p in before} - {"ripples.py"}

    def full(path: Path, text: str) -> None:
        if path.suffix == ".yaml":
            raise OSError("no space")
        write_text(path, text)

    monkeypatch.setattr(new_study, "write_text", full)
    assert stage("new-study", "rings") != 0 and not list((tmp_path / "rings").iterdir())


@pytest.mark.parametrize(
    ("more", "words", "tested", "plan"),
    [
        ([], ("waves", "Waves"), "4 passed, 2 skipped", "baseline fused train throughput"),
        pytest.param(
            *(["--images"], ("starter_cnn", "StarterCNN"), "7 passed", "baseline fused bf16 train throughput profile"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_new_study_is_the_example_with_another_name(
    tmp_path: Path, more: list[str], words: tuple[str, str], tested: str, plan: str
) -> None:
    """Code style, printed commands and configuration of a new study are valid, here in a folder with odd characters."""
    done = dlscale("dlscale", "new-study", "steep_fields", *more, "--at", "it's FILE & all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "it's FILE & all"
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert len(texts) == 5 and not any(word in text for text in texts.values() for word in words)
    assert "class SteepFieldsStudy(Study)" in texts["steep_fields.py"]
    part = "model import SteepFields" if more else "data import KINDS"
    assert f"from steep_fields_{part}" in texts["steep_fields.py"]
    for check in (["check"], ["format", "--check"]):
        command = [*check, "--config", str(ROOT / "pyproject.toml"), str(folder)]
        found = subprocess.run([Path(sys.executable).with_name("ruff"), *command], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout
    test, change, dry, run = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("  ")]
    checked = dlscale(*test[2:], "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert checked.returncode == 0 and tested in checked.stdout, checked.stdout
    assert change == ["cd", str(ROOT)] and dry == [*run, "-n"]
    assert run == ["dlscale", "run", "--configfile", str(folder / "steep_fields_run.yaml")]
    code = (
        "import sys; from dlscale.config import resolve\n"
        "loaded = resolve.load_files(sys.argv[1])\n"
        "plan = loaded.workflow.plans['steep_fields_ladder']\n"
        "print(*plan.runs, *plan.measure, *loaded.workflow.targets)\n"
    )
    told = subprocess.run([sys.executable, "-c", code, run[-1]], env=variables(), capture_output=True, text=True)
    assert told.stdout == f"{plan} steep_fields_ladder\n", told.stderr


def test_the_guide_names_all_files_of_a_new_study(tmp_path: Path) -> None:
    """docs/adding.md names all files of a new study, and links the template of each file or contains the file."""
    guide = (ROOT / "docs/adding.md").read_text()
    new_study.write("waves", tmp_path, images=False)
    for path in tmp_path.iterdir():
        linked = ROOT / "docs" / f"../workflow_scripts/dlscale/extensions/scaffold/template/{path.name}"
        if linked.exists():
            assert path.read_text() == linked.read_text()
            assert f"[`{path.name}`]({linked.relative_to(ROOT / 'docs')})" in guide
        else:
            assert f"| `{path.name}` |" in guide
            assert path.read_text().split("\n", 1)[1] in guide, (
                "the guide must contain all lines except the first, which names the folder"
            )
