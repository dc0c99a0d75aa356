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

from dlscale.config.places import check_plans
from dlscale.config.resolve import Configuration
from dlscale.config.site import Job
from dlscale.core.stages import RUN_STAGES
from dlscale.launch import launcher
from dlscale.preflight import data, disks, environment, probe, site_slurm
from dlscale.preflight.probe import Finding, Probe, started


def check(
    configuration: Configuration | None,
    stages_wanted: Collection[Job] = ("data", *RUN_STAGES),
    plans: Collection[str] = (),
) -> list[Finding]:
    """Check what plans need on this site, in a fixed order; the environment alone without a configuration.

    This function neither raises nor hangs: after twice `probe.LIMIT` and some seconds it is back.

    Parameters
    ----------
    stages_wanted
        Stages that will run: only what these need is checked.
    plans
        The plans, which have to be there; the targets if none is named.
    """
    results = Path(configuration.workflow.results) if configuration else Path()
    space: list[Probe] = [("space", lambda: disks.probe_space(results))]
    if configuration is None:
        return probe.ask([("environment", lambda: environment.probe_python([sys.executable], [])), *space])
    workflow = configuration.workflow
    scheduler, days = workflow.site.scheduler, workflow.site.scratch_days
    named = [(plan, *each) for plan in plans or workflow.targets for each in configuration.plans[plan].items()]
    runs = [resolved.run for _, _, resolved in named]
    on_gpus = bool(set(RUN_STAGES) & set(stages_wanted)) and launcher.device(workflow.site) == "cuda"
    profilers = {
        tool
        for plan, run, resolved in named
        if "profile" in stages_wanted and "profile" in configuration.stages(plan, run)
        for tool in resolved.run.profile.tools
    }
    # Which engine `auto` is may take a call of one of them: one, before the probes that need the answer wait for it.
    site = started(lambda: launcher.resolve(workflow.site)[0])
    wait([site], probe.LIMIT)
    image = started(lambda: environment.probe_image(site.result()))
    probes = site_slurm.probes(scheduler, runs, stages_wanted) if scheduler else []
    probes += [
        ("image", image.result),
        (
            "environment",
            lambda: environment.probe_environment(site.result(), image.result(), runs, profilers, on_gpus),
        ),
    ]
    datasets = {name: workflow.datasets[name] for name in dict.fromkeys(run.dataset for run in runs)}
    for name, dataset in datasets.items():
        samples = [run.samples for run in runs if run.dataset == name]
        probes.append((f"data {name}", functools.partial(data.probe_data, name, dataset, results, samples)))
    to_fetch = [each for name, each in datasets.items() if not data.manifest_of(results, name).exists()]
    for server in sorted({place for dataset in to_fetch for place in data.hosts(dataset)}):
        if "data" in stages_wanted:
            probes.append(("network", functools.partial(data.probe_network, server, scheduler)))
    if days:
        local = [path for dataset in datasets.values() for path in data.local_files(dataset)]
        probes.append(("purge", lambda: disks.probe_purge([str(results / "data"), *local], days)))
    return probe.ask([*probes, ("quota", disks.probe_quota), *space])


def lines(findings: Iterable[Finding]) -> list[str]:
    """Return one line a finding: status, what was checked, what was found, and unless it is fine the remedy."""
    text = []
    for finding in findings:
        remedy = f"; {finding.remedy}" if finding.remedy and finding.status in ("warn", "FAIL") else ""
        text.append(f"{finding.status:4}  {finding.name}: {finding.text}{remedy}".replace("\n", " ").rstrip())
    return text


def failed(findings: Iterable[Finding]) -> bool:
    """Whether something would keep the workflow from its results."""
    return any(finding.status == "FAIL" for finding in findings)


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the findings; return 0, or 1 if a check fails: all that a HEALTHCHECK may return."""
    findings = check(configuration, plans=check_plans(args.plans, configuration) if args.plans else ())
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines(findings)))
    return int(failed(findings))
