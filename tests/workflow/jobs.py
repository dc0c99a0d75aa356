"""Jobs of the tiny workflow by dataset, derived from the registry; tests compare them with the executed jobs."""

from __future__ import annotations

import functools

from dlscale.config.dataset import dataset_type
from dlscale.core.settings import validate
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.data import parts
from tests.workflow.conftest import CONFIG, PAGED


def _data_jobs(name: str) -> dict[str, list[str]]:
    """Return the jobs that make a dataset, by stage."""
    dataset = validate(dataset_type(), CONFIG["datasets"][name])
    labels = [f"{name} {part.split} {part.name}" for part in parts.parts(dataset)]
    made = [] if parts.kind_of(dataset).prepared(dataset) else labels
    raws = [raw.name for raw in parts.raws(dataset).values() if parts.acquired(dataset, raw)]
    return {
        "acquire": [f"acquire {name} {raw}" for raw in raws],
        "preprocess": [f"preprocess {label} {piece}" for label in made for piece in range(dataset.pieces)],
        "assemble": [f"assemble {label}" for label in made],
        "describe": [f"describe {name}"],
        "preview": [f"preview {name}"],
    }


#: Jobs of each dataset, by stage. `boxes` serves cosmo.unet, cosmo.ceiling (synthetic loader), again.faster (training
#: only) and tuned.mine; `years` serves era5.vit. The jobs of `waves` are listed literally, because the process of the
#: tests does not register the external study.
DATA = {
    **{name: _data_jobs(name) for name in CONFIG["datasets"] if name != "waves"},
    "waves": {
        "acquire": [],
        "preprocess": ["preprocess waves train waves 0", "preprocess waves valid waves 0"],
        "assemble": ["assemble waves train waves", "assemble waves valid waves"],
        "describe": ["describe waves"],
        "preview": ["preview waves"],
    },
}
ALL = tuple(DATA)
#: Datasets that are preprocessed; the other datasets are used unchanged.
PREPROCESSED = tuple(name for name in ALL if DATA[name]["preprocess"])
#: Dataset → study of the runs on this dataset.
STUDY: dict[str, str] = {}
#: Dataset → (plan, run, stages) of each run on this dataset, without runs that are reused from another plan.
RUNS: dict[str, list[tuple[str, str, list[str]]]] = {name: [] for name in ALL}
_USUAL = [stage for stage in RUN_STAGES if STAGES[stage].usual]
#: Plans that train runs.
TRAINING: set[str] = set()
PLANS: dict[str, list[str]] = {name: [] for name in ALL}
for _plan, _settings in CONFIG["plans"].items():
    _dataset = _settings["settings"]["dataset"]
    STUDY[_dataset] = _settings["study"]
    _measure = _settings.get("measure", ["tune"] if _settings.get("kind") == "tune" else _USUAL)
    PLANS[_dataset].append(_plan)
    TRAINING.update([_plan] if "train" in _measure else [])
    RUNS[_dataset] += [
        (_plan, run, [stage for stage in _measure if run in _settings.get("only", {}).get(stage, [run])])
        for run, own in _settings["runs"].items()
        if "use" not in own
    ]
REPORTS = ["report", *(f"report_plan {plan}" for plan in PAGED)]
CONFIGURE = [f"configure_plan {plan}" for plan in CONFIG["plans"]]


def tables(*plans: str) -> list[str]:
    """Return the jobs that show the results of the given plans."""
    return [*(f"collect {plan}" for plan in plans), *pages(*plans), "report"]


def pages(*plans: str) -> list[str]:
    """Return the jobs that write the pages of the given plans; plans without a page are left out."""
    return [f"report_plan {plan}" for plan in plans if plan in PAGED]


def stage(name: str, *datasets: str) -> list[str]:
    """Return the jobs of a stage for all runs on the given datasets, and the jobs that show the stage's results."""
    jobs = [(plan, f"{name} {plan} {run}") for data in datasets for plan, run, stages in RUNS[data] if name in stages]
    return [*(job for _, job in jobs), *tables(*{plan for plan, _ in jobs})]


def trained(*datasets: str) -> list[str]:
    """Return the trainings on the given datasets and the jobs that show the results, also in plans that reuse runs."""
    return stage("train", *datasets) + tables(*(plan for name in datasets for plan in PLANS[name] if plan in TRAINING))


timed, tuned, profiled = (functools.partial(stage, name) for name in ("throughput", "tune", "profile"))


def runs(*datasets: str) -> list[str]:
    """Return all jobs of the runs on the given datasets."""
    return trained(*datasets) + timed(*datasets) + profiled(*datasets) + tuned(*datasets)


def since(first: str, *datasets: str) -> list[str]:
    """Return all jobs of the given datasets from stage `first` on, including the jobs of their runs."""
    order = list(DATA["boxes"])
    return [job for name in datasets for key in order[order.index(first) :] for job in DATA[name][key]] + runs(
        *datasets
    )


def previews(*datasets: str) -> list[str]:
    """Return the preview jobs of the given datasets, and the jobs of the pages that show the previews."""
    shown = pages(*(plan for name in datasets for plan in PLANS[name]))
    return [*(f"preview {name}" for name in datasets), *shown, "report"]


EVERYTHING = [*CONFIGURE, *since("acquire", *ALL)]
