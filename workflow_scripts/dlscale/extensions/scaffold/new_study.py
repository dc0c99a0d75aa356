"""`dlscale new-study NAME`: write a small example as the start of a user's study.

For arrays of any shapes, the example is `waves`, in `template`. With --images or --inside, the example is the study
`starter_cnn`.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import os
import re
import shlex
from pathlib import Path

from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.files import remove, write_text
from dlscale.core.fingerprint import CHECKOUT, DOCS

PACKAGE = Path(__file__).resolve().parents[2]
REPOSITORY = CHECKOUT or Path.cwd()  # for an installed dlscale, the current folder
TEMPLATE = Path(__file__).with_name("template")
#: Whether --images or --inside is given → name of the copied study in modules, and in classes.
ORIGINALS = {True: ("starter_cnn", "StarterCNN"), False: ("waves", "Waves")}

#: Words that YAML reads as a boolean or null instead of the name of a study.
YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def main(args: argparse.Namespace, configuration: object = None) -> int:
    """Write the study `args.name`, and print the next commands."""
    name, images = args.name, args.images or args.inside
    check_name(name)
    if args.inside and args.at:
        raise UserError("--inside: the study is written into the repository, not into --at; omit --at")
    folder = None if args.inside else Path(args.at or name)
    write(name, folder, images)
    tests = REPOSITORY / f"tests/test_{name}.py" if folder is None else folder / f"test_{name}.py"
    place = _place()
    change = [] if place == Path.cwd() else [shlex.join(["cd", str(place)])]
    calls = [shlex.join(["python", "-m", "pytest", _seen(tests, Path.cwd())]), *change]
    if folder is None:
        calls = [*change, "make schema", f"python -m pytest tests/test_{name}.py", f"dlscale run {name}_ladder"]
        page = f"results/plans/{name}_ladder/report.html"
    else:
        call = _call(name, folder)
        calls += [f"{call} -n", call]
        page = f"results/{name}/report/index.html"
    print("\nNext:", *(f"  {call}" for call in calls), sep="\n")
    print(f"`{'make install-dev' if CHECKOUT else 'pip install pytest'}` installs pytest, which only the tests need.")
    guide = "from_notebook.md" if images else "adding.md"
    guide = _seen(CHECKOUT / "docs" / guide, Path.cwd()) if CHECKOUT else DOCS + guide
    page = _seen(place / page, Path.cwd())
    print(f"The last command makes data, trains, measures, and writes {page}. To continue, read {guide}")
    return 0


def check_name(name: str) -> None:
    """Refuse a name that is invalid for a module, or already in use."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name) or name in YAML_WORDS:
        raise UserError(
            f"NAME: {name}: expected up to 40 lower-case letters, digits and underscores, such as my_study, but no "
            "keyword of Python or YAML"
        )
    specs = [importlib.util.find_spec(module) for module in (name, f"{name}_model", f"{name}_data")]
    known = {*registry.studies(), *registry.shipped_kinds()}
    if name in known or any(spec and spec.origin for spec in specs):  # a folder without code has no origin
        raise UserError(
            f"NAME: {name}: a study or kind of dataset of dlscale, or a Python module, has this name; choose another"
        )


def write(name: str, folder: Path | None, images: bool) -> None:
    """Write a study into a folder, or into the repository if `folder` is None; overwrite no file."""
    files = inside(name) if folder is None else outside(name, folder, images)
    for path in files:
        if os.path.lexists(path):
            raise UserError(f"{path}: exists already, so nothing was written; choose another name or folder")
    original, classes = ORIGINALS[images]
    words = {original: name, classes: "".join(word.capitalize() for word in name.split("_"))}
    if folder is not None:
        words |= {"CALL": _call(name, folder), "NAME": name}
        # The module's name comes first in the pattern, because it contains the study's name.
        words = {f"dlscale.studies.{original}.model": f"{name}_model", **words}
    anyone = re.compile("|".join(map(re.escape, words)))
    try:
        for path, source in files.items():
            write_text(path, anyone.sub(lambda found: words[found[0]], source.read_text(encoding="utf-8")))
    except BaseException:  # remaining files would stop the next call
        for path in files:
            remove(path)
        raise
    print(*map(os.path.relpath, files), sep="\n")


def outside(name: str, folder: Path, images: bool) -> dict[Path, Path]:
    """Return new file → copied file, for a study in its own folder."""
    original, _ = ORIGINALS[images]
    shipped = PACKAGE / "studies" / original
    code = {"": shipped / "study.py", "_model": shipped / "model.py"}
    if not images:
        code = {"": TEMPLATE / f"{original}.py", "_data": TEMPLATE / f"{original}_data.py"}
    return {
        **{folder / f"{name}{part}.py": source for part, source in code.items()},
        folder / f"{name}.yaml": TEMPLATE / f"{original}.yaml",
        folder / f"test_{name}.py": TEMPLATE / f"test_{original}.py",
        folder / f"{name}_run.yaml": TEMPLATE / "run.yaml",
    }


def inside(name: str) -> dict[Path, Path]:
    """Return new file → copied file, for a study in the repository."""
    tests, own, (original, _) = REPOSITORY / "tests", PACKAGE / "studies" / name, ORIGINALS[True]
    if not (tests / "tiny").is_dir():
        raise UserError("--inside: this dlscale is installed without its repository; name a folder with --at")
    return {
        own / "__init__.py": PACKAGE / f"studies/{original}/__init__.py",
        own / "study.py": PACKAGE / f"studies/{original}/study.py",
        own / "model.py": PACKAGE / f"studies/{original}/model.py",
        own / "study.yaml": TEMPLATE / f"{original}.yaml",
        tests / f"test_{name}.py": TEMPLATE / f"test_{original}.py",
        tests / f"tiny/{name}.yaml": tests / f"tiny/{original}.yaml",
    }


def _place() -> Path:
    """Return the folder for `dlscale run`: the current folder or the repository, whichever has a Snakefile."""
    return next((place for place in (Path.cwd(), REPOSITORY) if (place / "Snakefile").is_file()), Path.cwd())


def _seen(path: Path, place: Path) -> str:
    """Return a path relative to a folder if it is inside of that folder, else absolute."""
    whole = path.absolute()
    return str(whole.relative_to(place) if whole.is_relative_to(place) else whole)


def _call(name: str, folder: Path) -> str:
    return shlex.join(["dlscale", "run", "--configfile", _seen(folder / f"{name}_run.yaml", _place())])
