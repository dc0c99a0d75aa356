"""Record `health.json` of a run: memory by step and phase, and compilations."""

from __future__ import annotations

import functools
from pathlib import Path

from pydantic import Field

from dlscale.core.errors import UserError
from dlscale.core.record import Record

#: File of the record, in the folder of a run.
FILE = "health.json"

#: Maximum number of points of memory in a record, for each process and device.
MAX_POINTS = 512

#: Phases of a run. `start`: until the first step has ended. `between`: pauses between steps, such as for checkpoints,
#: except validations with a loader.
START, TRAINING, VALIDATION, BETWEEN = "start", "training", "validation", "between"

#: Phase of a time for which steps and batches are unknown.
UNKNOWN = "unknown"


class Peak(Record):
    """Largest memory in a phase."""

    bytes: int = Field(ge=0)
    first: int = Field(ge=0)  #: Step after which the peak was reached.
    last: int = Field(ge=0)  #: Last step in which the peak may have been reached.


class Memory(Record):
    """Memory of one process on one device, in bytes.

    Main memory is the process's own memory: anonymous, shared and swapped-out pages. Peaks include pages of files.
    Memory of a GPU is the memory that PyTorch's allocator has allocated.
    """

    device: str  #: `cpu` or `cuda`.
    steps: list[int] = []  #: Number of steps that had ended at each point [n].
    phases: list[str] = []  #: Phase that ended at each point, or in which the point lies [n].
    used: list[int] = []  #: Memory in use at each point [n].
    reserved: list[int] = []  #: Memory that PyTorch's allocator holds at each point [n]; empty on a CPU.
    inactive: list[int] = []  #: Inactive parts of split blocks at each point [n]; empty on a CPU.
    peaks: dict[str, Peak] = {}  #: Largest memory of each phase; a phase without a known peak is absent.
    limit: int | None = None  #: Memory that the process may use; None if unknown.


class Compilation(Record):
    """One compilation of a function by torch.compile."""

    step: int = Field(ge=0)  #: Number of steps that had ended when the compilation began.
    seconds: float = Field(ge=0, allow_inf_nan=False)
    frame: str = ""  #: PyTorch's number of the compiled function.
    again: bool = False  #: Whether the function had been compiled before.
    forward: bool = True  #: False if only a backward pass was compiled.
    function: str = ""
    file: str = ""
    line: int = Field(0, ge=0, le=2**63)
    caller: str = ""  #: Line of the program that called the function at its first compilation; empty if unknown.
    reason: str = ""  #: Guard that failed; empty for the first compilation.
    refused: bool = False  #: Whether PyTorch refused to compile the function again (`recompile_limit`).


class ProcessHealth(Record):
    """Memory and compilations of one process."""

    rank: int = 0
    steps: int = 0  #: Number of steps after the first step.
    seconds: float = 0.0  #: Time from the first to the last step, seconds.
    memory: list[Memory] = []
    compilations: list[Compilation] = []
    breaks: dict[str, int] = {}  #: Number of graph breaks by reason, over all compilations.


class Health(Record):
    """Content of `health.json`."""

    processes: list[ProcessHealth] = []


def read_record(folder: Path | None) -> Health:
    """Read a run's record; a missing or damaged record is empty."""
    try:
        file = folder and folder / FILE
        return _read(file, file.stat().st_mtime_ns) if file else Health()
    except (OSError, UserError):
        return Health()


@functools.lru_cache(maxsize=64)
def _read(file: Path, changed: int) -> Health:
    return Health.read(file)


def thin(memory: Memory, most: int = MAX_POINTS) -> Memory:
    """Return a record with at most `most` points, evenly chosen."""
    every = -(-len(memory.steps) // most) if memory.steps else 1
    names = ("steps", "phases", "used", "reserved", "inactive")
    return memory.model_copy(update={name: getattr(memory, name)[::every] for name in names})
