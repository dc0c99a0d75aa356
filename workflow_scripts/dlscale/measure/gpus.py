"""The GPUs of a run as NVIDIA's management library (NVML) sees them, without touching what they compute."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from dlscale.core.telemetry import GpuSample

#: What holds clocks back, by bit of `nvmlClocksEventReasons` (nvml.h). Not here are what does so by wish: an idle GPU
#: (0x1), clocks that were set (0x2, 0x100), GPUs that were told to go in step (0x10).
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


def bus_ids(count: int) -> list[str]:
    """Return the PCI addresses of the first `count` devices that a CUDA program would see here, in its order.

    CUDA itself is asked: what CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER make of it, NVML, whose order is that of the
    bus, does not know. No context is made, so that no memory of a device is taken.
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
    """The first `count` CUDA devices; none where there is no driver."""

    def __init__(self, count: int) -> None:
        self._handles: list[Any] = []
        if not (addresses := bus_ids(count) if count else []):
            return
        import pynvml

        self._nvml = pynvml
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByPciBusId(address) for address in addresses]
        self._first = [self._ask("nvmlDeviceGetTotalEnergyConsumption", handle) for handle in self._handles]

    def __len__(self) -> int:
        return len(self._handles)

    def sample(self) -> tuple[GpuSample, ...]:
        """Return what each of them does now."""
        return tuple(self._sample(*known) for known in zip(self._handles, self._first, strict=True)) if self else ()

    def _sample(self, handle: Any, first: float | None) -> GpuSample:
        rates, memory = (self._ask(f"nvmlDeviceGet{name}", handle) for name in ("UtilizationRates", "MemoryInfo"))
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", handle)
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # drivers before 535
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return GpuSample(
            utilization=None if rates is None else rates.gpu / 100,
            memory_bytes=None if memory is None else memory.used,
            watts=None if milliwatts is None else milliwatts / 1000,
            joules=None if millijoules is None or first is None else (millijoules - first) / 1000,
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", handle, self._nvml.NVML_CLOCK_SM),
            celsius=self._ask("nvmlDeviceGetTemperature", handle, self._nvml.NVML_TEMPERATURE_GPU),
            throttled=None if reasons is None else "+".join(name for bit, name in REASONS.items() if reasons & bit),
        )

    def _ask(self, question: str, *words: Any) -> Any:
        """Return an answer, None where this GPU or its driver has none."""
        try:
            return getattr(self._nvml, question)(*words)
        except self._nvml.NVMLError:
            return None
