"""Where the stages run: engine, image, GPUs, versions."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlscale.config.run import Geometry, Run
from dlscale.config.site import Site
from dlscale.core import registry
from dlscale.core.fingerprint import ROOT
from dlscale.core.machine import missing, too_old
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
    if (identity := images.identity(site.engine, site.image)) is None:
        return Finding("image", "FAIL", f"{site.image}: {site.engine} does not have it", remedy)
    if site.engine == "podman-hpc" and not images.migrated(site.image):
        return Finding("image", "FAIL", f"{site.image}: not migrated, so compute nodes do not see it", remedy)
    return Finding("image", "ok", f"{site.image} ({images.shown(identity)})")


def _place() -> launcher.Place:
    return launcher.Place(folder=str(Path.cwd()), sources=str(ROOT.parent), uid=os.getuid(), gid=os.getgid())


def _has_gpu(devices: Path) -> bool:
    return any(devices.glob("nvidia[0-9]*"))


def probe_gpus(site: Site, devices: Path = Path("/dev")) -> Finding:
    """Ask for this machine's GPUs where the stages run."""
    if not _has_gpu(devices):
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


def probe_gpu_order(site: Site, devices: Path = Path("/dev")) -> list[Finding]:
    """Ask this machine which CPUs each of its GPUs is near to; nothing to find where it has no two."""
    if len(list(devices.glob("nvidia[0-9]*"))) < 2:
        return []
    return [gpu_order(said(["nvidia-smi", "topo", "-m"]), site)]


def gpu_order(text: str, site: Site) -> Finding:
    """Judge the site's order of GPUs by `nvidia-smi topo -m`: local ranks get CPUs in ascending order."""
    nearest: dict[int, int] = {}  # to each GPU, the first of its CPUs
    for line in text.splitlines():
        row = re.match(r"GPU(\d+)\t(.*)", re.sub(r"\x1b\[\d*m", "", line))
        lists = re.findall(r"(?:^|\t)\s*(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\s*(?=\t|$)", row.group(2)) if row else []
        if row and lists:  # the CPUs; what follows, such as NUMA nodes, are numbers, too
            nearest[int(row.group(1))] = int(lists[0])
    order = site.gpu_order or sorted(nearest)
    wanted = site.scheduler.gpu_nodes.gpus if site.scheduler else len(order)
    if not nearest or sorted(nearest) != list(range(wanted)) or len(order) != wanted:
        there = f"{len(nearest)} GPUs with known CPUs here, and {wanted} on the site's nodes"
        return Finding("GPU order", "skip", f"{there}; nvidia-smi topo -m on one of these shows theirs")
    if site.starter != "srun":
        return Finding("GPU order", "skip", "only srun gives processes CPUs of their own")
    shown = ", ".join(f"GPU {gpu} from CPU {nearest[gpu]}" for gpu in order)
    best = sorted(nearest, key=nearest.__getitem__)
    if [nearest[gpu] for gpu in order] == [nearest[gpu] for gpu in best]:
        return Finding("GPU order", "ok", shown)
    remedy = f"set site.gpu_order: {best}, so that each process's GPU is near to its CPUs"
    return Finding("GPU order", "warn", f"{shown}: not in the order of the CPUs", remedy)


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
            facts.update(cudnn=torch.backends.cudnn.version(), nccl=torch.cuda.nccl.version())
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
    # With this machine's GPUs, if any: whether torch sees them is among the questions.
    words = launcher.launch(site, _place(), Geometry() if _has_gpu(devices) else None)
    return probe_python([*words[: -len(launcher.PYTHON)], launcher.PYTHON[0]], runs, profilers, on_gpus)


def probe_python(
    python: list[str], runs: list[Run], profilers: Collection[str] = (), on_gpus: bool = False
) -> list[Finding]:
    """Ask an interpreter, started by these words, for versions."""
    try:
        printed = said([*python, "-P", "-c", FACTS])  # as stages run: nothing is imported from the working folder
        # An image may greet whoever enters it.
        return environment(json.loads(printed.strip().splitlines()[-1]), runs, profilers, on_gpus)
    except (AbsentError, FailedError) as error:
        remedy = "activate the environment, or see what the engine says"
        return [Finding("python", "FAIL", f"does not run where the stages do: {error}", remedy)]


@dataclass(frozen=True)
class Bad:
    """Versions of a package that are bad for 3D convolutions in some precisions; for other runs they are a warning."""

    first: tuple[int, int]
    last: tuple[int, int]
    precisions: tuple[str, ...]
    status: Status
    why: str
    remedy: str

    def spoils(self, run: Run) -> bool:
        return "conv3d" in registry.study(run.study).operations and run.precision.split("_")[0] in self.precisions


#: By package.
BAD = {
    "cuDNN": Bad(
        *((9, 8), (9, 10), ("bf16",), "FAIL"),
        why="3D convolutions in bf16 give wrong values",
        remedy="take an environment with cuDNN 9.11 or later or 9.7 or earlier, or another precision",
    ),
}


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
        if facts.get(name) is None:
            findings.append(Finding(name, "FAIL", "not installed where the stages run", pip))
        elif _numbers(facts[name]) < least:
            text = f"{facts[name]}, expected at least {'.'.join(map(str, least))}"
            findings.append(Finding(name, "FAIL", text, pip))
        elif name == "torch" and "error" in facts:
            findings.append(Finding(name, "FAIL", f"{facts[name]} does not import: {facts['error']}", pip))
        else:
            findings.append(_versioned(name, facts[name], runs))
    if facts.get("dali") is not None:
        findings.append(_versioned("DALI", facts["dali"], runs))
    elif any(run.loader.kind == "dali" for run in runs):
        remedy = "pip install 'dlscale[dali]', or leave loader.kind dali"
        findings.append(Finding("DALI", "FAIL", "not installed where the stages run, and runs load with it", remedy))
    else:
        findings.append(Finding("DALI", "skip", "not installed; no run needs it"))
    if "nsys" in profilers:
        remedy = "install Nsight Systems there, or set NSYS in site.environment, or leave nsys out of profile.tools"
        found = Finding("nsys", "ok", facts["nsys"]) if facts.get("nsys") else None
        findings.append(found or Finding("nsys", "warn", "not found where the stages run: no profile by it", remedy))
    if facts.get("cudnn"):
        findings.append(_versioned("cuDNN", cudnn(facts["cudnn"]), runs))
    if facts.get("nccl"):
        findings.append(_versioned("NCCL", ".".join(map(str, facts["nccl"])), runs))
    if facts.get("torch"):
        findings.append(_cuda(facts, on_gpus))
    return findings


def _cuda(facts: Facts, on_gpus: bool) -> Finding:
    """Judge whether torch can compute on GPUs: with compat libraries it may see them by an older driver, too."""
    cuda, driver, seen = facts.get("cuda"), facts.get("driver"), facts.get("gpus", 0)
    if not cuda:
        remedy = "install a PyTorch for CUDA there, take the image gpu, or set site.gpu: false"
        return Finding("CUDA", "FAIL" if on_gpus else "skip", "this torch computes on CPUs only", remedy)
    if driver and not seen and (old := too_old(driver, cuda)):
        remedy = (
            "take a newer driver, an image of an older CUDA, or put CUDA's compat libraries first: LD_LIBRARY_PATH in "
            "site.environment"
        )
        return Finding("CUDA", "FAIL" if on_gpus else "warn", old, remedy)
    return Finding("CUDA", "ok", f"{cuda}{f' on driver {driver}' if driver else ''}, {seen} GPUs seen by torch")


def probe_here(runs: Mapping[str, Run], devices: int) -> list[Finding]:
    """Judge in no time, before the first job of this machine, what runs by name need of it; no torch is imported.

    `devices` is how many GPUs it has. What is fine is not told; what runs, but not as one would think, is a `warn`.
    """
    findings = []
    for name, run in runs.items():
        wrong = [
            ("compile.mode", "compiler", run.compile.mode != "none", "mode: none"),
            ("loader.kind", "dali", run.loader.kind == "dali", "another loader"),
        ]
        for key, need, wanted, instead in wrong:
            if wanted and (lacking := missing([need])):
                remedy = f"install it, take {instead}, or write needs: [{need}], which leaves the run out without it"
                findings.append(Finding(f"run {name}", "FAIL", f"{key}: needs {lacking[0]}, not here", remedy))
        if run.cuda_graph and not devices:
            remedy = "set it to false, or run where there is a GPU"
            findings.append(
                Finding(f"run {name}", "FAIL", "cuda_graph: only GPUs have graphs, and none is here", remedy)
            )
        if run.precision.startswith("fp16") and not devices:
            remedy = "take bf16 or fp32, or run where there is a GPU"
            slow = "precision: most processors do not compute in fp16, and convert each number: slower than fp32"
            findings.append(Finding(f"run {name}", "warn", slow, remedy))
    return findings


def _versioned(name: str, version: str, runs: list[Run]) -> Finding:
    bad = BAD.get(name)
    if bad is None or not bad.first <= _numbers(version)[:2] <= bad.last:
        return Finding(name, "ok", version)
    if any(bad.spoils(run) for run in runs):
        return Finding(name, bad.status, f"{version}: {bad.why}", bad.remedy)
    return Finding(name, "warn", f"{version}: {bad.why} (no run here is concerned)", bad.remedy)


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 9, 1) for `2.9.1+cu128`."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()


def cudnn(number: int) -> str:
    """Return cuDNN's version from its number: 90801 is 9.8.1, and before version 9 8907 was 8.9.7."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
