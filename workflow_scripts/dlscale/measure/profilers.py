"""Records of profilers. Each profiler's own module runs the profiler around steps and reads its report."""

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
    """Mean times of a range of a step (`dlscale.core.ranges`) over the profiled steps."""

    seconds: float  #: Host seconds per step.
    std: float = 0.0  #: Standard deviation over the steps.
    device_seconds: float | None = None  #: Device seconds per step of the work launched in the range.


class Activity(Record):
    """Activity of host and device, means per profiled step; None or empty if the profiler cannot measure a value."""

    launches: float | None = None  #: Number of kernels, copies and graphs that the host launched.
    syncs: float | None = None  #: Number of waits of the host for the device.
    sync_seconds: float | None = None  #: Seconds in which the host waits for the device.
    #: Number of values read by `.item()`: on a GPU, reads for which the host waited; on a CPU, reads outside of the
    #: ranges `data` and `optimizer`.
    items: float | None = None
    device_busy: float | None = None  #: Fraction of the step time in which the device computed or copied.
    #: Range on the host → seconds per step in which the device is idle during the range; the sum over ranges is
    #: (1 - device_busy) times the step time. `model_dump` leaves out an empty dict, which would overwrite the values of
    #: another profiler.
    idle_seconds: dict[str, float] = Field({}, exclude_if=operator.not_)
    copy_bytes: float | None = None  #: Bytes copied from the host to the device.
    pageable_bytes: float | None = None  #: Part of `copy_bytes` that comes from memory that is not page-locked.
    copy_seconds: float | None = None
    copy_overlap: float | None = None  #: Fraction of the time of copies to the device in which kernels also ran.
    comm_seconds: float | None = None  #: Seconds of communication between processes.
    comm_overlap: float | None = None  #: Fraction of `comm_seconds` in which the device also computed.


class Overhead(Record):
    """Overhead of a profiler: profiled steps compared with plain (unprofiled) steps before and after them."""

    ratio: float  #: Step time with the profiler / step time without the profiler.
    noise: float | None = None  #: Half-width of the 95 % interval of `ratio`; None for a single step.

    @property
    def words(self) -> str:
        """The overhead as a sentence for the page and the log."""
        if self.noise is None:
            return (
                f"a profiled step took {percent(self.ratio)} of a plain step's time; the noise of one step is unknown"
            )
        if abs(self.ratio - 1) <= self.noise:
            return (
                f"no significant overhead: profiled and plain steps take equally long, within ± {percent(self.noise)}"
            )
        longer = percent(abs(self.ratio - 1))
        return f"profiled steps take {longer} {'longer' if self.ratio > 1 else 'less'} (± {percent(self.noise)})"


class ProfiledTool(Record):
    """Results of one profiler for a run."""

    name: str
    version: str = ""
    steps: int = 0
    #: Step time with the profiler: the median; on a GPU, the mean, including the wait until the device has finished.
    seconds_per_step: float | None = None
    overhead: Overhead | None = None
    ranges: dict[str, RangeTime] = {}
    activity: Activity = Activity()
    files: dict[str, str] = {}  #: Title of a report → name of its file in the run's folder `profile`.
    problem: str | None = None  #: Reason why there is no profile.


#: A number, or None (an empty cell in the CSV file).
Known = Annotated[float | None, BeforeValidator(lambda value: None if value == "" else value)]


class TopEntry(Record):
    """A row of `profile_summary.csv`; all profilers share these columns."""

    tool: str
    rank: int = 0
    #: `function`: a Python function in the main thread of a training process; `worker`: one in a loader's worker.
    kind: Literal["range", "kernel", "operator", "copy", "gap", "line", "function", "worker"]
    name: str
    calls: Known = None  #: Calls per step; None for sampling profilers.
    #: Seconds per step: device time for kernels, copies and gaps (idle device), else host time.
    seconds: float = Field(ge=0, allow_inf_nan=False)
    std: float = 0.0  #: Standard deviation of `seconds` over the steps.
    share: float = 0.0  #: `seconds` as a fraction of the step's time.
    total: Known = None  #: For functions: `share`, including the time of called functions.
    note: str = ""


class Profile(Record):
    """`profile.json`: the results of a run's profilers; each profiler has its own steps."""

    device: Device = Device()
    nranks: int = 1
    batch_size: int | None = None
    settings: dict[str, Any] = {}  #: The run's settings `profile`.
    seconds_per_step: list[float] = []  #: Seconds of each step without a profiler, before and after each profiler.
    tools: list[ProfiledTool] = []
    memory: Memory | None = None
    top: list[TopEntry] = []  #: First rows of `profile_summary.csv` for each profiler and kind, for the page.
    work: list[OperatorWork] = []  #: Operators in steps without a profiler, the longest first.


#: A profiler's record, and its rows for `profile_summary.csv`.
Found = tuple[ProfiledTool, list[TopEntry]]


class Unavailable(Exception):
    """Error of a profiler that does not work here; the message has the reason and the remedy."""


def overhead(before: Sequence[float], profiled: Sequence[float], after: Sequence[float]) -> Overhead:
    """Return the ratio of step times with and without a profiler, from the seconds of steps.

    The ratio is the median step time with the profiler / the mean of the medians before and after, so steady drift
    cancels. The noise is the half-width of the 95 % interval from the steps' scatter, plus ratio × |after - before| /
    (after + before), where `before` and `after` are medians. The noise is at least 1 - ratio.
    """
    plain = [statistics.median(before), statistics.median(after)]
    usual = statistics.fmean(plain)
    ratio = statistics.median(profiled) / usual
    fewest = min(map(len, (before, profiled, after)))
    if fewest < 2:
        return Overhead(ratio=ratio)
    # Standard errors of the medians, for normally distributed step times.
    errors = [
        math.sqrt(math.pi / 2) * statistics.stdev(each) / math.sqrt(len(each)) for each in (before, profiled, after)
    ]
    scatter = math.hypot(errors[1], ratio * errors[0] / 2, ratio * errors[2] / 2) / usual
    drift = ratio * abs(plain[0] - plain[1]) / 2 / usual
    # No profiler makes a step faster, so a ratio below 1 shows that the noise is at least 1 - ratio.
    return Overhead(ratio=ratio, noise=max(standard_errors(fewest) * scatter + drift, 1 - ratio))
