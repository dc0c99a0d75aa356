"""Extension: the command `explain`."""

from dlscale.core.stage import RUNS, Query

COMMANDS = {
    "explain": Query(
        "dlscale.extensions.explain.explain",
        "Show what limits runs, how far they are from their device's limit, and what to try next.",
        (RUNS,),
        example="dlscale explain starter_demo.single",
    ),
}
