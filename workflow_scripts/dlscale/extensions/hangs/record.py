"""Find the hang that ended a run, in the run's folder and in its logs."""

from __future__ import annotations

import re
from pathlib import Path

from dlscale.core.files import read_text
from dlscale.core.paths import Results

#: File with the finding, in the folder of a run.
FINDING = Path("hang/finding.txt")

#: Last message of a process that ended because another process hung or was lost (`watchdog.py`, `rendezvous.py`).
_ENDED = re.compile(r"^dlscale (\S+): (.*)\. This process also ends$", re.MULTILINE)


def hang_of(folder: Path) -> str:
    """Return the hang or the lost process that ended a run; empty without one.

    `folder` is the run's folder. The log of a job only describes the job's last try.
    """
    if (folder / FINDING).is_file():
        text = read_text(folder / FINDING, errors="replace").strip()
        return f"{text}. Stacks of all processes: {folder / FINDING.parent}"
    results = [*folder.absolute().parents][:3][-1]
    pattern = Results("").log("*", folder.parent.name, folder.name).lstrip("/").removesuffix(".log")
    for log in sorted([*results.glob(f"{pattern}.log"), *results.glob(f"{pattern}.rank*.log")]):
        if found := _ENDED.findall(read_text(log, errors="replace")):
            stage, text = found[-1]
            return f"{stage}: {text}. Stacks of all processes: {log.parent}/{folder.name}*.log"
    return ""
