"""Every loader yields the same samples for every file layout, any number of workers and ranks, and any resume point."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import h5py
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_structure

from dlscale import cli
from dlscale.config.run import load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.files import stamp
from dlscale.data import loaders, staging, store
from dlscale.data.loaders import direct_loader
from dlscale.data.loaders.base import Loader, Share
from dlscale.data.manifest import Manifest, Transform
from dlscale.data.samples import CroppedImages, GridSamples, Samples, WritingSamples
from dlscale.data.store import Field, Reader
from dlscale.extensions.cosmo_unet.cosmo.channels import CHANNELS
from dlscale.extensions.cosmo_unet.cosmo.kind import CropSamples
from dlscale.extensions.cosmo_unet.cosmo.samples import Crops
from dlscale.extensions.dali import loader as dali_loader
from dlscale.extensions.dali import mirrors, prepare
from dlscale.extensions.dali.loader import Pace
from dlscale.extensions.dali.settings import DaliLoader
from dlscale.extensions.era5_vit.era5.informed import InformedLoader
from dlscale.extensions.era5_vit.era5.kind import PairSamples
from dlscale.extensions.era5_vit.era5.samples import InformedPairs, Pairs, open_samples
from tests.conftest import ROOT, TINY, make_run
from tests.raw_files import manifest_of
from tests.waiting import PATIENCE, until

CPU = torch.device("cpu")
#: Edges of the volumes, cells. The volumes differ in size, are not cubes, and do not end with a complete chunk.
EDGES = [(13, 11, 12), (9, 17, 10)]
TIMES = [7, 9]

#: Layouts of a field, as arguments of `store.create`, by name. The tutorials' files have the layout "published".
VOLUMES: dict[str, dict[str, Any]] = {
    "published": {},
    "chunks": {"chunk": 5},
    "half": {"chunk": 5, "dtype": "float16"},
    "half, whole": {"dtype": "float16"},
    "channels last": {"channels_last": True, "chunk": 5},
    "channels last, whole": {"channels_last": True},
    "channels last, half": {"channels_last": True, "dtype": "float16", "chunk": 4},
    "channels last, half, whole": {"channels_last": True, "dtype": "float16"},
}
SERIES: dict[str, dict[str, Any]] = {"published": {}, "half": {"dtype": "float16"}}
#: Layouts that only the HDF5 library can read: compressed, with the other byte order, or in float64.
FOREIGN: dict[str, dict[str, Any]] = {
    "compressed": {"compression": "gzip"},
    "compressed, channels last": {"compression": "gzip", "channels_last": True},
    "big-endian": {"dtype": ">f4"},
    "double": {"dtype": "f8"},
}
#: Layout whose chunks contain only some of the channels.
SPLIT: dict[str, Any] = {"chunks": (2, 5, 5, 5)}


def write_field(path: Path, field: Field, seed: int, layout: dict[str, Any]) -> None:
    """Write one field with `store`, or with h5py if `store` cannot write the layout."""
    values = np.random.default_rng(seed).normal(size=field.shape).astype(np.float32)
    values[(0,) * 4] = -0.0
    with h5py.File(path, "a") as file:
        if layout in FOREIGN.values() or layout is SPLIT:
            last = bool(layout.get("channels_last"))
            values = np.moveaxis(values, 0, -1) if last else values
            rest = {key: value for key, value in layout.items() if key != "channels_last"}
            file.create_dataset(field.name, data=values, **rest).attrs["channels_last"] = last
            return
        shape = [-1 if axis == field.channel_axis else 1 for axis in range(4)]
        scaling = None
        if layout.get("dtype") == "float16":
            scaling = np.linspace(-0.5, 2, len(field.channels)), np.linspace(0.3, 3, len(field.channels))
            offset, scale = (part.reshape(shape).astype(np.float32) for part in scaling)
            values = ((values - offset) / scale).astype(np.float16)
        store.write(store.create(file, field, scaling=scaling, **layout), (slice(None),) * 4, values)


def volume_fields(edges: Sequence[int]) -> list[Field]:
    return [Field(name, c, u, (len(c), *edges), 0, t) for name, (c, u, t) in CHANNELS.items()]


def crops(folder: Path, layout: dict[str, Any], split: str = "train", files: int = 2, **more: Any) -> Crops:
    """Return crops of 6^3 cells from one or two volumes: 29 for training, 8 for validation."""
    for number, edges in enumerate(EDGES[:files]):
        path = folder / f"{number}.h5"
        if not path.exists():
            for seed, field in enumerate(volume_fields(edges)):
                write_field(path, field, 10 * number + seed, layout)
    described = {split: [(f"{number}.h5", edges[0]) for number, edges in enumerate(EDGES[:files])]}
    manifest = manifest_of(folder, "cosmo", volume_fields(EDGES[0]), described)
    return Crops(manifest, split, CropSamples(kind="crops", crop=6, train=29, valid=8, **more), seed=4)


def series(folder: Path, layout: dict[str, Any], split: str = "train") -> Manifest:
    """Return the manifest of two series of 6 channels on 5 x 8 points, of which 4 x 8 are kept."""
    names = tuple(f"channel{number}" for number in range(6))
    transforms = tuple(Transform("linear", 100.0 * number, 0.5 + number) for number in range(6))
    fields = [Field("fields", names, ("1",) * 6, (times, 6, 5, 8), 1, transforms) for times in TIMES]
    for number, field in enumerate(fields):
        path = folder / f"{number}.h5"
        if not path.exists():
            write_field(path, field, number, layout)
    described = {split: [(f"{number}.h5", times) for number, times in enumerate(TIMES)]}
    return manifest_of(folder, "era5", fields[:1], described, grid=[4, 8], stored="physical")


def pairs(folder: Path, layout: dict[str, Any], split: str = "train") -> Pairs:
    """Return the 14 pairs of the two series."""
    return Pairs(series(folder, layout, split), split, PairSamples(kind="pairs"), seed=4)


def informed(folder: Path, layout: dict[str, Any], split: str) -> InformedPairs:
    """Return pairs with history; the series are a training file and a validation file that continues it."""
    manifest = series(folder, layout)
    first, second = manifest.splits["train"]
    extra = {"step_hours": 6.0, "starts": {"0.h5": 0.0, "1.h5": 42.0}, "before": {"1.h5": "0.h5"}}
    manifest = manifest.model_copy(update={"extra": extra, "splits": {"train": [first], "valid": [second]}})
    samples = open_samples(manifest, split, PairSamples(kind="pairs", history=[1, 3], clock=["hour", "day"]), 4)
    assert isinstance(samples, InformedPairs)
    return samples


CASES = [
    *(
        pytest.param(crops, layout, id=f"crops, {name}")
        for name, layout in {**VOLUMES, **FOREIGN, "split": SPLIT}.items()
    ),
    *(
        pytest.param(pairs, layout, id=f"pairs, {name}")
        for name, layout in {**SERIES, **FOREIGN}.items()
        if "channels_last" not in layout
    ),
]


#: Settings class of every loader, by kind.
SETTINGS: dict[str, Any] = {get_args(each.model_fields["kind"].annotation)[0]: each for each in loaders.LOADERS}


def build(
    kind: str,
    samples: Any,
    share: Share,
    workers: int = 0,
    device: torch.device = CPU,
    **more: Any,
) -> Any:
    """Return a loader of a kind; `workers` is ignored by loaders without this setting, and at least 1 for DALI."""
    if kind == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install 'dlscale[dali]'")
    if more.get("reader") == "numpy":
        for field in (samples.input, samples.target):
            prepare.make_mirror(field)
    if "workers" in SETTINGS[kind].model_fields:
        more["workers"] = max(workers, 1 if kind == "dali" else 0)
    return registry.load(registry.loader(kind)).build(samples, SETTINGS[kind](kind=kind, **more), share, device)


def streamed(samples: GridSamples, share: Share, workers: int) -> Any:
    """Return the loader that streams to a GPU; the CPU takes the GPU's role."""
    loader = build("direct", samples, share, workers)
    loader._backend = direct_loader.Streamed(samples, len(share.indices(0, samples.size)), loader._slots, CPU)
    return loader


#: Functions that build every loader except `synthetic`, by name. Loaders with several modes appear once per mode.
LOADERS: dict[str, Callable[[GridSamples, Share, int], Loader]] = {
    **{kind: partial(build, kind) for kind in SETTINGS if kind != "synthetic"},
    "direct, resident": partial(build, "direct", resident="always"),
    "direct, streamed": streamed,
    "dali, numpy": partial(build, "dali", reader="numpy"),
}


def marked(*values: Any, id: str | None = None, quick: bool = False) -> Any:
    """Return a test's parameters, first the loader's name. DALI starts slowly, so it is marked slow unless `quick`."""
    return pytest.param(*values, id=id, marks=[pytest.mark.slow] if values[0].startswith("dali") and not quick else [])


def batches(loader: Loader, epoch: int, start: int = 0) -> list[list[np.ndarray]]:
    """Return copies of the arrays of an epoch's batches, because loaders reuse their buffers."""
    return [[values.numpy().copy() for values in tree_leaves(batch)] for batch in loader.epoch(epoch, start)]


def expected(samples: Samples, share: Share, epoch: int, start: int = 0) -> Iterator[list[np.ndarray]]:
    """Yield the expected batches; each sample comes from `samples.read`."""
    for step in range(start, share.steps(samples.size)):
        read = [tree_leaves(samples.read(epoch, index)) for index in share.indices(step, samples.size)]
        yield [
            np.array([sample[number] for sample in read], spec.dtype).reshape(-1, *spec.shape)
            for number, spec in enumerate(tree_leaves((samples.input_spec, samples.target_spec)))
        ]


def check(delivered: list[list[np.ndarray]], wanted: Iterator[list[np.ndarray]]) -> None:
    for batch, truth in itertools.zip_longest(delivered, wanted):
        for values, true_values in zip(batch, truth, strict=True):
            np.testing.assert_array_equal(values, true_values)
            assert (values.shape, values.dtype) == (true_values.shape, true_values.dtype)


#: Cases whose boxes DALI's operators read in different ways.
DALI_CASES = (
    "crops, published",
    "crops, channels last, half",
    "crops, compressed, channels last",
    "crops, split",
    "crops, double",
    "pairs, half",
)


@pytest.mark.parametrize(
    ("name", "make", "layout"),
    [
        marked(name, *case.values, id=f"{name}: {case.id}", quick=(name, case.id) == ("dali", "pairs, half"))
        for name in LOADERS
        for case in CASES
        if not name.startswith("dali") or case.id in DALI_CASES
        if name != "dali, numpy" or case.values[0] is crops
    ],
)
def test_every_loader_yields_the_one_stream(tmp_path: Path, name: str, make: Any, layout: dict[str, Any]) -> None:
    """All loaders yield bitwise equal samples from all layouts, in two epochs with a smaller last batch."""
    samples, share = make(tmp_path, layout), Share(4)
    assert samples.size % 4
    with closing(LOADERS[name](samples, share, 0 if name == "torch" else 2)) as loader:
        assert (loader.samples, len(loader)) == (samples.size, share.steps(samples.size))
        for epoch in (0, 3):
            check(batches(loader, epoch), expected(make(tmp_path, layout), share, epoch))


@pytest.mark.parametrize("symmetry", ["none", "rotations", "published", "published_dali"])
@pytest.mark.parametrize("name", [marked(name) for name in LOADERS])
def test_every_loader_applies_all_symmetries(tmp_path: Path, name: str, symmetry: str) -> None:
    """Loaders apply symmetries exactly: they transpose and reverse axes, exchange channels and change signs."""
    samples = crops(tmp_path, VOLUMES["half"], symmetry=symmetry)
    with closing(LOADERS[name](samples, Share(8), 0 if name == "torch" else 2)) as loader:
        check(batches(loader, 1), expected(samples, Share(8), 1))


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("name", [marked(name) for name in LOADERS if name != "dali, numpy"])
def test_every_loader_adds_history_and_time(tmp_path: Path, name: str, split: str) -> None:
    """The first histories of the validation file come from the training file that precedes it."""
    layout = {"dtype": "float16"}  # dlscale joins rows of two files in float32
    samples = informed(tmp_path, layout, split)
    assert (samples.size, samples.input_spec.shape) == ({"train": 3, "valid": 8}[split], (6 * 3 + 4, 4, 8))
    for rank in range(2):
        share = Share(3, rank, 2)
        inner = LOADERS[name](samples.boxes, share, 0 if name == "torch" else 2)
        with closing(InformedLoader(inner, samples, share, CPU)) as loader:
            assert (loader.samples, len(loader)) == (samples.size, share.steps(samples.size))
            for epoch, start in ((0, 0), (3, 0), (3, len(loader) - 1)):
                check(batches(loader, epoch, start), expected(informed(tmp_path, layout, split), share, epoch, start))


@pytest.mark.parametrize(
    ("name", "workers", "ranks", "make"),
    [
        marked(*case)
        for case in itertools.product(LOADERS, (0, 1, 2), (1, 2, 3), (crops, pairs))
        if not case[0].startswith("dali") or case[1:3] == (2, 2)
        if case[0] != "dali, numpy" or case[3] is crops
    ],
)
def test_workers_ranks_and_resume_points_do_not_change_samples(
    tmp_path: Path, name: str, workers: int, ranks: int, make: Any
) -> None:
    layout = {"dtype": "float16"}
    samples = make(tmp_path, layout)
    for rank in range(ranks):
        share = Share(4, rank, ranks)  # the last batch has one crop or two pairs
        with closing(LOADERS[name](make(tmp_path, layout), share, workers)) as loader:
            next(loader.epoch(2))  # abandon the epoch after a batch, while other batches are loaded
            for start in (0, 2, len(loader)):
                check(batches(loader, 1, start), expected(samples, share, 1, start))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", [marked(name) for name in LOADERS if not name.startswith("dali")])
def test_a_file_that_disappears_is_one_message(tmp_path: Path, name: str, workers: int) -> None:
    """The message of a worker has no traceback."""
    samples = crops(tmp_path, {})
    for path in tmp_path.rglob("*.h5"):
        path.unlink()
    with pytest.raises(UserError) as raised, closing(LOADERS[name](samples, Share(4), workers)) as loader:
        next(loader.epoch(0))
    assert str(raised.value).startswith(f"{tmp_path}/") and str(raised.value).endswith(".h5: no such file")


@pytest.mark.parametrize("kind", [marked(kind) for kind in SETTINGS])
@pytest.mark.parametrize("study", TINY)
def test_every_loader_serves_every_study(
    tmp_path: Path, tiny_data: Callable[[str], Path], study: str, kind: str
) -> None:
    """Every loader delivers the shapes and dtypes that a study's samples declare, or refuses the study."""
    run = load_run(make_run(tmp_path, study, TINY[study]["run"], TINY[study]["dataset"]), "train")
    module = registry.load(registry.module_of(registry.study(study).dataset, "samples") or "")
    manifest = Manifest.read(tiny_data(study) / "manifest.json")
    samples = module.open_samples(manifest, "train", run.samples, run.seed)
    specs = tree_leaves((samples.input_spec, samples.target_spec))
    for values, spec in zip(tree_leaves(samples.read(0, 0)), specs, strict=True):
        assert (values.shape, str(values.dtype)) == (spec.shape, spec.dtype)
    served = (GridSamples, WritingSamples) if kind == "direct" else (GridSamples, CroppedImages)
    if kind in ("direct", "dali") and not isinstance(samples, served):
        with pytest.raises(UserError, match=f"{kind} reads (only )?arrays on grids"):
            build(kind, samples, Share(5))
        return
    with closing(build(kind, samples, Share(5))) as loader:
        delivered = batches(loader, 1)
        structure = tree_structure((samples.input_spec, samples.target_spec))
        assert tree_structure(next(loader.epoch(0))) == structure
    wanted = list(expected(samples, Share(5), 1))
    # Compare only shapes and dtypes; test_imagenet.py compares the images from DALI.
    if kind == "synthetic" or (kind == "dali" and isinstance(samples, CroppedImages)):
        wanted = delivered
        assert [len(batch[0]) for batch in delivered] == [len(batch[0]) for batch in expected(samples, Share(5), 1)]
    check(delivered, iter(wanted))
    for batch in delivered:
        assert [(values.shape[1:], str(values.dtype)) for values in batch] == [(s.shape, s.dtype) for s in specs]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("samples", [1, 7, 8, 13])
def test_weighted_means_of_ranks_are_that_of_the_batch(samples: int, ranks: int) -> None:
    """The mean over ranks of their weighted means equals the mean of the batch.

    A rank may have any slice of a small last batch, even an empty slice.
    """
    losses = np.random.default_rng(0).uniform(size=samples)
    for step in range(-(-samples // 8)):
        shares = [Share(8, rank, ranks) for rank in range(ranks)]
        own = [losses[list(share.indices(step, samples))] for share in shares]
        means = [
            share.weight(step, samples) * part.mean() for share, part in zip(shares, own, strict=True) if len(part)
        ]
        assert sum(means) / ranks == pytest.approx(losses[8 * step : 8 * step + 8].mean())


def test_unwritten_chunks_are_read_by_the_library(tmp_path: Path) -> None:
    """The HDF5 library reads a field with unwritten chunks, because only the library inserts the fill value."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        values = file.create_dataset("Nbody", (4, 8, 8, 8), "f4", chunks=(4, 4, 4, 4), fillvalue=7.0)
        values[:, :4] = 1.0
    reader, out = Reader(tmp_path / "a.h5", "Nbody"), np.empty((4, 4, 4, 4), np.float32)
    reader.copy((slice(None), slice(2, 6), slice(1, 5), slice(1, 5)), out)
    assert not reader.chunks
    assert (out[:, :2] == 1).all() and (out[:, 2:] == 7).all()


@pytest.mark.parametrize(
    ("first", "second"),
    [("channels last, half", "published"), ("published", "channels last"), ("channels last", "published")],
)
@pytest.mark.parametrize("name", [marked(name) for name in LOADERS])
def test_files_of_different_layouts_in_one_dataset(tmp_path: Path, name: str, first: str, second: str) -> None:
    """A dataset may have files with different dtypes and orders of axes, such as a user's own files."""
    crops(tmp_path, VOLUMES[first], files=1)
    both = crops(tmp_path, VOLUMES[second])
    assert len({(reader.dataset.dtype, reader.order) for reader in both.input.readers}) == 2
    with closing(LOADERS[name](both, Share(4), 1)) as loader:
        check(batches(loader, 0), expected(both, Share(4), 0))


def test_halves_are_decoded_exactly() -> None:
    """All 65,536 float16 values are decoded exactly: normal, subnormal, both zeros, infinities and NaN."""
    from dlscale.data.loaders.direct_host import decode_half

    bits = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        wanted = bits.view(np.float16).astype(np.float32)
    found = torch.full((1, 1, 1, 2**16), torch.nan).numpy()
    # The offset is -0, because adding -0 keeps the sign of zeros.
    decode_half(bits, np.array([0, 0, 0, 1, 0]), np.array([[0], [1], [-0.0]], np.float32), found)
    np.testing.assert_array_equal(found.reshape(-1), wanted)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found.reshape(-1)[numbers]), np.signbit(wanted[numbers]))


# rows of 32 float32 values fill two cache lines, rows of 31 do not
@pytest.mark.parametrize(("channels", "width"), [(4, 32), (6, 32), (6, 31)])
@pytest.mark.parametrize("step", [(200, 40, 1), (1, -200, 40), (-40, 1, -200)], ids=["rows", "turned", "across"])
@pytest.mark.parametrize("form", ["wide", "half", "single"])
def test_compiled_loops_equal_the_formula(form: str, step: tuple[int, int, int], channels: int, width: int) -> None:
    """Compiled loops compute (value - shift) * factor + offset for every form of stored numbers.

    The channels of a cell are contiguous, in any order.
    """
    from dlscale.data.loaders import direct_host

    random = np.random.default_rng(0)
    stored = random.normal(size=100_000).astype(np.float32 if form == "single" else np.float16)
    channel, numbers = random.permutation(channels), random.normal(size=(3, channels)).astype(np.float32)
    words = {"single": stored, "half": stored.view(np.uint16)}.get(form)
    if words is None:
        words = np.lib.stride_tricks.as_strided(stored[:4].view(np.uint64), (len(stored) - 3,), (2,), writeable=False)
    shape, base = (channels, 3, 37, width), 50_000  # 37 rows do not fit into one block of 1,024 words
    wanted, out = np.empty(shape, np.float32), torch.full(shape, torch.nan).numpy()  # `out` is aligned to a cache line
    shift, factor, offset = numbers
    for c, i, j, k in np.ndindex(shape):
        value = np.float32(stored[base + channel[c] + int(np.dot(step, (i, j, k)))])
        wanted[c, i, j, k] = (value - shift[c]) * factor[c] + offset[c]
    getattr(direct_host, f"decode_{form}")(words, np.array([base, *step, *channel]), numbers, out)
    np.testing.assert_array_equal(out, wanted)


UNCACHED = """
import numpy as np
from dlscale.data.loaders import direct_host
from dlscale.extensions.imagenet_resnet50.imagenet.resize import resize
out = np.zeros((3, 8, 8), np.uint8)
resize(np.full((20, 20, 3), 7, np.uint8), (0, 0, 20, 20), (8, 8), (0, 0), False, out)
assert (out == 7).all() and direct_host.decode_half
"""


def test_compiled_code_needs_no_folder_for_a_cache() -> None:
    """Functions are compiled in memory if Numba finds no writable folder, as with a read-only package and no HOME.

    Without NUMBA_CACHE_DIR, the named locator finds no folder.
    """
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    done = subprocess.run([sys.executable, "-c", UNCACHED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_batch_is_overwritten_only_after_the_next_request(tmp_path: Path) -> None:
    """Buffers are reused, so memory does not grow with the epoch."""
    samples = crops(tmp_path, VOLUMES["half"])
    with closing(build("direct", samples, Share(2), 2)) as loader:
        places = set()
        for (x, y), (a, b) in zip(loader.epoch(0), expected(samples, Share(2), 0), strict=True):
            places.add((x.data_ptr(), y.data_ptr()))
            torch.mm(torch.randn(200, 200), torch.randn(200, 200))  # give the threads time to overwrite the batch
            np.testing.assert_array_equal(x.numpy(), a)
            np.testing.assert_array_equal(y.numpy(), b)
        assert len(places) == 3  # two ready batches and the batch in use


MEMORY = """
import sys, threading, time
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from tests import test_loaders as t
samples = t.large(Path(sys.argv[3]), int(sys.argv[4]))
loader = t.build("direct", samples, t.Share(4), 2)
def anonymous():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")))
most = 0
for epoch in range(2):
    for _ in loader.epoch(epoch):
        most = max(most, anonymous())
print(most)
"""


def large(folder: Path, edge: int) -> Crops:
    """Return crops of a volume of `edge`^3 cells and nine channels in float16."""
    fields = volume_fields([edge] * 3)
    for field in fields:
        with h5py.File(folder / f"{edge}.h5", "a") as file:
            if field.name not in file:
                scale = np.zeros(len(field.channels)), np.ones(len(field.channels))
                target = store.create(file, field, dtype="float16", channels_last=True, scaling=scale)
                target[...] = np.ones(target.shape, np.float16)
    manifest = manifest_of(folder, "cosmo", fields, {"train": [(f"{edge}.h5", edge)]})
    return Crops(manifest, "train", CropSamples(kind="crops", crop=16, train=400), seed=0)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """If the data grow by a factor of 37, the process's own memory grows by less than 10 % of the added bytes.

    Mapped pages of the page cache do not count, because the system can free them.
    """
    found = []
    for edge in (48, 160):
        large(tmp_path, edge)
        command = [sys.executable, "-c", MEMORY, str(ROOT), str(ROOT / "workflow_scripts"), str(tmp_path), str(edge)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found.append(int(done.stdout) * 1024)
    data = (160**3 - 48**3) * 9 * 2
    assert found[1] - found[0] < 0.1 * data, f"own memory: {found} bytes; added data: {data} bytes"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["direct", "dali"])
def test_a_torn_file_is_one_message_from_any_thread(tmp_path: Path, kind: str) -> None:
    samples = crops(tmp_path, FOREIGN["compressed"])
    with h5py.File(tmp_path / "0.h5") as file:
        first = file["Nbody"].id.get_chunk_info(0)
    with open(tmp_path / "0.h5", "r+b") as raw:
        raw.seek(first.byte_offset)
        raw.write(b"\0" * first.size)
    with (
        closing(build(kind, samples, Share(29), 2)) as loader,
        pytest.raises(UserError, match=r"0\.h5: cannot be read .*Nbody"),
    ):
        list(loader.epoch(0))


@pytest.mark.slow
def test_processes_of_dali_end_with_the_loader(tmp_path: Path) -> None:
    """DALI's processes end with the loader; a signal to all processes of a job does not end them.

    After such a signal, the training first saves its state.
    """
    loader = build("dali", crops(tmp_path, {}), Share(4), 2)
    next(iter(loader.epoch(0)))
    before = multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        for process in before:
            os.kill(process.pid or 0, number)
    assert len(list(loader.epoch(1))) == 8
    assert len(before) == 2 and set(multiprocessing.active_children()) == set(before)
    loader.close()
    assert not multiprocessing.active_children()


ENDLESS = """
import multiprocessing, sys, time
from pathlib import Path
if __name__ == "__main__":
    from tests.test_loaders import Share, build, crops
    loader = build("dali", crops(Path(sys.argv[1]), {}), Share(4), 2)
    next(iter(loader.epoch(0)))
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_processes_of_dali_do_not_outlive_a_killed_training(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/workflow_scripts:{ROOT}"}
    command = [sys.executable, tmp_path / "endless.py", tmp_path]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as training:
        processes = [Path(f"/proc/{pid}") for pid in training.stdout.readline().split()]
        assert len(processes) == 2 and all(process.exists() for process in processes)
        training.kill()
    until("the end of DALI's processes", lambda: not any(process.exists() for process in processes))


@pytest.fixture
def whole_file(tmp_path: Path) -> Crops:
    """Return the samples of a single volume, because the tutorial's program reads only one volume."""
    return crops(tmp_path, VOLUMES["published"], files=1)


def published_mirror(field: Any, path: Path) -> np.ndarray:
    """Write a mirror, a `.npy` copy with the channels last, like the tutorial's converter; return its values."""
    with h5py.File(field.readers[0].path) as file:
        values = np.transpose(file[field.readers[0].name], [1, 2, 3, 0])
    np.save(path, values)
    return values


def test_mirrors_next_to_a_file_are_read_and_kept(whole_file: Crops, tmp_path: Path) -> None:
    """Mirrors next to a file, named as in the tutorial, are read and left unchanged; no other mirrors are written."""
    fields = {"data": whole_file.input, "label": whole_file.target}
    for name, field in fields.items():
        published_mirror(field, tmp_path / f"0_{name}.npy")
    for name, field in fields.items():
        before = stamp(tmp_path / f"0_{name}.npy")
        prepare.make_mirror(field)
        found = mirrors.mirror(field)
        assert (found.path, found.first.tolist()) == (tmp_path / f"0_{name}.npy", [0])
        assert stamp(found.path) == before
    assert not [*tmp_path.glob("mirrors/*.npy")]
    (tmp_path / "0_label.npy").unlink()  # dlscale now writes its own mirror of the label
    prepare.make_mirror(whole_file.target)
    assert mirrors.mirror(whole_file.target).own


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: x[:-1], r"\(12, 11, 12, 4\) of float32"),
        (lambda x: x.astype(np.float64), r"\(13, 11, 12, 4\) of float64"),
        (np.asfortranarray, "Fortran order"),
        (lambda x: x + np.float32(1), r"other values in cell"),
        (lambda x: None, "no array of values"),
        (None, r"no array of values \(.*EOF"),
        ("pipe", r"no array of values \(not a file\)"),
    ],
    ids=["rows", "type", "order", "values", "no array", "torn header", "pipe"],
)
def test_invalid_mirrors_are_refused(whole_file: Crops, tmp_path: Path, wrong: Any, said: str) -> None:
    path = tmp_path / "0_data.npy"
    values = np.ascontiguousarray(published_mirror(whole_file.input, path))
    if callable(wrong):
        np.save(path, wrong(values), allow_pickle=True)
    elif wrong:
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_bytes(b"\x93NUMPY\x01\x00\x76\x00{" + b"(" * 200)
    with pytest.raises(
        UserError,
        match=rf"0.h5: .* not a mirror of Nbody: .*0_data.npy has {said}.*loader.reader to h5py",
    ):
        prepare.make_mirror(whole_file.input)


@pytest.mark.parametrize("damage", ["zeros", "torn", "text", "no record"])
def test_a_damaged_mirror_is_made_again(tmp_path: Path, damage: str) -> None:
    """A mirror's name identifies only the mirrored file, so damage is detected from the content."""
    samples = crops(tmp_path, VOLUMES["chunks"])
    prepare.make_mirror(samples.input)
    path = mirrors.mirror(samples.input).path
    content, before = path.read_bytes(), path.stat()
    prepare.make_mirror(samples.input)
    assert path.stat().st_ctime_ns == before.st_ctime_ns, "an intact mirror must not be written again"
    half = len(content) // 2
    damaged = {"zeros": content[:half] + bytes(100) + content[half + 100 :], "torn": content[:half], "text": b"hello"}
    path.write_bytes(damaged.get(damage, content))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    if damage == "no record":
        path.with_name(staging.RECORD).unlink()
    prepare.make_mirror(samples.input)
    assert path.read_bytes() == content


def test_a_damaged_mirror_next_to_a_file_is_refused(whole_file: Crops, tmp_path: Path) -> None:
    """A mirror next to its file is refused if a few values are wrong, even if a test of sampled cells misses them."""
    path = tmp_path / "0_data.npy"
    published_mirror(whole_file.input, path)
    prepare.make_mirror(whole_file.input)
    content = bytearray(path.read_bytes())
    content[-40:-36] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"0_data.npy: damaged: .*rows 0 to 12 .*0.h5"):
        prepare.make_mirror(whole_file.input)
    assert path.read_bytes() == content


def test_mirrors_are_made_once_and_anew_for_other_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrors are written once, by the first of several threads, and again for other content.

    A mirror joins volumes along the first axis; a smaller volume fills a corner of the other axes.
    """
    samples, made, write = crops(tmp_path, VOLUMES["chunks"]), list[Path](), prepare._write_mirror

    def slow(found: mirrors.NpyMirror, field: Any) -> None:
        made.append(found.path)
        time.sleep(0.2)  # other threads arrive during this time
        write(found, field)

    monkeypatch.setattr(prepare, "_write_mirror", slow)
    monkeypatch.setattr(mirrors, "SLAB", 10_000)  # several slabs per file
    with pytest.raises(UserError, match="no such mirror"):
        mirrors.mirror(samples.target)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prepare.make_mirror(samples.target), range(4)))
    found = mirrors.mirror(samples.target)
    assert made == [found.path] and found.first.tolist() == [0, 13]
    values = np.load(found.path)
    assert values.shape == (13 + 9, 17, 12, 5)
    for file, (first, (d, h, w)) in enumerate(zip((0, 13), EDGES, strict=True)):
        own = samples.target.readers[file].stored(())
        np.testing.assert_array_equal(values[first : first + d, :h, :w], np.moveaxis(own, 0, -1))
    samples.target.digests[0] = "another"
    prepare.make_mirror(samples.target)
    assert sorted((tmp_path / "mirrors").glob("*.npy")) == made[1:]


def test_a_mirror_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = crops(tmp_path, VOLUMES["chunks"])
    with monkeypatch.context() as full:
        full.setattr(staging.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(UserError, match=r"71.8 kB.* 1.00 kB .*loader.reader to h5py"):
            prepare.make_mirror(samples.input)
    monkeypatch.setattr(type(samples.input), "copy", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare.make_mirror(samples.input)
    assert [path.name for path in (tmp_path / "mirrors").iterdir()] == ["lock"]


def test_the_stage_writes_the_mirrors_for_the_loader(tmp_path: Path) -> None:
    """Before a stage begins, dlscale writes the mirrors of `reader: numpy`; DALI's other reader needs no mirrors."""
    crops(tmp_path, VOLUMES["published"])
    fields, described = volume_fields(EDGES[0]), {"train": [("0.h5", 13), ("1.h5", 9)], "valid": []}
    manifest_of(tmp_path, "cosmo", fields, described).write(tmp_path / "manifest.json")
    for loader, count in (({"kind": "dali"}, 0), ({"kind": "dali", "reader": "numpy"}, 2)):
        (tmp_path / "run.json").write_text(json.dumps({"loader": loader}))
        with ExitStack() as copies:
            manifest = str(tmp_path / "manifest.json")
            assert cli._copy(str(tmp_path / "run.json"), manifest, copies) == manifest
        assert len([*tmp_path.glob("mirrors/*.npy")]) == count


def test_mirrors_are_of_volumes(tmp_path: Path) -> None:
    """Mirrors exist only for volumes; series are refused."""
    pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install 'dlscale[dali]'")
    settings = DaliLoader(kind="dali", reader="numpy")
    with pytest.raises(UserError, match=r"loader.reader: numpy .*Pairs.*loader.reader to h5py"):
        dali_loader.build(pairs(tmp_path, {}), settings, Share(4), CPU)


class LateDevice:
    """Simulated device that runs its work late, at the latest when the host waits."""

    def __init__(self) -> None:
        self.memory: dict[int, str] = {}
        self.given: list[int] = []  # addresses that the device's work reads, in order
        self.seen: list[str] = []  # contents that the device has read
        self.ahead = 0  # largest number of waiting tasks

    def work(self, until: int) -> None:
        while len(self.seen) < until:
            self.seen.append(self.memory[self.given[len(self.seen)]])

    def record(self) -> Any:
        place = len(self.given)
        self.ahead = max(self.ahead, place - len(self.seen))
        return SimpleNamespace(query=lambda: len(self.seen) >= place, synchronize=lambda: self.work(place))


class LateBuffer:
    """Device memory that is overwritten as soon as it has no references."""

    def __init__(self, device: LateDevice, place: int) -> None:
        self.device, self.place = device, place
        device.memory[place] = f"batch {place}"

    def __del__(self) -> None:
        self.device.memory[self.place] = "overwritten"


@pytest.mark.parametrize("speed", [0, 1, 3])
def test_nothing_is_let_go_that_a_device_has_yet_to_read(speed: int) -> None:
    """Buffers are kept until the device has read them, however far the device lags behind.

    The host waits only if it is further ahead than allowed.
    """
    device, ahead = LateDevice(), 4
    pace = Pace(ahead, device.record)
    for number in range(30):
        pace.hold(LateBuffer(device, number))
        device.given.append(number)
        if number % 3 == 0:
            device.work(min(len(device.given), len(device.seen) + speed))
    pace.close()
    assert device.seen == [f"batch {number}" for number in range(30)]
    assert device.ahead <= ahead + 1
    assert set(device.memory.values()) == {"overwritten"}, "all buffers must be released at the end"


def test_data_that_fit_become_resident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Data become resident if they need at most 40 % of the device's memory that this process does not use.

    Memory of other processes counts as free, so parallel runs decide alike.
    """
    samples = crops(tmp_path, VOLUMES["half"])
    needed = samples.input.bytes + samples.target.bytes
    assert needed == 2 * 9 * sum(int(np.prod(edges)) for edges in EDGES)
    caplog.set_level("INFO")
    for room, own, free, fits in (
        (5 * needed, 0, 5 * needed, True),
        (5 * needed, 0, 4 * needed, True),
        (2 * needed, 0, 2 * needed, False),
        (5 * needed // 2 + 1, 0, 5 * needed // 2, True),
        (5 * needed // 2, 3, 5 * needed // 2, False),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, room=room, free=free: (free, room))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device, own=own: own)
        assert direct_loader.becomes_resident("auto", needed, torch.device("cuda")) == fits
        assert f"{'are kept' if fits else 'are not kept'} on the device" in caplog.messages[-1]
    assert direct_loader.becomes_resident("always", needed, torch.device("cuda"))
    assert not direct_loader.becomes_resident("never", needed, torch.device("cuda"))
    assert not direct_loader.becomes_resident("auto", needed, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("slow", ["the loader's stream", "the model's stream"])
@pytest.mark.parametrize(
    ("way", "make"), [*itertools.product(["always", "never", "dali", "torch"], [crops, pairs]), ("numpy", crops)]
)
def test_on_a_gpu(tmp_path: Path, make: Any, way: str, slow: str) -> None:
    """On a GPU all loaders deliver the same samples, whichever stream lags behind.

    Values agree within the rounding of a fused multiply-add. Only a lag reveals that a batch is used, or its memory
    reused, too early.
    """
    samples, device = make(tmp_path, {"dtype": "float16"}), torch.device("cuda")
    kind, more = (way, {}) if way in ("dali", "torch") else ("direct", {"resident": way})
    kind, more = ("dali", {"reader": "numpy"}) if way == "numpy" else (kind, more)
    kept = []
    with closing(build(kind, samples, Share(4), 2, device, **more)) as loader:
        next(loader.epoch(1))  # abandon the epoch after a batch
        for x, y in loader.epoch(0):
            if slow == "the model's stream":
                torch.cuda._sleep(50_000_000)
            elif kind != "dali":
                with torch.cuda.stream(loader._stream if way == "torch" else loader._backend.ring.stream):
                    torch.cuda._sleep(50_000_000)
            kept.append((x.clone(), y.clone()))
        for (x, y), (a, b) in zip(kept, expected(samples, Share(4), 0), strict=True):
            np.testing.assert_allclose(x.cpu(), a, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(y.cpu(), b, rtol=1e-6, atol=1e-6)
