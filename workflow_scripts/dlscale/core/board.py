"""TensorBoard's event files, in a run's folder: a new writer takes the place of an older one's file."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core.files import explained

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

NAME = "tensorboard"  #: Folder in a run's folder.


def writer(folder: Path) -> SummaryWriter:
    """Return a writer of a new event file in `folder`, whose older ones are removed."""
    from torch.utils.tensorboard import SummaryWriter

    for place in (folder, *folder.parents[:2]):
        if place.name == NAME and place.is_symlink():  # whose event files are somebody's own
            raise explained(OSError(errno.ELOOP, "", str(place)), place)
    for events in folder.glob("events.out.tfevents.*"):
        events.unlink()
    # From step 0: a TensorBoard that is open forgets the points of the file that was removed.
    return SummaryWriter(str(folder), purge_step=0)


def write(folder: Path, scalars: Mapping[str, float | None]) -> None:
    """Have TensorBoard show in `folder` these scalars, all that are not None, and no older ones."""
    with writer(folder) as board:
        for name, value in scalars.items():
            if value is not None:
                board.add_scalar(name, value, 0)
