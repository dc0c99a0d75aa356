"""Preflight: what the workflow needs, looked at before the first job waits in a queue for it.

Every check is a probe, which asks a command or the file system, and a pure function that judges the answer. Probes run
side by side, none longer than `LIMIT` seconds; one that breaks is a warning with its error, never a crash. Without a
configuration what is left is the environment itself: a container image's HEALTHCHECK.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import getpass
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from dlscale.runtime import image as images
from dlscale.runtime import launcher, slurm
from dlscale.runtime.config import Configuration, unknown
from dlscale.runtime.errors import UserError
from dlscale.runtime.fingerprint import ROOT
from dlscale.runtime.schema.dataset import (
    SPLITS,
    CosmoSimulated,
    Dataset,
    Era5Prepared,
    Era5Simulated,
    Era5Zarr,
)
from dlscale.runtime.schema.run import Geometry, Run, UNet3DModel
from dlscale.runtime.schema.site import Scheduler, Site
from dlscale.runtime.settings import read_yaml

Status = Literal["ok", "warn", "FAIL", "skip"]

#: Seconds that a probe may take.
LIMIT = 20.0
#: Bytes free, below which nothing can run, and below which it is worth a word.
LEAST, LITTLE = 0.5e9, 20e9
#: Days before a file is removed from scratch that are worth a word.
PURGE_SOON = 7
#: Files looked at for their age: of a folder with more, these stand for all.
MANY = 20_000


@dataclass(frozen=True)
class Finding:
    """What one check found; `remedy` says what to do, where there is something to be done."""

    name: str
    status: Status
    text: str
    remedy: str = ""


class _AbsentError(Exception):
    """A command that is not here: nothing to check."""


class _NoAnswerError(Exception):
    """A command that took too long."""


class _FailedError(_NoAnswerError):
    """A command that failed."""


def check(
    configuration: Configuration | None,
    profile: str | None = None,
    stages_wanted: Collection[slurm.Stage] = get_args(slurm.Stage),
    plans: Collection[str] = (),
) -> list[Finding]:
    """Check what plans need on this site; the environment alone without a configuration.

    Parameters
    ----------
    profile
        Name of the site's profile, or path of its `site.yaml`: beside that file are the workflow's own settings.
    stages_wanted
        Stages that will run: only what these need is checked.
    plans
        The plans, which have to be there; the targets if none is named.

    Returns
    -------
    list of Finding
        In a fixed order. This function neither raises nor hangs: after `LIMIT` and some seconds it is back.
    """
    probes: list[_Probe]
    if configuration is None:
        here = Path()
        probes = [("environment", lambda: _environment([sys.executable], [])), ("space", lambda: _space(here))]
        return _ask([*probes, ("clock", lambda: _clock(here))])
    workflow = configuration.workflow
    site, results = workflow.site, Path(workflow.results)
    runs = [resolved.run for plan in plans or workflow.targets for resolved in configuration.plans[plan].values()]
    datasets = {name: workflow.datasets[name] for name in dict.fromkeys(run.dataset for run in runs)}
    # Which engine `auto` is may take a call of one of them, so it is a probe's business.
    resolved = functools.cache(lambda: launcher.resolve(site).site)
    image = functools.cache(lambda: _image(resolved()))
    probes = []
    if site.scheduler:
        probes += _slurm_probes(site.scheduler, runs, profile, stages_wanted)
    probes += [
        ("engine", lambda: _engine(resolved())),
        ("image", image),
        ("environment", lambda: _environment_of(resolved(), image(), runs)),
    ]
    if {"train", "throughput"} & set(stages_wanted):
        probes.append(("GPU", lambda: _gpus(resolved())))
    for name, dataset in datasets.items():
        probes.append((f"data {name}", functools.partial(data, name, dataset, results)))
    if "data" in stages_wanted:
        to_fetch = [dataset for name, dataset in datasets.items() if not _manifest(results, name).exists()]
        places = sorted({place for dataset in to_fetch for place in hosts(dataset)})
        probes += [
            (f"network {host}", functools.partial(_network, host, port, site.scheduler)) for host, port in places
        ]
        if not places:
            probes.append(("network", lambda: Finding("network", "skip", "nothing has to be fetched")))
    probes += [("space", lambda: _space(results)), ("quota", lambda: _quota(results))]
    if site.scratch_days:
        local = [path for dataset in datasets.values() for path in local_files(dataset)]
        probes.append(("purge", lambda: _purge([str(results / "data"), *local], site.scratch_days or 0)))
    probes.append(("clock", lambda: _clock(results)))
    return _ask(probes)


def lines(findings: Iterable[Finding]) -> list[str]:
    """Return one line a finding: status, what was checked, what was found, and unless it is fine the remedy."""
    return [
        " ".join(f"{found.status:4}  {found.name}: {found.text}{_remedy(found)}".split("\n")).rstrip()
        for found in findings
    ]


def _remedy(found: Finding) -> str:
    return f"; {found.remedy}" if found.remedy and found.status != "ok" else ""


def failed(findings: Iterable[Finding]) -> bool:
    """Whether something would keep the workflow from its results."""
    return any(found.status == "FAIL" for found in findings)


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the findings; return 0, or 1 if a check fails: all that a HEALTHCHECK may return.

    Raises
    ------
    UserError
        No such plan.
    """
    known = configuration.plans if configuration else {}
    for name in args.plans:
        if name not in known:
            raise UserError(unknown("plan", name, known))
    findings = check(configuration, args.profile, plans=args.plans)
    if args.json:
        print(json.dumps([asdict(found) for found in findings], indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines(findings)))
    return int(failed(findings))


# ---- probes ----------------------------------------------------------------------------------------

_Probe = tuple[str, Callable[[], "Finding | list[Finding]"]]


def _ask(probes: list[_Probe]) -> list[Finding]:
    """Run all probes at once. Their threads are daemons: a file system that hangs holds one of them, and not us."""
    answers: dict[int, list[Finding]] = {}

    def answer(number: int, name: str, probe: Callable[[], Finding | list[Finding]]) -> None:
        try:
            found = probe()
        except _AbsentError as absent:
            found = Finding(name, "skip", f"{absent}: no such command here")
        except Exception as error:
            said = str(error) if isinstance(error, _NoAnswerError | UserError) else f"{type(error).__name__}: {error}"
            found = Finding(name, "warn", f"cannot be checked: {said}", "ask it by hand")
        answers[number] = found if isinstance(found, list) else [found]

    threads = [
        threading.Thread(target=answer, args=(number, *probe), daemon=True) for number, probe in enumerate(probes)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LIMIT + 5  # a command that is ended has a moment to go
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    silent = {
        number: [Finding(name, "warn", f"no answer within {LIMIT + 5:.0f} s", "does a file system hang here?")]
        for number, (name, _) in enumerate(probes)
    }
    return [found for number in range(len(probes)) for found in answers.get(number, silent[number])]


def _said(words: list[str]) -> str:
    """Return what a command prints."""
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    except (FileNotFoundError, PermissionError):
        raise _AbsentError(words[0]) from None
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # what supervises a container takes it along
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=3)
        process.kill()
        raise _NoAnswerError(f"{words[0]} gives no answer within {LIMIT:.0f} s") from None
    if process.returncode:
        said = (err or out).strip().splitlines()
        raise _FailedError(f"{words[0]}: {said[-1].removeprefix(f'{words[0]}: ') if said else process.returncode}")
    return out


# ---- Slurm -----------------------------------------------------------------------------------------


def _slurm_probes(
    scheduler: Scheduler, runs: list[Run], profile: str | None, stages: Collection[slurm.Stage]
) -> list[_Probe]:
    wanted = asked(scheduler, runs, stages)
    kinds = [scheduler.cpu_nodes] if "data" in stages else []
    kinds += [scheduler.gpu_nodes] if runs and {"train", "throughput"} & set(stages) else []
    constraints = {nodes.constraint for nodes in kinds if nodes.constraint}
    suffixed = any(nodes.account_suffix for nodes in kinds)
    configured = functools.cache(lambda: _said(["scontrol", "show", "config"]))

    def answers() -> Finding:
        if not shutil.which("sbatch"):
            return Finding("Slurm", "FAIL", "sbatch: no such command here", "run this on a login node of the site")
        try:
            return ping(_said(["scontrol", "ping"]))
        except _FailedError as error:
            return Finding("Slurm", "FAIL", str(error), "wait until the site's Slurm is back")

    def accounts() -> Finding:
        words = ["sacctmgr", "-nP", "show", "assoc", f"user={getpass.getuser()}", "format=account,qos"]
        try:
            return account(wanted, associations(_said(words)), suffixed)
        except _AbsentError:
            return account(wanted, None, suffixed)
        except _NoAnswerError as error:
            if "accounting_storage" in str(error):  # a cluster that keeps no accounts
                return account(wanted, None, suffixed)
            raise

    def queues() -> Finding:
        names = {name for _, name in wanted if name}
        if not names:
            return Finding("QOS", "skip", "the site names none")
        listed = _said(["sacctmgr", "-nP", "show", "qos", "format=name"])
        return qos(names, set(listed.split()), filtered=submit_filter(configured()))

    def age() -> Finding:
        settings = _workflow_profile(profile)
        if settings.get("slurm-status-command") == "sacct":
            return Finding("MinJobAge", "skip", "jobs are watched with sacct")
        return min_job_age(configured(), float(settings.get("slurm-init-seconds-before-status-checks", 40)))

    return [
        ("Slurm", answers),
        ("MinJobAge", age),
        ("account", accounts),
        ("QOS", queues),
        ("constraint", lambda: features(constraints, _said(["sinfo", "-a", "-ho", "%f"]))),
    ]


def _workflow_profile(profile: str | None) -> Mapping[str, Any]:
    """Return the settings of Snakemake's own in a profile; none where there is no such file."""
    if not profile:
        return {}
    folder = Path(profile).parent if "/" in profile else Path("profiles") / profile
    found = [file for name in ("profile.yaml", "profile.v9+.yaml", "config.yaml") if (file := folder / name).is_file()]
    return read_yaml(found[0]) if found else {}


def asked(
    scheduler: Scheduler, runs: Iterable[Run], stages: Collection[slurm.Stage]
) -> set[tuple[str | None, str | None]]:
    """Return account and QOS of all jobs that would be submitted."""
    found = {(slurm.account_of(scheduler, scheduler.cpu_nodes), scheduler.data_qos)} if "data" in stages else set()
    if {"train", "throughput"} & set(stages):
        account = slurm.account_of(scheduler, scheduler.gpu_nodes)
        found |= {(account, slurm.run_qos(scheduler, run.geometry)) for run in runs}
    return found


def associations(text: str) -> dict[str, set[str]]:
    """Return the QOS of each account, which may stand twice, from `sacctmgr -nP show assoc format=account,qos`."""
    found: dict[str, set[str]] = {}
    for line in text.split():
        name, _, listed = line.partition("|")
        found.setdefault(name, set()).update(filter(None, listed.split(",")))
    return found


def account(wanted: set[tuple[str | None, str | None]], mine: dict[str, set[str]] | None, suffixed: bool) -> Finding:
    """Judge accounts and the QOS that go with them.

    Parameters
    ----------
    wanted
        As `asked` returns them.
    mine
        The user's accounts; None where Slurm keeps none.
    suffixed
        Whether some nodes want the account's name to end in a certain way, as no default account does.
    """
    names = sorted({name for name, _ in wanted if name})
    have = f"; yours: {', '.join(sorted(mine))}" if mine else ""
    remedy = f"export SBATCH_ACCOUNT=PROJECT, or set site.scheduler.account{have}"
    if not names:
        status: Status = "FAIL" if suffixed else "warn" if mine else "skip"
        return Finding("account", status, "none is set; Slurm takes your default, if you have one", remedy)
    if mine is None:
        return Finding("account", "skip", f"{', '.join(names)}: nothing here can tell whether it is yours")
    # Slurm's database is in lower case.
    strange = [name for name in names if name.lower() not in mine]
    if strange:
        return Finding("account", "FAIL", f"{', '.join(strange)}: not yours", remedy)
    for name, queue in sorted((name, queue) for name, queue in wanted if name and queue):
        allowed = mine[name.lower()]
        if allowed and not _listed(queue, allowed):
            remedy = f"use one of its QOS: {', '.join(sorted(allowed))} (site.scheduler)"
            return Finding("account", "FAIL", f"{name} may not use QOS {queue}", remedy)
    return Finding("account", "ok", ", ".join(names))


def _listed(name: str, names: Collection[str]) -> bool:
    """Whether a QOS is there, perhaps by the name that the site's submit filter gives it: gpu_shared for shared."""
    return any(name == other or name in other.split("_") for other in names)


def qos(names: set[str], listed: set[str], filtered: bool) -> Finding:
    """Judge whether the QOS are there; `filtered`: a submit filter may turn names into others."""
    if missing := sorted(name for name in names if not _listed(name, listed)):
        remedy = f"set site.scheduler.part_qos, whole_qos, data_qos to what is: {', '.join(sorted(listed)) or 'none'}"
        return Finding("QOS", "warn" if filtered else "FAIL", f"{', '.join(missing)}: Slurm lists no such QOS", remedy)
    return Finding("QOS", "ok", ", ".join(sorted(names)))


def submit_filter(text: str) -> bool:
    """Whether `scontrol show config` names one."""
    value = _setting(text, "JobSubmitPlugins")
    return value is not None and value not in ("", "(null)")


def features(constraints: set[str], text: str) -> Finding:
    """Judge constraints (`gpu`, `gpu&hbm80g`) by the nodes' features, a line each of `sinfo -ho %f`."""
    if not constraints:
        return Finding("constraint", "skip", "the site names none")
    nodes = [set(line.split(",")) for line in text.split()]
    for constraint in sorted(constraints):
        names = set(re.findall(r"[\w.:+-]+", re.sub(r"\*\d+", "", constraint)))
        if missing := sorted(names.difference(*nodes)):
            known = ", ".join(sorted(set().union(*nodes) - {"(null)"}))
            remedy = f"set site.scheduler.*.constraint to what is: {known or 'none'}"
            return Finding("constraint", "FAIL", f"{', '.join(missing)}: a feature of no node", remedy)
        if not set(constraint) & set("|[*") and not any(names <= node for node in nodes):
            return Finding("constraint", "FAIL", f"{constraint}: of no node all together", "take another constraint")
    return Finding("constraint", "ok", ", ".join(sorted(constraints)))


def ping(text: str) -> Finding:
    """Judge `scontrol ping`: one line a controller."""
    said = " ".join(text.split())
    if re.search(r"\bis UP\b", said):
        return Finding("Slurm", "ok", said)
    return Finding("Slurm", "FAIL", said or "no controller answers", "wait until the site's Slurm is back")


def min_job_age(text: str, seconds: float) -> Finding:
    """Judge, by `scontrol show config`, whether `squeue` remembers jobs for three rounds of `seconds` between looks."""
    found = re.match(r"\d+", _setting(text, "MinJobAge") or "")
    if not found:
        return Finding("MinJobAge", "warn", "scontrol does not tell", "look for MinJobAge in scontrol show config")
    age = int(found.group())
    if age >= 3 * seconds:
        return Finding("MinJobAge", "ok", f"{age} s")
    remedy = f"set slurm-init-seconds-before-status-checks to at most {max(age // 3, 1)} in profile.yaml"
    text = f"{age} s; squeue may forget a finished job before it is looked for ({seconds:.0f} s, three times)"
    return Finding("MinJobAge", "warn", text, remedy)


def _setting(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\s*=\s*(.*?)\s*$", text, re.MULTILINE)
    return found.group(1) if found else None


# ---- containers and what is in them ----------------------------------------------------------------


def _engine(site: Site) -> Finding:
    if site.engine == "none":
        return Finding("engine", "skip", "none: commands run as they are")
    if where := shutil.which(site.engine):
        return Finding("engine", "ok", where)
    return Finding("engine", "FAIL", f"{site.engine}: no such command here", "install it, or set site.engine to auto")


def _image(site: Site) -> Finding:
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


def _gpus(site: Site, devices: Path = Path("/dev")) -> Finding:
    if not any(devices.glob("nvidia[0-9]*")):
        later = "; the first GPU job will see" if site.scheduler and site.scheduler.gpu_nodes.gpus else ""
        return Finding("GPU", "skip", f"no GPU on this machine{later}")
    words = launcher.launch(site, _place(), Geometry())[: -len(launcher.PYTHON)]
    try:
        return gpus(_said([*words, "nvidia-smi", "-L"]), inside=site.engine != "none")
    except (_AbsentError, _NoAnswerError) as error:
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


def _environment_of(site: Site, image: Finding, runs: list[Run]) -> list[Finding]:
    """Judge the environment where the stages run: the words that start them, but with a question at their end."""
    if image.status == "FAIL":
        return [Finding("environment", "skip", "it is in the image, which is not here")]
    words = launcher.launch(site, _place())
    return _environment([*words[: -len(launcher.PYTHON)], launcher.PYTHON[0]], runs)


def _environment(python: list[str], runs: list[Run]) -> list[Finding]:
    try:
        return environment(_parsed(_said([*python, "-c", FACTS])), runs)
    except (_AbsentError, _FailedError) as error:
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
    return isinstance(run.model, UNet3DModel) and run.precision.split("_")[0] in precisions


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


# ---- data ------------------------------------------------------------------------------------------


def _manifest(results: Path, name: str) -> Path:
    return results / "data" / name / "manifest.json"


def origins(dataset: Dataset) -> list[str]:
    """Return where a dataset's raw files come from: paths, URLs, a store; nothing for a simulated one."""
    source = dataset.source
    if isinstance(source, CosmoSimulated | Era5Simulated):
        return []
    if isinstance(source, Era5Zarr):
        return [source.store]
    if isinstance(source, Era5Prepared):
        return [source.path]
    return [path for key in (*SPLITS, "paths") for path in getattr(source, key, [])]


def local_files(dataset: Dataset) -> list[str]:
    """Return those that are read where they lie: files, and folders of files."""
    return [origin for origin in origins(dataset) if "://" not in origin]


def data(name: str, dataset: Dataset, results: Path) -> Finding:
    """Judge a dataset: the files it is made from, and those that were made of them."""
    what = f"data {name}"
    manifest = _manifest(results, name)
    # A store is read once; files that are read where they lie are inputs of rules, and are missed at any time.
    stored = isinstance(dataset.source, Era5Zarr) and manifest.exists()
    if not stored and (trouble := _trouble(dataset)):
        return Finding(what, "FAIL", trouble, f"put it there, or name its place in datasets.{name}.source")
    if not manifest.exists():
        made = "will be simulated" if not origins(dataset) else "will be made from its files"
        return Finding(what, "ok", made)
    try:
        splits = json.loads(manifest.read_text(encoding="utf-8"))["splits"]
        files = [(manifest.parent / file["path"], int(file["bytes"])) for split in splits.values() for file in split]
    except (ValueError, KeyError, TypeError, AttributeError):
        return Finding(what, "FAIL", f"{manifest}: not a manifest", "delete it and run the workflow again")
    gone = [path for path, _ in files if not path.is_file()]
    changed = [path for path, size in files if path.is_file() and path.stat().st_size != size]
    if changed:
        own = changed[0].resolve().is_relative_to(manifest.parent.resolve())
        remedy = (
            f"delete {changed[0]} and run the workflow again"
            if own
            else "if that is meant, go on: it is described again"
        )
        text = f"{changed[0]}: of another size than when it was described ({len(changed)} of {len(files)} files)"
        return Finding(what, "FAIL" if own else "warn", text, remedy)
    if gone:
        again = "simulated" if not origins(dataset) else "made" if local_files(dataset) else "fetched"
        text = f"{gone[0]}: gone, perhaps removed from scratch ({len(gone)} of {len(files)} files)"
        return Finding(what, "warn", text, f"it will be {again} again, which takes its time")
    size = sum(size for _, size in files)
    return Finding(what, "ok", f"{len(files)} files, {_bytes(size)}, of the size that was described")


def _trouble(dataset: Dataset) -> str | None:
    """Return what is wrong with the first local raw file that is not as it has to be."""
    for origin in local_files(dataset):
        path = Path(origin)
        if isinstance(dataset.source, Era5Prepared):
            for pattern in ("train/*.h5", "valid/*.h5", "stats/global_means.npy", "stats/global_stds.npy"):
                found = sorted(path.glob(pattern))
                if not found:
                    return f"{path / pattern}: no such file"
                if wrong := next(filter(None, map(_unreadable, found)), None):
                    return wrong
        elif not path.exists():
            return f"{path}: no such file or folder"
        elif not path.is_dir() and (wrong := _unreadable(path)):
            return wrong
    return None


def _unreadable(path: Path) -> str | None:
    if not os.access(path, os.R_OK):
        return f"{path}: no permission to read it"
    return f"{path}: empty" if path.stat().st_size == 0 else None


# ---- network ---------------------------------------------------------------------------------------

#: Where stores without a host in their name are.
STORES = {"gs": "storage.googleapis.com", "s3": "s3.amazonaws.com"}
PORTS = {"http": 80}


def hosts(dataset: Dataset) -> list[tuple[str, int]]:
    """Return name and port of the servers that a dataset is fetched from."""
    found = []
    for origin in origins(dataset):
        with contextlib.suppress(ValueError):  # no address: whoever fetches it will say so
            parts = urlsplit(origin)
            host = STORES.get(parts.scheme) or (parts.hostname if parts.scheme in ("http", "https") else None)
            if host:
                found.append((host, parts.port or PORTS.get(parts.scheme, 443)))
    return list(dict.fromkeys(found))


def _network(host: str, port: int, scheduler: Scheduler | None) -> Finding:
    proxy = urllib.request.getproxies().get("http" if port == 80 else "https")
    via = urlsplit(proxy) if proxy and not urllib.request.proxy_bypass(host) else None
    to = (via.hostname, via.port or 80) if via and via.hostname else (host, port)
    by = f" by way of the proxy {to[0]}" if via else ""
    try:
        socket.create_connection(to, timeout=5).close()
    except OSError as error:
        elsewhere = scheduler is not None and scheduler.acquire == "job"
        remedy = "fetch where there is a network (site.scheduler.acquire), or put the files there by hand"
        status: Status = "warn" if elsewhere else "FAIL"
        return Finding(f"network {host}", status, f"port {to[1]} does not answer from here{by}: {error}", remedy)
    return Finding(f"network {host}", "ok", f"port {to[1]} answers from here{by}")


# ---- disks -----------------------------------------------------------------------------------------


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest above it that is there."""
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())


def _space(folder: Path) -> Finding:
    folder = _existing(folder)
    nodes = os.statvfs(folder)
    return space(folder, *shutil.disk_usage(folder)[::2], nodes.f_favail, nodes.f_files)


def space(folder: Path, total: int, free: int, inodes_free: int = 0, inodes: int = 0) -> Finding:
    """Judge bytes and inodes of a file system; one without a fixed number of inodes has 0 of them."""
    text = f"{_bytes(free)} of {_bytes(total)} free at {folder}"
    remedy = "free some, or choose a larger place for `results`"
    if free < LEAST:
        return Finding("space", "FAIL", text, remedy)
    if inodes and inodes_free < inodes / 100:
        return Finding("space", "warn", f"{text}, but {inodes_free} of {inodes} inodes", "remove small files")
    return Finding("space", "warn" if free < LITTLE or free < total / 10 else "ok", text, remedy)


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"


def _quota(results: Path) -> Finding:
    if shutil.which("showquota"):
        return quota(showquota(_said(["showquota"])))
    folder = _existing(results)
    try:
        return quota(lustre(_said(["lfs", "quota", "-q", "-u", getpass.getuser(), str(folder)])))
    except _AbsentError:
        return Finding("quota", "skip", "neither showquota nor lfs is here")
    except _NoAnswerError:
        return Finding("quota", "skip", f"{folder} is on no Lustre file system")


def showquota(text: str) -> dict[str, float]:
    """Return the greatest percentage in use by file system, from NERSC's table: a row each, in cells between bars."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip(" |").split("|")]
        shares = [float(cell.rstrip("%")) for cell in cells[1:] if re.fullmatch(r"[\d.]+ ?%", cell)]
        if shares:
            found[cells[0]] = max(shares)
    return found


def lustre(text: str) -> dict[str, float]:
    """Return the greater percentage in use, of bytes and files, from `lfs quota -q`; a long path has its own line.

    Columns: file system, kB used (a star: over it), quota, limit, grace, files used, quota, limit, grace.
    """
    words = text.replace("*", "").split()
    shares = []
    for used, soft, hard in ((1, 2, 3), (5, 6, 7)):
        allowed = float(words[soft]) or float(words[hard])
        if allowed:
            shares.append(100 * float(words[used]) / allowed)
    return {words[0]: max(shares)} if shares else {}


def quota(shares: Mapping[str, float]) -> Finding:
    """Judge percentages in use by file system."""
    if not shares:
        return Finding("quota", "skip", "there is none")
    text = ", ".join(f"{name} {share:.0f} %" for name, share in shares.items())
    full = max(shares.values())
    return Finding("quota", "FAIL" if full >= 100 else "warn" if full >= 90 else "ok", text, "remove files there")


def _purge(paths: Iterable[str], days: int) -> Finding:
    oldest: tuple[float, str] | None = None
    for file in itertools.islice(_files(paths), MANY):
        with contextlib.suppress(OSError):
            status = Path(file).stat()
            # File systems that do not keep the time of the last reading have an old one there.
            used = max(status.st_atime, status.st_mtime), file
            oldest = min(oldest, used) if oldest else used
    return purge(oldest, days, time.time())


def _files(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        if Path(path).is_file():
            yield path
        for folder, _, names in os.walk(path):
            yield from (os.path.join(folder, name) for name in names)  # noqa: PTH118 - there may be many


def purge(oldest: tuple[float, str] | None, days: int, now: float) -> Finding:
    """Judge when the site begins to remove files: `oldest` is when one was last used (s since 1970), and which."""
    if oldest is None:
        return Finding("purge", "skip", "no data yet")
    used, file = oldest
    end = used + 86_400 * days
    text = f"{dt.date.fromtimestamp(end)}: {file} is the first to be removed, {days} days after it was last used"
    soon = end < now + 86_400 * PURGE_SOON
    return Finding("purge", "warn" if soon else "ok", text, "copy what cannot be fetched or made again to a safe place")


def _clock(folder: Path) -> Finding:
    """Compare this machine's clock with the file server's, which sets the times that the workflow compares."""
    folder = _existing(folder)
    before = time.time()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"dlscale")
            file.flush()
            written, after = os.fstat(file.fileno()).st_mtime, time.time()
    except OSError as error:
        # A container's working folder need not be for writing.
        remedy = "choose another place for `results`, or change its mode"
        return Finding("clock", "warn", f"{folder}: cannot write here ({error.strerror})", remedy)
    return clock(written - after if written > after else min(written - before, 0.0))


def clock(seconds: float) -> Finding:
    """Judge by how many seconds the file server is ahead."""
    text = f"the file server's is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} this machine's"
    remedy = "times of files decide what runs again: have the machine's clock set (NTP)"
    return Finding("clock", "warn" if abs(seconds) > 5 else "ok", text, remedy)
