"""`dlscale doctor`: what the workflow needs, checked before the first job waits in a queue for it.

Without a configuration the environment alone is checked: a container image's HEALTHCHECK.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path

from dlscale.config.places import check_plans
from dlscale.config.resolve import Configuration
from dlscale.config.site import Job
from dlscale.core.stages import RUN_STAGES
from dlscale.launch import launcher
from dlscale.preflight import data, environment, probe
from dlscale.preflight.probe import Finding, Probe


def check(
    configuration: Configuration | None,
    stages_wanted: Collection[Job] = ("data", *RUN_STAGES),
    plans: Collection[str] = (),
) -> list[Finding]:
    """Check what these stages of plans (the targets by default) need on this site; this neither raises nor hangs."""
    results = Path(configuration.workflow.results) if configuration else Path()
    space: Probe = ("space", functools.partial(data.probe_space, results))
    if configuration is None:
        here = functools.partial(environment.probe_python, [sys.executable], [])
        return probe.ask([("environment", here), space])
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
    place = functools.partial(environment.probe_site, workflow.site, runs, profilers, on_gpus)
    probes = environment.slurm_probes(scheduler, runs, stages_wanted) if scheduler else []
    probes.append(("environment", place))
    datasets = {name: workflow.datasets[name] for name in dict.fromkeys(run.dataset for run in runs)}
    for name, dataset in datasets.items():
        samples = [run.samples for run in runs if run.dataset == name]
        probes.append((f"data {name}", functools.partial(data.probe_data, name, dataset, results, samples)))
    to_fetch = [each for name, each in datasets.items() if not data.manifest_of(results, name).exists()]
    if "data" in stages_wanted:
        for server in sorted({place for dataset in to_fetch for place in data.hosts(dataset)}):
            probes.append(("network", functools.partial(data.probe_network, server, scheduler)))
    if days:
        paths = [str(results / "data"), *(path for each in datasets.values() for path in data.local_files(each))]
        probes.append(("purge", functools.partial(data.probe_purge, paths, days)))
    return probe.ask([*probes, ("quota", data.probe_quota), space])


def lines(findings: Iterable[Finding]) -> list[str]:
    """Return one line a finding: status, check, finding, and the remedy of what is not fine."""
    text = []
    for finding in findings:
        remedy = f"; {finding.remedy}" if finding.remedy and finding.status in ("warn", "FAIL") else ""
        text.append(f"{finding.status:4}  {finding.name}: {finding.text}{remedy}".replace("\n", " ").rstrip())
    return text


def failed(findings: Iterable[Finding]) -> bool:
    """Whether a check failed."""
    return any(finding.status == "FAIL" for finding in findings)


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the findings; return 1 if a check fails, else 0."""
    findings = check(configuration, plans=check_plans(args.plans, configuration) if args.plans else ())
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines(findings)))
    return int(failed(findings))
