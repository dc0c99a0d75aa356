"""Extension: the command `predict`."""

from dlscale.core.stage import Query, option

USES = ("memory",)

COMMANDS = {
    "predict": Query(
        "dlscale.extensions.predict.predict",
        "Predict speed, memory, time and cost of runs on other devices; name the fastest and the cheapest choice.",
        (
            ("runs", {"nargs": "*", "metavar": "RUN", "help": "measured run: PLAN.RUN, or its folder"}),
            option(
                "--devices",
                "numbers of devices for which to predict",
                False,
                type=int,
                nargs="+",
                default=[1, 2, 4, 8, 16, 32, 64],
                metavar="N",
            ),
            option(
                "--tp",
                "numbers of devices over which each layer is sharded",
                False,
                type=int,
                nargs="+",
                default=[1],
                metavar="N",
            ),
            option(
                "--cp",
                "numbers of devices over which the tokens of a sample are split",
                False,
                type=int,
                nargs="+",
                default=[1],
                metavar="N",
            ),
            option(
                "--batch-size",
                "samples per step over all devices (default: for each copy of the model, as many samples as were "
                "measured, or as in FILE)",
                False,
                type=int,
            ),
            option(
                "--machine",
                "name of a machine, or YAML file that describes its links (default: machine of the measured device); "
                "not with --model",
                False,
            ),
            option("--per-node", "devices used per node (default: all)", False, type=int, metavar="N"),
            option(
                "--storage",
                "samples/s that the storage delivers to all devices; not with --model",
                False,
                type=float,
                metavar="RATE",
            ),
            option(
                "--memory",
                "memory per device, GB; configurations that need more are left out",
                False,
                type=float,
                metavar="GB",
            ),
            option("--price", "price of a node-hour, in any currency", False, type=float, metavar="PRICE"),
            option("--epochs", "epochs of the training (default: the run's)", False, type=int, metavar="N"),
            option(
                "--target-samples", "samples that the training needs, in place of epochs", False, type=int, metavar="N"
            ),
            option("--model", "YAML file of a model that was not measured", False, metavar="FILE"),
            option("--validate", "compare predictions with published figures", False, action="store_true"),
        ),
        example="dlscale predict starter_demo.single --devices 4 8 16",
    ),
}
