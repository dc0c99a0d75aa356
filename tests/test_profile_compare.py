"""Comparison of two profiles: the changes, and which changes exceed the noise."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlscale.extensions.compare.compare import Summary, _calls, compare, read_rows, short_names
from dlscale.extensions.profile import profile
from dlscale.measure.profilers import Profile, ProfiledTool, TopEntry
from tests.conftest import stage
from tests.nsys_databases import Recording


def row(
    name: str, seconds: float, std: float = 0.0, tool: str = "torch", rank: int = 0, kind: str = "operator"
) -> TopEntry:
    return TopEntry(tool=tool, rank=rank, kind=kind, name=name, calls=1, seconds=seconds, std=std)  # type: ignore[arg-type]


def summary(*rows: TopEntry, steps: int = 4, batch: float | None = None) -> Summary:
    return Summary(list(rows), dict.fromkeys({one.tool for one in rows}, steps), batch)


def compared(before: Summary, after: Summary) -> dict[str, Any]:
    """Return the change of each row, by the row's name."""
    return {each.name: each for each in compare(before, after).itertuples()}


def test_names_in_a_summary_are_no_formulas(tmp_path: Path) -> None:
    """A name that a spreadsheet would compute gets a leading quote, which is removed when the name is read."""
    names = ["=cmd()", "+x", "-x", "@x", "\tx", "'=x", "'x", "x=", "-1.5"]
    profile.write(Profile(), [row(name, 1.0) for name in names], tmp_path)
    written = [line["name"] for line in csv.DictReader((tmp_path / "profile_summary.csv").open(newline=""))]
    assert written == ["'=cmd()", "'+x", "'-x", "'@x", "'\tx", "''=x", "'x", "x=", "-1.5"]
    assert [each.name for each in read_rows(tmp_path / "profile_summary.csv")] == names


def test_changes_are_by_profiler_kind_and_name() -> None:
    """A row that is missing in a profile or on a rank counts as zero time."""
    before = summary(row("mm", 5), row("mm", 7, kind="kernel"), row("gone", 2), row("a.py:1: x", 1, tool="lines"))
    after = summary(row("mm", 4), row("mm", 7, kind="kernel"), row("new", 3))
    assert {(one.kind, one.name): (one.before, one.after) for one in compare(before, after).itertuples()} == {
        ("operator", "mm"): (5, 4),
        ("kernel", "mm"): (7, 7),
        ("operator", "gone"): (2, 0),
        ("operator", "new"): (0, 3),
    }, "a profiler that only one profile has must be left out"
    ranks = summary(row("mm", 4), row("mm", 6, rank=1), row("only", 2, rank=1))
    assert {name: one.before for name, one in compared(ranks, ranks).items()} == {"mm": 5, "only": 1}


def test_noise_is_that_of_two_means() -> None:
    """The noise is sqrt(3^2 / 9 + 4^2 / 4) = sqrt(5), times Student's t with three degrees of freedom, 3.1824."""
    (one,) = compared(summary(row("mm", 10, 3), steps=9), summary(row("mm", 17, 4), steps=4)).values()
    assert one.noise == pytest.approx(3.1824 * 5**0.5, rel=1e-4) and not one.certain
    (one,) = compared(summary(row("mm", 10, 3), steps=9), summary(row("mm", 18, 4), steps=4)).values()
    assert one.certain
    (one,) = compared(summary(row("x", 1, kind="line")), summary(row("x", 9, kind="line"))).values()
    assert math.isinf(one.noise) and not one.certain
    (one,) = compared(summary(row("mm", 10), steps=1), summary(row("mm", 1, 0.1), steps=9)).values()
    assert math.isinf(one.noise) and not one.certain, "the noise of a single step must be unknown"


def test_other_batches_are_compared_by_the_sample() -> None:
    """If batch sizes differ, times and noise are per sample: 8 s for 4 samples are 2 s, 10 s for 10 samples are 1 s."""
    before, after = summary(row("mm", 8, 0.4), batch=4), summary(row("mm", 10, 0.5), batch=10)
    (one,) = compared(before, after).values()
    assert (one.before, one.after, one.per, one.certain) == (2, 1, "sample", True)
    assert one.noise == pytest.approx(3.1824 * math.hypot(0.1, 0.05) / 4**0.5, rel=1e-4)
    for batch in (4, None):  # older profiles may lack the batch size
        (one,) = compared(before, summary(row("mm", 10, 0.5), batch=batch)).values()
        assert (one.before, one.after, one.per) == (8, 10, "step")


def test_noise_is_seldom_called_a_change() -> None:
    """Profiles of the same program differ by more than the noise in only about 5 % of the rows."""
    draw, steps = random.Random(1), 100

    def profile() -> Summary:
        rows = []
        for name in range(400):
            times = [draw.gauss(5, 1) for _ in range(steps)]
            mean = sum(times) / steps
            rows.append(row(str(name), mean, (sum((t - mean) ** 2 for t in times) / (steps - 1)) ** 0.5))
        return summary(*rows, steps=steps)

    assert 0.02 < compare(profile(), profile()).certain.mean() < 0.08


def write(folder: Path, seconds: float, batch: int = 8, name: str = "aten::mm") -> Path:
    tool = ProfiledTool(name="torch", steps=4)
    Profile(tools=[tool], nranks=2, batch_size=batch).write(folder / "profile/profile.json")
    (folder / "config.yaml").write_text("{}")
    names, values = zip(*row(name, seconds, 1e-4).model_dump(exclude_none=True).items(), strict=True)
    (folder / "profile/profile_summary.csv").write_text(f"{','.join(names)}\n{','.join(map(str, values))}\n")
    return folder


def words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", 4e-3, name="aten::\x1b[31mmm"), write(tmp_path / "b", 3e-3, name="aten::\x1b[31mmm")
    assert stage("compare", "--profiles", a, b) == 0
    said = words(capsys)
    assert "faster and slower" in said and "mm −1.00 ± 0.23 4.00 3.00 1 operator, torch yes" in said
    assert "\x1b[31m" not in said, "the terminal must not execute this escape sequence"
    assert stage("compare", "--profiles", a, write(tmp_path / "d", 3e-3, 16, "aten::\x1b[31mmm")) == 0
    assert "4 before, 8 after" in (said := words(capsys)) and "per sample" in said
    assert stage("compare", "--profiles", b, a, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["per"], found["batches"]) == ("step", [4, 4])
    (slower,) = found["faster and slower"]
    assert slower["certain"] and slower["difference"] > 0
    assert stage("compare", "--profiles", a, tmp_path / "c") == 2
    assert "no such run; expected PLAN.RUN, or a run's folder" in capsys.readouterr().err


def test_profiles_of_other_studies_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", 4e-3), write(tmp_path / "b", 3e-3)
    for folder, study in ((a, "cosmo_unet"), (b, "era5_vit")):
        (folder / "config.yaml").write_text(f"study: {study}\n")
    assert stage("compare", "--profiles", a, b) == 2
    assert "the studies differ (cosmo_unet and era5_vit)" in capsys.readouterr().err
    assert stage("compare", "--profiles", a, b, "--force") == 0


def test_names_of_kernels_are_short_and_unique() -> None:
    """Long C++ names keep only their beginning and end; if two names become equal, the second gets a number."""
    long = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, (bool)1, (bool){}, (cudnnKernelDataType_t)0>(T1 *)"
    names = ["aten::mm", long.format(0), long.format(1), long.format(0), "aten::mm"]
    assert short_names(names) == [
        "aten::mm",
        "cudnn::ops::nchwToNhwcKernel<_…udnnKernelDataType_t)0>(T1 *)",
        "cudnn::ops::nchwToNhwcKernel<_…udnnKernelDataType_t)0>(T1 *) (2)",
        "cudnn::ops::nchwToNhwcKernel<_…udnnKernelDataType_t)0>(T1 *)",
        "aten::mm",
    ]


def test_calls_of_a_step_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calls are means over ranks. Equal numbers of calls are shown once; a profiler without counts shows no calls."""
    before = summary(replaced(row("nccl", 5), 8), replaced(row("nccl", 5, rank=1), 8), replaced(row("mm", 9), 2))
    after = summary(replaced(row("nccl", 4), 5), replaced(row("nccl", 4, rank=1), 5), replaced(row("mm", 8), 2))
    found = {name: (each.calls_before, each.calls_after) for name, each in compared(before, after).items()}
    assert found == {"nccl": (8, 5), "mm": (1, 1)}, "a rank without mm must count as zero calls"
    for calls, shown in (((8, 5), "8 -> 5"), ((7, 7), "7"), ((27.966, 3.97), "27.97 -> 3.97"), ((0, 0), "–")):
        assert _calls(*calls).text == shown


def replaced(entry: TopEntry, calls: float) -> TopEntry:
    return entry.model_copy(update={"calls": calls})


@pytest.mark.skipif(
    not (shutil.which(os.environ.get("NSYS") or "nsys") and os.environ.get("SC22_PROFILES")),
    reason="needs nsys, and SC22_PROFILES set to the folder sample_nsys_profiles of the SC22 tutorial",
)
def test_published_reports_show_fewer_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    """With larger buckets, a step has 5 NCCL calls instead of 8, as in the tutorial."""
    folder = Path(os.environ["SC22_PROFILES"])
    names = [folder / f"4gpu_{name}.nsys-rep" for name in ("baseline", "bucketcap100mb")]
    assert stage("compare", "--profiles", *names, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["faster and slower"]
    (nccl,) = [each for each in rows if each["name"].startswith("ncclKernel_AllReduce")]
    assert (nccl["calls_before"], nccl["calls_after"]) == (8, 5)


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            'Can\'t parse message of type "QuadDAnalysis.Data.SessionState"',
            "this nsys 2022.4.2.1 is older than the report",
        ),
        ("Section Table Reference magic number mismatch.", "nsys 2022.4.2.1 cannot export the report"),
    ],
)
def test_a_report_of_a_later_nsys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], printed: str, said: str
) -> None:
    """The errors that nsys 2022.4 prints for SC23's reports and for a truncated report give clear messages."""
    tool, report = tmp_path / "nsys", tmp_path / "theirs.nsys-rep"
    tool.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && echo version 2022.4.2.1-df98 || {{ echo {shlex.quote(printed)}; exit 1; }}\n"
    )
    tool.chmod(0o755)
    report.write_bytes(b"x")
    monkeypatch.setenv("NSYS", str(tool))
    assert stage("compare", "--profiles", report, report) == 2
    error = capsys.readouterr().err
    assert f"{report}: {said}" in error and "expected NVTX" not in error


def published(folder: Path, forward: int, version: str = "2022") -> Path:
    """Write a report with the range names of the tutorials' programs: 3 steps, with a forward pass of `forward` ms."""
    ms, recording = 1_000_000, Recording()
    for number in range(3):
        at = 100 * number * ms
        recording.ranges += [
            (at, at + 90 * ms, f"step {number}", 0, True),
            (at, at + 10 * ms, f"data copy in {number}", 0, True),
            (at + 20 * ms, at + (20 + forward) * ms, "forward", 0, True),
        ]
        recording.calls.append((at + 21 * ms, at + 22 * ms, 0, number + 1, "cudaLaunchKernel_v7000"))
        recording.kernels.append((at + 25 * ms, at + (25 + forward) * ms, number + 1, "convolution 3"))
    folder.mkdir()
    return recording.write(folder / "theirs.sqlite", version)


def test_reports_of_other_programs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reports from two versions of nsys are compared with each other, and a report with a run's profile."""
    before, after = published(tmp_path / "a", 30), published(tmp_path / "b", 40, "2025")
    assert stage("compare", "--profiles", before, after, "--json") == 0
    rows = {(row["kind"], row["name"]): row for row in json.loads(capsys.readouterr().out)["faster and slower"]}
    for key in (("range", "forward"), ("kernel", "convolution 3")):
        assert (rows[key]["before"], rows[key]["after"]) == pytest.approx((0.03, 0.04)), (
            "the times must be seconds per step"
        )
    assert {name for kind, name in rows if kind == "range"} == {"forward"}, (
        "unchanged steps and copies must be left out"
    )
    own = write(tmp_path / "own", 4e-3)
    (own / "profile/profile_summary.csv").write_text("tool,kind,name,calls,seconds\nnsys,range,copy,1,0.02\n")
    assert stage("compare", "--profiles", before, own) == 0
    assert "copy 10.0 noise unknown 10.0 20.0 1 range, nsys" in words(capsys)


def test_an_invalid_report_gives_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = published(tmp_path / "a", 30)
    none = Recording(ranges=[(1, 2, "forward", 0, True)]).write(tmp_path / "none.sqlite")
    (tmp_path / "a.nsys-rep").write_bytes(b"")
    monkeypatch.setenv("NSYS", "nosuch")
    for name, expected in {
        none: "contains no range with the name step",
        tmp_path / "nosuch.sqlite": "nosuch.sqlite: no such file",
        tmp_path / "a.nsys-rep": "Export the report on a machine with nsys: nsys export --type=sqlite a.nsys-rep",
    }.items():
        assert stage("compare", "--profiles", theirs, name) == 2
        assert expected in capsys.readouterr().err.splitlines()[-1]


def test_a_report_is_exported_by_a_real_nsys(
    real_nsys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "theirs.py"
    program.write_text(
        "import time, nvtx\n"
        "for i in range(3):\n"
        "    with nvtx.annotate(f'step {i}'), nvtx.annotate('forward'):\n"
        "        time.sleep(0.02)\n"
    )
    report = tmp_path / "theirs.nsys-rep"
    recorded = [real_nsys, "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", f"--output={report}"]
    subprocess.run([*recorded, sys.executable, program], check=True, capture_output=True)
    monkeypatch.setenv("NSYS", str(real_nsys))
    own = write(tmp_path / "own", 4e-3)
    (own / "profile/profile_summary.csv").write_text("tool,kind,name,calls,seconds\nnsys,range,forward,1,0.01\n")
    assert stage("compare", "--profiles", report, own, "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["faster and slower"]}
    assert 0.02 <= rows["forward"]["before"] < 0.2 and rows["step"]["before"] >= 0.02


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (b"", "no rows; run the profile stage again"),
        (b"\xff\xfe", "not the summary of a profile"),
        (b"tool,kind,name,calls,seconds\ntorch,kernel,a,1,-1\n", "row 1"),
        (b"tool,kind,name,calls,seconds\ntorch,kernel,a,1,inf\n", "row 1"),
        (b"tool,kind,name,calls,seconds\ntorch,kernel," + 200_000 * b"a" + b",1,1\n", "not the summary of a profile"),
        (b"tool,kind,name,calls,seconds\nnsys,kernel,a,1,1\n", "no profiler in common (torch and nsys)"),
    ],
)
def test_a_damaged_summary_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: bytes, words: str
) -> None:
    a, b = write(tmp_path / "a", 4e-3), write(tmp_path / "b", 6e-3)
    next(tmp_path.glob("b/**/profile_summary.csv")).write_bytes(table)
    assert stage("compare", "--profiles", a, b) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
