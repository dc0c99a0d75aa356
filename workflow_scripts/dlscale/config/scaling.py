"""Blocks of plans that make their runs: numbers of devices, batch sizes, seeds."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from dlscale.config.laws import Law, Lawful
from dlscale.core.errors import cut
from dlscale.core.schema import MOST_RUNS, BatchSize, Devices, Name, Seed
from dlscale.core.settings import holds
from dlscale.core.text import many

#: The computation with and without averaged gradients: what lies between is communication.
TWINS: dict[str, Any] = {"ddp": {}, "no_sync": {"parallel": {"sync": False}}}


#: Changes of a run that a block makes, by the key of the block where they are written.
Parts = dict[str, dict[str, Any]]


class Scaling(Lawful):
    """Runs of one computation on more and more devices."""

    devices: list[Devices] = Field(min_length=1, description="Numbers of devices, each a run.")
    per_node: Devices = Field(
        4, description="Devices of a node: fewer are on one node, more must be a multiple and fill several."
    )
    batch_sizes: list[BatchSize] = Field(
        min_length=1,
        description="weak_scaling: samples of a step on each device (or on those that share a model); "
        "strong_scaling: on all devices together.",
    )
    variants: dict[Name, Any] = Field(
        TWINS,
        min_length=1,
        description="Further settings by name: each variant runs on all numbers of devices. One with parallel.sync: "
        "false is the twin of the others that shows what communication costs; on one device there is none.",
    )

    @field_validator("devices", "batch_sizes")
    @classmethod
    def _once(cls, values: list[int]) -> list[int]:
        return sorted(_different(values))

    @field_validator("variants")
    @classmethod
    def _named(cls, variants: dict[str, Any]) -> dict[str, Any]:
        for name, settings in variants.items():
            _leave(settings, name, "use", "batch_size", "local_batch_size", "geometry.nodes", "geometry.gpus_per_node")
        return variants

    LAWS: ClassVar[tuple[Law, ...]] = (
        (lambda its: all(map(_apart, its.variants.values())), "variants: none averages gradients; add one: ddp: {{}}"),
        (
            lambda its: len(its.devices) * len(its.batch_sizes) * len(its.variants) > MOST_RUNS,
            f"devices x batch_sizes x variants: expected at most {MOST_RUNS} runs; give fewer",
        ),
        (
            lambda its: any(count > its.per_node and count % its.per_node for count in its.devices),
            "devices {its.devices}: each number must fill its nodes of per_node {its.per_node}",
        ),
    )

    def runs(self, kind: str) -> dict[str, Parts]:
        """Return the runs by name, those of a variant and batch size together, from few devices to many."""
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


#: Batch sizes: a list, or the further settings of each.
BatchSizes = Annotated[
    dict[BatchSize, Any],
    BeforeValidator(
        lambda value: dict.fromkeys(map(str, _different(value))) if isinstance(value, list) else value,
        json_schema_input_type=list[BatchSize] | dict[BatchSize, Any],
    ),
]


class Convergence(Lawful):
    """Trainings with larger and larger batches, each several times."""

    batch_sizes: BatchSizes = Field(
        min_length=1,
        description="Global batch sizes: a list, or by batch size further settings: `{64: {}, 256: {geometry: "
        "{gpus_per_node: 4}, training: {epochs: 20}}}`.",
    )
    scaling: list[Literal["none", "sqrt", "linear"]] = Field(
        ["sqrt"], min_length=1, description="How the learning rate grows with the batch size: each rule is tried."
    )
    base_batch_size: BatchSize | None = Field(
        None, description="Batch size that optimizer.lr is meant for; the smallest of batch_sizes if absent."
    )
    seeds: list[Seed] = Field([0], min_length=1, description="Each training is repeated with each of these.")

    @field_validator("scaling", "seeds")
    @classmethod
    def _once(cls, values: list[Any]) -> list[Any]:
        return _different(values)

    @field_validator("batch_sizes")
    @classmethod
    def _own(cls, sizes: dict[int, Any]) -> dict[int, Any]:
        for size, settings in sizes.items():
            _leave(settings, str(size), "use", "batch_size", "local_batch_size", "seed", "schedule.scaling")
        return dict(sorted(sizes.items()))

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda its: len(its.batch_sizes) * len(its.scaling) * len(its.seeds) > MOST_RUNS,
            f"batch_sizes x scaling x seeds: expected at most {MOST_RUNS} runs; give fewer",
        ),
    )

    def runs(self, kind: str) -> dict[str, Parts]:
        """Return the runs by name. With the base batch size all rules are one, and it trains once."""
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
        raise ValueError(f"{twice[0]} stands twice")
    return values


def _apart(settings: Any) -> bool:
    """Whether the devices of a variant keep their gradients to themselves."""
    return holds(settings, ("parallel", "sync")) and settings["parallel"]["sync"] is False


def _leave(settings: Any, name: str, *keys: str) -> None:
    """Refuse further settings that are none, or that the block itself decides on."""
    if settings is not None and not isinstance(settings, dict):
        raise ValueError(f"{name}: expected settings (keys and values), got {cut(repr(settings))}")
    for key in keys:
        if holds(settings, tuple(key.split("."))):
            raise ValueError(f"{name}: {key} is decided by the other keys of this block; leave it out")
