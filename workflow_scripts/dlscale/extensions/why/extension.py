"""Extension: the command `why`; each dry run ends with the same reasons."""

from dlscale.core.stage import Query

COMMANDS = {
    "why": Query(
        "dlscale.extensions.why.why",
        "Show why jobs would run: changed settings, sources, images or files.",
        (
            (
                "targets",
                {
                    "nargs": "*",
                    "metavar": "TARGET",
                    "help": "PLAN, data_NAME or a file (default: the targets of the configuration)",
                },
            ),
        ),
        example="dlscale why starter_demo",
    ),
}

PROVIDES = {
    "explain_jobs": "dlscale.extensions.why.why.format_reasons",
    "replaced_results": "dlscale.extensions.why.why.replaced",
}
