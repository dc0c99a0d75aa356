"""The files of datasets, and the servers that they are fetched from."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Sequence
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
from dlscale.preflight.probe import Finding, Status

#: What is said of raw files that are gone, and were read.
STAYS = "what was made of it stays as it is"


def manifest_of(results: Path, name: str) -> Path:
    """Return the file that describes a dataset, and is there once it is made."""
    return results / "data" / name / "manifest.json"


def local_files(dataset: DatasetSettings) -> list[str]:
    """Return the raw files that are read where they lie, and folders of them."""
    return [origin for origin in parts.kind_of(dataset).origins(dataset) if "://" not in origin]


def probe_data(name: str, dataset: DatasetSettings, results: Path, samples: Sequence[Any] = ()) -> Finding:
    """Judge a dataset: the files it is made from, those that were made of them, and what runs' `samples` find there."""
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
        if changed[0].resolve().is_relative_to(manifest.parent.resolve()):
            return found("FAIL", text, f"delete {changed[0]} and run the workflow again")
        return found("warn", text, "if that is meant, go on: it is described again")
    if gone:
        text = f"{gone[0]}: gone, perhaps removed from scratch ({len(gone)} of {len(files)} files)"
        return found("warn", text, "it will be made again, which takes its time")
    for split in ("train", "valid"):
        rows = [file.rows for file in described.splits[split]]
        if any(kind.available(each, rows) == 0 for each in samples):
            text = (
                f"{split}: no sample as a run's `samples` asks for, in files of {', '.join(map(str, rows))} {kind.rows}"
            )
            return found("FAIL", text, "change samples of the plan, or give the dataset more")
    total = size(sum(bytes_ for _, bytes_ in files), " ")
    return found("ok", f"{len(files)} files, {total}, of the size that was described")


def probe_raw(name: str, dataset: DatasetSettings, results: Path) -> Finding | None:
    """Judge the raw files that a dataset still needs: None if they are there."""
    # What raw files are made from is read once; files that are read where they lie are missed at any time.
    read_once = parts.kind_of(dataset).acquirer(dataset) is not None and manifest_of(results, name).exists()
    trouble = None if read_once else _trouble(dataset)
    if trouble and _made_of_these(name, dataset, results):
        return Finding(f"data {name}", "warn", f"{trouble}; {STAYS}", "if that is meant, go on; else put it back")
    remedy = f"put it there, or name its place in datasets.{name}.source"
    return Finding(f"data {name}", "FAIL", trouble, remedy) if trouble else None


def probe_kept(name: str, dataset: DatasetSettings, results: Path) -> Finding | None:
    """Warn where what is looked at for changes is gone: what was made of it stays as it is. None if it is there."""
    watched = type(parts.kind_of(dataset)).look is not DatasetKind.look
    trouble = _trouble(dataset) if watched else None
    if not trouble or not manifest_of(results, name).exists():
        return None
    remedy = "if that is meant, go on; elsewhere, put it back: only what is there shows changes"
    return Finding(f"data {name}", "warn", f"{trouble}; {STAYS}", remedy)


def _made_of_these(name: str, dataset: DatasetSettings, results: Path) -> bool:
    """Whether a dataset was made of the very files that it names: who needs the room may then remove them."""
    if parts.kind_of(dataset).prepared(dataset) or not manifest_of(results, name).exists():
        return False
    try:
        made = read_yaml(manifest_of(results, name).with_name("config.yaml"))
    except UserError:
        return False
    return bool(made.get("source") == dataset.model_dump(mode="json")["source"])


def _trouble(dataset: DatasetSettings) -> str | None:
    """Return what is wrong with the first local raw file that is not as it has to be."""
    kind = parts.kind_of(dataset)
    files = kind.prepared_files(dataset) if kind.prepared(dataset) else local_files(dataset)
    for path in [Path(file) for file in files if "://" not in file]:
        if not path.is_file() and not path.is_dir():  # a pipe, say, or a link that leads nowhere
            return f"{path}: no such file or folder"
        if not os.access(path, os.R_OK) or (path.is_file() and path.stat().st_size == 0):
            return f"{path}: empty, or no permission to read it"
    return None


#: Servers of stores without a host in their name.
STORES = {"gs": "storage.googleapis.com", "s3": "s3.amazonaws.com"}


def hosts(dataset: DatasetSettings) -> list[str]:
    """Return the servers that a dataset is fetched from, each as HOST:PORT."""
    servers = dict[str, None]()
    for address in map(urlsplit, parts.kind_of(dataset).origins(dataset)):
        if address.scheme in ("http", "https", *STORES):
            default = f"{STORES.get(address.scheme, address.hostname)}:{80 if address.scheme == 'http' else 443}"
            servers[address.netloc.rpartition("@")[2] if ":" in address.netloc else default] = None
    return list(servers)


def probe_network(server: str, scheduler: Scheduler | None) -> Finding:
    """Try to reach a server; by way of a proxy only whoever fetches can tell."""
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
