"""Reference rows of the GPU benchmarks: names, versions and hardware rates. The module needs only torch."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from functools import partial
from importlib import metadata

import torch

from bench.tasks import Bench, Task, Values

PRODUCT, COPY, PINNED = (
    f"machine: {name}" for name in ("bf16 matrix product", "copy in memory", "pinned host to device")
)
PACKAGES = ("triton", "numba", "numpy", "h5py", "pydantic")


def is_h200(bench: Bench) -> bool:
    """Return whether the targets for an H200 apply: the GPU is an H200, and the run is not quick."""
    there = bench.cuda and torch.cuda.is_available() and not bench.quick
    return there and "H200" in torch.cuda.get_device_name(bench.device)


def machine(bench: Bench) -> Values:
    """Return names and versions of hardware and software."""
    found: Values = {"torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    if bench.cuda:
        free, total = torch.cuda.mem_get_info(bench.device)
        found |= {
            "card": torch.cuda.get_device_name(bench.device),
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "free GB": free / 1e9,
            "GB": total / 1e9,
        }
        with suppress(OSError, subprocess.SubprocessError, IndexError):
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()[0]
    for package in metadata.distributions():
        name = str(package.metadata["Name"])
        if name.startswith("nvidia-dali") or name in PACKAGES:
            found[name] = package.version
    return found


def product(bench: Bench) -> Values:
    """Return the rate of a large bf16 matrix product: the better of two sizes."""
    best = 0.0
    for size in (8192, 16384) if bench.cuda and not bench.quick else (256,):
        a, b, c = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(3))
        best = max(best, 2 * size**3 / bench.seconds(partial(torch.mm, a, b, out=c), 10) / 1e12)
    return {"TFLOP/s": best}


def copying(bench: Bench) -> Values:
    """Return the rate of a copy within device memory; bytes read and bytes written both count."""
    size = 2**32 if bench.cuda and not bench.quick else 2**24
    source, target = (torch.zeros(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    return {"TB/s": 2 * size / bench.seconds(partial(target.copy_, source), 5) / 1e12}


def to_device(bench: Bench) -> Values:
    """Return the rate of copies from pinned memory to the device."""
    bench.need_cuda()
    size = 2**24 if bench.quick else 2**30
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    return {"GB/s": size / bench.seconds(partial(target.copy_, source, non_blocking=True), 3) / 1e9}


def tasks(bench: Bench) -> list[Task]:
    """Return the tasks that measure the reference figures."""
    return [
        Task("machine", "names and versions", 2, partial(machine, bench)),
        Task("machine", "bf16 matrix product", 5, partial(product, bench)),
        Task("machine", "copy in memory", 2, partial(copying, bench)),
        Task("machine", "pinned host to device", 2, partial(to_device, bench)),
    ]
