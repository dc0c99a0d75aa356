"""Records of throughput measurements."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, computed_field

from dlscale.core.noise import interval
from dlscale.core.record import Measured, Positive, Record
from dlscale.parallel.records import Device, Links, MemoryUse

#: The three throughput measurements, in the order in which tables and figures show them.
MODES = ("IO", "SYNTHETIC", "FULL")

#: Units of a rate; the second one is that of another program whose batch size is unknown.
SAMPLE_RATE, STEP_RATE = "samples/s", "steps/s"


class Usage(Record):
    """Use of the machine by a measurement, on the node of the first process."""

    begin: float | None = None  #: Seconds since 1970-01-01 UTC.
    seconds: float = Field(ge=0)
    cores: int = Field(ge=1)  #: That its processes may use.
    cpu_seconds: float  #: Processor time of the run's own processes there, those of its loader included.
    cores_cpu_seconds: float  #: Processor time of all programs on these cores; other cores of the machine do not count.
    read_bytes: int | None = None  #: That the run's processes fetched from disks, not from memory.


class Trials(Record):
    """One mode of a throughput measurement, in the form of romerojosh/benchy; rates are samples/s, times seconds.

    `avg_iter_throughput` equals the trial's: single steps are not timed.
    """

    trial_throughput: list[float] = []
    trial_time: list[float] = []
    avg_iter_throughput: list[float] = []
    mean: Measured
    std: Measured = 0.0
    rank_throughput: list[float] = []  #: Mean of each process's own samples/s, before it waits for the others.
    usage: Usage | None = None  #: Of the counted trials.


class SampleWork(Record):
    """Work of a step for one sample, whatever device it runs on."""

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


class OperatorWork(Record):
    """Work and time of an operator in a module, forward and backward together, a step of one process."""

    operator: str
    module: str  #: With its class; `*` stands for equal parts. Outside of modules the range of the step.
    calls: float
    seconds: float = Field(ge=0)  #: Of the device.
    flops: float = Field(ge=0)  #: Of products and convolutions; 0 of other operators.
    bytes: float = Field(ge=0)  #: Read and written.


class Peaks(Record):
    """What one device reaches at best, as measured in the same process."""

    dtype: str  #: In which the matrix product was computed: that of the run's precision.
    flops: float = Field(gt=0)  #: FLOP/s of a large matrix product; of the run itself where it reached more.
    bytes_per_second: float = Field(gt=0)  #: Of a copy in the device's memory, bytes read and written.
    operator_seconds: float | None = None  #: To call an operator on a single number, forward and backward: the host.


class Beside(Record):
    """A run timed in turn with the first run of its plan, FULL."""

    compute: str  #: Of the first run: `dlscale.config.compute.compute_digest`.
    #: Samples/s of this run and of the first one, by round; of each time that both were opened.
    openings: list[Annotated[list[tuple[Positive, Positive]], Field(min_length=1)]] = Field(min_length=1)

    @property
    def ratios(self) -> list[float]:
        """Natural logarithms of the speed-up, by opening: of each the trimmed mean of its rounds."""
        return [interval([math.log(own / first) for own, first in rounds])[0] for rounds in self.openings]


class Outside(Record):
    """A program that knows nothing of dlscale, and how its steps were seen."""

    command: list[str]
    way: Literal["timed", "seen", "log", "rate"]  #: By itself, in PyTorch's functions, in its log, in what it prints.
    samples: bool = True  #: Whether rates are samples/s; else steps/s.
    steps: int  #: That count.
    status: int  #: Exit status.
    seconds: float = Field(ge=0)  #: From its start to its end.
    first_step_seconds: float = Field(ge=0)  #: From its start to the end of its first step.
    waiting: float | None = Field(None, ge=0, le=1)  #: Share of FULL's time in which it waited for batches.
    training: float = Field(ge=0, le=1)  #: Share of the time between first and last step that FULL is of.
    gradient_bytes: int | None = None  #: Of one process.
    stalled: float | None = None  #: Share of its time in which processes of the machine waited for memory.
    queued: float | None = None  #: Share of its time in which threads of the machine waited for a core.
    rank_waiting: list[float] = []  #: `waiting` of each process.
    rank_cores: list[float] = []  #: Cores that each process kept busy in these steps, without its loader's workers.
    #: Whether profilers were at work in steps that FULL has, of which it would have none otherwise.
    profiled: bool = False
    trainings: int = 1  #: Number of trainings, one after the other; the longest counts.
    stopped: str | None = None  #: Reason why dlscale stopped watching the steps before the program ended.


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
    outside: Outside | None = None  #: Of another program; FULL is then of windows of its steps.

    @computed_field  # type: ignore[prop-decorator]
    @property
    def unit(self) -> str:
        """Unit of all rates."""
        return SAMPLE_RATE if self.outside is None or self.outside.samples else STEP_RATE

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
