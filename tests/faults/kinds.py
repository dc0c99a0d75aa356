"""The faults: generators that act before a call, during the call, and after its end.

`yield` separates these three parts.
A fault draws all of its choices from `trial.random`, so that a seed repeats them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.tree import COMMANDS, Call, Tree, networks

#: Files to damage, by content: patterns in the tree.
VICTIMS = {
    "data": ["results/data/*/*/*.h5"],
    "statistics": ["results/data/*/stats/*.npy"],
    "manifest": ["results/data/*/manifest.json", "results/data/*/verified.json"],
    "record": ["results/plans/*/*/*.json", "results/plans/*/*/telemetry/*.json"],
    "settings": ["results/plans/*/*/config.yaml", "results/plans/*/plan.yaml", "results/data/*/config.yaml"],
    "raw file": ["results/data/*/source/*"],
    "profile": ["results/plans/*/*/profile/*", "results/plans/*/*/tuned.yaml", "results/plans/*/rung*.json"],
    "crate": ["results/crates/**/*"],
    "history": ["older/plans/*/*/*.json"],
    "metrics": ["results/plans/*/*/*.jsonl"],
    "weights": ["results/plans/*/*/model*.pt"],
    "program": ["results/plans/*/*/out/*.pt"],
    "checkpoint": ["results/checkpoints/*/*/*/step-*/*"],
    "events": ["results/plans/*/*/tensorboard/**/*tfevents*"],
    "telemetry": ["results/plans/*/*/telemetry/*.csv", "results/benchmarks/**/*.tsv", "results/logs/**/*.log"],
    "page": [
        "results/plans/*/report.html",
        "results/plans/*/summary.csv",
        "results/plans/*/*/*.png",
        "results/data/*/*.png",
    ],
    "snakemake": [".snakemake/metadata/*", ".snakemake/*.json"],
}


class Skip(Exception):
    """Raised if a fault cannot be made, on this machine or without results."""


@dataclass
class Trial:
    """One trial: its random numbers, its copy of the study, its running call, and the effects of the fault."""

    random: random.Random
    tree: Tree
    state: str
    what: str  #: Name in `COMMANDS`.
    usual: float  #: Seconds that the call takes without a fault.
    call: Call | None = None
    point: str = ""
    damaged: list[str] = field(default_factory=list)
    others: list[Call] = field(default_factory=list)  #: Further calls, to wait for.
    expects: str = ""  #: Pattern in the output of the disturbed call, if this call fails.

    @property
    def running(self) -> bool:
        """Whether the call runs."""
        return bool(self.call and self.call.process.poll() is None)

    def sleep(self) -> float:
        """Sleep until a random moment of the call, or until the call's end; return the moment, seconds."""
        moment = self.random.uniform(0, 0.8 * self.usual)
        end = time.monotonic() + moment
        while self.running and time.monotonic() < end:
            time.sleep(0.01)
        return moment

    def pick(self, *roles: str) -> int | None:
        """Return a random process of the call with one of the roles (any role without arguments), and note the choice.

        If the call has no such process yet, wait for one; return None if the call ends before.
        """
        while self.running:
            by_role: dict[str, list[int]] = {}
            for process, role in sorted(self.tree.processes().items()):
                if not roles or role in roles:
                    by_role.setdefault(role, []).append(process)
            if by_role:
                role = self.random.choice(sorted(by_role))
                self.point += f" {role}"
                return self.random.choice(by_role[role])
            time.sleep(0.02)
        self.point += " (the call had ended)"
        return None


Fault = Callable[[Trial], Generator[None]]
FAULTS: dict[str, Fault] = {}


def _fault(function: Fault) -> Fault:
    FAULTS[function.__name__] = function
    return function


def shim(folder: Path) -> Path:
    """Compile `shim.c` into a library for LD_PRELOAD in `folder`; return its path.

    Raises
    ------
    Skip
        This machine has no C compiler.
    """
    library, compiler = folder / "shim.so", shutil.which("cc") or shutil.which("gcc")
    if not library.exists():
        if not compiler:
            raise Skip("no C compiler")
        part = folder / f".shim.{os.getpid()}"
        source = Path(__file__).with_name("shim.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", part, source, "-ldl"], check=True)
        part.replace(library)
    return library


@contextlib.contextmanager
def _shimmed(trial: Trial) -> Iterator[Callable[[int, int], None]]:
    """Load the shim into the processes of a call; yield a function that sets its seconds and microseconds."""
    place = trial.tree.path.parent
    control = place / "shim"
    control.write_bytes(bytes(16))
    trial.tree.variables = {
        **{"LD_PRELOAD": str(shim(place.parent)), "FAULTS_SHIM": str(control)},
        "FAULTS_SLOW": str(trial.tree.results.resolve()),
    }

    def set_shim(seconds: int, microseconds: int) -> None:
        with control.open("r+b") as file:
            file.write(struct.pack("qq", seconds, microseconds))

    try:
        yield set_shim
    finally:
        trial.tree.variables = {}


def _signals(number: signal.Signals, *roles: str) -> Fault:
    def fault(trial: Trial) -> Generator[None]:
        yield
        trial.point = f"after {trial.sleep():.1f} s:"
        if process := trial.pick(*roles):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        yield

    return fault


FAULTS["kill"] = _signals(signal.SIGKILL)
FAULTS["term"] = _signals(signal.SIGTERM)
FAULTS["int"] = _signals(signal.SIGINT)
FAULTS["kill a rank"] = _signals(signal.SIGKILL, "rank")
FAULTS["kill a worker"] = _signals(signal.SIGKILL, "worker")
FAULTS["hang of a rank"] = _signals(signal.SIGSTOP, "rank")
FAULTS["hang of a worker"] = _signals(signal.SIGSTOP, "worker")


@_fault
def ctrl_c(trial: Trial) -> Generator[None]:
    """Press Ctrl-C once or twice; as at a terminal, all processes of the group get the signal."""
    yield
    trial.point = f"after {trial.sleep():.1f} s"
    for _ in range(trial.random.choice([1, 1, 2])):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trial.call.process.pid, signal.SIGINT)  # type: ignore[union-attr]
        time.sleep(trial.random.uniform(0, 2))
    yield


@_fault
def killed_all(trial: Trial) -> Generator[None]:
    """Kill all processes of the call at once, as when a machine stops."""
    yield
    trial.point = f"after {trial.sleep():.1f} s"
    trial.tree.end()
    yield


@_fault
def pause(trial: Trial) -> Generator[None]:
    """Stop a process, and continue it after some seconds."""
    yield
    trial.point = f"after {trial.sleep():.1f} s:"
    if process := trial.pick():
        seconds = trial.random.uniform(0.5, 8)
        trial.point += f" for {seconds:.1f} s"
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(process, signal.SIGCONT)
    yield


@_fault
def two_controllers(trial: Trial) -> Generator[None]:
    """Run the same command twice at once."""
    yield
    trial.point = f"second call after {trial.sleep():.1f} s"
    trial.others.append(trial.tree.start(COMMANDS[trial.what].words))
    yield


@_fault
def damage(trial: Trial) -> Generator[None]:
    """Damage a file of results, records or Snakemake, or swap two such files, before the call."""
    found = {
        what: files
        for what, patterns in VICTIMS.items()
        if (files := sorted(f for p in patterns for f in trial.tree.path.glob(p) if f.is_file()))
    }
    if not found:
        raise Skip("no results to damage")
    what = trial.random.choice(sorted(found))
    file = trial.random.choice(found[what])
    how = trial.random.choice(sorted(DAMAGES))
    quiet = trial.random.random() < 0.5
    times = file.stat()
    done = DAMAGES[how](trial.random, file, found[what])
    if quiet and file.exists():
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    trial.damaged = [str(each.relative_to(trial.tree.path)) for each in (file, *done)]
    trial.point = f"{what}: {how} {' and '.join(trial.damaged)}{', time kept' if quiet else ''}"
    yield


def _truncate(draw: random.Random, file: Path, files: list[Path]) -> list[Path]:
    os.truncate(file, draw.randrange(max(1, file.stat().st_size)))
    return []


def _flip(draw: random.Random, file: Path, files: list[Path]) -> list[Path]:
    content = bytearray(file.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return []


def _swap(draw: random.Random, file: Path, files: list[Path]) -> list[Path]:
    others = [each for each in files if each != file]
    if not others:
        return _truncate(draw, file, files)
    other = draw.choice(others)
    one, two = file.read_bytes(), other.read_bytes()
    file.write_bytes(two)
    other.write_bytes(one)
    return [other]


def _delete(draw: random.Random, file: Path, files: list[Path]) -> list[Path]:
    file.unlink()
    return []


def _empty(draw: random.Random, file: Path, files: list[Path]) -> list[Path]:
    file.write_bytes(b"")
    return []


def _older(draw: random.Random, file: Path, files: list[Path]) -> list[Path]:
    """Drop a key of a JSON record, as if an older version had written the record."""
    try:
        record = json.loads(file.read_text())
        record.pop(draw.choice(sorted(record)))
    except (ValueError, AttributeError, IndexError):
        return _truncate(draw, file, files)
    file.write_text(json.dumps(record, indent=2) + "\n")
    return []


DAMAGES = {"truncate": _truncate, "flip": _flip, "swap": _swap, "delete": _delete, "empty": _empty, "older": _older}


@contextlib.contextmanager
def _mounted(trial: Trial) -> Iterator[Callable[[str], bool]]:
    """Put the results on a separate disk; yield a function that remounts the disk with other options."""
    if os.getuid():
        raise Skip("mounting needs root")
    place = trial.tree.results
    kept = place.with_name("kept")
    place.mkdir(exist_ok=True)
    place.rename(kept)
    place.mkdir()

    def mount(options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if not mount("size=1g"):
        place.rmdir()
        kept.rename(place)
        raise Skip("mounting is not permitted here")
    shutil.copytree(kept, place, symlinks=True, dirs_exist_ok=True)
    try:
        yield mount
    finally:
        trial.tree.end()
        # copy the results back to the usual disk, so that the trial's folder has them without the mount
        shutil.rmtree(kept)
        shutil.copytree(place, kept, symlinks=True)
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()
        kept.rename(place)


@_fault
def full_disk(trial: Trial) -> Generator[None]:
    """Leave at most 400 kB on the disk of the results from a random moment on; free space after the call."""
    with _mounted(trial) as mount:
        yield
        moment, room = trial.sleep(), trial.random.choice([0, 4, 40, 400]) << 10
        trial.point = f"after {moment:.1f} s: {room >> 10} kB left"
        used = os.statvfs(trial.tree.results)
        mount(f"remount,size={(used.f_blocks - used.f_bfree) * used.f_frsize + room}")
        yield
        mount("remount,size=1g")
        yield


@_fault
def read_only(trial: Trial) -> Generator[None]:
    """Make the disk of the results read-only at a random moment."""
    with _mounted(trial) as mount:
        yield
        trial.point = f"after {trial.sleep():.1f} s"
        while trial.running and not mount("remount,ro"):  # refused while a file is open for writing
            time.sleep(0.01)
        yield
        mount("remount,rw")
        yield


@_fault
def disappearing(trial: Trial) -> Generator[None]:
    """Move the folder of results away during the call."""
    yield
    trial.point = f"after {trial.sleep():.1f} s"
    if trial.tree.results.exists():
        trial.tree.results.rename(trial.tree.path.parent / "away")
    yield


@_fault
def memory(trial: Trial) -> Generator[None]:
    """Limit the memory of a process at a random moment, to its present size or some megabytes more."""
    yield
    trial.point = f"after {trial.sleep():.1f} s:"
    if process := trial.pick():
        with contextlib.suppress(OSError):
            room = trial.random.choice([0, 1, 50, 200]) << 20
            pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + room
            trial.point += f" {room >> 20} MB left"
            resource.prlimit(process, resource.RLIMIT_AS, (limit, limit))
    yield


@_fault
def clock(trial: Trial) -> Generator[None]:
    """Simulate a clock that jumped back: some results are from tomorrow."""
    files = sorted(f for f in trial.tree.results.rglob("*") if f.is_file())
    if not files:
        raise Skip("no results")
    chosen = trial.random.sample(files, trial.random.randint(1, len(files)))
    trial.point = f"{len(chosen)} of {len(files)} results are from tomorrow"
    for file in chosen:
        os.utime(file, (time.time() + 86400,) * 2)
    yield


@_fault
def clock_jump(trial: Trial) -> Generator[None]:
    """Let the clock of the call's processes jump by an hour, a day or a year at a random moment."""
    with _shimmed(trial) as set_shim:
        yield
        moment, hours = trial.sleep(), trial.random.choice([-8760, -24, -1, 1, 24, 8760])
        trial.point = f"after {moment:.1f} s: by {hours} h"
        set_shim(3600 * hours, 0)
        yield


@_fault
def slow_disk(trial: Trial) -> Generator[None]:
    """Slow the disk of the results down for up to 25 seconds from a random moment on."""
    with _shimmed(trial) as set_shim:
        yield
        moment, seconds = trial.sleep(), trial.random.choice([0.02, 0.5, 5])
        trial.point = f"after {moment:.1f} s: {seconds} s per write"
        set_shim(0, int(1e6 * seconds))
        end = time.monotonic() + 25
        while trial.running and time.monotonic() < end:
            time.sleep(0.05)
        set_shim(0, 0)
        yield


@_fault
def network(trial: Trial) -> Generator[None]:
    """Cut the network between two nodes: at a random moment, or while they train. Connect it again after the call."""
    with networks(trial.tree) as possible:
        if not possible:
            raise Skip("network namespaces cannot be made here")
        yield
        if trial.random.random() < 0.3:
            trial.point = f"after {trial.sleep():.1f} s:"
        else:
            while trial.running and not (trial.tree.results / "plans/nodes/two/metrics.jsonl").exists():
                time.sleep(0.01)
            time.sleep(trial.random.uniform(0, 1))
            trial.point = "in training:"
        node = trial.random.randrange(2)
        link = ["ip", "-n", f"{trial.tree.mark}-{node}", "link", "set", "eth0"]
        trial.expects = r"process \d|processes connected to"
        subprocess.run([*link, "down"], check=True)
        began = time.monotonic()
        yield
        trial.point += f" node {node}; the call ended {time.monotonic() - began:.0f} s later"
        subprocess.run([*link, "up"], check=True)
        yield
