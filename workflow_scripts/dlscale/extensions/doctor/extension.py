"""Extension: the command `doctor`; each dry run ends with the same checks."""

from dlscale.core.stage import PLANS, Query

COMMANDS = {
    "doctor": Query(
        "dlscale.extensions.doctor.doctor",
        "Check the requirements of the workflow before you submit jobs; exit with 1 if a check fails.",
        (PLANS,),
        example="dlscale doctor --profile perlmutter starter_strong",
    ),
}

PROVIDES = {
    "check_site": "dlscale.extensions.doctor.doctor.check",
    "check_machine": "dlscale.extensions.doctor.doctor.probe_here",
}
