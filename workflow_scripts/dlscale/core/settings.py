"""Reading settings from YAML, and one clear message for each mistake in them."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dlscale.core.errors import UserError, brief, cut, nearest
from dlscale.core.files import no_pipe, write_text
from dlscale.core.schema import BOUNDS, NAME, NAME_IN_WORDS, key_paths
from dlscale.core.text import many

Raw = dict[str, Any]
#: Letters of a file of settings, at most.
MOST_LETTERS = 2_000_000
Kind = TypeVar("Kind")


def read_settings(config: str | Path, option: str = "--config") -> tuple[Raw, str]:
    """Return the settings in a YAML file, or in the JSON object of an option, and the name of their place."""
    if not str(config).startswith("{"):
        return read_yaml(config), str(config)
    try:
        return json.loads(str(config)), option
    except json.JSONDecodeError as error:
        raise UserError(f"{option}: not valid JSON ({error}); pass what the workflow prints, or a file") from None


def write_yaml(path: str | Path, settings: Raw) -> None:
    """Write settings for whoever reads the results."""
    import yaml

    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    write_text(path, f"# Written by the workflow: the resolved settings. Change config.yaml instead.\n{text}")


def read_yaml(path: str | Path) -> Raw:
    """Read a YAML mapping with the safe loader; anything else is a `UserError`."""
    import yaml  # settings may come as JSON, where there is no YAML

    from dlscale.core.yaml_loader import Loader

    no_pipe(path, "a file of settings")  # who reads it next, such as Snakemake, would find it empty
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MOST_LETTERS + 1)
        if len(text) > MOST_LETTERS:
            raise UserError(f"{path}: has more than {MOST_LETTERS:,} letters: no file of settings; name another")
        loader = Loader(text)
        node = loader.get_single_node()
        raw = loader.construct_document(node) if node else None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # a number of thousands of digits is one
        raise UserError(f"{path}: not valid YAML: {brief(error)}") from None
    except RecursionError:
        raise UserError(f"{path}: not valid YAML: too many brackets in each other") from None
    if not isinstance(raw, dict):
        line = f", line {node.start_mark.line + 1}" if node else ""
        raise UserError(f"{path}{line}: expected keys and values, got {type(raw).__name__}")
    return raw


def typed(word: str) -> tuple[str, Any]:
    """Return the key and the value of KEY=VALUE as it was typed; a `UserError` where it is no such word.

    Numbers remain strings, as those in Snakemake's `--config` do.
    """
    import yaml

    key, equals, text = word.partition("=")
    if not (key and equals):
        raise UserError(f"{word}: expected KEY=VALUE")
    try:
        return key, yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{word}: not valid YAML: {' '.join(str(error).split())}") from None


def validate(kind: type[Kind], raw: Any, where: str = "configuration", layers: Sequence[tuple[str, Raw]] = ()) -> Kind:
    """Validate `raw` as a type that pydantic knows; errors become one `UserError` that names each key by its path.

    `layers` are the paths and settings that `raw` was merged from, later ones over earlier ones: a wrong value is
    reported at the place where it was written.
    """
    try:
        return TypeAdapter(kind).validate_python(raw)
    except ValidationError as error:
        raise UserError(_explained(error, kind, raw, where, layers)) from None


def _explained(error: ValidationError, kind: Any, raw: Any, where: str, layers: Sequence[tuple[str, Raw]]) -> str:
    """Return one line for each place in `raw` that `error` complains of; `kind` and `layers` as in `validate`."""
    reasons: dict[str, list[str]] = {}
    for item in error.errors(include_url=False)[:8]:
        keys = _path(raw, item["loc"])
        culprits = [keys]
        if item["type"] == "unknown_key":
            culprits = [(*keys, item["ctx"]["key"])]
        elif item["type"] == "value_error":
            # A check of several keys names them in its message.
            culprits = [(*keys, *name.split(".")) for name in re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", item["msg"])]
        written = [path for path, layer in layers if any(holds(layer, culprit) for culprit in culprits)]
        prefix = written[-1:] or [path for path, _ in layers[-1:]]
        path = ".".join(map(str, [*prefix, *keys]))
        reason = _reason(item)
        if item["type"] == "unknown_key":
            reason = _elsewhere(kind, keys, item, prefix)
        reason += _of_a_list(keys, item) if layers else ""
        # One line a place: of a union each member has its own complaint about the same value.
        reasons.setdefault(f"{where}: {cut(path) + ': ' if path else ''}", []).append(cut(reason, 1_500))
    return "\n".join(place + "; or: ".join(dict.fromkeys(each)) for place, each in reasons.items())


def to_try(key: str, values: list[Any]) -> str:
    """Return how a sweep is written that tries each value of a key."""
    return f"; to try each value: kind: sweep, sweep: {{over: {{{key}: {json.dumps(values, default=str)}}}}}"


def _of_a_list(keys: tuple[int | str, ...], item: Any) -> str:
    """Return how several values are tried, if a list stands where one value belongs; else an empty string."""
    given, names = item.get("input"), [key for key in keys if isinstance(key, str)]
    one = names == [*keys] and (item["type"].endswith("_type") or item["type"] == "literal_error")
    return to_try(".".join(names), given) if one and isinstance(given, list) else ""


def _elsewhere(kind: Any, keys: tuple[int | str, ...], item: Any, prefix: Sequence[str]) -> str:
    """Return the message for an unknown key, with the place where a key of that name, or of a similar one, belongs."""
    key, here = item["ctx"]["key"], tuple(map(str, keys))

    def shared(path: tuple[str, ...]) -> int:
        """Return how many steps a path has in common with the way to here; `*` stands for any name."""
        steps = zip(path, here, strict=False)
        return len(list(itertools.takewhile(lambda step: step[0] in ("*", step[1]), steps)))

    def apart(path: tuple[str, ...]) -> int:
        """Return how many steps of the tree are between a key and here."""
        return len(here) + len(path) - 2 * shared(path)

    valid = set(item["ctx"]["keys"].split(", "))
    if difflib.get_close_matches(key, valid, n=1, cutoff=0.9):  # a letter too many or too few: nearer than any place
        return str(item["msg"])
    every = sorted(set(key_paths(kind)), key=lambda path: (apart(path), path))
    # Of a union each member has its keys; those of others are not valid here.
    every = [path for path in every if shared(path) < len(here) or not {*path[len(here) :][:1]} - valid]
    named = [path for path in every if path[-1] == key]
    if not named and not item["ctx"]["nearest"]:
        close = difflib.get_close_matches(key, {path[-1] for path in every}, n=1, cutoff=0.75)
        named = [path for path in every if path[-1] in close]
    near = [path for path in named if apart(path) == apart(named[0])]
    if not 1 <= len(near) <= 3:  # `kind` is a key of many sections, none of which is meant more than the others
        return str(item["msg"])

    def place(path: tuple[str, ...]) -> str:
        same = shared(path)
        below = same == len(here) < len(path)
        return ".".join(path[same:] if below else (*prefix, *here[:same], *path[same:])).replace("*", "NAME")

    places = " or ".join(f"'{place(path)}'" for path in near)
    return f"unknown key '{key}' (did you mean {places}?); valid keys: {item['ctx']['keys']}"


def _reason(item: Any) -> str:
    kind, context = item["type"], item.get("ctx", {})
    given = item.get("input")
    if kind == "missing":
        last = item["loc"][-1]
        return f"value {last + 1} is missing" if isinstance(last, int) else "this key is missing"
    if kind in ("model_attributes_type", "model_type", "dict_type"):
        return f"got {cut(repr(given))}; expected keys and values"
    if kind == "union_tag_not_found":
        return "the key 'kind' is missing"
    if kind == "union_tag_invalid":
        tags = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
        given = context["tag"]
        close = "" if isinstance(item["input"].get("kind"), list) else nearest(given, tags)
        return f"kind: no such kind '{given}'{close}; expected one of: {', '.join(tags)}"
    if kind == "literal_error":
        choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ", ").split(",")]
        close = "" if isinstance(given, list) else nearest(str(given), choices)
        return f"got {cut(repr(given))}{close}; expected one of: {', '.join(choices)}"
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        return f"got {cut(repr(given))}; expected {NAME_IN_WORDS if pattern == NAME else f'to match {pattern}'}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "not_a_mapping":
        return f"got {cut(repr(given))}; {item['msg']}"
    if kind == "too_short":
        return f"got {given!r}; expected at least {many(context['min_length'], 'value')}"
    message = item["msg"].removeprefix("Input should be ")
    shown = repr(given) if len(repr(given)) < 60 else type(given).__name__
    if kind == "less_than_equal" and (why := BOUNDS.get(context["le"])):
        message = f"at most {context['le']:{',.0f' if context['le'] < 1e9 else 'g'}}: {why}"
    elif kind == "int_parsing_size":
        message = "a smaller number"
    return f"got {shown}; expected {message}"


def _path(raw: Any, location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Drop from a pydantic location the union tags, which are no keys of the file."""
    path: list[int | str] = []
    here = raw
    for position, key in enumerate(location):
        if key == "[key]":  # the name itself is wrong; it stands before this mark
            continue
        try:
            here = here[key]
        except (KeyError, IndexError, TypeError):
            # A key that is missing ends the path; anything else that is not there is a tag.
            last = position == len(location) - 1
            if not last or not isinstance(here, Mapping) or here.get("kind") == key:
                continue
        path.append(key)
    return tuple(path)


def flat(settings: Raw, prefix: str = "") -> Raw:
    """Return nested settings as one mapping with dotted keys, in their order."""
    values: Raw = {}
    for key, value in settings.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values


def nested(values: Raw) -> Raw:
    """Return settings by dotted key as nested mappings."""
    settings: Raw = {}
    for key, value in values.items():
        *path, last = key.split(".")
        here = settings
        for word in path:
            here = here.setdefault(word, {})
        here[last] = value
    return settings


def holds(layer: Any, keys: tuple[int | str, ...]) -> bool:
    """Whether nested settings have a value at this path."""
    for key in keys:
        try:
            layer = layer[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True
