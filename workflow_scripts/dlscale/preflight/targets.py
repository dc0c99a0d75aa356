"""Typed targets: the names that a word may have, for `dlscale run`, `dlscale why` and a plain `snakemake`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from dlscale.config.resolve import Configuration
from dlscale.core.errors import UserError, of_another, unknown

#: Begins a target's name, and the name of its kind in words.
KINDS = {"plan": "plan", "data": "dataset", "study": "study"}


@dataclass(frozen=True)
class Target:
    """A target, with the plans and datasets that it names or is a part of."""

    name: str  #: As Snakemake knows it.
    plans: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()


def studies(configuration: Configuration) -> dict[str, list[str]]:
    """Return the target plans of each study that has any."""
    found: dict[str, list[str]] = {}
    for plan in configuration.workflow.targets:
        found.setdefault(configuration.workflow.plans[plan].study, []).append(plan)
    return found


def read(word: str, configuration: Configuration) -> Target | None:
    """Return the target that a word names: a file of results, or plan_NAME, data_NAME, study_NAME; None if neither.

    An unknown name, or a plan without any run for this machine, is a `UserError` with the nearest name.
    """
    results = Path(configuration.workflow.results)
    path = Path(word)
    if path.is_absolute() and path.is_relative_to(results.resolve()):
        path = results / path.relative_to(results.resolve())
    if path.is_relative_to(results):
        parts = path.relative_to(results).parts
        if len(parts) > 2 and parts[0] == "plans":
            return Target(str(path), plans=(_known(word, "plan", parts[1], configuration),))
        datasets = parts[1:2] if len(parts) > 2 and parts[0] == "data" else ()
        return Target(str(path), datasets=datasets)
    what, _, name = word.partition("_")
    if not (what in KINDS and name and re.fullmatch(r"[\w-]+", word)):
        return None
    name = _known(word, what, name, configuration)
    if what == "data":
        return Target(word, datasets=(name,))
    if what == "study":
        return Target(word, plans=tuple(studies(configuration)[name]))
    if not configuration.plans[name]:
        lacking = "; ".join(f"{run}: {what}" for run, what in configuration.left_out[name].items())
        raise UserError(f"{word}: no run of it can be on this machine ({lacking})")
    return Target(word, plans=(name,))


def typed(word: str, configuration: Configuration) -> Target:
    """Return the target that a user's word names: as `read`, or a plan by its name alone, `all` or `image`."""
    if word in ("all", "image"):
        return Target(word)
    if found := read(f"plan_{word}" if word in configuration.plans else word, configuration):
        return found
    if "/" in word:
        results = configuration.workflow.results
        raise UserError(f"{word}: no target; the files that can be made are in {results}/")
    if "." in word:
        raise UserError(f"{word}: no target is called so; a plan is named alone, a setting is typed as {word}=VALUE")
    names = [*configuration.plans, "all", "image", *(f"data_{name}" for name in configuration.workflow.datasets)]
    raise UserError(f"{word}: {unknown('target', word, names)}")


def asked(words: Iterable[str], configuration: Configuration) -> list[Target]:
    """Return the targets among the words of a call of Snakemake; options, and files of such names, are none."""
    found = list[Target]()
    for word in words:
        try:
            target = read(word, configuration)
        except UserError:
            if Path(word).exists() and not Path(word).is_relative_to(configuration.workflow.results):
                continue
            raise
        found += [target] if target else []
    return found


def _known(word: str, what: str, name: str, configuration: Configuration) -> str:
    """Return a name that is known, or refuse it; where it has results, the message says where those are from."""
    workflow = configuration.workflow
    every: dict[str, Collection[str]] = {"plan": configuration.plans, "data": workflow.datasets}
    known = every.get(what) or studies(configuration)
    if name in known:
        return name
    file = {"plan": f"plans/{name}/plan.yaml", "data": f"data/{name}/manifest.json"}.get(what)
    other = of_another(Path(workflow.results, file)) if file else ""
    raise UserError(f"{word}: {unknown(KINDS[what], name, known)}{other}")
