"""Extension: the command `report --sheet`."""

from dlscale.core.stage import Query, option

USES = ("predict",)

COMMANDS = {
    "report --sheet": Query(
        "dlscale.extensions.sheet.sheet",
        "Write the evidence for a request for computing time on two pages (HTML, PDF).",
        (
            (
                "plans",
                {"nargs": "+", "metavar": "PLAN", "help": "plan of the request; further plans add their measurements"},
            ),
            option(
                "--devices",
                "numbers of devices to predict (default: 2, 4 and 8 times the largest measured number)",
                False,
                type=int,
                nargs="+",
                default=[],
                metavar="N",
            ),
            option(
                "--production",
                "devices of a production training (default: largest measured number)",
                False,
                type=int,
                metavar="N",
            ),
            option("--trainings", "number of production trainings", False, type=int, default=1, metavar="N"),
            option("--machine", "machine of the predictions, as for `dlscale predict`", False, metavar="NAME"),
        ),
        example="dlscale report --sheet starter_strong --devices 64 128",
    ),
}
