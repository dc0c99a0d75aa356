"""Data files that were damaged where neither their size nor their time shows it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dlscale.config.run import Geometry
from dlscale.config.site import Site
from dlscale.core.machine import VERIFY
from dlscale.data import verification
from dlscale.data.manifest import Manifest
from dlscale.launch.launcher import Place, launch
from tests.conftest import ERA5, ERA5_RUN, make_run, train


def damage(path: Path) -> None:
    """Turn one bit in the middle of a file, as a disk might."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.fixture
def manifest(era5_data: Path, tmp_path: Path) -> Path:
    return shutil.copytree(era5_data, tmp_path / "data") / "manifest.json"


def first(manifest: Path) -> Path:
    data = Manifest.read(manifest)
    return data.path(data.splits["train"][0])


def test_a_flipped_bit_ends_a_training_before_its_first_step(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one message; put back, the file is trained on, and not read again."""
    run = make_run(tmp_path / "run", "era5_vit", ERA5_RUN, ERA5).parent
    path = first(manifest)
    sound = path.read_bytes()
    damage(path)
    assert train(run, manifest) == 2
    error = capsys.readouterr().err
    assert f"{path}: damaged: its content changed since it was described (SHA-256 " in error
    assert len(error.strip().splitlines()) == 1 and not (run / "metrics.jsonl").exists()
    path.write_bytes(sound)
    assert train(run, manifest) == 0


def test_once(manifest: Path) -> None:
    """A file is read again when somebody wrote to it, though he set its time back; others are not."""
    data = Manifest.read(manifest)
    files = data.splits["train"] + data.splits["valid"]
    assert all(file.verifiable for file in files) and len(files) >= 2
    splits = ("train", "valid")
    assert verification.unverified(data, splits, "once") == files, "copied to here"
    assert verification.damaged(data, files) == []
    verification.remember(data, files)
    assert verification.unverified(data, splits, "once") == []
    assert verification.unverified(data, splits, "always") == files
    damage(data.path(files[1]))
    assert verification.unverified(data, splits, "once") == [files[1]]
    assert verification.unverified(data, splits, "never") == []
    (message,) = verification.damaged(data, files)
    assert message.startswith(f"{data.path(files[1])}: damaged: ")
    (manifest.parent / verification.RECORD).write_text("[torn")
    assert verification.unverified(data, splits, "once") == files


def test_what_was_described_here_is_known(era5_data: Path) -> None:
    """Its digests were made a moment ago: nothing is read twice."""
    data = Manifest.read(era5_data / "manifest.json")
    record = json.loads((era5_data / verification.RECORD).read_text())
    assert set(record) == {file.path for files in data.splits.values() for file in files}


def test_the_site_says_when(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the environment: no run is another one for it."""
    here, one = Place(folder="/work", sources="/work/workflow_scripts", uid=1, gid=1), Geometry()
    words = launch(Site.model_validate({"verify": "always"}), here, one)
    assert words[:2] == ["env", f"{VERIFY}=always"]
    assert not any(VERIFY in word for word in launch(Site(), here, one))
    monkeypatch.delenv(VERIFY, raising=False)
    assert verification.told() == "once"
    monkeypatch.setenv(VERIFY, "never")
    assert verification.told() == "never"
    monkeypatch.setenv(VERIFY, "sometimes")
    with pytest.raises(verification.UserError, match="'sometimes': expected one of once, always, never"):
        verification.told()
