"""Profilers, each a module: it starts one around some steps of a run, and reads its report. Here are their records."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dlscale.core.noise import standard_errors
from dlscale.core.record import Record
from dlscale.core.text import percent
from dlscale.measure.records import OperatorWork
from dlscale.parallel.records import Device, Memory


class RangeTime(Record):
    """A range of a step (`dlscale.core.ranges`), means over the profiled steps."""

    seconds: float  #: On the host, a step.
    std: float = 0.0  #: Standard deviation over the steps.
    device_seconds: float | None = None  #: Of the device's work that was given out within it, a step.


class Activity(Record):
    """Means over the profiled steps; None or absent where a profiler cannot see it."""

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
    """Cost of a profiler: its steps against plain ones just before and just after, by the same process."""

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
    ranges: dict[str, RangeTime] = {}
    activity: Activity = Activity()
    files: dict[str, str] = {}  #: What it left, by title: names in the folder `profile` of the run.
    problem: str | None = None  #: Why there is no profile.


#: A number that is not always known; in a CSV file an empty cell stands for None.
Known = Annotated[float | None, BeforeValidator(lambda value: None if value == "" else value)]


class TopEntry(Record):
    """A row of `profile_summary.csv`; all profilers share these columns."""

    tool: str
    rank: int = 0
    #: `function`, `worker`: of the main thread of a process that trains, and of those that work for it.
    kind: Literal["range", "kernel", "operator", "copy", "gap", "line", "function", "worker"]
    name: str
    calls: Known = None  #: A step; None where a profiler samples.
    #: A step, on the device for kernels and copies, else on the host.
    seconds: float = Field(ge=0, allow_inf_nan=False)
    std: float = 0.0  #: Standard deviation of `seconds` over the steps.
    share: float = 0.0  #: Of the step's time.
    total: Known = None  #: Of functions: share with all that they call.
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
    top: list[TopEntry] = []  #: The first rows of `profile_summary.csv`, for the page.
    work: list[OperatorWork] = []  #: Of steps with no profiler at work; the longest first.


#: A profiler's record, and its rows of the summary.
Found = tuple[ProfiledTool, list[TopEntry]]


class Unavailable(Exception):
    """A profiler does not work here; the message says why, and what to do."""


def overhead(before: Sequence[float], profiled: Sequence[float], after: Sequence[float]) -> Overhead:
    """Return the ratio of step times with a profiler and without, from the seconds of steps.

    It is a ratio of medians, one of which is the mean of those before and after, by which even drift cancels. The noise
    is that of the steps' scatter, and half of the difference of the plain steps.
    """
    plain = [statistics.median(before), statistics.median(after)]
    usual = statistics.fmean(plain)
    ratio = statistics.median(profiled) / usual
    fewest = min(map(len, (before, profiled, after)))
    if fewest < 2:
        return Overhead(ratio=ratio)
    # Standard errors of medians of normal values.
    errors = [
        math.sqrt(math.pi / 2) * statistics.stdev(each) / math.sqrt(len(each)) for each in (before, profiled, after)
    ]
    scatter = math.hypot(errors[1], ratio * errors[0] / 2, ratio * errors[2] / 2) / usual
    drift = ratio * abs(plain[0] - plain[1]) / 2 / usual
    # No profiler makes a step faster: where it seems so, that much at least is noise.
    return Overhead(ratio=ratio, noise=max(standard_errors(fewest) * scatter + drift, 1 - ratio))
