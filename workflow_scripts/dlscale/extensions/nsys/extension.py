"""Extension: the profiler `nsys` (NVIDIA Nsight Systems)."""

USES = ("profile",)
PROFILERS = {"nsys": "dlscale.extensions.nsys.nsys"}
