"""JSON schema of `config.yaml`, and its reference in Markdown: keys, values and defaults."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from dlscale.config.workflow import workflow_class
from dlscale.core.schema import NAME_IN_WORDS

Node = dict[str, Any]

HEAD = f"""# Every key of `config.yaml`

This page lists the keys with which a configuration defines plans, runs, data and the machine.
`dlscale schema --markdown` prints this page. `dlscale schema` prints the same keys as a JSON schema, with which editors
complete and check the keys. An absent key has the value in the study's file (`study.yaml`), or the default below;
a key with neither is required.

**Names** of datasets, plans and runs become names of folders.
A name has {NAME_IN_WORDS}.

If a `--configfile` is not valid YAML (a tab, an open bracket, an anchor within itself), Snakemake's message does not
name the file and the line; `dlscale why --configfile FILE` names both."""


#: Keys of a first study: path in the file → class and key. Runs are in `plans.NAME.runs`.
FIRST_KEYS = {
    "targets": ("", "targets"),
    "datasets.NAME.source": ("StarterDataset", "source"),
    "plans.NAME.study": ("Plan", "study"),
    "plans.NAME.from": ("Plan", "from"),
    "plans.NAME.measure": ("Plan", "measure"),
    "plans.NAME.runs": ("Plan", "runs"),
    "RUN.batch_size": ("RunSettings", "batch_size"),
    "RUN.optimizer.lr": ("Adam", "lr"),
    "RUN.precision": ("RunSettings", "precision"),
    "RUN.training.epochs": ("Training", "epochs"),
}

#: Groups of sections: title, class, and the keys of this class whose values the sections describe.
GROUPS = (
    ("Plans and runs", "", ("plans",)),
    ("Model and loss", "RunSettings", ("model", "loss")),
    ("Samples and loading", "RunSettings", ("samples", "loader")),
    ("Training and optimisers", "RunSettings", ("training", "optimizer", "schedule")),
    ("Compiling and devices", "RunSettings", ("compile", "geometry", "parallel")),
    ("Measuring and tuning", "RunSettings", ("throughput", "profile", "tune")),
    ("External programs", "RunSettings", ("program",)),
    ("Datasets", "", ("datasets",)),
    ("Machine, cost and page", "", ("site", "budget", "report")),
)


class _Overrides(GenerateJsonSchema):
    """Schema generator that requires no key, not even `kind`.

    No key is required because a file may override only some keys of another file.
    """

    def field_is_required(self, field: Any, total: bool) -> bool:
        return False

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> Node:
        return self.union_schema(core_schema.union_schema([*schema["choices"].values()]))

    def dict_schema(self, schema: core_schema.DictSchema) -> Node:
        made = super().dict_schema(schema)
        return {**made, "additionalProperties": False} if "patternProperties" in made else made


def schema() -> Node:
    """Return the JSON schema of `config.yaml`, for editors."""
    of_workflow = workflow_class().model_json_schema(schema_generator=_Overrides)
    models = of_workflow["$defs"]
    for model in [of_workflow, *models.values()]:
        for node in model.get("properties", {}).values():
            said = [models[name].get("description", "").split("\n\n")[0] for name in _held(node)]
            if "description" not in node and any(said):  # a key without a description gets its model's description
                node["description"] = " Or: ".join(" ".join(text.split()) for text in dict.fromkeys(said) if text)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **of_workflow, "title": "dlscale"}


def reference() -> str:
    """Return the reference: tables of first keys and of the file's keys, then a table per section, grouped by task."""
    found = schema()
    models: dict[str, Node] = {"": found, **found["$defs"]}
    first = {path: models[name]["properties"][key] for path, (name, key) in FIRST_KEYS.items()}
    lines = [HEAD, "", "## Keys of a first study", "", "RUN stands for `plans.NAME.runs.NAME`.", ""]
    lines += [*_table({"properties": first}), "", "## All keys of the file", "", *_table(found)]
    listed = set[str]()
    for title, owner, keys in GROUPS:
        lines += ["", f"## {title}"]
        for name in [name for key in keys for name in _sections(models[owner]["properties"][key], models)]:
            if name in listed:
                continue
            listed.add(name)
            said = " ".join(models[name].get("description", "").split())
            lines += ["", f"### {name.removesuffix('Settings')}", "", *([said, ""] if said else [])]
            lines += _table(models[name])
    return "\n".join(lines) + "\n"


def _sections(node: Any, models: dict[str, Node]) -> list[str]:
    """Return the classes that describe a key's value, and the classes of their keys, except the classes of a run."""
    if isinstance(node, list):
        return [name for each in node for name in _sections(each, models)]
    if not isinstance(node, dict):
        return []
    if "$ref" not in node:
        return _sections([*node.values()], models)
    name = node["$ref"].rpartition("/")[2]
    return [name, *([] if name == "RunSettings" else _sections(models[name], models))]


def _table(model: Node) -> Iterator[str]:
    yield "| key | values | default | description |"
    yield "|---|---|---|---|"
    for key, node in model.get("properties", {}).items():
        default = node.get("default", node.get("const"))
        told = "" if default is None or isinstance(default, dict) else json.dumps(default)
        # If the schema has no default for a key, the key's description may end with the default.
        said, _, usual = node.get("description", "").partition("Default: ")
        told = told or usual.removesuffix(".")
        cells = [f"`{key}`", _may_be(node), f"`{told}`" if told else "", said.strip().replace("|", "\\|")]
        yield "| " + " | ".join(cells) + " |"


def _may_be(node: Node) -> str:
    """Return the allowed values of a key in words."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(text for each in node["anyOf"] if (text := _may_be(each)) not in ("", "null")))
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2].removesuffix("Settings")
        return f"[{name}](#{name.lower()})"
    if "enum" in node or "const" in node:
        return ", ".join(f"`{json.dumps(value)}`".replace('"', "") for value in node.get("enum", [node.get("const")]))
    kind = node.get("type", "")
    if kind == "array":
        items: Node = node.get("items") or next(iter(node.get("prefixItems", [])), {})
        return f"list of {_may_be(items) or 'values'}"
    if kind == "object":
        held = node.get("additionalProperties") or next(iter(node.get("patternProperties", {}).values()), None)
        return f"names, each with {_may_be(held) or 'settings'}" if isinstance(held, dict) else "keys and values"
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false"}
    return " ".join([words.get(kind, str(kind)), *_bounds(node)])


def _bounds(node: Node) -> Iterator[str]:
    for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")):
        tighter = key == "exclusiveMinimum" and "minimum" in node
        if key in node and not tighter and abs(node[key]) < 2**31:  # larger bounds do not help a reader
            yield f"{sign} {node[key]:,}"


def _held(node: Node) -> list[str]:
    """Return the names of the models that are allowed as a key's value."""
    held = [name for each in node.get("anyOf", ()) for name in _held(each)]
    return [*held, *([node["$ref"].rpartition("/")[2]] if "$ref" in node else [])]


def main(args: argparse.Namespace, configuration: None) -> int:
    """Print the JSON schema, or the reference with `--markdown`."""
    print(reference() if args.markdown else json.dumps(schema(), indent=2))
    return 0
