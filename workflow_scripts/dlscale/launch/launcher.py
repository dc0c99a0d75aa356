"""Build the command that starts a stage, with the site's container engine and process starter.

Only the function `sources` writes to the disk: it may create a symbolic link.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dlscale.config.run import Geometry
from dlscale.config.site import Engine, Limits, Site
from dlscale.core.errors import UserError
from dlscale.core.fingerprint import CHECKOUT, ROOT
from dlscale.core.machine import FABRIC, HOST_SUFFIX, LOCAL_DISK, LOG_SECONDS, WATCHDOG, command_output
from dlscale.launch import slurm
from dlscale.launch.contain import PASSED_ON

#: Command of dlscale in an image. With -P, Python imports nothing from the working folder, which may have any files.
PYTHON = ["python", "-P", "-m", "dlscale"]

#: The same command with the Python of this process; the caller's PATH may have another `python`.
PYTHON_HERE = [sys.executable, *PYTHON[1:]]

#: Prefix of the names of images that the workflow builds.
LOCAL = "localhost/"

#: Ends of the names of image files, for engines whose images are files.
FILE_SUFFIXES = {"apptainer": ".sif", "enroot": ".sqsh"}

#: Arguments of Python that run `dlscale.launch.ranks`, which starts a node's ranks or a command such as mpirun.
RANKS = ["-P", "-m", "dlscale.launch.ranks"]

#: Options of srun that bind tasks to CPUs, or that srun does not accept together with --cpu-bind or --hint.
BINDING = re.compile(r"(?<!\S)(--(cpu[-_]bind|hint|ntasks-per-core|threads-per-core|extra-node-info)(?![\w-])|-B)")

#: Command that runs the container engine's client, and removes the container at the end.
SUPERVISOR = [sys.executable, "-P", "-m", "dlscale.launch.contain"]


@dataclass(frozen=True)
class Guest:
    """Command that a container runs instead of dlscale."""

    folder: str  #: Working folder.
    prefix: tuple[str, ...]  #: Arguments before the command.
    variables: tuple[str, ...]  #: Names of variables that the container gets from the environment.


@dataclass(frozen=True)
class ContainerMounts:
    """Folders that a container mounts at the same absolute paths, and the owner of written files."""

    folder: str  #: Working folder, which only external programs may write to.
    sources: str  #: Folder that contains the package `dlscale`; this code runs instead of the image's code.
    uid: int  #: User ID of written files.
    gid: int  #: Group ID of written files.
    data: tuple[str, ...] = ()  #: Further folders or files that the stage reads.
    results: str | None = None  #: Folder that the stage writes to.


def sources(site: Site) -> Path:
    """Return the folder from which Python imports `dlscale`.

    For containers, this folder must have nothing that Python could import by accident. An installed dlscale is in
    site-packages, so the result is then a new folder with a link to the package.
    """
    if CHECKOUT or site.engine == "none":
        return ROOT.parent
    link = Path(".snakemake/package").absolute() / ROOT.name
    if not link.exists() or link.resolve() != ROOT:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT)
    return link.parent


def launch(site: Site, place: ContainerMounts, geometry: Geometry | None = None) -> list[str]:
    """Return the command that starts `dlscale` (one process, or one per device), without the stage's arguments.

    `site` is a result of `resolve`. `geometry` is None for a stage that needs no device.
    """
    # On full nodes, local rank i takes the i-th GPU of the site's order. On part of a node, the scheduler selects GPUs.
    whole = geometry is not None and geometry.world_size > 1 and geometry.gpus_per_node == len(site.gpu_order or ())
    ordered = whole and bool(site.gpu)
    site = with_stage_environment(site, geometry, ordered)
    container = container_command(site, place, gpu=geometry is not None, writes=False)
    python = python_command(site)
    if geometry is None or geometry.world_size == 1 or site.starter == "direct":
        return [*container, *python]
    if site.starter == "srun":  # one container, or one bare process, for each task
        # Task i gets the i-th block of CPUs, not spread over sockets; every task sees all GPUs.
        order = ["--distribution=block:block", "--gpu-bind=none"] if ordered else []
        return [*srun_command(site, geometry), *order, "--kill-on-bad-exit=1", *container, *python]
    if site.starter == "mpirun":
        return [*mpirun_command(site, geometry), *container, *python]
    # `dlscale.launch.ranks` ends all processes when one fails. The arguments after its options are for Python.
    several = geometry.nodes > 1
    start = with_numbers(site.start, geometry) if several else []
    meet = [f"--nnodes={geometry.nodes}", f"--rdzv-endpoint={site.rendezvous}"] if several else []
    ranks = [python[0], *RANKS, *meet, f"--nproc-per-node={geometry.gpus_per_node}"]
    return [*start, *container, *ranks, *python[1:]]


def python_command(site: Site) -> list[str]:
    """Return the command that runs `dlscale` in the image, or in this Python environment if the site has no engine."""
    return PYTHON_HERE if site.engine == "none" else PYTHON


def srun_command(site: Site, geometry: Geometry) -> list[str]:
    """Return the command `srun` with a task per device."""
    # srun needs the geometry again: inside a job, the workflow's executor hides the geometry of the job.
    nodes = site.scheduler and site.scheduler.gpu_nodes
    return [
        *("srun", f"--nodes={geometry.nodes}", f"--ntasks-per-node={geometry.gpus_per_node}"),
        # srun ignores --hint if the command has --cpu-bind, so the site's options for binding replace this option.
        *([] if BINDING.search(" ".join(site.start)) else ["--cpu-bind=cores"]),
        *([f"--cpus-per-task={slurm.cpus_per_task(site.scheduler, geometry)}"] if site.scheduler else []),
        *([f"--gpus-per-node={geometry.gpus_per_node}"] if nodes and nodes.gpus else []),
        *with_numbers(site.start, geometry),
    ]


def mpirun_command(site: Site, geometry: Geometry) -> list[str]:
    """Return the command that starts a process per device: the site's command, or else `mpirun`."""
    return [
        sys.executable,
        *RANKS,
        *with_numbers(site.start or ["mpirun", "-n", "{ranks}"], geometry),
        *meeting_command(site, geometry),
    ]


def meeting_command(site: Site, geometry: Geometry) -> list[str]:
    """Return a command that sets the address at which ranks meet; `dlscale.launch.ranks` fills in host and port."""
    host = f"{{host}}{site.host_suffix}" if geometry.nodes > 1 else "127.0.0.1"
    return ["env", f"MASTER_ADDR={host}", "MASTER_PORT={port}"]


def with_stage_environment(site: Site, geometry: Geometry | None, ordered: bool) -> Site:
    """Return the site with the environment of its stages, and with mounts of `local_disk` and `packages`."""
    environment = dict[str, str | None]({} if site.log_seconds == 10 else {LOG_SECONDS: f"{site.log_seconds:g}"})
    if geometry:
        environment |= {WATCHDOG: str(site.watchdog or "off")} if site.watchdog != Limits() else {}
        environment |= {LOCAL_DISK: site.local_disk} if site.local_disk else {}
        environment |= {HOST_SUFFIX: site.host_suffix} if site.host_suffix and geometry.nodes > 1 else {}
        environment |= {FABRIC: site.fabric} if site.fabric not in (None, "ethernet") and geometry.nodes > 1 else {}
    # In jobs on one node, NCCL_NET lowers the speed, as HPE's ccl_env.sh warns.
    is_alone = geometry is not None and geometry.nodes == 1 and site.fabric == "slingshot"
    environment |= {**site.environment, **({"NCCL_NET": None} if is_alone else {})}
    if ordered:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, site.gpu_order or []))
    if site.packages:  # dlscale.cli.main adds this folder to Python's path
        environment["DLSCALE_PACKAGES"] = site.packages
    # A Shifter container sees the site's file systems, and refuses to mount their folders.
    seen = site.engine in ("none", "shifter")
    own = [] if seen else [path for path in (geometry and site.local_disk, site.packages) if path]
    return site.model_copy(
        update={"environment": environment, "mounts": {**dict(zip(own, own, strict=True)), **site.mounts}}
    )


def device(site: Site) -> str:
    """Return the option `--device` of runs: `cuda` if `site.gpu` is true, else `auto`.

    If `site.gpu` is not set, return `cuda` if the scheduler's GPU nodes have GPUs.
    """
    there = site.scheduler is not None and site.scheduler.gpu_nodes.gpus > 0
    return "cuda" if (there if site.gpu is None else site.gpu) else "auto"


def with_numbers(words: Iterable[str], geometry: Geometry) -> list[str]:
    """Replace placeholders such as {ranks} in a site's arguments by the numbers of a geometry."""
    numbers = {
        "{ranks}": geometry.world_size,
        "{ranks_per_node}": geometry.gpus_per_node,
        "{nodes}": geometry.nodes,
    }
    return [re.sub(r"\{\w+\}", lambda match: str(numbers.get(match[0], match[0])), word) for word in words]


def check(site: Site, geometry: Geometry, where: str = "") -> None:
    """Raise `UserError` for a geometry that the site cannot run; `where` is the prefix of the geometry's key."""
    if geometry.nodes > 1 and site.engine == "podman-hpc" and site.fabric == "slingshot":
        raise UserError(
            f"{where}geometry.nodes: {geometry.nodes} nodes: podman-hpc's module `nccl` does not give containers "
            "the devices of Slingshot (/dev/cxi*), so NCCL would use TCP. Set site.engine to shifter or none"
        )
    if site.starter != "mpirun" and not site.rendezvous:  # sites with mpirun or a rendezvous have no scheduler
        slurm.check(site.scheduler, geometry, where)


def container_command(
    site: Site, place: ContainerMounts, gpu: bool, guest: Guest | None = None, writes: bool = True
) -> list[str]:
    """Return the arguments that run the command after them in a container.

    Without an engine, the arguments only set the environment of the command. `guest` describes a command other than
    dlscale. Unless the command `writes` to the working folder, a container cannot change this folder (not with
    Shifter).
    """
    gpu, image = gpu and bool(site.gpu), site.image or ""
    if site.engine == "none":
        return _env(site.environment)
    given = {
        **({} if guest else {"PYTHONPATH": place.sources}),
        "PYTHONNOUSERSITE": "1",  # a mounted home folder may have packages for another Python
        "HOME": "/tmp",
        **site.environment,
    }
    environment = {name: value for name, value in given.items() if value is not None}
    unset = _env({name: None for name, value in given.items() if value is None})
    folders = {
        path: path if writes or path == place.results else f"{path}:ro"
        for path in (place.folder, place.results)
        if path
    }
    here = guest.folder if guest else place.folder
    prefix, variables = (guest.prefix, guest.variables) if guest else ((), ())
    if site.engine == "shifter":
        # A Shifter container sees the site's file systems and the environment. Modules of the site set their variables
        # last, so `env` sets the stage's variables in the container. The image's HOME would hide ~/.netrc and caches.
        home = os.environ.get("HOME", "/tmp")
        return [
            "shifter",
            f"--image={image}",
            *([f"--module={','.join(site.modules)}"] if gpu and site.modules else []),
            *(f"--volume={source}:{target}" for source, target in site.mounts.items()),
            f"--workdir={here}",
            *_env({**given, "HOME": site.environment.get("HOME", home)}),
            *prefix,
        ]
    for path in place.data:
        _check_mount(path, site)
    if site.engine in FILE_SUFFIXES:
        # These engines mount in the order of the options. Data come first: if a parent of the working folder were
        # mounted later, it would hide this folder.
        binds = [
            *(f"{path}:{path}:ro" for path in place.data),
            *(f"{source}:{target}" for source, target in {**folders, **site.mounts}.items()),
        ]
    if site.engine == "enroot":
        # A mount is a line of an fstab, in which blanks are octal numbers. enroot has no option for the working folder,
        # so `env` changes the folder. enroot's hook mounts NVIDIA's driver according to two variables, which the image
        # may set, too.
        binds = [bind.replace("\\", r"\134").replace(" ", r"\040") for bind in binds]
        cards = {"NVIDIA_VISIBLE_DEVICES": "all" if gpu else "void", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        return [
            *(*SUPERVISOR, *(f"--env={name}" for name in variables), "enroot", "start"),
            *(word for bind in binds for word in ("--mount", re.sub(":ro$", ":none:rbind,ro,x-create=auto", bind))),
            *(word for item in {**cards, **environment}.items() for word in ("--env", "=".join(item))),
            *(image, *(unset or ["env"]), f"--chdir={here}"),
            *prefix,
        ]
    if site.engine == "apptainer":
        return [
            *(*SUPERVISOR, *(f"--env={name}" for name in variables)),
            *("apptainer", "exec", "--cleanenv", "--no-home"),
            "--no-privs",  # drops root's capabilities, as enroot and Shifter always do
            *(["--nv"] if gpu else []),
            *(word for bind in binds for word in ("--bind", bind)),
            *(word for item in environment.items() if item[0] != "HOME" for word in ("--env", "=".join(item))),
            *("--pwd", here, image),
            *unset,
            *prefix,
        ]
    return [
        *(*SUPERVISOR, site.engine, "run", "--rm", "--init"),
        "--interactive",  # standard input ends with the process that started the container; see `contain`
        "--network=host",
        "--ipc=host",  # loaders share memory between processes, and NCCL shares memory between containers
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--pull=never",  # a pulled image would have another identity than the image that the rule `image` built
        # Some versions of podman start no container with the image's health check in a job, which has no systemd
        # session.
        "--no-healthcheck",
        *_engine_options(site, place, gpu),
        *(f"--volume={source}:{target}" for source, target in {**folders, **site.mounts}.items()),
        # Docker and podman refuse to mount a path twice.
        *(f"--volume={path}:{path}:ro" for path in place.data if site.mounts.get(path) != path),
        f"--workdir={here}",
        *(f"--env={name}={value}" for name, value in environment.items()),
        *(f"--env={name}" for name in PASSED_ON if name not in environment),
        *([f"--env={name}" for name in variables] if guest else ["--env=DLSCALE_LIFELINE=1"]),
        image,
        *unset,
        *prefix,
    ]


def _env(environment: Mapping[str, str | None]) -> list[str]:
    """Return an `env` command that sets variables, and unsets variables with the value None.

    The command is empty if `environment` is empty.
    """
    unset = [word for name, value in environment.items() if value is None for word in ("-u", name)]
    assigned = [f"{name}={value}" for name, value in environment.items() if value is not None]
    return ["env", *unset, *assigned] if environment else []


def _engine_options(site: Site, place: ContainerMounts, gpu: bool) -> list[str]:
    owner = f"--user={place.uid}:{place.gid}"
    if site.engine == "docker":
        return [owner, *(["--gpus=all"] if gpu else [])]
    if site.engine == "podman":
        # Rootless podman has to keep the user's ID; otherwise files would belong to a subordinate ID.
        mine = [owner] if place.uid == 0 else ["--userns=keep-id", owner]
        return [*mine, *(["--device=nvidia.com/gpu=all"] if gpu else [])]
    # podman-hpc is rootless: root in the container is the user outside. The image's own user would be a subordinate ID.
    modules = [f"--{module}" for module in site.modules if module != "gpu"]  # `--gpu` is added below
    # Without the user's groups, files of a project that only its group may read could not be opened.
    return ["--user=0:0", "--group-add=keep-groups", *(["--gpu", *modules] if gpu else [])]


#: Engines in the order in which `auto` tries them: engines for clusters first.
ENGINES: tuple[Engine, ...] = ("shifter", "podman-hpc", "apptainer", "enroot", "podman", "docker")


def resolve(site: Site, folder: Path | None = None) -> tuple[Site, list[str]]:
    """Return the site with `auto` and unset values resolved, and a list with the reason for an engine chosen by `auto`.

    If `folder` is given, search engines there instead of in PATH.
    """
    chosen: dict[str, str | bool] = {}
    reasons = []
    if site.packages and not Path(site.packages).is_dir():
        raise UserError(
            f"site.packages: {site.packages}: no such folder; to make this folder: pip install --target FOLDER NAME"
        )
    if site.engine == "auto":
        troubles = {engine: _trouble(engine, site.image, folder) for engine in ENGINES} if site.image else {}
        engine = chosen["engine"] = next((name for name, trouble in troubles.items() if trouble is None), "none")
        why = "it works here"
        if engine == "none":
            broken = [f"{name} ({trouble})" for name, trouble in troubles.items() if trouble != "absent"]
            none = f"no installed engine works{': ' * bool(broken)}{', '.join(broken)}"
            why = none if site.image else "site.image names no image"
        reasons.append(f"engine: {engine}, since {why}")
    if site.starter == "auto":
        chosen["starter"] = "srun" if site.scheduler else "torchrun"
    if site.gpu is None:
        chosen["gpu"] = site.scheduler.gpu_nodes.gpus > 0 if site.scheduler else Path("/dev/nvidiactl").exists()
    return site.model_copy(update=chosen), reasons


def _trouble(engine: str, image: str, folder: Path | None) -> str | None:
    """Return the reason why an engine cannot run an image; None if the engine can."""
    command = shutil.which(engine, path=str(folder) if folder else None)
    if not command:
        return "absent"
    if (engine in FILE_SUFFIXES) != image.endswith(FILE_SUFFIXES.get(engine, tuple(FILE_SUFFIXES.values()))) or (
        engine == "shifter" and image.startswith(LOCAL)
    ):
        return f"not for image {image}"
    # Often docker is installed but its daemon does not run, or podman-hpc lacks the variable USER or its tools.
    if question := {"docker": ["info"], "podman-hpc": ["images", "--quiet"]}.get(engine):
        return f"{engine} {' '.join(question)} fails" if command_output([command, *question], 30) is None else None
    return None


def packages(site: Site) -> list[str]:
    """Return names and versions of the packages in `site.packages`."""
    return sorted(info.stem for info in Path(site.packages).glob("*.dist-info")) if site.packages else []


def outside(paths: Iterable[str | Path], *inside: str | Path) -> tuple[str, ...]:
    """Return the folders that a container needs for `paths`, except folders within `inside`.

    The folders are absolute: each path's folder, and its folder after each symbolic link in the path was followed.
    """
    seen = [form for folder in inside for form in (Path(folder), Path(folder).resolve())]
    places = [place for path in paths for place in _chain(Path(path).absolute())]
    unseen = [place for place in places if not any(place.is_relative_to(folder) for folder in seen)]
    return tuple(dict.fromkeys(str(place if place.is_dir() else place.parent) for place in unseen))


def _chain(path: Path) -> list[Path]:
    """Return a path, and its form after each symbolic link in it was followed."""
    chain = [path]
    for _ in range(40):  # Linux follows at most 40 links
        link = next((part for part in [*reversed(chain[-1].parents), chain[-1]] if part.is_symlink()), None)
        if link is None:
            break
        target = Path(os.path.normpath(link.parent / link.readlink()))
        chain.append(target / chain[-1].relative_to(link))
    return chain


def check_names(paths: Iterable[str], site: Site) -> None:
    """Raise `UserError` for paths that the engine or the Slurm executor cannot handle."""
    for path in paths:
        # The executor puts the command in double quotes. In double quotes, a shell still interprets these characters.
        if site.scheduler and (bad := re.search(r'[$`"\\\n]', path)):
            raise UserError(f"{path}: Slurm jobs cannot be submitted from a path with {bad[0]!r}; use another name")
        if site.engine != "none":
            _check_mount(path, site)


def _check_mount(path: str, site: Site) -> None:
    if bad := re.search(r"[:,\n]", path):
        raise UserError(f"{path}: {site.engine} cannot be given a path with {bad[0]!r}; use another name")
