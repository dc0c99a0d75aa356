"""Slurm requests of stages, from their geometry and the site, and jobs in the queue."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from dlscale.config.run import Geometry
from dlscale.config.site import Job, Nodes, Queue, Scheduler
from dlscale.core.errors import UserError
from dlscale.core.machine import command_output
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.core.text import many

#: Resource of the Slurm executor → requested value.
Request = dict[str, Any]

#: Option of sbatch for each resource of a request, in the printed order.
WORDS = {
    **{"slurm_account": "--account", "slurm_partition": "--partition", "qos": "--qos", "constraint": "--constraint"},
    **{"nodes": "--nodes", "tasks": "--ntasks", "tasks_per_node": "--ntasks-per-node"},
    **{"cpus_per_task": "--cpus-per-task", "gres": "--gres", "mem_mb": "--mem", "runtime": "--time"},
}
#: Longest pause between two queries for jobs of an earlier call.
LONGEST_PAUSE_SECONDS = 300.0
#: Names of the resources of a request, without the counters of submitted jobs (`counter`).
RESOURCES = (*WORDS, "slurm_extra", "mpi")


def request(
    scheduler: Scheduler,
    job: Job,
    geometry: Geometry | None,
    minutes: int | None = None,
    processes: Geometry | None = None,
) -> Request:
    """Return a job's resources, by the names of the workflow's Slurm executor.

    If the job's queue limits the number of submitted jobs, one of the resources counts this job.

    Parameters
    ----------
    geometry
        Geometry of the run; None for a data stage, which takes part of a CPU node, or a GPU if these nodes have GPUs.
    minutes
        Estimated time limit; None for the site's limit. The queue may raise the limit to its minimum, or cut the limit
        to its maximum.
    processes
        Geometry of the processes, if a device does not have exactly one process.
    """
    nodes = scheduler.cpu_nodes if geometry is None else scheduler.gpu_nodes
    wanted: Request = {"nodes": 1}
    if geometry is None:
        wanted["cpus_per_task"] = min(scheduler.data_cpus, nodes.cpus)
        if nodes.gpus:  # a job on nodes with GPUs must request a GPU
            wanted |= {"cpus_per_task": nodes.cpus // nodes.gpus, "gres": f"{nodes.gres}:1"}
    else:
        check(scheduler, geometry)
        wanted["nodes"] = geometry.nodes
        processes = processes or geometry
        wanted["cpus_per_task"] = cpus_per_task(scheduler, geometry) * geometry.gpus_per_node // processes.gpus_per_node
        if nodes.gpus:
            wanted["gres"] = f"{nodes.gres}:{geometry.gpus_per_node}"
        if processes.world_size > 1:
            # With `mpi`, the executor does not start the tasks, because the command starts them with srun.
            wanted |= {"mpi": "srun", "tasks_per_node": processes.gpus_per_node}
    name, queue = choose_queue(scheduler, geometry)
    # With 0, the request has no --mem, and the job gets the memory of its part of the node. Without a value, the
    # executor would request 1 GB.
    share = int((nodes.memory_mb or 0) * part(scheduler, geometry, queue, wanted))
    wanted["mem_mb"] = (geometry and geometry.memory_mb) or share
    minutes = max(minutes or scheduler.limit(job), queue.min_minutes)
    wanted["runtime"] = min(minutes, queue.max_minutes or minutes)
    named = {
        **{"qos": queue.qos, "constraint": nodes.constraint, "slurm_partition": queue.partition},
        **{"slurm_account": account_of(scheduler, nodes), counter(name): queue.max_jobs and 1},
    }
    wanted |= {key: value for key, value in named.items() if value}
    extra = []
    if wanted.get("tasks_per_node") == 1:
        # The executor refuses one task per node, and multiplies the tasks by the GPUs if `gres` requests GPUs.
        wanted["tasks"] = wanted["nodes"] * wanted.pop("tasks_per_node")
        extra += [f"--gpus-per-node={wanted.pop('gres').removeprefix('gpu:')}"] if "gres" in wanted else []
    if job in STAGES and STAGES[job].warned:
        # Without `B:`, the signal goes to all processes of the job's steps, but not to the batch shell, which it would
        # end.
        extra.append(f"--signal=USR2@{scheduler.warning_seconds}")
    return {**wanted, "slurm_extra": " ".join(extra)} if extra else wanted


def counter(queue: str) -> str:
    """Return the name of the resource that counts a queue's jobs; Snakemake accepts only identifiers."""
    return re.sub(r"\W", "_", f"queue_{queue}_jobs")


def job_limits(scheduler: Scheduler) -> dict[str, int]:
    """Return the maximum number of submitted jobs per queue, by the name of the resource that counts them."""
    return {counter(name): queue.max_jobs for name, queue in scheduler.queues.items() if queue.max_jobs}


def words(asked: Mapping[str, Any]) -> str:
    """Return a job's resources as options of sbatch, quoted for a shell."""
    told = [f"{word}={asked[name]}" for name, word in WORDS.items() if asked.get(name)]  # 0 stands for no --mem
    return " ".join([shlex.join(told), *filter(None, [asked.get("slurm_extra")])])


def requests(asked: Iterable[tuple[Mapping[str, Any], str, Any]]) -> list[str]:
    """Return the Slurm requests of jobs as lines; jobs with equal requests share a line.

    `asked` yields resources, rule and wildcards of each job.
    """
    told = dict[str, set[str]]()
    for resources, rule, wildcards in asked:
        name = f"{wildcards.plan}.{wildcards.run}" if rule in RUN_STAGES else wildcards.dataset
        told.setdefault(words(resources), set()).add(f"{rule} {name}")
    lines = [f"sbatch {request_}: {', '.join(sorted(jobs))}" for request_, jobs in sorted(told.items())]
    return ["", *lines] if lines else []


def part(scheduler: Scheduler, geometry: Geometry | None, queue: Queue, asked: Request) -> float:
    """Return the fraction of each node that a job uses and pays for."""
    nodes = scheduler.gpu_nodes if geometry else scheduler.cpu_nodes
    if queue.whole_nodes:
        return 1.0
    cpus = asked["cpus_per_task"] * asked.get("tasks_per_node", 1) / nodes.cpus
    memory = ((geometry and geometry.memory_mb) or 0) / (nodes.memory_mb or math.inf)
    gpus = geometry.gpus_per_node / nodes.gpus if geometry and nodes.gpus else 0.0
    return max(gpus, min(max(float(cpus), memory), 1.0))


def cpus_per_task(scheduler: Scheduler, geometry: Geometry) -> int:
    """Return the CPUs per device of a run.

    Without `geometry.cpus`, return a GPU's fraction of the node's CPUs. If the nodes have no GPUs, return `data_cpus`,
    but at most the node's CPUs.
    """
    nodes = scheduler.gpu_nodes
    if geometry.cpus:
        return geometry.cpus
    return nodes.cpus // nodes.gpus if nodes.gpus else min(scheduler.data_cpus, nodes.cpus)


def account_of(scheduler: Scheduler, nodes: Nodes) -> str | None:
    """Return the account of jobs on these nodes, with the suffix of the nodes; None if no account is set."""
    account = scheduler.account or os.environ.get("SBATCH_ACCOUNT")
    for suffix in (scheduler.cpu_nodes.account_suffix, scheduler.gpu_nodes.account_suffix):
        account = account and account.removesuffix(suffix)
    return account + nodes.account_suffix if account else None


def choose_queue(scheduler: Scheduler, geometry: Geometry | None, where: str = "") -> tuple[str, Queue]:
    """Return name and settings of a job's queue: the first queue that allows the job's nodes and GPUs.

    `geometry` is None for a data stage. The name is empty if the site names no queue. Raise `UserError` if no queue
    allows the geometry.
    """
    names = scheduler.run_queues if geometry else filter(None, [scheduler.data_queue])
    queues = {name: scheduler.queues[name] for name in names} or {"": Queue()}
    asked = geometry or Geometry()  # a data stage uses at most one GPU
    for name, queue in queues.items():
        if asked.nodes <= (queue.max_nodes or math.inf) and asked.world_size <= (queue.max_gpus or math.inf):
            return name, queue
    limits = [
        f"{name} ({', '.join(many(n, what) for n, what in ((queue.max_nodes, 'node'), (queue.max_gpus, 'GPU')) if n)})"
        for name, queue in queues.items()
    ]
    raise UserError(
        f"{where}geometry: no queue in site.scheduler.run_queues allows {many(asked.nodes, 'node')} with "
        f"{many(asked.world_size, 'GPU')} in total; at most {', '.join(limits)}. Request less, or add a queue"
    )


def check(scheduler: Scheduler | None, geometry: Geometry, where: str = "") -> None:
    """Raise `UserError` for a geometry beyond the limits of nodes or queues.

    `where` is the prefix of the geometry's key.
    """
    if scheduler is None:
        if geometry.nodes > 1:
            raise UserError(
                f"{where}geometry.nodes: {geometry.nodes} nodes need a scheduler; use a profile with a scheduler, such "
                "as --profile perlmutter, or set in the site how processes start (docs/sites.md: Without Slurm)"
            )
        return
    have = scheduler.gpu_nodes.gpus
    if have and geometry.gpus_per_node > have:
        raise UserError(
            f"{where}geometry.gpus_per_node: {geometry.gpus_per_node} is more than the {have} GPUs of this site's "
            f"nodes; use at most {have}, and more nodes"
        )
    if (cpus := cpus_per_task(scheduler, geometry) * geometry.gpus_per_node) > scheduler.gpu_nodes.cpus:
        each = "geometry.cpus" if geometry.cpus else "scheduler.data_cpus"
        raise UserError(
            f"{where}geometry.gpus_per_node: {geometry.gpus_per_node} processes with {cpus // geometry.gpus_per_node} "
            f"CPUs each ({each}) need {cpus} CPUs, but this site's nodes have {scheduler.gpu_nodes.cpus}; lower "
            f"gpus_per_node or {each}"
        )
    if (geometry.memory_mb or 0) > (most := scheduler.gpu_nodes.memory_mb or math.inf):
        raise UserError(
            f"{where}geometry.memory_mb: {geometry.memory_mb} MB is more than the {most} MB of this site's nodes"
        )
    for key in ("cpus", "memory_mb"):
        if scheduler.gpu_nodes.fixed_share and getattr(geometry, key):
            raise UserError(
                f"{where}geometry.{key}: this site gives each GPU a fixed number of CPUs and a fixed amount of memory "
                "(gpu_nodes.fixed_share); remove the key, or run on another site"
            )
    choose_queue(scheduler, geometry, where)


def shown(geometry: Geometry, processes: Geometry | None = None, gpus: bool = True) -> str:
    """Return a geometry and its processes as text; if `gpus` is false, each device is called a process."""
    device = many(geometry.gpus_per_node, "GPU" if gpus else "process")
    devices = f"{many(geometry.nodes, 'node')} x {device}"
    axes = [f"dp {geometry.dp}", *(f"{axis} {n}" for axis in ("cp", "tp") if (n := getattr(geometry, axis)) > 1)]
    return f"{devices} = {many((processes or geometry).world_size, 'rank')} ({', '.join(axes)})"


def left_running(folder: str) -> list[str] | None:
    """Return number, purpose and state, as text, of each job that Slurm lists for a workflow in `folder`.

    Return None if squeue fails.
    """
    if not shutil.which("squeue"):  # without Slurm, no jobs are queued
        return []
    listed = command_output(["squeue", "--me", "--noheader", "--format=%i|%T|%Z|%k"])
    if listed is None:
        return None
    jobs = [line.split("|", 3) for line in listed.splitlines() if line.count("|") >= 3]
    return [
        f"{number} ({purpose.removeprefix('rule_').replace('_wildcards_', ' ')}, {state.lower()})"
        for number, state, place, purpose in jobs
        if place == folder and purpose.startswith("rule_")
    ]


def wait_for_left_running(folder: str, seconds: float = 30.0) -> None:
    """Wait until Slurm lists no job of an earlier workflow call in `folder`.

    The jobs of a killed controller continue until they finish. The pauses between queries begin with `seconds` and
    grow, because sites ask users to query rarely.
    """
    said: list[str] | None = []
    while (jobs := left_running(folder)) != []:
        if jobs != said:
            earlier = f"jobs of an earlier call: {', '.join(jobs or [])}; cancel unwanted jobs with `scancel`"
            print("Waiting for", f"{earlier}." if jobs else "squeue's answer.", file=sys.stderr)
            said = jobs
        time.sleep(seconds)
        seconds = min(1.5 * seconds, LONGEST_PAUSE_SECONDS)
