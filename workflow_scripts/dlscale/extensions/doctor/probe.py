"""Run checks with timeouts; check datasets and quotas."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dlscale.config.dataset import DatasetSettings
from dlscale.core.errors import UserError
from dlscale.core.paths import Results
from dlscale.core.text import listed, size
from dlscale.data import parts
from dlscale.data.manifest import Manifest
from dlscale.preflight.probe import Finding, Status, probe_raw

#: Timeout of a command, s.
LIMIT = 20.0
#: Timeout of a check, which may run several commands, s.
PROBE_LIMIT = 3 * LIMIT


class AbsentError(Exception):
    """A command is not installed."""


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


def probe_data(name: str, dataset: DatasetSettings, results: Path, samples: Sequence[Any] = ()) -> Finding:
    """Check a dataset's raw files and the files made from them, and that each run finds samples in them.

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
        text = f"{changed[0]}: its size differs from the manifest ({len(changed)} of {len(files)} files differ)"
        own = changed[0].resolve().is_relative_to(manifest.parent.resolve())
        remedy = (
            f"delete {listed([*map(str, changed)])}, and run the workflow again"
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
    return Finding("quota", status, text, "remove files from the full file system")
