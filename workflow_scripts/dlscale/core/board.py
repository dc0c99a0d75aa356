"""TensorBoard's event files, in a run's folder: a new writer takes the place of an older one's files, or goes on."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core.files import explained

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

NAME = "tensorboard"  #: Folder in a run's folder.
LAST = ".last"  #: Ends the name of a file with what is written once, at a run's end.


def writer(folder: Path, step: int = -1) -> SummaryWriter:
    """Return a writer of a new event file in `folder`. Older ones are removed, unless it goes on after a step.

    TensorBoard then forgets what they have of later steps.
    """
    from torch.utils.tensorboard import SummaryWriter

    for file in files(folder):
        if step < 0 or file.name.endswith(LAST):
            file.unlink()
    return SummaryWriter(str(folder), purge_step=step + 1)


def last_writer(folder: Path) -> SummaryWriter:
    """Return a writer of a run's end, beside the other files of `folder`."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), filename_suffix=LAST)


def files(folder: Path) -> list[Path]:
    """Return the event files."""
    for place in (folder, *folder.parents[:2]):
        if place.name == NAME and place.is_symlink():  # whose event files are somebody's own
            raise explained(OSError(errno.ELOOP, "", str(place)), place)
    return [*folder.glob("events.out.tfevents.*")]


def write(folder: Path, scalars: Mapping[str, float | None]) -> None:
    """Have TensorBoard show in `folder` these scalars, all that are not None, and no older ones."""
    with writer(folder) as board:
        for name, value in scalars.items():
            if value is not None:
                board.add_scalar(name, value, 0)
