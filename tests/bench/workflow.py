"""Seconds that the workflow itself takes: its graph, finding nothing to do, the command line's help."""

from __future__ import annotations

import copy
import subprocess
import sys

from tests.bench.measure import Options, Row, in_turns, seconds
from tests.conftest import COSMO, COSMO_RUN, ERA5, ERA5_RUN
from tests.workflow.conftest import Tree, copy_tree

RUNS = 300


def graph(options: Options) -> list[Row]:
    """Times of whole processes; what they are held against is a limit, or the import that they cannot do without."""
    config = {
        "targets": ["years"],
        "datasets": {
            "boxes": COSMO,
            "years": {**ERA5, "source": {**ERA5["source"], "days": 3, "train": [2001], "valid": [2002]}},
        },
        "plans": {
            "many": {
                "study": "cosmo_unet",
                "settings": {**COSMO_RUN, "dataset": "boxes"},
                "runs": {f"run{number}": {"seed": number} for number in range(RUNS)},
            },
            "years": {
                "study": "era5_vit",
                "measure": ["train"],
                "settings": {**copy.deepcopy(ERA5_RUN), "dataset": "years"},
                "runs": {"vit": {}},
            },
        },
    }
    tree = Tree(options.folder / "repository", config)
    copy_tree(tree.path)
    tree.write()

    def call(*command: str) -> None:
        environment = {key: value for key, value in tree.environment.items() if key != "IMPORTS"}
        done = subprocess.run(
            [sys.executable, *command], cwd=tree.path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    snakemake = ["-m", "snakemake", "--configfile", "tiny.yaml"]
    contestants = {
        "import": lambda: seconds(lambda: call("-c", "import snakemake.cli")),
        "graph": lambda: seconds(lambda: call(*snakemake, "-n", "--quiet", "--", "plan_many")),
        "python": lambda: seconds(lambda: call("-c", "pass")),
        "help": lambda: seconds(lambda: call("-m", "dlscale", "train", "--help")),
    }
    if not options.quick:
        call(*snakemake, "--cores", "2", "--", "all")
        contestants["nothing"] = lambda: seconds(lambda: call(*snakemake, "--cores", "2", "--", "all"))
    found = in_turns(options.repetitions, contestants)
    rows = [
        Row(
            f"graph of {RUNS} runs (limit 10 s)",
            "s",
            found["graph"],
            "importing Snakemake",
            found["import"],
            {"runs": RUNS},
        ),
        Row("dlscale train --help (limit 1 s)", "s", found["help"], "starting Python", found["python"], {}),
    ]
    if "nothing" in found:
        rows.append(
            Row("nothing to be done (limit 3 s)", "s", found["nothing"], "importing Snakemake", found["import"], {})
        )
    return rows
