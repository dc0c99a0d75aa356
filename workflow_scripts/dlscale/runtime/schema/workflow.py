"""The configuration file as a whole."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat

from dlscale.runtime.schema.base import Name, Strict
from dlscale.runtime.schema.dataset import Dataset
from dlscale.runtime.schema.plan import Plan, Settings
from dlscale.runtime.schema.site import Site


class ReportPage(Strict):
    """The report's page."""

    title: str = Field("dlscale report", description="Heading of the page.")


class Budget(Strict):
    """What one call of the workflow may cost, as estimated; more is refused before anything is submitted."""

    gpu_hours: NonNegativeFloat | None = None
    node_hours: NonNegativeFloat | None = None
    charged_hours: NonNegativeFloat | None = Field(None, description="Node-hours times the charge of their QOS.")


class Workflow(Strict):
    """All that `snakemake` reads from `config.yaml`, `--configfile` and `--config`."""

    results: str = Field(
        "results",
        pattern=r"^[^{}*?\[\]\n]+$",  # braces and stars are wildcards to Snakemake
        description="Folder of everything that is produced.",
    )
    targets: list[Name] = Field(min_length=1, description="Plans that a bare `snakemake` runs and reports.")
    datasets: dict[Name, Dataset] = Field({}, description="Datasets by name, beside those that the studies ship.")
    studies: dict[Name, Settings] = Field({}, description="Changes to a study's default run settings, by study.")
    plans: dict[Name, Plan] = Field({}, description="Plans by name, beside those that the studies ship.")
    report: ReportPage = ReportPage()
    site: Site = Field(Site(), description="Where and how commands run; a profile's site.yaml says it.")
    budget: Budget = Budget()
