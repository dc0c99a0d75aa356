"""Causes of a slow run: the machine."""

from __future__ import annotations

from dlscale.core.text import number, percent
from dlscale.report.evidence import Evidence, Finding
from dlscale.results import foreign_cpu_fraction


def neighbour(evidence: Evidence) -> Finding | None:
    """Find other programs on the run's CPUs."""
    share = foreign_cpu_fraction(evidence.throughput, [])
    usage = evidence.usage("FULL") or evidence.usage("IO") or evidence.usage("SYNTHETIC")
    if not (share and usage):
        return None
    return Finding(
        "neighbour",
        "busy machine",
        f"Other programs kept {number(share * usage.cores, 2)} of the run's {usage.cores} CPUs busy while the run was "
        "measured.",
        "Measure again on an idle machine, because these rates are probably too low.",
        None,
    )


def throttled(evidence: Evidence) -> Finding | None:
    """Find GPU clocks reduced by power or temperature limits."""
    watched = evidence.watched
    if not (watched and watched.seconds):
        return None
    reasons = sorted(watched.throttle_reasons, key=lambda reason: -watched.throttle_reasons[reason])
    held = watched.throttled_seconds / watched.seconds
    # A busy GPU always reaches its power cap, so a power cap costs only the lost clock cycles. Other reasons, such as
    # heat, are faults: all their time counts.
    faults = sum(watched.throttle_reasons[reason] for reason in reasons if reason != "power cap") / watched.seconds
    share = max(watched.clock_loss, min(faults, held))
    return Finding(
        "throttled",
        "reduced GPU clocks",
        f"For {percent(held)} of the time at least one GPU ran below its normal clock ({', '.join(reasons)}). The "
        f"slowest GPU lost {percent(watched.clock_loss)} of its cycles.",
        "If power is capped, ask the site's staff for a higher cap. If the GPU is too hot, use another node. Lower "
        "precision needs less power.",
        share,
    )
