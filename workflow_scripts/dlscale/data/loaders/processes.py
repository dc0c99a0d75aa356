"""How processes that load data live and end beside their training."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable


def outlive_signals() -> None:
    """Live on where all processes of a job are signalled: the training, which ends its workers, has yet to save."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def end_with_training() -> None:
    """End this process when the one that started it has ended: one that is killed takes none along."""
    if (training := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(training.join,), daemon=True).start()


def _end_with(wait: Callable[[], None]) -> None:
    wait()
    os._exit(1)
