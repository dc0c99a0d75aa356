"""The list of known mutations fits the code and the tests; `mutate_code.py` reports which mutations are caught."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.mutate_code import MUTATIONS, PACKAGE, ROOT, Mutation, draw, mutated, run

#: Parts of the package that need mutations, because they compute, decide or print.
PARTS = {
    "extensions",
    *("config", "core", "data", "launch", "measure", "parallel", "preflight", "report"),
    *("results.py", "studies", "train", "rules", ".."),
}


def test_each_mutation_fits_the_code() -> None:
    """The text to replace occurs exactly once, and the mutated code can be parsed."""
    for mutation in MUTATIONS:
        assert mutation.old != mutation.new, mutation.name
        changed = mutation.applied((ROOT / mutation.path).read_text())
        if mutation.path.endswith(".py"):
            ast.parse(changed)


def test_each_mutation_has_a_test_that_each_change_waits_for() -> None:
    """The test of a mutation is in `make test`, which runs before each change."""
    for mutation in MUTATIONS:
        file, _, name = mutation.node.partition("::")
        nodes = ast.parse((ROOT / file).read_text()).body
        (test,) = [each for each in nodes if isinstance(each, ast.FunctionDef) and each.name == name.partition("[")[0]]
        said = [ast.unparse(each) for each in test.decorator_list]
        if row := name.partition("[")[2].removesuffix("]"):
            rows = [
                each
                for each in ast.walk(test)
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.param"
            ]
            said += [text for text in map(ast.unparse, rows) if f"id={row!r}" in text]
        said = [text for text in said if not text.startswith("pytest.mark.parametrize")]
        said += [ast.unparse(each) for each in nodes if ast.unparse(each).startswith("pytestmark = ")]
        late = r"pytest\.mark\.(slow|long|parallel|cluster|container)\b"
        assert not re.search(late, " ".join(said)), f"{mutation.name}: {mutation.test}"


def test_mutations_are_many_and_everywhere() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 48
    assert {mutation.file.partition("/")[0] for mutation in MUTATIONS} == PARTS


def test_mistakes_of_a_statement() -> None:
    """Each mutation of a statement has one mistake."""
    (statement,) = ast.parse("return min(a + 1, b) if a < b and c else None").body
    assert [*mutated(statement)] == [
        "return None",
        "return None if a < b and c else min(a + 1, b)",
        "return min(a + 1, b) if a < b or c else None",
        "return min(a + 1, b) if a <= b and c else None",
        "return max(a + 1, b) if a < b and c else None",
        "return min(a - 1, b) if a < b and c else None",
        "return min(a + 2, b) if a < b and c else None",
    ]


@pytest.mark.slow
def test_a_draw_is_repeatable() -> None:
    drawn = draw(["report/speedup.py", "extensions/crate"], 5, seed=1)
    assert drawn == draw(["extensions/crate", "report/speedup.py"], 5, seed=1) and len({*drawn}) == 5
    for mutation in drawn:
        ast.parse(mutation.applied((ROOT / mutation.path).read_text()))


@pytest.mark.slow
def test_one_mutation_is_caught_and_one_survives(tmp_path: Path) -> None:
    """In a repository with one module and one test, one mutation is caught and reverted, and one survives."""
    package, tests = tmp_path / "small" / PACKAGE, tmp_path / "small/tests"
    package.mkdir(parents=True)
    tests.mkdir()
    (package / "__init__.py").touch()
    (package / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef idle():\n    return 1\n")
    (tests / "test_sums.py").write_text(
        "from dlscale.sums import add\n\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
    )
    (tmp_path / "small/pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['workflow_scripts']\n")
    mutations = [
        Mutation("sign", "sums.py", "a + b", "a - b", "test_sums.py::test_sum"),
        Mutation("unseen", "sums.py", "return 1", "return 2", "test_sums.py::test_sum"),
    ]
    shown: list[str] = []
    outcomes = run(tmp_path / "small", mutations, 1, shown.append)
    assert outcomes is not None, shown
    assert [(each.name, each.caught, each.by) for each in outcomes] == [
        ("sign", True, "test_sums.py::test_sum"),
        ("unseen", False, "test_sums.py::test_sum"),
    ]
    assert "caught" in shown[0] and "SURVIVED" in shown[1]
