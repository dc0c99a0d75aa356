"""What this extension adds."""

from dlscale.core.commands import Query
from dlscale.core.stage import option

COMMANDS = {
    "import": Query(
        "dlscale.extensions.logs.imports",
        "Import another program's TensorBoard log; the page draws it beside our runs.",
        (
            ("events", {"metavar": "EVENTS", "help": "event file, or a folder of event files"}),
            option("--as", "name of the reference", metavar="NAME", dest="name"),
            option("--study", "the study whose plans show it", metavar="STUDY", dest="reference_study"),
            option("--plans", "plans that show it; all plans of the study if absent", False, nargs="+", default=[]),
            option("--label", "its label on the page; its name if absent", False, metavar="TEXT"),
            option(
                "--batch-size", "the log's global batch size, to convert steps to samples", False, type=int, metavar="N"
            ),
            option("--epoch-samples", "the log's training samples per epoch", False, type=int, metavar="N"),
            option(
                "--counts",
                "unit of the log's steps; that of the study's published program if absent",
                False,
                choices=("step", "epoch"),
            ),
            option(
                "--tag",
                "a tag of the log and ours, as 'Val Loss=loss/valid'; those of the published program if absent",
                False,
                action="append",
                default=[],
                metavar="THEIRS=OURS",
            ),
        ),
    ),
}
