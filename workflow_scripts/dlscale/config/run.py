"""A fully resolved run of one study.

Its class depends on the study, which brings the settings of its model, loss and samples. A stage sees the common keys
(`RunCore`) and those of its row in the table of stages, and runs again where one of these changes.
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
from dlscale.config.program import Program, Value
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
    Workers,
    one_of,
)
from dlscale.core.settings import read_settings, validate
from dlscale.core.stages import STAGES

#: Names of experiment trackers, and of profilers; extensions bring some.
Tracker: Any = one_of(registry.trackers())
Tool: Any = one_of(["torch", *registry.profilers(), "lines"])


class _Optimizer(Lawful):
    kind: str
    lr: PositiveFloat = Field(2e-4, description="Learning rate at the schedule's base_batch_size.")
    weight_decay: NonNegativeFloat = Field(
        0.0,
        description="This factor times the weights is added to the gradient (adamw: this times lr times the weights "
        "is subtracted from them).",
    )
    fused: bool = Field(False, description="One kernel for the whole update.")
    clip_norm: PositiveFloat | None = Field(
        None, description="Greatest norm of all gradients together; greater ones are scaled down to it."
    )


class Adam(_Optimizer):
    """Adam; `adamw` keeps the weight decay out of the gradient (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    kind: Literal["adam", "adamw"] = "adam"
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="Decay of the running means of gradients and of their squares."
    )
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator.")

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda its: not all(0 <= beta < 1 for beta in its.betas),
            "betas {its.betas}: each must be at least 0 and less than 1",
        ),
    )


class SGD(_Optimizer):
    """Stochastic gradient descent."""

    kind: Literal["sgd"]
    momentum: float = Field(0.0, ge=0, lt=1, description="Share of the last update that is repeated.")


class Adadelta(_Optimizer):
    """Adadelta (Zeiler 2012, arXiv:1212.5701)."""

    kind: Literal["adadelta"]

    LAWS: ClassVar[tuple[Law, ...]] = ((lambda its: its.fused, "fused: PyTorch has no fused adadelta; leave it out"),)


def _adam_by_default(value: Any) -> Any:
    return {"kind": "adam", **value} if isinstance(value, dict) else value


Optimizer = Annotated[Adam | SGD | Adadelta, Field(discriminator="kind"), BeforeValidator(_adam_by_default)]


class Schedule(Lawful):
    """The learning-rate schedule: linear warm-up, then one of these forms."""

    kind: Literal["cosine", "linear", "polynomial", "exponential", "step", "constant"] = Field(
        "cosine",
        description="cosine, linear, polynomial (quadratic): reach end_lr at the last step; exponential: times gamma "
        "per epoch, a part of it at each step; step: times gamma after every step_epochs epochs, or after "
        "the epochs in milestones.",
    )
    warmup_steps: NonNegativeInt = Field(0, description="Steps of the linear warm-up from 0.")
    warmup_epochs: NonNegativeInt = Field(0, description="Epochs of the warm-up, instead of warmup_steps.")
    end_lr: NonNegativeFloat = Field(0.0, description="Last learning rate of cosine, linear, polynomial.")
    gamma: float = Field(0.1, gt=0, le=1, description="Factor of exponential and step.")
    step_epochs: PositiveInt = Field(1, description="Epochs between changes of kind step.")
    milestones: list[PositiveInt] = Field(
        [], description="Epochs after which kind step changes the rate, instead of every step_epochs."
    )
    scaling: Literal["none", "sqrt", "linear"] = Field(
        "none", description="How lr grows with batch_size / base_batch_size."
    )
    base_batch_size: BatchSize | None = Field(None, description="Batch size that optimizer.lr is meant for.")

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda its: its.scaling != "none" and its.base_batch_size is None,
            "scaling {its.scaling} needs base_batch_size",
        ),
        (lambda its: its.warmup_steps and its.warmup_epochs, "give either warmup_steps or warmup_epochs"),
        (
            lambda its: its.milestones != sorted(set(its.milestones)),
            "milestones {its.milestones}: each epoch must come after the one before",
        ),
    )


class Target(Strict):
    """Aim of a training."""

    metric: str = Field(VALID_LOSS.name, description="valid_loss, or the name of a metric of the study.")
    value: Number = Field(description="The target is reached when the metric is this good, or better, after an epoch.")
    stop: bool = Field(True, description="End the training then; false: only report when that was.")


class Training(Lawful):
    """Length of a training, its start, and its results."""

    epochs: PositiveInt | None = Field(None, description="Passes over the training samples; alternatively, give steps.")
    steps: PositiveInt | None = Field(None, description="Optimiser steps; the last epoch may be cut short.")
    checkpoint_epochs: PositiveInt = Field(1, description="Epochs between checkpoints; there is also one at the end.")
    stop_after: PositiveInt | None = Field(
        None,
        description="End after this many epochs. Schedule and checkpoints are those of the whole training, which can "
        "continue as if it had not ended: bitwise on a CPU; on a GPU, libraries choose kernels again.",
    )
    on_divergence: Literal["fail", "stop"] = Field(
        "fail",
        description="What happens if a loss is not a number: fail, or stop, so that the run counts as the worst (as "
        "trials of a sweep do).",
    )
    keep_best: str | None = Field(
        VALID_LOSS.name,
        description="Also keep the weights of the epoch that was best in this metric (model_best.pt): valid_loss, or "
        "the name of a metric of the study; null: do not.",
    )
    target: Target | None = Field(None, description="Value of a metric that the training is to reach.")
    weights: str | None = Field(
        None,
        description="Weights to start from: another run's model.pt, a checkpoint's folder, or a published state dict.",
    )
    trackers: list[Tracker] = Field(
        [],
        description="Experiment trackers beside TensorBoard. wandb: Weights & Biases, in the run's folder, offline "
        "unless WANDB_MODE says otherwise. mlflow: MLflow, in mlflow.db of the plan's folder, or at "
        "MLFLOW_TRACKING_URI. Both need dlscale[trackers].",
    )

    LAWS: ClassVar[tuple[Law, ...]] = (
        (lambda its: (its.epochs is None) == (its.steps is None), "give either epochs or steps"),
        (lambda its: "://" in (its.weights or ""), "weights: an address; fetch the file, and give its path"),
    )


class _Several(Strict):
    kind: str
    selftest: bool = Field(
        True,
        description="Before the run, test the values that the processes exchange, and latency and bandwidth of their "
        "links. Wrong values end the run.",
    )


class DDP(_Several):
    """DistributedDataParallel: one process per device; gradients are averaged in buckets."""

    kind: Literal["ddp"] = "ddp"
    bucket_mb: PositiveFloat | None = Field(
        None, description="MiB of gradients that one call averages; PyTorch's 25 if absent."
    )
    first_bucket_mb: PositiveFloat | None = Field(
        None,
        description="MiB of the first bucket: a small one lets the averaging begin early. Absent: bucket_mb, or "
        "PyTorch's 1 if that is absent, too.",
    )
    broadcast_buffers: bool = Field(
        True, description="Before each step all processes copy the first one's buffers, such as running means."
    )
    bucket_view: bool = Field(True, description="Gradients lie in the buckets; false: they are copied there and back.")
    sync_batchnorm: bool = Field(
        False,
        description="Batch normalisation over the samples of all processes; false: each normalises its own samples.",
    )
    compression: Literal["none", "bf16", "fp16"] = Field(
        "none", description="Number format in which gradients are averaged; none: the gradients' own."
    )
    sync: bool = Field(
        True,
        description="false: gradients are not averaged, which shows the cost of averaging. Such a run can be measured "
        "and profiled, but not trained.",
    )


class FSDP(_Several):
    """Fully sharded data parallelism (FSDP2; Zhao et al. 2023, arXiv:2304.11277): devices share weights."""

    kind: Literal["fsdp"]
    shard: PositiveInt | None = Field(
        None,
        description="Number of neighbouring devices that share one copy of the weights; such groups average their "
        "gradients (hybrid sharding). All devices if absent.",
    )
    reshard: bool = Field(
        True,
        description="Free a layer's weights after its forward pass, and gather them again for the backward pass; "
        "false: keep them, which needs more memory and sends less.",
    )
    param_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Number format for gathering weights and computing with them; updates are in float32."
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field("fp32", description="Number format in which gradients are averaged.")
    cpu_offload: bool = Field(
        False, description="Keep weights, gradients and optimiser in the host's memory, and make the update there."
    )


class DP(Strict):
    """DataParallel, for comparison: one process copies the model to all GPUs of a node at every step."""

    kind: Literal["dp"]


def _ddp_by_default(value: Any) -> Any:
    return {"kind": "ddp", **value} if isinstance(value, dict) else value


Parallel = Annotated[DDP | FSDP | DP, Field(discriminator="kind"), BeforeValidator(_ddp_by_default)]


class Compile(Strict):
    """`torch.compile` of the model together with its loss."""

    mode: Literal["none", "default", "reduce-overhead", "max-autotune"] = Field(
        "none",
        description="Mode of torch.compile: default; reduce-overhead: with CUDA graphs; max-autotune: tries kernels "
        "first; none: not compiled.",
    )


#: Orders of the axes along which devices share work; in each, the ranks of the first axis are neighbours.
Order = Literal["tp-cp-dp", "cp-tp-dp", "tp-dp-cp", "cp-dp-tp", "dp-tp-cp", "dp-cp-tp"]


class Geometry(Lawful):
    """Nodes and devices; tp x cp of them share a model and see the same samples."""

    nodes: Devices = Field(1, description="Nodes of the run.")
    gpus_per_node: Devices = Field(1, description="Devices used per node (a CPU counts as one).")
    tp: Devices = Field(
        1, description="Tensor parallel: devices that share each layer's weights, and its tokens between the layers."
    )
    cp: Devices = Field(
        1, description="Context parallel: devices that share a sample's tokens; each has all of the weights."
    )
    order: Order = Field(
        "tp-cp-dp",
        description="Order of the axes of devices: devices along the first axis are neighbours, within a node if they "
        "fit.",
    )
    cpus: PositiveInt | None = Field(
        None,
        description="CPUs of each device: sbatch --cpus-per-task. A process and its loader's workers stay on as many. "
        "Absent: under Slurm the device's share of its node, else all.",
    )
    memory_mb: PositiveInt | None = Field(
        None,
        description="Memory of the run on each node: sbatch --mem. Absent: as the site says. Without Slurm nothing "
        "holds a run to it.",
    )

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def model_size(self) -> int:
        return self.tp * self.cp

    @property
    def dp(self) -> int:
        """Groups of devices that see different samples."""
        return self.world_size // self.model_size

    @property
    def replicas(self) -> int:
        """Devices that hold the same weights."""
        return self.dp * self.cp

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda its: its.world_size % its.model_size,
            "tp {its.tp} x cp {its.cp} = {its.model_size} devices share a model, and nodes x gpus_per_node = "
            "{its.world_size} does not divide by that; set gpus_per_node to a multiple, or lower tp or cp",
        ),
    )


class Throughput(Strict):
    """Trials of the throughput stage, as `benchy` defined them, and turns with the plan's first run."""

    warmup: Repeats = Field(3, description="Uncounted trials before the counted ones.")
    trials: Annotated[Repeats, Field(ge=1)] = Field(3, description="Counted trials.")
    batches: Annotated[Repeats, Field(ge=1)] = Field(50, description="Least number of batches per trial.")
    seconds: Seconds = Field(
        1.0,
        description="Least seconds of a trial, which has more batches if these take less. 0: only `batches` counts.",
    )
    beside: Seconds = Field(
        30.0,
        description="Most seconds for which a run of one process is timed in turn with the plan's first run, which "
        "gives its speed-up; up to three times as many on a busy machine; 0: none. With ten seconds or "
        "more, the first run is timed with a copy of itself.",
    )
    error: PositiveFloat = Field(
        0.01,
        description="Turns end early when the ratio of each opening is known to this share (95 %), and go on if it is "
        "not known to three times that.",
    )


class Profile(Lawful):
    """Steps of the profile stage, and its tools."""

    tools: list[Tool] = Field(
        ["torch"],
        min_length=1,
        description="torch: PyTorch's profiler, with a trace for Perfetto; nsys: NVIDIA Nsight Systems, if installed; "
        "lines: the time of each line of the hot functions (line_profiler).",
    )
    epoch: PositiveInt = Field(2, description="Epoch whose samples the profiled steps use.")
    skip: Repeats = Field(5, description="Steps before the profiled ones, as warm-up.")
    steps: Annotated[Repeats, Field(ge=1)] = Field(10, description="Steps that each profiler sees.")
    ranks: list[NonNegativeInt] = Field([0], min_length=1, description="Ranks of the profiled processes.")
    functions: list[str] = Field(
        [],
        description="Further functions for lines, as MODULE:NAME or MODULE:CLASS.NAME. Functions of the step, the "
        "study's model and loss, its samples and the loader are always included.",
    )

    LAWS: ClassVar[tuple[Law, ...]] = (
        (lambda its: len({*its.tools}) < len(its.tools), "tools {its.tools}: one stands twice: each is used once"),
        (lambda its: len({*its.ranks}) < len(its.ranks), "ranks {its.ranks}: one stands twice: each is profiled once"),
    )


class Tune(Strict):
    """Settings that the tune stage tries, in all combinations; empty: its own choice."""

    workers: list[Workers] = Field(
        [], description="Workers of the loader; if empty 0, 1, 2, 4, … up to a process's cores."
    )
    prefetch: list[Few] = Field([2, 4], description="Batches that the loader keeps ready.")
    loaders: list[str] = Field([], description="Kinds of loaders; if empty the run's own.")
    threads: list[Threads] = Field(
        [], description="CPU threads of a process; if empty, on a CPU, all of its cores and half of them."
    )
    batch_size: list[BatchSize] = Field(
        [], description="Global batch sizes; if empty the run's own. Another one changes what is learnt."
    )
    values: dict[str, Annotated[list[Value], Field(min_length=1)]] = Field(
        {}, description="Of another program: values to try of its own placeholders (`program.values`)."
    )
    seconds: float = Field(
        120.0,
        gt=0,
        le=604_800,
        description="Seconds of measuring, half of them in the duel; start and warm-up are additional.",
    )
    rounds: Annotated[Repeats, Field(ge=3)] = Field(
        8, description="Rounds of the duel (the final comparison of two settings); each measures both."
    )

    @field_validator("loaders")
    @classmethod
    def _known(cls, kinds: list[str]) -> list[str]:
        known = set(loader_classes()) - {"synthetic"}  # which delivers no data, and so would win
        if wrong := [kind for kind in kinds if kind not in known]:
            raise ValueError(unknown("loader with data", wrong[0], known))
        return kinds


def loader_classes() -> dict[str, type[Component]]:
    """Return the settings of all loaders by kind."""
    classes = registry.load("dlscale.data.loaders").LOADERS
    return {each.model_fields["kind"].annotation.__args__[0]: each for each in classes}


Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp16_master", "bf16_master", "fp16_pure", "bf16_pure"]


LOCAL_BATCH_SIZE = (
    "Samples per step on each device (or group of devices that share a model), instead of batch_size, "
    "which is then this times geometry.dp."
)


class RunCore(Lawful):
    """Settings that training and measuring share; readers of a run see the global batch size."""

    LAWS: ClassVar[tuple[Law, ...]] = laws.OF_RUNS

    study: Name
    dataset: Name = Field(description="Name of the dataset.")
    seed: Seed = Field(0, description="Seed of weights, samples and drop-out.")
    batch_size: BatchSize = Field(64, description="Global batch size in samples: over all devices.")
    model: SerializeAsAny[Strict]
    loss: SerializeAsAny[Strict]
    samples: SerializeAsAny[Strict]
    loader: SerializeAsAny[Component]
    optimizer: Optimizer = Adam()
    precision: Precision = Field(
        "fp32",
        description="fp32 switches TensorFloat-32 off, all others switch it on. fp16, bf16: autocast (Apex O1). "
        "fp16_master, bf16_master: weights and computation in 16 bits, updates on float32 copies (O2). "
        "fp16_pure, bf16_pure: all in 16 bits (O3). fp16 and fp16_master scale the loss.",
    )
    compile: Compile = Compile()
    cuda_graph: bool = Field(False, description="Record the whole step as a CUDA graph and replay it; needs a GPU.")
    memory_format: Literal["contiguous", "channels_last"] = Field(
        "contiguous", description="Memory layout of convolutions' inputs and weights."
    )
    attention: Literal["default", "auto", "flash", "fa3", "efficient", "cudnn", "math"] = Field(
        "default",
        description="Attention kernel; default: PyTorch's own choice; auto: the fastest in a short trial; fa3: "
        "FlashAttention-3 (Hopper GPUs), which needs its package flash_attn_interface.",
    )
    accumulation_steps: PositiveInt = Field(
        1, description="Number of parts of the local batch, computed one after the other; the gradient stays the same."
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass instead of keeping them: less memory, more time."
    )
    threads: Threads | None = Field(
        None,
        description="CPU threads of each process; its share of the job's if absent. On one machine without a GPU, "
        "trainings with this key run side by side, as many as the cores allow.",
    )
    geometry: Geometry = Geometry()
    parallel: Parallel = DDP()
    program: Program | None = Field(
        None, description="Another program that runs in place of dlscale's training, with these settings."
    )

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
            raise ValueError("give either batch_size, of all devices together, or local_batch_size, of each")
        given, geometry = data["local_batch_size"], Geometry()
        with contextlib.suppress(ValidationError):  # its own mistake is reported
            geometry = TypeAdapter(Geometry).validate_python(rest.get("geometry") or {})
        try:
            whole = TypeAdapter(BatchSize).validate_python(given) * geometry.dp
            TypeAdapter(BatchSize).validate_python(whole)
        except ValidationError:
            raise ValueError(
                f"local_batch_size: got {given!r}; expected a whole number, that times {geometry.dp} is from 1 to "
                "1000000000"
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
        """CPUs of each process, if the run says."""
        its = self.geometry
        return its.cpus and its.cpus * its.gpus_per_node // self.processes.gpus_per_node

    @property
    def selftest(self) -> bool:
        return not isinstance(self.parallel, DP) and self.parallel.selftest

    @property
    def averages(self) -> bool:
        return not isinstance(self.parallel, DDP) or self.parallel.sync

    @property
    def arithmetic(self) -> Precision:
        """The precision that a step computes in: FSDP may cast weights and inputs of 32 bits to its `param_dtype`."""
        cast = self.precision in ("fp32", "tf32") and getattr(self.parallel, "param_dtype", "fp32") == "bf16"
        return "bf16_pure" if cast else self.precision

    @property
    def can_step_alone(self) -> bool:
        """Whether a process can leave out the exchange of a step."""
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
    """A run as `results/plans/PLAN/RUN/config.yaml` holds it."""

    training: Training
    schedule: Schedule = Schedule()
    throughput: Throughput = Throughput()
    profile: Profile = Profile()
    tune: Tune = Tune()
    label: str | None = Field(None, description="What tables and figures call the run; its name if absent.")

    def slice(self, stage: str) -> dict[str, Any]:
        return self.model_dump(mode="json", include={*RunCore.model_fields, *STAGES[stage].settings})


def components(study: str) -> dict[str, Any]:
    """Return the fields of a run whose types depend on its study."""
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
    """Return the class of a stage's view of a study's runs."""
    own: dict[str, Any] = {
        name: (Run.model_fields[name].annotation, Run.model_fields[name]) for name in STAGES[stage].settings
    }
    return create_model(f"{stage.capitalize()}Run", __base__=RunCore, **components(study), **own)


def load_run(config: str | Path, stage: str) -> Any:
    """Read a run's settings (`config.yaml`, or JSON itself) as a stage sees them."""
    raw, where = read_settings(config)
    study = raw.get("study")
    if study not in registry.studies():
        raise UserError(f"{where}: study: {unknown('study', study, registry.studies())}")
    # Of a key that no run has the stage's class complains; what other stages see is left out.
    others = set(Run.model_fields) - set(RunCore.model_fields) - set(STAGES[stage].settings)
    return validate(stage_class(study, stage), {k: v for k, v in raw.items() if k not in others}, where=where)
