"""What Slurm says of the site: accounts, QOS, features of nodes, how long jobs are remembered."""

from __future__ import annotations

import functools
import getpass
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from dlscale.config.run import Run
from dlscale.config.site import Job, Nodes, Scheduler
from dlscale.core.errors import unknown
from dlscale.core.settings import read_yaml
from dlscale.core.stages import RUN_STAGES
from dlscale.core.text import many
from dlscale.launch import slurm
from dlscale.preflight.probe import AbsentError, FailedError, Finding, NoAnswerError, Probe, Status, said, started


def probes(scheduler: Scheduler, runs: list[Run], profile: str | None, stages: Collection[Job]) -> list[Probe]:
    """Return the probes of what jobs of these stages and runs need of Slurm."""
    wanted = functools.partial(asked, scheduler, runs, stages)  # not yet: it refuses a geometry that cannot be
    kinds = [scheduler.cpu_nodes] if "data" in stages else []
    kinds += [scheduler.gpu_nodes] if runs and set(RUN_STAGES) & set(stages) else []
    partitions = {name for nodes in kinds if nodes.partition for name in nodes.partition.split(",")}
    constraints = {nodes.constraint for nodes in kinds if nodes.constraint}
    most = max((run.geometry.nodes for run in runs), default=1)
    suffixed = any(nodes.account_suffix for nodes in kinds)
    configured = started(lambda: said(["scontrol", "show", "config"]))

    def answers() -> Finding:
        if not shutil.which("sbatch"):
            return Finding("Slurm", "FAIL", "sbatch: no such command here", "run this on a login node of the site")
        try:
            return ping(said(["scontrol", "ping"]))
        except FailedError as error:
            return Finding("Slurm", "FAIL", str(error), "wait until the site's Slurm is back")

    def accounts() -> Finding:
        words = ["sacctmgr", "-nP", "show", "assoc", f"user={getpass.getuser()}", "format=account,qos"]
        try:
            return account(wanted(), associations(said(words)), suffixed)
        except AbsentError:
            return account(wanted(), None, suffixed)
        except NoAnswerError as error:
            if "accounting_storage" in str(error):  # a cluster that keeps no accounts
                return account(wanted(), None, suffixed)
            raise

    def queues() -> Finding:
        names = {name for _, name in wanted() if name}
        if not names:
            return Finding("QOS", "skip", "the site names none")
        listed = said(["sacctmgr", "-nP", "show", "qos", "format=name"])
        return qos(names, set(listed.split()), filtered=submit_filter(configured.result()))

    def machines() -> Finding:
        # Without a partition in the question, nodes of several count once.
        asked = {nodes.partition: ["-p", nodes.partition] if nodes.partition else [] for nodes in kinds}
        listed = {name: said(["sinfo", "-a", *only, "-ho", "%f|%c|%G|%D|%m"]) for name, only in asked.items()}
        return hardware([(nodes, listed[nodes.partition]) for nodes in kinds], most)

    def age() -> Finding:
        settings = _workflow_profile(profile)
        if settings.get("slurm-status-command") == "sacct":
            return Finding("MinJobAge", "skip", "jobs are watched with sacct")
        return min_job_age(configured.result(), float(settings.get("slurm-init-seconds-before-status-checks", 40)))

    return [
        ("Slurm", answers),
        ("MinJobAge", age),
        ("account", accounts),
        ("QOS", queues),
        ("partition", lambda: partition(partitions, said(["sinfo", "-a", "-ho", "%R"]) if partitions else "")),
        ("constraint", lambda: features(constraints, said(["sinfo", "-a", "-ho", "%f"]))),
        ("nodes", machines),
    ]


def _workflow_profile(profile: str | None) -> Mapping[str, Any]:
    """Return the settings of Snakemake's own in a profile; none where there is no such file."""
    if not profile:
        return {}
    folder = Path(profile).parent if "/" in profile else Path("profiles") / profile
    files = [folder / name for name in ("profile.yaml", "profile.v9+.yaml", "config.yaml")]
    return next((read_yaml(file) for file in files if file.is_file()), {})


def asked(scheduler: Scheduler, runs: Iterable[Run], stages: Collection[Job]) -> set[tuple[str | None, str | None]]:
    """Return account and QOS of all jobs that would be submitted."""
    jobs = [(stage, None) if stage == "data" else (stage, run.geometry) for stage in stages for run in runs]
    requests = [slurm.request(scheduler, stage, geometry) for stage, geometry in jobs]
    return {(request.get("slurm_account"), request.get("qos")) for request in requests}


def associations(text: str) -> dict[str, set[str]]:
    """Return the QOS of each account, which may stand twice, from `sacctmgr -nP show assoc format=account,qos`."""
    accounts: dict[str, set[str]] = {}
    for line in text.split():
        name, _, listed = line.partition("|")
        accounts.setdefault(name, set()).update(filter(None, listed.split(",")))
    return accounts


def account(wanted: set[tuple[str | None, str | None]], mine: dict[str, set[str]] | None, suffixed: bool) -> Finding:
    """Judge accounts and the QOS that go with them (`wanted`, as `asked` returns them).

    `mine` are the user's accounts, None where Slurm keeps none. `suffixed`: some nodes want the account's name to end
    in a certain way, as no default account does.
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
    return _setting(text, "JobSubmitPlugins") not in ("", "(null)")


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


def partition(names: set[str], text: str) -> Finding:
    """Judge whether the partitions are there, a line each of `sinfo -ho %R`."""
    if not names:
        return Finding("partition", "skip", "the site names none")
    there = set(text.split())
    if missing := sorted(names - there):
        remedy = "set site.scheduler.*_nodes.partition to what is"
        return Finding("partition", "FAIL", unknown("partition", missing[0], there), remedy)
    return Finding("partition", "ok", ", ".join(sorted(names)))


def hardware(kinds: Iterable[tuple[Nodes, str]], most: int) -> Finding:
    """Judge whether nodes have what the site says of them: a job that asks for more waits for ever.

    With each kind stands what `sinfo -ho "%f|%c|%G|%D|%m"` prints of its partition, a line a group of nodes: features,
    CPUs, generic resources, number, memory. `most` are the GPU nodes of the largest run.
    """
    checked = []
    for kind, text in kinds:
        constraint = kind.constraint or ""
        names = set(re.findall(r"[\w.:+-]+", constraint)) if not set(constraint) & set("|[*") else set()
        asks = kind.cpus, kind.gpus, kind.memory_mb or 0
        fitting, seen = 0, []
        for line in text.split():
            if line.count("|") != 4:
                continue
            nodes_features, cpus, gres, number, memory = line.split("|")
            if not names <= set(nodes_features.split(",")):
                continue
            gpus = max(map(int, re.findall(rf"\b{re.escape(kind.gres)}(?::[A-Za-z]\w*)?:(\d+)", gres)), default=0)
            has = int(cpus.rstrip("+")), gpus, int(memory.rstrip("+"))
            seen.append(f"{number} of {_has(*has)}")
            if all(one >= other for one, other in zip(has, asks, strict=True)):
                fitting += int(number)
        which = "".join(f" {word} {name}" for word, name in _which(kind) if name)
        wanted = most if kind.gpus else 1
        if fitting < wanted:
            there = "; ".join(dict.fromkeys(seen)) or "none"
            remedy = "set *_nodes of site.scheduler to what is there, or take fewer geometry.nodes"
            what = f"{many(wanted, 'node')} of {_has(*asks)}{which} wanted; sinfo has {fitting} ({there})"
            return Finding("nodes", "FAIL", what, remedy)
        checked.append(f"{fitting} of {_has(*asks)}{which}")
    return Finding("nodes", "ok" if checked else "skip", "; ".join(checked) or "no job needs any")


def _has(cpus: int, gpus: int, memory: int) -> str:
    """Return what a node has in words; of memory nothing where it is 0."""
    have = [many(cpus, "CPU"), many(gpus, "GPU"), f"{memory:,} MB"]
    return f"{', '.join(have[:2])} and {have[2]}" if memory else " and ".join(have[:2])


def _which(kind: Nodes) -> list[tuple[str, str | None]]:
    gres = kind.gres if kind.gpus else None
    return [("in partition", kind.partition), ("with constraint", kind.constraint), ("with --gres", gres)]


def ping(text: str) -> Finding:
    """Judge `scontrol ping`: one line a controller."""
    text = " ".join(text.split())
    if re.search(r"\bis UP\b", text):
        return Finding("Slurm", "ok", text)
    return Finding("Slurm", "FAIL", text or "no controller answers", "wait until the site's Slurm is back")


def min_job_age(text: str, seconds: float) -> Finding:
    """Judge, by `scontrol show config`, whether `squeue` remembers jobs for three rounds of `seconds` between looks."""
    number = re.match(r"\d+", _setting(text, "MinJobAge"))
    if not number:
        return Finding("MinJobAge", "warn", "scontrol does not tell", "look for MinJobAge in scontrol show config")
    age = int(number.group())
    if age >= 3 * seconds:
        return Finding("MinJobAge", "ok", f"{age} s")
    remedy = f"set slurm-init-seconds-before-status-checks to at most {max(age // 3, 1)} in profile.yaml"
    text = f"{age} s; squeue may forget a finished job before it is looked for ({seconds:.0f} s, three times)"
    return Finding("MinJobAge", "warn", text, remedy)


def _setting(text: str, name: str) -> str:
    line = re.search(rf"^{name}\s*=\s*(.*?)\s*$", text, re.MULTILINE)
    return line.group(1) if line else ""
