"""What a process and all its descendants use, from Linux's /proc; imports little, for a watcher is to be small."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_LISTED = Path("/proc/thread-self/children").exists()  # else every process of the machine has to be looked at


class Used(NamedTuple):
    """What a tree of processes has used since it began, and what it holds."""

    cpu_seconds: float
    read_chars: (
        int  #: Bytes that system calls asked to read, be it of files in memory or of pipes; not of mapped files.
    )
    reads: int  #: System calls that read.
    read_bytes: int  #: Fetched from disks, be it by a read or by touching a mapped file.
    write_chars: int
    write_bytes: int  #: Sent to disks.
    rss: int  #: Bytes in memory now; what processes share counts in each.
    swap: int  #: Bytes in swap now.


def tree(root: int, without: Collection[int] = ()) -> list[int]:
    """Return `root` and all its descendants but those in `without`, each after its parent."""
    children = None if _LISTED else _all_children()
    found = [root]
    for pid in found:  # which grows
        found += [
            child for child in (_children(pid) if children is None else children.get(pid, ())) if child not in without
        ]
    return found


def used(root: int, without: Collection[int] = (), tries: int = 50) -> Used:
    """Return what the tree of `root` has used; a `FileNotFoundError` if there is no such process.

    What ended and was waited for is in its parent's counters of children. Parents are read before their children:
    a child that ends meanwhile is counted in neither, and all is read again. Where some end all the time, the last try
    leaves them out.
    """
    while True:
        tries -= 1
        found = []
        for pid in tree(root, without):
            try:
                found.append(_used(pid))
            except (FileNotFoundError, ProcessLookupError):
                if pid == root:
                    raise FileNotFoundError(f"process {root}") from None
                if tries > 0:
                    break
        else:
            return Used(*map(sum, zip(*found, strict=True)))


def ranks_seen(root: int, rank: int) -> int:
    """Return how many children of `root` run the command of `rank`: those of containers of their own are not seen."""
    command = Path(f"/proc/{rank}/cmdline").read_bytes()
    count = 0
    for pid in _children(root) if _LISTED else _all_children().get(root, ()):
        with contextlib.suppress(OSError):
            count += Path(f"/proc/{pid}/cmdline").read_bytes() == command
    return count


def _stat(process: str) -> list[str]:
    """Return a process's or thread's status from its third field on: what comes before may hold blanks."""
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _numbers(path: str) -> Iterator[tuple[str, int]]:
    """Yield the names and numbers of a file with lines `name: number`, and those with further words (kB)."""
    with open(path) as file:
        for line in file:
            name, _, value = line.partition(":")
            number = value.split(maxsplit=1)[:1]
            if number and number[0].isdecimal():
                yield name, int(number[0])


def _used(pid: int) -> Used:
    stat = _stat(str(pid))
    io: dict[str, int] = {}
    with contextlib.suppress(PermissionError):  # another user's, such as Slurm's process above the ranks
        io = dict(_numbers(f"/proc/{pid}/io"))
    memory = dict(_numbers(f"/proc/{pid}/status"))
    keys = ("rchar", "syscr", "read_bytes", "wchar", "write_bytes")
    return Used(
        sum(map(int, stat[11:15])) / _TICKS,  # fields 14 to 17: user, system, and both of children waited for
        *(io.get(key, 0) for key in keys),
        *(1024 * memory.get(key, 0) for key in ("VmRSS", "VmSwap")),
    )


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _all_children() -> dict[int, list[int]]:
    """Return the children of every process of the machine."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal():
            with contextlib.suppress(OSError):
                found.setdefault(int(_stat(name)[1]), []).append(int(name))
    return found
