"""Jobs of shipped plans in `snakemake -n --profile perlmutter`, mainly of plans that profile two studies on GPUs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

import pytest

from dlscale.config import resolve
from dlscale.data import parts
from dlscale.launch import slurm
from tests.workflow.conftest import Job, Outcome, Tree

PLANS = ["plan_cosmo_profile", "plan_era5_profile"]
#: Profiled runs: first and last rung of each ladder on one GPU, and (`FOUR`) the last rung on the four GPUs of a node.
SINGLE = [f"{study}_ladder {run}" for study in ("cosmo", "era5") for run in ("baseline", "graphs")]
FOUR = ["cosmo_profile four", "era5_profile four"]
DATA = [
    *("data/downsamp_2048crop_train.h5", "data/downsamp_1024crop_valid.h5"),
    *("data/era5_published/train/1990.h5", "data/era5_published/valid/2016.h5"),
    *(f"data/era5_published/stats/{name}.npy" for name in ("global_means", "global_stds", "time_means")),
]
NSYS = {"environment": {"NSYS": "/global/tools/nsight/bin/nsys"}}
PODMAN_HPC = {"engine": "podman-hpc", "image": "localhost/dlscale:gpu", "modules": ["gpu", "nccl"], **NSYS}


@pytest.fixture(scope="module", params=[{}, PODMAN_HPC], ids=["shifter", "podman-hpc"])
def shown(request: pytest.FixtureRequest, make_tree: Callable[..., Tree]) -> tuple[str, Outcome]:
    """Return the engine and the outcome of a dry run, with placeholders for the tutorials' data."""
    tree = make_tree({"results": "results", "site": request.param})
    for name in DATA:
        (tree.path / name).parent.mkdir(parents=True, exist_ok=True)
        (tree.path / name).write_bytes(b"x")
    return request.param.get("engine", "shifter"), tree.planned("--profile", "perlmutter", targets=PLANS)


def profiles(outcome: Outcome) -> dict[str, Job]:
    return {" ".join(job.wildcards.values()): job for job in outcome.jobs if job.rule == "profile"}


@pytest.mark.slow
def test_only_the_named_runs_are_profiled_and_timed(shown: tuple[str, Outcome]) -> None:
    _, outcome = shown
    assert sorted(profiles(outcome)) == sorted(SINGLE + FOUR)
    names = {name for name in outcome.names if name.split()[0] in ("train", "throughput", "tune")}
    assert names == {f"throughput {run}" for run in SINGLE + FOUR}, "the runs must be timed, not trained"


def test_profiles_run_in_the_container_and_four_by_srun(shown: tuple[str, Outcome]) -> None:
    engine, outcome = shown
    for name, job in profiles(outcome).items():
        words = shlex.split(job.command)
        starter, inside = words[: words.index(engine)], words[words.index(engine) :]
        stage = inside.index("dlscale")
        assert inside[stage - 3 : stage + 2] == ["python", "-P", "-m", "dlscale", "profile"]
        assert inside[inside.index("--device") + 1] == "cuda"
        plan, run = name.split()
        folder = f"results/plans/{plan}/{run}"
        assert inside[inside.index("--out") + 1] == f"{folder}/profile"
        assert inside[inside.index("--telemetry") + 1] == f"{folder}/telemetry/profile.csv"
        if engine == "shifter":
            assert any(word.startswith("--image=ghcr.io/dlscale/dlscale:gpu-") for word in inside)
            assert "--module=gpu,nccl-plugin" in inside
        else:
            assert {"--gpu", "--nccl", "localhost/dlscale:gpu"} <= set(inside)
            assert "--env=NSYS=/global/tools/nsight/bin/nsys" in inside
            assert starter[-3:] == ["-P", "-m", "dlscale.launch.contain"]
            starter = starter[:-4]
        # Shifter's modules set their variables after `--env`, so `env` sets dlscale's variables inside the container.
        prefix = "" if engine == "shifter" else "--env="
        ordered = f"{prefix}CUDA_VISIBLE_DEVICES=3,2,1,0" in inside
        if name in FOUR:
            assert starter[0] == "srun" and {"--ntasks-per-node=4", "--gpus-per-node=4"} <= set(starter) and ordered
        else:
            assert not starter and not ordered


def test_the_last_epoch_is_profiled_with_the_ladders_settings(shown: tuple[str, Outcome]) -> None:
    """nsys and PyTorch profile the last of four epochs. Runs have the settings of their rungs."""
    for name, job in profiles(shown[1]).items():
        words = shlex.split(job.command)
        run = json.loads(words[words.index("--config") + 1])
        assert run["profile"]["tools"] == ["nsys", "torch"] and run["profile"]["ranks"] == [0]
        assert (run["profile"]["epoch"], run["cuda_graph"]) == (4, name.split()[1] != "baseline")
        assert run["geometry"] == {
            **{"nodes": 1, "gpus_per_node": 4 if name in FOUR else 1},
            **{"tp": 1, "cp": 1, "order": "tp-cp-dp", "cpus": None, "memory_mb": None},
        }
        of_one = 64 if run["study"] == "cosmo_unet" else 16
        assert run["batch_size"] == of_one * run["geometry"]["gpus_per_node"]


def test_the_slurm_request_of_profiles(shown: tuple[str, Outcome]) -> None:
    for name, job in profiles(shown[1]).items():
        gpus, qos = (4, "regular") if name in FOUR else (1, "shared")
        asked = {key: job.resources.get(key) for key in ("nodes", "constraint", "gres", "qos", "cpus_per_task")}
        assert asked == {"nodes": 1, "constraint": "gpu&hbm40g", "gres": f"gpu:{gpus}", "qos": qos, "cpus_per_task": 32}
        # The time of a first rung follows from its published speed. A later rung, of unknown speed, gets 60 minutes.
        assert job.resources["runtime"] == 60 or name.endswith("baseline")


@pytest.mark.slow
def test_every_shipped_plan_would_run_on_perlmutter(make_tree: Callable[..., Tree]) -> None:
    """With placeholders for the data, a dry run accepts every run of the shipped plans."""
    tree = make_tree({"results": "results"})
    configuration = resolve.load({"targets": ["cosmo_published"]})
    # `mnist_cores` sets the CPUs of a GPU, which Perlmutter does not allow (`fixed_share`).
    shipped = [name for study in resolve.study_files().values() for name in study.plans if name != "mnist_cores"]
    for dataset in configuration.workflow.datasets.values():
        kind = parts.kind_of(dataset)
        prepared = kind.prepared_files(dataset) if kind.prepared(dataset) else []
        raws = [raw.origin for raw in parts.raws(dataset).values() if raw.origin != "simulated"]
        for path in [tree.path / name.replace("*", "2000") for name in [*prepared, *raws] if "://" not in name]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path = path if path.suffix else path / "CLASS/1.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
    runs = [run for name in shipped for run in configuration.plans[name].values()]
    for program in [own for each in runs if (own := each.run.program)]:
        for word in [word for word in program.command if word.endswith(".py")]:
            script = tree.path / program.folder / word
            script.parent.mkdir(parents=True, exist_ok=True)
            script.touch()
    outcome = tree.planned("--profile", "perlmutter", targets=[f"plan_{name}" for name in shipped])
    stages = ("train", "throughput", "profile", "tune")
    made = {tuple(job.wildcards.values()) for job in outcome.jobs if job.rule in stages}
    # later rungs of a sweep depend on results that do not exist yet
    expected = {(run.plan, run.name) for run in runs if not run.rung}
    lacking = {
        (plan, run) for plan, left_out in configuration.skipped_runs.items() for run in left_out
    }  # runs that this machine does not support
    assert made - lacking == expected


def test_options_of_the_user_and_the_warning_signal_reach_sbatch(make_tree: Callable[..., Tree]) -> None:
    """Without the signal, a training would not save before its time limit."""
    tree = make_tree({"results": "results"})
    for option, value, expected in [
        ("--set-resources", "train:slurm_extra='--reservation=tutorial --nice=5'", "--reservation=tutorial --nice=5"),
        ("--set-resources", "train:slurm_extra=f'--nice={attempt}'", "--nice=1"),
        ("--default-resources", "slurm_extra='--nodelist=nid001'", "--nodelist=nid001"),
    ]:
        site = ["site='perlmutter'"] if option == "--default-resources" else []
        outcome = tree.planned("--profile", "perlmutter", option, value, *site, targets=["plan_cosmo_demo"])
        trained = {slurm.words(job.resources) for job in outcome.jobs if job.rule == "train"}
        assert trained and all(line.endswith(f" --signal=USR2@120 {expected}") for line in trained)
        others = {job.resources.get("slurm_extra") for job in outcome.jobs if job.rule == "preprocess"}
        assert others == {expected if site else ""}


@pytest.mark.parametrize("option", ["--signal=B:USR1@60", "--nice=5 -N2", "--gpus-per-task=1", "--mem 5G"])
def test_an_option_of_sbatch_that_dlscale_sets_is_refused(make_tree: Callable[..., Tree], option: str) -> None:
    tree = make_tree({"results": "results"})
    done = tree.snakemake("--profile", "perlmutter", "-n", "--set-resources", f"train:slurm_extra='{option}'")
    taken = option.removeprefix("--nice=5 ").removesuffix("2").partition("=")[0].partition(" ")[0]
    assert done.status == 2
    assert f"train:slurm_extra: {taken}: dlscale sets this option of sbatch itself" in done.output
    assert "Traceback" not in done.output
