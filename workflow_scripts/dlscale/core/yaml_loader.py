"""PyYAML's safe loader, which also refuses what that takes in silence.

That is keys written twice, NULs, and values in themselves.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.cyaml import CParser  # type: ignore[attr-defined]
from yaml.resolver import Resolver

MERGE = "tag:yaml.org,2002:merge"


class Loader(Composer, CParser, SafeConstructor, Resolver):
    """Reads YAML; what is wrong with it is a `yaml.MarkedYAMLError`, with its line.

    The parser is libyaml's, three times as fast as PyYAML's own, whose composer puts together what it finds.
    """

    def __init__(self, stream: Any) -> None:
        CParser.__init__(self, stream)
        for part in (Composer, SafeConstructor, Resolver):
            part.__init__(self)

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node; an alias must not name what it stands in."""
        event: Any = self.peek_event()
        node: Any = super().compose_node(parent, index)
        mark: Any = event.start_mark
        if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
            raise yaml.MarkedYAMLError(problem="a NUL", problem_mark=mark)
        if isinstance(event, yaml.AliasEvent) and node.end_mark is None:
            raise yaml.MarkedYAMLError(problem=f"*{event.anchor} stands in itself", problem_mark=mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Return a mapping; each of its keys is written once, while what `<<` brings may be written over."""
        node: Any = super().compose_mapping_node(anchor)
        written: dict[str, Any] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            if (first := written.setdefault(key.value, key)) is not key:
                problem = f"the key {key.value!r} stands in line {first.start_mark.line + 1} already; leave one out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node
