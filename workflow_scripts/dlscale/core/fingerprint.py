"""SHA-256 of exactly the source code that a stage can reach.

Snakemake does not look into imported modules; this digest, as a rule's parameter, is how an edited
module makes its stages run again, and only them. What the parsed code is counts: comments, docstrings and formatting
do not, nor do modification times, and an edit that is taken back un-triggers.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.files import write_text
from dlscale.core.stages import STAGES

ROOT = Path(__file__).resolve().parents[1]  # the package's folder
#: Digest of each source file, by fingerprint of this process.
TABLES: dict[str, dict[str, str]] = {}

#: No science: modules that find what a stage is made of, read, write, wait or tell, and decide none of its numbers.
#: An import of one of these does not count, and what it imports only where that is reached otherwise; but for `SHOWN`.
GUARDS = {
    # what a stage is given, and by which names: what these come to is among its job's params
    "dlscale.config.laws": "settings that go together, or a message",
    "dlscale.core.registry": "modules by name; which are reached is what counts",
    "dlscale.core.schema": "types of settings, and what to say where they do not fit",
    "dlscale.core.settings": "settings from files, or a message",
    # files: as they were, whole, or a message
    "dlscale.core.files": "outputs that appear whole or not at all",
    "dlscale.data.verification": "whole data files, or a message",
    # processes that meet, are watched, and end
    "dlscale.core.ending": "the last word of a process",
    "dlscale.core.ranks": "which of the processes this one is",
    "dlscale.parallel.rendezvous": "processes that meet, or a message",
    "dlscale.train.around": "processes that meet, right exchanges, whole data files, enough memory; or a message",
    # what is told
    "dlscale.core.errors": "messages",
    "dlscale.core.progress": "how far a stage is",
    "dlscale.core.ranges": "names of what is at work, for profilers and the watchdog",
    "dlscale.core.text": "numbers as messages have them",
    "dlscale.core.urls": "addresses as messages have them; a job's params hold them so",
}

#: Words are a result where pages and pictures are made.
SHOWN = {"dlscale.core.text"}

#: Names of a module that count; None: all of it.
Names = frozenset[str] | None

#: Findings that are kept at most, of 0.8 kB each: those of all sources are some 240.
MOST = 10_000


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
def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except SyntaxError as error:
        raise UserError(f"{file}:{error.lineno}: {error.msg}") from None


#: Digest and imports of parsed sources, by their content.
_PARSED: dict[str, list[Any]] = {}


def remember(path: Path) -> None:
    """Take what parsing found of sources from a file of an earlier call, and bring it up to date at this one's end.

    Parsing all sources takes seconds, and few of them change between two calls. What is found goes by content; a file
    that cannot be read or written is done without.
    """
    version = _version()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["version"] == version and len(kept["parsed"]) < MOST:
            _PARSED.update(kept["parsed"])
    before = len(_PARSED)

    def write() -> None:
        if len(_PARSED) > before:
            with contextlib.suppress(OSError, UserError):
                write_text(path, json.dumps({"version": version, "parsed": _PARSED}))

    atexit.register(write)


def _version() -> str:
    """Return the digest of this module and the version of Python, which decide what parsing finds."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest() + sys.version


@functools.cache
def _source(module: str, names: Names = None) -> tuple[str, frozenset[tuple[str, Names]]]:
    """Return a module's digest, and the modules that it imports, anywhere in its text: those that have a file here.

    With each stand the names that count of it. Where only `names` count of the module itself, digest and imports are
    those of the statements that these stand on.
    """
    file = _file(module)
    assert file is not None, module
    what = json.dumps([module, file.name, sorted(names) if names is not None else None]).encode()
    key = hashlib.sha256(what + file.read_bytes()).hexdigest()
    if key not in _PARSED:
        code, found = _parsed(file, module, names)
        _PARSED[key] = [code, [[name, sorted(given) if given is not None else None] for name, given in found]]
    code, listed = _PARSED[key]
    imported = {(name, frozenset(given) if given is not None else None) for name, given in listed}
    # A package's __init__ runs when any of its modules is imported.
    known = {name for name, _ in imported if _file(name)} | {module}
    imported |= {(name.rsplit(".", depth)[0], None) for name in known for depth in range(1, name.count(".") + 1)}
    return code, frozenset(each for each in imported if each[0] != module and _file(each[0]))


def _parsed(file: Path, module: str, names: Names) -> tuple[str, set[tuple[str, Names]]]:
    """Return the digest of a module's code, and all that it imports, whether that has a file here or not."""
    tree = _tree(file)
    if names is not None:
        tree = ast.Module(_used(tree, names), [])
    imported: set[tuple[str, Names]] = set()
    for node in _run(tree):
        if isinstance(node, ast.Import):
            imported |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # From here, so many packages up; `from package import name`: the name may be a module itself.
            here = module if file.name == "__init__.py" else module.rpartition(".")[0]
            up = here.split(".")[: len(here.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*up, *([node.module] if node.module else [])])
            imported |= {(name, None), *((f"{name}.{alias.name}", None) for alias in node.names)}
            if name == ROOT.name:
                imported |= {
                    (registry.PLACES[alias.name], None) for alias in node.names if alias.name in registry.PLACES
                }
    return hashlib.sha256(repr(_code(tree)).encode()).hexdigest(), imported


def _shows(module: str) -> bool:
    """Whether a module makes what people look at, pages or pictures: there words are a result."""
    return module.startswith("dlscale.report.") or module.endswith(".preview")


def _used(tree: ast.Module, names: Iterable[str]) -> list[ast.stmt]:
    """Return the statements of a module that `names` stand on, and all those that do something when it is imported."""
    parts: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            parts += [ast.Import([alias]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts += [ast.ImportFrom(node.module, [alias], node.level) for alias in node.names]
        else:
            parts.append(node)
    words, bound = [*map(_words, parts)], [*map(_bound, parts)]
    mentioned = set().union(*words)
    if mentioned & {"globals", "locals", "vars", "eval", "exec", "__init_subclass__", "metaclass"}:
        return tree.body  # what uses what is not to be read off
    imports = [isinstance(part, ast.Import | ast.ImportFrom) for part in parts]
    # What is imported and not used is imported for what that does.
    always = {at for at, own in enumerate(bound) if not own or (imports[at] and not own & mentioned)}
    needed, kept = set(names), always
    while True:
        needed.update(*(words[at] for at in kept))
        found = always | {at for at, own in enumerate(bound) if own & needed}
        if found == kept:
            return [parts[at] for at in sorted(kept)]
        kept = found


def _words(node: ast.AST) -> set[str]:
    """Return the names that a statement mentions, also as text (annotations, `getattr`); not those in docstrings."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return set()
    own = set().union(*map(_words, ast.iter_child_nodes(node)))
    match node:
        case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.keyword(arg=str(name)):
            return own | {name}
        case ast.Constant(value=str(text)):
            return own | set(re.findall(r"[^\W\d]\w*", text))
    return own


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines; none if it may do anything else when it is run.

    `STUDY = …` and `KINDS = …` make what a study's module is asked for. Decorators may do anything.
    """
    match node:
        case ast.Import(names=[alias]) | ast.ImportFrom(names=[alias]):
            return {(alias.asname or alias.name).split(".")[0]} - {"*"}
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            changed = {name for each in ast.walk(node) if isinstance(each, ast.Global) for name in each.names}
            return {node.name} | changed if not node.decorator_list else set()
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=value)
        ):
            calls = value is not None and any(isinstance(each, ast.Call) for each in ast.walk(value))
            return {name} if name in ("STUDY", "KINDS") or not calls else set()
    return set()


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


def _reached(modules: Iterable[str], whole: bool = False) -> dict[str, Names]:
    """Return all that `modules` import, themselves included, and the names that count of each."""
    seen: dict[str, Names] = {}
    todo = [_entry(module) for module in modules]
    while todo:
        module, names = todo.pop()
        before = seen.get(module, frozenset())
        together = None if whole or names is None or before is None else names | before
        if module not in seen or together != before:
            seen[module] = together
            # In their order, so that the same is parsed in the same steps each time.
            imported = sorted(_source(module, together)[1], key=_order)
            shown = SHOWN if _shows(module) else set()
            todo += [each for each in imported if whole or each[0] not in GUARDS or each[0] in shown]
    return dict(sorted(seen.items()))


def _order(imported: tuple[str, Names]) -> tuple[str, list[str]]:
    module, names = imported
    return module, sorted(names or ())


def _entry(module: str) -> tuple[str, Names]:
    """Return a module and the names that count of it, from `module` or `module:name,name`."""
    name, _, names = module.partition(":")
    return name, frozenset(names.split(",")) if names else None


def reachable(modules: Iterable[str], whole: bool = False) -> list[str]:
    """Return the modules of dlscale, and of studies outside, that `modules` import; themselves included.

    Imports inside functions count; those for types alone do not, nor do imports by computed name, which `run_modules`
    and `data_modules` list. `module:name,name` is of these names alone. `whole`: with `GUARDS`, and all names.
    """
    return list(_reached(modules, whole))


@functools.cache
def _digests(modules: tuple[str, ...]) -> dict[str, str]:
    return {module: _source(module, names)[0] for module, names in _reached(modules).items()}


def fingerprint(modules: Iterable[str], files: Iterable[Path] = ()) -> str:
    """Return the SHA-256 (64 hexadecimal digits) of all sources that `modules` reach, and of `files`.

    `files` are what the stage reads from the package beside its modules, such as a page's template.
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
    """Return the name of a module's file: within the package, or as a whole of a study from outside."""
    file = _file(module)
    return str(file.relative_to(ROOT) if file and file.is_relative_to(ROOT) else file)


def run_modules(stage: str, study: str, *loaders: str) -> list[str]:
    """Return the modules from which a stage reaches all the code that decides its results for a run.

    `study` is the name of the run's study, `loaders` are the kinds of loaders that the stage may use.
    """
    kind = registry.study(study).dataset
    modules = [STAGES[stage].decides, registry.studies()[study].module, _role(kind, "samples")]
    modules += map(registry.loader, loaders)
    return [module for module in modules if module]


def data_modules(stage: str, kind: str, maker: str | None = None) -> list[str]:
    """Return the modules from which a stage reaches all the code that decides its results for a dataset of this kind.

    Stage `acquire` depends on what makes the file (`maker`) alone: a fetched file does not change with the code
    that fetches it, and is not fetched again when that code is edited.
    """
    roles = {"acquire": maker, "preprocess": "source", "describe": "describe", "preview": "preview"}
    role = roles.get(stage)
    modules = [None if stage == "acquire" else STAGES[stage].module, role and _role(kind, role)]
    if stage == "describe":  # what its rows are called
        shipped = registry.shipped_kinds().get(kind)
        modules.append(f"{shipped}.kind" if shipped else f"{registry.kinds()[kind]}:KINDS")
    return [module for module in modules if module]


def _role(kind: str, role: str) -> str | None:
    """Return the module that does one thing for a kind of dataset; of one that does others, too, with the names."""
    module = registry.module_of(kind, role)
    if kind in registry.shipped_kinds() or module in (None, registry.DEFAULTS.get(role)):
        return module
    return f"{module}:{','.join(('KINDS', *registry.ROLES.get(role, ('acquire',))))}"
