"""What this extension adds."""

from dlscale.core.commands import Query
from dlscale.core.stage import option

COMMANDS = {
    "crate": Query(
        "dlscale.extensions.crate.crate",
        "Pack a plan's results and their provenance as a Workflow Run RO-Crate, to publish and to cite.",
        (
            ("plan", {"metavar": "PLAN", "help": "a finished plan"}),
            option(
                "--citation", "CITATION.cff of the results: their authors and licence; needed", False, metavar="FILE"
            ),
            option("--zip", "ZIP archive to write; a folder beside the results if absent", False, metavar="FILE"),
        ),
    ),
}
