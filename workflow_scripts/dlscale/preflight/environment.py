"""Where the stages run: engine, image, GPUs, versions."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlscale.config.run import Geometry, Run
from dlscale.config.site import Site
from dlscale.core import registry
from dlscale.core.fingerprint import ROOT
from dlscale.launch import image as images
from dlscale.launch import launcher
from dlscale.preflight.probe import AbsentError, FailedError, Finding, NoAnswerError, Status, said


def probe_engine(site: Site) -> Finding:
    """Look for the container engine."""
    if site.engine == "none":
        return Finding("engine", "skip", "none: commands run as they are")
    if where := shutil.which(site.engine):
        return Finding("engine", "ok", where)
    return Finding("engine", "FAIL", f"{site.engine}: no such command here", "install it, or set site.engine to auto")


def probe_image(site: Site) -> Finding:
    """Ask the engine for the image."""
    if site.engine == "none":
        return Finding("image", "skip", "no engine")
    if not site.image:
        return Finding("image", "FAIL", "the site names none", "set site.image")
    remedy = "snakemake image, with your profile, builds or pulls it"
    if site.engine == "apptainer":  # its identity is the SHA-256 of the file, which takes too long here
        if Path(site.image).is_file():
            return Finding("image", "ok", site.image)
        return Finding("image", "FAIL", f"{site.image}: no such file", f"apptainer pull {site.image} docker://NAME")
    if (found := images.identity(site.engine, site.image)) is None:
        return Finding("image", "FAIL", f"{site.image}: {site.engine} does not have it", remedy)
    if site.engine == "podman-hpc" and not images.migrated(site.image):
        return Finding("image", "FAIL", f"{site.image}: not migrated, so compute nodes do not see it", remedy)
    return Finding("image", "ok", f"{site.image} ({images.shown(found)})")


def _place() -> launcher.Place:
    return launcher.Place(folder=str(Path.cwd()), sources=str(ROOT.parent), uid=os.getuid(), gid=os.getgid())


def probe_gpus(site: Site, devices: Path = Path("/dev")) -> Finding:
    """Ask for this machine's GPUs where the stages run."""
    if not any(devices.glob("nvidia[0-9]*")):
        later = "; the first GPU job will see" if site.scheduler and site.scheduler.gpu_nodes.gpus else ""
        return Finding("GPU", "skip", f"no GPU on this machine{later}")
    words = launcher.launch(site, _place(), Geometry())[: -len(launcher.PYTHON)]
    try:
        return gpus(said([*words, "nvidia-smi", "-L"]), inside=site.engine != "none")
    except (AbsentError, NoAnswerError) as error:
        remedy = "see the engine's set-up for NVIDIA GPUs (nvidia-container-toolkit), and site.modules"
        return Finding("GPU", "FAIL", f"this machine has one that stages do not see: {error}", remedy)


def gpus(text: str, inside: bool) -> Finding:
    """Judge `nvidia-smi -L`, `inside` of a container or not."""
    names = re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", text, re.MULTILINE)
    where = "in the container" if inside else "here"
    if not names:
        return Finding("GPU", "FAIL", f"nvidia-smi lists none {where}", "see the engine's set-up for NVIDIA GPUs")
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Finding("GPU", "ok", f"{kinds} {where}")


#: Prints what there is where it runs, as one line of JSON. One process, since importing torch takes seconds.
FACTS = """
import json, platform
from importlib.metadata import PackageNotFoundError, version

def of(*names):
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            pass

found = {"python": platform.python_version(), "torch": of("torch"), "h5py": of("h5py"), "numba": of("numba")}
found["dali"] = of("nvidia-dali-cuda120", "nvidia-dali-cuda130", "nvidia-dali-cuda110")
if found["torch"]:
    try:
        import torch
        found.update(torch=torch.__version__, cuda=torch.version.cuda, gpus=torch.cuda.device_count())
        if torch.version.cuda:
            found.update(cudnn=torch.backends.cudnn.version(), nccl=torch.cuda.nccl.version())
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""

Facts = dict[str, Any]


def probe_environment(site: Site, image: Finding, runs: list[Run]) -> list[Finding]:
    """Judge the environment where the stages run: the words that start them, but with a question at their end."""
    if image.status == "FAIL":
        return [Finding("environment", "skip", "it is in the image, which is not here")]
    words = launcher.launch(site, _place())
    return probe_python([*words[: -len(launcher.PYTHON)], launcher.PYTHON[0]], runs)


def probe_python(python: list[str], runs: list[Run]) -> list[Finding]:
    """Ask an interpreter, started by these words, for versions."""
    try:
        return environment(_parsed(said([*python, "-c", FACTS])), runs)
    except (AbsentError, FailedError) as error:
        remedy = "activate the environment, or see what the engine says"
        return [Finding("python", "FAIL", f"does not run where the stages do: {error}", remedy)]


def _parsed(text: str) -> Facts:
    """Return the facts from the last line: an image may greet whoever enters it."""
    found: Facts = json.loads(text.strip().splitlines()[-1])
    return found


@dataclass(frozen=True)
class Bad:
    """Versions known to be bad: of which package, why, what to do, and which runs they spoil.

    `status` is what it is where a run is concerned; elsewhere it is worth a word only.
    """

    package: str
    versions: Callable[[tuple[int, ...]], bool]
    why: str
    remedy: str
    status: Status
    concerns: Callable[[Run], bool]


def _convolves_in(run: Run, *precisions: str) -> bool:
    return "conv3d" in registry.study(run.study).operations and run.precision.split("_")[0] in precisions


BAD = (
    Bad(
        "cuDNN",
        lambda version: (9, 8) <= version[:2] <= (9, 10),
        "3D convolutions in bf16 give wrong values",
        "take an environment with cuDNN 9.11 or later or 9.7 or earlier, or another precision",
        "FAIL",
        lambda run: _convolves_in(run, "bf16"),
    ),
    Bad(
        "torch",
        lambda version: version[:2] == (2, 9),
        "3D convolutions under autocast are four times slower",
        "take torch 2.10 or later, or 2.8",
        "warn",
        lambda run: _convolves_in(run, "bf16", "fp16"),
    ),
)


def environment(facts: Facts, runs: Iterable[Run]) -> list[Finding]:
    """Judge the versions where the stages run."""
    runs = list(runs)
    pip = "install dlscale's requirements there (pip install dlscale), or build the image anew"
    found = [_versioned("python", facts["python"], runs)]
    if _numbers(facts["python"]) < (3, 11):
        found = [Finding("python", "FAIL", f"{facts['python']}, expected at least 3.11", pip)]
    for name in ("torch", "h5py", "numba"):
        if facts.get(name) is None:
            found.append(Finding(name, "FAIL", "not installed where the stages run", pip))
        elif name == "torch" and "error" in facts:
            found.append(Finding(name, "FAIL", f"{facts[name]} does not import: {facts['error']}", pip))
        else:
            found.append(_versioned(name, facts[name], runs))
    if facts.get("dali") is not None:
        found.append(_versioned("DALI", facts["dali"], runs))
    elif any(run.loader.kind == "dali" for run in runs):
        remedy = "pip install 'dlscale[dali]', or leave loader.kind dali"
        found.append(Finding("DALI", "FAIL", "not installed where the stages run, and runs load with it", remedy))
    else:
        found.append(Finding("DALI", "skip", "not installed; no run needs it"))
    if facts.get("cudnn"):
        found.append(_versioned("cuDNN", cudnn(facts["cudnn"]), runs))
    if facts.get("nccl"):
        found.append(_versioned("NCCL", ".".join(map(str, facts["nccl"])), runs))
    if not facts.get("cuda") and facts.get("torch"):
        found.append(Finding("CUDA", "skip", "this torch computes on CPUs only"))
    elif facts.get("cuda"):
        found.append(Finding("CUDA", "ok", f"{facts['cuda']}, {facts.get('gpus', 0)} GPUs seen by torch"))
    return found


def _versioned(name: str, version: str, runs: list[Run]) -> Finding:
    for bad in BAD:
        if bad.package == name and bad.versions(_numbers(version)):
            spoilt = any(bad.concerns(run) for run in runs)
            who = "" if spoilt else " (no run here is concerned)"
            return Finding(name, bad.status if spoilt else "warn", f"{version}: {bad.why}{who}", bad.remedy)
    return Finding(name, "ok", version)


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 9, 1) for `2.9.1+cu128`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def cudnn(number: int) -> str:
    """Return cuDNN's version from its number: 90801 is 9.8.1, and before version 9 8907 was 8.9.7."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
