"""State that the rules of one call share: configuration, site, and parameters and commands of jobs.

A job's parameters are one dict: the SHA-256 of the code that the stage imports, the settings of the stage, and, if
set, the image and the site's packages. Snakemake compares parameters as a set of values, so names and values stay
together only in one dict. Functions that also take `input` do not make jobs run again: Snakemake does not compare their
results.
"""

from __future__ import annotations

import functools
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dlscale.config.dataset import DatasetSettings
from dlscale.config.resolve import Configuration
from dlscale.config.run import Geometry, Run
from dlscale.config.site import Site
from dlscale.core import registry, urls
from dlscale.core.errors import UserError
from dlscale.core.fingerprint import ROOT, fingerprint
from dlscale.core.machine import gpus
from dlscale.core.paths import Results
from dlscale.core.process import LAUNCHED
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.launch import launcher, slurm
from dlscale.preflight import cost
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
    #: Snakemake command that calls the workflow again with this call's settings. After `dlscale run`, this is also a
    #: `snakemake` command, because Snakemake's options, such as --force, can follow.
    call: Sequence[str]
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


@dataclass
class Commands:
    """Commands and resources of jobs."""

    context: Context

    def place(self, paths: Iterable[str]) -> launcher.ContainerMounts:
        """Return the folders that a container mounts for a stage that reads `paths`."""
        folder, results = str(Path.cwd()), Path(self.context.paths.folder).absolute()
        # Commands contain the results folder as the user typed it, so a container mounts this path, with unresolved
        # links. Within the working folder, links of the path are resolved, because they may lead outside.
        results = results.resolve() if results.is_relative_to(folder) else results
        sources = launcher.sources(self.context.site)
        return launcher.ContainerMounts(
            folder=folder,
            sources=str(sources),
            uid=os.getuid(),
            gid=os.getgid(),
            data=launcher.outside([*paths, sources / ROOT.name, *registry.roots()], folder, results),
            results=str(results),
        )

    def start(self, paths: Iterable[str], geometry: Geometry | None = None, secrets: bool = False) -> list[str]:
        """Return the command that starts a stage that reads `paths`.

        A container mounts the folders of `paths` at the same absolute paths. The secrets of addresses and of external
        programs stay in the stage's environment only if `secrets` is set.
        """
        try:
            return self.completed(launcher.launch(self.context.site, self.place(paths), geometry), secrets)
        except UserError as error:
            self.context.refuse(error)

    def completed(self, words: list[str], secrets: bool = False) -> list[str]:
        """Add the user's studies to a command, and remove environment variables that the stage must not get.

        These are secrets (unless `secrets` is set), and the calling shell's variables of launchers, such as RANK, which
        the process starter sets for each process.
        """
        names = [urls.VARIABLE] if self.context.configuration.secrets and not secrets else []
        names += [name for name in LAUNCHED if name in os.environ]
        withheld = ["env", *(word for name in names for word in ("-u", name))] if names else []
        return [*withheld, *words, *(f"--study={name}={study.file}" for name, study in registry.added().items())]

    def launch(self, wildcards: Wildcards, input: Any) -> list[str]:
        return self.start(input)

    def device(self, wildcards: Wildcards, input: Any) -> str:
        return launcher.device(self.context.configuration.workflow.site)

    def resources(self, stage: str) -> dict[str, Callable[..., Any]]:
        """Return resource → function that computes a job's value; empty without a scheduler.

        `stage` is a stage of runs, or `data`.
        """
        scheduler = self.context.site.scheduler
        if not scheduler:
            return {}

        @functools.lru_cache(maxsize=1)  # Snakemake requests each resource of a job separately
        def request(second: int, attempt: int, dataset: str, plan: str, run: str) -> slurm.Request:
            """Return all resources of a job; the time limit grows with attempts, and uses the latest measurements."""
            configuration = self.context.configuration
            geometry: Geometry | None = None
            processes: Geometry | None = None
            if stage in RUN_STAGES:
                settings = self.context.plans[plan][run].run
                geometry, processes = settings.geometry, settings.processes
                work = cost.run_work(configuration, plan, run, stage)
            else:
                work = cost.data_work(configuration, dataset, 1)
            minutes = cost.minutes(work, Path(self.context.paths.folder), scheduler)
            return slurm.request(scheduler, stage, geometry, minutes and minutes * attempt, processes)

        def resource(name: str) -> Callable[..., Any]:
            # A resource that the request lacks is None, because the executor tests which resources are set.
            return lambda wildcards, attempt: request(
                int(time.monotonic()), attempt, *(getattr(wildcards, key, "") for key in ("dataset", "plan", "run"))
            ).get(name)

        return {name: resource(name) for name in (*slurm.RESOURCES, *slurm.job_limits(scheduler))}
