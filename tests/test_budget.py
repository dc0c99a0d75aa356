"""Size of each part: `budget.toml` limits the core, each extension, the benchmarks, the tests and the interface."""

from __future__ import annotations

import ast
import json
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from dlscale.cli import QUERIES
from tests.conftest import ROOT

PACKAGE = ROOT / "workflow_scripts/dlscale"
BUDGET = tomllib.loads((ROOT / "tests/budget.toml").read_text(encoding="utf-8"))
MEASURES = ("statements", "files", "docstring_words")


def part_of(file: Path) -> str:
    """Return the part to which a file belongs, which is a row of the budget."""
    if file.is_relative_to(PACKAGE / "extensions") and file.parent != PACKAGE / "extensions":
        return f"extensions.{file.relative_to(PACKAGE / 'extensions').parts[0]}"
    return "core" if file.is_relative_to(ROOT / "workflow_scripts") else file.relative_to(ROOT).parts[0]


def size_of(file: Path) -> tuple[int, int, int]:
    """Return the number of statements, the number of files (1), and the number of words in docstrings."""
    nodes = list(ast.walk(ast.parse(file.read_bytes())))
    scopes = [
        node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    words = sum(len((ast.get_docstring(node) or "").split()) for node in scopes)
    return sum(isinstance(node, ast.stmt) for node in nodes), 1, words


def sizes() -> dict[str, dict[str, int]]:
    """Return the size of each part, by part and measure."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for folder in ("workflow_scripts", "bench", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            part = part_of(file)
            found[part] = [before + more for before, more in zip(found[part], size_of(file), strict=True)]
    found["package"] = [
        sum(size[i] for part, size in found.items() if part not in ("bench", "tests")) for i in range(3)
    ]
    return {part: dict(zip(MEASURES, size, strict=True)) for part, size in found.items()}


SIZES = sizes()


def bounds(part: str) -> dict[str, int]:
    """Return the row of a part in the budget."""
    row = BUDGET
    for word in part.split("."):
        row = row.get(word, {})
    return {key: value for key, value in row.items() if isinstance(value, int)}


@pytest.mark.parametrize("part", sorted(SIZES))
def test_each_part_is_within_the_budget(part: str) -> None:
    row = bounds(part)
    assert set(row) == set(MEASURES), f"tests/budget.toml has no row {part} with {', '.join(MEASURES)}"
    over = {key: SIZES[part][key] for key in row if SIZES[part][key] > row[key]}
    assert not over, f"{part} has {over}, and its budget is {row}: move code to an extension, or remove as much"


def test_the_interface_is_within_the_budget() -> None:
    schema = json.loads((PACKAGE / "config/config.schema.json").read_text(encoding="utf-8"))
    keys = sum(len(each.get("properties", {})) for each in [schema, *schema["$defs"].values()])
    found = {"keys": keys, "commands": len(QUERIES) + 1}  # QUERIES and `run`
    over = {key: found[key] for key in found if found[key] > BUDGET["interface"][key]}
    assert not over, f"there are {over}, and the budget is {BUDGET['interface']}: remove as many as you add"


def test_removed_parts_have_no_row() -> None:
    rows = {key for key, value in BUDGET.items() if key not in ("extensions", "interface")}
    assert rows | {f"extensions.{name}" for name in BUDGET["extensions"]} == set(SIZES)
