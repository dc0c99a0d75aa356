"""`dlscale new-study NAME`: a study of one's own begins as `starter_cnn` and the files of `template`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import keyword
import os
import re
import shlex
from pathlib import Path

from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.files import write_text

PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = PACKAGE.parents[1]
TEMPLATE = PACKAGE / "studies/template"
ORIGINAL, CLASSES = "starter_cnn", "StarterCNN"

#: What YAML reads as a boolean or as nothing, and not as the name of a study.
YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def main(args: argparse.Namespace, configuration: object = None) -> int:
    """Write the study `args.name`, and say what to do next."""
    name = args.name
    check_name(name)
    if args.inside and args.at:
        raise UserError("--inside: the study has its place in the repository; leave --at out")
    folder = None if args.inside else Path(args.at or name)
    write(name, folder)
    print(f"\nNext{'' if Path.cwd() == REPOSITORY else f', in {REPOSITORY}'}:")
    if folder is None:
        calls = ["make schema", f"python -m pytest tests/test_{name}.py", f"snakemake plan_{name}_ladder"]
        page = f"results/plans/{name}_ladder/report.html"
    else:
        seen = _seen(folder)
        calls = [shlex.join(["python", "-m", "pytest", str(seen / f"test_{name}.py")]), _call(name, seen)]
        page = f"results/{name}/report/index.html"
    print(*(f"  {call}" for call in calls), sep="\n")
    print("pytest comes with `make install-dev`; the rest works without.")
    print(f"The last one makes data, trains, measures, profiles, and writes {page}; docs/from_notebook.md leads on.")
    return 0


def check_name(name: str) -> None:
    """Refuse a name that no module can have, or that one has."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name) or name in YAML_WORDS:
        raise UserError(
            f"NAME: {name}: expected up to 40 lower-case letters, digits and underscores, such as my_study, and no "
            "word of Python or YAML"
        )
    specs = [importlib.util.find_spec(module) for module in (name, f"{name}_model")]
    if name in registry.studies() or any(spec and spec.origin for spec in specs):  # a mere folder has none
        raise UserError(f"NAME: {name}: a study of dlscale or a module of Python has this name; choose another")


def write(name: str, folder: Path | None) -> None:
    """Write a study into a folder, or without one into the repository, over no file."""
    files = inside(name) if folder is None else outside(name, folder)
    for path in files:
        if path.exists():
            raise UserError(f"{path}: is there already, and nothing was written; choose another name or place")
    words = {ORIGINAL: name, CLASSES: "".join(word.capitalize() for word in name.split("_"))}
    if folder is not None:
        seen = _seen(folder)
        words |= {"CALL": _call(name, seen), "FILE": json.dumps(str(seen / f"{name}.py"))}
        words = {f"dlscale.studies.{ORIGINAL}.model": f"{name}_model", **words}  # before its own last word
    anyone = re.compile("|".join(map(re.escape, words)))
    for path, original in files.items():
        write_text(path, anyone.sub(lambda found: words[found[0]], original.read_text(encoding="utf-8")))
        print(os.path.relpath(path))


def outside(name: str, folder: Path) -> dict[Path, Path]:
    """Return the files of a study in a folder of its own, each with the file that it is a copy of."""
    return {
        folder / f"{name}.py": PACKAGE / f"studies/{ORIGINAL}/study.py",
        folder / f"{name}_model.py": PACKAGE / f"studies/{ORIGINAL}/model.py",
        folder / f"{name}.yaml": TEMPLATE / f"{ORIGINAL}.yaml",
        folder / f"test_{name}.py": TEMPLATE / f"test_{ORIGINAL}.py",
        folder / f"{name}_run.yaml": TEMPLATE / "run.yaml",
    }


def inside(name: str) -> dict[Path, Path]:
    """Return the files of a study of the repository, each with the file that it is a copy of."""
    tests, own = REPOSITORY / "tests", PACKAGE / "studies" / name
    if not (tests / "tiny").is_dir():
        raise UserError("--inside: this dlscale is installed without its repository; name a folder with --at")
    return {
        own / "__init__.py": PACKAGE / f"studies/{ORIGINAL}/__init__.py",
        own / "study.py": PACKAGE / f"studies/{ORIGINAL}/study.py",
        own / "model.py": PACKAGE / f"studies/{ORIGINAL}/model.py",
        own / "study.yaml": TEMPLATE / f"{ORIGINAL}.yaml",
        tests / f"test_{name}.py": TEMPLATE / f"test_{ORIGINAL}.py",
        tests / f"tiny/{name}.yaml": tests / f"tiny/{ORIGINAL}.yaml",
    }


def _seen(folder: Path) -> Path:
    """Return a folder as the configuration names it: from the repository, or absolute."""
    place = folder.absolute()
    return place.relative_to(REPOSITORY) if place.is_relative_to(REPOSITORY) else place


def _call(name: str, seen: Path) -> str:
    return shlex.join(["snakemake", "--configfile", str(seen / f"{name}_run.yaml")])
