"""Profiler `nsys`: what it does when all goes well, with a real nsys; and when not, with one that is made to fail."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlscale.config.run import Profile, load_run
from dlscale.core.ranges import RANGES, mark, marking
from dlscale.measure.profile import write_table
from dlscale.measure.profilers import nsys, nvtx_ranges, records
from dlscale.measure.profilers.records import ProfiledTool, TopEntry
from dlscale.parallel.world import World
from dlscale.preflight.environment import environment as environment_of
from dlscale.report.profiles import read_rows
from tests.conftest import COSMO, COSMO_RUN, ROOT, make_run, stage
from tests.nsys import tidy
from tests.nsys_databases import Recording
from tests.waiting import PATIENCE, until

STEPS = 4
SETTINGS = {"tools": ["nsys"], "skip": 2, "steps": STEPS}


def configure(folder: Path, processes: int = 1, **profile: Any) -> Path:
    settings = {**COSMO_RUN, "geometry": {"gpus_per_node": processes}, "profile": {**SETTINGS, **profile}}
    return make_run(folder, "cosmo_unet", settings, COSMO)


# ---- an nsys that fails ------------------------------------------------------------------------------

#: It counts its calls in `calls`; `behaviour` has a word for each call of `profile`, the last one for all further ones.
PRETENDED = """#!/bin/sh
here=$(dirname "$0")
case "$1 $2" in
    "--version "*) echo "NVIDIA Nsight Systems version 2099.1.2-34v0"; exit;;
    "profile --help") echo "--cuda-graph-trace= --trace= Possible values are 'cuda', 'nccl'"; exit;;
esac
for word; do case $word in --output=*) output=${word#--output=};; esac; done
case "$1" in
    export) cp "$here/database" "$output"; exit;;
    profile) echo "$*" >>"$here/calls"; for word; do times=$word; done;;
esac
number=$(wc -l <"$here/calls")
word=$(sed -n "${number}p" "$here/behaviour")
case "${word:-$(tail -n 1 "$here/behaviour")}" in
    report) touch "$output.nsys-rep"; echo "[[1, 3], [3, 3], [1, 3]]" >"$times";;
    raw) touch "$output.qdstrm"; echo "[[1, 3], [3, 3], [1, 3]]" >"$times";;
    lost) echo "Connection to the Agent lost."; exit 1;;
    blocked) echo "Agent launcher failed."; exit 1;;
    silent) echo "Something else.";;
    fails) echo "ValueError: no such thing"; exit 3;;
    sleeps) touch "$here/started"; cat >/dev/null; touch "$here/ended";;
esac
"""


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that has nsys behave so at its calls."""
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
    config = configure(folder)
    return nsys.profile(str(config), "manifest.json", World(), None, "cpu", folder / "profile")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "profile").iterdir())


def test_without_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS", str(tmp_path / "nsys"))
    tool, top = profiled(tmp_path)
    assert tool.problem and "nsys: not found; install" in tool.problem and "set NSYS" in tool.problem and not top


def test_a_report_is_read_and_kept(tmp_path: Path, pretended: Any) -> None:
    folder = pretended("report")
    tool, top = profiled(tmp_path)
    assert (tool.version, tool.steps, tool.problem) == ("2099.1.2", 1, None)
    assert tool.files == {"Nsight Systems, rank 0": "nsys.rank0.nsys-rep"} and left(tmp_path) == ["nsys.rank0.nsys-rep"]
    assert [row.name for row in top] == ["step"]
    assert tool.overhead and tool.overhead.ratio == 1.5, "against the same process's plain steps"
    words = (folder / "calls").read_text().split()
    assert {"--trace=nvtx,osrt", "--sample=none", "--cpuctxsw=none", "--kill=none"} <= set(words)
    assert "--capture-range=nvtx" in words and "--capture-range-end=stop" in words


def test_a_lost_agent_is_tried_again(tmp_path: Path, pretended: Any) -> None:
    folder = pretended("lost", "silent", "report")
    tool, _ = profiled(tmp_path)
    assert tool.problem is None and tool.steps == 1
    assert len((folder / "calls").read_text().splitlines()) == 3


def test_an_agent_lost_for_good_is_a_problem(tmp_path: Path, pretended: Any) -> None:
    folder = pretended("lost")
    tool, top = profiled(tmp_path)
    assert tool.problem and "recorded nothing, 3 times" in tool.problem and "Agent lost" in tool.problem and not top
    assert len((folder / "calls").read_text().splitlines()) == nsys.TRIES and left(tmp_path) == []


def test_an_agent_that_never_starts_leads_to_what_an_earlier_one_left(tmp_path: Path, pretended: Any) -> None:
    folder = pretended("blocked")
    tool, _ = profiled(tmp_path)
    assert tool.problem and "Agent launcher failed.; if no other nsys runs on this machine, remove" in tool.problem
    assert len((folder / "calls").read_text().splitlines()) == 1


def test_a_process_that_fails_says_why_and_is_not_tried_again(tmp_path: Path, pretended: Any) -> None:
    folder = pretended("fails")
    tool, _ = profiled(tmp_path)
    assert tool.problem == "the profiled process ended with status 3: ValueError: no such thing"
    assert len((folder / "calls").read_text().splitlines()) == 1


def record_with(folder: Path, tool: ProfiledTool) -> records.Profile:
    """Write the profile of a run as the stage does, of `torch` and of what nsys found; return its record."""
    other = TopEntry(tool="torch", kind="operator", name="aten::mm", calls=1, seconds=1.0)
    record = records.Profile(tools=[ProfiledTool(name="torch"), tool], top=[other])
    record.write(folder / "profile/profile.json")
    write_table(folder / "profile/profile_summary.csv", [other])
    return record


@pytest.mark.slow
def test_what_was_recorded_only_is_imported_later(
    tmp_path: Path, pretended: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`dlscale import`: whole, or not at all, with one message that says why."""
    folder = pretended("raw")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    tool, top = profiled(tmp_path)
    assert tool.problem and tool.problem.endswith(f"installed: dlscale import {tmp_path}") and not top
    assert left(tmp_path) == ["nsys.rank0.qdstrm"] == [*tool.files.values()]
    record = record_with(tmp_path, tool)

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "profile").iterdir()}

    def fails(words: str) -> None:
        before = files()
        assert stage("import", tmp_path) == 2
        assert words in capfd.readouterr().err.splitlines()[-1] and files() == before

    fails(f"QdstrmImporter: neither beside {folder}/nsys nor on PATH; import where all of Nsight")
    importer = folder / "QdstrmImporter"
    importer.write_text("#!/bin/sh\necho no such format\nexit 1\n")
    importer.chmod(0o755)
    fails("nsys.rank0.qdstrm: QdstrmImporter cannot make a report of it")
    importer.write_text('#!/bin/sh\ncp "$2" "$4"\n')
    (folder / "database").write_bytes(b"no database")
    fails("nsys.rank0.nsys-rep")
    (folder / "database").unlink()
    Recording(ranges=[(0, 100, "step", 0, True)]).write(folder / "database")
    with monkeypatch.context() as without:
        without.setenv("NSYS", str(folder / "nosuch"))
        fails("nsys: not found; install NVIDIA Nsight Systems here")

    assert stage("import", tmp_path) == 0
    assert "nsys.rank0.nsys-rep; the next `snakemake` shows it" in capfd.readouterr().out
    assert left(tmp_path) == ["nsys.rank0.nsys-rep", "profile.json", "profile_summary.csv"]
    first, second = records.Profile.read(tmp_path / "profile/profile.json").tools
    assert first == record.tools[0] and second.problem is None and second.steps == 1
    assert second.overhead == tool.overhead and [*second.files.values()] == ["nsys.rank0.nsys-rep"]
    rows = read_rows(tmp_path / "profile/profile_summary.csv")
    assert [(row.tool, row.name) for row in rows] == [("torch", "aten::mm"), ("nsys", "step")]
    assert list((tmp_path / "tensorboard/profile").iterdir())
    fails("nothing is left over to import")


def test_a_problem_of_all_ranks_is_said_once() -> None:
    def joined(*problems: str | None) -> str | None:
        tools = [ProfiledTool(name="nsys", version="1", problem=problem) for problem in problems]
        return nsys._joined([(tool, []) for tool in tools])[0].problem

    assert joined("see nsys.rank0.qdstrm", "see nsys.rank1.qdstrm", None) == "see nsys.rankN.qdstrm"
    assert joined("see nsys.rank1.qdstrm", None) == "see nsys.rank1.qdstrm" and joined(None, None) is None
    assert joined("the process failed", "no step is in nsys.rank1.nsys-rep") == (
        "the process failed; no step is in nsys.rank1.nsys-rep"
    )
    assert joined("the process failed", "the process failed") == "the process failed"


#: Profiles as a stage does it.
STAGE = """
import json, logging, signal, sys
from pathlib import Path
from dlscale.config.run import load_run
from dlscale.measure.profilers import nsys
from dlscale.parallel.rendezvous import join
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
logging.basicConfig(level=logging.INFO)
config, manifest, folder = sys.argv[1:]
with join(load_run(config, "profile").geometry, "cpu") as world:
    tool, top = nsys.profile(config, manifest, world, 2, "cpu", Path(folder) / "profile")
    if world.main:
        rows = [row.model_dump() for row in top]
        (Path(folder) / "found.json").write_text(json.dumps({"tool": tool.model_dump(), "top": rows}))
"""


def stage_words(folder: Path, manifest: Path | str, *starter: str) -> list[str]:
    (folder / "stage.py").write_text(STAGE)
    return [sys.executable, *starter, str(folder / "stage.py"), str(folder / "config.yaml"), str(manifest), str(folder)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts"), **more}


def found(folder: Path) -> tuple[ProfiledTool, list[TopEntry]]:
    raw = json.loads((folder / "found.json").read_text())
    return ProfiledTool(**raw["tool"]), [TopEntry(**row) for row in raw["top"]]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stage_that_is_ended_takes_its_child_along(tmp_path: Path, pretended: Any, number: signal.Signals) -> None:
    """Asked to end, it leaves nothing; killed outright, what it had started sees its standard input end."""
    folder = pretended("sleeps")
    configure(tmp_path)
    process = subprocess.Popen(stage_words(tmp_path, "manifest.json"), env=environment(), cwd=tmp_path)
    until("the child's start", (folder / "started").exists, process)
    process.send_signal(number)
    process.wait(PATIENCE)
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM and left(tmp_path) == []
    else:
        until("the child's end", (folder / "ended").exists)


def test_words_follow_the_versions_help(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended("report")
    tool = nsys.find()
    assert tool is not None
    words = tool.profile(Path("folder/nsys.rank0.nsys-rep"), cuda=True)
    assert "--trace=cuda,nvtx,osrt,cublas,cudnn,nccl" in words and "--cuda-graph-trace=node" in words
    assert "--capture-range=cudaProfilerApi" in words and "--output=folder/nsys.rank0" in words
    monkeypatch.setattr(nsys, "answer", lambda words: "--trace= 'cuda', 'nvtx'")
    words = nsys.Nsys("nsys").profile(Path("nsys.rank0.nsys-rep"), cuda=True)
    assert "--trace=cuda,nvtx,osrt,cublas,cudnn" in words and not any("graph" in word for word in words)


def test_doctor_looks_for_it_where_runs_ask_for_it(tmp_path: Path) -> None:
    profilers = load_run(configure(tmp_path), "profile").profile.tools
    facts = {"python": "3.12.0", "torch": "2.13.0", "h5py": "3", "numba": "0.6"}
    for place, status in (("/opt/nsys", "ok"), (None, "warn")):
        [row] = [row for row in environment_of({**facts, "nsys": place}, [], profilers) if row.name == "nsys"]
        assert row.status == status and (row.remedy or status == "ok")
    assert not [row for row in environment_of(facts, [], Profile().tools) if row.name == "nsys"]


# ---- ranges ------------------------------------------------------------------------------------------


def test_a_hook_that_marks_sums_as_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its range ends when the sum is there, even where that fails."""
    happened: list[str] = []
    monkeypatch.setattr(nvtx_ranges, "_begun", lambda name: happened.append(name) or (lambda: happened.append("end")))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    hook: Any = nvtx_ranges.averaged(lambda group, bucket: future)
    averaged = hook(None, None)
    assert happened == ["comm"]
    future.set_result(torch.ones(3))
    assert torch.equal(averaged.wait(), torch.ones(3)) and happened == ["comm", "end"]
    future = torch.futures.Future()
    averaged = hook(None, None)
    future.set_exception(RuntimeError("the other is gone"))
    with pytest.raises(RuntimeError, match="the other is gone"):
        averaged.wait()
    assert happened == ["comm", "end"] * 2


def test_with_cuda_ranges_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        torch.cuda,
        "nvtx",
        SimpleNamespace(
            range=lambda name: marking(happened.append),  # any context
            range_start=lambda name: happened.append(name) or 7,
            range_end=happened.append,
        ),
    )
    assert nvtx_ranges.marker() is torch.cuda.nvtx.range
    nvtx_ranges._begun("comm")()
    assert happened == ["comm", 7]
    monkeypatch.setattr(
        torch.cuda, "profiler", SimpleNamespace(start=lambda: happened.append(1), stop=lambda: happened.append(2))
    )
    with nvtx_ranges.recorded(torch.device("cuda")):
        happened.append("steps")
    assert happened[2:] == [1, "steps", 2]


def test_marks_are_nvtx_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)  # PyTorch's own ranges yield nothing that could be asked
    with marking(nvtx_ranges.marker()):
        for name in RANGES:
            with mark(name) as opened:
                assert opened.attributes.message.string == name


# ---- a real nsys -------------------------------------------------------------------------------------


def totals(tool: Path, report: Path) -> dict[str, tuple[int, int]]:
    """Return what nsys' own summary of NVTX ranges says: how many, and ns in all."""
    names = subprocess.run([tool, "stats", "--help-reports"], capture_output=True, text=True).stdout
    summary = "nvtx_sum" if "nvtx_sum" in names else "nvtxsum"
    words = [tool, "stats", "--report", summary, "--format", "csv", "--output", "-", "--force-export", "true", report]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    rows = csv.DictReader(io.StringIO(said[said.index("Time (%)") :]))
    return {row["Range"].strip(":"): (int(row["Instances"]), int(row["Total Time (ns)"])) for row in rows}


def agrees(tool: Path, folder: Path, rank: int) -> None:
    """The ranges of a rank are balanced, as many as the steps, and as long as nsys itself says."""
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
        words, env=environment(NSYS=str(tool), **more), capture_output=True, text=True, timeout=PATIENCE
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
def test_a_recording_is_imported_by_the_real_nsys(
    real_nsys: Path, cosmo_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded by a copy of it that lacks what makes reports, as in a slim image."""
    [target] = real_nsys.parent.glob("../lib/*-linux-gnu/nsight-systems/target-*")
    slim = tmp_path / "slim" / target.name
    shutil.copytree(target, slim)
    configure(tmp_path)
    run(tmp_path, cosmo_data, slim / "nsys")
    tool, _ = found(tmp_path)
    assert tool.problem and f"dlscale import {tmp_path}" in tool.problem
    assert left(tmp_path) == ["nsys.rank0.qdstrm"]
    record_with(tmp_path, tool)
    monkeypatch.setenv("NSYS", str(real_nsys))
    assert stage("import", tmp_path) == 0
    imported = records.Profile.read(tmp_path / "profile/profile.json").tools[1]
    assert imported.problem is None and imported.steps == STEPS and imported.overhead == tool.overhead
    rows = read_rows(tmp_path / "profile/profile_summary.csv")
    expected = totals(real_nsys, tmp_path / "profile/nsys.rank0.nsys-rep")
    for row in [row for row in rows if row.tool == "nsys"]:
        assert row.seconds * STEPS * 1e9 == pytest.approx(expected[row.name][1], rel=1e-5), row.name


@pytest.mark.slow
def test_two_processes(real_nsys: Path, cosmo_data: Path, tmp_path: Path) -> None:
    """Both are profiled, and their sums of gradients are ranges that overlap the backward pass."""
    configure(tmp_path, 2, ranks=[0, 1])
    starter = ("-m", "dlscale.launch.torchrun", "--nproc-per-node=2")
    run(tmp_path, cosmo_data, real_nsys, *starter)
    tool, _ = found(tmp_path)
    assert tool.problem is None and left(tmp_path) == ["nsys.rank0.nsys-rep", "nsys.rank1.nsys-rep"]
    assert "comm" in tool.ranges and tool.activity.comm_seconds == pytest.approx(tool.ranges["comm"].seconds)
    assert tool.activity.comm_overlap is not None and 0 <= tool.activity.comm_overlap <= 1
    for rank in (0, 1):
        agrees(real_nsys, tmp_path, rank)


IN_A_CONTAINER = """
import subprocess, sys, time
from pathlib import Path
from dlscale.measure.profilers.nsys_neighbours import beside_others
subprocess.run(["mount", "-t", "tmpfs", "none", "/tmp"], check=True)
with beside_others():
    words = [sys.argv[1], "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--output=/tmp/of"]
    status = subprocess.run([*words, "sleep", "2"], cwd="/tmp").returncode
    time.sleep(2)  # until its agent has ended: with this process, the first one, all others are killed
sys.exit(status or not Path("/tmp/of.nsys-rep").exists())
"""


@pytest.mark.slow
def test_in_containers_that_count_alike(real_nsys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has numbers of processes and a /tmp of its own, but the machine's shared memory, where agents meet.

    Beside other load one of three loses its agent now and then; where nobody keeps them apart, it does each time.
    """
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount", "--mount-proc"]
    if subprocess.run([*apart, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode:
        pytest.skip("a user may not have numbers of processes and mounts of its own here")
    monkeypatch.setenv("DLSCALE_LIFELINE", "1")
    words = [*apart, sys.executable, "-c", IN_A_CONTAINER, str(real_nsys)]
    for _ in range(4):
        tidy()
        containers = [
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(3)
        ]
        said = [container.communicate(timeout=120)[0] for container in containers]
        if not any(container.returncode for container in containers):
            return
    pytest.fail(f"none of four times did all three make their reports; the last time they said {said}")


@pytest.mark.slow
def test_one_of_two_processes(real_nsys: Path, cosmo_data: Path, tmp_path: Path) -> None:
    configure(tmp_path, 2, ranks=[1])
    starter = ("-m", "dlscale.launch.torchrun", "--nproc-per-node=2")
    run(tmp_path, cosmo_data, real_nsys, *starter)
    tool, top = found(tmp_path)
    assert tool.problem is None and left(tmp_path) == ["nsys.rank1.nsys-rep"] and {row.rank for row in top} == {1}


@pytest.mark.slow
def test_a_mistake_in_one_of_two_processes_ends_both(
    real_nsys: Path,
    cosmo_data: Path,
    tmp_path: Path,
) -> None:
    """Its message is what is told; nobody waits for it."""
    configure(tmp_path, 2, ranks=[0, 1])
    starter = ("-m", "dlscale.launch.torchrun", "--nproc-per-node=2")
    run(tmp_path, tmp_path / "nosuch", real_nsys, *starter)
    tool, top = found(tmp_path)
    assert tool.problem and tool.problem.startswith("the profiled process ended with status 2: ")
    assert "nosuch" in tool.problem and not top and left(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_stage(real_nsys: Path, cosmo_data: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Neither the child nor nsys, which has processes of its own."""
    configure(tmp_path, steps=100_000)
    words = stage_words(tmp_path, cosmo_data / "manifest.json")
    process = subprocess.Popen(words, env=environment(NSYS=str(real_nsys)))

    def children() -> list[str]:
        """The processes that have this test's folder among their words."""
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lines.append(path.read_text(errors="replace").replace("\0", " "))
        return [line for line in lines if str(tmp_path) in line and "profilers.child" in line]

    until("nsys and the child", lambda: len(children()) >= 2, process)
    process.send_signal(number)
    process.wait(PATIENCE)
    until("the end of all", lambda: not children(), said=children)
    assert number == signal.SIGKILL or left(tmp_path) == []


def test_logs_have_no_progress(caplog: pytest.LogCaptureFixture, tmp_path: Path, pretended: Any) -> None:
    caplog.set_level(logging.INFO)
    folder = pretended("report")
    text = (folder / "nsys").read_text().replace('report) touch "', 'report) printf "a\\rb\\rdone\\n"; touch "')
    (folder / "nsys").write_text(text)
    profiled(tmp_path)
    [said] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("nsys: status")]
    assert said == "nsys: status 0\ndone"
