"""The stages, and which modules each one runs for a given dataset or run."""

from __future__ import annotations

from dlscale.runtime import plugins
from dlscale.runtime.schema.dataset import Dataset
from dlscale.runtime.schema.run import RunCore

#: Entry module of each stage; its `main(args)` does the work.
STAGES = {
    "configure": "dlscale.runtime.configure",
    "acquire": "dlscale.data.acquire",
    "preprocess": "dlscale.data.preprocess",
    "assemble": "dlscale.data.assemble",
    "describe": "dlscale.data.describe",
    "train": "dlscale.train.train",
    "throughput": "dlscale.measure.throughput",
    "collect": "dlscale.report.collect",
    "report": "dlscale.report.report",
}


def modules(stage: str, subject: Dataset | RunCore | None = None) -> list[str]:
    """Return the modules from which the stage reaches all the code that it runs for `subject`."""
    found: list[str | None] = [STAGES[stage]]
    if isinstance(subject, RunCore):
        found += [plugins.study(subject), plugins.loader(subject)]
    elif subject is not None:
        found += [plugins.acquisition(subject) if stage == "acquire" else plugins.kind(subject)]
    return [module for module in found if module]
