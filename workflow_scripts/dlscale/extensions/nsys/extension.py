"""The profiler `nsys` of this extension."""

PROFILERS = {"nsys": "dlscale.extensions.nsys.nsys"}
