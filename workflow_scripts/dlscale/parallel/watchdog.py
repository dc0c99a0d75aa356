"""Find the rank that all other ranks wait for, and end the run with a message that names this rank.

A thread of each rank writes a heartbeat to a store every second. Rank 0 judges all ranks, and rank 1 judges rank 0. The
heartbeats of ranks 0 and 1 contain the verdict, and each rank that reads a verdict ends. Each rank measures time by
counting its own heartbeats, so time while the process is stopped does not count.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dlscale.config.site import Limits
from dlscale.core import progress, ranges, registry
from dlscale.core.errors import PeerLost, brief
from dlscale.core.process import LOST, MEET, end
from dlscale.parallel.world import BACKGROUND

BEAT = 1.0  #: Seconds between two heartbeats.
#: Timeout of a range of a step (`core.ranges`), as a multiple of the longest recent range; at least `Limits.stuck` s.
MAX_RANGE_RATIO = 10.0
WINDOW = 200  #: Number of recent ranges, of which `MAX_RANGE_RATIO` uses the longest.
#: Longest timeout while data are opened, unless `Limits.between` is longer. Also the minimum timeout if no rank is
#: behind, except if all ranks wait, but not all in the same operation.
GRACE_SECONDS = 1800.0
REHEARSAL = 120.0  #: Seconds allowed without progress in the self-test, which may open thousands of connections.
CONNECT = 300.0  #: Timeout of a connection to the store, seconds; thousands of processes connect at once.
ANSWER = 25.0  #: Timeout of a request to the store, seconds.
NAMED = 60.0  #: Seconds of waiting after which the log names the awaited ranks, if the timeout is longer.

#: Phrases in libraries' error messages that indicate that another rank is gone.
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "gloo/transport")

_stores: Any = dist  # PyTorch defines the stores at run time only

#: States of a process, as seen by the ranks of its node.
THERE = "still running"
STOPPED = "stopped by a signal"
ENDED = "gone: killed, or ended by itself"
UNSEEN = "killed or stopped, or its node or network is gone, or its code holds Python's lock (GIL)"


class Heartbeat(NamedTuple):
    """Heartbeat of a rank."""

    number: int = 0
    host: str = ""
    place: str = ""  #: Host and PID namespace, within which `process` is meaningful.
    process: int = 0  #: Process number (PID).
    entered: int = 0  #: Number of ranges entered, plus number of parts of the run entered or left.
    range: str = ""  #: Name of the current range or part.
    kind: str = ranges.OPENING  #: Kind of the current work, which decides the timeout.
    exchanges: int = 0  #: Number of exchanges begun, without `background`.
    background: int = 0  #: Number of exchanges begun by the thread that writes checkpoints.
    #: Seconds since `entered`, `exchanges` or `background` changed, or since an update of a `Progress`.
    age: float = 0.0
    longest: float = 0.0  #: Duration of the longest recent range in steps, s.
    sees: dict[str, str] = {}  #: States of the other processes of the rank's node, by rank.
    failed: str = ""  #: Reason why this rank ends.
    verdict: str = ""  #: Reason why all ranks end.
    line: str = ""  #: Operation or line at which the rank waits; empty while it makes progress.


class Files:
    """Key-value store with one file per key, without locks, because a stopped process might hold a lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def set(self, key: str, value: str) -> None:
        file = os.open(self._folder / key, os.O_CREAT | os.O_WRONLY, 0o600)
        os.pwrite(file, value.encode().ljust(8192), 0)  # overwrites the file, which also works on a full disk
        os.close(file)

    def check(self, keys: Sequence[str]) -> bool:
        return all((self._folder / key).exists() for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [(self._folder / key).read_bytes() for key in keys]


def connect() -> Any:
    """Open a second connection to the store through which the ranks met."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = _stores.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT))
    except dist.DistError as error:
        raise PeerLost(
            f"the store of the processes, {address}:{port}, accepted no connection in {CONNECT:.0f} s "
            f"({brief(error)}). This process also ends"
        ) from error
    store.set_timeout(timedelta(seconds=ANSWER))
    return _stores.PrefixStore("watchdog", store)


class Watchdog:
    """Watchdog over a run's ranks, from construction until `close`; every rank must construct a watchdog."""

    def __init__(self, rank: int = 0, size: int = 1, per_node: int = 1, limits: Limits | None = None) -> None:
        """Start watching; `per_node` is the number of ranks per node; the ranks of a node are consecutive.

        Without `limits`, only a failed exchange ends the run.
        """
        self.rank, self.size, self.limits, self._judges = rank, size, limits or Limits(), limits is not None
        meet, first = os.environ.get(MEET), rank - rank % per_node
        self._store = _stores.HashStore() if size == 1 else Files(Path(f"{meet}.watchdog")) if meet else connect()
        self._holder = (
            f"the folder {meet}.watchdog, through which the processes of this node watch each other," if meet else ""
        )
        self._mates = [other for other in range(first, min(first + per_node, size)) if other != rank]
        self._known = (
            range(size) if rank == 0 else sorted({0, 1, *self._mates})
        )  #: ranks from which this rank reads heartbeats
        #: Last heartbeat of each rank, and seconds since that heartbeat, both by rank.
        self._seen, self._quiet = [Heartbeat()] * size, [0.0] * size
        self._heartbeat = Heartbeat(0, socket.gethostname().split(".")[0], progress.place(), os.getpid())
        self._unanswered = 0.0  #: seconds without an answer from the store
        self._named: list[int] = []  #: awaited ranks that the log has already named
        self._closed = threading.Event()
        self._show()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._beat, self._await_answer)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop watching, because a thread that uses the store while Python exits would abort the process."""
        self._closed.set()
        for thread in self._threads:
            thread.join(ANSWER)

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks why this rank ends."""
        with contextlib.suppress(Exception):
            self._show(failed=f"{type(error).__name__}: {brief(error)}")

    def describe_lost_rank(self, error: BaseException, seconds: float = 8.0) -> str:
        """Return a text that names the rank that was lost in a failed exchange.

        Wait up to `seconds` until heartbeats show the lost rank. If they do not, the text contains `error`.
        """
        self._known = range(self.size)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(BEAT / 2)
            if self._unanswered > 3 * BEAT:
                return f"{self._name(0)} ended: it hosted the store through which the processes met"
            if gone := self._silence([each for each in range(self.size) if each != self.rank], 3 * BEAT, 3 * BEAT):
                return gone
        return f"another process ended: {brief(error)}"

    # ---- heartbeats ------------------------------------------------------------------------------

    def _show(self, **changes: Any) -> None:
        self._heartbeat = self._heartbeat._replace(number=self._heartbeat.number + 1, **changes)
        self._store.set(f"sign-{self.rank}", json.dumps(self._heartbeat))

    def _look(self) -> None:
        """Read the heartbeats of other ranks once all exist, because thousands of processes take time to start."""
        known = list(self._known)
        keys = [f"sign-{rank}" for rank in known]
        for rank, text in zip(known, self._store.multi_get(keys), strict=True) if self._store.check(keys) else ():
            sign = Heartbeat(*json.loads(text))
            self._quiet[rank] = self._quiet[rank] + BEAT if sign == self._seen[rank] else 0.0
            self._seen[rank] = sign

    def _beat(self) -> None:
        place, age, longest, steps = (0, 0, 0, 0), 0.0, deque([0.0], WINDOW), False
        while not self._closed.wait(BEAT):
            come, kind = (ranges.entered, *_exchanges(), progress.Progress.updates), ranges.kind()
            if come != place:
                if steps:
                    longest.append(age)
                place, age, steps = come, 0.0, True
            age, steps = age + BEAT, steps and kind == ranges.STEPS  # `steps`: all of this range was in steps
            mates = {rank: self._seen[rank] for rank in self._mates}
            sees = {
                str(rank): state(sign.process) for rank, sign in mates.items() if sign.place == self._heartbeat.place
            }
            # Updates of `Progress` are left out, because they differ between ranks.
            at = dict(zip(("entered", "exchanges", "background"), come, strict=False))
            try:
                line = provided_text("waiting_place") if age > 3 * BEAT else ""
                self._show(**at, range=ranges.at, kind=kind, age=age, longest=max(longest), sees=sees, line=line)
                self._look()
                self._unanswered = 0.0
                if self._judges:
                    self._judge()
            except Exception as error:  # if the store stays silent, `_await_answer` ends the process
                logging.info("watchdog: the store does not answer: %s", brief(error))

    def _judge(self) -> None:
        """End this process if the heartbeat of rank 0 or 1 contains a verdict.

        Otherwise rank 0 judges all ranks, and rank 1 judges rank 0. Their next heartbeats contain the verdict.
        """
        if verdict := "".join(sign.verdict for sign in self._seen[:2]):
            # Rank 0 may host the store, so it ends later: the other ranks still have to read the verdict there.
            time.sleep(2 * BEAT if self.rank == 0 else 0)
            self._end(verdict)
        if self.rank < 2:
            self._heartbeat = self._heartbeat._replace(verdict=self._verdict())

    def _await_answer(self) -> None:
        while not self._closed.wait(BEAT):
            self._unanswered += BEAT
            if self._judges and self._unanswered > self.limits.silent:
                holder, silent = self._holder or self._name(0), f"{self.limits.silent:.0f} s"
                self._end(f"{holder} has not answered for {silent}: stopped, gone or unreachable")

    # ---- judgement -------------------------------------------------------------------------------

    def _verdict(self) -> str:
        judged = range(self.size) if self.rank == 0 else [0]
        silence = self._silence(judged, self.limits.silent, max(self.limits.silent, self.limits.stuck))
        return silence if silence or self.rank else self._behind()

    def _silence(self, ranks: Iterable[int], gone: float, unseen: float) -> str:
        """Return a text that names ranks without a heartbeat for longer than their states allow, or "".

        The limits are `gone` seconds for an ended or stopped process, `unseen` seconds for an unknown state, and the
        limit of the current range, at least `gone`, for a running process. A rank that reported why it ends is named
        alone, with this reason, after `gone` seconds.
        """
        silent = dict[int, str]()
        for rank in ranks:
            if self._quiet[rank] > gone:
                if self._seen[rank].failed:  # this rank reported why it ends
                    return f"{self._name(rank)} ended: {self._seen[rank].failed}"
                status = self._state(rank)
                allowed = self._limit([rank]) if status == THERE else unseen if status == UNSEEN else gone
                if self._quiet[rank] > allowed:
                    silent[rank] = f"{self._place(rank)}: {status}"
        names = ", ".join([*silent.values()][:8])
        return f"no heartbeat for {min(self._quiet[rank] for rank in silent):.0f} s from {names}" if silent else ""

    def _behind(self) -> str:
        """Return a text that names the ranks for which all other ranks have waited too long, or "".

        If no rank is behind, the text reports that all ranks have been without progress for too long.
        """
        # Within one range, the rank with more exchanges is ahead; while saving, background exchanges also count.
        places = [(s.entered, s.exchanges, s.background if s.range == ranges.SAVING else 0) for s in self._seen]
        behind = [rank for rank, place in enumerate(places) if place == min(places)]
        limit, names = self._limit(behind), ", ".join(map(self._place, behind[:8]))
        waited = min(quiet + sign.age for quiet, sign in zip(self._quiet, self._seen, strict=True))
        if len(behind) == self.size:  # all ranks compute, or wait for the network or the file system
            verdict = f"all processes have waited for {limit:.0f} s in different operations: {names}"
            if len({s.line for s in self._seen}) == 1 or not all("#" in s.line for s in self._seen):
                limit = max(limit, GRACE_SECONDS)
                verdict = f"no process has made progress for {limit:.0f} s, and none is behind the others: {names}"
            return verdict if waited > limit else ""
        if NAMED < waited <= limit and behind != self._named:
            self._named = behind
            logging.warning(
                "all other processes have waited for %.0f s for %s; the run ends after %.0f s", waited, names, limit
            )
        others = next((f" in {s.line}" for rank, s in enumerate(self._seen) if s.line and rank not in behind), "")
        return f"all other processes have waited for {limit:.0f} s{others} for {names}" if waited > limit else ""

    def _limit(self, ranks: Iterable[int]) -> float:
        """Return the longest timeout, seconds, among the timeouts for the current work of these ranks."""
        seconds = {
            ranges.STEPS: max(self.limits.stuck, MAX_RANGE_RATIO * max(seen.longest for seen in self._seen)),
            ranges.BETWEEN: self.limits.between,
            ranges.REHEARSAL: REHEARSAL,
            ranges.OPENING: max(self.limits.between, min(GRACE_SECONDS, 3 * self.limits.between)),
        }
        return max(seconds[self._seen[rank].kind] for rank in ranks)

    def _state(self, rank: int) -> str:
        """Return the state of a rank's process, as reported by another rank of its node in a recent heartbeat.

        Without such a report the state is `UNSEEN`.
        """
        return next(
            (
                status
                for sign, quiet in zip(self._seen, self._quiet, strict=True)
                if quiet <= 5 * BEAT and (status := sign.sees.get(str(rank)))
            ),
            UNSEEN,
        )

    def _name(self, rank: int) -> str:
        host = self._seen[rank].host
        return f"process {rank} on {host}" if host else f"process {rank}"

    def _place(self, rank: int) -> str:
        sign = self._seen[rank]
        return f"{self._name(rank)} ({' '.join(filter(None, [sign.range or sign.kind, sign.line]))})"

    def _end(self, verdict: str) -> None:
        if self._closed.is_set():
            return
        stopped = [self._seen[int(rank)].process for rank, status in self._heartbeat.sees.items() if status == STOPPED]
        for number, seconds in ((signal.SIGCONT, 3 * BEAT), (signal.SIGKILL, 0.0)) if stopped else ():
            for process in stopped:  # a continued process reads the verdict, and logs its stacks before it ends
                with contextlib.suppress(OSError):
                    os.kill(process, number)
            time.sleep(seconds)
        logging.error("%s", provided_text("stacks"))
        end(f"{verdict}. This process also ends", LOST)


def provided_text(name: str) -> str:
    """Return the text of a function that an extension provides; empty if the function is missing or fails.

    A failure must neither stop the heartbeats nor prevent the end of this process.
    """
    with contextlib.suppress(Exception):
        return str(registry.provided(name, str)())
    return ""


def _exchanges() -> tuple[int, int]:
    """Return how many exchanges this rank has begun outside and inside the thread that writes checkpoints."""
    begun = [
        (group.group_desc == BACKGROUND, group._get_sequence_number_for_group())
        for group in list[Any](distributed_c10d._world.pg_map)
    ]
    own, others = (sum(count for background, count in begun if background == kind) for kind in (False, True))
    return own, others


def state(process: int) -> str:
    """Return the state of the process `process` (PID) of this node (proc(5))."""
    try:
        letter = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ENDED
    return {"T": STOPPED, "t": STOPPED, "Z": ENDED, "X": ENDED}.get(letter, THERE)


def is_gone(error: BaseException) -> bool:
    """Return whether an exception means that another rank is gone.

    An `OSError` does not mean this, because a loader or a tracker may also raise an `OSError`.
    """
    return not isinstance(error, OSError) and (
        isinstance(error, dist.DistError) or any(words in str(error) for words in _GONE)
    )
