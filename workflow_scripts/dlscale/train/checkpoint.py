"""Checkpoints: one folder a step, there as a whole or not at all.

They lie in a folder named by what the run is (its settings, its data, its sources), not in a declared
output of the workflow, which would be deleted when a job fails: a retry resumes, a changed run starts
afresh.
"""

from __future__ import annotations

import logging
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from dlscale.core.files import whole

State = dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Parameters
    ----------
    folder
        Where they are, one `step-NNNNNNNN/` each.
    keep
        How many of the newest to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)

    def tidy(self) -> None:
        """Put right what a process left that was killed while it saved. Only the one writer may do so."""
        for torn in self.folder.glob(".step-*.part"):
            shutil.rmtree(torn, ignore_errors=True)
        for former in self.folder.glob(".step-*.old"):  # was about to be replaced by one of the same step
            path = self.folder / former.name.split(".")[1]
            if path.exists():
                shutil.rmtree(former, ignore_errors=True)
            else:
                former.rename(path)

    def steps(self) -> list[int]:
        """Return the saved steps, oldest first."""
        return sorted(int(path.name.split("-")[1]) for path in self.folder.glob("step-????????") if path.is_dir())

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, state: State) -> None:
        """Write `state` (tensors and plain values) as that of `step`, then drop the oldest beyond `keep`."""
        with whole(self._path(step)) as temporary:
            temporary.mkdir()
            torch.save(state, temporary / "state.pt")
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def load(self, only: int | None = None) -> State | None:
        """Return the newest readable state, or that of step `only`, tensors on the host, or None.

        Nothing in it is executed.
        """
        for step in reversed(self.steps() if only is None else [only]):
            path = self._path(step) / "state.pt"
            try:
                with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums that it wrote
                    if damaged := archive.testzip():
                        raise zipfile.BadZipFile(f"{damaged}: wrong checksum")
                # On the host: a device that is full or gone is no fault of the file.
                state: State = torch.load(path, map_location="cpu", weights_only=True)
                return state
            except (OSError, zipfile.BadZipFile, pickle.UnpicklingError, EOFError, RuntimeError) as error:
                logging.warning("%s: not readable (%s); trying an earlier one", path, type(error).__name__)
                if isinstance(error, zipfile.BadZipFile | FileNotFoundError):
                    # Torn beyond doubt: out of the way, so that it does not count among those to keep.
                    shutil.rmtree(self._path(step), ignore_errors=True)
        return None
