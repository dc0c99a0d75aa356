"""Loaders: one module each, with the same `build`, over the one sample stream."""

import signal


def outlive_signals() -> None:
    """Live on where all processes of a job are signalled: the training, which ends its workers, has yet to save."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
