"""`dlscale measure --live`: lines on standard error while a program runs, without effect on the program."""

from __future__ import annotations

import fcntl
import os
import re
import statistics
import struct
import sys
import termios
from pathlib import Path

import pytest

from dlscale.core import telemetry
from dlscale.core.telemetry import GpuSample, Sample
from dlscale.extensions.programs import live, running
from tests.test_any_program import found, measure
from tests.test_outside import Clock

#: Program of two processes; each makes steps of 20 ms with 8 samples, half of the time waiting.
PROGRAM = """
import dlscale, os, sys, time
def batches():
    for _ in range(int(sys.argv[1])):
        time.sleep(0.01)
        yield [0] * 8
os.environ["RANK"] = str(int(os.fork() == 0))
for number, batch in enumerate(dlscale.timed(batches())):
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end: pass
    if number % 50 == 0: print(number, end="\\r", flush=True)
if os.environ["RANK"] == "0": os.wait()
"""


def shown(stderr: str) -> list[str]:
    return re.findall(r"^dlscale \d+:\d\d: .*", stderr, re.MULTILINE)


@pytest.mark.slow
def test_the_speed_of_a_running_program_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shown rate is that of the result; the program's output is unchanged, also with several processes."""
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.setenv(live.EVERY, "1")
    done = measure(tmp_path, "--live", "--", sys.executable, "train.py", 250)
    lines = shown(done.stderr)
    assert done.returncode == 0 and len(lines) >= 4, done.stderr
    rates = [float(each.replace(",", "")) for each in re.findall(r": ([\d,.]+) (?:samples|steps)/s", "\n".join(lines))]
    full = found(tmp_path).full
    assert full and full.mean and rates and statistics.median(rates) == pytest.approx(full.mean, rel=0.2)
    assert re.search(r"waiting for data [3-7]\d\s%, [\d.]+ of \d+ cores, memory [\d.]+\s[kMG]B", "\n".join(lines))
    assert done.stderr.index(lines[-1]) < done.stderr.index("train: ")
    plain = measure(tmp_path, "--name", "plain", "--", sys.executable, "train.py", 20)
    assert not shown(plain.stderr)
    short = measure(tmp_path, "--name", "short", "--live", "--", sys.executable, "train.py", 20)
    assert plain.stdout == short.stdout != ""


def test_a_failing_view_leaves_the_program_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the telemetry is damaged, the view ends with a message, and the program continues."""
    monkeypatch.setenv(live.EVERY, "0.4")
    damage = (
        "import os, time; time.sleep(1); rows = os.environ['DLSCALE_STEPS'] + '/../telemetry/throughput.csv'\n"
        "open(rows, 'w').write('x,y\\n' * 10_000); time.sleep(1); print('ended')"
    )
    done = measure(tmp_path, "--live", "--", sys.executable, "-c", damage)
    assert done.stdout == "ended\n" and done.returncode == 0
    assert shown(done.stderr) and done.stderr.count("dlscale: the live view ended (ValueError") == 1


def screen(written: str, columns: int) -> list[str]:
    """Return the rows of a terminal; a character that follows a full row begins the next row."""
    rows, place = [""], 0
    for part in re.findall(r"\r|\n|\033\[K|.", written):
        if part == "\n":
            rows.append("")
        elif part == "\033[K":
            rows[-1] = rows[-1][:place]
        elif part == "\r":
            place = 0
        else:
            if place == columns:
                rows.append("")
                place = 0
            rows[-1] = rows[-1][:place].ljust(place) + part + rows[-1][place + 1 :]
            place += 1
    return [row.rstrip() for row in rows]


@pytest.mark.parametrize("columns", [40, 0])
def test_lines_and_progress_bars_do_not_mix(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """On a terminal, a message of dlscale begins in its own row, also after a full row of a bar; no row is empty.

    If the terminal's width is unknown, the message replaces the bar, which the measured program prints again.
    """
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        for bar in ("", "\r 10% #         ", f"\r 20% {'#' * 35}", "\r 90%\n"):
            terminal.write(bar)
            terminal.flush()
            running.say("12 samples/s")
        written = ""
        while written.count("\n") < 5:  # four lines, and the end of the bar
            written += os.read(master, 65536).decode()
    os.close(master)
    bars = [" 10% #", f" 20% {'#' * 35}", " 90%"] if columns else ["", "", " 90%"]
    expected = [row for bar in ("", *bars) for row in (bar, "12 samples/s") if row]
    assert screen(written.replace("\r\n", "\n\r"), columns or 40) == [*expected, ""]


# ---- lines, from notes with a simulated clock ----------------------------------------------------------


def view(folder: Path) -> live.View:
    """Return a view of a program that began at 1.7e9 s, with a row of telemetry."""
    rows = folder / "rows.csv"
    row = Sample(1.7e9 + 100, 1.0, 4, cpu=0.5, cpu_run=0.5, cpu_others=0.0, rss_bytes=2e9)
    rows.write_text(telemetry.header(0) + telemetry.line(row))
    found = live.View(folder, rows, 10.0)
    found._begin = 1.7e9
    return found


def test_only_the_last_seconds_count(tmp_path: Path) -> None:
    """A line shows the present speed, not the mean; only new notes are read."""
    clock, shown = Clock(tmp_path), view(tmp_path)
    assert re.fullmatch(r"0:05: no step .*, 2\.0 of 4 cores, .*2\.00\sGB", shown.line(1.7e9 + 5))
    clock.epoch(400, wait=0.0, seconds=0.1)
    assert "40" in shown.line(1.7e9 + 40)
    clock.epoch(100, wait=0.15, seconds=0.05)
    assert shown.line(1.7e9 + 60).startswith("1:00: 40.0 samples/s, waiting for data 75\u00a0%, 2.0 of 4 cores")
    place = shown._tails["seen.host.0"]._place
    assert place == clock.file.stat().st_size
    assert "no step for 1\u00a0min 0\u00a0s" in shown.line(1.7e9 + 120)


def test_slow_steps_and_pauses_of_the_notes(tmp_path: Path) -> None:
    """Lines show the speed even of steps longer than the time between lines. Pauses of the notes are not stalls."""
    clock, shown = Clock(tmp_path), view(tmp_path)
    clock.epoch(12, wait=1.0, seconds=29.0)
    assert "0.267 samples/s, waiting for data 3\u00a0%" in shown.line(1.7e9 + 361)
    clock.note(f"g {clock.now:.6f} {clock.now + 100:.6f}")
    assert "samples/s" in shown.line(1.7e9 + 450) and "no step" in shown.line(1.7e9 + 470)


def test_a_finding_is_shown_when_it_is_found_twice(tmp_path: Path) -> None:
    clock, shown = Clock(tmp_path), view(tmp_path)
    clock.epoch(100, wait=0.15, seconds=0.05)
    first, second = (shown.line(1.7e9 + 20) for _ in range(2))
    assert second in (f"{first}, too few workers", f"{first}, the loader's work")  # with and without an idle core


def test_gpus(tmp_path: Path) -> None:
    gpus = (GpuSample(0.8, 10e9), GpuSample(0.6, 30e9))
    text = live._devices([Sample(0, 1, 4, cpu_run=0.5, rss_bytes=2e9, gpus=gpus)])
    assert text == ["GPUs 70\u00a0%", "GPU memory 30.0\u00a0GB", "memory 2.00\u00a0GB"]


def test_telemetry_is_read_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = live.Rows(path)
    assert rows.read(0) == []
    with path.open("w", buffering=1) as file:
        text = telemetry.line(Sample(1.0, 1.0, 4, cpu_run=0.5))
        file.write(telemetry.header(0) + text[:9])
        file.flush()
        assert rows.read(0) == []
        file.write(text[9:] + telemetry.line(Sample(2.0, 1.0, 4)))
        file.flush()
        assert [each.time for each in rows.read(0)] == [1.0, 2.0]
        file.write(telemetry.line(Sample(3.0, 1.0, 4)))
        file.flush()
        assert [each.time for each in rows.read(1.5)] == [2.0, 3.0]
        assert [each.time for each in rows.read(9.0)] == [3.0]
