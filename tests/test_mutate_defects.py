"""`mutate_defects.py` has a mutation for each row of DEFECTS.md, or the reason why not; mutations fit the code."""

from __future__ import annotations

import ast

from tests.mutate_code import MUTATIONS, ROOT
from tests.mutate_defects import DEFECTS, mutations, rows


def test_each_row_has_a_defect_or_a_reason() -> None:
    """Each row has a mutation, or the reason why not. Each key of `DEFECTS` is the beginning of exactly one row."""
    found = rows()
    assert len(found) == len(DEFECTS) >= 52
    for beginning in DEFECTS:
        assert len([row for row in found if row.startswith(beginning)]) == 1, beginning
    without = [text for text in DEFECTS.values() if isinstance(text, str)]
    assert len({*without} - {each.name for each in MUTATIONS}) == len(DEFECTS) - len(mutations()) == 2


def test_each_defect_fits_the_code_and_a_test_in_its_row() -> None:
    found = rows()
    for beginning, defect in mutations().items():
        changed = defect.applied((ROOT / defect.path).read_text())
        ast.parse(changed)
        (tests,) = [tests for row, tests in found.items() if row.startswith(beginning)]
        assert defect.test.partition("[")[0] in tests, defect.name
