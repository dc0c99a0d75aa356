"""SHA-256 of exactly the source code that a stage can reach.

Snakemake does not look into imported modules; this digest, as a rule's parameter, is how an edited
module makes its stages run again, and only them. What the parsed code is counts: comments, docstrings and formatting
do not, nor do modification times, and an edit that is taken back un-triggers.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.stages import STAGES

ROOT = Path(__file__).resolve().parents[1]  # the package's folder
#: What this process's fingerprints are of: by fingerprint, the digest of each source file.
TABLES: dict[str, dict[str, str]] = {}


@functools.cache
def _file(module: str) -> Path | None:
    """Return the source file of a module of this package, or of a study from outside; None for anything else."""
    if module == "dlscale.core.stages":  # what it says of a stage is among the params of its jobs: entry, settings
        return None
    words = module.split(".")
    if words[0] != ROOT.name:
        return registry.source(module)
    base = ROOT.parent.joinpath(*words)
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


@functools.cache
def _source(module: str) -> tuple[str, frozenset[str]]:
    """Return a module's digest and the modules that it imports, anywhere in its text: those that have a file here."""
    file = _file(module)
    assert file is not None, module
    text = file.read_bytes()
    imported: set[str] = set()
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{file}:{error.lineno}: {error.msg}") from None
    for node in _run(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # From here, so many packages up; `from package import name`: the name may be a module itself.
            here = module if file.name == "__init__.py" else module.rpartition(".")[0]
            up = here.split(".")[: len(here.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*up, *([node.module] if node.module else [])])
            imported |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    # A package's __init__ runs when any of its modules is imported.
    parents = {name.rsplit(".", depth)[0] for name in {*imported, module} for depth in range(1, name.count(".") + 1)}
    code = hashlib.sha256(repr(_code(tree)).encode()).hexdigest()
    return code, frozenset(name for name in imported | parents if _file(name)) - {module}


def _code(node: Any) -> Any:
    """Return a tree as nested tuples, without places, docstrings, and empty fields, which differ by Python."""
    if isinstance(node, list):
        return [_code(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Constant):
        del fields["kind"]  # u"…" is "…"
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        match fields["body"]:
            case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                fields["body"] = rest
    return type(node).__name__, [(name, _code(value)) for name, value in fields.items() if value not in (None, [])]


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree's nodes, but for what stands under `if TYPE_CHECKING`: that is never run."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield from _run(other)
        else:
            yield from _run(child)


def reachable(modules: Iterable[str]) -> list[str]:
    """Return the modules of dlscale, and of studies outside, that `modules` import; themselves included.

    Imports inside functions count; those for types alone do not, nor do imports by computed name, which `run_modules`
    and `data_modules` list.
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

    `files` are what the stage reads from the package beside its modules, such as a page's template.
    """
    modules = tuple(sorted(modules))
    digest = hashlib.sha256(_digest(modules).encode())
    table = {_path(module): _source(module)[0] for module in reachable(modules)}
    for file in sorted(files):
        table[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.name} {table[file.name]}\n".encode())
    TABLES[digest.hexdigest()] = table
    return digest.hexdigest()


def _path(module: str) -> str:
    """Return the name of a module's file: within the package, or as a whole of a study from outside."""
    file = _file(module)
    return str(file.relative_to(ROOT) if file and file.is_relative_to(ROOT) else file)


def run_modules(stage: str, study: str, *loaders: str) -> list[str]:
    """Return the modules from which a stage reaches all the code that decides its results for a run.

    `study` is the name of the run's study, `loaders` are the kinds of loaders that the stage may use.
    """
    kind = registry.study(study).dataset
    modules = [STAGES[stage].module, registry.studies()[study].module, registry.module_of(kind, "samples")]
    modules += map(registry.loader, loaders)
    return [module for module in modules if module]


def data_modules(stage: str, kind: str, maker: str | None = None) -> list[str]:
    """Return the modules from which a stage reaches all the code that decides its results for a dataset of this kind.

    Stage `acquire` depends on what makes the file (`maker`) alone: a fetched file does not change with the code
    that fetches it, and is not fetched again when that code is edited.
    """
    roles = {"acquire": maker, "preprocess": "source", "describe": "describe", "preview": "preview"}
    role = roles.get(stage)
    modules = [None if stage == "acquire" else STAGES[stage].module, role and registry.module_of(kind, role)]
    if stage == "describe" and kind in registry.shipped_kinds():  # what its rows are called
        modules.append(f"{registry.shipped_kinds()[kind]}.kind")
    return [module for module in modules if module]
