"""Command of this extension: `dlscale import`."""

from dlscale.core.stage import Query, option

COMMANDS = {
    "import": Query(
        "dlscale.extensions.logs.imports",
        "Import a TensorBoard log of an external program, which the page then draws with the runs.",
        (
            ("events", {"metavar": "EVENTS", "help": "event file, or folder of event files"}),
            option("--as", "name of the reference", metavar="NAME", dest="name"),
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
                "unit of the log's steps (default: unit in the logs of the study's tutorial)",
                False,
                choices=("step", "epoch"),
            ),
            option(
                "--tag",
                "tag of the log = dlscale's name, as 'Val Loss=loss/valid' (default: tags of the study's tutorial)",
                False,
                action="append",
                default=[],
                metavar="THEIRS=OURS",
            ),
        ),
        example="dlscale import runs/first --as first --study era5_vit",
    ),
}

SECTIONS = {"references": "dlscale.extensions.logs.reference.section"}
