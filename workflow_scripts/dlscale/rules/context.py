"""State that the rules of one call share: configuration, site, and parameters of jobs.

A job's parameters are one dict: the SHA-256 of the code that the stage imports, the settings of the stage, and, if
set, the image and the site's packages. Snakemake compares parameters as a set of values, so names and values stay
together only in one dict. Functions that also take `input` do not make jobs run again: Snakemake does not compare their
results.
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
    """State that the rules of one call share."""

    configuration: Configuration
    site: Site  #: Site, with `auto` resolved.
    page: str  #: Path of the page of all targets.
    call: Sequence[str]  #: Command that calls the workflow again with this call's settings.
    own_settings: Sequence[str]  #: Arguments of `call` that contain the settings.
    is_live: bool  #: Whether the call writes a live page of the targets.
    image: str  #: Identity of the container image; empty without an image.
    say: Callable[[Finding], None]  #: Prints a finding, and ends the call on FAIL.
    refuse: Callable[[object], NoReturn]
    rung_file: Callable[[str, int], str]  #: Returns the file with the trials of a plan's rung, once it exists.
    keep_going: Callable[[], bool]  #: Returns whether a broken dataset fails only its own jobs, not the call.
    looked: set[str] = field(default_factory=set)  #: Datasets and runs that were checked; each is reported once.

    def __post_init__(self) -> None:
        workflow = self.configuration.workflow
        self.paths, self.datasets, self.plans = Results(workflow.results), workflow.datasets, self.configuration.plans
        self._packages = launcher.packages(self.site)
        #: Number of GPUs of this machine; 0 if a scheduler runs the jobs.
        self.gpus = 0 if self.site.scheduler else gpus()

    def dataset(self, wildcards: Wildcards) -> DatasetSettings:
        return self.datasets[wildcards.dataset]

    def run(self, wildcards: Wildcards) -> Run:
        return self.plans[wildcards.plan][wildcards.run].run

    def params(self, modules: Sequence[str], settings: Any, files: Iterable[Path] = ()) -> Params:
        """Return a job's parameters; a change of one parameter makes the job run again.

        Without modules, as for a fetched file, the job's result does not depend on dlscale's code. The parameters then
        do not include image and packages.
        """
        around = {"image": self.image, "packages": self._packages}
        kept = {key: value for key, value in around.items() if modules and value}
        return {"sources": fingerprint(modules, files), "settings": settings, **kept}

    def own_params(
        self, stage: str, settings: Any = None, files: Iterable[Path] = (), modules: Iterable[str] = ()
    ) -> Params:
        """Return the parameters of a stage whose code is the same for all studies and kinds of data.

        `modules`: modules that the stage imports by name.
        """
        return self.params([STAGES[stage].module, *modules], settings, files)

    def call_again(self, wildcards: Wildcards, input: Any) -> str:
        return shlex.join(self.call)
