"""Locks that die with their owners: one writer of a folder or of a file in it, and turns of processes of a machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.files import explained, no_link


@contextlib.contextmanager
def only_writer(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Hold `folder/name` while the block runs; if another process holds it, raise a `UserError` that names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / name, "a+", errors="replace", opener=no_link)  # noqa: SIM115 - closed below, with the lock
    except OSError as error:
        raise explained(error, folder) from error
    with file:
        try:
            # A POSIX lock, which forked children (loader workers that outlive a killed parent) do not hold.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
                logging.warning("%s: this file system has no locks; see to it that no second run writes here", folder)
                yield
                return
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise UserError(f"{folder}: in use by {owner}; wait for it, or end it and try again") from None
        file.truncate(0)
        job = os.environ.get("SLURM_JOB_ID")
        file.write(f"process {os.getpid()} on {socket.gethostname()}{f' (Slurm job {job})' if job else ''}\n")
        file.flush()
        yield


@contextlib.contextmanager
def turn(path: Path) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; others on this machine wait for it."""
    with open(path, "a", opener=no_link) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
