"""Values and configurations that a JSON schema describes, with mistakes."""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import functools
import json
import re
import zlib
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import yaml

from dlscale.config import resolve
from dlscale.core.errors import UserError
from dlscale.extensions.schema.reference import schema
from dlscale.preflight import run
from tests.conftest import ROOT, TINY
from tests.fuzz.damage import DEEP, TRAPS

Node = dict[str, Any]
Place = tuple[str | int, ...]

#: Texts that YAML's readers treat differently, or refuse.
YAML_TRAPS = (
    *(
        "yes",
        "on",
        "010",
        "0x1F",
        "1e3",
        "1_000",
        "12:30:00",
        ".inf",
        ".NaN",
        "2001-01-01",
        "=",
        "- 1",
        "? a",
        "!!int 3",
    ),
    *("!!python/object:os.system x", "&a [*a]", "*nobody", "{a: 1, a: 2}", "<<: 3", "{<<: [1, 2]}", "'", '"\\ud800"'),
    *(
        "|\n  x\n y",
        "@x",
        "`x`",
        "%x",
        "\t1",
        "[1, 2",
        "a: b: c",
        "---\n1",
        "\0",
        "\ufeff1",
        "'''",
        '"\\x00"',
        "!!binary 4",
    ),
    *(
        "&a {x: &b [1, 1, 1]}",
        "[" * 5_000,
        "9" * 5_000,
        "x" * 100_000,
        "\u2028",
        "é" * 3_000,
        "{? [1]: 2}",
        "null",
        "~",
        "",
    ),
)
#: One in this many accepted configurations is, on average, also planned by a dry run, which takes seconds.
DRY_RUNS = 10
#: Minimum similarity of keys (`difflib`) at which a message must suggest the right key.
SIMILAR = 0.6
#: Words of a message that states the expected value or the remedy.
EXPECTATION = re.compile(
    r"expected|did you mean|valid keys|there (are|is)|need|must|remove|rename|choose|change|set |give|write|either|only"
    r"|missing|greater|less|at (most|least)|cannot|not (valid|supported|allowed)|valid YAML|exclude|use |larger"
)


def sample(node: Node, models: Node, random: Random, depth: int = 0) -> Any:
    """Return a random value that fits most constraints of a node of a JSON schema."""
    if "$ref" in node:
        return sample(models[node["$ref"].rpartition("/")[2]], models, random, depth)
    if "anyOf" in node:
        return sample(random.choice(node["anyOf"]), models, random, depth)
    if "enum" in node or "const" in node:
        return random.choice(node.get("enum", [node.get("const")]))
    again = functools.partial(sample, models=models, random=random, depth=depth + 1)
    low = max(node.get("minimum", 0), node.get("exclusiveMinimum", -1) + 1e-3)
    high = max(low, min(node.get("maximum", 8), node.get("exclusiveMaximum", 8)))
    match node.get("type"):
        case "integer":
            return random.randint(int(-(-low // 1)), max(int(-(-low // 1)), int(high)))
        case "number":
            return random.uniform(low, high)
        case "boolean":
            return random.random() < 0.5
        case "null":
            return None
        case "array" if "prefixItems" in node:
            return [again(each) for each in node["prefixItems"]]
        case "array":
            least = node.get("minItems", 0)
            return [again(node.get("items", {})) for _ in range(least + random.randrange(2 if depth < 3 else 1))]
        case "object" if "properties" in node:
            there, needed = node["properties"], node.get("required", ())
            chosen = [key for key in there if key in needed or random.random() < (0.3 if depth < 3 else 0)]
            return {key: again(there[key]) for key in chosen}
        case "object":
            return {"train": again(_named(node))} if depth < 3 and _named(node) else {}
    return random.choice(["a1", "train", "2001-01-02T00:00:00+00:00", "data", "p.a"])


def _named(node: Node) -> Node:
    held = node.get("additionalProperties") or next(iter(node.get("patternProperties", {}).values()), {})
    return held if isinstance(held, dict) else {}


@functools.cache
def _schema() -> Node:
    return schema()


@functools.cache
def _studies() -> dict[str, resolve.StudyFile]:
    """Return the studies without their plans and datasets, which would take most of the time of a case."""
    return {name: each.model_copy(update={"plans": {}, "datasets": {}}) for name, each in SHIPPED().items()}


SHIPPED = resolve.study_files


def bases(folder: Path) -> None:
    """Write a valid configuration for each study."""
    folder.mkdir(parents=True)
    for study, tiny in TINY.items():
        plan = {"study": study, "settings": {"dataset": "data", **tiny["run"]}, "runs": {"a": {}, "b": {"seed": 1}}}
        raw = {"targets": ["p"], "datasets": {"data": tiny["dataset"]}, "plans": {"p": plan}}
        (folder / f"{study}.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))


def mistake(file: Path, other: bytes, random: Random) -> None:
    """Change a configuration in up to three places, and sometimes a value in its text.

    The file `changed` in the same folder names the changed and the misspelt keys, unless a value in the text was
    changed.
    """
    raw, misspelt = yaml.safe_load(file.read_text()), dict[str, str]()
    places = [_change(raw, misspelt, random) for _ in range(random.choice([1, 1, 1, 2, 3]))]
    text = yaml.safe_dump(raw, sort_keys=False, allow_unicode=True).replace(DEEP, "[" * 5_000)
    if random.random() < 0.25:
        found = [*re.finditer(r"(?<=: )[^\n|>]+$", text, re.MULTILINE)]
        start, end = random.choice(found).span()
        text, places, misspelt = text[:start] + random.choice(YAML_TRAPS) + text[end:], [], {}
    latin = text.isascii() or random.random() < 0.02
    file.write_bytes(text.encode("latin-1", "replace") if latin else text.encode("utf-8", "surrogatepass"))
    (file.parent / "changed").write_text(json.dumps([places, misspelt, file.name]))


def _change(raw: Node, misspelt: dict[str, str], random: Random) -> list[str]:
    """Change a random value or key of the schema; return the keys on the path to the change.

    A misspelt key of the schema is added, with the right key, to `misspelt`.
    """
    models, node, holder, key, keys, valid = _schema()["$defs"], _schema(), raw, "", list[str](), Node()
    while True:
        while "$ref" in node or "anyOf" in node:
            node = models[node["$ref"].rpartition("/")[2]] if "$ref" in node else random.choice(node["anyOf"])
        inner, named = node.get("properties"), _named(node)
        if not (inner or named) or (keys and random.random() < 0.1):
            break
        if keys:
            if not isinstance(holder.get(key), dict):
                holder[key] = {}
            holder = holder[key]
        if inner and "const" in inner.get("kind", {}):
            holder["kind"] = inner["kind"]["const"]
        likely = [each for each in inner or () if each in holder or each in ("plans", "settings", "runs")]
        key = random.choice(likely if likely and random.random() < 0.7 else [*(inner or [*holder, "b"])])
        node, valid = inner[key] if inner else named, inner or {}
        keys.append(key)
    match random.randrange(10):
        case 0 | 1 | 2:
            holder[key] = sample(node, models, random)
        case 3 | 4:
            at = random.randrange(len(key))
            wrong = random.choice(
                [key[:at] + key[at + 1 :], key[:at] + "e" + key[at:], key.replace("_", ""), key + "s"]
            )
            holder[wrong] = holder.pop(key, sample(node, models, random))
            misspelt |= {wrong: key} if key in valid and wrong not in valid else {}
            return [*keys[:-1], wrong]
        case 5:
            holder.pop(key, None)
        case 6:
            holder[key] = copy.deepcopy(random.choice([raw, holder, [holder.get(key)], str(holder.get(key))]))
        case _:
            holder[key] = random.choice(TRAPS)
    return keys


def load(folder: Path) -> None:
    """Resolve a configuration; an error must name a changed key or a line, and the expected value or the remedy.

    For a misspelt key, the error must suggest the right key, or another key that is as similar, unless the similarity
    is at most `SIMILAR`.
    """
    default = [[], {}, next(folder.glob("*.yaml")).name]
    places, misspelt, name = json.loads((folder / "changed").read_text()) if (folder / "changed").exists() else default
    try:
        resolved(folder / name)
    except UserError as error:
        text = str(error)
        known = ["line ", "no plan", "no dataset", *(key for keys in places for key in keys[1:] or keys)]
        if (places and not any(key in text for key in known)) or not EXPECTATION.search(text):
            raise AssertionError(f"changed {places}; unclear: {text[:1500]}") from None
        for wrong, right in misspelt.items():
            lines = [line for line in text.splitlines() if f"unknown key '{wrong}'" in line]
            near = re.findall(r"did you mean (.*?)\?\)", "".join(lines))
            found = [name.rpartition(".")[2] for name in re.findall(r"'(.*?)'", " ".join(near))]
            if lines and _similarity(wrong, right) > max([SIMILAR, *(_similarity(wrong, each) for each in found)]):
                raise AssertionError(f"{wrong} instead of {right}: not suggested: {text[:1500]}") from None
        raise


def planned(folder: Path) -> None:
    """Resolve a configuration; for a fraction of the accepted configurations, also make a dry run of the workflow."""
    load(folder)
    file = max(folder.glob("*.yaml"), key=lambda file: file.stat().st_mtime_ns)
    if zlib.crc32(file.read_bytes()) % DRY_RUNS:
        return
    work = folder.parent / "work"
    work.mkdir(exist_ok=True)
    for name in ("Snakefile", "rules", "profiles", "workflow_scripts", "config.yaml"):
        (work / name).unlink(missing_ok=True)
        (work / name).symlink_to(ROOT / name)
    with contextlib.chdir(work):
        status, said, _ = run.dry_run([], argparse.Namespace(profile=None, configfile=[str(file)], config=None))
    assert "Traceback" not in said and (not status or EXPECTATION.search(said)), said[-3000:]
    if status:
        raise UserError(said)


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, one).ratio()


def resolved(path: Path) -> None:
    with mock.patch.object(resolve, "study_files", _studies):
        resolve.load_files(path)
