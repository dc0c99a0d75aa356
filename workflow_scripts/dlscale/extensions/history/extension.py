"""Command of this extension: `dlscale history`."""

from dlscale.core.commands import Query
from dlscale.core.stage import option, path

COMMANDS = {
    "history": Query(
        "dlscale.extensions.history.history",
        "Show the speed of each run at each of its measurements, over any number of results folders.",
        (
            (
                "results",
                {"nargs": "*", "metavar": "RESULTS", "help": "plans or folders (default: the results folder here)"},
            ),
            option("--since", "first day of the measurements to show", False, metavar="YYYY-MM-DD"),
            path("--out", "PNG file to write", required=False),
        ),
    ),
}
