"""Extension: leaks, peaks of memory outside of training, and recompilations of a process that trains."""

HOOKS = {"dlscale.extensions.health.noted": "DLSCALE_STEPS"}

PROVIDES = {
    "watch_training": "dlscale.extensions.health.training.watch_training",
    "place_of_exhaustion": "dlscale.extensions.health.training.place_of_exhaustion",
    "write_health": "dlscale.extensions.health.programs.write_health",
    "gpu_activity": "dlscale.extensions.health.gpm.Activity",
}

#: Functions that judge a run's memory and compilations, for the verdict.
CAUSES = {
    name: f"dlscale.extensions.health.causes.{name}" for name in ("leak", "peak_outside", "recompilation", "breaks")
}
