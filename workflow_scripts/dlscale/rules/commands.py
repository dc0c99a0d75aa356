"""Prefixes of the jobs' commands (variables, container, starter), and Slurm requests of jobs."""

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

    def place(self, paths: Iterable[str]) -> launcher.ContainerMounts:
        """Return the folders that a container mounts for a stage that reads `paths`."""
        folder, results = str(Path.cwd()), Path(self.context.paths.folder).absolute()
        # Commands contain the results folder as the user typed it, so a container mounts it under this path, with its
        # links unresolved. In the working folder, links are resolved, because they may lead outside.
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

        Removed are secrets, unless `secrets` is set, and launchers' variables of the calling shell, such as RANK, which
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
            """Return all resources of a job; the time limit grows with attempts and uses the latest measured rates."""
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
