"""Class for the rows of the table of stages, and helpers for command-line options."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

#: Kind of thing that one job of a stage makes or works on.
Scope = Literal["raw", "piece", "part", "dataset", "run", "plan", "page", "image"]

#: Nodes of a job: the node where Snakemake runs, part of a CPU node, or the devices of the run's geometry.
Nodes = Literal["here", "cpu", "geometry"]


#: Option of the command line: its flag, and keyword arguments for `argparse`.
Option = tuple[str, dict[str, Any]]


def option(flag: str, text: str, required: bool = True, **more: Any) -> Option:
    """Return an option; `more` are further keyword arguments for `argparse`."""
    return flag, {"help": text, "required": required, **more}


def path(flag: str, text: str, **more: Any) -> Option:
    """Return an option that takes a path."""
    return option(flag, text, metavar="PATH", **more)


#: Work for a validation sample as a fraction of the work for a training sample. Validation only has a forward pass,
#: which takes 2 of a training step's 6 FLOPs per parameter (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
VALIDATION = 1 / 3


def training_work(run: Any, train: int | None, valid: int | None) -> float | None:
    """Return the training samples plus a third of the samples of all validations.

    Return None if a number of samples is unknown, or without training samples.
    """
    if not train or valid is None:
        return None
    steps = run.training.steps or math.inf
    epochs = run.training.epochs or -(-steps // -(-train // run.batch_size))
    epochs = min(epochs, run.training.stop_after or epochs)
    samples = min(epochs * train, steps * run.batch_size)
    return float(samples + VALIDATION * (epochs + 1) * valid)


#: Option with the arguments that start the processes of an external program; the program's command follows them.
START = option("--start", "arguments that start the processes of an external program, as JSON", False, metavar="JSON")


@dataclass(frozen=True)
class Stage:
    """One row of the table of stages.

    Several fields only apply to stages with scope `run`.
    """

    module: str  #: Entry module; its `main(args)` does the work.
    text: str  #: Description for `--help`.
    scope: Scope
    options: tuple[Option, ...] = ()  #: Options in addition to `--log` and, for stages of a run, `RUN_OPTIONS`.
    #: Keys of a run that the stage reads besides the keys of `RunCore`. No other key makes the stage run again.
    settings: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()  #: Files in the run's folder; if the first file exists, the stage is done.
    record: str = ""  #: Full name of the class of the first output, if only an extension reads this record.
    usual: bool = False  #: Whether the stage is in `measure` of a plan by default.
    nodes: Nodes = "here"
    #: Function of (run, training samples, validation samples) that returns the work, in units of a training sample.
    work: Callable[[Any, int | None, int | None], float | None] | None = None
    #: Function of the run that returns the fixed part of the stage's time, s, which is added to work / throughput.
    seconds: Callable[[Any], float] | None = None
    #: Function of the run that returns the number of processes that a rank starts one after the other; None means 1.
    starts: Callable[[Any], int] | None = None
    #: Function of the run that returns the modules that the stage imports by name.
    imports: Callable[[Any], Iterable[str]] = lambda run: ()
    minutes: int = 60  #: Time limit, minutes, of a job of unknown duration; a site may set another limit.
    warned: bool = False  #: Whether the job gets a signal before its time limit, to save its state.
    science: str = ""  #: Module that decides the results, if it is not the entry module.
    #: Entry module of the stage for an external program; None if the stage does not support external programs.
    program: str | None = None
    after: str = ""  #: Name of the row after which an extension inserts this row; if empty, the row is the last.

    @property
    def decides(self) -> str:
        """Module whose imports include all code that decides the results."""
        return self.science or self.module


@dataclass(frozen=True)
class Query:
    """A command for users that no rule calls; its `main(args, configuration)` returns the exit status."""

    module: str
    text: str
    options: tuple[Option, ...] = ()
    configured: bool = True  #: Whether the command reads the configuration, and has options such as `--configfile`.
    example: str = ""  #: Command line that the help prints.


#: Positional arguments: any number of plans.
PLANS: Option = (
    "plans",
    {"nargs": "*", "metavar": "PLAN", "help": "plans (default: the targets of the configuration)"},
)
#: Positional arguments: at least one run.
RUNS: Option = ("runs", {"nargs": "+", "metavar": "RUN", "help": "PLAN.RUN, or the folder of a run"})
