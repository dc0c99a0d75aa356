"""Jobs and their settings, tested without Snakemake, and settings that change the time of a step."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest

from dlscale.config import resolve
from dlscale.config.compute import KEYS, SWITCHES, compute_digest
from dlscale.config.dataset import dataset_type
from dlscale.config.run import Run, RunCore
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.process import LAUNCHED
from dlscale.core.settings import validate
from dlscale.core.stages import RUN_STAGES
from dlscale.data import describe, parts
from dlscale.data.manifest import Manifest
from dlscale.extensions.programs.files import kind as files_kind
from dlscale.extensions.programs.files.describe import describe_prepared
from dlscale.extensions.programs.jobs import ProgramJobs, probe_scripts
from dlscale.preflight import cost
from dlscale.preflight.probe import Finding
from dlscale.preflight.run import read_target
from dlscale.rules.calls import Call
from dlscale.rules.context import Commands, Context
from dlscale.rules.datasets import Datasets
from dlscale.rules.plans import Plans
from dlscale.rules.runs import ALL_CORES, Runs, decisive_settings
from tests.conftest import ERA5, ERA5_RUN

RUN = SimpleNamespace(plan="p", run="a")
DATA = SimpleNamespace(dataset="d", split="train", part="images", file="none")


def refuse(message: object) -> NoReturn:
    raise AssertionError(message)


class Jobs(NamedTuple):
    """The objects that the rules of a call use."""

    context: Context
    commands: Commands
    datasets: Datasets
    programs: ProgramJobs
    runs: Runs
    plans: Plans


def jobs(results: Path, settings: dict[str, Any] | None = None, site: dict[str, Any] | None = None) -> Jobs:
    """Return the objects that the rules of a call use, for a plan of two runs."""
    plan = {
        "study": "starter_cnn",
        "settings": {"dataset": "d", **(settings or {})},
        "runs": {"a": {}, "b": {"seed": 3}},
    }
    raw = {
        "results": str(results),
        "targets": ["p"],
        "datasets": {"d": {"kind": "starter", "source": {"kind": "simulated"}}},
    }
    configuration = resolve.load({**raw, "plans": {"p": plan}, "site": site or {}})
    context = Context(
        configuration,
        configuration.workflow.site,
        page="page",
        call=["snakemake"],
        own_settings=[],
        is_live=True,
        image="",
        say=print,
        refuse=refuse,
        rung_file=lambda plan, rung: "",
        keep_going=lambda: False,
    )
    return make_jobs(context)


def make_jobs(context: Context) -> Jobs:
    """Return the objects that the rules of a call use."""
    commands = Commands(context)
    datasets, programs = Datasets(context, commands), ProgramJobs(context, commands)
    return Jobs(context, commands, datasets, programs, Runs(context, commands, datasets, programs), Plans(context))


def test_secrets_of_addresses_are_kept_from_programs(tmp_path: Path) -> None:
    found = jobs(tmp_path, {"program": {"command": ["true"]}})
    found.context.configuration.secrets["https://h.org/x?sig=***"] = "https://h.org/x?sig=s3cret"
    for words in (found.runs.launch(RUN, []), found.programs.checkout_launch(RUN, [])):
        assert words[:3] == ["env", "-u", "DLSCALE_URLS"]


def test_secrets_of_a_program_are_passed_only_by_environment(tmp_path: Path) -> None:
    given = {
        "command": ["train", "--token", "{tok}"],
        "environment": {"API_KEY": "s3cret"},
        "values": {"tok": "s3cret2"},
    }
    found = jobs(tmp_path, {"program": given})
    words = [*found.runs.launch(RUN, []), found.runs.settings(RUN, []), str(found.runs.params("program")(RUN))]
    assert "DLSCALE_URLS" not in words and "s3cret" not in str(words)
    assert found.context.configuration.secrets == {"***secret.tok***": "s3cret2", "***secret.API_KEY***": "s3cret"}
    assert "DLSCALE_URLS" in found.programs.checkout_launch(RUN, []), "other stages must not get the secrets"
    other = jobs(tmp_path, {"program": {**given, "environment": {"API_KEY": "an0ther"}}})
    assert other.runs.params("program")(RUN) == found.runs.params("program")(RUN)


def test_a_page_is_made_again_with_another_template(tmp_path: Path) -> None:
    """A changed template makes a page again, even if the code is unchanged."""
    found, template = jobs(tmp_path), tmp_path / "page.j2"
    ours = found.plans.page_params("title", ["p"])
    assert ours["sources"] != found.context.own_params("report", ours["settings"])["sources"]
    digests = set()
    for text in ("one", "other"):
        template.write_text(text)
        digests.add(found.context.own_params("report", ours["settings"], [template])["sources"])
    assert len(digests) == 2


def test_an_inaccessible_file_is_no_input(tmp_path: Path) -> None:
    """With `--keep-going`, a file in an unreadable folder is left out of the inputs.

    The check runs in a child process that is not root.
    """
    (locked := tmp_path / "locked").mkdir(mode=0o000)
    found, file = jobs(Path("/nowhere")), locked / "a.npy"
    found.context.keep_going = lambda: True  # type: ignore[method-assign]
    if not (child := os.fork()):
        try:
            os.setuid(os.getuid() or 65534)
            known = found.datasets.existing([str(file)]), found.datasets._stamp("d", SimpleNamespace(origin=str(file)))
            os._exit(known != ([], None))
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("name", ["profile", "train"])
def test_stages_that_a_program_does_not_have_are_refused(tmp_path: Path, name: str) -> None:
    """If a call requests files of a stage that an external program does not have, the call is refused.

    The stage `program` replaces `train`, so that a program has no `metrics.jsonl`.
    """
    found = jobs(tmp_path, {"program": {"command": ["true"]}})
    with pytest.raises(AssertionError, match=f"{name}: a run of an external program has no such stage"):
        found.runs.params(name)(RUN)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["python", "train.py"], "train.py"),
        (["python3", "-m", "torch.distributed.launch", "--nproc_per_node=4", "train.py", "--x=a.py"], "train.py"),
        (["./train.sh"], "train.sh"),
        (["bash", "train.sh", "there.py"], "train.sh"),
        (["torchrun", "train.py", "there.py"], "train.py"),
        (["python", "there.py", "--config", "mine.py"], None),
        (["python", "-m", "mine", "-c"], None),
        (["python", "-u", "-X", "dev", "train.py"], "train.py"),
        (["torchrun", "--nproc-per-node", "2", "-m", "mine", "x.py"], None),
        (["python", "-m", "mine", "--config", "mine.py"], None),
        (["python", "-c", "import sys", "x.py"], None),
        (["bash", "-c", "cd sub && python train.py"], None),
        (["bash", "-lc", "exec python sub/train.py"], None),
        (["srun", "--chdir=sub", "python", "train.py"], None),
        (["env", "A=b", "python", "train.py"], None),
        (["python", "{out}/made.py"], None),
        (["true"], None),
    ],
)
def test_a_missing_script_is_a_failure(tmp_path: Path, command: list[str], missing: str | None) -> None:
    """A missing script is a failure in a dry run and in doctor, not only in the job."""
    (tmp_path / "there.py").touch()
    found = jobs(tmp_path / "results", {"program": {"command": command, "folder": str(tmp_path)}})
    said: list[Finding] = []
    found.context.say = said.append
    found.programs.files(RUN)
    found.programs.files(RUN)
    expected = [("FAIL", f"{tmp_path}/{missing}: no such file")] if missing else []
    assert [(each.status, each.text) for each in said] == expected
    names = [each.text for each in probe_scripts(found.context.configuration) if each.name.startswith("run p.a")]
    assert names == [text for _, text in expected]


@pytest.mark.parametrize("trials", [{"warmup": 1, "trials": 2, "batches": 1}, {"warmup": 0, "trials": 4, "batches": 1}])
def test_trials_that_are_too_short_for_a_program_are_refused(tmp_path: Path, trials: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"throughput: \(warmup \+ trials\) \* batches is [34]"):
        jobs(tmp_path, {"program": {"command": ["true"]}, "throughput": trials})
    jobs(tmp_path, {"throughput": trials})
    jobs(tmp_path, {"program": {"command": ["true"]}, "throughput": {**trials, "batches": 2}})


def test_ranks_of_the_calling_shell_reach_no_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank variables in the calling shell do not reach a stage, but rank variables that a starter sets do.

    A pod, a tutorial or a Slurm step may set such variables in the shell.
    """
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    program, several = {"program": {"command": ["true"]}}, {"geometry": {"gpus_per_node": 2}}
    found = jobs(tmp_path, program)
    assert found.runs.launch(RUN, [])[0] == sys.executable, (
        "if no variable is set, the command must not remove variables"
    )
    names = ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]
    withheld = ["env", *(word for name in names for word in ("-u", name))]
    for name in names:
        monkeypatch.setenv(name, "1")
    for words in (found.runs.launch(RUN, []), found.programs.checkout_launch(RUN, []), found.commands.launch(RUN, [])):
        assert words[: len(withheld) + 1] == [*withheld, sys.executable]
    found = jobs(tmp_path, several)
    words = found.runs.launch(RUN, [])
    assert words[: len(withheld)] == withheld and "dlscale.launch.ranks" in words
    seen = subprocess.run([*words[: len(withheld)], "printenv"], capture_output=True, text=True, check=True).stdout
    assert not {line.partition("=")[0] for line in seen.splitlines()} & {*LAUNCHED}


@pytest.mark.parametrize("name", ["batch_size", "workers", "out"])
def test_a_value_of_a_program_is_no_setting(tmp_path: Path, name: str) -> None:
    """A program's value with the name of a setting is refused.

    Otherwise the command could have a batch size different from the run's, from which the speed is computed.
    """
    with pytest.raises(UserError, match=rf"program\.values\.{name}: a setting has this name"):
        jobs(tmp_path, {"program": {"command": ["train", f"{{{name}}}"], "values": {name: 4}}})


def test_a_stage_reruns_only_if_its_own_settings_change(tmp_path: Path) -> None:
    """A new learning rate repeats the training but not the timing; a new number of trials does the reverse."""

    def params(**settings: Any) -> list[Any]:
        found = jobs(tmp_path, settings)
        return [found.runs.params("train")(RUN), found.runs.throughput_params(RUN)]

    before = params()
    assert params() == before
    changes: list[tuple[dict[str, Any], list[bool]]] = [
        ({"optimizer": {"lr": 0.5}}, [True, False]),
        ({"throughput": {"trials": 9}}, [False, True]),
        ({"batch_size": 7}, [True, True]),
    ]
    for settings, again in changes:
        assert [new != old for new, old in zip(params(**settings), before, strict=True)] == again


def test_files_of_a_plan_and_settings_of_its_runs(tmp_path: Path) -> None:
    found = jobs(tmp_path)
    files = found.plans.files("p")
    assert f"{tmp_path}/plans/p/b/metrics.jsonl" in files and files[-1] == f"{tmp_path}/plans/p/summary.csv"
    assert (
        found.plans.files_of_page(["p"])["manifests"]
        == [f"{tmp_path}/data/d/manifest.json"]
        == [found.runs.manifest(RUN)]
    )
    assert json.loads(found.runs.settings(RUN, None)) == found.context.plans["p"]["a"].run.model_dump(mode="json")
    page = json.loads(found.plans.live_page(RUN, None)[1])
    assert page["plans"] == [f"{tmp_path}/plans/p/plan.yaml"] and page["out"] == "page"
    assert [each["name"] for each in found.plans.settings("p")["runs"]] == ["a", "b"]


def test_a_run_is_timed_in_turn_with_the_first_one(tmp_path: Path) -> None:
    """If `throughput.beside` is at least 10 s, the first run has paired timing with its copy.

    All other runs have paired timing with the first run if `throughput.beside` is positive.
    """
    other = SimpleNamespace(plan="p", run="b")
    for seconds, copied in ((9.9, False), (10, True)):
        found = jobs(tmp_path, {"throughput": {"beside": seconds}})
        assert (found.runs.paired_with(RUN) is not None, found.runs.paired_with(other) is not None) == (copied, True)


def test_an_incomplete_import_is_not_a_reference(tmp_path: Path) -> None:
    for name in ("theirs", ".theirs.host.1.ab.part"):
        file = tmp_path / "references" / name / "reference.json"
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    assert jobs(tmp_path).plans.files_of_page(["p"])["references"] == [f"{tmp_path}/references/theirs/reference.json"]


@pytest.mark.parametrize(
    ("weights", "read", "remedy"),
    [
        ("none.pt", "none.pt", ""),
        ("plans/p/b/model_best.pt", "plans/p/b/model.pt", None),
        # Snakemake would look for these runs among the plans, whether or not the file exists.
        ("plans/p/c/model_best.pt", "plans/p/c/model.pt", "{}/plans"),
        ("plans/q/b/model_best.pt", "plans/q/b/model.pt", "{}/plans"),
    ],
)
def test_weights_without_a_source_are_reported_once_with_the_key(
    tmp_path: Path, weights: str, read: str, remedy: str | None
) -> None:
    said: list[Any] = []
    found = jobs(tmp_path, {"training": {"weights": f"{tmp_path}/{weights}"}})
    found.context.say = said.append
    assert [found.runs.weights(RUN) for _ in range(2)] == [[f"{tmp_path}/{read}"]] * 2
    assert len(said) == (remedy is not None)
    assert all(
        f"{remedy}".format(tmp_path) in each.remedy and "runs.a.training.weights" in each.remedy for each in said
    )


def test_trials_are_chosen_among_those_that_this_machine_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    over = {"seed": [1, 2], "geometry.gpus_per_node": [1, 2]}
    sweep = {"method": "halving", "over": over, "reduction_factor": 2}
    settings = {"batch_size": 4, "training": {"epochs": 2}}
    swept = {"study": "mnist_cnn", "kind": "sweep", "settings": settings, "sweep": sweep}
    swept_ = resolve.load({"targets": ["s"], "plans": {"s": swept}})
    found = make_jobs(replace(jobs(tmp_path).context, configuration=swept_))
    files = [Path(file) for file in found.plans.promote_inputs(SimpleNamespace(plan="s", rung="1"))]
    trials = [file.parent.name for file in files if file.name == "model.pt"]
    assert trials == ["seed-1_gpus_per_node-1-rung0", "seed-2_gpus_per_node-1-rung0"]


def test_cores_and_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlscale.rules.context.gpus", lambda: 0)
    here = jobs(tmp_path, {"threads": 3})
    assert here.runs.train_threads(RUN) == 3 and jobs(tmp_path).runs.train_threads(RUN) == ALL_CORES
    assert here.commands.resources("train") == here.commands.resources("data") == {}
    nodes = {"cpu_nodes": {"cpus": 32}, "gpu_nodes": {"cpus": 64, "gpus": 4}}
    there = jobs(tmp_path, {"geometry": {"gpus_per_node": 2}}, {"starter": "srun", "scheduler": nodes})
    asked = {name: resource(RUN, attempt=1) for name, resource in there.commands.resources("train").items()}
    assert (asked["gres"], asked["tasks_per_node"], asked["nodes"]) == ("gpu:2", 2, 1)
    assert there.commands.resources("train")["runtime"](RUN, attempt=2) == 2 * asked["runtime"]
    assert there.commands.resources("data")["cpus_per_task"](DATA, attempt=1) == 32


def test_results_behind_a_link_have_the_same_path_in_a_container(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "scratch").symlink_to("far")
    place = tmp_path / "scratch/results"
    found = jobs(place, site={"engine": "podman", "image": "x"}).commands.start([place / "data/d/manifest.json"])
    assert [word for word in found if str(tmp_path) in word] == [f"--volume={place}:{place}"]


@pytest.mark.parametrize("made", [False, True], ids=["simulated", "made"])
def test_a_field_that_the_dataset_lacks_is_refused_before_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    """Fields are known from the settings, or from a manifest that the call does not replace."""
    found = jobs(tmp_path, {"samples": {"input": "inputs"}})
    call = Call(found.context, found.plans, ["p"], [], cores=2, tell=print)
    works = cost.works(found.context.configuration, ["p"])
    assert {work.plan for work in works} == {"p", "d"}
    if made:
        fields = {"other": (1, ()), "target": (1, ())}
        monkeypatch.setattr(type(registry.kind("starter")), "outline", lambda *_: None)
        call.check(works, [])
        file = Path(found.context.paths.manifest("d"))
        file.parent.mkdir(parents=True)
        file.touch()
        monkeypatch.setattr(Manifest, "read", lambda path: SimpleNamespace(fields=fields))
        call.check(works, [])
        works = [work for work in works if work.run]
    wrong = r"^plans\.p\.runs\.a\.samples\.input: the dataset has no field 'inputs'"
    with pytest.raises(
        UserError, match=wrong + (r"; it has: other, target" if made else r" \(did you mean 'input'\?\)")
    ):
        call.check(works, [])


def test_a_call_knows_all_jobs_and_their_times(tmp_path: Path) -> None:
    told = list[str]()
    found = jobs(tmp_path)
    call = Call(found.context, found.plans, ["p"], [], cores=2, tell=lambda *lines: told.extend(lines))

    def waiting(rule: str, threads: int = 1, **wildcards: str) -> Any:
        named = SimpleNamespace(**wildcards, items=wildcards.items)
        files = {"log": [], "benchmark": "", "input": list[Path]()}
        return SimpleNamespace(rule=SimpleNamespace(name=rule), wildcards=named, threads=threads, **files)

    asked = [
        *(waiting("train", 64, plan="p", run="b"), waiting("train", 64, plan="p", run="a")),
        *(waiting("describe", dataset="d"), waiting("preprocess", dataset="d"), waiting("collect", plan="p")),
    ]
    works = call.works(asked)
    assert [(work.stage, work.run_name, work.jobs) for work in works] == [
        *(("data", "data", 2), ("train", "a", 1), ("train", "b", 1)),
    ]
    assert call.time_of(asked, works) == cost.Expected(0.0, untimed=5)
    assert [job.share for job in call.expected(asked)] == [1, 1, 0.5, 0.5, 0.5]
    assert call.verdict([], []) == 0 and call.verdict(asked, []) == 0
    assert any("5 jobs; duration unknown" in line for line in told)
    assert call.verdict(asked, [], targets=1) == 0
    assert told[-1].startswith("5 jobs and 1 target; duration unknown")
    ahead = tmp_path / "ahead"
    ahead.touch()
    os.utime(ahead, (time.time() + 3600,) * 2)
    asked[0].input = [ahead]
    assert call.verdict(asked, []) == 1 and any(f"FAIL  clock: {ahead}" in line for line in told)
    with pytest.raises(UserError, match="Not ready"):
        call.start(asked, [])
    asked[0].input = []
    folder = tmp_path / "benchmarks/train/p"
    folder.mkdir(parents=True)
    for run in "ab":
        (folder / f"{run}.tsv").write_text("s\n16\n")
    assert call.time_of(asked, works) == cost.Expected(32.0, untimed=3)


def test_targets_of_a_call_are_those_of_a_user(tmp_path: Path) -> None:
    """Targets are plans, studies and files of datasets, but not options."""
    configuration = jobs(tmp_path).context.configuration
    words = ["--cores", "plan_p", f"{tmp_path}/data/d/preview.png", "study_starter_cnn"]
    found = [target for word in words if (target := read_target(word, configuration))]
    assert [(each.plans, each.datasets) for each in found] == [(("p",), ()), ((), ("d",)), (("p",), ())]
    with pytest.raises(UserError, match="no plan is called 'other'"):
        read_target("plan_other", configuration)


# ---- settings that affect the time of a step -----------------------------------------------------------


LEARNT: list[dict[str, Any]] = [
    {"optimizer": {"lr": 0.5}},
    {"optimizer": {"betas": [0.8, 0.9]}},
    {"optimizer": {"weight_decay": 0.2}},
    {"optimizer": {"eps": 1e-7}},
    {"seed": 7},
    {"schedule": {"kind": "constant"}},
    {"label": "another"},
    {"training": {"epochs": 9}},
    {"samples": {"train": 8}},
    {"throughput": {"trials": 9}},
]
#: Stages that rerun after a change of a setting, by the setting's first key; unlisted keys rerun only the training.
AGAIN: dict[str, set[str]] = {"label": set(), "samples": set(RUN_STAGES), "throughput": {"throughput"}}
COMPUTED: list[dict[str, Any]] = [
    {"batch_size": 2},
    {"optimizer": {"weight_decay": 0}},
    {"optimizer": {"fused": True}},
    {"optimizer": {"clip_norm": 1.0}},
    {"precision": "bf16"},
    {"precision": "bf16_pure", "keep_norms_fp32": True},
    {"loader": {"workers": 3}},
    {"loader": {"kind": "direct"}},
    {"threads": 1},
    {"model": {"depth": 1}},
    {"activation_checkpointing": True},
    {"geometry": {"gpus_per_node": 2}},
    {"parallel": {"kind": "fsdp"}},
    {"parallel": {"sync": False}},
]


def run(**over: Any) -> Run:
    settings = {"dataset": "data", "optimizer": {"weight_decay": 0.1}}
    settings = resolve.merge(resolve.merge(copy.deepcopy(ERA5_RUN), settings), over)
    plan = {"study": "era5_vit", "measure": ["throughput"], "runs": {"run": settings}}
    raw = {"targets": ["test"], "datasets": {"data": ERA5}, "plans": {"test": plan}}
    return resolve.load(raw).plans["test"]["run"].run


def decisive(stage: str, run: Run) -> Any:
    return decisive_settings(stage, run.slice(stage))


once = functools.cache(run)


@pytest.mark.parametrize("over", LEARNT, ids=str)
def test_settings_of_learning_do_not_repeat_timing(over: dict[str, Any]) -> None:
    """Settings of learning do not change the measured speed and repeat only the training.

    `AGAIN` has the exceptions, such as samples and trials.
    """
    plain, other = once(), run(**over)
    assert compute_digest(other.model_dump(mode="json")) == compute_digest(plain.model_dump(mode="json"))
    again = {stage for stage in RUN_STAGES if decisive(stage, other) != decisive(stage, plain)}
    assert again == (AGAIN[key] if (key := next(iter(over))) in AGAIN else {"train"})


def test_only_the_presence_of_momentum_affects_speed() -> None:
    much, less, none = (
        decisive("throughput", run(optimizer={"kind": "sgd", "momentum": value})) for value in (0.9, 0.8, 0.0)
    )
    assert much == less != none


@pytest.mark.parametrize("over", COMPUTED, ids=str)
def test_settings_of_computing_repeat_all_stages(over: dict[str, Any]) -> None:
    plain, other = once(), run(**over)
    assert compute_digest(other.model_dump(mode="json")) != compute_digest(plain.model_dump(mode="json"))
    assert all(decisive(stage, other) != decisive(stage, plain) for stage in RUN_STAGES)


def test_every_setting_that_stages_share_is_judged() -> None:
    """`KEYS` and `SWITCHES` have every setting of a run, except seed and loss scale, which only change values."""
    assert {*KEYS, *SWITCHES} == set(RunCore.model_fields) - {"seed", "loss_scale"}


def test_the_digest_of_a_slice_equals_the_digest_of_the_run() -> None:
    assert compute_digest(run().slice("throughput")) == compute_digest(run().model_dump(mode="json"))


@pytest.mark.parametrize("fault", ["empty", "missing"])
def test_a_broken_dataset_fails_in_its_own_jobs_if_the_call_keeps_going(tmp_path: Path, fault: str) -> None:
    """With `--keep-going`, a broken dataset fails only in its own jobs. Otherwise no job runs."""
    for split, name in itertools.product(("train", "valid"), ("a", "b")):
        (tmp_path / split / name).mkdir(parents=True)
        (tmp_path / split / name / "0.jpg").write_bytes(b"image")
    (tmp_path / "valid/b/0.jpg").unlink()
    if fault == "missing":
        (tmp_path / "valid/b").rmdir()
    source = {"kind": "folder", "train": str(tmp_path / "train"), "valid": str(tmp_path / "valid")}
    words = {"empty": "valid/b: no images in this folder", "missing": "valid has no b; give each class a folder"}[fault]
    for keep_going in (False, True):
        found, said = jobs(tmp_path / "results"), list[Finding]()
        found.context.datasets["d"] = validate(
            dataset_type(), {"kind": "imagenet", "source": source, "shards": {"valid": 3}}
        )
        found.context.say, found.context.keep_going = said.append, lambda: keep_going  # noqa: B023
        for number in range(3):
            wildcards = SimpleNamespace(dataset="d", file=f"valid-000{number}.h5")
            assert words in found.datasets.acquire_params(wildcards)["settings"]["files"]
        assert [finding.status for finding in said] == ["warn" if keep_going else "FAIL"]
        assert words in said[0].text


def test_a_changed_local_store_is_read_again(tmp_path: Path) -> None:
    """Raw files depend on all files of a local Zarr store, and on the recorded state of a removed store."""
    store, results = tmp_path / "store.zarr", tmp_path / "results"
    for name in ("zarr.json", "t2m/zarr.json", "t2m/c/0/0/0", "t2m/c/1/0/0"):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(b"abc")
    source = {"kind": "zarr", "store": str(store)}
    split = {"train": ["2020-01-01", "2020-01-20"], "valid": ["2020-01-21", "2020-01-29"]}
    settings = {"kind": "era5", "source": source, "channels": ["t2m"], "split": split}

    def state() -> Any:
        found = jobs(results)
        found.context.datasets["d"] = validate(dataset_type(), settings)
        (file, *_) = parts.raws(found.context.datasets["d"])
        return found.datasets.acquire_params(SimpleNamespace(dataset="d", file=file))["settings"]["files"]

    states = [state()]
    (store / "t2m/c/1/0/0").write_bytes(b"abd")
    states.append(state())
    os.utime(store / "t2m/c/0/0/0", (1.7e9, 1.7e9))
    states.append(state())
    (store / "t2m/c/0/0/0").rename(store / "t2m/c/2")
    states.append(state())
    assert len({json.dumps(each) for each in states}) == 4 and state() == states[-1]
    dataset = validate(dataset_type(), settings)
    manifest = describe.new_manifest(dataset, {}, {}, results / "data/d")
    shutil.rmtree(store)
    manifest.write(results / "data/d/manifest.json")
    assert state() == states[-1], "without the store, its recorded state counts"


def test_too_many_files_fail_in_their_own_jobs_if_the_call_keeps_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_kind, "MAX_FILES", 2)
    (tmp_path / "many").mkdir()
    for number in range(3):
        (tmp_path / f"many/{number}.txt").write_text("x")
    source = {"paths": [str(tmp_path / "many")]}
    wildcards = SimpleNamespace(dataset="d")
    for keep_going in (False, True):
        found, said = jobs(tmp_path / "results"), list[Finding]()
        found.context.datasets["d"] = validate(dataset_type(), {"kind": "files", "source": source})
        found.context.say, found.context.keep_going = said.append, lambda: keep_going  # noqa: B023
        assert found.datasets.files(wildcards) == source["paths"]
        assert [finding.status for finding in said] == ["warn" if keep_going else "FAIL"]
        assert f"{tmp_path}/many: more than 2 files" in said[0].text
        sources = [Path(word) for word in found.datasets.prepared_sources(wildcards)[1:]]
        with pytest.raises(UserError, match="many: more than 2 files"):
            describe_prepared(found.context.datasets["d"], sources, tmp_path)
        assert found.datasets.describe_params(wildcards)["settings"]["files"] and len(said) == 1


def test_a_missing_file_is_no_input_of_a_call_that_keeps_going(tmp_path: Path) -> None:
    """With `--keep-going`, missing files are left out of the inputs; otherwise Snakemake would end the entire call.

    The stage still gets the file's name and reports the missing file.
    """
    files = {"images": str(tmp_path / "images.idx"), "labels": str(tmp_path / "labels.idx")}
    Path(files["images"]).write_bytes(b"x")
    found, said = jobs(tmp_path / "results"), list[Finding]()
    source = {"kind": "files", "all": files, "shares": {"train": 0.5, "valid": 0.5}}
    found.context.datasets["d"] = validate(dataset_type(), {"kind": "mnist", "source": source})
    found.context.say = said.append
    wildcards = SimpleNamespace(dataset="d", split="train", part="train", piece="0")
    assert found.datasets.part_sources(wildcards) == [*files.values()]
    found.context.keep_going = lambda: True
    assert found.datasets.part_sources(wildcards) == [files["images"]]
    assert found.datasets.source_words(wildcards) == ["--source", *files.values()]
    assert [finding.status for finding in said] == ["FAIL"] and "labels.idx: no such file" in said[0].text
