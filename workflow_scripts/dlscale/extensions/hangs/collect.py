"""Collect reports, stacks and states of all processes of a program."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dlscale.core.errors import UserError
from dlscale.core.files import make_folder, open_regular, read_text, remove, write_json, write_text
from dlscale.extensions.hangs.finding import ENDED, GONE, RUNNING, SILENT, STOPPED, Process, line_of, waiting
from dlscale.extensions.hangs.inside import ASK, REPORT, STACKS, TICK, catches_quit, process_scope

#: Longest waits, seconds: for reports; for the stacks of processes without a report; for py-spy.
ANSWER, SIGNALLED, SPYING = 10.0, 2.0, 10.0

#: Types of the values in a status and in a report.
KNOWN = {
    **dict.fromkeys(("rank", "pid", "parent"), int),
    **dict.fromkeys(("place", "line"), str),
    **dict.fromkeys(("trains", "stepped", "launched"), bool),
    **dict.fromkeys(("idle", "written"), int | float),
}

#: Maximum number of processes whose stacks py-spy reads.
MAX_SPIED = 8


@dataclass
class Collected:
    """Reports, stacks and states of a program's processes."""

    reports: dict[int, dict[str, Any]]  #: Reports of `inside.Reporter` by process id.
    stacks: dict[int, str]  #: Stacks of all threads by process id.
    processes: list[Process]  #: Ranks of the program; if it has none, all processes with stacks.

    def keep(self, folder: Path) -> None:
        """Replace `folder` by a new folder with the reports and stacks."""
        remove(folder)
        make_folder(folder)
        for pid, report in self.reports.items():
            write_json(folder / f"report.{pid}.json", report)
        for pid, text in self.stacks.items():
            write_text(folder / f"stacks.{pid}.txt", text)


def collect(steps: Path, program: int, statuses: Mapping[int, dict[str, Any]], ends: bool) -> Collected:
    """Collect reports, stacks and states of the process `program` and its descendants.

    Parameters
    ----------
    steps
        Folder into which the processes write statuses, reports and stacks.
    statuses
        Last statuses of the processes that record steps, by process id.
    ends
        Whether dlscale ends the program afterwards. If so, stopped processes are resumed, so that they write stacks.
    """
    family = family_of(program)
    stopped = {pid for pid in family if _is_stopped(pid)}
    own = {pid: file for file in _files(steps, STACKS) if (pid := int(file.suffix[1:])) in family}
    sizes = {pid: file.stat().st_size for pid, file in own.items()}
    away = {pid for pid, each in statuses.items() if each["place"] != process_scope() and not each.get("ended")}
    reports = request_reports(steps, (own.keys() - stopped) | away)
    # A process that holds Python's lock writes no report, but its handler of SIGQUIT still works.
    mute = {pid for pid in own if pid not in reports and (ends or pid not in stopped) and catches_quit(pid)}
    dumps = _Dumps([own[pid] for pid in mute])
    for pid in mute:
        _dump(pid)
    _until(dumps.are_complete, SIGNALLED)
    stacks = {pid: _after(file, sizes[pid]) for pid, file in own.items()}
    stacks |= {int(child): text for each in reports.values() for child, text in each.get("children", {}).items()}
    stacks |= _spied([pid for pid in family - stopped if _is_python(pid) and not stacks.get(pid)][:MAX_SPIED])
    stacks = {pid: text for pid, text in stacks.items() if text}
    return Collected(reports, stacks, _processes(reports, stacks, statuses, own.keys(), stopped))


def family_of(program: int) -> set[int]:
    """Return the process ids of a process and its descendants; empty if the process has ended."""
    with contextlib.suppress(psutil.Error):
        return {program, *(each.pid for each in psutil.Process(program).children(recursive=True))}
    return set()


def is_gone(status: Mapping[str, Any]) -> bool:
    """Return whether the process of a status has ended; False if it runs on another node or in another container."""
    if status["place"] != process_scope():
        return False
    try:
        return psutil.Process(status["pid"]).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def read(file: Path) -> dict[str, Any]:
    """Return a status or report; empty if the file is damaged."""
    with contextlib.suppress(Exception):
        found: dict[str, Any] = json.loads(read_text(file))
        valid = all(isinstance(found[key], kind) for key, kind in KNOWN.items())
        # Compute what later code computes, because an error there would end the watch of the program.
        json.dumps(found, allow_nan=False)
        {(each.called, each.group, each.order, each.name, each.seconds) for each in waiting(found)}
        {int(child): line_of(text) for child, text in found.get("children", {}).items()}
        return found if valid and max(found["pid"], abs(found["rank"])) < 2**31 else {}
    return {}


def request_reports(steps: Path, expected: Collection[int]) -> dict[int, dict[str, Any]]:
    """Request reports of all processes, and return them; wait at most `ANSWER` seconds for the processes `expected`."""
    begin, found = time.time(), dict[int, dict[str, Any]]()
    write_text(steps / ASK, "")

    def has_all() -> bool:
        # Clocks of nodes may differ, so the file's time counts, not the time in the report.
        new = [file for file in _files(steps, REPORT) if file.stat().st_mtime > begin - TICK]
        found.update({each["pid"]: each for file in new if (each := read(file))})
        return all(found.get(pid, {}).get("complete") for pid in expected)

    _until(has_all, ANSWER)
    return found


def _files(steps: Path, name: str) -> list[Path]:
    """Return the files NAME.HOST.PID; skip links and pipes, because another user may have created them."""
    named = [path for path in steps.glob(f"{name}.*") if re.fullmatch(r"\.\d{1,18}", path.suffix, re.ASCII)]
    return [path for path in named if path.is_file() and not path.is_symlink()]


def _after(file: Path, size: int) -> str:
    with contextlib.suppress(OSError, UserError), open(file, "rb", opener=open_regular) as stacks:
        stacks.seek(size)
        return stacks.read().decode(errors="replace")
    return ""


def _dump(pid: int) -> None:
    """Make a process write its stacks, even if the process is stopped.

    `tgkill` sends SIGQUIT to the main thread, which writes the stacks before it continues.
    """
    with contextlib.suppress(OSError):
        tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # missing before glibc 2.30
        if not tgkill or tgkill(pid, pid, signal.SIGQUIT):
            os.kill(pid, signal.SIGQUIT)
        os.kill(pid, signal.SIGCONT)


class _Dumps:
    """Files to which processes are appending their stacks, in pieces."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files, self._begin = files, [file.stat().st_size for file in files]
        self._last = self._begin

    def are_complete(self) -> bool:
        """Return whether all files have grown, but not since the last call."""
        before, self._last = self._last, [file.stat().st_size for file in self._files]
        return before == self._last and all(now > begin for now, begin in zip(self._last, self._begin, strict=True))


def _until(ready: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(0.1)


def _processes(
    reports: Mapping[int, dict[str, Any]],
    stacks: Mapping[int, str],
    statuses: Mapping[int, dict[str, Any]],
    own: Collection[int],
    stopped: Collection[int],
) -> list[Process]:
    """Return the ranks of a program; if it has none, all processes with stacks."""
    known = {**{pid: _seen(pid) for pid in own}, **statuses, **reports}
    ranks = {pid for pid, each in known.items() if each["trains"] or each["launched"]}
    found = dict[int, Process]()
    for pid, each in known.items():
        if not each["trains"] and (pid not in ranks or each["parent"] in ranks):
            continue  # a launcher, or a child of a rank
        state = STOPPED if pid in stopped else RUNNING if pid in reports else ENDED if each.get("ended") else SILENT
        state = GONE if state == SILENT and is_gone(each) else state
        now = reports.get(pid, {}).get("line") or line_of(stacks.get(pid, ""))
        last = each["line"] if state in (GONE, ENDED) else ""
        found[pid] = Process(pid, each["rank"], state, now or last, waiting(reports.get(pid, {})))
        forked = {int(child): text for child, text in reports.get(pid, {}).get("children", {}).items()}
        found[pid].workers = {child: line_of(text) for child, text in forked.items()}
        found[pid].workers |= {child: other["line"] for child, other in reports.items() if other["parent"] == pid}
        found[pid].workers |= {child: STOPPED for child in stopped if _parent(child) == pid}
    # If torchrun has restarted a rank, leave out the process that ended.
    present = {each.rank for each in found.values() if each.state not in (GONE, ENDED)}
    shown = [each for each in found.values() if each.state not in (GONE, ENDED) or each.rank not in present]
    return shown or [Process(pid, line=line_of(text)) for pid, text in stacks.items()]


def _seen(pid: int) -> dict[str, Any]:
    """Return a status for a process that wrote no status; its rank is from the launcher's variable `RANK`."""
    rank = ""
    with contextlib.suppress(psutil.Error):
        rank = psutil.Process(pid).environ().get("RANK", "")
    own = {"pid": pid, "place": process_scope(), "parent": _parent(pid), "trains": False, "line": ""}
    return {**own, "launched": bool(rank), "rank": int(rank) if rank.isdecimal() else 0}


def _parent(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return 0


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def _is_python(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return "python" in Path(psutil.Process(pid).exe()).name
    return False


def py_spy() -> str:
    """Return the path of py-spy; empty if it is not installed."""
    return shutil.which("py-spy") or shutil.which(str(Path(sys.executable).with_name("py-spy"))) or ""


def _spied(processes: Collection[int]) -> dict[int, str]:
    """Return the stacks of the processes that py-spy can read; empty without py-spy."""
    found = dict[int, str]()
    for pid in processes if py_spy() else ():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [py_spy(), "dump", "--pid", str(pid)]
            found[pid] = subprocess.run(command, capture_output=True, text=True, timeout=SPYING, check=True).stdout
    return found
