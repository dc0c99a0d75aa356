"""External program of a run: its command, folders and environment, and the record of its speed."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlscale.config.site import Limits
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.files import make_folder, remove
from dlscale.core.machine import WATCHDOG, given
from dlscale.core.progress import StageStatus, write_status
from dlscale.core.redact import put_back
from dlscale.core.urls import VARIABLE
from dlscale.extensions.hangs.record import FINDING
from dlscale.extensions.hangs.supervisor import HangSupervisor
from dlscale.extensions.programs import logs
from dlscale.extensions.programs import steps as seen
from dlscale.extensions.programs.launch import FOLDER
from dlscale.extensions.programs.revision import fresh
from dlscale.extensions.programs.running import (
    Outcome,
    Reading,
    measured,
    run_command,
    say,
    warn_of_lost_hook,
    with_hook,
)
from dlscale.extensions.programs.settings import Words
from dlscale.launch.contain import GRACE
from dlscale.measure.records import Throughput


class RunProgram:
    """External program of a run, with a folder for the program's files and a folder for its steps."""

    def __init__(self, run: Any, start: str | None, out: Path, steps: Path, resumed: bool = False) -> None:
        self.run, self.out, self.steps = run, out, steps
        for folder in (out, steps):
            make_folder(folder)
        # Records contain the command as written in the configuration, without secrets.
        self.words = Words(run.program, str(out.absolute()), resumed).command
        secrets = json.loads(os.environ.get(VARIABLE, "{}"))
        whole = type(run.program).model_validate(put_back(run.program.model_dump(), secrets))
        words = Words(whole, str(out.absolute()), resumed)
        self.folder, self.environment = words.folder, words.environment
        if not Path(self.folder).is_dir():
            raise UserError(f"program.folder: {self.folder}: no such folder")
        if revision := run.program.revision:
            checkout = steps.absolute().with_name("checkout")
            self.folder = fresh(words.folder, revision, bool(run.program.repository), checkout)
            _check_pinned(words, checkout)
        #: Command: arguments of the launcher, if any; `env` with the program's variables, which the launcher must not
        #: get; the program's arguments. Arguments of `env` are visible to other users, so secret variables are in
        #: `environment` instead, and the launcher passes them on.
        self.command = words.command
        self.contained = False
        if start and (before := json.loads(start)):
            here = str(Path(self.folder).absolute())
            environment = dict(words.environment)
            if "PYTHONPATH" in environment:
                environment["PYTHONPATH"] = with_hook(environment["PYTHONPATH"])
            secret = run.program.secret_variables()
            own = [f"{name}={value}" for name, value in environment.items() if name not in secret]
            inside = ["env", *own] if own else []
            own_words = [*inside, *words.command]
            if "podman-hpc" in before:  # podman-hpc takes options such as --gpu and `--` even after the image's name
                own_words = ["sh", "-c", f"exec {shlex.join(own_words)}"]
            self.command = [*(word.replace(FOLDER, here) for word in before), *own_words]
            self.environment = {name: environment[name] for name in secret}
            self.contained = True
        self.log = Path(self.folder, words.log) if words.log else None
        self.log_start = logs.start_of(self.log) if self.log else logs.Start(time.time())
        self.pattern: re.Pattern[str] | None = seen.pattern(run.program.rate) if run.program.rate else None
        #: Patterns of the losses that the program prints, by dlscale's names.
        self.losses = {} if self.log else {ours: re.compile(text) for text, ours in run.program.losses.items()}
        #: Samples per step; None if the command does not contain the run's batch size, and the study describes no model
        #: (study `program`).
        knows = {"batch_size", "local_batch_size"} & set(run.program.values) or not registry.study(run.study).programs
        self.batch_size: int | None = run.batch_size if knows else None
        self._check()

    def _check(self) -> None:
        """Raise `UserError` if the command does not begin with an executable program."""
        first, path = self.command[0], {**given(), **self.environment}.get("PATH", os.defpath)
        if not shutil.which(first if "/" not in first else str(Path(self.folder, first)), path=path):
            raise UserError(f"program.command: {first}: no such program here")

    def go(self, enough: Callable[[int], bool] | None = None) -> Outcome:
        """Run the program until it ends, or until `enough` (given the number of printed rates) returns True."""
        write_status(StageStatus(what="the program runs"))
        hang = None if enough else self._hang_supervisor()
        warn_of_lost_hook(self.words, self._reading())
        environment = {**self.environment, **(hang.environment if hang else {})}
        ended = run_command(
            *(self.command, self.steps, self.pattern, self.folder, environment, enough),
            losses=None if enough else self.losses,
            contained=self.contained,
            warn=not self.log,
            grace=GRACE,
            beside=hang.watch if hang else None,
        )
        if hang and hang.finding:
            raise UserError(f"ended the program: {hang.finding}. Stacks of all processes: {hang.folder}")
        return ended

    def _hang_supervisor(self) -> HangSupervisor | None:
        """Return a supervisor with the limits of `site.watchdog`.

        Return None if the limits are default limits or switched off, or if the program has its own image.
        """
        remove(self.steps.with_name(FINDING.parts[0]))
        if not os.environ.get(WATCHDOG) or self.run.program.image or not (limits := Limits.from_environment()):
            return None
        seconds = max(limits.stuck, limits.between)  # a pause between epochs looks like a hang in a step
        return HangSupervisor(self.steps, self.steps.parent, seconds, say, not (self.pattern or self.log))

    def _reading(self) -> Reading:
        return Reading(self.batch_size, True, self.run.program.rate, self.log, self.log_start)

    def record(self, ended: Outcome, telemetry: str | None) -> Throughput:
        """Return the record of the program's speed; raise `UserError` if no speed was measured."""
        reading, devices = self._reading(), self.run.geometry.world_size
        found, _ = measured(self.words, self.steps, Path(telemetry or "nowhere.csv"), ended, reading)
        if found.outside and found.outside.trainings > 1:
            logging.warning(
                "%d trainings ran one after the other; the rate is the longest training's", found.outside.trainings
            )
        # Either some processes use several devices, or the steps of some processes were not detected.
        if found.full and 0 < len(found.full.rank_throughput) < devices:
            logging.warning(
                "the run has %d devices, but only %d processes made steps",
                devices,
                len(found.full.rank_throughput),
            )
        return found.model_copy(update={"nranks": devices})


def _check_pinned(words: Words, checkout: Path) -> None:
    """Refuse absolute paths to the repository in the command and PYTHONPATH, whose files may be of another commit."""
    top = Path(words.folder).resolve()
    top = next(each for each in (top, *top.parents) if Path(each, ".git").exists())
    named = [*words.command, *words.environment.get("PYTHONPATH", "").split(os.pathsep)]
    for word in named:
        path = Path(word).resolve() if word.startswith("/") else None
        if path and path.is_relative_to(top) and Path(checkout, path.relative_to(top)).exists():
            raise UserError(
                f"program.command: {word} is not in the checkout of program.revision. Write the path relative to "
                "program.folder"
            )
