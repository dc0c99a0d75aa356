"""`dlscale new-study` and the notebook that leads to this command: the printed commands work.

The tests replace the printed `make schema` by the command of this target.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from tests.conftest import ROOT
from tests.waiting import PATIENCE
from tests.workflow.conftest import Tree

NOTEBOOK = ROOT / "docs/examples/from_notebook_to_report.ipynb"


def call(tree: Tree, command: str) -> str:
    """Run a command like a user, in the tree's environment; return the command's output."""
    shell, where = ["bash", "-c", command], {"cwd": tree.path, "env": tree.environment}
    done = subprocess.run(shell, capture_output=True, text=True, timeout=4 * PATIENCE, **where)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{(done.stdout + done.stderr)[-5000:]}"
    return done.stdout + done.stderr


def told(text: str) -> list[str]:
    """Return the commands that `new-study` prints as next steps."""
    return re.findall(r"^  (\S.*)$", text.partition("\nNext")[2], re.MULTILINE)


def check_ladder(results: Path, name: str, page: Path) -> None:
    """Check that a ladder has passed all stages, has learnt, and appears on the page."""
    plan = results / f"plans/{name}_ladder"
    table = pd.read_csv(plan / "summary.csv").set_index("run")
    assert {"baseline", "fused"} <= set(table.index)
    assert (table["rmse"] < 0.5 * table["rmse_of_naive"]).all() and (table["full_samples_per_second"] > 0).all()
    assert len(pd.read_csv(plan / "baseline/profile/profile_summary.csv")) > 3
    assert f"{name}_ladder" in page.read_text() and "0 runs" not in page.read_text()


@pytest.mark.slow
@pytest.mark.long
def test_a_new_study_goes_through_ladder_profile_and_page(make_tree: Callable[..., Tree]) -> None:
    """A new study runs unchanged. A second call does nothing. A change of its network reruns no data stage."""
    tree = make_tree()
    tests, look, run = told(call(tree, "dlscale new-study gentle_slopes --images"))
    assert "7 passed" in call(tree, tests)
    call(tree, look)
    call(tree, run)
    results = tree.path / "results/gentle_slopes"
    check_ladder(results, "gentle_slopes", results / "report/index.html")
    assert "Nothing to be done" in call(tree, run)
    model = tree.path / "gentle_slopes/gentle_slopes_model.py"
    model.write_text(model.read_text().replace("nn.LeakyReLU()", "nn.LeakyReLU(0.1)"))
    planned = call(tree, f"{run} -n -p")
    assert "Train gentle_slopes_ladder.baseline" in planned and "Preprocess" not in planned


@pytest.mark.long
@pytest.mark.slow
def test_a_new_study_inside(make_tree: Callable[..., Tree]) -> None:
    """A new study in the package is in the schema, passes the tests of all studies, and its ladder runs."""
    tree = make_tree()
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tree.path)
    shutil.copytree(ROOT / "tests", tree.path / "tests", symlinks=True)
    schema, tests, run = told(call(tree, "dlscale new-study quokka --inside"))
    assert schema == "make schema"
    file = "workflow_scripts/dlscale/config/config.schema.json"
    call(tree, f"dlscale schema >{file}.new && mv {file}.new {file}")
    assert '"quokka"' in (tree.path / file).read_text()
    assert "7 passed" in call(tree, f"{tests} -p no:cacheprovider -n 0")
    call(tree, "python -m pytest -n 0 tests/test_architecture.py -k 'quokka or named_outside or tiny'")
    call(tree, run)
    check_ladder(tree.path / "results", "quokka", tree.path / "results/plans/quokka_ladder/report.html")


def test_the_notebook_is_stored_without_outputs() -> None:
    """The notebook has no outputs, because they would depend on machine and date, and its code is valid Python."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            compile(cell.source, cell.id, "exec")


@pytest.mark.long
@pytest.mark.slow
def test_the_notebook(make_tree: Callable[..., Tree]) -> None:
    """All cells run, and the study's losses are similar to those of the notebook's plain PyTorch loop."""
    nbclient = pytest.importorskip("nbclient")
    tree = make_tree()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=4 * PATIENCE, kernel_name="python3", resources={"metadata": {"path": str(tree.path)}}
    )
    client.execute(env=tree.environment)
    work = tree.path / "results/notebook"
    check_ladder(work / "results", "edges", work / "results/report/index.html")
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    table = next(data["text/plain"] for data in shown if "the loop above" in data["text/plain"])
    losses = {run: float(loss) for run, loss in re.findall(r"^(.*\S) +([\d.e-]+)$", table, re.MULTILINE)}
    assert 0.25 < losses["baseline"] / losses["the loop above"] < 4, (
        "the losses must agree within a factor of 4; seed and order differ"
    )
