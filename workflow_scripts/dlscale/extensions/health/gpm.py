"""Activity of a GPU's units, from the GPM counters of NVIDIA's management library (NVML), on Hopper and newer GPUs."""

from __future__ import annotations

import contextlib
from typing import Any

#: Field of `dlscale.core.telemetry.GpuSample` → counter of `nvmlGpmMetricId_t` (nvml.h), in percent.
COUNTERS = {
    "sm_active": "NVML_GPM_METRIC_SM_UTIL",
    "tensor_active": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram_active": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}


class Activity:
    """Function that returns the activity of a GPU's units since its last call."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._before: Any = None  # sample of the last call; None if the GPU or its driver has no counters
        with contextlib.suppress(nvml.NVMLError, AttributeError):  # an older driver, or an older nvidia-ml-py
            if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                before, self._after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
                self._before = nvml.nvmlGpmSampleGet(handle, before)

    def __call__(self) -> dict[str, float]:
        """Return the known fractions of active time or bandwidth, by the names in `COUNTERS`."""
        if self._before is None:
            return {}
        nvml = self._nvml
        wanted = nvml.c_nvmlGpmMetricsGet_t(version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(COUNTERS))
        for place, counter in enumerate(COUNTERS.values()):
            wanted.metrics[place].metricId = getattr(nvml, counter)
        try:
            after = nvml.nvmlGpmSampleGet(self._handle, self._after)
            wanted.sample1, wanted.sample2 = self._before, after
            nvml.nvmlGpmMetricsGet(wanted)
        except nvml.NVMLError:
            return {}
        self._before, self._after = after, self._before
        found = dict(zip(COUNTERS, wanted.metrics, strict=False))
        return {
            name: each.value / 100
            for name, each in found.items()
            if each.nvmlReturn == nvml.NVML_SUCCESS and 0 <= each.value <= 100
        }
