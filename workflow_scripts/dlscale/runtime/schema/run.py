"""One fully resolved configuration of one study at one scale.

`TrainRun` and `ThroughputRun` are the slices that the two stages may see: what a stage cannot read
cannot make it run again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from dlscale.runtime.schema.base import Name, Strict


class UNet3DModel(Strict):
    """The 3D U-Net; its channels come from the data."""

    kind: Literal["unet3d"]
    widths: list[PositiveInt] = Field(
        [64, 128, 256, 512, 512, 512], min_length=1, description="Channels after each stride-2 level, top to bottom."
    )
    init_std: PositiveFloat = Field(0.02, description="Standard deviation of the initial weights.")


class ViTModel(Strict):
    """The vision transformer; its image size and channels come from the data."""

    kind: Literal["vit"]
    patch: PositiveInt | tuple[PositiveInt, PositiveInt] = Field(8, description="Patch edge, or rows and columns.")
    embed_dim: PositiveInt = 384
    depth: PositiveInt = 12
    heads: PositiveInt = 8
    mlp_ratio: PositiveFloat = 4.0
    dropout: float = Field(0.0, ge=0, lt=1, description="Of projections and MLPs.")
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    drop_path: float = Field(0.0, ge=0, lt=1, description="Stochastic depth of the last block; rises linearly from 0.")
    residual: bool = Field(False, description="Predict the change from the input state instead of the state itself.")

    @model_validator(mode="after")
    def _heads(self) -> ViTModel:
        if self.embed_dim % self.heads:
            raise ValueError(f"embed_dim {self.embed_dim} does not divide by heads {self.heads}")
        return self


class Loss(Strict):
    """The training loss."""

    kind: Literal["l1", "relative_l2"]
    density_weight: NonNegativeFloat = Field(
        0.0, description="Weight (lambda_rho) of the L1 of exp(14 x) of channel 0, added to l1; 0 leaves it out."
    )


class CropSamples(Strict):
    """Random crops of volumes."""

    kind: Literal["crops"]
    crop: PositiveInt = Field(64, description="Edge of a crop in cells.")
    symmetry: Literal["none", "rotations", "full"] = Field(
        "full", description="none; the 24 rotations; or full: all 48 rotations and reflections. Vectors turn along."
    )
    train: PositiveInt = Field(65536, description="Samples in a training epoch.")
    valid: PositiveInt = Field(8192, description="Fixed validation crops (fewer where the volume holds fewer).")


class PairSamples(Strict):
    """Pairs of states `dt` stored steps apart."""

    kind: Literal["pairs"]
    dt: PositiveInt = Field(1, description="Stored time steps between input and target.")
    train: PositiveInt | None = Field(None, description="At most this many training samples an epoch; all if absent.")
    valid: PositiveInt | None = Field(None, description="At most this many, evenly spaced; all if absent.")


class TorchLoader(Strict):
    """PyTorch's DataLoader: worker processes, the published baseline."""

    kind: Literal["torch"]
    workers: NonNegativeInt = Field(2, description="Loader processes; 0 loads in the training process.")
    prefetch: PositiveInt = Field(2, description="Batches that each worker keeps ready.")
    pin_memory: bool = Field(True, description="Page-locked host memory for copies to a GPU; no effect on a CPU.")


class DirectLoader(Strict):
    """Threads that read mapped files into reused buffers; a GPU turns and decodes what they read."""

    kind: Literal["direct"]
    workers: NonNegativeInt = Field(2, description="Threads; 0 loads in the thread of the model.")
    prefetch: PositiveInt = Field(2, description="Batches that are kept ready.")
    resident: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Hold all data on the device and read it once. auto: on a GPU of which it takes at most half the "
        "free memory; the log says which.",
    )


class DaliLoader(Strict):
    """NVIDIA DALI (`pip install dlscale[dali]`)."""

    kind: Literal["dali"]
    workers: PositiveInt = Field(2, description="Threads of the pipeline.")
    prefetch: PositiveInt = Field(2, description="Batches that are kept ready.")
    device: Literal["auto", "cpu", "gpu"] = Field(
        "auto", description="Where samples are turned and decoded; auto: where the model is."
    )


class SyntheticLoader(Strict):
    """One batch of random numbers on the device, again and again: no data at all."""

    kind: Literal["synthetic"]


Loader = Annotated[TorchLoader | DirectLoader | DaliLoader | SyntheticLoader, Field(discriminator="kind")]


class _Optimizer(Strict):
    kind: str
    lr: PositiveFloat = Field(2e-4, description="Learning rate at the schedule's base_batch_size.")
    weight_decay: NonNegativeFloat = 0.0
    fused: bool = Field(False, description="One kernel for the whole update.")


class Adam(_Optimizer):
    """Adam; `adamw` takes the weight decay out of the gradient (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    kind: Literal["adam", "adamw"] = "adam"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8

    @model_validator(mode="after")
    def _betas(self) -> Adam:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)}: each must be at least 0 and less than 1")
        return self


class SGD(_Optimizer):
    """Stochastic gradient descent."""

    kind: Literal["sgd"]
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum greater than 0")
        return self


def _adam_by_default(value: Any) -> Any:
    return {"kind": "adam", **value} if isinstance(value, dict) else value


Optimizer = Annotated[Adam | SGD, Field(discriminator="kind"), BeforeValidator(_adam_by_default)]


class Schedule(Strict):
    """The learning-rate schedule: linear warm-up, then a cosine that reaches `end_lr` when all steps are done."""

    kind: Literal["cosine", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    end_lr: NonNegativeFloat = 0.0
    scaling: Literal["none", "sqrt", "linear"] = Field(
        "none", description="How lr grows with batch_size / base_batch_size."
    )
    base_batch_size: PositiveInt | None = Field(None, description="Batch size that optimizer.lr is meant for.")

    @model_validator(mode="after")
    def _base(self) -> Schedule:
        if self.scaling != "none" and self.base_batch_size is None:
            raise ValueError(f"scaling {self.scaling} needs base_batch_size")
        return self


class Training(Strict):
    """How long to train, and what to keep."""

    epochs: PositiveInt | None = Field(None, description="Passes over the training samples; or give steps.")
    steps: PositiveInt | None = Field(None, description="Optimiser steps; the last epoch may be cut short.")
    checkpoint_epochs: PositiveInt = Field(1, description="Save a checkpoint every so many epochs, and at the end.")
    keep_checkpoints: PositiveInt = Field(2, description="Checkpoints kept on disk, the newest.")

    @model_validator(mode="after")
    def _one(self) -> Training:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


class Compile(Strict):
    """`torch.compile` of the model together with its loss."""

    mode: Literal["none", "default", "reduce-overhead", "max-autotune"] = "none"


class Geometry(Strict):
    """Nodes and devices. One process drives one device."""

    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt = Field(1, description="Processes a node, one device each (a CPU counts as one).")

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.nodes * self.gpus_per_node


class Throughput(Strict):
    """Trials of the throughput stage, as `benchy` defined them."""

    warmup: NonNegativeInt = Field(3, description="Uncounted trials first.")
    trials: PositiveInt = 3
    batches: PositiveInt = Field(50, description="Batches a trial.")


Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp16_master", "bf16_master", "fp16_pure", "bf16_pure"]


class RunCore(Strict):
    """What training and measuring share."""

    study: Name
    dataset: Name
    seed: NonNegativeInt = Field(0, description="Of weights, samples and drop-out.")
    batch_size: PositiveInt = Field(64, description="Global batch size in samples: over all devices.")
    model: Annotated[UNet3DModel | ViTModel, Field(discriminator="kind")]
    loss: Loss
    samples: Annotated[CropSamples | PairSamples, Field(discriminator="kind")]
    loader: Loader = TorchLoader(kind="torch")
    optimizer: Optimizer = Adam()
    precision: Precision = Field(
        "fp32",
        description="fp32 switches TensorFloat-32 off, the others on. fp16, bf16: autocast (Apex O1). "
        "fp16_master, bf16_master: weights and computation in 16 bits, updates on float32 copies (O2). "
        "fp16_pure, bf16_pure: all in 16 bits (O3). fp16 and fp16_master scale the loss.",
    )
    compile: Compile = Compile()
    cuda_graph: bool = Field(False, description="Record the whole step as a CUDA graph and replay it; needs a GPU.")
    memory_format: Literal["contiguous", "channels_last"] = Field(
        "contiguous", description="Order in memory of convolutions' inputs and weights."
    )
    pad_channels: PositiveInt = Field(
        1, description="Pad the U-Net's input and output channels with zeros to a multiple; its weights stay."
    )
    attention: Literal["default", "auto", "flash", "efficient", "cudnn", "math"] = Field(
        "default", description="Kernel of attention; default: PyTorch's own choice; auto: the fastest in a short trial."
    )
    accumulation_steps: PositiveInt = Field(
        1, description="Parts of the local batch that are computed one after the other; the gradient stays the same."
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass instead of keeping them: time for memory."
    )
    geometry: Geometry = Geometry()

    @model_validator(mode="after")
    def _fits(self) -> RunCore:
        if self.batch_size % self.geometry.world_size:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide by geometry.nodes x geometry.gpus_per_node = "
                f"{self.geometry.world_size}"
            )
        if isinstance(self.model, UNet3DModel) and isinstance(self.samples, CropSamples):
            factor = 2 ** len(self.model.widths)
            if self.samples.crop % factor:
                raise ValueError(
                    f"samples.crop {self.samples.crop} does not divide by {factor}: {len(self.model.widths)} levels "
                    "of model.widths each halve it"
                )
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> RunCore:
        """Refuse what no model, optimiser or graph can do."""
        vit = isinstance(self.model, ViTModel)
        if self.accumulation_steps > self.local_batch_size:
            raise ValueError(
                f"accumulation_steps {self.accumulation_steps} is more than the {self.local_batch_size} samples that a "
                "device has of batch_size"
            )
        if self.accumulation_steps > 1 and self.compile.mode in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"accumulation_steps and compile.mode {self.compile.mode}: its graphs write each part's gradients "
                "over those of the part before; use compile.mode default, with cuda_graph on a GPU"
            )
        if vit and self.pad_channels > 1:
            raise ValueError("pad_channels is for the unet3d; a vit's channels need no padding: leave it at 1")
        if not vit and self.attention != "default":
            raise ValueError(f"attention {self.attention}: the {self.model.kind} has none; leave it at default")
        # 2^-24 is the smallest number of float16; below, Adam divides by zero.
        if self.precision == "fp16_pure" and isinstance(self.optimizer, Adam) and self.optimizer.eps < 2**-24:
            raise ValueError(
                f"precision fp16_pure: optimizer.eps {self.optimizer.eps:g} is zero in 16 bits; use 1e-4, or "
                "optimizer.kind sgd, or precision fp16_master"
            )
        if self.cuda_graph:
            self._capturable()
        return self

    def _capturable(self) -> None:
        if self.geometry.world_size > 1:
            raise ValueError("cuda_graph is for one device so far; set it to false, or geometry to 1 x 1")
        if self.compile.mode in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"cuda_graph and compile.mode {self.compile.mode}: the mode captures graphs itself; "
                "leave one of them out, or use compile.mode default"
            )
        if self.precision in ("fp16", "fp16_master"):
            raise ValueError(
                f"cuda_graph and precision {self.precision}: loss scaling, which skips updates, is not recorded; use "
                "bf16 or bf16_master"
            )
        if self.optimizer.kind == "sgd" and not self.optimizer.fused:
            raise ValueError("cuda_graph and optimizer.kind sgd need optimizer.fused, which has its rate on the device")
        drops = isinstance(self.model, ViTModel) and (
            self.model.dropout or self.model.attention_dropout or self.model.drop_path
        )
        if self.activation_checkpointing and drops:
            raise ValueError(
                "cuda_graph and activation_checkpointing: no graph can record the random state that drop-out keeps "
                "for its second pass; leave one of the three out"
            )

    @property
    def local_batch_size(self) -> int:
        """Samples a step on one device."""
        return self.batch_size // self.geometry.world_size


class TrainRun(RunCore):
    """What the train stage sees."""

    training: Training
    schedule: Schedule = Schedule()


class ThroughputRun(RunCore):
    """What the throughput stage sees."""

    throughput: Throughput = Throughput()


class Run(TrainRun, ThroughputRun):
    """A run as `results/plans/PLAN/RUN/config.yaml` holds it."""

    label: str | None = Field(None, description="What tables and figures call the run; its name if absent.")

    def slice(self, kind: type[RunCore]) -> dict[str, Any]:
        """Return the part of this run that a stage of `kind` sees, as plain values for JSON."""
        return self.model_dump(mode="json", include=set(kind.model_fields))
