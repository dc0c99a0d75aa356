"""The tiny workflow from the user's view: files, output, and behaviour after failures."""

from __future__ import annotations

import ast
import copy
import csv
import html
import json
import os
import platform
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from snakemake.benchmark import ScheduledPeriodicTimer

from dlscale.core import telemetry
from dlscale.core.environment import Environment
from dlscale.core.process import only_writer
from dlscale.core.stages import STAGES
from dlscale.measure.records import Throughput
from tests.conftest import timeless
from tests.waiting import PATIENCE, until
from tests.workflow.conftest import CONFIG, RESULTS, ROOT, TARGETS, TITLE, Outcome, Tree
from tests.workflow.jobs import EVERYTHING

Make = Callable[..., Tree]

# ---- files of the results folder --------------------------------------------------------------------


#: Files that each job leaves in the results folder, without the folders and files that `test_layout` lists.
FILES = {
    "configure_plan": ["plans/{plan}/plan.yaml"],
    "acquire": ["data/{dataset}/source/{file}"],
    "preprocess": [],
    "assemble": ["data/{dataset}/{split}/{part}.h5"],
    "describe": ["data/{dataset}/manifest.json", "data/{dataset}/config.yaml"],
    "preview": ["data/{dataset}/preview.png"],
    "train": [
        f"plans/{{plan}}/{{run}}/{file}"
        for file in (
            "config.yaml",
            "metrics.jsonl",
            "health.json",
            "provenance.json",
            "prediction.png",
            "model.pt",
            "model_best.pt",
            "telemetry/train.csv",
            "telemetry/train.json",
        )
    ],
    "throughput": [
        f"plans/{{plan}}/{{run}}/{file}"
        for file in ("throughput.json", "telemetry/throughput.csv", "telemetry/throughput.json")
    ],
    "profile": [
        f"plans/{{plan}}/{{run}}/{file}"
        for file in (
            "profile/profile.json",
            "profile/profile_summary.csv",
            "telemetry/profile.csv",
            "telemetry/profile.json",
        )
    ],
    "tune": [
        f"plans/{{plan}}/{{run}}/{name}"
        for name in ("config.yaml", "tune.json", "tuned.yaml", "telemetry/tune.csv", "telemetry/tune.json")
    ],
    "collect": ["plans/{plan}/summary.csv"],
    "report_plan": ["plans/{plan}/report.html"],
    "report": ["report/index.html"],
}


def test_layout(finished: tuple[Tree, Outcome]) -> None:
    """Outside of the listed folders, the jobs leave exactly the files in `FILES`, and no partial file."""
    tree, outcome = finished
    files = {str(path.relative_to(tree.results)) for path in tree.results.rglob("*") if path.is_file()}
    jobs = [job for job in outcome.jobs if job.command]
    expected = {file.format(**job.wildcards) for job in jobs for file in FILES[job.rule]}
    # `FILES` leaves out the files in these folders.
    folders = ("logs/", "benchmarks/", "checkpoints/", *(f"data/{dataset}/stats/" for dataset in CONFIG["datasets"]))
    folders += ("report/figures/", *(f"plans/{plan}/figures/" for plan in CONFIG["plans"]))
    traces = {file for file in files if "/profile/" in file and ".rank0." in file}
    assert any("torch" in file for file in traces)
    left = {file for file in files - traces if not file.startswith(folders) and "/tensorboard/" not in file}
    # The lock and the lists of verified data files belong to this machine and are not results.
    beside = {".lock", *(f"data/{dataset}/verified.json" for dataset in {*CONFIG["datasets"]} - {"imagenet_resnet50"})}
    assert left - beside == expected
    assert ".lock" in left and "data/boxes/verified.json" in left
    for folder in ("logs/", "benchmarks/", "checkpoints/", "data/boxes/stats/", "data/years/stats/"):
        assert any(file.startswith(folder) for file in files), folder
    for job in [job for job in jobs if job.rule == "train"]:
        folder = "plans/{plan}/{run}/tensorboard/".format(**job.wildcards)
        assert any("tfevents" in file for file in files if file.startswith(folder)), folder
    for kind, ending in (("logs", ".log"), ("benchmarks", ".tsv")):
        written = [file for file in files if file.startswith(f"{kind}/")]
        assert len(written) == len(outcome.names) and all(file.endswith(ending) for file in written)


def test_contents(finished: tuple[Tree, Outcome]) -> None:
    tree, _ = finished
    rows = {}
    for plan, settings in CONFIG["plans"].items():
        with open(tree.results / f"plans/{plan}/summary.csv", newline="") as file:
            rows[plan] = list(csv.DictReader(file))
        assert [row["run"] for row in rows[plan]] == list(settings["runs"])
        for run, own in settings["runs"].items():
            if "use" not in own and "train" in settings.get("measure", ["train"]) and settings.get("kind") != "tune":
                lines = (tree.results / f"plans/{plan}/{run}/metrics.jsonl").read_text().splitlines()
                assert [json.loads(line)["epoch"] for line in lines] == [1, 2]
    assert [rows["again"][0][key] for key in ("source", "label")] == ["cosmo/unet", "same (= cosmo.unet)"]
    for image in tree.results.rglob("*.png"):
        assert image.read_bytes().startswith(b"\x89PNG")
    throughput = json.loads((tree.results / "plans/era5/vit/throughput.json").read_text())
    assert all(len(throughput[key]["trial_throughput"]) == 2 for key in ("IO", "SYNTHETIC", "FULL"))
    own, timed = (Throughput.read(tree.results / f"plans/cosmo/{run}/throughput.json") for run in ("unet", "ceiling"))
    assert own.beside is None, "one second is too short to time the run against its copy"
    assert timed.beside and timed.beside.compute == own.compute != timed.compute
    for stage in ("train", "throughput"):
        met = Environment.read(tree.results / f"plans/cosmo/unet/telemetry/{stage}.json")
        assert met.python == platform.python_version() and met.versions["torch"] == torch.__version__
    assert throughput["beside"] is None, "a plan without a second throughput run has no paired timing"


def test_jobs_of_the_call_are_known(finished: tuple[Tree, Outcome]) -> None:
    """Telemetry rows of trainings have the CPU use of the call's other jobs, so it does not count as foreign load."""
    tree, _ = finished
    files = [*tree.results.glob("plans/*/*/telemetry/train.csv")]
    assert files and all(row.cpu_call is not None for file in files for row in telemetry.read(file))
    assert (
        "BENCHMARK_INTERVAL_SHORT" in ScheduledPeriodicTimer._schedule.__code__.co_names
    )  # the variable that rules/common.smk sets still exists in Snakemake


def test_a_call_ends_with_the_time_per_rule(finished: tuple[Tree, Outcome]) -> None:
    """The last table counts every job once, with each rule's total time and the time of starting its processes."""
    tree, outcome = finished
    pages = [
        "report/index.html",
        *(f"{page.parent.name}/report.html" for page in tree.results.glob("plans/*/report.html")),
    ]
    said = outcome.output[outcome.output.index("Where the time went:") :]
    rows = re.findall(r"^  (\w+) +(\d+) +([\d.]+) s +([\d.]+) s$", said, re.MULTILINE)
    assert sum(int(jobs) for _, jobs, _, _ in rows) == len(outcome.names)
    seconds = {rule: (float(time), float(starting)) for rule, _, time, starting in rows}
    assert all(0 < starting < time for time, starting in (seconds["train"], seconds["throughput"]))
    assert [time for time, _ in seconds.values()] == sorted((time for time, _ in seconds.values()), reverse=True)
    assert sorted(re.findall(r"^Report: /.+/(\w+/\w+\.html)$", said, re.MULTILINE)) == sorted(pages)


def test_shell_characters_in_names_are_harmless(finished: tuple[Tree, Outcome]) -> None:
    """Quotes, spaces and commands in the results folder's name and in titles have no effect."""
    tree, _ = finished
    assert not [path for path in tree.path.rglob("*") if path.name.startswith("pwned")]
    for page in ("report/index.html", "plans/cosmo/report.html"):
        text = (tree.results / page).read_text()
        assert TITLE not in text
        heading = re.search(r"<h1[^>]*>(.*?)</h1>", text, re.DOTALL)
        assert heading and html.unescape(heading[1]).strip() == TITLE


def test_nothing_is_left_to_do(finished: tuple[Tree, Outcome]) -> None:
    outcome = finished[0].planned()
    assert outcome.names == [] and "Nothing to be done" in outcome.output


@pytest.mark.slow
def test_snakemakes_own_report(finished: tuple[Tree, Outcome]) -> None:
    """Snakemake's report contains every page, table and picture that a rule declares."""
    tree, _ = finished
    outcome = tree.snakemake("--report", "own.html", "--", *TARGETS)
    page = tree.path / "own.html"
    assert outcome.status == 0, outcome.output
    added = Counter(re.findall(r"^Adding (\S+)", outcome.output, re.MULTILINE))
    jobs = Counter(job.rule for job in finished[1].jobs)
    assert added == {
        "index.html": 1,
        "report.html": jobs["report_plan"],
        "summary.csv": jobs["collect"],
        "prediction.png": jobs["train"],
        "preview.png": jobs["preview"],
    }
    assert page.stat().st_size > 1e6
    page.unlink()


# ---- commands ---------------------------------------------------------------------------------------


def by_hand(tree: Tree, outcome: Outcome, *names: str) -> None:
    """Run the commands that Snakemake printed for the named jobs."""
    for name in names:
        (command,) = [job.command for job in outcome.jobs if str(job) == name]
        assert command in outcome.output
        done = tree.shell(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_run_by_hand(finished: tuple[Tree, Outcome], clone: Tree) -> None:
    """Training with the printed command gives identical weights, and identical metrics except for times."""
    folder = clone.results / "plans/era5/vit"
    same = [folder / name for name in ("model.pt", "config.yaml")]
    before, content = timeless(folder), [file.read_bytes() for file in same]
    shutil.rmtree(clone.results / "checkpoints/era5/vit")  # with checkpoints, the finished training would not run again
    shutil.rmtree(folder / "tensorboard")
    for name in ("metrics.jsonl", "model.pt", "prediction.png", "provenance.json", "config.yaml"):
        (folder / name).unlink()
    by_hand(clone, finished[1], "train era5 vit", "collect era5")
    assert timeless(folder) == before
    assert [file.read_bytes() for file in same] == content


HELP = """
import contextlib, io, json, sys
from dlscale import cli
from dlscale.core.stages import STAGES
for arguments in [], *([stage] for stage in STAGES):
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        cli.main([*arguments, "--help"])
    assert "usage:" in text.getvalue()
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def test_help_imports_nothing_heavy(finished: tuple[Tree, Outcome]) -> None:
    heavy = {"torch", "h5py", "matplotlib", "numpy", "pandas", "xarray", "tensorboard", "requests", "snakemake"}
    assert not heavy & set(finished[0].python(HELP))


# ---- targets ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh(make_tree: Make) -> Tree:
    """Return a tree without results, for dry runs."""
    return make_tree()


def of(names: list[str], rule: str) -> list[str]:
    return [name.removeprefix(f"{rule} ") for name in names if name.startswith(f"{rule} ")]


TRAINED = sorted(job.removeprefix("train ") for job in EVERYTHING if job.startswith("train "))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "runs", "pages"),
    [
        ("plan_cosmo", ["cosmo ceiling", "cosmo unet"], ["report_plan cosmo"]),
        ("plan_era5", ["era5 vit"], ["report_plan era5"]),
        ("plan_again", ["again faster", "cosmo unet"], ["report_plan again"]),
        (
            "study_cosmo_unet",
            ["again faster", "cosmo ceiling", "cosmo unet"],
            ["report_plan again", "report_plan cosmo", "report_plan tuned"],
        ),
        ("study_era5_vit", ["era5 vit"], ["report_plan era5"]),
        ("study_waves", ["waves_ladder baseline", "waves_ladder fused"], ["report_plan waves_ladder"]),
        ("all", TRAINED, ["report"]),
    ],
)
def test_targets(fresh: Tree, target: str, runs: list[str], pages: list[str]) -> None:
    """A run that other plans reuse (`use`) runs once, in its own plan. The page of the targets shows all runs."""
    names = fresh.planned(targets=[target]).names
    assert of(names, "train") == runs
    assert [name for name in names if name.startswith("report")] == pages


@pytest.mark.slow
def test_plan_of_a_thousand_jobs(fresh: Tree, make_tree: Make) -> None:
    """Three hundred runs need as many trainings and measurements, but their dataset is made only once."""
    config = copy.deepcopy(CONFIG)
    config["plans"]["many"] = {
        "study": "cosmo_unet",
        "settings": config["plans"]["cosmo"]["settings"],
        "runs": {f"run{number}": {"seed": number} for number in range(300)},
    }
    rules = Counter(job.rule for job in make_tree(config).planned(targets=["plan_many"]).jobs)
    assert rules["train"] == rules["throughput"] == 300
    assert rules["describe"] == rules["configure_plan"] == rules["collect"] == rules["report_plan"] == 1


# ---- the rules --------------------------------------------------------------------------------------

RULES = {
    name: (file.name, body)
    for file in sorted((ROOT / "rules").glob("*.smk"))
    for name, body in re.findall(r"^rule (\w+):\n((?:(?: {4}.*)?\n)+)", file.read_text(), re.MULTILINE)
}


def directive(body: str, name: str) -> str:
    """Return the text of a rule's directive, or an empty string."""
    found = re.search(rf"^    {name}:(.*\n(?:(?: {{8}}.*)?\n)*)", body, re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("rule", RULES)
def test_rule_is_thin_and_complete(rule: str) -> None:
    _, body = RULES[rule]
    assert re.match(r'    """[A-Z].*\."""\n', body), "each rule needs a docstring of one line"
    for name in ("log", "benchmark", "message", "params", *(["output"] if rule != "image" else [])):
        assert directive(body, name), name
    shell = ast.literal_eval(f"({directive(body, 'shell')})")
    # `launch` starts dlscale in one or more processes.
    stage = re.match(r"{params\.launch:q} ([a-z]+) ", shell)
    assert stage and stage[1] in STAGES
    assert not re.search(r"[;&|<>`$\\\n]", shell), "the shell must be a single command"
    assert "--log {log:q}" in shell


@pytest.mark.parametrize("rule", RULES)
def test_rules_quote_shell_arguments(rule: str) -> None:
    """Only numbers, and names whose wildcard constraint makes them harmless, are unquoted."""
    shell = ast.literal_eval(f"({directive(RULES[rule][1], 'shell')})")
    bare = {field for field in re.findall(r"{([^{}]*)}", shell) if not field.endswith(":q")}
    assert bare <= {"threads", "wildcards.split", "wildcards.part", "wildcards.piece"}


def test_wildcards_that_are_not_quoted_are_harmless() -> None:
    text = (ROOT / "Snakefile").read_text()
    constraints = dict(re.findall(r'^    (split|part|piece)=r?"(.*)",$', text, re.MULTILINE))
    assert set(constraints) == {"split", "part", "piece"}
    for pattern in constraints.values():
        for hostile in ("a b", "$(x)", "`x`", "a;b", "a'b", 'a"b', "a\nb", "a&b", "a|b", "a>b", "*", "~", "../x", ""):
            assert not re.fullmatch(pattern, hostile), (pattern, hostile)


def test_no_lambda_in_the_rules() -> None:
    for file in [ROOT / "Snakefile", *(ROOT / "rules").glob("*.smk")]:
        code = "\n".join(line.partition("#")[0] for line in file.read_text().splitlines())
        assert not re.search(r"\blambda\b", code), file


# ---- failures ---------------------------------------------------------------------------------------


def test_failing_stage(finished: tuple[Tree, Outcome], make_tree: Make) -> None:
    """The terminal shows the stage's one-line error, and no data file is left. After a repair the command works."""
    config = copy.deepcopy(CONFIG)
    names = ["a box $(touch pwned).h5", "another 'box'.h5"]
    source = {"kind": "files", "train": [f"raw/{names[0]}"], "valid": [f"raw/{names[1]}"]}
    config["datasets"]["mine"] = {"kind": "cosmo", "source": source}
    tree = make_tree(config)
    good = finished[0].results / "data/boxes/source/box000.h5"
    raw = tree.path / "raw"
    raw.mkdir()
    (raw / names[0]).write_bytes(good.read_bytes()[:100_000])
    shutil.copy(good, raw / names[1])
    target = f"{RESULTS}/data/mine/train/a_box___touch_pwned_.h5"
    call = ["--cores", "2", "--", target]

    failed = tree.snakemake(*call)
    assert failed.status == 1
    (line,) = {line for line in failed.output.splitlines() if line.startswith("dlscale ")}
    assert line.startswith("dlscale preprocess: ") and names[0] in line and "truncated" in line
    assert "Traceback" not in failed.output
    place = f"{RESULTS}/logs/preprocess/mine/train/a_box___touch_pwned_-0.log"
    last = f"FAILED data mine (preprocess): {line.removeprefix('dlscale preprocess: ')}; log: {place}"
    assert failed.output.splitlines()[-1] == last
    assert [path for path in (tree.results / "data").rglob("*") if path.is_file()] == []

    shutil.copy(good, raw / names[0])
    repaired = tree.snakemake(*call)
    assert repaired.status == 0, repaired.output
    assert repaired.names == [
        "assemble mine train a_box___touch_pwned_",
        "preprocess mine train a_box___touch_pwned_ 0",
    ]
    made, before = (tree.path / target, finished[0].results / "data/boxes/train/box000.h5")
    with h5py.File(made) as one, h5py.File(before) as other:
        assert np.array_equal(one["Nbody"], other["Nbody"])
    assert not list(tree.path.rglob("pwned*"))


@pytest.mark.slow
def test_interrupted_and_killed(clone: Tree) -> None:
    """After Ctrl-C the same command continues. After SIGKILL, Snakemake first asks for `--unlock` and then continues.

    A training that outlives the killed Snakemake keeps other processes from writing to its files.
    """
    clone.config["plans"]["era5"]["settings"]["training"] = {"epochs": 40}
    clone.write()
    run = clone.results / "plans/era5/vit"
    call = ["--cores", "2", "--", str(run.relative_to(clone.path) / "metrics.jsonl")]
    checkpoints = clone.results / "checkpoints/era5/vit"
    before = {path for path in checkpoints.iterdir() if path.is_dir()}

    def steps() -> set[str]:
        now = {path for path in checkpoints.iterdir() if path.is_dir()}
        (folder,) = now - before or [Path("nowhere")]
        return {path.name for path in folder.glob("step-*")}

    process = clone.start(*call)
    until("the first checkpoint", steps)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert (run / "metrics.jsonl").exists() and not (run / "model.pt").exists(), output

    done = steps()
    process = clone.start(*call)
    until("a checkpoint after the interruption", lambda: steps() - done)
    process.kill()  # kill only Snakemake, so the training continues
    process.wait()
    owner = int((checkpoints / ".lock").read_text().split()[1])
    try:
        os.kill(owner, signal.SIGSTOP)  # pause the training, so it still exists during the next calls
        locked = clone.snakemake(*call)
        assert locked.status == 1 and "--unlock" in locked.output
        assert clone.snakemake("--unlock", *call).status == 0
        busy = clone.snakemake(*call)
        assert busy.status == 1 and f"in use by process {owner} " in busy.output
    finally:
        os.kill(owner, signal.SIGKILL)
        process.stdout.close()

    assert clone.snakemake(*call).status == 0
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["resumed_from_step"] > int(min(done).removeprefix("step-"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 41))
    log = (clone.results / "logs/train/era5/vit.log").read_text()
    assert log.count(" started in ") >= 3 and "epoch 1 of 40" in log and "epoch 40 of 40" in log, (
        "the log must contain all attempts"
    )
    assert clone.planned(targets=call[3:]).names == []


@pytest.mark.slow
def test_a_folder_of_results_has_one_writer(make_tree: Make) -> None:
    """While a process writes results, a second call is refused before it writes a file; a dry run is allowed."""
    tree = make_tree()
    with only_writer(tree.results):
        before = list(tree.results.rglob("*"))
        second, dry = (tree.snakemake(*more, "--cores", "2", "--", "data_boxes") for more in ([], ["--dry-run"]))
        message = f"{tree.config['results']}: in use by process {os.getpid()} on "
        assert second.status == 2 and message in second.output and "Traceback" not in second.output, second.output
        assert dry.status == 0 and "in use by" not in dry.output, dry.output
        assert list(tree.results.rglob("*")) == before


@pytest.mark.slow
def test_a_dry_run_reports_jobs_that_cannot_start(clone: Tree) -> None:
    """A dry run prints the message with which the real run would fail before its first job."""
    clone.config["plans"]["nodes"] = {
        "study": "mnist_cnn",
        "settings": {"dataset": "mnist_cnn", "model": {"widths": [4, 8], "hidden": 16}, "batch_size": 8},
        "runs": {"two": {"geometry": {"nodes": 2}}},
    }
    clone.write()
    said = "plans.nodes.runs.two.geometry.nodes: 2 nodes need a scheduler"
    dry, real = (clone.snakemake(*more, "--cores", "2", "--", "plan_nodes") for more in (["--dry-run"], []))
    assert dry.status == 1 and f"The workflow would not start: {said}" in dry.output, dry.output[-3000:]
    assert dry.output.endswith("\n1 check fails: nothing would start\n")
    assert real.status != 0 and said in real.output and not real.jobs
