"""What a user watches while a run trains: `metrics.jsonl` and TensorBoard's event file grow epoch by epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.tensorboard.summary import hparams

from dlscale.core import board
from dlscale.core.files import write_text
from dlscale.core.records import Best, Epoch, epoch_lines
from dlscale.core.settings import flat


class RunLogs:
    """The logs in a run's folder `out`. They begin with the epochs of an earlier try; older logs are removed."""

    def __init__(self, out: Path, history: list[Epoch]) -> None:
        self._metrics, folder = out / "metrics.jsonl", out / "tensorboard"
        self._metrics.unlink(missing_ok=True)
        if history:
            write_text(self._metrics, epoch_lines(history))
        self._board = board.writer(folder)
        for record in history:
            self._scalars(record)
        self._board.flush()

    def add(self, record: Epoch) -> None:
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(record.text() + "\n")
        self._scalars(record)
        self._board.flush()

    def _scalars(self, record: Epoch) -> None:
        scalars = {
            "loss/train": record.train_loss,
            "loss/valid": record.valid_loss,
            "learning_rate": record.learning_rate,
            "samples_per_second": record.samples_per_second,
            **{f"valid/{name}": value for name, value in record.metrics.items()},
        }
        for name, value in scalars.items():
            self._board.add_scalar(name, value, record.step, walltime=record.wall_time)

    def finish(self, record: Epoch, picture: Path, settings: dict[str, Any], best: Best | None = None) -> None:
        """Add the picture of a prediction, the best epoch, and the settings beside the final losses; close the files.

        After a failure nobody closes them: that waits for the writer's thread, for ever if an interrupt caught it
        with its queue locked.
        """
        from matplotlib.image import imread

        pixels = imread(picture)  # drawn once: drawing takes as long as seconds of training
        self._board.add_image("valid/prediction", pixels, record.step, walltime=record.wall_time, dataformats="HWC")
        final = {"final/train_loss": record.train_loss, "final/valid_loss": record.valid_loss}
        plain = {key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in flat(settings).items()}
        for summary in hparams(plain, final):
            self._board._get_file_writer().add_summary(summary, walltime=record.wall_time)
        for name, value in final.items():
            self._board.add_scalar(name, value, record.step, walltime=record.wall_time)
        if best:
            self._board.add_scalar(f"best/{best.metric}", best.value, best.step, walltime=record.wall_time)
        self._board.close()
