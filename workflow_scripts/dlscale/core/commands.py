"""Commands of users, as tables; their modules are imported only when they run."""

from __future__ import annotations

from dataclasses import dataclass

from dlscale.core.stage import Option


@dataclass(frozen=True)
class Query:
    """A command of users that no rule calls: `main(args, configuration)` prints, and returns the exit status."""

    module: str
    text: str
    options: tuple[Option, ...] = ()
    configured: bool = True  #: Whether it reads the configuration, and so takes its files.


#: Plans that a command is about.
PLANS: Option = (
    "plans",
    {"nargs": "*", "metavar": "PLAN", "help": "plans; the targets of the configuration if absent"},
)
#: Runs that a command is about.
RUNS: Option = ("runs", {"nargs": "+", "metavar": "RUN", "help": "PLAN.RUN, or a run's folder"})
