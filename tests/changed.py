"""Select the tests that a change affects: test files that import a changed file, directly or indirectly.

Dependencies that are not imports are missed, for example a stage that a test starts through the command line. `make
test` runs all tests.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import subprocess
from pathlib import Path

from dlscale.core import fingerprint

ROOT = Path(__file__).resolve().parents[1]
#: Files on which all tests depend, left out of the selection. After a change of these files, run `make test`.
COMMON = {ROOT / "tests/conftest.py"}
#: Path of the table of stages. `fingerprint.reachable` leaves the table out, so `reached` adds it.
STAGES = ROOT / "workflow_scripts/dlscale/core/stages.py"


def files(since: str) -> set[Path]:
    """Return the files that differ between a commit and the working tree, including untracked files."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    names = [*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")]
    return {ROOT / name for name in names}


def commit(*paths: str) -> str:
    """Return the commit; with uncommitted changes of the paths, also a digest of the changes."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout

    changes = git("diff", "HEAD", "--", *paths)
    return git("rev-parse", "--short=12", "HEAD").decode().strip() + (
        f"+{hashlib.sha256(changes).hexdigest()[:6]}" if changes else ""
    )


@functools.cache
def reached(test: Path) -> frozenset[Path]:
    """Return the files on which a test file depends: itself, and the modules of tests and dlscale that it imports.

    Tests in tests/workflow also depend on the rules, the profiles and the configuration.
    """
    found, modules, todo = {test}, set[str](), [test]
    while todo:
        for name in _imported(todo.pop()):
            if name.startswith("dlscale") and fingerprint._file(name):
                modules.add(name)
            file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
            if name.startswith("tests.") and file.is_file() and file not in found | COMMON:
                found.add(file)
                todo.append(file)
    if test.parent.name == "workflow":
        found |= {ROOT / "Snakefile", ROOT / "config.yaml", *ROOT.glob("rules/*"), *ROOT.glob("profiles/*/*")}
    package = {file for file in map(fingerprint._file, fingerprint.reachable(modules, whole=True)) if file}
    stages = (
        {STAGES}
        if any("dlscale.core.stages" in _imported(file) for file in found | package if file.suffix == ".py")
        else set[Path]()
    )
    return frozenset({*found, *package, *stages})


@functools.cache
def _imported(file: Path) -> set[str]:
    """Return the names that a file imports: modules, and names in modules."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names
