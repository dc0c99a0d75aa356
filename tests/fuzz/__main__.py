"""A campaign of damaged files and wrong settings: `python -m tests.fuzz --count 10000`.

Case K of a seed damages one of a reader's small files, or makes mistakes in a configuration, and reads the files in a
process with limits on time and memory. A reader must accept the file, or refuse it with one message of at most 1,000
characters. `--log` gets a line for each batch of cases; a campaign continues after the last batch of the same commit,
seed and reader. The exit status is 1 if a case has another outcome. `--only K` repeats case K of the first
reader in `--readers`, and keeps the files.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch

from dlscale.core.errors import UserError
from tests import changed
from tests.fuzz.readers import READERS

#: Outcomes of a case.
ACCEPTED, DEFECTS = ("ok", "message"), ("long message", "unclear", "traceback", "memory", "hang", "crash")
#: Largest message, characters.
MAX_MESSAGE = 1000
#: Limits of a case: CPU time, seconds; sleep, as a multiple of this time; additional address space, bytes.
LIMIT_S, PATIENCE, MEMORY = 10.0, 6.0, 2 * 2**30
#: Interval between checks of a case, seconds.
POLL_S = 0.5
#: Maximum number of cases per batch.
BATCH = 100
FORK = multiprocessing.get_context("fork")

#: Case: number, outcome, message or traceback, CPU time (seconds), additional memory of its process (bytes).
Row = tuple[int, str, str, float, int]


class Server:
    """Server that runs the cases of a reader in forked processes, with all modules imported."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.name, self.seed, self.reader = name, seed, READERS[name]
        self.original, self.copy = folder / "original/files", folder / "copy/files"
        shutil.rmtree(folder, ignore_errors=True)
        self.original.parent.mkdir(parents=True)
        torch.set_num_threads(1)  # OpenMP threads do not survive a fork
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            self.reader.make(self.original)
            shutil.copytree(self.original, self.copy)
            self.reader.read(self.copy)  # undamaged; imports the modules that the processes need
        self.candidates = sorted(path for path in self.original.glob(self.reader.which) if path.is_file())
        assert self.candidates, f"{name}: there is no file {self.reader.which}"
        gc.collect()
        gc.freeze()

    def run(self, numbers: Sequence[int]) -> list[Row]:
        """Run cases in one process, or in a new process after a hang or crash; return their outcomes."""
        rows = list[Row]()
        while left := numbers[len(rows) :]:
            ends, words = FORK.Pipe(duplex=False)
            child = FORK.Process(target=self._serve, args=(left, words))
            child.start()
            words.close()
            assert child.pid
            for number in left:
                try:
                    rows.append(ends.recv() if _answers(ends, child.pid) else (number, "hang", "", LIMIT_S, 0))
                except EOFError:
                    child.join()
                    how = "memory" if child.exitcode == -signal.SIGKILL else "crash"
                    rows.append((number, how, f"exit status {child.exitcode}", 0.0, 0))
                if rows[-1][1] in ("hang", "crash", "memory"):
                    break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # also processes that the reader started
            child.join()
        return rows

    def _serve(self, numbers: Sequence[int], words: Any) -> None:
        os.setsid()
        faulthandler.disable()
        used = psutil.Process().memory_info()
        size = used.vms + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        warnings.simplefilter("ignore")
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        for number in numbers:
            begin, (outcome, text) = time.process_time(), self._case(number)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            words.send((number, outcome, text, time.process_time() - begin, max(0, peak - used.rss)))
        os._exit(0)

    def _case(self, number: int) -> tuple[str, str]:
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.original, self.copy)
        random = Random(f"{self.seed}/{self.name}/{number}")
        file, other = random.choice(self.candidates), random.choice(self.candidates)
        self.reader.damage(self.copy / file.relative_to(self.original), other.read_bytes(), random)
        try:
            self.reader.read(self.copy)
        except UserError as error:
            return "long message" if len(str(error)) > MAX_MESSAGE else "message", str(error)
        except BaseException as error:
            kinds = {AssertionError: "unclear", MemoryError: "memory"}
            return kinds.get(type(error), "traceback"), traceback.format_exc()
        return "ok", ""


def _answers(ends: Any, process: int) -> bool:
    """Wait for a case; return False if it takes `LIMIT_S` of CPU time, or sleeps `PATIENCE` times as long."""
    watched, slept = psutil.Process(process), 0.0
    before = sum(watched.cpu_times())
    while not ends.poll(POLL_S):
        if watched.status() != psutil.STATUS_RUNNING:  # on a busy machine, a process may wait long for a core
            slept += POLL_S
        if sum(watched.cpu_times()) - before > LIMIT_S or slept > PATIENCE * LIMIT_S:
            return False
    return True


def main() -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=25, help="cases of each reader (default: 25)")
    parser.add_argument(
        "--readers", nargs="+", choices=READERS, default=[*READERS], metavar="NAME", help="default: all"
    )
    parser.add_argument("--only", type=int, metavar="K", help="repeat case K of the first reader, and keep its files")
    parser.add_argument("--log", type=Path, help="file for one JSON line per batch (default: in --work)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), f"dlscale-fuzz-{os.getuid()}"))
    args = parser.parse_args()
    if args.only is not None:
        server = Server(args.readers[0], args.seed, args.work / f"only-{args.only}")
        ((_, outcome, text, *_),) = server.run([args.only])
        print(f"{outcome}\n{text}\nkept: {server.copy}")
        return int(outcome in DEFECTS)
    commit = changed.commit("workflow_scripts", "tests")
    log, folder, failed = args.log or args.work / "log.jsonl", args.work / str(os.getpid()), list[str]()
    columns = ["cases", "accepted", "refused", *DEFECTS, "s", "slowest, s", "peak, MiB"]
    table = [
        f"dlscale {version('dlscale')}, commit {commit}, seed {args.seed}",
        f"{'reader':24}{''.join(map('{:>13}'.format, columns))}",
    ]
    for name in args.readers:
        rows = list(batches(name, args.count, log, {"commit": commit, "seed": args.seed, "reader": name}, folder))
        counts = sum((Counter(row["outcomes"]) for row in rows), Counter[str]())
        slowest, peak = (max(row[key] for row in rows) for key in ("slowest", "peak_bytes"))
        cells = [counts.total(), *(counts[each] for each in (*ACCEPTED, *DEFECTS))]
        cells += [f"{sum(row['seconds'] for row in rows):.0f}", f"{slowest:.1f}", f"{peak / 2**20:.0f}"]
        table.append(f"{name:24}{''.join(map('{:>13}'.format, cells))}")
        print(table[-1], flush=True)
        again = f"python -m tests.fuzz --readers '{name}' --seed {args.seed} --only"
        failed += [f"{outcome}: {again} {number}" for row in rows for number, outcome, _ in row["defects"]]
    print("\n".join(["", *table, *failed]))
    return int(bool(failed))


def batches(name: str, count: int, log: Path, key: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the batches of a reader: first the batches in the log, then new ones, which are added to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    done = 0
    for line in log.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the last line of a killed campaign
            if (row := json.loads(line)).items() >= key.items():
                done = row["end"]
                yield row
    server = Server(name, key["seed"], folder) if done < count else None
    while server and done < count:
        begin, numbers = time.monotonic(), range(done, done := min(done + BATCH, count))
        found = server.run(numbers)
        row = {**key, "begin": numbers.start, "end": done, "seconds": round(time.monotonic() - begin, 2)}
        row["outcomes"] = Counter(outcome for _, outcome, *_ in found)
        row |= {"slowest": round(max(each[3] for each in found), 2), "peak_bytes": max(each[4] for each in found)}
        row["defects"] = [(k, outcome, text[-3000:]) for k, outcome, text, *_ in found if outcome in DEFECTS]
        with log.open("a") as file:
            file.write(f"\n{json.dumps(row)}\n")  # the last line may be incomplete
        yield row
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
