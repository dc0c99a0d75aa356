"""A campaign of random faults: `python -m tests.faults --count 500`.

Trial K of a seed copies the tiny study (`tree.py`) in a random state of completion, injects a random fault (`kinds.py`)
into a call of dlscale, follows the messages, and repeats the call as a user does. The result must then equal the result
of a call without a fault; files with times must be complete. No process and no temporary file may be left. Without
`--count`, the fixed trials of the short form run.

Each trial adds a line to `--log`. A campaign skips the trials of the same commit and seed in the log, and ends with a
table. The exit status is 1 if a trial failed. `--only K` repeats one trial and keeps its folder. Calls with
`--part 1/2` and `--part 2/2` can run at the same time; afterwards, the call without `--part` prints the table.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests import changed
from tests.faults import kinds
from tests.faults.kinds import FAULTS, Fault, Trial
from tests.faults.tree import COMMANDS, STEPS, Call, Tree, build

#: Paths; after a change in one of them, a campaign begins anew.
SOURCES = ("workflow_scripts", "rules", "Snakefile", "profiles", "tests/faults/tree.py")
#: Outcomes of a trial, and whether the campaign accepts them.
OUTCOMES = {
    "right": True,  # the last call gives the result
    "right after a message": True,  # the result after following the message
    "unnoticed": True,  # only the damaged file differs: a finished result that no job of the call reads
    "skipped": True,
    "wrong": False,
    "unclear": False,  # a traceback, or a message that lacks the lost process
    "refused": False,  # repeated calls end in messages
    "hung": False,
    "processes left": False,
    "files left": False,
}
#: Kinds that change files before the call, also of a finished plan.
ON_FILES = ("damage", "clock")
#: Commands that are suitable for a kind (default: `USUAL`).
SUITABLE = {
    **dict.fromkeys(ON_FILES, tuple({*COMMANDS} - {"data", "measure", "nodes"})),
    **dict.fromkeys(("kill a rank", "kill a worker", "hang of a rank", "hang of a worker"), ("train", "tp", "fsdp")),
    "network": ("nodes",),
}
#: Commands for all other kinds: nodes have networks only in trials of the kind `network`.
USUAL = tuple({*COMMANDS} - {"nodes"})
#: Maximum number of repeated calls after a fault.
REPEATS = 4
#: Seconds in which processes must end after the last call.
GRACE_S = 60.0
#: Trials of the short form: kind of fault, command, and state from which the trial starts.
SHORT = (
    ("kill", "train", "interrupted"),
    ("ctrl_c", "measure", "data"),
    ("two_controllers", "data", "fresh"),
    ("kill a worker", "train", "data"),
    ("damage", "train", "interrupted"),
    ("full_disk", "data", "fresh"),
    ("clock_jump", "data", "fresh"),
    ("memory", "data", "fresh"),
)


class Failed(Exception):
    """Ends a trial with an outcome and a reason."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def main() -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, help="number of random trials (default: the trials of the short form)")
    parser.add_argument("--only", type=int, metavar="K", help="repeat trial K of this seed, and keep its folder")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="run each N-th trial from the I-th on: N calls share a campaign"
    )
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, help="draw faults from these kinds only")
    parser.add_argument("--log", type=Path, help="file for one JSON line per trial (default: in --work)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), f"dlscale-faults-{os.getuid()}"))
    parser.add_argument("--limit", type=float, default=900.0, help="seconds in which a call must end")
    args = parser.parse_args()

    began, commit = time.monotonic(), changed.commit(*SOURCES) + "-short" * (not args.count)
    folder = args.work / commit
    if not (folder / "base/expected.json").exists():
        print(f"Building the study without faults in {folder}", flush=True)
        short = {step for _, what, state in SHORT for step in (COMMANDS[what].step, state)}
        build(folder, {*STEPS, *COMMANDS} if args.count else short)
    expected = json.loads((folder / "base/expected.json").read_text())
    log = args.log or args.work / "log.jsonl"
    done = {row["k"]: row for row in _read(log) if (row["commit"], row["seed"]) == (commit, args.seed)}
    part, parts = map(int, args.part.split("/"))
    wanted = range(part - 1, args.count or len(SHORT), parts) if args.only is None else [args.only]
    rows = []
    for k in wanted:
        row = done.get(k) if args.only is None else None
        if not row:
            row = {"commit": commit, "version": version("dlscale"), "seed": args.seed, "k": k}
            row |= run_trial(args, k, folder, expected)
            with log.open("a") as file:
                torn = file.tell() and not log.read_bytes().endswith(b"\n")
                file.write("\n" * bool(torn) + json.dumps(row) + "\n")
            place = f"{row['kind']}, {row['what']} from {row['state']}: {row['point']}"
            print(f"{k:4}  {row['outcome']:22} {row['seconds']:5.0f} s  {place}", flush=True)
            if row["reason"]:
                print(f"      {row['reason'][-600:]}", flush=True)
        rows.append(row)
    print(f"\ncommit {commit}, version {version('dlscale')}, seed {args.seed}\n{table(rows)}")
    print(f"{time.monotonic() - began:.0f} s")
    failed = [row for row in rows if not OUTCOMES[row["outcome"]]]
    for row in failed:
        form = f" --count {args.count}" if args.count else ""
        print(f"repeat: python -m tests.faults --seed {args.seed}{form} --only {row['k']}")
    return int(bool(failed))


def run_trial(args: argparse.Namespace, k: int, folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Run one trial; return its row of the log. The trial's folder is kept if the trial failed, or with `--only`."""
    draw = random.Random(f"{args.seed}/{k}")
    if args.count:
        kind = draw.choice(sorted(args.kinds or FAULTS))
        what = draw.choice(sorted(SUITABLE.get(kind, USUAL)))
        state = draw.choice([*COMMANDS[what].states, *(["done"] if kind in ON_FILES else [])])
    else:
        kind, what, state = SHORT[k]
    # a call for a finished result takes as long as a dry run: 5 s
    usual = (
        expected["seconds"].get(COMMANDS[what].step, 5.0)
        if state != "done" or COMMANDS[what].step not in STEPS
        else 5.0
    )
    place = folder / f"trial-{args.seed}-{k}"
    shutil.rmtree(place, ignore_errors=True)
    tree = Tree(folder / "base" / state / "tree", "").copy(place / "tree", f"{os.getpid()}-{args.seed}-{k}")
    trial = Trial(draw, tree, state, what, usual)
    began, reason = time.monotonic(), ""
    try:
        outcome = judge(trial, FAULTS[kind], expected["digests"], args.limit)
    except Failed as failure:
        outcome, reason = failure.outcome, str(failure)
    except kinds.Skip as skip:
        outcome, reason = "skipped", str(skip)
    finally:
        tree.end()
    said = [call.read_text(errors="replace").strip() for call in sorted(place.glob("call-*.txt"))]
    if OUTCOMES[outcome] and args.only is None:
        shutil.rmtree(place, ignore_errors=True)
    else:
        print(f"kept: {place}", flush=True)
    return {
        **{"kind": kind, "what": what, "state": state, "point": trial.point, "outcome": outcome, "reason": reason},
        "said": [each.rpartition("\n")[2][-500:] for each in said],  # last line of each call
        "seconds": round(time.monotonic() - began, 1),
    }


def judge(trial: Trial, fault: Fault, expected: dict[str, str], limit: float) -> str:
    """Inject a fault into a call, repeat the call until it succeeds, and return the outcome.

    Raises
    ------
    Failed
        The result is wrong, a message is unclear, all calls fail, a call hangs, or processes or files are left.
    """
    steps = fault(trial)
    followed = False
    try:
        next(steps)
        trial.call = trial.tree.start(COMMANDS[trial.what].words)
        next(steps, None)
        for call in (trial.call, *trial.others):
            _wait(trial, call, limit)
        next(steps, None)
        if trial.random.random() < 0.5:  # otherwise the next call meets processes that outlived the fault
            _wait_for_others(trial, limit)
        call = trial.call
        if trial.expects and call.process.returncode and not re.search(trial.expects, call.output()):
            raise Failed("unclear", f"the message names no process: {call.output()[-600:]}")
        before = list(COMMANDS[trial.what].before)
        for _ in range(REPEATS):
            if call.process.returncode == 0 and not _differing(trial, expected):
                break
            followed |= follow(trial, call.output(), limit)
            if before:
                made = trial.tree.start(before)
                _wait(trial, made, limit)
                followed |= follow(trial, made.output(), limit)
            call = trial.tree.start(COMMANDS[trial.what].words)
            _wait(trial, call, limit)
            if call.process.returncode == 0:
                break
        _wait_for_others(trial, GRACE_S)
        if left := trial.tree.processes():
            raise Failed("processes left", str(left))
        for file in sorted(trial.tree.path.parent.glob("call-*.txt")):
            if found := _defect(file.read_text(errors="replace")):
                raise Failed("unclear", f"{file.name}: {found[-600:]}")
        if call.process.returncode:
            raise Failed("refused", call.output()[-600:])
        if differing := _differing(trial, expected):
            if set(differing) <= set(trial.damaged):
                return "unnoticed"
            raise Failed("wrong", ", ".join(differing))
        if files := trial.tree.left_files():
            raise Failed("files left", ", ".join(files))
        return "right after a message" if followed else "right"
    finally:
        steps.close()


def follow(trial: Trial, said: str, limit: float) -> bool:
    """Follow a call's message; return whether the message names an action before the repetition of the call."""
    if "in use by process" in said:
        _wait_for_others(trial, limit)
        return True
    if "--unlock" in said:
        unlock = [sys.executable, "-m", "snakemake", "--unlock", "--configfile", "tiny.yaml"]
        _wait(trial, trial.tree.start(unlock), limit)
        return True
    if command := re.search(r"then run: (find .* -exec touch {} \+)", said):
        subprocess.run(shlex.split(command[1]), cwd=trial.tree.path, check=True)
        return True
    # such as FILE: not valid JSON; delete the file and run its stage again
    for line in reversed(said.splitlines()):
        for found in re.finditer(r"(?:^|: |\s)((?:/|results/|older/)[^:]*?): [^\n]*\b(?:delete|[Rr]emove)\b", line):
            path = trial.tree.path / found[1]
            if path.exists() and path.is_relative_to(trial.tree.path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                return True
    return False


def _defect(said: str) -> str:
    """Return the first traceback or defect of dlscale in the output of a call, or an empty text."""
    for found in re.finditer(
        r"Traceback \(most(?:(?!\nTraceback \(most).)*|[^\n]*a defect of dlscale[^\n]*", said, re.DOTALL
    ):
        # A process without memory for its first modules ends with Python's own message.
        theirs = re.search(r'"(?![^"]*/dlscale/train/)[^"]*train\.py", line', found[0])  # the program of `measure`
        if not theirs and not found[0].rstrip().endswith("\nMemoryError"):
            return found[0]
    return ""


def _differing(trial: Trial, expected: dict[str, str]) -> list[str]:
    found = trial.tree.digests()
    patterns = COMMANDS[trial.what].results
    files = {f for f in (*expected, *found) if any(fnmatch.fnmatch(f, pattern) for pattern in patterns)}
    differing = [file for file in files if found.get(file) != expected.get(file)]
    if trial.what == "measure":
        records = [*trial.tree.results.glob("plans/measured/fit*/throughput.json")]
        differing += ["plans/measured/*/throughput.json"] * (not records)
    return sorted(differing)


def _wait(trial: Trial, call: Call, limit: float) -> None:
    """Wait for the end of a call; after the time limit, write the stacks of its processes and fail the trial."""
    try:
        call.process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        stacks = []
        for process, role in trial.tree.processes().items():
            spy = subprocess.run(
                ["py-spy", "dump", "--pid", str(process)], capture_output=True, text=True, timeout=60, check=False
            )
            stacks.append(f"{role} {process}:\n{spy.stdout[-3000:]}{spy.stderr[-300:]}")
        (trial.tree.path.parent / "stacks.txt").write_text("\n".join(stacks))
        raise Failed("hung", f"a call did not end within {limit:.0f} s: stacks.txt, {call.said.name}") from None


def _wait_for_others(trial: Trial, limit: float) -> None:
    end = time.monotonic() + limit
    while trial.tree.processes() and time.monotonic() < end:
        time.sleep(0.2)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the outcomes of all trials by kind of fault, as text."""
    shown = [outcome for outcome in OUTCOMES if any(row["outcome"] == outcome for row in rows) or not OUTCOMES[outcome]]
    lines = [f"{'fault':18} trials  " + "  ".join(shown)]
    for kind in [*sorted({row["kind"] for row in rows}), "all"]:
        counts = Counter(row["outcome"] for row in rows if kind in (row["kind"], "all"))
        cells = "  ".join(f"{counts[outcome]:{len(outcome)}}" for outcome in shown)
        lines.append(f"{kind:18} {sum(counts.values()):6}  {cells}")
    return "\n".join(lines)


def _read(log: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log; the last line may be torn."""
    rows = []
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


if __name__ == "__main__":
    # Ctrl-C and SIGTERM end the processes of the trial, and unmount its disk.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command continues with the interrupted trial.")
