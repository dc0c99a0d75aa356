"""Samples/s of the loaders, against copying as many bytes in memory: crops of a volume, and pairs of a time series."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import h5py
import numpy as np
import torch

from dlscale.data import store
from dlscale.data.channels import CHANNELS
from dlscale.data.crops import Crops
from dlscale.data.loaders import torch_loader
from dlscale.data.loaders.base import Loader, Share
from dlscale.data.manifest import FieldInfo, File, Manifest
from dlscale.data.pairs import Pairs
from dlscale.data.samples import Samples
from dlscale.data.store import Field
from dlscale.data.transforms import Transform
from dlscale.runtime.schema.run import CropSamples, PairSamples
from dlscale.runtime.schema.run import Loader as Settings
from tests.bench.measure import Options, Row, in_turns

CHANNELS_ERA5, ROWS, COLUMNS = 20, 360, 720
FLOOR = "copying as many bytes"


def write(path: Path, fields: list[Field], half: bool = False) -> None:
    """Write normal deviates, contiguous float32 or, in half precision, as the assemble stage stores them."""
    generator = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for field in fields:
            ones = np.ones(len(field.channels))
            layout = {"dtype": "float16", "chunk": 32, "scaling": (0 * ones, ones)} if half else {}
            target = store.create(file, field, **layout)
            step = 32 if field.channel_axis == 0 else 1
            for first in range(0, field.rows, step):
                where = field.select(first, min(first + step, field.rows))
                target[where] = generator.standard_normal(target[where].shape, dtype=np.float32)


def manifest(path: Path, kind: str, fields: list[Field]) -> Manifest:
    """Describe a file as the describe stage would."""
    infos = {}
    for field in fields:
        count = len(field.channels)
        grid = list(field.shape[2:] if field.channel_axis == 1 else field.shape[1:])
        numbers = [[0.0] * count, [1.0] * count, [-5.0] * count, [5.0] * count]
        infos[field.name] = FieldInfo(
            list(field.channels), ["1"] * count, grid, [Transform()] * count, "model", *numbers
        )
    file = File(path.name, fields[0].rows, path.stat().st_size, "bench")
    return Manifest(kind, infos, {"train": [file]}, folder=path.parent)


def cosmo_fields(edge: int) -> list[Field]:
    """Return what a volume of `edge`^3 cells holds."""
    return [
        Field(name, channels, units, (len(channels), edge, edge, edge), 0, transforms)
        for name, (channels, units, transforms) in CHANNELS.items()
    ]


def rates(stack: ExitStack, samples: Samples, batch_size: int, workers: int) -> Callable[[], float]:
    """Return a function that delivers one epoch and returns its samples/s, the wait for the first batch included."""
    settings = Settings(kind="torch", workers=workers)
    loader: Loader = torch_loader.build(samples, settings, Share(batch_size), torch.device("cpu"))
    stack.enter_context(closing(loader))
    epochs = iter(range(10**9))

    def measure() -> float:
        delivered = 0
        start = time.perf_counter()
        for x, _ in loader.epoch(next(epochs)):
            delivered += len(x)
        return delivered / (time.perf_counter() - start)

    return measure


def copying(sample_bytes: int, count: int, batch_size: int) -> Callable[[], float]:
    """Return a function that copies as many bytes as `count` samples have, and returns its samples/s."""
    source = np.ones((max(4, 2**28 // sample_bytes), sample_bytes), np.uint8)  # more than any cache holds
    target = np.ones((batch_size, sample_bytes), np.uint8)

    def measure() -> float:
        start = time.perf_counter()
        for index in range(count):
            np.copyto(target[index % batch_size], source[index % len(source)])
        return count / (time.perf_counter() - start)

    return measure


def compare(options: Options, label: str, stores: dict[str, Samples], batch_size: int) -> list[Row]:
    """Measure each store with 0, 1 and 2 workers."""
    first = next(iter(stores.values()))
    sample_bytes = 4 * sum(int(np.prod(shape)) for shape in (first.input_shape, first.target_shape))
    with ExitStack() as stack:
        contestants = {
            f"{label}, {name}, workers: {workers}": rates(stack, samples, batch_size, workers)
            for name, samples in stores.items()
            for workers in (0, 1, 2)
        }
        contestants[FLOOR] = copying(sample_bytes, first.size, batch_size)
        found = in_turns(options.repetitions, contestants)
    floor = found.pop(FLOOR)
    counted = {"bytes/sample": sample_bytes, "samples": first.size, "batch": batch_size}
    return [Row(name, "samples/s", values, FLOOR, floor, counted) for name, values in found.items()]


def crops(options: Options) -> list[Row]:
    """64^3 crops of 9 channels, from the published layout and from this project's own, turned at random."""
    edge, count = (128, 8) if options.quick else (256, 32)
    fields = cosmo_fields(edge)
    stores: dict[str, Samples] = {}
    for name, half in (("contiguous fp32", False), ("chunks 32^3 fp16", True)):
        path = options.folder / f"volume{edge}-{'half' if half else 'single'}.h5"
        write(path, fields, half)
        stores[name] = Crops(manifest(path, "cosmo", fields), "train", CropSamples(kind="crops", train=count), seed=0)
    return compare(options, "64^3 crops", stores, batch_size=8)


def pairs(options: Options) -> list[Row]:
    """Pairs of atmospheric states, 20 channels at 360 x 720, from the published layout."""
    times = 5 if options.quick else 17
    names = tuple(f"channel{index}" for index in range(CHANNELS_ERA5))
    field = Field("fields", names, ("1",) * CHANNELS_ERA5, (times, CHANNELS_ERA5, ROWS, COLUMNS), 1)
    path = options.folder / "series.h5"
    write(path, [field])
    samples = Pairs(manifest(path, "era5", [field]), "train", PairSamples(kind="pairs"), seed=0)
    return compare(options, "ERA5 pairs", {"contiguous fp32": samples}, batch_size=2)
