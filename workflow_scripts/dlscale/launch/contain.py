"""Run a container engine's client, and remove the container: `python -m dlscale.launch.contain ENGINE ...`.

This process forwards signals to the container, returns the container's exit status, and removes the container by its
name. If this process is killed, the container's standard input ends, so the stage in the container ends
(`exit_with_stdin`). For Apptainer and enroot, this process becomes the container.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType

from dlscale.core import urls
from dlscale.core.process import VARIABLES

#: Environment variables that a container gets by name, without a value on the command line: the values differ between
#: processes (rank, rendezvous, devices, job) or are secrets.
PASSED_ON = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_ID"),
    *dict.fromkeys(name for names in VARIABLES for name in names if name.startswith(("OMPI", "MV2", "PMI", "MPI"))),
    *("SLINGSHOT_VNIS", "SLINGSHOT_SVC_IDS", "SLINGSHOT_DEVICES", "SLINGSHOT_TCS"),  # Slurm's, for libfabric
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "DLSCALE_IMAGE"),
    *(urls.VARIABLE, "WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_GROUP"),
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    "MLFLOW_EXPERIMENT_NAME",
)

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

#: Settings of enroot, instead of a site's `enroot.conf`. A login shell would reset the image's PATH, and a mounted home
#: folder would reset the stage's HOME. In other namespaces, a stage would lack signals, the network or devices.
ENROOT_SETTINGS = dict.fromkeys(
    (
        *("ENROOT_LOGIN_SHELL", "ENROOT_MOUNT_HOME", "ENROOT_RESTRICT_DEV", "ENROOT_ROOTFS_WRITABLE"),
        *("ENROOT_UNSHARE_PID", "ENROOT_UNSHARE_NET", "ENROOT_UNSHARE_IPC"),
    ),
    "no",
)

#: Seconds between SIGTERM and SIGKILL.
GRACE = 30


def name() -> str:
    """Return a container name that is unique among the user's containers on this node."""
    job = [
        number
        for key in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
        if (number := os.environ.get(key, "")).isdecimal()
    ]
    return "-".join(["dlscale", socket.gethostname().split(".")[0], *job, str(os.getpid())])


def main(command: list[str]) -> int:
    """Run a container to its end, and return its exit status; for Apptainer and enroot, become the container.

    `command` has options `--env=NAME` for further variables (Apptainer and enroot), the engine, and its arguments.
    """
    named = list(itertools.takewhile(lambda word: word.startswith("--env="), command))
    command = command[len(named) :]
    if command[0] in ("apptainer", "enroot"):  # no daemon and no container names: this process becomes the container
        given = {word.partition("=")[0] for option, word in itertools.pairwise(command) if option == "--env"}
        passed = {*PASSED_ON, *(word.removeprefix("--env=") for word in named)} & os.environ.keys() - given
        os.execvpe(
            command[0],
            [*command[:2], *(f"--env={key}" for key in sorted(passed) if command[0] == "enroot"), *command[2:]],
            {**os.environ, **ENROOT_SETTINGS, **{f"APPTAINERENV_{key}": os.environ[key] for key in passed}},
        )
    engine, called = command[0], name()

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([engine, *words], capture_output=True, text=True, check=False, start_new_session=True)

    def deliver(word: str) -> None:
        # Try again: the container may not have started yet.
        while client.poll() is None and ask("kill", "--signal", word, called).returncode:
            time.sleep(0.25)

    def forward(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=deliver, args=(signal.Signals(number).name,), daemon=True).start()
        if number == signal.SIGTERM and not killer.is_alive() and client.poll() is None:
            killer.start()

    # A stage that ignores SIGTERM is killed before the sender of SIGTERM kills this process.
    killer = threading.Timer(GRACE - 5, deliver, ["KILL"])
    killer.daemon = True
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # a signal waits until the client exists
    for number in FORWARDED:
        signal.signal(number, forward)
    # Ctrl-C goes to all processes of a terminal's session. The client gets a new session, so that the signal reaches
    # the container only once.
    client = subprocess.Popen(
        [engine, command[1], "--name", called, "--sig-proxy=false", *command[2:]],
        stdin=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED),
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    try:
        status = client.wait()
        if status in (125, 126, 127):  # the engine failed, or the command is not executable, or not found
            print(
                f"{engine} did not start the container (status {status}); check the image, and the set-up of GPUs for "
                "containers (site.gpu: false disables GPUs)",
                file=sys.stderr,
            )
        if status < 0:  # the client was killed; the container continues
            waited = ask("wait", called).stdout.strip()
            status = int(waited) if waited.isdecimal() else 128 - status
        return status
    finally:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        if client.stdin:
            with contextlib.suppress(OSError):
                client.stdin.close()
        end = time.monotonic() + GRACE
        ask("rm", "--force", called)  # repeated, because `rm` may be interrupted, or fail during the removal by --rm
        while ask("ps", "--all", "--quiet", "--filter", f"name=^{called}$").stdout.strip() and time.monotonic() < end:
            time.sleep(0.25)
            ask("rm", "--force", called)


def exit_with_stdin() -> None:
    """End this process when its standard input ends, because the process that started the container is then gone."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
