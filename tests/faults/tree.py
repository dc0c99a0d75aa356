"""The tiny study of the campaign: a plan with a training of two ranks and an external program."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import TIMES, TINY
from tests.workflow.conftest import copy_tree

#: Environment variable that all processes of a trial inherit. Its value finds the processes that a call left running.
MARK = "FAULTS_TRIAL"

#: External program. It resumes, and it writes atomically, so that only dlscale can make its result wrong.
PROGRAM = """\
import argparse, json, os, time
from pathlib import Path
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
saved, first = args.out / "saved.pt", 0
if args.resume and saved.exists():
    first, state = torch.load(saved)
    net.load_state_dict(state)
for epoch in range(first, 4):
    for batch in torch.utils.data.DataLoader(torch.arange(64.0).reshape(16, 4) / 64, 2):
        time.sleep(0.02)
        loss = net(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    part = saved.with_suffix(f".{os.getpid()}")
    torch.save((epoch + 1, net.state_dict()), part)
    os.replace(part, saved)
    print(json.dumps({"step": 8 * epoch + 8, "loss": loss.item()}), flush=True)
"""

CONFIG: dict[str, Any] = {
    "results": "results",
    "targets": ["faults"],
    "datasets": {"tiny": TINY["starter_cnn"]["dataset"]},
    # the shortest timeouts that a busy machine does not exceed
    "site": {"watchdog": {"silent": 20, "stuck": 30, "between": 60}},
    "plans": {
        "faults": {
            "study": "starter_cnn",
            "settings": {
                **TINY["starter_cnn"]["run"],
                "dataset": "tiny",
                "throughput": {**TINY["starter_cnn"]["run"]["throughput"], "batches": 3},
            },
            "runs": {
                "ours": {"geometry": {"gpus_per_node": 2}, "loader": {"workers": 1}, "training": {"epochs": 40}},
                "theirs": {
                    "program": {"command": ["python", "train.py", "--out", "{out}", "{resume}"], "resume": ["--resume"]}
                },
            },
        }
    },
}


@dataclass(frozen=True)
class Command:
    """A command of a user, and its results."""

    words: list[str]
    states: tuple[str, ...]  #: States of completion from which a trial starts the command.
    step: str  #: Step of the build with about the same duration.
    results: tuple[str, ...]  #: Patterns of the command's result files.


DLSCALE = [sys.executable, "-P", "-m", "dlscale"]


def _run(target: str) -> list[str]:
    return [*DLSCALE, "run", target, "--configfile", "tiny.yaml"]


#: Steps of the build, in their order: state of completion → target that makes the state. The state `interrupted` is a
#: copy of `data` in which a training was interrupted after its first checkpoint.
STEPS = {
    "data": "data_tiny",
    "trained": "results/plans/faults/ours/model.pt",
    "programmed": "results/plans/faults/theirs/program.json",
    "done": "faults",
}
COMMANDS = {
    "data": Command(_run(STEPS["data"]), ("fresh",), "data", ("results/data/*",)),
    "train": Command(
        _run(STEPS["trained"]),
        ("data", "interrupted"),
        "trained",
        ("results/data/*", "results/plans/faults/ours/[mcp]*"),
    ),
    "program": Command(
        _run(STEPS["programmed"]),
        ("data", "trained"),
        "programmed",
        ("results/data/*", "results/plans/faults/theirs/[op]*"),
    ),
    "run": Command(_run(STEPS["done"]), ("trained", "programmed"), "done", ("results/*",)),
    "measure": Command(
        [*DLSCALE, "measure", "--name", "fit", "--", sys.executable, "train.py", "--out", "measured"],
        ("done",),
        "measure",
        ("measured/*",),
    ),
}
#: Result files that must be equal bit by bit, as patterns in the tree.
EXACT = (
    *("results/data/*/*.h5", "results/data/*/*/*.h5", "results/data/*/manifest.json", "results/data/*/stats/*.npy"),
    *("results/data/*/config.yaml", "results/plans/faults/*/model*.pt", "results/plans/faults/*/out/saved.pt"),
    *("results/plans/faults/*/config.yaml", "results/plans/faults/plan.yaml", "measured/saved.pt"),
)
#: Result files with times: they must exist, and be complete. JSON is parsed; of other formats, only the end is checked.
WHOLE = (
    *("results/plans/faults/*/provenance.json", "results/plans/faults/*/throughput.json"),
    *("results/plans/faults/*/program.json", "results/plans/faults/summary.csv", "results/plans/faults/report.html"),
)


@dataclass
class Call:
    """A running call of dlscale, with the file that gets its output."""

    process: subprocess.Popen[bytes]
    said: Path

    def output(self) -> str:
        """Return the output of the call."""
        return self.said.read_text(errors="replace")


@dataclass
class Tree:
    """A copy of the study in a folder, and the mark of its processes."""

    path: Path
    mark: str
    calls: int = 0

    @property
    def results(self) -> Path:
        return self.path / "results"

    def start(self, command: list[str]) -> Call:
        """Start a call in a process group of its own; its output goes to a file, which an orphan cannot block."""
        (self.path / "measured").mkdir(exist_ok=True)
        said = self.path.parent / f"call-{self.calls}.txt"
        self.calls += 1
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SNAKEMAKE", "PYTEST", "SLURM"))}
        environment = {
            **kept,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.path / "workflow_scripts"),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            MARK: self.mark,
        }
        with said.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Call(process, said)

    def processes(self) -> dict[int, str]:
        """Return the living processes of this tree's calls: id → role."""
        return dict(_marked(f"{MARK}={self.mark}".encode()))

    def end(self) -> None:
        """Kill all processes of this tree's calls."""
        while found := self.processes():
            for process in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.1)

    def copy(self, path: Path, mark: str) -> Tree:
        """Copy the tree with its results and Snakemake's records, and keep the times of files."""
        shutil.copytree(self.path, path, symlinks=True)
        return Tree(path, mark)

    def digests(self) -> dict[str, str]:
        """Return the state of all results: path → digest; `whole` or `torn` for files with times."""
        found = {file: hashlib.sha256((self.path / file).read_bytes()).hexdigest() for file in self._files(*EXACT)}
        for file in self._files("results/plans/faults/*/*.jsonl"):
            found[file] = _digest_epochs((self.path / file).read_text(errors="replace"))
        return found | {file: "whole" if _is_whole(self.path / file) else "torn" for file in self._files(*WHOLE)}

    def left_files(self) -> list[str]:
        """Return temporary files that a finished call must not leave."""
        return [file for file in self._files("results/**/.*.part*", "results/**/.*.old", "results/**/*.tmp")]

    def _files(self, *patterns: str) -> list[str]:
        return sorted({str(file.relative_to(self.path)) for pattern in patterns for file in self.path.glob(pattern)})


def _marked(mark: bytes) -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if mark not in variables:
                continue
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            forked = Path(f"/proc/{parent}/cmdline").read_bytes() == (folder / "cmdline").read_bytes()
            yield int(folder.name), _role(words, any(each.startswith(b"RANK=") for each in variables), forked)


def _role(words: str, is_rank: bool, forked: bool) -> str:
    """Return the role of a process, derived from its command line."""
    if "train.py" in words and "dlscale" not in words:
        return "program"
    if "from snakemake import cli" in words or " dlscale run " in words:
        return "snakemake"
    if "dlscale measure" in words:
        return "measure"
    if words.startswith(("/bin/bash", "/bin/sh", "bash", "sh ")):
        return "shell"
    if forked or "multiprocessing" in words:
        return "worker"
    return "rank" if is_rank else "stage"


def _digest_epochs(text: str) -> str:
    """Return the digest of a run's epochs without times; a line that is not JSON counts unchanged."""
    kept = []
    for line in text.splitlines():
        try:
            kept.append({key: value for key, value in json.loads(line).items() if key not in (*TIMES, "time")})
        except (ValueError, AttributeError):
            kept.append({"torn": line})
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()


def _is_whole(file: Path) -> bool:
    text = file.read_text(errors="replace")
    if file.suffix == ".json":
        try:
            return bool(json.loads(text))
        except ValueError:
            return False
    return text.rstrip().endswith("</html>") if file.suffix == ".html" else text.endswith("\n") and "\0" not in text


def build(folder: Path) -> None:
    """Make the study in `folder/base/STATE`, one tree per state of completion, and the expected digests.

    Raises
    ------
    RuntimeError
        A call fails without any fault.
    """
    base = folder / "base"
    shutil.rmtree(base, ignore_errors=True)
    tree = Tree(base / "done" / "tree", f"build-{os.getpid()}")
    copy_tree(tree.path)
    (tree.path / "tiny.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    (tree.path / "train.py").write_text(PROGRAM)
    tree.copy(base / "fresh" / "tree", "")
    seconds = {}
    try:
        commands = {step: _run(target) for step, target in STEPS.items()}
        for step, words in {**commands, "measure": COMMANDS["measure"].words}.items():
            began = time.monotonic()
            call = tree.start(words)
            if call.process.wait(timeout=900):
                raise RuntimeError(f"without a fault: {step} failed:\n{call.output()}")
            seconds[step] = time.monotonic() - began
            if step not in ("done", "measure"):
                tree.copy(base / step / "tree", "")
            if step == "data":
                _interrupt(tree.copy(base / "interrupted" / "tree", tree.mark))
        expected = {"digests": tree.digests(), "seconds": seconds}
        # a trial of `measure` starts with the plan's results, but without a measured program
        shutil.rmtree(tree.path / "measured")
        shutil.rmtree(tree.results / "plans/measured")
        (base / "expected.json").write_text(json.dumps(expected, indent=1))
    finally:
        tree.end()


def _interrupt(tree: Tree) -> None:
    """Start the training, and end it by Ctrl-C after its first checkpoint."""
    call = tree.start(_run(STEPS["trained"]))
    while not [*tree.results.glob("checkpoints/faults/ours/*/step-*")]:
        if call.process.poll() is not None:
            raise RuntimeError(f"without a fault: no checkpoint was seen:\n{call.output()}")
        time.sleep(0.02)
    os.killpg(call.process.pid, signal.SIGINT)
    call.process.wait(timeout=300)
