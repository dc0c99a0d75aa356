"""What the README draws of the workflow is what Snakemake does."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.conftest import ROOT
from tests.workflow.conftest import Tree

Edges = set[tuple[str, str]]


def drawn(text: str) -> Edges:
    """Return the edges of the README's graph, in which a line leads from one rule to several."""
    (graph,) = re.findall(r"```mermaid\nflowchart LR\n(.*?)```", text, re.DOTALL)
    lines = [line.split(" --> ") for line in graph.splitlines()]
    return {(before.strip(), after.strip()) for before, several in lines for after in several.split("&")}


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
    assert drawn((ROOT / "README.md").read_text()) == rules
