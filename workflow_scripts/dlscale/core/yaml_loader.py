"""PyYAML's safe loader, which also refuses what that takes in silence.

That is keys written twice, values in themselves, and aliases of aliases that stand for more values than a file holds.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.cyaml import CParser  # type: ignore[attr-defined]
from yaml.resolver import Resolver

MERGE = "tag:yaml.org,2002:merge"

#: Values that a file may have, those that aliases repeat counted each time: some ten seconds to read.
MOST = 100_000


class Loader(Composer, CParser, SafeConstructor, Resolver):
    """Reads YAML; what is wrong with it is a `yaml.MarkedYAMLError`, with its line.

    The parser is libyaml's, three times as fast as PyYAML's own, whose composer puts together what it finds.
    """

    def __init__(self, stream: Any) -> None:
        CParser.__init__(self, stream)
        for part in (Composer, SafeConstructor, Resolver):
            part.__init__(self)
        self._sizes: dict[int, int] = {}  # values in each node

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node; an alias must not name what it stands in."""
        event: Any = self.peek_event()
        node: Any = super().compose_node(parent, index)
        mark: Any = event.start_mark
        if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
            raise yaml.MarkedYAMLError(problem="a NUL", problem_mark=mark)
        if isinstance(event, yaml.AliasEvent) and node.end_mark is None:
            raise yaml.MarkedYAMLError(problem=f"*{event.anchor} stands in itself", problem_mark=mark)
        if not isinstance(event, yaml.AliasEvent):
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            several = (each for part in parts for each in (part if isinstance(part, tuple) else (part,)))
            self._sizes[id(node)] = size = 1 + sum(self._sizes[id(each)] for each in several)
            if size > MOST:
                raise yaml.MarkedYAMLError(
                    problem=f"{size:,} values, those of aliases counted each time; expected at most {MOST:,}",
                    problem_mark=mark,
                )
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
