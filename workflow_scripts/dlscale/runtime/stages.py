"""The stages, and which modules each one runs for a given dataset or run."""

from __future__ import annotations

from dlscale.runtime import plugins
from dlscale.runtime.schema.dataset import Dataset
from dlscale.runtime.schema.run import RunCore

#: Entry module of each stage; its `main(args)` does the work.
STAGES = {
    "image": "dlscale.runtime.image",
    "configure": "dlscale.runtime.configure",
    "acquire": "dlscale.data.acquire",
    "preprocess": "dlscale.data.preprocess",
    "assemble": "dlscale.data.assemble",
    "describe": "dlscale.data.describe",
    "preview": "dlscale.data.preview",
    "train": "dlscale.train.train",
    "throughput": "dlscale.measure.throughput",
    "collect": "dlscale.report.collect",
    "report": "dlscale.report.report",
}


def modules(stage: str, subject: Dataset | RunCore | None = None) -> list[str]:
    """Return the modules from which the stage reaches all the code that decides its results for `subject`.

    For acquisition that is the simulator, or the reader of a store, alone: what comes from elsewhere does
    not change with the code that carries it, and is not fetched again when that is edited.
    """
    if isinstance(subject, RunCore):
        return [STAGES[stage], plugins.study(subject.study), plugins.loader(subject.loader.kind)]
    if subject is None:
        return [STAGES[stage]]
    if stage == "acquire":
        return [module for module in [plugins.acquisition(subject.kind, subject.source.kind)] if module]
    return [STAGES[stage], plugins.reader(subject.kind)]
