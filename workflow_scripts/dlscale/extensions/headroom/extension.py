"""Extension: stage `headroom` and option `--replay`, which measure a program with a loader that costs nothing."""

from dlscale.core.stage import START, Stage, path

USES = ("programs",)

STAGES = {
    "headroom": Stage(
        "dlscale.extensions.headroom.headroom",
        "Measure how much faster an external program would be with a loader that takes no time.",
        "run",
        (path("--out", "JSON file to write"), START),
        record="dlscale.extensions.headroom.records.Headroom",
        outputs=("headroom.json", "telemetry/headroom.csv"),
        nodes="geometry",
        minutes=30,
        program="dlscale.extensions.headroom.headroom",
        after="throughput",
    ),
}

HOOKS = {"dlscale.extensions.headroom.replay": "DLSCALE_REPLAY"}

PROVIDES = {"headroom": "dlscale.extensions.headroom.headroom.of_command"}

CAUSES = {"faster_loader": "dlscale.extensions.headroom.causes.faster_loader"}
