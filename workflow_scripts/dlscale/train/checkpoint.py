"""Checkpoints: one folder a step, there as a whole or not at all, written while the training goes on.

They lie in a folder named by the run's fingerprint: a retry resumes, a changed run starts afresh. Each device writes
its shards of each tensor by `torch.distributed.checkpoint` (DCP), under names that know nothing of devices, so that any
other number of them can go on. The files are safetensors: to read one executes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dlscale.core import ranges
from dlscale.core.errors import UserError
from dlscale.core.files import explained, sha256, whole
from dlscale.core.metrics import Epoch, Untrained
from dlscale.core.record import Number, Record
from dlscale.parallel.shards import Shard
from dlscale.parallel.world import BACKGROUND, World

#: This device's shard of each tensor, by name.
State = dict[str, Shard]

# A warning at every checkpoint of one process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
# DCP logs its progress, and each error with a traceback.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.CRITICAL)
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)


class CheckpointRecord(Record):
    """`checkpoint.json`: the progress of a training."""

    step: int = 0  #: optimiser steps done
    history: list[Epoch] = []  #: epochs done
    #: Sums of the epoch under way, of each rank of different samples: losses, then training metrics.
    sums: list[list[Number]] = []
    seconds: float = 0.0  #: time spent on its steps in all tries
    wall_time: float = 0.0  #: end of its steps, seconds since 1970-01-01 UTC; 0 before
    #: Settings that decide times and no weight (`train.NOT_FINGERPRINTED`); None if they changed in the epoch.
    made_with: dict[str, Any] | None = {}
    untrained: Untrained | None = None  #: scores before the first step, in the first epoch
    places: dict[str, Any] = {}  #: devices of the training; random numbers go on where they are the same
    scaler: dict[str, float] = {}  #: state of the loss scaler
    best: bool | None = None  #: whether the best weights are in it, too; None: they are the weights
    files: dict[str, str] = {}  #: SHA-256 of each other file
    run: str = ""  #: its folder, named by the training's fingerprint
    own: str = ""  #: SHA-256 of this record

    def sealed(self) -> CheckpointRecord:
        """Return the record with its digest."""
        text = self.model_copy(update={"own": ""}).text()
        return self.model_copy(update={"own": hashlib.sha256(text.encode()).hexdigest()})

    def rank_sums(self, rank: int, ranks: int) -> list[float]:
        """Return a rank's sums, [] for zeros; if the number of ranks has changed, the first one gets all."""
        if len(self.sums) == ranks:
            return self.sums[rank]
        return [] if rank else [sum(values) for values in zip(*self.sums, strict=True)]


#: Checkpoints kept of a run, the newest.
KEPT = 2


class Checkpoints:
    """The `keep` newest checkpoints of one run: `step-NNNNNNNN/` with `checkpoint.json` and safetensors files.

    All ranks call its methods together; `tidy` and `clear` are for the first rank alone.
    """

    def __init__(self, folder: Path, keep: int | None = None, world: World | None = None) -> None:
        self.folder, self.keep, self._world = folder, keep or KEPT, world or World()
        # A group of its own: these exchanges must not get between those of the training.
        group = dist.new_group(backend="gloo", group_desc=BACKGROUND) if self._world.size > 1 else None
        self._background = replace(self._world, control=group)
        self._saving = Future[None]()
        self._saving.set_result(None)
        self._until: int | None = None  #: steps after this one are those of a longer training
        if self._world.main:
            folder.mkdir(parents=True, exist_ok=True)

    def tidy(self) -> None:
        """Repair the folder after a process was killed while it saved."""
        for torn in self.folder.glob(".step-*.part"):
            shutil.rmtree(torn, ignore_errors=True)
        for former in self.folder.glob(".step-*.old"):  # was about to be replaced by one of the same step
            path = self.folder / former.name.split(".")[1]
            if path.exists():
                shutil.rmtree(former, ignore_errors=True)
            else:
                former.rename(path)

    def clear(self) -> None:
        for step in self.steps():
            shutil.rmtree(self._path(step), ignore_errors=True)

    def steps(self) -> list[int]:
        """Return the saved steps, oldest first."""
        return sorted(int(path.name.split("-")[1]) for path in self.folder.glob(f"step-{8 * '[0-9]'}") if path.is_dir())

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    # ---- save ------------------------------------------------------------------------------------

    def save(self, record: CheckpointRecord, state: Mapping[str, Shard]) -> None:
        """Wait for the save before, copy this rank's shards, and begin to write them.

        The shards may change when this returns. Once they are written, the oldest beyond `keep` are removed.
        """
        with ranges.part(ranges.SAVING, ranges.BETWEEN):
            self.wait()
            copies = {name: shard.copy("cpu") for name, shard in state.items()}
            self._saving = Future()
            threading.Thread(target=self._save, args=(self._saving, record, copies), daemon=True).start()

    def wait(self) -> None:
        """Wait until the last save is done, and raise its error."""
        with ranges.part(ranges.SAVING, ranges.BETWEEN):
            self._saving.result()

    def _save(self, saving: Future[None], record: CheckpointRecord, state: State) -> None:
        try:
            self._write(record, state)
            saving.set_result(None)
        except BaseException as error:
            saving.set_exception(error)

    def _write(self, record: CheckpointRecord, state: State) -> None:
        path, main = self._path(record.step), self._world.main
        with whole(path) if main else contextlib.nullcontext() as temporary:
            if temporary:
                temporary.mkdir()
            folder = Path(self._background.gather(str(temporary))[0])
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            # All is on the host: else the thread would look for the first GPU's stream, on each rank.
            writer.per_thread_copy_ahead = 0
            try:
                save(
                    state,
                    storage_writer=writer,
                    planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    process_group=self._background.control,
                    no_dist=self._world.size == 1,
                )
            except CheckpointException as error:
                cause = _cause(error)
                raise explained(cause, path) if isinstance(cause, Exception) else cause from None
            own = folder.glob(f"shard-{self._world.rank + 1:05d}-*")
            files = self._background.gather({file.name: sha256(file) for file in own})
            if main:
                names = [name for each in files for name in each]
                if missing := [name for name in names if not (folder / name).exists()]:
                    raise UserError(f"{folder}: {missing[0]}, of another process, is not there; {SHARED}")
                digests = {name: digest for each in files for name, digest in each.items()}
                record = record.model_copy(update={"files": digests, "run": self.folder.name})
                record.sealed().write(folder / "checkpoint.json")
        if main:
            known = [step for step in self.steps() if self._until is None or step <= self._until]
            earlier = [step for step in known if step < record.step]
            later = [step for step in known if step > record.step]  # which this training has left behind
            for old in [*earlier[: max(0, len(earlier) + 1 - self.keep)], *later]:
                shutil.rmtree(self._path(old), ignore_errors=True)

    # ---- load ------------------------------------------------------------------------------------

    def load(
        self, wanted: Callable[[CheckpointRecord], State], until: int | None = None
    ) -> tuple[CheckpointRecord, State] | None:
        """Return the newest undamaged checkpoint up to step `until`, if there is one.

        `wanted` returns the shards to fill. A checkpoint that is unusable without being damaged is a `UserError`, if no
        earlier one is usable.
        """
        known = self._world.gather(self.steps())
        if any(steps != known[0] for steps in known):
            raise UserError(f"{self.folder}: not all of the {self._world.size} processes see the same files; {SHARED}")
        self._until, useless = until, ""
        for step in reversed([step for step in known[0] if until is None or step <= until]):
            found, problem, damaged = self._read(step, wanted)
            told = self._world.gather((problem, damaged))
            if not any(problem for problem, _ in told):
                return found
            problem = next(problem for problem, _ in told if problem)
            logging.warning("%s: not used (%s); trying an earlier one", self._path(step), problem)
            if not any(damaged for _, damaged in told):  # the next try, or the code that wrote it, may go well
                useless = useless or (
                    f"{self._path(step)}: this training cannot go on from it ({problem}), nor from an earlier one, and "
                    "nothing says that it is damaged; try again, or remove the folder to begin anew"
                )
        if useless:
            raise UserError(useless)
        return None

    def _read(
        self, step: int, wanted: Callable[[CheckpointRecord], State]
    ) -> tuple[tuple[CheckpointRecord, State] | None, str, bool]:
        """Return a checkpoint, or else None and its problem; and whether its content is at fault."""
        path, checked = self._path(step), False
        try:
            record = CheckpointRecord.read(path / "checkpoint.json")
            if record.own != record.sealed().own:
                raise UserError(f"{path / 'checkpoint.json'}: not as it was written")
            _check(path, list(record.files.items()), self._world.rank, self._world.size)
            checked = True
            if (record.run or self.folder.name, record.step) != (self.folder.name, step):
                raise ValueError(f"it is of another training, {record.run}, or of another step, {record.step}")
            state = wanted(record)
            fill(path, state)
        except (Exception, CheckpointException) as error:  # there is an earlier one
            cause = _cause(error)
            # That a file cannot be opened or read now, or memory is short, says nothing of its content.
            damaged = not checked and isinstance(cause, (UserError, FileNotFoundError))
            return None, f"{type(cause).__name__}: {cause}".splitlines()[0], damaged
        return (record, state), "", False


def _check(path: Path, files: Sequence[tuple[str, str]], first: int = 0, step: int = 1) -> None:
    """Compare every `step`-th file of a checkpoint with its digest."""
    if not files:
        raise UserError(f"{path}: no files are named in it")
    for name, digest in files[first::step]:
        if sha256(path / Path(name).name) != digest:
            raise UserError(f"{path / name}: not as it was written")


SHARED = "all nodes need the same file system"


def _cause(error: BaseException) -> BaseException:
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].tensor.contiguous()  # safetensors has one order in memory


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # PyTorch's looks for tensors without memory, and makes something else of what it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        tensor: torch.Tensor = self.state_dict[index.fqn].tensor
        return tensor


def read(path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with `prefix`, gathered on the host; a damaged one is a `UserError`."""
    _check(path, list(CheckpointRecord.read(path / "checkpoint.json").files.items()))
    there = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    state = {
        name: Shard(torch.empty(entry.size, dtype=entry.properties.dtype))
        for name, entry in there.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    fill(path, state)
    return {name: shard.tensor for name, shard in state.items()}


def fill(path: Path, state: State) -> None:
    """Fill the shards from a checkpoint, or raise a `ValueError`."""
    reader = HuggingFaceStorageReader(str(path))
    there = reader.read_metadata().state_dict_metadata
    for name, shard in state.items():
        entry = there.get(name)
        if not isinstance(entry, TensorStorageMetadata) or entry.size != shard.shape:
            raise ValueError(f"{name}: {getattr(entry, 'size', 'not there')}, expected {tuple(shard.shape)}")
        if sum(_common(shard, chunk) for chunk in entry.chunks) != shard.tensor.numel():
            raise ValueError(f"{name}: not all of it is there, or some more than once")
    load(
        dict(state),
        storage_reader=reader,
        planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )


def _common(shard: Shard, chunk: ChunkStorageMetadata) -> int:
    here = zip(shard.offsets, shard.tensor.shape, chunk.offsets, chunk.sizes, strict=True)
    return math.prod(max(0, min(a + n, b + m) - max(a, b)) for a, n, b, m in here)
