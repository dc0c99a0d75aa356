"""A small Slurm cluster with Perlmutter's manners, on one machine: real daemons, pretended hardware.

Four GPU nodes (`nid001` … `nid004`, 4 A100s each, the last two with 80 GB) and one CPU node (`nid005`). Each is a real
`slurmd` with a host name, an address and an `/etc/hosts` of its own; as on a real cluster all see the same files, and
the compute nodes reach each other and the login node, which is this machine, but no other network. Projects, QOS and
their limits are in a database of its own, and a submit filter demands a constraint and picks the partition.

It needs root, network namespaces and Debian's Slurm packages (tried with Debian 12: Slurm 22.05), but neither systemd
nor cgroups. Clusters of different numbers run side by side.

    python -m tests.cluster.cluster start      # and: stop
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

#: A Debian package, and a program that shows that it is there.
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "slurm-client": "sbatch",
    "slurm-wlm-basic-plugins": "",  # comes with the daemons
    "munge": "munged",
    "mariadb-server": "mariadbd",
    "iproute2": "ip",
    "util-linux": "unshare",
}
#: Files with the processes of each running cluster, by its number; the next process finds them after a crash, too.
RECORDS = Path("/run/dlscale-cluster")
#: Debian's place for daemons, which is not in every user's PATH.
PATH = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"

GPU_NODES = {"nid001": "hbm40g", "nid002": "hbm40g", "nid003": "hbm80g", "nid004": "hbm80g"}
CPU_NODES = ["nid005"]
NODES = [*GPU_NODES, *CPU_NODES]
GPUS = 4

ACCOUNTS = ["m0000", "m0000_g"]
#: The site's limits. `preempt` comes first, since the others refer to it.
QOS = {
    "preempt": "MaxWall=2-00:00:00 GraceTime=10 PreemptMode=requeue",
    "regular": "MaxWall=2-00:00:00 Preempt=preempt",
    "premium": "MaxWall=2-00:00:00 Preempt=preempt Priority=200",
    "debug": "MaxWall=00:30:00 MaxTRESPerUser=node=8 Preempt=preempt Priority=100",
    "interactive": "MaxWall=04:00:00 MaxTRESPerUser=node=4 Preempt=preempt Priority=100",
    "shared": "MaxWall=2-00:00:00",
}
#: Limit that is set later: sacctmgr does not know GPUs before slurmctld has registered them with slurmdbd.
SHARED_LIMIT = "MaxTRESPerJob=node=1,gres/gpu=2"
#: Message of the submit filter for a job that it refuses.
REFUSAL = "Job request does not match any supported policy"

#: The database's settings: nothing in it outlives the cluster, so it need not wait for the disk.
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

# Far more CPUs and memory are promised than there are: nothing is bound or confined to them. Memory is watched, though.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
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
InactiveLimit=0

{nodes}
# Whole nodes, or parts of them: the submit filter chooses.
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
      return refuse("GPU nodes are charged to a project with _g")
   end
   -- The site picks the partition, whatever was asked for.
   job.partition = job.qos == "shared" and kind .. "_shared" or kind
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end

return slurm.SUCCESS
"""


class ClusterError(RuntimeError):
    """Raised if the cluster fails."""


def started(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks; None where it is gone, or waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def call(
    *command: object, check: bool = True, timeout: float = PATIENCE, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command; an error contains its output."""
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
    """Return why no cluster can be on this machine, whatever is installed, or None."""
    if os.geteuid() != 0:
        return "not root"
    if missing() and not shutil.which("apt-get"):
        return f"not installed, and there is no apt-get: {', '.join(missing())}"
    if shutil.which("unshare") and call("unshare", "--net", "--uts", "--mount", "true", check=False).returncode:
        return "this root may not make namespaces"
    return None


def install() -> None:
    """Install the packages, where they are missing, and keep them from starting daemons of their own."""
    if not missing():
        return
    environment = {**os.environ, "PATH": PATH, "DEBIAN_FRONTEND": "noninteractive"}
    policy = Path("/usr/sbin/policy-rc.d")  # asked by every package that would start a daemon
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        call("apt-get", "update", "-qq", env=environment, timeout=300)
        arguments = ["-y", "-qq", "--no-install-recommends", *PACKAGES]
        call("apt-get", "install", *arguments, env=environment, timeout=900)
    finally:
        if ours:
            policy.unlink()


class Cluster:
    """One cluster; as a context manager it is started and stopped.

    Parameters
    ----------
    number
        0 … 99; gives it addresses, ports and names that no other number has.
    folder
        Everything that it writes, made anew by `start`; only the logs stay after `stop`. The path has to be short,
        for there are sockets in it.
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
        """Return the recorded folder, and the recorded processes with their start times."""
        text = self.record.read_text() if self.record.exists() else ""
        return json.loads(text) if text else {"folder": None, "processes": {}}

    def _write(self, processes: dict[str, tuple[int, int]]) -> None:
        record = {"folder": str(self.folder), "processes": processes}
        RECORDS.mkdir(exist_ok=True)
        new = self.record.with_suffix(".new")
        new.write_text(json.dumps(record))
        new.replace(self.record)

    def processes(self) -> dict[str, int]:
        """Return the daemons that live, by name; one that has another's recycled id is not among them."""
        return {name: pid for name, (pid, start) in self._recorded()["processes"].items() if started(pid) == start}

    def _spawn(self, name: str, *command: object, **environment: str) -> None:
        with open(self.folder / "log" / f"{name}.out", "ab") as log:
            child = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                # without the variables of a job in which the tests may run themselves
                env={**_outside_of_jobs(), "PATH": PATH, **self.environment(), **environment},
                start_new_session=True,
            )
        self._children.append(child)
        start = started(child.pid)
        if start is None:
            raise ClusterError(f"{name} ended at once: see {self.folder / 'log'}")
        self._write({**self._recorded()["processes"], name: (child.pid, start)})

    def _halt(self, *names: str, patience: float) -> None:
        """End daemons together: politely first, where there is patience."""
        ours = {name: value for name, value in self._recorded()["processes"].items() if name in names}

        def alive() -> list[int]:
            for child in self._children:
                child.poll()  # reaps it
            return [pid for pid, start in ours.values() if started(pid) == start]

        for number, seconds in [(signal.SIGTERM, patience), (signal.SIGKILL, 5.0)]:
            if not seconds:
                continue
            for pid in alive():
                with contextlib.suppress(ProcessLookupError):
                    # each leads its own process group, which includes its helpers
                    os.killpg(pid, number)
            with contextlib.suppress(NotInTime):
                until("daemons to end", lambda: not alive(), seconds=seconds)
        self._write({name: value for name, value in self._recorded()["processes"].items() if name not in ours})

    # ---- start and stop --------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, unless it runs already; what an earlier one of this number left is removed first."""
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
        # the slowest by far, so the rest is prepared meanwhile
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
        """Stop it, and whatever runs on its nodes; also one that another process has started, or left by crashing."""
        for node in NODES:
            self._kill_all_on(node)
        names = list(self._recorded()["processes"])
        # Nothing of it is used again: the database and the nodes need no orderly end.
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
        """Slurm's configuration."""
        return self.folder / "conf" / "slurm.conf"

    def _address(self, node: str) -> str:
        return f"{self.subnet}.{10 + NODES.index(node)}"

    def _namespace(self, node: str) -> str:
        """Return the name of a node's network, which is also its device's on this side."""
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
        values = {
            "host": host,
            "subnet": self.subnet,
            "folder": self.folder,
            "port": self.port,
            "slurmd_port": self.port + 1,
            "slurmdbd_port": self.port + 2,
            "nodes": "\n".join([*gpus, *cpus]),
            "gpu_nodes": ",".join(GPU_NODES),
            "cpu_nodes": ",".join(CPU_NODES),
        }
        # Slurm gives out cards only where it finds their devices; it never opens them.
        for card in range(GPUS):
            (self.folder / "dev" / f"nvidia{card}").symlink_to("/dev/null")
        names = [f"{self._address(node)} {node}" for node in NODES]
        files = {
            "slurm.conf": SLURM_CONF.format(**values),
            "slurmdbd.conf": SLURMDBD_CONF.format(**values),
            "job_submit.lua": JOB_SUBMIT_LUA.replace("{refusal}", REFUSAL),
            "gres.conf": "AutoDetect=off\n"
            f"NodeName={values['gpu_nodes']} Name=gpu Type=a100 File={self.folder}/dev/nvidia[0-{GPUS - 1}]\n",
            # slurmd looks for cgroups, which are unused here, unless a version is set
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
            "hosts": "\n".join(["127.0.0.1 localhost", f"{self.subnet}.1 {host}", *names, ""]),
        }
        for name, text in files.items():
            (self.folder / "conf" / name).write_text(text)
        (self.folder / "conf" / "slurmdbd.conf").chmod(0o600)  # it refuses others
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.folder / "munge").chmod(0o711)  # all users may connect, but not list the folder

    def _munged(self) -> list[object]:
        folder, log = self.folder / "munge", self.folder / "log" / "munged.log"
        files = {"key-file": "key", "socket": "socket", "seed-file": "seed", "pid-file": "pid"}
        # forced, since it distrusts folders below a world-writable one
        return ["munged", "-F", "-f", f"--log-file={log}", *(f"--{key}={folder / name}" for key, name in files.items())]

    def _connect(self) -> None:
        """Give each node a network of its own, joined by a bridge."""
        lines = [f"link add {self.id} type bridge", f"addr add {self.subnet}.1/24 dev {self.id}"]
        for node in NODES:
            name = self._namespace(node)
            call("ip", "netns", "add", name)
            lines.append(f"link add {name} type veth peer name eth0 netns {name}")
            lines.append(f"link set {name} master {self.id} up")
        lines.append(f"link set {self.id} up")
        # slurmdbd and its clients wait for each other's delayed acknowledgements: 0.2 s a request instead of 1 ms
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
        """Start the accounting, and tell it the site's projects and limits."""
        if installation.wait(PATIENCE):
            raise ClusterError(f"mariadb-install-db failed: see {self.folder / 'log'}")
        port = self.folder / "run" / "mysql"
        settings = [*FORGETFUL, "--innodb-buffer-pool-size=32M", "--innodb-lock-wait-timeout=900"]
        arguments = ["--user=root", f"--datadir={self.folder / 'mysql'}", f"--socket={port}", "--skip-networking"]
        self._spawn("mariadbd", "mariadbd", "--no-defaults", *arguments, *settings)
        until("mariadbd", port.exists)
        self._spawn("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=str(port))
        until("slurmdbd", lambda: self.run("sacctmgr", "-n", "show", "cluster", check=False).returncode == 0)
        # Before slurmctld starts, so that it reads them at once.
        lines = ["add cluster perlmutter"]
        lines += [f"add qos {name} {limits} Flags=DenyOnLimit" for name, limits in QOS.items()]
        lines += [f"add account {name} Description=test Organization=test" for name in ACCOUNTS]
        lines += [f"add user root Account={name} DefaultAccount={ACCOUNTS[0]}" for name in ACCOUNTS]
        lines.append(f"modify user root set QOS={','.join(QOS)} DefaultQOS=regular")
        self.run("sacctmgr", "-i", "-Q", input="\n".join([*lines, "quit", ""]))

    def _limit_shared(self) -> bool:
        """Return whether slurmctld knows the limit; it ignores a limit that is set before it listens."""
        self.run("sacctmgr", "-i", "-Q", "modify", "qos", "shared", "set", SHARED_LIMIT, check=False)
        return SHARED_LIMIT.partition("=")[2] in self.run("scontrol", "show", "assoc_mgr", "flags=qos").stdout

    def _boot(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        Path("/etc/slurm").mkdir(exist_ok=True)
        # /etc/slurm, since SLURM_CONF is dropped by some of what runs in jobs (Snakemake's jobstep executor).
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
        """Kill all processes in a node's network: its daemon, the jobs' steps, and their children."""
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
        """Return the variables that a process needs, beside its own, to use the cluster."""
        return {"SLURM_CONF": str(self.conf)}

    def run(self, *command: object, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node; `check`, `timeout`, `input`, `cwd` as one knows them."""
        return call(*command, env={**_outside_of_jobs(), "PATH": PATH, **self.environment()}, **more)

    def submit(self, script: str, *options: str, cwd: Path | None = None) -> int:
        """Submit lines of bash with sbatch's options; return the job's number. Output goes to `cwd`/slurm-JOB.out."""
        done = self.run("sbatch", "--parsable", *options, input=f"#!/bin/bash\n{script}\n", cwd=cwd or self.folder)
        return int(done.stdout)

    def state(self, job: int) -> str:
        """Return a job's state, for 300 s after its end, too: PENDING, RUNNING, COMPLETED, NODE_FAIL …"""
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").stdout.strip()

    def wait(self, job: int, *states: str) -> None:
        """Wait for one of these states."""
        until(f"job {job} to be {' or '.join(states)}", lambda: self.state(job) in states)

    def limit(self, qos: str, limit: str) -> None:
        """Set a limit of a QOS, such as `MaxSubmitJobsPerUser=1`; -1 removes it."""
        self.run("sacctmgr", "-i", "-Q", "modify", "qos", qos, "set", limit)
        name, _, value = limit.partition("=")
        shown = f"{name}={value if value != '-1' else 'N'}"
        flags = "flags=qos"
        until(
            f"the limit {limit}",
            lambda: (
                f"QOS={qos}(" in (text := self.run("scontrol", "show", "assoc_mgr", flags).stdout)
                and shown in text.partition(f"QOS={qos}(")[2].partition("\nQOS=")[0]
            ),
        )

    def stop_controller(self) -> None:
        """Stop `slurmctld`: nodes and jobs continue, and no command of Slurm gets a reply."""
        self._halt("slurmctld", patience=10)

    def start_controller(self) -> None:
        """Start `slurmctld` again, with the jobs that it knew."""
        self._spawn("slurmctld", "slurmctld", "-D", "-f", self.conf)
        until("slurmctld", lambda: "UP" in self.run("scontrol", "ping", check=False).stdout)
        until("all nodes", self.ready)

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until the nodes are free again."""
        self.run("scancel", "--user=root", "--state=PENDING")
        self.run("scancel", "--user=root")
        until("the queue to be empty", lambda: not self.run("squeue", "--noheader").stdout.strip())

    def nodes(self) -> dict[str, str]:
        """Return the nodes' states: `idle`, `mixed`, `allocated`, `down*` …"""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False).stdout.splitlines()
        return dict(line.split() for line in lines)

    def ready(self) -> bool:
        """Whether all nodes take jobs."""
        nodes = self.nodes()
        return len(nodes) == len(NODES) and set(nodes.values()) <= {"idle", "mixed", "allocated", "completing"}

    def fail_node(self, node: str) -> None:
        """Take a node's power: nothing on it says good-bye, and Slurm sees it some 20 s later."""
        call("ip", "link", "set", self._namespace(node), "down")
        self._kill_all_on(node)
        self._halt(node, patience=0)

    def start_node(self, node: str) -> None:
        """Give a node its power back, and wait until it takes jobs."""
        call("ip", "link", "set", self._namespace(node), "up")
        if node not in self.processes():
            self._boot(node)
        until(f"{node} to be back", lambda: self.nodes().get(node) in ("idle", "mixed", "allocated"))


def _outside_of_jobs() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN"))}


def main() -> int:
    """Serve developers."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.cluster", description="A Slurm cluster for tests.")
    parser.add_argument("action", choices=["install", "start", "stop", "env"])
    parser.add_argument("--number", type=int, default=0, help="which one, 0 to 99 (default 0)")
    parser.add_argument("--folder", type=Path, help="where it keeps its files; a short path")
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
