"""Checkpoints: one folder per saved step, written atomically while the training continues.

The run's fingerprint names the folder of the checkpoints, so a retry resumes, and a run starts anew after a change that
affects its weights. The devices together write each part of each tensor once, with `torch.distributed.checkpoint`
(DCP). Tensor names do not depend on devices, so a training with another number of devices can resume. The format is
safetensors, so reading a file executes no code.
"""

from __future__ import annotations

import contextlib
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
from dlscale.core.files import atomic_write, sha256, translate_error
from dlscale.core.metrics import Epoch, Untrained
from dlscale.core.record import Number, Record
from dlscale.parallel.shards import Shard
from dlscale.parallel.world import BACKGROUND, World

#: Name of a tensor → this device's shard of the tensor.
State = dict[str, Shard]

# PyTorch would give this warning at every checkpoint of a single process, where it is harmless.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
# Silence DCP, which logs its progress, and each error with a traceback.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.CRITICAL)
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)


class CheckpointRecord(Record):
    """`checkpoint.json`: the progress of a training."""

    step: int = 0  #: number of completed optimiser steps
    history: list[Epoch] = []  #: completed epochs
    #: Sums over the current epoch for each data-parallel rank: the loss, then the training metrics.
    sums: list[list[Number]] = []
    #: Step left out in the current epoch (the training's first step is 0) → 2: the loss was not finite, 1: a gradient.
    bad: dict[int, int] = {}
    seconds: float = 0.0  #: time spent on the current epoch's steps in all tries, seconds
    wall_time: float = 0.0  #: end of the current epoch's steps, seconds since 1970-01-01 UTC; 0 until then
    #: Settings `geometry`, `parallel`, `threads`, `loader`, which affect times; None if they changed in this epoch.
    made_with: dict[str, Any] | None = {}
    untrained: Untrained | None = None  #: scores before the first step; only in records of the first epoch
    places: dict[str, Any] = {}  #: mesh and device type; random states are restored only if both are unchanged
    scaler: dict[str, float] = {}  #: state of the loss scaler
    best: bool | None = (
        None  #: whether the best weights are stored in addition to the last weights; None if no epoch is best
    )
    files: dict[str, str] = {}  #: name of each safetensors file of the checkpoint → SHA-256
    run: str = ""  #: name of the folder of the checkpoints: the training's fingerprint
    own: str = ""  #: SHA-256 of this record without this key

    def rank_sums(self, rank: int, ranks: int) -> list[float]:
        """Return the sums from which a resumed rank continues the epoch; an empty list stands for zeros.

        If the number of ranks has changed, the first rank gets the sums over all ranks.
        """
        if len(self.sums) == ranks:
            return self.sums[rank]
        return [] if rank else [sum(values) for values in zip(*self.sums, strict=True)]


#: Number of a run's newest checkpoints that are kept.
KEPT = 2


class Checkpoints:
    """The `keep` newest checkpoints of one run: `step-NNNNNNNN/` with `checkpoint.json` and safetensors files.

    All ranks call the methods at the same time, except `tidy` and `clear`, which only the first rank calls.
    """

    def __init__(self, folder: Path, keep: int | None = None, world: World | None = None) -> None:
        self.folder, self.keep, self._world = folder, keep or KEPT, world or World()
        # A separate group, so that exchanges about checkpoints do not mix with the exchanges of the training.
        group = dist.new_group(backend="gloo", group_desc=BACKGROUND) if self._world.size > 1 else None
        self._background = replace(self._world, control=group)
        self._saving = Future[None]()
        self._saving.set_result(None)
        self._until: int | None = (
            None  #: last step of this training; checkpoints of later steps are from a longer training
        )
        if self._world.main:
            folder.mkdir(parents=True, exist_ok=True)

    def tidy(self) -> None:
        """Clean up after a process that was killed during a save."""
        for torn in self.folder.glob(".step-*.part"):
            shutil.rmtree(torn, ignore_errors=True)
        for former in self.folder.glob(".step-*.old"):  # moved aside by a save of the same step
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
        """Wait for the previous save, copy this rank's shards, and start to write the copies.

        The caller may change the shards afterwards. After the write, the oldest checkpoints beyond `keep` are removed,
        and so are checkpoints of later steps, up to the last step of this training.
        """
        with ranges.part(ranges.SAVING, ranges.BETWEEN):
            self.wait()
            copies = {name: shard.copy("cpu") for name, shard in state.items()}
            self._saving = Future()
            threading.Thread(target=self._save, args=(self._saving, record, copies), daemon=True).start()

    def wait(self) -> None:
        """Wait until the last save has finished, and raise its error if it failed."""
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
        with atomic_write(path) if main else contextlib.nullcontext() as temporary:
            if temporary:
                temporary.mkdir()
            folder = Path(self._background.gather(str(temporary))[0])
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            # All tensors are on the host. Without this setting, each rank's thread would use the first GPU's stream.
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
                raise translate_error(cause, path) if isinstance(cause, Exception) else cause from None
            own = folder.glob(f"shard-{self._world.rank + 1:05d}-*")
            files = self._background.gather({file.name: sha256(file) for file in own})
            if main:
                names = [name for each in files for name in each]
                if missing := [name for name in names if not (folder / name).exists()]:
                    raise UserError(f"{folder}: {missing[0]}, a file of another process, is missing; {SHARED}")
                digests = {name: digest for each in files for name, digest in each.items()}
                record = record.model_copy(update={"files": digests, "run": self.folder.name})
                record.sealed().write(folder / "checkpoint.json")
        if main:
            known = [step for step in self.steps() if self._until is None or step <= self._until]
            earlier = [step for step in known if step < record.step]
            later = [step for step in known if step > record.step]  # from before a restart at an earlier step
            for old in [*earlier[: max(0, len(earlier) + 1 - self.keep)], *later]:
                shutil.rmtree(self._path(old), ignore_errors=True)

    # ---- load ------------------------------------------------------------------------------------

    def load(
        self, wanted: Callable[[CheckpointRecord], State], until: int | None = None
    ) -> tuple[CheckpointRecord, State] | None:
        """Return the newest usable checkpoint up to step `until`; None if all are missing or damaged.

        `wanted` returns the shards to fill. Raise `UserError` if a checkpoint is unusable but not known to be damaged,
        and no earlier checkpoint is usable. Also raise `UserError` if the ranks see different checkpoints.
        """
        known = self._world.gather(self.steps())
        if any(steps != known[0] for steps in known):
            raise UserError(f"{self.folder}: the {self._world.size} processes do not all see the same files; {SHARED}")
        self._until, useless = until, ""
        for step in reversed([step for step in known[0] if until is None or step <= until]):
            found, problem, damaged = self._read(step, wanted)
            reports = self._world.gather((problem, damaged))
            if not any(problem for problem, _ in reports):
                return found
            problem = next(problem for problem, _ in reports if problem)
            logging.warning("%s: not used (%s); trying an earlier checkpoint", self._path(step), problem)
            if not any(damaged for _, damaged in reports):  # a retry may succeed, or another version of dlscale
                useless = useless or (
                    f"{self._path(step)}: this training cannot resume from this checkpoint ({problem}), nor from an "
                    "earlier checkpoint, although this checkpoint may be undamaged. Try again, or remove this folder "
                    "to start from the beginning"
                )
        if useless:
            raise UserError(useless)
        return None

    def _read(
        self, step: int, wanted: Callable[[CheckpointRecord], State]
    ) -> tuple[tuple[CheckpointRecord, State] | None, str, bool]:
        """Return a checkpoint (None if unusable), its problem in words, and whether its content is damaged."""
        path, checked = self._path(step), False
        try:
            record = CheckpointRecord.read(path / "checkpoint.json")
            if record.own != record.sealed().own:
                raise UserError(f"{path / 'checkpoint.json'}: changed after it was written")
            _check(path, list(record.files.items()), self._world.rank, self._world.size)
            checked = True
            if (record.run or self.folder.name, record.step) != (self.folder.name, step):
                raise ValueError(f"it belongs to another training ({record.run}) or another step ({record.step})")
            state = wanted(record)
            fill(path, state)
        except (Exception, CheckpointException) as error:  # an earlier checkpoint may be usable
            cause = _cause(error)
            # Too little memory, or a file that cannot be opened or read now, does not prove damage. `read_json` turns
            # such an `OSError` into a `UserError`.
            first = cause.__context__ if isinstance(cause.__context__, OSError) else cause
            damaged = not checked and isinstance(first, (UserError, FileNotFoundError))
            return None, f"{type(cause).__name__}: {cause}".splitlines()[0], damaged
        return (record, state), "", False


def _check(path: Path, files: Sequence[tuple[str, str]], first: int = 0, step: int = 1) -> None:
    """Compare the digests of every `step`-th file of a checkpoint, from file `first` on, with the recorded digests."""
    if not files:
        raise UserError(f"{path}: the checkpoint lists no files")
    if foreign := {file.name for file in path.glob("*.safetensors")} - {name for name, _ in files}:  # PyTorch opens all
        raise ValueError(f"the checkpoint does not list {min(foreign)}; remove this file")
    for name, digest in files[first::step]:
        if sha256(path / Path(name).name) != digest:
            raise UserError(f"{path / name}: changed after it was written")


SHARED = "all nodes need the same file system"


def _cause(error: BaseException) -> BaseException:
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].tensor.contiguous()  # safetensors stores contiguous tensors only


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # PyTorch's method would replace tensors on `meta`, and also each `Shard`, a type that it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        tensor: torch.Tensor = self.state_dict[index.fqn].tensor
        return tensor


def read(path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint whose names begin with `prefix`, gathered on the host.

    Raise `UserError` for a damaged checkpoint.
    """
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
    """Fill the shards from a checkpoint; raise `ValueError` if a tensor is incomplete or has another shape."""
    reader = HuggingFaceStorageReader(str(path))
    there = reader.read_metadata().state_dict_metadata
    for name, shard in state.items():
        entry = there.get(name)
        if not isinstance(entry, TensorStorageMetadata) or entry.size != shard.shape:
            raise ValueError(f"{name}: {getattr(entry, 'size', 'missing')}, expected {tuple(shard.shape)}")
        if sum(_common(shard, chunk) for chunk in entry.chunks) != shard.tensor.numel():
            raise ValueError(f"{name}: parts of this tensor are missing, or stored more than once")
    load(
        dict(state),
        storage_reader=reader,
        planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )


def _common(shard: Shard, chunk: ChunkStorageMetadata) -> int:
    return math.prod(
        max(0, min(a + n, b + m) - max(a, b))
        for a, n, b, m in zip(shard.offsets, shard.tensor.shape, chunk.offsets, chunk.sizes, strict=True)
    )
