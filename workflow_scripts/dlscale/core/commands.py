"""Table rows of the commands for users.

The module of a command is imported only when it runs.
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
    configured: bool = True  #: Whether the command reads the configuration and has the options for the configuration.


#: Argument: plans.
PLANS: Option = (
    "plans",
    {"nargs": "*", "metavar": "PLAN", "help": "plans (default: the targets of the configuration)"},
)
#: Argument: runs.
RUNS: Option = ("runs", {"nargs": "+", "metavar": "RUN", "help": "PLAN.RUN, or the folder of a run"})
