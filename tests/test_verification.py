"""Data files that were damaged where neither their size nor their time shows it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dlscale.core.errors import UserError
from dlscale.data import staging
from dlscale.data.manifest import Manifest
from dlscale.parallel.world import World
from dlscale.train.around import verify
from tests.conftest import ERA5, ERA5_RUN, make_run, stage, train


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


def first(manifest: Path, split: str = "train") -> Path:
    data = Manifest.read(manifest)
    return data.path(data.splits[split][0])


@pytest.mark.parametrize("kind", ["throughput", "evaluate"])
def test_a_flipped_bit_ends_every_stage_that_reads_the_file(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    run = make_run(tmp_path / "run", "era5_vit", ERA5_RUN, ERA5).parent
    assert train(run, manifest) == 0
    damage(path := first(manifest, "train" if kind == "throughput" else "valid"))
    out = ["--out", tmp_path / "throughput.json", "--config", run / "config.yaml"] if kind == "throughput" else [run]
    capsys.readouterr()
    assert stage(kind, *out, "--manifest", manifest) == 2
    assert f"{path}: damaged: its content changed" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["rows", "latitude", "mean"])
def test_a_number_that_was_changed_in_a_manifest_is_refused(manifest: Path, change: str) -> None:
    """Fewer rows trained other weights under the same fingerprint, and halved latitudes changed metrics."""
    values = json.loads(manifest.read_text())
    if change == "rows":
        values["splits"]["train"][0]["rows"] -= 8
    elif change == "latitude":
        values["extra"]["latitude"] = [degrees / 2 for degrees in values["extra"]["latitude"]]
    else:
        values["fields"]["fields"]["mean"][0] += 1e-6
    manifest.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"manifest.json: .*not as it was written.*delete it and run the workflow"):
        Manifest.read(manifest)
    del values["own"]  # as an earlier version wrote them
    manifest.write_text(json.dumps(values))
    with pytest.raises(UserError, match="not as it was written"):
        Manifest.read(manifest)


def test_once(manifest: Path) -> None:
    """A file is read again when somebody wrote to it, though he set its time back; others are not."""
    data, splits = Manifest.read(manifest), ("train", "valid")
    files = data.splits["train"] + data.splits["valid"]
    assert all(file.verifiable for file in files) and len(files) >= 2

    assert staging.unverified(data, splits) == files, "copied to here"
    assert staging.damaged(data, files) == []
    staging.remember(data, files)
    assert staging.unverified(data, splits) == []
    damage(data.path(files[1]))
    assert staging.unverified(data, splits) == [files[1]]
    (message,) = staging.damaged(data, files)
    assert message.startswith(f"{data.path(files[1])}: damaged: ")
    (manifest.parent / staging.RECORD).write_text("[torn")
    assert staging.unverified(data, splits) == files


class Ranks(World):
    """Two ranks, of which this is the second; the first is on a node of its own."""

    def gather(self, value: Any) -> list[Any]:
        return ["elsewhere" if isinstance(value, str) and value else value, value]


def test_each_node_reads_its_own_copy(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    monkeypatch.setattr(staging, "damaged", lambda manifest, files: read.append(len(files)) or [])
    copy = tmp_path / f"dlscale-{os.getuid()}" / "0123"
    shutil.copytree(manifest.parent, copy)
    for folder in (manifest.parent, copy):
        (folder / staging.RECORD).unlink(missing_ok=True)
        verify(Manifest.read(folder / "manifest.json"), ("train", "valid"), Ranks(rank=1, size=2))
    assert read[0] < read[1] and not (manifest.parent / staging.RECORD).exists() and (copy / staging.RECORD).exists()


def test_what_was_described_here_is_known(era5_data: Path) -> None:
    """Its digests were made a moment ago: nothing is read twice."""
    data = Manifest.read(era5_data / "manifest.json")
    record = json.loads((era5_data / staging.RECORD).read_text())
    assert set(record) == {file.path for files in data.splits.values() for file in files}
