# Before anything runs: what it will cost, whether the site is ready, and whether an earlier call's jobs still run.
import time
from collections import Counter
from dataclasses import asdict

from dlscale.core import times
from dlscale.core.fingerprint import TABLES
from dlscale.core.machine import gpus
from dlscale.core.stages import DATA_STAGES, RUN_STAGES
from dlscale.core.text import coloured, many
from dlscale.preflight import disks, environment, expected
from dlscale.report import glance
from dlscale.report.results import read_plan

STARTED = time.time() - times.age()
#: Plans whose results are told at the end of a call.
RESULTS_SHOWN = 8

# Once: jobs that Snakemake starts as processes of their own read this file, too.
if workflow.is_main_process:
    for plan in ASKED_PLANS:
        for run, lacking in CONFIG.left_out[plan].items():
            print(f"{plan}.{run} is left out: this machine lacks {lacking}.", file=sys.stderr)


def in_order(work):
    return list(CONFIG.plans).index(work.plan), list(CONFIG.plans[work.plan]).index(work.run_name), work.stage


def trials_of(plan, works):
    """The trials of a sweep that would train."""
    return {CONFIG.plans[plan][work.run_name].trial for work in works if work.plan == plan} - {None}


def waiting_works():
    """The jobs that would run, as the estimate of their cost knows them: data jobs counted by dataset."""
    runs, data, halving = [], Counter(), []
    for job in jobs_to_run():
        name, wildcards = job.rule.name, job.wildcards
        if name in RUN_STAGES:
            runs.append(cost.run_work(CONFIG, wildcards.plan, wildcards.run, name))
        elif name in DATA_STAGES:
            data[wildcards.dataset] += 1
        elif name == "promote":
            halving.append(wildcards.plan)
    # Which trials come to a later rung is not known yet, but how many.
    later = [work for plan in dict.fromkeys(halving) for work in cost.works(CONFIG, [plan], trials_of(plan, runs))]
    runs += [work for work in later if work.run and CONFIG.plans[work.plan][work.run_name].rung and work not in runs]
    runs.sort(key=in_order)
    return [*(cost.data_work(CONFIG, name, number) for name, number in sorted(data.items())), *runs]


def examined(works):
    """What `dlscale doctor` finds of the site, for these jobs."""
    plans = {work.plan for work in works if work.run}
    return doctor.check(CONFIG, site_name(), {work.stage for work in works}, plans)


def check_start(works):
    """Raise a `UserError` if jobs cannot be started here as they would have to be."""
    paths = [os.getcwd(), RESULTS, *registry.roots(), *workflow.config_settings.configfiles]
    launcher.check_names(map(str, paths), SITE)
    for work in [work for work in works if work.run]:
        launcher.check(SITE, work.run.geometry, f"plans.{work.plan}.runs.{work.run_name}.")


def lacking_here(works):
    """What runs need and this machine lacks where it runs them itself, or does badly: found without import of torch."""
    runs = {f"{work.plan}.{work.run_name}": work.run for work in works if work.run}
    findings = [*environment.probe_here(runs, gpus()), disks.probe_space(Path(RESULTS))]
    return [finding for finding in findings if finding.status in ("FAIL", "warn")]


def found_before(works):
    """What is found of the site, or of the machine, before the first of these jobs begins."""
    if not works:
        return []
    return examined(works) if SITE.scheduler or SITE.engine != "none" else lacking_here(works)


def show_requests():
    """Print what the jobs of a dry run would ask of Slurm, those that ask for the same together."""
    asked = {}
    for resources, rule, wildcards in requests_to_show():
        job = f"{rule} {'.'.join([wildcards.plan, wildcards.run]) if rule in RUN_STAGES else wildcards.dataset}"
        asked.setdefault(slurm.words(resources), set()).add(job)
    if asked:
        print(
            "",
            *(f"sbatch {words}: {', '.join(sorted(asked[words]))}" for words in sorted(asked)),
            sep="\n",
            file=sys.stderr,
        )


def show_outlook():
    """Print what the jobs of a dry run would cost, what keeps them from starting, and a verdict; return the status."""
    works, jobs, problems = waiting_works(), jobs_to_run(), []
    if not jobs:
        return 0
    try:
        check_start(works)
    except UserError as error:
        problems.append(f"It would not start: {error}")
    table, findings = cost.price(works, SITE.scheduler, Path(RESULTS)), found_before(works)
    problems += doctor.lines(finding for finding in findings if finding.status == "FAIL")
    problems += filter(None, [cost.over(table, CONFIG.workflow.budget)])
    warnings = [] if SITE.scheduler else doctor.lines(finding for finding in findings if finding.status == "warn")
    lines = ["", *cost.lines(table)] if SITE.scheduler and works else []
    lines += ["", "It would start, but:", *warnings] if warnings and not problems else ["", *warnings, *problems]
    if problems:
        fail = f"{many(len(problems), 'check')} {'fails' if len(problems) == 1 else 'fail'}"
        fail += f": nothing would {'be submitted' if SITE.scheduler else 'start'}"
        lines += ["", coloured(fail, "red", sys.stderr)]
    else:
        lines += [cost.outlook(table, len(jobs), None if SITE.scheduler else time_of(jobs, works))]
    print(*lines, sep="\n", file=sys.stderr)
    return int(bool(problems))


def seconds_of(job):
    """How long a job takes on this machine, as far as is known."""
    stage, known, work = why.stage_of(job.rule.name), job.wildcards, None
    if stage in RUN_STAGES:
        work = cost.run_work(CONFIG, known.plan, known.run, stage)
    return expected.seconds(stage, work, Path(RESULTS), Path(job.benchmark) if job.benchmark else None)


def jobs_to_tell():
    """The jobs of this call, for the process that shows how far it is."""
    jobs, cores = jobs_to_run(), workflow.resource_settings.cores
    return [
        live.Job(
            "".join(why.place(job.rule.name, dict(job.wildcards.items()))),
            why.stage_of(job.rule.name),
            getattr(job.wildcards, "plan", ""),
            str(next(iter(job.log), "")),
            str(job.benchmark),
            seconds_of(job),
            min(job.threads, cores) / cores if cores else 1 / len(jobs),  # a site has nodes for all
        )
        for job in jobs
    ]


def time_of(jobs, works):
    """How long jobs take on this machine together, and what of the same works is no job yet: a later rung's."""
    there = {(job.rule.name, job.wildcards.plan, job.wildcards.run) for job in jobs if job.rule.name in RUN_STAGES}
    later = [work for work in works if work.run and (work.stage, work.plan, work.run_name) not in there]
    taken = [(seconds_of(job), job.threads) for job in jobs]
    taken += [(expected.seconds(work.stage, work, Path(RESULTS)), work.run.threads or 64) for work in later]
    return expected.in_all(taken, workflow.resource_settings.cores or 1)


SOURCES = Path(".snakemake/sources")


def remember_sources():
    """Write down what the digests of sources stand for, with which jobs are recorded."""
    for job in workflow.dag.needrun_jobs():
        job.params
    why.remember(TABLES, SOURCES)


def reasons():
    """Why the jobs of a dry run would run, and what is gone although nothing would make it."""
    found = why.found(reasons_to_run(), why.remembered(SOURCES, TABLES))
    found.lost += lost(files_to_make())
    return found


def lost(making=()):
    """Lines of what is gone of the runs and datasets that were asked for, though nothing would make it."""
    trained = [run for plan in ASKED_PLANS for run in CONFIG.plans[plan].values()]
    runs = dict.fromkeys(f"{run.plan}/{run.name}" for run in trained)
    return why.lost(RESULTS, runs, dict.fromkeys(plan_datasets(ASKED_PLANS) + asked_datasets()), making, own_settings())


def show_end():
    """Print, at the end of a call, what is gone, and where the pages are."""
    for line in lost():
        print(line, file=sys.stderr)
    show_pages()


def looked():
    """Print what a dry run found; return its status. Or tell the process that asked."""
    if dryrun.asked():
        dryrun.answer(cost.named(waiting_works()), asdict(reasons()))
        return 0
    why.show(reasons())
    if SITE.scheduler:
        show_requests()
    return show_outlook()


def show_failures():
    """Print a line for each job that failed; return whether that says all."""
    if INTERRUPTED:
        print("", "Interrupted. What is done is kept: the same command goes on from there.", sep="\n", file=sys.stderr)
        return True
    lines = sorted(why.failed(*job, STARTED) for job in failed_jobs())
    if lines:
        if live.asked():
            lines = [f"What Snakemake says: {', '.join(workflow.logger_manager.get_logfile())}", *lines]
        print("", *(coloured(line, "red", sys.stderr) for line in lines), sep="\n", file=sys.stderr)
    return bool(lines)


def show_pages():
    """Print where the pages of what was asked for are; of a part of a plan its page; of datasets their pictures."""
    files = list(map(Path, asked_files()))
    pages = [file for file in files if file == Path(PAGE) or file.name == "report.html"]
    if not pages:
        parts = [file.relative_to(RESULTS).parts for file in files if file.is_relative_to(RESULTS)]
        plans = dict.fromkeys(part[1] for part in parts if part[0] == "plans")
        pages = [page for plan in plans if (page := Path(RESULTS, "plans", plan, "report.html")).exists()]
    for page in pages:
        old = page not in files and any(page.stat().st_mtime < file.stat().st_mtime for file in files if file.exists())
        again = shlex.join(["snakemake", *own_settings(), "--", f"plan_{page.parent.name}"])
        newer = f" (older than what was asked for: {again} writes it anew)" if old else ""
        print(f"Report: {page.resolve()}{newer}", file=sys.stderr)
    for picture in [] if pages else [file for file in files if file.name == "preview.png"]:
        print(f"Preview: {picture.resolve()}", file=sys.stderr)


have_the_last_word(looked, show_end, show_failures)
if SITE.scheduler:
    be_the_only_controller()
# Snakemake's own lock is of this folder; another checkout may have the same `results`.
be_the_only_writer(RESULTS)


onstart:
    if workflow.non_local_exec and not SITE.scheduler:
        raise WorkflowError(
            "Jobs are submitted, and no site says how; name one: --default-resources \"site='NAME'\""
        )
    works = waiting_works()
    if line := why.replaced(reasons_to_run()):
        print(line, file=sys.stderr)
    remember_sources()
    try:
        check_start(works)
    except UserError as error:
        raise WorkflowError(str(error))
    if problem := cost.over(cost.price(works, SITE.scheduler, Path(RESULTS)), CONFIG.workflow.budget):
        raise WorkflowError(problem)
    findings = found_before(works)
    if findings:
        print(*doctor.lines(findings), sep="\n", file=sys.stderr)
    if doctor.failed(findings) or (works and SITE.engine != "none" and not IMAGE):
        raise WorkflowError("Not ready: nothing was started. See the lines with FAIL above.")
    if live.asked():
        live.tell(jobs_to_tell())
    for page in [file for file in asked_files() if Path(file).suffix == ".html"][:1]:
        print(f"The page will be {Path(page).resolve()}", file=sys.stderr)


def show_times():
    """Print where the time went, and what of this machine's cores was used if all jobs were its own."""
    used = os.times()
    here = not (workflow.non_local_exec or SITE.engine != "none")
    busy = used.user + used.system + used.children_user + used.children_system
    done = times.jobs(Path(RESULTS), STARTED)
    lines = times.lines(done, STARTED, time.time(), workflow.resource_settings.cores if here else None, busy)
    print(*lines, sep="\n", file=sys.stderr)


def show_results():
    """Print what each plan that was asked for came to, and what to ask next."""
    plans = []
    for name in ASKED_PLANS:
        try:
            plans.append(read_plan(Path(RESULTS, "plans", name, "plan.yaml")))
        except UserError:  # only a part of it was asked for
            continue
    for plan in plans[:RESULTS_SHOWN]:
        print(glance.line(plan), file=sys.stderr)
    if len(plans) > RESULTS_SHOWN:
        print(f"and {many(len(plans) - RESULTS_SHOWN, 'more plan')}, on the page", file=sys.stderr)
    best_first = [(plan, run) for plan in plans for run in [*filter(None, [plan.best]), *plan.runs]]
    for plan, run in [(plan, run) for plan, run in best_first if run.throughput or run.profile][:1]:
        call = shlex.join(["dlscale", "explain", f"{plan.name}.{run.name}", *own_settings()])
        print(f"Next: {call}  # what holds it back, what to try", file=sys.stderr)


onsuccess:
    show_times()
    remember_sources()
    show_results()
    show_end()
