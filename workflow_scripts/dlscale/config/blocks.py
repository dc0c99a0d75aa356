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
from dlscale.core.stages import STAGES
from dlscale.core.text import many

#: Settings of a generated run: key of the block → settings that this key sets.
Parts = dict[str, dict[str, Any]]


class Scaling(Lawful):
    """Block that generates runs of one computation on increasing numbers of devices."""

    devices: list[Devices] = Field(
        min_length=1, description="Numbers of devices, each with one run per batch size and variant."
    )
    per_node: Devices = Field(
        4,
        description="Devices per node. If a run has at most this many devices, the devices are on one node. A larger "
        "number of devices must be a multiple of per_node and fills several nodes.",
    )
    batch_sizes: list[BatchSize] = Field(
        min_length=1,
        description="Samples per step. weak_scaling: samples of each device, or of each group of devices that share a "
        "model. strong_scaling: samples of all devices together.",
    )
    variants: dict[Name, Any] = Field(
        {"ddp": {}, "no_sync": {"parallel": {"sync": False}}},
        min_length=1,
        description="Additional settings by name of the variant; each variant runs on all numbers of devices. A "
        "variant with parallel.sync: false does not average gradients, which shows the cost of averaging; this variant "
        "is skipped on one device. For a study of external programs, the default is `{program: {}}`.",
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
            lambda scaling: all(map(_apart, scaling.variants.values())),
            "variants: at least one variant must average gradients; add ddp: {{}}",
        ),
        (
            lambda scaling: len(scaling.devices) * len(scaling.batch_sizes) * len(scaling.variants) > MAX_RUNS,
            f"devices x batch_sizes x variants: expected at most {MAX_RUNS} runs; shorten the lists",
        ),
        (
            lambda scaling: any(count > scaling.per_node and count % scaling.per_node for count in scaling.devices),
            "devices {its.devices}: each number above per_node {its.per_node} must be a multiple of per_node",
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


#: Batch sizes as a list, or as a mapping from batch size to additional settings.
BatchSizes = Annotated[
    dict[BatchSize, Any],
    BeforeValidator(
        lambda value: dict.fromkeys(map(str, _different(value))) if isinstance(value, list) else value,
        json_schema_input_type=list[BatchSize] | dict[BatchSize, Any],
    ),
]


class Convergence(Lawful):
    """Block that generates trainings with increasing batch sizes, and with several seeds for each size."""

    batch_sizes: BatchSizes = Field(
        min_length=1,
        description="Global batch sizes: a list, or a mapping from batch size to additional settings, such as `{64: "
        "{}, 256: {geometry: {gpus_per_node: 4}, training: {epochs: 20}}}`.",
    )
    scaling: list[Literal["none", "sqrt", "linear"]] = Field(
        ["sqrt"],
        min_length=1,
        description="Rules for the growth of the learning rate with the batch size; each rule has its own runs.",
    )
    base_batch_size: BatchSize | None = Field(
        None, description="Batch size for which optimizer.lr was chosen. Absent: the smallest number in batch_sizes."
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
            lambda convergence: (
                len(convergence.batch_sizes) * len(convergence.scaling) * len(convergence.seeds) > MAX_RUNS
            ),
            f"batch_sizes x scaling x seeds: expected at most {MAX_RUNS} runs; shorten the lists",
        ),
    )

    def runs(self, kind: str) -> dict[str, Parts]:
        """Return the runs by name.

        At the base batch size, all rules give the same learning rate, so only the first rule has runs there.
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
    """Refuse additional settings that are not a mapping, or contain one of `keys`, which the block itself sets."""
    if settings is not None and not isinstance(settings, dict):
        raise ValueError(f"{name}: expected settings (keys and values), got {cut(repr(settings))}")
    for key in keys:
        if holds(settings, tuple(key.split("."))):
            raise ValueError(f"{name}: this block sets {key} from its other keys; remove {key}")


# ---- sweeps ------------------------------------------------------------------------------------------

#: Values of a trial by dotted key, such as `optimizer.lr`.
Values = dict[str, Any]

#: Maximum number of characters in a trial's name, without the suffix for the rung.
LONGEST = 52

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Range(Lawful):
    """Range of values between two ends; real numbers are rounded to three significant digits."""

    uniform: tuple[Number, Number] | None = Field(None, description="Ends of a uniform distribution of real numbers.")
    log_uniform: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="Ends of a log-uniform distribution, in which all orders of magnitude are equally likely."
    )
    integers: tuple[Whole, Whole] | None = Field(
        None, description="Smallest and largest number of a uniform distribution of whole numbers."
    )

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda bounds: sum(ends is not None for _, ends in bounds) != 1,
            "give one of uniform, log_uniform, integers",
        ),
        (
            lambda bounds: bounds.ends[0] >= bounds.ends[1],
            "[{its.ends[0]}, {its.ends[1]}]: the first end must be less than the second end",
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
    """Block that generates the trials of a sweep: runs that differ in some settings."""

    method: Literal["grid", "random", "halving"] = Field(
        "grid",
        description="Search method. grid: try all combinations. random: try `trials` random combinations. halving: "
        "successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943) of all combinations, or of random "
        "combinations if `trials` is set; only the best trials of each rung continue.",
    )
    over: dict[str, list[Any] | Range] = Field(
        min_length=1,
        description="Values to try, by setting, such as `optimizer.lr`. Values are a list, or a range such as "
        "`{log_uniform: [1e-4, 1e-1]}`, `{uniform: [0, 0.5]}` or `{integers: [1, 8]}`.",
    )
    trials: PositiveInt | None = Field(
        None,
        description="Number of trials to draw. If the number is increased later, the earlier trials are kept. Absent: "
        "all combinations (grid and halving).",
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
        description="Reduction factor F of successive halving: the best 1/F of the trials continue, and train F times "
        "as long.",
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
                raise ValueError(f"{key}: this section contains {longer}; vary only one of the two")
        # YAML reads a number without a dot, such as 1e-3, as a string.
        return {
            key: [_number(v) for v in values] if isinstance(values, list) else values for key, values in over.items()
        }

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda sweep: sweep.method == "halving" and "promote" not in STAGES,
            "method: halving needs dlscale's extension tune, which is not installed; use grid or random",
        ),
        (
            lambda sweep: sweep.method == "grid" and sweep.trials is not None,
            "trials: method grid tries all combinations; remove trials, or use method random",
        ),
        (
            lambda sweep: sweep.trials is None and any(isinstance(values, Range) for values in sweep.over.values()),
            "over: a range needs a number of trials; set trials with method random or halving, or replace the range by "
            "a list",
        ),
        (
            lambda sweep: sweep.method == "random" and sweep.trials is None,
            "trials: method random needs the number of trials to draw; set trials, or use method grid",
        ),
        (
            lambda sweep: sweep.trials is not None and sweep.trials > sweep.count,
            "trials: {its.trials} is more than the number of combinations, {its.count}; use at most {its.count}",
        ),
        (
            lambda sweep: sweep.number > MAX_RUNS,
            f"over, trials: {{its.number}} trials; expected at most {MAX_RUNS}, since each trial is a run with its "
            "own folder and jobs; set trials to draw fewer, with method random or halving",
        ),
        (lambda sweep: sweep.twice, "over: {its.twice} is listed twice; remove one"),
        (
            lambda sweep: sweep.trials is not None and sweep.different < sweep.trials,
            "trials: {its.trials} is more than the number of different trials that over gives, {its.different}; lower "
            "the number of trials",
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
        """Name of the first value that a list contains twice; None if all values of each list differ."""
        lists = {key: values for key, values in self.over.items() if isinstance(values, list)}
        names = Counter(_name({key: value}, self._words) for key, values in lists.items() for value in values)
        return next((name for name, number in names.items() if number > 1), None)

    @property
    def runs(self) -> dict[str, Values]:
        """Settings of each trial by name; the name consists of keys and values, such as `lr-0p01_seed-2`."""
        if self.trials is None:
            combinations = [dict(zip(self.over, each, strict=True)) for each in itertools.product(*self.over.values())]
            return {_name(values, self._words): values for values in combinations}
        found: dict[str, Values] = {}
        # A setting's random numbers depend only on seed and key: the first trials stay the same if more are drawn.
        shares = zip(*(_spread(f"{self.seed} {key}") for key in self.over), strict=True)
        # In a narrow range, draws often repeat earlier draws, so the number of draws is limited.
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
        """Return pairs (last epoch, number of trials), one for each rung; the last rung ends after `epochs`."""
        factor, sizes = self.reduction_factor, halved(trials, self.reduction_factor)
        longer = [factor**rung for rung in range(len(sizes)) if rung == 0 or epochs > factor ** (rung - 1)]
        return [(-(-epochs // times), size) for times, size in zip(reversed(longer), sizes, strict=False)]


def label(values: Values) -> str:
    """Return a trial's label for tables, such as `lr 0.01, seed 2`."""
    return ", ".join(f"{key.rpartition('.')[2]} {_shown(value)}" for key, value in values.items())


def _spread(seed: str) -> Iterator[float]:
    """Yield stratified random numbers from 0 to 1.

    Of the first 2 numbers, one is in each half of the interval; of the first 4 numbers, one is in each quarter; and so
    on.
    """
    # Python derives the seed from the text's SHA-512, so all machines draw the same numbers.
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
    """Return a name for a trial and for the trial's folder; 0.003 is written 0p003."""
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
        # Include keys, because other keys may have the same values. The value of `kind` needs no key.
        return " ".join(_shown(each) if key == "kind" else f"{key} {_shown(each)}" for key, each in value.items())
    if isinstance(value, list):
        return "x".join(_shown(each) for each in value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
