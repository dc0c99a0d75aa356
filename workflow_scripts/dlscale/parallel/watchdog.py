"""Who is it that all others wait for? Each rank shows signs of life, and the first one looks at them.

A rank that dies leaves the others in an exchange that ends by an error at once, or never; one that hangs, or that the
system stopped, leaves them there for good. Two threads of each rank prevent that: one tells a store, every second, how
far its rank has come, and one ends the process, with the culprit's name, when the first rank has found who it is:

- a rank that shows no sign of life was killed, stopped, or has lost its network, unless a rank beside it, which sees
  its process, says that it is there: code that holds Python's lock (GIL) lets no thread of its process show anything;
- where no rank gets any further for a time that none of them ever needed, the culprit is the one that is behind.

The store is files beside that by which the ranks of a node met, else that through which they met: in the first rank's
process. If it does not answer, the culprit is that one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dlscale.config.site import Limits
from dlscale.core import ending, ranges
from dlscale.core.errors import PeerLost, brief
from dlscale.core.ranks import MEET
from dlscale.parallel.world import BESIDE

BEAT = 1.0  #: Seconds between two signs of life.
LONGER = 10.0  #: A range of a step may take so many times the longest
WINDOW = 1000  #: of so many ranges before it, if that is more than `Limits.stuck`.
GRACE = 1800.0  #: Seconds without progress where anything may take long, or where nobody is behind.
REHEARSAL = 120.0  #: Seconds without progress in the self-test, which may have to open thousands of connections.
CONNECT = 300.0  #: Seconds until the store has taken up a connection: thousands of processes ask for one at once.
ANSWER = 25.0  #: Seconds until it answers.
TOLD = 60.0  #: Seconds of waiting after which the log says for whom, where more are allowed.


#: How libraries say that another rank has gone.
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "gloo/transport")

#: What a rank says of the process of one beside it, and what became of that in words.
THERE, STOPPED, ENDED, UNSEEN = "there", "stopped", "gone", ""
_FATES = {
    STOPPED: "stopped by a signal",
    ENDED: "its process is gone: killed, or ended by itself",
    UNSEEN: "killed or stopped, or its node is gone, or it runs code that holds Python's lock",
}


@dataclass
class _Seen:
    """What is known of a rank."""

    sign: str = ""
    at: float = 0.0  #: When it last changed, by this process's clock.
    entered: int = 0  #: Ranges and parts that it has entered or left.
    range: str = ""  #: The one that it is in,
    kind: str = ranges.OPENING  #: and of which kind that is.
    exchanges: int = 0  #: That it has begun,
    beside: int = 0  #: and those of its thread.
    age: float = 0.0  #: Seconds since any of these numbers changed.
    longest: float = 0.0  #: That it took of late, in steps.
    beside_it: dict[str, str] = field(default_factory=dict)  #: What it says of the ranks that it sees.


class Files:
    """A store in a folder, of a file a key: no process that was stopped holds a lock of it, and it does not grow.

    On a full disk a value is written over the one before it, whose place it has.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def set(self, key: str, value: str) -> None:
        new = self._file(f"{key}.{os.getpid()}")
        try:
            new.write_text(value)
            new.replace(self._file(key))
        except OSError:
            new.unlink(missing_ok=True)
            with self._file(key).open("r+") as file:
                file.write(value.ljust(self._file(key).stat().st_size))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        return self._file(key).read_bytes()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def _file(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


def connect(name: str) -> Any:
    """Return a connection of its own to the store through which the ranks met; its keys are those of `name`."""
    stores: Any = dist  # which names them at run time only
    if MEET in os.environ:
        return prefixed(stores.FileStore(os.environ[MEET]), name)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = stores.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT))
    except dist.DistError as error:
        raise PeerLost(
            f"{address}:{port}, where the processes met, took up no connection in {CONNECT:.0f} s ({brief(error)}); "
            "this process ends with it"
        ) from error
    store.set_timeout(timedelta(seconds=ANSWER))
    return prefixed(store, name)


def prefixed(store: Any, name: str) -> Any:
    """Return a store whose keys are those of `name` in another one."""
    stores: Any = dist
    return stores.PrefixStore(name, store)


class Watchdog:
    """Watches over the ranks of a run from its construction until `close`; all of them make one together."""

    def __init__(self, rank: int, size: int, per_node: int = 1, limits: Limits | None = None) -> None:
        """`per_node` consecutive ranks share a node. Without limits nothing ends but what an exchange ends."""
        self.rank, self.size, self.limits = rank, size, limits or Limits()
        meet = os.environ.get(MEET)
        self._store = Files(Path(f"{meet}.watchdog")) if meet else connect("watchdog")
        self._folder = meet and f"the folder {meet}.watchdog, by which the processes of this node know of each other,"
        self._hosts: dict[int, str] = {}
        self._store.set(f"place/{rank}", json.dumps([*_place(), os.getpid()]))
        first = rank - rank % per_node
        self._beside = [other for other in range(first, min(first + per_node, size)) if other != rank]
        self._awaited: tuple[int, ...] = ()  # what of them the log has said last
        self._processes: dict[int, psutil.Process | None] | None = None  # of those that share the node; not yet known
        # The first rank looks at all; the others look at the first, and at the second, which may see it.
        self._known = range(size) if rank == 0 else range(min(2, size))
        self._sign(0, 0.0, 0.0)
        self._closed = threading.Event()
        self._answered = time.monotonic()
        self._seen = [_Seen(at=time.monotonic()) for _ in range(size)]
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in ([self._beat, self._judge] if limits else [self._beat])
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Watch no longer: a thread that is inside the store when Python ends would abort the process."""
        self._closed.set()
        for thread in self._threads:
            thread.join(ANSWER)

    def tell(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        with contextlib.suppress(Exception):
            self._store.set(f"failed/{self.rank}", f"{type(error).__name__}: {brief(error)}")

    def culprit(self, error: BaseException, seconds: float = 6.0) -> str:
        """Return who has gone, after an exchange that failed; it may take a moment to be seen."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                for rank in range(self.size):
                    if rank != self.rank and self._store.check([f"failed/{rank}"]):
                        return f"{self._name(rank)} ended: {self._store.get(f'failed/{rank}').decode()}"
                self._look(range(self.size))
            except Exception:
                return f"{self._name(0)} ended: it held what the others met by"
            now = time.monotonic()
            silent = [rank for rank, seen in enumerate(self._seen) if now - seen.at > 3 * BEAT]
            silent = [rank for rank in silent if self._fate(rank, now) != THERE]
            if silent and silent != [self.rank]:
                return f"{self._name(silent[0])} ended without a word: killed, or its node is gone"
            time.sleep(BEAT / 2)
        return f"another process ended: {brief(error)}"

    # ---- signs of life ---------------------------------------------------------------------------

    def _sign(self, number: int, age: float, longest: float) -> None:
        place = [ranges.entered, ranges.at, ranges.kind(), *_exchanges(), self._look_beside()]
        self._store.set(f"sign/{self.rank}", json.dumps([number, *place, round(age, 1), round(longest, 1)]))

    def _beat(self) -> None:
        number, place, since, longest, silent = 0, (ranges.entered, 0, 0), time.monotonic(), Longest(), False
        usual = False  # whether that range was one of many
        while not self._closed.wait(BEAT):
            now = time.monotonic()
            number += 1
            try:
                if (come := (ranges.entered, *_exchanges())) != place:
                    if usual and ranges.kind() == ranges.STEPS:
                        longest.add(place[0], now - since)
                    place, since, usual = come, now, True
                usual = usual and ranges.kind() == ranges.STEPS
                self._sign(number, now - since, longest.before(place[0]))
                if self._store.check(["verdict"]):
                    self._end(self._store.get("verdict").decode())
                self._look(self._known)
            except Exception as error:  # _judge counts the time
                if not silent:
                    logging.info("watchdog: no answer: %s", brief(error))
                silent = True
                continue
            silent, self._answered = False, time.monotonic()

    def _look(self, known: range) -> None:
        """Take in what these ranks, from the first on, have shown."""
        keys = [f"sign/{rank}" for rank in known]
        if not self._store.check(keys):
            return
        if len(self._hosts) < len(known):
            self._hosts |= {rank: host for rank, (host, *_) in self._places(known).items()}
        now = time.monotonic()
        for rank, value in zip(known, self._store.multi_get(keys), strict=True):
            seen, sign = self._seen[rank], value.decode()
            if sign != seen.sign:
                _, seen.entered, seen.range, seen.kind, seen.exchanges, seen.beside, *more = json.loads(sign)
                seen.beside_it, seen.age, seen.longest = more
                seen.sign, seen.at = sign, now

    def _places(self, ranks: Sequence[int]) -> dict[int, list[Any]]:
        """Return where ranks are: host, numbering of processes, number; nothing as long as one has not said."""
        keys = [f"place/{rank}" for rank in ranks]
        if not (keys and self._store.check(keys)):
            return {}
        return dict(zip(ranks, map(json.loads, self._store.multi_get(keys)), strict=True))

    def _look_beside(self) -> dict[int, str]:
        """Return what became of the processes of the ranks beside this one, of those that it sees."""
        if self._processes is None and (places := self._places(self._beside)):
            self._processes = {rank: _process(number) for rank, (*place, number) in places.items() if place == _place()}
        return {rank: _fate(process) for rank, process in (self._processes or {}).items()}

    # ---- judgement -------------------------------------------------------------------------------

    def _judge(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(BEAT):
            now = time.monotonic()
            if now - last > 5 * BEAT:  # this process itself was stopped: what it knows is of then
                self._answered = now
                for seen in self._seen:
                    seen.at = now
            last = now
            if now - self._answered > self.limits.silent:
                silent = f"{self.limits.silent:.0f} s"
                holder = self._folder or self._name(0)
                self._end(f"{holder} has not answered for {silent}: it, or its node, is stopped or gone")
            if verdict := self._verdict(now) if self.rank == 0 else self._verdict_on_first(now):
                with contextlib.suppress(Exception):
                    self._store.set("verdict", verdict)
                time.sleep(2 * BEAT)  # in its process the store may live, which the others are to ask
                self._end(verdict)

    def _verdict(self, now: float) -> str | None:
        """Return who is to blame for what; None if nobody is, as far as one sees."""
        if silence := self._silence(now, range(self.size)):
            return silence
        # Of those in one range, who takes part in a further exchange is ahead; of those who wait for what their threads
        # write, whose thread does.
        places = [
            (seen.entered, seen.exchanges, seen.beside if seen.range == ranges.SAVING else 0) for seen in self._seen
        ]
        culprits = [rank for rank, place in enumerate(places) if place == min(places)]
        limit = self._limit(culprits)
        if len(culprits) == self.size:
            limit = max(limit, GRACE)  # all compute, or wait for their network or file system
        waited = min(now - seen.at + seen.age for seen in self._seen)
        if waited <= limit:
            self._tell(culprits if waited > TOLD and len(culprits) < self.size else [], waited, limit)
            return None
        if len(culprits) == self.size:
            return f"no process has got any further for {limit:.0f} s, and none is behind the others"
        return f"all have waited for {limit:.0f} s for {self._places_of(culprits)}"

    def _places_of(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"{self._name(rank)} ({self._seen[rank].range})" for rank in ranks[:8])

    def _tell(self, ranks: Sequence[int], waited: float, limit: float) -> None:
        """Log once for whom all others wait, and until when they will."""
        if ranks and tuple(ranks) != self._awaited:
            places = self._places_of(ranks)
            logging.warning("all have waited for %.0f s for %s; the run ends after %.0f s", waited, places, limit)
        self._awaited = tuple(ranks)

    def _verdict_on_first(self, now: float) -> str | None:
        """Return what the others find of the first rank, which then may find nothing itself."""
        first, limit = self._seen[0], max(self.limits.silent, self._limit([0]))
        if silence := self._silence(now, range(1)):
            return silence
        if now - first.at <= limit:
            return None
        return f"{self._name(0)} ({first.range}) is there, but has shown no sign of life for {limit:.0f} s"

    def _limit(self, ranks: Iterable[int]) -> float:
        """Return the seconds that all of these ranks may take for what they are at."""
        seconds = {
            ranges.STEPS: max(self.limits.stuck, LONGER * max(seen.longest for seen in self._seen)),
            ranges.BETWEEN: self.limits.between,
            ranges.REHEARSAL: REHEARSAL,
            ranges.OPENING: GRACE,
        }
        return max(seconds[self._seen[rank].kind] for rank in ranks)

    def _silence(self, now: float, ranks: Iterable[int]) -> str | None:
        """Return which of these ranks show no sign of life, and are not there any more as far as one sees."""
        limits = {
            STOPPED: self.limits.silent,
            ENDED: self.limits.silent,
            UNSEEN: max(self.limits.silent, self.limits.stuck),
        }
        silent = [rank for rank in ranks if now - self._seen[rank].at > self.limits.silent]
        fates = {rank: self._fate(rank, now) for rank in silent}
        fates = {
            rank: fate for rank, fate in fates.items() if fate != THERE and now - self._seen[rank].at > limits[fate]
        }
        if not fates:
            return None
        with contextlib.suppress(Exception):
            for rank in fates:  # it has said why, and could not end before the others
                if self._store.check([f"failed/{rank}"]):
                    return f"{self._name(rank)} ended: {self._store.get(f'failed/{rank}').decode()}"
        names = ", ".join(f"{self._name(rank)} ({_FATES[fate]})" for rank, fate in [*fates.items()][:8])
        return f"no sign of life for {max(limits[fate] for fate in fates.values()):.0f} s: {names}"

    def _fate(self, rank: int, now: float) -> str:
        """Return what those who see a rank's process, and showed a sign just now, say of it."""
        fresh = (seen for seen in self._seen if now - seen.at <= 5 * BEAT)
        return next((fate for seen in fresh if (fate := seen.beside_it.get(str(rank)))), UNSEEN)

    def _name(self, rank: int) -> str:
        return f"process {rank}" + (f" on {self._hosts[rank]}" if rank in self._hosts else "")

    def _end(self, verdict: str) -> None:
        if not self._closed.is_set():
            for process in (self._processes or {}).values():
                if process and _fate(process) == STOPPED:  # it hears no other request to end
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            ending.end(f"{verdict}. This process ends with it", ending.LOST)


class Longest:
    """The longest of the last `WINDOW` ranges."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, float]] = []

    def add(self, number: int, seconds: float) -> None:
        """Note how long range `number` took."""
        self._taken.append((number, seconds))

    def before(self, number: int) -> float:
        """Return the longest of those before range `number`, in seconds."""
        self._taken = [(each, seconds) for each, seconds in self._taken if number - each <= WINDOW]
        return max((seconds for _, seconds in self._taken), default=0.0)


def _exchanges() -> tuple[int, int]:
    """Return how many exchanges this rank has begun: in the groups of its steps, as many on all ranks; and beside."""
    steps, beside = 0, 0
    for group in list[Any](distributed_c10d._world.pg_map):
        if group.group_desc == BESIDE:
            beside += group._get_sequence_number_for_group()
        else:
            steps += group._get_sequence_number_for_group()
    return steps, beside


def _place() -> list[str]:
    """Return the host, and what numbers its processes: those of a container may have numbers of their own."""
    numbering = ""
    with contextlib.suppress(OSError):
        numbering = str(Path("/proc/self/ns/pid").readlink())
    return [socket.gethostname().split(".")[0], numbering]


def _process(number: int) -> psutil.Process | None:
    """Return a process by its number; None if there is none."""
    try:
        return psutil.Process(number)
    except psutil.Error:
        return None


def _fate(process: psutil.Process | None) -> str:
    """Return what became of a process."""
    try:
        if process is None or not process.is_running():
            return ENDED
        state = process.status()
    except psutil.NoSuchProcess:
        return ENDED
    except psutil.Error:
        return UNSEEN
    if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return ENDED
    return STOPPED if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else THERE


def is_gone(error: BaseException) -> bool:
    """Whether an exception says that another rank has gone."""
    if isinstance(error, OSError):  # a loader's, a tracker's
        return False
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _GONE)
