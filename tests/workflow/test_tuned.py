"""What tuning writes is used with the command that its file and the page name; nothing is tuned again for it."""

from __future__ import annotations

import os
import shlex

import pytest
import yaml

from dlscale.measure import tune
from dlscale.measure.tune_records import Duel, Tuning
from tests.workflow.conftest import Outcome, Tree

NEW = "tuned_mine_tuned"
#: All that is lacking for the plan that was written: one run that is timed again, one that is new.
JOBS = [
    f"collect {NEW}",
    f"configure_plan {NEW}",
    f"report_plan {NEW}",
    "throughput tuned mine",
    f"throughput {NEW} tuned",
    f"train {NEW} tuned",
]


@pytest.mark.slow
def test_the_command_that_is_named_trains_what_won(finished: tuple[Tree, Outcome], clone: Tree) -> None:
    """In a folder of results whose name has to be quoted, of a plan that only a second file has."""
    (job,) = [job for job in finished[1].jobs if job.rule == "tune"]
    words = shlex.split(job.command)
    given = {flag: words[words.index(flag) + 1] for flag in ("--call", "--run", "--out")}
    assert given["--call"] == "snakemake --configfile tiny.yaml"
    # Whether the demonstration gained anything is the machine's to say; here it did.
    folder = clone.results / "plans/tuned/mine"
    found = Tuning.read(folder / "tune.json")
    assert found.run == given["--run"] == "tuned.mine"
    duel = Duel(challenger=1, rates=[(2.0, 1.0)] * 3, ratio=2.0, low=1.9, high=2.1)
    file = f"{given['--out']}/tuned.yaml"
    command = f"{given['--call']} {shlex.quote(file)} -- plan_{NEW}"
    found = found.model_copy(update={"duel": duel, "command": command})
    time = (folder / "tuned.yaml").stat().st_mtime_ns
    (folder / "tuned.yaml").write_text(tune.tuned(found, "cosmo_unet"))
    os.utime(folder / "tuned.yaml", ns=(time, time))
    assert found.plan == NEW and f"#   {command}\n" in (folder / "tuned.yaml").read_text()
    assert list(yaml.safe_load((folder / "tuned.yaml").read_text())["plans"]) == [NEW]

    clone.log.unlink(missing_ok=True)
    done = clone.shell(command.replace("snakemake ", "snakemake -np --logger jobs ", 1))
    assert done.returncode == 0, done.stdout + done.stderr
    assert Outcome(0, done.stdout, clone.jobs()).names == JOBS

    # With the same files nothing else has changed, least of all what was tuned.
    assert clone.planned("--configfile", "tiny.yaml", file).names == []
