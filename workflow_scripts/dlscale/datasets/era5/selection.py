"""Which fields of a variable are one series, where files hold several: members, forecast steps, types of levels.

What tells fields apart are their traits (`Variable.traits`): keys of GRIB, dimensions and coordinates of NetCDF.
`source.select` takes the fields with certain values of these; what is left twice is refused by name.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dlscale.core.errors import UserError, nearest
from dlscale.datasets.era5.kind import Value
from dlscale.datasets.era5.variable import Variable

Select = Mapping[str, Value | list[Value]]

#: What fields that share a time may differ in, the likeliest first, and what its values are called.
WORDS = {
    **{"number": "members", "typeOfLevel": "types of levels", "stepType": "step types", "step": "forecast steps"},
    **{"stepRange": "ranges of steps", "dataType": "data types", "expver": "versions"},
}
#: What the values of a range of steps are.
_OVER = {"accum": "accumulated", "avg": "mean", "max": "maximum", "min": "minimum"}
_MONTH = range(28 * 24, 31 * 24 + 1)  # hours


def chosen(variable: Variable, select: Select) -> np.ndarray:
    """Return which fields of a variable `select` takes, bool [T]; those without a key are not chosen by it."""
    keep = np.ones(variable.times.shape, bool)
    for key, wanted in select.items():
        values = variable.traits.get(key, np.full(keep.shape, None)).tolist()
        taken = {value: value is None or any(_same(value, other) for other in _list(wanted)) for value in set(values)}
        keep &= [taken[value] for value in values]
    return keep


def check_chosen(name: str, variables: list[Variable], select: Select, label: str) -> None:
    """Refuse a selection that leaves nothing of the variables of a channel."""
    if not any(chosen(variable, select).any() for variable in variables):
        for key, value in select.items():
            wanted = _list(value)
            there = _values(key, ((variable, np.ones(variable.times.shape, bool)) for variable in variables))
            if there and not any(_same(value, other) for value in there for other in wanted):
                raise UserError(
                    f"{label}: channel '{name}': no field has {key} {_listed(wanted)} (source.select); there are: "
                    f"{_listed(there)}"
                )
        raise UserError(f"{label}: channel '{name}': no field has all of source.select; take some of its keys out")


def check_keys(variables: list[Variable], select: Select, label: str) -> None:
    """Refuse a key that no field has."""
    known = sorted({key for variable in variables for key in variable.traits if _any(variable.traits[key])})
    for key in select:
        if key not in known:
            raise UserError(
                f"{label}: source.select: no field has the key '{key}'{nearest(key, known)}; there are: "
                f"{', '.join(known) or 'none'}"
            )


def check_one_series(name: str, kept: list[tuple[Variable, np.ndarray]], label: str) -> None:
    """Refuse fields of several members, or of several ranges of time, as the series of a channel."""
    if len(members := _values("number", kept)) > 1:
        raise UserError(f"{label}: channel '{name}' has the members {_listed(members)}; {_advice('number', members)}")
    told = [variable.traits.get("number", np.full(keep.shape, None))[keep].tolist() for variable, keep in kept]
    if members not in ([], [0]) and any(None in some for some in told):  # 0 is what others leave without a number
        raise UserError(
            f"{label}: channel '{name}' has fields of member {members[0]} and fields of none; choose by another key of "
            "source.select, such as dataType, or leave a file out"
        )
    ranges: dict[str, dict[str, set[str]]] = {}  # of steps, by what fields are, and their step types
    for variable, keep in kept:
        if "stepType" in variable.traits:
            types = variable.traits["stepType"][keep]
            steps = variable.traits["stepRange"][keep] if "stepRange" in variable.traits else np.full(types.shape, "")
            for kind, step in sorted({*zip(map(str, types), map(str, steps), strict=True)}, key=_numbers):
                ranges.setdefault(_nature(kind, step), {}).setdefault(kind, set()).add(step)
    if len(ranges) > 1:
        (kind, steps), *_ = next(iter(ranges.values())).items()
        if sum(kind in kinds for kinds in ranges.values()) == 1:
            advice = _advice("stepType", [kind])
        else:
            advice = _advice("stepRange", [sorted(steps, key=_numbers)])
        raise UserError(f"{label}: channel '{name}' is of several kinds: {', '.join(ranges)}; {advice}")


def told_apart(name: str, fields: list[tuple[Variable, int]], when: str, label: str) -> UserError:
    """Return the refusal of several fields of a channel (a variable, and which of its fields) at one time."""
    held = [{key: np.asarray(of[at]).tolist() for key, of in variable.traits.items()} for variable, at in fields]
    for each, (variable, at) in zip(held[:2], fields, strict=False):
        each |= {key: value for key, value in variable.keys(at).items() if key not in each}
    for key in dict.fromkeys([*WORDS, *(key for each in held for key in each)]):
        values = {each[key] for each in held if key in each} - {None}
        if len(values) > 1:
            several = _sorted(values)
            many = "two" if len(fields) == 2 else str(len(fields))
            return UserError(
                f"{label}: {many} fields of '{name}' at {when}: {WORDS.get(key, key)} {_listed(several)} (in "
                f"{' and '.join([*dict.fromkeys(variable.origin for variable, _ in fields)][:2])}); "
                f"{_advice(key, several)}"
            )
    places = [*dict.fromkeys(variable.origin for variable, _ in fields)]
    return UserError(
        f"{label}: channel '{name}' stands twice at {when}: in {' and '.join(places[:2])}, and nothing that "
        "source.select could choose by tells the fields apart; give each time once"
    )


def _advice(key: str, values: Sequence[Any]) -> str:
    value = values[0][0] if isinstance(values[0], list) and len(values[0]) == 1 else values[0]
    text = f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else _text(value)
    return f"choose one: source: {{select: {{{key}: {text}}}}}"


def _numbers(texts: str | tuple[str, str]) -> tuple[Any, ...]:
    """Return what ranges of steps, and step types before them, are ordered by."""
    *kinds, steps = [texts] if isinstance(texts, str) else texts
    return (*kinds, *map(int, re.findall(r"\d+", steps)))


def _nature(kind: str, steps: str) -> str:
    """Return what a field is: of one time, or of a range, and how long that is."""
    ends = re.fullmatch(r"(\d+)([smhD]?)-(\d+)([smhD]?)", steps)
    if not ends:
        return "instantaneous" if kind == "instant" else _OVER.get(kind, kind)
    hours = {"s": 1 / 3600, "m": 1 / 60, "D": 24.0}
    length = int(ends[3]) * hours.get(ends[4], 1) - int(ends[1]) * hours.get(ends[2], 1)
    return f"{_OVER.get(kind, kind)} over {'a month' if length in _MONTH else f'{length:g} h'}"


def _values(key: str, kept: Iterable[tuple[Variable, np.ndarray]]) -> list[Any]:
    """Return the values of a key that fields have, once each, in order."""
    told = [variable.traits[key][keep].tolist() for variable, keep in kept if key in variable.traits]
    values = {value for some in told for value in some}
    return _sorted(values - {None})


def _sorted(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def _list(wanted: Value | list[Value]) -> list[Value]:
    return wanted if isinstance(wanted, list) else [wanted]


def _any(values: np.ndarray) -> bool:
    return any(value is not None for value in values)


def _same(value: Any, other: Any) -> bool:
    """Whether a field's value is the asked one; 6, 6.0 and '6' are one, and '0001' is 1."""
    with contextlib.suppress(ValueError):
        return float(value) == float(other)
    return str(value) == str(other)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _listed(values: Sequence[Any], most: int = 12) -> str:
    few = [_text(value) for value in values[:most]]
    if len(values) > most:
        return f"{', '.join(few)} and {len(values) - most} more"
    return " and ".join([", ".join(few[:-1]), few[-1]] if len(few) > 1 else few)
