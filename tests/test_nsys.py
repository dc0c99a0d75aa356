"""Profiler `nsys`: success with the real tool, and failures with a simulated tool."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dlscale.config.run import Profile, load_run
from dlscale.core.ranges import RANGES, mark
from dlscale.extensions.doctor.doctor import environment as environment_of
from dlscale.extensions.nsys import nsys
from dlscale.measure.profilers import ProfiledTool, TopEntry
from dlscale.parallel.world import World
from tests.conftest import COSMO, COSMO_RUN, make_run, variables
from tests.nsys_databases import Recording
from tests.waiting import PATIENCE, until

STEPS = 4
SETTINGS = {"tools": ["nsys"], "skip": 2, "steps": STEPS}


def configure(folder: Path, processes: int = 1, **profile: Any) -> Path:
    settings = {**COSMO_RUN, "geometry": {"gpus_per_node": processes}, "profile": {**SETTINGS, **profile}}
    return make_run(folder, "cosmo_unet", settings, COSMO)


# ---- a simulated nsys that fails ---------------------------------------------------------------------

#: Simulated nsys. It appends each `profile` call to the file `calls`. Line n of the file `behaviour` selects the
#: behaviour of call n; the last line applies to all later calls.
PRETENDED = """#!/bin/sh
here=$(dirname "$0")
case "$1 $2" in
    "--version "*) echo "NVIDIA Nsight Systems version 2099.1.2-34v0"; exit;;
esac
for word; do case $word in --output=*) output=${word#--output=};; esac; done
case "$1" in
    export) cp "$here/database" "$output"; exit;;
    profile) echo "$*" >>"$here/calls"; for word; do asked=$word; done
        times=$(echo "$asked" | sed 's/.*"times": "\\([^"]*\\)".*/\\1/');;
esac
number=$(wc -l <"$here/calls")
word=$(sed -n "${number}p" "$here/behaviour")
case "${word:-$(tail -n 1 "$here/behaviour")}" in
    report) touch "$output.nsys-rep"; echo "[[1, 3], [3, 3], [1, 3]]" >"$times";;
    silent) echo "Something else.";;
    fails) echo "ValueError: no such thing"; exit 3;;
    sleeps) touch "$here/started"; cat >/dev/null; touch "$here/ended";;
esac
"""


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs a simulated nsys with the given behaviour."""
    folder = tmp_path / "pretended"
    folder.mkdir()
    (folder / "nsys").write_text(PRETENDED)
    (folder / "nsys").chmod(0o755)
    Recording(ranges=[(0, 100, "step", 0, True)]).write(folder / "database")
    monkeypatch.setenv("NSYS", str(folder / "nsys"))

    def behave(*words: str) -> Path:
        (folder / "behaviour").write_text("\n".join(words) + "\n")
        return folder

    return behave


def profiled(folder: Path) -> tuple[ProfiledTool, list[TopEntry]]:
    return nsys.profile_apart(str(configure(folder)), "manifest.json", World(), None, "cpu", folder / "profile")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profile").iterdir())


def test_without_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS", str(tmp_path / "nsys"))
    tool, top = profiled(tmp_path)
    assert tool.problem and "nsys: not found. Install" in tool.problem and "set NSYS" in tool.problem and not top


def test_a_report_is_read_and_kept(tmp_path: Path, pretended: Any) -> None:
    folder = pretended("report")
    tool, top = profiled(tmp_path)
    assert (tool.version, tool.steps, tool.problem) == ("2099.1.2", 1, None)
    assert tool.files == {"Nsight Systems, rank 0": "nsys.rank0.nsys-rep"} and left(tmp_path) == ["nsys.rank0.nsys-rep"]
    assert [row.name for row in top] == ["step"]
    assert tool.overhead and tool.overhead.ratio == 1.5, (
        "the overhead must be relative to steps without a profiler in the same process"
    )
    words = (folder / "calls").read_text().split()
    assert {"--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--kill=none"} <= set(words)
    assert "--capture-range=nvtx" in words and "--capture-range-end=stop" in words


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("silent", "nsys made no report: Something else."),
        ("fails", "the profiled process ended with status 3: ValueError: no such thing"),
        ("unread", "nsys.rank0.nsys-rep: nsys 2099.1.2 cannot export"),
    ],
)
def test_failures_of_nsys_are_reported(tmp_path: Path, pretended: Any, behaviour: str, words: str) -> None:
    folder = pretended("report" if behaviour == "unread" else behaviour)
    if behaviour == "unread":
        (folder / "database").unlink()
    tool, top = profiled(tmp_path)
    assert tool.problem and words in tool.problem and not top
    assert left(tmp_path) == (["nsys.rank0.nsys-rep"] if behaviour == "unread" else [])
    assert len((folder / "calls").read_text().splitlines()) == 1


#: Program that profiles as a stage does.
STAGE = """
import json, logging, signal, sys
from pathlib import Path
from dlscale.config.run import load_run
from dlscale.extensions.nsys import nsys
from dlscale.parallel.rendezvous import join
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
logging.basicConfig(level=logging.INFO)
config, manifest, folder = sys.argv[1:]
with join(load_run(config, "profile").geometry, "cpu") as world:
    tool, top = nsys.profile_apart(config, manifest, world, 2, "cpu", Path(folder) / "profile")
    rows = [row.model_dump() for rank in world.gather(top) for row in rank]
    if world.main:
        (Path(folder) / "found.json").write_text(json.dumps({"tool": tool.model_dump(), "top": rows}))
"""


def stage_words(folder: Path, manifest: Path | str, *starter: str) -> list[str]:
    (folder / "stage.py").write_text(STAGE)
    return [sys.executable, *starter, str(folder / "stage.py"), str(folder / "config.yaml"), str(manifest), str(folder)]


def found(folder: Path) -> tuple[ProfiledTool, list[TopEntry]]:
    raw = json.loads((folder / "found.json").read_text())
    return ProfiledTool(**raw["tool"]), [TopEntry(**row) for row in raw["top"]]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_child_of_a_killed_stage_ends(tmp_path: Path, pretended: Any, number: signal.Signals) -> None:
    """After SIGTERM, the stage leaves no file. After SIGKILL, the child process ends, because its input is closed."""
    folder = pretended("sleeps")
    configure(tmp_path)
    process = subprocess.Popen(stage_words(tmp_path, "manifest.json"), env=variables(), cwd=tmp_path)
    until("the child's start", (folder / "started").exists, process)
    process.send_signal(number)
    process.wait(PATIENCE)
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM and left(tmp_path) == []
    else:
        until("the child's end", (folder / "ended").exists)


def test_nsys_options_with_cuda() -> None:
    words = nsys.recording("nsys", Path("folder/nsys.rank0.nsys-rep"), cuda=True)
    assert "--trace=cuda,nvtx" in words and "--cuda-graph-trace=node" in words
    assert "--capture-range=cudaProfilerApi" in words and "--output=folder/nsys.rank0" in words


def test_doctor_looks_for_it_where_runs_ask_for_it(tmp_path: Path) -> None:
    profilers = load_run(configure(tmp_path), "profile").profile.tools
    facts = {"python": "3.12.0", "torch": "2.13.0", "h5py": "3", "numba": "0.6"}
    for place, status in (("/opt/nsys", "ok"), (None, "warn")):
        [row] = [row for row in environment_of({**facts, "nsys": place}, [], profilers) if row.name == "nsys"]
        assert row.status == status and (row.remedy or status == "ok")
    assert not [row for row in environment_of(facts, [], Profile().tools) if row.name == "nsys"]


# ---- ranges ------------------------------------------------------------------------------------------


def test_a_hook_that_marks_sums_as_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The range of an all-reduce ends when its sum is available, and the hook returns the sum."""
    happened: list[str] = []
    monkeypatch.setattr(nsys.nvtx, "start_range", lambda name: happened.append(name) or 7)
    monkeypatch.setattr(nsys.nvtx, "end_range", lambda opened: happened.append("end"))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    hook: Any = nsys.averaged(lambda group, bucket: future)
    averaged = hook(None, None)
    assert happened == ["comm"]
    future.set_result(torch.ones(3))
    assert torch.equal(averaged.wait(), torch.ones(3)) and happened == ["comm", "end"]


def test_marks_are_nvtx_ranges() -> None:
    with nsys.recorded(torch.device("cpu")):
        for name in RANGES:
            with mark(name) as opened:
                assert opened.attributes.message.string == name


# ---- the real nsys -----------------------------------------------------------------------------------


def totals(tool: Path, report: Path) -> dict[str, tuple[int, int]]:
    """Return (count, total ns) of each NVTX range in nsys's own summary."""
    names = subprocess.run([tool, "stats", "--help-reports"], capture_output=True, text=True).stdout
    summary = "nvtx_sum" if "nvtx_sum" in names else "nvtxsum"
    words = [tool, "stats", "--report", summary, "--format", "csv", "--output", "-", "--force-export", "true", report]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    rows = csv.DictReader(io.StringIO(said[said.index("Time (%)") :]))
    return {row["Range"].strip(":"): (int(row["Instances"]), int(row["Total Time (ns)"])) for row in rows}


def agrees(tool: Path, folder: Path, rank: int) -> None:
    """Check that a rank's ranges occur once per step, and have the counts and durations of nsys's summary."""
    _, top = found(folder)
    expected = totals(tool, folder / f"profile/nsys.rank{rank}.nsys-rep")
    rows = {row.name: row for row in top if row.kind == "range" and row.rank == rank}
    assert Counter({name: count for name, (count, _) in expected.items() if name in RANGES}) == Counter(
        {name: round(row.calls * STEPS) for name, row in rows.items()}
    )
    for name, row in rows.items():
        assert row.calls == 1, name
        assert row.seconds * STEPS * 1e9 == pytest.approx(expected[name][1], abs=2), name


def run(folder: Path, data: Path, tool: Path, *starter: str, **more: str) -> None:
    words = stage_words(folder, data / "manifest.json", *starter)
    done = subprocess.run(
        words, env=variables(NSYS=str(tool), **more), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_on_a_processor(real_nsys: Path, cosmo_data: Path, tmp_path: Path) -> None:
    configure(tmp_path)
    run(tmp_path, cosmo_data, real_nsys)
    tool, top = found(tmp_path)
    assert tool.problem is None and tool.steps == STEPS and tool.version and left(tmp_path) == ["nsys.rank0.nsys-rep"]
    assert set(tool.ranges) == {"step", "data", "copy", "forward", "backward", "optimizer"}
    inner = sum(tool.ranges[name].seconds for name in ("data", "forward", "backward", "optimizer"))
    assert 0.5 * tool.ranges["step"].seconds < inner <= tool.ranges["step"].seconds
    agrees(real_nsys, tmp_path, 0)
    assert {row.kind for row in top} == {"range"}


@pytest.mark.slow
def test_two_processes(real_nsys: Path, cosmo_data: Path, tmp_path: Path) -> None:
    """Both processes are profiled, and their all-reduces have ranges."""
    configure(tmp_path, 2, ranks=[0, 1])
    starter = ("-m", "dlscale.launch.ranks", "--nproc-per-node=2")
    run(tmp_path, cosmo_data, real_nsys, *starter)
    tool, _ = found(tmp_path)
    assert tool.problem is None and left(tmp_path) == ["nsys.rank0.nsys-rep", "nsys.rank1.nsys-rep"]
    assert "comm" in tool.ranges and tool.activity.comm_seconds == pytest.approx(tool.ranges["comm"].seconds)
    for rank in (0, 1):
        agrees(real_nsys, tmp_path, rank)


@pytest.mark.slow
def test_a_mistake_in_one_of_two_processes_ends_both(
    real_nsys: Path,
    cosmo_data: Path,
    tmp_path: Path,
) -> None:
    """Without a manifest, both profiled processes end, and the error message is reported."""
    configure(tmp_path, 2, ranks=[0, 1])
    starter = ("-m", "dlscale.launch.ranks", "--nproc-per-node=2")
    run(tmp_path, tmp_path / "nosuch", real_nsys, *starter)
    tool, top = found(tmp_path)
    assert tool.problem and tool.problem.startswith("the profiled process ended with status 1: ")
    assert "nosuch" in tool.problem and not top and left(tmp_path) == []
