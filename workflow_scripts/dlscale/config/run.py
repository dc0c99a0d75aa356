"""A fully resolved run of one study.

The class of a run depends on the run's study, which defines the settings of model, loss and samples. A stage reads the
common keys (`RunCore`) and the keys in the stage's row of the table of stages. If one of these keys changes, the stage
runs again.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from dlscale.config import laws
from dlscale.config.laws import Law, Lawful
from dlscale.core import registry
from dlscale.core.errors import UserError, unknown
from dlscale.core.metrics import VALID_LOSS
from dlscale.core.schema import (
    BatchSize,
    Component,
    Devices,
    Few,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Repeats,
    Seconds,
    Seed,
    Strict,
    Threads,
    Value,
    Workers,
    one_of,
)
from dlscale.core.settings import read_settings, validate
from dlscale.core.stages import STAGES

#: Types for the names of experiment trackers (`Tracker`) and of profilers (`Tool`), including those of extensions.
Tracker: Any = one_of(registry.table("TRACKERS"))
Tool: Any = one_of(registry.table("PROFILERS"))
#: Class of the settings of an external program.
Program: Any = registry.provided("Program", one_of([]))


class _Optimizer(Lawful):
    kind: str
    lr: PositiveFloat = Field(
        2e-4,
        description="Learning rate after warm-up (with schedule.scaling: at batch size base_batch_size).",
    )
    weight_decay: NonNegativeFloat = Field(
        0.0,
        description="Factor of the weight decay: each gradient is increased by weight_decay x weights (not with "
        "adamw).",
    )
    fused: bool = Field(False, description="Compute the complete update in one kernel.")
    clip_norm: PositiveFloat | None = Field(
        None,
        description="Maximum norm of all gradients together; gradients with a larger norm are scaled to this norm.",
    )


class Adam(_Optimizer):
    """Adam. `adamw` decreases weights by lr x weight_decay x weights (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    kind: Literal["adam", "adamw"] = "adam"
    betas: tuple[float, float] = Field(
        (0.9, 0.999),
        description="Decay factors of two running means: mean of the gradients, mean of squared gradients.",
    )
    eps: PositiveFloat = Field(1e-8, description="Number that is added to the denominator of an update.")

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda adam: not all(0 <= beta < 1 for beta in adam.betas),
            "betas {its.betas}: each must be at least 0 and less than 1",
        ),
    )


class SGD(_Optimizer):
    """Stochastic gradient descent."""

    kind: Literal["sgd"]
    momentum: float = Field(0.0, ge=0, lt=1, description="Fraction of the previous update that each update adds again.")


class Adadelta(_Optimizer):
    """Adadelta (Zeiler 2012, arXiv:1212.5701)."""

    kind: Literal["adadelta"]

    LAWS: ClassVar[tuple[Law, ...]] = (
        (lambda optimizer: optimizer.fused, "fused: PyTorch has no fused adadelta; remove this key"),
    )


def _with_kind(kind: str, value: Any) -> Any:
    return {"kind": kind, **value} if isinstance(value, dict) else value


Optimizer = Annotated[
    Adam | SGD | Adadelta, Field(discriminator="kind"), BeforeValidator(functools.partial(_with_kind, "adam"))
]


class Schedule(Lawful):
    """Learning-rate schedule: a linear warm-up, then the form that `kind` names."""

    kind: Literal["cosine", "linear", "polynomial", "exponential", "step", "constant"] = Field(
        "cosine",
        description="Form of the schedule. cosine, linear, polynomial (quadratic): fall to end_lr at the end. "
        "exponential: multiply by gamma per epoch, in equal factors per step. step: multiply by gamma after every "
        "step_epochs epochs, or after the epochs in milestones. constant: keep the learning rate.",
    )
    warmup_steps: NonNegativeInt = Field(
        0, description="Steps of the linear warm-up; step 1 has 1/warmup_steps of the rate after the warm-up."
    )
    warmup_epochs: NonNegativeInt = Field(0, description="Epochs of the linear warm-up; alternative to warmup_steps.")
    end_lr: NonNegativeFloat = Field(0.0, description="Final learning rate of kinds cosine, linear and polynomial.")
    gamma: float = Field(0.1, gt=0, le=1, description="Factor of kinds exponential and step.")
    step_epochs: PositiveInt = Field(1, description="For kind step, epochs between changes of the learning rate.")
    milestones: list[PositiveInt] = Field(
        [], description="For kind step, epochs after which the learning rate changes; alternative to step_epochs."
    )
    scaling: Literal["none", "sqrt", "linear"] = Field(
        "none",
        description="Growth of optimizer.lr with the ratio batch_size / base_batch_size. none: no growth. sqrt: lr is "
        "multiplied by the square root of the ratio. linear: lr is multiplied by the ratio.",
    )
    base_batch_size: BatchSize | None = Field(None, description="Global batch size for which optimizer.lr was chosen.")

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda schedule: schedule.scaling != "none" and schedule.base_batch_size is None,
            "scaling {its.scaling} needs base_batch_size",
        ),
        (
            lambda schedule: schedule.warmup_steps and schedule.warmup_epochs,
            "give either warmup_steps or warmup_epochs",
        ),
        (
            lambda schedule: schedule.milestones != sorted(set(schedule.milestones)),
            "milestones {its.milestones}: each epoch must come after the previous epoch",
        ),
    )


class Target(Strict):
    """Value of a metric that a training must reach."""

    metric: str = Field(
        VALID_LOSS.name, description="Metric of the target: valid_loss, or the name of a metric of the study."
    )
    value: Number = Field(
        description="Value of the metric; the target is reached if an epoch ends with this value or a better one."
    )
    stop: bool = Field(
        True, description="End the training when it reaches the target; false: only report the epoch that reached it."
    )


class Training(Lawful):
    """Length of a training, its initial weights, and the results that it keeps."""

    epochs: PositiveInt | None = Field(None, description="Passes over the training samples; alternative to `steps`.")
    steps: PositiveInt | None = Field(
        None, description="Optimiser steps; alternative to `epochs`. The last epoch may be shorter."
    )
    checkpoint_epochs: PositiveInt = Field(
        1,
        description="Epochs between two checkpoints; training also writes a checkpoint at its end. With on_divergence "
        "roll_back, training writes a checkpoint after each epoch.",
    )
    stop_after: PositiveInt | None = Field(
        None,
        description="Number of epochs after which the training pauses. Schedule and checkpoints do not change, so that "
        "the training can continue later as if there had been no pause. On a CPU, the result has identical bits; on a "
        "GPU, libraries choose kernels again, so bits may differ.",
    )
    on_divergence: Literal["fail", "stop", "skip", "roll_back"] = Field(
        "fail",
        description="Reaction to a loss or gradient of NaN or infinity. fail: the stage fails. stop: the training ends "
        "and the run ranks last; this is the default in plans of kind sweep or convergence. skip: leave out these "
        "steps. roll_back: repeat the epoch from its checkpoint, and leave out these steps. With skip and roll_back, "
        "the stage fails if more than half of an epoch's steps are left out, or if the validation loss is NaN or "
        "infinite.",
    )
    check_replicas: bool = Field(
        False,
        description="After each epoch, compare hashes of the weights of all processes; fail if copies differ.",
    )
    keep_best: str | None = Field(
        VALID_LOSS.name,
        description="Metric that selects the best epoch, whose weights are kept as model_best.pt: valid_loss, or the "
        "name of a metric of the study. null: keep only the final weights.",
    )
    target: Target | None = Field(None, description="Value of a metric that the training must reach.")
    weights: str | None = Field(
        None,
        description="Path of the initial weights: the model.pt of another run, the folder of a checkpoint, or a "
        "published state dict.",
    )
    trackers: list[Tracker] = Field(
        [],
        description="Experiment trackers in addition to TensorBoard. wandb: Weights & Biases writes to the run's "
        "folder, offline unless WANDB_MODE is set. mlflow: MLflow writes to mlflow.db in the plan's folder, or to "
        "MLFLOW_TRACKING_URI. Both trackers need dlscale[trackers].",
    )

    LAWS: ClassVar[tuple[Law, ...]] = (
        (lambda training: (training.epochs is None) == (training.steps is None), "give either epochs or steps"),
        (lambda training: "://" in (training.weights or ""), "weights: an address; fetch the file, and give its path"),
        (
            lambda training: training.check_replicas and "check_replicas" not in registry.table("PROVIDES"),
            "check_replicas: this key needs dlscale's extension batch, which is not installed; remove the key",
        ),
    )


class _Several(Strict):
    kind: str
    selftest: bool = Field(
        True,
        description="Test the communication before the run: check the exchanged values, and measure the latency and "
        "bandwidth of the links. Wrong values end the run.",
    )


class DDP(_Several):
    """DistributedDataParallel: one process per device, which averages gradients in buckets."""

    kind: Literal["ddp"] = "ddp"
    bucket_mb: PositiveFloat | None = Field(
        None,
        description="Bucket size, MiB: gradients averaged in one call. Absent: PyTorch's default of 25.",
    )
    first_bucket_mb: PositiveFloat | None = Field(
        None,
        description="Size of the first bucket, MiB; with a small first bucket, averaging starts earlier. Absent: "
        "bucket_mb, or PyTorch's default of 1 if bucket_mb is also absent.",
    )
    broadcast_buffers: bool = Field(
        True, description="Copy the model's buffers, such as running means, from rank 0 to all ranks before each step."
    )
    bucket_view: bool = Field(
        True, description="Store gradients in the buckets; false: copy gradients into the buckets and back."
    )
    sync_batchnorm: bool = Field(
        False,
        description="Batch normalisation over the samples of all processes; false: each process normalises its own "
        "samples.",
    )
    compression: Literal["none", "bf16", "fp16"] = Field(
        "none", description="Number format in which gradients are averaged; none: the format of the gradients."
    )
    sync: bool = Field(
        True,
        description="Average gradients over the processes. With false, gradients are not averaged, which shows the "
        "cost of averaging: such a run can be measured and profiled, but not trained.",
    )


class FSDP(_Several):
    """Fully sharded data parallelism (FSDP2; Zhao et al. 2023, arXiv:2304.11277): each device stores a shard."""

    kind: Literal["fsdp"]
    shard: PositiveInt | None = Field(
        None,
        description="Number of neighbouring devices over which one copy of the weights is sharded. Several groups of "
        "this many devices average gradients with each other (hybrid sharding). Absent: all devices with the same "
        "weights (all devices / tp).",
    )
    reshard: bool = Field(
        True,
        description="Free the gathered weights of a layer after its forward pass, and gather the weights again for the "
        "backward pass. false: keep the gathered weights, which needs more memory and less communication.",
    )
    param_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Number format in which weights are gathered and used. fp32: the format of the stored weights, in "
        "which updates are computed (16 bits with a precision that ends with _pure, otherwise float32).",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="Number format in which gradients are averaged.")
    cpu_offload: bool = Field(
        False,
        description="Keep weights, gradients and optimiser state in the host's memory, and update weights on the host.",
    )


class DP(Strict):
    """DataParallel, for comparison.

    One process copies the model to all GPUs of a node at every step.
    """

    kind: Literal["dp"]


Parallel = Annotated[
    DDP | FSDP | DP, Field(discriminator="kind"), BeforeValidator(functools.partial(_with_kind, "ddp"))
]


class Compile(Strict):
    """`torch.compile` of the model together with its loss."""

    mode: Literal["none", "default", "reduce-overhead", "max-autotune"] = Field(
        "none",
        description="Mode of torch.compile. none: do not compile. default: PyTorch's default. reduce-overhead: use "
        "CUDA graphs. max-autotune: use CUDA graphs and the fastest of several kernels.",
    )
    memory_budget: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Fraction of the activations that the compiled step keeps for the backward pass, from 0 (only the "
        "inputs) to 1 (PyTorch's default). PyTorch chooses the activations to recompute.",
    )


#: Orders of the axes of the device mesh; the ranks of the first axis are neighbours.
Order = Literal["tp-cp-dp", "cp-tp-dp", "tp-dp-cp", "cp-dp-tp", "dp-tp-cp", "dp-cp-tp"]


class Geometry(Lawful):
    """Nodes and devices of a run.

    Each group of tp x cp devices shares a model and computes the same samples.
    """

    nodes: Devices = Field(1, description="Nodes of the run.")
    gpus_per_node: Devices = Field(1, description="Devices per node; without GPUs, each process counts as a device.")
    tp: Devices = Field(
        1,
        description="Tensor-parallel size: number of devices over which the weights of each layer are sharded. Between "
        "the layers, the tokens are split over these devices.",
    )
    cp: Devices = Field(
        1,
        description="Context-parallel size: number of devices over which the tokens of a sample are split; each device "
        "has all weights.",
    )
    order: Order = Field(
        "tp-cp-dp",
        description="Order of the axes of the device mesh. Devices along the first axis are neighbours; they are on "
        "one node if the node has enough devices.",
    )
    cpus: PositiveInt | None = Field(
        None,
        description="CPUs per device (sbatch --cpus-per-task); a process and its loader workers only run on these "
        "CPUs. Absent: with Slurm, the node's CPUs divided by the node's GPUs (on nodes without GPUs: data_cpus of the "
        "scheduler); without Slurm, all CPUs.",
    )
    memory_mb: PositiveInt | None = Field(
        None,
        description="Memory of the run on each node, MB (sbatch --mem). Absent: the run's fraction of the node's "
        "memory_mb. Without Slurm, the limit is not enforced.",
    )

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def model_size(self) -> int:
        return self.tp * self.cp

    @property
    def dp(self) -> int:
        """Number of device groups that compute different samples."""
        return self.world_size // self.model_size

    @property
    def replicas(self) -> int:
        """Number of devices with the same weights."""
        return self.dp * self.cp

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda geometry: geometry.world_size % geometry.model_size,
            "tp {its.tp} x cp {its.cp} = {its.model_size} devices share a model, and nodes x gpus_per_node = "
            "{its.world_size} is not a multiple of that number; change gpus_per_node, tp or cp",
        ),
    )


class Throughput(Strict):
    """Trials of the throughput stage (as in NERSC's tool benchy), and paired timing with the plan's first run."""

    warmup: Repeats = Field(3, description="Minimum number of warm-up trials, whose times are discarded.")
    trials: Annotated[Repeats, Field(ge=1)] = Field(3, description="Number of trials whose times count.")
    batches: Annotated[Repeats, Field(ge=1)] = Field(50, description="Minimum number of batches per trial.")
    seconds: Seconds = Field(
        1.0,
        description="Planned minimum duration of a trial, seconds. If the minimum number of batches takes less time in "
        "the warm-up, the trial has more batches. 0: no minimum.",
    )
    beside: Seconds = Field(
        30.0,
        description="Planned duration of the paired timing, seconds: to measure the speed-up, a run and the plan's "
        "first run with the stage throughput are timed alternately, if both have one process. On a busy machine the "
        "timing may take up to three times as long. 0: no paired timing. From 10 on, the first run is also timed "
        "against a copy of itself.",
    )
    error: PositiveFloat = Field(
        0.01,
        description="Target for the relative half-width of the 95 % interval of the two runs' speed ratio. Paired "
        "timing opens both runs several times. Each opening ends early when it reaches the target, and takes longer "
        "than planned while the half-width is above three times the target.",
    )


class Profile(Lawful):
    """Steps and tools of the profile stage."""

    tools: list[Tool] = Field(
        ["torch"],
        min_length=1,
        description="Profilers. torch: PyTorch's profiler, with a trace for Perfetto. nsys: NVIDIA Nsight Systems, if "
        "it is installed. lines: time of each source line in the hot functions (line_profiler).",
    )
    epoch: PositiveInt = Field(2, description="Epoch whose samples the profiled steps use, counted from 1.")
    skip: Repeats = Field(5, description="Warm-up steps before the profiled steps.")
    steps: Annotated[Repeats, Field(ge=1)] = Field(10, description="Steps that each profiler records.")
    ranks: list[NonNegativeInt] = Field([0], min_length=1, description="Ranks of the profiled processes.")
    functions: list[str] = Field(
        [],
        description="Additional functions for the tool `lines`, as MODULE:NAME or MODULE:CLASS.NAME. The tool always "
        "includes the functions of the step, of the study's model, loss and samples, and of the loader.",
    )

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda profile: len({*profile.tools}) < len(profile.tools),
            "tools {its.tools}: a tool is listed twice; remove one",
        ),
        (
            lambda profile: len({*profile.ranks}) < len(profile.ranks),
            "ranks {its.ranks}: a rank is listed twice; remove one",
        ),
    )


class Tune(Strict):
    """Settings that the tune stage tries in all combinations.

    If a list is empty, the stage chooses the values of the setting.
    """

    workers: list[Workers] = Field(
        [], description="Numbers of loader workers. Empty: 0, 1, 2, 4, … up to the number of CPUs of a process."
    )
    prefetch: list[Few] = Field([2, 4], description="Values of the loader's key `prefetch`.")
    loaders: list[str] = Field([], description="Kinds of loaders. Empty: the loader of the run.")
    threads: list[Threads] = Field(
        [],
        description="Numbers of CPU threads per process. Empty: without a GPU, the number of the process's CPUs and "
        "half of this number; with a GPU, the run's number.",
    )
    batch_size: list[BatchSize] = Field(
        [],
        description="Global batch sizes. Empty: the batch size of the run. Another batch size changes the training "
        "result.",
    )
    values: dict[str, Annotated[list[Value], Field(min_length=1)]] = Field(
        {}, description="For an external program, values to try for each placeholder in `program.values`."
    )
    seconds: float = Field(
        120.0,
        gt=0,
        le=604_800,
        description="Duration of all measurements, seconds; the duel (see rounds) takes half of this time, or all of "
        "this time with at most two combinations. Start and warm-up take additional time.",
    )
    rounds: Annotated[Repeats, Field(ge=3)] = Field(
        8,
        description="Rounds of the duel, the final comparison of the best combination with the run's own settings; "
        "each round measures both.",
    )

    @field_validator("loaders")
    @classmethod
    def _known(cls, kinds: list[str]) -> list[str]:
        known = set(loader_classes()) - {"synthetic"}  # synthetic loads no data, so it would always win
        if wrong := [kind for kind in kinds if kind not in known]:
            raise ValueError(unknown("loader that reads data", wrong[0], known))
        return kinds


def loader_classes() -> dict[str, type[Component]]:
    """Return the settings of all loaders by kind."""
    return {
        each.model_fields["kind"].annotation.__args__[0]: each for each in registry.load("dlscale.data.loaders").LOADERS
    }


Precision = Literal[
    "fp32", "tf32", "fp16", "bf16", "fp16_master", "bf16_master", "fp16_pure", "bf16_pure", "fp8", "fp8_rowwise"
]


LOCAL_BATCH_SIZE = (
    "Samples per step on each device (or group of devices that share a model). Alternative to batch_size, which is "
    "local_batch_size x devices (or groups)."
)


class RunCore(Lawful):
    """Settings that all stages of a run read; `batch_size` is always the global batch size."""

    LAWS: ClassVar[tuple[Law, ...]] = laws.OF_RUNS

    study: Name
    dataset: Name = Field(description="Name of the dataset.")
    seed: Seed = Field(0, description="Seed of initial weights, sample order and drop-out.")
    batch_size: BatchSize = Field(64, description="Global batch size, in samples over all devices.")
    model: SerializeAsAny[Strict]
    loss: SerializeAsAny[Strict]
    samples: SerializeAsAny[Strict]
    loader: SerializeAsAny[Component]
    optimizer: Optimizer = Adam()
    precision: Precision = Field(
        "fp32",
        description="Number format of the computation. fp32: 32 bits without TensorFloat-32. Every other value enables "
        "TensorFloat-32. fp16, bf16: autocast (Apex O1). fp16_master, bf16_master: weights and computation in 16 bits, "
        "updates on float32 copies (O2). fp16_pure, bf16_pure: weights, computation and updates in 16 bits (O3). fp16 "
        "and fp16_master scale the loss. fp8, fp8_rowwise: bf16, and linear layers in 8 bits, scaled by "
        "tensor or by row; needs torchao and an H100, L40 or newer.",
    )
    loss_scale: PositiveFloat | None = Field(
        None,
        description="Constant factor of the loss for precision fp16 and fp16_master, such as 128. Absent: the factor "
        "begins at 65536, is halved after a step whose gradients overflow, and is doubled after 2000 steps without "
        "overflow. With either factor, steps whose gradients overflow are left out.",
    )
    keep_norms_fp32: bool = Field(
        False,
        description="Keep weights, statistics and computation of normalisation layers in 32 bits, for precision "
        "fp16_pure and bf16_pure; the other precisions always do this.",
    )
    compile: Compile = Compile()
    cuda_graph: bool = Field(
        False, description="Record the complete step as a CUDA graph, and replay this graph; needs a GPU."
    )
    memory_format: Literal["contiguous", "channels_last"] = Field(
        "contiguous", description="Memory layout of the inputs and weights of convolutions."
    )
    attention: Literal["default", "auto", "flash", "efficient", "cudnn", "math"] = Field(
        "default",
        description="Attention kernel. default: PyTorch's choice. auto: the fastest kernel in a short test. The other "
        "values are PyTorch's kernels.",
    )
    accumulation_steps: PositiveInt = Field(
        1, description="Number of micro-batches per local batch; one update follows all micro-batches."
    )
    activation_checkpointing: bool | Literal["selective"] = Field(
        False,
        description="Recompute activations in the backward pass instead of keeping them. A step then needs less "
        "memory and more time. selective: keep the outputs of matrix products and attention, and recompute the rest.",
    )
    threads: Threads | None = Field(
        None,
        description="CPU threads per process. Absent: the job's threads divided by the job's processes. On one machine "
        "without a GPU, as many trainings with this key and without geometry.cpus run in parallel as the cores allow.",
    )
    geometry: Geometry = Geometry()
    parallel: Parallel = DDP()
    program: Program | None = Field(None, description="External program that runs instead of dlscale's training.")

    @classmethod
    def _keys(cls) -> list[str]:
        keys = super()._keys()
        place = keys.index("batch_size") + 1
        return [*keys[:place], "local_batch_size", *keys[place:]]

    @model_validator(mode="before")
    @classmethod
    def _to_global(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "local_batch_size" not in data:
            return data
        rest = {key: value for key, value in data.items() if key != "local_batch_size"}
        if data["local_batch_size"] is None:
            return rest
        if "batch_size" in rest:
            raise ValueError("give either batch_size (over all devices) or local_batch_size (per device)")
        given, geometry = data["local_batch_size"], Geometry()
        with contextlib.suppress(ValidationError):  # validation of the key `geometry` reports this error
            geometry = TypeAdapter(Geometry).validate_python(rest.get("geometry") or {})
        try:
            whole = TypeAdapter(BatchSize).validate_python(given) * geometry.dp
            TypeAdapter(BatchSize).validate_python(whole)
        except ValidationError:
            raise ValueError(
                f"local_batch_size: got {given!r}; expected a whole number that, multiplied by {geometry.dp} (groups "
                "of devices), is from 1 to 1000000000"
            ) from None
        return {**rest, "batch_size": whole}

    @model_validator(mode="after")
    def _fits_its_study(self) -> RunCore:
        registry.study(self.study).check(self)
        return self

    @property
    def processes(self) -> Geometry:
        return Geometry() if isinstance(self.parallel, DP) else self.geometry

    @property
    def cpus(self) -> int | None:
        """CPUs per process; None without `geometry.cpus`."""
        geometry = self.geometry
        return geometry.cpus and geometry.cpus * geometry.gpus_per_node // self.processes.gpus_per_node

    @property
    def selftest(self) -> bool:
        return not isinstance(self.parallel, DP) and self.parallel.selftest

    @property
    def averages(self) -> bool:
        return not isinstance(self.parallel, DDP) or self.parallel.sync

    @property
    def arithmetic(self) -> Precision:
        """Precision in which a step computes.

        This is `precision`, or `bf16_pure` if FSDP with `param_dtype` bf16 casts 32-bit weights and inputs.
        """
        cast = self.precision in ("fp32", "tf32") and getattr(self.parallel, "param_dtype", "fp32") == "bf16"
        return "bf16_pure" if cast else self.precision

    @property
    def can_step_alone(self) -> bool:
        """Whether a process can compute a step without communication, to measure the cost of communication."""
        parallel = self.parallel
        return isinstance(parallel, DDP) and parallel.sync and not parallel.sync_batchnorm and not self.cuda_graph

    @property
    def local_batch_size(self) -> int:
        return self.batch_size // self.geometry.dp

    def loaders(self, stage: str) -> list[str]:
        tried = [getattr(self, key) for key in STAGES[stage].settings]
        kinds = [kind for settings in tried if isinstance(settings, Tune) for kind in settings.loaders]
        return list(dict.fromkeys([self.loader.kind, *kinds]))


class Run(RunCore):
    """Complete settings of a run, as in `results/plans/PLAN/RUN/config.yaml`."""

    training: Training
    schedule: Schedule = Schedule()
    throughput: Throughput = Throughput()
    profile: Profile = Profile()
    tune: Tune = Tune()
    label: str | None = Field(None, description="Name of the run in tables and figures. Absent: the run's key.")

    def slice(self, stage: str) -> dict[str, Any]:
        return self.model_dump(mode="json", include={*RunCore.model_fields, *STAGES[stage].settings})


def components(study: str) -> dict[str, Any]:
    """Return the fields of a run whose types depend on its study or, for `loader`, on the extensions."""
    brought = registry.study(study)
    loaders = tuple(loader_classes().values())
    loader = Annotated[Union[loaders], Field(discriminator="kind")]  # type: ignore[valid-type]  # noqa: UP007
    return {
        "model": (brought.Model, ...),
        "loss": (brought.Loss, ...),
        "samples": (registry.kind(brought.dataset).Samples, ...),
        "loader": (loader, loaders[0](kind="torch")),
    }


@functools.cache
def run_class(study: str) -> type[Run]:
    """Return the class of a study's runs."""
    return create_model("Run", __base__=Run, __doc__=Run.__doc__, **components(study))


@functools.cache
def stage_class(study: str, stage: str) -> type[RunCore]:
    """Return the class of a study's runs, limited to the keys that a stage reads."""
    own: dict[str, Any] = {
        name: (Run.model_fields[name].annotation, Run.model_fields[name]) for name in STAGES[stage].settings
    }
    return create_model(f"{stage.capitalize()}Run", __base__=RunCore, **components(study), **own)


def load_run(config: str | Path, stage: str) -> Any:
    """Read and validate the keys that a stage needs; `config` is the path of a run's `config.yaml`, or JSON."""
    raw, where = read_settings(config)
    study = raw.get("study")
    if study not in registry.studies():
        raise UserError(f"{where}: study: {unknown('study', study, registry.studies())}")
    # Remove keys of other stages. Unknown keys stay, so that the stage's class refuses them.
    others = set(Run.model_fields) - set(RunCore.model_fields) - set(STAGES[stage].settings)
    return validate(stage_class(study, stage), {k: v for k, v in raw.items() if k not in others}, where=where)
