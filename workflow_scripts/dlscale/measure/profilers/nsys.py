"""Profiler `nsys`: some steps of a run under NVIDIA Nsight Systems, in processes of their own, read from its report.

Every rank starts a child (`child`), those to be profiled through `nsys profile`, where the rank itself is: in its
container, if there is one. The children join a world of their own. A report `nsys.rankN.nsys-rep` of each stays.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from dlscale.config.run import load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.machine import answer
from dlscale.core.process import MEET
from dlscale.measure.profilers import child
from dlscale.measure.profilers.nsys_database import summarize
from dlscale.measure.profilers.nvtx_ranges import CAPTURE
from dlscale.measure.profilers.records import ProfiledTool, TopEntry
from dlscale.measure.profilers.tool import Found, overhead, report
from dlscale.parallel.world import World

NOT_FOUND = (
    "nsys: not found; install NVIDIA Nsight Systems where the stage runs, or set NSYS to its command line tool, or "
    "leave nsys out of profile.tools"
)
#: Where it lacks what makes reports.
UNREPORTED = (
    "nsys recorded, but cannot make a report here, where libraries are missing, as in a slim image: {} is kept, which "
    "Nsight's window opens; for figures here, install all of Nsight Systems where the stage runs"
)
#: What it says where it does not even start: it waits for a lock in memory that all share.
UNSTARTED = "Agent launcher failed"
BLOCKED = "if no other nsys runs on this machine, remove what an earlier one left: rm /dev/shm/NSys-* /dev/shm/quadd-*"
#: The status of a child that was ended because another one failed.
ENDED = -1000
#: Seconds between asking a child to end and ending it.
GRACE = 10.0
#: Else nsys begins to record at those names of ranges alone that a program has registered, which PyTorch does not.
ENVIRONMENT = {"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}


def profile(run_json: str, manifest: str, world: World, threads: int | None, device: str, folder: Path) -> Found:
    """Profile a run; every rank calls it, and gets what its own report says.

    No memory of the device should be in use: the children need it.

    Parameters
    ----------
    run_json
        The run's settings as JSON, or their file.
    threads
        CPU threads of a node.
    device
        As on the command line: `auto`, `cpu`, `cuda`.
    folder
        Where reports go.
    """
    tool = shutil.which(os.environ.get("NSYS") or "nsys")
    profiled = world.rank in load_run(run_json, "profile").profile.ranks
    if not all(world.gather(tool is not None or not profiled)):
        return ProfiledTool(name="nsys", problem=NOT_FOUND), []
    with tempfile.TemporaryDirectory() as scratch:
        kept, times = report(folder, "nsys", world.rank, "nsys-rep"), Path(scratch) / "times.json"
        studies = [(study.name, str(study.file)) for study in registry.added().values()]
        asked = child.Asked(run_json, manifest, device, threads, studies, str(times) if profiled else None)
        words = [sys.executable, "-m", child.__name__, json.dumps(asdict(asked))]
        if profiled and tool:
            folder.mkdir(parents=True, exist_ok=True)
            words = [*recording(tool, kept, world.device.type == "cuda"), *words]
        status, said = _run(words, world)
        advice = f"; {BLOCKED}" if UNSTARTED in said else ""
        failed = f"the profiled process ended with status {status}: {_last(said)}{advice}"
        # A process that others waited for says why; they say nothing.
        problem = next(filter(None, world.gather("" if status in (0, ENDED) else failed)), None)
        found, rows = ProfiledTool(name="nsys", problem=problem), list[TopEntry]()
        if profiled and tool and not problem:
            if kept.exists():
                found, rows = _read(tool, world.rank, kept, Path(scratch) / "database.sqlite")
            elif (raw := kept.with_suffix(".qdstrm")).exists():
                files = {f"Recorded by Nsight Systems, rank {world.rank}": raw.name}
                found = ProfiledTool(name="nsys", problem=UNREPORTED.format(raw.name), files=files)
            else:
                problem = f"nsys made no report: {_last(said)}; see the log, and run the stage again"
                found = ProfiledTool(name="nsys", problem=problem)
        cost = overhead(*json.loads(times.read_text())) if times.exists() else None
        version = re.search(r"\d+(\.\d+)+", (answer([tool, "--version"]) if tool else None) or "")
        return found.model_copy(update={"overhead": cost, "version": version.group() if version else ""}), rows


def recording(tool: str, kept: Path, cuda: bool) -> list[str]:
    """Return the words that have a command recorded into a report, while its window is open."""
    traces = "cuda,nvtx,osrt,cublas,cudnn" if cuda else "nvtx,osrt"
    window = ["--capture-range=cudaProfilerApi"] if cuda else ["--capture-range=nvtx", f"--nvtx-capture={CAPTURE}"]
    return [
        *(tool, "profile", f"--trace={traces}", "--sample=none", "--cpuctxsw=none"),
        *(*window, "--capture-range-end=stop", "--kill=none", *(["--cuda-graph-trace=node"] if cuda else [])),
        *("--force-overwrite=true", f"--output={kept.with_suffix('')}"),
    ]


def _read(tool: str, rank: int, kept: Path, database: Path) -> Found:
    """Return what a report says."""
    files = {f"Nsight Systems, rank {rank}": kept.name}
    words = [tool, "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(kept)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode or not database.exists():
        logging.warning("nsys export: status %d\n%s", done.returncode, (done.stdout + done.stderr)[-2000:])
        problem = f"nsys cannot export {kept.name}, which Nsight's window opens; see the log"
        return ProfiledTool(name="nsys", problem=problem, files=files), []
    try:
        summary, top = summarize(database, rank)
    except UserError as error:
        problem = str(error).replace(str(database), kept.name)
        return ProfiledTool(name="nsys", problem=problem, files=files), []
    return summary.model_copy(update={"files": files}), top


def _last(said: str) -> str:
    """Return the line in which the child says why it failed, else the last one that says something."""
    lines = [line.rpartition("\r")[2].strip() for line in said.split("\n")]
    why = [line.removeprefix(child.FAILED) for line in lines if line.startswith(child.FAILED)]
    return next((line for line in reversed(why or lines) if line), "it said nothing")


def _run(words: list[str], world: World) -> tuple[int, str]:
    """Run this rank's child to its end together with those of the others; return its status and what it said.

    Where one fails the others are ended: they would wait for it.
    """
    # Through RANK or Slurm's variables the children know who they are, as their parents do. Where those met is not for
    # them: they have a place of their own.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")} | ENVIRONMENT
    number = world.gather(_free_port() if world.main else 0)[0]
    environment["MASTER_PORT"] = str(number)
    if MEET in environment:
        environment[MEET] += f"-{number}"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,  # it ends when this process is killed, and the child with it
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        ended = False
        try:
            while True:
                running, failed = world.max(process.poll() is None, bool(process.poll()))
                if not running:
                    break
                if failed and process.poll() is None:
                    _end(process)
                    ended = True
                time.sleep(0.2)
        finally:
            _end(process)
        output.seek(0)
        said = output.read().decode(errors="replace")
    logging.info("nsys: status %d\n%s", process.returncode, re.sub(r"[^\n]*\r(?!\n)", "", said).rstrip())
    return ENDED if ended else process.returncode, said


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started; nothing happens if they have ended."""
    for number, seconds in [(signal.SIGTERM, GRACE), (signal.SIGKILL, None)]:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    if process.stdin:
        with contextlib.suppress(OSError):
            process.stdin.close()
