"""PyYAML's safe loader, which also refuses what it would take in silence: keys written twice, and values in themselves."""

from __future__ import annotations

import yaml


class Loader(yaml.SafeLoader):
    """Reads YAML; what is wrong with it is a `yaml.MarkedYAMLError`, with its line."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node; an alias must not name what it stands in."""
        event = self.peek_event()
        node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) and node.end_mark is None:
            raise yaml.MarkedYAMLError(problem=f"*{event.anchor} stands in itself", problem_mark=event.start_mark)
        return node  # type: ignore[no-any-return]

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Return a mapping; each of its keys is written once, while what `<<` brings may be written over."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)  # type: ignore[no-untyped-call]
        written: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (first := written.setdefault(key.value, key)) is not key:
                    problem = f"the key {key.value!r} stands in line {first.start_mark.line + 1} already; leave one out"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return node
