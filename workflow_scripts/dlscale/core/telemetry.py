"""`telemetry/STAGE.csv` of a run: a node's activity each second during a stage; its writer and readers.

The standard library alone is imported, for the sampling process is to be small.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import math
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dlscale.core import board
from dlscale.core.errors import UserError
from dlscale.core.files import explained, no_pipe

#: The process that samples; a stage imports none of it.
SAMPLER = "dlscale.measure.telemetry"
PATIENCE = 5.0  #: Seconds that a stage waits at its end for the last row.


@dataclass(frozen=True)
class GpuSample:
    """Activity of a GPU of the run; None: not told. Columns `gpu0_utilization`, `gpu0_memory_bytes`, ..."""

    utilization: float | None = None  #: Share of the driver's last interval, 1/6 to 1 s, in which a kernel ran.
    memory_bytes: float | None = None  #: In use, by all processes.
    watts: float | None = None
    joules: float | None = None  #: Since sampling began, from the GPU's own counter.
    sm_mhz: float | None = None
    celsius: float | None = None
    throttled: str | None = None  #: Causes of lower clocks, joined by `+`: `dlscale.measure.telemetry.REASONS`.


@dataclass(frozen=True)
class Sample:
    """A row: rates and shares are means over the `seconds` before `time`.

    The run's own processes are all ranks of the node and their descendants. Where these are not all seen (ranks in
    containers of their own), `cpu_others` is None, and the run's figures are of those that are.
    """

    time: float  #: Seconds since 1970-01-01 UTC.
    seconds: float
    cores: int  #: Of the machine.
    cpu: float | None = None  #: Share of the machine's processor time that was used, 0 to 1.
    cpu_run: float | None = None  #: By the run's own processes.
    cpu_others: float | None = None  #: By all others.
    #: By other jobs of the same call, part of `cpu_others`; None if Snakemake is not among the run's ancestors.
    cpu_call: float | None = None
    rss_bytes: float | None = None  #: Memory of the run's processes; what they share counts in each.
    read_bytes_per_second: float | None = None  #: System calls of the run's processes asked for; not mapped files.
    reads_per_second: float | None = None  #: Such calls.
    disk_read_bytes_per_second: float | None = None  #: Fetched from disks for the run, be it for mapped files.
    write_bytes_per_second: float | None = None
    #: Since sampling began, of a node whose GPUs are not used: all of it (Cray), or processors and memory (RAPL).
    joules: float | None = None
    gpus: tuple[GpuSample, ...] = field(default=())

    def cells(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in _NODE}
        for number, gpu in enumerate(self.gpus):
            found |= {f"gpu{number}_{name}": getattr(gpu, name) for name in _GPU}
        return found


_NODE = tuple(column.name for column in fields(Sample) if column.name != "gpus")
_GPU = tuple(column.name for column in fields(GpuSample))


def header(gpus: int) -> str:
    """Return the first line of a file with so many GPUs."""
    return ",".join(Sample(0, 1, 1, gpus=(GpuSample(),) * gpus).cells()) + "\n"


def line(sample: Sample) -> str:
    """Return a row of the file."""
    _, *values = sample.cells().values()
    cells = [value or "" if value is None or isinstance(value, str) else f"{round(value, 4):.12g}" for value in values]
    return ",".join([f"{sample.time:.3f}", *cells]) + "\n"


def read(path: str | Path) -> list[Sample]:
    """Read a file; none and an empty one hold no samples, and half a last line is left out."""
    try:
        no_pipe(path)
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
        return [_sample(row) for row in csv.DictReader((row for row in lines if row.endswith("\n")), strict=True)]
    except FileNotFoundError:
        return []
    except (KeyError, TypeError, ValueError, csv.Error) as error:  # one of them is UnicodeDecodeError
        raise UserError(f"{path}: not telemetry ({error}); delete the file and run its stage again") from None


def read_nodes(path: str | Path) -> list[list[Sample]]:
    """Read the files of all nodes, the first node's first, without those of an earlier run on more nodes."""
    path = Path(path)
    first = read(path)
    count = len(list(path.parent.glob(f"{path.stem}.node*")))
    others = [read(node_file(path, number)) for number in range(1, count + 1)]
    return [first, *(samples for samples in others if samples and samples[-1].time >= begin(first))] if first else []


def node_file(path: Path, node: int) -> Path:
    """Return the file of a node; `path` is that of the first."""
    return path.with_name(f"{path.stem}.node{node}{path.suffix}") if node else path


def begin(samples: Sequence[Sample]) -> float:
    """Return when sampling began, seconds since 1970-01-01 UTC."""
    return samples[0].time - samples[0].seconds


def _sample(row: Mapping[str, str]) -> Sample:
    if None in row or None in row.values():
        raise ValueError(f"expected {len(row) - (None in row)} cells")
    values: dict[str, Any] = {
        name: cell if name.endswith("_throttled") else float(cell) if cell else None for name, cell in row.items()
    }
    count = sum(name.endswith("_throttled") for name in row)
    gpus = tuple(GpuSample(*(values[f"gpu{number}_{name}"] for name in _GPU)) for number in range(count))
    values = {"joules": None, "cpu_call": None} | values  # earlier versions lack these columns
    sample = Sample(**{name: values[name] for name in _NODE} | {"cores": int(row["cores"]), "gpus": gpus})
    numbers = [value for value in values.values() if isinstance(value, float)]
    if not (all(map(math.isfinite, numbers)) and sample.seconds > 0 and sample.cores > 0):
        raise ValueError("expected finite numbers, and seconds and cores above 0")
    return sample


# ---- what it comes to -------------------------------------------------------------------------------


def energy(nodes: Iterable[Sequence[Sample]], since: float = -math.inf, until: float = math.inf) -> float | None:
    """Return the energy of a run between two times (seconds since 1970-01-01 UTC), J; None if not known.

    It is that of its GPUs, from their own counters, else power x time, which is constant between samples; without GPUs
    that of its nodes, as far as they count it. A counter that was set back counts on from there.
    """
    found = list[float]()
    for samples in nodes:
        places: list[int | None] = [*range(len(samples[0].gpus))] if samples else []
        for number in places or [None]:
            states = [sample if number is None else sample.gpus[number] for sample in samples]
            counted = number is None or any(state.joules is not None for state in states)
            before = 0.0
            for sample, state in zip(samples, states, strict=True):
                used = state.joules if counted else getattr(state, "watts", None)
                if used is not None:
                    grown, before = (max(0.0, used - before), used) if counted else (used * sample.seconds, 0.0)
                    inside = min(until, sample.time) - max(since, sample.time - sample.seconds)
                    found.append(grown * max(0.0, inside) / sample.seconds)
    return sum(found) if found else None


@dataclass(frozen=True)
class Summary:
    """A node's activity during a stage. Columns are named as in the file; unknown ones are absent."""

    seconds: float = 0.0
    means: Mapping[str, float] = field(default_factory=dict)  #: Over time.
    peaks: Mapping[str, float] = field(default_factory=dict)
    joules: float | None = None  #: Of the GPUs, or of a node without.
    throttled_seconds: float = 0.0  #: In which a GPU of the run was held back.
    throttle_reasons: Mapping[str, float] = field(default_factory=dict)  #: Seconds by reason, added up over the GPUs.
    #: Share of its cycles that a GPU lost while it was held back, against its greatest clock here; of the worst GPU.
    clock_loss: float = 0.0


def summary(samples: Sequence[Sample]) -> Summary:
    """Return what the samples of a node come to."""
    if not samples:
        return Summary()
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    reasons = Counter[str]()
    throttled = 0.0
    for sample in samples:
        for name, value in list(sample.cells().items())[3:]:
            if isinstance(value, float | int) and not name.endswith("joules"):  # which is a sum
                columns[name].append((value, sample.seconds))
        held = [reason for gpu in sample.gpus for reason in (gpu.throttled or "").split("+") if reason]
        for reason in held:
            reasons[reason] += sample.seconds  # type: ignore[assignment]
        throttled += sample.seconds if held else 0.0
    return Summary(
        seconds=sum(sample.seconds for sample in samples),
        means={name: sum(v * s for v, s in found) / sum(s for _, s in found) for name, found in columns.items()},
        peaks={name: max(value for value, _ in found) for name, found in columns.items()},
        joules=energy([samples]),
        throttled_seconds=throttled,
        throttle_reasons=reasons,
        clock_loss=max((_clock_loss(samples, number) for number in range(len(samples[0].gpus))), default=0.0),
    )


def _clock_loss(samples: Sequence[Sample], number: int) -> float:
    clocks = [(sample.seconds, sample.gpus[number].sm_mhz or 0.0, sample.gpus[number].throttled) for sample in samples]
    greatest = max(clock for _, clock, _ in clocks)
    lost = sum(seconds * (1 - clock / greatest) for seconds, clock, held in clocks if held and clock)
    return lost / sum(seconds for seconds, _, _ in clocks) if lost else 0.0


# ---- of a stage ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def sampled(path: Path, root: int, ranks: int, gpus: int) -> Iterator[None]:
    """Sample the node, a row each second, into a new file `path`, while this context and this process last.

    Parameters
    ----------
    root
        Process that with its descendants is the run on this node: this one, or its parent if that started several.
    ranks
        Number of the run's processes on this node.
    gpus
        Number of its GPUs; 0 on a CPU.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # one that lives on, of a stage that was killed, has the old file
        file = open(path, "ab", buffering=0)  # noqa: SIM115 - as standard output
    except OSError as error:
        raise explained(error, path) from error
    words = map(str, (root, ranks, gpus))
    # In a group of its own: Ctrl-C on the terminal would end it with a traceback before it has learnt to ignore that.
    with file:
        sampler = subprocess.Popen(
            [sys.executable, "-m", SAMPLER, *words], stdin=subprocess.PIPE, stdout=file, process_group=0
        )
    assert sampler.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            sampler.stdin.write(b"\n")  # processes that were forked meanwhile may keep the pipe open
            sampler.stdin.close()
        try:
            sampler.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # such as where a driver does not answer
            sampler.kill()
            sampler.wait()


def show(file: Path) -> None:
    """Have TensorBoard show the means, energy and throttled time of telemetry in its run's folder."""
    if file.parent.name != "telemetry" or not file.exists():
        return
    try:
        found = summary(read(file))
    except UserError as error:  # what was measured is there all the same
        logging.warning("%s", error)
        return
    others = {"seconds": found.seconds, "joules": found.joules, "throttled_seconds": found.throttled_seconds}
    scalars = {f"telemetry/{name}": value for name, value in (*found.means.items(), *others.items())}
    board.write(file.parents[1] / board.NAME / "telemetry" / file.stem, scalars)
