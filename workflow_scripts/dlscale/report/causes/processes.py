"""Causes of a slow run: its processes, and the network between them."""

from __future__ import annotations

import statistics

from dlscale.core.text import number
from dlscale.measure.records import Throughput
from dlscale.parallel.network import is_tcp
from dlscale.report.evidence import Evidence, Finding
from dlscale.report.speedup import between


def straggler(evidence: Evidence) -> Finding | None:
    """Find one slow rank that all other ranks wait for."""
    for mode, doing in (("alone", "computes"), ("IO", "loads")):
        trials = evidence.trials(mode)
        if not trials or len(trials.rank_throughput) < 2 or (mode == "IO" and not evidence.loading):
            continue
        slowest = min(trials.rank_throughput)
        rank = trials.rank_throughput.index(slowest)
        usual = statistics.median([rate for number_, rate in enumerate(trials.rank_throughput) if number_ != rank])
        if slowest < 0.85 * usual:
            return Finding(
                "straggler",
                f"slow rank {rank}",
                f"Rank {rank} {doing} {number(slowest)} samples/s, while the median of the other ranks is "
                f"{number(usual)}. All other ranks wait for the slow rank in every step.",
                f"Check the node and the device of rank {rank}: clocks, temperature, other programs. Exclude the node "
                "if it stays slow.",
                1 - slowest / usual,
            )
    return None


def communication(evidence: Evidence) -> Finding | None:
    """Find gradient averaging that computation does not hide."""
    measured, activity, seconds = evidence.throughput, evidence.activity, evidence.step_seconds
    alone, together = evidence.trials("alone"), evidence.trials("SYNTHETIC")
    if alone and together and measured and together.mean:
        if between(together, alone).noise:
            return None
        share = 1 - together.mean / alone.mean
        why = (
            f"Gradient averaging over {measured.nranks} processes lowers the rate of computing alone from "
            f"{number(alone.mean)} to {number(together.mean)} samples/s."
        )
    elif activity.comm_seconds and seconds:  # `alone` is missing if a CUDA graph contains the averaging
        exposed = activity.comm_seconds * (1 - (activity.comm_overlap or 0.0))
        share = min(exposed / seconds, 1.0)
        why = (
            f"A step takes {1e3 * seconds:.1f} ms. Averaging gradients takes {1e3 * activity.comm_seconds:.1f} ms of "
            f"the step, and no computation overlaps with {1e3 * exposed:.1f} ms of the averaging."
        )
    else:
        return None
    return Finding(
        "communication",
        "communication",
        why,
        "Use a larger batch on each device (batch_size). If memory is short, raise accumulation_steps, because "
        "gradients are averaged once per step. Try other bucket sizes (parallel: bucket_mb, first_bucket_mb).",
        share,
    )


def network(evidence: Evidence) -> Finding | None:
    """Find TCP between nodes, which NCCL uses if it finds no plug-in for the site's network."""
    if not is_tcp(used := (evidence.throughput or Throughput()).device.network):
        return None
    return Finding(
        "network",
        "TCP between nodes",
        f"NCCL exchanged gradients between nodes over TCP (network {used}).",
        "If the nodes have a faster network, provide NCCL's plug-in for it, and declare the network (site.fabric).",
        None,
    )
