"""TensorBoard's event files, in a run's folder: a new writer takes the place of an older one's files, or goes on."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dlscale.core import events
from dlscale.core.files import explained

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils.tensorboard import SummaryWriter

NAME = "tensorboard"  #: Folder in a run's folder.


def writer(folder: Path, step: int = -1) -> SummaryWriter:
    """Return a writer of a new event file in `folder`. Older ones are removed, unless it goes on after a step."""
    from torch.utils.tensorboard import SummaryWriter

    for file in _files(folder) if step < 0 else ():
        file.unlink()
    # A TensorBoard that is open forgets the points of what was removed.
    return SummaryWriter(str(folder), purge_step=step + 1)


def kept(folder: Path, last: Callable[[Event], bool]) -> bool:
    """Keep of the event files in `folder` all until the latest that `last` is true of; say if there is one."""
    return any(events.cut(file, last) for file in _files(folder))


def _files(folder: Path) -> list[Path]:
    """Return the event files, the newest first."""
    for place in (folder, *folder.parents[:2]):
        if place.name == NAME and place.is_symlink():  # whose event files are somebody's own
            raise explained(OSError(errno.ELOOP, "", str(place)), place)
    return sorted(folder.glob("events.out.tfevents.*"), reverse=True)


def write(folder: Path, scalars: Mapping[str, float | None]) -> None:
    """Have TensorBoard show in `folder` these scalars, all that are not None, and no older ones."""
    with writer(folder) as board:
        for name, value in scalars.items():
            if value is not None:
                board.add_scalar(name, value, 0)
