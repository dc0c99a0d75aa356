"""A run and the first run of its plan, timed in turn: their ratio, from which the machine's drift cancels.

Each run is a process of its own, which is stopped in the other's turn. Two processes that do the same differ by up to
4 % for as long as they live, by where their memory is: so both are opened several times, and each opening is one
measurement (Kalibera and Jones 2013, doi:10.1145/2464157.2464160).
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from dlscale.config.run import load_run
from dlscale.core import machine, registry
from dlscale.core.errors import brief
from dlscale.core.noise import interval
from dlscale.core.progress import Progress
from dlscale.core.settings import read_settings
from dlscale.measure.window import timed_steps, training_batches
from dlscale.parallel.rendezvous import join
from dlscale.train.build import open_session

#: Seconds of a turn: many slices of the system's scheduler, and less than most of what others do lasts.
TURN = 0.25

#: Times that both runs are opened.
OPENINGS = 4

#: Rounds of an opening before its turns may end early.
LEAST = 8

#: Where an opening's ratio is not known to so many times the error that is asked for, its turns go on so many times as
#: long.
ROUGH, LONGER = 3, 3

#: Seconds that a run may take to open, or for a turn. A step takes less: the stage has timed some before.
PATIENCE = 600.0

#: Samples/s of a run, and of the first of its plan.
Round = tuple[float, float]


@dataclass(frozen=True)
class Timed:
    """A run to be timed."""

    config: str  #: Its `config.yaml`, or settings as JSON.
    manifest: str
    device: str  #: As of `--device`.
    threads: int | None  #: CPU threads.


class Ended(Exception):
    """A timed run could not be opened, or ended."""


class Player(Protocol):
    """A run that waits for its turns: a study's, or another program."""

    def send(self, message: Any) -> None:
        """Have it open."""

    def receive(self) -> float:
        """Wait until it is open and warm; `Ended` where it cannot be."""

    def stop(self) -> None:
        """Stop it, with all that it has started."""

    def turn(self) -> float:
        """Let it go on for a turn; return samples/s."""

    def close(self) -> None:
        """End it, with all that it has started."""


class Turns:
    """Both runs, in processes that wait. Make it before the stage computes anything: processes are copied."""

    def __init__(self, own: Timed, first: Timed) -> None:
        # Who is made and opened first was found to be 1 % slower: each is so in every second opening.
        self._couples = [
            (_player(own), _player(first)) if number % 2 else (_player(first), _player(own))[::-1]
            for number in range(OPENINGS)
        ]

    def close(self) -> None:
        """End both runs, and all that they have started."""
        for couple in self._couples:
            for player in couple:
                player.close()

    def rounds(self, seconds: float, error: float) -> list[list[Round]]:
        """Return the samples/s of both runs, opening by opening; each has an even number of rounds.

        Parameters
        ----------
        seconds
            Time of all turns together; each opening has at least two rounds. No further opening, beyond the second,
            begins after opening alone took so long.
        error
            Reach of the ratio's 95 % interval, relative, at which an opening's turns end early. Where it is more than
            three times as far they go on, for up to three times as long.

        Raises
        ------
        Ended
            One of them cannot be timed, and why.
        """
        found: list[list[Round]] = []
        opening = 0.0
        what = "timing this run and the plan's first one in turn"
        with Progress(what, len(self._couples), "openings", part=True) as progress:
            for number, couple in enumerate(self._couples):
                if number < 2 or opening < seconds:
                    order = (0, 1) if number % 2 else (1, 0)
                    opening += _open(couple, order)
                    found.append(_rounds(couple, order, seconds / len(self._couples), error))
                    progress.update(len(found))
        return found


def _open(couple: Sequence[Player], order: tuple[int, int]) -> float:
    """Open both runs in this order, stop them, and return the seconds."""
    start = time.monotonic()
    for number in order:
        couple[number].send("open")
    for player in couple:
        player.receive()
    for player in couple:
        player.stop()
    return time.monotonic() - start


def _rounds(couple: Sequence[Player], order: tuple[int, int], seconds: float, error: float) -> list[Round]:
    """Time both runs in turn, and end them."""
    found: list[Round] = []
    start = time.monotonic()
    while len(found) < 2 or not _enough(found, time.monotonic() - start, seconds, error):
        for turn in (order, order[::-1]):
            rates = {number: couple[number].turn() for number in turn}
            found.append((rates[0], rates[1]))
    for player in couple:
        player.close()
    return found


def _enough(rounds: list[Round], passed: float, seconds: float, error: float) -> bool:
    """Return whether the turns of an opening have lasted long enough."""
    reach = interval([math.log(own / first) for own, first in rounds])[1]
    if passed < seconds:
        return len(rounds) >= LEAST and reach <= error
    return reach <= ROUGH * error or passed >= LONGER * seconds


def _player(timed: Timed) -> Player:
    """Return a run that waits."""
    if read_settings(timed.config)[0].get("program"):
        found: Player = registry.load("dlscale.extensions.programs.turns").Program(timed)
        return found
    return _Study(timed)


class _Study:
    """A run of a study in a process group of its own, which can be stopped with all that it has started."""

    def __init__(self, timed: Timed) -> None:
        # As loaders' processes are: what this process has imported is there, and nothing that it would compute with.
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_play, args=(other, self._pipe, timed, os.getpid()))
        self._process.start()
        other.close()
        self._group = self._process.pid or 0
        with contextlib.suppress(OSError):  # it does the same
            os.setpgid(self._group, self._group)

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, and `receive` says why
            self._pipe.send(message)

    def receive(self) -> float:
        if not self._pipe.poll(PATIENCE):  # a loader that waits for ever, or somebody has stopped it
            raise Ended(f"its process {self._group} did not answer for {PATIENCE:.0f} s")
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise Ended(f"its process ended with status {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise Ended(answer)
        return float(answer)

    def stop(self) -> None:
        os.killpg(self._group, signal.SIGSTOP)

    def turn(self) -> float:
        os.killpg(self._group, signal.SIGCONT)
        self.send("turn")
        rate = self.receive()
        self.stop()
        return rate

    def close(self) -> None:
        if self._pipe.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        self._process.join()
        self._pipe.close()


def _play(pipe: Connection, others: Connection, timed: Timed, parent: int) -> None:
    """Wait to be asked, open the run, and send samples/s of each turn; a failure is sent as text."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    machine.with_parent(parent)  # those that this process started the system then wakes and ends
    others.close()
    logging.getLogger().setLevel(logging.WARNING)  # what there is to say of a run its own stage says
    with contextlib.suppress(EOFError):  # it is not asked
        pipe.recv()
        try:
            for rate in _rates(timed):
                pipe.send(rate)
                pipe.recv()
        except EOFError:
            raise
        except Exception as error:
            pipe.send(brief(error))


def _rates(timed: Timed) -> Iterator[float]:
    """Yield once when the run is open and warm, then samples/s of each turn."""
    run = load_run(timed.config, "throughput")
    with join(run.processes, timed.device) as world:
        session = open_session(run, timed.manifest, world, timed.threads)
        with contextlib.closing(session.loader("train")) as loader:
            batches = training_batches(session, loader, 0)
            timed_steps(session.step, batches, 1, world.device)  # what is made at first use
            steps = 1
            while (seconds := timed_steps(session.step, batches, steps, world.device)[1]) < TURN / 2:
                steps *= 2
            steps = max(1, round(steps * TURN / seconds))
            yield 0.0
            while True:
                count, seconds = timed_steps(session.step, batches, steps, world.device)
                yield count / seconds
