"""Loading speed, samples/s: crops of a volume and pairs of a time series, in the page cache and cold.

The reference is the loader of the SC22 and SC23 tutorials, restated operation by operation in `bench.published`, with
its best number of workers. All loaders take turns. The reference's first batches do not count, as in the tutorials.
The lower bound on time is a copy of as many stored bytes into reused buffers.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import torch

from bench import published
from bench.measure import Options, Row, in_turns
from dlscale.core.errors import UserError
from dlscale.data import store
from dlscale.data.loaders import DirectLoader, TorchLoader, direct_loader, torch_loader
from dlscale.data.loaders.base import Batch, Loader, Share
from dlscale.data.manifest import Manifest, Transform
from dlscale.data.samples import BoxIndex, GridSamples
from dlscale.data.store import Field
from dlscale.extensions.cosmo_unet.cosmo.channels import CHANNELS
from dlscale.extensions.cosmo_unet.cosmo.kind import CropSamples
from dlscale.extensions.cosmo_unet.cosmo.samples import Crops
from dlscale.extensions.dali.prepare import make_mirror
from dlscale.extensions.dali.settings import DaliLoader
from dlscale.extensions.era5_vit.era5.kind import PairSamples
from dlscale.extensions.era5_vit.era5.samples import Pairs
from tests.raw_files import manifest_of

CHANNELS_ERA5, ROWS, COLUMNS = 20, 360, 720
CPU = torch.device("cpu")
THREADS = 2
COPYING = "copying the stored bytes"
PLAIN = "published layout"
LOOP = "the same rows by a loop in C"
PROGRAM = "published loader, {} workers"
PUBLISHED = "torch loader, published layout, {} workers"
WORKERS = (0, 1, 2)
#: Minimum ratio of each loader's speed to the speed of the tutorial's loader with the best number of workers.
CROPS = {"direct, fp16 channels last": 12.0}
PAIRS = {"direct, fp16": 10.0}

Contestants = dict[str, Callable[[], float]]


def write(
    path: Path, fields: list[Field], dtype: str = "float32", channels_last: bool = False, chunk: int | None = None
) -> None:
    """Write random values: contiguous float32 as in the tutorials' files, or as the assemble stage stores them."""
    # Absolute values, because densities cannot be negative.
    tile = np.abs(np.random.default_rng(0).standard_normal(2**22, dtype=np.float32))
    with h5py.File(path, "w") as file:
        for field in fields:
            ones = np.ones(len(field.channels))
            scaling = (0 * ones, ones) if dtype == "float16" else None
            target = store.create(file, field, dtype=dtype, chunk=chunk, channels_last=channels_last, scaling=scaling)
            step = 32 if field.channel_axis == 0 else 1
            for first in range(0, field.rows, step):
                where = field.select(first, min(first + step, field.rows))
                shape = field.resized(min(step, field.rows - first)).shape
                store.write(target, where, np.resize(tile, shape))


def manifest(path: Path, kind: str, fields: list[Field]) -> Manifest:
    """Describe a file as the describe stage does: volumes in model units, series in physical units."""
    info = {} if fields[0].channel_axis == 0 else {"stored": "physical"}
    return manifest_of(path.parent, kind, fields, {"train": [(path.name, fields[0].rows)]}, **info)


def cosmo_fields(edge: int) -> list[Field]:
    """Return the fields of a volume of `edge`^3 cells."""
    return [
        Field(name, channels, units, (len(channels), edge, edge, edge), 0, transforms)
        for name, (channels, units, transforms) in CHANNELS.items()
    ]


def series_field(times: int, channels: int, rows: int, columns: int) -> Field:
    """Return the field of a series of states, with its standardisation."""
    names = tuple(f"channel{index}" for index in range(channels))
    transforms = (Transform("linear", 0.1, 1.5),) * channels
    return Field("fields", names, ("1",) * channels, (times, channels, rows, columns), 1, transforms)


def torch_of(samples: GridSamples, batch_size: int, workers: int) -> Loader:
    return torch_loader.build(samples, TorchLoader(kind="torch", workers=workers), Share(batch_size), CPU)


def direct_of(samples: GridSamples, batch_size: int) -> Loader:
    return direct_loader.build(samples, DirectLoader(kind="direct", workers=THREADS), Share(batch_size), CPU)


def dali_rates(
    stack: ExitStack, samples: GridSamples, batch_size: int, readers: dict[str, Literal["h5py", "numpy"]]
) -> Contestants:
    """Return DALI's contestants by name; empty if DALI is not installed."""
    from dlscale.extensions.dali import loader as dali_loader

    if "numpy" in readers.values():
        for field in (samples.input, samples.target):
            make_mirror(field)
    try:
        return {
            f"DALI, {name}": rate(
                stack,
                dali_loader.build(
                    samples, DaliLoader(kind="dali", workers=THREADS, reader=reader), Share(batch_size), CPU
                ),
            )
            for name, reader in readers.items()
        }
    except UserError as error:
        print(f"skipped: {error}")
        return {}


def rate(stack: ExitStack, loader: Loader) -> Callable[[], float]:
    """Return a function that delivers one epoch and returns samples/s, including the wait for the first batch."""
    stack.enter_context(closing(loader))
    epochs = iter(range(10**9))

    def measure() -> float:
        start = time.perf_counter()
        delivered = sum(len(x) for x, _ in loader.epoch(next(epochs)))
        return delivered / (time.perf_counter() - start)

    return measure


def steady_rate(epoch: Callable[[], Iterable[Batch]], workers: int) -> Callable[[], float]:
    """Return a function that delivers one epoch and returns samples/s, without the first batch of each worker.

    The tutorials leave out one batch of a thousand. Here an epoch has few batches, and the first batches of all workers
    arrive together, so leaving out only one batch would overestimate the speed.
    """

    def measure() -> float:
        batches = iter(epoch())
        for _ in range(max(workers, 1)):
            next(batches)
        start = time.perf_counter()
        delivered = sum(len(x) for x, _ in batches)
        return delivered / (time.perf_counter() - start)

    return measure


def program_rate(stack: ExitStack, dataset: published.Pieces, batch_size: int, workers: int) -> Callable[[], float]:
    """Return a function that measures the tutorials' loader in the same way as `steady_rate`."""
    loader = published.loader(dataset, batch_size, workers)
    stack.callback(setattr, loader, "_iterator", None)  # end the worker processes
    return steady_rate(lambda: loader, workers)


def torch_rate(stack: ExitStack, samples: GridSamples, batch_size: int, workers: int) -> Callable[[], float]:
    """Return a function that measures dlscale's baseline, the `torch` loader, in the same way as `steady_rate`."""
    loader = stack.enter_context(closing(torch_of(samples, batch_size, workers)))
    epochs = iter(range(10**9))
    return steady_rate(lambda: loader.epoch(next(epochs)), workers)


def reading(stack: ExitStack, samples: GridSamples, batch_size: int) -> Callable[[], float]:
    """Return a function that copies an epoch's stored boxes into buffers and returns samples/s."""
    pool = stack.enter_context(ThreadPoolExecutor(THREADS))
    fields = samples.input, samples.target
    buffers = [
        field.canonical(np.ones([batch_size, *(field.shape[axis] for axis in field.order)], field.dtype))
        for field in fields
    ]
    for field in fields:
        for file in range(len(field.readers)):
            # touch each page once, because page faults are not part of reading
            if (values := field.mapped(file)) is not None:
                values.transpose(field.order_of(file)).reshape(-1)[:: 4096 // field.dtype.itemsize].max()
    epochs = iter(range(10**9))

    def measure() -> float:
        boxes = samples.boxes(next(epochs))

        def read(index: int) -> None:
            for field, starts, out in zip(fields, (boxes.input, boxes.target), buffers, strict=True):
                field.copy(boxes.file[index], starts[index], out[index % batch_size])

        start = time.perf_counter()
        list(pool.map(read, range(samples.size)))
        return samples.size / (time.perf_counter() - start)

    return measure


ROWS_IN_C = """
#include <string.h>
void rows(char *to, const char *from, const long *n, const long *stride, long width) {
    for (long i = 0; i < n[0]; i++)
        for (long j = 0; j < n[1]; j++)
            for (long k = 0; k < n[2]; k++, to += width)
                memcpy(to, from + i * stride[0] + j * stride[1] + k * stride[2], width);
}
"""


def reading_in_c(stack: ExitStack, samples: GridSamples, batch_size: int, folder: Path) -> Callable[[], float]:
    """Return a function that measures like the function from `reading`, but with a C loop over the rows of boxes."""
    (folder / "rows.c").write_text(ROWS_IN_C)
    library = folder / f"rows{len(list(folder.glob('rows*.so')))}.so"
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, folder / "rows.c"], check=True)
    rows = ctypes.CDLL(str(library)).rows
    rows.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long]
    pool = stack.enter_context(ThreadPoolExecutor(THREADS))
    fields = samples.input, samples.target
    buffers = [np.ones((batch_size, int(np.prod(field.shape))), field.dtype) for field in fields]
    epochs = iter(range(10**9))

    def prepared(boxes: BoxIndex, index: int) -> list[tuple[Any, ...]]:
        """Return the arguments of the two C calls for a sample."""
        calls = list[tuple[Any, ...]]()
        for field, starts, out in zip(fields, (boxes.input, boxes.target), buffers, strict=True):
            values = field.mapped(boxes.file[index])
            assert values is not None
            box = [slice(None), *(slice(a, a + n) for a, n in zip(starts[index], field.shape[1:], strict=True))]
            view = values[tuple(box)].transpose(field.order)
            outer, width = list(zip(view.shape, view.strides, strict=True)), view.itemsize
            while outer and outer[-1][1] == width:  # merge contiguous axes
                width *= outer.pop()[0]
            counts, strides = (
                (ctypes.c_long * 3)(*each) for each in zip(*[(1, 0)] * (3 - len(outer)), *outer, strict=True)
            )
            calls.append((out[index % batch_size].ctypes.data, view.ctypes.data, counts, strides, width))
        return calls

    def measure() -> float:
        boxes = samples.boxes(next(epochs))
        work = [prepared(boxes, index) for index in range(samples.size)]

        def read(calls: list[tuple[Any, ...]]) -> None:
            for words in calls:
                rows(*words)

        start = time.perf_counter()
        list(pool.map(read, work))
        return samples.size / (time.perf_counter() - start)

    return measure


def copying(stack: ExitStack, sample_bytes: int, count: int, batch_size: int) -> Callable[[], float]:
    """Return a function that copies the bytes of `count` samples into buffers and returns samples/s."""
    pool = stack.enter_context(ThreadPoolExecutor(THREADS))
    source = np.ones((max(4, 2**29 // sample_bytes), sample_bytes), np.uint8)  # larger than any cache
    target = np.ones((batch_size, sample_bytes), np.uint8)

    def copy(index: int) -> None:
        np.copyto(target[index % batch_size], source[index % len(source)])

    def measure() -> float:
        start = time.perf_counter()
        list(pool.map(copy, range(count)))
        return count / (time.perf_counter() - start)

    return measure


def cold(path: Path, make: Callable[[], Loader], read: list[float]) -> Callable[[], float]:
    """Return a function that delivers one epoch of a file that is not in the page cache, and returns samples/s.

    The function appends to `read` the bytes per sample that this process read from the disk. Zero bytes are an error,
    because they mean that the file was in the page cache.
    """

    def measure() -> float:
        # these functions cache samples, which keep files mapped
        for of_epochs in (Crops.boxes, Crops.table, Pairs.boxes):
            of_epochs.cache_clear()
        gc.collect()  # free the mappings, because the page cache keeps mapped pages
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        loader = make()
        before, start = _disk_bytes(), time.perf_counter()
        delivered = sum(len(x) for x, _ in loader.epoch(0))
        seconds = time.perf_counter() - start
        came = _disk_bytes() - before
        loader.close()
        if not came:
            raise RuntimeError(
                f"{path}: no bytes were read from the disk: the file is still mapped, or is in memory (tmpfs)"
            )
        read.append(came / delivered)
        return delivered / seconds

    return measure


def _disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


@dataclass(frozen=True)
class Published:
    """Samples in the layout of the tutorial's files, for the tutorial's loader and for dlscale's loaders."""

    pieces: published.Pieces
    samples: GridSamples


@dataclass(frozen=True)
class Comparison:
    """Inputs for comparing the loaders of one study with the tutorial's loader."""

    label: str
    program: Published
    ours: GridSamples  #: Samples whose stored bytes the lower bounds read and copy.
    batch_size: int
    targets: dict[str, float]  #: Loader → minimum ratio of its speed to the speed of the tutorial's loader.


def compare(options: Options, comparison: Comparison, contestants: Callable[[ExitStack], Contestants]) -> list[Row]:
    """Measure all loaders in turns; `contestants` makes all loaders except PyTorch's."""
    label, ours, batch_size = comparison.label, comparison.ours, comparison.batch_size
    program, plain, targets = comparison.program.pieces, comparison.program.samples, comparison.targets
    stored = [(np.prod(field.shape), field.readers[0].dataset.dtype.itemsize) for field in (ours.input, ours.target)]
    stored_bytes = int(sum(values * size for values, size in stored))
    delivered = int(sum(values * 4 for values, _ in stored))
    with ExitStack() as stack:
        others = contestants(stack)
        found = in_turns(
            options.repetitions,
            {
                **{PROGRAM.format(workers): program_rate(stack, program, batch_size, workers) for workers in WORKERS},
                **{PUBLISHED.format(workers): torch_rate(stack, plain, batch_size, workers) for workers in WORKERS},
                **others,
                "reads alone": reading(stack, ours, batch_size),
                LOOP: reading_in_c(stack, ours, batch_size, options.folder),
                COPYING: copying(stack, stored_bytes, ours.size, batch_size),
            },
        )
    floor = found.pop(COPYING)
    best = best_of([found[PROGRAM.format(workers)] for workers in WORKERS])
    ours_best = best_of([found[PUBLISHED.format(workers)] for workers in WORKERS])
    counted: dict[str, float] = {"bytes delivered": delivered, "batch": batch_size}
    rows = [
        Row(f"{label}, {name}", "samples/s", found.pop(name), COPYING, floor, {**counted, "stored": delivered})
        for name in [form.format(workers) for form in (PROGRAM, PUBLISHED) for workers in WORKERS]
    ]
    reference = "published loader's best"
    rows.append(Row(f"{label}, torch loader's best", "samples/s", ours_best, reference, best, counted, target=0.95))
    reads = found.pop("reads alone")
    counted["stored"] = stored_bytes
    rows.append(Row(f"{label}, reads alone", "samples/s", reads, COPYING, floor, counted))
    rows.append(Row(f"{label}, reads alone", "samples/s", reads, LOOP, found.pop(LOOP), counted, target=0.9))
    for name, values in found.items():
        rows.append(Row(f"{label}, {name}", "samples/s", values, COPYING, floor, counted))
        if name in targets:
            rows.append(Row(f"{label}, {name}", "samples/s", values, reference, best, counted, target=targets[name]))
    return rows


def best_of(rates: list[list[float]]) -> list[float]:
    """Return the rates with the greatest median; each list has one rate per repetition."""
    return max(rates, key=statistics.median)


def crops(options: Options) -> list[Row]:
    """Measure 64^3 crops of 9 channels with random symmetries, in batches of 16."""
    edge, few, many = (96, 48, 32) if options.quick else (512, 96, 256)
    fields = cosmo_fields(edge)
    paths = {name: options.folder / f"{name}.h5" for name in ("published", "ours", "chunked")}
    write(paths["published"], fields)
    write(paths["ours"], fields, "float16", channels_last=True)
    write(paths["chunked"], fields, "float16", channels_last=True, chunk=32)

    def samples(name: str, count: int) -> Crops:
        settings = CropSamples(kind="crops", train=count)
        return Crops(manifest(paths[name], "cosmo", fields), "train", settings, seed=0)

    ours = samples("ours", many)

    def contestants(stack: ExitStack) -> Contestants:
        found = {
            "direct, published layout": rate(stack, direct_of(samples("published", many), 16)),
            "direct, fp16 channels last, chunks 32^3": rate(stack, direct_of(samples("chunked", many), 16)),
            "direct, fp16 channels last": rate(stack, direct_of(ours, 16)),
        }
        return found | dali_rates(stack, samples("published", many), 16, {PLAIN: "h5py", ".npy mirrors": "numpy"})

    program = Published(published.Crops(paths["published"], 64, few), samples("published", few))
    # Measure cold reads first, because the samples in `compare` keep their files mapped.
    cold_rows = colds(options, "64^3 crops", paths, lambda name: samples(name, 16 if options.quick else 32), 16)
    return compare(options, Comparison("64^3 crops", program, ours, 16, CROPS), contestants) + cold_rows


def pairs(options: Options) -> list[Row]:
    """Measure pairs of atmospheric states, 20 standardised channels at 360 x 720, in batches of 4."""
    times, few, many = (13, 12, 12) if options.quick else (33, 24, 32)
    field = series_field(times, CHANNELS_ERA5, ROWS, COLUMNS)
    paths = {name: options.folder / f"{name}.h5" for name in ("published", "ours")}
    write(paths["published"], [field])
    write(paths["ours"], [field], "float16")

    def samples(name: str, count: int) -> Pairs:
        return Pairs(manifest(paths[name], "era5", [field]), "train", PairSamples(kind="pairs", train=count), seed=0)

    ours = samples("ours", many)

    def contestants(stack: ExitStack) -> Contestants:
        found = {
            "direct, published layout": rate(stack, direct_of(samples("published", many), 4)),
            "direct, fp16": rate(stack, direct_of(ours, 4)),
        }
        return found | dali_rates(stack, samples("published", many), 4, {PLAIN: "h5py"})

    means, stds = (
        np.full((CHANNELS_ERA5, 1, 1), getattr(field.transforms[0], key), np.float32) for key in ("offset", "scale")
    )
    program = Published(published.Pairs(paths["published"], means, stds, few), samples("published", few))
    cold_rows = colds(options, "ERA5 pairs", paths, lambda name: samples(name, few // 2), 4)
    return compare(options, Comparison("ERA5 pairs", program, ours, 4, PAIRS), contestants) + cold_rows


def colds(
    options: Options, label: str, paths: dict[str, Path], samples: Callable[[str], GridSamples], batch_size: int
) -> list[Row]:
    """Measure cold reads: the direct loader on each layout, compared with PyTorch's loader on the published layout."""
    read: dict[str, list[float]] = {name: [] for name in ("torch, published layout", *paths)}
    found = in_turns(
        2 if options.quick else 3,
        {
            "torch, published layout": cold(
                paths["published"],
                lambda: torch_of(samples("published"), batch_size, 0),
                read["torch, published layout"],
            ),
            **{
                name: cold(path, lambda name=name: direct_of(samples(name), batch_size), read[name])  # type: ignore[misc]
                for name, path in paths.items()
            },
        },
    )
    reference = found["torch, published layout"]
    return [
        Row(
            f"{label}, cold, direct, {name} layout",
            "samples/s",
            found[name],
            "torch loader, published layout, cold",
            reference,
            {
                "bytes read/sample": float(np.median(read[name])),
                "torch read": float(np.median(read["torch, published layout"])),
            },
        )
        for name in paths
    ]
