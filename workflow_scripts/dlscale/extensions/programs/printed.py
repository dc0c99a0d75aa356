"""Find numbers in a program's output, in a separate process.

In this way a slow pattern delays neither dlscale nor the program. The separate process runs this file as its script, so
the file imports only modules of Python's standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Name of rates in steps/s; rates in samples/s have the name "".
PER_STEP = "/step"

#: Names, in place of a pattern's name, for the label of a rank, and for the words and digits of a rate.
RANK, LABEL = "/rank", "/label"

#: Maximum number of characters of a line that are searched.
MAX_LINE = 2000

#: Maximum CPU seconds of a pattern on one line, and number of slow lines after which a pattern is no longer used.
MAX_SECONDS, MAX_SLOW = 1.0, 3

#: Maximum number of lines in the queue, and maximum time for emptying the queue at the end, seconds.
MAX_WAITING, PATIENCE_SECONDS = 100_000, 30.0

#: Maximum number of characters that a message shows of a text that is not a rate.
MAX_SHOWN = 80

#: Upper bound of a number that counts as a rate.
MAX_RATE = 1e12

#: Escape sequences of a terminal, such as colours.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")

#: A number, and the text after the number. Spaces may separate groups of three digits.
NUMBER = re.compile(
    r"(?P<number>[-+]?(?:[1-9]\d{0,2}(?: \d{3})+(?!\d)(?:[.,]\d+)?|\d(?:[\d,._'’\u00a0\u2009\u202f]*\d)?\.?|[.,]\d+)"
    r"(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?))(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
#: Text before a group's number that belongs to the number: digits, `1.2e+`, `10^`, `0x`, `1_`, or a minus sign.
HEAD = re.compile(
    r"\d\.?(?:[eEdD][-+−]?)?$|(?<![\w.])0[xXoObB][\da-fA-F_.]*(?:[pP][-+−]?)?$|10(?:\^|\*\*)[({]?[-+−]?$"
    r"|\d[_'’\u00a0\u2009\u202f]$|(?<![\w.)-])[-−]$"
)
#: Text after a number that belongs to the number: exponents such as `D+06` and `×10^6`, hexadecimal digits, `:31`.
TAIL = re.compile(r"(?:[eEdDpP][-+−]?|[xXoObB]|[_:])\d|\s?[×·*xX]\s?10(?:\^|\*\*|[⁰¹²³⁴-⁹⁺⁻])")
#: Text before a match that may belong to the number at the match's begin: `1,` of `1,234`, `1 ` of `1 234`.
OUTSIDE = re.compile(
    r"[\d.,'’]*\d[,_'’\u00a0\u2009\u202f]$"
    r"|(?<![\w.,:/])(?<!step )(?<!iter )(?<!epoch )(?<!batch )[1-9]\d{0,2} $",
    re.IGNORECASE,
)
#: Maximum relative difference between a group's number and the line's complete number; if the difference is larger, the
#: group's number is refused.
MAX_CUT = 0.05

#: Names of units of time, by the unit's length in seconds.
TIMES = {
    1e-9: "ns nsec nsecs nanos nanosecond nanoseconds",
    1e-6: "us µs μs usec usecs micros microsec microsecs microsecond microseconds",
    1e-3: "ms msec msecs millis millisec millisecs millisecond milliseconds",
    1.0: "s sec secs second seconds",
    60.0: "min mins minute minutes",
    3600.0: "h hr hrs hour hours",
    86400.0: "day days",
}
SECONDS = {word: seconds for seconds, words in TIMES.items() for word in words.split()}
TIME = rf"(?P<time>{'|'.join(sorted(SECONDS, key=len, reverse=True))})(?![A-Za-z])"
PER = r"(?:\s?/\s?|[\s_-]?per[\s_-]|per(?=sec|step|iter|batch|sample))"
STEP = r"(?:its?|iter(?:ation)?s?|steps?|(?:mini-?)?batch(?:es)?|updates?)"
SAMPLE = r"(?:samples?|images?|im|ims|imgs?|ex|examples?|items?|rows?|records?|seqs?|sequences?)"
#: Nouns of rates that count neither steps nor samples.
OTHER = re.compile(
    r"ep(?:och|isode)?s?|[kmg]?(?:(?:sub)?(?:tok(?:en)?|word)|char(?:acter)?|frame|(?:mega|giga)?pixel|voxel|op)s?"
    r"|[kmgtp]?i?b(?:ytes?|its?)?|[kmgtp]?flops?"
    r"|(?:atom|residue|base|node|edge|transition|eval(?:uation)?|second|sec|minute|hour|day)s?",
    re.IGNORECASE,
)
#: A rate (`it/s`, `steps_per_second`), a duration (`ms/step`), or a short name: `ups` (updates/s), names of rates of
#: something else, and `sps` and `ips`, which may be samples/s or steps/s.
UNIT = (
    rf"(?:(?P<noun>[a-z]+){PER}{TIME}|{TIME.replace('<time>', '<each>')}{PER}(?P<of>[a-z]+)"
    r"|(?P<short>ups|[kmg]?(?:[wtf]ps|tgs|bps)|[si]ps)(?![a-z]|\s+[-+.]?\d))"
)
IN_LABEL = re.compile(rf"(?<![a-z]){UNIT}", re.IGNORECASE)
NOUN = rf"(?i:{SAMPLE}|{STEP}|tok|pts)"
#: A suffix directly after a number, or before a noun (`kimg/s`). After a space, a letter may begin the next label
#: (`0.52 G: 1.3`): only rates may have a suffix there, if a unit or the end of the text follows.
GLUED = re.compile(rf"([kKMG])(?=$|[\s,;|/.)\]}}\"'>]|{NOUN})")
SUFFIX = re.compile(
    rf"{GLUED.pattern}|\s([kKMG])(?=(?:\s?{NOUN})?\s*(?:$|[,;|)\]}}])"
    rf"|\s?(?i:[a-z]*{PER}{TIME.replace('?P<time>', '?:')})(?!\s*[:=]|\s+[-+.]?\d))"
)
#: Text between a number and its unit, such as the mean in `84.1 (83.9) samples/s`.
GAP = (
    r"(?:\s?(?:(?:\+/?-|±|/)\s?[\d.,]+|\([\d.,]+\)))?"
    r"[\s\"')\]]*[(\[]?"
)
#: A unit after a number. A unit before `:` or `=`, and `min` before a number, belong to the next number's label.
UNNAMED = re.sub(r"\?P<\w+>", "?:", UNIT)
AFTER = re.compile(rf"{GAP}(?:[a-z]{{2,}}[\s_-](?!{UNNAMED}\s+[-+.]?\d))?{UNIT}(?!\s*[:=])", re.IGNORECASE)
DURATION = re.compile(rf"{GAP}{TIME}(?!\s*[:=])(?!(?<=min)\s+[-+.\d])", re.IGNORECASE)
#: Noun for steps or samples, directly after a number.
COUNTED = re.compile(rf"(?:{SAMPLE}|{STEP})(?![a-z])", re.IGNORECASE)
#: Text between a number and its unit that may be a factor, such as `m`, which is million or milli.
FACTOR = re.compile(
    rf"\s?(?:[a-zµ]|thousands?|millions?|mio|mln|mill?|billions?|bn|mrd)\.?\s+[a-z]+{PER}{TIME}(?!\s*[:=]|\s+[-+.]?\d)"
    rf"|[a-zµ]{COUNTED.pattern}",
    re.IGNORECASE,
)
#: A unit of time at the end of a label: `(ms)`, `_ms`, `in s`, `time ms`.
TIME_LABEL = re.compile(rf"(?:[(\[_]|\bin\s|\b(?!(?:s|h|min)\b)){TIME}(?:[)\]]|(?![a-z]))[^a-z]*$", re.IGNORECASE)
#: Labels of numbers that are not rates: times without a unit, times of several steps (`s per 10 steps`), counts
#: (`samples per epoch`), tokens and operations.
NO_RATE = re.compile(
    r"(?<![a-z])(?:time|elapsed|duration|latency|took|eta)(?![a-z])(?!.*(?:rate|speed|throughput))"
    r"|(?<![a-z])(?:tok|tokens?|words?|wpb|frames?|mfu|[kmgtp]?flops?)(?![a-z])"
    rf"|{TIME}{PER}\d+\s?[a-z]*[^a-z]*$|{PER}(?:epochs?|{STEP})[^a-z]*$",
    re.IGNORECASE,
)
#: Rates of one device or process, of micro-batches, and of an environment's steps: none is a rate of the run's samples
#: or steps.
OF_DEVICE = re.compile(
    r"(?:/\s?|per[\s_-]?)(?:[gt]pu|device|rank|worker|chip|card|accelerator|core|proc(?:ess)?|node|gcd)(?![a-z]{2})",
    re.IGNORECASE,
)
MICRO = re.compile(
    r"micro[\s_-]?(?:batch|step)|(?<![a-z])(?:env(?:ironment)?|agent|sim(?:ulat(?:or|ion))?)[\s_-]?steps?|timesteps?",
    re.IGNORECASE,
)
#: Text between a number or its unit and `/gpu` or `per device`.
BEFORE_DEVICE = re.compile(r"(?:\s?/\s?s(?:ec(?:ond)?)?(?![a-z]))?[\s,]*[(\[]?\s?", re.IGNORECASE)
#: Words for one step in the label of a duration.
ONE_STEP = re.compile(r"(?<![a-z])(?:it|iter|iteration|step|batch|minibatch|update)(?![a-z])", re.IGNORECASE)
#: Number after which a label begins, with the number's unit if further words follow.
AMOUNT = re.compile(
    rf"(?<!per[\s_-])(?<![a-z]/)\b\d[\w./%µ]*(?:\s{UNNAMED}(?=[^\d]*[a-z]))?",
    re.IGNORECASE,
)
#: Characters that are skipped if they precede the number in a pattern's group.
START = " \t([{:=~<\"'"
#: Label of a rank: of `mpirun --tag-output`, of torchrun and programs (`[rank0]:`), of `srun --label` (`0: `).
RANKED = re.compile(
    r"^\s*\[([^\s,\]]*,\d+)\]<"
    r"|(?:^\s*|[\[(<])((?:rank|default|trainer|worker|proc(?:ess)?|task|gpu|cuda|device)[\s:=_#-]*\d+)(?![\d.])"
    r"|^\s*\[?(\d+)(?:\]|:)(?!\d)",
    re.IGNORECASE,
)
#: Words before a rate that name a progress bar or phase, and the bar's number of steps.
WORDS = re.compile(r"(?<![\w.+-])[A-Za-z][A-Za-z_]+(?!\w)|(?<=/)\d+(?= \[)")
#: Maximum number of these `WORDS` before a rate.
MAX_WORDS = 8
#: A number with a mark that may separate thousands or decimals; a number of at most three digits, without a mark.
AMBIGUOUS, NEUTRAL = re.compile(r"[1-9]\d{0,2}[.,]\d{3}"), re.compile(r"\d{1,3}")
#: Maximum length of the label before a number, characters.
MAX_LABEL = 100
#: A rate in the form that a progress bar inverts below 1/s, or has inverted: `0.80it/s` becomes `1.25s/it`.
INVERTIBLE = re.compile(r"(\d[\d.]*)(?:s/([A-Za-z]+)|([A-Za-z]+)/s)")
#: Maximum number of inverted rates that wait for a match of their bar.
MAX_INVERTED = 10_000
POWERS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}


def plain(text: str) -> str:
    """Return a text without the escape sequences of a terminal."""
    return ESCAPES.sub("", text) if "\x1b" in text else text


def number_in(text: str) -> float | None:
    """Parse a number that may have a decimal point or comma, and thousands separators; return None for other text.

    A comma before three digits separates thousands, unless the number begins with 0: `1,234` is 1234, `0,234` is 0.234.
    """
    text = text.rstrip(".,").replace("’", "'")
    for mark in "' \u00a0\u2009\u202f":
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


def parts_of(match: re.Match[str], suffixes: re.Pattern[str]) -> tuple[float, str, str] | None:
    """Return the number in a pattern's group, the rest of the group, and the rest of the line.

    A suffix such as `k` multiplies the number, and is not part of either rest. Return None if the group has no number,
    or only a part of the line's number.
    """
    group = (match[1] or "").lstrip(START)
    before, line = match.string[: match.end(1) - len(group)], match.string[match.end(1) - len(group) :]
    found, whole = NUMBER.match(group), NUMBER.match(line)
    number, complete = (number_in(each["number"]) if each else None for each in (found, whole))
    # A pattern may name the separator before its group: `^\d+,([\d.]+)` matches the second number of a list.
    separator = re.escape(before[-1:]) + (r"|\\s" if before.endswith(" ") else "")
    named = re.search(rf"(?:{separator})[+*]?\(", match.re.pattern)
    head = None if match.start() < match.start(1) and named else OUTSIDE.search(before)
    joined = NUMBER.match(head[0] + found["number"]) if head and found else None
    if (
        not found
        or number is None
        or HEAD.search(before)
        or TAIL.match(whole["rest"] if whole else "")
        or (joined and not joined["rest"] and number_in(joined["number"]) is not None)
        or (complete is not None and abs(complete - number) > MAX_CUT * abs(number))
    ):
        return None
    after = found["rest"] + match.string[match.end(1) :]
    if suffix := suffixes.match(after):
        return number * POWERS[suffix[1] or suffix[2]], "", after[suffix.end() :]
    return number, found["rest"], after


def value_of(match: re.Match[str]) -> float | None:
    """Return the number in a pattern's group; a suffix such as `k` multiplies it, and % divides it by 100.

    Return None if the group has no complete number, or if letters that are not a unit follow the number.
    """
    found = parts_of(match, GLUED)
    if not found or (re.match(r"[A-Za-z_\d]", found[1]) and not AFTER.match(found[2])):
        return None
    return found[0] / 100 if re.match(r"\s?%", found[2]) else found[0]


def label_of(match: re.Match[str]) -> str:
    """Return the label of a pattern's group.

    The label is the longer of two texts that end at the group: one text begins after the line's last number or
    separator, the other text begins after the last number in the match.
    """
    before, own = match.string[: match.start(1)][-MAX_LABEL:], match.string[match.start() : match.start(1)][-MAX_LABEL:]
    return max(re.split(r"[,;|\0]", AMOUNT.sub("\0", before))[-1], AMOUNT.sub("\0", own).split("\0")[-1], key=len)


def rate_of(match: re.Match[str]) -> tuple[str, float] | None:
    """Return the kind of a rate, `PER_STEP` or "" (samples/s), and its value; None for other numbers.

    The unit follows the number, or is in the label before the number. A number without a unit is a rate in samples/s,
    unless its label names another quantity.
    """
    found = parts_of(match, SUFFIX)
    if not found or not 0 < found[0] < MAX_RATE or re.match(r"\s?%", found[2]):
        return None
    number, rest, after = found
    known = any(each.match(after) for each in (AFTER, DURATION, COUNTED))
    if FACTOR.match(after) or (re.match(r"[A-Za-zµ]", after) and not known):
        return None
    label = label_of(match)
    unit, named = AFTER.match(after), list(IN_LABEL.finditer(label))[-1:]
    if named and (not unit or re.match(r"\s+[-+.]?\d", after[unit.end() :])):
        unit = named[0]
    own = AFTER.match(after) or DURATION.match(after)
    rest_of_line = BEFORE_DEVICE.sub("", after[own.end() if own else 0 :], count=1)
    if (
        OF_DEVICE.match(rest_of_line)
        or OF_DEVICE.search(label)
        or MICRO.search(label + after[: own.end() if own else 0])
    ):
        return None
    if unit:
        return _in_unit(number, unit)
    if (time := DURATION.match(after) or TIME_LABEL.search(label)) and ONE_STEP.search(label):
        return PER_STEP, 1 / (number * SECONDS[time["time"].lower()])
    if time or NO_RATE.search(label) or re.match(r"[A-Za-z_\d]", rest):
        return None
    return "", number


def inverted(text: str) -> str:
    """Return a line with its rates in the other form: `1.25s/it` becomes `1.25it/s`, with the same digits."""
    return INVERTIBLE.sub(lambda rate: f"{rate[1]}{rate[2]}/s" if rate[2] else f"{rate[1]}s/{rate[3]}", text)


def words_of(match: re.Match[str]) -> str:
    """Return the words before a rate, which identify its progress bar or phase."""
    return " ".join(WORDS.findall(match.string[: match.start(1)])[:MAX_WORDS])


def digits_of(match: re.Match[str]) -> str:
    """Return the number in a pattern's group as it is printed."""
    found = NUMBER.match((match[1] or "").lstrip(START))
    return found["number"].rstrip(".,") if found else ""


def text_of(match: re.Match[str]) -> str:
    """Return the text that a pattern matched, with some of the text after the match."""
    return match.string[match.start() : match.end() + 20].strip()[:MAX_SHOWN]


def _in_unit(number: float, unit: re.Match[str]) -> tuple[str, float] | None:
    if unit["short"]:
        return (PER_STEP, number) if unit["short"].lower() == "ups" else None
    if unit["noun"]:
        kind, rate = unit["noun"], number / SECONDS[unit["time"].lower()]
        if large := GLUED.match(kind):
            kind, rate = kind[1:], rate * POWERS[large[1]]
        if OTHER.fullmatch(kind := re.split(r"(?<=[a-z])(?=[A-Z])", kind)[-1]):
            return None
    else:
        kind, rate = unit["of"], 1 / (number * SECONDS[unit["each"].lower()])
        if not re.fullmatch(rf"{STEP}|{SAMPLE}", kind, re.IGNORECASE):
            return None
    return (PER_STEP if re.fullmatch(STEP, kind, re.IGNORECASE) else ""), rate


class Finder:
    """Find numbers in lines by named patterns with one group; the pattern of rates has the name "".

    `found` maps the name of a pattern to times (seconds since 1970-01-01 UTC) and numbers. If `record` is given, the
    numbers are also written to this file.
    """

    def __init__(self, looked: Mapping[str, re.Pattern[str]], record: Path | None = None) -> None:
        self.found = {name: list[tuple[float, float]]() for name in ["", PER_STEP, *looked]}
        #: First text that matches a pattern but has no number or rate, and number of such texts, by the pattern's name.
        self.refused = dict[str, list[Any]]()
        self._labels = Counter[str]()
        #: Rates, by kind (`PER_STEP` or "") and by the words before the rate.
        self.bars = defaultdict[str, defaultdict[str, list[float]]](lambda: defaultdict(list))
        self.texts = dict[str, str]()  #: First number of each form: `ambiguous` and `clear` use of `.` and `,`.
        self.slow = Counter[str]()  #: Number of lines on which a pattern took too long, by the pattern's name.
        self.missed = 0  #: Number of lines that were not searched.
        self._record = record
        self._waiting = queue.Queue[bytes](MAX_WAITING)
        patterns = json.dumps({name: pattern.pattern for name, pattern in looked.items()})
        command = [sys.executable, "-I", "-S", __file__, patterns]
        # The separate session protects the process from a terminal's Ctrl-C, which is for the program.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def look(self, when: float, lines: list[bytes]) -> None:
        """Queue lines that arrived at the time `when` for the search; if the queue is full, skip and count them."""
        for line in lines:
            try:
                self._waiting.put_nowait(b"%.6f %s\n" % (when, line[: 4 * MAX_LINE]))
            except queue.Full:
                self.missed += 1

    def close(self) -> None:
        """Wait until all lines are searched, or for `PATIENCE_SECONDS`; then end the process."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(b"", timeout=PATIENCE_SECONDS)
        self._threads[-1].join(PATIENCE_SECONDS)
        if self._threads[-1].is_alive():
            self.missed += self._waiting.qsize()
        self._process.kill()
        self._process.wait()

    def ranks(self) -> list[str]:
        """Return the labels of ranks in the lines with rates; repeated numbers 0, 1, 2 and so on count as labels."""
        bare = sorted(int(label) for label, count in self._labels.items() if label.isdecimal() and count > 1)
        named = (label for label in self._labels if not label.isdecimal())
        return sorted(named) or [str(number) for number in bare if bare == [*range(len(bare))]]

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
            elif name == RANK:
                self._labels[number] += 1
            elif name == LABEL:
                kind, words, rate, text = number
                self.bars[kind][words].append(rate)
                if not NEUTRAL.fullmatch(text):
                    self.texts.setdefault("ambiguous" if AMBIGUOUS.fullmatch(text) else "clear", text)
            elif isinstance(number, str):
                self.refused.setdefault(name, [number, 0])[1] += 1
            else:
                self.found[name].append((when, number))
                if self._record:
                    with contextlib.suppress(OSError), open(self._record, "ab", opener=_open_own) as file:
                        file.write(line)


def _open_own(file: str, flags: int) -> int:
    # Refuse a link, and a pipe without a reader, because another user may have created them.
    return os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def main() -> None:
    """Read lines with their times; print each number found as JSON, with the pattern's name and the time.

    In place of the number, print the text of a match without a number or rate, and null for a pattern that is too slow.
    For a rate, also print the words before it and its digits, and the label of a rank in its line. A rate that a bar
    has inverted counts if the pattern matches other lines of this bar.
    """

    def late(number: int, frame: object) -> None:
        raise TimeoutError

    def report(name: str, when: str, match: re.Match[str], inverse: bool = False) -> None:
        kind, number = (name, value_of(match)) if name else rate_of(match) or ("", None)
        number = 1 / number if number and inverse else number
        print(json.dumps([kind, float(when), text_of(match) if number is None else number]), flush=True)
        if name or number is None:
            return
        print(json.dumps([LABEL, float(when), [kind, words_of(match), number, digits_of(match)]]), flush=True)
        if rank := RANKED.search(match.string):
            print(json.dumps([RANK, float(when), rank[rank.lastindex or 0]]), flush=True)

    signal.signal(signal.SIGVTALRM, late)
    looked, slow = {name: re.compile(text) for name, text in json.loads(sys.argv[1]).items()}, Counter[str]()
    bars, waiting, count = set[str](), defaultdict[str, list[Any]](list), 0
    for line in sys.stdin.buffer:
        when, _, rest = line.decode(errors="replace").partition(" ")
        text = plain(rest.rstrip("\n"))[:MAX_LINE]
        for name, pattern in looked.items():
            if slow[name] >= MAX_SLOW:
                continue
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
            try:
                match, inverse = pattern.search(text), False
                if not (match or name) and (other := inverted(text)) != text:
                    match, inverse = pattern.search(other), True
            except TimeoutError:
                slow[name] += 1
                print(json.dumps([name, float(when), None]), flush=True)
                continue
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if not match:
                continue
            bar = "" if name else words_of(match)
            if inverse and bar not in bars:
                count += 1
                if count <= MAX_INVERTED:
                    waiting[bar].append((when, match))
                continue
            if not (name or inverse):
                bars.add(bar)
                for seen, other_form in waiting.pop(bar, ()):
                    report(name, seen, other_form, inverse=True)
            report(name, when, match, inverse)


if __name__ == "__main__":
    main()
