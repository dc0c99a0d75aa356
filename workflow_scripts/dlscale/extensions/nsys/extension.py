"""What this extension adds: the profiler `nsys`."""

PROFILERS = {"nsys": "dlscale.extensions.nsys.nsys"}
