"""One typed class for each file that a stage writes: its writer and all its readers use it."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from dlscale.core.errors import UserError
from dlscale.core.files import no_pipe
from dlscale.core.noise import interval
from dlscale.core.record import Record as Record  # with those that are made of it
from dlscale.core.schema import Name
from dlscale.core.text import NONE, number, percent, size, unit

#: The three throughput measurements, in the order in which tables and figures show them.
MODES = ("IO", "SYNTHETIC", "FULL")

#: A number; JSON's null stands for one that is not finite.
Number = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, return_type=float | None, when_used="json"),
]

#: A rate or a time that was measured: no mistaken unit makes it so great, and `true` is none.
Measured = Annotated[float, Field(ge=0, le=1e15, strict=True, allow_inf_nan=False)]

#: One of which there is a logarithm.
Positive = Annotated[Measured, Field(ge=1e-15)]


class Metric(Record):
    """What a validation metric is; tables and the page are made from this."""

    name: str  #: As in `Epoch.metrics`: `KIND`, or `KIND/CHANNEL` where there is one for each channel.
    title: str  #: What readers call the kind.
    meaning: str = ""  #: What it means, in a line.
    unit: str = "1"  #: `1` for a number without a unit.
    better: Literal["lower", "higher"] = "lower"
    naive: str | None = None  #: Name of the metric that holds the same score of a naive answer, if there is one.
    answer: str = ""  #: What the naive answer is.
    rival: str = ""  #: What a naive answer is called whose score this is, where there are several to choose from.
    derived: bool = False  #: Whether it follows from other metrics, as a skill does: the page then shows those.

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def channel(self) -> str:
        """The channel; empty if the metric is of no channel."""
        return self.name.partition("/")[2]

    @property
    def full_title(self) -> str:
        """What begins a caption: the channel, which keeps its letters, or a capital."""
        return f"{self.channel} {self.title}" if self.channel else self.title[:1].upper() + self.title[1:]

    @property
    def label(self) -> str:
        """What an axis says."""
        shown = unit(self.unit)
        return f"{self.channel} {self.title}".strip() + f" ({shown})" * bool(shown)

    def skill(self, metrics: Mapping[str, float]) -> float | None:
        """Return 1 - error / error of the naive answer from metrics by name; None where it has no such answer.

        It is the share of the naive answer's error that is gone; a metric of which more is better has none.
        """
        value, naive = metrics.get(self.name), metrics.get(self.naive or "")
        return 1 - value / naive if self.better == "lower" and naive and value is not None else None

    def of(self, epoch: Epoch) -> float:
        """Return its value after an epoch; NaN if it has none."""
        return epoch.valid_loss if self.name == VALID_LOSS.name else epoch.metrics.get(self.name, math.nan)

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as the target, or better; NaN never is."""
        return value <= target if self.better == "lower" else value >= target

    def aim(self, value: float) -> str:
        """Return in words that it is as good as a value, or better."""
        return f"{self.title} {'≤' if self.better == 'lower' else '≥'} {value:g}"

    def best(self, epochs: Iterable[Epoch]) -> Epoch | None:
        """Return the epoch after which it was best, the first of several; None if it has no finite value."""
        known = [epoch for epoch in epochs if math.isfinite(self.of(epoch))]
        sign = 1 if self.better == "lower" else -1
        return min(known, key=lambda epoch: sign * self.of(epoch), default=None)

    def first(self, epochs: Iterable[Epoch], target: float) -> Epoch | None:
        """Return the first epoch that reached the target; None if none did."""
        return next((epoch for epoch in epochs if self.reaches(self.of(epoch), target)), None)


#: The validation loss, where a metric is asked for.
VALID_LOSS = Metric(name="valid_loss", title="validation loss", meaning="mean over all validation samples")


class LossInfo(Record):
    """What a loss is called, and its unit in words."""

    title: str = "loss"
    unit: str = ""

    @property
    def label(self) -> str:
        """What an axis says."""
        return self.title + " loss" * ("loss" not in self.title) + f" ({self.unit})" * bool(self.unit)


class Untrained(Record):
    """How good a model was before its first step."""

    train_loss: Number = math.nan  #: Of the first batch, before it is learnt from; NaN while that is not known.
    valid_loss: Number  #: Mean over all validation samples.
    metrics: dict[str, Number] = {}  #: Validation metrics by name.


class Epoch(Record):
    """One line of `metrics.jsonl`."""

    epoch: int = Field(ge=1)
    step: int  #: Optimiser steps so far.
    samples: int  #: Training samples so far.
    learning_rate: Number  #: Of the epoch's last step.
    train_loss: Number  #: Mean over the epoch's training samples.
    valid_loss: Number  #: Mean over all validation samples.
    epoch_seconds: Measured  #: Time of training alone, s.
    samples_per_second: Measured  #: Of training alone; the wait for the first batch is included.
    valid_seconds: Measured = 0.0  #: Time of validation, which follows, s.
    wall_time: float = 0.0  #: When the epoch's last training step was done, seconds since 1970-01-01 UTC.
    metrics: dict[str, Number] = {}  #: Validation metrics by name.
    #: The run's geometry and loader, which decide its times; None if they changed within the epoch.
    made_with: dict[str, Any] | None = {}
    untrained: Untrained | None = None  #: Of the first epoch: what was before it, if that was looked at.

    @property
    def begin(self) -> float:
        """When its first step began, seconds since 1970-01-01 UTC; of one in several tries, as if without a pause."""
        return self.wall_time - self.epoch_seconds


def read_epochs(path: Path) -> list[Epoch]:
    """Read `metrics.jsonl`; a missing, torn or empty file is a `UserError`."""
    no_pipe(path)
    advice = "delete it and run the train stage again"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the train stage first") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {advice}") from None
    epochs = []
    for row, line in enumerate(lines, 1):
        try:
            epochs.append(Epoch.checked(json.loads(line), f"{path}: line {row}"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: line {row} is not valid JSON ({error}); {advice}") from None
    if not epochs or [epoch.epoch for epoch in epochs] != list(range(1, len(epochs) + 1)):
        raise UserError(f"{path}: holds {f'not all of {len(epochs)} epochs' if epochs else 'no epoch'}; {advice}")
    return epochs


def epoch_lines(epochs: Iterable[Epoch]) -> str:
    """Return the text of `metrics.jsonl`."""
    return "".join(epoch.text() + "\n" for epoch in epochs)


class Device(Record):
    """What a stage computed on: `cpu` or `cuda`, its name, CPU threads of a process."""

    kind: str = ""
    name: str = ""
    threads: int | None = None


class Usage(Record):
    """What a measurement used of the machine from its begin to its end, on the node of the first process."""

    seconds: float = Field(ge=0)
    cores: int = Field(ge=1)  #: That its processes may use.
    cpu_seconds: float  #: Processor time of the run's own processes there, those of its loader included.
    cores_cpu_seconds: float  #: Processor time of all programs on these cores; other cores of the machine do not count.
    read_bytes: int | None = None  #: That the run's processes fetched from disks, not from memory.


class Trials(Record):
    """One mode of a throughput measurement, in the form of romerojosh/benchy; rates are samples/s, times seconds.

    `avg_iter_throughput` equals the trial's: single steps are not timed, since each would wait for the device.
    """

    trial_throughput: list[float] = []
    trial_time: list[float] = []
    avg_iter_throughput: list[float] = []
    mean: Measured
    std: Measured = 0.0
    rank_throughput: list[float] = []  #: Mean of each process's own samples/s, before it waits for the others.
    usage: Usage | None = None  #: Of the counted trials.


class SampleWork(Record):
    """What a step computes and moves for one sample, whatever device it runs on."""

    forward_flops: float = Field(ge=0)  #: A multiplication and an addition are two.
    backward_flops: float = Field(ge=0)
    #: That the operators of forward, backward and update read and write, each for itself, as a step that is not
    #: compiled does. What stays in a cache between two operators counts, too. None where they cannot be counted.
    bytes: float | None = None
    operators: float | None = None  #: That a step calls, whatever its batch, if nothing fuses them.
    source: Literal["formula", "counted"]  #: Of the FLOPs: the study's own formula, or the operators of a step.

    @property
    def flops(self) -> float:
        """Of forward and backward pass."""
        return self.forward_flops + self.backward_flops


class Peaks(Record):
    """What one device reaches at best, as measured in the same process."""

    dtype: str  #: In which the matrix product was computed: that of the run's precision.
    flops: float = Field(gt=0)  #: FLOP/s of a large matrix product; of the run itself where it reached more.
    product_flops: float | None = None  #: FLOP/s of the product where the run reached more, else None.
    bytes_per_second: float = Field(gt=0)  #: Of a copy in the device's memory, bytes read and written.
    operator_seconds: float | None = None  #: To call an operator on a single number, forward and backward: the host.


class MemoryUse(Record):
    """Bytes on one device, by what they hold."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int  #: What autograd saves between forward and backward pass, the batch included.
    #: The greatest at one time: gradients come as activations go, and operators need some memory for a while.
    peak: int | None = None

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


class Memory(Record):
    """Memory of one device, bytes: predicted before a step, and measured at each of its stages."""

    predicted: MemoryUse
    #: By stage (`set-up`, `forward`, `backward`, `step`): in use then, of the device; of a CPU, of the process.
    measured: dict[str, int] = {}
    peak: int | None = None  #: The greatest in use.
    device: int | None = None  #: That the device has.


class Exchanged(Record):
    """Bytes that a rank exchanges with others in a step, by kind (`all_reduce`, …), as nccl-tests count them."""

    counted: dict[str, int]
    formula: dict[str, int]  #: Without single numbers, such as the norm of gradients.


class LinkLevel(Record):
    """Links of one kind between devices: a message of n bytes takes alpha + n beta seconds (Hockney 1994)."""

    name: Literal["node", "switch", "network"]  #: What both ends have in common.
    size: int  #: Units that it joins: devices of a node, nodes below a switch, nodes or switches in all.
    links: int  #: That were measured: couples of processes.
    alpha: Measured  #: Median latency, s: half of a small message's way there and back.
    beta: Measured  #: Median of the seconds a byte takes, one way, while others of the level talk, too.
    worst: tuple[int, int]  #: The ranks of the link that is slowest for a large message,
    worst_alpha: float  #: with its latency, s,
    worst_beta: float  #: and its seconds a byte.


class AllReduce(Record):
    """A sum of as many bytes over all processes."""

    bytes: int
    seconds: float  #: Median, of the slowest process.


class Links(Record):
    """What the self-test of a run's processes measured before it began."""

    backend: str  #: Of the exchanges: nccl, gloo.
    processes: int
    nodes: int
    seconds: float  #: That the test took.
    levels: list[LinkLevel]  #: The nearest first.
    all_reduce: list[AllReduce]  #: A small one and one like gradients.
    slow: list[str] = []  #: Nodes, processes and links that are much slower than others of their level, in words.

    def line(self) -> str:
        """Return the levels in a line."""
        found = [
            f"{level.name}: {number(1e6 * level.alpha)} µs"
            + (f", {number(1e-9 / level.beta)} GB/s" if level.beta else "")
            for level in self.levels
        ]
        found += [
            f"all_reduce of {size(sum_.bytes, ' ')}: {number(1e3 * sum_.seconds)} ms" for sum_ in self.all_reduce[-1:]
        ]
        return "; ".join([*found, *self.slow])


class Beside(Record):
    """A run timed in turn with the first run of its plan, FULL: what happens to the machine happens to both."""

    compute: str  #: Of the first run: `dlscale.config.compute.compute_digest`.
    #: Samples/s of this run and of the first one, by round; of each time that both were opened.
    openings: list[Annotated[list[tuple[Positive, Positive]], Field(min_length=1)]] = Field(min_length=1)

    @property
    def ratios(self) -> list[float]:
        """Natural logarithms of how much faster this run was, by opening: of each the trimmed mean of its rounds."""
        return [interval([math.log(own / first) for own, first in rounds])[0] for rounds in self.openings]


class Throughput(Record):
    """`throughput.json`; a mode that was not measured is None."""

    nranks: int = Field(1, ge=1)  #: Devices that compute, which are as many as processes but for `dp`.
    batch_size: int | None = None  #: Samples a step over all processes.
    device: Device = Device()
    compute: str | None = None  #: Digest of all settings that decide how long a step takes (`dlscale.config.compute`).
    settings: dict[str, Any] = {}  #: The run's `throughput`: warm-up trials, trials, batches.
    compile: dict[str, float] | None = None  #: `cold_seconds`, `warm_seconds` of compiling, if the run compiles.
    io: Trials | None = Field(None, alias="IO")  #: Loading alone.
    synthetic: Trials | None = Field(None, alias="SYNTHETIC")  #: Computing alone, on a batch that stays on the device.
    full: Trials | None = Field(None, alias="FULL")  #: Both.
    beside: Beside | None = None  #: FULL, in turns with the plan's first run; of runs of one process.
    alone: Trials | None = None  #: SYNTHETIC while no process waits for another's gradients; of several processes.
    work: SampleWork | None = None  #: What a sample costs.
    peaks: Peaks | None = None  #: Of one device.
    peak_memory_bytes: int | None = None  #: Greatest memory of any process: the GPU's, or the process's on a CPU.
    predicted: MemoryUse | None = None  #: Memory that a step was predicted to take on each device.
    links: Links | None = None  #: Between several processes, if they were tested.

    def mode(self, name: str) -> Trials | None:
        """Return one of `MODES`, or what was measured `alone`."""
        trials: Trials | None = getattr(self, name.lower())
        return trials

    def mfu(self, mode: str = "FULL") -> float | None:
        """Return the share of the devices' peak FLOP/s that a mode reaches (Chowdhery et al. 2022, appendix B)."""
        trials = self.mode(mode)
        if not (trials and self.work and self.peaks):
            return None
        return trials.mean * self.work.flops / (self.nranks * self.peaks.flops)

    def mbu(self, mode: str = "FULL") -> float | None:
        """Return the share of the devices' peak memory bandwidth that a mode's operators move; caches may exceed 1."""
        trials = self.mode(mode)
        if not (trials and self.work and self.work.bytes and self.peaks):
            return None
        return trials.mean * self.work.bytes / (self.nranks * self.peaks.bytes_per_second)


class RangeTime(Record):
    """A range of a step (`dlscale.core.ranges`), means over the profiled steps."""

    seconds: float  #: On the host, a step.
    std: float = 0.0  #: Standard deviation over the steps.
    device_seconds: float | None = None  #: Of the device's work that was given out within it, a step.


class Activity(Record):
    """What happened in a step, means over the profiled steps; None or absent where a profiler cannot see it."""

    operators: float | None = None  #: Operators of PyTorch that the host called.
    launches: float | None = None  #: Kernels, copies and graphs that the host gave to the device.
    syncs: float | None = None  #: Times that the host waited for the device.
    sync_seconds: float | None = None  #: How long it waited.
    items: float | None = None  #: Numbers that were read from tensors (`.item()`), which makes a host wait for a GPU.
    device_busy: float | None = None  #: Share of the steps in which the device computed or copied.
    #: Seconds a step for which the device did nothing, by the range that the host was in; in all (1 - device_busy) of
    #: it. A record without them leaves them to other profilers' (`model_dump`).
    idle_seconds: dict[str, float] = Field({}, exclude_if=operator.not_)
    copy_bytes: float | None = None  #: From the host to the device.
    pageable_bytes: float | None = None  #: Of these, from memory that is not page-locked.
    copy_seconds: float | None = None
    copy_overlap: float | None = None  #: Share of the copies' time in which kernels ran as well.
    comm_seconds: float | None = None  #: Communication between processes.
    comm_overlap: float | None = None  #: Share of that time in which anything else was computed as well.


class Overhead(Record):
    """What a profiler costs: its steps against plain ones just before and just after, by the same process."""

    ratio: float  #: 1.1: a step takes a tenth longer with it.
    noise: float | None = None  #: Half of the 95 % interval of `ratio`; None where no spread is known: of one step.

    @property
    def words(self) -> str:
        """What it comes to, for readers."""
        if self.noise is None:
            return f"a step took {percent(self.ratio)} of its time without it; of one step the noise is not known"
        if abs(self.ratio - 1) <= self.noise:
            return f"with it a step takes as long as without, within the noise of ± {percent(self.noise)}"
        longer = percent(abs(self.ratio - 1))
        return f"a step takes {longer} {'longer' if self.ratio > 1 else 'less'} with it (± {percent(self.noise)})"


class ProfiledTool(Record):
    """What one profiler saw of a run."""

    name: str
    version: str = ""
    steps: int = 0
    #: With the profiler at work: the median; of a GPU from the first step until all is done, over the steps.
    seconds_per_step: float | None = None
    overhead: Overhead | None = None
    complete: bool = False  #: Whether the summary has all its rows: what has none took no time, and was not left out.
    ranges: dict[str, RangeTime] = {}
    activity: Activity = Activity()
    files: dict[str, str] = {}  #: What it left, by title: names in the folder `profile` of the run.
    problem: str | None = None  #: Why there is no profile.


class TopEntry(Record):
    """A row of `profile_summary.csv`; all profilers share these columns."""

    tool: str
    rank: int = 0
    kind: Literal["range", "kernel", "operator", "copy", "gap", "line", "function"]
    name: str
    calls: float  #: A step.
    #: A step, on the device for kernels and copies, else on the host.
    seconds: float = Field(ge=0, allow_inf_nan=False)
    std: float = 0.0  #: Standard deviation of `seconds` over the steps.
    share: float = 0.0  #: Of the step's time.
    note: str = ""


class Profile(Record):
    """`profile.json`: what a run's profilers saw, each in steps of its own."""

    device: Device = Device()
    nranks: int = 1
    batch_size: int | None = None
    settings: dict[str, Any] = {}  #: The run's `profile`.
    seconds_per_step: list[float] = []  #: Of steps with no profiler at work, before and after each profiler.
    tools: list[ProfiledTool] = []
    memory: Memory | None = None
    exchanged: Exchanged | None = Field(None, exclude_if=operator.not_)  #: By the first rank; of several ranks.
    counted: SampleWork | None = None  #: From the operators of a step, beside `formula`.
    formula: SampleWork | None = None
    top: list[TopEntry] = []  #: The first rows of `profile_summary.csv`, for the page.


class Tried(Record):
    """A setting that was tried."""

    changes: dict[str, Any]  #: What it changes of the run's own setting, by dotted key; of that one itself nothing.
    rates: list[list[float]] = []  #: Samples/s of its trials, by rung; the duel is not among them.
    peak_memory_bytes: int | None = None  #: The greatest of any process, on its device; on a CPU with its loader's.
    problem: str | None = None  #: Why it was dropped, if not for its speed.


#: Cores that other programs keep busy beyond the murmur of a quiet machine, as `dlscale.report.verdict` has it.
NEIGHBOURS = 0.25


class Duel(Record):
    """The best of the other settings (`challenger`) against the run's own, measured in turns."""

    challenger: int  #: Its place among the settings that were tried.
    rates: list[tuple[float, float]]  #: Samples/s of the challenger and of the run's own setting, by round.
    ratio: float  #: How many times as fast the challenger is: the geometric mean of the rounds' ratios.
    low: float  #: Of the 95 % interval of the ratio: Student's t of the logarithms of the rounds' ratios.
    high: float
    usage: Usage | None = None  #: Of the machine, meanwhile.

    @property
    def neighbours(self) -> float:
        """How many cores other programs kept busy meanwhile, if that is worth a word; else 0."""
        if self.usage is None or not self.usage.seconds:
            return 0.0
        others = (self.usage.cores_cpu_seconds - self.usage.cpu_seconds) / self.usage.seconds
        return others if others > NEIGHBOURS else 0.0

    @property
    def won(self) -> bool:
        """Whether the challenger is faster beyond the noise."""
        return self.low > 1


class Tuning(Record):
    """`tune.json`: which settings of a run were tried, and whether one beats its own."""

    run: str = ""  #: PLAN.RUN.
    device: Device = Device()
    nranks: int = 1
    batch_size: int | None = None  #: The run's own.
    settings: dict[str, Any] = {}  #: The run's `tune`.
    seconds: float = 0.0  #: That all of it took.
    memory_limit_bytes: int | None = None  #: What a setting may take of a device.
    candidates: list[Tried] = Field(min_length=1)  #: The first one is the run's own setting.
    duel: Duel | None = None  #: None where no other setting could be measured.
    command: str = ""  #: That trains with what won; nothing if nothing did.

    @property
    def plan(self) -> str:
        """The plan that `tuned.yaml` adds."""
        return f"{self.run.replace('.', '_')}_tuned"

    @property
    def changes(self) -> dict[str, Any]:
        """What to change of the run, by dotted key: nothing unless a setting won."""
        return self.candidates[self.duel.challenger].changes if self.duel and self.duel.won else {}

    def verdict(self) -> str:
        """Return what came of it, in a sentence."""
        if self.duel is None:
            return "Nothing to gain: no other setting could be measured."
        ratio = f"{self.duel.ratio:.2f}× ± {(self.duel.high - self.duel.low) / 2:.2f}"
        found = (
            f"{ratio} as fast as the run's own setting."
            if self.duel.won
            else f"Nothing to gain: the best other setting is {ratio} as fast as the run's own."
        )
        if busy := self.duel.neighbours:
            found += (
                f" Not on a quiet machine: other programs kept {busy:.1f} cores busy during the duel, so this says "
                "what is faster beside them. Tune again without them before you trust it."
            )
        return found


class Evaluation(Record):
    """What `dlscale evaluate` found."""

    weights: str  #: The file.
    split: str
    samples: int
    loss: Number  #: Mean over the samples; so are the metrics.
    metrics: dict[str, Number] = {}
    loss_info: LossInfo = LossInfo()
    described: list[Metric] = []


class Best(Record):
    """The epoch whose weights a run keeps as `model_best.pt`."""

    metric: str  #: That it is the best in: `valid_loss`, or a name as in `Epoch.metrics`.
    value: Number
    epoch: int
    step: int


class Provenance(Record):
    """`provenance.json`: what a training was made with. The train stage writes it last."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)

    command: str | None = None
    started: str | None = None
    finished: str | None = None
    git: dict[str, Any] | None = None
    host: str | None = None
    platform: str | None = None
    python: str | None = None
    packages: dict[str, str | None] = {}
    image: dict[str, str] | None = None
    slurm: dict[str, str] = {}
    device: Device = Device()
    processes: int = 1
    devices: int = 0  #: That compute: as many as processes, unless one of them drives several GPUs; 0: not known.
    cores: int | None = None  #: Of a node that they may run on.
    memory_bytes: int | None = None  #: Of a node that they may have.
    seed: int | None = None
    parameters: int | None = None
    training_samples: int | None = None
    validation_samples: int | None = None
    dataset: str | None = None
    manifest: dict[str, Any] = {}  #: What the dataset was made from.
    fingerprint: str | None = None  #: The first digits of the run's fingerprint, the name of its folder of checkpoints.
    resumed_from_step: int | None = None
    links: Links | None = None  #: Between several processes, if they were tested.
    best: Best | None = None
    loss: LossInfo = LossInfo()
    metrics: list[Metric] = []  #: What the metrics of the run's epochs are.


class Published(Record):
    """A published figure of a study, as its YAML file has it: a throughput, or the value of something else."""

    label: str = NONE
    hardware: str = NONE
    gpus: int = Field(1, ge=1)  #: That made the figure together: samples/s are of all of them, memory is of one.
    batch_size: int | None = Field(None, ge=1)  #: Samples a step over all GPUs.
    source: str = NONE
    runs: list[str] = []  #: `PLAN.RUN` of the runs that do what was measured.
    like: list[str] = []  #: `PLAN.RUN` of those that take the same step from elsewhere, or at another size.
    kind: str = "FULL"  #: Of a throughput: one of `MODES`.
    samples_per_second: float | None = Field(None, gt=0)
    std: float | None = Field(None, ge=0)  #: Of a throughput: standard deviation over its trials.
    metric: str = ""  #: Where the figure is no throughput: a key of `PUBLISHED_KINDS`, or else a validation metric.
    value: float | None = None
    by_epoch: list[float] = []  #: In place of `value`: after each epoch from the first on.
    unit: str = "1"
    series: list[Name] = []  #: Of the study's series, those that it is a point of.
    #: Training samples of the epochs, or samples of the validation, that it was measured over: the wait for the first
    #: batch is in it. None: steps alone.
    samples: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)  #: Of a time: so many epochs, each with a validation.
    tp: int = Field(1, ge=1)  #: Devices that shared the model's weights, as in `geometry`.
    cp: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _one_figure(self) -> Self:
        given = [self.samples_per_second is not None, self.value is not None, bool(self.by_epoch)]
        if sum(given) != 1 or (self.samples_per_second is None) == (not self.metric):
            raise ValueError(f"{self.label}: expected samples_per_second, or metric with either value or by_epoch")
        return self

    @property
    def speed(self) -> float:
        """FULL samples/s of all GPUs together; 0 if the figure is another one."""
        return (self.samples_per_second or 0.0) if self.kind == "FULL" else 0.0

    @property
    def devices(self) -> str:
        """What it was measured on."""
        return f"{self.gpus} × {self.hardware}" if self.gpus > 1 else self.hardware


class Series(Record):
    """Published figures of one program on one machine, on few devices and on many, which hold the model of scaling."""

    title: str
    machine: Name  #: As in `measure/scaling/machines.yaml`.
    parameters: int = Field(ge=1)
    gradient_bytes: int = Field(4, ge=1)  #: Of a gradient when it is sent.
    collectives: int | None = Field(None, ge=1)  #: A step, if that was published; else as PyTorch cuts its buckets.
    fit: int = Field(8, ge=1)  #: The model sees figures of at most so many GPUs; the others it must predict.
    valid_samples: int | None = Field(None, ge=1)  #: Of a validation.
    workers: int = Field(1, ge=1)  #: Of a device's loader that make batches of their own; 1 for DALI's threads.
    loaded: float | None = Field(None, gt=0)  #: Samples/s that a device's loader kept up with, if with another model.
    tokens: tuple[int, int, int] | None = None  #: Tokens of a sample, their width, blocks.


#: What a published figure may be of, beside throughput and validation metrics; in words.
PUBLISHED_KINDS = {
    "train_loss": "training loss",
    "valid_loss": "validation loss",
    "time": "time",
    "validation_time": "time of a validation",
    "validation_speed": "samples a second of validation",
    "memory": "memory of a GPU",
    "steps_per_second": "steps a second",
    "parameters": "parameters",
    "scaling_efficiency": "scaling efficiency",
    "communication": "share of communication",
    "collectives": "collectives a step",
}


#: What plans ask: their runs stand alone, build on each other, or are made from a block of settings.
PlanKind = Literal["set", "ladder", "tune", "sweep", "weak_scaling", "strong_scaling", "convergence", "parallelism"]


class RunReference(Record):
    """A run of a plan, and the folder `PLAN/RUN` that holds its results."""

    name: Name
    label: str | None = None
    plan: Name
    run: Name
    measure: list[str]  #: The stages that it goes through.
    repeats: list[Name] = []  #: Runs of the same plan that train it once more, each with another seed.


class SweepRecord(Record):
    """What a plan of kind `sweep` tries."""

    method: Literal["grid", "random", "halving"]
    metric: str  #: What the best trial is best in: `valid_loss`, a validation metric, `samples_per_second`.
    trials: dict[Name, dict[str, Any]]  #: By trial: its values by dotted key.
    rungs: list[tuple[int, int]] = []  #: Of halving: epochs after which each rung ends, and its number of trials.


class Rung(Record):
    """`rungN.json`: which trials of successive halving come to rung N, from 1 on, and what they were chosen by."""

    metric: str
    scores: dict[Name, Number]  #: Of the trials of the rung before, the best first.
    trials: list[Name]  #: The first of these.


class PlanRecord(Record):
    """`plan.yaml`: which runs a plan consists of, and what the report needs to know of its study."""

    plan: Name
    title: str | None = None
    study: Name
    study_title: str | None = None
    kind: PlanKind = "set"
    measure: list[str]  #: The stages that its runs go through, each those of its own reference.
    runs: list[RunReference] = Field(min_length=1)  #: Of successive halving each trial, with its run of the first rung.
    sweep: SweepRecord | None = None  #: Of kind sweep.
    left_out: dict[str, str] = {}  #: Runs that the machine cannot do, and what it lacks.
    published: list[Published] = []
