"""`dlscale measure --loader`: planted causes are named, and the program computes as without dlscale."""

from __future__ import annotations

import gc
import io
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import Dataset, dataloader
from torch.utils.data._utils import fetch

from dlscale.config import resolve as config
from dlscale.core import machine
from dlscale.extensions.doctor import doctor
from dlscale.extensions.loading import inside as watch
from dlscale.extensions.loading import layout, report
from dlscale.extensions.loading.records import Array, Loader, Loading
from dlscale.extensions.programs import causes
from dlscale.extensions.programs.measure import PLAN
from dlscale.measure.records import Throughput
from dlscale.report.evidence import Evidence
from tests.conftest import TINY
from tests.test_any_program import measure
from tests.test_counting import tiny_run

#: Training program whose data loading is slow for a known cause, which its first argument names. It prints a digest of
#: all batches and of the weights.
PROGRAM = """
import hashlib, os, sys, time
import h5py, numpy as np, torch
from torch.utils.data import DataLoader, Dataset, Subset

os.sched_setaffinity(0, {*os.sched_getaffinity(0)} if len(os.sched_getaffinity(0)) < 3 else {0, 1})
CAUSE = sys.argv[1]
if CAUSE == "workers":  # a core for each worker, which only sleeps
    os.sched_getaffinity = lambda pid: {0, 1, 2}
TRANSFORM, FETCH, STEP, WORKERS, SIZE = {
    "transform": (0.004, 0.0, 0.002, 2, 64),
    "workers": (0.0, 0.007, 0.04, 1, 64),
    "copies": (0.0, 0.0005, 0.03, 2, 131072),
    "chunks": (0.0, 0.0, 0.002, 1, 25600),
    "healthy": (0.0005, 0.0005, 0.03, 2, 64),
    "same": (0.0, 0.0, 0.0, int(sys.argv[2]) if len(sys.argv) > 2 else 0, 64),
}[CAUSE]


class Noise:
    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, x):
        if self.seconds:
            time.sleep(self.seconds)
        return x + torch.rand(1)


class Rows(Dataset):
    def __init__(self):
        self.transform, self.values = Noise(TRANSFORM), None
        self.target_transform = torch.nn.Sequential(torch.nn.Identity())

    def __len__(self):
        return 160

    def __getitem__(self, index):
        if FETCH:
            time.sleep(FETCH)
        x = torch.full((SIZE,), float(index % 7))
        if CAUSE == "chunks":
            if self.values is None:
                self.values = h5py.File("rows.h5", rdcc_nbytes=2**20)["x"]
            first = index * 37 % 10 * 100
            x = torch.from_numpy(self.values[index % 16, first : first + 100]).reshape(-1)
        assert type(self.transform) is Noise and len(self.target_transform) == 1
        return self.target_transform(self.transform(x))


if __name__ == "__main__":
    torch.manual_seed(0)
    device, digest = "meta" if CAUSE == "copies" else "cpu", hashlib.sha256()
    model = torch.nn.Linear(SIZE, 1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = DataLoader(Subset(Rows(), range(160)), 8, shuffle=True, num_workers=WORKERS)
    for epoch in range(2):
        for x in loader:
            digest.update(x.numpy().tobytes())
            time.sleep(STEP)
            optimizer.zero_grad()
            model(x.to(device, non_blocking=True)).square().mean().backward()
            optimizer.step()
    if device == "cpu":
        digest.update(model.weight.detach().numpy().tobytes())
    print(digest.hexdigest())
"""


def measured(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], Loading]:
    (folder / "train.py").write_text(PROGRAM)
    done = measure(folder, "--loader", "--", sys.executable, "train.py", *words)
    assert done.returncode == 0, done.stderr
    return done, Loading.read(folder / "results/plans" / PLAN / "train" / report.NAME)


def test_a_slow_transform_is_named(tmp_path: Path) -> None:
    done, loading = measured(tmp_path, "transform")
    assert loading.advice and loading.advice.cause == "transform" and "transform (Noise" in loading.advice.why
    assert loading.advice.share > 0.5
    parts = report.parts_of(loading.loaders[0])
    assert parts["transform"] > 8 * 0.004 and parts["transform"] > 0.6 * sum(parts.values())
    assert done.stderr.count("Advice: Slow transform: the transform (Noise") == 1
    page = (tmp_path / "results/plans" / PLAN / "report.html").read_text()
    assert "Loaders" in page and "Slow transform: the transform (Noise" in page
    assert not (tmp_path / "results/plans" / PLAN / "train/steps").exists()


@pytest.mark.slow
def test_one_worker_too_few_is_named(tmp_path: Path) -> None:
    done, loading = measured(tmp_path, "workers")
    assert loading.advice and loading.advice.cause == "workers", done.stderr
    assert "2 workers suffice" in loading.advice.why and "num_workers=2" in loading.advice.todo


@pytest.mark.slow
def test_pageable_copies_are_named(tmp_path: Path) -> None:
    """The weights are on another device than the batches, as on a GPU; `meta` is such a device on any machine."""
    done, loading = measured(tmp_path, "copies")
    assert loading.device == "meta"
    assert loading.advice and loading.advice.cause == "copies", done.stderr
    (loader,) = loading.loaders
    assert loader.bytes / loader.sized == 8 * 131072 * 4 and "pin_memory=True" in loading.advice.todo


@pytest.mark.slow
def test_wasted_bytes_are_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:  # the cache holds one of the 16 chunks
        values = np.random.default_rng(0).normal(size=(16, 1000, 256)).astype("float32")
        file.create_dataset("x", data=values, chunks=(1, 1000, 256), compression="gzip")
    done, loading = measured(tmp_path, "chunks")
    assert loading.advice and loading.advice.cause == "chunks", done.stderr
    (array,) = loading.arrays
    assert array.ratio == pytest.approx(9.4, rel=0.1) and array.compression == "gzip" and array.requests == 320
    assert array.touched == 10 * array.requested == 10 * 320 * 100 * 256 * 4 and array.region == "1 × 100 × 256"
    assert re.search(
        r"requests are 1 × 100 × 256, so (8[89]|9[01])\s% of the bytes read are unused", loading.advice.why
    )


@pytest.mark.slow
def test_a_healthy_loader_gets_no_advice(tmp_path: Path) -> None:
    done, loading = measured(tmp_path, "healthy")
    assert loading.advice is None and "Advice" not in done.stderr, done.stderr
    assert loading.loaders[0].fetch.batches > 30


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow), "2"])
def test_a_program_computes_as_without_dlscale(tmp_path: Path, workers: str) -> None:
    done, loading = measured(tmp_path, "same", workers)
    plain = subprocess.run(
        [sys.executable, "train.py", "same", workers], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == plain.stdout != ""
    assert loading.loaders[0].fetch.batches > 30 and not loading.stopped


@pytest.mark.slow
def test_unknown_loaders_are_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import dlscale, time\nfor batch in dlscale.timed([[0] * 8] * 40): time.sleep(0.01)\n"
    )
    done = measure(tmp_path, "--loader", "--", sys.executable, "train.py")
    assert "unknown: no batch of PyTorch's DataLoader was seen" in done.stderr and "Advice" not in done.stderr


def test_nothing_is_watched_unless_asked(tmp_path: Path) -> None:
    """Without `--loader`, the program does not load the module that times loaders."""
    code = "import sitecustomize as hook; print(*(each.__name__ for each in hook.EXTENSIONS))"
    assert "dlscale_loading" not in measure(tmp_path, "--", sys.executable, "-c", code).stdout
    assert "dlscale_loading" in measure(tmp_path, "--loader", "--", sys.executable, "-c", code).stdout


# ---- functions ---------------------------------------------------------------------------------------


@pytest.fixture
def watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> watch.ProcessSums:
    monkeypatch.setattr(watch, "FOLDER", str(tmp_path))
    return watch.ProcessSums()


def test_spans_of_selections() -> None:
    shape, values = (5, 6, 7), np.arange(210).reshape(5, 6, 7)
    one = [0, -1, slice(None), slice(1, 4), slice(None, None, 2), slice(4, 0, -2), slice(3, 3)]
    for count in (1, 2, 3):
        for selection in itertools.product(one, repeat=count):
            for own in (selection, (*selection, ...), (..., *selection)):
                found = watch.spans(shape, own)
                assert math.prod(each[2] for each in found) == values[own].size if found else not values[own].size
    assert watch.spans(shape, (2, slice(1, 4))) == [(2, 2, 1), (1, 3, 3), (0, 6, 7)]
    unknown: list[Any] = [[1, 2], np.array([1, 2]), "name", (..., ...), (0, 0, 0, 0)]
    assert not any(watch.spans(shape, each) for each in unknown)
    assert watch.spans(shape, np.int64(-1))[0] == (4, 4, 1)


def test_an_error_stops_the_watch_only(watching: watch.ProcessSums) -> None:
    class Odd:
        __dict__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    fetch = watching._fetching(lambda fetcher, index: fetcher.collate_fn([index]))
    assert fetch(SimpleNamespace(dataset=Odd(), collate_fn=sum), 3) == 3
    assert not watching.on and "ZeroDivisionError" in next(Path(watch.FOLDER).glob("loader.*")).read_text()


def test_a_write_while_another_thread_opens_an_array(watching: watch.ProcessSums) -> None:
    class Files(set[str]):
        def __len__(self) -> int:  # called by `write`: another thread opens an array
            watching._arrays.setdefault(2, {"files": {"b.h5"}})
            return 1

    watching._arrays[1] = {"files": Files()}
    watching.write()
    assert watching.on and '"arrays": [{"files": 1}]' in next(Path(watch.FOLDER).glob("loader.*")).read_text()


def test_transforms_are_restored(watching: watch.ProcessSums) -> None:
    """After a fetch, even after a failed fetch, the dataset has its own functions again."""

    def double(x: int) -> int:
        return 2 * x

    dataset = SimpleNamespace(dataset=SimpleNamespace(transform=double))
    fetcher, seen = SimpleNamespace(dataset=dataset, collate_fn=sum), list[Any]()

    def original(fetcher: Any, index: int) -> int:
        seen.append(dataset.dataset.transform)
        return int(fetcher.collate_fn([dataset.dataset.transform(1 / index)]))

    watching._local.loader = {"fetch": {}}
    for index in (1, 0):
        try:
            assert watching._fetching(original)(fetcher, index) == 2
        except ZeroDivisionError:
            assert index == 0
        assert dataset.dataset.transform is double and fetcher.collate_fn is sum
    assert seen[0] is not double and seen[0].__name__ == "double" and watching.on


class Photos(Dataset[torch.Tensor]):
    """Sixteen images that PIL decodes within the dataset's transform."""

    def __init__(self, transform: Callable[[Image.Image], torch.Tensor]) -> None:
        self.transform, file = transform, io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "JPEG")
        self.file = file.getvalue()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(Image.open(io.BytesIO(self.file)))


@pytest.fixture
def watched(watching: watch.ProcessSums, monkeypatch: pytest.MonkeyPatch) -> watch.ProcessSums:
    """Return a watch of PyTorch's loaders in this process, until the test ends."""
    names = {"_BaseDataLoaderIter": ("__init__", "__next__", "_reset"), "DataLoader": ("__init__",)}
    for kind, methods in names.items():
        for method in methods:
            monkeypatch.setattr(getattr(dataloader, kind), method, getattr(getattr(dataloader, kind), method))
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        monkeypatch.setattr(fetcher, "fetch", fetcher.fetch)
    watching.loaders(dataloader)
    watching.fetchers(fetch)
    return watching


def test_loaders_with_equal_settings_are_told_apart(watched: watch.ProcessSums) -> None:
    """Loaders are identified by line and dataset; a loader that each epoch creates anew counts as one loader."""

    def make(data: Dataset[torch.Tensor]) -> dataloader.DataLoader[torch.Tensor]:
        return dataloader.DataLoader(data, 4)

    photos = [Photos(lambda image: torch.ones(1)) for _ in range(2)]
    train, valid = make(photos[0]), make(photos[1])
    for _ in range(3):
        for loader in (train, valid, dataloader.DataLoader(photos[0], 4), make(Photos(photos[0].transform))):
            assert len([*loader]) == 4
        loader = None  # the datasets of the next epoch replace the datasets of this epoch
        gc.collect()
    watched.write()
    loading = report.read_loading(Path(watch.FOLDER))
    found = [(int(each.made.removeprefix("tests/test_measure_loader.py:")), each.order) for each in loading.loaders]
    line = test_loaders_with_equal_settings_are_told_apart.__code__.co_firstlineno
    assert [(place - line, order) for place, order in found] == [(4, 0), (4, 1), (9, 0), (4, 2)]
    names = [text for name, text in report.table(loading) if name == "loader"]
    assert len({*names}) == 4 and names[1].endswith(f":{line + 4} (dataset 2)")


def test_a_loader_of_the_programs_class_has_the_line_that_makes_it(watched: watch.ProcessSums) -> None:
    class Repeating(dataloader.DataLoader[torch.Tensor]):
        def __init__(self, data: Dataset[torch.Tensor]) -> None:
            super().__init__(data, batch_size=4)

    train = Repeating(Photos(lambda image: torch.ones(1)))
    valid = Repeating(Photos(lambda image: torch.ones(1)))
    assert len([*train]) == len([*valid]) == 4
    watched.write()
    line = test_a_loader_of_the_programs_class_has_the_line_that_makes_it.__code__.co_firstlineno
    made = [each.made.rpartition(":")[2] for each in report.read_loading(Path(watch.FOLDER)).loaders]
    assert made == [str(line + 5), str(line + 6)]


class Pinned(torch.Tensor):
    """Tensor that claims pinned memory, which PyTorch only has on machines with an accelerator."""

    def is_pinned(self, device: Any = None) -> bool:
        return True


@pytest.mark.parametrize(
    ("pinned", "pageable", "kind", "advised"),
    [
        (4_000_000, 0, "pinned", False),
        (0, 4_000_000, "pageable", True),
        (3_000_000, 1_000_000, "partly pinned", False),
        (1_000_000, 3_000_000, "partly pinned", True),
    ],
)
def test_pinned_bytes_are_counted(
    watched: watch.ProcessSums, pinned: int, pageable: int, kind: str, advised: bool
) -> None:
    """Batches are nested, and have two tensors; advice follows if most of the bytes are in pageable memory."""
    watched._device = "meta"  # as after the first step of a model on another device
    batch = {"x": [torch.empty(pinned).as_subclass(Pinned)], "y": (torch.empty(pageable),), "z": "text"}
    assert len([*dataloader.DataLoader(range(30), 1, collate_fn=lambda rows: batch)]) == 30  # type: ignore[arg-type]
    watched.write()
    loading = report.read_loading(Path(watch.FOLDER))
    (loader,) = loading.loaders
    assert (loader.bytes, loader.pinned) == (loader.sized * 16_000_000, loader.sized * 4 * pinned) and loader.sized
    assert dict(report.table(loading))["  copies to meta"] == f"16.0\u00a0MB per batch from {kind} memory"
    assert (report._copies(loader, loading) is not None) == advised


def test_decoding_is_no_part_of_the_transform(watched: watch.ProcessSums, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL decodes an image when the transform first uses it; in this test, each decoding takes 5 ms."""
    load = ImageFile.ImageFile.load

    def slow(image: ImageFile.ImageFile) -> Any:
        time.sleep(0.005)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", slow)
    assert len([*dataloader.DataLoader(Photos(lambda image: torch.tensor(image.resize((2, 2)).size)), 4)]) == 4
    watched.write()
    (loader,) = report.read_loading(Path(watch.FOLDER)).loaders
    parts = report.parts_of(loader)
    assert parts["decode"] > 4 * 0.005 > 2 * parts["transform"] > 0
    assert "decoding images (PIL)" in report.table(Loading(loaders=[loader]))[1][1]


@pytest.mark.parametrize(("stored", "chunks", "region"), [((100, 150), (4, 5), (3, 7)), ((9,), (2,), (9,))])
def test_chunk_ratio(stored: tuple[int, ...], chunks: tuple[int, ...], region: tuple[int, ...]) -> None:
    """The expected ratio is near the mean over all positions; positions near the edges touch fewer chunks."""
    places = itertools.product(*(range(s - r + 1) for s, r in zip(stored, region, strict=True)))
    ratios = list[float]()
    for place in places:
        each = zip(place, region, chunks, strict=True)
        touched = math.prod((p + r - 1) // c - p // c + 1 for p, r, c in each)
        ratios.append(touched * math.prod(chunks) / math.prod(region))
    assert layout.chunk_ratio(stored, chunks, region) == pytest.approx(np.mean(ratios), rel=0.05)


def test_page_ratio() -> None:
    """Random crops of a large volume read a page for each short piece; reads of complete slices waste nothing."""
    assert layout.page_ratio((512, 512, 512), (64, 64, 64), 4) == pytest.approx(1 + 4095 / 256, rel=0.01)
    assert layout.page_ratio((100, 1000, 1000), (1, 1000, 1000), 4) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("kind", ["HDF5", "Zarr"])
def test_reads_are_counted(watching: watch.ProcessSums, tmp_path: Path, kind: str) -> None:
    """Both libraries return the same values as without the watch; chunks and requests are counted once per call."""
    values = np.arange(40 * 50, dtype="int16").reshape(40, 50)
    if kind == "Zarr":
        zarr = pytest.importorskip("zarr")
        array = zarr.create_array(str(tmp_path / "a.zarr"), data=values, chunks=(10, 50))
        module = SimpleNamespace(Array=type("Array", (zarr.Array,), {}))
        watching.zarr(module)
        opened = module.Array(array._async_array)
    else:
        file = h5py.File(tmp_path / "a.h5", "w")
        array = file.create_dataset("a", data=values, chunks=(10, 50))
        module = SimpleNamespace(Dataset=type("Dataset", (h5py.Dataset,), {}))
        watching.h5py(module)
        opened = module.Dataset(array.id)
    for selection in (3, (slice(5, 15), slice(0, 5)), ...):
        assert np.array_equal(opened[selection], values[selection])
    if kind == "HDF5":
        out = np.empty((2, 50), "int16")
        opened.read_direct(out, np.s_[0:2])
        assert np.array_equal(out, values[:2])
    (record,) = watching._arrays.values()
    more = kind == "HDF5"
    assert record["requests"] == 3 + more and record["chunks"] == [10, 50] and watching.on
    assert record["requested"] == 2 * (50 + 50 + 2000 + more * 100)
    assert record["touched"] == 2 * (500 + 1000 + 2000 + more * 500)
    assert record["regions"]["10 × 5"] == 1


def test_workers_belong_to_their_loader(tmp_path: Path) -> None:
    """Workers are found by the seed of their iterator, also if their parent is a fork server."""
    common = {"pin_memory": False, "batches": 20, "waited": 1.0, "firsts": 1, "first_waited": 0.1, "between": [0.1]}
    loaders = [{"dataset": "A", "workers": n, "seeds": [n], **common} for n in (1, 2)]
    main = {"host": "h", "pid": 1, "parent": 0, "loaders": loaders}
    (tmp_path / "loader.h.1").write_text(json.dumps(main))
    rank = {"host": "h", "pid": 8, "parent": 0, "loaders": [{"dataset": "B", "workers": 1, "seeds": [1], **common}]}
    (tmp_path / "loader.h.8").write_text(json.dumps(rank))  # another process, whose loader has the same seed
    for pid, parent, seed in ((2, 1, 1), (3, 9, 2), (4, 1, 2), (5, 1, 77), (7, 8, 1)):
        worker = {"seed": seed, "batches": 10, "seconds": 1.0, "parts": {"transform": 0.5}}
        (tmp_path / f"loader.h.{pid}").write_text(
            json.dumps({"host": "h", "pid": pid, "parent": parent, "worker": worker})
        )
    (tmp_path / "loader.h.6").write_text("{")  # a killed process
    found = report.read_loading(tmp_path)
    assert [(each.dataset, each.fetch.batches) for each in found.loaders] == [("A", 10), ("A", 20), ("B", 10)]


def loader(**changes: Any) -> Loader:
    """Return a loader whose two workers deliver a batch in 20 ms, while the program takes one every 10 ms."""
    fetch = {"batches": 100, "seconds": 4.0, "cpu": 0.0, "parts": {"read": 3.0}} | changes.pop("fetch", {})
    own = {"dataset": "A", "workers": 2, "pin_memory": False, "batches": 100, "waited": 1.0, "requests": 100}
    return Loader(**{**own, "firsts": 1, "first_waited": 0.1, "between": [0.01], "empty": 90, "fetch": fetch} | changes)


@pytest.mark.parametrize(
    ("changes", "cores", "cause"),
    [
        ({}, 5, "workers"),
        ({}, 4, "read"),  # four workers and the training process need five cores, even if the workers wait
        ({"fetch": {"cpu": 4.0}}, 2, "read"),  # no free core for more workers
        ({"fetch": {"cpu": 4.0, "parts": {"collate": 3.0}}}, 2, "collate"),
        ({"fetch": {"cpu": 4.0, "parts": {}}}, 2, "dataset"),
        ({"fetch": {"cpu": 4.0, "parts": {"decode": 3.0}}}, 2, "decode"),
        ({"fetch": {"seconds": 1.0, "parts": {}}}, 8, "transfer"),
        ({"fetch": {"seconds": 1.0, "parts": {}}, "empty": 10}, 8, "uneven"),
        ({"fetch": {"seconds": 1.0, "parts": {}}, "empty": 1}, 8, None),  # ready batches, but a busy machine
        ({"waited": 0.05, "firsts": 10, "first_waited": 5.0}, 8, "starts"),
        ({"waited": 0.05, "firsts": 10, "first_waited": 5.0, "persistent": True}, 8, None),
        ({"waited": 0.05}, 8, None),
        ({"batches": 5}, 8, None),
    ],
)
def test_advice(changes: dict[str, Any], cores: int, cause: str | None) -> None:
    advice = report.advise(Loading(cores=cores, processes=1, loaders=[loader(**changes)]))
    assert (advice and advice.cause) == cause


def test_advice_on_a_first_batch_names_no_part() -> None:
    fetch = {"batches": 0, "seconds": 0.0, "parts": {}, "first": 0.05}
    advice = report.advise(Loading(cores=8, processes=1, loaders=[loader(fetch=fetch)]))
    assert advice and advice.cause == "workers" and advice.why.endswith("suffice.")


@pytest.mark.parametrize(("opens", "words"), [(1, "Store the data"), (900, "Keep the dataset open (x = file['x']")])
def test_reopened_datasets_lose_their_cache(opens: int, words: str) -> None:
    """HDF5 reads a chunk again if the program opens the dataset again for each request."""
    own = {"kind": "HDF5", "name": "/x", "file": "a.h5", "dtype": "float32", "itemsize": 4, "chunks": [10, 100]}
    array = Array(**own, cache=2**20, requests=1000, opens=opens, measured_used=100, measured_read=1000)
    advice = report.advise(Loading(cores=8, processes=1, loaders=[loader()], arrays=[array]))
    assert advice and advice.cause == "chunks" and advice.todo.startswith(words)


def test_the_verdict_has_the_advice(tmp_path: Path) -> None:
    """`causes.waiting` returns the advice of `--loader` if it exists, otherwise the general cause."""
    outside = {"command": [], "way": "seen", "steps": 100, "status": 0, "seconds": 9, "first_step_seconds": 1}
    throughput = Throughput(outside={**outside, "training": 1, "waiting": 0.5})
    general = causes.waiting(Evidence({}, throughput, folder=tmp_path))
    loading = Loading(cores=8, processes=1, loaders=[loader()])
    loading.model_copy(update={"advice": report.advise(loading)}).write(tmp_path / report.NAME)
    detailed = causes.waiting(Evidence({}, throughput, folder=tmp_path))
    assert general and detailed and (general.cause, detailed.cause) == ("loader", "loading")
    assert "num_workers=4" in detailed.todo


def test_striping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has the count and the size that `lfs getstripe` prints; without Lustre it is empty."""
    assert layout.striping("x") == ""
    lfs = tmp_path / "lfs"
    lfs.write_text('#!/bin/sh\ncase "$2" in -c) echo 4;; -S) echo 1048576;; esac\n')
    lfs.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert layout.striping("x") == "4 Lustre stripes of 1.05\u00a0MB"
    lfs.write_text("#!/bin/sh\necho not Lustre >&2; exit 1\n")
    assert layout.striping("x") == ""


# ---- `dlscale doctor` --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("study", "texts"),
    [
        (
            "cosmo_unet",
            ["Hydro: chunks 5 × 32 × 32 × 32 float32, a sample reads 5 × 16 × 16 × 16, at most 7.22 times its size"],
        ),
        ("era5_vit", ["fields: contiguous float32, a sample reads 1 × 5 × 16 × 32, at most 1.40 times its size"]),
        ("mnist_cnn", ["images: contiguous uint8, a sample reads 1 × 1 × 28 × 28, at most 6.22 times its size"]),
    ],
)
def test_doctor_reports_layouts(
    tmp_path: Path, tiny_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, study: str, texts: list[str]
) -> None:
    """Each field of a prepared dataset has a finding; pages are a problem only if the files exceed the memory."""
    run, manifest = tiny_run(study, tmp_path), tiny_data(study) / "manifest.json"
    found = layout._probe(run, manifest)
    assert all(any(f"layout data.{text}" in str(each) for each in found) for text in texts), found
    assert {each.status for each in found} == {"ok"}
    monkeypatch.setattr(machine, "free_memory", lambda: 0)
    assert ("warn" in {each.status for each in layout._probe(run, manifest)}) == (study != "era5_vit")


def test_doctor_warns_of_compressed_chunks(tmp_path: Path, tiny_data: Callable[[str], Path]) -> None:
    """dlscale cannot map compressed chunks, so most of the bytes that a sample reads are unused."""
    folder = shutil.copytree(tiny_data("era5_vit"), tmp_path / "data")
    for path in (folder / "train").glob("*.h5"):
        with h5py.File(path, "r+") as file:
            values, attributes = file["fields"][...], dict(file["fields"].attrs)
            del file["fields"]
            new = file.create_dataset("fields", data=values, chunks=(8, *values.shape[1:]), compression="gzip")
            new.attrs.update(attributes)
    (finding,) = layout._probe(tiny_run("era5_vit", tmp_path), folder / "manifest.json")
    assert (finding.status, finding.name) == ("warn", "layout data.fields")
    assert "chunks 8 × 5 × 16 × 32" in finding.text and "8.00 bytes read per byte used, gzip" in finding.text


def test_doctor_lists_layouts(tmp_path: Path, tiny_data: Callable[[str], Path]) -> None:
    """The command reports the dataset of a plan; a dataset that does not exist yet has no layout."""
    settings = {"dataset": "data", **TINY["mnist_cnn"]["run"]}
    raw = {"results": str(tmp_path), "targets": ["test"], "datasets": {"data": TINY["mnist_cnn"]["dataset"]}}
    raw |= {"plans": {"test": {"study": "mnist_cnn", "runs": {"run": settings}}}}
    configuration = config.load(raw)
    assert layout.probe_layouts(configuration) == []
    (tmp_path / "data").mkdir()
    (tmp_path / "data/data").symlink_to(tiny_data("mnist_cnn"))
    names = {each.name for each in doctor.check(configuration, ["data"])}
    assert {"layout data.images", "layout data.labels"} <= names
