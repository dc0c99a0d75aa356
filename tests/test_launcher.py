"""Commands that start a stage's processes, for every container engine and every starter, such as torchrun or srun."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from snakemake_executor_plugin_slurm import ExecutorSettings
from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.utils import set_gres_string

from dlscale.config import resolve as config
from dlscale.config.run import Geometry
from dlscale.config.site import Site, _warn_once
from dlscale.core.errors import UserError
from dlscale.core.machine import FABRIC, HOST_SUFFIX
from dlscale.core.process import Image
from dlscale.core.settings import read_yaml
from dlscale.launch import image, launcher, slurm
from dlscale.launch.contain import PASSED_ON
from dlscale.launch.launcher import PYTHON_HERE, ContainerMounts, check_names, launch, outside, packages, resolve
from tests.conftest import ROOT, variables
from tests.waiting import PATIENCE

ENGINES = ["none", "docker", "podman", "podman-hpc", "shifter", "apptainer", "enroot"]
SCHEDULER = {"cpu_nodes": {"cpus": 256}, "gpu_nodes": {"cpus": 128, "gpus": 4}}
HERE = ContainerMounts("/scratch/my work", "/scratch/my work/workflow_scripts", uid=1000, gid=100, data=("/cfs/a b",))
WRITING = replace(HERE, results="/scratch/my work/results")
ONE, FOUR, EIGHT = Geometry(), Geometry(gpus_per_node=4), Geometry(nodes=2, gpus_per_node=4)


class Resources(dict[str, Any]):
    """Resources of a job, read by `get` or as attributes, as in Snakemake."""

    __getattr__ = dict.__getitem__


def site(**changes: Any) -> Site:
    starter = "srun" if changes.get("scheduler") else "torchrun"
    base = {"engine": "podman", "image": "registry/dlscale:1", "starter": starter, "gpu": True}
    return Site.model_validate({**base, **changes})


def words(found: list[str], flag: str) -> list[str]:
    """Return all values of an option that is given as `--flag=value`."""
    return [word.partition("=")[2] for word in found if word.startswith(f"{flag}=")]


# ---- starters --------------------------------------------------------------------------------------


def test_one_process_is_python_alone() -> None:
    for starter in ("direct", "torchrun", "srun"):
        assert launch(site(engine="none", starter=starter), HERE, ONE) == PYTHON_HERE
    assert launch(site(engine="none"), HERE) == PYTHON_HERE


@pytest.mark.slow
def test_srun_gets_the_complete_geometry() -> None:
    assert launch(site(engine="none", starter="srun", scheduler=SCHEDULER), HERE, EIGHT) == [
        *("srun", "--nodes=2", "--ntasks-per-node=4", "--cpu-bind=cores", "--cpus-per-task=32", "--gpus-per-node=4"),
        *("--kill-on-bad-exit=1", *PYTHON_HERE),
    ]


def test_srun_gets_the_options_of_the_site() -> None:
    place = site(engine="none", starter="srun", scheduler=SCHEDULER, start=["--network=no_vni", "--mem={ranks}"])
    found = launch(place, HERE, EIGHT)
    assert found[found.index("--gpus-per-node=4") + 1 :] == [
        *("--network=no_vni", "--mem=8", "--kill-on-bad-exit=1"),
        *PYTHON_HERE,
    ]


@pytest.mark.parametrize(
    "options", [["--cpu-bind=threads"], ["--hint=nomultithread"], ["--hint", "memory_bound"], ["-B", "1:8:1"]]
)
def test_options_of_the_site_for_binding_replace_ours(options: list[str]) -> None:
    """With --cpu-bind, srun would ignore --hint, and refuse or override the site's other options for binding."""
    found = launch(site(engine="none", starter="srun", scheduler=SCHEDULER, start=options), HERE, EIGHT)
    assert [word for word in found if word.startswith("--cpu-bind")] == options[:1] * (options[0][:5] == "--cpu")
    assert found[found.index(options[0]) :][: len(options)] == options


@pytest.mark.parametrize("option", ["--threads-per-core-x", "--hinted", "--cpu-bindings"])
def test_only_options_for_binding_replace_ours(option: str) -> None:
    assert "--cpu-bind=cores" in launch(
        site(engine="none", starter="srun", scheduler=SCHEDULER, start=[option]), HERE, EIGHT
    )


@pytest.mark.parametrize(
    ("start", "message"),
    [
        *(([word], "dlscale sets srun's numbers") for word in ("--ntasks=4", "-n8", "-N", "-c=4", "--gpus-per-task=1")),
        *(([word], "dlscale sets srun's numbers") for word in ("--nodes", "-G4", "--kill-on-bad-exit=0", "-K0")),
        *((["--overlap", word], "") for word in ("--mem=8", "--network=no_vni", "--gpu-bind=none", "-m", "--mpi=pmix")),
        *(([word], "") for word in ("--nodelist=n1", "--ntasks-per-core=1", "--hint=nomultithread", "--cpu-freq=high")),
    ],
)
def test_options_of_srun_that_dlscale_sets_are_refused(start: list[str], message: str) -> None:
    if not message:
        assert site(starter="srun", scheduler=SCHEDULER, start=start).start == start
        return
    with pytest.raises(ValidationError, match=f"start: .*{re.escape(start[0])}.*{message}.*remove these options"):
        site(starter="srun", scheduler=SCHEDULER, start=start)
    assert site(starter="mpirun", start=["mpirun", *start]).starter == "mpirun"


@pytest.mark.parametrize("option", ["--distribution=cyclic", "-m", "--gpu-bind=closest"])
def test_the_order_of_gpus_excludes_options_of_srun(option: str) -> None:
    with pytest.raises(ValidationError, match="with gpu_order, dlscale sets --distribution and --gpu-bind"):
        site(starter="srun", scheduler=SCHEDULER, gpu_order=[3, 2, 1, 0], start=[option])


@pytest.mark.parametrize("name", ["SLURM_HINT", "SBATCH_SIGNAL", "SRUN_CPUS_PER_TASK"])
def test_the_environment_of_the_site_has_no_variables_of_srun(name: str) -> None:
    """The site's environment is set inside srun's tasks, so srun would not read these variables."""
    with pytest.raises(ValidationError, match="would reach the stages only"):
        site(starter="srun", scheduler=SCHEDULER, environment={name: "x"})


def test_the_environment_of_the_site_reaches_a_bare_process() -> None:
    found = launch(site(engine="none", environment={"A": "b c", "D": "$(e)"}), HERE, ONE)
    assert found == ["env", "A=b c", "D=$(e)", *PYTHON_HERE]
    shown = subprocess.run([*found[:3], "printenv", "A", "D"], capture_output=True, text=True, check=True)
    assert shown.stdout == "b c\n$(e)\n"


def test_the_site_sets_the_time_between_lines() -> None:
    """Stages of every kind get `site.log_seconds`, and write lines at this interval; without the key, every 10 s."""
    counted = """
import logging, time
logging.basicConfig(level=logging.INFO)
from dlscale.core.progress import Progress
with Progress("training", 30, "steps") as progress:
    for step in range(30):
        time.sleep(0.02)
        progress.update(step + 1)
"""
    lines = {}
    for seconds in (0.1, 10):
        found = launch(site(engine="none", starter="direct", log_seconds=seconds), HERE)
        command = [*found[: -len(PYTHON_HERE)], sys.executable, "-c", counted]
        done = subprocess.run(command, capture_output=True, text=True, env=variables(), timeout=PATIENCE, check=True)
        lines[seconds] = done.stderr.count(" steps, ")
    assert 3 <= lines[0.1] <= 7 and lines[10] == 1, lines


@pytest.mark.parametrize("engine", ENGINES)
def test_a_variable_is_unset_inside(engine: str) -> None:
    """`env -u` runs inside the container, so it also removes variables that the image or Shifter's modules set."""
    found = launch(site(engine=engine, environment={"A": "b", "NCCL_CROSS_NIC": None}), HERE, ONE)
    place = found.index("NCCL_CROSS_NIC")
    assert found[place - 1] == "-u" and "env" in found[:place] and found[-3:] == PYTHON_HERE[1:]
    if engine not in ("none", "shifter"):
        assert found[place - 3] == "registry/dlscale:1"
    assert not any("NCCL_CROSS_NIC" in word for word in found if word != "NCCL_CROSS_NIC")


def test_variables_of_the_site_win_over_shifters_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """`env` sets the site's variables inside, because Shifter's modules override `--env`; HOME is the caller's."""
    monkeypatch.setenv("HOME", "/global/homes/u/user")
    found = launch(site(engine="shifter", modules=["gpu"], environment={"NCCL_NET_GDR_LEVEL": "PHB"}), HERE, ONE)
    inside = found[found.index("env") :]
    assert {"NCCL_NET_GDR_LEVEL=PHB", "HOME=/global/homes/u/user"} <= set(inside)
    assert not any(word.startswith("--env") for word in found)


# ---- packages in addition to the image's packages -----------------------------------------------------


def test_packages_are_found_last(tmp_path: Path) -> None:
    """Additional packages are last in the search path of a stage and its children. Importing dlscale keeps the path."""
    (tmp_path / "numpy.py").write_text("raise ImportError('the wrong one')\n")
    (tmp_path / "only_here.py").write_text("place = __file__\n")
    found = launch(site(engine="none", packages=str(tmp_path)), HERE, ONE)
    assert found == ["env", f"DLSCALE_PACKAGES={tmp_path}", *PYTHON_HERE]
    code = """
import multiprocessing, sys
there = list(sys.path)
from dlscale.cli import main
assert sys.path == there
main([])
import numpy.linalg, only_here
print(multiprocessing.get_context("spawn").Pool(1).apply(eval, ["__import__('only_here').place"]))
"""
    words = ["env", found[1], sys.executable, "-c", code]
    shown = subprocess.run(words, env=variables(), capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == str(tmp_path / "only_here.py")


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_packages_reach_every_engine(engine: str) -> None:
    found = " ".join(launch(site(engine=engine, packages="/scratch/more"), HERE, ONE))
    assert re.search(r"(--env[= ]|\benv .*)DLSCALE_PACKAGES=/scratch/more\b", found)
    mounted = re.search(r"--(volume=|bind |mount )/scratch/more:/scratch/more\b", found)
    assert bool(mounted) == (engine != "shifter"), "Shifter sees the folder, and refuses to mount it"


def test_packages_are_distinguished_by_version(tmp_path: Path) -> None:
    for name in ("b-2.0", "a-1.1"):
        (tmp_path / f"{name}.dist-info").mkdir()
    assert packages(site(packages=str(tmp_path))) == ["a-1.1", "b-2.0"]
    assert packages(site()) == []
    with pytest.raises(UserError, match="/nowhere: no such folder"):
        resolve(site(packages="/nowhere"))


# ---- assignment of GPUs to processes ---------------------------------------------------------------

ORDERED: dict[str, Any] = {"scheduler": SCHEDULER, "gpu_order": [3, 2, 0, 1]}


@pytest.mark.parametrize(("engine", "starter"), list(itertools.product(ENGINES, ["direct", "torchrun", "srun"])))
def test_the_order_reaches_every_engine(engine: str, starter: str) -> None:
    more = ORDERED if starter != "torchrun" else {"gpu_order": ORDERED["gpu_order"]}
    found = launch(site(engine=engine, starter=starter, **more), HERE, FOUR)
    given = [word for word in found if "CUDA_VISIBLE_DEVICES" in word]
    form = dict.fromkeys(("none", "apptainer", "enroot", "shifter"), "CUDA_VISIBLE_DEVICES=3,2,0,1")
    assert given == [form.get(engine, "--env=CUDA_VISIBLE_DEVICES=3,2,0,1")], (
        "CUDA_VISIBLE_DEVICES must be set exactly once, to the site's order"
    )
    assert ("--gpu-bind=none" in found) == (starter == "srun")


@pytest.mark.parametrize(
    ("geometry", "changes"),
    [
        (None, {}),  # a stage that needs no device
        (ONE, {}),
        (Geometry(gpus_per_node=2), {}),  # part of a node: only Slurm knows which GPUs the job gets
        (FOUR, {"gpu": False}),
        (FOUR, {"gpu_order": None}),
    ],
)
def test_without_a_site_order_the_scheduler_assigns_gpus(geometry: Geometry | None, changes: dict[str, Any]) -> None:
    found = launch(site(engine="none", starter="srun", **{**ORDERED, **changes}), HERE, geometry)
    assert "CUDA_VISIBLE_DEVICES" not in " ".join(found)
    assert "--gpu-bind=none" not in found
    assert ("--cpu-bind=cores" in found) == (geometry is not None and geometry.world_size > 1), (
        "CPUs must be bound if there are several processes"
    )


# ---- files of other users -------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_imported_from_the_working_folder(tmp_path: Path) -> None:
    """No module is imported from the working folder: by stages, their children, torchrun, mpirun or the doctor."""
    for name in ("argparse", "h5py", "numpy", "platform", "psutil", "pynvml", "torch", "yaml"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w')\n")
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import h5py'], check=True)"
    doctor = (
        "from dlscale.config.site import Site; from dlscale.extensions.doctor.doctor import probe_site; "
        "print(probe_site(Site(), []))"
    )
    stages = [
        [*launch(site(engine="none"), HERE, ONE), "train", "--help"],
        [*launch(site(engine="none"), HERE, Geometry(gpus_per_node=2)), "train", "--help"],
        [
            *launch(site(engine="none", starter="mpirun", start=["env"]), HERE, Geometry(gpus_per_node=2)),
            "train",
            "--help",
        ],
        ["python", "-P", "-c", f"from dlscale.__main__ import main; main(); {child}", "--version"],
        ["python", "-P", "-c", doctor],
    ]
    environment = variables(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for words in stages:
        done = subprocess.run(words, env=environment, cwd=tmp_path)
        assert done.returncode == 0 and not (tmp_path / "executed").exists(), words


# ---- engines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["docker", "podman", "podman-hpc"])
def test_engines_that_run(engine: str) -> None:
    found = launch(
        site(engine=engine, mounts={"/cfs/x": "/data", "/cfs/y": "/cfs/y"}, environment={"A": "b c"}),
        replace(HERE, data=(*HERE.data, "/cfs/y")),  # the site also mounts this folder, which must appear once
        ONE,
    )
    assert found[:6] == [*PYTHON_HERE[:-1], "dlscale.launch.contain", engine, "run"]
    assert found[-5:] == ["registry/dlscale:1", "python", "-P", "-m", "dlscale"]
    assert {"--rm", "--init", "--interactive", "--cap-drop=ALL", "--security-opt=no-new-privileges"} < set(found)
    assert words(found, "--workdir") == ["/scratch/my work"]
    assert words(found, "--volume") == [
        *("/scratch/my work:/scratch/my work:ro", "/cfs/x:/data", "/cfs/y:/cfs/y", "/cfs/a b:/cfs/a b:ro")
    ]
    given = words(found, "--env")
    assert {"A=b c", "PYTHONPATH=/scratch/my work/workflow_scripts", "DLSCALE_LIFELINE=1"} < set(given)
    assert {"WANDB_API_KEY", "WANDB_MODE", *PASSED_ON} < set(given), "variables must be passed by name, without values"


def mounts(found: list[str]) -> list[str]:
    """Return the mounts of a command, in the form of podman."""
    given = words(found, "--volume")
    given += [word for flag, word in itertools.pairwise(found) if flag in ("--bind", "--mount")]
    return [word.replace(":none:rbind,ro,x-create=auto", ":ro").replace(r"\040", " ") for word in given]


@pytest.mark.parametrize("engine", ["docker", "podman", "podman-hpc", "apptainer", "enroot"])
def test_a_stage_can_change_only_the_results(engine: str) -> None:
    """A container of dlscale's stages mounts the working folder read-only. External programs may write there."""
    binds = mounts(launch(site(engine=engine), WRITING, ONE))
    assert [bind for bind in binds if not bind.endswith(":ro")] == [":".join([f"{HERE.folder}/results"] * 2)]
    assert binds.index(f"{HERE.folder}:{HERE.folder}:ro") < binds.index(":".join([f"{HERE.folder}/results"] * 2)), (
        "a later mount would hide the results"
    )
    program = launcher.container_command(site(engine=engine), WRITING, gpu=False)
    assert f"{HERE.folder}:{HERE.folder}" in mounts(program)


def test_files_belong_to_the_caller() -> None:
    assert words(launch(site(engine="docker"), HERE, ONE), "--user") == ["1000:100"]
    found = launch(site(engine="podman"), HERE, ONE)
    assert "--userns=keep-id" in found and words(found, "--user") == ["1000:100"]
    assert "--userns=keep-id" not in launch(site(engine="podman"), ContainerMounts("/w", "/w", uid=0, gid=0), ONE)
    found = launch(site(engine="podman-hpc"), HERE, ONE)
    assert words(found, "--user") == ["0:0"], "root in the container must be the calling user"
    assert words(found, "--group-add") == ["keep-groups"], "files may be readable by the user's groups only"
    assert "--no-healthcheck" in found


@pytest.mark.parametrize(
    ("engine", "words_for_gpus"),
    [
        ("docker", ["--gpus=all"]),
        ("podman", ["--device=nvidia.com/gpu=all"]),
        ("podman-hpc", ["--gpu"]),
        ("apptainer", ["--nv"]),
        ("enroot", ["NVIDIA_VISIBLE_DEVICES=all"]),
    ],
)
def test_only_runs_on_machines_with_gpus_get_gpus(engine: str, words_for_gpus: list[str]) -> None:
    for geometry, gpu in itertools.product((None, ONE, FOUR), (True, False)):
        found = launch(site(engine=engine, gpu=gpu), HERE, geometry)
        assert [word for word in found if word in words_for_gpus] == (words_for_gpus if gpu and geometry else [])


@pytest.mark.parametrize(
    ("changes", "device"),
    [
        ({"gpu": None}, "auto"),  # use a GPU if this machine has one
        ({"gpu": True}, "cuda"),
        ({"gpu": False}, "auto"),
        ({"gpu": None, "scheduler": SCHEDULER}, "cuda"),
        ({"gpu": False, "scheduler": SCHEDULER}, "auto"),
        ({"gpu": None, "scheduler": {**SCHEDULER, "gpu_nodes": {"cpus": 64}}}, "auto"),
    ],
)
def test_runs_compute_on_gpus_where_the_site_has_some(changes: dict[str, Any], device: str) -> None:
    assert launcher.device(site(**changes)) == device


def test_shifter_by_its_documented_rules() -> None:
    found = launch(
        site(engine="shifter", modules=["gpu", "nccl-plugin"], mounts={"/cfs/x": "/data"}, environment={"A": "b"}),
        HERE,
        ONE,
    )
    assert found[0] == "shifter" and "DLSCALE_LIFELINE=1" not in " ".join(found), (
        "shifter passes signals and the exit status on without DLSCALE_LIFELINE"
    )
    expected = {
        "--image": ["registry/dlscale:1"],
        "--module": ["gpu,nccl-plugin"],  # in one option, because shifter uses only the last
        "--volume": ["/cfs/x:/data"],
        "--workdir": ["/scratch/my work"],
    }
    assert {flag: words(found, flag) for flag in expected} == expected
    assert all(word.partition("=")[2] for word in words(found, "--env")), "shifter does not accept empty values"
    assert found[-4:] == ["python", "-P", "-m", "dlscale"]


def test_apptainer() -> None:
    found = launch(site(engine="apptainer", image="/cfs/dlscale.sif"), HERE, None)
    assert found[4:7] == ["apptainer", "exec", "--cleanenv"]
    assert "--no-privs" in found[: found.index("/cfs/dlscale.sif")], "root in the container must have no capabilities"
    assert found[-5:] == ["/cfs/dlscale.sif", "python", "-P", "-m", "dlscale"]
    pairs = list(itertools.pairwise(found))
    # a mount hides earlier mounts below the same path
    binds = [word for option, word in pairs if option == "--bind"]
    assert binds.index("/cfs/a b:/cfs/a b:ro") < binds.index("/scratch/my work:/scratch/my work:ro")
    assert ("--pwd", "/scratch/my work") in pairs
    with pytest.raises(UserError, match="/cfs/a,b: apptainer cannot be given a path with ','"):
        launch(site(engine="apptainer"), ContainerMounts("/w", "/w", uid=1, gid=1, data=("/cfs/a b", "/cfs/a,b")), ONE)


def test_enroot() -> None:
    """enroot gets mounts as lines of an fstab, and NVIDIA_VISIBLE_DEVICES, because an image may set it."""
    place = site(engine="enroot", image="/cfs/dlscale.sqsh", environment={"A": "b c", "D": None}, mounts={"/x": "/y"})
    found = launch(place, replace(WRITING, data=(r"/cfs/a b\c",)), None)
    assert found[:6] == [*PYTHON_HERE[:-1], "dlscale.launch.contain", "enroot", "start"]
    end = found.index("/cfs/dlscale.sqsh")
    assert found[end + 1 :] == ["env", "-u", "D", "--chdir=/scratch/my work", "python", "-P", "-m", "dlscale"]
    pairs = list(zip(found[6:end:2], found[7:end:2], strict=True))
    read_only = "none:rbind,ro,x-create=auto"
    assert [word for option, word in pairs if option == "--mount"] == [
        rf"/cfs/a\040b\134c:/cfs/a\040b\134c:{read_only}",
        rf"/scratch/my\040work:/scratch/my\040work:{read_only}",
        r"/scratch/my\040work/results:/scratch/my\040work/results",
        "/x:/y",
    ]
    given = [word for option, word in pairs if option == "--env"]
    assert {"A=b c", "HOME=/tmp", "NVIDIA_VISIBLE_DEVICES=void"} < set(given) and len(pairs) == 4 + len(given)
    own = launch(site(engine="enroot", environment={"NVIDIA_VISIBLE_DEVICES": "0"}), HERE, ONE)
    assert [word for word in own if "VISIBLE" in word] == ["NVIDIA_VISIBLE_DEVICES=0"]
    with pytest.raises(UserError, match="/a:b: enroot cannot be given a path with ':'"):
        launch(place, replace(HERE, data=("/a:b",)), None)


@pytest.mark.parametrize("engine", ["apptainer", "enroot"])
def test_containers_without_a_supervisor_get_variables_by_name(engine: str, tmp_path: Path) -> None:
    """Set variables of ranks and programs, such as secrets, reach the container by name; arguments have no values."""
    show = "#!/bin/sh\nprintf '%s\\n' \"$@\" =; env\n"
    (tmp_path / engine).write_text(show)
    (tmp_path / engine).chmod(0o755)
    guest = launcher.Guest("{folder}", ("sh",), ("SECRET", "UNSET"))
    found = launcher.container_command(site(engine=engine, environment={"RANK": "5"}), HERE, gpu=False, guest=guest)
    given = {"RANK": "3", "LOCAL_RANK": "1", "SECRET": "hidden", "OTHER": "x", "ENROOT_LOGIN_SHELL": "yes"}
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "workflow_scripts")}
    done = subprocess.run([*found, "x"], env={**given, **paths}, capture_output=True, text=True, check=True)
    arguments, _, environment = done.stdout.partition("\n=\n")
    assert "hidden" not in arguments and "UNSET" not in done.stdout and arguments.endswith("\nsh\nx")
    if engine == "enroot":
        assert re.findall("^--env=(.*)", arguments, re.M) == ["LOCAL_RANK", "SECRET"], "the site's RANK must win"
        assert {"SECRET=hidden", "ENROOT_LOGIN_SHELL=no", "ENROOT_MOUNT_HOME=no"} < {*environment.split()}
    else:
        assert {*re.findall("^APPTAINERENV_(.*)", environment, re.M)} == {"LOCAL_RANK=1", "SECRET=hidden"}


@pytest.mark.parametrize(
    ("engine", "name", "commands"),
    [
        (
            *("apptainer", "localhost/dlscale:cpu"),
            ".sif file. To make dlscale.sif: podman save --format docker-archive --output dlscale.tar "
            "localhost/dlscale:cpu && apptainer build dlscale.sif docker-archive:dlscale.tar (from",
        ),
        ("apptainer", "/cfs/x.sif", "apptainer build /cfs/x.sif docker-archive:dlscale.tar (from a registry: "),
        ("enroot", "x/y:1", "To make dlscale.sqsh: enroot import --output dlscale.sqsh podman://localhost/dlscale:gpu"),
        (
            "enroot",
            "/cfs/x.sqsh",
            "To make /cfs/x.sqsh: enroot import --output /cfs/x.sqsh podman://localhost/dlscale:",
        ),
    ],
)
def test_a_missing_image_file_is_reported_with_its_commands(engine: str, name: str, commands: str) -> None:
    with pytest.raises(UserError) as error:
        image.main(SimpleNamespace(engine=engine, image=name))
    assert str(error.value).startswith(f"{name}: no such file; site.image has to be a ")
    assert commands in str(error.value)
    assert image.identity(engine, name) is None


@pytest.mark.parametrize(("engine", "starter"), list(itertools.product(ENGINES, ["direct", "torchrun", "srun"])))
def test_arguments_survive_a_shell(engine: str, starter: str, tmp_path: Path) -> None:
    """A shell leaves each quoted word unchanged, even a hostile name; Snakemake's rules run commands in a shell."""
    hostile = tmp_path / "a 'b' $(touch pwned) `touch pwned` \"c\" ; touch pwned"
    hostile.mkdir()
    place = ContainerMounts(str(hostile), f"{hostile}/src", uid=1, gid=1)
    variables = {"A": "$(touch pwned) ' \" \\ ;"}
    scheduler = SCHEDULER if starter == "srun" else None
    found = launch(site(engine=engine, starter=starter, scheduler=scheduler, environment=variables), place, EIGHT)
    command = f"{shlex.quote(sys.executable)} -c 'import json,sys; print(json.dumps(sys.argv[1:]))' {shlex.join(found)}"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(shown.stdout) == found
    assert {path.name for path in tmp_path.iterdir()} == {hostile.name}


# ---- the choice of `auto` --------------------------------------------------------------------------


def fake(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).write_text(f"#!/bin/sh\nexit {int(name == 'docker')}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("there", "name", "taken"),
    [
        ([], "registry/x:1", "none"),
        (["podman"], "registry/x:1", "podman"),
        (["podman", "podman-hpc"], "registry/x:1", "podman-hpc"),
        (["docker", "apptainer", "shifter"], "registry/x:1", "shifter"),
        (["apptainer", "podman"], "registry/x:1", "podman"),
        (["shifter", "apptainer", "podman"], "localhost/dlscale:cpu", "podman"),
        (["shifter", "apptainer", "enroot", "podman"], "/cfs/x.sif", "apptainer"),
        (["shifter", "apptainer", "enroot", "podman"], "/cfs/x.sqsh", "enroot"),
        (["shifter", "apptainer", "podman"], "/cfs/x.sqsh", "none"),
        (["shifter", "apptainer", "podman"], "registry/x:1", "shifter"),
    ],
)
def test_auto_selects_an_available_engine_and_reports_why(
    tmp_path: Path, there: list[str], name: str, taken: str
) -> None:
    chosen, reasons = resolve(site(engine="auto", image=name), fake(tmp_path, *there))
    assert chosen.engine == taken
    assert reasons[0].startswith(f"engine: {taken}, since ")


def test_docker_without_a_daemon_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{fake(tmp_path, 'docker')}:{os.environ['PATH']}")
    chosen, reasons = resolve(site(engine="auto"), tmp_path)
    assert chosen.engine == "none" and "docker (docker info fails)" in reasons[0]


# ---- invalid sites ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        # Mounts over system folders are refused.
        *(
            ({"mounts": {"/data": target}}, "does not allow mounts at")
            for target in ("/etc", "/etc/x", "/var/lib", "/opt", "/", "/opt/")
        ),
        # Values that an engine would reject or misread are refused.
        ({"image": "--privileged"}, r"site\.image"),
        ({"image": "x; touch pwned"}, r"site\.image"),
        ({"mounts": {"/a:/b": "/c"}}, r"site\.mounts"),
        ({"mounts": {"relative": "/c"}}, r"site\.mounts"),
        ({"environment": {"A B": "c"}}, r"site\.environment"),
        ({"environment": {"A": ""}}, r"site\.environment"),
        ({"modules": ["--privileged"]}, r"site\.modules"),
        ({"engine": "singularity"}, r"site\.engine"),
        # A GPU order must name each GPU exactly once.
        *(
            ({"scheduler": SCHEDULER, "gpu_order": order}, "expected the numbers of a node's 4 GPUs")
            for order in ([0, 1], [0, 1, 2, 2], [1, 2, 3, 4], [3, 2, 1, 0, 4])
        ),
        (
            {"engine": "auto", "scheduler": SCHEDULER},
            "site: engine: auto .*different nodes",
        ),
        # Queues must exist, and old keys cannot be combined with queues.
        (
            {"scheduler": {**SCHEDULER, "queues": {"debug": {}}, "run_queues": ["debgu"]}},
            r"site\.scheduler: run_queues, data_queue: no queue is called 'debgu' \(did you mean 'debug'\?\)",
        ),
        ({"scheduler": {**SCHEDULER, "data_queue": "cpu"}}, "no queue is called 'cpu'"),
        (
            {"scheduler": {**SCHEDULER, "run_queues": ["debug"], "whole_qos": "debug"}},
            r"site\.scheduler: whole_qos: cannot be combined with queues",
        ),
        ({"scheduler": {**SCHEDULER, "qos": [1]}}, "unknown key 'qos'"),
    ],
)
def test_impossible_site_settings_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config.load({"targets": ["cosmo_published"], "site": given})


@pytest.mark.parametrize("name", ["docker", "slurm", "cloud", "perlmutter", "juwels", "leonardo"])
def test_the_profiles_sites_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    loaded = config.load_files("config.yaml", site=name)
    assert (loaded.workflow.site.scheduler is not None) == (name != "docker")
    assert loaded.workflow.site.gpu_order == ([3, 2, 1, 0] if name == "perlmutter" else None)


# ---- Slurm -----------------------------------------------------------------------------------------


@pytest.fixture
def perlmutter(monkeypatch: pytest.MonkeyPatch) -> slurm.Scheduler:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SBATCH_ACCOUNT", "m1234")
    return config.load_files("config.yaml", site="perlmutter").workflow.site.scheduler


def test_the_request_of_a_run_on_one_gpu(perlmutter: slurm.Scheduler) -> None:
    assert slurm.request(perlmutter, "train", ONE) == {
        **{"nodes": 1, "mem_mb": 0, "cpus_per_task": 32, "gres": "gpu:1", "runtime": 720},
        **{"qos": "shared", "constraint": "gpu&hbm40g", "slurm_account": "m1234_g", "slurm_extra": "--signal=USR2@120"},
    }
    # A program gets no warning before its time limit: without a handler, USR2 would end the program.
    assert "slurm_extra" not in slurm.request(perlmutter, "program", ONE)


def test_the_request_of_a_run_on_nodes(perlmutter: slurm.Scheduler) -> None:
    assert slurm.request(perlmutter, "throughput", EIGHT, minutes=25) == {
        **{"nodes": 2, "mem_mb": 0, "cpus_per_task": 32, "gres": "gpu:4", "mpi": "srun", "tasks_per_node": 4},
        **{"runtime": 25, "qos": "regular", "constraint": "gpu&hbm40g", "slurm_account": "m1234_g"},
    }


@pytest.mark.parametrize(("gres", "gpus"), [("gpu", "1"), ("gpu:a100", "a100:1")])
def test_the_request_of_one_gpu_on_each_of_two_nodes(perlmutter: slurm.Scheduler, gres: str, gpus: str) -> None:
    """One GPU on each of two nodes is requested by --gpus-per-node instead of `gres`.

    With `gres`, Snakemake's Slurm plugin multiplies tasks by GPUs, and it refuses one task per node.
    """
    nodes = perlmutter.gpu_nodes.model_copy(update={"gres": gres})
    assert slurm.request(perlmutter.model_copy(update={"gpu_nodes": nodes}), "train", Geometry(nodes=2)) == {
        **{"nodes": 2, "mem_mb": 0, "cpus_per_task": 32, "mpi": "srun", "tasks": 2, "runtime": 720, "qos": "regular"},
        **{"constraint": "gpu&hbm40g", "slurm_account": "m1234_g"},
        "slurm_extra": f"--gpus-per-node={gpus} --signal=USR2@120",
    }


def test_the_request_of_one_process_with_four_gpus(perlmutter: slurm.Scheduler) -> None:
    assert slurm.request(perlmutter, "throughput", FOUR, processes=ONE) == {
        **{"nodes": 1, "mem_mb": 0, "cpus_per_task": 128, "gres": "gpu:4", "runtime": 60, "qos": "regular"},
        **{"constraint": "gpu&hbm40g", "slurm_account": "m1234_g"},
    }


def test_a_run_may_set_cpus_and_memory(perlmutter: slurm.Scheduler) -> None:
    """A run may set its CPUs and memory, as the MNIST workshop's job script does.

    The job is charged for its fraction of the node's GPUs or CPUs, whichever is larger.
    """
    nodes = perlmutter.gpu_nodes.model_copy(update={"fixed_share": False})
    perlmutter = perlmutter.model_copy(update={"gpu_nodes": nodes})
    own = Geometry(cpus=1, memory_mb=8192)
    assert slurm.words(slurm.request(perlmutter, "train", own)).split()[4:7] == [
        *("--cpus-per-task=1", "--gres=gpu:1", "--mem=8192")
    ]
    starter = {"engine": "none", "starter": "srun", "scheduler": perlmutter}
    assert "--cpus-per-task=8" in launch(site(**starter), HERE, Geometry(gpus_per_node=4, cpus=8))
    half = slurm.request(perlmutter, "train", Geometry(cpus=64))
    assert [slurm.part(perlmutter, ONE, slurm.Queue(), asked) for asked in (half, {"cpus_per_task": 8})] == [0.5, 0.25]
    assert slurm.request(perlmutter, "train", Geometry(gpus_per_node=4, cpus=8), processes=ONE)["cpus_per_task"] == 32
    with pytest.raises(UserError, match=r"4 processes with 64 CPUs .*geometry.cpus.* 256 CPUs"):
        slurm.check(perlmutter, Geometry(gpus_per_node=4, cpus=64))
    with pytest.raises(UserError, match=r"geometry.memory_mb: 600000 MB .*500000 MB"):
        slurm.check(PLACED, Geometry(memory_mb=600_000))


def test_the_request_of_data_jobs(perlmutter: slurm.Scheduler) -> None:
    found = slurm.request(perlmutter, "data", None)
    assert found["constraint"] == "cpu" and found["slurm_account"] == "m1234" and "gres" not in found
    # For a project without CPU hours, `cpu_nodes` are GPU nodes: data jobs use one GPU, its CPUs and the GPU account.
    data = slurm.request(perlmutter.model_copy(update={"cpu_nodes": perlmutter.gpu_nodes}), "data", None)
    assert (data["gres"], data["cpus_per_task"], data["slurm_account"]) == ("gpu:1", 32, "m1234_g")


def test_the_limits_of_a_queue_are_checked(perlmutter: slurm.Scheduler) -> None:
    debug = perlmutter.model_copy(update={"run_queues": ["shared", "debug"]})
    assert slurm.request(debug, "train", EIGHT)["runtime"] == 30, "the runtime must be in minutes"
    allowed = re.escape("at most shared (1 node, 2 GPUs), debug (8 nodes)")
    with pytest.raises(UserError, match=rf"^a\.geometry: no queue .* 9 nodes with 36 GPUs.*; {allowed}"):
        slurm.check(debug, Geometry(nodes=9, gpus_per_node=4), "a.")
    with pytest.raises(UserError, match="8 is more than the 4 GPUs"):
        slurm.check(perlmutter, Geometry(gpus_per_node=8))
    cpus = perlmutter.model_copy(update={"gpu_nodes": slurm.Nodes(cpus=64)})
    slurm.check(cpus, Geometry(gpus_per_node=2))
    with pytest.raises(UserError, match=r"gpus_per_node: 3 processes .* 96 CPUs.* 64"):
        slurm.check(cpus, Geometry(gpus_per_node=3))


def test_a_queue_has_a_shortest_time_limit(perlmutter: slurm.Scheduler) -> None:
    preempt = perlmutter.model_copy(update={"run_queues": ["preempt"]})
    assert slurm.request(preempt, "train", EIGHT, minutes=15)["runtime"] == 120
    assert slurm.request(perlmutter, "train", EIGHT, minutes=15)["runtime"] == 15


def test_a_queue_has_a_number_of_jobs(perlmutter: slurm.Scheduler) -> None:
    assert slurm.job_limits(perlmutter) == {"queue_debug_jobs": 5, "queue_premium_jobs": 5}
    debug = perlmutter.model_copy(update={"run_queues": ["debug"]})
    assert slurm.request(debug, "train", EIGHT)["queue_debug_jobs"] == 1
    assert "queue_debug_jobs" not in slurm.request(perlmutter, "train", EIGHT)
    small = PLACED.queues["small-g"].model_copy(update={"max_jobs": 7})
    limited = PLACED.model_copy(update={"queues": PLACED.queues | {"small-g": small}})
    (name,) = slurm.job_limits(limited)
    assert name.isidentifier() and slurm.request(limited, "train", ONE)[name] == 1, "Snakemake accepts only identifiers"


@pytest.mark.parametrize("key", ["cpus", "memory_mb"])
def test_a_fixed_share_of_a_node_cannot_be_changed(perlmutter: slurm.Scheduler, key: str) -> None:
    """Perlmutter's shared nodes give each GPU 32 CPUs. A job that requests another number would fail at submission."""
    geometry = Geometry.model_validate({key: 1 if key == "cpus" else 8192})
    with pytest.raises(UserError, match=rf"a\.geometry\.{key}: .*fixed number of CPUs"):
        slurm.check(perlmutter, geometry, "a.")
    free = perlmutter.gpu_nodes.model_copy(update={"fixed_share": False})
    slurm.check(perlmutter.model_copy(update={"gpu_nodes": free}), geometry)


#: Site that limits partitions instead of QOS, like LUMI: `small-g` shares its nodes, `standard-g` does not.
PLACED = slurm.Scheduler.model_validate(
    {
        "account": "m1",
        "cpu_nodes": {"cpus": 64, "memory_mb": 250_000},
        "gpu_nodes": {"cpus": 64, "memory_mb": 500_000, "gpus": 8},
        "queues": {
            "small": {"partition": "small"},
            "small-g": {"partition": "small-g", "max_nodes": 1, "max_gpus": 7},
            "standard-g": {"partition": "standard-g", "max_nodes": 16, "whole_nodes": True},
        },
        "run_queues": ["small-g", "standard-g"],
        "data_queue": "small",
    }
)


def test_a_job_pays_for_its_largest_share_of_a_node() -> None:
    """A job is charged for the largest of its fractions of a node's GPUs, CPUs and memory."""
    shares = {(4, None, None): 0.5, (1, 48, None): 0.75, (4, None, 470_000): 0.94}
    for (gpus, cpus, memory), share in shares.items():
        geometry = Geometry(gpus_per_node=gpus, cpus=cpus, memory_mb=memory)
        asked = slurm.request(PLACED, "train", geometry)
        assert slurm.part(PLACED, geometry, PLACED.queues["small-g"], asked) == pytest.approx(share)


@pytest.mark.parametrize(
    ("geometry", "on_perlmutter", "partition", "memory"),
    [
        (None, ("shared", 0.125), "small", 125_000),
        (ONE, ("shared", 0.25), "small-g", 62_500),
        (Geometry(gpus_per_node=2), ("shared", 0.5), "small-g", 125_000),
        (Geometry(gpus_per_node=3), ("regular", 1.0), "small-g", 187_500),
        (Geometry(nodes=2), ("regular", 1.0), "standard-g", 500_000),
        (FOUR, ("regular", 1.0), "small-g", 250_000),
        (Geometry(nodes=8, gpus_per_node=4), ("regular", 1.0), "standard-g", 500_000),
    ],
)
def test_the_size_of_a_job_chooses_its_queue(
    perlmutter: slurm.Scheduler,
    geometry: Geometry | None,
    on_perlmutter: tuple[str, float],
    partition: str,
    memory: int,
) -> None:
    """A run takes the first queue that allows its nodes and GPUs; a data stage takes its own queue."""
    job = "train" if geometry else "data"
    asked = slurm.request(perlmutter, job, geometry)
    _, queue = slurm.choose_queue(perlmutter, geometry)
    assert (asked["qos"], slurm.part(perlmutter, geometry, queue, asked)) == on_perlmutter
    assert "slurm_partition" not in asked
    asked = slurm.request(PLACED, job, geometry, minutes=10_000)
    assert (asked["slurm_partition"], asked["mem_mb"], asked["runtime"]) == (partition, memory, 10_000)
    assert "qos" not in asked
    bare = slurm.request(PLACED.model_copy(update={"run_queues": [], "data_queue": None}), job, geometry)
    assert not {"qos", "slurm_partition"} & bare.keys()


#: Settings of the shipped profiles' schedulers from the time before the key `queues`.
OLD = {
    "perlmutter": """
        data_qos: shared
        part_qos: shared
        whole_qos: regular
        qos:
          shared: {max_gpus: 2, max_minutes: 2880}
          regular: {max_minutes: 2880}
          debug: {max_nodes: 8, max_minutes: 30, max_jobs: 5}
          premium: {max_minutes: 2880, charge: 2.0, max_jobs: 5}
          preempt: {max_nodes: 128, min_minutes: 120, max_minutes: 2880, charge: 0.25, full_charge_minutes: 120}""",
    "juwels": """
        cpu_nodes: {partition: booster}
        gpu_nodes: {partition: booster}
        qos: {"": {max_minutes: 1440}}""",
    "leonardo": """
        cpu_nodes: {partition: lrd_all_serial}
        gpu_nodes: {partition: boost_usr_prod}
        part_qos: normal
        whole_qos: normal
        qos:
          normal: {max_nodes: 64, max_minutes: 1440}
          boost_qos_dbg: {max_nodes: 2, max_minutes: 30}
          boost_qos_lprod: {max_nodes: 3, max_minutes: 5760}""",
}


@pytest.mark.parametrize("name", OLD)
def test_old_keys_request_the_same_jobs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A site with the keys before `queues` requests the same jobs, with one warning that shows the new keys."""
    _warn_once.cache_clear()
    raw = read_yaml(ROOT / f"profiles/{name}/site.yaml")["scheduler"]
    rest = {key: value for key, value in raw.items() if "queue" not in key}
    given = config.merge(copy.deepcopy(rest), yaml.safe_load(OLD[name]))
    old, _ = (slurm.Scheduler.model_validate(given) for _ in range(2))
    new = slurm.Scheduler.model_validate(raw)
    for geometry, minutes in itertools.product((None, ONE, Geometry(gpus_per_node=3), FOUR, EIGHT), (None, 5)):
        job = "train" if geometry else "data"
        assert slurm.request(old, job, geometry, minutes) == slurm.request(new, job, geometry, minutes)
    (warning,) = caplog.messages
    shown = yaml.safe_load(warning.partition("Write ")[2])
    assert slurm.Scheduler.model_validate({**rest, **shown}) == old


@pytest.mark.parametrize(("part", "whole"), [*itertools.product((None, "a", "b"), (None, "b"))])
def test_old_keys_choose_the_same_qos(part: str | None, whole: str | None) -> None:
    """The translated queues choose and refuse like `part_qos` and `whole_qos`, whose choice the test computes."""
    sizes = [Geometry(nodes=nodes, gpus_per_node=gpus) for nodes in (1, 2, 3) for gpus in (1, 2, 3, 4)]
    limits = (None, 1, 4)
    for gpus, few, most, geometry in itertools.product((0, 1, 4), limits, limits, sizes):
        qos = {"": {"max_gpus": 3}, "a": {"max_gpus": few}, "b": {"max_gpus": most, "max_nodes": 2, "max_jobs": 9}}
        raw = {"cpu_nodes": {"cpus": 64}, "gpu_nodes": {"cpus": 64, "gpus": gpus}, "qos": qos, "data_qos": part}
        scheduler = slurm.Scheduler.model_validate({**raw, "part_qos": part, "whole_qos": whole})
        fits = geometry.gpus_per_node <= (qos[part or ""]["max_gpus"] or gpus)
        expected = part if part and geometry.nodes == 1 and geometry.gpus_per_node < gpus and fits else whole
        limit = qos[expected or ""]
        if geometry.world_size > (limit["max_gpus"] or 99) or geometry.nodes > limit.get("max_nodes", 99):
            with pytest.raises(UserError, match="no queue"):
                slurm.choose_queue(scheduler, geometry)
        else:
            name, queue = slurm.choose_queue(scheduler, geometry)
            assert (queue.qos, queue.whole_nodes) == (expected, expected == whole != part and whole is not None)
            assert queue.max_jobs == limit.get("max_jobs") and name == (expected or "no_qos")
        assert slurm.choose_queue(scheduler, None)[1].qos == part


@pytest.mark.parametrize(
    ("name", "gpu", "two_nodes", "data"),
    [
        (
            "juwels",
            "--partition=booster --nodes=1 --cpus-per-task=24 --gres=gpu:1 --time=720",
            "--partition=booster --nodes=2 --ntasks-per-node=4 --cpus-per-task=24 --gres=gpu:4 --time=720",
            "--partition=booster --nodes=1 --cpus-per-task=24 --gres=gpu:1 --time=240",
        ),
        (
            "leonardo",
            "--partition=boost_usr_prod --qos=normal --nodes=1 --cpus-per-task=8 --gres=gpu:1 --mem=123500 --time=1440",
            "--partition=boost_usr_prod --qos=normal --nodes=2 --ntasks-per-node=4 --cpus-per-task=8 --gres=gpu:4 "
            "--mem=494000 --time=1440",
            "--partition=lrd_all_serial --nodes=1 --cpus-per-task=4 --mem=30800 --time=240",
        ),
    ],
)
def test_requests_of_profiles_that_were_never_tried(name: str, gpu: str, two_nodes: str, data: str) -> None:
    """The expected options come from users' job scripts for these machines."""
    place = Site.model_validate(read_yaml(ROOT / f"profiles/{name}/site.yaml"))
    assert place.scheduler
    found = [slurm.words(slurm.request(place.scheduler, "train", each)) for each in (ONE, EIGHT)]
    found.append(slurm.words(slurm.request(place.scheduler, "data", None)))
    assert [words.replace(" --signal=USR2@120", "") for words in found] == [gpu, two_nodes, data]
    assert slurm.request(place.scheduler, "train", ONE, minutes=10_000)["runtime"] == 1440, (
        "the queue must limit the job's time"
    )
    inside = " ".join(launch(place, HERE, EIGHT))
    assert inside.startswith("srun --nodes=2 --ntasks-per-node=4 --cpu-bind=cores ")
    assert f"{FABRIC}=infiniband" in inside and (f"{HOST_SUFFIX}=i" in inside) == (name == "juwels")


def test_command_lines_of_the_template_for_clouds() -> None:
    place = Site.model_validate(read_yaml(ROOT / "profiles/cloud/site.yaml"))
    assert place.scheduler
    found = [slurm.words(slurm.request(place.scheduler, "train" if each else "data", each)) for each in (EIGHT, None)]
    assert found == [
        "--nodes=2 --ntasks-per-node=4 --cpus-per-task=12 --gres=gpu:4 --time=720 --signal=USR2@120",
        "--nodes=1 --cpus-per-task=16 --time=60",
    ]
    chosen, _ = resolve(place)
    mounts = r"/scratch/my\040work:/scratch/my\040work:none:rbind,ro,x-create=auto"
    container = [
        *(*PYTHON_HERE[:-1], "dlscale.launch.contain", "enroot", "start", "--mount", mounts),
        *("--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        *("--env", f"PYTHONPATH={HERE.sources}", "--env", "PYTHONNOUSERSITE=1", "--env", "HOME=/tmp"),
        *("--env", f"{FABRIC}=infiniband", "/shared/dlscale.sqsh", "env", "--chdir=/scratch/my work"),
    ]
    assert launch(chosen, replace(HERE, data=()), EIGHT) == [
        *("srun", "--nodes=2", "--ntasks-per-node=4", "--cpu-bind=cores", "--cpus-per-task=12", "--gpus-per-node=4"),
        *("--distribution=block:block", "--kill-on-bad-exit=1", *container, "python", "-P", "-m", "dlscale"),
    ]


def test_the_page_with_the_command_lines_of_all_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page, which the documentation generates from the code, shows every profile's requests and commands."""
    for name in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files"):  # not installed with the tests
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(File=None, Files=None))
    hooks = runpy.run_path(str(ROOT / "docs/hooks.py"))
    described = {path.parent.name for path in ROOT.glob("profiles/*/site.yaml")}
    assert {profile for _, profile, _ in hooks["SITES"]} == described
    sections = dict(part.split("\n", 1) for part in hooks["command_lines"]().split("\n## ")[1:])
    starts = {
        "perlmutter": "shifter --image=ghcr.io/dlscale/dlscale:gpu-0.1.0 --module=gpu,nccl-plugin",
        "perlmutter with podman.yaml": "podman-hpc run --rm",
        "slurm with apptainer": "apptainer exec --cleanenv",
        "cloud": "enroot start --mount /scratch/dlscale:/scratch/dlscale:none:rbind,ro,x-create=auto --env NVIDIA",
        "juwels": "srun --nodes=2 --ntasks-per-node=4 --cpu-bind=cores",
        "docker": "docker run --rm",
    }
    texts = {title: " ".join(text.replace("\\\n", "").split()) for title, text in sections.items()}
    assert [title for title, start in starts.items() if start not in texts[title]] == []
    assert "sbatch --account=m1234_g --qos=regular --constraint=gpu&hbm40g --nodes=2" in texts["perlmutter"].replace(
        "'", ""
    )
    assert "**Train on 2 nodes**: refused. geometry.nodes" in texts["perlmutter with podman.yaml"]
    native = texts["perlmutter with native.yaml"]  # the caller's LD_LIBRARY_PATH must not be replaced
    assert "NCCL_NET_PLUGIN=/global/common/software/nersc9/nccl/" in native and "LD_LIBRARY_PATH" not in native
    one, two = native.partition("**Train on 1 GPU**")[2].split("**Train on 2 nodes**")
    assert "-u NCCL_NET" in one and "'NCCL_NET=AWS Libfabric'" not in one  # HPE's ccl_env.sh
    assert "'NCCL_NET=AWS Libfabric'" in two and "NCCL_CROSS_NIC=2" in native


def test_resources_lists_all_requested_resources(perlmutter: slurm.Scheduler) -> None:
    assert set(slurm.RESOURCES) == {
        *slurm.request(perlmutter, "train", EIGHT),
        *slurm.request(PLACED, "data", None),
        *slurm.request(PLACED, "train", Geometry(nodes=2)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("geometry", [None, ONE, FOUR, EIGHT, Geometry(nodes=2)])
def test_the_shown_options_equal_those_given_to_sbatch(perlmutter: slurm.Scheduler, geometry: Geometry | None) -> None:
    """The options that dlscale shows equal the options that Snakemake's Slurm plugin passes to sbatch.

    Account, partition and defaults for one process are not compared, because the plugin adds them.
    """
    nodes = perlmutter.gpu_nodes.model_copy(update={"memory_mb": 256_000, "constraint": "gpu&hbm80g"})
    scheduler = perlmutter.model_copy(update={"gpu_nodes": nodes})
    resources = Resources(slurm.request(scheduler, "train" if geometry else "data", geometry))
    more = dict.fromkeys(("run_uuid", "slurm_logfile", "comment_str", "account", "partition"), "")
    job = SimpleNamespace(resources=resources, threads=1)
    given = shlex.split(get_submit_command(job, {**more, "workdir": ""}) + set_gres_string(job))
    short = {"-t": "--time", "-C": "--constraint", "--mem": "--mem"}
    joined = [f"{short[word]}={value}" for word, value in itertools.pairwise(given) if word in short]
    shown = [word for word in shlex.split(slurm.words(resources)) if not word.startswith("--account")]
    usual = {"--parsable", "--export=ALL", "--ntasks=1"}
    assert set(shown) - usual == {word for word in [*given, *joined] if word.startswith("--") and "=" in word} - usual
    assert any(word.startswith("--mem=") for word in shown) == (geometry is not None)


def test_a_reservation_is_asked_for(perlmutter: slurm.Scheduler) -> None:
    """A reservation is requested with the option of Snakemake's Slurm plugin."""
    job = SimpleNamespace(resources=Resources(slurm.request(perlmutter, "train", ONE)), threads=1)
    more = dict.fromkeys(("run_uuid", "slurm_logfile", "comment_str", "account", "partition", "workdir"), "")
    asked = get_submit_command(job, more, ExecutorSettings(reservation="sc22_tutorial"))
    assert "--reservation=sc22_tutorial" in shlex.split(asked)


def test_auto_without_an_image_selects_no_engine(tmp_path: Path) -> None:
    chosen, reasons = resolve(Site(engine="auto"), fake(tmp_path, "podman"))
    assert chosen.engine == "none" and any("engine: none" in reason and "site.image" in reason for reason in reasons)


# ---- jobs of an earlier call -----------------------------------------------------------------------

QUEUE = "7|RUNNING|/here|rule_train_wildcards_a_b\n8|PENDING|/there|rule_acquire\n9|RUNNING|/here|mine\nodd line\n\n"


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_jobs_of_this_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, "squeue", f"printf '{QUEUE}'")
    assert slurm.left_running("/here") == ["7 (train a_b, running)"]
    assert slurm.left_running("/nowhere") == []


def test_a_failed_query_does_not_mean_an_empty_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If squeue fails, the call waits for squeue's answer; otherwise it could submit running jobs a second time."""
    program(tmp_path, monkeypatch, "squeue", "exit 1")
    assert slurm.left_running("/here") is None
    answers = f"cd {tmp_path}; echo x >>asked; case $(wc -l <asked) in 1) exit 1;; 2) printf '{QUEUE}';; esac"
    program(tmp_path, monkeypatch, "squeue", answers)
    slurm.wait_for_left_running("/here", 0.01)
    said = capsys.readouterr().err.splitlines()
    assert "squeue" in said[0] and "7 (train" in said[1]
    assert (tmp_path / "asked").read_text().count("x") == 3


# ---- the image -------------------------------------------------------------------------------------


def test_an_image_digest_is_passed_to_child_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, "podman", "echo sha256:abc")
    monkeypatch.setenv("DLSCALE_IMAGE", "podman:registry/x:1=sha256:old")
    assert image.image_identity("podman", "registry/x:1", first=False) == "sha256:old"
    assert image.image_identity("podman", "registry/x:2", first=False) == "sha256:abc", (
        "the inherited digest must not be used for another image"
    )
    assert image.image_identity("podman", "registry/x:1", first=True) == "sha256:abc"
    assert Image.read() == Image("podman", "registry/x:1", "sha256:abc")
    assert image.image_identity("none", "", first=True) == "" and Image.read() is None


def test_versions_of_the_images_are_the_projects() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for file, target in (("profiles/perlmutter/site.yaml", "gpu"), ("Snakefile", "cpu")):
        assert f"ghcr.io/dlscale/dlscale:{target}-{version}" in (ROOT / file).read_text(), file


def test_a_chain_of_links_is_followed(tmp_path: Path) -> None:
    """Each folder on a chain of links is mounted once, so that containers can follow the chain.

    The chain has links to links, relative links, and links to folders.
    """
    work, far = tmp_path / "work", tmp_path / "far"
    (far / "v2").mkdir(parents=True)
    work.mkdir()
    (far / "v2/x.h5").touch()
    (far / "by_name").mkdir()
    (far / "by_name/current").symlink_to("../v2")
    (work / "x.h5").symlink_to(far / "by_name/current/x.h5")
    (work / "own.h5").touch()
    assert outside([work / "x.h5", work / "own.h5"], work) == (str(far / "by_name/current"), str(far / "v2"))
    assert outside([far / "v2/x.h5", far / "v2"], work) == (str(far / "v2"),)


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        (
            "/a/$(touch x)",
            {"scheduler": SCHEDULER, "engine": "none"},
            "Slurm jobs cannot be submitted from a path with",
        ),
        ("/a/`x`", {"scheduler": SCHEDULER, "engine": "none"}, "Slurm jobs cannot"),
        ("/a:b", {"engine": "podman"}, "podman cannot be given a path with ':'"),
    ],
)
def test_paths_that_cannot_be_carried_are_refused(path: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        check_names(["/fine 'n' ü", path], site(**changes))
    check_names([path], site(engine="none"))
