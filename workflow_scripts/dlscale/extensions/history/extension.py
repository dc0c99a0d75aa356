"""What this extension adds."""

from dlscale.core.commands import Query
from dlscale.core.stage import option, path

COMMANDS = {
    "history": Query(
        "dlscale.extensions.history.history",
        "Show the speed of each run at each of its measurements, over any number of results folders.",
        (
            ("results", {"nargs": "*", "metavar": "RESULTS", "help": "plans or folders; absent: the results here"}),
            option("--since", "leave out measurements before this day", False, metavar="YYYY-MM-DD"),
            path("--out", "PNG file to write", required=False),
        ),
    ),
}
