"""A tiny workflow of all shipped studies and an external study, run once by Snakemake in a copy of the repository."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlscale.extensions.scaffold.new_study import TEMPLATE
from dlscale.preflight.run import ASKED
from tests.conftest import COSMO, COSMO_RUN, ERA5, ERA5_RUN, ROOT, TINY, once
from tests.waiting import PATIENCE

#: Folder of modules that run inside Snakemake and the stages, so tests can observe both.
INSIDE = Path(__file__).parent / "inside"
#: Files and folders of the repository that a run of the workflow needs.
TREE = ["Snakefile", "config.yaml", "README.md", "CITATION.cff", "rules", "profiles", "perlmutter", "workflow_scripts"]
#: Results folder and title that would do harm, or fail, in an unquoted command. The file `pwned`, which the commands in
#: these names create, must never appear.
RESULTS = "my results $(touch pwned) 'n' more"
TITLE = """Gas & "stars" $(touch pwned) `touch pwned` <b>it's</b>; touch pwned"""

#: Folder of the external study, a copy of the template of `dlscale new-study`, next to the copy of the repository.
OUTSIDE = "a study's place"

#: Profile of two steps with each profiler; the record lists profilers that are not installed.
PROFILE = {"tools": ["torch", "nsys", "lines"], "skip": 1, "steps": 2}

#: Configuration of all workflow tests: three plans of two studies with four runs and a reused run; a tuned run; a
#: ladder of the external study; and a plan, a dataset and a run of each other study.
CONFIG: dict[str, Any] = {
    "results": RESULTS,
    "targets": ["cosmo", "era5", "again", "tuned", "waves_ladder"],
    "datasets": {
        "boxes": {
            **COSMO,
            "source": {**COSMO["source"], "boxes": {"train": 1, "valid": 1, "test": 0}},
            "pieces": 2,
        },
        "years": {**ERA5, "source": {**ERA5["source"], "days": 3, "train": [2001], "valid": [2002]}},
        "waves": {"kind": "waves", "train": 64, "valid": 32},
    },
    "plans": {
        "cosmo": {
            "study": "cosmo_unet",
            "title": TITLE,
            "settings": {
                **COSMO_RUN,
                "dataset": "boxes",
                "profile": PROFILE,
                "throughput": {**COSMO_RUN["throughput"], "beside": 1},
            },
            "measure": ["train", "throughput", "profile"],
            "only": {"profile": ["unet"]},
            "runs": {"unet": {"label": TITLE}, "ceiling": {"loader": {"kind": "synthetic"}}},
        },
        "era5": {
            "study": "era5_vit",
            "settings": {
                **{key: value for key, value in ERA5_RUN.items() if key != "optimizer"},
                "dataset": "years",
                "throughput": {"warmup": 0, "trials": 2, "batches": 3, "seconds": 0, "beside": 0},
            },
            "runs": {"vit": {}},
        },
        "again": {
            "study": "cosmo_unet",
            "measure": ["train"],
            "settings": {**COSMO_RUN, "dataset": "boxes"},
            "runs": {"same": {"use": "cosmo.unet"}, "faster": {"optimizer": {"lr": 4e-3}}},
        },
        "tuned": {
            "study": "cosmo_unet",
            "kind": "tune",
            "settings": {
                **COSMO_RUN,
                "dataset": "boxes",
                "tune": {"seconds": 0.3, "workers": [0, 1], "prefetch": [2], "threads": [1], "rounds": 3},
            },
            "runs": {"mine": {}},
        },
        # The study ships this plan; the test changes it.
        "waves_ladder": {
            "study": "waves",
            "settings": {
                "dataset": "waves",
                "training": {"epochs": 2},
                "throughput": {"trials": 2, "seconds": 0, "beside": 0},
            },
            "runs": {"baseline": {}, "fused": {}},
        },
    },
    "studies": {"era5_vit": {"optimizer": {"lr": 1e-3}}, "waves": f"../{OUTSIDE}/waves.py"},
    "report": {"title": TITLE},
}
# sorted, so that all test processes have the same order
for _study in sorted(TINY.keys() - {plan["study"] for plan in CONFIG["plans"].values()}):
    CONFIG["targets"].append(_study)
    CONFIG["datasets"][_study] = TINY[_study]["dataset"]
    CONFIG["plans"][_study] = {
        "study": _study,
        "measure": ["train"],  # only train, because the plans above are also timed
        "settings": {**TINY[_study]["run"], "dataset": _study},
        "runs": {"tiny": {}},
    }
#: Options for one thread per job, so two simultaneous jobs and other processes disturb each other less.
THREADS = ["--set-threads", "train=1", "throughput=1", "tune=1"]
COMMON = ["--configfile", "tiny.yaml", "--logger", "dlscale", "jobs", *THREADS]
#: Plans whose own pages the tests request; the page of the targets shows all plans.
PAGED = ("cosmo", "era5", "again")
TARGETS = ["all", *(f"plan_{plan}" for plan in PAGED)]


@dataclass(frozen=True)
class Job:
    """A job that Snakemake runs or would run; `str` gives its rule and wildcards."""

    rule: str
    wildcards: dict[str, str]
    reason: str
    message: str
    command: str
    resources: dict[str, int | str]

    def __str__(self) -> str:
        return " ".join([self.rule, *self.wildcards.values()])


@dataclass(frozen=True)
class Outcome:
    """Result of a Snakemake call."""

    status: int
    output: str
    jobs: list[Job] = field(repr=False)

    @property
    def names(self) -> list[str]:
        """Return the sorted names of the jobs, without target rules, which only collect other jobs."""
        return sorted(str(job) for job in self.jobs if job.command)


@dataclass
class Tree:
    """A copy of the repository with its own configuration."""

    path: Path
    config: dict[str, Any]
    _dry_runs: subprocess.Popen[str] | None = None

    def write(self) -> None:
        """Write the configuration file."""
        (self.path / "tiny.yaml").write_text(yaml.safe_dump(self.config, sort_keys=False))
        self.imports.mkdir(exist_ok=True)

    @property
    def results(self) -> Path:
        """Return the results folder."""
        return self.path / self.config["results"]

    @property
    def log(self) -> Path:
        """Return the file to which Snakemake's jobs are written."""
        return self.path / "jobs.jsonl"

    @property
    def imports(self) -> Path:
        """Return the folder to which each stage writes the names of the modules that it imported."""
        return self.path / "imports"

    @property
    def environment(self) -> dict[str, str]:
        """Return an environment in which `python -m dlscale` runs this Python and the tree's package."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SNAKEMAKE", "PYTEST", "SLURM"))}
        return {
            **kept,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{self.path / 'workflow_scripts'}{os.pathsep}{INSIDE}",
            "JOBS_LOG": str(self.log),
            "IMPORTS": str(self.imports),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start Snakemake in its own process group."""
        command = [sys.executable, "-m", "snakemake", *COMMON, *arguments]
        return subprocess.Popen(
            command,
            cwd=self.path,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def snakemake(self, *arguments: str, timeout: float = 2 * PATIENCE) -> Outcome:
        """Run Snakemake, wait for its end, and return the outcome."""
        self.log.unlink(missing_ok=True)
        with self.start(*arguments) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return Outcome(process.returncode, output, self.jobs())

    def planned(self, *arguments: str, targets: Sequence[str] = TARGETS) -> Outcome:
        """Return the outcome of a dry run."""
        if self._dry_runs is None:
            self._dry_runs = subprocess.Popen(
                [sys.executable, str(INSIDE / "dry_runs.py")],
                cwd=self.path,
                # as for `dlscale why`: write the reasons to a file instead of the terminal
                env={**self.environment, ASKED: str(self.path / "answer.json")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self.log.unlink(missing_ok=True)
        assert self._dry_runs.stdin and self._dry_runs.stdout
        self._dry_runs.stdin.write(json.dumps([*COMMON, "--dry-run", "-p", *arguments, "--", *targets]) + "\n")
        self._dry_runs.stdin.flush()
        status, output = json.loads(self._dry_runs.stdout.readline())
        assert status == 0, output
        return Outcome(status, output, self.jobs())

    def jobs(self) -> list[Job]:
        """Return the jobs that the last call ran or would run."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [Job(**json.loads(line)) for line in lines]

    def close(self) -> None:
        """End the process for dry runs."""
        if self._dry_runs:
            self._dry_runs.communicate()

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command like a user at a terminal; return the completed process."""
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.path,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def python(self, code: str) -> Any:
        """Run code that prints JSON, and return the result."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=PATIENCE,
        )
        return json.loads(done.stdout)


def copy_tree(path: Path) -> None:
    """Copy the files that the workflow needs, and the external study, without results and caches."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(TEMPLATE, path.parent / OUTSIDE, ignore=ignored, dirs_exist_ok=True)
    path.mkdir(parents=True)
    for name in TREE:
        source = ROOT / name
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, path / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, path / name, follow_symlinks=False)


@pytest.fixture(scope="session")
def make_tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Tree]]:
    """Return a function that copies the repository, or the tree `like` with its results."""
    trees = []

    def make(config: dict[str, Any] | None = None, like: Tree | None = None) -> Tree:
        tree = Tree(tmp_path_factory.mktemp("tree") / "a repository", json.loads(json.dumps(config or CONFIG)))
        trees.append(tree)
        if like:
            shutil.copytree(like.path.parent, tree.path.parent, symlinks=True, dirs_exist_ok=True)
        else:
            copy_tree(tree.path)
        tree.write()
        return tree

    yield make
    for tree in trees:
        tree.close()


@pytest.fixture(scope="session")
def finished(make_tree: Callable[..., Tree], tmp_path_factory: pytest.TempPathFactory) -> tuple[Tree, Outcome]:
    """Run the tiny workflow once for all test processes; return a copy, to be left unchanged, and the outcome."""

    def run(folder: Path) -> None:
        copy_tree(folder / "a repository")
        tree = Tree(folder / "a repository", CONFIG)
        tree.write()
        outcome = tree.snakemake("--cores", "2", "--printshellcmds", "--", *TARGETS, timeout=6 * PATIENCE)
        assert outcome.status == 0, outcome.output[-5000:]
        (folder / "output").write_text(outcome.output)

    folder = once(tmp_path_factory, "workflow", run)
    tree = make_tree(like=Tree(folder / "a repository", CONFIG))
    return tree, Outcome(0, (folder / "output").read_text(), tree.jobs())


@pytest.fixture
def clone(finished: tuple[Tree, Outcome], make_tree: Callable[..., Tree]) -> Tree:
    """Return a copy of the finished tree with Snakemake's metadata; a test may change the copy."""
    return make_tree(like=finished[0])
