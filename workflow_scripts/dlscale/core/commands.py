"""Class `Query` for commands for users, and arguments that several commands share.

The module of a command is imported only when the command runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlscale.core.stage import Option


@dataclass(frozen=True)
class Query:
    """A command for users that no rule calls; its `main(args, configuration)` returns the exit status."""

    module: str
    text: str
    options: tuple[Option, ...] = ()
    configured: bool = True  #: Whether the command reads the configuration, and has options such as `--configfile`.


#: Positional arguments: any number of plans.
PLANS: Option = (
    "plans",
    {"nargs": "*", "metavar": "PLAN", "help": "plans (default: the targets of the configuration)"},
)
#: Positional arguments: at least one run.
RUNS: Option = ("runs", {"nargs": "+", "metavar": "RUN", "help": "PLAN.RUN, or the folder of a run"})
