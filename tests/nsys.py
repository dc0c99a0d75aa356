"""Nsight Systems' command line tool for tests; without the tool, tests that need it are skipped.

The tool is searched in $DLSCALE_NSYS_FOLDER and PATH. With DLSCALE_NSYS_TESTS=1, Debian's packages of the tool
(non-free, 630 MB) are unpacked into this folder (default: a folder in /var/tmp), but not installed. The tool needs no
GPU.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

FOLDER = Path(os.environ.get("DLSCALE_NSYS_FOLDER") or "/var/tmp/dlscale-nsys")
PACKAGES = ("nsight-systems", "nsight-systems-target", "libssh-4")


def find() -> Path | None:
    """Return the path of the tool, or None if it is missing."""
    known = (FOLDER / place for place in ("usr/bin/nsys", "root/usr/bin/nsys"))
    on_path = shutil.which("nsys")
    return next((path for path in known if path.exists()), Path(on_path) if on_path else None)


def unpack(folder: Path) -> None:
    """Unpack the packages into a folder; apt uses a copy of the system's sources with the component non-free."""
    work = folder / "apt"
    shutil.rmtree(work, ignore_errors=True)
    for name in ("sources", "lists/partial", "packages"):
        (work / name).mkdir(parents=True)
    own = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    for file in [path for path in own if path.is_file() and path.suffix in (".list", ".sources")]:
        text = re.sub(r"^Components:.*", "Components: main non-free", file.read_text(), flags=re.MULTILINE)
        text = re.sub(r"^(deb .*? )main\b.*", r"\1main non-free", text, flags=re.MULTILINE)
        (work / "sources" / file.name).write_text(text)
    state = {"Etc::sourcelist": "/dev/null", "Etc::sourceparts": work / "sources", "State::lists": work / "lists"}
    apt = ["apt-get", "-qq", *(word for key, value in state.items() for word in ("-o", f"Dir::{key}={value}"))]
    subprocess.run([*apt, "update"], check=True, capture_output=True, text=True)
    # Download as root, because apt's own user may not write to the folder.
    words = [*apt, "-o", "APT::Sandbox::User=root", "download", *PACKAGES]
    subprocess.run(words, check=True, capture_output=True, text=True, cwd=work / "packages")
    for package in (work / "packages").glob("*.deb"):
        subprocess.run(["dpkg", "--extract", package, folder], check=True)
    shutil.rmtree(work)
    # nsys searches its own folder for the tools that make reports.
    [target] = folder.glob("usr/lib/*-linux-gnu/nsight-systems")
    [host] = folder.glob("usr/lib/nsight-systems/host-*")
    if not (target / host.name).exists():
        (target / host.name).symlink_to(Path("../../nsight-systems") / host.name)


def tidy() -> None:
    """Remove the shared memory of a killed nsys, because a later nsys would wait for it forever."""
    running = [process.info for process in psutil.process_iter(["name", "status"])]
    if not any("nsys" in (each["name"] or "") and each["status"] != psutil.STATUS_ZOMBIE for each in running):
        for left in [*Path("/dev/shm").glob("NSys-*"), *Path("/dev/shm").glob("quadd-*")]:
            left.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def real_nsys() -> Path:
    """Return the path of the tool; skip the test if the tool is missing."""
    if os.environ.get("DLSCALE_NSYS_TESTS") == "1" and find() is None:
        if not shutil.which("apt-get"):
            pytest.skip("Nsight Systems is missing, and so is apt-get, which could fetch it")
        FOLDER.mkdir(parents=True, exist_ok=True)
        # only one process of a test session unpacks at a time
        with FOLDER.with_name(f"{FOLDER.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if find() is None:
                try:
                    unpack(FOLDER)
                except subprocess.CalledProcessError as error:
                    pytest.skip(f"Nsight Systems cannot be fetched here: {error.stderr or error}")
    tidy()
    if (tool := find()) is None:
        pytest.skip("Nsight Systems is missing; DLSCALE_NSYS_TESTS=1 fetches it, on Debian")
    return tool
