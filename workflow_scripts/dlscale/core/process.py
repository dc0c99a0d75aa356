"""Process of a stage: rank, image, log, locks, and last message."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from dlscale.core import interrupt
from dlscale.core.errors import UserError
from dlscale.core.files import open_regular, translate_error
from dlscale.core.machine import text_of

# ---- signals ------------------------------------------------------------------------------------------


def pass_on(number: int, frame: object = None) -> None:
    """Send a signal to the nearest descendants of this process that have a handler for it.

    The signal would end a descendant without a handler, such as a shell, so the children of this descendant get it.
    The children of a process with a handler do not get the signal, because that process decides about them.
    """
    import psutil

    waiting = psutil.Process().children()
    while waiting:
        child = waiting.pop()
        caught = re.search(r"^SigCgt:\s*(\w+)", text_of(Path(f"/proc/{child.pid}/status")), re.MULTILINE)
        with contextlib.suppress(psutil.Error):
            if caught and int(caught[1], 16) >> (number - 1) & 1:
                child.send_signal(number)
            else:
                waiting += child.children()


# ---- launcher -----------------------------------------------------------------------------------------

#: Variables with rank, size and local rank, one row per launcher. Slurm's variables come last: in a Slurm job, mpirun
#: uses srun to start one daemon per node, and all ranks of the node inherit the daemon's Slurm variables.
VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # mpirun of Open MPI, jsrun
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),  # mpirun_rsh of MVAPICH2
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # mpiexec (Hydra) of MPICH, Intel MPI
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),  # mpiexec of Cray's PALS
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # srun
)

#: Environment variable with the path of the file by which the ranks of a run on one node find each other, in a folder
#: that only the user may write to.
MEET = "DLSCALE_MEET"


#: All variables of launchers for the ranks and the rendezvous of processes.
LAUNCHED = (
    *dict.fromkeys(name for names in VARIABLES for name in names),
    *("LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", MEET),
)


class Ranks(NamedTuple):
    """Rank of this process, and number of the processes that were started together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  #: Rank among the processes of this node.


def ranks() -> Ranks:
    """Return rank, size and local rank from the launcher's environment variables.

    Without these variables, return rank 0 of 1 process. PyTorch is not needed.
    """
    for names in VARIABLES:
        values = [os.environ.get(name, "") for name in names]
        if all(value.isdecimal() for value in values):
            return Ranks(*map(int, values))
    return Ranks()


@dataclass(frozen=True)
class Image:
    """Container image of a stage.

    Snakemake's process determines the image and passes it to the stages in `DLSCALE_IMAGE`.
    """

    engine: str
    name: str
    identity: str

    @staticmethod
    def read() -> Image | None:
        name, _, identity = os.environ.get("DLSCALE_IMAGE", "").partition("=")
        engine, _, image = name.partition(":")
        return Image(engine, image, identity) if engine and image and identity else None

    def write(self) -> None:
        os.environ["DLSCALE_IMAGE"] = f"{self.engine}:{self.name}={self.identity}"


# ---- log ----------------------------------------------------------------------------------------------

_log: Path | None = None  #: File that this process logs to.


def redirect(log: Path) -> TextIO:
    """Send the output of this process and its children to a new file `log`.

    Return a stream to the previous standard error, usually the terminal.
    """
    global _log
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.is_file():
            log.unlink()  # truncating would also empty the copy that `keep_log` keeps as a hard link
        # Append mode, because `keep_log` may make the file longer.
        file = open(log, "a", buffering=1, encoding="utf-8", opener=open_regular)  # noqa: SIM115 - it stays open
    except OSError as error:
        raise translate_error(error, log) from error
    _log = log
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    return terminal


def keep_log(kept: Path, resumed: bool) -> None:
    """Keep this process's log under a second name, `kept`, because Snakemake removes a job's log before each try.

    If `resumed`, the lines of earlier tries in `kept` are first inserted at the beginning of this log.
    """
    if not (_log and _log.is_file()):
        return
    try:
        if resumed and os.path.lexists(kept):
            # Not a new file, because other processes write to this file.
            with open(kept, "rb", opener=open_regular) as old, _log.open("r+b") as file:
                text = old.read() + file.read()
                file.seek(0)
                file.write(text)
        kept.unlink(missing_ok=True)
        os.link(_log, kept)
    except OSError as error:
        logging.info("cannot keep this log for a later try: %s", error)


# ---- locks --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def only_writer(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Hold the lock `folder/name` during the block.

    Raise a `UserError` that names the owner if another process holds the lock. On a file system without locks, log a
    warning and run the block without a lock.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / name, "a+", errors="replace", opener=open_regular)  # noqa: SIM115 - `with file` closes it
    except OSError as error:
        raise translate_error(error, folder) from error
    with file:
        try:
            # A POSIX lock is not inherited by forked children, such as loader workers that outlive a killed parent.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                owner = file.read().strip() or "another process"
                raise UserError(
                    f"{folder}: in use by {owner}; wait until this process ends, or end it and try again"
                ) from None
            logging.warning("%s: this file system has no locks; make sure that no second run writes here", folder)
        else:
            job = os.environ.get("SLURM_JOB_ID")
            owner = f"process {os.getpid()} on {socket.gethostname()}{f' (Slurm job {job})' if job else ''}\n"
            with contextlib.suppress(OSError):  # on a full disk, the lock works without the name of its owner
                file.truncate(0)
                os.write(file.fileno(), owner.encode())
        yield


@contextlib.contextmanager
def turn(path: Path) -> Iterator[None]:
    """Hold the lock file `path` during the block; other processes on this machine wait."""
    with open(path, "a", opener=open_regular) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- end ----------------------------------------------------------------------------------------------

#: Last message of a process that Ctrl-C ended.
INTERRUPTED = "interrupted"
#: Last message of a call of the workflow that Ctrl-C ended.
INTERRUPTED_CALL = "Interrupted. Finished results are kept: the same command continues."

#: Exit status of a process that ends because another process of its run ended, hangs, or sends wrong values.
LOST = 76


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


#: Function that prints a last message to the user; `dlscale.cli` sets this function.
say: Callable[[str], object] = _print


def end(message: str, status: int) -> None:
    """Print a message and end this process at once, from any thread."""
    try:
        for child in multiprocessing.active_children():
            child.kill()  # a loader process that hangs would outlive this process
        say(message)
    finally:
        os._exit(status)


def with_last_word(work: Callable[..., object], ended: Callable[[], int]) -> Callable[..., None]:
    """Return a function that calls `work`, then exits with the status from `ended`, unless this status is 0.

    After Ctrl-C the status is 130. The function exits by `sys.exit`, because for any other exception in a function of
    the Snakefile, Snakemake prints a traceback.
    """

    def done(*args: object, **named: object) -> None:
        try:
            work(*args, **named)
        except KeyboardInterrupt:
            print("", INTERRUPTED_CALL, sep="\n", file=sys.stderr)
            sys.exit(130)
        finally:
            interrupt.end_at_once("snakemake")
        if status := ended():
            sys.exit(status)

    return done
