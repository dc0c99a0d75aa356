"""Damaged files end in a message: a few of each reader here, and 250 of each by `make test-mutations`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutate_files

#: These are made by whole stages.
TRAINED = ("manifest", "described data", "weights", "checkpoint", "records")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in TRAINED else ()) for name in mutate_files.READERS]
)
def test_a_damaged_file_ends_in_a_message(tmp_path: Path, name: str) -> None:
    shown: list[str] = []
    mutate_files.run(name, 5, 0, tmp_path, shown.append)
    assert not shown, "\n".join(shown)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_damaged_files(tmp_path: Path) -> None:
    shown: list[str] = []
    for name in mutate_files.READERS:
        mutate_files.run(name, 60, 1, tmp_path / name.replace(", ", "-"), shown.append)
    assert not shown, "\n".join(shown)


@pytest.mark.slow
def test_what_is_at_fault_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that lets an exception through; one that crashes or does not end, in its library, is counted."""

    def read(folder: Path) -> None:
        if (text := (folder / "file").read_bytes()) != b"whole" * 9:
            [lambda: {}[text], lambda: mutate_files.os.abort(), lambda: mutate_files.time.sleep(9)][sum(text) % 3]()

    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"whole" * 9)

    monkeypatch.setitem(mutate_files.READERS, "IDX", (make, read, "file"))
    monkeypatch.setattr(mutate_files, "LIMIT_S", 0.5)
    shown: list[str] = []
    found = mutate_files.run("IDX", 24, 0, tmp_path, shown.append)
    assert found["traceback"] and found["crash"] and found["hang"] and len(shown) == found["traceback"]
