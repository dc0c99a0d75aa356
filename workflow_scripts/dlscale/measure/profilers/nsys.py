"""Profiler `nsys`: some steps of a run under NVIDIA Nsight Systems, in processes of their own, read from its report.

Every rank starts a child (`child`), those to be profiled through `nsys profile`, where the rank itself is: in its
container, if there is one. The children join a world of their own. A report `nsys.rankN.nsys-rep` of each stays.
"""

from __future__ import annotations

import contextlib
import functools
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dlscale.config.run import load_run
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.machine import answer
from dlscale.core.ranks import MEET
from dlscale.measure.profilers import child
from dlscale.measure.profilers.nsys_database import summarize
from dlscale.measure.profilers.nsys_neighbours import beside_others
from dlscale.measure.profilers.nvtx_ranges import CAPTURE
from dlscale.measure.profilers.overhead import overhead
from dlscale.measure.profilers.records import ProfiledTool, TopEntry
from dlscale.measure.profilers.tool import Found
from dlscale.parallel.world import World

NOT_FOUND = (
    "nsys: not found; install NVIDIA Nsight Systems where the stage runs, or set NSYS to its command line tool, or "
    "leave nsys out of profile.tools"
)
#: What nsys says, on a busy machine, where it will write no report; and how often one tries.
LOST = "Connection to the Agent lost"
TRIES = 3
#: What it says where it does not even start, and what then helps: it waits for a lock in memory that all share. To try
#: again does not.
UNSTARTED = "Agent launcher failed"
BLOCKED = "if no other nsys runs on this machine, remove what an earlier one left: rm /dev/shm/NSys-* /dev/shm/quadd-*"
#: The status of a child that was ended because another one failed.
ENDED = -1000
#: Seconds between asking a child to end and ending it.
GRACE = 10.0
#: Else nsys begins to record at those names of ranges alone that a program has registered, which PyTorch does not.
ENVIRONMENT = {"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}


@dataclass(frozen=True)
class Nsys:
    """An nsys command line tool; its options are looked up in its own help."""

    command: str

    @functools.cached_property
    def version(self) -> str:
        """As `2022.4.2.1`; empty if it does not say."""
        found = re.search(r"\d+(\.\d+)+", answer([self.command, "--version"]) or "")
        return found.group() if found else ""

    @functools.cached_property
    def _help(self) -> str:
        return answer([self.command, "profile", "--help"]) or ""

    def profile(self, report: Path, cuda: bool) -> list[str]:
        """Return the words that have a command recorded into `report`, while its window is open (`recorded`)."""
        _, _, traces = self._help.partition("--trace=")
        wanted = ["cuda", "nvtx", "osrt", "cublas", "cudnn", "nccl"] if cuda else ["nvtx", "osrt"]
        traced = [name for name in wanted if name != "nccl" or re.search(r"\bnccl\b", traces[:2000])]
        window = ["--capture-range=cudaProfilerApi"] if cuda else ["--capture-range=nvtx", f"--nvtx-capture={CAPTURE}"]
        graphs = ["--cuda-graph-trace=node"] if cuda and "--cuda-graph-trace" in self._help else []
        return [
            *(self.command, "profile", f"--trace={','.join(traced)}", "--sample=none", "--cpuctxsw=none"),
            *(*window, "--capture-range-end=stop", "--kill=none", *graphs),
            *("--force-overwrite=true", f"--output={report.with_suffix('')}"),
        ]

    def database(self, report: Path, database: Path) -> bool:
        """Export a report to SQLite; return whether that is there now."""
        words = [self.command, "export", "--type=sqlite", "--force-overwrite=true"]
        return _done([*words, f"--output={database}", str(report)]) and database.exists()

    @property
    def importer(self) -> str | None:
        """Its program that makes reports of what was recorded, where it is installed."""
        root = Path(shutil.which(self.command) or self.command).resolve().parents[1]
        found = sorted(str(path) for path in root.glob("host-*/QdstrmImporter"))
        return shutil.which("QdstrmImporter") or next(iter(found), None)

    def report(self, recorded: Path, report: Path) -> bool:
        """Make a report of a `.qdstrm`; return whether it is there now."""
        words = [self.importer or "", "--input-file", str(recorded), "--output-file", str(report)]
        return bool(words[0]) and _done(words) and report.exists()


def _done(words: list[str]) -> bool:
    """Run a command whose output goes into the log if it fails; return whether it succeeded."""
    try:
        subprocess.run(words, capture_output=True, text=True, check=True)
    except OSError as error:
        logging.warning("nsys: %s", error)
        return False
    except subprocess.CalledProcessError as error:
        logging.warning("nsys: %s: status %d\n%s", words[0], error.returncode, (error.stdout + error.stderr)[-2000:])
        return False
    return True


def find() -> Nsys | None:
    """Return the tool that the variable NSYS names, or that is on PATH; None if there is none."""
    command = shutil.which(os.environ.get("NSYS") or "nsys")
    return Nsys(command) if command else None


def profile(
    run_json: str, manifest: str, world: World, threads: int | None, device: str, folder: Path
) -> tuple[ProfiledTool, list[TopEntry]]:
    """Profile a run; every rank calls it, and gets what all ranks' reports say.

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
        Where reports go, and for a while what nsys records.

    Returns
    -------
    ProfiledTool
        Ranges and activity are those of the first of the profiled ranks; `problem` says why there are none.
    list of TopEntry
        Of all profiled ranks.
    """
    found, profiled = find(), world.rank in load_run(run_json, "profile").profile.ranks
    if not all(world.gather(found is not None or not profiled)):
        return ProfiledTool(name="nsys", problem=NOT_FOUND), []
    words = [sys.executable, "-m", child.__name__, "--config", run_json, "--manifest", manifest]
    words += ["--device", device, *(["--threads", str(threads)] if threads else [])]
    words += [word for study in registry.added().values() for word in ("--study", f"{study.name}={study.file}")]
    tool = found if profiled else None
    with beside_others(), _scratch(folder / f".nsys.rank{world.rank}") as scratch:
        recorded, times = scratch / f"nsys.rank{world.rank}.nsys-rep", scratch / "times.json"
        if tool:
            words = [*tool.profile(recorded, world.device.type == "cuda"), *words, "--nvtx", "--times", str(times)]
        status, said, lost = 0, "", False
        for attempt in range(TRIES):
            for former in scratch.iterdir():  # another rank lost its agent
                former.unlink()
            status, said = _run(words, world)
            lost = tool is not None and not _left(recorded) and (status == 0 or LOST in said)
            if not any(world.gather(lost)):  # a peer of one who lost its agent fails, too
                break
            logging.warning("nsys recorded nothing (try %d of %d): %s", attempt + 1, TRIES, _last(said))
        if tool and (status == 0 or lost):
            result = _collect(tool, world.rank, recorded, folder, said)
            if times.exists():
                cost = overhead(*json.loads(times.read_text()))
                result = result[0].model_copy(update={"overhead": cost}), result[1]
        else:
            failed = status not in (0, ENDED)
            advice = f"; {BLOCKED}" if UNSTARTED in said else ""
            problem = f"the profiled process ended with status {status}: {_last(said)}{advice}" if failed else None
            result = ProfiledTool(name="nsys", problem=problem), []
    return _joined(world.gather(result))


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is removed afterwards; one that was left by a process that was killed is, too."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _left(report: Path) -> bool:
    return report.exists() or report.with_suffix(".qdstrm").exists()


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


def _collect(tool: Nsys, rank: int, recorded: Path, folder: Path, said: str) -> tuple[ProfiledTool, list[TopEntry]]:
    """Return what the report of a rank says, once it is in its place; or why there is none."""
    empty = ProfiledTool(name="nsys", version=tool.version)
    raw = recorded.with_suffix(".qdstrm")
    if not _left(recorded):
        problem = f"nsys recorded nothing, {TRIES} times: {_last(said)}; try again while the machine is less busy"
        return empty.model_copy(update={"problem": problem}), []
    kept = folder / recorded.name
    if not recorded.exists() and not tool.report(raw, recorded):
        os.replace(raw, kept.with_suffix(".qdstrm"))
        problem = (
            "nsys recorded, but cannot make a report here, where libraries are missing; where all of Nsight Systems is "
            f"installed: dlscale import {folder.parent}"
        )
        left = {f"Recorded by Nsight Systems, rank {rank}": raw.name}
        return empty.model_copy(update={"problem": problem, "files": left}), []
    os.replace(recorded, kept)
    return _read(tool, rank, kept)


def _read(tool: Nsys, rank: int, report: Path) -> tuple[ProfiledTool, list[TopEntry]]:
    """Return what a report says."""
    known = {"version": tool.version, "files": {f"Nsight Systems, rank {rank}": report.name}}
    with _scratch(report.with_name(f".{report.name}.export")) as scratch:
        database = scratch / "database.sqlite"
        if not tool.database(report, database):
            return ProfiledTool(name="nsys", problem=f"nsys cannot export {report.name}; see the log", **known), []
        try:
            summary, top = summarize(database, rank)
        except UserError as error:
            problem = str(error).replace(str(database), report.name)
            return ProfiledTool(name="nsys", problem=problem, **known), []
    return summary.model_copy(update=known), top


def _joined(results: list[tuple[ProfiledTool, list[TopEntry]]]) -> tuple[ProfiledTool, list[TopEntry]]:
    """Return the results of all ranks as one; those that were not profiled have neither files nor a problem."""
    tools = [tool for tool, _ in results]
    first = next((tool for tool in tools if tool.steps), tools[0])
    files = {title: name for tool in tools for title, name in tool.files.items()}
    problems: dict[str, str] = {}  # what differs in the rank's number alone is said once
    for problem in filter(None, (tool.problem for tool in tools)):
        of_any = re.sub(r"\brank\d+", "rankN", problem)
        problems[of_any] = problem if problems.get(of_any, problem) == problem else of_any
    # A process that others waited for says why; they say that it is gone.
    whole = {
        "files": files,
        "problem": "; ".join(problems.values()) or None,
        "version": max(tool.version for tool in tools),
    }
    return first.model_copy(update=whole), [row for _, rows in results for row in rows]


def import_left_over(folder: Path, into: Path) -> Found:
    """Read what nsys recorded in a folder, where it could make no reports; these go into another one.

    Returns
    -------
    ProfiledTool, list of TopEntry
        As from `profile`, of all ranks. Where nothing was recorded, or it cannot be read here either: `UserError`.
    """
    recorded = sorted(path for path in folder.glob("nsys.rank*") if path.suffix in (".qdstrm", ".nsys-rep"))
    if not recorded:
        raise UserError(f"{folder}: nothing that nsys recorded is left over here")
    tool, raws = find(), [path for path in recorded if path.suffix == ".qdstrm"]
    if tool is None:
        raise UserError("nsys: not found; install NVIDIA Nsight Systems here, or set NSYS to its command line tool")
    if raws and not tool.importer:
        beside = f"QdstrmImporter: neither beside {tool.command} nor on PATH"
        raise UserError(f"{beside}; import where all of Nsight Systems is installed")
    results = []
    for path in recorded:
        report = into / path.with_suffix(".nsys-rep").name
        if path in raws and not tool.report(path, report):
            raise UserError(f"{path}: QdstrmImporter cannot make a report of it; what it said stands above")
        if path not in raws and not report.exists():
            shutil.copy2(path, report)
        results.append(_read(tool, int(path.name.split(".")[1].removeprefix("rank")), report))
    found, rows = _joined(results)
    if found.problem:
        raise UserError(f"{folder}: {found.problem}")
    return found, rows
