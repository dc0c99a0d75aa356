"""Clocks, power and temperature of a GPU during a measurement, from a background `nvidia-smi`."""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import threading
import time
from typing import Any

#: Fields that `nvidia-smi` prints, in the order of its columns.
FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu")
#: Names of the field with the reasons for reduced clocks: first in older drivers, then in newer drivers.
REASONS = ("clocks_throttle_reasons.active", "clocks_event_reasons.active")
#: Name of each reason by its bit in NVML (nvmlClocksEventReasons). Bit 0 is left out because it means an idle GPU.
BITS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
MILLISECONDS = 250  #: Time between two lines of figures.


def command(device: str, reasons: str) -> list[str]:
    """Return the `nvidia-smi` command that prints a line of figures every `MILLISECONDS`."""
    query = ",".join([*FIELDS, reasons])
    fields = [f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--loop-ms={MILLISECONDS}"]
    return ["nvidia-smi", f"--id={device}", *fields]


def _number(cell: str) -> float:
    """Return a cell's number, decimal or hexadecimal; NaN for an unknown value (`[N/A]`)."""
    with contextlib.suppress(ValueError):
        return float(int(cell, 16)) if cell.startswith("0x") else float(cell)
    return math.nan


class Sampler:
    """Read lines of figures in a thread until the sampler is closed; without `nvidia-smi`, read no lines.

    `device` is the GPU's UUID or its number in `nvidia-smi`, which ignores CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, device: str) -> None:
        self._samples: list[tuple[float, list[float]]] = []
        self._process: subprocess.Popen[str] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(device,), daemon=True)
        self._thread.start()

    def _read(self, device: str) -> None:
        for reasons in REASONS:  # if nvidia-smi does not know a name, it exits at once; then try the next name
            if self._closed.is_set():
                return
            try:
                self._process = subprocess.Popen(
                    command(device, reasons), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            except OSError:
                return
            if self._closed.is_set():  # `close` was called while the process was starting
                self._process.kill()
            assert self._process.stdout is not None
            for line in self._process.stdout:
                *numbers, mask = (cell.strip() for cell in line.split(","))
                if len(numbers) == len(FIELDS):
                    self._samples.append((time.monotonic(), [*map(_number, numbers), _number(mask)]))
            if self._samples:
                return

    def between(self, start: float, end: float) -> dict[str, Any]:
        """Return the figures between two times of `time.monotonic`.

        Samples in which the GPU is less than 50 % busy are left out, unless this would leave out all samples.
        """
        seen = [values for moment, values in list(self._samples) if start <= moment <= end]
        busy = [values for values in seen if values[4] >= 50] or seen
        found: dict[str, Any] = {}
        for name, column, of in (
            ("SM MHz", 0, statistics.median),
            ("least SM MHz", 0, min),
            ("memory MHz", 1, statistics.median),
            ("W", 2, statistics.median),
            ("most W", 2, max),
            ("°C", 3, max),
        ):
            if known := [values[column] for values in busy if not math.isnan(values[column])]:
                found[name] = of(known)
        masks = [int(values[5]) for values in busy if not math.isnan(values[5])]
        held = [name for bit, name in BITS.items() if any(mask & bit for mask in masks)]
        return found | ({"held back by": ", ".join(held)} if held else {})

    def close(self, patience: float = 5) -> None:
        """End `nvidia-smi` and the thread."""
        self._closed.set()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._thread.join(patience)
