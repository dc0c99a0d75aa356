"""Causes of a slow external program, for the verdict."""

from __future__ import annotations

import math
import statistics
from typing import cast

from dlscale.core import registry
from dlscale.core.text import duration, number, percent, size
from dlscale.measure.records import SAMPLE_RATE
from dlscale.report.evidence import Evidence, Finding, crowded_out
from dlscale.results import MIN_FRACTION, foreign_cores

#: Memory pressure is reported if any process of the node waits for memory for at least this fraction of the time.
STALLED = 0.1

#: Too many threads are reported if any thread of the node waits for a core for at least this fraction of the time.
QUEUED = 0.5

#: Limits for reporting that an external program slows down: minimum number of windows of steps in each third of its
#: run, and minimum fraction of the speed that is lost from the first third to the last third.
WINDOWS, SLOWER = 3, 0.2

#: Minimum time outside the steps that is described, seconds.
PAUSE = 1.0

#: Step time, seconds, below which launching operators is reported as a cost of an external program on a CPU.
TINY = 4e-3


def slow_process(evidence: Evidence) -> Finding | None:
    """Find one process of an external program that waits for data, or computes, longer than the other processes."""
    if not (program := evidence.outside):
        return None
    # With GPUs, a busy core is not evidence of computing: a process spins while its GPU waits for other ranks.
    for shares, doing in (
        (program.rank_waiting, "waits for batches"),
        ([] if evidence.cuda else program.rank_cores, "computes"),
    ):
        if len(shares) < 2:
            continue
        slowest = max(shares)
        rank = shares.index(slowest)
        usual = statistics.median([share for number_, share in enumerate(shares) if number_ != rank])
        if slowest - usual >= 2 * MIN_FRACTION and usual < 0.75 * slowest:
            cores = "" if shares is program.rank_waiting else " (100 % is one core)"
            return Finding(
                "straggler",
                f"slow rank {rank}",
                f"Rank {rank} {doing} for {percent(slowest)} of a step{cores}, while the median of the other ranks is "
                f"{percent(usual)}. All other ranks wait for the slow rank in every step.",
                f"Check whether rank {rank} has more samples or files than other ranks, does extra work, or shares its "
                "node with other programs.",
                min(slowest - usual, 1.0),
            )
    return None


def waiting(evidence: Evidence) -> Finding | None:
    """Find an external program that waits for batches: slow storage, few workers, or expensive loading."""
    program, usage = evidence.outside, evidence.usage("FULL")
    # With `dlscale measure --loader`, the cause is known in more detail.
    if program and (detailed := registry.provided("loader_cause", lambda _: None)(evidence)):
        return cast(Finding, detailed)
    if not (program and program.waiting and program.waiting >= 2 * MIN_FRACTION) or (usage and crowded_out(usage)):
        return None
    why = f"The program waits for data for {percent(program.waiting)} of each step"
    busy = usage.cpu_seconds / usage.seconds if usage else 0.0
    spare = usage and usage.cores - usage.cores_cpu_seconds / usage.seconds
    read = f", and disks deliver {size(usage.read_bytes / usage.seconds)}/s" if usage and usage.read_bytes else ""
    ranks = evidence.throughput.nranks if evidence.throughput else 1
    free = usage.cores - ranks if usage else 1
    most = f", at most {free} in all" if usage else ""
    more = f"Use more workers (num_workers of the DataLoader){most}" if free > 0 else ""
    if usage and busy < 0.5 * min(ranks, usage.cores):
        return Finding(
            "storage",
            "slow storage",
            f"{why} and keeps only {number(busy, 2)} of {usage.cores} cores busy{read}. The program waits for files, "
            "or it sleeps.",
            "Copy the data to faster storage (the node's own disk, or memory). Use more workers (num_workers of the "
            "DataLoader), so that more files are read at the same time: workers that wait need no cores.",
            program.waiting,
        )
    idle = ""
    if usage and more and spare and spare >= 0.5:
        idle = f", while {number(spare, 2)} of {usage.cores} cores are idle"
    todo = f"{more}. " if idle or not usage else ""
    return Finding(
        "workers" if idle else "loader",
        "too few workers" if idle else "the loader's work",
        f"{why}{idle}{read}.",
        f"{todo}Store the data in the form that the model takes, so that there is less to decode and to transform.",
        program.waiting,
    )


def small_steps(evidence: Evidence) -> Finding | None:
    """Find steps of an external program that are too small for its device."""
    program, full = evidence.outside, evidence.trials("FULL")
    if not (program and full and full.mean) or (program.waiting or 0.0) > 0.5 or idle(evidence):
        return None
    batch = evidence.throughput.batch_size if evidence.throughput and program.samples else 1
    seconds = batch / full.mean if batch else math.inf
    gpu = evidence.watched.means.get("gpu0_utilization") if evidence.watched else None
    if evidence.cuda and gpu is not None and gpu < 0.7:
        why = (
            f"The GPU computes for only {percent(gpu)} of the time. The host does not launch work fast enough, or it "
            "waits for the GPU within a step (`.item()`, `print(loss)`)."
        )
        share = 1 - gpu
    elif not evidence.cuda and seconds < TINY:
        why = (
            f"A step takes {1e3 * seconds:.2f} ms. In such a short step, launching the operators takes about as long "
            "as computing them. Launching takes the same time at any batch size."
        )
        share = min(1.0, 0.5 * TINY / seconds) * 0.5
    else:
        return None
    todo = (
        "Use a larger batch, or torch.compile. On a GPU, use a fused optimiser or CUDA graphs (mode='reduce-overhead')."
    )
    return Finding("launches", "tiny steps", why, todo, share)


def idle(evidence: Evidence) -> Finding | None:
    """Find an external program that leaves cores idle within its steps, for a reason other than its loader."""
    program, usage = evidence.outside, evidence.usage("FULL")
    if not (program and usage and evidence.throughput) or evidence.cuda or crowded_out(usage) or slow_process(evidence):
        return None
    least, busy = min(evidence.throughput.nranks, usage.cores), usage.cpu_seconds / usage.seconds
    share = 1 - busy / least - (program.waiting or 0.0)
    if share < 0.3:
        return None
    read = f", and disks deliver {size(usage.read_bytes / usage.seconds)}/s" if usage.read_bytes else ""
    return Finding(
        "idle",
        "idle processors",
        f"The program keeps only {number(busy, 2)} of {usage.cores} cores busy{read}. Its loader is not the reason. "
        "Within a step the program waits for files, the network or other processes, or it sleeps.",
        "Read ahead in a loader's workers. Log and save in a thread. `--profile` shows the lines of code that wait.",
        share,
    )


def besides(evidence: Evidence) -> Finding | None:
    """Find an external program that spends much time outside its training steps."""
    program = evidence.outside
    if not program or program.training > 1 - 2 * MIN_FRACTION:
        return None
    share = 1 - program.training
    other, longest = (program.pauses.get(name, 0.0) for name in ("other", "longest"))
    why = [
        f"From the first counted step to the last, {percent(share)} of the time is spent outside the steps. The rate "
        "does not count this time.",
        f"For {duration(other)}, a loader other than the training's was read, or a model was in evaluation mode, as in "
        "a validation." * (other >= PAUSE),
        f"The longest time without a batch or a step is {duration(longest)}." * (longest >= PAUSE),
    ]
    todo = [
        "If this is validation, validate less often, on fewer samples, or in larger batches." * (other >= longest),
        "If the program saves checkpoints meanwhile, save less often, or in a thread." * (longest >= min(other, PAUSE)),
        "A log does not show the wait for data, but `dlscale.timed` does." * (program.way == "log"),
    ]
    return Finding(
        "besides", "much time outside training", " ".join(filter(None, why)), " ".join(filter(None, todo)), share
    )


def between_epochs(evidence: Evidence) -> Finding | None:
    """Find an external program that spends much of its steps' time between two loops over its loader."""
    program = evidence.outside
    share = program.between_epochs if program else 0.0
    if share < 2 * MIN_FRACTION:
        return None
    return Finding(
        "epochs",
        "work between epochs",
        f"{percent(share)} of the time in the rate passes between an epoch's last step and the "
        "request for the next epoch's first batch. The program neither trains nor waits for a batch in this time.",
        "If the loader's workers start again in each epoch, use persistent_workers=True. Log, save, evaluate and "
        "collect garbage less often, or make epochs longer. `--profile` shows the slowest lines of code.",
        share,
    )


def slowing(evidence: Evidence) -> Finding | None:
    """Find an external program that slows down.

    Every window of its last third is slower than every window of its first third, by at least the fraction `SLOWER`.
    """
    full = evidence.trials("FULL")
    rates = full.trial_throughput if evidence.outside and full else []
    before, after = rates[: len(rates) // 3], rates[-(len(rates) // 3) :]
    if len(before) < WINDOWS or max(after) > (1 - SLOWER) * min(before):
        return None
    first, last = statistics.fmean(before), statistics.fmean(after)
    unit = evidence.throughput.unit if evidence.throughput else SAMPLE_RATE
    return Finding(
        "slowing",
        "the program slows down",
        f"The program reached {number(first)} {unit} in the first third of its steps, and {number(last)} {unit} in the "
        "last third.",
        "Check whether lists, logs or the autograd graphs of stored losses grow from step to step, whether numbers "
        "become denormal (remedy: `torch.set_flush_denormal(True)`), and whether heat lowers the clock rates.",
        1 - statistics.fmean(rates) / first,
    )


def threads(evidence: Evidence) -> Finding | None:
    """Find an external program with more threads than cores."""
    program, usage = evidence.outside, evidence.usage("FULL")
    if not (program and program.queued and usage) or evidence.cuda or foreign_cores(usage) > 0.25:
        return None
    busy = usage.cpu_seconds / usage.seconds
    if program.queued < QUEUED or busy < 0.8 * usage.cores or (program.waiting or 0.0) >= 2 * MIN_FRACTION:
        return None
    return Finding(
        "threads",
        "more threads than cores",
        f"Threads waited for a core for {percent(min(program.queued, 1.0))} of the time. The program itself kept "
        f"at least 80 % of its {usage.cores} cores busy.",
        "Set OMP_NUM_THREADS, or torch.set_num_threads, to the number of cores divided by the number of processes. "
        "Use fewer loader workers.",
        None,
    )


def stalled(evidence: Evidence) -> Finding | None:
    """Find memory pressure: the machine swaps, or rereads files that no longer fit into its memory."""
    program = evidence.outside
    if not (program and program.stalled and program.stalled >= STALLED):
        return None
    return Finding(
        "swapping",
        "too little memory",
        f"Processes of this machine waited for memory for {percent(min(program.stalled, 1.0))} of the time. The "
        "machine swaps, or rereads files that no longer fit into its memory.",
        "Use fewer workers, a smaller prefetch or a smaller batch, or request more memory.",
        min(program.stalled, 1.0),
    )


def unwatched(evidence: Evidence) -> Finding | None:
    """Find an external program that dlscale did not watch to the end."""
    program = evidence.outside
    if not (program and program.stopped):
        return None
    return Finding(
        "unwatched",
        "steps not watched to the end",
        f"dlscale stopped watching before the program ended: {program.stopped}. The rate covers only the steps before "
        "that time.",
        "If the disk is full, free some space. Otherwise report this message as a defect of dlscale.",
        None,
    )
