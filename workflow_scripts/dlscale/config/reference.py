"""The reference of `config.yaml` in Markdown, made from its JSON schema: each key, what it may be, its default."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dlscale.core.schema import NAME_IN_WORDS

Node = dict[str, Any]

HEAD = f"""# Every key of `config.yaml`

Made by `dlscale schema --markdown`. `dlscale schema` prints the same as a JSON schema, with which editors complete and
check keys. No key has to be there: what is absent is as a study ships it
(`workflow_scripts/dlscale/studies/STUDY.yaml`), or as it stands here.

**Names** of datasets, plans and runs become folders.
They have {NAME_IN_WORDS}.

Of a `--configfile` that is no YAML (a tab, an open bracket, an anchor in itself) Snakemake names neither file nor line,
since it reads it before anything of dlscale; `dlscale why --configfile FILE` names both."""


def reference(schema: Node) -> str:
    """Return the reference; `schema` is that of `dlscale.config.resolve.schema`."""
    models: Node = schema["$defs"]
    lines, done = [HEAD, "", "## The file", "", *_table(schema, models)], list[str]()
    waiting = list(_held(schema))
    while waiting:
        name = waiting.pop(0)
        if name not in done:
            done.append(name)
            own = [each for each in _held(models[name]) if each not in done]
            waiting = [*own, *waiting]
            lines += ["", f"## {_title(name)}", ""]
            if said := " ".join(models[name].get("description", "").split()):
                lines += [said, ""]
            lines += _table(models[name], models)
    return "\n".join(lines) + "\n"


def _table(model: Node, models: Node) -> list[str]:
    rows = ["| key | may be | default | what it is |", "|---|---|---|---|"]
    for key, node in model.get("properties", {}).items():
        default = node.get("default", node.get("const"))
        told = "" if default is None or isinstance(default, dict) else json.dumps(default)
        # An override has no default; that of the key it overrides stands at its description's end.
        said, _, usual = node.get("description", "").partition("Default: ")
        told = told or usual.removesuffix(".")
        cells = [f"`{key}`", _may_be(node), f"`{told}`" if told else "", said.strip().replace("|", "\\|")]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _may_be(node: Node) -> str:
    """Return in words what a key may have."""
    options = node.get("anyOf") or node.get("allOf")
    if options:
        return " or ".join(dict.fromkeys(text for each in options if (text := _may_be(each)) not in ("", "null")))
    if "$ref" in node:
        return _link(node["$ref"].rpartition("/")[2])
    if "enum" in node or "const" in node:
        return ", ".join(f"`{json.dumps(value)}`".replace('"', "") for value in node.get("enum", [node.get("const")]))
    kind = node.get("type", "")
    if kind == "array":
        items: Node = node.get("items") or next(iter(node.get("prefixItems", [])), {})
        return f"list of {_may_be(items) or 'values'}"
    if kind == "object":
        held = node.get("additionalProperties") or next(iter(node.get("patternProperties", {}).values()), None)
        return f"names, each with {_may_be(held) or 'settings'}" if isinstance(held, dict) else "keys and values"
    if kind in ("integer", "number"):
        return " ".join([{"integer": "whole number", "number": "number"}[kind], *_bounds(node)])
    return {"string": "text", "boolean": "true, false"}.get(kind, str(kind))


def _bounds(node: Node) -> Iterator[str]:
    for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")):
        if key in node and abs(node[key]) < 2**31:  # what is beyond is told where it is met
            yield f"{sign} {node[key]:,}"


def _held(node: Any) -> Iterator[str]:
    """Yield the models that a node refers to, in order."""
    if isinstance(node, list):
        for each in node:
            yield from _held(each)
    elif isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for key, each in node.items():
            if key != "$defs":
                yield from _held(each)


def _title(name: str) -> str:
    return name.removesuffix("Settings")


def _link(name: str) -> str:
    return f"[{_title(name)}](#{_title(name).lower()})"
