"""Row of the table of stages, and options of its command."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: Object for which one job of a stage runs.
Scope = Literal["raw", "piece", "part", "dataset", "run", "plan", "page", "image"]

#: Nodes of a job: the node of the controller, part of a CPU node, or the devices of the run's geometry.
Nodes = Literal["here", "cpu", "geometry"]


#: Option of the command line: its flag, and keyword arguments for `argparse`.
Option = tuple[str, dict[str, Any]]


def option(flag: str, text: str, required: bool = True, **more: Any) -> Option:
    """Return an option; `more` goes to `argparse`."""
    return flag, {"help": text, "required": required, **more}


def path(flag: str, text: str, **more: Any) -> Option:
    """Return an option that takes a path."""
    return option(flag, text, metavar="PATH", **more)


#: Work of a validation sample as a fraction of a training sample's. The forward pass takes 2 of the 6 FLOPs per
#: parameter; the rest is the backward pass (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
VALIDATION = 1 / 3


def training_work(run: Any, train: int | None, valid: int | None) -> float | None:
    """Return the samples of all steps plus a third of the samples of all validations.

    Return None for an empty dataset.
    """
    if not train or valid is None:
        return None
    steps = run.training.steps or math.inf
    epochs = run.training.epochs or -(-steps // -(-train // run.batch_size))
    epochs = min(epochs, run.training.stop_after or epochs)
    samples = min(epochs * train, steps * run.batch_size)
    return float(samples + VALIDATION * (epochs + 1) * valid)


#: Option: words that start the processes of an external program; its command follows them.
START = option("--start", "words that start the processes of an external program, as JSON", False, metavar="JSON")


@dataclass(frozen=True)
class Stage:
    """One row of the table of stages.

    Several fields only apply to stages with scope `run`.
    """

    module: str  #: Entry module; its `main(args)` does the work.
    text: str  #: Description for `--help`.
    scope: Scope
    options: tuple[Option, ...] = ()  #: Options, without `--log` and the common options of a run's stages.
    #: Keys of a run that the stage reads in addition to the common keys. Other keys do not make it run again.
    settings: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()  #: Files in the run's folder; the first one shows that the stage is done.
    usual: bool = False  #: Whether the stage is in `measure` of a plan by default.
    nodes: Nodes = "here"
    #: Function of (run, training samples, validation samples) for the work, in units of one training sample.
    work: Callable[[Any, int | None, int | None], float | None] | None = None
    seconds: Callable[[Any], float] | None = None  #: Function of the run for the time that does not depend on its rate.
    starts: Callable[[Any], int] | None = None  #: Function of the run for the number of process starts; None: 1.
    minutes: int = 60  #: Time limit of a job of unknown duration; a site may set another one.
    warned: bool = False  #: Whether the job gets a signal before its time limit.
    science: str = ""  #: Module that decides the results, if it is not the entry module.
    #: Entry module for an external program instead of dlscale's training; None: the stage does not exist for it.
    program: str | None = None
    after: str = ""  #: Name of the row after which an extension inserts this row; empty: at the end.

    @property
    def decides(self) -> str:
        """Module whose imports include all code that decides the results."""
        return self.science or self.module
