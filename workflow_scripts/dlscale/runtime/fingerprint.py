"""SHA-256 of exactly the source files that a stage can reach.

Snakemake does not look into imported modules; this digest, as a rule's parameter, is how an edited
module makes its stages run again, and only them. Content counts, not modification times: an edit
that is taken back un-triggers.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the package's folder


@functools.cache
def _file(module: str) -> Path | None:
    """Return the source file of a module of this package, or None for anything else."""
    parts = module.split(".")
    if parts[0] != ROOT.name:
        return None
    base = ROOT.joinpath(*parts[1:])
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


@functools.cache
def _source(module: str) -> tuple[str, frozenset[str]]:
    """Return a module's digest and the modules of this package that it imports, anywhere in its text."""
    file = _file(module)
    assert file is not None, module
    text = file.read_bytes()
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # `from package import name`: the name may be a module itself.
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    # A package's __init__ runs when any of its modules is imported.
    parents = {name.rsplit(".", depth)[0] for name in {*found, module} for depth in range(1, name.count(".") + 1)}
    return hashlib.sha256(text).hexdigest(), frozenset(name for name in found | parents if _file(name)) - {module}


def reachable(modules: Iterable[str]) -> list[str]:
    """Return the modules of this package that `modules` import, directly or not, themselves included.

    Imports inside functions count; imports by computed name do not (`dlscale.runtime.stages` lists
    those). Relative imports are not followed: the package has none, and a test holds that.
    """
    seen: set[str] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += _source(module)[1]
    return sorted(seen)


@functools.cache
def _digest(modules: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for module in reachable(modules):
        digest.update(f"{module} {_source(module)[0]}\n".encode())
    return digest.hexdigest()


def fingerprint(modules: Iterable[str], files: Iterable[Path] = ()) -> str:
    """Return the SHA-256 (64 hexadecimal digits) of all sources that `modules` reach, and of `files`.

    Parameters
    ----------
    modules
        Module names, as `dlscale.runtime.stages.modules` gives them.
    files
        Further files that the stage reads from the package, such as a page's template.
    """
    digest = hashlib.sha256(_digest(tuple(sorted(modules))).encode())
    for file in sorted(files):
        digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
