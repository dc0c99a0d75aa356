"""Find the modules of studies, kinds of datasets, loaders, stages and commands by name.

- The core has the studies in `dlscale/studies/NAME` and the kinds of datasets in `dlscale/datasets/KIND`.
- Extensions add rows to tables, such as `STAGES`. An extension is a folder `dlscale/extensions/NAME`, or an installed
  package with an entry point `dlscale.extensions`.
- An outside study is a file or folder that the configuration names. Such a study may define kinds of datasets.

A fingerprint cannot find modules that are imported by name, so this module lists them for `dlscale.core.fingerprint`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from dlscale.core.errors import UserError, unknown

PACKAGE = Path(__file__).resolve().parents[1]

#: Module of each name that the author of a study imports from `dlscale` directly.
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
    "timed": "dlscale.extensions.programs.timed",
}


#: Group of the entry points by which installed packages add extensions: `NAME = "package.extension"`.
ENTRY_POINTS = "dlscale.extensions"


@functools.cache
def extensions() -> dict[str, ModuleType]:
    """Return the module of each extension by the extension's name, extensions of this package first.

    `USES` of an extension names the extensions that its code imports or its plans need. Without one of these, the
    extension is left out.

    Raises
    ------
    UserError
        If two extensions have the same name, or an installed extension cannot be imported.
    """
    files = sorted((PACKAGE / "extensions").glob("*/extension.py"))
    modules = {file.parent.name: f"{PACKAGE.name}.extensions.{file.parent.name}.extension" for file in files}
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS)):
        if modules.setdefault(entry.name, entry.value) != entry.value:
            raise UserError(f"two extensions are called '{entry.name}': {modules[entry.name]} and {entry.value}")
    found = {name: _extension(name, module) for name, module in modules.items()}
    while lacking := [name for name, module in found.items() if not {*getattr(module, "USES", ())} <= found.keys()]:
        found = {name: module for name, module in found.items() if name not in lacking}
    return found


def _extension(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        if module.startswith(f"{PACKAGE.name}."):
            raise
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"extension {name}: {module}: {what}; correct or uninstall its package") from error


@functools.cache
def _packages() -> dict[str, Path]:
    """Return the folders of the installed packages that add extensions, by import name of the package."""
    found = {}
    for module in extensions().values():
        top, *inner = module.__name__.split(".")
        if top != PACKAGE.name and module.__file__:
            found[top] = Path(module.__file__).resolve().parents[max(len(inner) - 1, 0)]
    return found


@dataclass(frozen=True)
class StudyModule:
    """Name, module and file of a study."""

    name: str
    module: str  #: Name under which the study is imported.
    file: Path  #: Python file of the study; `__init__.py` if the study is a folder.

    @property
    def yaml(self) -> Path:
        """File with the settings, datasets, plans and published figures of the study."""
        if self.file.name == "__init__.py":
            return self.file.with_name(f"{self.file.parent.name}.yaml")
        return self.file.with_suffix(".yaml")

    @property
    def root(self) -> Path:
        """Folder from which an outside study is imported."""
        return self.file.parents[self.file.name == "__init__.py"]


_added: dict[str, StudyModule] = {}


def studies() -> dict[str, StudyModule]:
    """Return all studies by name."""
    return {**_shipped(), **_added}


@functools.cache
def _shipped() -> dict[str, StudyModule]:
    modules = {
        file.parent.name: f"dlscale.studies.{file.parent.name}.study" for file in PACKAGE.glob("studies/*/study.py")
    }
    modules |= table("STUDIES")
    return {name: StudyModule(name, modules[name], _file(modules[name])) for name in sorted(modules)}


def _file(module: str) -> Path:
    """Return the file of a module of this package, or of an installed extension."""
    return _packages().get(module.partition(".")[0], PACKAGE).parent.joinpath(*module.split(".")).with_suffix(".py")


def add(name: str, path: str | Path) -> None:
    """Register the study in an outside file or folder, and make the study importable.

    A second call with the same arguments has no effect. Raise a `UserError` if a file is missing, if the name of the
    module is unsuitable or not unique, or if dlscale ships a study called `name`.
    """
    where = f"studies.{name}"
    file = Path(path).expanduser().resolve()
    file = file / "__init__.py" if file.is_dir() else file
    if not file.is_file() or file.suffix != ".py":
        raise UserError(f"{where}: {path}: expected a study's Python file (.py), or a folder with __init__.py")
    if name in _shipped():
        raise UserError(f"{where}: dlscale already has a study of this name; choose another name")
    module = (file.parent if file.name == "__init__.py" else file).stem
    if not module.isidentifier() or module in sys.stdlib_module_names or module == PACKAGE.name:
        raise UserError(
            f"{where}: {path}: expected a Python identifier that is not a standard module or '{PACKAGE.name}', got "
            f"'{module}'; rename the file or folder"
        )
    study = StudyModule(name, module, file)
    if not study.yaml.is_file():
        raise UserError(f"{where}: {study.yaml}: no such file; write the study's settings to this YAML file")
    _added[name] = study
    if str(study.root) not in sys.path:
        sys.path.append(str(study.root))  # last, so that the study's modules do not hide installed packages
    source(module)  # refuses a module that exists twice, because Python would import only one of the two


def added() -> dict[str, StudyModule]:
    """Return the outside studies by name."""
    return dict(_added)


def roots() -> list[Path]:
    """Return the folders of outside studies and of installed extensions."""
    return list(dict.fromkeys([*(study.root for study in _added.values()), *_packages().values()]))


def source(module: str) -> Path | None:
    """Return the file of a module of an outside study or an installed extension; None for other modules."""
    folders = [_packages()[module.partition(".")[0]].parent] if module.partition(".")[0] in _packages() else []
    folders = folders or [study.root for study in _added.values()]
    bases = [folder.joinpath(*module.split(".")) for folder in dict.fromkeys(folders)]
    files = [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()]
    if len(files) > 1:
        raise UserError(f"{files[0]} and {files[1]}: Python can import only one module '{module}'; rename one of them")
    return files[0] if files else None


def mistake(error: BaseException) -> str | None:
    """Return file, line and message of an exception from an outside study or installed extension.

    Return None for other exceptions.
    """
    places = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places = [(Path(error.filename), error.lineno)]
    for file, line in reversed(places):
        ours = file.is_relative_to(PACKAGE) or "site-packages" in file.parts
        if not ours and any(map(file.is_relative_to, roots())):
            return f"{file}:{line}: {type(error).__name__}: {' '.join(str(error).split())}"
    return None


def load(module: str) -> ModuleType:
    """Import a module by name; an error in a module outside dlscale becomes a `UserError`."""
    try:
        return importlib.import_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if module.split(".")[0] == PACKAGE.name:
            raise
        what = mistake(error) or f"{type(error).__name__}: {error}"
        raise UserError(f"{what}; the module {module} cannot be imported") from error


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
            f"got {found!r}" + f" without {', '.join(lacks)}" * bool(lacks) + "; see docs/adding.md"
        )
    return found


@functools.cache
def shipped_kinds() -> dict[str, str]:
    """Return the package of each shipped kind of dataset without importing it."""
    packages = {file.parent.name: f"dlscale.datasets.{file.parent.name}" for file in PACKAGE.glob("datasets/*/kind.py")}
    packages |= table("KINDS")
    return dict(sorted(packages.items()))


def _outside_kinds() -> dict[str, Any]:
    found = dict[str, Any]()
    for study in _added.values():
        for kind in getattr(load(study.module), "KINDS", []):
            if isinstance(kind, type):
                raise UserError(f"{study.file}: KINDS has the class {kind.__name__}; write {kind.__name__}()")
            if kind.name in shipped_kinds() or found.setdefault(kind.name, kind) is not kind:
                raise UserError(f"{study.file}: a kind of dataset called '{kind.name}' already exists; rename it")
    return found


def kinds() -> dict[str, str]:
    """Return name → package of each shipped kind of dataset, and name → module of the class of each outside kind."""
    return {**shipped_kinds(), **{name: type(kind).__module__ for name, kind in _outside_kinds().items()}}


def kind(name: str) -> Any:
    """Return the kind of dataset called `name`.

    A shipped kind is `KIND` in `kind.py` of the kind's folder. An outside kind is an entry of an outside study's
    `KINDS`.
    """
    if name in shipped_kinds():
        return load(f"{shipped_kinds()[name]}.kind").KIND
    known = _outside_kinds()
    if name not in known:
        raise UserError(unknown("kind of dataset", name, {**shipped_kinds(), **known}))
    return known[name]


#: Role → functions by which the module of an outside kind defines the role. The function `acquire` defines all other
#: roles.
ROLES = {
    "source": ("open_source",),
    "samples": ("open_samples",),
    "describe": ("describe_prepared", "complete"),
    "preview": ("preview",),
}
#: Default modules by role, for kinds of datasets that have no module for the role.
DEFAULTS = {"samples": "dlscale.data.samples"}


def module_of(name: str, role: str) -> str | None:
    """Return the module of a role for a kind of dataset.

    If the kind does not define the role, return the role's module in `DEFAULTS`, or None.

    `role` is `source`, `samples`, `describe`, `preview`, or the kind's name for a module that acquires files. A shipped
    kind defines a role by a module with the role's name. An outside kind defines a role by a function (`ROLES`) in the
    module of the kind's class.
    """
    if name in shipped_kinds():
        own = f"{shipped_kinds()[name]}.{role}"
        there = _file(own).is_file()
    else:
        own = type(kind(name)).__module__
        there = any(hasattr(load(own), function) for function in ROLES.get(role, ("acquire",)))
    return own if there else DEFAULTS.get(role)


def table(name: str, taken: Iterable[str] = ()) -> dict[str, Any]:
    """Return the rows of all extensions' tables called `name`; refuse repeated keys, and keys in `taken` (the core's).

    Rows of `COMMANDS` and `STAGES` are objects (`dlscale.core.stage`), and rows of `LOADERS` are `LoaderPlace`. `HOOKS`
    has a module as key and an environment variable as row (see `hooks`). Rows of other tables are full names:

    - `STUDIES`: module of a study.
    - `KINDS`: package of a kind of dataset.
    - `PROGRAM_STAGES`: module of a stage for external programs.
    - `CAUSES`: function that finds what slows a run (`dlscale.report.causes`).
    - `SECTIONS`: function with the arguments (`PlanResult`, `dlscale.report.sections.Page`), which returns a `Section`
      of the page, or None.
    - `CARDS`: function that returns additions to a plan's card, its summary on a page.
    - `PROBES`: function of `configuration` and `plans` (None means the targets), which returns a list of `Finding` for
      `dlscale doctor`.
    - `TRACKERS`: class of an experiment tracker, with the arguments folder, settings, history and checkpoint folder of
      the run, and the methods `add(epoch)` and `finish(picture, best)`.
    - `PROFILERS`: module of a profiler. If the profiler starts separate processes, the module has the functions
      `profile_apart(run_json, manifest, world, threads, device, folder)`, which is called on all ranks, and
      `of_report(path)`, which reads a report.
    """
    rows = dict[str, Any]()
    for extension, module in extensions().items():
        for key, row in getattr(module, name, {}).items():
            if key in taken or rows.setdefault(key, row) is not row:
                raise UserError(f"extension {extension}: {name}: '{key}' exists already; rename it")
    return rows


def rules() -> list[str]:
    """Return the files `rules.smk` that extensions have next to `extension.py`, for Snakemake."""
    files = [Path(str(module.__file__)).with_name("rules.smk") for module in extensions().values()]
    return [str(file) for file in files if file.is_file()]


def hooks() -> dict[Path, str]:
    """Return the files that dlscale's hook may load into an external program, each with its environment variable.

    The hook loads a file if its variable is set, and passes the log of the steps to the function `start` of the file.
    """
    return {_file(module): variable for module, variable in table("HOOKS").items()}


def page_modules() -> list[str]:
    """Return the modules with which extensions complete a page; a change of these modules makes the page again."""
    functions = (name for each in ("CAUSES", "SECTIONS", "CARDS") for name in table(each).values())
    names = (*functions, *(row.record for row in table("STAGES").values() if row.record))
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def provided(name: str, default: Any) -> Any:
    """Return the object that an extension lists as `name` in its table `PROVIDES`; `default` if no extension does."""
    found = table("PROVIDES").get(name)
    return named(found) if found else default


def provider(name: str) -> list[str]:
    """Return the module in which `provided` finds the object `name`, as a list that may be empty."""
    return [found.rpartition(".")[0] for key, found in table("PROVIDES").items() if key == name]


class LoaderPlace(NamedTuple):
    """Full names of the module, class and function of a loader that an extension adds."""

    module: str  #: Module with the function `build`.
    settings: str  #: Class of the settings.
    prepare: str = ""  #: Function that is called with (loader settings, path of the manifest) before a stage begins.


def _loaders() -> dict[str, LoaderPlace]:
    return table("LOADERS", ("torch", "direct", "synthetic"))


def loader(kind: str) -> str:
    """Return the module of a kind of loader."""
    added = _loaders()
    return added[kind].module if kind in added else f"dlscale.data.loaders.{kind}_loader"


def loader_settings() -> list[Any]:
    """Return the settings classes of the loaders that extensions add."""
    return [named(place.settings) for place in _loaders().values()]


def prepare_data(loader: dict[str, Any], manifest: str) -> None:
    """Call the function with which a loader prepares a dataset, if the loader has such a function."""
    place = _loaders().get(str(loader.get("kind")))
    if place and place.prepare:
        named(place.prepare)(loader, manifest)


def named(name: str) -> Any:
    """Return the object with this full name, `module.object`."""
    module, _, attribute = name.rpartition(".")
    return getattr(load(module), attribute)
