"""Cause of a slow external program: its loader, as measured with replayed batches."""

from __future__ import annotations

from dlscale.extensions.headroom.records import Headroom
from dlscale.report.evidence import Evidence, Finding


def faster_loader(evidence: Evidence) -> Finding | None:
    """Find a program that a loader without cost would speed up significantly."""
    file = evidence.folder / "headroom.json" if evidence.folder else None
    headroom = Headroom.read(file) if file and file.exists() else None
    if headroom is None or not headroom.significant:
        return None
    said = f"{headroom.text[0].upper()}{headroom.text[1:]}."
    return Finding(
        "headroom",
        "faster loader",
        f"{said} A copy of the program was timed in {len(headroom.turns)} pairs of turns, with its loader and with "
        "replayed batches.",
        "Use more workers, do less work per sample, or store the data in the form that the model takes.",
        1 - 1 / headroom.gain[0],
    )
