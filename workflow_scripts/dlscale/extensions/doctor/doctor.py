"""`dlscale doctor`: check the requirements of the workflow before the first job is submitted.

The command checks the container engine, the image with its versions and visible GPUs, the site's Slurm, data and disks.
Without a configuration, the command checks only the environment and the disk, as in the HEALTHCHECK of the images.
"""

from __future__ import annotations

import argparse
import functools
import getpass
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlscale.config.places import check_plans
from dlscale.config.resolve import Configuration
from dlscale.config.run import Geometry, Run
from dlscale.config.site import Job, Nodes, Queue, Scheduler, Site
from dlscale.core import registry
from dlscale.core.machine import missing
from dlscale.core.stages import RUN_STAGES
from dlscale.core.text import many
from dlscale.extensions.doctor import probe
from dlscale.extensions.doctor.probe import AbsentError, FailedError, Probe, command_output
from dlscale.launch import image as images
from dlscale.launch import launcher, slurm
from dlscale.preflight.probe import Finding, Status, probe_space

#: CUDA major version → major version of the oldest driver that supports all minor versions
#: (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1).
DRIVERS = {11: 450, 12: 525, 13: 580}

#: Program that prints the versions of its environment as one line of JSON. One process prints all versions, because
#: importing torch takes seconds.
FACTS = """
import json, os, platform, shutil, site
if more := os.environ.get("DLSCALE_PACKAGES"):  # as the command line does
    site.addsitedir(more)
from importlib.metadata import PackageNotFoundError, version

def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None

facts = {"python": platform.python_version(), "torch": of("torch"), "h5py": of("h5py"), "numba": of("numba")}
facts["nsys"] = shutil.which(os.environ.get("NSYS") or "nsys")
facts["plugin"] = os.environ.get("NCCL_NET_PLUGIN", "")
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

#: Oldest supported versions, as in pyproject.toml. Early builds of a version, such as 2.11.0a0, count as that version.
MIN_VERSIONS = {"python": (3, 11), "torch": (2, 11), "h5py": (3, 12), "numba": (0, 64)}
#: Seconds for which `squeue` must list ended jobs: three times `dlscale-init-seconds-before-status-checks`.
MIN_JOB_AGE = 120
#: Number of submitted jobs that a call does not reach: profiles limit Snakemake's `jobs` to less.
MAX_JOBS = 1000
#: First and last cuDNN version whose 3D convolutions in bf16 return wrong values.
BAD_CUDNN = 90_800, 91_099


# ---- image and environment -------------------------------------------------------------------------


def probe_site(
    site: Site, runs: list[Run], profilers: Collection[str] = (), on_gpus: bool = False, devices: Path = Path("/dev")
) -> list[Finding]:
    """Check the image and the versions in it, with the same command that starts a stage."""
    site, _ = launcher.resolve(site)
    image = probe_image(site)
    if image.status == "FAIL":
        return [image, Finding("environment", "skip", "not checked, because the check of the image failed")]
    here = any(devices.glob("nvidia[0-9]*"))
    folder, sources = str(Path.cwd()), launcher.sources(site)
    data = launcher.outside([sources / "dlscale"], folder)
    place = launcher.ContainerMounts(folder, str(sources), os.getuid(), os.getgid(), data)
    words = launcher.launch(site, place, Geometry() if here else None)
    found = probe_python([*words[: 1 - len(launcher.PYTHON)]], runs, profilers, on_gpus)
    if here and site.gpu and any(each.name == "CUDA" and ", 0 GPUs" in each.text for each in found):
        remedy = "check the engine's set-up for NVIDIA GPUs (nvidia-container-toolkit), and site.modules"
        found.append(Finding("GPU", "FAIL", "this machine has GPUs, but stages do not see them", remedy))
    return [image, *found]


def probe_image(site: Site) -> Finding:
    """Check the container engine and its image."""

    def failed(text: str, remedy: str = "run `snakemake image` with your profile to build or pull it") -> Finding:
        return Finding("image", "FAIL", text, remedy)

    if site.engine == "none":
        return Finding("image", "skip", "no container engine: commands run directly")
    if not shutil.which(site.engine):
        return failed(
            f"{site.engine}: no such command here", f"install {site.engine}, or set site.engine to an installed engine"
        )
    if not site.image:
        return failed("site.image is not set", "set site.image to an image's name (for apptainer and enroot: its file)")
    if site.engine in launcher.FILE_SUFFIXES:  # the identity is the SHA-256 of the file, which takes too long
        if not Path(site.image).is_file():
            return failed(f"{site.image}: no such file", images.file_remedy(site.engine, site.image))
        return Finding("image", "ok", site.image)
    if (identity := images.identity(site.engine, site.image)) is None:
        migrated = ", or has not migrated it, so compute nodes do not see it" * (site.engine == "podman-hpc")
        return failed(f"{site.image}: {site.engine} has no such image{migrated}")
    return Finding("image", "ok", f"{site.image} ({identity.removeprefix('sha256:')[:12]})")


def probe_python(
    python: list[str], runs: list[Run], profilers: Collection[str] = (), on_gpus: bool = False
) -> list[Finding]:
    """Check the versions of the interpreter that the command `python` starts, and of the interpreter's packages."""
    try:
        # With -P, Python imports nothing from the working folder, as in stages. Importing torch from a cold disk is
        # slow, hence the long timeout.
        printed = command_output([*python, "-P", "-c", FACTS], probe.PROBE_LIMIT)
    except (AbsentError, FailedError) as error:
        text = "not found" if isinstance(error, AbsentError) else "the check of its versions failed"
        return [
            Finding(
                "python",
                "FAIL",
                f"{text} where the stages run: {error}",
                "activate the environment of dlscale (Python 3.11 or later), or correct site.engine and site.image",
            )
        ]
    # The entry point of an image may print a greeting first.
    return environment(json.loads(printed.strip().splitlines()[-1]), runs, profilers, on_gpus)


def environment(
    facts: Facts, runs: Iterable[Run], profilers: Collection[str] = (), on_gpus: bool = False
) -> list[Finding]:
    """Judge the versions of the environment in which the stages run.

    Parameters
    ----------
    profilers
        Profilers of the runs.
    on_gpus
        Whether the runs of the site use GPUs.
    """
    runs, findings = list(runs), list[Finding]()
    for name, least in MIN_VERSIONS.items():
        known, error = str(facts.get(name) or ""), facts.get("error") if name == "torch" else None
        remedy = "install dlscale's requirements where the stages run (pip install dlscale), or rebuild the image"
        numbers = re.match(r"\d+(\.\d+)*", known)
        wrong = f" cannot be imported: {error}" if error else ""
        if not numbers or tuple(map(int, numbers.group().split("."))) < least:
            wrong = f"{'' if known else 'not installed'}, expected at least {'.'.join(map(str, least))}"
        findings.append(Finding(name, "FAIL" if wrong else "ok", f"{known}{wrong}", remedy))
    dali, nsys = any(run.loader.kind == "dali" for run in runs), "nsys" in profilers
    wanted: list[tuple[str, bool, Status, str]] = [
        ("dali", dali, "FAIL", "pip install 'dlscale[dali]', or set another loader.kind"),
        (
            "nsys",
            nsys,
            "warn",
            "install Nsight Systems where the stages run, set NSYS in site.environment to the path of nsys, "
            "or remove nsys from profile.tools",
        ),
    ]
    for name, _, status, remedy in [each for each in wanted if each[1]]:
        found = facts.get(name)
        findings.append(
            Finding(
                name, "ok" if found else status, found or "not installed where the stages run, but runs use it", remedy
            )
        )
    if cudnn := facts.get("cudnn"):
        version = f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}"
        bf16 = [run for run in runs if run.precision.startswith("bf16")]
        conv3d = any("conv3d" in registry.study(run.study).operations for run in bf16)
        if conv3d and BAD_CUDNN[0] <= cudnn <= BAD_CUDNN[1]:
            remedy = "use cuDNN 9.7 or earlier, cuDNN 9.11 or later, or another precision"
            text = f"{version}: 3D convolutions in bf16 give wrong values"
            findings.append(Finding("cuDNN", "FAIL", text, remedy))
        else:
            findings.append(Finding("cuDNN", "ok", version))
    return [*findings, _cuda(facts, on_gpus)] if facts.get("torch") else findings


def too_old(driver: str, cuda: str) -> str | None:
    """Return a message if the driver is too old for a version of CUDA, otherwise None."""
    least = DRIVERS.get(int(cuda.partition(".")[0]), 0)
    if int(driver.partition(".")[0]) >= least:
        return None
    return f"PyTorch is built for CUDA {cuda}, which needs NVIDIA driver {least} or later; the driver here is {driver}"


def _cuda(facts: Facts, on_gpus: bool) -> Finding:
    """Judge whether torch can compute on GPUs.

    An old driver alone is not a failure, because torch may see GPUs with CUDA's compat libraries.
    """
    cuda, driver, seen = facts.get("cuda"), facts.get("driver"), facts.get("gpus", 0)
    if not cuda:
        remedy = "install PyTorch with CUDA for the stages, use the gpu image, or set site.gpu: false"
        return Finding("CUDA", "FAIL" if on_gpus else "skip", "this PyTorch supports CPUs only", remedy)
    if driver and not seen and (old := too_old(driver, cuda)):
        remedy = "install a newer driver, or use an image with an older CUDA or CUDA's compat libraries (docs/sites.md)"
        return Finding("CUDA", "FAIL" if on_gpus else "warn", old, remedy)
    plugin = re.search(r"(?<![a-z])cu(?:da)?-?(\d\d)", facts.get("plugin", ""))
    if plugin and plugin[1] != cuda.partition(".")[0]:
        text = f"PyTorch is built for CUDA {cuda}, but NCCL_NET_PLUGIN for CUDA {plugin[1]}: {facts['plugin']}"
        remedy = "name the plug-in for PyTorch's CUDA version in site.environment"
        return Finding("CUDA", "FAIL" if on_gpus else "warn", text, remedy)
    return Finding("CUDA", "ok", f"{cuda}{f' on driver {driver}' if driver else ''}, {seen} GPUs seen by torch")


def probe_here(runs: Mapping[str, Run], devices: int) -> list[Finding]:
    """Check the needs of runs (by name) on this machine, which has `devices` GPUs; do not import torch."""
    findings = []
    for name, run in runs.items():
        what = f"run {name}"
        for key, need, wanted, instead in (
            ("compile.mode", "compiler", run.compile.mode != "none", "mode: none"),
            ("loader.kind", "dali", run.loader.kind == "dali", "another loader"),
        ):
            if wanted and (lacking := missing([need])):
                remedy = f"install it, use {instead}, or write needs: [{need}] to skip the run on machines without it"
                findings.append(Finding(what, "FAIL", f"{key}: needs {lacking[0]}, which this machine lacks", remedy))
        if run.cuda_graph and not devices:
            remedy = "set cuda_graph to false, or run on a machine with a GPU"
            findings.append(
                Finding(what, "FAIL", "cuda_graph: CUDA graphs need a GPU, and this machine has no GPU", remedy)
            )
    return findings


# ---- Slurm -----------------------------------------------------------------------------------------


def probe_slurm() -> Finding:
    """Check that Slurm's controller is up."""
    remedy = "wait until the site's Slurm is back"
    if not shutil.which("sbatch"):
        return Finding("Slurm", "FAIL", "sbatch: no such command here", "run this on a login node of the site")
    try:
        text = " ".join(command_output(["scontrol", "ping"]).split())
    except FailedError as error:
        return Finding("Slurm", "FAIL", str(error), remedy)
    return Finding(
        "Slurm", "ok" if re.search(r"\bis UP\b", text) else "FAIL", text or "`scontrol ping` printed nothing", remedy
    )


def probe_queue() -> Finding:
    """Check that `squeue` lists ended jobs for as long as Snakemake's Slurm plugin needs."""
    found = re.search(r"^MinJobAge\s*=\s*(\d+)", command_output(["scontrol", "show", "config"]), re.MULTILINE)
    if not found:
        return Finding(
            "MinJobAge", "warn", "not in the output of `scontrol show config`", "ask the site's staff for the value"
        )
    if (age := int(found[1])) < MIN_JOB_AGE:
        text = f"{age} s, expected at least {MIN_JOB_AGE} s: a job cancelled with scancel would seem to run forever"
        remedy = f"in profile.yaml set dlscale-init-seconds-before-status-checks: {max(1, age // 3)}"
        return Finding("MinJobAge", "warn", text, remedy)
    return Finding("MinJobAge", "ok", f"{age} s")


def _used_queues(scheduler: Scheduler) -> list[tuple[str, Queue]]:
    names = [scheduler.data_queue or "", *(scheduler.run_queues or [""])]  # an empty name means no queue
    return [(name, scheduler.queues.get(name, Queue())) for name in names]


def probe_partition(scheduler: Scheduler) -> Finding:
    """Warn if Slurm has a default partition that Snakemake's Slurm plugin would request.

    The plugin requests this partition for jobs without a partition. If all used queues name a partition, the check
    passes.
    """
    partitions = command_output(["sinfo", "-aho", "%P"]).split()
    default = next((name.removesuffix("*") for name in partitions if name.endswith("*")), None)
    named = all(queue.partition for _, queue in _used_queues(scheduler))
    if named or default is None:
        return Finding("partition", "ok", "set by the site" if named else "no default partition")
    text = f"{default} is the default: Snakemake's Slurm plugin adds --partition={default} to jobs without a partition"
    remedy = "if the site selects partitions by QOS or constraint, set partition in site.scheduler.queues"
    return Finding("partition", "warn", text, remedy)


def probe_account(scheduler: Scheduler, runs: Iterable[Run], stages: Collection[Job]) -> Finding:
    """Check that the user may use the accounts and QOS of the jobs that would be submitted."""
    jobs: list[tuple[Job, Geometry | None]] = [("data", None)] if "data" in stages else []
    jobs += [(stage, run.geometry) for stage in stages if stage != "data" for run in runs]
    requests = [slurm.request(scheduler, stage, geometry) for stage, geometry in jobs]
    wanted = {(each["slurm_account"], each.get("qos") or "") for each in requests if each.get("slurm_account")}
    try:
        listed = command_output(["sacctmgr", "-nP", "show", "assoc", f"user={getpass.getuser()}", "format=account,qos"])
    except FailedError as error:
        if "accounting_storage" not in str(error):
            raise
        return Finding("account", "skip", "this Slurm has no accounting database")
    mine = dict[str, set[str]]()
    for name, _, queues in (line.partition("|") for line in listed.split()):
        mine.setdefault(name, set()).update(filter(None, queues.split(",")))
    remedy = f"export SBATCH_ACCOUNT=PROJECT, or set site.scheduler.account; your accounts: {', '.join(sorted(mine))}"
    if not wanted:
        return Finding("account", "warn", "no account is set; Slurm uses your default account, if you have one", remedy)
    for name, queue in sorted(wanted):
        allowed = mine.get(name.lower())  # Slurm's database stores lower-case names
        if allowed is None:
            plain = name.removesuffix(scheduler.gpu_nodes.account_suffix)
            if plain.lower() in mine:
                remedy = f"if jobs on GPUs are charged to {plain}, set site.scheduler.gpu_nodes.account_suffix to ''"
            return Finding("account", "FAIL", f"{name}: not one of your accounts", remedy)
        if queue and allowed and not any(_is_qos(queue, other) for other in allowed):
            remedy = f"use a QOS of this account: {', '.join(sorted(allowed))} (site.scheduler)"
            return Finding("account", "FAIL", f"{name} may not use QOS {queue}", remedy)
    return Finding("account", "ok", ", ".join(sorted({name for name, _ in wanted})))


def _is_qos(name: str, qos: str) -> bool:
    """Return whether `qos` may be the QOS `name`, which submit filters rename: `shared` to `gpu_shared`, `shared_1`."""
    return bool(re.fullmatch(rf"((cpu|gpu)_)?{re.escape(name)}(_\d+)?", qos))


def probe_job_limits(scheduler: Scheduler) -> Finding:
    """Check that the site's settings limit the jobs of each used QOS to the number that a user may submit."""
    try:
        listed = command_output(["sacctmgr", "-nP", "show", "qos", "format=name,maxsubmitpu"])
    except FailedError as error:
        if "accounting_storage" not in str(error):
            raise
        return Finding("job limits", "skip", "this Slurm has no accounting database")
    limits = {name: int(most) for name, _, most in (line.partition("|") for line in listed.split()) if most}
    for name, queue in _used_queues(scheduler):
        most = min((n for qos, n in limits.items() if queue.qos and _is_qos(queue.qos, qos)), default=math.inf)
        if (queue.max_jobs or MAX_JOBS) > most:
            text = f"QOS {queue.qos} accepts {many(int(most), 'submitted job')} per user, and refuses further jobs"
            remedy = f"set site.scheduler.queues.{name}.max_jobs: {most}, so that further jobs wait in Snakemake"
            return Finding("job limits", "warn", text, remedy)
    return Finding("job limits", "ok", ", ".join(f"{name} {most}" for name, most in limits.items()) or "none")


def _probe_partitions(scheduler: Scheduler, kind: Nodes, geometries: Iterable[Geometry | None]) -> list[Finding]:
    jobs = [(slurm.choose_queue(scheduler, each)[1].partition or "", each.nodes if each else 1) for each in geometries]
    return [probe_nodes(kind, *largest) for largest in dict(sorted(jobs)).items()]  # the largest job of each partition


def probe_nodes(kind: Nodes, partition: str, most: int) -> Finding:
    """Check that a partition has at least `most` nodes as in the site's settings; otherwise jobs would wait forever."""
    # Each group of nodes: features, CPUs, generic resources, number of nodes, memory (MB).
    text = command_output(["sinfo", "-a", *(["-p", partition] if partition else []), "-ho", "%f|%c|%G|%D|%m"])
    constraint = kind.constraint or ""
    features = set(filter(None, constraint.split("&"))) if not set(constraint) & set("|[*(") else set()
    asks = kind.cpus, kind.gpus, kind.memory_mb or 0
    fitting, seen = 0, list[str]()
    for row in [line.split("|") for line in text.split() if line.count("|") == 4]:
        if features <= set(row[0].split(",")):
            has = int(row[1].rstrip("+")), _count_gpus(row[2], kind.gres), int(row[4].rstrip("+"))
            seen.append(f"{row[3]} of {_has(*has)}")
            fitting += int(row[3]) if all(one >= other for one, other in zip(has, asks, strict=True)) else 0
    which = {"partition": partition, "constraint": constraint, "--gres": kind.gres if kind.gpus else ""}
    what = _has(*asks) + "".join(f", {word} {name}" for word, name in which.items() if name)
    if fitting >= most:
        return Finding(_name(kind), "ok", f"{fitting} of {what}")
    there = "; ".join(dict.fromkeys(seen)) or "no node with this partition and constraint"
    remedy = "correct cpu_nodes, gpu_nodes or queues in site.scheduler, or reduce geometry.nodes"
    text = f"{many(most, 'node')} of {what} wanted; sinfo has {fitting} ({there})"
    return Finding(_name(kind), "FAIL", text, remedy)


def _count_gpus(listed: str, gres: str) -> int:
    """Return the number of `gres` in a node's list, such as `gpu:a100:4(S:0-1),shard:8`."""
    total = 0
    for each in re.sub(r"\([^)]*\)", "", listed).split(","):  # drop sockets and indices, which are in brackets
        name, _, count = each.rpartition(":")
        if not count.isdigit():  # Slurm's short form for a count of one
            name, count = each, "1"
        total += int(count) if name == gres or name.startswith(f"{gres}:") else 0
    return total


def _name(kind: Nodes) -> str:
    return "GPU nodes" if kind.gpus else "CPU nodes"


def _has(cpus: int, gpus: int, memory: int) -> str:
    return ", ".join([many(cpus, "CPU"), many(gpus, "GPU"), *([f"{memory:,} MB"] if memory else [])])


# ---- all checks ------------------------------------------------------------------------------------


def check(
    configuration: Configuration | None,
    stages_wanted: Collection[Job] = ("data", *RUN_STAGES),
    plans: Collection[str] | None = None,
    datasets: Collection[str] = (),
) -> list[Finding]:
    """Check that this site can run `stages_wanted` of plans (default: the targets) and of datasets.

    A check of the site that raises or hangs becomes a warning; a check whose command is not installed is skipped.
    """
    results = Path(configuration.workflow.results) if configuration else Path()
    space: Probe = ("space", functools.partial(probe_space, results))
    if configuration is None:
        here = functools.partial(probe_python, [sys.executable], [])
        return probe.run_probes([("environment", here), space])
    workflow = configuration.workflow
    scheduler = workflow.site.scheduler
    named = [
        (plan, *each)
        for plan in (workflow.targets if plans is None else plans)
        for each in configuration.plans[plan].items()
    ]
    runs = [resolved.run for _, _, resolved in named]
    on_gpus = bool(set(RUN_STAGES) & set(stages_wanted)) and launcher.device(workflow.site) == "cuda"
    profilers = {
        tool
        for plan, run, resolved in named
        if "profile" in stages_wanted and "profile" in configuration.stages(plan, run)
        for tool in resolved.run.profile.tools
    }
    place = functools.partial(probe_site, workflow.site, runs, profilers, on_gpus)
    probes: list[Probe] = [("environment", place)]
    if scheduler:
        kinds: list[tuple[Nodes, list[Geometry | None]]] = (
            [(scheduler.cpu_nodes, [None])] if "data" in stages_wanted else []
        )
        if runs and set(RUN_STAGES) & set(stages_wanted):
            kinds.append((scheduler.gpu_nodes, [run.geometry for run in runs]))
        probes += [
            ("Slurm", probe_slurm),
            ("MinJobAge", probe_queue),
            ("partition", functools.partial(probe_partition, scheduler)),
            ("account", functools.partial(probe_account, scheduler, runs, stages_wanted)),
            ("job limits", functools.partial(probe_job_limits, scheduler)),
            *((_name(kind), functools.partial(_probe_partitions, scheduler, kind, each)) for kind, each in kinds),
        ]
    for name in dict.fromkeys([*(run.dataset for run in runs), *datasets]):
        samples = [run.samples for run in runs if run.dataset == name]
        look = functools.partial(probe.probe_data, name, workflow.datasets[name], results, samples)
        probes.append((f"data {name}", look))
    added = [
        finding for name in registry.table("PROBES").values() for finding in registry.named(name)(configuration, plans)
    ]
    return [*added, *probe.run_probes([*probes, ("quota", probe.probe_quota), space])]


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the findings; return 1 if a check fails, else 0."""
    findings = check(configuration, plans=check_plans(args.plans, configuration) if args.plans else None)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        print(*findings, sep="\n")
    return int(any(finding.status == "FAIL" for finding in findings))
