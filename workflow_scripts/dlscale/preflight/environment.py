"""The place where the stages run: engine, image, GPUs, versions."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from dlscale.config.run import Geometry, Run
from dlscale.config.site import Site
from dlscale.core import registry
from dlscale.core.fingerprint import ROOT
from dlscale.core.machine import missing, too_old
from dlscale.launch import image as images
from dlscale.launch import launcher
from dlscale.preflight.probe import AbsentError, FailedError, Finding, said


def probe_image(site: Site) -> Finding:
    """Look for the container engine, and ask it for the image."""
    if site.engine == "none":
        return Finding("image", "skip", "no engine: commands run as they are")
    if not shutil.which(site.engine):
        return Finding("image", "FAIL", f"{site.engine}: no such command here", "install it, or set site.engine")
    if not site.image:
        return Finding("image", "FAIL", "the site names none", "set site.image")
    remedy = "snakemake image, with your profile, builds or pulls it"
    if site.engine == "apptainer":  # its identity is the SHA-256 of the file, which takes too long here
        there = Path(site.image).is_file()
        remedy = f"apptainer pull {site.image} docker://NAME"
        return Finding("image", "ok" if there else "FAIL", site.image if there else f"{site.image}: no file", remedy)
    if (identity := images.identity(site.engine, site.image)) is None:
        return Finding("image", "FAIL", f"{site.image}: {site.engine} does not have it", remedy)
    if site.engine == "podman-hpc" and not images.migrated(site.image):
        return Finding("image", "FAIL", f"{site.image}: not migrated, so compute nodes do not see it", remedy)
    return Finding("image", "ok", f"{site.image} ({images.shown(identity)})")


def _words(site: Site, devices: Path) -> list[str]:
    """Return the words that start a stage here, with this machine's GPUs, if any, up to Python."""
    place = launcher.Place(folder=str(Path.cwd()), sources=str(ROOT.parent), uid=os.getuid(), gid=os.getgid())
    words = launcher.launch(site, place, Geometry() if any(devices.glob("nvidia[0-9]*")) else None)
    return words[: -len(launcher.PYTHON)]


#: Prints what there is where it runs, as one line of JSON. One process, since importing torch takes seconds.
FACTS = """
import json, os, platform, shutil
from importlib.metadata import PackageNotFoundError, version

def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None

facts = {"python": platform.python_version(), "torch": of("torch"), "h5py": of("h5py"), "numba": of("numba")}
facts["nsys"] = shutil.which(os.environ.get("NSYS") or "nsys")
try:
    import nvidia.dali
    facts["dali"] = nvidia.dali.__version__
except Exception:
    facts["dali"] = None
if facts["torch"]:
    try:
        import torch
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        facts.update(torch=torch.__version__, cuda=torch.version.cuda, gpus=seen)
        if torch.version.cuda:
            facts.update(cudnn=torch.backends.cudnn.version())
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {error}"
try:
    import pynvml
    pynvml.nvmlInit()
    facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
except Exception:  # no NVIDIA driver here
    pass
print(json.dumps(facts))
"""

Facts = dict[str, Any]

#: The oldest versions that dlscale works with: those of pyproject.toml's ranges. Early builds of a version count as it.
LEAST = {"python": (3, 11), "torch": (2, 11), "h5py": (3, 12), "numba": (0, 64)}
#: The first and the last cuDNN whose 3D convolutions in bf16 give wrong values.
BAD_CUDNN = 90_800, 91_099


def probe_environment(
    site: Site,
    image: Finding,
    runs: list[Run],
    profilers: Collection[str] = (),
    on_gpus: bool = False,
    devices: Path = Path("/dev"),
) -> list[Finding]:
    """Judge the environment where the stages run: the words that start them, but with a question at their end."""
    if image.status == "FAIL":
        return [Finding("environment", "skip", "it is in the image, which is not here")]
    found = probe_python([*_words(site, devices), launcher.PYTHON[0]], runs, profilers, on_gpus)
    unseen = any(each.name == "CUDA" and ", 0 GPUs" in each.text for each in found) and site.gpu
    if unseen and any(devices.glob("nvidia[0-9]*")):
        remedy = "see the engine's set-up for NVIDIA GPUs (nvidia-container-toolkit), and site.modules"
        found.append(Finding("GPU", "FAIL", "this machine has one that stages do not see", remedy))
    return found


def probe_python(
    python: list[str], runs: list[Run], profilers: Collection[str] = (), on_gpus: bool = False
) -> list[Finding]:
    """Ask an interpreter, started by these words, for versions."""
    try:
        printed = said([*python, "-P", "-c", FACTS])  # as stages run: nothing is imported from the working folder
    except (AbsentError, FailedError) as error:
        remedy = "activate the environment, or see what the engine says"
        return [Finding("python", "FAIL", f"does not run where the stages do: {error}", remedy)]
    # An image may greet whoever enters it.
    return environment(json.loads(printed.strip().splitlines()[-1]), runs, profilers, on_gpus)


def environment(
    facts: Facts, runs: Iterable[Run], profilers: Collection[str] = (), on_gpus: bool = False
) -> list[Finding]:
    """Judge the versions where the stages run.

    `profilers` are those that will look at runs; `on_gpus`: the site says that runs are on GPUs.
    """
    runs = list(runs)
    pip = "install dlscale's requirements there (pip install dlscale), or build the image anew"
    findings = []
    for name, least in LEAST.items():
        known, error = facts.get(name), facts.get("error") if name == "torch" else None
        if known is None or _numbers(known) < least:
            text = f"{known or 'not installed where the stages run'}, expected at least {'.'.join(map(str, least))}"
            findings.append(Finding(name, "FAIL", text, pip))
        else:
            text = f"{known} does not import: {error}" if error else known
            findings.append(Finding(name, "FAIL", text, pip) if error else Finding(name, "ok", text))
    needed = any(run.loader.kind == "dali" for run in runs)
    for name, wanted, remedy in (
        ("dali", needed, "pip install 'dlscale[dali]', or leave loader.kind dali"),
        ("nsys", "nsys" in profilers, "install Nsight Systems there, set NSYS in site.environment, or leave nsys out"),
    ):
        found = facts.get(name)
        if found and (wanted or name == "dali"):
            findings.append(Finding(name, "ok", found))
        elif wanted:
            findings.append(Finding(name, "FAIL" if name == "dali" else "warn", "not found there; runs use it", remedy))
    if cudnn := facts.get("cudnn"):
        version = f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}"
        findings.append(Finding("cuDNN", "ok", version))
        if BAD_CUDNN[0] <= cudnn <= BAD_CUDNN[1] and any(map(_convolves_in_bf16, runs)):
            remedy = "take an environment with cuDNN 9.11 or later or 9.7 or earlier, or another precision"
            text = f"{version}: 3D convolutions in bf16 give wrong values"
            findings[-1] = Finding("cuDNN", "FAIL", text, remedy)
    return [*findings, _cuda(facts, on_gpus)] if facts.get("torch") else findings


def _convolves_in_bf16(run: Run) -> bool:
    return "conv3d" in registry.study(run.study).operations and run.precision.startswith("bf16")


def _cuda(facts: Facts, on_gpus: bool) -> Finding:
    """Judge whether torch can compute on GPUs: with compat libraries it may see them by an older driver, too."""
    cuda, driver, seen = facts.get("cuda"), facts.get("driver"), facts.get("gpus", 0)
    if not cuda:
        remedy = "install a PyTorch for CUDA there, take the image gpu, or set site.gpu: false"
        return Finding("CUDA", "FAIL" if on_gpus else "skip", "this torch computes on CPUs only", remedy)
    if driver and not seen and (old := too_old(driver, cuda)):
        remedy = "take a newer driver, an image of an older CUDA, or CUDA's compat libraries (docs/sites.md)"
        return Finding("CUDA", "FAIL" if on_gpus else "warn", old, remedy)
    return Finding("CUDA", "ok", f"{cuda}{f' on driver {driver}' if driver else ''}, {seen} GPUs seen by torch")


def probe_here(runs: Mapping[str, Run], devices: int) -> list[Finding]:
    """Judge in no time, before the first job of this machine, what runs by name need of it; no torch is imported.

    `devices` is how many GPUs it has. What is fine is not told; what runs, but not as one would think, is a `warn`.
    """
    findings = []
    for name, run in runs.items():
        what = f"run {name}"
        for key, need, wanted, instead in (
            ("compile.mode", "compiler", run.compile.mode != "none", "mode: none"),
            ("loader.kind", "dali", run.loader.kind == "dali", "another loader"),
        ):
            if wanted and (lacking := missing([need])):
                remedy = f"install it, take {instead}, or write needs: [{need}], which leaves the run out without it"
                findings.append(Finding(what, "FAIL", f"{key}: needs {lacking[0]}, not here", remedy))
        if run.cuda_graph and not devices:
            remedy = "set it to false, or run where there is a GPU"
            findings.append(Finding(what, "FAIL", "cuda_graph: only GPUs have graphs, and none is here", remedy))
        if run.precision.startswith("fp16") and not devices:
            slow = "precision: most processors do not compute in fp16, and convert each number: slower than fp32"
            findings.append(Finding(what, "warn", slow, "take bf16 or fp32, or run where there is a GPU"))
    return findings


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 9, 1) for `2.9.1+cu128`."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()
