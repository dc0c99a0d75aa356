"""Signals that a process passes on to its descendants (`core.process.pass_on`)."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import until

#: Process that appends each USR2 to the file NAME.DEPTH, and starts the same process with a smaller DEPTH.
CHILD = """
import signal, subprocess, sys, time
script, name, depth = sys.argv[0], sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGUSR2, lambda number, frame: open(f"{name}.{depth}", "a").write("x"))
below = subprocess.Popen([sys.executable, script, name, str(depth - 1)]) if depth else None
open(f"{name}.{depth}", "w").close()
time.sleep(60)
"""

#: Process like Snakemake's in a job: it passes on USR2, and runs a shell command.
JOB = """
import signal, subprocess, sys
from dlscale.core import process
signal.signal(signal.SIGUSR2, process.pass_on)
subprocess.run(sys.argv[1], shell=True)
"""


def test_the_nearest_process_with_a_handler_gets_the_signal(tmp_path: Path) -> None:
    """The shell, which has no handler, is not ended. The child of the process with a handler gets no signal."""
    script, name = tmp_path / "child.py", tmp_path / "signals"
    script.write_text(CHILD)
    words = shlex.join([sys.executable, str(script), str(name), "1"])
    job = subprocess.Popen([sys.executable, "-c", JOB, f"{words}; true"], start_new_session=True, text=True)
    first, second = Path(f"{name}.1"), Path(f"{name}.0")
    try:
        until("both processes", lambda: first.exists() and second.exists(), job)
        for count in (1, 2):
            job.send_signal(signal.SIGUSR2)
            until("the signal", lambda: len(first.read_text()) == count, job)  # noqa: B023
        assert second.read_text() == "" and job.poll() is None
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
