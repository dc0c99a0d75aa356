"""Profiler of this extension: `nsys`."""

PROFILERS = {"nsys": "dlscale.extensions.nsys.nsys"}
