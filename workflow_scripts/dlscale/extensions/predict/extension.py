"""What this extension adds."""

from dlscale.core.commands import Query
from dlscale.core.stage import option

COMMANDS = {
    "predict": Query(
        "dlscale.extensions.predict.predict",
        "Predict speed, memory, time and cost of measured runs on other devices, and recommend some.",
        (
            ("runs", {"nargs": "*", "metavar": "RUN", "help": "a measured run: PLAN.RUN, or its folder"}),
            option(
                "--devices",
                "numbers of devices",
                False,
                type=int,
                nargs="+",
                default=[1, 2, 4, 8, 16, 32, 64],
                metavar="N",
            ),
            option(
                "--tp", "devices that share a model's weights", False, type=int, nargs="+", default=[1], metavar="N"
            ),
            option(
                "--cp", "devices that share a sample's tokens", False, type=int, nargs="+", default=[1], metavar="N"
            ),
            option(
                "--batch-size",
                "samples per step of all devices; if absent, each device keeps its measured number",
                False,
                type=int,
            ),
            option(
                "--machine", "a machine's name, or a YAML file of its levels; that of the measurement if absent", False
            ),
            option("--per-node", "devices used per node; all if absent", False, type=int, metavar="N"),
            option(
                "--storage", "samples/s that the storage delivers to all devices", False, type=float, metavar="RATE"
            ),
            option(
                "--memory",
                "GB of a device; configurations that need more are left out",
                False,
                type=float,
                metavar="GB",
            ),
            option("--price", "price of a node-hour", False, type=float, metavar="PRICE"),
            option("--epochs", "epochs of the training; the run's if absent", False, type=int, metavar="N"),
            option("--target-samples", "samples to the solution, in place of epochs", False, type=int, metavar="N"),
            option("--validate", "compare predictions with published figures", False, action="store_true"),
        ),
    ),
}
