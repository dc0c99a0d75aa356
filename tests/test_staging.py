"""Copies of a dataset on a node's disk or in its memory are complete and made once; silent damage is detected."""

from __future__ import annotations

import errno
import json
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from dlscale import cli
from dlscale.core.errors import UserError
from dlscale.core.machine import LOCAL_DISK
from dlscale.data import staging
from dlscale.data.manifest import Manifest
from dlscale.data.staging import staged
from dlscale.launch.launcher import PYTHON_HERE, launch
from dlscale.parallel.world import World
from dlscale.train.around import verify
from tests.conftest import ERA5, ERA5_RUN, make_run, records, stage, train
from tests.test_launcher import FOUR, HERE, site
from tests.test_parallel import configure, train_by


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that simulates the node's disk and the node's memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setenv(LOCAL_DISK, str(folder))
    monkeypatch.setattr(staging, "MEMORY", str(folder))
    return folder


def files(disk: Path) -> list[Path]:
    return sorted(path for path in disk.rglob("*") if path.is_file() and path.suffix != ".lock" and path.name != "lock")


@pytest.mark.parametrize("place", ["memory", "local"])
def test_the_copy_equals_the_data(era5_data: Path, disk: Path, place: Any) -> None:
    original = Manifest.read(era5_data / "manifest.json")
    with staged(era5_data / "manifest.json", place) as path:
        copy = Manifest.read(path)
        copy.check_files()
        for split in ("train", "valid"):
            for one, other in zip(original.files(split), copy.files(split), strict=True):
                assert copy.path(other).is_relative_to(disk)
                assert copy.path(other).read_bytes() == original.path(one).read_bytes()
        assert copy.fields == original.fields and copy.extra == original.extra
        described = [
            {split: [f.digest for f in each.splits[split]] for split in each.splits} for each in (original, copy)
        ]
        assert described[0] == described[1], (
            "digests must stay, even of splits that are not copied, so that checkpoints stay valid"
        )
    # A copy in memory is removed; a copy on a disk serves the next run.
    assert bool(files(disk)) == (place == "local")


def test_each_run_of_a_paired_timing_reads_by_its_own_staging(era5_data: Path, disk: Path) -> None:
    manifest = str(era5_data / "manifest.json")
    plain, near = (json.dumps({"loader": {"staging": place}}) for place in ("none", "memory"))
    for own, first in ((near, plain), (plain, near)):
        args = Namespace(stage="throughput", config=own, manifest=manifest, beside=first, beside_manifest=None)
        with cli._near(args):
            at = {own: args.manifest, first: args.beside_manifest}
        assert at[plain] == manifest and at[near].startswith(str(disk))


@pytest.mark.slow
@pytest.mark.parametrize(
    "loader", [{"kind": "direct", "workers": 1}, pytest.param({"kind": "torch", "workers": 1}, marks=pytest.mark.slow)]
)
def test_a_training_on_the_copy_is_the_same(
    tmp_path: Path, era5_data: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, loader: dict[str, Any]
) -> None:
    opened: list[str] = []
    check = Manifest.check_files
    monkeypatch.setattr(Manifest, "check_files", lambda self: (opened.append(str(self.folder)), check(self)))
    weights = []
    for place in ("none", "local"):
        make_run(tmp_path / place, "era5_vit", {**ERA5_RUN, "loader": {**loader, "staging": place}}, ERA5)
        assert train(tmp_path / place, era5_data / "manifest.json") == 0
        weights.append(torch.load(tmp_path / place / "model.pt", weights_only=True))
    assert opened[-1].startswith(str(disk))
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    one, other = (records(tmp_path / place) for place in ("none", "local"))
    assert [epoch["valid_loss"] for epoch in one] == [epoch["valid_loss"] for epoch in other]


@pytest.mark.slow
def test_processes_of_a_node_share_one_copy(tmp_path: Path, era5_data: Path, disk: Path) -> None:
    folder = configure(tmp_path / "run", "era5_vit", 2, loader={"kind": "direct", "workers": 1, "staging": "local"})
    train_by(2, folder, era5_data)
    logs = [path.read_text() for path in folder.glob("train*.log")]
    assert len(logs) == 2 and sum("copied" in text for text in logs) == 1
    assert len([path for path in disk.glob("*/*") if path.is_dir()]) == 1


@pytest.mark.parametrize("what", ["nothing", "removed", "cut", "zeros"])
@pytest.mark.parametrize("of", ["data", "stats", "manifest.json"])
def test_a_damaged_copy_heals(era5_data: Path, disk: Path, what: str, of: str) -> None:
    """Removed, truncated or zeroed files are copied again; intact files are not copied again."""
    with staged(era5_data / "manifest.json", "local") as manifest:
        copy = Manifest.read(manifest)
        places = {"data": copy.path(copy.files("train")[1]), "stats": copy.folder / "stats" / "hour_means.npy"}
        victim = places.get(of, copy.folder / of)
        whole = {path: (path.read_bytes(), path.stat().st_ctime_ns) for path in files(disk)}
    content = whole[victim][0]
    if what == "removed":
        victim.unlink()
    elif what != "nothing":
        victim.write_bytes(content[: len(content) // 2] if what == "cut" else bytes(len(content)))
    with staged(era5_data / "manifest.json", "local") as again:
        assert again == manifest
        anew = {path for path in files(disk) if path.stat().st_ctime_ns != whole[path][1]} - {manifest}
        assert anew == (set() if what == "nothing" else {victim} - {manifest})
        assert all(path.read_bytes() == content for path, (content, _) in whole.items())


@pytest.mark.parametrize("place", ["memory", "local"])
def test_data_that_do_not_fit_are_refused_with_sizes(
    era5_data: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    if place == "memory":
        monkeypatch.setattr(staging, "free_memory", lambda: 1000)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 800}))
    message = rf"loader\.staging: {place}: .* [\d.]+ [kM]B, .* 800 B free"
    with pytest.raises(UserError, match=message), staged(era5_data / "manifest.json", place):
        pass
    assert files(disk) == []


def test_the_sites_disk_reaches_the_stages() -> None:
    """The path of the node's disk is passed on unchanged, because the node expands the variables in the path."""
    found = launch(site(engine="none", starter="direct", local_disk="$TMPDIR/x"), HERE, FOUR)
    assert found == ["env", f"{LOCAL_DISK}=$TMPDIR/x", *PYTHON_HERE]
    found = launch(site(engine="podman", local_disk="/local"), HERE, FOUR)
    assert f"--env={LOCAL_DISK}=/local" in found and "--volume=/local:/local" in found
    assert LOCAL_DISK not in " ".join(launch(site(engine="none", local_disk="/local"), HERE)), (
        "data stages must not use the node's disk"
    )
    with pytest.raises(ValueError, match="containers of podman do not get the job's variables"):
        site(engine="podman", local_disk="$TMPDIR")


@pytest.mark.parametrize("what", ["a link", "mode 0750"])
def test_a_folder_of_another_user_is_refused(era5_data: Path, tmp_path: Path, disk: Path, what: str) -> None:
    """A folder that other users can enter is refused, and so is a link, which could redirect the copy."""
    mine, elsewhere = disk / f"dlscale-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if what == "a link":
        mine.symlink_to(elsewhere)
    else:
        mine.mkdir(mode=0o750)
    refused = pytest.raises(
        UserError, match=f"^{mine}: expected a folder, not a link, .* user {os.getuid()} .* mode 0700"
    )
    with refused, staged(era5_data / "manifest.json", "memory"):
        pass
    assert not files(elsewhere) and set(files(disk)) <= {mine}


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_disk_that_cannot_be_written_to_is_one_message(
    era5_data: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """If the disk is read-only or full, one message names the disk, and does not suggest a problem with `results`."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(shutil, "copy2", fail)
    message = rf"/disk/dlscale-\d+: data cannot be copied .* \({os.strerror(number)}\); set loader\.staging to none"
    with pytest.raises(UserError, match=message), staged(era5_data / "manifest.json", "local"):
        pass


def test_a_copy_in_memory_stays_while_a_run_reads_it(era5_data: Path, disk: Path) -> None:
    """A copy in memory stays while a run reads it. The next run removes the copy of a killed run."""
    left = disk / f"dlscale-{os.getuid()}" / "0123456789abcdef" / "train"
    left.mkdir(parents=True)
    left.parents[1].chmod(0o700)
    with staged(era5_data / "manifest.json", "memory") as manifest:
        assert not left.exists()
        with staged(era5_data / "manifest.json", "memory") as same:
            assert same == manifest
        Manifest.read(manifest).check_files()
    assert files(disk) == []


@pytest.mark.parametrize("given", ["", "$NOBODY_SET_THIS/x"])
def test_staging_without_a_local_disk_is_refused(era5_data: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(LOCAL_DISK, given)
    with pytest.raises(UserError, match=r"set site\.local_disk"), staged(era5_data / "manifest.json", "local"):
        pass


# ---- damage that changes neither size nor time of a file ------------------------------------------------


def damage(path: Path) -> None:
    """Flip one bit in the middle of a file, as a failing disk could."""
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
    assert f"{path}: damaged: the content changed" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["rows", "latitude", "mean"])
def test_a_number_that_was_changed_in_a_manifest_is_refused(manifest: Path, change: str) -> None:
    """An edited manifest is refused; it would give other weights or metrics under the same fingerprint."""
    values = json.loads(manifest.read_text())
    if change == "rows":
        values["splits"]["train"][0]["rows"] -= 8
    elif change == "latitude":
        values["extra"]["latitude"] = [degrees / 2 for degrees in values["extra"]["latitude"]]
    else:
        values["fields"]["fields"]["mean"][0] += 1e-6
    manifest.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"manifest.json: .*changed after it was written.*delete"):
        Manifest.read(manifest)
    del values["own"]  # manifests of earlier versions lack this key
    manifest.write_text(json.dumps(values))
    with pytest.raises(UserError, match="changed after it was written"):
        Manifest.read(manifest)


def test_files_are_verified_once(manifest: Path) -> None:
    """A file is read again after a change, even if its modification time was reset; unchanged files are not."""
    data, splits = Manifest.read(manifest), ("train", "valid")
    files = data.splits["train"] + data.splits["valid"]
    assert all(file.verifiable for file in files) and len(files) >= 2

    assert staging.unverified(data, splits) == files, "files of a copied dataset must not count as verified"
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
    """World of the second of two ranks; the first rank is on another node."""

    def gather(self, value: Any) -> list[Any]:
        return ["elsewhere" if isinstance(value, str) and value else value, value]


def test_each_node_verifies_its_own_copy(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    monkeypatch.setattr(staging, "damaged", lambda manifest, files: read.append(len(files)) or [])
    copy = tmp_path / f"dlscale-{os.getuid()}" / "0123"
    shutil.copytree(manifest.parent, copy)
    for folder in (manifest.parent, copy):
        (folder / staging.RECORD).unlink(missing_ok=True)
        verify(Manifest.read(folder / "manifest.json"), ("train", "valid"), Ranks(rank=1, size=2))
    assert read[0] < read[1] and not (manifest.parent / staging.RECORD).exists() and (copy / staging.RECORD).exists()


def test_files_described_on_this_machine_are_not_read_again(era5_data: Path) -> None:
    """The machine that computed the files' digests does not verify the files again."""
    data = Manifest.read(era5_data / "manifest.json")
    record = json.loads((era5_data / staging.RECORD).read_text())
    assert set(record) == {file.path for files in data.splits.values() for file in files}
