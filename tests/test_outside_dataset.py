"""External studies with their own kinds of dataset: data made in memory, files that a study reads, and mistakes."""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dlscale import cli
from dlscale.config.dataset import DatasetSettings, dataset_type
from dlscale.core import fingerprint, registry
from dlscale.core.errors import UserError
from dlscale.core.settings import validate
from dlscale.data import acquire, parts
from dlscale.data.kind import Part, RawFile
from dlscale.data.manifest import Manifest
from dlscale.data.preview import first_rows
from dlscale.data.source import ArraySource
from dlscale.data.store import Reader
from dlscale.preflight.probe import probe_raw
from tests.conftest import make_dataset, make_parts, stage

MODULE = """
from typing import Literal

import numpy as np

from dlscale.config.dataset import DatasetSettings
from dlscale.core.schema import Strict
from dlscale.data.kind import DatasetKind, Part
from dlscale.data.source import ArraySource


class Settings(DatasetSettings):
    kind: Literal["marks"]
    count: int = 40
    bad: bool = False


class Samples(Strict):
    kind: Literal["rows"]


class Marks(DatasetKind):
    name, Settings, Samples = "marks", Settings, Samples

    def parts(self, dataset):
        return [Part(split, "all") for split in ("train", "valid")]


KINDS = [Marks()]


def arrays(split, count):
    rng = np.random.default_rng(["train", "valid"].index(split))
    return {
        "image": rng.integers(0, 256, (count, 1, 6, 5), dtype=np.uint8),
        "mask": rng.random((count, 6, 5)) > 0.5,
        "label": rng.integers(0, 7, count) if split == "train" else np.full(count, 9),
        "scalars": rng.normal(3, 2, (count, 2)),
        "weight": rng.normal(size=count).astype(np.float32),
    }


def open_source(dataset, part, paths):
    assert not paths
    made = arrays(part.split, dataset.count)
    if dataset.bad:
        made["scalars"][3, 1] = np.nan
    return ArraySource(
        made, channels={"image": ["grey"], "scalars": ["mass", "age"]}, units={"weight": "kg"}, attributes={"seed": 0}
    )
"""
TYPES = {"image": "uint8", "mask": "uint8", "label": "int64", "scalars": "float32", "weight": "float32"}


@pytest.fixture
def module(tmp_path: Path) -> str:
    """Register a study with its own kind of dataset; return the name of the study's module."""
    name = f"marks_{tmp_path.parent.name}_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}.yaml").write_text("{}")
    registry.add("marks", tmp_path / f"{name}.py")
    return name


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        (["valid"], "no part has the split train"),
        (["train"], "no part has the split valid"),
    ],
)
def test_parts_that_cannot_be(module: str, monkeypatch: pytest.MonkeyPatch, splits: list[Any], words: str) -> None:
    kind = registry.kind("marks")
    monkeypatch.setattr(type(kind), "parts", lambda self, dataset: [Part(split, "all") for split in splits])
    with pytest.raises(UserError, match=words):
        parts.parts(kind.Settings(kind="marks"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"arrays": {"x": np.zeros((3, 2)), "y": np.zeros(4)}}, "'y' has 4 rows, .*first array has 3"),
        ({"channels": {"x": ["a", "b", "c"]}}, r"'x': 3 named channels .*shape \(3, 2\)"),
        ({"channels": {"X": ["a", "b"]}}, "no array is called 'X'"),
        ({"units": {"z": "K"}}, "no array is called 'z'"),
        ({"arrays": {"x": np.ma.masked_less(np.arange(3.0), 1)}}, "'x' is a MaskedArray of float64"),
        ({"arrays": {"x": np.ones(3, complex)}}, "'x' is a ndarray of complex128; expected a NumPy array of numbers"),
        ({"arrays": {"x": [1.0, 2.0]}}, "'x' is a list of no dtype"),
        ({"arrays": {"x": np.array(1.0)}}, "'x' is a ndarray of float64"),
    ],
)
def test_arrays_that_do_not_go_together(arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"arrays": {"x": np.zeros((3, 2))}}
    with pytest.raises(UserError, match=words):
        ArraySource(**given | arguments)


def test_a_kind_that_acquires_is_asked_for_a_url_too(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset kind's `acquire` also gets URLs, because it may do more than fetch the file."""
    kind, raw = registry.kind("marks"), RawFile("a.bin", "http://127.0.0.1:9/a.zip")
    every = [Part(split, "all", (raw,)) for split in ("train", "valid")]
    monkeypatch.setattr(type(kind), "parts", lambda self, dataset: every)
    monkeypatch.setattr(type(kind), "acquirer", lambda self, dataset: "marks")
    monkeypatch.setattr(
        registry.load(module), "acquire", lambda dataset, raw, out, progress: out.write_text(raw.origin), raising=False
    )
    acquire.main(argparse.Namespace(config='{"kind": "marks"}', file="a.bin", out=tmp_path / "a.bin"))
    assert (tmp_path / "a.bin").read_text() == raw.origin


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_rows_of_any_type_go_through_every_stage(module: str, tmp_path: Path, dtype: str, pieces: int) -> None:
    """Integers keep their type; floats get the requested type. Statistics cover only the training split."""
    settings = {"kind": "marks", "pieces": pieces, "storage": {"dtype": dtype, "channels": "last"}}
    folder = make_dataset(tmp_path / "data", settings)
    manifest = Manifest.read(folder / "manifest.json")
    manifest.check_files()
    made = registry.load(module).arrays
    assert (manifest.kind, manifest.rows, manifest.extra, manifest.facts) == ("marks", "samples", {}, [])
    assert {split: [file.rows for file in files] for split, files in manifest.splits.items()} == {
        "train": [40],
        "valid": [40],
        "test": [],
    }
    shapes = {"image": (1, 6, 5), "mask": (6, 5), "label": (), "scalars": (2,), "weight": ()}
    for split in ("train", "valid"):
        path = manifest.path(manifest.files(split)[0])
        for name, values in made(split, 40).items():
            info, read = manifest.fields[name], Reader(path, name)[(slice(None),)]
            assert (info.dtype, info.row_shape, info.stored) == (TYPES[name], shapes[name], "model")
            assert read.dtype == TYPES[name] and read.shape == values.shape
            with h5py.File(path) as file:
                assert file[name].dtype == (dtype if info.dtype == "float32" else info.dtype)
            exact = dtype == "float32" or info.dtype != "float32"
            np.testing.assert_allclose(read, values, atol=0 if exact else 0.01, rtol=1e-7 if exact else 1e-3)
    for name, values in made("train", 40).items():
        info = manifest.fields[name]
        axes = tuple(axis for axis in range(values.ndim) if axis != info.channel_axis)
        np.testing.assert_allclose(info.mean, np.atleast_1d(values.mean(axis=axes)), rtol=1e-6)
        np.testing.assert_allclose(info.std, np.atleast_1d(values.std(axis=axes)), rtol=1e-6)
        np.testing.assert_allclose(info.maximum, np.atleast_1d(values.max(axis=axes)), rtol=1e-6)
    classes = {name: info.classes for name, info in manifest.fields.items()}
    assert classes == {"image": None, "mask": None, "label": 10, "scalars": None, "weight": None}, (
        "class counts must cover all splits"
    )
    assert manifest.fields["scalars"].channels == ["mass", "age"] and manifest.fields["weight"].units == ["kg"]
    panels = {panel.title: panel for panel in first_rows(manifest)}
    assert panels["grey"].values.shape == (24, 20) and panels["label"].classes == 10
    np.testing.assert_array_equal(panels["grey"].values[6:12, 5:10], made("train", 40)["image"][5, 0])
    assert (folder / "preview.png").read_bytes().startswith(b"\x89PNG")


def test_curves_are_drawn_and_short_vectors_have_a_histogram(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of the picture is a row of the file, also for curves with channels; short vectors have a histogram."""
    curves = np.arange(40 * 2 * 64, dtype=np.float32).reshape(40, 2, 64)

    def open_source(dataset: Any, part: Part, paths: list[Path]) -> ArraySource:
        made = curves + (part.split == "valid")
        arrays = {"sensors": made, "matrix": made, "pair": made[:, :, 0]}
        return ArraySource(arrays, channels={"sensors": ["position", "velocity"]})

    monkeypatch.setattr(registry.load(module), "open_source", open_source)
    folder = make_dataset(tmp_path / "made", {"kind": "marks"})
    panels = {panel.title: panel for panel in first_rows(Manifest.read(folder / "manifest.json"))}
    np.testing.assert_array_equal(panels["velocity"].values, curves[:, 1])
    np.testing.assert_array_equal(panels["matrix"].values, curves.reshape(40, 128))
    assert panels["velocity"].labels[1] == panels["matrix"].labels[1] == "row" and panels["pair"].values.ndim == 1


def test_files_of_other_fields_are_refused(module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_parts(tmp_path, {"kind": "marks"})
    with h5py.File(tmp_path / "train" / "all.h5", "r+") as file:
        file.attrs["fields"] = ["image", "label"]
    products = ["--manifest", tmp_path / "manifest.json", "--stats", tmp_path / "stats"]
    assert stage("describe", "--config", tmp_path / "config.yaml", *products) == 2
    words = "valid/all.h5: holds the fields image, mask, label, scalars, weight, expected image, label, as in the other"
    assert words in capfd.readouterr().err


def test_files_of_other_rows_are_refused(module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_parts(tmp_path, {"kind": "marks"})
    with h5py.File(tmp_path / "valid" / "all.h5", "r+") as file:
        attributes = dict(file["image"].attrs)
        del file["image"]
        file["image"] = np.zeros((40, 1, 7, 5), np.uint8)
        file["image"].attrs.update(attributes)
    products = ["--manifest", tmp_path / "manifest.json", "--stats", tmp_path / "stats"]
    assert stage("describe", "--config", tmp_path / "config.yaml", *products) == 2
    assert re.search(r"image: .* shape \(40, 1, 7, 5\);.* shape \(40, 1, 6, 5\)", capfd.readouterr().err)


# ---- files that the code of a study reads --------------------------------------------------------------

READING = """
import os, sqlite3, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py

from dlscale.data.kind import RawFile

HERE = Path(__file__).parent
{imported}

class Lazy(ArraySource):
    def read(self, start, stop):
        {late}
        return super().read(start, stop)

def open_source(dataset, part, paths):
    (named,) = paths
    y = np.load(named)
    {early}
    return Lazy({{"y": y}})

def parts(self, dataset):
    {listed}
    return [Part(split, "all", (RawFile("y.npy", str(HERE / "y.npy")),)) for split in ("train", "valid")]

Marks.parts = parts
"""
OTHER = "HERE / 'other.npy'"
CAUGHT = f"""try:
        np.load({OTHER})
    except Exception:
        pass"""
THREAD = f"ThreadPoolExecutor(1).submit(np.load, {OTHER}).exception()"
OWN = """folder = tempfile.mkdtemp(dir=HERE)
    np.save(folder + "/a.npy", y); os.rename(folder + "/a.npy", folder + "/b.npy"); np.load(folder + "/b.npy")
    with h5py.File(folder + "/c.h5", "w") as file: file["y"] = y
    with h5py.File(folder + "/c.h5") as file: file["y"][()]
    import matplotlib.font_manager, zoneinfo; zoneinfo.ZoneInfo("Europe/Zurich")
    with tempfile.TemporaryFile() as file: file.write(b"1"); file.seek(0); file.read()
    open("/proc/self/stat").read(); import wave"""


def preprocessed(folder: Path, **code: str) -> int:
    """Preprocess a part with a study whose module contains `code`; return the exit status."""
    np.save(folder / "y.npy", np.arange(6.0))
    np.save(folder / "other.npy", np.arange(6.0))
    np.arange(6.0).tofile(folder / "other.raw")
    (folder / "other.txt").write_text("1")
    sqlite3.connect(folder / "other.db").execute("create table t (x)")
    with h5py.File(folder / "other.h5", "w") as file:
        file["y"] = np.arange(6.0)
    empty = dict.fromkeys(("imported", "late", "early", "listed"), "pass")
    write(folder / "kind_that_reads.py", MODULE + READING.format(**{**empty, **code}))
    sys.modules.pop("kind_that_reads", None)
    registry.add("s", folder / "kind_that_reads.py")
    words = ["--part", "train/all", "--source", folder / "y.npy", "--out", folder / "piece.h5"]
    return stage("preprocess", "--config", json.dumps({"kind": "marks"}), *words)


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("early", f"np.load({OTHER})"),
        ("early", f"np.load({OTHER}, mmap_mode='r')"),
        ("early", "np.fromfile(HERE / 'other.raw')"),
        ("early", "np.memmap(HERE / 'other.raw', mode='r+')"),
        ("early", "h5py.File(HERE / 'other.h5')"),
        ("early", "h5py.File(HERE / 'other.h5', 'a')"),
        ("early", "sqlite3.connect(HERE / 'other.db')"),
        ("early", "os.open(HERE / 'other.txt', os.O_RDONLY)"),
        ("early", CAUGHT),
        ("early", THREAD),
        ("late", "(HERE / 'other.txt').read_text()"),
        ("imported", "TABLE = (HERE / 'other.txt').read_text()"),
    ],
)
def test_a_file_that_parts_do_not_name_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str, code: str
) -> None:
    assert preprocessed(tmp_path, **{place: code}) == 2
    text = capfd.readouterr().err
    assert re.search(r"/other\.\w+: opened by the study's own code, but not named in `parts`", text), text
    assert "Traceback" not in text


@pytest.mark.parametrize(("place", "code"), [("early", OWN), ("listed", "(HERE / 'other.txt').read_text()")])
def test_a_source_may_read_named_own_and_package_files(tmp_path: Path, place: str, code: str) -> None:
    assert preprocessed(tmp_path, **{place: code}) == 0
    np.testing.assert_array_equal(h5py.File(tmp_path / "piece.h5")["y"], np.arange(6))
    np.load(tmp_path / "other.npy")  # after the stage, opened files must no longer be checked
    h5py.File(tmp_path / "other.h5").close()


@pytest.mark.parametrize("role", ["acquire", "complete"])
def test_acquiring_and_describing_read_named_files_only(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """`acquire` may read the raw file's origin, `complete` may read the dataset's folder; other files are refused."""
    (tmp_path / "other.txt").write_text("1")
    (tmp_path / "y.txt").write_text("2")
    kind, code, raw = registry.kind("marks"), registry.load(module), RawFile("a.txt", str(tmp_path / "y.txt"))
    if role == "complete":
        make_parts(tmp_path / "data", {"kind": "marks"})
        products = ["--manifest", tmp_path / "data/manifest.json", "--stats", tmp_path / "data/stats"]
        words = ["describe", "--config", tmp_path / "data/config.yaml", *products]
    else:
        monkeypatch.setattr(
            type(kind), "parts", lambda *_: [Part(split, "all", (raw,)) for split in ("train", "valid")]
        )
        words = ["acquire", "--config", '{"kind": "marks"}', "--file", "a.txt", "--out", tmp_path / "source/a.txt"]
        (tmp_path / "source").mkdir()
    for name, status in (("y.txt" if role == "acquire" else "data/train/all.h5", 0), ("other.txt", 2)):

        def act(dataset: Any, given: Any, out: Path, progress: Any, name: str = name) -> Any:
            text = (tmp_path / name).read_bytes()
            return given if role == "complete" else out.write_bytes(text)

        monkeypatch.setattr(code, role, act, raising=False)
        assert stage(*words) == status


# ---- external studies: where they are found, and errors in their code ----------------------------------


STUDY = """
from dlscale.core.schema import Strict
from dlscale.data.kind import DatasetKind
from dlscale.config.dataset import DatasetSettings

class Kind(DatasetKind):
    name, Settings = "{kind}", DatasetSettings
    def parts(self, dataset):
        return []

KINDS = [Kind()]

class Study:
    dataset, Model, Loss = "{kind}", Strict, Strict

STUDY = Study()
"""


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove registered studies and import paths after each test."""
    monkeypatch.setattr(registry, "_added", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    fingerprint._file.cache_clear()
    yield
    fingerprint._file.cache_clear()
    fingerprint._source.cache_clear()


def write(path: Path, text: str, yaml: str = "settings: {}\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    beside = path.with_name(f"{path.parent.name}.yaml") if path.name == "__init__.py" else path.with_suffix(".yaml")
    beside.write_text(yaml)
    return path


def test_the_sources_of_a_study_are_its_file_and_imports(tmp_path: Path) -> None:
    write(tmp_path / "ripples.py", "import torch, helper_of_ripples\n" + STUDY.format(kind="ripples"))
    (tmp_path / "helper_of_ripples.py").write_text("from dlscale.studies.scores import skill\n")
    (tmp_path / "stranger.py").write_text("")
    registry.add("r", tmp_path / "ripples.py")
    assert registry.study("r").dataset == "ripples" and registry.kind("ripples").name == "ripples"
    reached = fingerprint.reachable(["ripples"])
    assert {"ripples", "helper_of_ripples", "dlscale.studies.scores"} <= set(reached)
    assert not {"stranger", "torch"} & set(reached)


def test_a_folder_with_relative_imports(tmp_path: Path) -> None:
    write(tmp_path / "swell/__init__.py", "from .inner import value\n" + STUDY.format(kind="swell"))
    (tmp_path / "swell/inner.py").write_text("from . import deep\nvalue = 1\n")
    (tmp_path / "swell/deep.py").write_text("")
    registry.add("s", tmp_path / "swell")
    assert registry.study("s").dataset == "swell"
    assert {"swell", "swell.inner", "swell.deep"} <= set(fingerprint.reachable(["swell"]))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("my-study", STUDY.format(kind="k"), "expected a Python identifier .*, got 'my-study'; rename the file"),
        ("nothing", "", "expected `STUDY = MyStudy\\(\\)` at its end.* without dataset, Model, Loss"),
        (
            "lacking",
            "class S:\n    dataset = 'k'\nSTUDY = S()\n",
            "got .* without Model",
        ),
        ("class_alone", "class S:\n    dataset = 'k'\nSTUDY = S\n", "got <class '.*S'>"),
        ("leaving", "import sys\nsys.exit(0)\n", r"leaving.py:2: SystemExit: 0"),
        ("broken", "def f(:\n", r"broken.py:1: SyntaxError"),
        ("failing", "\nraise ValueError('no luck')\n", r"failing.py:2: ValueError: no luck"),
        (
            "classes",
            STUDY.format(kind="k").replace("[Kind()]", "[Kind]"),
            r"KINDS has the class Kind; write Kind\(\)",
        ),
        ("taken", STUDY.format(kind="mnist"), "a kind of dataset called 'mnist' already exists"),
    ],
)
def test_mistakes_in_a_study(tmp_path: Path, name: str, text: str, words: str) -> None:
    file = write(tmp_path / f"{name}.py", text)
    with pytest.raises(UserError, match=words):
        registry.add("s", file)
        registry.study("s")
        registry.kinds()


def test_one_module_name_in_two_studies_is_refused(tmp_path: Path) -> None:
    """Two studies with modules of the same name are refused, because Python would import the same module for both."""
    for folder in ("a", "b"):
        write(tmp_path / folder / f"study_{folder}.py", STUDY.format(kind=folder))
        (tmp_path / folder / "common.py").write_text("")
        registry.add(folder, tmp_path / folder / f"study_{folder}.py")
    with pytest.raises(UserError, match="can import only one module 'common'"):
        registry.source("common")


def test_an_error_in_a_study_is_reported_with_file_and_line(tmp_path: Path) -> None:
    write(tmp_path / "late.py", "def fail():\n    return [][1]\n" + STUDY.format(kind="late"))
    registry.add("late", tmp_path / "late.py")
    with pytest.raises(IndexError) as caught:
        registry.load("late").fail()
    assert registry.mistake(caught.value) == f"{tmp_path}/late.py:2: IndexError: list index out of range"
    assert registry.mistake(IndexError("elsewhere")) is None


def test_a_network_with_two_arguments_is_told_that_it_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The call is dlscale's, so the traceback has no line of the study, whose network is in any of its files."""
    registry.add("tide", write(tmp_path / "tide.py", STUDY.format(kind="tide")))

    def run(args: argparse.Namespace) -> int:
        raise TypeError("Net.forward() missing 1 required positional argument: 'context'")

    monkeypatch.setattr(cli, "_run", run)
    assert cli.main(["status"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "tide.py" not in said and "study tide or of dlscale: TypeError: Net.forward() missing 1" in said
    assert said.endswith("'context'. A network's `forward` gets one argument: a tensor, a tuple or a dict")


def test_a_suggested_key_is_one_of_the_own_kind(module: str) -> None:
    """Other kinds have the key `source.train`; the kind `marks` has no keys in `source`."""
    with pytest.raises(UserError) as refused:
        validate(dict[str, dataset_type()], {"mine": {"kind": "marks", "train": 4}})  # type: ignore[misc]
    assert "unknown key 'train'" in str(refused.value) and "source.train" not in str(refused.value)


def test_a_missing_file_of_an_own_kind_names_the_code_that_names_it(tmp_path: Path) -> None:
    """The code of the kind names the path, so the remedy points to the kind's `parts`."""
    raw = 'return [Part("train", "a", raws := (RawFile("a", "absent.npy"),)), Part("valid", "b", raws)]'
    text = (
        STUDY.format(kind="swells")
        .replace("return []", raw)
        .replace("DatasetKind\n", "DatasetKind, Part, RawFile\n", 1)
    )
    registry.add("s", write(tmp_path / "swells.py", text))
    dataset = DatasetSettings.model_construct(kind="swells", source=None)
    found = probe_raw("mine", dataset, tmp_path)
    assert found and found.status == "FAIL" and "absent.npy" in found.text
    assert "`parts`" in found.remedy and "swells" in found.remedy and "datasets.mine" not in found.remedy


def test_a_missing_file_is_only_accepted_if_the_dataset_was_made_from_it(tmp_path: Path) -> None:
    """An own kind has no key `source`, so equal settings `source` do not show that the file is the same."""
    raw = 'return [Part("train", "a", raws := (RawFile("a", dataset.file),)), Part("valid", "b", raws)]'
    text = (
        STUDY.format(kind="tides").replace("return []", raw).replace("DatasetKind\n", "DatasetKind, Part, RawFile\n", 1)
    )
    registry.add("s", write(tmp_path / "tides.py", text))
    made = tmp_path / "data/mine/manifest.json"
    made.parent.mkdir(parents=True)
    raws = {"old.npy": (7, 1)}
    Manifest(kind="tides", fields={}, splits={}, provenance={"settings": {"source": None}, "raws": raws}).write(made)

    class Tides(DatasetSettings):
        file: str

    def found(file: str) -> Any:
        return probe_raw("mine", Tides(kind="tides", file=file), tmp_path)

    kept, wrong = found("old.npy"), found("other.npy")
    assert kept.status == "warn" and "old.npy: no such file" in kept.text and "using the dataset" in kept.text
    assert wrong.status == "FAIL" and "other.npy: no such file" in wrong.text and "made from" not in wrong.text
    assert "datasets.mine.file" in wrong.remedy
