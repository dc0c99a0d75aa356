"""Memory and compilations of a process while it trains: leaks, peaks outside of training, recompilations."""

PROVIDES = {
    "watch_training": "dlscale.extensions.vitals.training.watch_training",
    "place_of_exhaustion": "dlscale.extensions.vitals.training.place_of_exhaustion",
    "read_vitals": "dlscale.extensions.vitals.programs.read_vitals",
}

#: Functions that judge a run's memory and compilations, for the verdict.
CAUSES = {
    name: f"dlscale.extensions.vitals.causes.{name}" for name in ("leak", "peak_outside", "recompilation", "breaks")
}
