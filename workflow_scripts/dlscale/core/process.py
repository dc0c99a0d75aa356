"""A stage's process: rank, image, log, locks, and last message."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from dlscale.core import interrupt
from dlscale.core.errors import UserError
from dlscale.core.files import explained, open_regular

# ---- what started it ----------------------------------------------------------------------------------

#: Variables that name rank, size and local rank, by what started the process. Slurm's come last: within its jobs
#: mpirun starts one process a node by srun, and that one starts the ranks.
VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # mpirun of Open MPI, jsrun
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),  # mpirun_rsh of MVAPICH2
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # mpiexec (Hydra) of MPICH, Intel MPI
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),  # mpiexec of Cray's PALS
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),  # srun
)

#: Variable that names a file, in a folder of one user alone, by which the ranks of a node meet.
MEET = "DLSCALE_MEET"


#: All variables by which launchers number processes and let them meet.
LAUNCHED = (
    *dict.fromkeys(name for names in VARIABLES for name in names),
    *("LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", MEET),
)


class Ranks(NamedTuple):
    """Place of this process among those that were started together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  #: Rank on the node.


def ranks() -> Ranks:
    """Return this process's place by the environment; alone, if that has none. PyTorch is not needed."""
    for names in VARIABLES:
        values = [os.environ.get(name, "") for name in names]
        if all(value.isdecimal() for value in values):
            return Ranks(*map(int, values))
    return Ranks()


@dataclass(frozen=True)
class Image:
    """Container image of a stage, found by the workflow's first process and passed on in `DLSCALE_IMAGE`."""

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


# ---- its log ------------------------------------------------------------------------------------------

_log: Path | None = None  #: File that this process logs to.


def redirect(log: Path) -> TextIO:
    """Send the output of this process and its children to a new file `log`; return the terminal."""
    global _log
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.is_file():
            log.unlink()  # and is not emptied: its content may be what `go_on` keeps
        # Appending, so that what is written after `go_on` has no hole before it.
        file = open(log, "a", buffering=1, encoding="utf-8", opener=open_regular)  # noqa: SIM115 - it stays open
    except OSError as error:
        raise explained(error, log) from error
    _log = log
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    return terminal


def go_on(kept: Path, resumed: bool) -> None:
    """Keep this process's log under a second name, `kept`: Snakemake removes a job's log before each try.

    If `resumed`, the log first gets what `kept` holds of earlier tries.
    """
    if not (_log and _log.is_file()):
        return
    try:
        if resumed and kept.exists():
            with _log.open("r+b") as file:  # the same file: others write to it
                text = kept.read_bytes() + file.read()
                file.seek(0)
                file.write(text)
        kept.unlink(missing_ok=True)
        os.link(_log, kept)
    except OSError as error:
        logging.info("this log is not kept for a later try: %s", error)


# ---- its locks ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def only_writer(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Hold the lock `folder/name` during the block; raise a `UserError` that names another holder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / name, "a+", errors="replace", opener=open_regular)  # noqa: SIM115 - closed below, with the lock
    except OSError as error:
        raise explained(error, folder) from error
    with file:
        try:
            # A POSIX lock, which forked children (loader workers that outlive a killed parent) do not hold.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                owner = file.read().strip() or "another process"
                raise UserError(f"{folder}: in use by {owner}; wait for it, or end it and try again") from None
            logging.warning("%s: this file system has no locks; see to it that no second run writes here", folder)
        else:
            job = os.environ.get("SLURM_JOB_ID")
            owner = f"process {os.getpid()} on {socket.gethostname()}{f' (Slurm job {job})' if job else ''}\n"
            with contextlib.suppress(OSError):  # on a full disk it holds without a name
                file.truncate(0)
                os.write(file.fileno(), owner.encode())
        yield


@contextlib.contextmanager
def turn(path: Path) -> Iterator[None]:
    """Hold the lock file `path` during the block; others on this machine wait."""
    with open(path, "a", opener=open_regular) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- its end ------------------------------------------------------------------------------------------

#: Last message of a process that Ctrl-C ended.
INTERRUPTED = "interrupted"
#: Last message of such a call of the workflow.
INTERRUPTED_CALL = "Interrupted. What is done is kept: the same command goes on from there."

#: Status of a process that ends since another one of its run ended, hangs, or sends wrong values.
LOST = 76


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


#: Prints a last message where the user reads; the command line sets it.
say: Callable[[str], object] = _print


def end(message: str, status: int) -> None:
    """Print a message and end this process at once, from any thread."""
    try:
        say(message)
    finally:
        os._exit(status)


def with_last_word(work: Callable[..., object], ended: Callable[[], int]) -> Callable[..., None]:
    """Return a function that does `work` and exits with the status of `ended`, unless that is 0.

    (Snakemake shows where functions of the Snakefile raise.)
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
