"""Damages small files of every kind that is read, in many ways, and counts what their readers say.

`python -m tests.mutate_files --count 250` damages a file of each reader 250 times. Each time the reader, in a process
of its own, either takes the file, refuses it with a `UserError`, or is at fault: it ends in another exception, crashes,
or does not end. The exit status says whether one was at fault. `--only ROW` and `--seed N` repeat a row of the table.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import io
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
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
from dlscale.data.mapped import MappedArray
from dlscale.data.parts import load_dataset
from dlscale.data.store import Reader
from dlscale.datasets.imagenet.folder import pictures
from dlscale.datasets.imagenet.pack import Pack
from dlscale.datasets.imagenet.packing import write_pack
from dlscale.parallel.world import World
from dlscale.report import imports
from dlscale.train.around import verify
from dlscale.train.provenance import Provenance
from dlscale.train.weights import read_weights
from tests.conftest import ERA5, ERA5_RUN, make_dataset, make_run, train
from tests.raw_files import cosmo, era5, published, volume, write_volume, write_years
from tests.test_era5_sources import FORMATS, atmosphere, write
from tests.test_import_log import write as write_log
from tests.test_mnist import write_idx

#: Seconds after which a reader does not end.
LIMIT_S = 20.0
OUTCOMES = ("taken", "refused", "traceback", "crash", "hang")

Read = Callable[[Path], None]


def sources(settings: Callable[[Path], dict[str, Any]]) -> Read:
    """Return what reads all of the first part of a dataset of raw files in a folder."""

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
    """Return what describes the prepared files in a folder, and then reads samples of them."""

    def read(folder: Path) -> None:
        dataset, out = _dataset(settings(folder), folder), folder.parent / "out"
        shutil.rmtree(out, ignore_errors=True)
        arguments = {
            "config": folder.parent / "config.json",
            "source": [r.origin for r in parts.raws(dataset).values()],
        }
        describe.main(argparse.Namespace(**arguments, manifest=out / "manifest.json", stats=out / "stats"))
        manifest = Manifest.read(out / "manifest.json")
        for name, info in manifest.fields.items():
            for file in manifest.files("train"):
                reader = Reader(manifest.path(file), name)
                reader[(slice(0, 2),)]
                if len(reader.shape) == 4 and info.channel_axis is not None:
                    mapped = MappedArray(reader, info.channel_axis)
                    mapped.copy(np.zeros(3, int), np.empty((mapped.shape[0], 1, 1, 1), mapped.buffer_dtype))

    return read


def described(folder: Path) -> None:
    """Read a described dataset as a training and its metrics do."""
    manifest = Manifest.read(folder / "data" / "manifest.json")
    manifest.check_files()
    verify(manifest, ("train", "valid"), World())
    run = load_run(folder / "config.yaml", "train")
    answers = study(run.study).metrics(run, manifest, torch.device("cpu")).answers
    answers(0)


def images(folder: Path) -> None:
    """Pack the images of a folder of classes, as they are and decoded."""
    for form in ("encoded", "decoded"):
        write_pack(folder.parent / "pack.h5", pictures(folder, ["a", "b"]), ["a", "b"], form, lambda done, whole: None)


def pack(folder: Path) -> None:
    opened = Pack(folder / "pack.h5")
    for row in range(len(opened.labels)):
        opened.image(row)


def arrays(suffix: str) -> Read:
    def settings(folder: Path) -> dict[str, Any]:
        given = {key: str(folder / f"{key}{suffix}") for key in ("input", "target")}
        return {"kind": "starter", "source": {"kind": "arrays", "all": given, "shares": {"train": 0.5, "valid": 0.5}}}

    return sources(settings)


def digits(suffix: str) -> Read:
    def settings(folder: Path) -> dict[str, Any]:
        given = {key: str(folder / f"{key}{suffix}") for key in ("images", "labels")}
        return {"kind": "mnist", "source": {"kind": "files", "all": given, "shares": {"train": 0.5, "valid": 0.5}}}

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
            file[key] = given[key]


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
    write_pack(
        folder / "pack.h5", pictures(folder.parent / "images", ["a", "b"]), ["a", "b"], "encoded", lambda *_: None
    )


def _log(folder: Path) -> None:
    write_log(folder / "events.out.tfevents.1", [(step, 1.0 * step, {"loss": 1 / (step + 1)}) for step in range(20)])


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


def _cosmo(kind: str) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: cosmo([folder / "a.h5"], [folder / "b.h5"], kind)


#: By name: what makes the files of a folder, what reads them, and which of them are damaged.
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
    "IDX": (_digits, digits(""), "*s"),
    "IDX, gzip": (_digits, digits(".gz"), "*.gz"),
    "images": (_images, images, "*/*"),
    "packed images": (_pack, pack, "*"),
    "npy": (_arrays, arrays(".npy"), "*.npy"),
    "npz": (_arrays, arrays(".npz"), "*.npz"),
    "HDF5 arrays": (_arrays, arrays(".h5"), "*.h5"),
    "event files": (_log, lambda folder: _import(folder), "*"),
    "manifest": (_described, described, "data/manifest.json"),
    "described data": (_described, described, "data/**/*.[hn]*"),
    "weights": (_trained, lambda folder: _weights(folder), "model.pt"),
    "checkpoint": (_trained, _checkpoint, "checkpoints/*/step*/*"),
    "records": (_trained, _records, "*.json*"),
}


def _import(folder: Path) -> None:
    imports.read([folder / "events.out.tfevents.1"], {"loss": "loss/train"}, frozenset())


def _weights(folder: Path) -> None:
    read_weights(folder / "model.pt")


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """Return a file's content with some bytes changed, a stretch moved, overwritten or repeated, or its end cut off.

    Half of the time that is within the first bytes, where formats have what leads to all else.
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
    """Return how a reader ends, and its last words."""
    words, ends = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        gc.disable()
        faulthandler.disable()
        os.close(words)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        said = "taken"
        try:
            read(folder)
        except UserError as error:
            said = f"refused\n{error}"
        except BaseException:
            said = f"traceback\n{traceback.format_exc()}"
        os.write(ends, said.encode(errors="replace")[:60_000])
        os._exit(0)
    os.close(ends)
    with open(words, "rb") as pipe:
        there = select.select([pipe], [], [], LIMIT_S)[0]
        said = pipe.read().decode(errors="replace") if there else "hang\n"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if there and not said:
        said = f"crash\n{signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else status}"
    how, _, text = said.partition("\n")
    return how, text


def run(name: str, count: int, seed: int, folder: Path, show: Callable[[str], None] = print) -> Counter[str]:
    """Damage the files of a reader `count` times; return how often it ended how. What it is at fault for is shown."""
    make, read, which = READERS[name]
    original, copy = folder / "original" / "files", folder / "copy" / "files"
    original.parent.mkdir(parents=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        make(original)
        shutil.copytree(original, copy)
        read(copy)  # as it is: all that the children need is imported by then
    candidates = sorted(path.relative_to(original) for path in original.glob(which) if path.is_file())
    assert candidates, f"{name}: no file is called {which}"
    found: Counter[str] = Counter()
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        file = candidates[int(rng.integers(len(candidates)))]
        content = mutated((original / file).read_bytes(), rng)
        shutil.rmtree(copy)
        shutil.copytree(original, copy)
        (copy / file).write_bytes(content)
        how, text = outcome(read, copy)
        found[how] += 1
        if how == "traceback":
            show(f"{name}: number {number}, {file}: {how}: {text[-3000:]}")
        elif len(text) > 1000 or "\n" in text:
            found["traceback"] += 1
            show(f"{name}: number {number}, {file}: no short message: {text[:2000]}")
    return found


def main() -> int:
    """Print a table of all readers; return 1 if one was at fault."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--count", type=int, default=250, help="how often each reader's files are damaged")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--only", action="append", choices=READERS, help="one reader; may be repeated")
    args = arguments.parse_args()
    prepare()
    total: Counter[str] = Counter()
    print(f"{'reader':20}" + "".join(f"{each:>10}" for each in OUTCOMES) + f"{'s':>8}")

    def show(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for name in args.only or READERS:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = run(
                name, args.count, args.seed, Path(folder), lambda text: print(text, file=sys.stderr, flush=True)
            )
        total += found
        seconds = time.perf_counter() - started
        print(f"{name:20}" + "".join(f"{found[each]:10}" for each in OUTCOMES) + f"{seconds:8.0f}", flush=True)
    print(f"{'all':20}" + "".join(f"{total[each]:10}" for each in OUTCOMES))
    return int(total["traceback"] > 0)


def prepare() -> None:
    """Have this process be one that may be forked: threads of OpenMP do not outlive that."""
    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
