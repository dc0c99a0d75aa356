"""Extension: `dlscale measure`, and stages, checks and causes for external programs in plans."""

from dlscale.core.stage import START, Query, Stage, option, path, training_work

USES = ("hangs", "logs", "profile", "tune")

STUDIES = {"program": "dlscale.extensions.programs.study"}
KINDS = {"files": "dlscale.extensions.programs.files"}

COMMANDS = {
    "measure": Query(
        "dlscale.extensions.programs.measure",
        "Run any training program unchanged, and report its speed and its bottleneck.",
        (
            ("command", {"nargs": "+", "metavar": "COMMAND", "help": "program and its arguments, after --"}),
            option("--name", "name of the result (default: name of the script)", False, metavar="NAME"),
            option(
                "--batch-size",
                "samples per step over all processes (default: detected from the batches)",
                False,
                type=int,
                metavar="N",
            ),
            option(
                "--steps",
                "log of the program's steps: TensorBoard file or folder, or file of JSON lines",
                False,
                metavar="FILE",
            ),
            option(
                "--rate",
                "pattern of the printed speed: a regular expression with one group, or nersc (NERSC's tutorial)",
                False,
                metavar="PATTERN",
            ),
            option(
                "--replay",
                "before the run, measure the gain of a faster loader: replay the first N batches in a scratch copy",
                False,
                type=int,
                metavar="N",
            ),
            option(
                "--hang-after",
                "end the program after this time without a step or batch (before the first step: ten times this time), "
                "and report where its processes hang",
                False,
                type=float,
                metavar="SECONDS",
            ),
            option("--profile", "also profile with PyTorch's profiler and py-spy", False, action="store_true"),
            option("--live", "print speed and bottleneck every ten seconds", False, action="store_true"),
            option("--loader", "also time PyTorch's loaders, and reads of HDF5 and Zarr", False, action="store_true"),
        ),
        configured=False,
        example="dlscale measure --name small -- python train.py --epochs 1",
    ),
}

STAGES = {
    "checkout": Stage(
        "dlscale.extensions.programs.checkout",
        "Fetch a revision of an external program's repository.",
        "raw",
        (
            option("--repository", "address or folder of the repository", metavar="URL"),
            option("--revision", "commit to fetch", metavar="SHA1"),
            path("--out", "folder to write"),
        ),
        after="configure",
    ),
    "program": Stage(
        "dlscale.extensions.programs.program",
        "Run an external program to its end, in place of `train`.",
        "run",
        (
            path("--keep", "folder for the program's files, from which a later try may resume"),
            option(
                "--sources",
                "digest of the program's files and settings; if it has changed, the program starts afresh",
                False,
                metavar="SHA256",
            ),
            path("--out", "folder of the run"),
            START,
        ),
        outputs=("program.json", "telemetry/program.csv"),
        nodes="geometry",
        work=training_work,
        minutes=720,
        program="dlscale.extensions.programs.program",
        after="train",
    ),
}

#: Stage → module that implements the stage if an external program replaces dlscale's training.
PROGRAM_STAGES = {
    "throughput": "dlscale.extensions.programs.throughput",
    "tune": "dlscale.extensions.programs.tune",
}

#: Checks of `dlscale doctor`.
PROBES = {"scripts": "dlscale.extensions.programs.jobs.probe_scripts"}

PROVIDES = {
    "Program": "dlscale.extensions.programs.settings.Program",
    "Programs": "dlscale.extensions.programs.jobs.ProgramJobs",
    "ProgramSubject": "dlscale.extensions.programs.turns.ProgramSubject",
}

#: Functions that find what slows an external program, for the verdict on its run.
CAUSES = {
    name: f"dlscale.extensions.programs.causes.{name}"
    for name in (
        "slow_process",
        "waiting",
        "small_steps",
        "idle",
        "besides",
        "between_epochs",
        "slowing",
        "threads",
        "stalled",
        "unwatched",
    )
}
