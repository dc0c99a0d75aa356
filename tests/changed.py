"""Which tests a change reaches: those of test files that import, themselves or through others, a file that changed.

What is reached by a name only, as a stage is by the command line, is not seen: `make test` runs all.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from pathlib import Path

from dlscale.core import fingerprint

ROOT = Path(__file__).resolve().parents[1]
#: What every test stands on: a change of it is for `make test`.
COMMON = {ROOT / "tests/conftest.py"}
#: The table of stages: the fingerprint of sources, by which modules are found here, leaves it out.
STAGES = ROOT / "workflow_scripts/dlscale/core/stages.py"


def files(since: str) -> set[Path]:
    """Return what differs from a commit in the working tree, what git does not know yet included."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    names = [*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")]
    return {ROOT / name for name in names}


@functools.cache
def reached(test: Path) -> frozenset[Path]:
    """Return the files of a test file: itself, what it imports of the tests, and what these reach of the package."""
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
    package = {fingerprint._file(name) for name in fingerprint.reachable(modules, whole=True)} - {None}
    stages = (
        {STAGES}
        if any("dlscale.core.stages" in _imported(file) for file in found | package if file.suffix == ".py")
        else set[Path]()
    )
    return frozenset({*found, *package, *stages})


@functools.cache
def _imported(file: Path) -> set[str]:
    """Return the names that a file imports, modules or what is in them."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names
