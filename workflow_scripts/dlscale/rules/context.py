"""What the rules of one call share: its configuration and site, and the parameters of a job.

A job's parameters are one dict: the SHA-256 of the sources that the stage reaches, and its settings. Snakemake compares
parameters as a set of values, so one dict is compared as a whole. A function of a rule that also takes `input` is not
compared.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dlscale.config.dataset import DatasetSettings
from dlscale.config.resolve import Configuration
from dlscale.config.run import Run
from dlscale.config.site import Site
from dlscale.core.fingerprint import fingerprint
from dlscale.core.machine import gpus
from dlscale.core.paths import Results
from dlscale.core.stages import STAGES
from dlscale.launch import launcher
from dlscale.preflight.probe import Finding

#: Wildcards of a job, by attribute.
Wildcards = Any
Params = dict[str, Any]


@dataclass
class Context:
    """What the rules of one call share."""

    configuration: Configuration
    site: Site  #: With its choices made.
    page: str  #: Of all targets.
    call: Sequence[str]  #: Words that call the workflow again with this call's settings.
    own_settings: Sequence[str]  #: Of these the settings.
    is_live: bool  #: Whether the call writes a live page of the targets.
    image: str  #: The image's identity, if any.
    say: Callable[[Finding], None]  #: Prints what was found, and ends the call if nothing can be made of it.
    refuse: Callable[[object], NoReturn]
    rung_file: Callable[[str, int], str]  #: The file that says which trials come to a rung, once it is there.
    keep_going: Callable[[], bool]  #: Whether a broken dataset fails in its own jobs only.
    looked: set[str] = field(default_factory=set)  #: What was looked at, and is not told of twice.

    def __post_init__(self) -> None:
        workflow = self.configuration.workflow
        self.paths, self.datasets, self.plans = Results(workflow.results), workflow.datasets, self.configuration.plans
        self._packages = launcher.packages(self.site)
        #: GPUs of this machine, where it runs the jobs itself.
        self.gpus = 0 if self.site.scheduler else gpus()

    def dataset(self, wildcards: Wildcards) -> DatasetSettings:
        return self.datasets[wildcards.dataset]

    def run(self, wildcards: Wildcards) -> Run:
        return self.plans[wildcards.plan][wildcards.run].run

    def params(self, modules: Sequence[str], settings: Any, files: Iterable[Path] = ()) -> Params:
        """Return what makes a job run again; without modules (a fetched file) no code of dlscale decides the result."""
        around = {"image": self.image, "packages": self._packages}
        kept = {key: value for key, value in around.items() if modules and value}
        return {"sources": fingerprint(modules, files), "settings": settings, **kept}

    def own_params(self, stage: str, settings: Any = None, files: Iterable[Path] = ()) -> Params:
        """Return the parameters of a stage that is the same for all studies and kinds of data."""
        return self.params([STAGES[stage].module], settings, files)

    def call_again(self, wildcards: Wildcards, input: Any) -> str:
        return shlex.join(self.call)
