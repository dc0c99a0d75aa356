"""Extension: the command `crate`."""

from dlscale.core.stage import Query, option

COMMANDS = {
    "crate": Query(
        "dlscale.extensions.crate.crate",
        "Pack a plan's results and their provenance as a Workflow Run RO-Crate, to publish and to cite.",
        (
            ("plan", {"metavar": "PLAN", "help": "finished plan"}),
            option(
                "--citation",
                "CITATION.cff with the authors and the licence of the results (required; example: docs/crate.md)",
                False,
                metavar="FILE",
            ),
            option("--zip", "ZIP archive to write (default: folder crates/PLAN in the results)", False, metavar="FILE"),
        ),
        example="dlscale crate starter_demo --citation mine.cff --zip starter.zip",
    ),
}
