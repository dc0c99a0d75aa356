"""Behaviour shared by all configuration models."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from dlscale.core.errors import nearest

#: Names of datasets, plans and runs become folders, so they hold nothing that a shell or a path reads.
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
NAME_IN_WORDS = "1 to 64 letters (A to Z), digits, '_' and '-', the first of them a letter or a digit"
Name = Annotated[str, StringConstraints(pattern=NAME)]

#: Whole numbers as they occur; what is larger is a slip, and would end far from where it was written.
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
#: Of nodes, GPUs and processes: the largest machines have some ten thousand.
Devices = Annotated[int, Field(gt=0, le=1_000_000)]
#: Samples of a step.
BatchSize = Annotated[int, Field(gt=0, le=1_000_000_000)]
#: Upper bounds of numbers that cost, generously, and why. More is a slip, and would end far from where it
#: was written: in a machine that stands still, or a week later.
BOUNDS = {
    512: "each is a process, or a thread, on a node",
    1_024: "no node has more cores, and libraries end a process of some thousands",
    604_800: "a week of seconds",
    1_000: "nobody has computed with so many",
    10_000: "for each there is a file, and a job that makes it",
    65_536: "memory grows with it, or with its square",
    100_000: "each takes time, and what it leaves takes memory",
    1e30: "a greater number overflows in 32 bits on the way",
}
PositiveFloat = Annotated[float, Field(gt=0, le=1e30)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e30)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Seconds = Annotated[float, Field(ge=0, le=604_800)]
#: Of a loader.
Workers = Annotated[int, Field(ge=0, le=512)]
#: That a process computes with.
Threads = Annotated[int, Field(gt=0, le=1_024)]
#: Layers, heads, batches that are kept ready.
Few = Annotated[int, Field(gt=0, le=1_000)]
#: Files, or folders, or jobs.
Files = Annotated[int, Field(gt=0, le=10_000)]
#: Cells, pixels, channels along one axis.
Extent = Annotated[int, Field(gt=0, le=65_536)]
#: Of what is measured again and again.
Repeats = Annotated[int, Field(ge=0, le=100_000)]
#: Whole numbers of either sign.
Whole = Annotated[int, Field(ge=-(2**53), le=2**53)]
#: As PyTorch takes them.
MOST_SEED = 2**63 - 1
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]

#: Runs that a plan has at most: each has a folder and jobs of its own, which Snakemake keeps in memory.
MOST_RUNS = 10_000


class Strict(BaseModel):
    """A frozen model of settings that refuses unknown keys with the nearest name, and takes numbers as strings."""

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
                    {"key": str(key), "nearest": nearest(key, known), "keys": ", ".join(known)},
                )
        return data

    @model_validator(mode="before")
    @classmethod
    def _no_boolean_numbers(cls, data: Any) -> Any:
        """Refuse `true` for 1, also in lists."""
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
    """Yield the path of each key of a type's settings; `*` stands for users' names."""
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
    """Settings of one of several kinds, told apart by `kind`, a Literal."""

    kind: str
