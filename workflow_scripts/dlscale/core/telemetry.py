"""Write and read `telemetry/STAGE.csv`: a node's activity during a stage of a run.

The file has a row per second. This module imports only the standard library and small modules of dlscale, to keep the
sampling process small.
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
from dlscale.core.files import read_text, translate_error

#: Module of the sampling process; a stage does not import it.
SAMPLER = "dlscale.measure.telemetry"
PATIENCE = 5.0  #: Time that a stage waits at its end for the sampler's last row, s.


@dataclass(frozen=True)
class GpuSample:
    """Activity of one GPU of the run.

    Unknown values are None. The columns in the file are `gpu0_utilization`, `gpu0_memory_bytes`, ...
    """

    utilization: float | None = None  #: Fraction of the driver's last interval (1/6 to 1 s) in which a kernel ran.
    memory_bytes: float | None = None  #: Memory in use by all processes, bytes.
    watts: float | None = None
    joules: float | None = None  #: Energy since sampling began, from the GPU's counter, J.
    sm_mhz: float | None = None
    celsius: float | None = None
    throttled: str | None = None  #: Causes of lower clocks (`dlscale.measure.telemetry.REASONS`), joined by `+`.
    sm_active: float | None = None  #: Fraction of the streaming multiprocessors that computed (Hopper and newer).
    tensor_active: float | None = None  #: Fraction of the time in which tensor cores computed (Hopper and newer).
    dram_active: float | None = None  #: Fraction of the memory bandwidth that was used (Hopper and newer).


@dataclass(frozen=True)
class Sample:
    """A row of the file; rates and fractions are means over the `seconds` before `time`.

    The run's processes are all ranks on the node and the descendants of these ranks. If some ranks are not visible
    because they are in separate containers, `cpu_others` is None and the run's values only include visible processes.
    """

    time: float  #: Seconds since 1970-01-01 UTC.
    seconds: float
    cores: int  #: Number of the machine's logical CPUs (hardware threads).
    cpu: float | None = None  #: Fraction of the machine's processor time that was used, 0 to 1.
    cpu_run: float | None = None  #: Fraction of the processor time that the run's processes used.
    cpu_others: float | None = None  #: Fraction of the processor time that all other processes used.
    #: Fraction of the processor time that other jobs of the same Snakemake call used. `cpu_others` includes this
    #: fraction. None if `cpu_others` is None, or if Snakemake is not an ancestor of the run.
    cpu_call: float | None = None
    rss_bytes: float | None = None  #: Memory of the run's processes; shared memory counts once per process.
    read_bytes_per_second: float | None = None  #: Bytes requested by read calls of the run, without mapped files.
    reads_per_second: float | None = None  #: Read calls of the run per second.
    disk_read_bytes_per_second: float | None = None  #: Bytes fetched from disks for the run, mapped files included.
    write_bytes_per_second: float | None = None
    #: Energy since sampling began, J, if the run uses no GPUs: energy of the node (Cray), or energy of the processors
    #: and the memory (RAPL).
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
    """Return the header line of a file that has columns for `gpus` GPUs."""
    return ",".join(Sample(0, 1, 1, gpus=(GpuSample(),) * gpus).cells()) + "\n"


def line(sample: Sample) -> str:
    """Return a row of the file."""
    _, *values = sample.cells().values()
    cells = [value or "" if value is None or isinstance(value, str) else f"{round(value, 4):.12g}" for value in values]
    return ",".join([f"{sample.time:.3f}", *cells]) + "\n"


def read(path: str | Path) -> list[Sample]:
    """Read the samples in a file.

    Return an empty list for a missing or empty file. Ignore an incomplete last line.
    """
    try:
        lines = read_text(path).splitlines(keepends=True)
        return [parse_row(row) for row in csv.DictReader((row for row in lines if row.endswith("\n")), strict=True)]
    except FileNotFoundError:
        return []
    except (KeyError, TypeError, ValueError, csv.Error) as error:  # a UnicodeDecodeError is a ValueError
        raise UserError(f"{path}: not telemetry ({error}); delete the file and run its stage again") from None


def read_nodes(path: str | Path) -> list[list[Sample]]:
    """Read the files of all nodes, first node first.

    Files of an earlier run on more nodes are ignored.
    """
    path = Path(path)
    first = read(path)
    count = len(list(path.parent.glob(f"{path.stem}.node*")))
    others = [read(node_file(path, number)) for number in range(1, count + 1)]
    return [first, *(samples for samples in others if samples and samples[-1].time >= begin(first))] if first else []


def node_file(path: Path, node: int) -> Path:
    """Return the file of a node; `path` is the file of the first node."""
    return path.with_name(f"{path.stem}.node{node}{path.suffix}") if node else path


def begin(samples: Sequence[Sample]) -> float:
    """Return the start time of sampling, seconds since 1970-01-01 UTC."""
    return samples[0].time - samples[0].seconds


def parse_row(row: Mapping[str, str]) -> Sample:
    """Return the sample in a row (column → text); raise KeyError, TypeError or ValueError if the row is damaged."""
    if None in row or None in row.values():
        raise ValueError(f"expected {len(row) - (None in row)} cells")
    values: dict[str, Any] = {
        name: cell if name.endswith("_throttled") else float(cell) if cell else None for name, cell in row.items()
    }
    count = sum(name.endswith("_throttled") for name in row)
    # Files of earlier versions lack `joules`, `cpu_call` and the last three columns of each GPU.
    values = {"joules": None, "cpu_call": None} | values
    gpus = tuple(
        GpuSample(*(values[f"gpu{number}_{name}"] for name in (_GPU if "gpu0_dram_active" in row else _GPU[:-3])))
        for number in range(count)
    )
    sample = Sample(**{name: values[name] for name in _NODE} | {"cores": int(row["cores"]), "gpus": gpus})
    if not (
        all(math.isfinite(value) for value in values.values() if isinstance(value, float))
        and sample.seconds > 0
        and sample.cores > 0
    ):
        raise ValueError("expected finite numbers, and seconds and cores above 0")
    return sample


# ---- summary ----------------------------------------------------------------------------------------


def energy(nodes: Iterable[Sequence[Sample]], since: float = -math.inf, until: float = math.inf) -> float | None:
    """Return the energy of a run between two times (seconds since 1970-01-01 UTC), J.

    Return None if the energy is unknown.

    For a run with GPUs, this is the energy of the GPUs. A GPU without an energy counter contributes power x time, with
    constant power between two samples. For a run without GPUs, this is the energy of the nodes, if they have a counter.
    If a counter decreases, it was reset: the interval counts as 0 J.
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
    """A node's activity during a stage.

    `means` and `peaks` have the columns of the file as keys; columns without values are absent.
    """

    seconds: float = 0.0
    means: Mapping[str, float] = field(default_factory=dict)  #: Means over time, by column.
    peaks: Mapping[str, float] = field(default_factory=dict)
    joules: float | None = None  #: Energy of the run's GPUs, J; for a run without GPUs, energy of the node.
    throttled_seconds: float = 0.0  #: Time in which at least one GPU of the run was throttled, s.
    throttle_reasons: Mapping[str, float] = field(default_factory=dict)  #: Time by reason, summed over the GPUs, s.
    #: Fraction of clock cycles that the most throttled GPU lost, relative to the maximum clock in its samples.
    clock_loss: float = 0.0


def summary(samples: Sequence[Sample]) -> Summary:
    """Return the summary of a node's samples."""
    if not samples:
        return Summary()
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    reasons = Counter[str]()
    throttled = 0.0
    for sample in samples:
        for name, value in list(sample.cells().items())[3:]:
            if isinstance(value, float | int) and not name.endswith("joules"):  # the energy is a running total
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


# ---- sampling of a stage -------------------------------------------------------------------------------


@contextlib.contextmanager
def sampled(path: Path, root: int, ranks: int, gpus: int) -> Iterator[None]:
    """Sample the node's activity into a new file `path`, one row per second, during this context.

    If this process ends earlier, sampling ends as well.

    Parameters
    ----------
    root
        Id of the root process of the run on this node: this process, or its parent if a launcher started several
        processes. The root process and all its descendants count as the run.
    ranks
        Number of the run's processes on this node.
    gpus
        Number of the run's GPUs on this node; 0 on a CPU.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # the sampler of a killed stage may still write to the old file
        file = open(path, "ab", buffering=0)  # noqa: SIM115 - becomes the standard output
    except OSError as error:
        raise translate_error(error, path) from error
    words = map(str, (root, ranks, gpus))
    # A separate process group does not get Ctrl-C, which would end a starting sampler with a traceback.
    with file:
        sampler = subprocess.Popen(
            [sys.executable, "-m", SAMPLER, *words], stdin=subprocess.PIPE, stdout=file, process_group=0
        )
    assert sampler.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            sampler.stdin.write(b"\n")  # closing is not enough, because forked processes may keep the pipe open
            sampler.stdin.close()
        try:
            sampler.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # for example if a driver does not respond
            sampler.kill()
            sampler.wait()


def show(file: Path) -> None:
    """Read a telemetry file, and write means, duration, energy and throttled time as TensorBoard events of the run.

    Write nothing for a file outside a folder `telemetry`, or a missing file.
    """
    if file.parent.name != "telemetry" or not file.exists():
        return
    try:
        found = summary(read(file))
    except UserError as error:  # the results of the stage exist, so a warning is enough
        logging.warning("%s", error)
        return
    others = {"seconds": found.seconds, "joules": found.joules, "throttled_seconds": found.throttled_seconds}
    scalars = {f"telemetry/{name}": value for name, value in (*found.means.items(), *others.items())}
    board.write(file.parents[1] / board.NAME / "telemetry" / file.stem, scalars)
