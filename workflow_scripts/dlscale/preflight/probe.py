"""Checks that query commands and file systems: shared code, and the checks of datasets and disks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dlscale.config.dataset import DatasetSettings
from dlscale.core.errors import UserError
from dlscale.core.paths import Results
from dlscale.core.settings import read_yaml
from dlscale.core.text import size
from dlscale.data import parts
from dlscale.data.kind import DatasetKind
from dlscale.data.manifest import Manifest

Status = Literal["ok", "warn", "FAIL", "skip"]

#: Timeout of a command, s.
LIMIT = 20.0
#: Timeout of a check, which may run several commands, s.
PROBE_LIMIT = 3 * LIMIT
#: Free bytes below which a check fails, and free bytes below which the check warns.
FAIL_FREE_BYTES, WARN_FREE_BYTES = 0.5e9, 20e9


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


class AbsentError(Exception):
    """A command is not installed, so its check is skipped."""


class FailedError(UserError):
    """A command failed or timed out."""


#: Name and function of a check.
Probe = tuple[str, Callable[[], "Finding | list[Finding]"]]


def _started(probe: Callable[[], Finding | list[Finding]]) -> Future[Finding | list[Finding]]:
    """Run a check in a daemon thread, so that a hanging file system cannot keep this process alive."""
    future: Future[Finding | list[Finding]] = Future()

    def run() -> None:
        try:
            future.set_result(probe())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def run_probes(probes: list[Probe]) -> list[Finding]:
    """Run all checks at once and return their findings in the same order; never raise or hang."""
    answers = [(name, _started(probe)) for name, probe in probes]
    end = time.monotonic() + PROBE_LIMIT
    findings = list[Finding]()
    for name, answer in answers:
        try:
            found = answer.result(max(end - time.monotonic(), 0))
        except AbsentError as absent:
            found = Finding(name, "skip", f"{absent}: no such command here")
        except Exception as error:
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            why = why if answer.done() else f"no answer within {PROBE_LIMIT:.0f} s; a file system may hang"
            found = Finding(name, "warn", f"cannot be checked: {why}", "check it by hand")
        findings += found if isinstance(found, list) else [found]
    return findings


def command_output(words: list[str], limit: float = LIMIT) -> str:
    """Return the output of a command; `limit` is the timeout, s.

    Raise `AbsentError` if the command is not installed, and `FailedError` if it fails or times out.
    """
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=limit, check=False
        )
    except (FileNotFoundError, PermissionError):
        raise AbsentError(words[0]) from None
    except subprocess.TimeoutExpired:
        raise FailedError(f"{words[0]}: no answer within {limit:.0f} s") from None
    if done.returncode:
        printed = (done.stderr or done.stdout).strip().splitlines()
        why = printed[-1].removeprefix(f"{words[0]}: ") if printed else done.returncode
        raise FailedError(f"{words[0]}: {why}")
    return done.stdout


# ---- data ------------------------------------------------------------------------------------------


def probe_data(name: str, dataset: DatasetSettings, results: Path, samples: Sequence[Any] = ()) -> Finding:
    """Check the raw files and the made files of a dataset, and that the files contain samples for each run.

    `samples` has the settings `samples` of each run that reads the dataset.
    """
    manifest, kind = Path(Results(results).manifest(name)), parts.kind_of(dataset)

    def found(status: Status, text: str, remedy: str = "") -> Finding:
        return Finding(f"data {name}", status, text, remedy)

    if trouble := probe_raw(name, dataset, results):
        return trouble
    if not manifest.exists():
        return found("ok", "will be made from its files" if kind.origins(dataset) else "will be simulated")
    try:
        described = Manifest.read(manifest)
    except UserError as error:
        return found("FAIL", str(error))
    files = [(described.path(file), file.bytes) for split in described.splits.values() for file in split]
    # A missing file is not an error, because the workflow makes the file again.
    changed = [path for path, bytes_ in files if path.is_file() and path.stat().st_size != bytes_]
    if changed:
        text = f"{changed[0]}: has another size than in the manifest ({len(changed)} of {len(files)} files)"
        own = changed[0].resolve().is_relative_to(manifest.parent.resolve())
        remedy = (
            f"delete {changed[0]} and run the workflow again"
            if own
            else "nothing to do: the workflow describes the files again"
        )
        return found("FAIL" if own else "warn", text, remedy)
    for split in ("train", "valid"):
        rows = [file.rows for file in described.splits[split]]
        if any(kind.available(each, rows) == 0 for each in samples):
            text = f"{split}: no sample fits a run's `samples` settings; the files have {', '.join(map(str, rows))} "
            return found("FAIL", text + kind.rows, "change `samples` in the plan, or add data to the dataset")
    return found("ok", f"{len(files)} files, {size(sum(bytes_ for _, bytes_ in files), ' ')}, as in the manifest")


def probe_raw(name: str, dataset: DatasetSettings, results: Path) -> Finding | None:
    """Check the raw files that a dataset still needs or watches for changes; None if no problem was found."""
    paths, kind = Results(results), parts.kind_of(dataset)
    made, recorded = Path(paths.manifest(name)).exists(), Path(paths.dataset_settings(name))
    read_once = made and kind.acquirer(dataset) is not None
    watched = type(kind).look is not DatasetKind.look
    try:
        if (read_once and not watched) or not (trouble := _trouble(dataset)):
            return None
    except UserError as error:  # the settings do not yield file names
        return Finding(f"data {name}", "FAIL", str(error))
    source = read_yaml(recorded).get("source") if made and recorded.exists() else None
    of_these = source == dataset.model_dump(mode="json")["source"] and not kind.prepared(dataset)
    if read_once or (made and of_these):
        text = f"{trouble}; the dataset made from it is kept"
        return Finding(f"data {name}", "warn", text, "put the file back, unless you removed it on purpose")
    return Finding(f"data {name}", "FAIL", trouble, f"put the file there, or correct datasets.{name}.source")


def _trouble(dataset: DatasetSettings) -> str | None:
    """Return a message on the first local raw file that cannot be read; None if all files can be read."""
    kind = parts.kind_of(dataset)
    files = kind.prepared_files(dataset) if kind.prepared(dataset) else kind.origins(dataset)
    for raw in parts.raws(dataset).values():
        if not parts.acquired(dataset, raw) and os.access(raw.origin, os.F_OK) and Path(raw.origin).is_dir():
            return f"{raw.origin}: a folder; expected a file, name the files in it"
    for path in [Path(file) for file in files if "://" not in file]:
        if not os.access(path, os.F_OK):
            allowed = os.access(path.parent, os.X_OK)
            return f"{path}: no such file or folder{'' if allowed else ', or no permission to look for it'}"
        if not os.access(path, os.R_OK) or (path.is_file() and path.stat().st_size == 0):
            return f"{path}: empty, or no permission to read it"
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


def probe_quota() -> Finding:
    """Check the used fractions of the user's quotas, from the table that NERSC's `showquota` prints.

    The table has a row for each file system; cells with `%` are used fractions.
    """
    used = {}
    for line in command_output(["showquota"]).splitlines():
        name, *cells = line.strip(" |").split("|")
        if shares := [float(share) for cell in cells for share in re.findall(r"([\d.]+) ?%", cell)]:
            used[name.strip()] = max(shares)
    full = max(used.values(), default=0.0)
    status: Status = "FAIL" if full >= 100 else "warn" if full >= 90 else "ok"
    text = ", ".join(f"{name} {share:.0f} %" for name, share in used.items())
    return Finding("quota", status, text, "remove files there")
