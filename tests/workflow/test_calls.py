"""While one process writes results, Snakemake calls that would change results are refused; other calls are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlscale.core.process import only_writer
from dlscale.core.progress import job_seconds
from tests.conftest import ROOT, once
from tests.waiting import PATIENCE
from tests.workflow.conftest import Tree

#: Arguments of calls that change results.
CHANGING = [
    *("--cores 1", "-c1 -sSnakefile", "-sSnakefile -kj1", "-c1 -dnew/../", "-c1 --config name=n", "-c1 --until all"),
    *("-c1 --touch", "-tj1", "-c1 --report own.html --report-after-run", "-c1 --rerun-triggers input"),
    *("--delete-all-output", "--delete-temp-output", "--cleanup-metadata x", "--cleanup-shadow"),
]
#: Arguments of calls that change no results.
LOOKING = [
    *("-n", "-kn", "-nj1", "-nc1 -sSnakefile", "--dry-run", "--dryrun", "-n --touch", "-nq", "-n --delete-all-output"),
    *("--unlock", "--lint", "--report own.html", "--summary", "--detailed-summary", "--list-rules"),
    *("--list", "-l", "--list-target-rules", "--dag", "--rulegraph", "--filegraph", "--d3dag", "--list-changes code"),
    *("--list-input-changes", "--list-params-changes", "--list-untracked", "--print-compilation", "--profile dry"),
    "--executor dryrun",
]

SNAKEFILE = f"""
include: "{ROOT}/rules/controller.smk"
include: "{ROOT}/rules/display.smk"
include: "{ROOT}/rules/locks.smk"
from types import SimpleNamespace
SITE, RESULTS, ASKED, ASKED_PLANS, ASKED_DATASETS = SimpleNamespace(scheduler=None), "results", [1], [], []
CONFIG, PLANS = SimpleNamespace(secrets=None), SimpleNamespace(datasets=lambda plans: [])
prepare_methods()
rule all:
    output: "results/made"
    shell: "touch {{output}}"
"""

#: Program that runs each call from its standard input in a fork, because importing Snakemake is slow.
CALLS = """
import json, os, sys, tempfile
import snakemake.cli
from dlscale.launch import slurm
from dlscale.preflight import run, status
snakemake.cli.get_argument_parser()
for words in json.load(sys.stdin):
    with tempfile.TemporaryFile() as output:
        if not (child := os.fork()):
            os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
            sys.argv[1:] = words.split()
            try:
                snakemake.cli.main(sys.argv[1:])
            except SystemExit as ended:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(ended.code if isinstance(ended.code, int) else 1)
        status_ = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps([words, status_, output.read().decode()]), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, int]]:
    """Return (status, output, process of the lock holder) for each call; another process writes during all calls."""

    def call(folder: Path) -> None:
        (folder / "new").mkdir(parents=True)
        (folder / "Snakefile").write_text(SNAKEFILE)
        (folder / "dry").mkdir()
        (folder / "dry/profile.yaml").write_text("dry-run: true\ncores: 1\n")
        with only_writer(folder / "results"):
            done = subprocess.run(
                [sys.executable, "-c", CALLS],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts")},
                input=json.dumps(CHANGING + LOOKING),
                capture_output=True,
                text=True,
                timeout=2 * PATIENCE,
            )
        assert done.returncode == 0, done.stderr
        assert [path.name for path in (folder / "results").iterdir()] == [".lock"]
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        (folder / "outcomes.json").write_text(json.dumps({words: (*row, os.getpid()) for words, *row in rows}))

    return json.loads((once(tmp_path_factory, "calls", call) / "outcomes.json").read_text())


@pytest.mark.parametrize("words", CHANGING + LOOKING)
def test_whether_a_call_makes_anything(outcomes: dict[str, tuple[int, str, int]], words: str) -> None:
    status, output, holder = outcomes[words]
    refused = status == 2 and output.splitlines()[-1].startswith(f"results: in use by process {holder} on ")
    assert refused == (words in CHANGING), output
    assert ("in use by" in output) == (words in CHANGING) and "Traceback" not in output, output


@pytest.mark.timeout(240)
@pytest.mark.parametrize("trap", [Path.symlink_to, lambda file, private: os.mkfifo(file)])
def test_a_link_or_pipe_in_place_of_a_benchmark_is_replaced(
    make_tree: Callable[..., Tree], tmp_path: Path, trap: Callable[[Path, Path], Any]
) -> None:
    """Another user may create a link or pipe; Snakemake would overwrite the link's target, or wait for a reader."""
    tree = make_tree()
    (private := tmp_path / "private").write_text("mine")
    (benchmark := tree.results / "benchmarks/configure/plans/again.tsv").parent.mkdir(parents=True)
    trap(benchmark, private)
    plan = tree.results / "plans/again/plan.yaml"
    done = tree.snakemake("--cores", "1", "--", str(plan.relative_to(tree.path)))
    assert done.status == 0 and plan.exists(), done.output[-3000:]
    assert private.read_text() == "mine" and job_seconds(benchmark) is not None
