"""Who is it that all others wait for? Each rank shows signs of life, and the first one looks at them.

A rank that dies leaves the others in an exchange that ends by an error at once, or never; one that hangs, or that the
system stopped, leaves them there for good. Two threads of each rank prevent that: one tells a store, every second, how
far its rank has come, and one ends the process, with the culprit's name, when the first rank has found who it is:

- a rank that shows no sign of life for `SILENT` seconds was killed, stopped, or has lost its network;
- where no rank gets any further for a time that none of them ever needed, the culprit is the one that is behind.

The store is that through which the ranks met: in the first rank's process, or in torchrun's. If it does not answer, the
culprit is that one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dlscale.core import ending, ranges
from dlscale.core.errors import brief

BEAT = 1.0  #: Seconds between two signs of life.
SILENT = 25.0  #: Seconds without one after which a rank is given up: many times what a busy machine takes.
STUCK = 45.0  #: Seconds without progress of any rank, at least, after which one of them hangs,
LONGER = 10.0  #: and times of the longest that any range of a step has taken.
GRACE = 1800.0  #: Seconds without progress before and between loops of steps: data are opened, code is compiled.
FIRST = 8  #: Ranges of a step that are to be done until that ends.
REHEARSAL = 120.0  #: Seconds without progress in the self-test, which may have to open thousands of connections.

#: Description of a group in which a thread of a rank exchanges beside its steps: how far it is says nothing of them.
BESIDE = "beside"

#: How libraries say that another rank has gone.
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "gloo/transport")


@dataclass
class _Seen:
    """What is known of a rank."""

    sign: str = ""
    at: float = 0.0  #: When it last changed, by this process's clock.
    entered: int = 0  #: Ranges that it has entered.
    range: str = ""  #: The last one.
    looping: bool = False  #: Whether it is in a loop of steps.
    patient: bool = False  #: Whether what it does there may take long.
    exchanges: int = 0  #: That it has begun.
    age: float = 0.0  #: Seconds since then.
    longest: float = 0.0  #: That it was in any one.


def connect(name: str) -> Any:
    """Return a connection of its own to the store through which the ranks met; its keys are those of `name`."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    stores: Any = dist  # which names them at run time only
    return prefixed(stores.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=SILENT)), name)


def prefixed(store: Any, name: str) -> Any:
    """Return a store whose keys are those of `name` in another one."""
    stores: Any = dist
    return stores.PrefixStore(name, store)


class Watchdog:
    """Watches over the ranks of a run from its construction until `close`; all of them make one together."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = connect("watchdog")
        self._hosts: dict[int, str] = {}
        self._store.set(f"host/{rank}", socket.gethostname().split(".")[0])
        self._sign(0, 0.0, 0.0)
        self._closed = threading.Event()
        self._answered = time.monotonic()
        self._seen = [_Seen(at=time.monotonic()) for _ in range(size)]
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in (self._beat, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closed.set()

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
                self._look(self.size)
            except Exception:
                return f"{self._name(0)} ended: it held what the others met by"
            silent = [rank for rank, seen in enumerate(self._seen) if time.monotonic() - seen.at > 3 * BEAT]
            if silent and silent != [self.rank]:
                return f"{self._name(silent[0])} ended without a word: killed, or its node is gone"
            time.sleep(BEAT / 2)
        return f"another process ended: {brief(error)}"

    # ---- signs of life ---------------------------------------------------------------------------

    def _sign(self, number: int, age: float, longest: float) -> None:
        place = [ranges.entered, ranges.at, bool(ranges.loops), bool(ranges.patient), _exchanges()]
        sign = [number, *place, round(age, 1), round(longest, 1)]
        self._store.set(f"sign/{self.rank}", json.dumps(sign))

    def _beat(self) -> None:
        number, entered, since, longest, silent = 0, ranges.entered, time.monotonic(), 0.0, False
        usual = False  # whether that range was one of many
        while not self._closed.wait(BEAT):
            now = time.monotonic()
            if ranges.entered != entered:
                if entered - ranges.rehearsed >= FIRST and usual and ranges.in_step():
                    longest = max(longest, now - since)
                entered, since, usual = ranges.entered, now, True
            usual = usual and ranges.in_step()
            number += 1
            try:
                self._sign(number, now - since, longest)
                if self._store.check(["verdict"]):
                    self._end(self._store.get("verdict").decode())
                self._look(self.size if self.rank == 0 else 1)
            except Exception as error:  # _judge counts the time
                if not silent:
                    logging.info("watchdog: no answer: %s", brief(error))
                silent = True
                continue
            silent, self._answered = False, time.monotonic()

    def _look(self, count: int) -> None:
        """Take in what the first so many ranks have shown."""
        keys = [f"sign/{rank}" for rank in range(count)]
        if not self._store.check(keys):
            return
        if len(self._hosts) < count:
            self._learn_hosts(range(count))
        now = time.monotonic()
        for seen, value in zip(self._seen[:count], self._store.multi_get(keys), strict=True):
            sign = value.decode()
            if sign != seen.sign:
                _, seen.entered, seen.range, seen.looping, seen.patient, *numbers = json.loads(sign)
                seen.exchanges, seen.age, seen.longest = numbers
                seen.sign, seen.at = sign, now

    def _learn_hosts(self, ranks: Iterable[int]) -> None:
        keys = [f"host/{rank}" for rank in ranks]
        if self._store.check(keys):
            names = self._store.multi_get(keys)
            self._hosts |= {rank: name.decode() for rank, name in zip(ranks, names, strict=True)}

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
            if now - self._answered > SILENT:
                self._end(f"{self._name(0)} has not answered for {SILENT:.0f} s: it, or its node, is stopped or gone")
            # The first rank looks at all; the others look at the first.
            if verdict := self._verdict(now) if self.rank == 0 else self._silence(now, 1):
                with contextlib.suppress(Exception):
                    self._store.set("verdict", verdict)
                time.sleep(2 * BEAT)  # in its process the store may live, which the others are to ask
                self._end(verdict)

    def _verdict(self, now: float) -> str | None:
        """Return who is to blame for what; None if nobody is, as far as one sees."""
        if silence := self._silence(now, self.size):
            return silence
        # Who has left a loop is ahead; of those in one range, who takes part in a further exchange.
        places = [(seen.entered, not seen.looping, seen.exchanges) for seen in self._seen]
        culprits = [rank for rank, place in enumerate(places) if place == min(places)]
        limit = max(STUCK, LONGER * max(seen.longest for seen in self._seen))
        if all(self._seen[rank].range == ranges.REHEARSAL for rank in culprits):
            limit = max(limit, REHEARSAL)
        elif min(places)[0] - ranges.rehearsed < FIRST or not all(self._seen[rank].looping for rank in culprits):
            limit = max(limit, GRACE)  # who is no more in a loop may wait for one who still is
        if len(culprits) == self.size or any(seen.patient for seen in self._seen):
            limit = max(limit, GRACE)  # all compute, or wait for their network; or one of them compiles
        if min(seen.age for seen in self._seen) <= limit:
            return None
        if len(culprits) == self.size:
            return f"no process has got any further for {limit:.0f} s, and none is behind the others"
        names = ", ".join(f"{self._name(rank)} ({self._seen[rank].range})" for rank in culprits[:8])
        return f"all have waited for {limit:.0f} s for {names}"

    def _silence(self, now: float, count: int) -> str | None:
        """Return which of the first so many ranks show no sign of life."""
        silent = [rank for rank, seen in enumerate(self._seen[:count]) if now - seen.at > SILENT]
        if not silent:
            return None
        with contextlib.suppress(Exception):
            for rank in silent:  # it has said why, and could not end before the others
                if self._store.check([f"failed/{rank}"]):
                    return f"{self._name(rank)} ended: {self._store.get(f'failed/{rank}').decode()}"
        names = ", ".join(self._name(rank) for rank in silent[:8])
        return f"no sign of life for {SILENT:.0f} s: {names}; it was killed or stopped, or its node is gone"

    def _name(self, rank: int) -> str:
        return f"process {rank}" + (f" on {self._hosts[rank]}" if rank in self._hosts else "")

    def _end(self, verdict: str) -> None:
        if not self._closed.is_set():
            ending.end(f"{verdict}. This process ends with it", ending.LOST)


def _exchanges() -> int:
    """Return how many exchanges this rank has begun, in all groups of its steps: as many on all ranks."""
    groups: list[Any] = [group for group in distributed_c10d._world.pg_map if group.group_desc != BESIDE]
    return sum(group._get_sequence_number_for_group() for group in groups)


def is_gone(error: BaseException) -> bool:
    """Whether an exception says that another rank has gone."""
    if isinstance(error, OSError):  # a loader's, a tracker's
        return False
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _GONE)
