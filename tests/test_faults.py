"""The campaign of faults (`make test-faults`) detects programs that do not survive a fault."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import changed
from tests.faults import __main__ as campaign
from tests.faults.kinds import FAULTS, Trial, shim
from tests.faults.tree import COMMANDS, Command, Tree

#: Program that needs two seconds for its result. Its argument is its defect.
TOY = """
import os, pathlib, subprocess, sys, time
defect, folder = sys.argv[1], pathlib.Path("results/plans/faults/ours")
folder.mkdir(parents=True, exist_ok=True)
tried, result = pathlib.Path("tried"), folder / "model.pt"
if tried.exists() and defect == "hung":
    time.sleep(1000)
if tried.exists() and defect == "unclear":
    raise ValueError
if tried.exists() and defect == "refused":
    sys.exit("toy: a message without a remedy")
if defect == "processes left":
    subprocess.Popen(["sleep", "1000"])
tried.touch()
if result.exists():
    sys.exit()
part = result if defect == "wrong" else result.with_name(f".model.pt.{os.getpid()}.part")
for left in folder.glob(".*") if defect != "files left" else ():
    left.unlink()
with part.open("w") as file:
    for piece in range(20):
        print(piece, file=file, flush=True)
        time.sleep(0.1)
os.replace(part, result)
"""


@pytest.mark.parametrize(
    "defect",
    [
        *("right", "wrong", "files left"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("unclear", "refused", "hung", "processes left")),
    ],
    ids=str,
)
def test_a_defect_is_detected(defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program killed while it writes is judged by its defect; without a defect, the repeated call is right."""
    tree = Tree(tmp_path / "tree", f"toy-{tmp_path}")
    tree.path.mkdir()
    (tree.path / "toy.py").write_text(TOY)
    monkeypatch.setitem(COMMANDS, "run", Command([sys.executable, "toy.py", "right"], (), "", ("results/*",)))
    assert tree.start(COMMANDS["run"].words).process.wait(60) == 0
    expected = tree.digests()
    (tree.results / "plans/faults/ours/model.pt").unlink()
    (tree.path / "tried").unlink()

    monkeypatch.setitem(COMMANDS, "run", Command([sys.executable, "toy.py", defect], (), "", ("results/*",)))
    monkeypatch.setattr(campaign, "GRACE_S", 1.0)
    trial = Trial(random.Random(0), tree, "fresh", "run", usual=1.0)
    try:
        outcome = campaign.judge(trial, _killed_in_a_write, expected, limit=10)
    except campaign.Failed as failure:
        outcome = failure.outcome
    finally:
        tree.end()
    assert outcome == defect, trial.point


def _killed_in_a_write(trial: Trial):  # type: ignore[no-untyped-def]
    """Kill the program as soon as it has written a part of its result."""
    steps = FAULTS["kill"](trial)
    next(steps)
    yield
    while not [file for file in trial.tree.results.rglob("*") if file.is_file()]:
        assert trial.running
    trial.usual = 0.0
    next(steps)
    yield


def test_an_uncommitted_change_begins_a_campaign_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    for name in ("code", "docs"):
        (tmp_path / name).write_text("a")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    keys = [changed.commit("code")]
    for name, text in (("docs", "b"), ("code", "b"), ("code", "c")):
        (tmp_path / name).write_text(text)
        keys.append(changed.commit("code"))
    assert [keys.index(key) for key in keys] == [0, 0, 2, 3]


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_the_shim_shifts_the_clock_and_delays_writes_in_one_folder(tmp_path: Path) -> None:
    """The clock is a day ahead of this process's clock, and only writes in the slow folder wait."""
    code = """
import os, sys, time
print(time.time())
for folder in sys.argv[1:]:
    begin = time.monotonic()
    with open(folder + "/part", "w") as file:
        file.write("a")
        file.flush()
        os.fsync(file.fileno())
    os.rename(folder + "/part", folder + "/whole")
    print(time.monotonic() - begin)
"""
    folders = [tmp_path / "slow", tmp_path / "fast"]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "control").write_bytes(struct.pack("qq", 86400, 500_000))
    variables = {"LD_PRELOAD": shim(tmp_path), "FAULTS_SHIM": tmp_path / "control", "FAULTS_SLOW": folders[0]}
    command = [sys.executable, "-S", "-c", code, *folders]
    printed = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True).stdout
    clock, slow, fast = map(float, printed.split())
    assert clock - time.time() == pytest.approx(86400, abs=60)
    assert slow - fast > 1, "three operations wait for half a second each"


def test_a_message_must_name_the_lost_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed call whose message lacks the expected name is unclear, although the repeated call is right."""
    tree = Tree(tmp_path / "tree", f"named-{tmp_path}")
    tree.path.mkdir()
    code = (
        "import pathlib, sys; f = pathlib.Path('t'); g = f.exists(); f.touch(); sys.exit(0 if g else 'process 1 ended')"
    )
    monkeypatch.setitem(COMMANDS, "run", Command([sys.executable, "-c", code], (), "", ("results/*",)))

    def outcome(expects: str) -> str:
        def fault(trial: Trial):  # type: ignore[no-untyped-def]
            yield
            trial.expects = expects
            yield

        (tree.path / "t").unlink(missing_ok=True)
        for said in tmp_path.glob("call-*"):
            said.unlink()
        try:
            return campaign.judge(Trial(random.Random(0), tree, "fresh", "run", usual=1.0), fault, {}, limit=60)
        except campaign.Failed as failure:
            return failure.outcome

    assert (outcome("process [01]"), outcome("process [23]")) == ("right", "unclear")


def test_a_campaign_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A logged trial is not repeated, a torn last line is ignored, and a failed trial fails the campaign."""
    commit, log = changed.commit(*campaign.SOURCES), tmp_path / "log.jsonl"
    (tmp_path / commit / "base").mkdir(parents=True)
    (tmp_path / commit / "base/expected.json").write_text('{"digests": {}, "seconds": {}}')
    row = {"commit": commit, "seed": 1, "kind": "kill", "outcome": "right", "seconds": 1.0}
    rows = [{**row, "k": 0}, {**row, "k": 1, "outcome": "wrong"}, {**row, "k": 2, "seed": 2}]
    log.write_text("".join(json.dumps(each) + "\n" for each in rows) + '{"torn')
    run: list[int] = []

    def run_trial(args: object, k: int, *_: object) -> dict[str, object]:
        run.append(k)
        return {
            "kind": "term",
            "what": "run",
            "state": "fresh",
            "point": "",
            "outcome": "right",
            "reason": "",
            "seconds": 2,
        }

    monkeypatch.setattr(campaign, "run_trial", run_trial)
    monkeypatch.setattr(sys, "argv", ["faults", "--count", "4", "--work", str(tmp_path)])
    assert campaign.main() == 1
    assert run == [2, 3]
    said = capsys.readouterr().out
    assert "--seed 1 --count 4 --only 1" in said
    assert campaign.main() == 1 and run == [2, 3], "the log must have the new trials, even after a torn line"
    for part in ("2/2", "1/2"):
        monkeypatch.setattr(sys, "argv", ["faults", "--count", "7", "--work", str(tmp_path), "--part", part])
        campaign.main()
    assert run == [2, 3, 5, 4, 6]


def test_only_the_program_may_print_a_traceback() -> None:
    """The program's own traceback, as after Ctrl-C, does not count; a traceback of dlscale does."""
    own = 'Traceback (most recent call last):\n  File "/x/train.py", line 3, in <module>\nKeyboardInterrupt\n'
    ours = 'Traceback (most recent call last):\n  File "/x/dlscale/cli.py", line 3, in main\nKeyError: 1\n'
    assert campaign._defect(f"{own}dlscale measure: the program received SIGINT\n") == ""
    assert campaign._defect(own + ours).startswith(ours.rstrip())
    stage = own.replace('train.py"', 'workflow_scripts/dlscale/train/train.py"')
    assert stage != own and campaign._defect(stage).startswith("Traceback")
    assert campaign._defect("a\ndlscale train: a defect of dlscale: KeyError\nb") == (
        "dlscale train: a defect of dlscale: KeyError"
    )
