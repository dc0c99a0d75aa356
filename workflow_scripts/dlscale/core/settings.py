"""Read settings from YAML, validate them, and explain wrong values in messages."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from dlscale.core.errors import UserError, brief, cut, nearest
from dlscale.core.files import no_pipe, read_text, translate_error, write_text
from dlscale.core.schema import BOUNDS, NAME, NAME_IN_WORDS, key_paths
from dlscale.core.text import many

Raw = dict[str, Any]
Kind = TypeVar("Kind")

#: YAML tag of strings.
STRING_TAG = "tag:yaml.org,2002:str"

#: Maximum number of additional values that the aliases in a file may produce.
MAX_ALIASED_VALUES = 100_000
#: Maximum number of lists and mappings within each other.
MAX_DEPTH = 10_000


def read_settings(config: str | Path, option: str = "--config") -> tuple[Raw, str]:
    """Return the settings in a YAML file or a JSON text, and their origin for messages."""
    if not str(config).startswith("{"):
        return read_yaml(config), str(config)
    try:
        return json.loads(str(config)), option
    except (ValueError, RecursionError) as error:
        raise UserError(f"{option}: not valid JSON ({brief(error)}); pass valid JSON or a YAML file") from None


def write_yaml(path: str | Path, settings: Raw) -> None:
    """Write settings to a YAML file for readers of the results."""
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    write_text(path, f"# Written by the workflow: the resolved settings. Change config.yaml instead.\n{text}")


class YamlLoader(yaml.CSafeLoader):
    """PyYAML's safe loader, with numbers and booleans as in YAML 1.2, and a limit on aliases.

    The loader uses libyaml's parser. YAML 1.1 would read 12:00:00 as 43,200, 010 as 8, and `no` as false. This loader
    returns a string for every value that is not clearly a number, `true`, `false` or null; validation then converts the
    string to the type of the setting. Keys are strings as written.
    """

    yaml_implicit_resolvers: ClassVar = {}  # type: ignore[misc]  # removes the resolvers of YAML 1.1

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._seen: set[yaml.Node] = set()

    def get_single_data(self) -> Any:
        """Return the only document of the stream as Python objects."""
        node = self.get_single_node()
        if node is None:
            return None
        written: dict[yaml.Node, int] = {}
        if (size := _expanded(node, written)) > len(written) + MAX_ALIASED_VALUES:
            problem = f"its aliases (*) stand for {size:.2g} values; expected at most {MAX_ALIASED_VALUES:,}"
            raise yaml.MarkedYAMLError(problem=problem)
        for each in written:
            self._check_tag(each)
        return self.construct_object(node, deep=True)  # `deep` refuses a value that contains itself

    def _check_tag(self, node: yaml.Node) -> None:
        """Refuse a tag in the file, such as `!!int`, that changes how a value is read.

        The tag `!!str` is allowed.
        """
        plain = isinstance(node, yaml.ScalarNode) and not node.style
        if node.tag not in (STRING_TAG, self.resolve(type(node), node.value, (plain, not plain))):
            name = node.tag.replace("tag:yaml.org,2002:", "!!")
            problem = f"the tag {name} is not supported; remove it, or write !!str for text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Refuse a NUL character, which is invalid in paths, commands and labels."""
        value = super().construct_scalar(node)
        if "\0" in str(value):
            raise yaml.MarkedYAMLError(problem="a NUL character; remove it", problem_mark=node.start_mark)
        return value

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuse repeated keys, then merge the values of the key `<<`."""
        written: dict[str, yaml.Node] = {}
        for key, _ in node.value if node not in self._seen else ():
            if (first := written.setdefault(str(key.value), key)) is not key and key.value != "<<":
                problem = f"the key {key.value!r} is already in line {first.start_mark.line + 1}; remove one of the two"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                key.tag = STRING_TAG  # all keys are strings, even 1 and true
        self._seen.add(node)
        super().flatten_mapping(node)


for _tag, _pattern, _starts in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), [*_starts])


def _expanded(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """Return the number of values in a node after its aliases are replaced by their values."""
    if node not in sizes:
        sizes[node] = 1  # set first, because a node may contain itself, which `construct_object` refuses later
        if isinstance(node, yaml.CollectionNode):
            mapping = isinstance(node, yaml.MappingNode)
            inner = itertools.chain.from_iterable(node.value) if mapping else node.value
            sizes[node] += sum(_expanded(each, sizes) for each in inner)
    return sizes[node]


class StringLoader(YamlLoader):
    """`YamlLoader` that reads numbers, booleans and null as strings, as in Snakemake's `--config`."""

    yaml_implicit_resolvers: ClassVar = {}  # type: ignore[misc]


def read_yaml(path: str | Path, linked: bool = True) -> Raw:
    """Read a YAML mapping in UTF-8 with `YamlLoader`; raise a `UserError` for any other content.

    Unless `linked`, refuse a link.
    """
    no_pipe(path, "a file of settings")  # after this read, a pipe would be empty for the next reader (Snakemake)
    try:
        raw = load_yaml(read_text(path, linked=linked).removeprefix("\ufeff"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise translate_error(error, path) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not in UTF-8; save the file in UTF-8") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected keys and values, got {type(raw).__name__}")
    return raw


def load_yaml(text: str, where: str, loader: type[YamlLoader] = YamlLoader) -> Any:
    """Return the value of a YAML text.

    Raise a `UserError` for a mistake, with the line if it is known.
    """
    try:
        # libyaml's composer calls itself for each level of lists and mappings: 100,000 levels would overflow the stack.
        events = yaml.parse(text, yaml.CSafeLoader) if max(map(text.count, "[{-?")) > MAX_DEPTH else ()
        rises = (isinstance(e, yaml.CollectionStartEvent) - isinstance(e, yaml.CollectionEndEvent) for e in events)
        if any(depth > MAX_DEPTH for depth in itertools.accumulate(rises)):
            raise RecursionError(f"more than {MAX_DEPTH:,} levels")
        return loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # for example with thousands of digits or brackets
        raise UserError(f"{where}: not valid YAML: {brief(error)}") from None


def typed(word: str) -> tuple[str, Any]:
    """Return key and value of KEY=VALUE; numbers, booleans and null stay strings, as in Snakemake's `--config`."""
    key, equals, text = word.partition("=")
    if not (key and equals):
        raise UserError(f"{word}: expected KEY=VALUE, such as results=results")
    return key, load_yaml(text, word, StringLoader)


def validate(kind: type[Kind], raw: Any, where: str = "configuration", layers: Sequence[tuple[str, Raw]] = ()) -> Kind:
    """Validate `raw` with pydantic as `kind`.

    Raise one `UserError` that names the path of each wrong key, for the first 8 errors.

    `raw` was merged from `layers`, pairs of key path and settings; later layers override earlier layers. The error
    names the path of the layer that set the wrong value.
    """
    try:
        return TypeAdapter(kind).validate_python(raw)
    except ValidationError as error:
        raise UserError(_translate(error, kind, raw, where, layers)) from None


def _translate(error: ValidationError, kind: Any, raw: Any, where: str, layers: Sequence[tuple[str, Raw]]) -> str:
    """Return a message with one line for each wrong value in `raw`; see `validate`."""
    reasons: dict[str, list[str]] = {}
    for item in error.errors(include_url=False)[:8]:
        keys = _path(raw, item["loc"])
        culprits = [keys]
        if item["type"] == "unknown_key":
            culprits = [(*keys, item["ctx"]["key"])]
        elif item["type"] == "value_error":
            # If a check involves several keys, its message names the keys.
            culprits = [(*keys, *name.split(".")) for name in re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", item["msg"])]
        written = [path for path, layer in layers if any(holds(layer, culprit) for culprit in culprits)]
        prefix = written[-1:] or [path for path, _ in layers[-1:]]
        path = ".".join(map(str, [*prefix, *keys]))
        reason = _elsewhere(kind, keys, item, prefix) if item["type"] == "unknown_key" else _reason(item)
        # One line per value, because each member of a union has an error of its own for the same value.
        reasons.setdefault(f"{where}: {cut(path) + ': ' if path else ''}", []).append(cut(reason, 600))
    return "\n".join(place + "; or: ".join(dict.fromkeys(each)) for place, each in reasons.items())


def _elsewhere(kind: Any, keys: tuple[int | str, ...], item: Any, prefix: Sequence[str]) -> str:
    """Return the message for an unknown key.

    Suggest sections in which a key of this name exists.
    """
    key, here, valid = item["ctx"]["key"], tuple(map(str, keys)), item["ctx"]["keys"].split(", ")
    if difflib.get_close_matches(key, valid, n=1, cutoff=0.9):  # a typing error is likelier than a wrong section
        return str(item["msg"])
    # For each key: distance from `here` in the tree (up to a constant), path, length of the prefix shared with `here`.
    every = [(len(path) - 2 * same, path, same) for path in set(key_paths(kind)) for same in [_shared(path, here)]]
    # Skip keys of other members of a union, because these keys are not valid in this section.
    every = [each for each in sorted(every) if each[2] < len(here) or each[1][len(here) :] in item["ctx"]["paths"]]
    named = [each for each in every if each[1][-1] == key]
    near = [each for each in named if each[0] == named[0][0]]
    if not 1 <= len(near) <= 3:  # a suggestion is useless if many sections have the key, such as `kind`
        return str(item["msg"])
    places = [
        ".".join(path[same:] if same == len(here) < len(path) else (*prefix, *here[:same], *path[same:]))
        for _, path, same in near
    ]
    meant = " or ".join(f"'{place.replace('*', 'NAME')}'" for place in places)
    return f"unknown key '{key}' (did you mean {meant}?); valid keys: {item['ctx']['keys']}"


def _shared(path: tuple[str, ...], here: tuple[str, ...]) -> int:
    """Return the length of the common prefix of two paths; `*` matches any name."""
    steps = zip(path, here, strict=False)
    return len([*itertools.takewhile(lambda step: step[0] in ("*", step[1]), steps)])


def _reason(item: Any) -> str:
    """Return the message for an error of pydantic, with the given and the expected value."""
    context, given = item.get("ctx", {}), item.get("input")
    got = f"got {cut(repr(given))}"
    match item["type"]:
        case "missing":
            last = item["loc"][-1]
            return f"value {last + 1} is missing" if isinstance(last, int) else "this key is missing"
        case "model_attributes_type" | "model_type" | "dict_type":
            return f"{got}; expected keys and values"
        case "union_tag_not_found":
            return "the key 'kind' is missing"
        case "union_tag_invalid":
            tag, tags = cut(str(context["tag"])), _choices(context["expected_tags"])
            return f"kind: no such kind '{tag}'{nearest(tag, tags)}; expected one of: {', '.join(tags)}"
        case "literal_error":
            choices = _choices(context["expected"])
            return f"{got}{nearest(str(given), choices)}; expected one of: {', '.join(choices)}"
        case "string_pattern_mismatch":
            pattern = context["pattern"]
            return f"{got}; expected {NAME_IN_WORDS if pattern == NAME else f'to match {pattern}'}"
        case "value_error":
            return str(context["error"])
        case "not_a_mapping":
            return f"{got}; {item['msg']}"
        case "string_type" if given is None or isinstance(given, bool | int | float):
            expected = "text; write the value in quotes"
        case "too_short":
            return f"got {given!r}; expected at least {many(context['min_length'], 'value')}"
        case "less_than_equal" if why := BOUNDS.get(context["le"]):
            expected = f"at most {context['le']:{',.0f' if context['le'] < 1e9 else 'g'}} ({why})"
        case "int_parsing_size":
            expected = "a smaller number"
        case _:
            expected = item["msg"].removeprefix("Input should be ")
    return f"got {repr(given) if len(repr(given)) < 60 else type(given).__name__}; expected {expected}"


def _choices(listed: str) -> list[str]:
    return [word.strip("' ") for word in listed.replace(" or ", ", ").split(",")]


def _path(raw: Any, location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return a location of pydantic without union tags, which are not keys of the file."""
    path: list[int | str] = []
    here = raw
    for position, key in enumerate(location):
        if key == "[key]":  # this marker follows a name that is itself wrong
            continue
        try:
            here = here[key]
        except (KeyError, IndexError, TypeError):
            # Only the last element can be a missing key; other missing elements are tags.
            last = position == len(location) - 1
            if not last or not isinstance(here, Mapping) or here.get("kind") == key:
                continue
        path.append(key)
    return tuple(path)


def flat(settings: Raw, prefix: str = "") -> Raw:
    """Return nested settings as one mapping with dotted keys, in the same order."""
    return {
        path: inner
        for key, value in settings.items()
        for path, inner in (
            flat(value, f"{prefix}{key}.").items() if isinstance(value, dict) else [(f"{prefix}{key}", value)]
        )
    }


def nested(values: Raw) -> Raw:
    """Return settings with dotted keys as nested mappings."""
    settings: Raw = {}
    for key, value in values.items():
        *path, last = key.split(".")
        functools.reduce(lambda inner, word: inner.setdefault(word, {}), path, settings)[last] = value
    return settings


def holds(layer: Any, keys: tuple[int | str, ...]) -> bool:
    """Return whether nested settings have a value at this path."""
    for key in keys:
        try:
            layer = layer[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True
