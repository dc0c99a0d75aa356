"""Bad input and bad places: each ends in one clear message and exit status 2, with nothing half-written."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest

from dlscale import cli
from dlscale.core import files, telemetry
from dlscale.core.errors import UserError
from dlscale.core.events import events
from dlscale.core.files import read_json, sha256, write_json
from dlscale.core.metrics import read_epochs
from dlscale.data import describe as data_describe
from dlscale.data import parts
from dlscale.data.manifest import Manifest
from dlscale.data.mapped import map_chunks
from dlscale.data.parts import load_dataset
from dlscale.datasets.cosmo import describe as cosmo_describe
from dlscale.datasets.era5 import describe as era5_describe
from dlscale.datasets.mnist.source import read_idx
from dlscale.report.compare import read_rows
from dlscale.train.weights import read_weights
from tests.conftest import COSMO, COSMO_RUN, ERA5, ERA5_RUN, ROOT, make_dataset, make_parts, make_run, stage
from tests.mutate_files import READERS
from tests.raw_files import cosmo, era5, published, volume, write_volume, write_years
from tests.waiting import PATIENCE

Check = Callable[..., str]


def contents(folder: Path) -> dict[str, bytes]:
    """Return what a folder holds, hidden files included, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Check:
    """Return a function that runs a stage, asserts that it is refused and leaves no trace, and returns the message."""

    def run(*arguments: object, folder: Path = tmp_path) -> str:
        before = contents(folder)
        capfd.readouterr()
        assert stage(*arguments) == cli.USER_ERROR
        return one_message(capfd.readouterr().err, str(arguments[0]), folder, before)

    return run


def one_message(error: str, name: str, folder: Path, before: dict[str, bytes]) -> str:
    assert error.startswith(f"dlscale {name}: ") and error.count("\n") == 1 and error.endswith("\n"), error
    assert "Traceback" not in error and "Error" not in error, error
    after = contents(folder)
    for kept in (".lock", ".log"):  # a lock file stays, released
        after = {path: content for path, content in after.items() if not path.endswith(kept)}
        before = {path: content for path, content in before.items() if not path.endswith(kept)}
    assert after == before
    return error.removeprefix(f"dlscale {name}: ").strip()


def configured(folder: Path, settings: dict[str, Any]) -> list[object]:
    """Write a dataset's settings; return the arguments that name them."""
    assert stage("configure", "--settings", json.dumps(settings), "--out", folder / "config.yaml") == 0
    return ["--config", folder / "config.yaml"]


def preprocess(folder: Path, settings: dict[str, Any], *raw: Path, part: str = "train/a") -> list[object]:
    """Return the command that preprocesses a part."""
    options = ["--part", part, "--source", *raw, "--out", folder / "piece.h5"]
    return ["preprocess", *configured(folder, settings), *options]


def describe(folder: Path, settings: dict[str, Any], *raw: Path) -> list[object]:
    """Return the command that describes a dataset."""
    products = ["--manifest", folder / "manifest.json", "--stats", folder / "stats"]
    return ["describe", *configured(folder, settings), *(["--source", *raw] if raw else []), *products]


def damaged(folder: Path, change: Callable[[dict[str, Any]], object] = lambda fields: None) -> Path:
    """Write a volume with a change to its fields."""
    fields: dict[str, Any] = volume((8, 8, 8))
    change(fields)
    return write_volume(folder / "a.h5", fields)


# ---- raw volumes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_file(tmp_path: Path, refused: Check, share: float) -> None:
    path = damaged(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    text = refused(*preprocess(tmp_path, cosmo([path], [path.with_name("b.h5")]), path))
    assert str(path) in text and "truncated" in text


def test_a_file_of_another_kind(tmp_path: Path, refused: Check) -> None:
    path = tmp_path / "a.h5"
    path.write_text("<html>404 Not Found</html>")
    assert "not a readable HDF5 file" in refused(*preprocess(tmp_path, cosmo([path], [tmp_path / "b.h5"]), path))
    folder = tmp_path / "folder.h5"
    folder.mkdir()
    text = refused(*preprocess(tmp_path, cosmo([folder], [tmp_path / "b.h5"]), folder, part="train/folder"))
    assert str(folder) in text


def corrupt(path: Path) -> None:
    """Damage the stored bytes of a compressed dataset, so that it opens but cannot be read."""
    with h5py.File(path, "r") as file:
        offset = file["Nbody"].id.get_chunk_info(0).byte_offset
    with open(path, "r+b") as raw:
        raw.seek(offset)
        raw.write(b"\xff" * 64)


def test_a_file_that_opens_but_cannot_be_read(tmp_path: Path, refused: Check) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for name, values in published(volume((8, 8, 8))).items():
            file.create_dataset(name, data=values, compression="gzip")
    corrupt(path)
    other = write_volume(tmp_path / "b.h5", published(volume((8, 8, 8))))
    for command in (
        preprocess(tmp_path, cosmo([path], [other]), path),
        describe(tmp_path, cosmo([path], [other], "prepared"), path, other),
    ):
        text = refused(*command)
        assert f"{path}: cannot be read (" in text and "Nbody" in text and "damaged" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.update(NBody=f.pop("Nbody")), ("no dataset 'Nbody'", "NBody")),
        (lambda f: f.update(Nbody=f["Nbody"][:3]), ("Nbody", "4 channels first", "(3, 8, 8, 8)")),
        (lambda f: f.update(Hydro=f["Hydro"][0]), ("Hydro", "4 axes", "(8, 8, 8)")),
        (lambda f: f.update(Hydro=f["Hydro"].astype(np.int32)), ("Hydro", "floating-point", "int32")),
        (lambda f: f.update(Hydro=f["Hydro"][:, :7]), ("differ in size", "(8, 8, 8)", "(7, 8, 8)")),
    ],
    ids=["name", "channels", "axes", "type", "grids"],
)
def test_other_names_and_shapes(tmp_path: Path, refused: Check, change: Any, words: tuple[str, ...]) -> None:
    path = damaged(tmp_path, change)
    text = refused(*preprocess(tmp_path, cosmo([path], [tmp_path / "b.h5"]), path))
    assert str(path) in text and all(word in text for word in words), text
    other = write_volume(tmp_path / "b.h5", published(volume((8, 8, 8))))
    text = refused(*describe(tmp_path, cosmo([path], [other], "prepared"), path, other))
    assert str(path) in text and all(word in text for word in words), text


@pytest.mark.parametrize(("value", "factor"), [(np.nan, 1), (np.inf, 1), (-np.inf, 2)])
def test_values_that_are_not_finite(tmp_path: Path, refused: Check, value: float, factor: int) -> None:
    """The message says where: file, field, channel and row, even of a density, whose logarithm has a floor."""

    def change(fields: dict[str, np.ndarray]) -> None:
        fields["Hydro"][0, 5, 1, 2] = fields["Hydro"][3, 6, 0, 0] = value

    path = damaged(tmp_path, change)
    text = refused(*preprocess(tmp_path, cosmo([path], [tmp_path / "b.h5"], downsample=factor), path))
    assert f"{path}: Hydro: channel 'gas_density' is not finite at row 5 " in text
    other = write_volume(tmp_path / "b.h5", published(volume((8, 8, 8))))
    text = refused(*describe(tmp_path, cosmo([path], [other], "prepared"), path, other))
    assert f"{path}: Hydro: channel 'gas_density' is not finite at row 5 " in text


def test_an_overdensity_is_no_density(tmp_path: Path, refused: Check) -> None:
    """Its negative half would be raised to the logarithm's floor, in silence."""

    def change(fields: dict[str, np.ndarray]) -> None:
        fields["Nbody"][0] = fields["Nbody"][0] / fields["Nbody"][0].mean() - 1

    path = damaged(tmp_path, change)
    for factor in (1, 2):
        settings = cosmo([path], [tmp_path / "b.h5"], downsample=factor)
        text = refused(*preprocess(tmp_path, settings, path))
        assert f"{path}: Nbody: channel 'dm_density': " in text and "% of its cells are negative (down to -" in text
        assert "expected values of at least 0, in mean density; to an overdensity (x / mean - 1) add 1" in text


def link(path: Path, secret: Path) -> None:
    path.unlink()
    with h5py.File(path, "w") as file:
        file["Nbody"] = h5py.ExternalLink(str(secret), "values")


def store_outside(path: Path, secret: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("Nbody", (4, 8, 8, 8), "f4", external=[(str(secret), 0, 8192)])


def put_together(path: Path, secret: Path) -> None:
    layout = h5py.VirtualLayout((4, 8, 8, 8), "f4")
    layout[:] = h5py.VirtualSource(str(secret), "values", (4, 8, 8, 8))
    with h5py.File(path, "w") as file:
        file.create_group("deep").create_virtual_dataset("Nbody", layout)
        file["Nbody"] = h5py.SoftLink("/deep/Nbody")


@pytest.mark.parametrize("lead", [link, store_outside, put_together])
def test_a_file_that_leads_to_other_files(tmp_path: Path, refused: Check, lead: Any) -> None:
    """Who sends an HDF5 file is not to see what else lies on the machine that reads it."""
    path, secret = damaged(tmp_path), tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["values"] = np.ones((4, 8, 8, 8), np.float32)
    lead(path, secret)
    other = write_volume(tmp_path / "b.h5", published(volume((8, 8, 8))))
    readers: list[Callable[[], list[object]]] = [
        lambda: preprocess(tmp_path, cosmo([path], [other]), path),
        lambda: describe(tmp_path, cosmo([path], [other], "prepared"), path, other),
        lambda: preprocess(tmp_path, era5_files(path), path, part="train/2001"),
        lambda: preprocess(tmp_path, starter(path), path, path, part="train/train"),
    ]
    for command in readers:
        text = refused(*command())
        assert f"{path}: 'Nbody' lies in other files, which are not read: copy its values into this one" in text


def era5_files(path: Path) -> dict[str, Any]:
    split = {"train": ["2001-01-01", "2001-01-03"], "valid": ["2001-01-04", "2001-01-05"]}
    return {"kind": "era5", "source": {"kind": "files", "paths": [str(path)]}, "channels": ["t2m"], "split": split}


def starter(path: Path) -> dict[str, Any]:
    files, array = {"input": str(path), "target": str(path)}, {"array": "Nbody"}
    source = {"kind": "arrays", "all": files, "shares": {"train": 0.5, "valid": 0.5}, "input": array, "target": array}
    return {"kind": "starter", "source": source}


def test_a_pipe_is_no_file(tmp_path: Path, refused: Check) -> None:
    os.mkfifo(tmp_path / "a.h5")
    settings = cosmo([tmp_path / "a.h5"], [tmp_path / "b.h5"])
    assert "a.h5: a pipe or a device; expected a file" in refused(*preprocess(tmp_path, settings, tmp_path / "a.h5"))
    os.mkfifo(pipe := tmp_path / "a.npy")
    assert "a.npy: a pipe" in refused(*preprocess(tmp_path, starter(pipe), pipe, pipe, part="train/train"))
    with pytest.raises(UserError, match=r"a\.npy: a pipe or a device; expected a file"):
        read_idx(pipe, 3)


@pytest.mark.parametrize(
    "reader",
    [sha256, read_json, read_epochs, Manifest.read, read_weights, telemetry.read, read_rows, lambda p: [*events(p)]],
)
def test_nothing_waits_for_a_pipe(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    os.mkfifo(pipe := tmp_path / "events.out.tfevents.1")
    with pytest.raises(UserError, match="a pipe or a device; expected"):
        reader(pipe)


def test_a_channel_that_does_not_vary(tmp_path: Path, refused: Check) -> None:
    def change(fields: dict[str, np.ndarray]) -> None:
        fields["Nbody"][2] = 0.1

    path = damaged(tmp_path, change)
    other = write_volume(tmp_path / "b.h5", volume((8, 8, 8), 1))
    settings = cosmo([path], [other])
    for part, raw in (("train/a", path), ("valid/b", other)):
        piece, out = tmp_path / "piece.h5", tmp_path / f"{part}.h5"
        assert stage(*preprocess(tmp_path, settings, raw, part=part)) == 0
        assert stage("assemble", *configured(tmp_path, settings), "--pieces", piece, "--out", out) == 0
    text = refused(*describe(tmp_path, settings))
    assert "Nbody: channel 'dm_velocity_y' is constant over the training part" in text
    assert "channel 'dm_velocity_y' is constant" in refused(
        *describe(tmp_path, cosmo([path], [other], "prepared"), path, other)
    )


def test_rows_of_prepared_files_that_exceed_the_memory(tmp_path: Path, refused: Check) -> None:
    """Planes of a volume, states of a series; and arrays of an archive, which are read as a whole."""
    bound = "the dataset's `memory_mb` allows 1"
    paths = [write_volume(tmp_path / name, volume((2, 200, 200), seed)) for seed, name in enumerate(("a.h5", "b.h5"))]
    text = refused(*describe(tmp_path, cosmo(paths[:1], paths[1:], "prepared", memory_mb=1), *paths))
    assert f"{paths[0]}: one row needs 2 MB of buffers, {bound};" in text
    years = write_years(tmp_path / "years", {"train": {2000: 2}, "valid": {2001: 2}}, shape=(200, 300))
    text = refused(*describe(tmp_path, era5(years, memory_mb=1), *sorted(years.glob("*/*.h5"))))
    assert f"years: one row needs 2 MB of buffers, {bound};" in text
    np.savez(tmp_path / "a.npz", input=np.zeros((500, 1000)), target=np.zeros(500))
    files = {"input": str(tmp_path / "a.npz"), "target": str(tmp_path / "a.npz")}
    source = {"kind": "arrays", "all": files, "shares": {"train": 0.5, "valid": 0.5}}
    settings = {"kind": "starter", "source": source, "memory_mb": 1}
    text = refused(*preprocess(tmp_path, settings, tmp_path / "a.npz", tmp_path / "a.npz", part="train/train"))
    assert "'input' has 4 MB" in text and f"{bound}: raise it, or save the array as .npy" in text


def test_a_series_of_one_time(tmp_path: Path, refused: Check) -> None:
    """A pair needs two in one file, that is in one year."""
    years = write_years(tmp_path / "years", {"train": {2000: 4}, "valid": {2001: 1, 2002: 1}})
    text = refused(*describe(tmp_path, era5(years), *sorted(years.glob("*/*.h5"))))
    assert "valid: no file (of a year) holds two times, so there is no pair of states" in text


def test_prepared_files_that_were_not_prepared(tmp_path: Path, refused: Check) -> None:
    """Physical densities of 1e3 where their logarithm is expected would overflow; the other source kind is named."""
    paths = [write_volume(tmp_path / name, volume((8, 8, 8), seed)) for seed, name in enumerate(("a.h5", "b.h5"))]
    text = refused(*describe(tmp_path, cosmo(paths[:1], paths[1:], "prepared"), *paths))
    assert "Nbody: channel 'dm_density'" in text and "source kind files" in text


def test_more_pieces_than_rows(tmp_path: Path, refused: Check) -> None:
    path = damaged(tmp_path)
    text = refused(*preprocess(tmp_path, cosmo([path], [tmp_path / "b.h5"], pieces=9), path))
    assert "train/a: 8 rows do not fill 9 pieces" in text and "`pieces`" in text


def test_a_memory_bound_below_one_row(tmp_path: Path, refused: Check) -> None:
    path = write_volume(tmp_path / "a.h5", volume((2, 200, 200)))
    text = refused(*preprocess(tmp_path, cosmo([path], [tmp_path / "b.h5"], memory_mb=1), path))
    assert "one row needs 2 MB" in text and "`memory_mb` allows 1;" in text


def test_splits_and_factors_that_leave_nothing(tmp_path: Path, refused: Check) -> None:
    path = damaged(tmp_path)
    text = refused(*preprocess(tmp_path, cosmo([path], [tmp_path / "b.h5"], downsample=9), path))
    assert "downsample 9 is larger than the volume (8, 8, 8)" in text
    source = {"kind": "files", "paths": [str(path)], "fractions": {"train": 0.5, "valid": 0.1, "gap": 1}}
    text = refused(*preprocess(tmp_path, {"kind": "cosmo", "source": source}, path, part="valid/a"))
    assert "split 'valid' is empty" in text and "gap 1" in text


def test_names_that_are_not_there(tmp_path: Path, refused: Check, cosmo_data: Path) -> None:
    options = ["--config", cosmo_data / "config.yaml"]
    text = refused("acquire", *options, "--file", "box00.h5", "--out", tmp_path / "x")
    assert "did you mean 'box00" in text
    text = refused("preprocess", *options, "--part", "train/box9", "--source", "x", "--out", tmp_path / "x")
    assert "--part train/box9: no such part; there are: train/box000" in text


# ---- series ----------------------------------------------------------------------------------------------


def test_a_channel_that_is_not_there(tmp_path: Path, refused: Check, era5_data: Path) -> None:
    raw = era5_data / "source" / "2001.nc"
    settings = {
        "kind": "era5",
        "source": {"kind": "files", "paths": [str(raw)]},
        "channels": ["u11"],
        "split": {"train": ["2001-01-01", "2001-01-03"], "valid": ["2001-01-04", "2001-01-05"]},
    }
    text = refused(*preprocess(tmp_path, settings, raw, part="train/2001"))
    assert "channel 'u11'" in text and "did you mean 'u10'?" in text
    settings |= {"channels": ["u10"], "crop": [99, 99]}
    assert "crop 99 x 99" in refused(*preprocess(tmp_path, settings, raw, part="train/2001"))


YEARS = {"train": {2001: 6}, "valid": {2002: 6}}


def rewrite(path: Path, change: Callable[[np.ndarray], np.ndarray], name: str = "fields") -> None:
    with h5py.File(path) as file:
        values = file["fields"][()]
    with h5py.File(path, "w") as file:
        file.create_dataset(name, data=change(values))


PREPARED: dict[str, tuple[Callable[[Path], object], dict[str, Any], tuple[str, ...]]] = {
    "no training files": (lambda root: shutil.rmtree(root / "train"), {}, ("train", "no *.h5 files")),
    "no statistics": (lambda root: (root / "stats/global_stds.npy").unlink(), {}, ("global_stds.npy: no such file",)),
    "empty statistics": (lambda root: (root / "stats/global_means.npy").write_bytes(b""), {}, ("global_means.npy",)),
    "torn statistics": (
        lambda root: (root / "stats/global_means.npy").write_bytes((root / "stats/global_means.npy").read_bytes()[:-3]),
        {},
        ("global_means.npy: cannot be read (",),
    ),
    "statistics of fewer channels": (
        lambda root: np.save(root / "stats/global_means.npy", np.zeros((1, 2, 1, 1))),
        {},
        ("global_means.npy: expected finite numbers of the 3 channels", "(1, 2, 1, 1)"),
    ),
    "zero variance": (
        lambda root: np.save(root / "stats/global_stds.npy", np.array([1.0, 0.0, 1.0]).reshape(1, 3, 1, 1)),
        {"channels": ["u10", "v10", "t2m"]},
        ("channel 'v10' is constant",),
    ),
    "NaN in statistics": (
        lambda root: np.save(root / "stats/global_means.npy", np.full((1, 3, 1, 1), np.nan)),
        {},
        ("global_means.npy: expected finite numbers",),
    ),
    "complex statistics": (
        lambda root: np.save(root / "stats/global_means.npy", np.full((1, 3, 1, 1), 1j)),
        {},
        ("global_means.npy: expected finite numbers", "complex128"),
    ),
    "torn climatology": (
        lambda root: (root / "stats/time_means.npy").write_bytes(b"\x93NUMPY\x01"),
        {},
        ("time_means.npy: cannot be read (",),
    ),
    "climatology of another grid": (
        lambda root: np.save(root / "stats/time_means.npy", np.zeros((1, 3, 8, 16))),
        {},
        ("time_means.npy: expected finite numbers of the 3 channels, shape (1, 3, 9, 16)", "(1, 3, 8, 16)"),
    ),
    "too few names": (lambda root: None, {"channels": ["u10"]}, ("3 channels", "names 1")),
    "crop too large": (lambda root: None, {"crop": [10, 16]}, ("crop 10 x 16", "9 x 16")),
    "another dataset": (
        lambda root: rewrite(root / "train/2001.h5", lambda v: v, "Fields"),
        {},
        ("2001.h5: no dataset 'fields'; it holds: Fields",),
    ),
    "another shape": (
        lambda root: rewrite(root / "valid/2002.h5", lambda v: v[:, :, :8]),
        {},
        ("2002.h5", "(6, 3, 8, 16)", "(6, 3, 9, 16)"),
    ),
    "a truncated year": (
        lambda root: (root / "valid/2002.h5").write_bytes((root / "valid/2002.h5").read_bytes()[:-50]),
        {},
        ("2002.h5: cannot be read (", "not a readable HDF5 file", "truncated"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PREPARED)
def test_damaged_published_folders(tmp_path: Path, refused: Check, case: str) -> None:
    damage, more, words = PREPARED[case]
    root = write_years(tmp_path / "raw", YEARS)
    damage(root)
    text = refused(*describe(tmp_path / "data", era5(root, **more)))
    assert str(root) in text and all(word in text for word in words), text


# ---- training --------------------------------------------------------------------------------------------


def training(
    folder: Path, study: str, settings: dict[str, Any], dataset: dict[str, Any], manifest: Path
) -> list[object]:
    """Return the command that trains a run."""
    config = make_run(folder, study, settings, dataset)
    places = ["--checkpoints", folder / "checkpoints", "--out", folder / "out"]
    return ["train", "--config", config, "--manifest", manifest, "--device", "cpu", "--threads", 1, *places]


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a described dataset of two 8^3 volumes, and its settings."""
    paths = [
        write_volume(tmp_path / "raw" / name, published(volume((8, 8, 8), seed)))
        for seed, name in enumerate(("a.h5", "b.h5"))
    ]
    settings = cosmo(paths[:1], paths[1:], "prepared")
    return make_dataset(tmp_path / "data", settings), settings


def small_run(**changes: Any) -> dict[str, Any]:
    return {**COSMO_RUN, "model": {"widths": [2, 4]}, "samples": {"crop": 8, "train": 4, "valid": 4}, **changes}


@pytest.mark.slow
def test_a_crop_larger_than_the_box(tmp_path: Path, refused: Check, small: tuple[Path, dict[str, Any]]) -> None:
    """Of files the size is known only when they are read."""
    folder, settings = small
    run = small_run(samples={"crop": 16, "train": 4, "valid": 4})
    text = refused(*training(tmp_path / "run", "cosmo_unet", run, settings, folder / "manifest.json"))
    assert "samples.crop 16 is larger than the boxes of dataset data (8 cells)" in text


@pytest.mark.slow
def test_a_patch_that_does_not_fit_files(tmp_path: Path, refused: Check) -> None:
    settings = era5(write_years(tmp_path / "raw", YEARS))
    folder = make_dataset(tmp_path / "data", settings)
    text = refused(*training(tmp_path / "run", "era5_vit", ERA5_RUN, settings, folder / "manifest.json"))
    assert "model.patch 4 x 4 does not divide the fields of dataset data (9 x 16 points)" in text
    cropped = {**settings, "crop": [8, 16]}
    folder = make_dataset(tmp_path / "cropped", cropped)
    run = {**ERA5_RUN, "samples": {"dt": 6}}
    text = refused(*training(tmp_path / "run", "era5_vit", run, cropped, folder / "manifest.json"))
    assert "no pair of states 6 steps apart (samples.dt)" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "content", ["", '{"kind": "cosmo", "fie', "null", "[]", '"text"', "{}", '{"kind": 1, "fields": []}']
)
def test_a_torn_manifest(tmp_path: Path, refused: Check, content: str) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text(content)
    text = refused(*training(tmp_path / "run", "cosmo_unet", small_run(), COSMO, manifest))
    assert text.startswith(f"{manifest}: ") and "delete " in text


@pytest.mark.parametrize("content", [b'{"a": NaN}', b"[-Infinity]", b'{"a": "\xff"}', b"[" * 100_000, b"{"])
def test_what_is_no_json(tmp_path: Path, content: bytes) -> None:
    """Python's reader takes some of it."""
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json: not valid JSON \(.*\); delete it and run its stage again"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_json_has_not_are_never_written(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": [value]})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_manifest_without_its_files(tmp_path: Path, refused: Check, small: tuple[Path, dict[str, Any]]) -> None:
    """Scratch is purged: data vanish, or are torn, after they were described."""
    folder, settings = small
    command = training(tmp_path / "run", "cosmo_unet", small_run(), settings, folder / "manifest.json")
    data = tmp_path / "raw" / "a.h5"
    data.write_bytes(data.read_bytes()[:-100])
    assert f"{data}: {data.stat().st_size} bytes, expected {data.stat().st_size + 100}; it changed" in refused(*command)
    data.unlink()
    assert f"{data}: no such file" in refused(*command)
    (folder / "manifest.json").unlink()
    assert "manifest.json: no such file; run the stage that writes it first" in refused(*command)


@pytest.mark.slow
def test_a_split_that_the_dataset_has_not(tmp_path: Path, refused: Check, small: tuple[Path, dict[str, Any]]) -> None:
    folder, settings = small
    manifest = Manifest.read(folder / "manifest.json")
    del manifest.splits["valid"]
    manifest.write(folder / "manifest.json")
    command = training(tmp_path / "run", "cosmo_unet", small_run(), settings, folder / "manifest.json")
    assert "the dataset has no valid part; its splits: train" in refused(*command)


# ---- full disks ------------------------------------------------------------------------------------------


def fill(disk: Path, leave: int) -> None:
    """Leave so many bytes free."""
    with open(disk / "filler", "wb") as file:
        file.write(bytes(shutil.disk_usage(disk).free - leave))
    assert abs(shutil.disk_usage(disk).free - leave) < 8192


def test_a_full_disk(full_disk: Path, refused: Check, cosmo_data: Path, era5_data: Path) -> None:
    """Acquire, preprocess and assemble each write 1.2 MB; the disk is as free afterwards as it was before."""
    free = shutil.disk_usage(full_disk).free
    raw = cosmo_data / "source" / "box000.h5"
    piece = cosmo_data / "pieces" / "train" / "box000-0.h5"
    assert min(raw.stat().st_size, piece.stat().st_size) > free
    options = ["--config", cosmo_data / "config.yaml"]
    out = full_disk / "deep" / "out.h5"
    for command in (
        ["acquire", *options, "--file", "box000.h5", "--out", out],
        ["preprocess", *options, "--part", "train/box000", "--source", raw, "--out", out],
        ["assemble", *options, "--pieces", piece, "--out", out],
    ):
        text = refused(*command, folder=full_disk)
        assert text.startswith(f"{out}: no space left"), text
        assert shutil.disk_usage(full_disk).free >= free - 8192
    fill(full_disk, 40_000)
    options = ["--config", era5_data / "config.yaml"]
    raw, piece = era5_data / "source" / "2001.nc", era5_data / "pieces" / "train" / "2001-0.h5"
    for command in (
        ["preprocess", *options, "--part", "train/2001", "--source", raw, "--out", out],
        ["assemble", *options, "--pieces", piece, "--out", out],
    ):
        text = refused(*command, folder=full_disk)
        assert text.startswith(f"{out}: no space left"), text


@pytest.mark.slow
@pytest.mark.parametrize("leave", [4096])
def test_a_disk_too_full_for_a_simulated_year(full_disk: Path, era5_data: Path, leave: int) -> None:
    fill(full_disk, leave)
    before = contents(full_disk)
    out = full_disk / "2001.nc"
    arguments = ["acquire", "--config", era5_data / "config.yaml", "--file", "2001.nc", "--out", out]
    command = [sys.executable, "-m", "dlscale", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts")}
    # A process of its own: it may crash.
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == cli.USER_ERROR
    assert one_message(done.stderr.splitlines(keepends=True)[-1], "acquire", full_disk, before).startswith(
        f"{out}: no space left"
    )


def test_a_disk_too_full_for_the_log(full_disk: Path, cosmo_data: Path) -> None:
    """The message is on the terminal, without a traceback, and the status is that of a user's mistake."""
    (full_disk / "x.log").touch()
    fill(full_disk, 0)
    arguments = ["acquire", "--config", cosmo_data / "config.yaml", "--file", "box000.h5"]
    arguments += ["--out", full_disk / "out.h5", "--log", full_disk / "x.log"]
    command = [sys.executable, "-m", "dlscale", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts"), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == cli.USER_ERROR, done.stderr  # also where what was not written waits in a buffer
    assert done.stderr.startswith("dlscale acquire: ") and "no space left" in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


# ---- places that may not be written ------------------------------------------------------------------------


@contextlib.contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """Take the right to write in `folder` from everybody; root, who needs none, becomes another user for a while."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    root = os.geteuid() == 0
    if root:
        os.setegid(65534)
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
            os.setegid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_no_write_permission(refused: Check, cosmo_data: Path) -> None:
    """Neither new files and folders, nor files that are there, nor logs."""
    with tempfile.TemporaryDirectory() as name:  # not below tmp_path, where others may not even look
        place = Path(name)
        shutil.copytree(cosmo_data, place / "data")
        options = ["--config", place / "data" / "config.yaml"]
        raw, piece = (place / "data" / file for file in ("source/box000.h5", "pieces/train/box000-0.h5"))
        with without_rights(place):
            for out in (place / "data" / "new" / "out.h5", place / "data" / "train" / "box000.h5"):
                for command in (
                    ["acquire", *options, "--file", "box000.h5", "--out", out],
                    ["preprocess", *options, "--part", "train/box000", "--source", raw, "--out", out],
                    ["assemble", *options, "--pieces", piece, "--out", out],
                    ["configure", "--settings", "{}", "--out", out],
                ):
                    text = refused(*command, folder=place)
                    assert text.startswith(f"{out}: no permission to write here"), text
            log = place / "data" / "logs" / "x.log"
            text = refused("configure", "--settings", "{}", "--out", place / "x", "--log", log, folder=place)
            assert text.startswith(f"{log}: no permission to write here")


def test_a_file_where_a_folder_is_needed(tmp_path: Path, refused: Check, cosmo_data: Path) -> None:
    (tmp_path / "file").write_text("mine")
    options = ["--config", cosmo_data / "config.yaml"]
    raw, piece = cosmo_data / "source" / "box000.h5", cosmo_data / "pieces" / "train" / "box000-0.h5"
    out = tmp_path / "file" / "out.h5"
    for command in (
        ["acquire", *options, "--file", "box000.h5", "--out", out],
        ["preprocess", *options, "--part", "train/box000", "--source", raw, "--out", out],
        ["assemble", *options, "--pieces", piece, "--out", out],
        ["configure", "--settings", "{}", "--out", out, "--log", out],
    ):
        assert "a file stands where a folder is needed" in refused(*command)
    (tmp_path / "folder.h5" / "inside").mkdir(parents=True)
    text = refused("assemble", *options, "--pieces", piece, "--out", tmp_path / "folder.h5")
    assert "a folder where a file is" in text
    assert (tmp_path / "folder.h5" / "inside").is_dir()


# ---- odd names -------------------------------------------------------------------------------------------


ODD = [
    "two words.h5",
    'it\'s "quoted".h5',
    "$(touch pwned) `id` ;&|.h5",
    "größe-宇宙.h5",
    "-rf.h5",
    "a\tb*?[x].h5",
    "{x}.h5",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_odd_names_of_files_work(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "odd $HOME's folder"
    paths = [write_volume(home / split / name, volume((8, 8, 8), seed)) for seed, split in enumerate(("one", "two"))]
    folder = tmp_path / "da ta's"
    make_parts(folder, {**cosmo(paths[:1], paths[1:]), "pieces": 2})
    for part in parts.parts(load_dataset(folder / "config.yaml")):
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", part.name)
        with h5py.File(folder / part.split / f"{part.name}.h5") as file:
            assert file["Nbody"].shape == (4, 8, 8, 8)
            assert json.loads(file.attrs["source"])["raw_file"] == name
    assert not list(tmp_path.rglob("pwned"))


def test_simulated_settings_that_cannot_be(tmp_path: Path, refused: Check) -> None:
    """Stages check their settings again: somebody may have edited config.yaml."""
    for source, words in (({"grid": 17}, "multiple of 2"), ({"gird": 16}, "did you mean 'grid'?")):
        settings = {**COSMO, "source": {**COSMO["source"], **source}}
        text = refused("acquire", *configured(tmp_path, settings), "--file", "box000.h5", "--out", tmp_path / "x.h5")
        assert words in text and "config.yaml: source" in text
    settings = {**ERA5, "source": {**ERA5["source"], "days": 400}}
    text = refused("acquire", *configured(tmp_path, settings), "--file", "2001.nc", "--out", tmp_path / "x.nc")
    assert "source.days" in text and "366" in text


@pytest.mark.slow
@pytest.mark.parametrize("words", [["schema"], ["cost", "--json"], ["doctor"]], ids=" ".join)
def test_who_stops_reading_hears_of_no_defect(words: list[str]) -> None:
    """As of `dlscale schema | head -1`: the status is that of SIGPIPE, and nothing is said."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "dlscale", *words]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=PATIENCE)
    finally:
        os.close(writer)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "defect" not in done.stderr, done.stderr


# ---- what is the file's fault, and what is not ----------------------------------------------------------------


def test_too_little_memory_is_no_damage(tmp_path: Path) -> None:
    """But where NumPy is asked for more than a file of this size can hold, that comes of what the file says."""
    small, large = tmp_path / "small", tmp_path / "large"
    for path, size in ((small, 1000), (large, 2**40)):
        path.touch()
        os.truncate(path, size)
    with (
        pytest.raises(UserError, match=r"small: cannot be read .*Unable to allocate.* the file may be torn"),
        files.reading(small),
    ):
        np.empty(2**44)
    for path in (large, tmp_path / "an address"):
        with pytest.raises(MemoryError), files.reading(path):
            np.empty(2**44)
    with pytest.raises(MemoryError), files.reading(small):  # who asks, and for how much, is not known
        raise MemoryError


def test_an_array_of_terabytes_in_a_small_file_is_damage(tmp_path: Path, refused: Check) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**44,)})
    with zipfile.ZipFile(tmp_path / "input.npz", "w") as archive:
        archive.writestr("input.npy", header.getvalue() + bytes(100))
    np.savez(tmp_path / "target.npz", target=np.arange(4))
    given = {key: str(tmp_path / f"{key}.npz") for key in ("input", "target")}
    settings = {"kind": "starter", "source": {"kind": "arrays", "all": given, "shares": {"train": 0.5, "valid": 0.5}}}
    raw = [tmp_path / f"{key}.npz" for key in given]
    message = refused(*preprocess(tmp_path, settings, *raw, part="train/train"))
    assert message.startswith(f"{tmp_path}/input.npz: cannot be read (Unable to allocate 128. TiB")


def test_values_beyond_the_end_of_a_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        place = file.create_dataset("x", data=np.arange(1000.0), chunks=(1000,)).id.get_chunk_info(0).byte_offset
    content = path.read_bytes()
    told = content.rfind(struct.pack("<Q", place), 0, place)  # in the tree of chunks, which has no checksum
    path.write_bytes(content[:told] + struct.pack("<Q", len(content) - 80) + content[told + 8 :])
    with (
        h5py.File(path) as file,
        pytest.raises(UserError, match=r"a.h5: values of '/x' are beyond its end; the file may"),
    ):
        map_chunks(file["x"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "module", "name"),
    [
        ("cosmo, prepared", cosmo_describe, "_measure"),
        ("era5, prepared", era5_describe, "_published_times"),
        ("ours", data_describe, "check_alike"),
        ("ours", era5_describe, "_timed"),
    ],
)
def test_a_defect_of_ours_is_not_told_as_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, module: ModuleType, name: str
) -> None:
    def defect(*_: object) -> None:
        raise KeyError("ours")

    def ours(folder: Path) -> None:
        made = {"config": folder / "config.yaml", "manifest": folder / "manifest.json", "stats": folder / "stats"}
        data_describe.main(argparse.Namespace(**made, source=[]))

    make, read = READERS[data][:2] if data != "ours" else (lambda folder: make_parts(folder, ERA5), ours)
    make(tmp_path / "data")
    monkeypatch.setattr(module, name, defect)
    with pytest.raises(KeyError, match="ours"):
        read(tmp_path / "data")
