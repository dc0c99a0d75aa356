"""Tables of rules for settings that exclude each other; each rule has a message for settings that break it.

A message contains the wrong keys, from which `dlscale.core.settings` finds the section or file to name. In a message,
`{its}` stands for the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar, Self

from pydantic import model_validator

from dlscale.core import registry
from dlscale.core.errors import UserError, nearest
from dlscale.core.schema import Strict

#: Rule: function that returns whether settings break the rule, and the message for this case.
Law = tuple[Callable[[Any], Any], str]


class Lawful(Strict):
    """Base class of settings with `LAWS`, rules that involve several keys."""

    LAWS: ClassVar[tuple[Law, ...]] = ()

    @model_validator(mode="after")
    def _lawful(self) -> Self:
        for broken, message in self.LAWS:
            if broken(self):
                raise ValueError(message.format(its=self))
        return self


def _supports(run: Any, key: str) -> bool:
    return key in registry.study(run.study).supports


def _captures(run: Any) -> bool:
    return run.compile.mode in ("reduce-overhead", "max-autotune")


def _draws(run: Any) -> bool:
    """Return whether several devices share a model whose forward pass draws random numbers."""
    return run.geometry.model_size > 1 and registry.study(run.study).draws(run)


#: Rules for the settings of a run.
OF_RUNS: tuple[Law, ...] = (
    (
        lambda run: run.batch_size % run.geometry.dp,
        "batch_size {its.batch_size} is not divisible by geometry.nodes x geometry.gpus_per_node / (tp "
        "{its.geometry.tp} x cp {its.geometry.cp}) = {its.geometry.dp}; use a multiple of {its.geometry.dp}",
    ),
    (
        lambda run: run.accumulation_steps > run.local_batch_size,
        "accumulation_steps {its.accumulation_steps} is more than the {its.local_batch_size} samples that "
        "batch_size gives each device; lower accumulation_steps, or raise batch_size",
    ),
    (
        lambda run: run.accumulation_steps > 1 and _captures(run),
        "accumulation_steps and compile.mode {its.compile.mode}: the CUDA graphs of this mode overwrite the gradients "
        "of the previous micro-batch; use compile.mode default, on a GPU with cuda_graph",
    ),
    (
        lambda run: run.attention != "default" and not _supports(run, "attention"),
        "attention: the model of study {its.study} does not support this setting; set it to default",
    ),
    (
        lambda run: run.activation_checkpointing and not _supports(run, "activation_checkpointing"),
        "activation_checkpointing: the model of study {its.study} does not support this setting; set it to false",
    ),
    (
        lambda run: run.compile.memory_budget < 1 and run.compile.mode == "none",
        "compile.memory_budget {its.compile.memory_budget:g}: only compiled steps have a budget; set compile.mode to "
        "default, or use activation_checkpointing",
    ),
    (
        # 2^-24 is the smallest positive number in float16; with a smaller eps Adam divides by zero.
        lambda run: run.precision == "fp16_pure" and "adam" in run.optimizer.kind and run.optimizer.eps < 2**-24,
        "precision fp16_pure: optimizer.eps {its.optimizer.eps:g} is zero in 16 bits; set it to 1e-4, or use "
        "optimizer.kind sgd or precision fp16_master",
    ),
    (
        lambda run: run.loss_scale is not None and run.precision not in ("fp16", "fp16_master"),
        "loss_scale and precision {its.precision}: only fp16 and fp16_master scale the loss; remove loss_scale, or use "
        "one of these precisions",
    ),
    (
        lambda run: run.keep_norms_fp32 and not run.precision.endswith("_pure"),
        "keep_norms_fp32 and precision {its.precision}: only fp16_pure and bf16_pure have normalisation in 16 bits; "
        "remove keep_norms_fp32, or use one of these precisions",
    ),
    (
        lambda run: run.precision.startswith("fp8") and "float8" not in registry.table("PROVIDES"),
        "precision {its.precision}: needs dlscale's extension fp8, which is not installed; use precision bf16",
    ),
    (
        lambda run: run.precision.startswith("fp8") and run.geometry.tp > 1,
        "precision {its.precision} and geometry.tp: divided layers have no 8-bit version; use tp 1, or precision bf16",
    ),
    # ---- CUDA graphs
    (
        lambda run: run.cuda_graph and _captures(run),
        "cuda_graph and compile.mode {its.compile.mode}: this mode captures graphs itself; remove cuda_graph, or use "
        "compile.mode default",
    ),
    (
        lambda run: run.cuda_graph and run.precision in ("fp16", "fp16_master") and not run.optimizer.fused,
        "cuda_graph and precision {its.precision} need optimizer.fused, because this precision scales the loss, and "
        "only a fused update (adam, adamw, sgd) can be skipped on the device if gradients overflow; set "
        "optimizer.fused, or use precision bf16 or bf16_master",
    ),
    (
        # The settings of a measurement have no `training`.
        lambda run: (
            run.cuda_graph
            and not run.optimizer.fused
            and getattr(getattr(run, "training", None), "on_divergence", "") in ("skip", "roll_back")
        ),
        "cuda_graph and training.on_divergence {its.training.on_divergence} need optimizer.fused (adam, adamw, sgd), "
        "because only a fused update can be left out on the device; set optimizer.fused",
    ),
    (
        lambda run: run.cuda_graph and run.optimizer.kind == "sgd" and not run.optimizer.fused,
        "cuda_graph and optimizer.kind sgd need the learning rate on the device; set optimizer.fused",
    ),
    # ---- devices that share a model
    *(
        (
            lambda run, axis=axis: getattr(run.geometry, axis) > 1 and not _supports(run, axis),
            f"geometry.{axis}: the model of study {{its.study}} does not support this key; set it to 1 (parallel.kind "
            "fsdp shards the weights of any model)",
        )
        for axis in ("tp", "cp")
    ),
    (
        lambda run: run.geometry.model_size > 1 and run.parallel.kind == "dp",
        "parallel.kind dp and geometry.tp, cp: dp has one process for all devices, and tp and cp need one process per "
        "device; use ddp or fsdp",
    ),
    (
        lambda run: run.geometry.model_size > 1 and run.parallel.kind == "ddp" and run.parallel.sync_batchnorm,
        "parallel.sync_batchnorm and geometry.tp, cp cannot be combined; remove sync_batchnorm, or set tp and cp to 1",
    ),
    *(
        (
            lambda run, broken=broken: broken(run) and _draws(run),
            f"{key} and geometry.tp, cp: a CUDA graph cannot change the random state of drop-out on devices that share "
            "a model; set drop-out to 0, or remove one of these settings",
        )
        for key, broken in (("cuda_graph", lambda run: run.cuda_graph), ("compile.mode {its.compile.mode}", _captures))
    ),
    # ---- DataParallel
    (
        lambda run: run.parallel.kind == "dp" and run.geometry.nodes > 1,
        "parallel.kind dp and geometry.nodes {its.geometry.nodes}: dp has a single process, on one node; use ddp",
    ),
    (
        lambda run: run.parallel.kind == "dp" and run.cuda_graph,
        "cuda_graph and parallel.kind dp: dp copies the model again at every step; use ddp",
    ),
    (
        lambda run: run.parallel.kind == "dp" and run.compile.mode != "none",
        "compile.mode and parallel.kind dp: dp copies the model again at every step; use ddp",
    ),
    # ---- FSDP
    (
        lambda run: run.parallel.kind == "fsdp" and run.geometry.replicas % (run.parallel.shard or 1),
        "parallel.shard {its.parallel.shard}: expected a divisor of {its.geometry.replicas}, which is the number of "
        "devices with the same weights (all devices / tp)",
    ),
    (
        lambda run: run.parallel.kind == "fsdp" and run.precision.endswith("_master"),
        "precision {its.precision} and parallel.kind fsdp: fsdp keeps float32 weights itself; use precision bf16 with "
        "parallel.param_dtype bf16",
    ),
    (
        lambda run: run.keep_norms_fp32 and run.parallel.kind == "fsdp",
        "keep_norms_fp32 and parallel.kind fsdp: fsdp shards weights of a single number format; remove "
        "keep_norms_fp32, or use ddp",
    ),
    (
        lambda run: (
            run.parallel.kind == "fsdp"
            and run.geometry.replicas == 1
            and (run.parallel.param_dtype, run.parallel.reduce_dtype) != ("fp32", "fp32")
        ),
        "parallel.param_dtype and reduce_dtype: fsdp has no effect if no two devices have the same weights, and then "
        "precision sets all number formats; remove both keys, and use precision bf16",
    ),
    (
        lambda run: run.parallel.kind == "fsdp" and run.parallel.cpu_offload and run.geometry.tp > 1,
        "parallel.cpu_offload and geometry.tp: tp sums gradients on the devices, and cpu_offload keeps gradients in "
        "the host's memory; remove one of the two keys",
    ),
    (
        lambda run: run.parallel.kind == "fsdp" and run.geometry.replicas == 1 and run.parallel.cpu_offload,
        "parallel.cpu_offload: with a single device, the weights are not sharded and stay on the device; remove this "
        "key, or use more devices",
    ),
    (
        lambda run: run.parallel.kind == "fsdp" and run.parallel.cpu_offload and run.precision == "fp16",
        "parallel.cpu_offload and precision fp16: fp16 scales the loss on the device; use precision bf16",
    ),
    (
        lambda run: run.parallel.kind == "fsdp" and run.cuda_graph,
        "cuda_graph and parallel.kind fsdp: fsdp moves weights in memory at every step; remove cuda_graph, or use ddp",
    ),
    (
        lambda run: run.parallel.kind == "fsdp" and run.memory_format != "contiguous",
        "memory_format channels_last and parallel.kind fsdp: fsdp moves weights in memory at every step; use "
        "memory_format contiguous, or ddp",
    ),
    # ---- DistributedDataParallel
    (
        lambda run: run.parallel.kind == "ddp" and run.parallel.sync_batchnorm and not run.parallel.sync,
        "parallel.sync false and sync_batchnorm: sync_batchnorm would still exchange statistics; remove one key",
    ),
    (
        lambda run: run.parallel.kind == "ddp" and run.parallel.compression != "none" and not run.parallel.sync,
        "parallel.sync false and compression: without sync no gradients are exchanged; remove one of the two keys",
    ),
    (
        lambda run: run.parallel.kind == "ddp" and run.parallel.sync_batchnorm and run.accumulation_steps > 1,
        "parallel.sync_batchnorm and accumulation_steps: a small last batch gives processes different numbers of "
        "micro-batches, so some processes would wait forever for statistics; remove one of the two keys",
    ),
)


# ---- samples that are rows of a dataset's files


def check_fields(samples: Any, fields: Collection[str], where: str = "") -> None:
    """Raise a `UserError` if row samples need a field that the dataset lacks; check nothing if `fields` is empty."""
    for key in ("input", "target"):
        named = getattr(samples, key, ())  # a user's own class may lack these keys
        for name in [named] if isinstance(named, str) else named.values() if isinstance(named, dict) else named:
            if fields and name not in fields:
                raise UserError(
                    f"{where}samples.{key}: the dataset has no field '{name}'{nearest(name, fields)}; it has: "
                    f"{', '.join(fields)}"
                )
