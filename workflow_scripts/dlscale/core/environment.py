"""Record of a stage's software and hardware, and the differences between two records.

`dlscale.cli` writes the record next to the telemetry, as `telemetry/STAGE.json`, when the stage has succeeded.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import platform
import socket
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from dlscale.core.errors import brief
from dlscale.core.machine import command_output, nvml, processor
from dlscale.core.process import Image
from dlscale.core.record import Record, Time
from dlscale.core.redact import is_secret_name, redact
from dlscale.core.urls import hidden_in

#: Prefixes of the environment variables that are recorded.
VARIABLES = ("NCCL_", "TORCH_", "CUDA_", "OMP_", "FI_", "UCX_", "PYTORCH_")

#: Maximum number of packages in a list of differences, and maximum number of variables.
NAMED = 3


class Gpu(Record):
    """A GPU and its settings."""

    name: str
    memory_bytes: int | None = None
    watts: float | None = None  #: Power limit, W.
    sm_mhz: int | None = None  #: Maximum clock of the streaming multiprocessors, MHz.
    memory_mhz: int | None = None  #: Maximum clock of the memory, MHz.
    ecc: bool | None = None
    mig: bool | None = None


class Environment(Record):
    """`telemetry/STAGE.json`: software and hardware of a stage's process with rank 0."""

    time: Time  #: End time of the stage.
    host: str
    kernel: str
    processor: str
    python: str
    versions: dict[str, str] = {}  #: Versions of dlscale, torch, CUDA, cuDNN, NCCL, the driver, Triton and DALI.
    gpus: list[Gpu] = []
    image: dict[str, str] | None = None  #: Engine, name and identity of the container's image.
    git: dict[str, Any] | None = None  #: Commit of dlscale's checkout, and whether it is dirty.
    packages: list[str] = []  #: All installed distributions, as `NAME==VERSION`.
    variables: dict[str, str] = {}  #: Environment variables with secrets redacted.

    def commit(self) -> str:
        """Return the commit, marked if the checkout had local changes.

        Return an empty string without a checkout.
        """
        return f"{self.git['commit']}{' with local changes' * bool(self.git['dirty'])}" if self.git else ""


def environment() -> Environment:
    """Return the environment of this process, with GPUs only if PyTorch has initialised CUDA."""
    image = Image.read()
    return Environment(
        time=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        kernel=platform.release(),
        processor=processor(),
        python=platform.python_version(),
        versions={name: version for name, version in _versions().items() if version},
        gpus=_gpus(),
        image=asdict(image) if image else None,
        git=git_state(),
        packages=_packages(),
        variables={
            name: _shown(name)
            for name, value in sorted(os.environ.items())
            # On a single node, `dlscale.parallel.rendezvous` sets NCCL_SOCKET_IFNAME=lo, which the user did not choose.
            if name.startswith(VARIABLES) and (name, value) != ("NCCL_SOCKET_IFNAME", "lo")
        },
    )


def record(path: Path) -> None:
    """Write the environment of this process to `path`.

    If this fails, only log a warning, because the stage itself has succeeded.
    """
    try:
        path.unlink(missing_ok=True)  # the record of an earlier try
        environment().write(path)
    except Exception as error:  # drivers and packages may raise any exception
        logging.warning("cannot write %s: %s", path, brief(error))


def _shown(name: str) -> str:
    value = os.environ[name].encode(errors="replace").decode()  # replaces bytes that are not UTF-8
    return "***" if is_secret_name(name) else redact(hidden_in(value))


def _packages() -> list[str]:
    found = set[str]()
    for each in metadata.distributions():
        with contextlib.suppress(Exception):  # metadata may be damaged or unreadable
            if (name := each.metadata["Name"]) and (version := each.version):
                found.add(f"{name}=={version}")
    return sorted(found, key=str.lower)


def git_state() -> dict[str, Any] | None:
    """Return the commit of the checkout that contains this file, and whether it is dirty.

    Return None without a checkout, or without Git. Untracked files do not count.
    """
    # The checkout may belong to another user, so programs in its git configuration must not run.
    off = ["-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}"]
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).resolve().parent), *off]
    # An installed package may lie inside the checkout of another project, which then does not track this file.
    if command_output([*git, "ls-files", "--error-unmatch", Path(__file__).name], 10) is None:
        return None
    commit = command_output([*git, "rev-parse", "HEAD"], 10)
    filters = command_output(
        [*git, "config", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process|required)$"], 10
    )
    for name in (filters or "").splitlines():
        git += ["-c", f"{name}={'false' if name.endswith('.required') else ''}"]
    status = command_output([*git, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all"], 10)
    return None if commit is None or status is None else {"commit": commit.strip(), "dirty": bool(status.strip())}


def _versions() -> dict[str, str | None]:
    found = {name: _version(name) for name in ("dlscale", "torch", "triton")}
    found["DALI"] = _version("nvidia-dali-cuda130") or _version("nvidia-dali-cuda120")
    if torch := sys.modules.get("torch"):
        number = torch.backends.cudnn.version() if torch.version.cuda else None
        found |= {"torch": torch.__version__, "CUDA": torch.version.cuda}
        found["cuDNN"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else None
        if torch.cuda.is_initialized():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
            found["driver"] = nvml(lambda driver: driver.nvmlSystemGetDriverVersion())
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[Gpu]:
    torch = sys.modules.get("torch")
    if not torch or not torch.cuda.is_initialized():
        return []
    return [_gpu(torch.cuda.get_device_properties(number)) for number in range(torch.cuda.device_count())]


def _gpu(device: Any) -> Gpu:
    def ask(question: str, *words: str) -> Any:
        def asked(driver: Any) -> Any:
            handle = driver.nvmlDeviceGetHandleByUUID(f"GPU-{device.uuid}")
            return getattr(driver, f"nvmlDeviceGet{question}")(handle, *(getattr(driver, word) for word in words))

        return nvml(asked)

    limit, ecc, mig = ask("EnforcedPowerLimit"), ask("EccMode"), ask("MigMode")
    return Gpu(
        name=device.name,
        memory_bytes=device.total_memory,
        watts=None if limit is None else limit / 1000,
        sm_mhz=ask("MaxClockInfo", "NVML_CLOCK_SM"),
        memory_mhz=ask("MaxClockInfo", "NVML_CLOCK_MEM"),
        ecc=None if ecc is None else bool(ecc[0]),
        mig=None if mig is None else bool(mig[0]),
    )


# ---- differences ---------------------------------------------------------------------------------------


def differences(before: Environment, after: Environment) -> list[str]:
    """Return the differences between two environments, such as `driver 570 → 580`.

    Host and time are ignored. The list names at most `NAMED` packages and `NAMED` variables.
    """
    sides = [_facts(each) for each in (before, after)]
    found = [_pair(name, *(side.get(name) for side in sides)) for name in dict.fromkeys([*sides[0], *sides[1]])]
    for what in ("variables", "packages"):
        old, new = (_named(each, what) for each in (before, after))
        apart = [_pair(name, old.get(name), new.get(name)) for name in sorted({*old, *new})]
        apart = [each for each in apart if each]
        rest = len(apart) - NAMED
        found += apart if rest <= 0 else [*apart[:NAMED], f"{rest} other {what}"]
    return [each for each in found if each]


def _facts(each: Environment) -> dict[str, str]:
    gpus = dict[str, int]()
    for gpu in each.gpus:
        set_ = [f"{gpu.watts:g} W" if gpu.watts else "", f"{gpu.sm_mhz} MHz" if gpu.sm_mhz else ""]
        switches = {"ECC": gpu.ecc, "MIG": gpu.mig}
        set_ += [f"{name} {'on' if on else 'off'}" for name, on in switches.items() if on is not None]
        words = ", ".join(filter(None, [gpu.name, *set_]))
        gpus[words] = gpus.get(words, 0) + 1
    return {
        "processor": each.processor,
        "GPUs": "; ".join(f"{count} × {words}" for words, count in gpus.items()),
        **each.versions,
        "Python": each.python,
        "kernel": each.kernel,
        "image": (each.image or {}).get("identity", ""),
        "commit": each.commit(),
    }


def _named(each: Environment, what: str) -> dict[str, str]:
    if what == "variables":
        return each.variables
    versions = [package.partition("==") for package in each.packages]
    return {name: version for name, _, version in versions if name not in each.versions}


def _pair(name: str, old: str | None, new: str | None) -> str:
    return "" if (old or None) == (new or None) else f"{name} {old or 'none'} → {new or 'none'}"
