"""docs/first_hour.md: its files, written as the page has them, and its commands on them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest

from tests.conftest import ROOT
from tests.workflow.conftest import Tree

PAGE = (ROOT / "docs/first_hour.md").read_text()
FILES = re.findall(r"^```(?:yaml|python)\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.join(shlex.split(line, comments=True)) for block in BLOCKS for line in block.splitlines()]


def written(tree: Tree) -> Tree:
    for name, text in FILES:
        (tree.path / name).write_text(text)
    return tree


@pytest.mark.slow
def test_its_files_are_what_its_commands_name(make_tree: Callable[..., Tree]) -> None:
    """Each `dlscale run` of the page as a dry run; its data are made before."""
    tree = written(make_tree())
    assert [name for name, _ in FILES] == ["mine.yaml", "fields.py", "own.yaml"]
    for command in [command for command in COMMANDS if command.startswith(("dlscale run", "dlscale why", "python "))]:
        shown = command if not command.startswith("dlscale run") or "-n" in command.split() else f"{command} -n"
        done = tree.shell(shown.replace("dlscale ", "python -P -m dlscale ", 1))
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        if "mine.yaml" in command and " run " in command:
            assert "rates.slow (train): never made" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_arrays_of_ones_own(make_tree: Callable[..., Tree]) -> None:
    """Section 5, command by command."""
    tree = written(make_tree())
    for command in [command for command in COMMANDS if "own.yaml" in command or "fields.py" in command]:
        done = tree.shell(command.replace("dlscale ", "python -P -m dlscale ", 1))
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert (tree.path / "results/data/fields/preview.png").exists()
    assert (tree.path / "results/report/squares.html").exists()
