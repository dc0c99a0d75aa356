"""A call of the workflow: its jobs and their cost, the checks before it starts, and its results."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlscale.config.laws import check_fields
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.machine import gpus
from dlscale.core.stages import DATA_STAGES, RUN_STAGES, job_name, stage_of
from dlscale.core.text import are_gone, coloured, many
from dlscale.data.kind import RowSamples
from dlscale.data.manifest import Manifest
from dlscale.launch import launcher
from dlscale.preflight import cost, status
from dlscale.preflight.cost import Work
from dlscale.preflight.probe import Finding, probe_clock, probe_space
from dlscale.report import sections
from dlscale.results import read_plan
from dlscale.rules.context import Context
from dlscale.rules.plans import Plans

#: Maximum number of plans whose results are printed at the end of a call.
RESULTS_SHOWN = 8


@dataclass
class Call:
    """Call of the workflow for some plans and datasets, on one site."""

    context: Context
    pages: Plans
    plans: Sequence[str]
    datasets: Sequence[str]
    cores: int | None  #: `--cores`: CPUs of this machine that the call may use; None without this option.
    tell: Callable[..., None]  #: Function that prints lines on the terminal.

    def __post_init__(self) -> None:
        self.configuration, self.site = self.context.configuration, self.context.site
        self.results = Path(self.configuration.workflow.results)
        #: Whether `fetch` counts as a job: false if `fetch` runs on the login node.
        self._fetching = not (self.site.scheduler and self.site.scheduler.acquire == "here")

    # ---- what would run ------------------------------------------------------------------------------

    def works(self, waiting: Iterable[Any]) -> list[Work]:
        """Convert Snakemake's jobs to items of the cost estimate; all jobs that make one dataset are one item."""
        plans = self.configuration.plans
        runs, data, halving = list[Work](), Counter[str](), dict[str, None]()
        for job in waiting:
            name, wildcards = job.rule.name, job.wildcards
            if name in RUN_STAGES:
                runs.append(cost.run_work(self.configuration, wildcards.plan, wildcards.run, name))
            elif stage_of(name) in DATA_STAGES and (name != "fetch" or self._fetching):
                data[wildcards.dataset] += 1
            elif name == "promote":
                halving[wildcards.plan] = None
        # The trials of later rungs are not known yet, but the number of these trials is known.
        again = {(work.plan, plans[work.plan][work.run_name].trial) for work in runs}
        later = cost.works(self.configuration, halving, again) if halving else []
        runs += [work for work in later if work.run and plans[work.plan][work.run_name].rung and work not in runs]
        order = {plan: (number, [*plans[plan]]) for number, plan in enumerate(plans)}
        runs.sort(key=lambda work: (order[work.plan][0], order[work.plan][1].index(work.run_name), work.stage))
        return [*(cost.data_work(self.configuration, name, number) for name, number in sorted(data.items())), *runs]

    def seconds_of(self, job: Any) -> cost.Expected:
        stage, known = stage_of(job.rule.name), job.wildcards
        work = cost.run_work(self.configuration, known.plan, known.run, stage) if stage in RUN_STAGES else None
        return cost.seconds_here(stage, work, self.results, Path(job.benchmark) if job.benchmark else None)

    def expected(self, waiting: Sequence[Any]) -> list[status.Job]:
        """Convert Snakemake's jobs for the display of progress."""
        return [
            status.Job(
                "".join(job_name(job.rule.name, dict(job.wildcards.items()))),
                stage_of(job.rule.name),
                str(next(iter(job.log), "")),
                str(job.benchmark),
                takes.seconds,
                not takes.untimed,
                cost.share(job.threads, self.cores) if self.cores else 1 / len(waiting),
            )
            for job, takes in ((job, self.seconds_of(job)) for job in waiting)
        ]

    def time_of(self, waiting: Sequence[Any], works: Iterable[Work]) -> cost.Expected:
        """Return the expected time of all jobs on this machine, including later rungs."""
        cores = self.cores or 1
        jobs = [job for job in waiting if job.rule.name in RUN_STAGES]
        there = {(job.rule.name, job.wildcards.plan, job.wildcards.run) for job in jobs}
        later = [work for work in works if (work.stage, work.plan, work.run_name) not in there]
        taken = [(self.seconds_of(job), job.threads) for job in waiting]
        on_gpus = bool(self.context.gpus)
        taken += [
            (cost.seconds_here(each.stage, each, self.results), cost.threads(each.stage, each.run, on_gpus))
            for each in later
            if each.run
        ]
        return cost.in_all([(seconds, cost.share(threads, cores)) for seconds, threads in taken])

    # ---- whether the workflow would start ----------------------------------------------------------------------

    def check(self, works: Sequence[Work], files: Iterable[str | Path]) -> None:
        """Raise `UserError` for jobs that cannot start on this site, or for a path that the site cannot handle.

        `files` are the configuration's files.
        """
        launcher.check_names(map(str, [Path.cwd(), self.results, *registry.roots(), *files]), self.site)
        making = {work.plan for work in works if not work.run}
        for work in works:
            if work.run:
                here = f"plans.{work.plan}.runs.{work.run_name}."
                launcher.check(self.site, work.run.geometry, here)
                if isinstance(work.run.samples, RowSamples) and not work.run.program:
                    check_fields(work.run.samples, self._fields(work, work.run.dataset, making), here)
                if (
                    work.stage == "throughput"
                    and work.run.program
                    and (problem := work.run.program.check_trials(work.run))
                ):
                    raise UserError(f"{here}{problem}")

    def _fields(self, work: Work, dataset: str, making: Collection[str]) -> Collection[str]:
        """Return the fields of a run's dataset, from settings or manifest; empty if they are not known yet."""
        outline = registry.kind(work.dataset.kind).outline(work.dataset) if work.dataset else None
        manifest = Path(self.context.paths.manifest(dataset))
        if outline or dataset in making or not manifest.exists():
            return outline.fields if outline else ()
        return Manifest.read(manifest).fields

    def findings(self, works: Sequence[Work]) -> list[Finding]:
        """Check the site, or this machine if it runs the jobs without containers, and return the findings.

        Of the findings on this machine, return only warnings and failures.
        """
        if not works:
            return []
        if self.site.scheduler or self.site.engine != "none":
            plans, data = ({work.plan for work in works if bool(work.run) == of_run} for of_run in (True, False))
            check = registry.provided("check_site", lambda *_: [])
            found: list[Finding] = check(self.configuration, {work.stage for work in works}, plans, data)
            return found
        runs = {f"{work.plan}.{work.run_name}": work.run for work in works if work.run}
        found = [*registry.provided("check_machine", lambda *_: [])(runs, gpus()), probe_space(self.results)]
        if self.configuration.workflow.budget.model_dump(exclude_none=True):
            found.append(Finding("budget", "warn", "not checked: this site has no queue that charges hours"))
        return [finding for finding in found if finding.status in ("FAIL", "warn")]

    def verdict(self, waiting: Sequence[Any], files: Iterable[str | Path], targets: int = 0) -> int:
        """Print cost, problems and verdict of a dry run, and return the exit status.

        `targets` is the number of target rules, which Snakemake's total counts as jobs.
        """
        if not waiting:
            return 0
        scheduler, works, problems = self.site.scheduler, self.works(waiting), list[str]()
        try:
            self.check(works, files)
        except UserError as error:
            problems.append(f"The workflow would not start: {error}")
        table = cost.price(works, scheduler, self.results) if scheduler else []
        findings = [*self.findings(works), *probe_clock(str(file) for job in waiting for file in job.input)]
        problems += [str(finding) for finding in findings if finding.status == "FAIL"]
        problems += filter(None, [cost.budget_message(table, self.configuration.workflow.budget)])
        warnings = [] if scheduler else [str(finding) for finding in findings if finding.status == "warn"]
        self.tell(*(["", *cost.lines(table)] if table else []))
        self.tell("", *(["The workflow would start, but:"] if warnings and not problems else []), *warnings, *problems)
        if problems:
            fail = f"{many(len(problems), 'check')} {'fails' if len(problems) == 1 else 'fail'}"
            start = "be submitted" if scheduler else "start"
            self.tell("", coloured(f"{fail}: nothing would {start}", "red", sys.stderr))
        else:
            self.tell(cost.outlook(table, len(waiting), None if scheduler else self.time_of(waiting, works), targets))
        return int(bool(problems))

    def start(self, waiting: Sequence[Any], files: Iterable[str | Path]) -> None:
        """Print the findings before jobs begin; raise `UserError` if the jobs must not begin."""
        works = self.works(waiting)
        self.check(works, files)
        table = cost.price(works, self.site.scheduler, self.results) if self.site.scheduler else []
        if problem := cost.budget_message(table, self.configuration.workflow.budget):
            raise UserError(problem)
        findings = [*self.findings(works), *probe_clock(str(file) for job in waiting for file in job.input)]
        self.tell(*map(str, findings))
        failed = any(finding.status == "FAIL" for finding in findings)
        if failed or (works and self.site.engine != "none" and not self.context.image):
            raise UserError("Not ready: nothing was started. See the lines with FAIL above.")

    # ---- results -------------------------------------------------------------------------------------

    def missing_results(self, making: Collection[str] = ()) -> list[str]:
        """Return a line for each missing result that no job would make."""
        trained = [run for plan in self.plans for run in self.configuration.plans[plan].values()]
        runs = dict.fromkeys(f"{run.plan}/{run.name}" for run in trained)
        datasets = dict.fromkeys([*self.pages.datasets(self.plans), *self.datasets])
        return missing_results(str(self.results), runs, datasets, making, self.context.call[1:])

    def show_pages(self, files: Iterable[Path]) -> None:
        """Print the paths of the requested pages.

        If only files of a plan are requested, print the path of the plan's page. Without pages, print the requested
        previews with facts on their datasets.
        """
        files = list(files)
        pages = [file for file in files if file == Path(self.context.page) or file.name == "report.html"]
        plans = {
            Path(self.context.paths.plan(file.relative_to(self.results).parts[1])).parent: file
            for file in files
            if file.is_relative_to(self.context.paths.plans)
        }
        pages = pages or [folder / "report.html" for folder in plans if (folder / "report.html").exists()]
        previews = [] if pages else [file for file in files if file.name == "preview.png"]
        self.tell(*(f"Report: {page.resolve()}" for page in pages))
        for file in previews:
            self.tell(f"Preview: {file.resolve()}", *(f"  {fact}" for fact in _facts(file.with_name("manifest.json"))))

    def show_results(self) -> None:
        """Print the result of each requested plan, and a command to try next."""
        plans = []
        for name in self.plans:
            with contextlib.suppress(UserError):  # only part of the plan was requested
                plans.append(read_plan(self.context.paths.plan(name)))
        self.tell(*map(sections.line, plans[:RESULTS_SHOWN]))
        if len(plans) > RESULTS_SHOWN:
            self.tell(f"and {many(len(plans) - RESULTS_SHOWN, 'more plan')}, on the page")
        best_first = [(plan, run) for plan in plans for run in [*filter(None, [plan.best]), *plan.runs]]
        if seen := [f"{plan.name}.{run.name}" for plan, run in best_first if run.throughput or run.profile]:
            call = shlex.join(["dlscale", "explain", seen[0], *self.context.own_settings])
            self.tell(f"Next: {call}  # what limits the run, and what to try next")


def missing_results(
    results: str, runs: Iterable[str], datasets: Iterable[str], making: Collection[str], given: Sequence[str] = ()
) -> list[str]:
    """Return a line for each run (`PLAN/RUN`) and dataset with missing files that no job would make.

    `making` has the files that jobs would make, and `given` the options that select the call's site and configuration.
    """
    places = [(f"plans/{run}", run.replace("/", "."), "metrics.jsonl", ["model.pt", "tensorboard/"]) for run in runs]
    places += [(f"data/{name}", f"data {name}", "manifest.json", ["stats/"]) for name in datasets]
    lines = []
    for where, what, first, kept in places:
        folder = f"{results}/{where}"
        # An empty folder counts as missing.
        gone = [name for name in kept if not any(Path(folder).glob(f"{name}*" if name.endswith("/") else name))]
        if gone and Path(folder, first).exists() and f"{folder}/{first}" not in making:
            call = shlex.join(["snakemake", *given, "--force", f"{folder}/{first}"])
            lines.append(f"{what}: {are_gone(gone)}, and no job would restore this; to do so: {call}")
    return lines


def _facts(manifest: Path) -> list[str]:
    with contextlib.suppress(UserError):
        return Manifest.read(manifest).facts
    return []
