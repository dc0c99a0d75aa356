"""Prepare a release: write the version into all files, check files and distributions, print the notes.

python .ci/release.py version             write pyproject.toml's version into all other files that have it
python .ci/release.py check [--tag TAG]   compare these files, the changelog, dist/ and the tag with this version
python .ci/release.py notes               print the changelog's section of this version
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
#: Files that repeat the version, with a pattern of three groups: text before it, the version, text after it.
PLACES = {
    "CITATION.cff": r"(?m)(^version: )(.*)($)",
    "Snakefile": r"(dlscale:cpu-)(.*?)(\")",
    "docker/Dockerfile": r"(?m)(^ARG VERSION=)(.*)($)",
    "profiles/perlmutter/site.yaml": r"(?m)(^image: .*:gpu-)(.*)($)",
    "profiles/perlmutter/README.md": r"(`image: .*:gpu-)(.*?)(`)",
}
#: Files in git that the source distribution may lack.
OURS = re.compile(r"\.(ci|github)/|\.[^/]*$")


def write() -> None:
    """Write the version into all files of `PLACES`."""
    for name, pattern in PLACES.items():
        file = ROOT / name
        file.write_text(re.sub(pattern, rf"\g<1>{VERSION}\g<3>", file.read_text()))


def section() -> tuple[str, str]:
    """Return the date of this version in the changelog, and its text."""
    text = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(rf"(?ms)^## \[{re.escape(VERSION)}\] - (\S+)\n(.*?)(?=^## \[|\Z)", text)
    return (found[1], found[2].strip()) if found else ("", "")


def wrong(tag: str | None) -> Iterator[str]:
    """Yield one line per error in the version, the changelog or the tag."""
    for name, pattern in PLACES.items():
        there = [found[2] for found in re.finditer(pattern, (ROOT / name).read_text())]
        if set(there) != {VERSION}:
            yield f"{name}: version {', '.join(there) or 'missing'}, expected {VERSION} (pyproject.toml): make version"
    date, text = section()
    if not text:
        yield f"CHANGELOG.md: section [{VERSION}] is missing or empty"
    if tag and tag != f"v{VERSION}":
        yield f"tag {tag}: expected v{VERSION}"
    if tag and not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        yield f"CHANGELOG.md: [{VERSION}] has the date «{date}»: expected the day of the release, such as 2026-01-31"


def incomplete() -> Iterator[str]:
    """Yield the files that the wheel or the source distribution in dist/ lacks."""
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    package, workflow = "workflow_scripts/", re.compile(r"Snakefile|config\.yaml|(rules|profiles/\w+)/")
    code = {name.removeprefix(package) for name in git if name.startswith(package) and not (ROOT / name).is_symlink()}
    code |= {f"dlscale/workflow/{name}" for name in git if workflow.match(name)}
    for file in (ROOT / "dist").glob(f"dlscale-{VERSION}*.whl"):
        with zipfile.ZipFile(file) as wheel:
            yield from (f"{file.name}: {name} is missing" for name in sorted(code - set(wheel.namelist())))
    for file in (ROOT / "dist").glob(f"dlscale-{VERSION}.tar.gz"):
        with tarfile.open(file) as source:
            there = {name.partition("/")[2] for name in source.getnames()}
        yield from (f"{file.name}: {name} is missing" for name in git if name not in there and not OURS.match(name))


def main() -> int:
    """Run a command of this script, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("version", "check", "notes"))
    parser.add_argument("--tag", help="tag of the release (default: none; the changelog then needs no date)")
    args = parser.parse_args()
    if args.what == "version":
        write()
    elif args.what == "notes":
        print(section()[1])
    else:
        found = [*wrong(args.tag), *incomplete()]
        print(*(found or [f"dlscale {VERSION}: files, changelog and distributions agree"]), sep="\n")
        return int(bool(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
