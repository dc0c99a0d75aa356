"""Checks of raw files and disks, before jobs start."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlscale.config.dataset import DatasetSettings
from dlscale.core.errors import UserError
from dlscale.core.paths import Results
from dlscale.core.settings import flat
from dlscale.core.text import duration, size
from dlscale.data import parts
from dlscale.data.kind import DatasetKind
from dlscale.data.manifest import Manifest

Status = Literal["ok", "warn", "FAIL", "skip"]

#: Free bytes below which a check fails, and free bytes below which the check warns (also below a tenth of the disk).
FAIL_FREE_BYTES, WARN_FREE_BYTES = 0.5e9, 20e9
#: Seconds by which the clocks of this machine and of a file server may differ.
SKEW_S = 60.0


@dataclass(frozen=True)
class Finding:
    """Result of one check; `remedy` is the advice for a warning or a failure."""

    name: str
    status: Status
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        """Return one line: status, name, finding, and for warnings and failures the remedy."""
        remedy = f"; {self.remedy}" if self.remedy and self.status in ("warn", "FAIL") else ""
        return f"{self.status:4}  {self.name}: {self.text}{remedy}".replace("\n", " ").rstrip()


# ---- data ------------------------------------------------------------------------------------------


def probe_raw(name: str, dataset: DatasetSettings, results: Path) -> Finding | None:
    """Check a dataset's raw files, if they are still needed or watched for changes; return None without a problem."""
    manifest, kind = Path(Results(results).manifest(name)), parts.kind_of(dataset)
    made, settings = manifest.is_file(), dataset.model_dump(mode="json")
    read_once, watched = made and kind.acquirer(dataset) is not None, type(kind).look is not DatasetKind.look
    try:
        if (read_once and not watched) or not (trouble := _trouble(dataset)):
            return None
        origin = Manifest.read(manifest).provenance if made else {}
    except UserError as error:  # the settings do not yield file names, or the manifest is damaged
        return Finding(f"data {name}", "FAIL", str(error))
    path, problem = trouble
    if (
        origin.get("settings", {}).get("source") == settings["source"]
        if read_once
        else path in origin.get("raws", {}) and not kind.prepared(dataset)
    ):
        return Finding(f"data {name}", "warn", f"{path}: {problem}; using the dataset that was made from it")
    keys = [key for key, value in flat(settings).items() if "kind" not in key and Path(path).name in str(value)]
    where = f"datasets.{name}.{keys[0]}" if keys else f"the path in `parts` of the dataset kind {dataset.kind}"
    return Finding(f"data {name}", "FAIL", f"{path}: {problem}", f"put the file there, or correct {where}")


def _trouble(dataset: DatasetSettings) -> tuple[str, str] | None:
    """Return the first local raw file that cannot be read, and the problem; None if all files can be read."""
    kind = parts.kind_of(dataset)
    files = kind.prepared_files(dataset) if kind.prepared(dataset) else kind.origins(dataset)
    for raw in parts.raws(dataset).values():
        if not parts.acquired(dataset, raw) and os.access(raw.origin, os.F_OK) and Path(raw.origin).is_dir():
            return raw.origin, "a folder; expected a file. Name the files in the folder"
    for file, path in [(file, Path(file)) for file in files if "://" not in file]:
        if not os.access(path, os.F_OK):
            allowed = os.access(path.parent, os.X_OK)
            return file, f"no such file or folder{'' if allowed else ', or no permission to look for it'}"
        if not os.access(path, os.R_OK) or (path.is_file() and path.stat().st_size == 0):
            return file, "empty, or no permission to read it"
    return None


# ---- disks -----------------------------------------------------------------------------------------


def probe_space(folder: Path) -> Finding:
    """Check the free disk space for a folder, which may not exist yet."""
    folder = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())
    usage = shutil.disk_usage(folder)
    little = usage.free < WARN_FREE_BYTES or usage.free < usage.total / 10
    status: Status = "FAIL" if usage.free < FAIL_FREE_BYTES else "warn" if little else "ok"
    text = f"{size(usage.free, ' ')} of {size(usage.total, ' ')} free at {folder}"
    return Finding("space", status, text, "free some space, or set `results` to a folder on a larger disk")


def probe_clock(inputs: Iterable[str]) -> list[Finding]:
    """Refuse input files and folders that were written in the future.

    Snakemake would delete the outputs of a job with such an input, because the outputs are older than the input. For
    Snakemake, a folder is as old as its file `.snakemake_timestamp`.
    """
    late = {
        path: ahead
        for path in map(Path, set(inputs))
        for file in (path, path / ".snakemake_timestamp")
        if file.exists() and (ahead := file.stat().st_mtime - time.time()) > SKEW_S
    }
    if not late:
        return []
    latest, folders = max(late, key=late.__getitem__), {str(path if path.is_dir() else path.parent) for path in late}
    remedy = f"correct the clock, then run: find {shlex.join(sorted(folders))} -newermt now -exec touch {{}} +"
    return [Finding("clock", "FAIL", f"{latest}: written {duration(late[latest])} in the future", remedy)]
