"""A row of the table of stages, and the options of its command."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: Scope of one job of a stage.
Scope = Literal["raw", "piece", "part", "dataset", "run", "plan", "page", "image"]

#: Where a job runs: on the node of the controller, on part of a CPU node, or on the devices of the run's geometry.
Nodes = Literal["here", "cpu", "geometry"]


#: An option of the command line: its flag, and the keywords of `argparse`.
Option = tuple[str, dict[str, Any]]


def option(flag: str, text: str, required: bool = True, **more: Any) -> Option:
    """Return an option; `more` goes to `argparse`."""
    return flag, {"help": text, "required": required, **more}


def path(flag: str, text: str, **more: Any) -> Option:
    """Return an option that takes a path."""
    return option(flag, text, metavar="PATH", **more)


#: A validation sample needs no backward pass, which is two thirds of a training sample's work: of 6 FLOPs a parameter
#: the forward pass takes 2 (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
VALIDATION = 1 / 3


def training_work(run: Any, train: int | None, valid: int | None) -> float | None:
    """Return the samples of all steps + a third of those of all validations; None for data without a sample."""
    if not train or valid is None:
        return None
    steps = run.training.steps or math.inf
    epochs = run.training.epochs or -(-steps // -(-train // run.batch_size))
    epochs = min(epochs, run.training.stop_after or epochs)
    samples = min(epochs * train, steps * run.batch_size)
    return float(samples + VALIDATION * (epochs + 1) * valid)


#: Words that start another program's processes; its command follows them.
START = option("--start", "words that start another program's processes, as JSON", False, metavar="JSON")


@dataclass(frozen=True)
class Stage:
    """One row of the table."""

    module: str  #: Entry module; its `main(args)` does the work.
    text: str  #: Its work, for `--help`.
    scope: Scope
    options: tuple[Option, ...] = ()  #: Beside `--log` and those that every stage of a run has.
    #: Of a run: the keys that the stage sees beside the common ones. What it cannot see cannot make it run again.
    settings: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()  #: Of a run: files in its folder; the first one shows that the stage is done.
    usual: bool = False  #: Of a run: whether plans go through the stage unless they say what they measure.
    nodes: Nodes = "here"
    #: Of a run: samples that it computes, in units of one training sample, from the samples of train and valid.
    work: Callable[[Any, int | None, int | None], float | None] | None = None
    seconds: Callable[[Any], float] | None = None  #: Of a run: what it takes beside that, whatever the rate.
    starts: Callable[[Any], int] | None = None  #: Of a run: how many times a process has to start up; None: once.
    minutes: int = 60  #: Time limit where nothing is known of how long a job takes; a site may say another.
    warned: bool = False  #: Whether the job asks to be warned of its time limit.
    science: str = ""  #: The module that decides the results, where the entry only stands around it.
    #: Of a run: the entry module where another program runs in place of dlscale's training; None: it has no such stage.
    program: str | None = None
    after: str = ""  #: Of a row of an extension: the row that it follows; at the end, if that is empty.

    @property
    def decides(self) -> str:
        """The module from which all that decides the results is reached."""
        return self.science or self.module
