"""Extension: the stages `tune` and `promote`."""

from dlscale.core.stage import Stage, option, path

STAGES = {
    "tune": Stage(
        "dlscale.extensions.tune.tune",
        "Search for a run's fastest loader, threads and batch size; write them as settings.",
        "run",
        (
            path("--out", "folder to write: tune.json, tuned.yaml"),
            option("--run", "name of the tuned run, on which the plan in tuned.yaml is based", metavar="PLAN.RUN"),
            option(
                "--call",
                "shell command that starts the workflow, for the command in tuned.yaml",
                False,
                default="snakemake --configfile",
                metavar="WORDS",
            ),
            option(
                "--candidates",
                "JSON list of candidates for an external program: changed settings, and the run with these settings",
                False,
                metavar="JSON",
            ),
        ),
        settings=("tune",),
        record="dlscale.extensions.tune.records.Tuning",
        outputs=("tune.json", "tuned.yaml", "telemetry/tune.csv"),
        nodes="geometry",
        work=lambda run, train, valid: 0.0,  # `tune.seconds` sets the time; the work before the search is short
        seconds=lambda run: float(run.tune.seconds),
        minutes=30,
        after="throughput",
    ),
    "promote": Stage(
        "dlscale.extensions.tune.promote",
        "Choose the trials of a sweep for the next rung of successive halving.",
        "plan",
        (
            path("--plan", "the plan's plan.yaml"),
            option("--rung", "number of the next rung, from 1", type=int, metavar="N"),
            path("--out", "JSON file to write"),
        ),
    ),
}

CARDS = {"tuning": "dlscale.extensions.tune.section.card"}
SECTIONS = {"tuning": "dlscale.extensions.tune.section.section"}
