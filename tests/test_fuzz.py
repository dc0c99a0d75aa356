"""Each function that reads a file accepts a damaged file, or refuses it with one message (`make test-fuzz`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlscale.core.errors import UserError
from tests.fuzz import __main__ as campaign
from tests.fuzz.readers import READERS, Reader


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_ends_in_a_message(tmp_path: Path, name: str) -> None:
    rows = campaign.Server(name, 0, tmp_path / "files").run(range(5))
    assert not [row for row in rows if row[1] in campaign.DEFECTS]


#: Reader, file, and content that once ended in a traceback.
CRASHERS = (
    ("replayed turns", "turns.host.7", b"20 0 8 x 4 4096 0 0\n20\n\xff\n"),
    ("replayed turns", "turns.host.7.now", b"25\0 4"),
    ("losses of earlier tries", "out.losses.json", b'{"step": "1", "counted": true, "curves": {"a": [[1]]}}'),
    ("losses of earlier tries", "out.losses.json", b"\xff"),
    ("printed losses", "steps/printed", b'1\n["loss/valid", 1e999, 1]\n\xff\n' + b"[" * 20_000),
    ("hang reports", "steps/hang.status.host.7", b'{"pid": 7}'),
    ("findings of hangs", "results/plans/p/a/hang/finding.txt", b"\xb9"),
    (
        "loader notes",
        "steps/loader.host.7",
        b'{"host": "h", "pid": 7, "parent": 6, "loaders": [{"dataset": "A", "workers": 1, "pin_memory": false,'
        b' "waited": 1, "firsts": 1, "first_waited": 1, "batches": 1%s}]}' % (b"0" * 400),
    ),
    ("health notes", "steps/health.host.7", b"begin 1.7e9 1000\nm 1005 5\nm inf 1 2\nk []\n"),
    ("profiled window", "steps/torch.host.7.window", b"[]"),
    ("profiled window", "steps/torch.host.7.json", b'{"traceEvents": [1]}'),
    ("py-spy stacks", "profile/py-spy.folded", b'process 7:"p";thread (7): MainThread;f x\n'),
    ("progress", "logs/train/p/a.log.doing", b'{"what": "a", "unit": "b", "total": 1, "done": 1%s}' % (b"0" * 400)),
    ("progress", "logs/train/p/a.log.doing", b'{"what": "a", "place": "elsewhere", "time": -1e300}'),
)


@pytest.mark.parametrize(("name", "file", "content"), CRASHERS)
def test_known_damage_is_left_out_or_refused(tmp_path: Path, name: str, file: str, content: bytes) -> None:
    READERS[name].make(tmp_path / "files")
    (tmp_path / "files" / file).write_bytes(content)
    with contextlib.suppress(UserError):
        READERS[name].read(tmp_path / "files")


def _raise(error: BaseException) -> None:
    raise error


#: Outcome → reader with this outcome.
TOYS: dict[str, Callable[[], object]] = {
    "ok": lambda: None,
    "message": lambda: _raise(UserError("a.txt: not a number; write one")),
    "unclear": lambda: _raise(AssertionError()),
    "traceback": lambda: _raise(KeyError("a")),
    "memory": lambda: bytearray(2**36),
    "hang": lambda: time.sleep(60),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}


@pytest.mark.parametrize("outcome", TOYS)
def test_each_outcome_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    """The case after a crash or a hang is still run."""

    def read(folder: Path) -> None:
        if (folder / "a.txt").read_bytes() == b"damaged":
            TOYS[outcome]()

    def damage(file: Path, other: bytes, random: Any) -> None:
        file.write_bytes(b"damaged")

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "a.txt").touch()

    monkeypatch.setitem(READERS, "toy", Reader(make, read, "*", damage))
    monkeypatch.setattr(campaign, "LIMIT_S", 0.05 if outcome == "hang" else 10.0)
    rows = campaign.Server("toy", 1, tmp_path / "files").run([3, 4])
    assert [row[:2] for row in rows] == [(3, outcome), (4, outcome)]


@pytest.mark.parametrize("runnable", [True, False])
def test_a_case_on_a_busy_machine_does_not_hang(monkeypatch: pytest.MonkeyPatch, runnable: bool) -> None:
    """Sleep and CPU time count towards the time limit, but waiting for a core does not."""
    process = SimpleNamespace(cpu_times=lambda: (1.0,), status=lambda: "running" if runnable else "sleeping")
    monkeypatch.setattr(campaign.psutil, "Process", lambda number: process)
    answers = iter([False] * 200 + [True])
    ends = SimpleNamespace(poll=lambda seconds: next(answers))
    assert campaign._answers(ends, 1) is runnable


def test_a_campaign_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A logged batch is not repeated, a torn last line is ignored, and a defect fails the campaign."""
    words = ["fuzz", "--readers", "JSON lines", "--work", str(tmp_path), "--count"]
    monkeypatch.setattr(sys, "argv", [*words, "3"])
    assert campaign.main() == 0
    log = tmp_path / "log.jsonl"
    row = json.loads(log.read_text())
    assert (row["begin"], row["end"], sum(row["outcomes"].values())) == (0, 3, 3)
    log.write_text(json.dumps(row | {"outcomes": {"hang": 3}, "defects": [[2, "hang", ""]]}) + '\n{"torn')
    monkeypatch.setattr(sys, "argv", [*words, "4"])
    assert campaign.main() == 1
    assert json.loads(log.read_text().splitlines()[-1])["begin"] == 3
    assert "hang: python -m tests.fuzz --readers 'JSON lines' --seed 1 --only 2" in capsys.readouterr().out
