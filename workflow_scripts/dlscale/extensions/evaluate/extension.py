"""Extension: the command `evaluate`."""

from dlscale.core.stage import RUNS, Query, option, path

COMMANDS = {
    "evaluate": Query(
        "dlscale.extensions.evaluate.evaluate",
        "Score the weights of trained runs on their validation or test data, without training.",
        (
            RUNS,
            option("--weights", "weights to score: last, best, or a file", False, default="last", metavar="WHICH"),
            option("--split", "split of the run's dataset", False, default="valid", choices=("valid", "test")),
            option("--device", "device that computes", False, choices=("auto", "cpu", "cuda"), default="auto"),
            option("--threads", "CPU threads (default: as in training)", False, type=int, metavar="N"),
            path(
                "--manifest",
                "manifest.json of the dataset (default: the manifest in the results folder)",
                required=False,
            ),
            path("--out", "JSON file to write", required=False),
        ),
        example="dlscale evaluate starter_demo.single --weights best",
    ),
}
