"""Extension: the command `batch`, and `training.check_replicas`, a check for equal weights on all ranks."""

from dlscale.core.stage import Query, option, path

COMMANDS = {
    "batch": Query(
        "dlscale.extensions.batch.batch",
        "Show the batch of a training step: samples with their files, and value ranges and NaNs of the tensors.",
        (
            ("run", {"metavar": "RUN", "help": "PLAN.RUN, or the folder of a run"}),
            option("--step", "number of the step, from 1", type=int, metavar="N"),
            path(
                "--manifest",
                "manifest.json of the dataset (default: the manifest in the results folder)",
                required=False,
            ),
            path("--out", ".npz file to write, with the batch's tensors", required=False),
        ),
        example="dlscale batch starter_demo.single --step 4",
    ),
}

PROVIDES = {"check_replicas": "dlscale.extensions.batch.replicas.check_replicas"}
