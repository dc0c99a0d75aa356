"""How the devices of a run share its work. Each kind of sharing is a class, with the settings that it alone has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dlscale.core.schema import PositiveFloat, PositiveInt, Strict


class _Several(Strict):
    """What has a process for each device."""

    kind: str
    selftest: bool = Field(
        True,
        description="Before anything else, test what the processes exchange: values, and latency and bandwidth of the "
        "links between them. A process or node that sends wrong values ends the run, and a slow one is told.",
    )


class DDP(_Several):
    """DistributedDataParallel: a process a device; gradients are averaged in buckets while they are computed."""

    kind: Literal["ddp"] = "ddp"
    bucket_mb: PositiveFloat | None = Field(
        None, description="MiB of gradients that are averaged by one call; PyTorch's 25 if absent."
    )
    first_bucket_mb: PositiveFloat | None = Field(
        None,
        description="Of the first bucket: a small one lets the averaging begin early. Absent: PyTorch's 1 where "
        "bucket_mb is absent, too, else bucket_mb.",
    )
    broadcast_buffers: bool = Field(
        True, description="Before each step all processes take over the first one's buffers, such as running means."
    )
    bucket_view: bool = Field(True, description="Gradients lie in the buckets; else they are copied there and back.")
    static_graph: bool = Field(
        False, description="Tell PyTorch that every step uses the same parameters in the same order."
    )
    sync_batchnorm: bool = Field(
        False, description="Batch normalisation over the samples of all processes, instead of each one's own."
    )
    compression: Literal["none", "bf16", "fp16"] = Field(
        "none", description="Number format in which gradients are averaged; none: their own."
    )
    sync: bool = Field(
        True,
        description="false: gradients are not averaged, which shows what the averaging costs. Such a run can be "
        "measured and profiled; it is no training.",
    )


class FSDP(_Several):
    """Fully sharded data parallelism (FSDP2): weights, gradients and the optimiser's state are shared among devices.

    The weights of a layer are put together when it computes, and gradients go to the device that updates them (Zhao et
    al. 2023, arXiv:2304.11277). The study says which modules are gathered at once.
    """

    kind: Literal["fsdp"]
    shard: PositiveInt | None = Field(
        None,
        description="Devices that share one copy of the weights: neighbours; such groups average their gradients "
        "(hybrid sharding). All of them if absent.",
    )
    reshard: bool = Field(
        True,
        description="Free a layer's weights after its forward pass, and gather them again for the backward pass; "
        "false: keep them until then, which needs more memory and sends less.",
    )
    param_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Format in which weights are gathered and computed with; updates are made in float32."
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="Format in which gradients are averaged.")
    cpu_offload: bool = Field(
        False, description="Weights, gradients and optimiser live in the host's memory, where the update is made."
    )


class DP(Strict):
    """DataParallel, for comparison: one process copies the model to all GPUs of a node anew at every step."""

    kind: Literal["dp"]


def _ddp_by_default(value: Any) -> Any:
    return {"kind": "ddp", **value} if isinstance(value, dict) else value


Parallel = Annotated[DDP | FSDP | DP, Field(discriminator="kind"), BeforeValidator(_ddp_by_default)]
