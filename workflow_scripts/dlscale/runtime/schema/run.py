"""One fully resolved configuration of one study at one scale.

`TrainRun` and `ThroughputRun` are the slices that the two stages may see: what a stage cannot read
cannot make it run again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

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


class Loader(Strict):
    """How batches reach the model."""

    kind: Literal["torch", "synthetic"] = Field("torch", description="torch: DataLoader; synthetic: no data at all.")
    workers: NonNegativeInt = Field(2, description="Loader processes; 0 loads in the training process.")
    prefetch: PositiveInt = Field(2, description="Batches that each worker keeps ready.")
    pin_memory: bool = Field(True, description="Page-locked host memory for copies to a GPU; no effect on a CPU.")


class Optimizer(Strict):
    """The optimiser."""

    kind: Literal["adam"] = "adam"
    lr: PositiveFloat = Field(2e-4, description="Learning rate at the schedule's base_batch_size.")
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    fused: bool = Field(False, description="One kernel for the whole update.")

    @model_validator(mode="after")
    def _betas(self) -> Optimizer:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)}: each must be at least 0 and less than 1")
        return self


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
    """`torch.compile`."""

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


class RunCore(Strict):
    """What training and measuring share."""

    study: Name
    dataset: Name
    seed: NonNegativeInt = Field(0, description="Of weights, samples and drop-out.")
    batch_size: PositiveInt = Field(64, description="Global batch size in samples: over all devices.")
    model: Annotated[UNet3DModel | ViTModel, Field(discriminator="kind")]
    loss: Loss
    samples: Annotated[CropSamples | PairSamples, Field(discriminator="kind")]
    loader: Loader = Loader()
    optimizer: Optimizer = Optimizer()
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = Field(
        "fp32", description="fp32 switches TensorFloat-32 off; fp16 and bf16 are autocast (fp16 with loss scaling)."
    )
    compile: Compile = Compile()
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
