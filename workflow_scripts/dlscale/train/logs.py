"""Logs of a training, extended after each epoch: `metrics.jsonl` and TensorBoard's event file.

docs/tensorboard.md lists TensorBoard's tags. The extension `trackers` adds other trackers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard.summary import hparams

from dlscale.core import board
from dlscale.core.files import open_regular, write_text
from dlscale.core.metrics import Best, Epoch, Untrained, epoch_lines
from dlscale.core.settings import flat
from dlscale.studies.base import PublishedLog

if TYPE_CHECKING:
    import numpy as np

#: Prefix of the TensorBoard tag of a study's picture, which is drawn after some epochs.
PICTURE = "Visualization, "


class RunLogs:
    """Logs of a run in its folder `out`; they begin with the epochs in `history`.

    `metrics.jsonl` is always written again. TensorBoard's files are continued after step `step`. If TensorBoard's files
    are missing, or the tags of `published` count epochs, the epochs in `history` are written again, without pictures.
    """

    def __init__(self, out: Path, history: list[Epoch], published: PublishedLog | None = None, step: int = 0) -> None:
        self._metrics, self._folder = out / "metrics.jsonl", out / board.NAME
        self._published = published or PublishedLog()
        # Existing files are continued: writing thousands of epochs again takes ten times as long as opening the files.
        # Values after `step` must be dropped, which TensorBoard can do only if tags count steps, not epochs.
        goes_on = step > 0 and bool(board.files(self._folder)) and self._published.over == "step"
        self._board = board.writer(self._folder, step if goes_on else -1)
        self._metrics.unlink(missing_ok=True)
        if history:
            write_text(self._metrics, epoch_lines(history))
        self._steps, self._begun = history[-1].step if history and goes_on else 0, goes_on
        for record in () if goes_on else history:
            self._epoch(record)
        self._board.flush()

    def begin(self, untrained: Untrained, wall_time: float) -> None:
        """Add the scores before the first step, unless an earlier try did so."""
        if not self._begun:
            self._scalars(validation(untrained), 0, 0, wall_time)
            self._begun = True
            self._board.flush()

    def add(self, record: Epoch, picture: tuple[str, np.ndarray] | None = None) -> None:
        """Add an epoch, and the picture (name, pixels [H, W, 3]) that was drawn after the epoch, if any."""
        with open(self._metrics, "a", encoding="utf-8", opener=open_regular) as file:
            file.write(record.text() + "\n")
        self._epoch(record)
        if picture:
            name, pixels = picture
            self._board.add_image(PICTURE + name, pixels, record.step, record.wall_time, dataformats="HWC")
        self._board.flush()

    def _epoch(self, record: Epoch) -> None:
        if record.untrained and not self._begun:
            self.begin(record.untrained, record.begin)
        if record.untrained:
            self._scalars({"loss/train": record.untrained.train_loss}, 0, 0, record.begin)
        self._scalars(quantities(record, record.step - self._steps), record.step, record.epoch, record.wall_time)
        self._steps = record.step

    def _scalars(self, numbers: dict[str, float], step: int, epoch: int, wall_time: float) -> None:
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step, walltime=wall_time)
        log = self._published
        for tag, name in log.tags.items():
            if name in numbers:
                value = 100 * numbers[name] if tag in log.percent else numbers[name]
                self._board.add_scalar(tag, value, epoch if log.over == "epoch" else step, walltime=wall_time)

    def finish(self, record: Epoch, picture: Path, settings: dict[str, Any], best: Best | None = None) -> None:
        """Add the picture of a prediction, the best epoch, the settings and the final losses; close the files.

        Do not call this after a failure: an interrupt may have left the writer's queue locked.
        """
        from matplotlib.image import imread

        pixels = imread(picture)  # read from the file, because drawing again would take seconds
        self._board.close()
        final = {"final/train_loss": record.train_loss, "final/valid_loss": record.valid_loss}
        plain = {key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in flat(settings).items()}
        with board.last_writer(self._folder) as last:
            last.add_image("valid/prediction", pixels, record.step, walltime=record.wall_time, dataformats="HWC")
            for summary in hparams(plain, final):
                last._get_file_writer().add_summary(summary, walltime=record.wall_time)
            for name, value in final.items():
                last.add_scalar(name, value, record.step, walltime=record.wall_time)
            if best:
                last.add_scalar(f"best/{best.metric}", best.value, best.step, walltime=record.wall_time)


def quantities(record: Epoch, steps: int) -> dict[str, float]:
    """Return losses, metrics and rates of an epoch of `steps` steps, by TensorBoard tag."""
    return {
        "loss/train": record.train_loss,
        "learning_rate": record.learning_rate,
        **({"samples_per_second": record.samples_per_second} if record.samples_per_second else {}),
        "steps_per_second": steps / record.epoch_seconds,
        **{f"train/{name}": value for name, value in record.train_metrics.items()},
        **validation(record),
        **_times(record, steps),
    }


def _times(record: Epoch, steps: int) -> dict[str, float]:
    """Return seconds per step of training and validation, and validation's rate, by TensorBoard tag."""
    times = {"seconds_per_step": record.epoch_seconds / steps} if steps else {}
    if record.valid_steps and record.valid_seconds:
        times["valid_samples_per_second"] = record.valid_samples / record.valid_seconds
        times["valid_seconds_per_step"] = record.valid_seconds / record.valid_steps
    return times


def validation(record: Epoch | Untrained) -> dict[str, float]:
    """Return loss and metrics of a validation, by TensorBoard tag."""
    return {"loss/valid": record.valid_loss, **{f"valid/{name}": value for name, value in record.metrics.items()}}
