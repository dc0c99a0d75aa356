"""Signals that a process passes on to its descendants (`core.process.pass_on`) or to its container."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import variables
from tests.waiting import PATIENCE, until

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


#: Container engine whose container ends with status 7 after `kill`.
ENGINE = """#!/bin/sh
case $1 in
    run) for look in $(seq 3000); do [ -e killed ] && exit 7; sleep 0.1; done ;;
    kill) echo "$*" > killed ;;
esac
"""

#: Process that gets a signal while it starts the engine's client.
EARLY = """
import os, subprocess, sys
from dlscale.launch import contain
start = subprocess.Popen
def begin(words, *args, **options):
    if "run" in words:
        os.kill(os.getpid(), int(sys.argv[1]))
    return start(words, *args, **options)
subprocess.Popen = begin
sys.exit(contain.main(["./engine", "run", "image"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_during_the_start_of_a_container_reaches_the_container(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "engine").write_text(ENGINE)
    (tmp_path / "engine").chmod(0o700)
    command = [sys.executable, "-c", EARLY, str(int(number))]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert (tmp_path / "killed").read_text().startswith(f"kill --signal {number.name} dlscale-")


#: Process that prints whether a stage that ignores SIGTERM is killed before its supervisor.
LIMIT = """
import sys, threading
from dlscale.launch import contain
timer = threading.Timer
def limited(seconds, *arguments):
    print(0 < seconds < contain.GRACE)
    return timer(seconds, *arguments)
threading.Timer = limited
sys.exit(contain.main(["true", "run"]))
"""


def test_a_container_is_killed_before_its_supervisor() -> None:
    """The sender of SIGTERM kills the supervisor after `GRACE` seconds; the container would then continue."""
    command = [sys.executable, "-c", LIMIT]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "True\n"
