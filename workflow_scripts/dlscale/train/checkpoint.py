"""Checkpoints: one folder a step, there as a whole or not at all.

They lie in a folder named by the run's fingerprint, not in a declared output of the workflow, which would be deleted
when a job fails: a retry resumes, a changed run starts afresh.
"""

from __future__ import annotations

import logging
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from dlscale.core.errors import UserError
from dlscale.core.files import whole
from dlscale.core.records import Epoch, Number, Record, Untrained
from dlscale.train import archive

State = dict[str, Any]


class CheckpointRecord(Record):
    """`checkpoint.json`: how far a training was."""

    step: int = 0  #: optimiser steps that are done
    history: list[Epoch] = []  #: the epochs that are done
    loss_sums: list[Number] = [0.0]  #: of the epoch under way: sum of the samples' losses on each rank
    seconds: float = 0.0  #: time spent on its steps in all tries
    wall_time: float = 0.0  #: when its steps were done, seconds since 1970-01-01 UTC; 0 while they are not
    #: The run's `geometry`, `threads`, `loader`, which decide times and no weight; None if they changed in the epoch.
    made_with: dict[str, Any] | None = {}
    untrained: Untrained | None = None  #: what was before the first step, while the first epoch is under way

    def loss_sum(self, rank: int, ranks: int) -> float:
        """Return the sum with which a rank goes on; with another number of ranks the first has the sum of all."""
        if len(self.loss_sums) == ranks:
            return self.loss_sums[rank]
        return 0.0 if rank else sum(self.loss_sums)


class Checkpoints:
    """The `keep` newest checkpoints of one run: `step-NNNNNNNN/` in `folder`, with `checkpoint.json` and `state.pt`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)

    def tidy(self) -> None:
        """Repair what a process left that was killed while it saved. Only the one writer may do so."""
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
        return sorted(int(path.name.split("-")[1]) for path in self.folder.glob("step-????????") if path.is_dir())

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, record: CheckpointRecord, state: State) -> None:
        """Write the record and `state` (tensors and plain values), then drop the oldest beyond `keep`."""
        with whole(self._path(record.step)) as temporary:
            temporary.mkdir()
            torch.save(state, temporary / "state.pt")
            record.write(temporary / "checkpoint.json")
        # Later steps are what could not be read: nothing goes on from them.
        earlier = [step for step in self.steps() if step < record.step]
        later = [step for step in self.steps() if step > record.step]
        for old in [*earlier[: max(0, len(earlier) + 1 - self.keep)], *later]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def load(self, only: int | None = None, until: int | None = None) -> tuple[CheckpointRecord, State] | None:
        """Return the newest readable checkpoint, or that of step `only`, tensors on the host; None if there is none.

        Those of steps after `until` are left alone. Nothing in it is executed.
        """
        known = [step for step in self.steps() if until is None or step <= until]
        for step in reversed(known if only is None else [only]):
            path = self._path(step) / "state.pt"
            try:
                record = CheckpointRecord.read(path.with_name("checkpoint.json"))
                return record, archive.load(path)
            except (OSError, zipfile.BadZipFile, pickle.UnpicklingError, EOFError, RuntimeError, UserError) as error:
                logging.warning("%s: not readable (%s); trying an earlier one", path.parent, type(error).__name__)
                if only is None and isinstance(error, zipfile.BadZipFile | FileNotFoundError | UserError):
                    # Torn beyond doubt: removed, so that it does not count among those to keep. The one that is named
                    # was read by the rank that writes; who cannot see it shall not remove it.
                    shutil.rmtree(self._path(step), ignore_errors=True)
        return None
