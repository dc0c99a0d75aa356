"""A small Slurm cluster that behaves like Perlmutter, on one machine: real daemons, simulated hardware.

The cluster has a CPU node (`nid005`) and four GPU nodes of 4 A100s (`nid001`, `nid002`: 40 GB each; `nid003`, `nid004`:
80 GB).
Each node is a real `slurmd` with its own host name, address and `/etc/hosts`. As on a real cluster, all nodes see the
same files. Compute nodes reach each other and the login node, which is this machine, but no other network. The cluster
has its own database of projects, QOS and limits. A submit filter requires a constraint and selects the partition.

The cluster needs root, network namespaces and Debian's Slurm packages (tested with Debian 12: Slurm 22.05), but neither
systemd nor cgroups. Clusters with different numbers can run at the same time.

    python -m tests.cluster.cluster start      # or: stop
    eval "$(python -m tests.cluster.cluster env)"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.waiting import PATIENCE, NotInTime, until

#: Debian packages, each with a program whose presence shows that the package is installed.
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "slurm-client": "sbatch",
    "slurm-wlm-basic-plugins": "",  # installed together with the daemons
    "munge": "munged",
    "mariadb-server": "mariadbd",
    "iproute2": "ip",
    "util-linux": "unshare",
}
#: Folder with a file per cluster, which lists the cluster's processes. The path is fixed, so that `stop` in another
#: process finds them, even after a crash.
RECORDS = Path("/run/dlscale-cluster")
#: Search path with Debian's folders for daemons, which not every user's PATH has.
PATH = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"

GPU_NODES = {"nid001": "hbm40g", "nid002": "hbm40g", "nid003": "hbm80g", "nid004": "hbm80g"}
CPU_NODES = ["nid005"]
NODES = [*GPU_NODES, *CPU_NODES]
GPUS = 4

ACCOUNTS = ["m0000", "m0000_g"]
#: Limits of the site, by QOS. `preempt` comes first, because other QOS refer to it.
QOS = {
    "preempt": "MaxWall=2-00:00:00 GraceTime=10 PreemptMode=requeue",
    "regular": "MaxWall=2-00:00:00 Preempt=preempt",
    "premium": "MaxWall=2-00:00:00 Preempt=preempt Priority=200",
    "debug": "MaxWall=00:30:00 MaxTRESPerUser=node=8 Preempt=preempt Priority=100",
    "interactive": "MaxWall=04:00:00 MaxTRESPerUser=node=4 Preempt=preempt Priority=100",
    "shared": "MaxWall=2-00:00:00",
}
#: Limit of QOS `shared`, set after slurmctld has started: before, sacctmgr does not know GPUs.
SHARED_LIMIT = "MaxTRESPerJob=node=1,gres/gpu=2"
#: The submit filter's message for a refused job.
REFUSAL = "Job request does not match any supported policy"

#: Settings of the database. They disable waiting for the disk, because no data outlive the cluster.
FORGETFUL = [
    "--innodb-flush-method=nosync",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-log-file-size=4M",
    "--skip-innodb-doublewrite",
    "--performance-schema=OFF",
]

SLURM_CONF = """\
ClusterName=perlmutter
SlurmctldHost={host}({subnet}.1)
SlurmctldPort={port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log

# The nodes claim far more CPUs and memory than the machine has, so tasks are not bound to CPUs. Slurm kills a job that
# exceeds its memory.
SlurmdParameters=config_overrides
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
JobAcctGatherParams=OverMemoryKill
MpiDefault=none
SwitchType=switch/none

SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
DefMemPerCPU=2000
JobSubmitPlugins=lua
PriorityType=priority/multifactor
PriorityWeightQOS=1000
PreemptType=preempt/qos
PreemptMode=REQUEUE
JobRequeue=1

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={subnet}.1
AccountingStoragePort={slurmdbd_port}
AccountingStoragePass={folder}/munge/socket
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu,gres/gpu:a100

# Seconds. A real site schedules less often and waits longer for a silent node.
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5,batch_sched_delay=0
SlurmctldTimeout=30
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=2
ReturnToService=2
KillWait=10
OverTimeLimit=0
MinJobAge=1800
# Clusters on one machine share the tree of cgroups, whose names contain the job's number.
FirstJobId={first_job}
InactiveLimit=0

{nodes}
# Partitions for complete nodes, and (_shared) for parts of nodes. The submit filter chooses the partition.
PartitionName=DEFAULT MaxTime=2-00:00:00 DefaultTime=00:10:00 State=UP
PartitionName=gpu Nodes={gpu_nodes} OverSubscribe=EXCLUSIVE
PartitionName=gpu_shared Nodes={gpu_nodes} OverSubscribe=NO
PartitionName=cpu Nodes={cpu_nodes} OverSubscribe=EXCLUSIVE
PartitionName=cpu_shared Nodes={cpu_nodes} OverSubscribe=NO
"""

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost={host}
DbdAddr={subnet}.1
DbdPort={slurmdbd_port}
SlurmUser=root
PidFile={folder}/run/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=accounting
"""

JOB_SUBMIT_LUA = """\
local function refuse(why)
   slurm.log_user("{refusal}: " .. why)
   return slurm.ERROR
end

function slurm_job_submit(job, partitions, uid)
   local kind
   for feature in string.gmatch(job.features or "", "%w+") do
      if feature == "gpu" or feature == "cpu" then kind = feature end
   end
   if kind == nil then
      return refuse("ask for a kind of node, -C gpu or -C cpu")
   end
   if kind == "gpu" and job.account ~= nil and not string.find(job.account, "_g$") then
      return refuse("GPU nodes are charged to a project whose name ends in _g")
   end
   -- The site selects the partition; a requested partition has no effect.
   job.partition = job.qos == "shared" and kind .. "_shared" or kind
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end

return slurm.SUCCESS
"""


class ClusterError(RuntimeError):
    """Failure of the cluster."""


def started(pid: int) -> int | None:
    """Return a process's start time in kernel ticks; None if the process is gone, or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def call(
    *command: object, check: bool = True, timeout: float = PATIENCE, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command; if the command fails, raise an error with its output, unless `check` is False."""
    argv = [str(word) for word in command]
    more.setdefault("env", {**os.environ, "PATH": PATH})
    if "input" not in more:
        more.setdefault("stdin", subprocess.DEVNULL)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, **more)
    if check and done.returncode:
        raise ClusterError(f"{' '.join(argv)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name, program in PACKAGES.items() if program and not shutil.which(program, path=PATH)]


def obstacle() -> str | None:
    """Return the reason why this machine cannot run a cluster, even after `install`; None if it can."""
    if os.geteuid() != 0:
        return "not root"
    if missing() and not shutil.which("apt-get"):
        return f"packages are missing, and so is apt-get to install them: {', '.join(missing())}"
    if shutil.which("unshare") and call("unshare", "--net", "--uts", "--mount", "true", check=False).returncode:
        return "root may not create namespaces here"
    return None


def install() -> None:
    """Install missing packages, and prevent them from starting their own daemons."""
    if not missing():
        return
    environment = {**os.environ, "PATH": PATH, "DEBIAN_FRONTEND": "noninteractive"}
    policy = Path("/usr/sbin/policy-rc.d")  # packages run this script, and start no daemon if it exits with 101
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        call("apt-get", "update", "-qq", env=environment, timeout=300)
        arguments = ["-y", "-qq", "--no-install-recommends", *PACKAGES]
        call("apt-get", "install", "-o", "DPkg::Lock::Timeout=300", *arguments, env=environment, timeout=900)
    finally:
        if ours:
            policy.unlink()


class Cluster:
    """A cluster; as a context manager, it starts on entry and stops on exit.

    Parameters
    ----------
    number
        0 … 99; determines unique addresses, ports and names.
    folder
        Folder for all files, recreated by `start`; only the logs remain after `stop`. The path must be short, because
        paths of sockets have at most 107 bytes.
    """

    def __init__(self, number: int = 0, folder: Path | None = None) -> None:
        self.id = f"dls{number}"  # names of network devices have at most 15 characters
        self.subnet = f"10.77.{number}"
        self.port = 7400 + 4 * number
        self.record = RECORDS / f"{self.id}.json"
        self.folder = Path(folder or self._recorded()["folder"] or f"/tmp/{self.id}").resolve()
        self._children: list[subprocess.Popen[bytes]] = []

    # ---- started processes ------------------------------------------------------------------------

    def _recorded(self) -> dict[str, Any]:
        """Return the recorded folder and the recorded processes with their start times."""
        text = self.record.read_text() if self.record.exists() else ""
        return json.loads(text) if text else {"folder": None, "processes": {}}

    def _write(self, processes: dict[str, tuple[int, int]]) -> None:
        record = {"folder": str(self.folder), "processes": processes}
        RECORDS.mkdir(exist_ok=True)
        new = self.record.with_suffix(".new")
        new.write_text(json.dumps(record))
        new.replace(self.record)

    def processes(self) -> dict[str, int]:
        """Return the process IDs of running daemons, by name; IDs that the system has reused are left out."""
        return {name: pid for name, (pid, start) in self._recorded()["processes"].items() if started(pid) == start}

    def _spawn(self, name: str, *command: object, **environment: str) -> None:
        with open(self.folder / "log" / f"{name}.out", "ab") as log:
            child = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                # If the tests run in a Slurm job themselves, the variables of this job are removed.
                env={**_outside_of_jobs(), "PATH": PATH, **self.environment(), **environment},
                start_new_session=True,
            )
        self._children.append(child)
        start = started(child.pid)
        if start is None:
            raise ClusterError(f"{name} ended at once: see {self.folder / 'log'}")
        self._write({**self._recorded()["processes"], name: (child.pid, start)})

    def _halt(self, *names: str, patience: float) -> None:
        """End daemons together: first by SIGTERM if `patience` is positive, then by SIGKILL."""
        ours = {name: value for name, value in self._recorded()["processes"].items() if name in names}

        def alive() -> list[int]:
            for child in self._children:
                child.poll()  # reap the process
            return [pid for pid, start in ours.values() if started(pid) == start]

        for number, seconds in [(signal.SIGTERM, patience), (signal.SIGKILL, 5.0)]:
            if not seconds:
                continue
            for pid in alive():
                with contextlib.suppress(ProcessLookupError):
                    # Each daemon leads its own process group, which includes its helpers.
                    os.killpg(pid, number)
            with contextlib.suppress(NotInTime):
                until("daemons to end", lambda: not alive(), seconds=seconds)
        self._write({name: value for name, value in self._recorded()["processes"].items() if name not in ours})

    # ---- start and stop --------------------------------------------------------------------------

    def start(self) -> None:
        """Start the cluster unless it runs already; first remove the remains of an earlier cluster of this number."""
        if missing():
            raise ClusterError(f"not installed: {', '.join(missing())}")
        if self.processes() and Path(self._recorded()["folder"]) == self.folder and self.ready():
            return
        self.stop()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        for name in ["conf", "log", "run", "munge", "mysql", "dev", "state", "spool"]:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for log in (self.folder / "log").iterdir():
            log.unlink()
        self.folder.chmod(0o755)
        self._write({})
        # The database takes longest, so everything else is prepared meanwhile.
        database = self._install_database()
        self._configure()
        self._spawn("munged", *self._munged())
        self._connect()
        self._start_database(database)
        self._spawn("slurmctld", "slurmctld", "-D", "-f", self.conf)
        for node in NODES:
            self._boot(node)
        until("slurmctld", lambda: "UP" in self.run("scontrol", "ping", check=False).stdout)
        until("the limit of QOS shared", self._limit_shared)
        until("all nodes", self.ready)

    def stop(self) -> None:
        """Stop the cluster and all processes on its nodes, even if another process, now ended, started the cluster."""
        for node in NODES:
            self._kill_all_on(node)
        names = list(self._recorded()["processes"])
        # Stopping deletes the data, so the database and the nodes' daemons are killed without SIGTERM.
        orderly = [name for name in names if name in ("slurmctld", "slurmdbd")]
        if names:
            self._halt(*(name for name in names if name not in orderly), patience=0)
            self._halt(*orderly, patience=1)
        self._disconnect()
        for folder in {self.folder, Path(self._recorded()["folder"] or self.folder)}:
            for name in ["conf", "run", "munge", "mysql", "dev", "state", "spool"]:
                shutil.rmtree(folder / name, ignore_errors=True)
        for child in self._children:
            child.poll()
        self._children.clear()
        self.record.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- parts -----------------------------------------------------------------------------------

    @property
    def conf(self) -> Path:
        """Path of Slurm's configuration."""
        return self.folder / "conf" / "slurm.conf"

    def _address(self, node: str) -> str:
        return f"{self.subnet}.{10 + NODES.index(node)}"

    def _namespace(self, node: str) -> str:
        """Return the name of a node's network namespace, and of the node's network device on this machine."""
        return f"{self.id}-{node}"

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        gpus = [
            f"NodeName={node} NodeAddr={self._address(node)} Sockets=1 CoresPerSocket=64 ThreadsPerCore=2"
            f" RealMemory=256000 Gres=gpu:a100:{GPUS} Feature=gpu,a100,{memory}"
            for node, memory in GPU_NODES.items()
        ]
        cpus = [
            f"NodeName={node} NodeAddr={self._address(node)} Sockets=2 CoresPerSocket=64 ThreadsPerCore=2"
            f" RealMemory=512000 Feature=cpu"
            for node in CPU_NODES
        ]
        # As on most sites, cgroups track a job's processes, if this machine allows it; Slurm then sends signals only to
        # the first process of a task. Otherwise Slurm searches /proc, and sends signals to all processes.
        freezer = Path("/sys/fs/cgroup/freezer")
        values = {
            "tracking": "cgroup" if freezer.is_dir() and os.access(freezer, os.W_OK) else "linuxproc",
            "host": host,
            "subnet": self.subnet,
            "folder": self.folder,
            "port": self.port,
            "first_job": 1 + (self.port - 7400) * 10_000,
            "slurmd_port": self.port + 1,
            "slurmdbd_port": self.port + 2,
            "nodes": "\n".join([*gpus, *cpus]),
            "gpu_nodes": ",".join(GPU_NODES),
            "cpu_nodes": ",".join(CPU_NODES),
        }
        # Slurm assigns GPUs only if their devices exist, but never opens the devices.
        for card in range(GPUS):
            (self.folder / "dev" / f"nvidia{card}").symlink_to("/dev/null")
        names = [f"{self._address(node)} {node}" for node in NODES]
        files = {
            "slurm.conf": SLURM_CONF.format(**values),
            "slurmdbd.conf": SLURMDBD_CONF.format(**values),
            "job_submit.lua": JOB_SUBMIT_LUA.replace("{refusal}", REFUSAL),
            "gres.conf": "AutoDetect=off\n"
            f"NodeName={values['gpu_nodes']} Name=gpu Type=a100 File={self.folder}/dev/nvidia[0-{GPUS - 1}]\n",
            # Without a named version of cgroups, slurmd searches for one, even if the cluster uses no cgroups.
            "cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n",
            "hosts": "\n".join(["127.0.0.1 localhost", f"{self.subnet}.1 {host}", *names, ""]),
        }
        for name, text in files.items():
            (self.folder / "conf" / name).write_text(text)
        (self.folder / "conf" / "slurmdbd.conf").chmod(0o600)  # slurmdbd refuses other modes
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.folder / "munge").chmod(0o711)  # all users may connect but not list the folder

    def _munged(self) -> list[object]:
        folder, log = self.folder / "munge", self.folder / "log" / "munged.log"
        files = {"key-file": "key", "socket": "socket", "seed-file": "seed", "pid-file": "pid"}
        # `-f` forces the start, because munged refuses folders below a world-writable folder.
        return ["munged", "-F", "-f", f"--log-file={log}", *(f"--{key}={folder / name}" for key, name in files.items())]

    def _connect(self) -> None:
        """Give each node its own network namespace; a bridge joins all namespaces."""
        lines = [f"link add {self.id} type bridge", f"addr add {self.subnet}.1/24 dev {self.id}"]
        for node in NODES:
            name = self._namespace(node)
            call("ip", "netns", "add", name)
            lines.append(f"link add {name} type veth peer name eth0 netns {name}")
            lines.append(f"link set {name} master {self.id} up")
        lines.append(f"link set {self.id} up")
        # Without quick acknowledgements, slurmdbd and its clients wait for each other: a request takes 0.2 s instead of
        # 1 ms.
        here = f"{self.subnet}.1"
        lines.append(f"route replace local {here} dev {self.id} table local scope host src {here} quickack 1")
        call("ip", "-batch", "-", input="\n".join(lines))
        for node in NODES:
            lines = [f"addr add {self._address(node)}/24 dev eth0", "link set lo up", "link set eth0 up"]
            call("ip", "-n", self._namespace(node), "-batch", "-", input="\n".join(lines))

    def _disconnect(self) -> None:
        for node in NODES:
            call("ip", "netns", "del", self._namespace(node), check=False)
            call("ip", "link", "del", self._namespace(node), check=False)
        call("ip", "link", "del", self.id, check=False)

    def _install_database(self) -> subprocess.Popen[bytes]:
        command = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={self.folder / 'mysql'}"]
        with open(self.folder / "log" / "mariadb-install.out", "wb") as log:
            return subprocess.Popen(
                [*command, "--auth-root-authentication-method=socket", "--skip-test-db", *FORGETFUL],
                env={**os.environ, "PATH": PATH},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _start_database(self, installation: subprocess.Popen[bytes]) -> None:
        """Start the accounting, and add the site's projects and limits."""
        if installation.wait(PATIENCE):
            raise ClusterError(f"mariadb-install-db failed: see {self.folder / 'log'}")
        port = self.folder / "run" / "mysql"
        settings = [*FORGETFUL, "--innodb-buffer-pool-size=32M", "--innodb-lock-wait-timeout=900"]
        arguments = ["--user=root", f"--datadir={self.folder / 'mysql'}", f"--socket={port}", "--skip-networking"]
        self._spawn("mariadbd", "mariadbd", "--no-defaults", *arguments, *settings)
        until("mariadbd", port.exists)
        self._spawn("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=str(port))
        until("slurmdbd", lambda: self.run("sacctmgr", "-n", "show", "cluster", check=False).returncode == 0)
        # Add projects and QOS before slurmctld starts, so that it reads them at its start.
        lines = ["add cluster perlmutter"]
        lines += [f"add qos {name} {limits} Flags=DenyOnLimit" for name, limits in QOS.items()]
        lines += [f"add account {name} Description=test Organization=test" for name in ACCOUNTS]
        lines += [f"add user root Account={name} DefaultAccount={ACCOUNTS[0]}" for name in ACCOUNTS]
        lines.append(f"modify user root set QOS={','.join(QOS)} DefaultQOS=regular")
        self.run("sacctmgr", "-i", "-Q", input="\n".join([*lines, "quit", ""]))

    def _limit_shared(self) -> bool:
        """Set the limit of QOS `shared`; return whether slurmctld knows this limit.

        slurmctld ignores a limit that is set too early.
        """
        self.run("sacctmgr", "-i", "-Q", "modify", "qos", "shared", "set", SHARED_LIMIT, check=False)
        return SHARED_LIMIT.partition("=")[2] in self.run("scontrol", "show", "assoc_mgr", "flags=qos").stdout

    def _boot(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        Path("/etc/slurm").mkdir(exist_ok=True)
        # Mount over /etc/slurm, because some programs in jobs (Snakemake's jobstep executor) drop SLURM_CONF.
        script = (
            'hostname "$1" && mount --bind "$2/hosts" /etc/hosts && mount --bind "$2" /etc/slurm'
            ' && exec slurmd -D -N "$1" -f "$2/slurm.conf"'
        )
        inside = [
            "nsenter",
            f"--net=/run/netns/{self._namespace(node)}",
            "unshare",
            "--uts",
            "--mount",
            "--propagation",
            "slave",
        ]
        self._spawn(node, *inside, "sh", "-c", script, "sh", node, self.conf.parent)

    def _kill_all_on(self, node: str) -> None:
        """Kill all processes in a node's network namespace: its daemon, and the jobs' steps with their children."""
        name = self._namespace(node)

        def kill() -> bool:
            pids = call("ip", "netns", "pids", name, check=False).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            return not any(started(int(pid)) for pid in pids)

        until(f"the processes of {node} to end", kill)

    # ---- use -------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which a process uses the cluster."""
        return {"SLURM_CONF": str(self.conf)}

    def run(self, *command: object, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node; `check`, `timeout`, `input` and `cwd` are arguments of `subprocess.run`."""
        return call(*command, env={**_outside_of_jobs(), "PATH": PATH, **self.environment()}, **more)

    def submit(self, script: str, *options: str, cwd: Path | None = None) -> int:
        """Submit lines of bash with sbatch's options; return the job number. The output goes to `cwd`/slurm-JOB.out."""
        done = self.run("sbatch", "--parsable", *options, input=f"#!/bin/bash\n{script}\n", cwd=cwd or self.folder)
        return int(done.stdout)

    def state(self, job: int) -> str:
        """Return a job's state, for example PENDING or NODE_FAIL. Slurm forgets a job 1800 s after its end."""
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").stdout.strip()

    def wait(self, job: int, *states: str) -> None:
        """Wait until the job has one of the given states."""
        until(f"job {job} to be {' or '.join(states)}", lambda: self.state(job) in states)

    def limit_jobs(self, qos: str, number: int) -> None:
        """Limit the number of submitted jobs of a QOS; -1 removes the limit."""
        self.run("sacctmgr", "-i", "-Q", "modify", "qos", qos, "set", f"GrpSubmitJobs={number}")

        def shown() -> bool:
            text = self.run("scontrol", "show", "assoc_mgr", "flags=qos").stdout
            own = text.partition(f"QOS={qos}(")[2].partition("\nQOS=")[0]
            return f"GrpSubmitJobs={number if number >= 0 else 'N'}(" in own

        until("the limit on submitted jobs", shown)

    def stop_controller(self) -> None:
        """Stop `slurmctld`: nodes and jobs continue, but commands such as squeue and sbatch get no reply."""
        self._halt("slurmctld", patience=10)

    def start_controller(self) -> None:
        """Start `slurmctld` again, which still knows the earlier jobs."""
        self._spawn("slurmctld", "slurmctld", "-D", "-f", self.conf)
        until("slurmctld", lambda: "UP" in self.run("scontrol", "ping", check=False).stdout)
        until("all nodes", self.ready)

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until the queue is empty."""
        self.run("scancel", "--user=root", "--state=PENDING")
        self.run("scancel", "--user=root")
        until("the queue to be empty", lambda: not self.run("squeue", "--noheader").stdout.strip())

    def nodes(self) -> dict[str, str]:
        """Return the state of each node, for example `idle` or `down*`."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False).stdout.splitlines()
        return dict(line.split() for line in lines)

    def ready(self) -> bool:
        """Return whether all nodes accept jobs."""
        nodes = self.nodes()
        return len(nodes) == len(NODES) and set(nodes.values()) <= {"idle", "mixed", "allocated", "completing"}

    def fail_node(self, node: str) -> None:
        """Simulate a power failure of a node: its processes end silently, and Slurm notices after about 20 s."""
        call("ip", "link", "set", self._namespace(node), "down")
        self._kill_all_on(node)
        self._halt(node, patience=0)

    def start_node(self, node: str) -> None:
        """Restore a node's power, and wait until the node accepts jobs."""
        call("ip", "link", "set", self._namespace(node), "up")
        if node not in self.processes():
            self._boot(node)
        until(f"{node} to be back", lambda: self.nodes().get(node) in ("idle", "mixed", "allocated"))


def _outside_of_jobs() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN"))}


def main() -> int:
    """Run the command line for developers; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.cluster", description="A Slurm cluster for tests.")
    parser.add_argument("action", choices=["install", "start", "stop", "env"])
    parser.add_argument("--number", type=int, default=0, help="number of the cluster, 0 to 99 (default 0)")
    parser.add_argument("--folder", type=Path, help="folder of the cluster's files; its path must be short")
    arguments = parser.parse_args()
    if why := obstacle():
        print(f"No cluster here: {why}.", file=sys.stderr)
        return 1
    cluster = Cluster(arguments.number, arguments.folder)
    match arguments.action:
        case "install":
            install()
        case "start":
            install()
            cluster.start()
            print(cluster.run("sinfo").stdout, end="")
        case "stop":
            cluster.stop()
        case "env":
            for key, value in cluster.environment().items():
                print(f"export {key}='{value}'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
