"""What this extension adds: programs of others, measured as they are, alone or in plans."""

from dlscale.core.commands import Query
from dlscale.core.stage import START, Stage, option, path, training_work

COMMANDS = {
    "measure": Query(
        "dlscale.extensions.programs.measure",
        "Run any training program as it is: how fast it trains, and what bounds it.",
        (
            ("command", {"nargs": "+", "metavar": "COMMAND", "help": "after --: the program and its words"}),
            option("--name", "of what is measured; that of its script if absent", False, metavar="NAME"),
            option(
                "--batch-size",
                "samples per step over all processes, in place of what the batches show",
                False,
                type=int,
                metavar="N",
            ),
            option(
                "--steps",
                "where it logs its steps: TensorBoard's file or folder, or a file of JSON lines",
                False,
                metavar="FILE",
            ),
            option(
                "--rate",
                "what it prints has its samples/s: a regular expression with one group",
                False,
                metavar="PATTERN",
            ),
            option("--profile", "also where its time goes: py-spy, PyTorch's profiler", False, action="store_true"),
        ),
        configured=False,
    ),
}

STAGES = {
    "checkout": Stage(
        "dlscale.extensions.programs.checkout",
        "Fetch a revision of another program's repository.",
        "raw",
        (
            option("--repository", "address or folder of the repository", metavar="URL"),
            option("--revision", "the commit", metavar="SHA1"),
            path("--out", "folder to write"),
        ),
        after="configure",
    ),
    "program": Stage(
        "dlscale.extensions.programs.program",
        "Run another program, in place of `train`, to its end.",
        "run",
        (
            path("--keep", "folder of the program's own, which a later try finds again"),
            option("--sources", "digest of its files; with another one it starts afresh", False, metavar="SHA256"),
            path("--out", "the run's folder"),
            START,
        ),
        outputs=("program.json", "telemetry/program.csv"),
        nodes="geometry",
        work=training_work,
        minutes=720,
        warned=True,
        program="dlscale.extensions.programs.program",
        after="train",
    ),
}

#: Modules of stages of a run, if a program runs in place of dlscale's training.
PROGRAM_STAGES = {
    "throughput": "dlscale.extensions.programs.throughput",
    "tune": "dlscale.extensions.programs.tune",
}
