"""Telemetry of a run: `python -m dlscale.measure.telemetry PID RANKS GPUS`, a small process that runs next to a stage.

PID is the root process of the run; its descendants belong to the run. RANKS is the number of the run's ranks on this
node, and GPUS is the number of CUDA devices to sample. The telemetry process writes the rows of
`dlscale.core.telemetry` once a second. It ends when its standard input closes or receives a byte, or when its parent
ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from dlscale.core import registry, telemetry
from dlscale.core.telemetry import GpuSample, Sample
from dlscale.measure import processes

SECONDS = 1.0  #: Seconds between two samples.
MIN_LAST_SECONDS = 0.1  #: Minimum duration of the last sample, s: Linux counts processor time in units of 0.01 s.
#: Bit of `nvmlClocksEventReasons` (nvml.h) → cause of reduced clocks. Intended causes are not in the table: an idle GPU
#: (0x1), clocks set by a user (0x2, 0x100), synchronised GPUs (0x10).
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


class Node:
    """Resource use on this node since the last sample."""

    def __init__(self, root: int, ranks: int, gpus: int) -> None:
        self._root, self._ranks, self._cores = root, ranks, psutil.cpu_count() or 1
        self._caller = processes.find_snakemake(root)
        self.gpus, self._meter = Gpus(gpus), None if gpus else Energy()
        self._time, self._machine, self._run = time.monotonic(), psutil.cpu_times(), self._used()
        self._call = self._call_seconds()

    def sample(self) -> Sample:
        """Return the resource use since the previous call, or since this object was created."""
        now, machine, run, call = time.monotonic(), psutil.cpu_times(), self._used(), self._call_seconds()
        seconds = max(now - self._time, 1e-6)
        busy = ("user", "nice", "system", "irq", "softirq")  # `user` includes the time of guests (virtual machines)
        cpu = sum(getattr(machine, name) - getattr(self._machine, name) for name in busy) / seconds / self._cores
        # If a daemon adopts a process, the adopted process's past use leaves the tree, so the sums may shrink.
        rates = [max(0.0, after - before) / seconds for after, before in zip(run, self._run, strict=True)]
        cpu_run = rates[0] / self._cores
        jobs = None
        if call is not None and self._call is not None:
            jobs = max(0.0, (call - self._call) / seconds / self._cores - cpu_run)
        seen = self._ranks == 1 or processes.ranks_seen(self._root) >= self._ranks
        self._time, self._machine, self._run, self._call = now, machine, run, call
        return Sample(
            time=time.time(),
            seconds=seconds,
            cores=self._cores,
            cpu=cpu,
            cpu_run=cpu_run,
            cpu_others=max(0.0, cpu - cpu_run) if seen else None,
            cpu_call=jobs if seen else None,
            rss_bytes=run.rss,
            read_bytes_per_second=rates[1],
            reads_per_second=rates[2],
            disk_read_bytes_per_second=rates[3],
            write_bytes_per_second=rates[4],
            joules=self._meter.joules() if self._meter else None,
            gpus=self.gpus.sample(),
        )

    def _used(self) -> processes.Used:
        return processes.used(self._root, without=(os.getpid(),))

    def _call_seconds(self) -> float | None:
        """Return the processor seconds of the workflow call's jobs; None if unknown."""
        try:
            return processes.used(self._caller, without=(os.getpid(),)).cpu_seconds if self._caller else None
        except psutil.Error:
            return None


def main() -> None:
    """Write rows until the stage ends; leave signals to the stage."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        _watch(*map(int, sys.argv[1:]))
    except Exception as error:  # the stage continues without telemetry
        print(f"telemetry ended: {type(error).__name__}: {error}", file=sys.stderr)


def _watch(root: int, ranks: int, gpus: int) -> None:
    parent, start = os.getppid(), time.monotonic()
    node = Node(root, ranks, gpus)
    # One write per line, so that a killed process leaves only complete lines.
    os.write(1, telemetry.header(len(node.gpus.handles)).encode())
    ended = False
    while not ended:
        wait = SECONDS - (time.monotonic() - start) % SECONDS
        if ended := bool(select.select([0], [], [], wait)[0]):
            time.sleep(max(0.0, MIN_LAST_SECONDS - (time.monotonic() - start) % SECONDS))
        if os.getppid() != parent:  # the stage was killed; its children may keep the pipe open
            return
        os.write(1, telemetry.line(node.sample()).encode())


# ---- the node's own counters of energy ----------------------------------------------------------------


class Energy:
    """Counter of energy since the object's creation: of the node on Cray, or else of processors and memory (RAPL).

    RAPL's counters are in microjoules and restart at `max_energy_range_uj` (Linux, Documentation/power/powercap). On
    most systems, only root may read these counters. Cray's file contains `JOULES J MICROSECONDS us`.
    """

    def __init__(self, system: Path = Path("/sys")) -> None:
        zones = sorted(system.glob("class/powercap/intel-rapl:*/name"))
        parts = [zone.parent for zone in zones if _word(zone).startswith(("package", "dram"))]
        counters = [(part / "energy_uj", 1e-6, _number(part / "max_energy_range_uj")) for part in parts]
        if _number(cray := system / "cray/pm_counters/energy") is not None:
            counters = [(cray, 1.0, None)]
        self._counters = [each for each in counters if _number(each[0]) is not None]
        self._before, self._joules = [_number(file) for file, _, _ in self._counters], 0.0

    def joules(self) -> float | None:
        """Return the energy since the counter's creation, J; None without a readable counter."""
        for place, (file, unit, most) in enumerate(self._counters):
            now, before = _number(file), self._before[place]
            if now is not None and before is not None:
                grown = now - before
                self._joules += unit * (grown if grown >= 0 else grown + (most or -grown))
                self._before[place] = now
        return self._joules if self._counters else None


def _word(file: Path) -> str:
    try:
        return (file.read_text().split() or [""])[0]
    except (OSError, ValueError):  # not readable, or not text
        return ""


def _number(file: Path) -> float | None:
    word = _word(file)
    return float(word) if word.isdecimal() else None


# ---- GPUs, as NVIDIA's management library (NVML) sees them --------------------------------------------


def bus_ids(count: int) -> list[str]:
    """Return the PCI addresses of the first `count` devices that a CUDA program sees, in CUDA's order.

    The CUDA driver applies CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. The query creates no context, which would take
    memory on the device. The list is empty without a driver, or if a query fails.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    found: list[str] = []
    total, device, text = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(32)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(total)):
        return []
    for ordinal in range(min(count, total.value)):
        if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetPCIBusId(text, 32, device):
            return []
        found.append(text.value.decode())
    return found


class Gpus:
    """The first `count` CUDA devices, sampled through NVML; empty without a driver."""

    def __init__(self, count: int) -> None:
        self.handles: list[Any] = []
        self._first: list[float | None] = []
        if not (addresses := bus_ids(count) if count else []):
            return
        import pynvml

        self._nvml = pynvml
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self.handles = [pynvml.nvmlDeviceGetHandleByPciBusId(address) for address in addresses]
        # If this process sees only some of the run's GPUs (each rank sees only its own), power and energy of the run
        # are unknown, so both are left out.
        self._sees_all = len(addresses) == count
        self._first = [self._ask("nvmlDeviceGetTotalEnergyConsumption", handle) for handle in self.handles]
        self._activity = [registry.provided("gpu_activity", lambda *_: dict)(pynvml, handle) for handle in self.handles]

    def sample(self) -> tuple[GpuSample, ...]:
        return tuple(map(self._sample, self.handles, self._first, self._activity)) if self.handles else ()

    def _sample(self, handle: Any, first: float | None, activity: Any) -> GpuSample:
        rates, memory = (self._ask(f"nvmlDeviceGet{name}", handle) for name in ("UtilizationRates", "MemoryInfo"))
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return GpuSample(
            utilization=None if rates is None else rates.gpu / 100,
            memory_bytes=None if memory is None else memory.used,
            watts=milliwatts / 1000 if self._sees_all and milliwatts is not None else None,
            joules=(millijoules - first) / 1000 if self._sees_all and None not in (millijoules, first) else None,
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", handle, self._nvml.NVML_CLOCK_SM),
            celsius=self._ask("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU),
            throttled=None if reasons is None else "+".join(name for bit, name in REASONS.items() if reasons & bit),
            **activity(),
        )

    def _ask(self, question: str, *words: Any) -> Any:
        """Query NVML; return None if the GPU or its driver does not support the query."""
        try:
            return getattr(self._nvml, question)(*words)
        except self._nvml.NVMLError:
            return None


if __name__ == "__main__":
    main()
