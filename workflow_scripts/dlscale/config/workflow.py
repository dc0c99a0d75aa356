"""The configuration file as a whole."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializeAsAny, create_model, field_validator

from dlscale.config.dataset import DatasetSettings, dataset_type
from dlscale.config.plan import Plan, plan_class, study_settings
from dlscale.config.site import Site
from dlscale.core.schema import Name, NonNegativeFloat, Strict


class ReportPage(Strict):
    """The report's page."""

    title: str = Field("dlscale report", description="Heading of the page.")


class Budget(Strict):
    """What one call of the workflow may cost, as estimated; more is refused before anything is submitted."""

    gpu_hours: NonNegativeFloat | None = Field(None, description="GPUs x hours.")
    node_hours: NonNegativeFloat | None = Field(None, description="Nodes x hours.")
    charged_hours: NonNegativeFloat | None = Field(None, description="Node-hours times the charge of their QOS.")


#: Bytes of a name, of the 255 that file systems take: some files beside it have longer ones.
LONGEST = 200

DATASETS = "Datasets by name, beside those that the studies ship."
STUDIES = (
    "By study: changes to its default run settings; or, to add a study, the path of its Python file, which has a YAML "
    "file of the same name beside it."
)


class Workflow(Strict):
    """All that `snakemake` reads from `config.yaml`, `--configfile` and `--config`."""

    results: str = Field(
        "results",
        pattern=r"^[^{}*?\[\]\n]+$",  # braces and stars are wildcards to Snakemake
        description="Folder of everything that is produced.",
    )

    @field_validator("results")
    @classmethod
    def _can_be_made(cls, results: str) -> str:
        if any(len(name.encode()) > LONGEST for name in results.split("/")):
            raise ValueError(f"a folder's name has more than {LONGEST} bytes, which file systems refuse; shorten it")
        return results

    targets: list[Name] = Field(min_length=1, description="Plans that a bare `snakemake` runs and reports.")
    datasets: dict[Name, SerializeAsAny[DatasetSettings]] = Field({}, description=DATASETS)
    studies: dict[Name, Any] = Field({}, description=STUDIES)
    plans: dict[Name, Plan] = Field({}, description="Plans by name, beside those that the studies ship.")
    report: ReportPage = ReportPage()
    site: Site = Field(Site(), description="Where and how commands run; a profile's site.yaml says it.")
    budget: Budget = Budget()


def workflow_class(*, of_runs: bool = True) -> type[Workflow]:
    """Return the class of configurations with what is registered now.

    Parameters
    ----------
    of_runs
        Whether it names the keys of runs, too, as the JSON schema and messages need: making it then takes as long as
        reading all that is configured.
    """
    own: dict[str, Any] = {
        "datasets": (dict[Name, dataset_type()], Field({}, description=DATASETS)),  # type: ignore[misc]
    }
    if of_runs:
        plan: Any = plan_class()
        own["studies"] = (dict[Name, study_settings()], Field({}, description=STUDIES))  # type: ignore[misc]
        own["plans"] = (dict[Name, plan], Workflow.model_fields["plans"])
    return create_model("Workflow", __base__=Workflow, __doc__=Workflow.__doc__, **own)
