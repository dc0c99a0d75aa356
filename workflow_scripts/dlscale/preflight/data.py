"""Checks of datasets: their files, the servers that they are fetched from, and the disks that hold them."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import re
import shutil
import socket
import time
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dlscale.config.dataset import DatasetSettings
from dlscale.config.site import Scheduler
from dlscale.core.errors import UserError
from dlscale.core.settings import read_yaml
from dlscale.core.text import size
from dlscale.data import parts
from dlscale.data.kind import DatasetKind
from dlscale.data.manifest import Manifest
from dlscale.preflight.probe import Finding, Status, said

#: Servers of stores without a host in their name.
STORES = {"gs": "storage.googleapis.com", "s3": "s3.amazonaws.com"}
#: Free bytes below which nothing can run, and below which a warning is given.
LEAST, LITTLE = 0.5e9, 20e9
#: Days before a file's removal from scratch from which on a warning is given.
PURGE_SOON = 7
#: Greatest number of files whose age is looked at.
MANY = 20_000


# ---- files -----------------------------------------------------------------------------------------


def manifest_of(results: Path, name: str) -> Path:
    """Return the manifest's path of a dataset."""
    return results / "data" / name / "manifest.json"


def local_files(dataset: DatasetSettings) -> list[str]:
    """Return the raw files, and folders of them, that are read in place."""
    return [origin for origin in parts.kind_of(dataset).origins(dataset) if "://" not in origin]


def probe_data(name: str, dataset: DatasetSettings, results: Path, samples: Sequence[Any] = ()) -> Finding:
    """Check a dataset's raw files, its own files, and that they have samples for each run's `samples`."""
    manifest, kind = manifest_of(results, name), parts.kind_of(dataset)

    def found(status: Status, text: str, remedy: str = "") -> Finding:
        return Finding(f"data {name}", status, text, remedy)

    if trouble := probe_raw(name, dataset, results):
        return trouble
    if not manifest.exists():
        return found("ok", "will be made from its files" if kind.origins(dataset) else "will be simulated")
    try:
        described = Manifest.read(manifest)
    except UserError:
        return found("FAIL", f"{manifest}: not a manifest", "delete it and run the workflow again")
    files = [(described.path(file), file.bytes) for split in described.splits.values() for file in split]
    gone = [path for path, _ in files if not path.is_file()]
    changed = [path for path, size in files if path.is_file() and path.stat().st_size != size]
    if changed:
        text = f"{changed[0]}: of another size than when it was described ({len(changed)} of {len(files)} files)"
        own = changed[0].resolve().is_relative_to(manifest.parent.resolve())
        remedy = f"delete {changed[0]} and run the workflow again" if own else "go on: it is described again"
        return found("FAIL" if own else "warn", text, remedy)
    if gone:
        return found("warn", f"{gone[0]}: gone ({len(gone)} of {len(files)} files)", "go on: it will be made again")
    for split in ("train", "valid"):
        rows = [file.rows for file in described.splits[split]]
        if any(kind.available(each, rows) == 0 for each in samples):
            text = f"{split}: no sample as a run's `samples` asks for, in files of "
            text += f"{', '.join(map(str, rows))} {kind.rows}"
            return found("FAIL", text, "change samples of the plan, or give the dataset more")
    return found("ok", f"{len(files)} files, {size(sum(bytes_ for _, bytes_ in files), ' ')}, as described")


def probe_raw(name: str, dataset: DatasetSettings, results: Path) -> Finding | None:
    """Check the raw files that a dataset still needs, or watches for changes; None if they are there."""
    made, kind = manifest_of(results, name).exists(), parts.kind_of(dataset)
    read_once = made and kind.acquirer(dataset) is not None
    watched = type(kind).look is not DatasetKind.look
    if (read_once and not watched) or not (trouble := _trouble(dataset)):
        return None
    if read_once or (made and not kind.prepared(dataset) and _made_of_these(name, dataset, results)):
        text = f"{trouble}; what was made of it stays as it is"
        return Finding(f"data {name}", "warn", text, "if that is meant, go on; else put it back")
    return Finding(f"data {name}", "FAIL", trouble, f"put it there, or name its place in datasets.{name}.source")


def _made_of_these(name: str, dataset: DatasetSettings, results: Path) -> bool:
    """Whether a dataset was made of the very files that it names."""
    try:
        made = read_yaml(manifest_of(results, name).with_name("config.yaml"))
    except UserError:
        return False
    return bool(made.get("source") == dataset.model_dump(mode="json")["source"])


def _trouble(dataset: DatasetSettings) -> str | None:
    """Return the fault of the first local raw file that has one."""
    kind = parts.kind_of(dataset)
    files = kind.prepared_files(dataset) if kind.prepared(dataset) else local_files(dataset)
    for path in [Path(file) for file in files if "://" not in file]:
        if not path.is_file() and not path.is_dir():
            return f"{path}: no such file or folder"
        if not os.access(path, os.R_OK) or (path.is_file() and path.stat().st_size == 0):
            return f"{path}: empty, or no permission to read it"
    return None


# ---- network ---------------------------------------------------------------------------------------


def hosts(dataset: DatasetSettings) -> list[str]:
    """Return the servers that a dataset is fetched from, each as HOST:PORT."""
    servers = dict[str, None]()
    for address in map(urlsplit, parts.kind_of(dataset).origins(dataset)):
        if address.scheme in ("http", "https", *STORES):
            default = f"{STORES.get(address.scheme, address.hostname)}:{80 if address.scheme == 'http' else 443}"
            servers[address.netloc.rpartition("@")[2] if ":" in address.netloc else default] = None
    return list(servers)


def probe_network(server: str, scheduler: Scheduler | None) -> Finding:
    """Try to reach a server, unless a proxy stands between."""
    host, _, port = server.rpartition(":")
    if urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return Finding("network", "skip", f"{server}: there is a proxy; the download will tell")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as error:
        status: Status = "warn" if scheduler is not None and scheduler.acquire == "job" else "FAIL"
        remedy = "fetch where there is a network (site.scheduler.acquire), or put the files there by hand"
        return Finding("network", status, f"{server} does not answer from here: {error}", remedy)
    return Finding("network", "ok", f"{server} answers from here")


# ---- disks -----------------------------------------------------------------------------------------


def probe_space(folder: Path) -> Finding:
    """Check the room where a folder is, or will be."""
    folder = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.is_dir())
    usage = shutil.disk_usage(folder)
    little = usage.free < LITTLE or usage.free < usage.total / 10
    status: Status = "FAIL" if usage.free < LEAST else "warn" if little else "ok"
    text = f"{size(usage.free, ' ')} of {size(usage.total, ' ')} free at {folder}"
    return Finding("space", status, text, "free some, or choose a larger place for `results`")


def probe_quota() -> Finding:
    """Check the user's shares in use by the table of NERSC's `showquota`: per cent in cells, a file system a row."""
    used = {}
    for line in said(["showquota"]).splitlines():
        name, *cells = line.strip(" |").split("|")
        if shares := [float(share) for cell in cells for share in re.findall(r"([\d.]+) ?%", cell)]:
            used[name.strip()] = max(shares)
    full = max(used.values(), default=0.0)
    status: Status = "FAIL" if full >= 100 else "warn" if full >= 90 else "ok"
    text = ", ".join(f"{name} {share:.0f} %" for name, share in used.items())
    return Finding("quota", status, text, "remove files there")


def probe_purge(paths: Iterable[str], days: int) -> Finding:
    """Find the file among these files and folders that was used least recently."""
    there = (path for each in map(Path, paths) for path in ([each] if each.is_file() else each.rglob("*")))
    # File systems that do not keep the time of the last reading have an old one there.
    files = ((path.stat(), path) for path in itertools.islice(there, MANY) if path.is_file())
    used = min(((max(stat.st_atime, stat.st_mtime), path) for stat, path in files), default=None)
    if used is None:
        return Finding("purge", "skip", "no data yet")
    end = used[0] + 86_400 * days
    text = f"{dt.date.fromtimestamp(end)}: {used[1]} is the first to be removed, {days} days after it was last used"
    soon = end < time.time() + 86_400 * PURGE_SOON
    return Finding("purge", "warn" if soon else "ok", text, "copy what cannot be fetched or made again to a safe place")
