"""Experiment trackers that a run logs to beside TensorBoard: the numbers of `metrics.jsonl`, epoch by epoch.

They are optional dependencies, imported only where a run asks for them (`training.trackers`).
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlscale.core.errors import UserError
from dlscale.core.metrics import Best, Epoch, Untrained

#: Switches off all that Weights & Biases would collect by itself; telemetry and provenance say it here.
UNSEEN: Any = {**dict.fromkeys(("x_disable_meta", "x_disable_stats", "x_disable_machine_info"), True), "host": ""}


class Wandb:
    """Weights & Biases, in `wandb/` of the run's folder: offline unless the variable WANDB_MODE says otherwise.

    Settings and numbers are all that is logged: no output of the terminal, no code, no host, nothing of
    the environment.
    An offline run is sent by hand: `wandb sync RUN/wandb/offline-run-*`.
    """

    def __init__(self, out: Path, run: dict[str, Any], history: Iterable[Epoch]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which goes online whatever the mode
        try:
            import wandb
        except ImportError:
            raise UserError(
                "training.trackers: wandb is not installed; pip install 'dlscale[trackers]', or leave it out"
            ) from None
        wandb.finish()  # what a training of this process left that failed
        shutil.rmtree(out / "wandb", ignore_errors=True)  # of an earlier try: its epochs are logged again
        out.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # wandb says which there are
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dlscale"),
            group=os.environ.get("WANDB_RUN_GROUP", out.parent.name),
            name=f"{out.parent.name}.{out.name}",
            dir=str(out),
            mode=mode,
            config=run,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, **UNSEEN),
        )
        for record in history:
            self.add(record)

    def add(self, record: Epoch) -> None:
        if record.untrained:
            self._log(0, record.untrained)
        self._log(record.step, record)

    def _log(self, step: int, record: Epoch | Untrained) -> None:
        numbers = record.model_dump(exclude={"metrics", "made_with", "untrained"})
        metrics = {f"valid/{name}": value for name, value in record.metrics.items()}
        finite = {name: value for name, value in (numbers | metrics).items() if math.isfinite(value)}
        self._run.log(finite, step=step)

    def finish(self, picture: Path, best: Best | None) -> None:
        """Add the picture of a prediction and what was best, and close."""
        self._run.log({"valid/prediction": self._wandb.Image(str(picture))})
        if best:
            self._run.summary.update({"best": best.model_dump()})
        self._run.finish()
        self._wandb.teardown()  # waits for its service, which writes the file on after a run's end


def trackers(names: Iterable[str], out: Path, run: dict[str, Any], history: Iterable[Epoch]) -> list[Wandb]:
    """Return the trackers of a run by name, told the epochs of an earlier try; one that is missing is a `UserError`."""
    return [Wandb(out, run, history) for name in names if name == "wandb"]
