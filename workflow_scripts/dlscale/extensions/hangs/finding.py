"""Find, in the reports of a program's processes, the rank and the operation for which other ranks wait."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlscale.core.text import many
from dlscale.extensions.hangs.inside import is_start, line

#: States of a process.
RUNNING, STOPPED, SILENT = "running", "stopped by a signal", "no answer"
GONE, ENDED = "is gone: killed, or ended without Python's exit handlers", "has ended before the other processes"

_PLURALS = {"is": "are", "has": "have", "does": "do"}

#: Maximum number of a rank's child processes that a finding names.
MAX_CHILDREN = 4

#: A thread in a dump of `faulthandler`, and its frames.
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x\w+).*\n((?:  .*\n)*)", re.MULTILINE)

#: A frame of a thread; the innermost frame comes first.
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass
class Waiting:
    """Unfinished collective operation of a rank."""

    called: str  #: Name, number and line, such as `all_gather #412 at train.py:88`.
    group: str  #: Name of the process group.
    order: int  #: Number of the operation in its group.
    name: str  #: Name of the operation, such as `all_gather`.
    seconds: float  #: Time since the operation began, seconds.


@dataclass
class Process:
    """State of a program's process, from its status and its report."""

    pid: int
    rank: int | None = None  #: None if the program has no ranks.
    state: str = RUNNING
    line: str = ""  #: Line of the main thread, as `at FILE:LINE`.
    waiting: list[Waiting] = field(default_factory=list)  #: Unfinished operations, the oldest first.
    workers: dict[int, str] = field(default_factory=dict)  #: Lines or states of child processes, by process id.

    @property
    def name(self) -> str:
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank}"


def waiting(report: dict[str, Any]) -> list[Waiting]:
    """Return the unfinished operations in a report of `inside.Reporter`."""
    found = list[Waiting]()
    for entry in report.get("entries", []):
        if not entry["retired"]:
            name = entry["profiling_name"].rpartition(":")[2]
            seconds = max(0.0, report["written"] - entry["time_created_ns"] / 1e9)
            order = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
            found.append(Waiting(entry["called"], entry["process_group"][0], order, name, seconds))
    return found


def line_of(stacks: str) -> str:
    """Return the line of the main thread in dumps of `faulthandler`, as `at FILE:LINE`; empty if unknown.

    The main thread is the last thread of a dump. Only the first dump counts.
    """
    threads = _THREAD.findall(stacks)
    main = next((frames for name, frames in threads if name == threads[-1][0]), "")
    places = list[tuple[str, int]]()
    for file, row, function in _FRAME.findall(main):
        if is_start(file, function):
            break
        places.append((file, int(row)))
    return line(places)


def describe(processes: Sequence[Process]) -> str:
    """Return the state, and the line or operation, of each rank; if the program has no ranks, of each process.

    Ranks that do not wait in a collective operation come first, because other ranks may wait for them.
    """
    ranks = sorted((each for each in processes if each.rank is not None), key=lambda each: each.rank or 0)
    shown = ranks or list(processes)
    behind, stuck = _sides(shown)
    texts = defaultdict[str, list[Process]](list)
    for each in behind:
        texts[_doing(each)].append(each)
    parts = [f"{_names(group)} {text if len(group) == 1 else _plural(text)}" for text, group in texts.items()]
    waits = defaultdict[str, list[Process]](list)
    for each in stuck:
        waits[each.waiting[0].called].append(each)
    for text, group in waits.items():
        seconds = min(each.waiting[0].seconds for each in group)
        parts.append(f"{_names(group)} wait{'s' * (len(group) == 1)} in {text} for {seconds:.0f} s")
    text = "; ".join(parts)
    if behind or len(stuck) < 2:
        return text
    same = len({(each.waiting[0].group, each.waiting[0].order, each.waiting[0].name) for each in stuck}) == 1
    return f"all ranks wait in {'the same operation' if same else 'different operations'}: {text}"


def _sides(shown: Sequence[Process]) -> tuple[list[Process], list[Process]]:
    """Return the processes that do not wait in an operation (running processes last), and the processes that wait."""
    stuck = [each for each in shown if each.state == RUNNING and each.waiting]
    behind = sorted((each for each in shown if each not in stuck), key=lambda each: each.state == RUNNING)
    return behind, stuck


def _doing(process: Process) -> str:
    """Return the state and the line of a process that does not wait in an operation."""
    if process.state == STOPPED:
        text = f"is {STOPPED} {process.line}".rstrip()
    elif process.state in (GONE, ENDED):
        text = process.state + (f"; its last known line is {process.line[3:]}" if process.line else "")
    elif process.state == SILENT:
        text = f"does not answer: its code may hold Python's lock (GIL) {process.line}".rstrip()
    else:
        text = f"is {process.line or 'in a library'}"
    children = [f", its child process {pid} {place}" for pid, place in process.workers.items() if place]
    return text + "".join(children[:MAX_CHILDREN])


def _plural(text: str) -> str:
    """Return a text of `_doing` with its verb in the plural."""
    verb, _, rest = text.partition(" ")
    return f"{_PLURALS[verb]} {rest}"


def _names(group: Sequence[Process]) -> str:
    """Return the names of processes: `rank 3`, `ranks 0–2, 5`, or `process 4021`."""
    if any(each.rank is None for each in group):
        return ", ".join(each.name for each in group)
    ranks, spans = sorted({each.rank or 0 for each in group}), list[list[int]]()
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][-1:] = [rank] if len(spans[-1]) > 1 else [spans[-1][0], rank]
        else:
            spans.append([rank])
    texts = [f"{span[0]}–{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]
    shown = ", ".join(texts[:8]) + (f" and {many(len(texts) - 8, 'more span')}" if len(texts) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
