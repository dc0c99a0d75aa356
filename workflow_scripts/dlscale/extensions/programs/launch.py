"""Start an external program, in a container or not, as one process or as one process per device."""

from __future__ import annotations

import sys

from dlscale.config.run import Run
from dlscale.config.site import Site
from dlscale.core import registry
from dlscale.core.fingerprint import ROOT
from dlscale.core.machine import STEPS
from dlscale.core.process import VARIABLES
from dlscale.launch.launcher import (
    PYTHON_HERE,
    RANKS,
    ContainerMounts,
    Guest,
    container_command,
    meeting_command,
    mpirun_command,
    outside,
    python_command,
    srun_command,
    with_numbers,
    with_stage_environment,
)

#: Command that lets gloo and NCCL of a program on one node listen only on loopback. PyTorch 2.13 has no option for the
#: stores of torchrun, which listen at all addresses.
ON_LOOPBACK = ["env", "GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=lo"]

#: Shell command that sets torchrun's variables in a task of srun or mpirun, and runs the program.
TORCHRUN_VARIABLES = (
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

#: Environment variable with the files of extensions that dlscale's hook loads.
HOOKS = "DLSCALE_HOOKS"

#: Variables for dlscale's hook, except those of other extensions. A program's own container gets these variables.
HOOK_VARIABLES = (STEPS, HOOKS, "DLSCALE_READ", "DLSCALE_PROFILE", "DLSCALE_STEPS_EVERY", "PYTHONUNBUFFERED")

#: Placeholder for the program's working folder, in the arguments that precede the program's command.
FOLDER = "{folder}"

#: Shell command that adds the folder of dlscale's hook (`$0`) to PYTHONPATH, which the image may set.
HOOK_SHELL = 'export PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}"'

#: Shell script in an external program's container: adds the folder of dlscale's hook (`$0`) to PYTHONPATH, and ends the
#: program when standard input ends.
PROGRAM_SHELL = f"""{HOOK_SHELL}
exec 3<&0 </dev/null
((cat >/dev/null; kill -TERM $$; sleep 20; kill -KILL $$) 2>/dev/null <&3 3<&- &)
exec "$@" 3<&-"""


def launch_program(site: Site, place: ContainerMounts, run: Run) -> tuple[list[str], list[str]]:
    """Return the command of a program's stage, and the arguments to put before the program's own command.

    On a site with a container engine, stage and program run in the same container, with two exceptions. The stage runs
    outside of a container if the program has its own image, or if `srun`, `mpirun` or torchrun on several nodes starts
    the program.
    """
    program, geometry = run.program, run.geometry
    assert program is not None
    several = geometry.world_size > 1 and program.start == "site" and site.starter != "direct"
    site = with_stage_environment(site, geometry, ordered=False)
    # External programs may write into their own folder, so the container mounts this folder.
    if site.engine not in ("none", "shifter"):
        own = outside([program.folder], place.folder, *filter(None, [place.results]))
        site = site.model_copy(update={"mounts": {**dict(zip(own, own, strict=True)), **site.mounts}})
    container = list[str]()
    if program.image or (several and (site.starter != "torchrun" or geometry.nodes > 1)):
        outer = [*container_command(site.model_copy(update={"engine": "none"}), place, gpu=True), *PYTHON_HERE]
        if site.engine != "none":
            told = site.model_copy(update={"image": program.image or site.image})
            # A Shifter container is this process's child, so it ends with this process.
            shell = f'{HOOK_SHELL}; exec "$@"' if site.engine == "shifter" else PROGRAM_SHELL
            prefix = ("sh", "-c", shell, f"{place.sources}/{ROOT.name}/extensions/programs/hook")
            guest = Guest(FOLDER, prefix, (*program.secret_variables(), *HOOK_VARIABLES, *registry.hooks().values()))
            container = container_command(told, place, gpu=True, guest=guest)
    else:
        outer = [*container_command(site, place, gpu=True), *python_command(site)]
    start = list[str]()
    if several and site.starter == "torchrun":
        start = with_numbers(site.start, geometry) if geometry.nodes > 1 else []
        meet = [f"--nnodes={geometry.nodes}", f"--rdzv-endpoint={site.rendezvous}", "--rdzv-backend=c10d"]
        container += ["torchrun", "--no-python", *(meet if geometry.nodes > 1 else ["--standalone"])]
        container += [f"--nproc-per-node={geometry.gpus_per_node}", *([] if geometry.nodes > 1 else ON_LOOPBACK)]
    elif several:
        srun = [*srun_command(site, geometry), "--kill-on-bad-exit=1", *meeting_command(site, geometry)]
        start = [sys.executable, *RANKS, *srun] if site.starter == "srun" else mpirun_command(site, geometry)
        start += ["sh", "-c", TORCHRUN_VARIABLES, "sh"]
    return outer, [*start, *container]
