"""The site's Slurm: controllers, accounts with their QOS, nodes."""

from __future__ import annotations

import functools
import getpass
import re
import shutil
from collections.abc import Collection, Iterable

from dlscale.config.run import Run
from dlscale.config.site import Job, Nodes, Scheduler
from dlscale.core.stages import RUN_STAGES
from dlscale.core.text import many
from dlscale.launch import slurm
from dlscale.preflight.probe import FailedError, Finding, Probe, said

#: Features, CPUs, generic resources, number and memory of a group of nodes.
COLUMNS = "%f|%c|%G|%D|%m"


def probes(scheduler: Scheduler, runs: list[Run], stages: Collection[Job]) -> list[Probe]:
    """Return the probes of what jobs of these stages and runs need of Slurm."""
    kinds = [scheduler.cpu_nodes] if "data" in stages else []
    kinds += [scheduler.gpu_nodes] if runs and set(RUN_STAGES) & set(stages) else []
    most = max((run.geometry.nodes for run in runs), default=1)

    def accounts() -> Finding:
        wanted = asked(scheduler, runs, stages)
        words = ["sacctmgr", "-nP", "show", "assoc", f"user={getpass.getuser()}", "format=account,qos"]
        try:
            return account(wanted, associations(said(words)))
        except FailedError as error:
            if "accounting_storage" not in str(error):
                raise
            return Finding("account", "skip", "this Slurm keeps none")

    def machines(kind: Nodes) -> Finding:
        partition = ["-p", kind.partition] if kind.partition else []
        return hardware(kind, said(["sinfo", "-a", *partition, "-ho", COLUMNS]), most)

    return [
        ("Slurm", answers),
        ("account", accounts),
        *((_called(kind), functools.partial(machines, kind)) for kind in kinds),
    ]


def answers() -> Finding:
    """Ask the controllers: one of them has to be up."""
    remedy = "wait until the site's Slurm is back"
    if not shutil.which("sbatch"):
        return Finding("Slurm", "FAIL", "sbatch: no such command here", "run this on a login node of the site")
    try:
        text = " ".join(said(["scontrol", "ping"]).split())
    except FailedError as error:
        return Finding("Slurm", "FAIL", str(error), remedy)
    return Finding("Slurm", "ok" if re.search(r"\bis UP\b", text) else "FAIL", text or "no answer", remedy)


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


def account(wanted: set[tuple[str | None, str | None]], mine: dict[str, set[str]]) -> Finding:
    """Judge accounts and the QOS that go with them (`wanted`, as `asked` returns them) by the user's own."""
    names = sorted({name for name, _ in wanted if name})
    if not names:
        remedy = f"export SBATCH_ACCOUNT=PROJECT, or set site.scheduler.account; yours: {', '.join(sorted(mine))}"
        return Finding("account", "warn", "none is set; Slurm takes your default, if you have one", remedy)
    for name, queue in sorted((name, queue or "") for name, queue in wanted if name):
        allowed = mine.get(name.lower())  # Slurm's database is in lower case
        if allowed is None:
            remedy = f"export SBATCH_ACCOUNT=PROJECT, or set site.scheduler.account; yours: {', '.join(sorted(mine))}"
            return Finding("account", "FAIL", f"{name}: not yours", remedy)
        # A site's submit filter may give a QOS another name: gpu_shared for shared.
        if queue and allowed and not any(queue == other or queue in other.split("_") for other in allowed):
            remedy = f"use one of its QOS: {', '.join(sorted(allowed))} (site.scheduler)"
            return Finding("account", "FAIL", f"{name} may not use QOS {queue}", remedy)
    return Finding("account", "ok", ", ".join(names))


def hardware(kind: Nodes, text: str, most: int) -> Finding:
    """Judge whether nodes have what the site says of them: a job that asks for more waits for ever.

    `text` is what sinfo prints of their partition, `COLUMNS` a line; `most` are the GPU nodes of the largest run.
    """
    constraint = kind.constraint or ""
    features = set(filter(None, constraint.split("&"))) if not set(constraint) & set("|[*(") else set()
    asks = kind.cpus, kind.gpus, kind.memory_mb or 0
    fitting, seen, known = 0, list[str](), set[str]()
    for row in [line.split("|") for line in text.split() if line.count("|") == 4]:
        known |= set(row[0].split(","))
        if features <= set(row[0].split(",")):
            gpus = re.findall(rf"\b{re.escape(kind.gres)}(?::[A-Za-z]\w*)?:(\d+)", row[2])
            has = int(row[1].rstrip("+")), max(map(int, gpus), default=0), int(row[4].rstrip("+"))
            seen.append(f"{row[3]} of {_has(*has)}")
            fitting += int(row[3]) if all(one >= other for one, other in zip(has, asks, strict=True)) else 0
    wanted = most if kind.gpus else 1
    which = {"partition": kind.partition, "constraint": constraint, "--gres": kind.gres if kind.gpus else ""}
    what = _has(*asks) + "".join(f", {word} {name}" for word, name in which.items() if name)
    if fitting >= wanted:
        return Finding(_called(kind), "ok", f"{fitting} of {what}")
    there = "; ".join(dict.fromkeys(seen)) or f"of features {', '.join(sorted(known)) or 'none'}"
    remedy = "set *_nodes of site.scheduler to what is there, or take fewer geometry.nodes"
    text = f"{many(wanted, 'node')} of {what} wanted; sinfo has {fitting} ({there})"
    return Finding(_called(kind), "FAIL", text, remedy)


def _called(kind: Nodes) -> str:
    return "GPU nodes" if kind.gpus else "CPU nodes"


def _has(cpus: int, gpus: int, memory: int) -> str:
    """Return what a node has in words; of memory nothing where it is 0."""
    return ", ".join([many(cpus, "CPU"), many(gpus, "GPU"), *([f"{memory:,} MB"] if memory else [])])
