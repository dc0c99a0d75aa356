"""Types of settings, and the base class of all configuration models."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from dlscale.core.errors import nearest

#: Pattern of the names of datasets, plans and runs, without special characters because the names become folders.
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
NAME_IN_WORDS = "1 to 64 letters (A to Z), digits, '_' and '-', the first of them a letter or a digit"
Name = Annotated[str, StringConstraints(pattern=NAME)]

#: Whole numbers with a bound, because a larger number is a typing error and would fail later with an unclear message.
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
#: Number of nodes, GPUs or processes; the largest machines have tens of thousands.
Devices = Annotated[int, Field(gt=0, le=1_000_000)]
#: Samples per step.
BatchSize = Annotated[int, Field(gt=0, le=1_000_000_000)]
#: Upper bounds with the reasons that messages quote. A larger number is a typing error, which otherwise shows only when
#: the machine hangs or the job takes weeks.
BOUNDS = {
    512: "each node would start this many processes or threads",
    1_024: "no node has more cores, and libraries fail with thousands of threads",
    604_800: "one week",
    1_000: "larger numbers are not realistic",
    10_000: "larger numbers need too many files and jobs",
    65_536: "memory use grows with this number or with its square",
    100_000: "larger numbers take too much time and memory",
    1e30: "larger numbers overflow in 32 bits",
}
PositiveFloat = Annotated[float, Field(gt=0, le=1e30)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e30)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Seconds = Annotated[float, Field(ge=0, le=604_800)]
#: Number of worker processes of a loader.
Workers = Annotated[int, Field(ge=0, le=512)]
#: Number of CPU threads of a process.
Threads = Annotated[int, Field(gt=0, le=1_024)]
#: Number of layers, heads, or batches prepared in advance.
Few = Annotated[int, Field(gt=0, le=1_000)]
#: Number of files, folders or jobs.
Files = Annotated[int, Field(gt=0, le=10_000)]
#: Number of cells, pixels or channels along one axis.
Extent = Annotated[int, Field(gt=0, le=65_536)]
#: Number of repetitions of a measurement.
Repeats = Annotated[int, Field(ge=0, le=100_000)]
#: Whole number of either sign.
Whole = Annotated[int, Field(ge=-(2**53), le=2**53)]
#: Value of a placeholder in a command.
Value = bool | Whole | Number | str | list[bool | Whole | Number | str]
#: Largest seed: the largest signed integer of 64 bits.
MAX_SEED = 2**63 - 1
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]

#: Maximum number of runs of a plan; Snakemake keeps their jobs in memory.
MAX_RUNS = 10_000


class Strict(BaseModel):
    """Frozen model of settings that refuses an unknown key and suggests the most similar valid key.

    Numbers may be given as strings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise PydanticCustomError(
                "not_a_mapping", "expected keys and values ({keys})", {"keys": ", ".join(cls._keys())}
            )
        known = cls._keys()
        for key in data:
            if key not in known:
                raise PydanticCustomError(
                    "unknown_key",
                    "unknown key '{key}'{nearest}; valid keys: {keys}",
                    {
                        **{"key": str(key), "nearest": nearest(key, known), "keys": ", ".join(known)},
                        "paths": {(), *key_paths(cls)},
                    },
                )
        return data

    @model_validator(mode="before")
    @classmethod
    def _no_boolean_numbers(cls, data: Any) -> Any:
        for name, field in cls.model_fields.items() if isinstance(data, dict) else ():
            value = data.get(key := field.alias or name)
            for each in value if isinstance(value, list) else [value]:
                if (
                    isinstance(each, bool)
                    and (types := {*_types(field.annotation)}) & {int, float}
                    and bool not in types
                ):
                    values = {"key": key, "value": str(each).lower()}
                    raise PydanticCustomError("boolean_number", "a number as `{key}`, not {value}", values)
        return data

    @classmethod
    def _keys(cls) -> list[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]


def one_of(names: Iterable[str]) -> Any:
    """Return the type of a string that is one of `names`."""
    return Literal[tuple(names) or ("(no extension has any)",)]


def _types(annotation: Any) -> Iterator[Any]:
    inner = get_args(annotation)
    yield from itertools.chain.from_iterable(map(_types, inner)) if inner else [annotation]


def key_paths(kind: Any) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key in a type of settings.

    In a path, `*` stands for a name that the user chooses.
    """
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            key = field.alias or name
            yield (key,)
            yield from ((key, *path) for path in key_paths(field.annotation))
    elif get_origin(kind) is dict:
        yield from (("*", *path) for path in key_paths(get_args(kind)[1]))
    else:
        yield from itertools.chain.from_iterable(map(key_paths, get_args(kind)))


class Component(Strict):
    """Base class of settings that exist in several kinds; the key `kind` selects one."""

    kind: str
