"""What a plan of kind `sweep` tries: which values of which settings, under which names."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from dlscale.core.noise import halved
from dlscale.core.schema import MOST_RUNS, Few, Number, PositiveFloat, PositiveInt, Seed, Strict, Whole

#: Values of a trial by dotted key, as `optimizer.lr`.
Values = dict[str, Any]

#: Letters of a trial's name, beside those that its rung may add.
LONGEST = 52

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Range(Strict):
    """Values between two ends, of which trials draw; real numbers have three significant digits."""

    uniform: tuple[Number, Number] | None = Field(None, description="Each number is as likely.")
    log_uniform: tuple[PositiveFloat, PositiveFloat] | None = Field(None, description="Each order of magnitude is.")
    integers: tuple[Whole, Whole] | None = Field(None, description="Whole numbers, each as likely, the ends included.")

    @model_validator(mode="after")
    def _one(self) -> Range:
        given = [ends for ends in (self.uniform, self.log_uniform, self.integers) if ends is not None]
        if len(given) != 1:
            raise ValueError("give one of uniform, log_uniform, integers")
        if given[0][0] >= given[0][1]:
            raise ValueError(f"{list(given[0])}: the first end must be less than the second")
        return self

    def at(self, share: float) -> float:
        """Return the value that a `share` (0 ≤ share < 1) of the draws is below."""
        if self.integers is not None:
            low, high = self.integers
            return low + int(share * (high - low + 1))
        if self.log_uniform is not None:
            first, last = self.log_uniform
            value = first * (last / first) ** share
        else:
            assert self.uniform is not None
            first, last = self.uniform
            value = first + share * (last - first)
        return min(max(float(f"{value:.3g}"), first), last)


class Sweep(Strict):
    """Trials: runs of a plan that differ in some settings."""

    method: Literal["grid", "random", "halving"] = Field(
        "grid",
        description="grid: all combinations; random: so many `trials`, drawn; halving: successive halving (Jamieson "
        "and Talwalkar 2016, arXiv:1502.07943) of either, where only the best trials of each rung train on.",
    )
    over: dict[str, list[Any] | Range] = Field(
        min_length=1,
        description="By setting, written `optimizer.lr`: a list of values, or a range: `{log_uniform: [1e-4, 1e-1]}`, "
        "`{uniform: [0, 0.5]}`, `{integers: [1, 8]}`.",
    )
    trials: PositiveInt | None = Field(
        None,
        description="Trials to draw; more of them leave those that are there as they are. Of halving: all "
        "combinations if absent.",
    )
    seed: Seed = Field(0, description="Of the draws.")
    metric: str = Field(
        "valid_loss",
        description="What the best trial is best in: valid_loss, a validation metric of the study, or "
        "samples_per_second.",
    )
    reduction_factor: Few = Field(
        3, ge=2, description="Of halving: one of so many trials trains on, so many times as long."
    )
    min_epochs: PositiveInt = Field(1, description="Of halving: epochs of the first rung, at least.")

    @field_validator("over")
    @classmethod
    def _numbers(cls, over: dict[str, Any]) -> dict[str, Any]:
        for key, values in over.items():
            if values == []:
                raise ValueError(f"{key}: no values")
            if key.split(".")[0] in ("use", "needs", "label", "study"):
                raise ValueError(f"{key}: no setting of a run that could be varied")
            if longer := next((other for other in over if other.startswith(f"{key}.")), None):
                raise ValueError(f"{key}: {longer} is a part of it; vary one of them")
        # YAML reads 1e-3, which has no dot, as a string.
        return {
            key: [_number(v) for v in values] if isinstance(values, list) else values for key, values in over.items()
        }

    @model_validator(mode="after")
    def _countable(self) -> Sweep:
        ranges = [key for key, values in self.over.items() if isinstance(values, Range)]
        if self.method == "grid" and self.trials is not None:
            raise ValueError("trials: a grid tries all combinations; leave it out, or use method random")
        if ranges and self.trials is None:
            todo = "use method random, or give a list" if self.method == "grid" else "give trials"
            raise ValueError(f"over.{ranges[0]}: of a range there are no combinations; {todo}")
        if self.method == "random" and self.trials is None:
            raise ValueError("trials: how many to draw is missing; or use method grid")
        most = math.prod(map(_number_of, self.over.values()))
        if self.trials is not None and self.trials > most:
            todo = f"use at most {most}" + ("" if ranges else ", or method grid")
            raise ValueError(f"trials: {self.trials} of {most} combinations; {todo}")
        if (count := self.trials or most) > MOST_RUNS:
            raise ValueError(
                f"{'trials' if self.trials else 'over'}: {count} trials; expected at most {MOST_RUNS}, for each is a "
                "run with a folder and jobs of its own; draw fewer: method random or halving, with trials"
            )
        for key, values in self._lists.items():  # trials that differ in a value differ in that part of their names
            names = Counter(_name({key: value}, self._words) for value in values)
            if twice := next((name for name, number in names.items() if number > 1), None):
                raise ValueError(f"over: {twice} stands twice")
        if ranges and len(self.runs) < (self.trials or 0):
            raise ValueError(
                f"trials: {self.trials}, but over has no more than {len(self.runs)} different ones; use these"
            )
        return self

    @property
    def runs(self) -> dict[str, Values]:
        """What each trial changes, by name. A name says its values: a trial that stays keeps its results."""
        return {
            _name(values, self._words): values for values in (self._all() if self.trials is None else self._drawn())
        }

    @property
    def _lists(self) -> dict[str, list[Any]]:
        return {key: values for key, values in self.over.items() if isinstance(values, list)}

    def _all(self) -> Iterator[Values]:
        lists = self._lists
        return (dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values()))

    def _drawn(self) -> list[Values]:
        """Return distinct trials. Each setting has its own random numbers: the first ones stay if there are more."""
        found: dict[str, Values] = {}
        shares = zip(*(_spread(f"{self.seed} {key}") for key in self.over), strict=True)
        for number, drawn in enumerate(shares):
            draw = {key: _at(each, share) for (key, each), share in zip(self.over.items(), drawn, strict=True)}
            found.setdefault(_name(draw, self._words), draw)
            if len(found) == self.trials or number > 20 * (self.trials or 1):  # a narrow range has few values
                break
        return list(found.values())

    @property
    def _words(self) -> dict[str, str]:
        """What names call the settings: the last word of each key, or all of a key whose last word another has."""
        last = Counter(key.rpartition(".")[2] for key in self.over)
        return {key: word if last[word := key.rpartition(".")[2]] == 1 else key.replace(".", "-") for key in self.over}

    def rungs(self, trials: int, epochs: int) -> list[tuple[int, int]]:
        """Return epochs and number of trials of each rung: the last one trains all `epochs`.

        Each has a `reduction_factor`-th of the trials of the one before, and at least one; the first one trains
        `min_epochs` or more.
        """
        factor, sizes = self.reduction_factor, halved(trials, self.reduction_factor)
        least = [0, *(self.min_epochs * factor**rung for rung in range(len(sizes) - 1))]
        longer = [factor**rung for rung, few in enumerate(least) if epochs > few]
        until = [min(epochs, max(self.min_epochs, -(-epochs // times))) for times in reversed(longer)]
        return list(zip(until, sizes, strict=False))


def label(values: Values) -> str:
    """Return what tables call a trial."""
    return ", ".join(f"{key.rpartition('.')[2]} {_shown(value)}" for key, value in values.items())


def _spread(seed: str) -> Iterator[float]:
    """Yield random shares (0 ≤ share < 1) that spread: of the first 2, 4, 8, … each half, quarter, eighth has one.

    So a few trials cover a range, and those that are there stay when more are drawn; of a Latin hypercube all change.
    """
    numbers, shares = random.Random(seed), list[float]()  # by the text's SHA-512: the same everywhere
    for strata in (2**power for power in itertools.count()):
        free = sorted(set(range(strata)) - {int(share * strata) for share in shares})
        numbers.shuffle(free)
        for stratum in free:
            shares.append((stratum + numbers.random()) / strata)
            yield shares[-1]


def _number_of(values: list[Any] | Range) -> float:
    """Return how many values there are; of real numbers, no matter how many."""
    if isinstance(values, list):
        return len(values)
    return values.integers[1] - values.integers[0] + 1 if values.integers else math.inf


def _at(values: list[Any] | Range, share: float) -> Any:
    return values.at(share) if isinstance(values, Range) else values[int(share * len(values))]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _name(values: Values, words: dict[str, str]) -> str:
    """Return a trial's name, which is a folder's: letters, digits, `-`, `_`; of 0.003 it has 0p003."""
    name = "_".join(f"{words[key]}-{_legal(_shown(value))}" for key, value in values.items())
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _legal(text: str) -> str:
    text = re.sub(r"(?<=\d)\.(?=\d)", "p", text).replace("e-0", "e-").replace("e+", "e")
    return re.sub(r"[^A-Za-z0-9-]+", "-", text).rstrip("-") or "none"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, dict):
        # With its keys, for others may have the same values; but a kind says itself what it is of.
        return " ".join(_shown(each) if key == "kind" else f"{key} {_shown(each)}" for key, each in value.items())
    if isinstance(value, list):
        return "x".join(_shown(each) for each in value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
