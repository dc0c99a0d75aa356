"""The profiler `nsys` of this extension."""

USES = ("profile",)
PROFILERS = {"nsys": "dlscale.extensions.nsys.nsys"}
