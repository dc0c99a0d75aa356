"""How a call meets its user: what is typed, how it ends, and that it says so last."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.workflow.conftest import RESULTS, Tree
from tests.workflow.test_why import why


def test_what_is_typed_is_what_snakemake_is_told(make_tree: Callable[..., Tree]) -> None:
    """A plan by its name, a dotted key, files, and options of Snakemake's behind."""
    tree = make_tree()
    run = "python -m dlscale run --configfile tiny.yaml"
    typed = tree.shell(f"{run} era5 -n training.epochs=3")
    told = tree.shell(
        """snakemake -n --configfile tiny.yaml --config 'plans={"era5": {"settings": {"training": {"epochs": 3}}}}' """
        "-- plan_era5"
    )
    assert typed.returncode == told.returncode == 0, typed
    assert typed.stderr == told.stderr and typed.stdout == told.stdout
    assert why(typed.stderr)[0].startswith("data years (") and "until the end" in typed.stderr.splitlines()[-1]
    assert why(tree.shell(f"{run} plan_era5 -n training.epochs=3 --cores 1").stderr) == why(typed.stderr)


def test_a_call_is_shown(make_tree: Callable[..., Tree]) -> None:
    """How far it is, and what we say; not what Snakemake says of each job, which is in its log."""
    tree = make_tree()
    run = "python -m dlscale run --configfile tiny.yaml data_waves"
    done = tree.shell(run)
    assert done.returncode == 0 and done.stdout == "", done
    lines = done.stderr.splitlines()
    assert any(re.match(r"\d+\s% after .*; about .* left; \d+ of \d+ jobs", line) for line in lines)
    assert lines[-1] == f"Preview: {tree.results}/data/waves/preview.png"
    assert not any(word in done.stderr for word in ("Job stats", "Finished jobid", "Select jobs", "Building DAG"))
    (log,) = (tree.path / ".snakemake/log").iterdir()
    assert "Finished jobid" in log.read_text()
    tree.config["plans"]["era5"]["settings"]["seed"] = 4711  # while its jobs wait in a queue
    tree.write()
    job = "snakemake --mode remote -n -p --cores 1 --configfile tiny.yaml -- plan_era5"
    told = tree.shell(f"DLSCALE_CALLED=$PWD/.snakemake/called.json {job}"), tree.shell(job)
    assert ["4711" in each.stdout + each.stderr for each in told] == [False, True], told
    again = tree.shell(run)
    assert again.returncode == 0 and "Nothing to be done" in again.stderr and lines[-1] in again.stderr
    told = tree.shell(f"{run} -p --forcerun preview")
    assert told.returncode == 0 and "Finished jobid" in told.stderr
    assert "Shell command: python -P -m dlscale " in told.stderr
    (tree.results / "data/waves/manifest.json").unlink()
    (tree.results / "data/waves/preview.png").unlink()
    locked = tree.path / ".snakemake/locks"
    locked.mkdir(parents=True, exist_ok=True)
    (locked / "0.output.lock").write_text(f"{RESULTS}/data/waves/manifest.json\n")
    wrong = tree.shell(run)
    assert wrong.returncode == 1 and wrong.stderr.startswith("LockException:\n") and "--unlock" in wrong.stderr
