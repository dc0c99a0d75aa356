"""Extension: the command `dlscale import`, and the section of the page with imported logs."""

from dlscale.core.stage import Query, option

COMMANDS = {
    "import": Query(
        "dlscale.extensions.logs.imports",
        "Import a TensorBoard log of an external program; the page then shows the log next to the runs.",
        (
            ("events", {"metavar": "EVENTS", "help": "event file, or folder of event files"}),
            option("--as", "name of the imported log", metavar="NAME", dest="name"),
            option("--study", "study with the plans that show the log", metavar="STUDY", dest="reference_study"),
            option(
                "--plans", "plans that show the log (default: all plans of the study)", False, nargs="+", default=[]
            ),
            option("--label", "label on the page (default: the name)", False, metavar="TEXT"),
            option(
                "--batch-size",
                "global batch size of the log, to convert steps to samples",
                False,
                type=int,
                metavar="N",
            ),
            option("--epoch-samples", "training samples per epoch of the log", False, type=int, metavar="N"),
            option(
                "--counts",
                "unit of the log's step numbers (default: as in the study's tutorial)",
                False,
                choices=("step", "epoch"),
            ),
            option(
                "--tag",
                "tag of the log and its name in dlscale, such as 'Val Loss=loss/valid' (default: the tutorial's tags)",
                False,
                action="append",
                default=[],
                metavar="THEIRS=OURS",
            ),
        ),
        example="dlscale import runs/first --as first --study waves",
    ),
}

SECTIONS = {"references": "dlscale.extensions.logs.reference.section"}
