"""The logs of a training: `metrics.jsonl` and TensorBoard's event file, which grow epoch by epoch.

TensorBoard's tags of our numbers (`quantities`):

- loss/train, loss/valid, valid/METRIC: also at step 0, before training, of the first batch and of all validation
  samples.
- learning_rate, samples_per_second, steps_per_second.
- steps/loss and steps/samples_per_second: every ten seconds, of the first process's last step, and of all since.

Beside them stand the tags of the study's published program (`Study.published_log`), and pictures: `Visualization, NAME`
of truth and prediction, and `valid/prediction` at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard.summary import hparams

from dlscale.core import board
from dlscale.core.files import write_text
from dlscale.core.metrics import Best, Epoch, Untrained, epoch_lines
from dlscale.core.settings import flat
from dlscale.studies.base import PublishedLog

if TYPE_CHECKING:
    import numpy as np

#: The tag of what a study draws after each epoch; a name follows.
PICTURE = "Visualization, "
#: Begin of the tags of single steps.
STEPS = "steps/"


class RunLogs:
    """The logs in a run's folder `out`. They begin with what there was until `step`; all else is removed.

    Where TensorBoard's files are gone, the epochs are written again, without pictures and single steps.
    """

    def __init__(self, out: Path, history: list[Epoch], published: PublishedLog | None = None, step: int = 0) -> None:
        self._metrics, self._folder = out / "metrics.jsonl", out / board.NAME
        self._published = published or PublishedLog()
        # Of thousands of epochs, to write anew what is there takes ten times as long as to begin.
        goes_on = step > 0 and bool(board.files(self._folder))
        self._board = board.writer(self._folder, step if goes_on else -1)
        self._metrics.unlink(missing_ok=True)
        if history:
            write_text(self._metrics, epoch_lines(history))
        self._steps, self._begun = history[-1].step if history and goes_on else 0, goes_on
        for record in () if goes_on else history:
            self._epoch(record)
        self._board.flush()

    def begin(self, untrained: Untrained, wall_time: float) -> None:
        """Show how good the model is before its first step."""
        self._scalars(_validation(untrained), 0, 0, wall_time)
        self._begun = True
        self._board.flush()

    def add(self, record: Epoch, picture: tuple[str, np.ndarray] | None = None) -> None:
        """Add an epoch, and truth beside prediction after it: a name and pixels [H, W, 3]."""
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(record.text() + "\n")
        self._epoch(record)
        if picture:
            name, pixels = picture
            self._board.add_image(PICTURE + name, pixels, record.step, record.wall_time, dataformats="HWC")
        self._board.flush()

    def add_steps(self, step: int, values: Mapping[str, float]) -> None:
        """Add what a step and those before it were like: its loss, and their samples/s."""
        for name, value in values.items():
            self._board.add_scalar(STEPS + name.replace("/s", "_per_second"), value, step)
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
        """Add the picture of a prediction, the best epoch, and the settings beside the final losses; close the files.

        After a failure nobody closes them: that waits for the writer's thread, for ever if an interrupt caught it
        with its queue locked.
        """
        from matplotlib.image import imread

        pixels = imread(picture)  # drawn once: drawing takes as long as seconds of training
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
    """Return the numbers of an epoch of so many steps, by what TensorBoard calls them."""
    return {
        "loss/train": record.train_loss,
        "learning_rate": record.learning_rate,
        "samples_per_second": record.samples_per_second,
        "steps_per_second": steps / record.epoch_seconds,
        **_validation(record),
    }


def _validation(record: Epoch | Untrained) -> dict[str, float]:
    return {"loss/valid": record.valid_loss, **{f"valid/{name}": value for name, value in record.metrics.items()}}
