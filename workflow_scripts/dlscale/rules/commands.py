"""The words that start the command of a job, and what the job asks of Slurm."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlscale.config.run import Geometry
from dlscale.core import registry, urls
from dlscale.core.errors import UserError
from dlscale.core.fingerprint import ROOT
from dlscale.core.process import LAUNCHED
from dlscale.core.stages import RUN_STAGES
from dlscale.launch import launcher, slurm
from dlscale.preflight import cost
from dlscale.rules.context import Context, Wildcards


@dataclass
class Commands:
    """Commands and resources of jobs."""

    context: Context

    def place(self, paths: Iterable[str]) -> launcher.Place:
        """Return the folders that a container takes over, for a stage that reads `paths`."""
        folder, results = str(Path.cwd()), Path(self.context.paths.folder).absolute()
        # Commands name it as it was typed, though a link may be on its way; that of a link in the folder is followed.
        results = results.resolve() if results.is_relative_to(folder) else results
        sources = launcher.sources(self.context.site)
        return launcher.Place(
            folder=folder,
            sources=str(sources),
            uid=os.getuid(),
            gid=os.getgid(),
            data=launcher.outside([*paths, sources / ROOT.name, *registry.roots()], folder, results),
            results=None if results.is_relative_to(folder) else str(results),
        )

    def start(self, paths: Iterable[str], geometry: Geometry | None = None, secrets: bool = False) -> list[str]:
        """Return the words that start a stage that reads `paths`: in a container it sees these, here and there alike.

        Addresses with secrets, and secrets of programs, are kept from it unless `secrets`.
        """
        try:
            return self.completed(launcher.launch(self.context.site, self.place(paths), geometry), secrets)
        except UserError as error:
            self.context.refuse(error)

    def completed(self, words: list[str], secrets: bool = False) -> list[str]:
        """Return the words that start a stage, with the studies that it knows, and without secrets.

        Variables of the calling shell that number processes, such as RANK, are withheld: a starter sets its own.
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
        """Return functions from wildcards to the resources of a run's stage, or of `data` stages, by name."""
        scheduler = self.context.site.scheduler
        if not scheduler:
            return {}

        @functools.lru_cache(maxsize=1)  # Snakemake asks for one resource after the other
        def request(second: int, attempt: int, dataset: str, plan: str, run: str) -> slurm.Request:
            """Return all that a job requests: its time limit grows with attempts, and follows rates just measured."""
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
            # A missing resource is None: the executor asks which resources there are.
            return lambda wildcards, attempt: request(
                int(time.monotonic()), attempt, *(getattr(wildcards, key, "") for key in ("dataset", "plan", "run"))
            ).get(name)

        return {name: resource(name) for name in (*slurm.RESOURCES, *slurm.job_limits(scheduler))}
