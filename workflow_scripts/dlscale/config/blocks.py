"""Blocks of a plan that generate its runs: sweeps, scaling and convergence."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from dlscale.config.laws import Law, Lawful
from dlscale.core.errors import cut
from dlscale.core.noise import halved
from dlscale.core.schema import MAX_RUNS, BatchSize, Devices, Name, Number, PositiveFloat, PositiveInt, Seed, Whole
from dlscale.core.settings import holds
from dlscale.core.text import many

#: Changes of a generated run, by the key of the block that sets them.
Parts = dict[str, dict[str, Any]]


class Scaling(Lawful):
    """Runs of one computation on increasing numbers of devices."""

    devices: list[Devices] = Field(min_length=1, description="Numbers of devices; one run for each number.")
    per_node: Devices = Field(
        4,
        description="Devices per node. Up to this number, all devices of a run are on one node; larger numbers must be "
        "multiples of it and fill several nodes.",
    )
    batch_sizes: list[BatchSize] = Field(
        min_length=1,
        description="Samples per step. weak_scaling: per device, or per group of devices that share a model. "
        "strong_scaling: over all devices.",
    )
    variants: dict[Name, Any] = Field(
        {"ddp": {}, "no_sync": {"parallel": {"sync": False}}},
        min_length=1,
        description="Additional settings by name; each variant runs on all numbers of devices. A variant with "
        "parallel.sync: false measures the cost of communication by leaving it out; it is skipped on one device.",
    )

    @field_validator("devices", "batch_sizes")
    @classmethod
    def _once(cls, values: list[int]) -> list[int]:
        return sorted(_different(values))

    @field_validator("variants")
    @classmethod
    def _named(cls, variants: dict[str, Any]) -> dict[str, Any]:
        for name, settings in variants.items():
            _leave(
                settings,
                name,
                "use",
                "label",
                "batch_size",
                "local_batch_size",
                "geometry.nodes",
                "geometry.gpus_per_node",
            )
        return variants

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda its: all(map(_apart, its.variants.values())),
            "variants: at least one must average gradients; add ddp: {{}}",
        ),
        (
            lambda its: len(its.devices) * len(its.batch_sizes) * len(its.variants) > MAX_RUNS,
            f"devices x batch_sizes x variants: expected at most {MAX_RUNS} runs; give fewer",
        ),
        (
            lambda its: any(count > its.per_node and count % its.per_node for count in its.devices),
            "devices {its.devices}: each number above per_node {its.per_node} must be a multiple of it",
        ),
    )

    def runs(self, kind: str) -> dict[str, Parts]:
        """Return the runs by name, ordered by batch size, variant and number of devices."""
        made, weak = {}, kind == "weak_scaling"
        for batch, (variant, settings), count in itertools.product(
            self.batch_sizes, self.variants.items(), self.devices
        ):
            if count == 1 and _apart(settings):
                continue
            nodes = max(count // self.per_node, 1)
            words = [many(count, "device"), f"{batch} {'each' if weak else 'in all'}"]
            words += [variant.replace("_", " ")] if variant != next(iter(self.variants)) else []
            own = {
                "geometry": {"nodes": nodes, "gpus_per_node": count // nodes},
                "local_batch_size" if weak else "batch_size": batch,
                "label": ", ".join(words),
            }
            made[f"b{batch}_{variant}_{count}"] = {f"variants.{variant}": settings or {}, "devices": own}
        return made


#: Batch sizes as a list, or as a mapping to additional settings.
BatchSizes = Annotated[
    dict[BatchSize, Any],
    BeforeValidator(
        lambda value: dict.fromkeys(map(str, _different(value))) if isinstance(value, list) else value,
        json_schema_input_type=list[BatchSize] | dict[BatchSize, Any],
    ),
]


class Convergence(Lawful):
    """Trainings with increasing batch sizes, each with several seeds."""

    batch_sizes: BatchSizes = Field(
        min_length=1,
        description="Global batch sizes: a list, or additional settings by batch size: `{64: {}, 256: {geometry: "
        "{gpus_per_node: 4}, training: {epochs: 20}}}`.",
    )
    scaling: list[Literal["none", "sqrt", "linear"]] = Field(
        ["sqrt"], min_length=1, description="Rules for the growth of the learning rate with the batch size; all run."
    )
    base_batch_size: BatchSize | None = Field(
        None, description="Batch size for which optimizer.lr was chosen. Absent: the smallest of batch_sizes."
    )
    seeds: list[Seed] = Field([0], min_length=1, description="Seeds; each training runs once per seed.")

    @field_validator("scaling", "seeds")
    @classmethod
    def _once(cls, values: list[Any]) -> list[Any]:
        return _different(values)

    @field_validator("batch_sizes")
    @classmethod
    def _own(cls, sizes: dict[int, Any]) -> dict[int, Any]:
        for size, settings in sizes.items():
            _leave(settings, str(size), "use", "label", "batch_size", "local_batch_size", "seed")
            _leave(settings, str(size), "schedule.scaling", "schedule.base_batch_size")
        return dict(sorted(sizes.items()))

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda its: len(its.batch_sizes) * len(its.scaling) * len(its.seeds) > MAX_RUNS,
            f"batch_sizes x scaling x seeds: expected at most {MAX_RUNS} runs; give fewer",
        ),
    )

    def runs(self, kind: str) -> dict[str, Parts]:
        """Return the runs by name.

        At the base batch size all rules give the same learning rate, so it trains with the first rule only.
        """
        base, made = self.base_batch_size or min(self.batch_sizes), {}
        for (size, settings), rule, seed in itertools.product(self.batch_sizes.items(), self.scaling, self.seeds):
            if size == base and rule != self.scaling[0]:
                continue
            words = [f"batch {size}"]
            words += [rule] if len(self.scaling) > 1 and size != base else []
            words += [f"seed {seed}"] if len(self.seeds) > 1 else []
            own = {
                "batch_size": size,
                "seed": seed,
                "schedule": {"scaling": rule, "base_batch_size": base},
                "label": ", ".join(words),
            }
            made[f"b{size}_{rule}_seed{seed}"] = {f"batch_sizes.{size}": settings or {}, "batch_sizes": own}
        return made


def _different(values: list[Any]) -> list[Any]:
    if twice := [value for value, times in Counter(map(str, values)).items() if times > 1]:
        raise ValueError(f"{twice[0]} is listed twice; remove one")
    return values


def _apart(settings: Any) -> bool:
    """Return whether a variant does not average gradients."""
    # `--config` passes values as strings.
    return holds(settings, ("parallel", "sync")) and str(settings["parallel"]["sync"]).lower() == "false"


def _leave(settings: Any, name: str, *keys: str) -> None:
    """Refuse additional settings that are not a mapping or have one of `keys`.

    The block itself sets these keys.
    """
    if settings is not None and not isinstance(settings, dict):
        raise ValueError(f"{name}: expected settings (keys and values), got {cut(repr(settings))}")
    for key in keys:
        if holds(settings, tuple(key.split("."))):
            raise ValueError(f"{name}: {key} is decided by the other keys of this block; leave it out")


# ---- sweeps ------------------------------------------------------------------------------------------

#: Values of a trial by dotted key, such as `optimizer.lr`.
Values = dict[str, Any]

#: Maximum length of a trial's name, letters, without the suffix of its rung.
LONGEST = 52

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Range(Lawful):
    """Range of values between two ends; real numbers are rounded to three significant digits."""

    uniform: tuple[Number, Number] | None = Field(None, description="Ends of a uniform distribution of real numbers.")
    log_uniform: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="Ends of a log-uniform distribution: all orders of magnitude are equally likely."
    )
    integers: tuple[Whole, Whole] | None = Field(
        None, description="First and last number of a uniform distribution of whole numbers."
    )

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda its: sum(ends is not None for _, ends in its) != 1,
            "give one of uniform, log_uniform, integers",
        ),
        (
            lambda its: its.ends[0] >= its.ends[1],
            "[{its.ends[0]}, {its.ends[1]}]: the first end must be less than the second",
        ),
    )

    @property
    def ends(self) -> tuple[float, float]:
        return next(ends for _, ends in self if ends is not None)

    @property
    def count(self) -> float:
        """Number of values; infinite for real numbers."""
        return self.integers[1] - self.integers[0] + 1 if self.integers else math.inf

    def at(self, share: float) -> float:
        """Return the quantile at `share` (0 ≤ share < 1)."""
        first, last = self.ends
        if self.integers is not None:
            return first + int(share * self.count)
        value = first * (last / first) ** share if self.log_uniform else first + share * (last - first)
        return min(max(float(f"{value:.3g}"), first), last)


class Sweep(Lawful):
    """Trials of a sweep: runs that differ in some settings."""

    method: Literal["grid", "random", "halving"] = Field(
        "grid",
        description="Search method. grid: all combinations. random: `trials` random combinations. halving: successive "
        "halving (Jamieson and Talwalkar 2016, arXiv:1502.07943) of all or of random combinations; only the best "
        "trials of each rung continue.",
    )
    over: dict[str, list[Any] | Range] = Field(
        min_length=1,
        description="Values by setting, written like `optimizer.lr`: a list, or a range: `{log_uniform: "
        "[1e-4, 1e-1]}`, `{uniform: [0, 0.5]}`, `{integers: [1, 8]}`.",
    )
    trials: PositiveInt | None = Field(
        None,
        description="Number of trials to draw; a larger number keeps the trials drawn before. Absent, for halving: all "
        "combinations.",
    )
    seed: Seed = Field(0, description="Seed of the random draws.")
    metric: str = Field(
        "valid_loss",
        description="Metric that ranks the trials: valid_loss, a validation metric of the study, or "
        "samples_per_second.",
    )
    reduction_factor: int = Field(
        3,
        ge=2,
        le=1_000,
        description="Reduction factor of successive halving: 1 of this many trials continues, and trains this many "
        "times as long.",
    )

    @field_validator("over")
    @classmethod
    def _numbers(cls, over: dict[str, Any]) -> dict[str, Any]:
        for key, values in over.items():
            if values == []:
                raise ValueError(f"{key}: no values; list at least one")
            if key.split(".")[0] in ("use", "needs", "label", "study"):
                raise ValueError(f"{key}: a sweep cannot vary this key; remove it")
            if longer := next((other for other in over if other.startswith(f"{key}.")), None):
                raise ValueError(f"{key}: {longer} is a part of it; vary only one of them")
        # YAML reads a number without a dot, such as 1e-3, as a string.
        return {
            key: [_number(v) for v in values] if isinstance(values, list) else values for key, values in over.items()
        }

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda its: its.method == "grid" and its.trials is not None,
            "trials: a grid tries all combinations; leave it out, or use method random",
        ),
        (
            lambda its: its.trials is None and any(isinstance(values, Range) for values in its.over.values()),
            "over: a range has no list of combinations; set trials with method random or halving, or write a list",
        ),
        (
            lambda its: its.method == "random" and its.trials is None,
            "trials: method random needs the number of trials to draw; set it, or use method grid",
        ),
        (
            lambda its: its.trials is not None and its.trials > its.count,
            "trials: {its.trials} of {its.count} combinations; use at most {its.count}",
        ),
        (
            lambda its: its.number > MAX_RUNS,
            f"over, trials: {{its.number}} trials; expected at most {MAX_RUNS}, since each trial is a run with its "
            "own folder and jobs; draw fewer: set trials, with method random or halving",
        ),
        (lambda its: its.twice, "over: {its.twice} is listed twice; remove one"),
        (
            lambda its: its.trials is not None and its.different < its.trials,
            "trials: {its.trials}; over has only {its.different} different trials; lower trials",
        ),
    )

    @property
    def count(self) -> float:
        return math.prod(values.count if isinstance(values, Range) else len(values) for values in self.over.values())

    @property
    def number(self) -> float:
        return self.trials or self.count

    @property
    def different(self) -> int:
        return len(self.runs)

    @property
    def twice(self) -> str | None:
        """Name of the first value that is listed twice; None if all values differ."""
        lists = {key: values for key, values in self.over.items() if isinstance(values, list)}
        names = Counter(_name({key: value}, self._words) for key, values in lists.items() for value in values)
        return next((name for name, number in names.items() if number > 1), None)

    @property
    def runs(self) -> dict[str, Values]:
        """Changes of each trial by the trial's name, which is made of the values."""
        if self.trials is None:
            combinations = [dict(zip(self.over, each, strict=True)) for each in itertools.product(*self.over.values())]
            return {_name(values, self._words): values for values in combinations}
        found: dict[str, Values] = {}
        # Each setting has its own random numbers, so the first trials stay the same if more are drawn.
        shares = zip(*(_spread(f"{self.seed} {key}") for key in self.over), strict=True)
        # A narrow range has few values, so draws may repeat.
        for drawn in itertools.islice(shares, 20 * self.trials):
            draw = {
                key: values.at(share) if isinstance(values, Range) else values[int(share * len(values))]
                for (key, values), share in zip(self.over.items(), drawn, strict=True)
            }
            found.setdefault(_name(draw, self._words), draw)
            if len(found) == self.trials:
                break
        return found

    @property
    def _words(self) -> dict[str, str]:
        last = Counter(key.rpartition(".")[2] for key in self.over)
        return {key: word if last[word := key.rpartition(".")[2]] == 1 else key.replace(".", "-") for key in self.over}

    def rungs(self, trials: int, epochs: int) -> list[tuple[int, int]]:
        """Return epochs and number of trials of each rung; the last rung trains all `epochs`."""
        factor, sizes = self.reduction_factor, halved(trials, self.reduction_factor)
        longer = [factor**rung for rung in range(len(sizes)) if rung == 0 or epochs > factor ** (rung - 1)]
        until = [-(-epochs // times) for times in reversed(longer)]
        return list(zip(until, sizes, strict=False))


def label(values: Values) -> str:
    """Return the name of a trial for tables."""
    return ", ".join(f"{key.rpartition('.')[2]} {_shown(value)}" for key, value in values.items())


def _spread(seed: str) -> Iterator[float]:
    """Yield stratified random numbers from 0 to 1.

    Among the first 2, 4, 8, … numbers, each half, quarter, eighth, … of the interval has exactly one.
    """
    # Python seeds from the text's SHA-512, so all machines draw the same numbers.
    numbers, shares = random.Random(seed), list[float]()
    for strata in (2**power for power in itertools.count()):
        free = sorted(set(range(strata)) - {int(share * strata) for share in shares})
        numbers.shuffle(free)
        for stratum in free:
            shares.append((stratum + numbers.random()) / strata)
            yield shares[-1]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _name(values: Values, words: dict[str, str]) -> str:
    """Return the name of a trial and of its folder; 0.003 is written 0p003."""
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
        # Keys are included, since other keys may have the same values; `kind` explains itself.
        return " ".join(_shown(each) if key == "kind" else f"{key} {_shown(each)}" for key, each in value.items())
    if isinstance(value, list):
        return "x".join(_shown(each) for each in value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
