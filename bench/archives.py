"""Loading speed, samples/s, of ERA5 pairs from a compressed Zarr v3 archive and from dlscale's prepared HDF5 file.

The archive has one array per variable and one chunk per state, compressed by Blosc (LZ4, level 5, shuffled bytes), as
in ARCO-ERA5. Its values are smooth fields with 16 bits per number, as in ERA5's GRIB files. The reader of the archive
is the tutorial's dataset with `zarr` instead of `h5py`, in processes of PyTorch's DataLoader. Another reader
decompresses on a GPU; it needs CUDA, CuPy, kvikio and nvCOMP, and has never run.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import torch
import zarr
from numpy.typing import NDArray
from torch.nn import functional as F
from zarr.buffer import gpu
from zarr.codecs import BloscCodec, BloscShuffle, ZstdCodec

from bench import published
from bench.loading import (
    CHANNELS_ERA5,
    COLUMNS,
    ROWS,
    WORKERS,
    Contestants,
    best_of,
    direct_of,
    manifest,
    program_rate,
    rate,
    series_field,
)
from bench.measure import Options, Row, in_turns
from dlscale.data import store
from dlscale.extensions.era5_vit.era5.kind import PairSamples
from dlscale.extensions.era5_vit.era5.samples import Pairs

#: Minimum ratio of the speed of `direct` to the speed of the archive's reader with the best number of workers.
TARGET = 3.0
#: Reader that decompresses on a GPU. It has never run.
ON_GPU = "Zarr v3 with Zstd, decompressed on a GPU"


def state(time: int) -> NDArray[np.float32]:
    """Return smooth fields, float32 [channel, row, column]; the values have 16 bits, as in GRIB files."""
    coarse = torch.randn(1, CHANNELS_ERA5, ROWS // 16, COLUMNS // 16, generator=torch.Generator().manual_seed(time))
    fine = F.interpolate(coarse, (ROWS, COLUMNS), mode="bicubic")[0].numpy()
    low, high = (extreme(fine, axis=(1, 2), keepdims=True) for extreme in (np.min, np.max))
    return np.asarray(low + np.round((fine - low) / (high - low) * 65535) * ((high - low) / 65535), np.float32)


def _row(array: object, time: int) -> NDArray[Any]:
    assert isinstance(array, zarr.Array)
    return np.asarray(array[time])


class Archive(published.Pairs):
    """Pairs of consecutive states of a Zarr archive, standardised in place as in the tutorial."""

    def _state(self, time: int) -> torch.Tensor:
        group = zarr.open_group(self.path, mode="r")
        values = np.stack([_row(group[f"channel{channel}"], time) for channel in range(CHANNELS_ERA5)])
        values -= self.means
        values /= self.stds
        return torch.as_tensor(values)

    def __getitem__(self, index: int) -> published.Pair:
        return self._state(index), self._state(index + 1)


def write(folder: Path, times: int) -> dict[str, Path]:
    """Write the same states as an archive, in the tutorial's layout, and as `assemble` stores them."""
    paths = {"archive": folder / "era5.zarr", "published": folder / "published.h5", "fp16": folder / "fp16.h5"}
    field = series_field(times, CHANNELS_ERA5, ROWS, COLUMNS)
    codec = BloscCodec(cname="lz4", clevel=5, shuffle=BloscShuffle.shuffle)
    group = zarr.create_group(paths["archive"], zarr_format=3)
    arrays = [
        group.create_array(
            f"channel{channel}", shape=(times, ROWS, COLUMNS), chunks=(1, ROWS, COLUMNS), dtype="f4", compressors=codec
        )
        for channel in range(CHANNELS_ERA5)
    ]
    scaling = np.zeros(CHANNELS_ERA5), np.ones(CHANNELS_ERA5)
    with h5py.File(paths["published"], "w") as plain, h5py.File(paths["fp16"], "w") as half:
        targets = store.create(plain, field), store.create(half, field, dtype="float16", scaling=scaling)
        for row in range(times):
            values = state(row)
            for array, channel in zip(arrays, values, strict=True):
                array[row] = channel
            for target in targets:
                store.write(target, field.select(row, row + 1), values[None])
    return paths


def gpu_reader(archive: Path, copy: Path, device: str = "cuda") -> Callable[[Sequence[int]], torch.Tensor]:
    """Return a function that reads states by time, [time, channel, row, column], and decompresses them on a GPU.

    kvikio reads chunks into zarr's GPU buffers (https://docs.rapids.ai/api/kvikio/stable/zarr). zarr would decompress
    them on the host (https://zarr.readthedocs.io/en/stable/user-guide/gpu), so nvCOMP decompresses all chunks of a call
    (https://docs.nvidia.com/cuda/nvcomp/py_api.html). nvCOMP cannot read Blosc: `copy` is the archive with Zstd.
    """
    _, kvikio, nvcomp = (import_module(name) for name in ("cupy", "kvikio.zarr", "nvidia.nvcomp"))
    names = [f"channel{channel}" for channel in range(CHANNELS_ERA5)]
    for name in names:
        values = np.asarray(zarr.open_array(archive, path=name, mode="r")[:])
        zarr.create_array(copy, name=name, data=values, chunks=(1, ROWS, COLUMNS), compressors=ZstdCodec())
    store = kvikio.GDSStore(copy, read_only=True)
    codec = nvcomp.Codec(algorithm="Zstd", bitstream_kind=nvcomp.BitstreamKind.RAW)

    async def chunks(times: Sequence[int]) -> list[Any]:
        keys = [f"{name}/c/{row}/0/0" for row in times for name in names]
        return await asyncio.gather(*(store.get(key, gpu.buffer_prototype) for key in keys))

    def read(times: Sequence[int]) -> torch.Tensor:
        found = codec.decode(nvcomp.as_arrays([chunk.as_array_like() for chunk in asyncio.run(chunks(times))]))
        fields = [torch.as_tensor(each, device=device).view(torch.float32) for each in found]
        return torch.stack(fields).view(-1, CHANNELS_ERA5, ROWS, COLUMNS)

    return read


def gpu_rate(archive: Path, copy: Path, scaling: Sequence[NDArray[Any]], count: int) -> Contestants:
    """Return the reader that decompresses on a GPU; empty without CUDA or one of the packages."""
    try:
        torch.cuda.init()
        read, (means, stds) = gpu_reader(archive, copy), (torch.as_tensor(each, device="cuda") for each in scaling)
    except (ImportError, RuntimeError, AssertionError) as error:
        print(f"skipped: {ON_GPU}: {error}; needs CUDA; pip install cupy-cuda12x kvikio-cu12 nvidia-nvcomp-cu12")
        return {}

    def measure() -> float:
        start = time.perf_counter()
        for first in range(0, count, 4):
            read([row for index in range(first, min(first + 4, count)) for row in (index, index + 1)]).sub_(means).div_(
                stds
            )
        torch.cuda.synchronize()
        return count / (time.perf_counter() - start)

    return {ON_GPU: measure}


def cores(action: Callable[[], float], samples: int, used: list[float]) -> Callable[[], float]:
    """Return a function that calls `action` and appends to `used` the processor seconds of all processes per sample."""

    def total() -> float:
        here = psutil.Process()
        times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    def measure() -> float:
        before = total()
        found = action()
        used.append((total() - before) / samples)
        return found

    return measure


def archives(options: Options) -> list[Row]:
    """Measure pairs of atmospheric states, 20 standardised channels at 360 x 720, in batches of 4."""
    times, count = (13, 12) if options.quick else (33, 32)
    paths, field = write(options.folder, times), series_field(times, CHANNELS_ERA5, ROWS, COLUMNS)
    means, stds = (
        np.full((CHANNELS_ERA5, 1, 1), getattr(field.transforms[0], key), np.float32) for key in ("offset", "scale")
    )
    names = {workers: f"Zarr v3, {workers} workers" for workers in WORKERS}
    with ExitStack() as stack:
        contestants: Contestants = {
            name: program_rate(stack, Archive(paths["archive"], means, stds, count), 4, workers)
            for workers, name in names.items()
        }
        for name in ("published", "fp16"):
            settings = PairSamples(kind="pairs", train=count)
            samples = Pairs(manifest(paths[name], "era5", [field]), "train", settings, seed=0)
            contestants[f"direct, {name}"] = rate(stack, direct_of(samples, 4))
        paths[ON_GPU] = options.folder / "zstd.zarr"
        contestants |= gpu_rate(paths["archive"], paths[ON_GPU], (means, stds), count)
        used: dict[str, list[float]] = {name: [] for name in contestants}
        found = in_turns(
            options.repetitions, {name: cores(each, count, used[name]) for name, each in contestants.items()}
        )
    stored = {
        name: sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
        for name, path in paths.items()
    }
    best = best_of([found[name] for name in names.values()])
    fastest = next(name for name in names.values() if found[name] is best)
    rows = []
    for name, rates in found.items():
        form = name.removeprefix("direct, ") if name not in names.values() else "archive"
        counted = {"stored bytes/sample": 2 * stored[form] / times, "CPU s/sample": statistics.median(used[name])}
        target = TARGET if form == "fp16" else None
        rows.append(Row(f"ERA5 archive, {name}", "samples/s", rates, fastest, best, counted, target))
    return rows
