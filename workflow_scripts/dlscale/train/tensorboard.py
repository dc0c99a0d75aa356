"""TensorBoard logs of a run: scalars every epoch, the figure and the hyper-parameters at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard import SummaryWriter

from dlscale.config.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Board:
    """Writes event files into a folder; on a resume the trainer replays the epochs done before."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._writer = SummaryWriter(str(folder))
        self._run = run
        self._step = 0

    def __enter__(self) -> Board:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        # Closing waits for the writer's thread, for ever if an interrupt caught it with its queue locked. After a
        # failure the folder is thrown away, and the thread ends with the process.
        if failure is None:
            self._writer.close()

    def epoch(self, record: dict[str, Any]) -> None:
        """Log an epoch's record at its step."""
        self._step = record["step"]
        scalars = {
            "loss/train": record["train_loss"],
            "loss/valid": record["valid_loss"],
            "learning_rate": record["learning_rate"],
            "samples_per_second": record["samples_per_second"],
            **{f"valid/{name}": value for name, value in record["metrics"].items()},
        }
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, self._step)
        self._writer.flush()

    def figure(self, figure: Figure) -> None:
        """Log the picture of prediction against truth."""
        self._writer.add_figure("valid/prediction", figure, self._step, close=False)

    def finish(self, record: dict[str, Any]) -> None:
        """Log the hyper-parameters beside the final losses."""
        settings = _flat(self._run.model_dump(mode="json"))
        final = {"final/train_loss": record["train_loss"], "final/valid_loss": record["valid_loss"]}
        self._writer.add_hparams(settings, final, run_name=".", global_step=self._step)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
