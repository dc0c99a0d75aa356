"""Numbers in what programs print, found by a process of its own: a slow pattern stops neither dlscale nor the program.

This file is also that process's script, and imports Python's own modules only.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

#: Name of rates in steps/s, not samples/s.
PER_STEP = "/step"

#: Characters of a line that are looked at.
MAX_LINE = 2000

#: Processor time of a pattern on one line, s, and lines that may exceed it.
MAX_SECONDS, MAX_SLOW = 1.0, 3

#: Lines that wait to be looked at, and the time that is left for them at the end, s.
MAX_WAITING, PATIENCE_SECONDS = 100_000, 30.0

#: No program trains on as many samples a second.
MAX_RATE = 1e12

#: Sequences by which a terminal shows colours.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")

#: A number, a suffix for thousands or more, and a unit of steps per time or time per step.
NUMBER = re.compile(
    r"(?P<number>[-+]?(?:\d[\d,._'’\u00a0\u202f]*|[.,]\d+)(?:[eE][-+]?\d+)?|nan|[-+]?inf(?:inity)?)"
    r"(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
SUFFIX = re.compile(r"\s?([kKMG])(?![A-Za-z])|\s?([kKMG])(?=samples?|images?|im[gs]|it/|tok|seq|ex|pts|steps)")
STEP = r"(?:it|iters?|iterations?|steps?|batch(?:es)?)"
STEPS = re.compile(rf"\s?{STEP}\s?(?:/|per )\s?s(?:ec(?:onds?)?)?\b")
SECONDS = re.compile(rf"\s?(us|µs|ms|s|sec|seconds?)\s?(?:/|per )\s?{STEP}\b")
UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3}
POWERS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}


def plain(text: str) -> str:
    """Return a text without the escape sequences of a terminal."""
    return ESCAPES.sub("", text) if "\x1b" in text else text


def number_in(text: str) -> float | None:
    """Return a number with a point or comma for decimals, and marks between thousands; None for other text.

    One comma before three digits is a mark between thousands: `1,234` is 1234.
    """
    text = text.rstrip(".,").replace("’", "'")
    for mark in "'\u00a0\u202f":
        text = text.replace(mark, "")
    if re.fullmatch(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text):
        text = text.replace(",", "")
    elif re.fullmatch(r"[-+]?\d{1,3}(\.\d{3})+,\d+", text):
        text = text.replace(".", "").replace(",", ".")
    elif text.count(",") == 1 and "." not in text:
        text = text.replace(",", ".")
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def value_of(match: re.Match[str]) -> float | None:
    """Return the number in a pattern's group, with the suffix or % sign after it."""
    found = NUMBER.match((match[1] or "").strip(" \t([{:=~<"))
    number = number_in(found["number"]) if found else None
    if not found or number is None:
        return None
    rest = found["rest"] + match.string[match.end(1) :]
    suffix = SUFFIX.match(rest)
    if not suffix and re.match(r"[A-Za-z_\d]", found["rest"]) and not (STEPS.match(rest) or SECONDS.match(rest)):
        return None
    return number / 100 if rest.startswith("%") else number * (POWERS[suffix[1] or suffix[2]] if suffix else 1.0)


def rate_of(match: re.Match[str]) -> tuple[str, float] | None:
    """Return whether a rate is of steps (`PER_STEP`) or samples (""), and the rate; None for other numbers."""
    number = value_of(match)
    if number is None or not 0 < number < MAX_RATE:
        return None
    group = match[1].lstrip(" \t([{:=~<")
    found = NUMBER.match(group)
    rest = (found["rest"] if found else "") + match.string[match.end(1) :]
    if suffix := SUFFIX.match(rest):
        rest = rest[suffix.end() :]
    if seconds := SECONDS.match(rest):
        return PER_STEP, 1 / (number * UNITS.get(seconds[1], 1.0))
    return (PER_STEP if STEPS.match(rest) else ""), number


class Finder:
    """Finds numbers in lines by patterns, which have one group; "" is that of rates.

    What is found is in `found`, by name: times (seconds since 1970-01-01 UTC) and numbers; also in the file `record`.
    """

    def __init__(self, looked: Mapping[str, re.Pattern[str]], record: Path | None = None) -> None:
        self.found = {name: list[tuple[float, float]]() for name in ["", PER_STEP, *looked]}
        self.slow = Counter[str]()  #: Lines on which a pattern took too long.
        self.missed = 0  #: Lines that were not looked at.
        self._record = record
        self._waiting = queue.Queue[bytes](MAX_WAITING)
        patterns = json.dumps({name: pattern.pattern for name, pattern in looked.items()})
        command = [sys.executable, "-I", "-S", __file__, patterns]
        # A session of its own: Ctrl-C is the program's.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def look(self, when: float, lines: list[bytes]) -> None:
        """Look for numbers in lines, which came at a time; never wait."""
        for line in lines:
            try:
                self._waiting.put_nowait(b"%.6f %s\n" % (when, line[: 4 * MAX_LINE]))
            except queue.Full:
                self.missed += 1

    def close(self) -> None:
        """Wait until all lines were looked at, but no longer than some seconds."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(b"", timeout=PATIENCE_SECONDS)
        self._threads[-1].join(PATIENCE_SECONDS)
        if self._threads[-1].is_alive():
            self.missed += self._waiting.qsize()
        self._process.kill()
        self._process.wait()

    def _write(self) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError), self._process.stdin as stream:
            while line := self._waiting.get():
                stream.write(line)

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            name, when, number = json.loads(line)
            if number is None:
                self.slow[name] += 1
                continue
            self.found[name].append((when, number))
            if self._record:
                with contextlib.suppress(OSError), self._record.open("ab") as file:
                    file.write(line)


def main() -> None:
    """Read lines with their times; print the numbers in them, and null where a pattern takes too long."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGVTALRM, late)
    looked, slow = {name: re.compile(text) for name, text in json.loads(sys.argv[1]).items()}, Counter[str]()
    for line in sys.stdin.buffer:
        when, _, rest = line.partition(b" ")
        text = plain(rest.decode(errors="replace").rstrip("\n"))[:MAX_LINE]
        for name, pattern in looked.items():
            if slow[name] >= MAX_SLOW:
                continue
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
            try:
                match = pattern.search(text)
            except TimeoutError:
                slow[name] += 1
                print(json.dumps([name, float(when), None]), flush=True)
                continue
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if match:
                number = value_of(match) if name else None
                of, number = (name, number) if name else rate_of(match) or ("", None)
                if number is not None:
                    print(json.dumps([of, float(when), number]), flush=True)


if __name__ == "__main__":
    main()
