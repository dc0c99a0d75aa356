"""`dlscale doctor`: each check on real command output and on fakes that fail or hang; all checks on this machine."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from dlscale.config import resolve as config
from dlscale.config.dataset import DatasetSettings, dataset_type
from dlscale.config.resolve import Configuration
from dlscale.config.run import Geometry
from dlscale.config.site import Nodes, Scheduler, Site
from dlscale.core import machine
from dlscale.core.errors import UserError
from dlscale.data.manifest import File, Manifest
from dlscale.extensions.doctor import doctor, probe
from dlscale.launch import image as images
from dlscale.launch import launcher
from dlscale.preflight.probe import Finding, probe_clock, probe_space
from tests.cluster import cluster as slurm_cluster
from tests.conftest import COSMO, ERA5, ERA5_RUN, ROOT

PERLMUTTER = ROOT / "profiles/perlmutter/site.yaml"


#: Facts about an environment without faults.
FACTS: dict[str, Any] = {
    "python": "3.12.3",
    "torch": "2.13.0+cu130",
    "h5py": "3.16.0",
    "numba": "0.68.1",
    "dali": "2.4.0",
    "cuda": "13.0",
    "gpus": 4,
    "cudnn": 91700,
    "nccl": [2, 28, 3],
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the import of torch by known facts, except in processes of `doctor_command`."""
    monkeypatch.setattr(doctor, "FACTS", f"print({json.dumps(FACTS)!r})")


def load(results: Path, site: dict[str, Any] | None = None, **changes: Any) -> Configuration:
    """Return the shipped configuration, with changes, on a site."""
    raw = {"site": site or {}, **yaml.safe_load((ROOT / "config.yaml").read_text())}
    return config.load(config.merge(raw, {"results": str(results), **changes}))


def dataset(settings: dict) -> DatasetSettings:
    return TypeAdapter(dataset_type()).validate_python(settings)


def named(findings: list[Finding], name: str) -> Finding:
    (found,) = [found for found in findings if found.name == name]
    return found


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that writes a shell script and puts it before all other commands on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "workflow_scripts"))

    def make(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return make


# ---- Slurm: output captured from a cluster --------------------------------------------------

ASSOCIATIONS = """\
m1_g|debug,interactive,preempt,premium,regular,shared
m1|debug,shared
m1|regular
root|
"""


@pytest.mark.parametrize(
    ("wanted", "status", "words"),
    [
        ([("m1", "shared"), ("m1_g", "premium")], "ok", ["m1, m1_g"]),
        ([("M1", "shared")], "ok", ["M1"]),
        ([("root", "anything")], "ok", ["root"]),  # without a list of QOS, all QOS are allowed
        ([("m1_g", "share")], "FAIL", ["m1_g may not use QOS share"]),
        ([("m1", "premium")], "FAIL", ["m1 may not use QOS premium", "debug, regular, shared"]),
        ([("m2", "shared"), ("m1", "shared")], "FAIL", ["m2: not one of your accounts", "m1, m1_g, root"]),
        ([("root_g", "")], "FAIL", ["root_g: not one of your accounts", "charged to root", "account_suffix to ''"]),
        ([(None, "shared")], "warn", ["no account is set", "export SBATCH_ACCOUNT"]),
    ],
)
def test_account(
    monkeypatch: pytest.MonkeyPatch, command: Callable[[str, str], None], wanted: list, status: str, words: list[str]
) -> None:
    command("sacctmgr", f"printf '{ASSOCIATIONS}'")
    asked = iter(wanted)
    monkeypatch.setattr(
        doctor.slurm, "request", lambda *_: dict(zip(("slurm_account", "qos"), next(asked), strict=True))
    )
    nobody: Any = SimpleNamespace(geometry=None, gpu_nodes=SimpleNamespace(account_suffix="_g"))
    found = doctor.probe_account(nobody, [nobody] * len(wanted), ["train"])
    assert found.status == status
    command("sacctmgr", "echo \"Only 'accounting_storage/slurmdbd' is supported\" >&2; exit 1")
    assert doctor.probe_account(nobody, [], ["train"]).status == "skip"
    for word in words:
        assert word in found.text + found.remedy


def test_accounts_are_those_of_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[[str, str], None]
) -> None:
    """Only the accounts of jobs that would be submitted are checked."""
    monkeypatch.setenv("SBATCH_ACCOUNT", "m1")
    command("sacctmgr", f"printf '{ASSOCIATIONS}'")
    scheduler = Scheduler.model_validate(yaml.safe_load(PERLMUTTER.read_text())["scheduler"])
    runs = [found.run for found in load(tmp_path).plans["cosmo_published"].values()]
    for stages, text in ((["data", "train"], "m1, m1_g"), (["throughput"], "m1_g"), (["data"], "m1")):
        found = doctor.probe_account(scheduler, runs, stages)
        assert (found.status, found.text) == ("ok", text)


@pytest.mark.parametrize(
    ("queue", "known", "status", "words"),
    [
        ("short", None, "warn", ["QOS debug accepts 5 submitted jobs per user", "queues.short.max_jobs: 5"]),
        ("short", 6, "warn", ["queues.short.max_jobs: 5"]),
        ("short", 5, "ok", ["debug 5, gpu_regular 7"]),
        ("regular", None, "warn", ["QOS regular accepts 7 submitted jobs per user", "queues.regular.max_jobs: 7"]),
        ("many", None, "ok", []),
        (None, None, "ok", []),
    ],
)
def test_the_site_knows_how_many_jobs_a_queue_accepts(
    command: Callable[[str, str], None], queue: str | None, known: int | None, status: str, words: list[str]
) -> None:
    others = ["regular_1|5000", "regular_interactive|2", "debug_regular|1", "many|5000"]
    qos = ["normal|", "debug|5", "regular|", "gpu_regular|7", "premium|5", *others]
    command("sacctmgr", f"printf '%s\\n' {shlex.join(qos)}")
    given = {
        "cpu_nodes": {"cpus": 1},
        "gpu_nodes": {"cpus": 1},
        "queues": {
            "short": {"qos": "debug", "max_jobs": known},
            **{name: {"qos": name} for name in ("regular", "many")},
        },
        "run_queues": [queue] if queue else [],
    }
    found = doctor.probe_job_limits(Scheduler.model_validate(given))
    assert found.status == status and all(word in found.text + found.remedy for word in words)
    command("sacctmgr", "echo \"Only 'accounting_storage/slurmdbd' is supported\" >&2; exit 1")
    assert doctor.probe_job_limits(Scheduler.model_validate(given)).status == "skip"


NODES = "gpu,a100|128|gpu:a100:4(S:0-1)|2|256000+\ngpu,a100,hbm80g|128|gpu:a100:4|2|512000\ncpu|256|(null)|1|512000\n"


@pytest.mark.parametrize(
    ("kind", "most", "status", "word"),
    [
        ({"constraint": "gpu", "cpus": 128, "gpus": 4}, 4, "ok", "4 of 128 CPUs, 4 GPUs, constraint gpu, --gres gpu"),
        ({"constraint": "gpu", "cpus": 128, "gpus": 4}, 5, "FAIL", "5 nodes of 128 CPUs, 4 GPUs, constraint gpu"),
        ({"constraint": "gpu&hbm80g", "cpus": 128, "gpus": 4, "gres": "gpu:a100"}, 3, "FAIL", "sinfo has 2"),
        ({"constraint": "gpu&(a100|hbm80g)", "cpus": 128, "gpus": 4}, 4, "ok", "4 of 128 CPUs"),
        ({"constraint": "gpuu", "cpus": 128, "gpus": 4}, 1, "FAIL", "0 (no node with this partition and constraint)"),
        ({"constraint": "gpu", "cpus": 128, "gpus": 8}, 1, "FAIL", "has 0 (2 of 128 CPUs, 4 GPUs, 256,000 MB"),
        ({"constraint": "gpu", "cpus": 1, "gpus": 1, "gres": "gpu:h100"}, 1, "FAIL", "0 GPUs"),
        ({"cpus": 256}, 1, "ok", "1 of 256 CPUs"),
        ({"cpus": 256}, 2, "FAIL", "2 nodes of 256 CPUs, 0 GPUs wanted; sinfo has 1"),
        ({"cpus": 257}, 1, "FAIL", "1 node of 257 CPUs, 0 GPUs wanted; sinfo has 0"),
        ({"cpus": 128, "gpus": 4, "memory_mb": 256_000}, 4, "ok", "4 of 128 CPUs, 4 GPUs, 256,000 MB"),
        ({"cpus": 128, "gpus": 4, "memory_mb": 256_001}, 3, "FAIL", "4 GPUs, 256,001 MB, --gres gpu wanted"),
    ],
)
def test_nodes_match_the_sites_settings(
    command: Callable[[str, str], None], kind: dict[str, Any], most: int, status: str, word: str
) -> None:
    command("sinfo", f"printf '{NODES}'")
    found = doctor.probe_nodes(Nodes(**kind), "", most)
    assert found.status == status and word in found.text


@pytest.mark.parametrize(
    ("listed", "gres", "gpus"),
    [
        ("gpu:4", "gpu", 4),
        ("gpu", "gpu", 1),
        ("gpu:nvidia_a100-sxm4-40gb:4(S:0-1)", "gpu", 4),
        ("gpu:nvidia_a100-sxm4-40gb:4(S:0-1)", "gpu:nvidia_a100-sxm4-40gb", 4),
        ("gpu:rtx-a6000:4", "gpu", 4),
        ("gpu:nvidia_a100_1g.5gb:7", "gpu", 7),
        ("gpu:2080ti:2", "gpu", 2),
        ("gpu:3090:2", "gpu", 2),
        ("gpu:3090:2", "gpu:3090", 2),
        ("gpu:a100:4(IDX:0-3)", "gpu", 4),
        ("gpu:a100:8(S:0,2),shard:16(S:0,2)", "gpu", 8),
        ("gpu:a100:no_consume:2", "gpu", 2),
        ("gpu:tesla:2,gpu:kepler:2", "gpu", 4),
        ("gpu:tesla:2,gpu:kepler:3", "gpu:kepler", 3),
        ("gpu:a100-80gb:4", "gpu:a100", 0),
        ("shard:gpu:8,mps:400,gpu:a100:2", "gpu", 2),
        ("mygpu:4", "gpu", 0),
        ("(null)", "gpu", 0),
    ],
)
def test_gpus_of_a_node_whatever_the_name_of_their_type(
    command: Callable[[str, str], None], listed: str, gres: str, gpus: int
) -> None:
    command("sinfo", f"echo '(null)|64|{listed}|1|256000'")
    if gpus:
        assert doctor.probe_nodes(Nodes(cpus=64, gpus=gpus, gres=gres), "", 1).status == "ok"
    found = doctor.probe_nodes(Nodes(cpus=64, gpus=gpus + 1, gres=gres), "", 1)
    assert found.status == "FAIL" and f"64 CPUs, {gpus} GPU{'s' * (gpus != 1)}, 256,000 MB" in found.text


def test_nodes_are_those_of_their_partition(command: Callable[[str, str], None]) -> None:
    """Nodes of other partitions do not count. A partition without nodes is reported."""
    command(
        "sinfo",
        """case "$*" in
*'-p old '*) echo '(null)|64|gpu:4|8|256000' ;;
*'-p new '*) echo '(null)|64|gpu:8|2|512000' ;;
esac""",
    )
    for name, status, text in (
        ("new", "ok", "2 of 64 CPUs, 8 GPUs, partition new"),
        ("old", "FAIL", "sinfo has 0 (8 of 64 CPUs, 4 GPUs, 256,000 MB)"),
        ("newer", "FAIL", "sinfo has 0 (no node with this partition and constraint)"),
    ):
        found = doctor.probe_nodes(Nodes(cpus=64, gpus=8), name, 1)
        assert found.status == status and text in found.text
    kinds = {"cpu_nodes": {"cpus": 1}, "gpu_nodes": {"cpus": 64, "gpus": 8}}
    queues = {"part": {"partition": "old", "max_gpus": 7}, "rest": {"partition": "new"}}
    scheduler = Scheduler.model_validate({**kinds, "queues": queues, "run_queues": ["part", "rest"]})
    runs = [Geometry(), *(Geometry(nodes=nodes, gpus_per_node=8) for nodes in (3, 1))]
    small, large = doctor._probe_partitions(scheduler, Nodes(cpus=64, gpus=4), runs)
    assert "3 nodes of 64 CPUs, 4 GPUs, partition new" in small.text and small.status == "FAIL"
    assert (large.status, large.text) == ("ok", "8 of 64 CPUs, 4 GPUs, partition old, --gres gpu")


@pytest.mark.parametrize(
    ("printed", "status", "word"),
    [
        ("MinJobAge               = 300 sec", "ok", "300 s"),
        ("MinJobAge               = 120 sec", "ok", "120 s"),
        ("MinJobAge               = 60 sec", "warn", "dlscale-init-seconds-before-status-checks: 20"),
        ("MinJobAge               = 2 sec", "warn", "dlscale-init-seconds-before-status-checks: 1"),
        ("MpiDefault              = none", "warn", "not in the output"),
    ],
)
def test_ended_jobs_are_remembered(command: Callable[[str, str], None], printed: str, status: str, word: str) -> None:
    command("scontrol", f'[ "$*" = "show config" ] && printf "AccountingStorageHost = db\n{printed}\n"')
    found = doctor.probe_queue()
    assert found.status == status and word in str(found) + found.text


def test_a_default_partition(command: Callable[[str, str], None]) -> None:
    """A queue without a partition is a warning if the cluster has a default partition.

    In this case the Slurm plugin requests the default partition.
    """
    kinds = {"cpu_nodes": {"cpus": 4}, "gpu_nodes": {"cpus": 4}, "data_queue": "a"}
    named = Scheduler.model_validate({**kinds, "queues": {"a": {"partition": "b"}}, "run_queues": ["a"]})
    unnamed = named.model_copy(update={"run_queues": []})
    command("sinfo", "printf 'gpu\ncpu*\nlong\n'")
    assert doctor.probe_partition(unnamed).status == "warn"
    assert "--partition=cpu" in doctor.probe_partition(unnamed).text
    assert doctor.probe_partition(named).status == "ok"
    command("sinfo", "printf 'gpu\ncpu\n'")
    assert doctor.probe_partition(unnamed) == Finding("partition", "ok", "no default partition")


# ---- probes that break or hang -----------------------------------------------------------------------


def test_no_slurm(tmp_path: Path, command: Callable[[str, str], None]) -> None:
    """Without working Slurm commands, the doctor reports one failure instead of one per check."""
    command("sbatch", "")
    command("scontrol", "echo 'scontrol: error: no route to host' >&2; exit 1")
    for name in ("sacctmgr", "sinfo"):
        command(name, "echo gone >&2; exit 1")
    found = doctor.check(load(tmp_path / "results", yaml.safe_load(PERLMUTTER.read_text()) | {"engine": "none"}))
    assert named(found, "Slurm").status == "FAIL" and "no route to host" in named(found, "Slurm").text
    assert [named(found, name).status for name in ("account", "GPU nodes")] == ["warn"] * 2
    assert "sinfo: gone" in named(found, "GPU nodes").text


def test_probes_neither_raise_nor_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that hangs, for example in a file system, is abandoned; all other findings are reported in order."""
    monkeypatch.setattr(probe, "PROBE_LIMIT", 0.5)
    start = time.monotonic()
    found = probe.run_probes(
        [
            ("slow", lambda: time.sleep(60) or Finding("slow", "ok", "")),
            ("broken", lambda: 1 // 0),  # type: ignore[list-item, return-value]
            ("fine", lambda: Finding("fine", "ok", "yes")),
        ]
    )
    assert time.monotonic() - start < 5
    assert [(f.name, f.status) for f in found] == [("slow", "warn"), ("broken", "warn"), ("fine", "ok")]
    assert "ZeroDivisionError" in found[1].text and "no answer" in found[0].text


# ---- containers --------------------------------------------------------------------------------------

#: Fake engine, which knows one image and runs the given command on this machine.
ENGINE = """
case "$1 $2" in
  "info "*) exit 0 ;;
  "image inspect") [ "$5" = localhost/mine:1 ] && echo sha256:0123456789abcdef || exit 1 ;;
  run*) echo "Welcome to this image"; while [ "$1" != localhost/mine:1 ]; do shift; done; shift; exec "$@" ;;
esac
"""


def test_in_a_container(tmp_path: Path, command: Callable[[str, str], None]) -> None:
    """Checks start in the container with the same command as a stage; a greeting that the image prints is ignored."""
    command("docker", ENGINE)
    found = doctor.check(load(tmp_path / "results", {"engine": "docker", "image": "localhost/mine:1"}))
    assert named(found, "image") == Finding("image", "ok", "localhost/mine:1 (0123456789ab)")
    assert (named(found, "torch").status, named(found, "torch").text) == ("ok", FACTS["torch"])


def test_no_image(tmp_path: Path, command: Callable[[str, str], None]) -> None:
    command("docker", ENGINE)
    found = doctor.check(load(tmp_path / "results", {"engine": "docker", "image": "localhost/other:1"}))
    assert named(found, "image").status == "FAIL" and "snakemake image" in named(found, "image").remedy
    assert named(found, "environment").status == "skip"
    for engine, suffix in launcher.FILE_SUFFIXES.items():
        (file := tmp_path / f"image{suffix}").touch()
        command(engine, "")
        site = Site(engine=engine, image=str(file))
        for image, status in ((str(file), "ok"), (f"/no{suffix}", "FAIL"), (None, "FAIL")):
            assert doctor.probe_image(site.model_copy(update={"image": image})).status == status
    assert "no such command" in doctor.probe_image(Site(engine="shifter", image="mine:1")).text


@pytest.mark.parametrize(
    ("listed", "status", "migrates"),
    [
        ("localhost/mine:1 sha256:01 true", "ok (01)", True),
        ("localhost/mine:1 sha256:01 false", "FAIL ()", False),
        # Another login node has another build, which compute nodes do not see.
        ("localhost/mine:1 sha256:01 false\nlocalhost/mine:1 sha256:02 true", "ok (02)", False),
        ("localhost/mine:10 sha256:01 true", "FAIL ()", False),
        ("docker.io/localhost/mine:1 sha256:01 true", "ok (01)", True),
    ],
)
def test_migrated(command: Callable[[str, str], None], listed: str, status: str, migrates: bool) -> None:
    """The image of compute nodes counts, not the image of this login node."""
    command("podman-hpc", f'case "$1" in images) printf "{listed}\\n" ;; image) echo 01 ;; esac')
    found = doctor.probe_image(Site(engine="podman-hpc", image="localhost/mine:1"))
    assert f"{found.status} ({found.text.rpartition('(')[2].rstrip(')') if found.status == 'ok' else ''})" == status
    words = argparse.Namespace(engine="podman-hpc", image="localhost/mine:1", target="cpu", build_arg=[])
    if migrates:
        images.main(words)
    else:
        with pytest.raises(UserError, match=r"localhost/mine:1.*migrated"):
            images.main(words)


@pytest.mark.parametrize(
    ("printed", "ready"),
    [("status: PENDING\nstatus: READY", True), ("status: READY\nstatus: FAILURE", False), ("", False)],
)
def test_a_failed_pull_of_shifter(command: Callable[[str, str], None], printed: str, ready: bool) -> None:
    """`shifterimg pull` exits with 0 after a failure, and an older image of this name may exist."""
    command("shifterimg", f'[ "$1" = pull ] && printf "{printed}\\n" || echo 0123')
    words = argparse.Namespace(engine="shifter", image="registry/mine:1", target="cpu", build_arg=[])
    if ready:
        images.main(words)
    else:
        with pytest.raises(UserError, match="shifterimg pull registry/mine:1 failed with status 0"):
            images.main(words)


@pytest.mark.parametrize(
    ("cuda", "driver", "needed"),
    [
        ("13.0", "580.65.06", None),
        # a driver that supports the first version of a major version supports all versions of the major version
        ("13.2", "580", None),
        ("13.0", "575.57.08", 580),
        ("12.8", "525.60.13", None),
        ("12.6", "515.105.01", 525),
        ("11.8", "450.80.02", None),
        ("14.0", "595.10", None),  # not in the table yet
    ],
)
def test_which_driver_a_cuda_needs(cuda: str, driver: str, needed: int | None) -> None:
    """The minimum driver follows NVIDIA's table of minor-version compatibility."""
    said = doctor.too_old(driver, cuda)
    assert (said is None) == (needed is None)
    assert said is None or {f"{cuda},", str(needed), driver} < set(said.split())


def test_gpus_that_stages_do_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FACTS", f"print({json.dumps(FACTS | {'gpus': 0})!r})")
    assert not [f for f in doctor.probe_site(Site(gpu=True), [], devices=tmp_path) if f.name == "GPU"]
    (tmp_path / "nvidia0").touch()
    found = named(doctor.probe_site(Site(gpu=True), [], devices=tmp_path), "GPU")
    assert found.status == "FAIL" and "stages do not see" in found.text


# ---- versions ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "name", "plan", "status"),
    [
        ({"cudnn": 90701}, "cuDNN", "cosmo_ladder", "ok"),
        ({"cudnn": 90800}, "cuDNN", "cosmo_ladder", "FAIL"),
        ({"cudnn": 91002}, "cuDNN", "cosmo_ladder", "FAIL"),
        ({"cudnn": 91100}, "cuDNN", "cosmo_ladder", "ok"),
        ({"cudnn": 91002}, "cuDNN", "era5_ladder", "ok"),  # a model without convolutions does not need cuDNN
        ({"torch": "2.10.0"}, "torch", "era5_ladder", "FAIL"),
        ({"torch": "2.11.0a0+nv26.01"}, "torch", "era5_ladder", "ok"),
        ({"torch": "2.15.0"}, "torch", "era5_ladder", "ok"),
        ({"h5py": "3.9.0"}, "h5py", "era5_ladder", "FAIL"),
        ({"torch": None}, "torch", "era5_ladder", "FAIL"),
        ({"error": "ImportError: libcudart.so"}, "torch", "era5_ladder", "FAIL"),
        ({"numba": None}, "numba", "era5_ladder", "FAIL"),
        ({"h5py": None}, "h5py", "era5_ladder", "FAIL"),
        ({"python": "3.10.2"}, "python", "era5_ladder", "FAIL"),
        ({"dali": None}, "dali", "cosmo_published", "FAIL"),
        ({"cuda": None}, "CUDA", "cosmo_demo", "skip"),
        ({"gpus": 0, "driver": "570.195.03"}, "CUDA", "cosmo_demo", "warn"),
        ({"gpus": 0}, "CUDA", "cosmo_demo", "ok"),  # a login node has no GPU
        ({"plugin": "/soft/nccl/2.29.2-cu99/plugin/lib/libnccl-net.so"}, "CUDA", "cosmo_demo", "warn"),
        ({"plugin": "/soft/nccl/2.29.2-cu13/plugin/lib/libnccl-net.so"}, "CUDA", "cosmo_demo", "ok"),
        ({"plugin": "/usr/lib/libnccl-net.so"}, "CUDA", "cosmo_demo", "ok"),
        ({"driver": "550.54.15"}, "CUDA", "cosmo_demo", "ok"),  # CUDA's compat libraries allow this driver
    ],
)
def test_versions(tmp_path: Path, facts: dict, name: str, plan: str, status: str) -> None:
    """If the site's runs use GPUs, a torch without usable GPU fails the check `CUDA`."""
    runs = [found.run for found in load(tmp_path).plans[plan].values()]
    found = named(doctor.environment({**FACTS, **facts}, runs), name)
    assert found.status == status, found
    assert found.status in ("ok", "skip") or found.remedy
    on_gpus = named(doctor.environment({**FACTS, **facts}, runs, on_gpus=True), name)
    assert on_gpus.status == ("FAIL" if name == "CUDA" and status != "ok" else status)


# ---- data --------------------------------------------------------------------------------------------


def describe(folder: Path, *train: File) -> None:
    """Write a manifest that contains only a list of files."""
    Manifest(kind="", fields={}, splits={"train": list(train), "valid": []}).write(folder / "manifest.json")


def made(results: Path, name: str = "mine", size: int = 100) -> Path:
    """Make a dataset of one file; return the path of the file."""
    folder = results / "data" / name
    (folder / "train").mkdir(parents=True)
    (folder / "train/a.h5").write_bytes(bytes(100))
    describe(folder, File(path="train/a.h5", rows=1, bytes=size, digest=""))
    return folder / "train/a.h5"


def files(*paths: object, kind: str = "files") -> DatasetSettings:
    return dataset({"kind": "cosmo", "source": {"kind": kind, "train": [str(paths[0])], "valid": [str(paths[1])]}})


def test_data(tmp_path: Path) -> None:
    """The check distinguishes data that will be made, complete data and changed data."""
    simulated = dataset(COSMO)
    assert probe.probe_data("mine", simulated, tmp_path) == Finding("data mine", "ok", "will be simulated")
    file = made(tmp_path)
    assert probe.probe_data("mine", simulated, tmp_path).text.startswith("1 files, 100 B")
    file.write_bytes(bytes(99))
    cut = probe.probe_data("mine", simulated, tmp_path)
    assert cut.status == "FAIL" and str(file) in cut.text and str(file) in cut.remedy
    (manifest := tmp_path / "data/mine/manifest.json").write_text(manifest.read_text().replace("100", "99"))
    assert str(probe.probe_data("mine", simulated, tmp_path)).startswith(f"FAIL  data mine: {manifest}: ")


@pytest.mark.parametrize("kind", ["files", "prepared"])
def test_raw_files(tmp_path: Path, kind: str) -> None:
    (one := tmp_path / "one.h5").write_bytes(b"1")
    two = tmp_path / "two.h5"
    found = probe.probe_data("mine", files(one, two, kind=kind), tmp_path)
    assert found.status == "FAIL" and f"{two}: no such file" in found.text and "datasets.mine.source" in found.remedy
    two.touch()
    assert "empty" in probe.probe_data("mine", files(one, two, kind=kind), tmp_path).text
    two.unlink()
    two.write_bytes(b"2")
    assert probe.probe_data("mine", files(one, two, kind=kind), tmp_path).status == "ok"
    made(tmp_path)
    describe(tmp_path / "data/mine", File(path=str(one), rows=1, bytes=7, digest=""))
    found = probe.probe_data("mine", files(one, two, kind=kind), tmp_path)
    assert found.status == "warn" and "size differs from the manifest" in found.text, (
        "the stages describe a changed file again"
    )
    one.unlink()  # it is unknown which file was made from this file
    assert probe.probe_data("mine", files(one, two, kind=kind), tmp_path).status == "FAIL"
    origin = {"raws": {str(path): (1, 1) for path in (one, two)}}
    Manifest(kind="", fields={}, splits={}, provenance=origin).write(tmp_path / "data/mine/manifest.json")
    found = probe.probe_data("mine", files(one, two, kind=kind), tmp_path)
    if kind == "prepared":
        assert found.status == "FAIL", "a missing prepared file is a failure, because every training reads it"
    else:
        assert (
            found.status == "warn"
            and f"{one}: no such file" in found.text
            and "using the dataset that was made from it" in found.text
        )
        assert probe.probe_data("mine", files(tmp_path / "three.h5", two), tmp_path).status == "FAIL"


@pytest.mark.parametrize("kind", ["files", "prepared"])
def test_a_folder_in_place_of_a_file_is_found_before_a_job(tmp_path: Path, kind: str) -> None:
    (one := tmp_path / "one.h5").write_bytes(b"1")
    (folder := tmp_path / "two.h5").mkdir()
    found = probe.probe_data("mine", files(one, folder, kind=kind), tmp_path)
    assert found.status == "FAIL" and f"{folder}: a folder; expected a file. Name the files in the folder" in found.text


# ---- disks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [(1e12, 2e11, "ok"), (1e12, 0.9e11, "warn"), (1e11, 1.9e10, "warn"), (1e11, 1e8, "FAIL")],
)
def test_space(monkeypatch: pytest.MonkeyPatch, total: float, free: float, status: str) -> None:
    """Free space below a tenth of the disk, or below 20 GB, is a warning; below 0.5 GB, it is a failure."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=total, free=free))
    assert probe_space(Path("/not/there")).status == status


SHOWQUOTA = """\
+-------------+------------+-------------+----------------+------------+-------------+----------------+
| File system | Space used | Space quota | Space used (%) | Inode used | Inode quota | Inode used (%) |
+-------------+------------+-------------+----------------+------------+-------------+----------------+
|        home |    9.00GiB |    40.00GiB |          22.5% |    100.00K |       1.00M |          10.0% |
|    pscratch |   17.00TiB |    20.00TiB |          85.0% |      9.50M |      10.00M |          95.0% |
"""


def test_quota(command: Callable[[str, str], None]) -> None:
    (found,) = probe.run_probes([("quota", probe.probe_quota)])
    assert found.status == "skip"
    command("showquota", f"cat <<END\n{SHOWQUOTA}END")
    assert probe.probe_quota() == Finding(
        "quota", "warn", "home 22 %, pscratch 95 %", "remove files from the full file system"
    )
    for share, status in ((89.0, "ok"), (90.0, "warn"), (100.0, "FAIL")):
        command("showquota", f"echo '| a | {share}% |'")
        assert probe.probe_quota().status == status


# ---- all checks --------------------------------------------------------------------------------------


def test_plans(tmp_path: Path) -> None:
    """Only the data of the given plans are checked, whatever the targets are."""
    configuration = load(tmp_path)
    found = doctor.check(configuration, plans=["cosmo_ladder"])
    assert [f.name for f in found if f.name.startswith("data ")] == ["data cosmo_published"]
    assert named(doctor.check(configuration), "data cosmo_demo").status == "ok"
    found = doctor.check(configuration, ["data"], [], ["cosmo_published"])
    assert [f.name for f in found if f.name.startswith("data ")] == ["data cosmo_published"], (
        "no data of other plans may be checked"
    )


def doctor_command(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "dlscale", "doctor", *arguments]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    more = {"PYTHONPATH": str(ROOT / "workflow_scripts"), "PATH": path, **environment}
    return subprocess.run(
        words, cwd=folder, env={**os.environ, **more}, capture_output=True, text=True, timeout=60, check=False
    )


def test_bare(tmp_path: Path) -> None:
    """Without configuration and profile, as in an image, the command still runs its real checks."""
    done = doctor_command(tmp_path, "--json")
    findings = json.loads(done.stdout)
    assert [f["name"] for f in findings if f["name"] not in ("cuDNN", "dali", "nsys")] == [
        *("python", "torch", "h5py", "numba", "CUDA", "space")
    ]
    failing = [f for f in findings if f["status"] == "FAIL"]
    assert done.returncode == bool(failing), done.stderr
    assert not [f for f in failing if f["name"] != "space"], failing


@pytest.mark.slow
def test_status(tmp_path: Path) -> None:
    """The exit status is 1 if a check fails, and 2 if the configuration has a mistake."""
    text = {"results": str(tmp_path / "results"), "targets": ["cosmo_ladder"]}  # the data of this plan are missing
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(text))
    done = doctor_command(tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "data cosmo_published" in line]
    assert line.startswith("FAIL  ") and "datasets.cosmo_published.source" in line
    (tmp_path / "mine.yaml").write_text("targets: [cosmo_lader]\n")
    done = doctor_command(tmp_path, "--configfile", "mine.yaml")
    assert done.returncode == 2 and "did you mean 'cosmo_ladder'" in done.stderr


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """Yield the environment of a cluster that is configured like Perlmutter."""
    if slurm_cluster.obstacle() or slurm_cluster.missing():
        pytest.skip("no Slurm here")
    # Each process of a test session has its own cluster number; the first numbers belong to tests/cluster.
    number = 50 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    with slurm_cluster.Cluster(number) as cluster:
        yield cluster.environment()


@pytest.mark.cluster
@pytest.mark.slow
def test_on_a_cluster(tmp_path: Path, slurm: dict[str, str]) -> None:
    """With real Slurm commands, valid settings pass and invalid settings fail."""
    site = yaml.safe_load(PERLMUTTER.read_text()) | {"engine": "none"}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"results": str(tmp_path / "results"), "targets": ["cosmo_demo"]})
    )
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    asked = ["--profile", f"{tmp_path}/site.yaml", "--configfile", "mine.yaml", "--json"]

    def found(**environment: str) -> dict[str, dict[str, str]]:
        done = doctor_command(tmp_path, *asked, **{**slurm, **environment})
        return {finding["name"]: finding for finding in json.loads(done.stdout)}

    sound = found(SBATCH_ACCOUNT="m0000")
    assert [sound[name]["status"] for name in ("Slurm", "account", "CPU nodes", "GPU nodes")] == ["ok"] * 4, sound
    assert sound["account"]["text"] == "m0000, m0000_g" and "constraint gpu" in sound["GPU nodes"]["text"]
    assert found(SBATCH_ACCOUNT="m9999")["account"]["status"] == "FAIL"
    site["scheduler"]["gpu_nodes"]["constraint"] = "gpu&hbm90g"
    site["scheduler"]["queues"]["shared"]["qos"] = "shred"
    site["scheduler"]["data_queue"] = "premium"
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    wrong = found(SBATCH_ACCOUNT="m0000")
    assert "constraint gpu&hbm90g" in wrong["GPU nodes"]["text"] and wrong["GPU nodes"]["status"] == "FAIL"
    assert wrong["account"]["text"] == "m0000_g may not use QOS shred"


def test_unmet_requirements_are_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unmet requirement is reported with its key and a remedy; met requirements are not reported."""
    runs = {
        "p.plain": {},
        "p.dali": {"loader": {"kind": "dali"}},
        "p.compiled": {"compile": {"mode": "default"}},
        "p.graphs": {"cuda_graph": True},
    }
    plan = {"study": "era5_vit", "settings": {**ERA5_RUN, "dataset": "d"}, "runs": {n[2:]: s for n, s in runs.items()}}
    found = config.load({"targets": ["p"], "datasets": {"d": ERA5}, "plans": {"p": plan}}).plans["p"]
    resolved = {f"p.{name}": each.run for name, each in found.items()}
    for need, (what, _) in machine.NEEDS.items():
        monkeypatch.setitem(machine.NEEDS, need, (what, lambda: False))
    lines = [str(finding) for finding in doctor.probe_here(resolved, devices=0)]
    assert len(lines) == 3
    assert lines[0].startswith("FAIL  run p.dali: loader.kind: needs NVIDIA DALI") and "needs: [dali]" in lines[0]
    assert lines[1].startswith("FAIL  run p.compiled: compile.mode: needs a C++ compiler") and "mode: none" in lines[1]
    assert lines[2].startswith("FAIL  run p.graphs: cuda_graph: CUDA graphs need a GPU")
    for need, (what, _) in machine.NEEDS.items():
        monkeypatch.setitem(machine.NEEDS, need, (what, lambda: True))
    assert doctor.probe_here(resolved, devices=1) == []


def test_an_input_from_the_future_is_refused(tmp_path: Path) -> None:
    """The message names the latest input, and its command repairs all inputs. Clocks may differ a little."""
    near, far, further = (tmp_path / "a b" / name / "x" for name in ("near", "far", "further"))
    for file, hours in ((near, 0.01), (far, 1), (further, 24)):
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (time.time() + 3600 * hours,) * 2)
    assert probe_clock([str(near), str(tmp_path / "missing")]) == []
    inputs = [str(each) for each in (near, further, far)]
    (finding,) = probe_clock(inputs)
    assert finding.status == "FAIL" and str(finding).startswith(f"FAIL  clock: {further}: written 24")
    subprocess.run(["bash", "-c", finding.remedy.partition("run: ")[2]], check=True)
    assert probe_clock(inputs) == []
    stamp = further.parent / ".snakemake_timestamp"  # the time of a folder, for Snakemake
    stamp.touch()
    os.utime(stamp, (time.time() + 7200,) * 2)
    os.utime(further.parent)
    (finding,) = probe_clock([str(further.parent)])
    subprocess.run(["bash", "-c", finding.remedy.partition("run: ")[2]], check=True)
    assert probe_clock([str(further.parent)]) == []
