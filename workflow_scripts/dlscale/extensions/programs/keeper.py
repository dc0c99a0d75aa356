"""Keeper process between dlscale and a program.

The keeper reaps the program's orphans. If dlscale is killed, the keeper ends all of the program's processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from dlscale.core import machine
from dlscale.core.files import HOST, remove, remove_left

#: Seconds between SIGTERM to a program's processes and SIGKILL.
GRACE = 5.0

#: Longest interval between the keeper's checks that dlscale still runs, seconds; a signal causes an earlier check.
LOOK = 1.0


class KeptProgram:
    """A running program and its keeper."""

    def __init__(
        self,
        command: Sequence[str],
        folder: str | None,
        environment: Mapping[str, str],
        out: int | None = None,
        stdin: int | None = None,
        session: bool = False,
        scratch: str | None = None,
    ) -> None:
        """Start a program; raise `OSError` if it cannot be run.

        Parameters
        ----------
        command
            Program and arguments.
        folder
            Working folder (default: this process's).
        environment
            Environment variables.
        out, stdin
            Target of the output and errors, and source of the input, as in `subprocess.Popen`.
        session
            Whether the program gets a session of its own. All descendants are then killed when the program ends.
        scratch
            Folder that the keeper removes if dlscale is killed.
        """
        parent, (read, write) = os.getpid(), os.pipe()
        try:
            self._keeper = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=stdin,
                stdout=out,
                stderr=out,
                start_new_session=session,
                close_fds=False,  # the program may use files that the caller's shell opened, as for `<(…)`
                preexec_fn=lambda: _keep(parent, write, session, scratch),
            )
            self.pid = int(os.read(read, 32))  #: Process id of the program.
        except subprocess.SubprocessError as error:  # the new process could not fork the program
            raise OSError(errno.EAGAIN, "no more processes can be started here") from error
        finally:
            os.close(read)
            os.close(write)

    @property
    def streams(self) -> tuple[IO[bytes] | None, IO[bytes] | None]:
        """Output and error stream of the program; None for a stream that is not a pipe."""
        return self._keeper.stdout, self._keeper.stderr

    def wait(self, seconds: float | None = None) -> int:
        """Wait at most `seconds` (None: no limit) for the program, and return its exit status as a shell does.

        Raise `subprocess.TimeoutExpired` if the program still runs.
        """
        return self._keeper.wait(seconds)

    def poll(self) -> int | None:
        """Return the exit status, as a shell does; None if the program still runs."""
        return self._keeper.poll()

    def signal(self, number: int, descendants: bool = False) -> None:
        """Send a signal to the program, and with `descendants` also to all its descendants."""
        if self.poll() is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if not descendants:
                os.kill(self.pid, number)
                return
            for each in psutil.Process(self._keeper.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    each.send_signal(number)


def _keep(parent: int, write: int, all_end: bool, scratch: str | None) -> None:
    """Fork before a program is executed: the parent becomes the keeper, and the child returns to execute the program.

    In the keeper this function does not return: the keeper exits with the program's status.
    """
    # The keeper blocks signals, because a terminal, Slurm and dlscale send them to the program directly.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    machine.with_parent(parent, signal.SIGCHLD)
    adopt_orphans()
    keeper = os.getpid()
    if not (program := os.fork()):
        for each in (signal.SIGUSR1, signal.SIGUSR2):  # ignored by dlscale, but not by the program
            signal.signal(each, signal.SIG_DFL)
        machine.with_parent(keeper, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    status = 1
    try:
        os.write(write, str(program).encode())
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        status = _kept(program, parent, all_end, scratch)
    finally:
        os._exit(status)


def _kept(program: int, parent: int, all_end: bool, scratch: str | None) -> int:
    """Reap processes until the program or dlscale ends; return the program's status.

    The status is 1 if dlscale ends first.
    """
    while True:
        signal.sigtimedwait(signal.valid_signals(), LOOK)
        status = _reaped().get(program)
        if os.getppid() != parent:
            _end_all(0.0 if scratch else GRACE)
            if scratch:
                _remove(scratch)
        elif status is None:
            continue
        elif all_end:
            _end_all(0.0)
        return 1 if status is None else status


def _remove(folder: str) -> None:
    """Remove a folder, and its subfolders that an overlay file system left without permissions."""
    for place, names, _ in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                Path(place, name).chmod(0o700)
    remove(Path(folder))


def _reaped() -> dict[int, int]:
    """Reap all ended children; return their exit statuses by process id: 128 + N after signal N, as in a shell."""
    found = dict[int, int]()
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            found[ended[0]] = code if code >= 0 else 128 - code
    return found


def _end_all(grace: float) -> None:
    """End all descendants, including stopped processes; kill descendants that still run after `grace` seconds."""
    end, asked = time.monotonic() + grace, set[Any]()
    # The wait is limited, because a process of another user cannot be ended.
    while (rest := psutil.Process().children(recursive=True)) and (now := time.monotonic()) < end + GRACE:
        late = now >= end
        for each in rest:
            with contextlib.suppress(psutil.Error):
                if late:
                    each.kill()
                elif each not in asked:
                    asked.add(each)
                    each.terminate()
                    each.resume()
        _reaped()
        time.sleep(0.02)


def temporary_folder(name: str, parent: str | os.PathLike[str] | None = None) -> tempfile.TemporaryDirectory[str]:
    """Make a folder in `parent` that is removed when its context ends.

    The default of `parent` is the system's temporary folder. Also remove folders of this name that killed processes
    left behind.
    """
    parent, stem = Path(parent or tempfile.gettempdir()), f"{name}.{HOST}"
    remove_left(parent, stem)
    return tempfile.TemporaryDirectory(dir=parent, prefix=f"{stem}.{os.getpid()}.")


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of orphaned descendants; if `adopt` is false, end this adoption."""
    ctypes.CDLL(None).prctl(36, int(adopt), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
