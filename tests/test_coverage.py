"""docs/coverage.md: each row has a valid command, existing files and existing tests.

Commands of dlscale and Snakemake are read by their parsers. A row's tests check what the command does.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from snakemake.cli import get_argument_parser

from dlscale import cli
from dlscale.config import resolve
from dlscale.config.resolve import Configuration
from dlscale.core.settings import read_yaml
from dlscale.launch import launcher
from dlscale.preflight import run
from tests.conftest import ROOT

COLUMNS = ["feature", "where", "command", "test"]
#: Numbers of the documents, each of which has a section, in order.
DOCUMENTS = ["000", "001", "002", "003", "004"]


@dataclass(frozen=True)
class Row:
    """A feature of a document, with the code spans of the row's cells."""

    section: str
    feature: str
    where: tuple[str, ...]
    commands: tuple[str, ...]
    tests: tuple[str, ...]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def spans(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def rows(text: str) -> list[Row]:
    """Return the rows of all tables that have the four columns."""
    found, section, header = [], "", [""]
    for line in text.splitlines():
        if line.startswith("## "):
            section, header = line[3:], [""]
        elif not line.startswith("|"):
            header = [""]
        elif header == [""]:
            header = cells(line)
        elif header == COLUMNS and set(line) - set("|-: "):
            values = cells(line)
            assert len(values) == len(COLUMNS), f"the row has too many or too few pipes: {line}"
            found.append(Row(section, values[0], *map(spans, values[1:])))
    return found


TEXT = (ROOT / "docs/coverage.md").read_text()
ROWS = rows(TEXT)


# ---- checks of a command ------------------------------------------------------------------------------


@functools.cache
def configuration(site: str = "", config: tuple[str, ...] = ()) -> Configuration:
    """Return the repository's configuration with a site, and with `KEY=VALUE` settings as the workflow accepts them."""
    raw = resolve.merge(resolve.site_settings(site, ROOT / "profiles"), read_yaml(ROOT / "config.yaml"))
    for text in config:
        key, _, value = text.partition("=")
        resolve.merge(raw, {key: yaml.safe_load(value)})
    return resolve.load(raw)


of_snakemake = functools.cache(get_argument_parser)
of_dlscale = functools.cache(cli.parser)


def check(command: str) -> None:
    """Fail if a command of dlscale or Snakemake names an unknown option, file, profile, plan, run or target."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    program, *words = words
    if words[:2] == ["-m", "dlscale"] and program == "python":
        program, words = "dlscale", words[2:]
    checks = {"snakemake": snakemake, "dlscale": dlscale}
    if program in checks:
        checks[program](words)


def snakemake(words: list[str]) -> None:
    args = parsed(of_snakemake(), words)
    profiles = [path for path in (*(args.profile or []), args.workflow_profile) if path and path != "none"]
    for path in profiles:
        assert (ROOT / path).is_dir() or (ROOT / "profiles" / path).is_dir(), f"no profile {path}"
    for file in args.configfile:
        assert (ROOT / file).is_file() or (ROOT / "docs/examples" / file).is_file(), f"no file {file}"
    if args.configfile:
        return  # the plans are in the named file
    sites = [Path(path).name for path in profiles if (ROOT / "profiles" / Path(path).name / "site.yaml").exists()]
    known = configuration(*sites[:1], config=tuple(args.config or ()))
    targets = {"all", "image", *(f"data_{name}" for name in known.workflow.datasets)}
    targets |= {f"plan_{name}" for name in known.plans}
    targets |= {f"study_{known.workflow.plans[name].study}" for name in known.workflow.targets}
    assert set(args.targets) <= targets, f"no target {sorted(set(args.targets) - targets)}"
    plans = [known.plans.get(target.removeprefix("plan_"), {}) for target in args.targets]
    for each in [each for plan in plans for each in plan.values() if known.workflow.site.scheduler]:
        launcher.check(known.workflow.site, each.run.geometry)  # the site must not refuse the runs


def dlscale(words: list[str]) -> None:
    args = parsed(of_dlscale(), words)
    typed = run.sort(args.words if args.stage == "run" else ())
    if typed.settings and not typed.files:  # with a file, the plans are in the named file
        with contextlib.chdir(ROOT):
            run.configured(typed)
    query = args.stage in cli.QUERIES
    site = (query and cli.QUERIES[args.stage].configured and args.profile) or ""
    known = configuration(site, config=tuple(getattr(args, "config", ()) if query else ()))
    for plan in getattr(args, "plans", None) or []:
        assert not query or plan in known.plans, f"no plan {plan}"
    for name in getattr(args, "runs", None) or []:
        plan, _, rung = name.partition(".")
        there = {
            **known.plans.get(plan, {}),
            **known.skipped_runs.get(plan, {}),
        }  # this machine lacks a requirement of the run, so the run is left out
        assert "/" in name or rung in there, f"no run {name}"


@pytest.mark.parametrize("name", cli.QUERIES)
def test_the_example_of_each_command_is_valid(name: str) -> None:
    program, *words = shlex.split(cli.QUERIES[name].example)
    assert program == "dlscale" and name in " ".join(words)
    dlscale(words)


def parsed(parser: Any, words: list[str]) -> Any:
    try:
        return parser.parse_args(words)
    except SystemExit:
        raise AssertionError(f"not understood: {' '.join(words)}") from None


@functools.cache
def functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def check_test(name: str, before: str) -> str:
    """Return the file of an existing test; `before` is the file of a name that begins with `::`."""
    path, _, function = name.partition("::")
    path = path or before
    file = ROOT / path if (ROOT / path).is_file() else ROOT / "tests" / path
    assert path.endswith(".py") and file.is_file(), f"no file {path}"
    assert not function or function.partition("[")[0] in functions(file), f"{path} has no {function}"
    return path


# ---- the page ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section[:3]} {row.feature}")
def test_each_row_names_existing_files_commands_and_tests(row: Row) -> None:
    assert row.where and row.commands and row.tests, "a cell lacks a file, a command or a test"
    for path in row.where:
        assert (ROOT / path).exists(), f"no file {path}"
    for command in row.commands:
        check(command)
    file = ""
    for name in row.tests:
        file = check_test(name, file)


def test_every_document_has_a_section() -> None:
    assert re.findall(r"^## (\d{3}):", TEXT, re.MULTILINE) == DOCUMENTS
    assert set(DOCUMENTS) <= {row.section[:3] for row in ROWS}


def test_deviations_name_existing_studies() -> None:
    deviations = re.findall(r"^\| `(\w+)` \| ", TEXT, re.MULTILINE)
    assert len(deviations) > 10 and set(deviations) <= set(resolve.study_files())


def test_each_defect_names_existing_tests() -> None:
    lines = [line for line in (ROOT / "tests/DEFECTS.md").read_text().splitlines() if line.startswith("|")]
    defects = [
        cells(line) for line in lines if set(line) - set("|-: ") and "the tests that detect the defect" not in line
    ]
    assert len(defects) > 50
    for defect in defects:
        assert len(defect) == 3 and spans(defect[2]), f"a row lacks a test: {defect[0]}"
        file = ""
        for name in spans(defect[2]):
            assert "::" in name, f"{name}: expected a test instead of a file"
            file = check_test(name, file)


def test_an_unknown_setting_fails() -> None:
    changes = json.dumps({"cosmo_demo": {"settings": {"trainin": {"epochs": 1}}}})
    with pytest.raises(Exception, match="did you mean 'training'"):
        check(f"snakemake -n plan_cosmo_demo --config 'plans={changes}'")
    with pytest.raises(Exception, match="did you mean 'training'"):
        check("dlscale run -n cosmo_demo trainin.epochs=1")
