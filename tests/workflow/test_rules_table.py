"""What the table of rules in docs/fingerprints.md says of the workflow is what Snakemake does."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.conftest import ROOT
from tests.workflow.conftest import Tree

Edges = set[tuple[str, str]]


def told(text: str) -> Edges:
    """Return the edges of the page's table: from each rule that another one needs to that one."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|([^|]*)\|$", text, re.MULTILINE)
    return {(before, after) for after, needs in rows for before in re.findall(r"\w+", needs)}


def of_snakemake(text: str) -> Edges:
    names = dict(re.findall(r"(id\d+)\[(\w+)\]", text))
    return {(names[before], names[after]) for before, after in re.findall(r"(id\d+) --> (id\d+)", text)}


@pytest.mark.slow
def test_the_graph_of_rules(make_tree: Callable[..., Tree]) -> None:
    """Without targets, and the rule that writes plans; of config.yaml's plans."""
    done = make_tree().shell("snakemake --rulegraph mermaid-js")
    assert done.returncode == 0, done.stderr
    edges = of_snakemake(done.stdout)
    rules = {(before, after) for before, after in edges if after != "all" and not before.startswith("configure_")}
    assert len(rules) < len(edges) and ("train", "report") in rules
    assert told((ROOT / "docs/fingerprints.md").read_text()) == rules
