"""A stage's command as processes: container engine x process starter, in one pure function."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dlscale.config.program import Program
from dlscale.config.run import Geometry, Run
from dlscale.config.site import Engine, Limits, Site
from dlscale.core.errors import UserError
from dlscale.core.fingerprint import CHECKOUT, ROOT
from dlscale.core.machine import LOCAL_DISK, STEPS, WATCHDOG, answer
from dlscale.core.process import VARIABLES
from dlscale.launch import slurm
from dlscale.launch.contain import PASSED_ON

#: Python in an image, which imports nothing from the working folder (-P): anybody may have put a file there.
PYTHON = ["python", "-P", "-m", "dlscale"]

#: Python of this process. A caller's PATH may have another `python`, and stays as it is.
PYTHON_HERE = [sys.executable, *PYTHON[1:]]

#: Beginning of the names of images that are built here.
LOCAL = "localhost/"

#: Module that starts the ranks of a node, or a command that starts them.
RANKS = ["-P", "-m", "dlscale.launch.ranks"]

#: Supervisor of the engine's client.
SUPERVISOR = [sys.executable, "-P", "-m", "dlscale.launch.contain"]


@dataclass(frozen=True)
class Place:
    """Folders and owner that a container takes over; paths are absolute, and the same inside."""

    folder: str  #: Working folder.
    sources: str  #: Folder of the package `dlscale`, whose code runs in place of the image's.
    uid: int  #: Owner of what is written.
    gid: int  #: Its group.
    data: tuple[str, ...] = ()  #: Further folders or files that the stage reads.
    results: str | None = None  #: Folder that the stage writes to, if it is outside of `folder`.


def sources(site: Site) -> Path:
    """Return a folder that has the package in it, and nothing else that Python could import in a container."""
    if CHECKOUT or site.engine == "none":
        return ROOT.parent
    link = Path(".snakemake/package").absolute() / ROOT.name
    if not link.exists() or link.resolve() != ROOT:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT)
    return link.parent


def launch(site: Site, place: Place, geometry: Geometry | None = None) -> list[str]:
    """Return the words that start `dlscale`, once or with a process for each device; the stage's own follow.

    `site` is resolved; a stage that needs no device has no geometry.
    """
    # On whole nodes local rank i takes the i-th GPU of the site's order; of a part only the scheduler knows the GPUs.
    whole = geometry is not None and geometry.world_size > 1 and geometry.gpus_per_node == len(site.gpu_order or ())
    ordered = whole and bool(site.gpu)
    site = _told(site, geometry, ordered)
    container = _contain(site, place, gpu=geometry is not None)
    python = _python(site)
    if geometry is None or geometry.world_size == 1 or site.starter == "direct":
        return [*container, *python]
    if site.starter == "srun":  # one container, or one bare process, for each task
        srun = _srun(site, geometry)
        if ordered:  # task i on the i-th share of the CPUs, not dealt out to sockets; every task sees all GPUs
            srun += ["--distribution=block:block", "--cpu-bind=cores", "--gpu-bind=none"]
        return [*srun, "--kill-on-bad-exit=1", *container, *python]
    if site.starter == "mpirun":
        return [*_mpirun(site, geometry), *container, *python]
    # It ends all processes when one fails. What follows its own words is Python's.
    several = geometry.nodes > 1
    start = _filled(site.start, geometry) if several else []
    meet = [f"--nnodes={geometry.nodes}", f"--rdzv-endpoint={site.rendezvous}"] if several else []
    ranks = [python[0], *RANKS, *meet, f"--nproc-per-node={geometry.gpus_per_node}"]
    return [*start, *container, *ranks, *python[1:]]


def _python(site: Site) -> list[str]:
    """Return the words of dlscale where the site's stages run."""
    return PYTHON_HERE if site.engine == "none" else PYTHON


#: Starter of a program's processes on one node, by the program's own PyTorch.
TORCHRUN = ["torchrun", "--standalone", "--no-python"]

#: What torchrun tells its processes, as a task of srun or mpirun.
RANKED = (
    " ".join(
        [
            "export",
            *(
                f'{own}="{"".join(f"${{{other}-" for other in others)}{"}" * len(others)}"'
                for own, *others in zip(*VARIABLES, strict=True)
            ),
        ]
    )
    + '; exec "$@"'
)

#: Stands for the program's working folder in the words before its command.
FOLDER = "{folder}"

#: In a program's container: its steps are seen, whatever PYTHONPATH the image sets; it ends when its holder is gone.
HELD = """export PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}"
exec 3<&0 </dev/null
((cat >/dev/null; kill -TERM $$; sleep 20; kill -KILL $$) 2>/dev/null <&3 3<&- &)
exec "$@" 3<&-"""


def launch_program(site: Site, place: Place, run: Run) -> tuple[list[str], list[str]]:
    """Return the words that start `dlscale`, once, and those that it puts before the command of a run's program.

    The stage runs where others do, and the program beside it. It is outside of a container where the program has an
    image of its own, or where `srun` or `mpirun` start it.
    """
    program, geometry = run.program, run.geometry
    assert program is not None
    several = geometry.world_size > 1 and program.start == "site" and site.starter != "direct"
    site = _told(site, geometry, ordered=False)
    if site.engine not in ("none", "shifter"):  # programs write where they are
        own = outside([program.folder], place.folder, *filter(None, [place.results]))
        site = site.model_copy(update={"mounts": {**dict(zip(own, own, strict=True)), **site.mounts}})
    container = list[str]()
    if program.image or (several and (site.starter != "torchrun" or geometry.nodes > 1)):
        outer = [*_contain(site.model_copy(update={"engine": "none"}), place, gpu=True), *PYTHON_HERE]
        if site.engine != "none":
            told = site.model_copy(update={"image": program.image or site.image})
            container = _contain(told, place, gpu=True, program=program)
    else:
        outer = [*_contain(site, place, gpu=True), *_python(site)]
    start = list[str]()
    if several and site.starter == "torchrun":
        start = _filled(site.start, geometry) if geometry.nodes > 1 else []
        meet = [f"--nnodes={geometry.nodes}", f"--rdzv-endpoint={site.rendezvous}", "--rdzv-backend=c10d"]
        torchrun = ["torchrun", "--no-python", *meet] if geometry.nodes > 1 else TORCHRUN
        container += [*torchrun, f"--nproc-per-node={geometry.gpus_per_node}"]
    elif several:
        start = (
            [sys.executable, *RANKS, *_srun(site, geometry), "--kill-on-bad-exit=1", *_meet(geometry)]
            if site.starter == "srun"
            else _mpirun(site, geometry)
        )
        start += ["sh", "-c", RANKED, "sh"]
    return outer, [*start, *container]


def _srun(site: Site, geometry: Geometry) -> list[str]:
    # The geometry is said again: inside of a job the workflow's executor hides the job's own from srun.
    srun = ["srun", f"--nodes={geometry.nodes}", f"--ntasks-per-node={geometry.gpus_per_node}"]
    if site.scheduler:
        srun.append(f"--cpus-per-task={slurm.cpus_per_task(site.scheduler, geometry)}")
        srun += [f"--gpus-per-node={geometry.gpus_per_node}"] if site.scheduler.gpu_nodes.gpus else []
    return srun


def _mpirun(site: Site, geometry: Geometry) -> list[str]:
    return [sys.executable, *RANKS, *_filled(site.start or ["mpirun", "-n", "{ranks}"], geometry), *_meet(geometry)]


def _meet(geometry: Geometry) -> list[str]:
    """Return the words that tell ranks where they meet, in which `dlscale.launch.ranks` puts the numbers."""
    return ["env", f"MASTER_ADDR={'{host}' if geometry.nodes > 1 else '127.0.0.1'}", "MASTER_PORT={port}"]


def _told(site: Site, geometry: Geometry | None, ordered: bool) -> Site:
    """Return the site with the variables for its stages, and with the folders that these name."""
    environment, mounts = dict[str, str](), dict[str, str]()
    if geometry:
        environment |= {WATCHDOG: str(site.watchdog or "off")} if site.watchdog != Limits() else {}
        environment |= {LOCAL_DISK: site.local_disk} if site.local_disk else {}
        if site.local_disk and site.engine not in ("none", "shifter"):
            mounts[site.local_disk] = site.local_disk
    environment |= site.environment
    if ordered:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, site.gpu_order or []))
    if site.packages:  # the command line adds them: dlscale.cli.main
        environment["DLSCALE_PACKAGES"] = mounts[site.packages] = site.packages
    return site.model_copy(update={"environment": environment, "mounts": {**mounts, **site.mounts}})


def device(site: Site) -> str:
    """Return the `--device` of runs: `cuda` where the site says that there are GPUs."""
    there = site.scheduler is not None and site.scheduler.gpu_nodes.gpus > 0
    return "cuda" if (there if site.gpu is None else site.gpu) else "auto"


def _filled(words: Iterable[str], geometry: Geometry) -> list[str]:
    """Return a site's words with the numbers of a geometry put in."""
    numbers = {
        "{ranks}": geometry.world_size,
        "{ranks_per_node}": geometry.gpus_per_node,
        "{nodes}": geometry.nodes,
    }
    return [re.sub(r"\{\w+\}", lambda match: str(numbers.get(match[0], match[0])), word) for word in words]


def check(site: Site, geometry: Geometry, where: str = "") -> None:
    """Refuse a geometry that the site cannot hold or start; `where` begins its key."""
    if site.starter != "mpirun" and not site.rendezvous:  # which sites without a scheduler have
        slurm.check(site.scheduler, geometry, where)


def _contain(site: Site, place: Place, gpu: bool, program: Program | None = None) -> list[str]:
    """Return the words that put a process into a container, or give a bare one the site's environment.

    With a program the container is that of its command.
    """
    gpu, image = gpu and bool(site.gpu), site.image or ""
    if site.engine == "none":
        return ["env", *(f"{name}={value}" for name, value in site.environment.items())] if site.environment else []
    environment = {
        **({} if program else {"PYTHONPATH": place.sources}),
        "PYTHONNOUSERSITE": "1",  # home may be mounted, with packages for another Python
        "HOME": "/tmp",
        **site.environment,
    }
    folders = {path: path for path in (place.folder, place.results) if path}
    here = FOLDER if program else place.folder
    held = ["sh", "-c", HELD, f"{place.sources}/{ROOT.name}/extensions/programs/hook"] if program else []
    if site.engine == "shifter":
        # It sees the site's file systems and the whole environment as they are.
        return [
            "shifter",
            f"--image={image}",
            *([f"--module={','.join(site.modules)}"] if gpu and site.modules else []),
            *(f"--volume={source}:{target}" for source, target in site.mounts.items()),
            f"--workdir={here}",
            *(f"--env={name}={value}" for name, value in environment.items() if name != "HOME"),
        ]
    for path in place.data:
        _check_mount(path, site)
    if site.engine == "apptainer":
        # It mounts them in this order: data may be in a folder above the working folder, which they would hide.
        binds = [f"{path}:{path}:ro" for path in place.data]
        binds += [f"{source}:{target}" for source, target in {**folders, **site.mounts}.items()]
        return [
            *(*SUPERVISOR, "apptainer", "exec", "--cleanenv", "--no-home"),
            *(["--nv"] if gpu else []),
            *(word for bind in binds for word in ("--bind", bind)),
            *(word for item in environment.items() if item[0] != "HOME" for word in ("--env", "=".join(item))),
            *("--pwd", here, image),
            *held,
        ]
    return [
        *(*SUPERVISOR, site.engine, "run", "--rm", "--init"),
        "--interactive",  # its standard input ends when whoever started it does; see `contain`
        "--network=host",
        "--ipc=host",  # loaders and NCCL share memory, the latter between containers
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        *_engine_options(site, place, gpu),
        *(f"--volume={source}:{target}" for source, target in {**folders, **site.mounts}.items()),
        # Docker and podman refuse what is mounted twice.
        *(f"--volume={path}:{path}:ro" for path in place.data if site.mounts.get(path) != path),
        f"--workdir={here}",
        *(f"--env={name}={value}" for name, value in environment.items()),
        *(f"--env={name}" for name in PASSED_ON if name not in environment),
        *(f"--env={name}" for name in (program.secret_variables() if program else ())),
        f"--env={STEPS}" if program else "--env=DLSCALE_LIFELINE=1",
        image,
        *held,
    ]


def _engine_options(site: Site, place: Place, gpu: bool) -> list[str]:
    owner = f"--user={place.uid}:{place.gid}"
    if site.engine == "docker":
        return ["--pull=never", "--no-healthcheck", owner, *(["--gpus=all"] if gpu else [])]
    if site.engine == "podman":
        # Without root, the user's own number has to be asked for, or files would belong to a subordinate one.
        mine = [owner] if place.uid == 0 else ["--userns=keep-id", owner]
        return ["--pull=never", "--no-healthcheck", *mine, *(["--device=nvidia.com/gpu=all"] if gpu else [])]
    # podman-hpc runs without root, and root inside is the user: the image's own user would be nobody outside.
    modules = [f"--{module}" for module in site.modules if module != "gpu"]  # of GPU nodes
    return ["--user=0:0", *(["--gpu", *modules] if gpu else [])]


#: Engines in the order of `auto`: those made for clusters first.
ENGINES: tuple[Engine, ...] = ("shifter", "podman-hpc", "apptainer", "podman", "docker")


def resolve(site: Site, folder: Path | None = None) -> tuple[Site, list[str]]:
    """Return the site with `auto` and open choices resolved, and the reasons; `folder` replaces PATH."""
    chosen: dict[str, str | bool] = {}
    reasons = []
    if site.packages and not Path(site.packages).is_dir():
        raise UserError(f"site.packages: {site.packages}: no such folder; make it: pip install --target FOLDER NAME")
    if site.engine == "auto":
        troubles = {engine: _trouble(engine, site.image, folder) for engine in ENGINES} if site.image else {}
        engine = chosen["engine"] = next((name for name, trouble in troubles.items() if trouble is None), "none")
        why = "it is here"
        if engine == "none":
            broken = [f"{name} ({trouble})" for name, trouble in troubles.items() if trouble != "absent"]
            none = f"no engine is installed{' but ' * bool(broken)}{', '.join(broken)}"
            why = none if site.image else "site.image names no image"
        reasons.append(f"engine: {engine}, since {why}")
    if site.starter == "auto":
        chosen["starter"] = "srun" if site.scheduler else "torchrun"
    if site.gpu is None:
        chosen["gpu"] = site.scheduler.gpu_nodes.gpus > 0 if site.scheduler else Path("/dev/nvidiactl").exists()
    return site.model_copy(update=chosen), reasons


def _trouble(engine: str, image: str, folder: Path | None) -> str | None:
    """Return why an engine cannot be used for an image, or None."""
    command = shutil.which(engine, path=str(folder) if folder else None)
    if not command:
        return "absent"
    if (engine == "apptainer") != image.endswith(".sif") or (engine == "shifter" and image.startswith(LOCAL)):
        return f"not for image {image}"
    # A client without its daemon is common, and podman-hpc without a USER or its tools.
    if question := {"docker": ["info"], "podman-hpc": ["images", "--quiet"]}.get(engine):
        return f"{engine} {' '.join(question)} fails" if answer([command, *question], 30) is None else None
    return None


def packages(site: Site) -> list[str]:
    """Return names and versions of the packages in `site.packages`."""
    return sorted(info.stem for info in Path(site.packages).glob("*.dist-info")) if site.packages else []


def outside(paths: Iterable[str | Path], *inside: str | Path) -> tuple[str, ...]:
    """Return the absolute folders of `paths`, and of all links on their way, that are not within `inside`."""
    seen = [form for folder in inside for form in (Path(folder), Path(folder).resolve())]
    places = [place for path in paths for place in _chain(Path(path).absolute())]
    unseen = [place for place in places if not any(place.is_relative_to(folder) for folder in seen)]
    return tuple(dict.fromkeys(str(place if place.is_dir() else place.parent) for place in unseen))


def _chain(path: Path) -> list[Path]:
    """Return a path, and its forms as each link in it is followed."""
    chain = [path]
    for _ in range(40):  # as many as Linux follows
        link = next((part for part in [*reversed(chain[-1].parents), chain[-1]] if part.is_symlink()), None)
        if link is None:
            break
        target = Path(os.path.normpath(link.parent / link.readlink()))
        chain.append(target / chain[-1].relative_to(link))
    return chain


def check_names(paths: Iterable[str], site: Site) -> None:
    """Refuse paths that an engine, or the executor that submits jobs, cannot carry."""
    for path in paths:
        # It puts the command between double quotes, in which a shell still reads these.
        if site.scheduler and (bad := re.search(r'[$`"\\\n]', path)):
            raise UserError(f"{path}: Slurm jobs cannot be submitted from a path with {bad[0]!r}; use another name")
        if site.engine != "none":
            _check_mount(path, site)


def _check_mount(path: str, site: Site) -> None:
    if bad := re.search(r"[:,\n]", path):
        raise UserError(f"{path}: {site.engine} cannot be given a path with {bad[0]!r}; use another name")
