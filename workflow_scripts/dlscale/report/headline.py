"""What a plan came to, in a line: the end of a call says it before its page is opened."""

from __future__ import annotations

from dlscale.core.text import number, percent, unit
from dlscale.report import glance
from dlscale.report.results import PlanResult


def line(plan: PlanResult) -> str:
    """Return a plan's fastest run, and how good its best one is."""
    return f"{plan.name}: {'; '.join(filter(None, [_fast(plan), _good(plan)])) or 'nothing was measured'}"


def _fast(plan: PlanResult) -> str:
    found = glance.speed(plan)
    if not found:
        return ""
    told = f"{number(found['speed'])} samples/s"
    if found["gain"]:
        return f"{found['fastest']} is fastest, {found['gain'].words} as fast as {found['first']}, {told}"
    return f"{told}, no run is faster beyond noise" if len(plan.runs) > 1 and not found["alone"] else told


def _good(plan: PlanResult) -> str:
    found = glance.quality(plan)
    if not found:
        return ""
    lead, of = found["lead"], f" ({found['run']})" if len(plan.runs) > 1 else ""
    if lead and lead["skill"] is not None:
        more = "less" if lead["skill"] >= 0 else "more"
        return f"{percent(abs(lead['skill']))} {more} error than {lead['answer']}{of}"
    if lead:
        shown = f"{number(lead['value'])} {unit(lead['metric'].unit)}".strip()
        return f"{lead['metric'].full_title} {shown}{of}"
    return f"validation loss {number(found['last'].valid_loss)}{of}"
