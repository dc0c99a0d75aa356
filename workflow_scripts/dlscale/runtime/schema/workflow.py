"""The configuration file as a whole."""

from __future__ import annotations

from pydantic import Field

from dlscale.runtime.schema.base import Name, Strict
from dlscale.runtime.schema.dataset import Dataset
from dlscale.runtime.schema.plan import Plan, Settings


class ReportPage(Strict):
    """The report's page."""

    title: str = Field("dlscale report", description="Heading of the page.")


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
