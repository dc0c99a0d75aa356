"""Studies from outside: where they are found, and one clear message for each mistake in them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlscale.core import fingerprint, registry
from dlscale.core.errors import UserError

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
    """Leave no study or path behind."""
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


def test_a_file_and_what_it_imports_are_its_sources(tmp_path: Path) -> None:
    write(tmp_path / "ripples.py", "import torch, helper_of_ripples\n" + STUDY.format(kind="ripples"))
    (tmp_path / "helper_of_ripples.py").write_text("from dlscale.scores import l1\n")
    (tmp_path / "stranger.py").write_text("")
    registry.add("r", tmp_path / "ripples.py")
    assert registry.study("r").dataset == "ripples" and registry.kind("ripples").name == "ripples"
    reached = fingerprint.reachable(["ripples"])
    assert {"ripples", "helper_of_ripples", "dlscale.scores"} <= set(reached)
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
        ("my-study", STUDY.format(kind="k"), "cannot import a module called 'my-study'"),
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
            r"KINDS holds the class Kind; write Kind\(\)",
        ),
        ("taken", STUDY.format(kind="mnist"), "a kind of dataset called 'mnist' is there already"),
    ],
)
def test_mistakes_in_a_study(tmp_path: Path, name: str, text: str, words: str) -> None:
    file = write(tmp_path / f"{name}.py", text)
    with pytest.raises(UserError, match=words):
        registry.add("s", file)
        registry.study("s")
        registry.kinds()


def test_one_module_name_in_two_studies_is_refused(tmp_path: Path) -> None:
    """Python would import one of them for both."""
    for folder in ("a", "b"):
        write(tmp_path / folder / f"study_{folder}.py", STUDY.format(kind=folder))
        (tmp_path / folder / "common.py").write_text("")
        registry.add(folder, tmp_path / folder / f"study_{folder}.py")
    with pytest.raises(UserError, match="can import only one module 'common'"):
        registry.source("common")


def test_a_failure_inside_a_study_names_its_place(tmp_path: Path) -> None:
    write(tmp_path / "late.py", "def fail():\n    return [][1]\n" + STUDY.format(kind="late"))
    registry.add("late", tmp_path / "late.py")
    with pytest.raises(IndexError) as caught:
        registry.load("late").fail()
    assert registry.mistake(caught.value) == f"{tmp_path}/late.py:2: IndexError: list index out of range"
    assert registry.mistake(IndexError("elsewhere")) is None
