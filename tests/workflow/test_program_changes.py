"""Reruns of external programs: an edit reruns exactly the listed jobs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs import settings, write_program
from tests.workflow.conftest import Tree
from tests.workflow.test_changes import Edit, append, both, configure, touch

pytestmark = pytest.mark.slow

SETTINGS = {**settings(Path("theirs"), "--seconds", "{seconds}", values={"seconds": 0.01}), "dataset": "mine"}
CONFIG: dict[str, Any] = {
    "results": "results",
    "targets": ["theirs"],
    "datasets": {"mine": {"kind": "files", "source": {"paths": ["read.txt"]}}},
    "plans": {"theirs": {"study": "program", "measure": ["train"], "settings": SETTINGS, "runs": {"here": {}}}},
}
HERE, PINNED = ["program theirs here"], ["program theirs pinned"]


def git(folder: Path, *words: str) -> str:
    known = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", folder, *known, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def tree(make_tree: Callable[..., Tree]) -> Iterator[Tree]:
    """Return a tree after a complete run of two programs: one from a folder, one from a repository's revision."""
    made = make_tree(CONFIG)
    write_program(made.path / "theirs")
    (made.path / "read.txt").write_text("what it reads\n")
    published = write_program(made.path / "published")
    git(published, "init", "--quiet")
    for text in ("one", "two"):
        (published / "README").write_text(text)
        git(published, "add", ".")
        git(published, "commit", "--quiet", "--message", text)
    subprocess.run(["cp", "-r", published, made.path / "moved"], check=True)
    first = git(published, "rev-parse", "HEAD~1").strip()
    pinned = {"repository": str(published), "revision": first, "folder": "."}
    made.config["plans"]["theirs"]["runs"]["pinned"] = {"program": pinned}
    made.write()
    outcome = made.snakemake("--cores", "2")
    assert outcome.status == 0, outcome.output[-5000:]
    return made


def repository(name: str, revision: str | None = None) -> Edit:
    """Set the repository to folder `name` and, if `revision` is given, the revision to that commit."""

    def edit(tree: Tree) -> Callable[[], object]:
        key = "plans.theirs.runs.pinned.program"
        edits = [configure(f"{key}.repository", str(tree.path / name))]
        if revision:
            found = git(tree.path / name, "rev-parse", revision).strip()
            edits.append(configure(f"{key}.revision", found))
        return both(*edits)(tree)

    return edit


@pytest.mark.parametrize(
    ("edit", "jobs", "fetched"),
    [
        (append("theirs/train.py", "# edited\n"), HERE, False),
        # A dataset's files are identified by size and modification time; undoing `touch` also restores the time.
        (both(touch("read.txt"), append("read.txt", "more\n")), HERE + PINNED, False),
        (configure("plans.theirs.runs.here.program", {"values": {"seconds": 0.02}}), HERE, False),
        (configure("plans.theirs.settings.program.environment", {"A": "b"}), HERE + PINNED, False),
        (repository("published", "HEAD"), PINNED, True),
        (repository("moved"), PINNED, True),
        (append("published/train.py", "# not committed\n"), [], False),
        (touch("theirs/train.py"), [], False),
    ],
    ids=["script", "file", "value", "variable", "revision", "address", "no commit", "touched"],
)
def test_rows(tree: Tree, edit: Edit, jobs: list[str], fetched: bool) -> None:
    undo = edit(tree)
    try:
        found = tree.planned(targets=["all"]).names
    finally:
        undo()
    assert [name for name in found if name.startswith("program ")] == jobs, found
    assert any(name.startswith("checkout ") for name in found) is fetched, found
    assert bool(found) is bool(jobs), found
