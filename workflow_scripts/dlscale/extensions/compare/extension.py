"""Extension: the commands `compare` and `history`."""

from dlscale.core.stage import Query, option, path

COMMANDS = {
    "compare": Query(
        "dlscale.extensions.compare.compare",
        "Compare two results folders, plans or runs: speed with its noise, loss, settings. Or compare two profiles.",
        (
            (
                "results",
                {
                    "nargs": 2,
                    "metavar": "RESULTS",
                    "help": "results before and after: plans, runs (PLAN.RUN) or folders (./NAME)",
                },
            ),
            option("--profiles", "compare the profiles of two runs, or reports of nsys", False, action="store_true"),
            option("--force", "compare even if the studies differ", False, action="store_true"),
            option("--gate", "exit with 1 if a run is slower by more than the noise", False, action="store_true"),
        ),
        example="dlscale compare starter_demo.single starter_weak_demo.b8_ddp_2",
    ),
    "history": Query(
        "dlscale.extensions.compare.history",
        "Show all measurements of each run in any number of results folders, in chronological order.",
        (
            (
                "results",
                {"nargs": "*", "metavar": "RESULTS", "help": "plans, runs or folders (default: the results folder)"},
            ),
            option("--since", "day of the oldest measurements to show", False, metavar="YYYY-MM-DD"),
            path("--out", "PNG chart to write", required=False),
        ),
        example="dlscale history starter_demo --since 2026-11-01",
    ),
}
