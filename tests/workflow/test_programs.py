"""External programs in plans with the real Snakemake: ladders, scaling, paired timing, tuning and reruns."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlscale.core.machine import CHANGED
from dlscale.core.noise import interval
from dlscale.results import RunResult, read_plan
from tests.conftest import TINY
from tests.waiting import PATIENCE
from tests.workflow.conftest import Outcome, Tree

#: Settings of a short paired timing.
TIMED = {"warmup": 1, "trials": 3, "batches": 4, "seconds": 0.0, "beside": 2, "error": 0.2}
#: Command of a program whose steps sleep, so that their duration hardly depends on the machine.
COMMAND = ["python", "theirs.py", "--batch-size", "{batch_size}", "--epochs", "{epochs}", "--sleep", "{sleep}"]
PROGRAM: dict[str, Any] = {
    "command": [*COMMAND, "--out", "{out}", "--seed", "{seed}"],
    "values": {"sleep": 0.04},
    "log": "{out}/log.jsonl",
    "losses": {"train": "loss/train", "val": "loss/valid"},
}
SETTINGS: dict[str, Any] = {
    "batch_size": 32,
    "training": {"epochs": 4},
    "throughput": TIMED,
    "program": PROGRAM,
}
#: Program whose loader and model take equally long.
LOADS = """
import pathlib, sys, time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        time.sleep(0.03)
        return torch.ones(4)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-6)
pathlib.Path(sys.argv[1], "started").touch()
for batch in torch.utils.data.DataLoader(Data()):
    time.sleep(0.03)
    net(batch).sum().backward()
    optimizer.step()
"""

CONFIG: dict[str, Any] = {
    "results": "results",
    "targets": ["ladder"],
    "datasets": {"mine": {"kind": "files", "source": {"paths": ["read.txt"]}}, "tiny": TINY["starter_cnn"]["dataset"]},
    "plans": {
        "ladder": {
            "study": "program",
            "kind": "ladder",
            "settings": {**SETTINGS, "dataset": "mine"},
            "runs": {"slow": {}, "fast": {"program": {"values": {"sleep": 0.01}}}},
        },
        "weak": {
            "study": "program",
            "kind": "weak_scaling",
            "settings": {**SETTINGS, "dataset": "mine"},
            "scaling": {"devices": [1, 2], "batch_sizes": [32]},
        },
        "beside": {
            "study": "starter_cnn",
            "measure": ["throughput"],
            "settings": {**TINY["starter_cnn"]["run"], "dataset": "tiny", "throughput": TIMED, "batch_size": 8},
            "runs": {"theirs": {"program": {key: PROGRAM[key] for key in ("command", "values")}}, "ours": {}},
        },
        "spare": {
            "study": "program",
            "measure": ["throughput", "headroom"],
            "settings": {"throughput": TIMED, "program": {"command": ["python", "loads.py", "{out}"]}},
            "runs": {"loads": {}},
        },
        "tuned": {
            "study": "program",
            "kind": "tune",
            "settings": {
                **SETTINGS,
                "dataset": "mine",
                "training": {"epochs": 400},
                "tune": {"seconds": 4, "values": {"sleep": [0.04, 0.005]}},
            },
            "runs": {"base": {}},
        },
    },
}


@pytest.fixture(scope="module")
def tree(make_tree: Callable[..., Tree]) -> Tree:
    made = make_tree(CONFIG)
    for name in ("theirs.py", "neighbour.py"):
        shutil.copy(Path(__file__).with_name(name), made.path)
    (made.path / "read.txt").write_text("what it reads\n")
    (made.path / "loads.py").write_text(LOADS)
    return made


def call(tree: Tree, *targets: str) -> Outcome:
    outcome = tree.snakemake("--cores", "2", "--", *targets)
    assert outcome.status == 0, outcome.output[-5000:]
    return outcome


def runs(tree: Tree, plan: str) -> dict[str, RunResult]:
    return {run.name: run for run in read_plan(tree.results / f"plans/{plan}/plan.yaml").runs}


def check_environments(tree: Tree) -> None:
    """Check that programs get the caller's variables unchanged, except for variables that docs/any_program.md lists."""
    found = [json.loads(file.read_text()) for file in tree.path.glob("environment.*.json")]
    timed = [each for each in found if "DLSCALE_STEPS_EVERY" in each]
    assert len(found) - len(timed) == 4 and len(timed) >= 4, (
        "expected two trainings, two measurements and paired timings"
    )
    callers = {name: value for name, value in tree.environment.items() if not name.startswith("DLSCALE_")}
    for each in found:
        assert each.pop("DLSCALE_STEPS_EVERY", "0.1") == "0.1"
        assert Path(each.pop("DLSCALE_STEPS")).name == "steps" and each.pop("DLSCALE_HOOKS") == "health/noted.py"
        hook = tree.path / "workflow_scripts/dlscale/extensions/programs/hook"
        assert each == {**callers, "PYTHONPATH": f"{hook}{os.pathsep}{tree.environment['PYTHONPATH']}"}


@pytest.mark.slow
def test_dlscale_run_changes_no_environment(make_tree: Callable[..., Tree]) -> None:
    """A program and a user's rule get the caller's variables and `python`, and can import modules of their folders.

    The program lacks the variables of ranks, such as RANK, because dlscale starts one process for the program.
    """
    settings = {"program": {"command": ["python", "alone.py"], "rate": "nersc"}}
    settings |= {"throughput": {"trials": 2, "beside": 0}}
    plan = {"study": "program", "measure": ["throughput"], "settings": settings, "runs": {"one": {}}}
    tree = make_tree({"results": "results", "targets": ["p"], "plans": {"p": plan}})
    shutil.copy(Path(__file__).with_name("neighbour.py"), tree.path)
    rates = 'for number in range(9):\n    print("avg", 100 + number, "samples/sec", flush=True)\n'
    (tree.path / "alone.py").write_text(f"import neighbour\nneighbour.note_environment()\n{rates}")
    (tree.path / "own.smk").write_text(
        'include: "Snakefile"\nrule own:\n    output: directory("own")\n'
        '    shell: "mkdir {output}; cd {output}; python ../own.py"\n'
    )
    (tree.path / "own.py").write_text("import neighbour\nneighbour.note_environment()\n")
    (tree.path / "bin").mkdir()
    (tree.path / "bin/python").symlink_to(sys.executable)
    path = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if not Path(each, "python").exists())
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456"}
    given = {**tree.environment, "PATH": f"{tree.path / 'bin'}{os.pathsep}{path}", "MINE": "a=b c", "TMPDIR": "/tmp/"}
    words = ["run", "--configfile", "tiny.yaml", "-s", "own.smk", "--cores", "2", "--", "own", "plan_p"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dlscale", *words],
        cwd=tree.path,
        env={**given, **ranks},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    log = tree.results / "logs/throughput/p/one.log"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    (found,) = [json.loads(file.read_text()) for file in tree.path.glob("environment.*.json")]
    hook = tree.path / "workflow_scripts/dlscale/extensions/programs/hook"
    assert Path(found.pop("DLSCALE_STEPS")).name == "steps"
    added = {"PYTHONUNBUFFERED": "1", "DLSCALE_READ": "1", "DLSCALE_HOOKS": "health/noted.py"}
    assert found == {**given, **added, "PYTHONPATH": f"{hook}{os.pathsep}{given['PYTHONPATH']}"}
    assert read_plan(tree.results / "plans/p/plan.yaml").runs[0].throughput
    (file,) = tree.path.glob("own/environment.*.json")
    found = {name: value for name, value in json.loads(file.read_text()).items() if not name.startswith("DLSCALE_")}
    changed = {name for name in {*found, *given, *ranks} if found.get(name) != {**given, **ranks}.get(name)}
    assert changed <= {*CHANGED}, "only the variables of Snakemake and its shell may differ"


@pytest.mark.slow
def test_plans_of_programs(tree: Tree) -> None:
    """Rates match the program's sleeps and the paired timing, losses match its log, and only an edit reruns jobs."""
    call(tree)
    check_environments(tree)
    ladder = runs(tree, "ladder")
    for run, sleep in ((ladder["slow"], 0.04), (ladder["fast"], 0.01)):
        assert run.throughput and run.throughput.full and run.throughput.outside
        assert 0.4 < run.throughput.full.mean * sleep / 32 < 1, "the rate must be a little below the rate of the sleeps"
        assert run.throughput.outside.way == "seen" and run.throughput.batch_size == 32
        assert run.throughput.outside.gradient_bytes == 4 * (8 * 32 + 32 + 32 + 1)
        logged = [json.loads(line) for line in (run.folder / "out/log.jsonl").read_text().splitlines()]
        assert [epoch.valid_loss for epoch in run.epochs] == [row["val"] for row in logged]
        assert [epoch.step for epoch in run.epochs] == [16, 32, 48, 64]
    beside = ladder["fast"].throughput
    assert beside and beside.beside, "the second run must have a paired timing with the first"
    ratio = math.exp(interval(beside.beside.ratios)[0])
    own = ladder["fast"].throughput.full.mean / ladder["slow"].throughput.full.mean  # type: ignore[union-attr]
    assert 2 < ratio < 4.5 and abs(math.log(ratio / own)) < 0.5
    assert "fast" in (tree.results / "report/ladder.html").read_text()

    assert tree.planned(targets=["all"]).names == []
    (tree.path / "theirs.py").touch()
    (tree.path / "theirs.py").write_text((tree.path / "theirs.py").read_text() + "\n# edited\n")
    again = {f"{stage} ladder {run}" for run in ladder for stage in ("program", "throughput")}
    assert again <= set(tree.planned(targets=["all"]).names)


@pytest.mark.slow
def test_on_one_process_and_on_two(tree: Tree) -> None:
    call(tree, "plan_weak")
    for name, ranks in (("b32_program_1", 1), ("b32_program_2", 2)):
        found = runs(tree, "weak")[name].throughput
        assert found and found.full and found.outside and found.outside.way == "seen"
        assert len(found.full.rank_throughput) == found.nranks == ranks and found.batch_size == 32 * ranks


@pytest.mark.slow
def test_in_turns_with_a_study(tree: Tree) -> None:
    """A program and a study's run have a paired timing with each other, in either order."""
    call(tree, "plan_beside")
    found = runs(tree, "beside")
    ours = found["ours"].throughput
    assert ours and ours.beside and found["theirs"].throughput
    tree.config["plans"]["reversed"] = {
        **CONFIG["plans"]["beside"],
        "runs": dict(reversed(CONFIG["plans"]["beside"]["runs"].items())),
    }
    tree.write()
    call(tree, "plan_reversed")
    theirs = runs(tree, "reversed")["theirs"].throughput
    assert theirs and theirs.beside
    one, other = (interval(each.beside.ratios)[0] for each in (ours, theirs) if each.beside)
    assert abs(one + other) < 1, "the ratio must not depend on the order of the runs"


@pytest.mark.slow
def test_tuning(tree: Tree) -> None:
    """Tuning chooses the shorter sleep and writes a valid plan."""
    call(tree, "plan_tuned")
    tuning = runs(tree, "tuned")["base"].records["tune"]
    assert tuning and tuning.changes == {"program.values.sleep": 0.005}
    written = yaml.safe_load((tree.results / "plans/tuned/base/tuned.yaml").read_text())
    assert written["plans"]["tuned_base_tuned"]["runs"]["tuned"]["program"] == {"values": {"sleep": 0.005}}


@pytest.mark.slow
def test_a_failed_try_is_resumed(tree: Tree) -> None:
    """The next call uses the program's own resume option, and the result has the epochs of both tries."""
    program = {
        **PROGRAM,
        "command": [*PROGRAM["command"], "--fail-after", "2", "{resume}"],
        "resume": ["--resume"],
    }
    tree.config["plans"]["resumed"] = {
        **CONFIG["plans"]["ladder"],
        "measure": ["train"],
        "settings": {**CONFIG["plans"]["ladder"]["settings"], "program": program},
        "runs": {"one": {"program": {"values": {"sleep": 0.01}}}},
    }
    tree.write()
    failed = tree.snakemake("--cores", "2", "--", "plan_resumed")
    assert failed.status != 0 and "the program ended with status 3" in failed.output
    assert not (tree.results / "plans/resumed/one/program.json").exists()
    call(tree, "plan_resumed")
    one = runs(tree, "resumed")["one"]
    assert [epoch.step for epoch in one.epochs] == [16, 32, 48, 64]


@pytest.mark.slow
def test_the_headroom_of_a_program_in_a_plan(tree: Tree) -> None:
    call(tree, "plan_spare")
    (run,) = runs(tree, "spare").values()
    assert 1.5 < run.records["headroom"].gain[0] < 2.1
    assert not [*run.folder.rglob("started")], "the copy must write to a temporary folder"
    page = (tree.results / "plans/spare/report.html").read_text()
    assert "A faster loader gains at most" in page
