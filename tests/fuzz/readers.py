"""Readers of files: functions that make small valid files, and read them as dlscale does."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import pkgutil
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import h5py
import numpy as np
import torch
import yaml
from PIL import Image

import dlscale
from dlscale.config.run import load_run
from dlscale.core import files, telemetry
from dlscale.core.files import read_json
from dlscale.core.metrics import read_epochs
from dlscale.core.record import Record
from dlscale.core.registry import study
from dlscale.data import describe, parts
from dlscale.data.manifest import Manifest
from dlscale.data.reads import load_dataset
from dlscale.data.store import Reader as StoreReader
from dlscale.extensions.compare.compare import read_rows
from dlscale.extensions.crate.crate import _read_citation
from dlscale.extensions.era5_vit.era5.zarr import acquire
from dlscale.extensions.imagenet_resnet50.imagenet.folder import pictures
from dlscale.extensions.imagenet_resnet50.imagenet.pack import Pack, write_pack
from dlscale.extensions.imagenet_resnet50.imagenet.resize import resize
from dlscale.extensions.imagenet_resnet50.imagenet.samples import _pixels
from dlscale.extensions.logs import imports
from dlscale.extensions.nsys.nsys import of_report
from dlscale.extensions.predict import analytic, model
from dlscale.extensions.profile import profile
from dlscale.extensions.programs import logs, printed
from dlscale.measure.profilers import Profile
from dlscale.parallel.world import World
from dlscale.train.around import verify
from dlscale.train.provenance import Provenance
from dlscale.train.weight_files import read_weights
from tests import test_report
from tests.conftest import ERA5, ERA5_RUN, ROOT, make_dataset, make_run, train
from tests.fuzz import grammar, notes
from tests.fuzz.damage import damage
from tests.raw_files import cosmo, era5, published, volume, write_volume, write_years
from tests.test_blind import MODEL
from tests.test_era5_sources import FORMATS, atmosphere, write
from tests.test_import_log import write as write_log
from tests.test_mnist import write_idx
from tests.test_nsys_database import TWO_STEPS

Make = Callable[[Path], object]
Read = Callable[[Path], object]
Settings = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True)
class Reader:
    """A reader of files."""

    make: Make  #: Writes valid files into a new folder.
    read: Read  #: Reads the files in the folder.
    which: str = "*"  #: Pattern of the files to damage.
    damage: Callable[[Path, bytes, Random], None] = damage


# ---- datasets ------------------------------------------------------------------------------------------


def sources(settings: Settings) -> Read:
    """Return a function that reads the first part of a dataset from the raw files in a folder."""

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


def prepared(settings: Settings) -> Read:
    """Return a function that writes a manifest of the prepared files in a folder, and then reads samples."""

    def read(folder: Path) -> None:
        dataset, out, config = _dataset(settings(folder), folder), folder.parent / "out", folder.parent / "config.json"
        shutil.rmtree(out, ignore_errors=True)
        raws = [raw.origin for raw in parts.raws(dataset).values()]
        described = {"manifest": out / "manifest.json", "stats": out / "stats"}
        describe.main(argparse.Namespace(config=config, source=raws, **described))
        manifest = Manifest.read(out / "manifest.json")
        for name in manifest.fields:
            for file in manifest.files("train"):
                reader = StoreReader(manifest.path(file), name)
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


def fetched(folder: Path) -> None:
    """Copy the channels of a Zarr store."""
    dataset = _dataset(_weather({"kind": "zarr", "store": str(folder / "a.zarr")}), folder)
    acquire(dataset, next(iter(parts.raws(dataset).values())), folder.parent / "fetched.nc")


def _weather(source: dict[str, Any]) -> dict[str, Any]:
    split = {"train": ["2020-02-27", "2020-02-28"], "valid": ["2020-02-29", "2020-03-01"]}
    return {"kind": "era5", "source": source, "channels": ["t2m", "z@500"], "split": split}


def images(folder: Path) -> None:
    """Pack the images of class folders into one file, once unchanged and once decoded."""
    for form in ("encoded", "decoded"):
        found = pictures(folder, ["a", "b"])[0]
        write_pack(folder.parent / "pack.h5", found, ["a", "b"], form, lambda done, whole: None)


def pack(folder: Path) -> None:
    opened = Pack(folder / "pack.h5")
    for row in range(len(opened.labels)):
        opened.image(row)
        height, width = opened.index[row, 2:].tolist()
        resize(*_pixels(opened, row, (0, 0, height, width)), (8, 8), (0, 0), False, np.empty((3, 8, 8), np.uint8))


def paired(kind: str, form: str, keys: tuple[str, str], suffix: str) -> Read:
    def settings(folder: Path) -> dict[str, Any]:
        given = {key: str(folder / f"{key}{suffix}") for key in keys}
        return {"kind": kind, "source": {"kind": form, "all": given, "shares": {"train": 0.5, "valid": 0.5}}}

    return sources(settings)


def _store(folder: Path, version: int) -> None:
    folder.mkdir(parents=True)
    ATMOSPHERE.to_zarr(folder / "a.zarr", zarr_format=version, consolidated=version == 2)


def _volumes(folder: Path) -> None:
    for seed, name in enumerate(("a.h5", "b.h5")):
        write_volume(folder / name, published(volume((8, 8, 8), seed)))


def _zipped_volumes(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("a.h5", "b.h5"):
        with h5py.File(folder / name, "w", libver="latest" if name == "a.h5" else None) as file:
            for key, values in published(volume((8, 8, 8))).items():
                file.create_dataset(key, data=values, compression="gzip", fletcher32=True, chunks=(1, 8, 8, 8))


def _arrays(folder: Path) -> None:
    folder.mkdir(parents=True)
    given = {"input": np.random.default_rng(0).random((6, 2, 4, 4)), "target": np.arange(6)}
    with h5py.File(folder / "input.h5", "w") as one, h5py.File(folder / "target.h5", "w") as two:
        for key, file in zip(given, (one, two), strict=True):
            np.save(folder / f"{key}.npy", given[key])
            np.savez_compressed(folder / f"{key}.npz", **{key: given[key]})
            file.create_dataset(key, data=given[key], chunks=True, compression="gzip")


def _digits(folder: Path) -> None:
    folder.mkdir(parents=True)
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
    folder.mkdir(parents=True)
    found, _ = pictures(folder.parent / "images", ["a", "b"])
    write_pack(folder / "pack.h5", found, ["a", "b"], "encoded", lambda *_: None)


def _described(folder: Path) -> None:
    make_dataset(folder / "data", ERA5)
    make_run(folder, "era5_vit", ERA5_RUN, ERA5)


# ---- logs, results and settings ------------------------------------------------------------------------


def _events(folder: Path) -> None:
    write_log(folder / LOG, [(step, 1.0 * step, {"loss": 1 / (step + 1)}) for step in range(20)])


def _json_log(folder: Path) -> None:
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": n, "time": 1.6e9 + n, "loss": 1 / n}) for n in range(1, 9)]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")


def logged(folder: Path) -> None:
    """Read a log as `dlscale measure` does: the times of its steps, and its losses."""
    path, start = next(folder.glob("*")), logs.Start(1.6e9 - 60)
    logs.values(path, {"loss": "loss/train"}, start, end=1.6e9 + 60)
    logs.logged(path, start, end=1.6e9 + 60)


def _printed(folder: Path) -> None:
    folder.mkdir(parents=True)
    lines = ["epoch 1 step 10/80 loss=0.3141 lr 1.0e-3 (12.3 it/s, 1,234.5 samples/s)", "speed: 250 ms/step 41%|#### |"]
    lines += ["\x1b[32mtrain\x1b[0m img/s = 1.2k ± 3", "throughput 3.1e2 samples per second, eta 0:12:30, s/it: 0.05"]
    (folder / "output.log").write_text("\n".join(lines * 3))


def rates(folder: Path) -> None:
    """Find rates and losses in the output of a program."""
    patterns = {"": r"(?:speed|img/s|throughput|\()[ :=]*(.*)", "loss/train": r"loss\s*=?\s*(\S+)"}
    lines = (folder / "output.log").read_bytes().split(b"\n")
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"".join(b"1600000000.0 %s\n" % line for line in lines)))
    sys.argv = ["printed", json.dumps(patterns)]
    printed.main()


def _database(folder: Path) -> None:
    folder.mkdir(parents=True)
    for version in ("2020", "2022", "2025"):
        TWO_STEPS.write(folder / f"{version}.sqlite", version)


def _trained(folder: Path) -> None:
    data = make_dataset(folder.parent / "trained_on", ERA5)
    make_run(folder, "era5_vit", {**ERA5_RUN, "training": {"epochs": 1}}, ERA5)
    assert train(folder, data / "manifest.json") == 0


def _of_training(folder: Path) -> None:
    read_epochs(folder / "metrics.jsonl")
    Provenance.read(folder / "provenance.json")
    read_json(folder / "provenance.json")


def _checkpoint(folder: Path) -> None:
    read_weights(next(path.parent for path in folder.rglob("checkpoint.json")))


def _record_classes(kind: type[Record] = Record) -> dict[str, type[Record]]:
    below = {f"{each.__module__}.{each.__name__}": each for each in kind.__subclasses__()}
    return {name: each for one in below.values() for name, each in (*below.items(), *_record_classes(one).items())}


def _records(folder: Path) -> None:
    """Write a record of each class, with values from its schema."""
    folder.mkdir(parents=True)
    for module in pkgutil.walk_packages(dlscale.__path__, "dlscale."):
        if re.search(r"(records|reference|series|provenance|extra|checkpoint|profilers)$", module.name):
            importlib.import_module(module.name)
    for name, kind in sorted(_record_classes().items()):
        schema = kind.model_json_schema()
        for seed in range(200):
            with contextlib.suppress(ValueError):
                raw = grammar.sample(schema, schema.get("$defs", {}), Random(seed))
                files.write_json(
                    folder / f"{name}.json", kind.model_validate(raw).model_dump(mode="json", by_alias=True)
                )
                break


def records(folder: Path) -> None:
    """Read the record that was changed last, and write it again."""
    path = max(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    found = _record_classes()[path.stem].read(path)
    found.write(folder.parent / "again.json")


def _results(folder: Path) -> None:
    results = test_report.with_ladder(test_report.Results(folder))
    rows = [telemetry.Sample(1.7e9 + n, 1.0, 4, cpu=0.9, cpu_others=0.1, joules=9.0 * n) for n in range(5)]
    for run in (folder / "plans/ladder").glob("*/telemetry"):
        (run / "train.csv").write_text(telemetry.header(0) + "".join(map(telemetry.line, rows)))
    results.collect(results.plans[0])


def page(folder: Path) -> None:
    """Write the tables and the page of a plan, without pictures of charts (V8 does not survive a fork)."""
    sys.modules["vl_convert"] = mock.MagicMock(
        **{
            "vegalite_to_svg.return_value": "",
            "vegalite_to_pdf.return_value": b"",
            "javascript_bundle.return_value": "",
        }
    )
    results = test_report.Results(folder)
    results.plans, results.datasets = [folder / "plans/ladder/plan.yaml"], [folder / "data/demo_states"]
    results.collect(results.plans[0])
    results.report()


def _summary(folder: Path) -> None:
    folder.mkdir(parents=True)
    _, rows = of_report(TWO_STEPS.write(folder.parent / "summary.sqlite"))
    profile.write(Profile.model_construct(), rows, folder)


def _settings(folder: Path) -> None:
    grammar.bases(folder)
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    (folder / "machine.yaml").write_text(yaml.safe_dump(model.shipped()["dgx_h100"].model_dump(mode="json")))
    shutil.copy(ROOT / "CITATION.cff", folder)


def settings(folder: Path) -> None:
    """Read the file that was changed: a configuration, a model or machine to predict, or a citation."""
    path = max(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    {
        "model": lambda path: analytic.fitted(analytic.read(path)),
        "machine": lambda path: model.named(str(path)),
        "CITATION": _read_citation,
    }.get(path.stem, grammar.resolved)(path)


ATMOSPHERE = atmosphere(names=("t2m", "z"), height=5, width=6)
YEARS = {"train": {2001: 6}, "valid": {2002: 6}}
LOG = "events.out.tfevents.1"
ENDS = (".npy", ".npz", ".h5")


def _cosmo(kind: str) -> Settings:
    return lambda folder: cosmo([folder / "a.h5"], [folder / "b.h5"], kind)


#: All readers, by name; the slowest reader comes last.
READERS: dict[str, Reader] = {
    "configurations": Reader(grammar.bases, grammar.planned, "*.yaml", grammar.mistake),
    "settings": Reader(_settings, settings),
    "records": Reader(_records, records),
    "records of a training": Reader(_trained, _of_training, "*.json*"),
    "manifest": Reader(_described, described, "data/manifest.json"),
    "described data": Reader(_described, described, "data/**/*.[hn]*"),
    "weights": Reader(_trained, lambda folder: read_weights(folder / "model.pt"), "model.pt"),
    "checkpoint": Reader(_trained, _checkpoint, "checkpoints/*/step*/*"),
    "event files": Reader(_events, lambda folder: imports.read([folder / LOG], {"loss": "loss/train"}, frozenset())),
    "event files, measured": Reader(_events, logged),
    "JSON lines": Reader(_json_log, logged),
    "printed rates": Reader(_printed, rates),
    "nsys": Reader(_database, lambda folder: [of_report(path) for path in sorted(folder.iterdir())]),
    "profile summary": Reader(_summary, lambda folder: read_rows(folder / "profile_summary.csv"), "*.csv"),
    "cosmo, raw": Reader(lambda it: write_volume(it / "a.h5", volume((8, 8, 8))), sources(_cosmo("files")), "a.h5"),
    "cosmo, compressed": Reader(_zipped_volumes, prepared(_cosmo("prepared"))),
    "cosmo, prepared": Reader(_volumes, prepared(_cosmo("prepared"))),
    "era5, prepared": Reader(lambda folder: write_years(folder, YEARS), prepared(era5), "**/*.h5"),
    "era5, statistics": Reader(lambda folder: write_years(folder, YEARS), prepared(era5), "**/*.npy"),
    **{
        f"era5, {form}": Reader(  # type: ignore[misc]
            lambda folder, form=form: write(ATMOSPHERE, folder / f"a.{form}", form),
            sources(lambda folder, form=form: _weather({"kind": "files", "paths": [str(folder / f"a.{form}")]})),
            "a.*",
        )
        for form in FORMATS
    },
    **{
        f"Zarr {version}": Reader(lambda folder, version=version: _store(folder, version), fetched, "a.zarr/**/*")  # type: ignore[misc]
        for version in (2, 3)
    },
    "IDX": Reader(_digits, paired("mnist", "files", ("images", "labels"), ""), "*s"),
    "IDX, gzip": Reader(_digits, paired("mnist", "files", ("images", "labels"), ".gz"), "*.gz"),
    "images": Reader(_images, images, "*/*"),
    "packed images": Reader(_pack, pack),
    **{
        f"arrays{end}": Reader(_arrays, paired("starter", "arrays", ("input", "target"), end), f"*{end}")
        for end in ENDS
    },
    "mirrors": Reader(notes.make_mirrors, notes.mirrored, "**/*.[nj]*"),
    "steps": Reader(notes.make_program, notes.measured, "steps/timed.*"),
    "health notes": Reader(notes.make_program, notes.measured, "steps/health.*"),
    "loader notes": Reader(notes.make_program, notes.measured, "steps/loader.*"),
    "profiled window": Reader(notes.make_program, notes.measured, "steps/torch.*"),
    "py-spy stacks": Reader(notes.make_program, notes.measured, "profile/*"),
    "losses of earlier tries": Reader(notes.make_earlier, notes.resumed, "*.json"),
    "printed losses": Reader(notes.make_earlier, notes.resumed, "steps/printed"),
    "replayed turns": Reader(notes.make_turns, notes.turns),
    "hang reports": Reader(notes.make_hang, notes.hung, "steps/*"),
    "findings of hangs": Reader(notes.make_hang, notes.hung, "results/**/*.*"),
    "progress": Reader(notes.make_progress, notes.shown, "**/*.*"),
    "results": Reader(_results, page, "**/*.[jyc]*"),
}
