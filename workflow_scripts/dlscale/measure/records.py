"""Records of throughput measurements."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, computed_field

from dlscale.core.noise import interval
from dlscale.core.record import Measured, Positive, Record
from dlscale.parallel.records import Device, Links, MemoryUse

#: The three modes of a throughput measurement (loading, computing, training), in the order of tables and figures.
MODES = ("IO", "SYNTHETIC", "FULL")

#: Mode of a throughput measurement → its name on the page and in messages; files contain the mode.
MODE_NAMES = dict(zip(MODES, ("loading", "computing", "training"), strict=True))

#: Units of a rate; steps/s is the unit for an external program with an unknown batch size.
SAMPLE_RATE, STEP_RATE = "samples/s", "steps/s"


class Usage(Record):
    """Resource use on the node of rank 0 during a measurement."""

    begin: float | None = None  #: Start of the measurement, seconds since 1970-01-01 UTC.
    seconds: float = Field(ge=0)
    cores: int = Field(ge=1)  #: Number of logical CPUs that the run's processes on the node may use.
    cpu_seconds: float  #: Processor seconds of the run's processes on the node, with the loader's processes.
    #: Processor seconds of all programs on these logical CPUs; for an external program, on all of the node's CPUs.
    cores_cpu_seconds: float
    read_bytes: int | None = None  #: Bytes that the run's processes fetched from disks, not from the page cache.


class Trials(Record):
    """One mode of a throughput measurement, with the JSON keys of benchy (romerojosh/benchy).

    Rates are in samples/s (for some external programs in steps/s), times in seconds. `avg_iter_throughput` equals
    `trial_throughput`, because rates of single steps are not recorded.
    """

    trial_throughput: list[float] = []
    trial_time: list[float] = []
    avg_iter_throughput: list[float] = []
    mean: Measured
    std: Measured = 0.0
    rank_throughput: list[
        float
    ] = []  #: Mean rate of each process, without its waits for other processes at the ends of trials.
    usage: Usage | None = None  #: Resource use during the trials, without the warm-up.


class SampleWork(Record):
    """Work of a training step per sample, on any device."""

    forward_flops: float = Field(ge=0)  #: FLOPs of the forward pass; a multiply-add counts as two.
    backward_flops: float = Field(ge=0)
    #: Bytes that the uncompiled operators of forward pass, backward pass and update read and write, including data that
    #: stay in a cache between two operators. None if the bytes cannot be counted.
    bytes: float | None = None
    #: Number of operators that one uncompiled step calls, at any batch size, without activation checkpointing.
    operators: float | None = None
    source: Literal["formula", "counted"]  #: Source of the FLOPs: the study's formula, or counted operators.

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward pass."""
        return self.forward_flops + self.backward_flops


class OperatorWork(Record):
    """Work and time per step of one operator in one module of a process, forward and backward pass together."""

    operator: str
    #: Name and class of the module, with `*` where names of equal modules differ; outside of modules, the step's range.
    module: str
    calls: float
    seconds: float = Field(ge=0)  #: Time on the device per step.
    flops: float = Field(ge=0)  #: FLOPs of a matrix product, convolution or attention; 0 for other operators.
    bytes: float = Field(ge=0)  #: Bytes read and written.


class Peaks(Record):
    """Peak rates of one device, measured in the run's processes; means over the devices of the run."""

    dtype: str  #: Number format of the matrix product, from the run's precision.
    flops: float = Field(gt=0)  #: FLOP/s of a large matrix product, or of the run if the run was faster.
    bytes_per_second: float = Field(gt=0)  #: Bytes/s read and written by a copy in the device's memory.
    operator_seconds: float | None = None  #: Host seconds per call of an operator on one number.


class PairedTiming(Record):
    """Paired timing of training (FULL) for a run and the first run of its plan."""

    compute: str  #: Digest of the first run's settings that affect the step time, as `Throughput.compute`.
    #: (Samples/s of this run, samples/s of the first run), [opening][round]. Each opening starts both runs anew.
    openings: list[Annotated[list[tuple[Positive, Positive]], Field(min_length=1)]] = Field(min_length=1)

    @property
    def ratios(self) -> list[float]:
        """Natural logarithms of the speed-up, one per opening: trimmed means over the opening's rounds."""
        return [interval([math.log(own / first) for own, first in rounds])[0] for rounds in self.openings]


class Outside(Record):
    """An external program, and the measurement of its steps."""

    command: list[str]
    #: Source of the step times. timed: calls in the program; seen: PyTorch's functions; log: the program's log; rate: a
    #: rate that the program prints.
    way: Literal["timed", "seen", "log", "rate"]
    samples: bool = True  #: Whether rates are samples/s (else steps/s).
    steps: int  #: Number of counted steps.
    status: int  #: Exit status of the program.
    seconds: float = Field(ge=0)  #: Seconds from the program's start to its end.
    first_step_seconds: float = Field(ge=0)  #: Seconds from the program's start to the end of its first step.
    waiting: float | None = Field(None, ge=0, le=1)  #: Fraction of FULL's time spent waiting for batches.
    training: float = Field(ge=0, le=1)  #: Fraction of the time between first and last step that is spent in steps.
    #: Fraction of FULL's time between an epoch's last step and the request for the next epoch's first batch.
    between_epochs: float = Field(0.0, ge=0, le=1)
    #: Seconds outside the steps: for batches of other loaders, or in evaluation mode, as in a validation (`other`);
    #: longest time without a batch or a step (`longest`).
    pauses: dict[str, float] = {}
    gradient_bytes: int | None = None  #: Bytes of the gradients of one process.
    stalled: float | None = None  #: Fraction of the program's time in which processes on the machine waited for memory.
    queued: float | None = None  #: Fraction of the program's time in which threads on the machine waited for a core.
    rank_waiting: list[float] = []  #: `waiting` of each process.
    rank_cores: list[float] = []  #: Cores kept busy by each process in the counted steps, without its loader's workers.
    #: Whether FULL includes profiled steps, because no unprofiled steps were left.
    profiled: bool = False
    trainings: int = 1  #: Number of successive trainings in the program; the longest is recorded.
    stopped: str | None = None  #: Reason why dlscale stopped watching the steps before the program ended.


class Throughput(Record):
    """`throughput.json`; a mode that was not measured is None."""

    #: Number of devices that compute: the number of processes, except with `parallel.kind: dp`.
    nranks: int = Field(1, ge=1)
    batch_size: int | None = None  #: Samples per step over all processes.
    device: Device = Device()
    compute: str | None = None  #: Digest of the settings that affect the step time (`dlscale.config.compute`).
    settings: dict[str, Any] = {}  #: The run's settings `throughput`.
    compile: dict[str, float] | None = None  #: Compile times `cold_seconds` and `warm_seconds`, if the run compiles.
    io: Trials | None = Field(None, alias="IO")  #: Loading only.
    synthetic: Trials | None = Field(None, alias="SYNTHETIC")  #: Computing only, on a batch that stays on the device.
    full: Trials | None = Field(None, alias="FULL")  #: Training: loading and computing.
    #: Paired timing of FULL with the plan's first run; only for single-process runs.
    beside: PairedTiming | None = None
    #: SYNTHETIC without averaged gradients; only for runs of several processes that can compute steps independently.
    alone: Trials | None = None
    work: SampleWork | None = None  #: FLOPs and bytes per sample.
    peaks: Peaks | None = None  #: Peak rates of one device.
    #: Peak memory of the process with the highest peak: GPU memory, or main memory for a run on CPUs.
    peak_memory_bytes: int | None = None
    predicted: MemoryUse | None = None  #: Predicted memory of a step on each device.
    links: Links | None = None  #: Links between processes; None if the links were not tested.
    outside: Outside | None = None  #: Record of an external program; each trial of FULL is then a window of steps.

    @computed_field  # type: ignore[prop-decorator]
    @property
    def unit(self) -> str:
        """Unit of all rates."""
        return SAMPLE_RATE if self.outside is None or self.outside.samples else STEP_RATE

    def mode(self, name: str) -> Trials | None:
        """Return the trials of one of `MODES`, or of `alone`."""
        trials: Trials | None = getattr(self, name.lower())
        return trials

    def mfu(self, mode: str = "FULL") -> float | None:
        """Return the model FLOPs utilisation of a mode, a fraction of the devices' peak FLOP/s; None if unknown.

        See Chowdhery et al. 2022, appendix B.
        """
        trials = self.mode(mode)
        if not (trials and self.work and self.peaks):
            return None
        return trials.mean * self.work.flops / (self.nranks * self.peaks.flops)

    def mbu(self, mode: str = "FULL") -> float | None:
        """Return the fraction of the devices' peak memory bandwidth that a mode uses; above 1 if caches help."""
        trials = self.mode(mode)
        if not (trials and self.work and self.work.bytes and self.peaks):
            return None
        return trials.mean * self.work.bytes / (self.nranks * self.peaks.bytes_per_second)
