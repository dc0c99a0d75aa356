"""Profiler `nsys`: profile some steps of a run with NVIDIA Nsight Systems, and read its report.

Every rank starts a child process in the rank's container; children of profiled ranks run under `nsys profile`. NVIDIA
documents the exported database in the sections "SQLite Schema Reference" and "SQLite Schema Event Values" of the
Analysis Guide (https://docs.nvidia.com/nsight-systems/AnalysisGuide/index.html).
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
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nvtx
import pandas as pd
import torch

from dlscale.config.run import load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.machine import command_output, let_threads_wait
from dlscale.core.process import MEET
from dlscale.core.ranges import RANGES, marking
from dlscale.extensions.profile.trace import summarise
from dlscale.extensions.profile.window import Window
from dlscale.launch.contain import exit_with_stdin
from dlscale.measure.profilers import Found, ProfiledTool, overhead
from dlscale.parallel.rendezvous import join
from dlscale.parallel.strategy import CommHook
from dlscale.parallel.world import World
from dlscale.train.build import open_session

NOT_FOUND = (
    "nsys: not found. Install NVIDIA Nsight Systems on the machine that runs the stage, set NSYS in site.environment "
    "to the path of nsys, or remove nsys from profile.tools"
)
#: Name of the NVTX range during which nsys records a run without CUDA.
CAPTURE = "dlscale capture"


def profile_apart(run_json: str, manifest: str, world: World, threads: int | None, device: str, folder: Path) -> Found:
    """Profile a run; every rank must call this function. A profiled rank gets the results of its own report.

    Other ranks get no results. If a child process fails, all ranks get its message. The child processes need the
    device's memory, which the caller must have released.

    Parameters
    ----------
    run_json
        The run's settings as JSON, or a file with the settings.
    threads
        CPU threads per node.
    device
        Device as on the command line: `auto`, `cpu` or `cuda`.
    folder
        Folder for the reports.
    """
    tool = shutil.which(os.environ.get("NSYS") or "nsys")
    profiled = world.rank in load_run(run_json, "profile").profile.ranks
    if not all(world.gather(tool is not None or not profiled)):
        return ProfiledTool(name="nsys", problem=NOT_FOUND), []
    with tempfile.TemporaryDirectory() as scratch:
        kept, times = folder / f"nsys.rank{world.rank}.nsys-rep", Path(scratch) / "times.json"
        asked: dict[str, Any] = {"config": run_json, "manifest": manifest, "device": device, "threads": threads}
        asked |= {"studies": [(study.name, str(study.file)) for study in registry.added().values()]}
        asked |= {"times": str(times) if profiled else None}
        words = [sys.executable, "-m", __name__, json.dumps(asked)]
        if profiled and tool:
            folder.mkdir(parents=True, exist_ok=True)
            words = [*recording(tool, kept, world.device.type == "cuda"), *words]
        status, said = _run(words, world)
        failed = f"the profiled process ended with status {status}: {_last(said)}"
        # Only the failed process has a message. The other processes were ended because they waited for that process.
        problem = next(filter(None, world.gather("" if status in (0, None) else failed)), None)
        if problem or not profiled or not tool:
            return ProfiledTool(name="nsys", problem=problem), []
        if not kept.exists():
            problem = f"nsys made no report: {_last(said).rstrip('.')}. See the log, and run the stage again"
            return ProfiledTool(name="nsys", problem=problem), []
        found, rows = _read(tool, world.rank, kept, Path(scratch) / "database.sqlite")
        cost = overhead(*json.loads(times.read_text())) if times.exists() else None
        known = {"overhead": cost, "version": nsys_version(tool)}
        return found.model_copy(update=known | {"files": {f"Nsight Systems, rank {world.rank}": kept.name}}), rows


def recording(tool: str, kept: Path, cuda: bool) -> list[str]:
    """Return the arguments with which nsys records the command that follows, while the recording window is open."""
    traces = "cuda,nvtx" if cuda else "nvtx"  # traces of system calls would slow steps down
    window = ["--capture-range=cudaProfilerApi"] if cuda else ["--capture-range=nvtx", f"--nvtx-capture={CAPTURE}"]
    return [
        *(tool, "profile", f"--trace={traces}", "--sample=none", "--cpuctxsw=none"),
        *(*window, "--capture-range-end=stop", "--kill=none", *(["--cuda-graph-trace=node"] if cuda else [])),
        *("--force-overwrite=true", f"--output={kept.with_suffix('')}"),
    ]


# ---- the child process: nsys profiles complete processes ---------------------------------------------


def main() -> None:
    """Make the steps described by the only argument on the command line, which is JSON."""
    let_threads_wait()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    exit_with_stdin()  # the stage has the other end of standard input, so this process ends when the stage ends
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    profiled(**json.loads(sys.argv[1]))


def profiled(
    config: str, manifest: str, device: str, threads: int | None, studies: list[tuple[str, str]], times: str | None
) -> None:
    """Warm up; then make steps without recording, with recording, and again without recording.

    Parameters
    ----------
    studies
        Names and files of studies that are not part of dlscale.
    times
        File for the seconds of the steps before, during and after the recording; None if the process is not recorded.
    """
    for study in studies:
        registry.add(*study)
    run = load_run(config, "profile")
    with join(run.processes, device) as world:
        session = open_session(run, manifest, world, threads)
        if times and not run.cuda_graph:  # a CUDA graph replays no NVTX ranges
            session.step.strategy.around_averaging(averaged)
        with contextlib.closing(Window(run.profile, session)) as window:
            window.run(run.profile.skip)
            seconds = [window.run()]
            world.barrier()  # wait until all ranks are ready
            with recorded(world.device) if times else contextlib.nullcontext():
                seconds.append(window.run())
            seconds.append(window.run())
            if times:
                Path(times).write_text(json.dumps(seconds))


@contextlib.contextmanager
def recorded(device: torch.device) -> Iterator[None]:
    """Open nsys's recording window (see `recording`) for the duration of the block."""
    with marking(nvtx.annotate), contextlib.ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.profiler.start()
            stack.callback(torch.cuda.profiler.stop)
        else:
            stack.enter_context(nvtx.annotate(CAPTURE))
        yield


def averaged(hook: CommHook) -> CommHook:
    """Wrap `hook`, which averages a bucket of gradients, in an NVTX range `comm`.

    The range lasts from the launch until the sum is available. With NCCL the range ends when the sum has been enqueued
    on the device.
    """

    def within(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        opened = nvtx.start_range("comm")  # not `push_range`, because the range may end in another thread

        def ended(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            nvtx.end_range(opened)
            return done.value()

        # DDP waits for this future, and so for the end of the range. A plain callback would end the range too late: the
        # training thread continues meanwhile, and may hold Python's lock for a long time.
        return hook(group, bucket).then(ended)

    return within


# ---- the children ------------------------------------------------------------------------------------


def _run(words: list[str], world: World) -> tuple[int | None, str]:
    """Run this rank's child to its end, together with the children of the other ranks.

    Return the status and the output of this rank's child. If a child fails, the other children are ended, because they
    would wait for the failed child; the status of an ended child is None.
    """
    # The children get their ranks from RANK or Slurm's variables, like their parents, but meet at another port.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    # By default nsys starts recording only at ranges with registered names. Accept all names.
    environment["NSYS_NVTX_PROFILER_REGISTER_ONLY"] = "0"
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, sys.path)
    )  # keep this process's order of folders, in which the site's further packages are last
    alone = os.environ.get("MASTER_ADDR", "127.0.0.1") == "127.0.0.1"  # whether no other node connects to the port
    with socket.create_server(("127.0.0.1" if alone else "", 0)) as free:
        number = world.gather(free.getsockname()[1])[0]
    environment["MASTER_PORT"] = str(number)
    if MEET in environment:
        environment[MEET] += f"-{number}"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,  # closes when this process is killed, which ends the child
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
    return None if ended else process.returncode, said


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a running process and its process group, and close the process's input."""
    for number, seconds in [(signal.SIGTERM, 10.0), (signal.SIGKILL, None)]:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(seconds)
    if process.stdin:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _last(said: str) -> str:
    """Return the last line of the last traceback in an output, or the last line if there is no traceback.

    nsys prints further lines after a traceback.
    """
    lines = [
        re.sub(r"^\[rank\d+\]: ", "", line.rpartition("\r")[2].strip()) for line in said.split("\n")
    ]  # PyTorch prints the rank
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return next((line for line in reversed(raised or lines) if line), "no message was printed").removeprefix(
        f"{UserError.__module__}.{UserError.__name__}: "
    )


# ---- the report --------------------------------------------------------------------------------------


def of_report(path: Path) -> Found:
    """Read a report of any program: a `.nsys-rep`, or a `.sqlite` that nsys has exported.

    Raise `UserError` if the report cannot be read, or has no steps.
    """
    if path.suffix == ".sqlite":
        found = _summary(path, 0, path)
    else:
        if not (tool := shutil.which(os.environ.get("NSYS") or "nsys")):
            there = f"nsys export --type=sqlite {path.name}"
            raise UserError(
                f"{path}: the report cannot be read, because nsys is not installed. Export the report on a machine "
                f"with nsys: {there}"
            )
        with tempfile.TemporaryDirectory() as scratch:
            database = Path(scratch) / "database.sqlite"
            if problem := _export(tool, path, database):
                raise UserError(f"{path}: {problem}")
            found = _summary(database, 0, path)
    if found[0].problem:
        raise UserError(f"{path}: {found[0].problem}; expected NVTX ranges named step, or step 1, step 2, and so on")
    return found


def _read(tool: str, rank: int, kept: Path, database: Path) -> Found:
    if problem := _export(tool, kept, database):
        return ProfiledTool(name="nsys", problem=f"{kept.name}: {problem}"), []
    return _summary(database, rank, kept)


def _export(tool: str, kept: Path, database: Path) -> str:
    """Export a report into a database; return the reason of a failure, or an empty text after a success."""
    words = [tool, "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(kept)]
    done = subprocess.run(words, capture_output=True, text=True)
    if not done.returncode and database.exists():
        return ""
    text = done.stdout + done.stderr
    version = f"nsys {nsys_version(tool)}".rstrip()
    if OLDER.search(text):
        return f"this {version} is older than the report. Use the nsys that recorded the report, or a later version"
    logging.warning("nsys export: status %d\n%s", done.returncode, text[-2000:])
    return f"{version} cannot export the report. See the log, or try to open the report in the Nsight Systems GUI"


def nsys_version(tool: str) -> str:
    """Return the version of the nsys `tool`, such as 2025.3.1; empty if the version is unknown."""
    version = re.search(r"\d+(\.\d+)+", command_output([tool, "--version"]) or "")
    return version.group() if version else ""


def _summary(database: Path, rank: int, kept: Path) -> Found:
    try:
        return summarise(events(database), "nsys", rank)
    except (UserError, ValueError) as error:
        return ProfiledTool(name="nsys", problem=str(error).replace(str(database), kept.name)), []


#: Pattern of the messages that an old nsys (2022.4) prints for a report of a later version.
OLDER = re.compile(r"Can't parse message|ProtobufParseException|newer version|unsupported.*version", re.IGNORECASE)


def _case(column: str, names: Mapping[int, str], other: str) -> str:
    return f"CASE {column} {' '.join(f'WHEN {key} THEN {name!r}' for key, name in names.items())} ELSE {other} END"


#: Names of ENUM_CUDA_MEMCPY_OPER and ENUM_CUDA_MEM_KIND.
COPIES = {1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 8: "Device-to-Device", 10: "Peer-to-Peer"}
COPIES[11] = "Unified Host-to-Device"
MEMORIES = {0: "pageable", 1: "pinned", 2: "device", 4: "managed"}
PLACES = [_case(column, MEMORIES, "'unknown'") for column in ("srcKind", "dstKind")]
COPY = f"{_case('copyKind', COPIES, 'copyKind')} || ' (' || {PLACES[0]} || ' to ' || {PLACES[1]} || ')'"
STRING = "(SELECT value FROM StringIds WHERE id = {})".format
CALLED = STRING("nameId")
#: SQL expressions by table: kind, name, bytes, thread and correlation of the table's events, and the condition under
#: which an event counts. NVTX ranges count if a thread pushes and pops them (type 59), or if they are started and
#: ended, possibly by different threads (type 60).
TABLES = {
    "NVTX_EVENTS": ("'range'", f"COALESCE(text, {STRING('textId')})", "0", "globalTid", "0", "eventType IN (59, 60)"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("'call'", CALLED, "0", "globalTid", "correlationId", "1"),
    "CUPTI_ACTIVITY_KIND_KERNEL": ("'kernel'", STRING("demangledName"), "0", "NULL", "correlationId", "1"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("'copy'", COPY, "bytes", "NULL", "correlationId", "1"),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("'memset'", "'Memset'", "bytes", "NULL", "correlationId", "1"),
}


#: Range name in the SC tutorials' programs, without the step number → dlscale's range name.
THEIRS = {"data copy in": "copy"}


def events(path: Path) -> pd.DataFrame:
    """Return the events in a database of nsys, as a table for `dlscale.extensions.profile.trace`.

    Ranges with other names than dlscale's are left out. Raise `UserError` if the file is not a database of Nsight
    Systems.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            # Thread numbers have 64 bits, which a float would round.
            found = [
                pd.read_sql_query(
                    f"SELECT {kind} AS kind, {name} AS name, start AS begin, end, CAST({thread} AS TEXT) AS thread, "
                    f"COALESCE({correlation}, 0) AS correlation, {size} AS bytes, 0 AS own FROM {table} WHERE {which}",
                    connection,
                )
                for table, (kind, name, size, thread, correlation, which) in TABLES.items()
                if table in there
            ]
        rows = pd.concat(found, ignore_index=True)
        plain = rows.name.str.replace(r" \d+$", "", regex=True).replace(THEIRS)
        rows["name"] = plain.where(rows.kind == "range", rows.name)
        rows = rows[(rows.end >= rows.begin) & ((rows.kind != "range") | rows.name.isin(RANGES))]
        numbers = dict.fromkeys(("begin", "end", "correlation", "bytes", "own"), "int64")
        return rows.assign(thread=pd.factorize(rows.thread)[0], name=rows.name.fillna("unknown")).astype(numbers)
    except (sqlite3.Error, pd.errors.DatabaseError, ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: not a readable database of Nsight Systems ({error})") from None


if __name__ == "__main__":
    main()
