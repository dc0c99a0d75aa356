"""Preflight: what the workflow needs, looked at before the first job waits in a queue for it.

Every check is a probe, which asks a command or the file system, and a pure function that judges the answer. Probes run
side by side, none longer than `probe.LIMIT` seconds; one that breaks is a warning with its error, never a crash.
Without a configuration what is left is the environment itself: a container image's HEALTHCHECK.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Collection, Iterable
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path

from dlscale.config.resolve import Configuration
from dlscale.config.site import Job
from dlscale.core.errors import UserError, unknown
from dlscale.core.stages import RUN_STAGES
from dlscale.launch import launcher
from dlscale.preflight import data, disks, environment, probe, site_slurm
from dlscale.preflight.probe import Finding, Probe, started


def check(
    configuration: Configuration | None,
    profile: str | None = None,
    stages_wanted: Collection[Job] = ("data", *RUN_STAGES),
    plans: Collection[str] = (),
) -> list[Finding]:
    """Check what plans need on this site, in a fixed order; the environment alone without a configuration.

    This function neither raises nor hangs: after twice `probe.LIMIT` and some seconds it is back.

    Parameters
    ----------
    profile
        Name of the site's profile, or path of its `site.yaml`: beside that file are the workflow's own settings.
    stages_wanted
        Stages that will run: only what these need is checked.
    plans
        The plans, which have to be there; the targets if none is named.
    """
    if configuration is None:
        here = Path()
        python = ("environment", lambda: environment.probe_python([sys.executable], []))
        return probe.ask(
            [python, ("space", lambda: disks.probe_space(here)), ("clock", lambda: disks.probe_clock(here))]
        )
    probes: list[Probe] = []
    workflow = configuration.workflow
    results, scheduler, days = Path(workflow.results), workflow.site.scheduler, workflow.site.scratch_days
    runs = [resolved.run for plan in plans or workflow.targets for resolved in configuration.plans[plan].values()]
    profilers = {
        tool
        for plan in plans or workflow.targets
        for name, resolved in configuration.plans[plan].items()
        if "profile" in configuration.stages(plan, name) and "profile" in stages_wanted
        for tool in resolved.run.profile.tools
    }
    datasets = {name: workflow.datasets[name] for name in dict.fromkeys(run.dataset for run in runs)}
    on_gpus = launcher.device(workflow.site) == "cuda" and bool(set(RUN_STAGES) & set(stages_wanted))
    # Which engine `auto` is may take a call of one of them: one, before the probes that need the answer wait for it.
    site = started(lambda: launcher.resolve(workflow.site)[0])
    wait([site], probe.LIMIT)
    image = started(lambda: environment.probe_image(site.result()))
    if scheduler:
        probes += site_slurm.probes(scheduler, runs, profile, stages_wanted)
    probes += [
        ("engine", lambda: environment.probe_engine(site.result())),
        ("image", image.result),
        (
            "environment",
            lambda: environment.probe_environment(site.result(), image.result(), runs, profilers, on_gpus),
        ),
    ]
    if set(RUN_STAGES) & set(stages_wanted):
        probes.append(("GPU", lambda: environment.probe_gpus(site.result())))
        probes.append(("GPU order", lambda: environment.probe_gpu_order(site.result())))
    for name, dataset in datasets.items():
        samples = [run.samples for run in runs if run.dataset == name]
        probes.append((f"data {name}", functools.partial(data.probe_data, name, dataset, results, samples)))
    if "data" in stages_wanted:
        to_fetch = [dataset for name, dataset in datasets.items() if not data.manifest_of(results, name).exists()]
        places = sorted({place for dataset in to_fetch for place in data.hosts(dataset)})
        for host, port in places:
            probes.append((f"network {host}", functools.partial(data.probe_network, host, port, scheduler)))
        if not places:
            probes.append(("network", lambda: Finding("network", "skip", "nothing has to be fetched")))
    probes += [("space", lambda: disks.probe_space(results)), ("quota", lambda: disks.probe_quota(results))]
    if days:
        local = [path for dataset in datasets.values() for path in data.local_files(dataset)]
        probes.append(("purge", lambda: disks.probe_purge([str(results / "data"), *local], days)))
    probes.append(("clock", lambda: disks.probe_clock(results)))
    return probe.ask(probes)


def lines(findings: Iterable[Finding]) -> list[str]:
    """Return one line a finding: status, what was checked, what was found, and unless it is fine the remedy."""
    text = []
    for finding in findings:
        remedy = f"; {finding.remedy}" if finding.remedy and finding.status != "ok" else ""
        text.append(f"{finding.status:4}  {finding.name}: {finding.text}{remedy}".replace("\n", " ").rstrip())
    return text


def failed(findings: Iterable[Finding]) -> bool:
    """Whether something would keep the workflow from its results."""
    return any(finding.status == "FAIL" for finding in findings)


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the findings; return 0, or 1 if a check fails: all that a HEALTHCHECK may return."""
    known = configuration.plans if configuration else {}
    for name in args.plans:
        if name not in known:
            raise UserError(unknown("plan", name, known))
    findings = check(configuration, args.profile, plans=args.plans)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines(findings)))
    return int(failed(findings))
