"""The datasets: their files, and the servers that they are fetched from."""

from __future__ import annotations

import contextlib
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
    what = f"data {name}"
    manifest = manifest_of(results, name)
    if found := probe_raw(name, dataset, results):
        return found
    origins = parts.kind_of(dataset).origins(dataset)
    if not manifest.exists():
        return Finding(what, "ok", "will be made from its files" if origins else "will be simulated")
    try:
        described = Manifest.read(manifest)
    except UserError:
        return Finding(what, "FAIL", f"{manifest}: not a manifest", "delete it and run the workflow again")
    files = [(described.path(file), file.bytes) for split in described.splits.values() for file in split]
    gone = [path for path, _ in files if not path.is_file()]
    changed = [path for path, size in files if path.is_file() and path.stat().st_size != size]
    if changed:
        text = f"{changed[0]}: of another size than when it was described ({len(changed)} of {len(files)} files)"
        if changed[0].resolve().is_relative_to(manifest.parent.resolve()):
            return Finding(what, "FAIL", text, f"delete {changed[0]} and run the workflow again")
        return Finding(what, "warn", text, "if that is meant, go on: it is described again")
    if gone:
        again = "simulated" if not origins else "made" if local_files(dataset) else "fetched"
        text = f"{gone[0]}: gone, perhaps removed from scratch ({len(gone)} of {len(files)} files)"
        return Finding(what, "warn", text, f"it will be {again} again, which takes its time")
    kind = parts.kind_of(dataset)
    for split in ("train", "valid"):
        rows = [file.rows for file in described.splits[split]]
        if any(kind.available(each, rows) == 0 for each in samples):
            there = ", ".join(map(str, rows))
            text = f"{split}: no sample as a run's `samples` asks for, in files of {there} {kind.rows}"
            return Finding(what, "FAIL", text, "change samples of the plan, or give the dataset more")
    total = size(sum(bytes_ for _, bytes_ in files), " ")
    return Finding(what, "ok", f"{len(files)} files, {total}, of the size that was described")


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
    trouble = _trouble(dataset) if getattr(dataset.source, "watch", False) else None
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
        if not path.exists():
            return f"{path}: " + ("a link that leads nowhere" if path.is_symlink() else "no such file or folder")
        if not path.is_file() and not path.is_dir():
            return f"{path}: neither a file nor a folder (a pipe, a device); expected a file"
        if not os.access(path, os.R_OK):
            return f"{path}: no permission to read it"
        if path.is_file() and path.stat().st_size == 0:
            return f"{path}: empty"
    return None


#: Where stores without a host in their name are.
STORES = {"gs": "storage.googleapis.com", "s3": "s3.amazonaws.com"}
PORTS = {"http": 80}


def hosts(dataset: DatasetSettings) -> list[tuple[str, int]]:
    """Return name and port of the servers that a dataset is fetched from."""
    servers = []
    for origin in parts.kind_of(dataset).origins(dataset):
        with contextlib.suppress(ValueError):  # no address: whoever fetches it will say so
            address = urlsplit(origin)
            host = STORES.get(address.scheme) or (address.hostname if address.scheme in ("http", "https") else None)
            if host:
                servers.append((host, address.port or PORTS.get(address.scheme, 443)))
    return list(dict.fromkeys(servers))


def probe_network(host: str, port: int, scheduler: Scheduler | None) -> Finding:
    """Try to reach a server, by way of the proxy if there is one."""
    proxy = urllib.request.getproxies().get("http" if port == 80 else "https")
    via = urlsplit(proxy) if proxy and not urllib.request.proxy_bypass(host) else None
    to = (via.hostname, via.port or 80) if via and via.hostname else (host, port)
    by = f" by way of the proxy {to[0]}" if via else ""
    try:
        socket.create_connection(to, timeout=5).close()
    except OSError as error:
        elsewhere = scheduler is not None and scheduler.acquire == "job"
        remedy = "fetch where there is a network (site.scheduler.acquire), or put the files there by hand"
        status: Status = "warn" if elsewhere else "FAIL"
        return Finding(f"network {host}", status, f"port {to[1]} does not answer from here{by}: {error}", remedy)
    return Finding(f"network {host}", "ok", f"port {to[1]} answers from here{by}")
