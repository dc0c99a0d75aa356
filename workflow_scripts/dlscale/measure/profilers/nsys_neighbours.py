"""Several nsys on one machine, in containers that share its memory but neither /tmp nor numbers of processes.

Their agents meet in `/dev/shm`. They take turns there by a lock in `/tmp/nvidia`, and have names by the number of their
process. Where each container has a `/tmp` of its own and counts its processes from one, nobody waits for a turn, and
two agents have one name: the second does not start («Agent launcher failed»), and what is left blocks all later ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

#: Where nsys has its lock and its sockets.
TURNS = Path("/tmp/nvidia")
#: Shared by all containers, like the memory that the lock is for.
MEMORY = Path("/dev/shm")
#: Numbers of processes between two containers; from here to its agent, each uses a few hundred.
APART = 1000


@contextlib.contextmanager
def beside_others() -> Iterator[None]:
    """Let nsys work beside those of other containers, for as long as this lasts; outside of a container, do nothing.

    Containers of one user are told apart. Where that fails, a warning says so, and nsys may fail, too.
    """
    with contextlib.ExitStack() as stack:
        if "DLSCALE_LIFELINE" in os.environ:  # a container with numbers of its own; others share the machine's
            try:
                shared = MEMORY / f"dlscale-nsys-{os.getuid()}"
                shared.mkdir(mode=0o700, exist_ok=True)
                if not TURNS.exists():
                    TURNS.symlink_to(shared)
                _use_up(APART * stack.enter_context(_place(shared)))
            except OSError as error:
                logging.warning("nsys: it may not start beside those of other containers of this machine: %s", error)
        yield


@contextlib.contextmanager
def _place(folder: Path) -> Iterator[int]:
    """Yield the lowest number that no other container holds now."""
    with contextlib.ExitStack() as stack:
        for number in itertools.count():
            file: IO[str] = stack.enter_context((folder / f"place{number}").open("w"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
        yield number


def _use_up(numbers: int) -> None:
    """Use numbers of processes up: threads have some, too, and are quickly made."""
    for _ in range(numbers):
        thread = threading.Thread()
        thread.start()
        thread.join()
