"""Properties of this machine: environment, memory, GPUs, compilers, and the output of commands."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

#: Environment at the start of `python -m dlscale`; in a job, the environment of Snakemake's caller.
GIVEN: dict[str, str] = {}

#: Environment variable with the values that the variables `CHANGED` had before Snakemake started, as JSON.
CALLER = "DLSCALE_CALLER"

#: Environment variable with the ids of the Snakemake processes above a job, outermost process first.
SNAKEMAKES = "DLSCALE_SNAKEMAKES"

#: Variables that Snakemake, its shell, or Python under the locale C may set for a job.
CHANGED = (
    *("OMP_NUM_THREADS", "GOTO_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS", "TMPDIR", "TMP", "TEMPDIR", "TEMP"),
    *("LC_CTYPE", "PWD", "OLDPWD", "SHLVL", "_"),
)

#: Settings of OpenMP with which idle threads spin for some microseconds and then sleep. If threads slept at once, small
#: operations would be slow, because waking a thread takes longer than the operation. If threads spun for long, they
#: would occupy cores that other processes need.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}

#: Environment variable with a folder on the node's local disk (`local_disk` of a site), if the site sets this folder.
LOCAL_DISK = "DLSCALE_LOCAL_DISK"
#: Environment variable with the suffix of node names in the network between nodes (`host_suffix` of a site).
HOST_SUFFIX = "DLSCALE_HOST_SUFFIX"
#: Environment variable with the network between nodes (`fabric` of a site), if it is not ethernet.
FABRIC = "DLSCALE_FABRIC"

#: Environment variable with the folder to which an external program writes the times of its steps. The module
#: `dlscale.extensions.programs.timed` repeats this name, because it imports nothing from dlscale.
STEPS = "DLSCALE_STEPS"

#: Environment variable with the limits of the watchdog (`watchdog` of a site), if the limits are not the defaults.
WATCHDOG = "DLSCALE_WATCHDOG"

#: Environment variable with the seconds between two lines of progress (`log_seconds` of a site), if not the default.
LOG_SECONDS = "DLSCALE_LOG_SECONDS"


def given() -> dict[str, str]:
    """Return the environment for external programs."""
    return GIVEN or dict(os.environ)


def first_environment() -> dict[str, str]:
    """Return the environment at the start of this process, without variables that Python added."""
    try:
        entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    except OSError:
        return dict(os.environ)
    return dict(entry.split("=", 1) for entry in reversed(entries) if "=" in entry)


def callers_values() -> str:
    """Return the value of `CALLER` for the jobs of this process."""
    first = first_environment()
    return json.dumps({name: first.get(name) for name in CHANGED})


def restore_caller() -> None:
    """Change `GIVEN` in a job to the environment of Snakemake's caller, without variables of dlscale."""
    if not GIVEN:
        return
    before = json.loads(GIVEN.get(CALLER, "{}"))
    kept = {name: value for name, value in GIVEN.items() if name not in before and not name.startswith("DLSCALE_")}
    GIVEN.clear()
    GIVEN.update(kept | {name: value for name, value in before.items() if value is not None})


def let_threads_wait() -> None:
    """Set the variables `WAITING`, unless the environment has one of them or KMP_BLOCKTIME.

    Call this function before OpenMP is loaded.
    """
    if not any(name in os.environ for name in (*WAITING, "KMP_BLOCKTIME")):
        os.environ.update(WAITING)


def put_python_first() -> None:
    """Put the folder of this Python first in PATH, if it has a program `python`.

    The virtual environment of this Python then need not be activated.
    """
    folder, path = Path(sys.executable).parent, os.environ.get("PATH", os.defpath)
    if os.access(folder / "python", os.X_OK) and path.split(os.pathsep)[0] != str(folder):
        os.environ["PATH"] = os.pathsep.join([str(folder), path])


def with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let Linux send this process a signal when its parent, process `parent`, ends.

    If the parent has ended already, end this process.
    """
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def processor() -> str:
    """Return the name of this machine's processor; its architecture if the name is unknown."""
    found = re.search(r"^model name\s*:\s*(.+)$", text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1] if found else platform.machine()


def command_output(words: list[str], seconds: float = 60.0) -> str | None:
    """Return a command's output; None if the command is missing, fails, or takes longer than `seconds`."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def job_limits() -> list[tuple[int, int]]:
    """Return memory limit and memory use (bytes) of each control group that limits the memory of this process.

    The use excludes files in memory that Linux can drop.
    """
    found = list[tuple[int, int]]()
    kinds = {
        "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),  # cgroup v2
        "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),  # cgroup v1
    }
    for _, kind, group in (line.split(":", 2) for line in text_of(Path("/proc/self/cgroup")).splitlines()):
        if kind in kinds:
            place, limit, used = kinds[kind]
            for folder in [own := place / group.lstrip("/"), *own.parents]:  # from the group of this process upwards
                if folder.is_relative_to(place) and (text := text_of(folder / limit)).isdecimal():
                    caches = re.findall(
                        r"^(?:total_)?inactive_file (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE
                    )
                    found.append((int(text), int(text_of(folder / used) or 0) - int([0, *caches][-1])))
    return found


def text_of(path: Path) -> str:
    """Return a file's text, stripped; an empty string if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def free_memory() -> int:
    """Return the memory that this job can still use, bytes."""
    import psutil

    return int(max(min([psutil.virtual_memory().available, *(limit - used for limit, used in job_limits())]), 0))


def gpus() -> int:
    """Return the number of visible GPUs.

    If CUDA_VISIBLE_DEVICES is set, count its entries; otherwise count all GPUs of the driver.
    """
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return sum(name.strip() not in ("", "-1") for name in named.split(","))
    return int(nvml(lambda driver: driver.nvmlDeviceGetCount()) or 0)


def nvml(ask: Callable[[Any], Any]) -> Any:
    """Return the result of a query to NVIDIA's driver.

    Return None if the driver is missing, or if the driver or the GPU does not support the query.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        return ask(pynvml)
    except pynvml.NVMLError:
        return None


def _compiler() -> bool:
    compiler = os.environ.get("CXX") or "g++"  # PyTorch uses the same compiler
    return bool(shutil.which(compiler)) and Path(sysconfig.get_path("include"), "Python.h").exists()


def has_package(need: str) -> bool:
    """Return whether a requirement's package is installed; true for a requirement without a package."""
    name = {"dali": "nvidia.dali", "fp8": "torchao"}.get(need, "sys")
    return bool(importlib.util.find_spec(name.partition(".")[0]) and importlib.util.find_spec(name))


def _bf16() -> bool:
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(text_of(Path("/proc/cpuinfo")).split()))


def _fp8() -> bool:
    # Queries the first GPU: the GPUs of a node are of one model.
    return has_package("fp8") and tuple(
        nvml(lambda driver: driver.nvmlDeviceGetCudaComputeCapability(driver.nvmlDeviceGetHandleByIndex(0))) or ()
    ) >= (8, 9)


#: Requirements by name in a run's `needs`, each with a description and a function that checks this machine.
NEEDS: dict[str, tuple[str, Callable[[], bool]]] = {
    "compiler": ("a C++ compiler (g++) and Python's headers (python3-dev)", _compiler),
    "dali": ("NVIDIA DALI (pip install 'dlscale[dali]')", lambda: has_package("dali")),
    "bf16": ("a processor with bfloat16 instructions", _bf16),
    "fp8": ("a GPU with FP8 matrix products (L40, H100 or newer) and torchao (pip install 'dlscale[fp8]')", _fp8),
}


def missing(needs: list[str], provided: Collection[str] | None = None) -> list[str]:
    """Return the descriptions of `needs` that are not in `provided`.

    If `provided` is None, return the descriptions of `needs` that this machine lacks.
    """
    return [
        what
        for name, (what, here) in NEEDS.items()
        if name in needs and not (here() if provided is None else name in provided)
    ]
