"""Paths of all results, defined once for rules, commands and pages.

An omitted argument becomes a Snakemake wildcard with the argument's name. For example,
`Results("results").run("metrics.jsonl")` is `results/plans/{plan}/{run}/metrics.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Results(NamedTuple):
    """Paths in a results folder."""

    folder: str | Path

    # ---- datasets ------------------------------------------------------------------------------------

    def raw_file(self, file: str = "{file}", dataset: str = "{dataset}") -> str:
        """Return the path of a raw file that the stage `acquire` makes."""
        return f"{self.folder}/data/{dataset}/source/{file}"

    def piece(self, part: str = "{split}/{part}", piece: int | str = "{piece}", dataset: str = "{dataset}") -> str:
        """Return the path of a preprocessed piece of a dataset part."""
        return f"{self.folder}/data/{dataset}/pieces/{part}-{piece}.h5"

    def part(self, part: str = "{split}/{part}", dataset: str = "{dataset}") -> str:
        return f"{self.folder}/data/{dataset}/{part}.h5"

    def manifest(self, dataset: str = "{dataset}") -> str:
        return f"{self.folder}/data/{dataset}/manifest.json"

    def stats(self, dataset: str = "{dataset}") -> str:
        """Return the folder of a dataset's statistics."""
        return f"{self.folder}/data/{dataset}/stats"

    def preview(self, dataset: str = "{dataset}") -> str:
        return f"{self.folder}/data/{dataset}/preview.png"

    def dataset_settings(self, dataset: str = "{dataset}") -> str:
        """Return the path of the dataset settings that the stage `describe` used."""
        return f"{self.folder}/data/{dataset}/config.yaml"

    # ---- runs ----------------------------------------------------------------------------------------

    def run(self, file: str = "", plan: str = "{plan}", run: str = "{run}") -> str:
        """Return the path of a file of a run.

        Without a file, return the path of the run's folder.
        """
        return f"{self.folder}/plans/{plan}/{run}{'/' * bool(file)}{file}"

    def checkpoints(self, plan: str, run: str) -> str:
        """Return the folder of a run's checkpoints.

        The folder is not an output of a rule, so Snakemake keeps it if the job fails.
        """
        return f"{self.folder}/checkpoints/{plan}/{run}"

    def program(self, revision: str = "{revision}") -> str:
        """Return the folder of an external program's code, fetched at a Git revision."""
        return f"{self.folder}/programs/{revision}"

    # ---- plans ---------------------------------------------------------------------------------------

    @property
    def plans(self) -> str:
        return f"{self.folder}/plans"

    def plan(self, plan: str = "{plan}") -> str:
        """Return the path of a plan's record (`PlanRecord`)."""
        return f"{self.folder}/plans/{plan}/plan.yaml"

    def table(self, plan: str = "{plan}") -> str:
        return f"{self.folder}/plans/{plan}/summary.csv"

    def rung(self, plan: str = "{plan}", rung: int | str = "{rung}") -> str:
        """Return the path of a file that lists the trials in one rung of successive halving."""
        return f"{self.folder}/plans/{plan}/rung{rung}.json"

    def plan_page(self, plan: str = "{plan}") -> str:
        return f"{self.folder}/plans/{plan}/report.html"

    def references(self) -> list[str]:
        """Return the paths of the records of imported logs, without hidden folders (incomplete imports)."""
        return sorted(map(str, Path(self.folder).glob("references/[!.]*/reference.json")))

    # ---- jobs ----------------------------------------------------------------------------------------

    def log(self, stage: str, *names: str) -> str:
        return f"{self.folder}/logs/{'/'.join([stage, *names])}.log"

    def benchmark(self, stage: str, *names: str) -> str:
        """Return the path of Snakemake's benchmark file, which contains a job's duration."""
        return f"{self.folder}/benchmarks/{'/'.join([stage, *names])}.tsv"
