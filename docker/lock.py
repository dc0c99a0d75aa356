"""Write docker/requirements-*.txt: the packages of requirements.lock that an image needs, with hashes.

`make lock` calls this script after it has written requirements.lock and a second lock with DALI for CUDA 13. For each
package, the locks name the packages that require it, so that this script can leave out packages for development.
PyTorch and its CUDA packages are not in the written files, because the index in the Dockerfile selects their build.
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
#: Packages that are not locked, because the index selects PyTorch's build and the matching Triton.
UNLOCKED = {"torch", "triton"}
#: Optional dependencies of each image.
EXTRAS = {"cpu": ["grib"], "gpu-cuda12": ["dali", "grib"], "gpu-cuda13": ["dali-cuda13", "grib"]}
#: Packages that only a CUDA build of PyTorch requires.
CUDA = re.compile(r"nvidia-(cu|nccl|nvjitlink|nvshmem|nvtx)|cuda-")
PYTHONS = ("cp311", "cp312")
PLATFORMS = re.compile(r"any|manylinux.*_(x86_64|aarch64)")


def locked(path: Path) -> dict[str, tuple[str, list[str]]]:
    """Return package name → (version, names of the packages that require the package), from a lock."""
    entries = re.findall(r"^(\S+)==(\S+) +# via (.+)$", path.read_text(), re.MULTILINE)
    return {canonicalize_name(name): (version, via.split(", ")) for name, version, via in entries}


def needed(lock: dict[str, tuple[str, list[str]]], extras: list[str]) -> set[str]:
    """Return the packages that dlscale with `extras` needs, directly or through other packages."""
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
    """Return the SHA-256 of the wheels of one version that an image can use.

    Without such a wheel, return the SHA-256 of the version's source distribution.
    """
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
    """Write the file of each image."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    index = asked.stdout.strip() or "https://pypi.org/simple"
    lock, cuda13 = locked(ROOT / "requirements.lock"), locked(Path(sys.argv[1]))
    for target, extras in EXTRAS.items():
        known = {**lock, **cuda13} if target == "gpu-cuda13" else lock
        names = [name for name in sorted(needed(known, extras) - UNLOCKED) if not CUDA.match(name)]
        versions = [known[name][0] for name in names]
        with ThreadPoolExecutor(8) as pool:
            digests = list(pool.map(hashes, [index] * len(names), names, versions))
        lines = [f"# Written by `make lock`: the packages of the image {target}, except PyTorch and its CUDA packages."]
        for name, version, found in zip(names, versions, digests, strict=True):
            entry = [f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in found)]
            lines.append(" \\\n    ".join(entry))
        (FOLDER / f"requirements-{target}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
