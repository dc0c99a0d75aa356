"""A process between dlscale and a program: it reaps the program's orphans, and ends them all if dlscale is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import psutil

from dlscale.core import machine

#: Seconds between asking what a program started to end, and killing it.
GRACE = 5.0

#: Seconds after which the keeper looks, even without a signal, whether dlscale is still there.
LOOK = 1.0


class Kept:
    """A running program and its keeper."""

    def __init__(
        self,
        command: Sequence[str],
        folder: str | None,
        environment: Mapping[str, str],
        out: int | None = None,
        stdin: int | None = None,
        session: bool = False,
    ) -> None:
        """Start a program; an `OSError` if it cannot be run.

        Parameters
        ----------
        command
            Its words.
        folder
            Its working folder; this process's if absent.
        environment
            Its variables.
        out, stdin
            Where its output goes, and its input comes from, as in `subprocess.Popen`.
        session
            Whether it has a session of its own, all of whose processes end with it.
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
                preexec_fn=lambda: _keep(parent, write, all_end=session),
            )
            self.pid = int(os.read(read, 32))  #: Of the program.
        except subprocess.SubprocessError as error:  # the keeper could not fork
            raise OSError(errno.EAGAIN, "no more processes can be started here") from error
        finally:
            os.close(read)
            os.close(write)

    @property
    def streams(self) -> tuple[IO[bytes] | None, IO[bytes] | None]:
        """Its output and its errors, if they are pipes."""
        return self._keeper.stdout, self._keeper.stderr

    def wait(self, seconds: float | None = None) -> int:
        """Return its exit status, as a shell has it; raise `subprocess.TimeoutExpired` if it goes on."""
        return self._keeper.wait(seconds)

    def poll(self) -> int | None:
        """Return its exit status, as a shell has it; None if it goes on."""
        return self._keeper.poll()

    def signal(self, number: int, descendants: bool = False) -> None:
        """Send a signal to the program, or to all that it started, too."""
        if self.poll() is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if not descendants:
                os.kill(self.pid, number)
                return
            for each in psutil.Process(self._keeper.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    each.send_signal(number)


def _keep(parent: int, write: int, all_end: bool) -> None:
    """Split this process before it executes a program: return in the program's; the other one keeps it, and ends."""
    # Signals are for the program: those of a terminal, of Slurm, and of dlscale reach it itself.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    machine.with_parent(parent, signal.SIGCHLD)
    machine.adopt_orphans()
    keeper = os.getpid()
    if not (program := os.fork()):
        for each in (signal.SIGUSR1, signal.SIGUSR2):  # which the command line ignores
            signal.signal(each, signal.SIG_DFL)
        machine.with_parent(keeper, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    status = 1
    try:
        os.write(write, str(program).encode())
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))
        status = _kept(program, parent, all_end)
    finally:
        os._exit(status)


def _kept(program: int, parent: int, all_end: bool) -> int:
    """Reap processes until the program or dlscale ends; return the program's status."""
    while True:
        signal.sigtimedwait(signal.valid_signals(), LOOK)
        status = _reaped().get(program)
        if os.getppid() != parent:
            _end_all(GRACE)
        elif status is None:
            continue
        elif all_end:
            _end_all(0.0)
        return 1 if status is None else status


def _reaped() -> dict[int, int]:
    """Reap all children that have ended; return their statuses, as a shell has them, by process."""
    found = dict[int, int]()
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            found[ended[0]] = code if code >= 0 else 128 - code
    return found


def _end_all(grace: float) -> None:
    """End all descendants, stopped ones included; kill those that remain after some seconds."""
    end, asked = time.monotonic() + grace, set[Any]()
    # Another user's process cannot be ended: it is not waited for without end.
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
