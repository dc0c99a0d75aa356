"""Write requirements-cpu.txt and requirements-gpu.txt: the packages of requirements.lock for each image, with hashes.

`make lock` runs this script after it has written requirements.lock. Nothing is resolved again: the lock lists which
packages require each package, so packages that only development needs are left out. PyTorch and its CUDA packages are
not in these files; see the Dockerfile.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import canonicalize_name, parse_wheel_filename

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
#: Packages that are not locked. The index (cpu) or the base image (gpu) decides on the build of PyTorch and its Triton.
#: For gpu also numpy, since packages of the base image are compiled against its version.
APART = {"cpu": {"torch", "triton"}, "gpu": {"torch", "triton", "numpy"}}
EXTRAS = {"cpu": ["grib"], "gpu": ["dali", "grib"]}
PYTHONS = ("cp311", "cp312")
PLATFORMS = re.compile(r"any|manylinux.*_(x86_64|aarch64)")


def locked() -> dict[str, tuple[str, list[str]]]:
    """Return version and requiring packages of each package in requirements.lock."""
    entries = re.findall(r"^(\S+)==(\S+)  # via (.+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    return {canonicalize_name(name): (version, via.split(", ")) for name, version, via in entries}


def needed(lock: dict[str, tuple[str, list[str]]], extras: list[str]) -> set[str]:
    """Return the packages that dlscale with `extras` needs, directly or indirectly."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    found: set[str] = set()
    new: set[str] = {canonicalize_name(Requirement(line).name) for line in asked}
    while new:
        found |= new
        new = {name for name, (_, via) in lock.items() if name not in found and found & set(via)}
    return found


def usable(tag: Tag) -> bool:
    """Return whether an image can use a wheel with this tag."""
    compiled = tag.interpreter in PYTHONS or tag.abi == "abi3"
    return bool(PLATFORMS.fullmatch(tag.platform)) and (compiled or tag.interpreter == "py3")


def hashes(index: str, name: str, version: str) -> list[str]:
    """Return the SHA-256 of all usable wheels of one version, or else of its source distribution."""
    with urllib.request.urlopen(f"{index.rstrip('/')}/{name}/", timeout=60) as page:
        links = re.findall(r'/([^/"#]+)#sha256=([0-9a-f]{64})"', page.read().decode())
    wheels, sources = set(), set()
    for file, digest in links:
        if file.endswith(f"-{version}.tar.gz"):
            sources.add(digest)
        elif file.endswith(".whl") and f"-{version}-" in file and any(map(usable, parse_wheel_filename(file)[3])):
            wheels.add(digest)
    if not wheels | sources:
        raise SystemExit(f"{index} has no file of {name} {version}")
    return sorted(wheels or sources)


def main() -> None:
    """Write both requirements files."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    index = asked.stdout.strip() or "https://pypi.org/simple"
    lock = locked()
    for target, extras in EXTRAS.items():
        names = sorted(needed(lock, extras) - APART[target])
        with ThreadPoolExecutor(8) as pool:
            digests = list(pool.map(lambda name: hashes(index, name, lock[name][0]), names))
        apart = ", ".join(sorted(APART[target]))
        lines = [f"# Written by `make lock` from requirements.lock: packages of the image {target} without {apart}."]
        for name, found in zip(names, digests, strict=True):
            entry = [f"{name}=={lock[name][0]}", *(f"--hash=sha256:{digest}" for digest in found)]
            lines.append(" \\\n    ".join(entry))
        (FOLDER / f"requirements-{target}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
