"""`dlscale run`: its arguments give a Snakemake call, or one error message."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlscale import cli
from dlscale.config import resolve
from dlscale.core import machine
from dlscale.core.errors import UserError
from dlscale.core.stages import STAGES
from dlscale.preflight import run
from dlscale.preflight.run import Typed
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the repository's folder, in which users run this command."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def configuration() -> resolve.Configuration:
    return resolve.load_files(ROOT / "config.yaml")


REST = ["--cores", "4", "-n"]
C = [*REST, "c=1"]
SEEDS = ["seed=1", "seed=2", "seed=3"]


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("", {}),
        ("mnist_demo -n", {"targets": ["mnist_demo"], "dry": True}),
        ("-np mnist_demo", {"targets": ["mnist_demo"], "dry": True, "commands": True}),
        ("--dry-run --printshellcmds", {"dry": True, "commands": True}),
        ("a optimizer.lr=1e-3 b seed=2", {"targets": ["a", "b"], "settings": ["optimizer.lr=1e-3", "seed=2"]}),
        ("--profile perlmutter a", {"profile": "perlmutter", "targets": ["a"]}),
        ("--profile=perlmutter a", {"profile": "perlmutter", "targets": ["a"]}),
        ("--configfile mine.yaml a", {"files": ["mine.yaml"], "targets": ["a"]}),
        ("--configfile=mine.yaml more.yml a -n", {"files": ["mine.yaml", "more.yml"], "targets": ["a"], "dry": True}),
        ("a --config seed=2 b", {"targets": ["a", "b"], "settings": ["seed=2"]}),
        ("--configfile mine.yaml -- a", {"files": ["mine.yaml"], "targets": ["a"]}),
        ("a -n --cores 4 seed=2 -p", {"targets": ["a"], "dry": True, "rest": ["--cores", "4", "seed=2", "-p"]}),
        ("a --workflow-profile profiles/x -n", {"profile": "profiles/x", "targets": ["a"], "dry": True}),
        ("--workflow-profile=profiles/x a", {"profile": "profiles/x", "targets": ["a"]}),
        ("a --cores 4 --configfile m.yaml n.json -n", {"targets": ["a"], "files": ["m.yaml", "n.json"], "rest": REST}),
        ("--cores 4 --configfile=m.yaml -n a", {"files": ["m.yaml"], "rest": [*REST, "a"]}),
        ("seed=1 -C seed=2 b --cores 4 --config seed=3 -n c=1", {"targets": ["b"], "settings": SEEDS, "rest": C}),
        ("results/plans/a/b=c/x.json", {"targets": ["results/plans/a/b=c/x.json"]}),
        ("a --help", {"targets": ["a"], "help": True}),
    ],
)
def test_words_are_sorted(words: str, call: dict[str, Any]) -> None:
    assert run.sort(words.split()) == Typed(**call)


@pytest.mark.parametrize("option", ["--profile", "--configfile"])
def test_an_option_without_a_value_is_refused(option: str) -> None:
    with pytest.raises(UserError, match=f"{option}.*: expected "):
        run.sort(["a", option])


@pytest.mark.parametrize(
    ("word", "name"),
    [
        *(("cosmo_demo", "plan_cosmo_demo"), ("plan_cosmo_demo", "plan_cosmo_demo")),
        *((word, word) for word in ("data_cosmo_demo", "study_cosmo_unet", "all", "image", "results/plans/a")),
        ("results/plans/cosmo_demo/baseline/throughput.json", "results/plans/cosmo_demo/baseline/throughput.json"),
        ("./results/data/cosmo_demo/preview.png", "results/data/cosmo_demo/preview.png"),
        (f"{ROOT}/results/data/cosmo_demo/preview.png", "results/data/cosmo_demo/preview.png"),
    ],
)
def test_targets(configuration: resolve.Configuration, word: str, name: str) -> None:
    assert run.typed_target(word, configuration).name == name


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("cosmo_dmo", "no target is called 'cosmo_dmo' (did you mean 'cosmo_demo'?)"),
        ("plan_cosmo_dmo", "no plan is called 'cosmo_dmo' (did you mean 'cosmo_demo'?)"),
        ("data_cosmo_dmo", "no dataset is called 'cosmo_dmo' (did you mean 'cosmo_demo'?)"),
        ("study_cosmo_net", "no study is called 'cosmo_net' (did you mean 'cosmo_unet'?)"),
        ("al", "no target is called 'al' (did you mean 'all'?)"),
        ("cosmo_demo.baseline", "this is a run; only its plan can be a target. Run the plan: dlscale run cosmo_demo"),
        ("results/plans/cosmo_dmo/a/b.json", "no plan is called 'cosmo_dmo'"),
        ("results/data/cosmo_dmo/manifest.json", "no dataset is called 'cosmo_dmo' (did you mean 'cosmo_demo'?)"),
        ("results/plans/cosmo_demo/baselin/a.json", "no run is called 'baselin' (did you mean 'baseline'?)"),
        ("mine/plan.json", "no target is called 'mine/plan.json'"),
        (f"{ROOT}/config.yaml", f"a file of settings; write: --configfile {ROOT}/config.yaml"),
    ],
)
def test_an_unknown_target_is_refused(configuration: resolve.Configuration, word: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        run.typed_target(word, configuration)
    assert str(error.value).startswith(f"{word}: {said}")


@pytest.mark.parametrize(
    ("word", "example"),
    [("cosmo_demo", "dlscale run cosmo_demo --cores 4"), ("seed=2", "dlscale run PLAN seed=2 --cores 4")],
)
def test_words_after_snakemakes_options_are_refused(
    configuration: resolve.Configuration, word: str, example: str
) -> None:
    run.refuse_late_words(["plan_cosmo_demo", "train", "results/a=b/c"], configuration)
    with pytest.raises(UserError) as error:
        run.refuse_late_words(["plan_cosmo_demo", word], configuration)
    assert str(error.value).startswith(f"{word}: ") and str(error.value).endswith(f": {example}")


def test_snakemakes_line_about_the_profile_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    run.print_without_profile("Using workflow specific profile profiles/default for setting ...", file=sys.stderr)
    run.print_without_profile("Error: a mistake", file=sys.stderr)
    assert capsys.readouterr().err == "Error: a mistake\n"


def typed(*words: str) -> tuple[list[str], dict[str, Any]]:
    _, asked, over = run.configured(run.sort(words))
    return [target.name for target in asked], over


@pytest.mark.slow
def test_settings_are_of_the_plans_that_are_named() -> None:
    own = {"settings": {"optimizer": {"lr": "1e-3"}, "training": {"epochs": "2"}}}
    words = ("optimizer.lr=1e-3", "training={epochs: 2}")
    assert typed("cosmo_demo", *words) == (["plan_cosmo_demo"], {"plans": {"cosmo_demo": own}})
    file = "results/plans/cosmo_demo/baseline/metrics.jsonl"
    assert typed(file, *words) == ([file], {"plans": {"cosmo_demo": own}})
    _, over = typed("study_cosmo_unet", "seed=3")
    assert over["plans"].keys() >= {"cosmo_demo"} and "era5_demo" not in over["plans"]


def test_a_profile_without_a_site_is_of_this_machine() -> None:
    assert typed("--profile", "local", "cosmo_demo") == (["plan_cosmo_demo"], {})


def test_a_full_key_sets_any_part_of_the_configuration() -> None:
    """Full keys set any part of the configuration, and can even define the target plan."""
    assert typed("results=/tmp/x", "report.title=Mine and yours") == (
        [],
        {"results": "/tmp/x", "report": {"title": "Mine and yours"}},
    )
    new = ("plans.mine.study=starter_cnn", "plans.mine.from=starter_demo.single", "plans.mine.runs.a.seed=7")
    names, over = typed("mine", *new)
    assert names == ["plan_mine"] and over["plans"]["mine"]["runs"] == {"a": {"seed": "7"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["optimizer.lr=1"],
            "optimizer.lr=1: a setting without a plan. Name the plan: dlscale run PLAN optimizer.lr=1",
        ),
        (["plan.a.seed=1"], "plan.a.seed=1: a setting without a plan. Name the plan: dlscale run PLAN plan.a.seed=1"),
        (["cosmo_demo", "optimiser.lr=1"], "configuration: plans.cosmo_demo.settings: unknown key 'optimiser' (did"),
        (["cosmo_demo", "seed=1", "optimizer.lr=fast"], "configuration: plans.cosmo_demo.settings.optimizer.lr: "),
        (["reslts=x", "cosmo_demo"], "configuration: plans.cosmo_demo.settings: unknown key 'reslts'"),
        (["cosmo_demo", "seed=[1"], "seed=[1, line 2: not valid YAML: "),
        (["cosmo_dmo", "seed=1"], "cosmo_dmo: no target is called"),
        (["--configfile", "nothere.yaml", "cosmo_demo"], "nothere.yaml: no such file"),
        (["--configfile", "mine.conf"], "--configfile: expected a file *.yaml, *.yml, *.json"),
        (["--profile", "perlmuter"], "site: profiles/perlmuter/site.yaml: no such file; no site is called 'perlmuter'"),
    ],
)
def test_a_mistake_is_one_message(words: list[str], said: str) -> None:
    """The message begins with the option, file or key, and may suggest a valid name."""
    with pytest.raises(UserError) as error:
        typed(*words)
    assert str(error.value).startswith(said), error.value


def test_the_call() -> None:
    call = run.sort(["a", "-np", "--profile", "perlmutter", "--configfile", "m.yaml", "--cores", "2"])
    over = {"plans": {"a": {"settings": {"optimizer": {"lr": "1e-3"}}}}}
    words = ["--workflow-profile", "profiles/perlmutter", "--dry-run", "--printshellcmds", "--logger", "dlscale"]
    plans = json.dumps(over["plans"])
    words += ["--config", f"plans={plans}", "--configfile", "m.yaml", "--cores", "2", "--", "plan_a"]
    assert run.command(call, ["plan_a"], over) == [sys.executable, "-P", "-c", run.SNAKEMAKE, *words]
    rest = run.sort(["a", "--forcerun", "train", "--", "plan_b"])
    assert run.command(rest, ["plan_a"], {})[6:] == ["--forcerun", "train", "--", "plan_b", "plan_a"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--dryrum", "unrecognized arguments: --dryrum (did you mean '--dryrun'?); write targets and settings before"),
        ("-q plan_x", "argument --quiet/-q: invalid choice: 'plan_x' (choose from 'all', "),
    ],
)
def test_an_unknown_snakemake_option_gives_one_message(words: str, said: str) -> None:
    done = subprocess.run(run.command(run.sort(words.split()), [], {}), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(f"dlscale run: {said}") and done.stderr.count("\n") == 1


def test_help_lists_the_commands_of_users_without_the_stages() -> None:
    top = cli.parser()
    (commands,) = [action.choices for action in top._actions if isinstance(action.choices, dict)]
    text = top.format_help()
    listed = re.findall(r"^    ([a-z][a-z-]+(?: --[a-z]+)?) +\S", text, re.MULTILINE)
    assert sorted(listed) == sorted(["run", *cli.QUERIES]) and len(listed) <= 20
    assert {*listed, *STAGES} == {*commands} and "preprocess" not in text
    measure = " ".join(commands["measure"].format_help().split())
    assert "--rate PATTERN pattern of the printed speed: a regular expression with one group" in measure


def test_an_environment_need_not_be_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's Python comes first in the PATH of jobs, followed by the existing PATH."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    machine.put_python_first()
    machine.put_python_first()
    assert Path(shutil.which("python") or "").parent == Path(sys.executable).parent
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}:/usr/bin:/bin"
