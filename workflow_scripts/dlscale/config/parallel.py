"""How the devices of a run share its work. Each kind of sharing is a class, with the settings that it alone has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, model_validator

from dlscale.core.schema import Strict


class DDP(Strict):
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
    sync: bool = Field(
        True,
        description="false: gradients are not averaged, which shows what the averaging costs. Such a run can be "
        "measured and profiled; it is no training.",
    )

    @model_validator(mode="after")
    def _alone(self) -> DDP:
        if self.sync_batchnorm and not self.sync:
            raise ValueError("sync: false and sync_batchnorm: statistics would still be exchanged; leave one out")
        return self


class DP(Strict):
    """DataParallel, for comparison: one process copies the model to all GPUs of a node anew at every step."""

    kind: Literal["dp"]


def _ddp_by_default(value: Any) -> Any:
    return {"kind": "ddp", **value} if isinstance(value, dict) else value


Parallel = Annotated[DDP | DP, Field(discriminator="kind"), BeforeValidator(_ddp_by_default)]
