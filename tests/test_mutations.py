"""Each function that reads a file format accepts a randomly damaged file, or refuses it with one message.

A reader must not raise another exception, crash or hang. `make test-mutations` damages the files of each reader 250
times.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from dlscale.config.run import load_run
from dlscale.core import files
from dlscale.core.errors import UserError
from dlscale.core.files import read_json
from dlscale.core.metrics import read_epochs
from dlscale.core.registry import study
from dlscale.data import describe, parts
from dlscale.data.manifest import Manifest
from dlscale.data.reads import load_dataset
from dlscale.data.store import Reader
from dlscale.extensions.imagenet_resnet50.imagenet.folder import pictures
from dlscale.extensions.imagenet_resnet50.imagenet.pack import Pack, write_pack
from dlscale.extensions.logs import imports
from dlscale.parallel.world import World
from dlscale.train.around import verify
from dlscale.train.provenance import Provenance
from dlscale.train.weight_files import read_weights
from tests.conftest import ERA5, ERA5_RUN, make_dataset, make_run, train
from tests.raw_files import cosmo, era5, published, volume, write_volume, write_years
from tests.test_era5_sources import FORMATS, atmosphere, write
from tests.test_import_log import write as write_log
from tests.test_mnist import write_idx

#: Time limit of a reader, seconds.
LIMIT_S = 20.0
FORK = multiprocessing.get_context("fork")

Read = Callable[[Path], object]


def sources(settings: Callable[[Path], dict[str, Any]]) -> Read:
    """Return a function that reads the first split of a dataset from the raw files in a folder."""

    def read(folder: Path) -> None:
        dataset = _dataset(settings(folder), folder)
        part = parts.parts(dataset)[0]
        source = parts.needed(dataset, "source", "open_source")(dataset, part, [Path(raw.origin) for raw in part.raws])
        with contextlib.closing(source):
            for row in range(source.fields[0].rows):
                source.read(row, row + 1)

    return read


def _dataset(raw: dict[str, Any], folder: Path) -> Any:
    files.write_json(folder.parent / "config.json", raw)
    return load_dataset(folder.parent / "config.json")


def prepared(settings: Callable[[Path], dict[str, Any]]) -> Read:
    """Return a function that writes a manifest of the prepared files in a folder, and then reads samples."""

    def read(folder: Path) -> None:
        dataset, out = _dataset(settings(folder), folder), folder.parent / "out"
        shutil.rmtree(out, ignore_errors=True)
        arguments = {
            "config": folder.parent / "config.json",
            "source": [r.origin for r in parts.raws(dataset).values()],
        }
        describe.main(argparse.Namespace(**arguments, manifest=out / "manifest.json", stats=out / "stats"))
        manifest = Manifest.read(out / "manifest.json")
        for name in manifest.fields:
            for file in manifest.files("train"):
                reader = Reader(manifest.path(file), name)
                reader[(slice(0, 2),)]
                reader.copy(tuple(slice(0, 1) for _ in reader.shape), np.empty([1] * len(reader.shape), np.float32))

    return read


def described(folder: Path) -> None:
    """Read a dataset through its manifest, as training and its metrics do."""
    manifest = Manifest.read(folder / "data" / "manifest.json")
    manifest.check_files()
    verify(manifest, ("train", "valid"), World())
    run = load_run(folder / "config.yaml", "train")
    study(run.study).metrics(run, manifest, torch.device("cpu")).answers(0)


def images(folder: Path) -> None:
    """Pack the images of class folders into one file, once unchanged and once decoded."""
    for form in ("encoded", "decoded"):
        write_pack(
            folder.parent / "pack.h5", pictures(folder, ["a", "b"])[0], ["a", "b"], form, lambda done, whole: None
        )


def pack(folder: Path) -> None:
    opened = Pack(folder / "pack.h5")
    for row in range(len(opened.labels)):
        opened.image(row)


def paired(kind: str, form: str, keys: tuple[str, str], suffix: str) -> Read:
    def settings(folder: Path) -> dict[str, Any]:
        given = {key: str(folder / f"{key}{suffix}") for key in keys}
        return {"kind": kind, "source": {"kind": form, "all": given, "shares": {"train": 0.5, "valid": 0.5}}}

    return sources(settings)


def weather(form: str) -> Read:
    def settings(folder: Path) -> dict[str, Any]:
        split = {"train": ["2020-02-27", "2020-02-28"], "valid": ["2020-02-29", "2020-03-01"]}
        source = {"kind": "files", "paths": [str(folder / f"a.{form}")]}
        return {"kind": "era5", "source": source, "channels": ["t2m", "z@500"], "split": split}

    return sources(settings)


def _volumes(folder: Path) -> None:
    for seed, name in enumerate(("a.h5", "b.h5")):
        write_volume(folder / name, published(volume((8, 8, 8), seed)))


def _zipped_volumes(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("a.h5", "b.h5"):
        with h5py.File(folder / name, "w", libver="latest" if name == "a.h5" else None) as file:
            for key, values in published(volume((8, 8, 8))).items():
                file.create_dataset(key, data=values, compression="gzip", fletcher32=True, chunks=(1, 8, 8, 8))


def _arrays(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"input": np.random.default_rng(0).random((6, 2, 4, 4)), "target": np.arange(6)}
    with h5py.File(folder / "input.h5", "w") as one, h5py.File(folder / "target.h5", "w") as two:
        for key, file in zip(given, (one, two), strict=True):
            np.save(folder / f"{key}.npy", given[key])
            np.savez_compressed(folder / f"{key}.npz", **{key: given[key]})
            file.create_dataset(key, data=given[key], chunks=True, compression="gzip")


def _digits(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for suffix in ("", ".gz"):
        write_idx(folder / f"images{suffix}", rng.integers(0, 256, (8, 6, 6), dtype=np.uint8), bool(suffix))
        write_idx(folder / f"labels{suffix}", rng.integers(0, 10, 8, dtype=np.uint8), bool(suffix))


def _images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        image = Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8))
        image.save(folder / name / "1.jpg")
        image.save(folder / name / "2.png")


def _pack(folder: Path) -> None:
    _images(folder.parent / "images")
    images(folder.parent / "images")
    folder.mkdir(parents=True)
    found, _ = pictures(folder.parent / "images", ["a", "b"])
    write_pack(folder / "pack.h5", found, ["a", "b"], "encoded", lambda *_: None)


def _log(folder: Path) -> None:
    write_log(folder / LOG, [(step, 1.0 * step, {"loss": 1 / (step + 1)}) for step in range(20)])


def _described(folder: Path) -> None:
    make_dataset(folder / "data", ERA5)
    make_run(folder, "era5_vit", ERA5_RUN, ERA5)


def _trained(folder: Path) -> None:
    data = make_dataset(folder.parent / "trained_on", ERA5)
    make_run(folder, "era5_vit", {**ERA5_RUN, "training": {"epochs": 1}}, ERA5)
    assert train(folder, data / "manifest.json") == 0


def _records(folder: Path) -> None:
    read_epochs(folder / "metrics.jsonl")
    Provenance.read(folder / "provenance.json")
    read_json(folder / "provenance.json")


def _checkpoint(folder: Path) -> None:
    read_weights(next(path.parent for path in folder.rglob("checkpoint.json")))


YEARS = {"train": {2001: 6}, "valid": {2002: 6}}
LOG = "events.out.tfevents.1"
ENDS = (".npy", ".npz", ".h5")


def _cosmo(kind: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: cosmo([folder / "a.h5"], [folder / "b.h5"], kind)


#: Functions that make and read a reader's files, and a pattern of the files to damage, by name of the reader.
READERS: dict[str, tuple[Callable[[Path], object], Read, str]] = {
    "cosmo, raw": (lambda folder: write_volume(folder / "a.h5", volume((8, 8, 8))), sources(_cosmo("files")), "a.h5"),
    "cosmo, compressed": (_zipped_volumes, prepared(_cosmo("prepared")), "?.h5"),
    "cosmo, prepared": (_volumes, prepared(_cosmo("prepared")), "?.h5"),
    "era5, prepared": (lambda folder: write_years(folder, YEARS), prepared(era5), "**/*.h5"),
    "era5, statistics": (lambda folder: write_years(folder, YEARS), prepared(era5), "**/*.npy"),
    **{
        f"era5, {form}": (
            lambda folder, form=form: write(atmosphere(names=("t2m", "z")), folder / f"a.{form}", form),
            weather(form),
            "a.zarr/**/*" if form == "zarr" else "a.*",
        )
        for form in FORMATS
    },
    "IDX": (_digits, paired("mnist", "files", ("images", "labels"), ""), "*s"),
    "IDX, gzip": (_digits, paired("mnist", "files", ("images", "labels"), ".gz"), "*.gz"),
    "images": (_images, images, "*/*"),
    "packed images": (_pack, pack, "*"),
    **{f"arrays{end}": (_arrays, paired("starter", "arrays", ("input", "target"), end), f"*{end}") for end in ENDS},
    "event files": (_log, lambda folder: imports.read([folder / LOG], {"loss": "loss/train"}, frozenset()), "*"),
    "manifest": (_described, described, "data/manifest.json"),
    "described data": (_described, described, "data/**/*.[hn]*"),
    "weights": (_trained, lambda folder: read_weights(folder / "model.pt"), "model.pt"),
    "checkpoint": (_trained, _checkpoint, "checkpoints/*/step*/*"),
    "records": (_trained, _records, "*.json*"),
}


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """Return a file's content with some bytes changed, moved, overwritten, repeated or cut off.

    Half of the changes are in the first 2048 bytes, which contain offsets and sizes in most formats.
    """
    data = bytearray(content)
    size = len(data) if rng.random() < 0.5 else min(len(data), 2048)
    start = int(rng.integers(size))
    stop = min(len(data), start + int(rng.integers(1, 64)))
    match int(rng.integers(7)):
        case 0:
            return bytes(data[:start])
        case 1:
            other = int(rng.integers(len(data)))
            data[start:stop], data[other : other + stop - start] = data[other : other + stop - start], data[start:stop]
        case 2:
            data[start:stop] = bytes([int(rng.choice([0, 255]))]) * (stop - start)
        case 3:
            data[start:start] = data[start:stop]
        case _:
            for place in rng.integers(size, size=int(rng.integers(1, 9))):
                data[place] = int(rng.integers(256)) if rng.random() < 0.5 else data[place] ^ 1 << int(rng.integers(8))
    return bytes(data)


def outcome(read: Read, folder: Path) -> tuple[str, str]:
    """Run a reader in a separate process; return the outcome, and the message or traceback."""
    ends, words = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_report, args=(read, folder, words))
    child.start()
    words.close()
    try:
        found = ends.recv() if ends.poll(LIMIT_S) else ("hang", "")
    except EOFError:
        found = "crash", ""
    child.kill()
    child.join()
    return found


def _report(read: Read, folder: Path, words: Any) -> None:
    gc.disable()
    faulthandler.disable()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        read(folder)
        words.send(("taken", ""))
    except UserError as error:
        words.send(("refused", str(error)))
    except BaseException:
        words.send(("traceback", traceback.format_exc()))
    os._exit(0)


def check(name: str, count: int, seed: int, folder: Path) -> None:
    """Damage a reader's file `count` times; each time the reader must accept it, or refuse it in a short message."""
    make, read, which = READERS[name]
    original, copy = folder / "original" / "files", folder / "copy" / "files"
    original.parent.mkdir(parents=True)
    torch.set_num_threads(1)  # OpenMP threads do not survive a fork
    make(original)
    shutil.copytree(original, copy)
    read(copy)  # undamaged; this call also imports all modules that the child processes need
    candidates = sorted(path.relative_to(original) for path in original.glob(which) if path.is_file())
    assert candidates, f"{name}: there is no file {which}"
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        file = candidates[int(rng.integers(len(candidates)))]
        content = mutated((original / file).read_bytes(), rng)
        shutil.rmtree(copy)
        shutil.copytree(original, copy)
        (copy / file).write_bytes(content)
        how, text = outcome(read, copy)
        assert how in ("taken", "refused"), f"{name}: number {number}, {file}: {how}: {text[-3000:]}"
        assert len(text) <= 1000 and "\n" not in text, (
            f"{name}: number {number}, {file}: expected one short message: {text[:2000]}"
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_ends_in_a_message(tmp_path: Path, name: str) -> None:
    check(name, 5, 0, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
def test_many_damaged_files(tmp_path: Path, name: str) -> None:
    check(name, 250, 1, tmp_path)
