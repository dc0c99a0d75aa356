"""The tiny study of the campaign: plans that use most stages, also on meshes and on two nodes."""

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
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ERA5, ERA5_RUN, TIMES, TINY
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

#: Program that starts a node's command in each of the two networks of a trial (`networks`).
NODES = f"""\
import os, signal, subprocess, sys

nodes = [
    subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{{os.environ['{MARK}']}}-{{node}}", *sys.argv[1:]],
        env={{**os.environ, "NODE_RANK": str(node)}},
    )
    for node in range(2)
]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: [node.send_signal(number) for node in nodes])
sys.exit(max([node.wait() for node in nodes]))
"""

_RAW = {**ERA5, "source": {**ERA5["source"], "days": 3, "train": [2001], "valid": [2002]}}
_STARTER = {**TINY["starter_cnn"]["run"], "dataset": "tiny"}
_ALONE = {"study": "starter_cnn", "settings": _STARTER}
_THEIRS = {"program": {"command": ["python", "train.py", "--out", "{out}", "{resume}"], "resume": ["--resume"]}}
_TWO = {"geometry": {"gpus_per_node": 2}, "loader": {"workers": 1}, "training": {"epochs": 40}}

CONFIG: dict[str, Any] = {
    "results": "results",
    "targets": ["faults"],
    "datasets": {"tiny": TINY["starter_cnn"]["dataset"], "raw": _RAW},
    # the shortest timeouts that a busy machine does not exceed
    "site": {"watchdog": {"silent": 20, "stuck": 30, "between": 60}},
    "plans": {
        "faults": {
            **_ALONE,
            "settings": {**_STARTER, "throughput": {**_STARTER["throughput"], "batches": 3}},
            "runs": {"ours": _TWO, "theirs": _THEIRS},
        },
        "meshes": {
            "study": "era5_vit",
            "measure": ["train"],
            "settings": {**ERA5_RUN, "dataset": "raw", **_TWO, "training": {"epochs": 10}},
            "runs": {
                "tp": {"geometry": {"gpus_per_node": 2, "tp": 2}},
                "fsdp": {"parallel": {"kind": "fsdp"}},
            },
        },
        "profiled": {
            **_ALONE,
            "measure": ["profile"],
            "settings": {**_STARTER, "profile": {"tools": ["torch"], "skip": 1, "steps": 2}},
            "runs": {"one": {}},
        },
        "tuned": {
            **_ALONE,
            "kind": "tune",
            "settings": {
                **_STARTER,
                "tune": {"seconds": 0.3, "workers": [0, 1], "prefetch": [2], "threads": [1], "rounds": 3},
            },
            "runs": {"one": {}},
        },
        "rates": {
            **_ALONE,
            "kind": "sweep",
            "settings": {**_STARTER, "training": {"epochs": 3}},
            "sweep": {
                "method": "halving",
                "over": {"optimizer.lr": [0.01, 0.02, 0.03]},
                "trials": 3,
                "metric": "valid_loss",
            },
        },
        "replayed": {
            **_ALONE,
            "measure": ["headroom"],
            "settings": {"batch_size": 2, "throughput": {"trials": 2, "batches": 3, "seconds": 0}},
            "runs": {"theirs": _THEIRS},
        },
        "nodes": {
            **_ALONE,
            "measure": ["train"],
            "runs": {"two": {**_TWO, "geometry": {"nodes": 2, "gpus_per_node": 1}, "training": {"epochs": 80}}},
        },
    },
}
#: Site of the same study, on which runs can start on two nodes.
NODES_SITE = {**CONFIG["site"], "starter": "torchrun", "start": ["python", "nodes.py"], "rendezvous": "10.0.0.1:29500"}


@dataclass(frozen=True)
class Command:
    """A command of a user, and its results."""

    words: list[str]
    states: tuple[str, ...]  #: States of completion from which a trial starts the command.
    step: str  #: Step of the build with about the same duration.
    results: tuple[str, ...]  #: Patterns of the command's result files.
    before: tuple[str, ...] = ()  #: Command that a user runs before the repetition, to make missing results again.


DLSCALE = [sys.executable, "-P", "-m", "dlscale"]


def _run(target: str, file: str = "tiny.yaml") -> list[str]:
    return [*DLSCALE, "run", target, "--configfile", file]


#: Steps of the build, in their order: state of completion → target that makes the state. The state `interrupted` is a
#: copy of `data` in which a training was interrupted after its first checkpoint.
STEPS = {
    "data": "data_tiny",
    "trained": "results/plans/faults/ours/model.pt",
    "programmed": "results/plans/faults/theirs/program.json",
    "raw": "data_raw",
    "tp": "results/plans/meshes/tp/model.pt",
    "fsdp": "results/plans/meshes/fsdp/model.pt",
    "profile": "results/plans/profiled/one/profile/profile.json",
    "tune": "results/plans/tuned/one/tune.json",
    "sweep": "rates",
    "headroom": "results/plans/replayed/theirs/headroom.json",
    "done": "faults",
}


def _stage(step: str, states: tuple[str, ...], *results: str) -> Command:
    return Command(_run(STEPS[step]), states, step, results)


def _query(step: str, *words: str, result: str) -> Command:
    return Command([*DLSCALE, *words], ("done",), step, (result,), before=tuple(_run(STEPS["done"])))


_CONFIGURED = ("--configfile", "tiny.yaml")
COMMANDS = {
    "data": _stage("data", ("fresh",), "results/data/tiny/*"),
    "train": _stage("trained", ("data", "interrupted"), "results/data/tiny/*", "results/plans/faults/ours/[mcp]*"),
    "program": _stage("programmed", ("data", "trained"), "results/data/tiny/*", "results/plans/faults/theirs/[op]*"),
    "run": _stage("done", ("trained", "programmed"), "results/data/tiny/*", "results/plans/faults/*"),
    "measure": Command(
        [*DLSCALE, "measure", "--name", "fit", "--", sys.executable, "train.py", "--out", "measured"],
        ("data", "done"),
        "measure",
        ("measured/*",),
    ),
    "raw": _stage("raw", ("fresh", "data"), "results/data/raw/*"),
    "tp": _stage("tp", ("raw",), "results/data/raw/*", "results/plans/meshes/tp/*"),
    "fsdp": _stage("fsdp", ("raw",), "results/data/raw/*", "results/plans/meshes/fsdp/*"),
    "profile": _stage("profile", ("data", "raw"), "results/plans/profiled/*"),
    "tune": _stage("tune", ("data", "raw"), "results/plans/tuned/*"),
    "sweep": _stage("sweep", ("data", "raw"), "results/plans/rates/*"),
    "headroom": _stage("headroom", ("data", "raw"), "results/plans/replayed/*"),
    "nodes": Command(
        _run("results/plans/nodes/two/model.pt", "nodes.yaml"), ("data",), "nodes", ("results/plans/nodes/*",)
    ),
    "evaluate": _query(
        "evaluate", "evaluate", "faults.ours", "--out", "scores.json", *_CONFIGURED, result="scores.json"
    ),
    "crate": _query("crate", "crate", "faults", "--citation", "CITATION.cff", *_CONFIGURED, result="results/crates/*"),
    "history": _query("history", "history", "results", "older", "--out", "history.png", result="history.png"),
}
#: Result files that must be equal bit by bit, as patterns in the tree.
EXACT = (
    *("results/data/*/*.h5", "results/data/*/*/*.h5", "results/data/*/manifest.json", "results/data/*/stats/*.npy"),
    *("results/data/*/config.yaml", "measured/saved.pt", "scores.json", "results/crates/*/plans/*/*/model*.pt"),
    *(
        f"results/plans/{plan}/{file}"
        for plan in CONFIG["plans"]
        for file in ("*/model*.pt", "*/out/saved.pt", "*/config.yaml", "plan.yaml", "rung*.json")
    ),
)
#: Result files with times: they must exist, and be complete. JSON is parsed; of other formats, mainly the
#: end is checked.
WHOLE = (
    *("results/crates/*/ro-crate-metadata.json", "history.png"),
    *(
        f"results/plans/{plan}/{file}"
        for plan in CONFIG["plans"]
        for file in (
            *(f"*/{name}.json" for name in ("provenance", "throughput", "program", "tune", "headroom")),
            *("*/profile/profile.json", "*/tuned.yaml", "summary.csv", "report.html"),
        )
    ),
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
    variables: dict[str, str] = field(default_factory=dict)  #: Further environment variables of calls.

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
            **self.variables,
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
        for file in self._files(*(f"results/plans/{plan}/*/*.jsonl" for plan in CONFIG["plans"])):
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
    if file.suffix == ".png":
        return file.read_bytes().endswith(b"IEND\xaeB`\x82")
    if file.suffix == ".json":
        try:
            return bool(json.loads(text))
        except ValueError:
            return False
    return text.rstrip().endswith("</html>") if file.suffix == ".html" else text.endswith("\n") and "\0" not in text


@contextlib.contextmanager
def networks(tree: Tree) -> Iterator[bool]:
    """Connect two network namespaces, named after the tree's mark, by a cable; yield whether this has worked."""
    names = [f"{tree.mark}-{node}" for node in range(2)]

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0

    try:
        yield (
            shutil.which("ip") is not None
            and all([ip("netns", "add", name) for name in names])
            and ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
            and all(ip("-n", name, "addr", "add", f"10.0.0.{k}/24", "dev", "eth0") for k, name in enumerate(names, 1))
            and all(ip("-n", name, "link", "set", dev, "up") for name in names for dev in ("lo", "eth0"))
        )
    finally:
        for name in names if shutil.which("ip") else ():
            ip("netns", "del", name)


def build(folder: Path, wanted: Collection[str]) -> None:
    """Make the study in `folder/base/STATE`, one tree per state of completion, and the expected digests.

    `wanted` names the steps of the build (`STEPS`) to run, and the commands to run that are not steps.

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
    (tree.path / "nodes.yaml").write_text(yaml.safe_dump({**CONFIG, "site": NODES_SITE}, sort_keys=False))
    (tree.path / "train.py").write_text(PROGRAM)
    (tree.path / "nodes.py").write_text(NODES)
    tree.copy(base / "fresh" / "tree", "")
    last = {name: command.words for name, command in COMMANDS.items() if command.step == name and name not in STEPS}
    seconds = {}
    try:
        for step, words in {**{step: _run(target) for step, target in STEPS.items()}, **last}.items():
            if step not in wanted:
                continue
            if step == "history":
                shutil.copytree(tree.results / "plans", tree.path / "older/plans")
            with networks(tree) if step == "nodes" else contextlib.nullcontext(True) as possible:
                if not possible:
                    continue
                began = time.monotonic()
                call = tree.start(words)
                if call.process.wait(timeout=900):
                    raise RuntimeError(f"without a fault: {step} failed:\n{call.output()}")
                seconds[step] = time.monotonic() - began
            if step in STEPS and step != "done":
                tree.copy(base / step / "tree", "")
            if step == "data":
                _interrupt(tree.copy(base / "interrupted" / "tree", tree.mark))
        expected = {"digests": tree.digests(), "seconds": seconds}
        # a trial of a command that is not a step starts with the results of all steps, but without its own result
        for path in ("measured", "results/plans/measured", "results/plans/nodes", "results/crates"):
            shutil.rmtree(tree.path / path, ignore_errors=True)
        for path in ("scores.json", "history.png"):
            (tree.path / path).unlink(missing_ok=True)
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
