"""How far a call is, from what its jobs leave; the process that shows it."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from dlscale.core.progress import SUFFIX, Doing
from dlscale.preflight import status
from tests.waiting import PATIENCE, until


def job(folder: Path, name: str, seconds: float = 10.0, share: float = 1.0, rule: str = "train") -> status.Job:
    return status.Job(name, rule, str(folder / f"{name}.log"), str(folder / f"{name}.tsv"), seconds, share)


def tell(job: status.Job, **more: object) -> None:
    """Have a process of another machine say what it does."""
    doing = {"what": "training", "done": 30, "total": 120, "unit": "steps", "left": 90.0, "time": time.time()}
    Doing.model_validate({**doing, "place": "elsewhere", "values": {"samples/s": 1234.0}, **more}).write(
        f"{job.log}{SUFFIX}"
    )


def end(job: status.Job, seconds: float | None = None) -> None:
    Path(job.benchmark).write_text(f"s\th:m:s\n{seconds or job.seconds}\t0:00:02\n")
    Path(f"{job.log}{SUFFIX}").unlink(missing_ok=True)


def test_what_is_left_is_time_not_jobs(tmp_path: Path) -> None:
    """Jobs that fill the machine wait for one another; those that take a part of it run side by side."""
    now = time.time()
    whole = [job(tmp_path, name, 10) for name in "ab"]
    parts = [job(tmp_path, name, 4, 0.25) for name in "cdef"]
    progress = status.CallProgress(now, [*whole, *parts])
    progress.look(now)
    assert not progress.done and progress.left(now) == 24 and progress.share(now) == 0
    for each in parts:
        end(each)
    progress.look(now + 5)
    assert list(progress.done) == parts and progress.left(now + 5) == 20
    assert progress.share(now + 5) == pytest.approx(0.2)
    tell(whole[0], left=15.0, time=now + 5)
    progress.look(now + 6)
    assert progress.left(now + 6) == pytest.approx(14 + 10), "it says so itself"
    tell(whole[0], left=1.0, part=True, time=now + 6)
    progress.look(now + 6)
    assert progress.left_of(whole[0], now + 6) == pytest.approx(10), "others parts may follow"
    assert progress.left_of(whole[0], now + 106) == pytest.approx(10), "a tenth of what it has taken"
    end(whole[0], 20)
    progress.look(now + 6)
    assert progress.left(now + 6) == pytest.approx(10 * 36 / 26), "a slow machine"
    end(whole[1])
    progress.look(now + 20)
    assert progress.left(now + 20) == 0 and progress.share(now + 20) == 1
    alone = [job(tmp_path, "alone", 100, 0.1), job(tmp_path, "beside it", 10, 0.1)]
    assert status.CallProgress(now, alone).left(now) == 100, "however many run beside it, as on a cluster"


def test_what_an_earlier_call_left_is_not_done(tmp_path: Path) -> None:
    one = job(tmp_path, "a")
    end(one)
    progress = status.CallProgress(time.time() + 10, [one])
    progress.look(time.time() + 10)
    assert not progress.done


def test_a_line(tmp_path: Path) -> None:
    """What runs is what says so, and is named: how far it is, and how fast."""
    now = time.time()
    jobs = [job(tmp_path, "p.a"), job(tmp_path, "p.b")]
    tell(jobs[0], time=now)
    progress = status.CallProgress(now - 8, jobs)
    progress.look(now)
    assert status.line(progress, now).replace("\u00a0", " ") == (
        "7 % after 8.00 s; about 1 min 40 s left; 0 of 2 jobs; "
        "p.a train: 30 of 120 steps (25 %), 1,234 samples/s, 1 min 30 s left"
    )


def test_what_is_drawn(tmp_path: Path) -> None:
    """A bar of all, and a line for each process that there is, however many may run at once."""
    now = time.time()
    jobs = [job(tmp_path, f"p.{number}") for number in range(20)]
    tell(jobs[0], time=now)
    for each in jobs[1:14]:
        tell(each, what="starting", unit="", left=None, values={}, time=now)
    progress = status.CallProgress(now - 8, jobs)
    progress.look(now)
    console = Console(file=io.StringIO(), width=120)
    console.print(status.drawn(progress, now))
    assert isinstance(console.file, io.StringIO)
    first, *lines = console.file.getvalue().replace("\u00a0", " ").splitlines()
    assert first.split()[:2] == ["3", "%"] and "╸" in first
    assert re.split("  +", first.strip())[-2:] == ["0 of 20 jobs", "14 running"]
    assert re.split("  +", lines[0])[:3] == ["p.0", "train", "30 of 120 steps (25 %)"]
    assert lines[0].rstrip().endswith("1,234 samples/s  1 min 30 s left") and "starting" in lines[1]
    assert len(lines) == 14 and max(map(len, map(str.rstrip, [first, *lines[1:]]))) <= 80, "a terminal's width"


CALL = """
import json, os, pathlib, signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
folder = pathlib.Path(sys.argv[1])
job = dict(name="p.a", rule="train", log=f"{folder}/a.log", benchmark=f"{folder}/a.tsv", seconds=9, share=1)
pathlib.Path(os.environ["DLSCALE_TOLD"]).write_text(json.dumps([job]))
print("a word", flush=True)
(folder / "ready").touch()
while not (folder / "go").exists():
    time.sleep(0.05)
(folder / "a.tsv").write_text("s")
time.sleep(1)
print("interrupts:", len(seen), "stdin:", repr(sys.stdin.read()), flush=True)
print("the last word", flush=True)
sys.exit(7)
"""


LONG = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path("asked").touch()))
pathlib.Path("ready").touch()
for number in range(6000):
    if pathlib.Path("say").exists():
        print("a word", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_call_is_shown_and_ends_as_it_does(tmp_path: Path) -> None:
    """Its words, its status; Ctrl-C comes to it once."""
    command = [sys.executable, "-c", CALL, str(tmp_path)]
    code = f"import sys; from dlscale.preflight import status; sys.exit(status.shown({command!r}))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as shown:
        until("the call", (tmp_path / "ready").exists, shown)
        time.sleep(1)  # it has been looked at
        os.killpg(shown.pid, signal.SIGINT)  # as a terminal does
        time.sleep(0.5)
        (tmp_path / "go").touch()
        said = shown.stderr.read().splitlines()
        assert shown.wait() == 7
    assert said[0] == "a word" and said[-1] == "the last word"
    assert "interrupts: 1 stdin: ''" in said
    assert any(line.endswith("0 of 1 job") for line in said)


@pytest.mark.parametrize("how", ["TERM", "HUP", "KILL", "closed pipe"])
def test_nothing_goes_on_unseen(tmp_path: Path, how: str) -> None:
    """However who shows a call ends, the call is asked to end."""
    code = "import signal, sys; from dlscale.preflight import status; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    code += f"sys.exit(status.shown({[sys.executable, '-c', LONG]!r}))"
    shown = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True
    )
    until("the call", (tmp_path / "ready").exists, shown)
    if how == "closed pipe":
        shown.stderr.close()
        (tmp_path / "say").touch()
    else:
        send = os.killpg if how == "HUP" else os.kill  # of a lost terminal all of its processes hear
        send(shown.pid, signal.Signals[f"SIG{how}"])
    until("its end", (tmp_path / "asked").exists)
    shown.wait(timeout=PATIENCE)
    if how != "closed pipe":
        shown.stderr.close()


def test_a_call_that_is_killed(tmp_path: Path) -> None:
    assert status.shown([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]) == 137
