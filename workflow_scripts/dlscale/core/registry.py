"""Studies, kinds of datasets and loaders: modules that a configuration names, and that are imported by these names.

A shipped study is a folder `dlscale/studies/NAME`: `study.py`, `study.yaml`, `model.py`; a shipped kind of dataset is a
folder `dlscale/datasets/KIND`. A study from outside is a file or folder that the configuration names
(`studies: {mine: path/to/mine.py}`) or an installed entry point of the group `dlscale.studies`; it may bring kinds of
datasets along. Nothing else of dlscale knows a study or a kind by its name.

The fingerprint of a stage follows static imports only. What this module imports by a computed name, the fingerprint
learns from the same functions.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import traceback
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from dlscale.core.errors import UserError, unknown

PACKAGE = Path(__file__).resolve().parents[1]
GROUP = "dlscale.studies"


#: What the author of a study imports from `dlscale` itself, and where it is.
PLACES = {
    **dict.fromkeys(("Study", "Metrics", "SampleLoss", "PublishedLog"), "dlscale.studies.base"),
    **dict.fromkeys(("Metric", "LossInfo"), "dlscale.core.metrics"),
    **dict.fromkeys(("UserError", "Refused"), "dlscale.core.errors"),
    **dict.fromkeys(("DatasetKind", "Part", "RawFile", "RowSamples", "Outline"), "dlscale.data.kind"),
    "ArraySource": "dlscale.data.source",
    "DatasetSettings": "dlscale.config.dataset",
    "Manifest": "dlscale.data.manifest",
    "Sharding": "dlscale.parallel.sharding",
    "Strict": "dlscale.core.schema",
}


@dataclass(frozen=True)
class Study:
    """Where a study is."""

    name: str
    module: str  #: Name under which the study is imported.
    file: Path  #: Its Python file (of a folder, its `__init__.py`).
    outside: bool = False  #: Whether the file is not of this package.

    @property
    def yaml(self) -> Path:
        """The file of its settings, datasets, plans and published figures: beside it, or in its folder."""
        if self.file.name == "__init__.py":
            return self.file.with_name(f"{self.file.parent.name}.yaml")
        return self.file.with_suffix(".yaml")


_added: dict[str, Study] = {}


def studies() -> dict[str, Study]:
    """Return all studies by name: the shipped ones, those that are installed, those that were added."""
    return {**_shipped(), **_installed(), **_added}


@functools.cache
def _shipped() -> dict[str, Study]:
    files = sorted((PACKAGE / "studies").glob("*/study.py"))
    return {f.parent.name: Study(f.parent.name, f"dlscale.studies.{f.parent.name}.study", f) for f in files}


@functools.cache
def _installed() -> dict[str, Study]:
    installed = {}
    for point in metadata.entry_points(group=GROUP):
        where = f"entry point {point.name} of {GROUP}"
        if point.name in _shipped():
            raise UserError(f"{where}: dlscale has a study of this name; uninstall the package, or rename its study")
        try:
            spec = importlib.util.find_spec(point.module)
        except ImportError:
            spec = None
        if spec is None or spec.origin is None:
            raise UserError(f"{where}: no module {point.module}; install its package again")
        installed[point.name] = Study(point.name, point.module, Path(spec.origin), outside=True)
    return installed


def add(name: str, path: str | Path) -> Study:
    """Register the study in a file or folder outside of this package; adding the same one again is fine.

    A `UserError` is raised for a file that is missing, that Python cannot import, or for a name that is taken.
    """
    where = f"studies.{name}"
    file = Path(path).expanduser().resolve()
    file = file / "__init__.py" if file.is_dir() else file
    if not file.is_file() or file.suffix != ".py":
        raise UserError(f"{where}: {path}: expected a study's Python file (.py), or a folder with __init__.py")
    if name in _shipped() or name in _installed():
        raise UserError(f"{where}: dlscale has a study of this name; choose another")
    module = (file.parent if file.name == "__init__.py" else file).stem
    if not module.isidentifier() or module in sys.stdlib_module_names or module == PACKAGE.name:
        raise UserError(f"{where}: {path}: Python cannot import a module called '{module}'; rename it")
    study = Study(name, module, file, outside=True)
    if not study.yaml.is_file():
        raise UserError(f"{where}: {study.yaml}: no such file; a study's settings stand in a YAML file beside it")
    _added[name] = study
    roots()  # the folder is importable from now on
    return study


def added() -> dict[str, Study]:
    """Return the studies that were added."""
    return dict(_added)


def _root(study: Study) -> Path:
    """Return the folder from which a study's module is imported."""
    return study.file.parents[study.module.count(".") + (study.file.name == "__init__.py")]


def roots() -> list[Path]:
    """Return the folders from which studies from outside are imported; those of added ones are made importable."""
    for root in map(str, map(_root, _added.values())):
        if root not in sys.path:
            sys.path.append(root)  # last: nothing there hides what is installed
    return list(dict.fromkeys(map(_root, (*_added.values(), *_installed().values()))))


def source(module: str) -> Path | None:
    """Return the file of a module that belongs to a study from outside; None for any other.

    Of an installed study these are the modules of its own package, of an added one all in the folder that it is in.
    """
    words, files = module.split("."), {}
    for study in (*_added.values(), *_installed().values()):
        if study.name in _added or words[0] == study.module.split(".")[0]:
            base = _root(study).joinpath(*words)
            for file in (base.with_suffix(".py"), base / "__init__.py"):
                if file.is_file():
                    files[file] = study.name
    if len(files) > 1:
        first, second, *_ = files
        raise UserError(f"{first} and {second}: Python can import only one module '{module}'; rename one of them")
    return next(iter(files), None)


def mistake(error: BaseException) -> str | None:
    """Return where in a study from outside an exception was raised, and what it says; None if it was elsewhere."""
    if isinstance(error, SyntaxError) and error.filename:
        places = [(Path(error.filename), error.lineno)]
    else:
        places = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    roots = [_root(study) for study in _added.values()]
    for file, line in reversed(places):
        ours = file.is_relative_to(PACKAGE) or "site-packages" in file.parts
        if not ours and any(file.is_relative_to(root) for root in roots):
            return f"{file}:{line}: {type(error).__name__}: {' '.join(str(error).split())}"
    return None


def load(module: str) -> ModuleType:
    """Import a module that a function of this module names; a mistake in one from outside is a `UserError`."""
    try:
        loaded = importlib.import_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if module.split(".")[0] == PACKAGE.name:
            raise
        what = mistake(error) or f"{type(error).__name__}: {error}"
        raise UserError(f"{what}; the study in module {module} cannot be imported") from error
    for study in _added.values():
        if study.module == module and Path(loaded.__file__ or "").resolve() != study.file:
            where = f"{study.file}: Python has another module '{module}', {loaded.__file__}"
            raise UserError(f"studies.{study.name}: {where}; rename it")
    return loaded


def public(name: str) -> Any:
    """Return what `from dlscale import NAME` asks for; its module is imported by then alone."""
    if name not in PLACES:
        raise AttributeError(f"module 'dlscale' has no attribute {name!r}")
    return getattr(importlib.import_module(PLACES[name]), name)


def study(name: str) -> Any:
    """Return the study called `name`: the object `STUDY` of its module."""
    known = studies()
    if name not in known:
        raise UserError(unknown("study", name, known))
    found = getattr(load(known[name].module), "STUDY", None)
    lacks = [key for key in ("dataset", "Model", "Loss") if not hasattr(found, key)]
    if lacks or isinstance(found, type):
        raise UserError(
            f"{known[name].file}: expected `STUDY = MyStudy()` at its end, an object with dataset, Model and Loss; "
            f"got {found!r}" + f" without {', '.join(lacks)}" * bool(lacks) + "; docs/adding.md says what a study has"
        )
    return found


@functools.cache
def shipped_kinds() -> dict[str, str]:
    """Return the folder of each kind of dataset of this package, as a package's name; nothing is imported."""
    names = sorted(file.parent.name for file in (PACKAGE / "datasets").glob("*/kind.py"))
    return {name: f"dlscale.datasets.{name}" for name in names}


def kinds() -> dict[str, str]:
    """Return the module of each kind of dataset: a folder of this package, or a study's module from outside."""
    modules = dict(shipped_kinds())
    for outside in (study for study in studies().values() if study.outside):
        for kind in getattr(load(outside.module), "KINDS", []):
            if isinstance(kind, type):
                raise UserError(f"{outside.file}: KINDS holds the class {kind.__name__}; write {kind.__name__}()")
            if modules.setdefault(kind.name, outside.module) != outside.module:
                raise UserError(f"{outside.file}: a kind of dataset called '{kind.name}' is there already; rename it")
    return modules


def kind(name: str) -> Any:
    """Return a kind of dataset: the object `KIND` of a folder's `kind.py`, or one of an outside module's `KINDS`."""
    if name in shipped_kinds():
        return load(f"{shipped_kinds()[name]}.kind").KIND
    if name not in (known := kinds()):
        raise UserError(unknown("kind of dataset", name, known))
    return next(kind for kind in load(known[name]).KINDS if kind.name == name)


#: Functions of each role that a kind of dataset may have itself. A role that is not here acquires: `acquire`.
ROLES = {
    "source": ("open_source",),
    "samples": ("open_samples",),
    "describe": ("describe_prepared", "complete"),
    "preview": ("preview",),
}


#: Modules for a kind of dataset without one of its own for a role.
DEFAULTS = {"samples": "dlscale.data.rows"}


def module_of(name: str, role: str) -> str | None:
    """Return the module that does one thing for a kind of dataset; None if none does.

    Parameters
    ----------
    role
        `source`, `samples`, `describe`, `preview`, or what the kind calls a module that acquires. Of a folder it is the
        module of that name; a single module from outside has all of its roles in itself, as functions.
    """
    if name in shipped_kinds():
        own = f"{shipped_kinds()[name]}.{role}"
        there = (PACKAGE / "datasets" / name / f"{role}.py").is_file()
    else:
        own = kinds()[name]
        there = any(hasattr(load(own), function) for function in ROLES.get(role, ("acquire",)))
    return own if there else DEFAULTS.get(role)


def loader(kind: str) -> str:
    """Return the module of a kind of loader."""
    return f"dlscale.data.loaders.{kind}_loader"
