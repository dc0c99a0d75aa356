"""Causes of a slow run.

Each function in `CAUSES` looks for one cause. The function returns a finding with its evidence, or None if the cause is
absent or was not measured. An extension lists more functions, by their full names, in its table `CAUSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dlscale.core import registry
from dlscale.report.causes.computing import copies, launches, memory, sync
from dlscale.report.causes.loading import loading, overlap
from dlscale.report.causes.machine import neighbour, throttled
from dlscale.report.causes.processes import communication, network, straggler
from dlscale.report.evidence import Evidence, Finding

CAUSES: tuple[Callable[[Evidence], Finding | None], ...] = (
    loading,
    overlap,
    straggler,
    communication,
    network,
    launches,
    sync,
    memory,
    copies,
    neighbour,
    throttled,
)


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Yield the findings of all functions in `CAUSES`, including functions of extensions."""
    for look in (*CAUSES, *map(registry.named, registry.table("CAUSES").values())):
        if finding := look(evidence):
            yield finding
