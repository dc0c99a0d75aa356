"""`dlscale report --sheet PLAN`: write the evidence for a request for computing time on two pages.

The sheet is a page (`sheet.html`) and a PDF file (`sheet.pdf`) in the folder of the plan, with the same content.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from dlscale.config.places import check_plans
from dlscale.config.resolve import Configuration
from dlscale.core.errors import UserError
from dlscale.core.files import atomic_write, write_text
from dlscale.core.paths import Results
from dlscale.core.schema import Strict
from dlscale.core.settings import read_yaml, validate
from dlscale.extensions.sheet import draw, facts, tables
from dlscale.extensions.sheet.evidence import Evidence
from dlscale.extensions.sheet.parts import Part, counts
from dlscale.results import read_plan

#: Parts of the first page; all other parts are on the second page.
FIRST = "problem", "machine", "scaling", "efficiency"


def parts(evidence: Evidence) -> list[Part]:
    """Return the parts of the sheet, in order."""
    grids, curves = tables.scaling(evidence)
    return [
        Part("problem", "Problem and model", [*facts.problem(evidence)]),
        Part("machine", "Machine and software", [*facts.machine(evidence)]),
        Part("scaling", "Strong and weak scaling", [*tables.unscaled(evidence)], grids, curves),
        Part("efficiency", "Efficiency on the devices", [*facts.efficiency(evidence)]),
        Part("target", "Time and node-hours to the target", [*tables.goal(evidence)], [*tables.trainings(evidence)]),
        Part("energy", "Energy", [*facts.energy(evidence)]),
        Part("memory", "Memory", [*facts.memory(evidence)]),
        Part("storage", "Storage, input and output", [*facts.storage(evidence)]),
        Part("request", "Derivation of the requested hours", [*facts.request(evidence)]),
        Part("commands", "Exact commands", commands=facts.commands(evidence)),
    ]


class Question(Strict):
    """A technical question of a form, in our words."""

    ask: str
    parts: list[str] = Field([], description="Parts of the sheet that answer the question.")
    applicant: str = Field("", description="Part of the answer that only the applicant knows.")

    @model_validator(mode="after")
    def _is_mapped(self) -> Question:
        if not (self.parts or self.applicant):
            raise ValueError(f"{self.ask}: expected parts of the sheet, or applicant")
        return self


class Form(Strict):
    """A form for requests for computing time."""

    title: str
    sources: list[str] = Field(min_length=1)
    read: str = Field(description="Date of reading, and the parts of the form that were read.")
    questions: list[Question] = Field(min_length=1)


def forms() -> dict[str, Form]:
    """Return the forms in `forms.yaml`, by name."""
    path = Path(__file__).with_name("forms.yaml")
    return validate(dict[str, Form], read_yaml(path), str(path))


def answer(question: Question, made: Sequence[Part]) -> dict[str, Any]:
    """Return a question with the titles of the parts that answer it, and with all open points."""
    here = [part for part in made if part.key in question.parts]
    left = [f"{fact.label}: {fact.note}" for part in here for fact in part.open]
    applicant = [f"the applicant: {question.applicant}"] if question.applicant else []
    return {"ask": question.ask, "parts": [part.title for part in here], "open": [*applicant, *left]}


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Write the sheet of `args.plans`; print its paths, and the number of answered questions of each form."""
    names = check_plans(args.plans, configuration)
    assert configuration
    for flag in ("production", "trainings"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise UserError(f"--{flag}: got {value}; expected at least 1")
    paths, lacking = Results(configuration.workflow.results), list[str]()
    for name in names:
        if not Path(paths.plan(name)).exists():
            raise UserError(f"{name} has no results yet. Run dlscale run {name}")
    plans = [read_plan(paths.plan(name), lacking=lacking) for name in names]
    if not plans[0].runs:
        raise UserError(f"{names[0]} has no results yet. Run dlscale run {names[0]}")
    evidence = Evidence(plans, configuration, args, lacking)
    made = parts(evidence)
    answers = {form.title: [answer(each, made) for each in form.questions] for form in forms().values()}
    folder = Path(paths.plan(names[0])).parent
    pages = [[part for part in made if (part.key in FIRST) is first] for first in (True, False)]
    title = plans[0].title
    write_text(folder / "sheet.html", draw.html(title, pages, counts(made), answers))
    with atomic_write(folder / "sheet.pdf") as temporary:
        fits = draw.pdf(temporary, title, pages, counts(made), answers)
    if args.json:
        print(json.dumps({"html": str(folder / "sheet.html"), "pdf": str(folder / "sheet.pdf"), "forms": answers}))
        return 0
    for form, asked in answers.items():
        print(f"{form}: {draw.summary(asked)}")
    if not fits:
        print("The PDF is cut off, because a page is too full. Name fewer plans, or print sheet.html instead")
    print(f"Sheet: {(folder / 'sheet.html').resolve()}\nPDF: {(folder / 'sheet.pdf').resolve()}")
    return 0
