"""Paired timing: time a run and the first run of its plan in turns, so that changes of the machine's speed cancel.

Each run is a separate process, which is paused during the turn of the other run. Two identical processes may differ
in speed by up to 4 % from start to end, because of their placement in memory. Therefore both runs are opened
(started anew) several times, and each opening is one measurement (Kalibera and Jones 2013,
doi:10.1145/2464157.2464160).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from dlscale.config.compute import compute_digest
from dlscale.config.run import Throughput, load_run
from dlscale.core import machine, registry
from dlscale.core.errors import brief
from dlscale.core.noise import interval
from dlscale.core.progress import Progress
from dlscale.core.settings import read_settings
from dlscale.data.samples import samples_in
from dlscale.measure.records import PairedTiming
from dlscale.parallel.rendezvous import join
from dlscale.parallel.world import synchronize
from dlscale.train.build import open_session
from dlscale.train.loop import Batch, Hook, run_steps

#: Duration of a turn, s: many time slices of the operating system, but shorter than most disturbances by other
#: programs.
TURN = 0.25

#: Number of openings: how often both runs are started anew.
OPENINGS = 4

#: Minimum number of rounds before an opening may end early. In a round, each run has one turn.
MIN_ROUNDS = 8

#: Multiple of the requested error above which an opening is prolonged.
MAX_ERROR_RATIO = 3
#: Longest duration of an opening, as a multiple of the planned duration.
MAX_DURATION_RATIO = 3

#: Timeout of an opening or a turn, seconds. A turn takes about `TURN` seconds, an opening longer.
PATIENCE = 600.0

#: (Samples/s of a run, samples/s of the first run of its plan) in one round.
Round = tuple[float, float]


@dataclass(frozen=True)
class TimedRunSettings:
    """Arguments of one of the two timed runs."""

    config: str  #: Path of the run's `config.yaml`, or its settings as JSON.
    manifest: str
    device: str  #: Value of `--device`.
    threads: int | None  #: CPU threads of a node.


class TurnFailed(Exception):
    """Failure of a timed run: it could not be opened, ended early, or did not answer."""


class Subject(Protocol):
    """A run that is timed in turns: either the training step of a study, or an external program.

    All methods raise `TurnFailed` if the run failed.
    """

    def open(self) -> None:
        """Start the run; return before it has started."""

    def wait(self) -> None:
        """Wait until the run has started and has made its warm-up steps."""

    def pause(self) -> None:
        """Pause the run and all processes that it has started."""

    def turn(self) -> float:
        """Resume the run for a turn; return the samples/s of the turn."""

    def close(self) -> None:
        """End the run and all processes that it has started."""


class Turns:
    """Processes of both runs, for all openings. Create this object before the stage computes, because it forks."""

    def __init__(self, own: TimedRunSettings, first: TimedRunSettings) -> None:
        self._first = first
        # In a test, a run was 1 % slower if it was created and opened first. Therefore the order alternates.
        self._couples = [
            (_subject(own), _subject(first)) if number % 2 else (_subject(first), _subject(own))[::-1]
            for number in range(OPENINGS)
        ]

    def close(self) -> None:
        for couple in self._couples:
            for subject in couple:
                subject.close()

    def paired_timing(self, settings: Throughput) -> PairedTiming | None:
        """Return the record of the paired timing; if the timing fails, log the reason and return None."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # free this process's memory for the two runs
        try:
            rounds = self.rounds(settings.beside, settings.error)
        except TurnFailed as failed:
            logging.warning("no paired timing with the plan's first run: %s", failed)
            return None
        first = load_run(self._first.config, "throughput").model_dump(mode="json")
        found = PairedTiming(compute=compute_digest(first), openings=rounds)
        ratio, error = interval(found.ratios)
        logging.info(
            "paired timing, %d openings: %.3f times as fast as the plan's first run (relative error ± %.3f)",
            *(len(rounds), math.exp(ratio), error),
        )
        return found

    def rounds(self, seconds: float, error: float) -> list[list[Round]]:
        """Time both runs; return their samples/s, [opening][round], with an even number of rounds per opening.

        Parameters
        ----------
        seconds
            Planned duration of all turns together, s; an opening has at least two rounds. After the second opening, no
            further opening begins if starting the runs has taken longer than this duration in total.
        error
            Relative half-width of the ratio's 95 % interval at which an opening ends early, after `MIN_ROUNDS` rounds
            or more. An opening with a half-width above `MAX_ERROR_RATIO` times this value is prolonged, to at most
            `MAX_DURATION_RATIO` times the opening's planned duration.

        Raises
        ------
        TurnFailed
            One of the two runs cannot be timed. The message has the reason.
        """
        found: list[list[Round]] = []
        opening = 0.0
        what = "paired timing with the plan's first run"
        with Progress(what, len(self._couples), "repetitions", part=True) as progress:
            for number, couple in enumerate(self._couples):
                if number < 2 or opening < seconds:
                    order = (0, 1) if number % 2 else (1, 0)
                    opening += _open(couple, order)
                    found.append(_rounds(couple, order, seconds / len(self._couples), error, progress))
                    progress.update(len(found))
        return found


def _open(couple: Sequence[Subject], order: tuple[int, int]) -> float:
    """Open both runs in the order `order`, pause both, and return the seconds that opening took."""
    start = time.monotonic()
    for number in order:
        couple[number].open()
    for subject in couple:
        subject.wait()
    for subject in couple:
        subject.pause()
    return time.monotonic() - start


def _rounds(
    couple: Sequence[Subject], order: tuple[int, int], seconds: float, error: float, progress: Progress
) -> list[Round]:
    found: list[Round] = []
    start = time.monotonic()
    while len(found) < 2 or not _enough(found, time.monotonic() - start, seconds, error):
        for turn in (order, order[::-1]):
            rates = {number: couple[number].turn() for number in turn}
            found.append((rates[0], rates[1]))
            progress.update(progress.done)  # renews the stage's status, because an opening may last hours
    for subject in couple:
        subject.close()
    return found


def _enough(rounds: list[Round], passed: float, seconds: float, error: float) -> bool:
    reach = interval([math.log(own / first) for own, first in rounds])[1]
    if passed < seconds:
        return len(rounds) >= MIN_ROUNDS and reach <= error
    return reach <= MAX_ERROR_RATIO * error or passed >= MAX_DURATION_RATIO * seconds


@contextlib.contextmanager
def paired(args: argparse.Namespace) -> Iterator[Turns | None]:
    """Start the processes of the stage's run and of the run `args.beside`; yield None without `args.beside`."""
    if not args.beside:
        yield None
        return
    own = TimedRunSettings(args.config, args.manifest, args.device, args.threads)
    first = replace(own, config=args.beside, manifest=args.beside_manifest or args.manifest)
    with contextlib.closing(Turns(own, first)) as turns:
        yield turns


def _subject(timed: TimedRunSettings) -> Subject:
    """Return a run that is not open yet; fork the process of a study's run."""
    program = registry.provided("ProgramSubject", None) if read_settings(timed.config)[0].get("program") else None
    found: Subject = (program or _Study)(timed)
    return found


class _Study:
    """A run of a study in its own process group, so that all its processes can be paused together."""

    def __init__(self, timed: TimedRunSettings) -> None:
        # A fork saves imports, and is safe, because no CUDA context or thread pool exists yet.
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_play, args=(other, self._pipe, timed, os.getpid()))
        self._process.start()
        other.close()
        self._group = self._process.pid or 0
        with contextlib.suppress(OSError):  # the child also calls `setpgid`, and may have been first
            os.setpgid(self._group, self._group)

    def open(self) -> None:
        self._ask()

    def wait(self) -> None:
        self._answer()

    def _ask(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process ended; `_answer` will report this
            self._pipe.send(None)

    def _answer(self) -> float:
        if not self._pipe.poll(PATIENCE):  # for example a loader hangs
            raise TurnFailed(f"process {self._group} of a run did not answer for {PATIENCE:.0f} s")
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise TurnFailed(f"the process of a run ended with status {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise TurnFailed(answer)
        return float(answer)

    def pause(self) -> None:
        os.killpg(self._group, signal.SIGSTOP)

    def turn(self) -> float:
        os.killpg(self._group, signal.SIGCONT)
        self._ask()
        rate = self._answer()
        self.pause()
        return rate

    def close(self) -> None:
        if self._pipe.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        self._process.join()
        self._pipe.close()


def _play(pipe: Connection, others: Connection, timed: TimedRunSettings, parent: int) -> None:
    """On requests from the parent, open the run and send the samples/s of each turn; send a failure as text."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    machine.with_parent(parent)  # if the parent dies, Linux ends this process
    others.close()
    logging.getLogger().setLevel(logging.WARNING)  # each run's own stage already logs its details
    with contextlib.suppress(EOFError):  # the parent closed the pipe
        pipe.recv()
        try:
            for rate in _rates(timed):
                pipe.send(rate)
                pipe.recv()
        except EOFError:
            raise
        except Exception as error:
            pipe.send(brief(error))


def _rates(timed: TimedRunSettings) -> Iterator[float]:
    """Yield 0 when the run is open and warmed up, and then the samples/s of each turn."""
    run = load_run(timed.config, "throughput")
    with join(run.processes, timed.device) as world:
        session = open_session(run, timed.manifest, world, timed.threads)
        with contextlib.closing(session.loader("train")) as loader:
            batches = session.training_batches(loader, 0)
            timed_steps(session.step, batches, 1, world.device)  # one-time set-up
            steps = 1
            while (seconds := timed_steps(session.step, batches, steps, world.device)[1]) < TURN / 2:
                steps *= 2
            steps = max(1, round(steps * TURN / seconds))
            yield 0.0
            while True:
                count, seconds = timed_steps(session.step, batches, steps, world.device)
                yield count / seconds


def timed_steps(
    consume: Callable[..., object], batches: Iterator[Batch], steps: int, device: torch.device
) -> tuple[int, float]:
    """Make `steps` steps; return their number of samples, and the seconds until the device has finished them."""
    counts = list[int]()
    count = Hook(after_step=lambda number, batch, result: counts.append(samples_in(batch[0])))
    start = time.perf_counter()
    run_steps(consume, batches, range(steps), [count])
    synchronize(device)
    seconds = time.perf_counter() - start
    return sum(counts), seconds
