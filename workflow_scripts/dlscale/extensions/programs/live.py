"""Show the speed of a running program: `dlscale measure --live` prints a line every ten seconds."""

from __future__ import annotations

import bisect
import contextlib
import csv
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dlscale.core import telemetry
from dlscale.core.files import open_regular
from dlscale.core.text import duration, number, percent, size
from dlscale.extensions.programs import running
from dlscale.extensions.programs import steps as seen
from dlscale.launch.contain import GRACE
from dlscale.measure.records import SAMPLE_RATE, STEP_RATE, Outside, Throughput, Trials
from dlscale.report.evidence import Evidence
from dlscale.report.verdict import verdict

#: Environment variable: seconds between two lines.
EVERY = "DLSCALE_LIVE_EVERY"

#: Seconds between two lines. A line shows the steps and the telemetry of this time; the first line appears after half
#: this time.
SECONDS = 10.0

#: Minimum number of steps that a line's speed includes, because slow steps may take longer than `SECONDS`.
MIN_STEPS = 8

#: Time without a step that is reported, in multiples of the time between two lines.
STALLED = 1.5


@contextlib.contextmanager
def showing(steps: Path, rows: Path) -> Iterator[None]:
    """Print the program's speed on standard error during this context, from its steps and its telemetry `rows`."""
    view = View(steps, rows, float(os.environ.get(EVERY) or SECONDS))
    view.start()
    try:
        yield
    finally:
        view.close()


class View(threading.Thread):
    """Thread that prints the lines; an error ends the lines, but not the program."""

    def __init__(self, steps: Path, rows: Path, every: float) -> None:
        super().__init__(daemon=True)
        self._steps, self._rows, self._every, self._begin = steps, Rows(rows), every, time.time()
        self._tails, self._ended, self._before = dict[str, seen.Tail](), threading.Event(), ""

    def run(self) -> None:
        due = time.monotonic() + self._every / 2
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            due += self._every
            try:
                text = self.line(time.time())
            except Exception as error:
                running.say(f"dlscale: the live view ended ({type(error).__name__}: {error}); the program continues")
                return
            running.say(f"dlscale {text}")

    def close(self) -> None:
        self._ended.set()
        self.join(GRACE)

    def line(self, now: float) -> str:
        """Return a line about the last seconds before `now`, from notes and telemetry written since the last call.

        The line has the time since the program's start, the speed, the wait for batches, the use of devices and memory,
        and the first finding if it was also the first finding of the preceding line.
        """
        rows, (way, processes) = self._rows.read(now - self._every), self._read()
        parts, finding = list[str](), ""
        windows = [_latest(each, self._every) for each in processes]
        pace = seen.pace(windows) if windows else None
        last = max((each.steps[-1] for each in processes), default=self._begin)
        pausing = any(each.gaps and each.gaps[-1][1] >= now for each in processes)  # notes of long runs have gaps
        if not processes:
            parts.append("no step seen yet")
        elif now - last > STALLED * self._every and not pausing:
            parts.append(f"no step for {duration(round(now - last))}")
        elif pace:
            rate = sum(pace.rank_rates)
            parts.append(f"{number(rate)} {SAMPLE_RATE if pace.samples else STEP_RATE}")
            parts += [f"waiting for data {percent(pace.waiting)}"] if pace.waiting is not None else []
            finding = _finding(way, pace, rows, now - self._begin) if rows else ""
        else:
            parts.append("too few steps for a speed")
        parts += _devices(rows)
        parts += [finding] if finding and finding == self._before else []
        self._before = finding
        minutes, seconds = divmod(round(now - self._begin), 60)
        return f"{minutes}:{seconds:02}: {', '.join(parts)}"

    def _read(self) -> tuple[str, list[seen.Process]]:
        """Read the new notes of all processes; return the way of detecting steps, and the processes that train now."""
        for way in seen.WAYS:
            for path in seen.files(self._steps, way):
                if path.name in self._tails:
                    self._tails[path.name].read()
                else:
                    self._tails[path.name] = seen.Tail(path)
        for way in seen.WAYS:
            tails = [each for name, each in self._tails.items() if name.startswith(f"{way}.")]
            known = [seen.without_validations(each.process) for each in tails]
            if known := [each for each in known if each.steps]:
                newest = max(each.steps[-1] for each in known)
                current = [each for each in known if newest - each.steps[-1] <= STALLED * self._every]
                return way, sorted(current, key=lambda each: each.rank)
        return "", []


class Rows:
    """Telemetry that is read while it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._header = path, 0, ""
        self._samples = list[telemetry.Sample]()

    def read(self, since: float) -> list[telemetry.Sample]:
        """Read the new rows; return the rows since a time (seconds since 1970-01-01 UTC), at least the last row."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb", opener=open_regular) as file:
            file.seek(self._place)
            text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._place += len(text)
            header, *lines = [*([self._header] if self._header else []), *text.decode().splitlines()] or [""]
            self._header = header
            self._samples += map(telemetry.parse_row, csv.DictReader([header, *lines], strict=True))
        self._samples = [each for each in self._samples if each.time >= since] or self._samples[-1:]
        return self._samples


def _latest(process: seen.Process, seconds: float) -> seen.Process:
    """Return a copy of a process with the steps of its last seconds, at least `MIN_STEPS` steps."""
    steps = process.steps
    first = min(bisect.bisect_right(steps, steps[-1] - seconds), max(0, len(steps) - MIN_STEPS))
    batches = process.batches[bisect.bisect_right([each[0] for each in process.batches], steps[first]) :]
    computed = process.computed[first:]
    # Without optimisers, the steps count as one training.
    return replace(process, steps=steps[first:], computed=computed, batches=batches, optimizers={}, cut=0)


def _devices(rows: Sequence[telemetry.Sample]) -> list[str]:
    """Return the use of GPUs, or else of cores, and of memory, as text."""
    if not rows:
        return []
    last, memory = rows[-1], []
    busy = [gpu.utilization for row in rows for gpu in row.gpus if gpu.utilization is not None]
    if busy:
        memory = [gpu.memory_bytes or 0.0 for gpu in last.gpus]
        use = f"GPU{'s' * (len(last.gpus) > 1)} {percent(statistics.fmean(busy))}"
    else:
        cores = [(row.cpu_run or 0.0) * row.cores for row in rows]
        use = f"{number(statistics.fmean(cores), 2)} of {last.cores} cores"
    each = [f"GPU memory {size(max(memory))}"] if memory else []
    return [use, *each, *([f"memory {size(last.rss_bytes)}"] if last.rss_bytes else [])]


def _finding(way: str, pace: seen.Pace, rows: Sequence[telemetry.Sample], seconds: float) -> str:
    """Return the name of the first finding of the last seconds; empty without findings."""
    begin = rows[0].time - rows[0].seconds
    full = Trials(
        trial_throughput=pace.rates,
        trial_time=pace.seconds,
        avg_iter_throughput=pace.rates,
        mean=statistics.fmean(pace.rates),
        rank_throughput=pace.rank_rates,
        usage=running.usage_between(rows, begin, rows[-1].time, ()),
    )
    outside = Outside(
        command=[],
        way="timed" if way == "timed" else "seen",
        samples=pace.samples,
        steps=pace.steps,
        status=0,
        seconds=seconds,
        first_step_seconds=0.0,
        waiting=pace.waiting,
        training=1.0,
        rank_waiting=pace.waits_of_ranks,
        rank_cores=pace.cores_of_ranks,
    )
    device, ranks = running.device_of([rows]), pace.processes
    record = Throughput(nranks=ranks, batch_size=pace.batch_size, device=device, full=full, outside=outside)
    found = verdict(Evidence({}, record, None, telemetry.summary(rows))).findings
    return found[0].what if found else ""
