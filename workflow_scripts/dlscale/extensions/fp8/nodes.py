"""Check whether a site's GPUs have 8-bit products; a module without torch, because login nodes import it."""

from __future__ import annotations

from collections.abc import Collection

from dlscale.config.resolve import Configuration
from dlscale.core.machine import missing
from dlscale.core.text import listed
from dlscale.launch import launcher
from dlscale.preflight.probe import Finding


def probe_gpus(configuration: Configuration, plans: Collection[str] | None = None) -> list[Finding]:
    """Report runs in 8 bits if the site lacks suitable GPUs or torchao.

    Nothing is reported for other nodes without `site.provides`, or if runs may use a CPU, which emulates 8 bits.
    """
    workflow = configuration.workflow
    site, scheduler = workflow.site, workflow.site.scheduler
    elsewhere = bool(scheduler or site.start or site.engine != "none")
    runs = [
        f"{plan}.{name}"
        for plan in (workflow.targets if plans is None else plans)
        for name, resolved in configuration.plans[plan].items()
        if resolved.run.precision.startswith("fp8") and not resolved.run.program
    ]
    if not runs or launcher.device(site) != "cuda" or (elsewhere and site.provides is None):
        return []
    if not (lacking := missing(["fp8"], site.provides if elsewhere else None)):
        return []
    gpu = scheduler.gpu_nodes.gpu if scheduler else None
    where = f"the site's nodes{f' ({gpu})' if gpu else ''}" if elsewhere else "this machine"
    text = f"{listed(runs)}: needs {lacking[0]}, which {where} must provide"
    instead = "use precision bf16" + ", or add fp8 to site.provides if the nodes have both" * elsewhere
    return [Finding("precision fp8", "FAIL", text, instead)]
