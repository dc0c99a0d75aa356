"""Predict a model that was never measured, from its parameters, FLOPs and shapes (`dlscale predict --model FILE`).

The time of a sample is FLOPs / (`reached` · peak) + bytes / (`COPY` · memory bandwidth), with the bytes of operators
other than matrix products. The fixed time of a step is the optimiser's memory traffic / (`COPY` · memory bandwidth).
Loading is assumed to take no time. All other costs are the medians of their priors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from dlscale.core.schema import Few, NonNegativeInt, PositiveFloat, PositiveInt, Strict
from dlscale.core.settings import read_yaml, validate
from dlscale.extensions.predict.fit import NAMES, PRIORS, Fit
from dlscale.extensions.predict.model import Costs, Memory, Tokens, Workload, buckets, named

#: Fraction of the memory bandwidth that a copy reaches. Measured by dlscale on an H200: 4.3 of 4.8 TB/s.
COPY = 0.9
#: Bytes that operators other than matrix products move per token, unit of width and block. 34 bytes are stored for the
#: backward pass (Korthikanti et al. 2022, arXiv:2205.05198, equation 2). The forward pass writes and reads these bytes.
#: The backward pass reads them, and writes and reads as many bytes of gradients.
FORWARD_BYTES, BACKWARD_BYTES = 2 * 34, 3 * 34
#: Bytes per token and entry of the vocabulary: logits in fp32, written and read three times.
LOGIT_BYTES = 24
#: Bytes per parameter that an optimiser step reads and writes, as in the prior of `fixed`.
OPTIMIZER_BYTES = 28
#: Ratios measured / predicted of public runs, by table.
PUBLIC_RUNS = Path(__file__).with_name("public_runs.yaml")


Bytes = Annotated[float, Field(ge=0, le=1_000)]  #: Bytes per parameter.


class Device(Strict):
    """Peak rates of a device, from its data sheet."""

    source: str
    flops: dict[str, PositiveFloat] = Field(description="FLOP/s by number format, such as bf16.")
    bandwidth: PositiveFloat = Field(description="Bytes/s of the device's memory.")
    reached: float | None = Field(
        None, gt=0, le=1, description="Fraction of `flops` that trainings reach. Absent: `reached` of the machine."
    )


class Model(Strict):
    """A model and its training, without any measurement."""

    name: str
    machine: str = Field(description="Machine in machines.yaml, or a YAML file.")
    device: Device
    parameters: int = Field(ge=1, le=10**13)
    flops: dict[str, PositiveFloat] = Field(
        min_length=1,
        description="FLOPs of a sample's forward and backward pass, by number format, including recomputation.",
    )
    tokens: tuple[PositiveInt, PositiveInt, Few] = Field(
        description="Tokens of a sample, width of a token, number of blocks."
    )
    vocabulary: NonNegativeInt = Field(0, description="Entries of the vocabulary; 0: the model returns no logits.")
    batch: PositiveFloat = Field(
        description="Samples per micro-batch of each device, or group of devices that shares a model."
    )
    recomputed: float = Field(0.0, ge=0, le=1, description="Fraction of the blocks' forward pass that is repeated.")
    fused: float = Field(1.0, gt=0, le=1, description="Fraction of the memory traffic that remains after compilation.")
    gradient_bytes: float = Field(4, gt=0, le=1_000, description="Bytes per parameter of averaged gradients.")
    gathered_bytes: tuple[Bytes, Bytes] | None = Field(
        None, description="FSDP: bytes per parameter that are gathered before forward and backward pass; absent: DDP."
    )
    shards: PositiveInt = Field(1, description="Devices over which the state of the optimiser is sharded.")
    steps: PositiveInt = Field(1, description="Micro-batches per optimiser step (gradient accumulation).")
    state_bytes: PositiveFloat = Field(16, description="Bytes per parameter of weights, gradients and optimiser state.")

    @model_validator(mode="after")
    def _formats_of_the_device(self) -> Model:
        if missing := [kind for kind in self.flops if kind not in self.device.flops]:
            raise ValueError(
                f"flops: {missing[0]}: no such key in device.flops; add the device's FLOP/s in this format"
            )
        return self

    @property
    def bytes(self) -> float:
        """Bytes per sample that operators other than matrix products read and write."""
        count, width, depth = self.tokens
        blocks = (FORWARD_BYTES * (1 + self.recomputed) + BACKWARD_BYTES) * count * width * depth
        return self.fused * (blocks + LOGIT_BYTES * count * self.vocabulary)

    @property
    def sample_seconds(self) -> float:
        """Computing time of a sample on one device."""
        reached = self.device.reached or named(self.machine).reached
        products = sum(flops / (reached * self.device.flops[kind]) for kind, flops in self.flops.items())
        return products + self.bytes / (COPY * self.device.bandwidth)


def read(path: str | Path) -> Model:
    """Read the description of a model from a YAML file."""
    return validate(Model, read_yaml(path), str(path))


def public_ratios() -> list[float]:
    """Return the ratios measured / predicted of public runs, in ascending order."""
    return sorted(ratio for table in read_yaml(PUBLIC_RUNS).values() for ratio in table)


def fitted(model: Model) -> Fit:
    """Return the scaling model for a network that was never measured."""
    size, (count, width, depth) = model.parameters * model.gradient_bytes, model.tokens
    unit = [1 / depth] * depth if model.gathered_bytes else buckets([size / depth] * depth)
    gathered = model.gathered_bytes
    state = model.state_bytes * model.parameters
    work = Workload(
        size,
        tuple(unit),
        Tokens(count, width, depth, 2, model.recomputed == 1),
        gathered=(gathered[0] * model.parameters, gathered[1] * model.parameters) if gathered else None,
        memory=Memory(state, 34.0 * count * width * (1 if model.recomputed == 1 else depth)),
    )
    update = OPTIMIZER_BYTES * model.parameters / model.shards / model.steps / (COPY * model.device.bandwidth)
    known = {"sample": model.sample_seconds, "fixed": update, "load": 1e-6 * model.sample_seconds}
    costs = Costs(**{name: known.get(name, PRIORS[name].middle) for name in NAMES})
    return Fit(named(model.machine).machine, work, costs, np.zeros((len(NAMES), len(NAMES))), ())
