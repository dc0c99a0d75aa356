"""Fingerprints of the source code that each stage imports, since Snakemake does not follow imports.

A fingerprint is a parameter of a rule: if a module is edited, exactly the stages that import the module run again.
Comments, docstrings, formatting, modification times and modules in `GUARDS` do not count. Messages, descriptions of
settings and modules in `SHOWN` only count for pages, the tables of plans, and previews of datasets.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.files import write_json, write_text
from dlscale.core.stages import STAGES

ROOT = Path(__file__).resolve().parents[1]  #: Folder of the package.
WORKFLOW = ROOT / "workflow"  #: Folder with Snakefile, rules and profiles; links in a checkout.
#: Base URL of the documentation, which is not part of the package.
DOCS = "https://github.com/dlscale/dlscale/blob/main/docs/"
#: Folder of the repository; None for an installed package.
CHECKOUT = ROOT.parents[1] if (ROOT.parents[1] / "Snakefile").is_file() else None
#: Tables of source files with their digests, one table for each fingerprint that this process computed.
TABLES: dict[str, dict[str, str]] = {}

#: Modules that read, write, wait or report and thus do not affect a stage's numbers, each with a description. Their
#: code is not part of a fingerprint and their imports are not followed, except for modules in `SHOWN`.
GUARDS = {
    # settings and names: the params of a job contain the resolved values
    "dlscale.config.laws": "checks of settings that exclude each other",
    "dlscale.core.registry": "search of modules by name; a fingerprint contains the modules themselves",
    "dlscale.core.schema": "types of settings, and messages for wrong values",
    "dlscale.core.settings": "reading of settings; an invalid file raises an error",
    # files: a file is complete and unchanged, or the stage fails with a message
    "dlscale.core.files": "atomic writes of outputs",
    "dlscale.data.reads": "check of the files that a study's code reads",
    "dlscale.data.staging": "copies of data files near the processes that read them",
    # start, supervision and end of processes
    "dlscale.core.process": "rank, log, locks and last message of a process",
    "dlscale.parallel.rendezvous": "connection of processes",
    "dlscale.train.around": "checks of connections, exchanges between processes, data and memory",
    # output
    "dlscale.core.errors": "messages",
    "dlscale.core.progress": "progress of a stage",
    "dlscale.core.ranges": "names of a step's phases, for profilers and the watchdog",
    "dlscale.core.text": "format of numbers in messages",
    "dlscale.core.redact": "redaction of the secrets of programs, which affects no number",
    "dlscale.core.urls": "redaction of addresses; the params of a job contain the redacted addresses",
}

#: Modules of `GUARDS` that count for pages, tables of plans and previews, because these results contain their texts.
SHOWN = {"dlscale.core.text"}

#: Keyword arguments that only contain texts for readers, by name of the function.
WORDS = {"Field": {"description", "title"}, "Metric": {"title", "meaning"}, "LossInfo": {"title"}}

#: Functions whose arguments are messages, such as `logging.info`.
MESSAGES = {("logging", name) for name in ("debug", "info", "warning", "error", "exception")} | {("warnings", "warn")}


#: Folder to which each call of the workflow saves its tables (`save_tables`).
SOURCES = Path(".snakemake/sources")


def save_tables() -> None:
    """Write a file for each fingerprint that this process computed, with the digests of its source files."""
    for digest, table in TABLES.items():
        if not (path := SOURCES / f"{digest}.json").exists():
            write_json(path, table)


@functools.cache
def _file(module: str) -> Path | None:
    """Return the source file of a module of this package, an outside study or an installed extension.

    Return None for other modules.
    """
    # The table of stages does not count, because a job's params contain its stage's entry module and settings.
    if module in ("dlscale.core.stage", "dlscale.core.stages"):
        return None
    words = module.split(".")
    if words[0] != ROOT.name:
        return registry.source(module)
    base = ROOT.parent.joinpath(*words)
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


#: Results for each parsed source: digest with texts, digest without texts, and imports. The key is a digest of the
#: module's name, the file's name and the file's content.
_PARSED: dict[str, tuple[str, str, list[str]]] = {}


def remember(path: Path) -> None:
    """Load the cache of parsed sources from `path`, and update the file at exit.

    Parsing all sources takes seconds. An invalid or outdated cache file is ignored.
    """
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest() + json.dumps(registry.PLACES) + sys.version
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["version"] == version and len(kept["parsed"]) < 10_000:  # an entry has 0.8 kB
            _PARSED.update({key: (str(a), str(b), [*map(str, c)]) for key, (a, b, c) in kept["parsed"].items()})
    before = len(_PARSED)

    def write() -> None:
        if len(_PARSED) > before:
            with contextlib.suppress(OSError, UserError):
                write_text(path, json.dumps({"version": version, "parsed": _PARSED}))

    atexit.register(write)


@functools.cache
def _source(module: str) -> tuple[tuple[str, str], frozenset[str]]:
    """Return a module's digests (with and without texts for readers) and its imported modules.

    Modules without a source file are left out; parent packages are included.
    """
    file = _file(module)
    if file is None:
        raise UserError(f"{module}: no such module; an extension's table or a study names it")
    content = file.read_bytes()
    key = hashlib.sha256(f"{module} {file.name} ".encode() + content).hexdigest()
    if key not in _PARSED:
        _PARSED[key] = _parsed(content, file, module)
    code, unworded, imported = _PARSED[key]
    # A package's __init__ counts, because it runs when any of the package's modules is imported.
    known = {name for name in imported if _file(name)} | {module}
    known |= {name.rsplit(".", depth)[0] for name in known for depth in range(1, name.count(".") + 1)}
    return (code, unworded), frozenset(name for name in known - {module} if _file(name))


def _parsed(content: bytes, file: Path, module: str) -> tuple[str, str, list[str]]:
    try:
        tree = ast.parse(content)
    except SyntaxError as error:
        raise UserError(f"{file}:{error.lineno}: {error.msg}") from None
    imported: set[str] = set()
    for node in _run(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `level` counts packages upwards from `here`. In `from package import name`, the name may be a module.
            here = module if file.name == "__init__.py" else module.rpartition(".")[0]
            up = here.split(".")[: len(here.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*up, *([node.module] if node.module else [])])
            imported |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
            if name == ROOT.name:
                imported |= {registry.PLACES[alias.name] for alias in node.names if alias.name in registry.PLACES}
    code = hashlib.sha256(_code(tree).encode()).hexdigest()
    return code, hashlib.sha256(ast.dump(_Unworded().visit(tree)).encode()).hexdigest(), sorted(imported)


def _code(tree: ast.Module) -> str:
    """Return the code of a parsed module without docstrings, independent of Python's version."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            del node.body[0]
        for name, value in [*ast.iter_fields(node)]:
            if value == [] or isinstance(value, ast.Load) or name == "kind":  # `kind` only differs between u"…" and "…"
                delattr(node, name)
    return ast.dump(tree)


class _Unworded(ast.NodeTransformer):
    """Transformer that empties messages of errors, assertions and logs, and texts for readers (`WORDS`)."""

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return _Emptied().generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        node.msg = None
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        name = getattr(function, "id", getattr(function, "attr", ""))
        place = function.value if isinstance(function, ast.Attribute) else None
        if name.endswith(("Error", "Warning")) or (getattr(place, "id", ""), name) in MESSAGES:
            return _Emptied().generic_visit(node)
        for keyword in getattr(node, "keywords", []):
            if keyword.arg in WORDS.get(name, ()):
                _Emptied().visit(keyword)
        return node


class _Emptied(ast.NodeTransformer):
    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        return ast.Constant("")

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree except those under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield from _run(other)
        else:
            yield from _run(child)


def reachable(modules: Iterable[str], whole: bool = False) -> list[str]:
    """Return `modules` and all modules with a known source file (`_file`) that `modules` import.

    Imports inside functions count; imports for type checking or by a computed name do not. Modules in `GUARDS` are left
    out, unless `whole` is true, or the module is in `SHOWN` and a module of a page, table or preview imports it.
    """
    seen, todo = set[str](), [*modules]
    while todo:
        if (module := todo.pop()) not in seen:
            seen.add(module)
            shown = SHOWN if _is_shown(module) else set[str]()
            todo += [each for each in _source(module)[1] if whole or each not in GUARDS or each in shown]
    return sorted(seen)


def _is_shown(module: str) -> bool:
    return module.startswith("dlscale.report.") or module.endswith(".preview")


@functools.cache
def _digests(modules: tuple[str, ...]) -> dict[str, str]:
    unworded = not any(map(_is_shown, modules))
    return {module: _source(module)[0][unworded] for module in reachable(modules)}


def fingerprint(modules: Iterable[str], files: Iterable[Path] = ()) -> str:
    """Return the SHA-256 (64 hexadecimal digits) of `files`, `modules` and all modules that `reachable` finds.

    `files` are package data of the stage, such as the template of a page.
    """
    digests = _digests(tuple(sorted(modules)))
    digest = hashlib.sha256(json.dumps(digests, sort_keys=True).encode())
    table = {_path(module): code for module, code in digests.items()}
    for file in sorted(files):
        table[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.name} {table[file.name]}\n".encode())
    TABLES[digest.hexdigest()] = table
    return digest.hexdigest()


def _path(module: str) -> str:
    """Return the path of a module's file; a path inside the package is relative to the package."""
    file = _file(module)
    return str(file.relative_to(ROOT) if file and file.is_relative_to(ROOT) else file)


def run_modules(stage: str, study: str, *loaders: str) -> list[str]:
    """Return the modules that decide a stage's results for a run.

    `loaders` are kinds of loaders.
    """
    samples = registry.module_of(registry.study(study).dataset, "samples")
    modules = [STAGES[stage].decides, registry.studies()[study].module, samples, *map(registry.loader, loaders)]
    return [module for module in modules if module]


def data_modules(stage: str, kind: str, maker: str | None = None) -> list[str]:
    """Return the modules that decide a stage's results for a dataset of this kind.

    For the stage `acquire`, only the module that simulates a file counts, the module with the role `maker`. `maker` is
    None for a fetched file, which does not depend on code.
    """
    roles = {"acquire": maker, "preprocess": "source", "describe": "describe", "preview": "preview"}
    role = roles.get(stage)
    modules = [None if stage == "acquire" else STAGES[stage].module, role and registry.module_of(kind, role)]
    if stage == "describe":  # the kind's class has the noun for rows, which the manifest contains
        modules.append(type(registry.kind(kind)).__module__)
    return [module for module in modules if module]
