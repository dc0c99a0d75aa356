"""Telemetry of a stage: figures of real processes, the end of sampling, and the functions that read the file."""

from __future__ import annotations

import ctypes
import datetime as dt
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale.config.records import PlanRecord, Published
from dlscale.core import telemetry
from dlscale.core.errors import UserError
from dlscale.core.machine import SNAKEMAKES
from dlscale.core.metrics import Epoch
from dlscale.core.telemetry import GpuSample, Sample, sampled
from dlscale.extensions.health.gpm import Activity
from dlscale.extensions.profile import machine as profiles
from dlscale.measure import processes
from dlscale.measure import telemetry as sampler
from dlscale.measure.telemetry import Energy, Gpus, bus_ids
from dlscale.report.sections import Page
from dlscale.results import PlanResult, RunResult
from dlscale.train.provenance import Provenance
from tests.conftest import variables
from tests.test_usage import BURN, answer, drop, end, on_disk, python
from tests.waiting import until

START = 1.7e9  # seconds since 1970


def gpu(joules: float | None = None, watts: float | None = None, throttled: str = "") -> GpuSample:
    return GpuSample(0.5, 2e9, watts, joules, 1410.0, 61.0, throttled)


def write(path: Path, samples: list[Sample]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(telemetry.header(len(samples[0].gpus)) + "".join(map(telemetry.line, samples)))
    return path


# ---- the file ---------------------------------------------------------------------------------------


def test_written_telemetry_is_read_unchanged(tmp_path: Path) -> None:
    full = {column.name: 0.25 + number for number, column in enumerate(fields(Sample))} | {
        "cores": 2,
        "time": START + 1,
    }
    first = Sample(**full | {"gpus": (gpu(12.5, 310.25, "power cap+power brake"), GpuSample(throttled=""))})  # type: ignore[arg-type]
    second = Sample(START + 2, 1.0, 2, gpus=(gpu(7_654_321.125), GpuSample(throttled="")))
    path = write(tmp_path / "train.csv", [first, second])
    assert telemetry.read(path) == [first, second]
    table = pd.read_csv(path)
    assert table["gpu0_throttled"][0] == "power cap+power brake" and table["gpu0_joules"][1] == 7_654_321.125
    assert table["cpu"].isna().tolist() == [False, True]


def test_an_incomplete_row_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "train.csv", [Sample(START, 1.0, 2), Sample(START + 1, 1.0, 2)])
    text = path.read_text()
    for cut in range(1, len(text) - text.rindex("\n", 0, -1)):
        path.write_text(text[:-cut])
        assert telemetry.read(path) == [Sample(START, 1.0, 2)]
    path.write_text("")
    assert telemetry.read(path) == [] and telemetry.read(tmp_path / "none.csv") == []


ROW = telemetry.line(Sample(START, 1.0, 2, cpu=0.5))


@pytest.mark.parametrize(
    "text",
    [
        "time,seconds\n1,1\n",
        "{}\n{}\n",
        *(telemetry.header(0) + row for row in ("1,a,2\n", "1,1,2\n", "," + ROW, ROW.replace(",1,2,", ",,2,"))),
        *(telemetry.header(0) + ROW.replace(",1,2,", cells) for cells in (",0,2,", ",-1,2,", ",nan,2,", ",1,0,")),
        telemetry.header(0) + ROW.replace(",0.5,", ",nan,"),
        telemetry.header(0) + ROW.replace(",0.5,", f",{'5' * 200_000},"),
        telemetry.header(0) + ROW.replace(",0.5,", ",\udcff,"),
    ],
)
def test_invalid_telemetry_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.csv"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=r"train\.csv: not telemetry .* run its stage again"):
        telemetry.read(path)


def test_nodes_of_this_run_and_of_no_earlier_one(tmp_path: Path) -> None:
    rows = [Sample(START + second, 1.0, 2) for second in range(3)]
    path = write(tmp_path / "train.csv", rows)
    write(tmp_path / "train.node1.csv", rows[:2])
    write(tmp_path / "train.node2.csv", [Sample(START - 100, 1.0, 2)])
    assert telemetry.read_nodes(path) == [rows, rows[:2]]
    assert telemetry.read_nodes(tmp_path / "throughput.csv") == []


# ---- summaries --------------------------------------------------------------------------------------

POWER = st.lists(st.tuples(st.floats(0.1, 2.0), st.floats(0, 700)), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(POWER, st.booleans(), st.floats(-1, 12), st.floats(0, 12))
def test_energy_is_the_integral_of_power(
    states: list[tuple[float, float]], counted: bool, since: float, more: float
) -> None:
    """Energy, from the GPUs' counters or power, equals a sum over 20,000 moments, for two nodes of two GPUs."""
    samples, time_, joules = [], START, 0.0
    for seconds, watts in states:
        time_, joules = time_ + seconds, joules + seconds * watts
        one = gpu(joules=joules if counted else None, watts=watts)
        samples.append(Sample(time_, seconds, 2, gpus=(one, one)))
    edges = np.cumsum([0, *(seconds for seconds, _ in states)])
    moments = np.linspace(0, edges[-1], 20_001)[:-1] + edges[-1] / 40_000
    power = np.array([watts for _, watts in states])[
        np.searchsorted(edges, moments, side="right").clip(1, len(states)) - 1
    ]
    inside = (moments >= since) & (moments < since + more)
    expected = float(power[inside].sum() * edges[-1] / 20_000)
    found = telemetry.energy([samples, samples], START + since, START + since + more)
    assert found == pytest.approx(4 * expected, abs=4 * 700 * edges[-1] / 5_000)
    assert telemetry.energy([samples]) == pytest.approx(2 * joules, rel=1e-5)  # times since 1970 have steps of 0.2 µs
    assert telemetry.energy([[Sample(START, 1.0, 2, gpus=(GpuSample(),))], []]) is None, (
        "GPUs without power and energy must have no total"
    )


def test_the_summary_equals_that_of_the_table(tmp_path: Path) -> None:
    """pandas gives the same means over time and the same peaks."""
    random = np.random.default_rng(0)
    samples = [
        Sample(
            START + 2 * second,
            float(random.uniform(0.5, 1.5)),
            2,
            cpu=random.random(),
            rss_bytes=random.integers(10**9),
            gpus=(gpu(watts=300 * random.random(), throttled="power cap" if second == 1 else ""),) * 2,
        )
        for second in range(5)
    ]
    path = write(tmp_path / "train.csv", samples)
    found, table = telemetry.summary(telemetry.read(path)), pd.read_csv(path)
    for name in ("cpu", "rss_bytes", "gpu1_watts"):
        assert found.means[name] == pytest.approx(np.average(table[name], weights=table["seconds"]))
        assert found.peaks[name] == table[name].max()
    assert "cpu_others" not in found.means
    assert found.seconds == pytest.approx(table["seconds"].sum())
    assert found.throttled_seconds == pytest.approx(table["seconds"][1])
    assert found.throttle_reasons == {"power cap": pytest.approx(2 * table["seconds"][1])}
    assert found.joules == pytest.approx(2 * (table["seconds"] * table["gpu0_watts"]).sum())
    assert telemetry.summary([]).seconds == 0


def result(samples: list[list[Sample]], *epochs: Epoch, **over: Any) -> RunResult:
    provenance = Provenance(**over)
    return RunResult("a", "a", Path("a"), "p/a", {}, provenance, list(epochs), None, None, None, {"train": samples})


def epoch(number: int, end: float, seconds: float, speed: float) -> Epoch:
    losses = {"learning_rate": 1, "train_loss": 1, "valid_loss": 1}
    times = {"epoch_seconds": seconds, "samples_per_second": speed, "wall_time": START + end}
    return Epoch(epoch=number, step=number, samples=number, **losses, **times)  # type: ignore[arg-type]


def test_energy_per_sample() -> None:
    """Energy per sample counts only training after the first epoch (warm-up), here at 100 W; otherwise 1000 W."""
    training = [(2, 4), (6, 9), (10, 14)]
    watts = [100.0 if any(begin <= second < end for begin, end in training[1:]) else 1000.0 for second in range(20)]
    samples = [Sample(START + second + 1, 1.0, 2, gpus=(gpu(watts=power),)) for second, power in enumerate(watts)]
    epochs = [epoch(number + 1, end, end - begin, 50.0) for number, (begin, end) in enumerate(training)]
    run = result([samples, samples], *epochs)
    assert (run.energy_per_sample, run.energy) == (pytest.approx(2 * 100 / 50), pytest.approx(2 * sum(watts)))
    resumed = result([samples[5:]], *epochs, resumed_from_step=1)
    assert resumed.energy is None and resumed.energy_per_sample == pytest.approx(100 / 50)
    assert result([samples[12:]], *epochs[:2]).energy_per_sample is None, (
        "an epoch of an earlier attempt has no telemetry"
    )
    assert result([], *epochs).energy_per_sample is None


def test_without_gpus_the_nodes_energy_counts() -> None:
    samples = [Sample(START + second, 1.0, 2, joules=10.0 * second) for second in (1, 2, 3)]
    assert telemetry.energy([samples, samples]) == 60 and telemetry.energy([samples], START + 1, START + 2) == 10
    back = [replace(sample, joules=joules) for sample, joules in zip(samples, (100.0, 5.0, 8.0), strict=True)]
    assert telemetry.energy([back]) == 103, "a reset counter must not reduce the energy"
    with_gpu = [replace(sample, gpus=(gpu(watts=5.0),)) for sample in samples]
    assert telemetry.energy([with_gpu]) == 15, "the GPUs' energy must count instead of the node's"


def test_the_energy_of_a_node(tmp_path: Path) -> None:
    """RAPL counters may wrap. Of a zone's parts only memory is added to the zone. Cray's counter includes all parts."""
    zones = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram", "intel-rapl:1": "psys"}
    folder = tmp_path / "class/powercap"
    for zone, name in zones.items():
        (folder / zone).mkdir(parents=True)
        for file, content in {"name": name, "max_energy_range_uj": "100000000", "energy_uj": "90000000"}.items():
            (folder / zone / file).write_text(f"{content}\n")
    meter = Energy(tmp_path)
    for zone in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1"):
        (folder / zone / "energy_uj").write_text("95000000\n")
    assert meter.joules() == pytest.approx(5)
    (folder / "intel-rapl:0/energy_uj").write_text("1000000\n")
    (folder / "intel-rapl:0:1/energy_uj").write_text("92000000\n")
    assert meter.joules() == pytest.approx(5 + 6 + 2)
    (tmp_path / "cray/pm_counters").mkdir(parents=True)
    (tmp_path / "cray/pm_counters/energy").write_text("5000 J 1700000000000000 us\n")
    cray = Energy(tmp_path)
    (tmp_path / "cray/pm_counters/energy").write_text("5300 J 1700000001000000 us\n")
    assert cray.joules() == 300 and Energy(tmp_path / "nothing").joules() is None
    (tmp_path / "cray/pm_counters/energy").write_bytes(b"\xff")
    assert Energy(tmp_path).joules() == 0, "RAPL must be used if Cray's counter is unreadable"


def test_goodput_is_the_fraction_of_training_over_all_tries() -> None:
    epochs = [epoch(1, 10, 10, 1.0), epoch(2, 60, 20, 1.0)]
    epochs[1] = epochs[1].model_copy(update={"valid_seconds": 5.0})
    at = [dt.datetime.fromtimestamp(START + moment, dt.UTC).isoformat() for moment in (-20, 80)]
    resumed = result([], *epochs, resumed_from_step=1, started=at[0], finished=at[1]).goodput
    assert resumed and (resumed.training, resumed.validation, resumed.rest) == pytest.approx((30 / 65, 5 / 65, 30 / 65))
    whole = result([], *epochs, started=at[0], finished=at[1]).goodput
    assert whole and (whole.training, whole.rest) == pytest.approx((0.3, 0.65))
    assert result([]).goodput is None
    assert result([], *epochs, started=at[1], finished=at[0]).goodput is None, (
        "the clock was set back, so that goodput is unknown"
    )


# ---- job efficiency, as defined by Slurm's `seff` -----------------------------------------------------


def published_job() -> RunResult:
    """Return a job with 53 s of CPU time in 56 s on one of 64 cores, and 1.3 GB of 8 GB."""
    rows, time_ = [], 1000.0
    for seconds, share in ((1.0, 0.0), (15.0, 0.8), (40.0, 1.0250)):
        time_ += seconds
        rows.append(Sample(time_, seconds, cores=64, cpu_run=share / 64, rss_bytes=1.31e9 * share))
    return result([rows], cores=1, memory_bytes=8_000_000_000)


def test_the_published_job() -> None:
    job = profiles.job(published_job())
    assert (job.stage, job.seconds, job.cores) == ("train", 56, 1)
    assert job.cpu_seconds == pytest.approx(15 * 0.8 + 40 * 1.025) and job.cpu_seconds == pytest.approx(53)
    assert job.efficiency == pytest.approx(0.9464, abs=1e-4)
    assert job.peak_bytes == pytest.approx(1.025 * 1.31e9) and job.gpu is None


def test_the_page_shows_published_efficiency_next_to_the_run() -> None:
    figures = [
        Published(label="job", metric="CPU efficiency", value=94.64, unit="%", source="workshop", runs=["p.a"]),
        Published(label="job", metric="CPU efficiency", value=1.0, unit="%", source="other", runs=["q.a"]),
    ]
    reference = {"name": "a", "plan": "p", "run": "a", "measure": ["train"]}
    plan = PlanRecord(plan="p", study="mnist_cnn", measure=["train"], runs=[reference], published=figures)
    view = profiles.efficiency(PlanResult(plan, [published_job()]), Page())
    assert view and "CPU efficiency 94.64 %" in view.notes[0]
    headings = [heading for heading, _ in view.tables[0].columns]
    cells = dict(zip(headings, (cell.text for cell in view.tables[0].rows[0]), strict=True))
    assert cells["CPU efficiency"] == "95\u00a0%" and cells["memory efficiency"] == "17\u00a0%"
    assert "GPU utilisation" not in cells and "waiting for data" not in cells


# ---- real processes ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_telemetry_shows_computing_reading_and_foreign_load(tmp_path: Path) -> None:
    """The rows show a child that computes, this process's reading from a disk, and a foreign program."""
    size, path, file = 8 << 20, tmp_path / "telemetry/train.csv", tmp_path / "file"
    file.write_bytes(os.urandom(size))
    disk = on_disk(tmp_path)
    own = time.process_time()
    with sampled(path, os.getpid(), 1, 0):
        until("it looks", lambda: path.stat().st_size)
        busy = python(BURN + "sys.stdin.read()", 0.7)
        drop(file)
        file.read_bytes()
        shell = ["sh", "-c", '"$0" -S -c "$1" 0.5 & exec true', sys.executable, BURN]
        with subprocess.Popen(shell, stdout=subprocess.PIPE, text=True) as child:
            neighbour = answer(child)
        computed = answer(busy)
        end(busy)
    rows = telemetry.read(path)
    computed += time.process_time() - own
    assert sum(row.seconds for row in rows) == pytest.approx(rows[-1].time - telemetry.begin(rows), abs=0.05)

    def total(name: str) -> float:
        return sum(getattr(row, name) * row.seconds for row in rows)

    cores = rows[0].cores
    assert cores == psutil.cpu_count()
    assert cores * total("cpu_run") == pytest.approx(computed, abs=0.12)
    assert cores * total("cpu_others") > neighbour - 0.12
    assert total("cpu") == pytest.approx(total("cpu_run") + total("cpu_others"), abs=0.05)
    assert 0.999 * size < total("read_bytes_per_second") < size + (4 << 20)
    assert total("reads_per_second") >= 1
    assert total("disk_read_bytes_per_second") > 0.999 * size or not disk
    assert all(row.rss_bytes and row.rss_bytes > 20 << 20 for row in rows)
    assert rows[0].gpus == () and all(row.cpu_others is not None for row in rows)


def test_rates_are_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are per second, although the interval is 4 s long; each counter grows by a different number."""
    used = [processes.Used(1.0, 10, 20, 30, 40, 60), processes.Used(3.0, 410, 820, 1230, 1640, 600)]
    # the call's CPU time includes the run's 2 s
    call = [used[0]._replace(cpu_seconds=5.0), used[1]._replace(cpu_seconds=7.5)]
    times = [psutil.cpu_times()._replace(**dict.fromkeys(psutil.cpu_times()._fields, 0.0))] * 2
    times[1] = times[1]._replace(user=2.0, system=1.0, steal=0.5, idle=4.0)
    clock = iter([1000.0, 1004.0])
    monkeypatch.setattr(
        sampler,
        "processes",
        SimpleNamespace(used=lambda root, **_: (used if root == 1 else call).pop(0), find_snakemake=lambda _: 2),
    )
    monkeypatch.setattr(sampler.psutil, "cpu_times", lambda: times.pop(0))
    monkeypatch.setattr(sampler.psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(sampler.time, "monotonic", lambda: next(clock))
    found = sampler.Node(1, 1, 0).sample()
    assert (found.seconds, found.cpu, found.cpu_run, found.cpu_others) == (4, 3 / 8, 2 / 8, 1 / 8)
    assert found.cpu_call == pytest.approx(0.5 / 4 / 2)
    assert (found.rss_bytes, found.read_bytes_per_second, found.reads_per_second) == (600, 100, 200)
    assert (found.disk_read_bytes_per_second, found.write_bytes_per_second) == (300, 400)


def test_own_jobs_are_those_below_the_outermost_snakemake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outermost running process that the environment variable names is found, also for nested calls."""
    ask = "import os; from dlscale.measure.processes import find_snakemake; print(find_snakemake(os.getpid()))"
    start = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True)"
    name = f"os.environ[{SNAKEMAKES!r}] += f' {{os.getpid()}}'; print(os.getpid(), flush=True); "
    named = start.replace("subprocess.run", name + "subprocess.run")

    def answer(*programs: str) -> list[str]:
        return subprocess.check_output([sys.executable, "-c", *programs], text=True).split()

    monkeypatch.setenv(SNAKEMAKES, "1073741824")  # larger than Linux's largest process ID
    outer, inner, found = answer(named, start, named, ask)
    assert found == outer != inner
    assert answer(start, ask) == ["None"]


def test_telemetry_of_earlier_versions_has_no_own_jobs(tmp_path: Path) -> None:
    rows = [telemetry.Sample(1.7e9, 1.0, 2, cpu=0.5, cpu_others=0.1, cpu_call=0.05)]
    text = telemetry.header(0) + telemetry.line(rows[0])
    (tmp_path / "new.csv").write_text(text)
    table = [line.split(",") for line in text.splitlines()]
    column = table[0].index("cpu_call")
    (tmp_path / "old.csv").write_text("".join(",".join(row[:column] + row[column + 1 :]) + "\n" for row in table))
    assert telemetry.read(tmp_path / "new.csv") == rows
    assert [row.cpu_call for row in telemetry.read(tmp_path / "old.csv")] == [None]


@pytest.mark.slow
def test_telemetry_has_one_row_per_second(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    with sampled(path, os.getpid(), 1, 0):
        until("two rows", lambda: len(telemetry.read(path)) >= 2)
        assert path.read_text().endswith("\n")
    rows = telemetry.read(path)
    assert [row.seconds for row in rows[:2]] == pytest.approx([1.0, 1.0], abs=0.4)
    assert 0 < rows[-1].seconds < 1.5


def samplers(pid: int) -> list[int]:
    return [p.pid for p in psutil.Process(pid).children() if "dlscale.measure.telemetry" in p.cmdline()]


#: Stage with a forked worker, which inherits the stage's open files and ends when the file `.end` exists.
STAGE = """
import os, pathlib, sys, time
from dlscale.core.telemetry import sampled
with sampled(pathlib.Path(sys.argv[1]), os.getpid(), 1, 0):
    worker = os.fork()
    while not pathlib.Path(sys.argv[1] + ".end").exists():
        time.sleep(0.05)
    if worker == 0:
        os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by itself", "SIGKILL"])
def test_telemetry_ends_with_the_stage(tmp_path: Path, way: str) -> None:
    """The sampler ignores signals and ends with the stage. The file has complete lines, and no traceback is printed."""
    path, enough = tmp_path / "train.csv", tmp_path / "train.csv.end"
    command = [sys.executable, "-c", STAGE, str(path)]
    with (tmp_path / "said").open("w") as said:
        child = subprocess.Popen(command, stderr=said, env=variables(), text=True, process_group=0)
    until("the first line", lambda: path.exists() and path.stat().st_size, child)
    (sampler,) = samplers(child.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(sampler, number)
    before = len(telemetry.read(path))
    until("a row more", lambda: len(telemetry.read(path)) > before, child)
    if way == "by itself":
        enough.touch()
        assert child.wait() == 0
        assert not psutil.pid_exists(sampler), "the stage must wait for the end of the sampler"
    else:
        child.kill()
        child.wait()
        until("it is gone", lambda: not psutil.pid_exists(sampler) or psutil.Process(sampler).status() == "zombie")
        enough.touch()
    assert path.read_text().endswith("\n") and telemetry.read(path)
    assert (tmp_path / "said").read_text() == ""


def test_telemetry_imports_no_large_package() -> None:
    code = (
        "import sys, dlscale.measure.telemetry, json; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pandas", "pydantic", "yaml", "pynvml"} & set(json.loads(done.stdout))


# ---- GPUs -------------------------------------------------------------------------------------------


class FakeCuda:
    """Simulated CUDA driver with CUDA_VISIBLE_DEVICES=1,0: its first device is the second device on the bus."""

    addresses = (b"0000:81:00.0", b"0000:41:00.0")

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.addresses)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: Any) -> int:
        text.value = self.addresses[device.value]
        return 0


class NVMLError(Exception):
    pass


class FakeNvml(SimpleNamespace):
    """Simulated `pynvml` with the functions that dlscale uses: two GPUs, found by address.

    The second GPU on the bus is throttled by its power cap and its temperature. The first GPU has no energy counter.
    """

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVMLError = 1, 0, NVMLError
    looks = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> int:
        return {"0000:41:00.0": 0, "0000:81:00.0": 1}[address]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=97 if handle else 0, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=40 << 30, free=30 << 30, used=(10 + handle) << 30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 398_500 if handle else 52_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle == 0:
            raise NVMLError("Not Supported")
        self.looks += 1
        return 10_000_000 + 400_000 * self.looks

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return {1: 1260}[clock]

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 84

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return 0x4 | 0x20 | 0x2 if handle else 0x1


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler.ctypes, "CDLL", lambda name: FakeCuda())
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())


@pytest.mark.usefixtures("_two_gpus")
def test_gpus_are_sampled_in_the_order_of_cuda() -> None:
    assert bus_ids(8) == ["0000:81:00.0", "0000:41:00.0"]
    first, second = Gpus(2).sample()
    assert first == GpuSample(0.97, 11 << 30, 398.5, 400.0, 1260, 84, "power cap+temperature (software)")
    assert second == GpuSample(0.0, 10 << 30, 52.0, None, 1260, 84, "")
    assert [sample.watts for sample in Gpus(1).sample()] == [398.5], "a run on one GPU must use CUDA's first device"
    assert Gpus(0).sample() == ()
    assert {(each.watts, each.joules) for each in Gpus(4).sample()} == {(None, None)}, (
        "a run on four GPUs must not get the figures of two visible GPUs"
    )
    text = io.StringIO(telemetry.header(2) + telemetry.line(Sample(START, 1.0, 2, gpus=(first, second))))
    assert pd.read_csv(text)["gpu1_watts"].tolist() == [52.0]


class Library:
    """Stand-in for NVIDIA's functions for GPM counters, called by the real `pynvml` with its real structures."""

    def __init__(self, supported: bool, unknown: int = -1) -> None:
        self.supported, self.unknown, self.calls = supported, unknown, list[str]()
        self.samples = dict[int, int]()  # address of a sample → number of the read that filled it; 0 before

    def __call__(self, name: str) -> Callable[..., int]:
        self.calls.append(name.removeprefix("nvmlGpm"))
        return {
            "nvmlGpmQueryDeviceSupport": self.query,
            "nvmlGpmSampleAlloc": self.alloc,
            "nvmlGpmSampleGet": self.get,
            "nvmlGpmMetricsGet": self.metrics,
        }[name]

    def query(self, device: object, reference: Any) -> int:
        assert device == "handle" and reference._obj.version == pynvml.NVML_GPM_SUPPORT_VERSION
        reference._obj.isSupportedDevice = self.supported
        return 0

    def alloc(self, reference: Any) -> int:
        reference._obj.contents = pynvml.struct_c_nvmlGpmSample_t.from_buffer(ctypes.create_string_buffer(8))
        self.samples[ctypes.cast(reference._obj, ctypes.c_void_p).value or 0] = 0
        return 0

    def get(self, device: object, sample: Any) -> int:
        assert device == "handle"
        self.samples[ctypes.cast(sample, ctypes.c_void_p).value or 0] = 1 + max(self.samples.values())
        return 0

    def metrics(self, reference: Any) -> int:
        wanted = reference._obj
        assert wanted.version == pynvml.NVML_GPM_METRICS_GET_VERSION and wanted.numMetrics == 3
        pair = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in (wanted.sample1, wanted.sample2))
        begin, end = map(self.samples.__getitem__, pair)
        assert 0 < begin == end - 1, "the counters must come from the last two reads, the older read first"
        for each in wanted.metrics[:3]:
            each.value = {2: 80.0, 5: 25.0, 10: 50.0 + end}[each.metricId]
            each.nvmlReturn = 3 if each.metricId == self.unknown else 0  # NVML_ERROR_NOT_SUPPORTED
        return 0


def test_activity_of_the_units_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples are allocated once, and each call computes the activity since the preceding call."""
    for library, first in (
        (Library(True), {"sm_active": 0.8, "tensor_active": 0.25, "dram_active": 0.52}),
        (Library(True, unknown=5), {"sm_active": 0.8, "dram_active": 0.52}),
        (Library(False), {}),
    ):
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", library)
        activity = Activity(pynvml, "handle")
        assert activity() == first
        assert activity() == {name: value + 0.01 * (name == "dram_active") for name, value in first.items()}
        begin = ["QueryDeviceSupport", *["SampleAlloc", "SampleAlloc", "SampleGet"] * bool(first)]
        assert library.calls == begin + ["SampleGet", "MetricsGet"] * 2 * bool(first)
    old = SimpleNamespace(NVMLError=NVMLError)  # a version of pynvml without these functions
    assert Activity(old, "handle")() == {}


def test_files_without_activity_are_read(tmp_path: Path) -> None:
    """Files of earlier versions lack the columns of GPM counters."""
    gpus = (GpuSample(0.5, sm_active=0.25), GpuSample(0.6))
    text = telemetry.header(2) + telemetry.line(Sample(START, 1.0, 2, gpus=gpus))
    (tmp_path / "new.csv").write_text(text)
    rows = [line.split(",") for line in text.splitlines()]
    kept = [place for place, name in enumerate(rows[0]) if not name.endswith("_active")]
    (tmp_path / "old.csv").write_text("".join(",".join(row[place] for place in kept) + "\n" for row in rows))
    assert [each.sm_active for each in telemetry.read(tmp_path / "new.csv")[0].gpus] == [0.25, None]
    assert [each.utilization for each in telemetry.read(tmp_path / "old.csv")[0].gpus] == [0.5, 0.6]


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByPciBusId"])
def test_a_driver_that_refuses_leaves_no_gpus(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def refuse(*words: object) -> None:
        raise NVMLError("Driver/library version mismatch")

    monkeypatch.setattr(FakeNvml, broken, refuse)
    assert Gpus(2).sample() == ()


@pytest.mark.gpu
def test_a_real_gpu(tmp_path: Path) -> None:
    """The sampled GPU is PyTorch's first device, and its utilisation shows a computation."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path, block = tmp_path / "train.csv", torch.ones(4096, 4096, device="cuda")
    with sampled(path, os.getpid(), 1, 1):
        stop = time.monotonic() + 4
        while time.monotonic() < stop:
            (block @ block).sum().item()
    rows = telemetry.read(path)
    (last,) = rows[-2].gpus
    assert last.utilization and last.utilization > 0.5 and last.memory_bytes and last.memory_bytes > 64 << 20
    used = telemetry.energy([rows])
    by_power = telemetry.energy([[replace(r, gpus=(replace(r.gpus[0], joules=None),)) for r in rows]])
    assert used and by_power and math.isclose(used, by_power, rel_tol=0.3)
