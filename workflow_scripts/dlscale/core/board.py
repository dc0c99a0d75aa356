"""Write TensorBoard event files."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core.files import make_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

NAME = "tensorboard"  #: Name of the folder for event files in a run's folder.
LAST = ".last"  #: Suffix of an event file that is written only once, at the end of a run.


def writer(folder: Path, step: int = -1) -> SummaryWriter:
    """Return a writer of event files in `folder`.

    Without `step`, remove all older files. With a `step`, only remove the file with suffix `LAST`; the new events
    continue after this step.
    """
    from torch.utils.tensorboard import SummaryWriter

    for each in (folder, *folder.parents):  # refuse links, up to the run's `tensorboard` folder
        make_folder(each)
        if each.name == NAME or NAME not in folder.parts:
            break
    for file in files(folder):
        if step < 0 or file.name.endswith(LAST):
            file.unlink()
    _print_no_traceback()
    return SummaryWriter(str(folder), purge_step=step + 1)


def last_writer(folder: Path) -> SummaryWriter:
    """Return a writer of a separate event file for values at the end of a run."""
    from torch.utils.tensorboard import SummaryWriter

    _print_no_traceback()
    return SummaryWriter(str(folder), filename_suffix=LAST)


@functools.cache
def _print_no_traceback() -> None:
    """Suppress the traceback of TensorBoard's thread.

    The traceback is redundant, because the writer raises the same error at its next use.
    """
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if type(failed.thread).__name__ != "_AsyncWriterThread":
            before(failed)

    threading.excepthook = hook


def files(folder: Path) -> list[Path]:
    """Return the event files in `folder`."""
    return [*folder.glob("events.out.tfevents.*")]


def write(folder: Path, scalars: Mapping[str, float | None]) -> None:
    """Write scalars to `folder`, replacing older files; skip None values."""
    with writer(folder) as board:
        for name, value in scalars.items():
            if value is not None:
                board.add_scalar(name, value, 0)
