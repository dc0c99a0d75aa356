"""Times that a user waits: the workflow's graph, a call with nothing to do, a changed setting, resuming, imports."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import time
from pathlib import Path

from bench.measure import Options, Row, in_turns, seconds
from tests.conftest import COSMO, COSMO_RUN, ERA5, ERA5_RUN, make_run
from tests.workflow.conftest import Tree, copy_tree

RUNS = 300
#: Number of epochs that a training has completed before it is resumed.
EPOCHS = 3000

#: Limits of the measured durations, seconds.
GRAPH, HELP, NOTHING, CHANGED, RESUMED, WITHOUT = 10.0, 1.0, 2.0, 8.0, 5.0, 0.4
TYPED = 4.0  # more than `NOTHING`, because both `dlscale run` and Snakemake resolve the plans
#: Code that disables garbage collection, as stages do during their imports.
AS_STAGES = "import gc; gc.disable(); "
#: Code of the smallest training. Its optimiser step imports most of PyTorch.
FIRST_STEP = (
    "import torch; model = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), 0.1); "
    "model(torch.ones(1, 2)).sum().backward(); optimizer.step()"
)


def make_tree(folder: Path) -> Tree:
    """Copy the repository; configure a tiny plan and a plan of many runs."""
    config = {
        "targets": ["years"],
        "datasets": {
            "boxes": COSMO,
            "years": {**ERA5, "source": {**ERA5["source"], "days": 3, "train": [2001], "valid": [2002]}},
        },
        "plans": {
            "many": {
                "study": "cosmo_unet",
                "settings": {**COSMO_RUN, "dataset": "boxes"},
                "runs": {f"run{number}": {"seed": number} for number in range(RUNS)},
            },
            "years": {
                "study": "era5_vit",
                "measure": ["train"],
                "settings": {**copy.deepcopy(ERA5_RUN), "dataset": "years", "training": {"steps": 1}},
                "runs": {"vit": {}},
            },
        },
    }
    tree = Tree(folder / "repository", config)
    copy_tree(tree.path)
    tree.write()
    return tree


def edit_loop(options: Options) -> list[Row]:
    """Measure the wall time of complete processes against limits."""
    tree = make_tree(options.folder)
    environment = {key: value for key, value in tree.environment.items() if key != "IMPORTS"}
    epochs = 20 if options.quick else EPOCHS

    def start(*command: str) -> subprocess.Popen[str]:
        words = [sys.executable, *command]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, cwd=tree.path, env=environment, text=True, **pipes)  # type: ignore[call-overload]

    def call(*command: str) -> str:
        process = start(*command)
        output, _ = process.communicate()
        assert process.returncode == 0, output
        return output

    def nothing() -> None:
        assert "until the end" not in call(*snakemake, "-n")  # a dry run that lists jobs ends with this text

    snakemake = ["-m", "snakemake", "--configfile", "tiny.yaml", "--cores", "2"]
    typed = ["-m", "dlscale", "run", "years", "--configfile", "tiny.yaml"]
    results, numbers = tree.path / "results", itertools.count(1)
    call(*snakemake, "--", "all")
    long = options.folder / "long"

    def train_until(epoch: int) -> list[str]:
        """Return a command that trains the long run until `epoch`; each epoch has one step."""
        training = {"epochs": 10 * EPOCHS, "stop_after": epoch, "checkpoint_epochs": EPOCHS}
        samples = {**ERA5_RUN.get("samples", {}), "train": ERA5_RUN["batch_size"]}
        make_run(long, "era5_vit", {**copy.deepcopy(ERA5_RUN), "samples": samples, "training": training}, ERA5)
        files = {"config": long / "config.yaml", "manifest": results / "data/years/manifest.json", "out": long}
        files |= {"checkpoints": long / "checkpoints", "log": long / "log"}
        named = [word for name, path in files.items() for word in (f"--{name}", str(path))]
        return ["-P", "-m", "dlscale", "train", "--threads", "1", *named]

    call(*train_until(epochs))

    def until_an_epoch(metrics: Path, *command: str) -> float:
        """Return the seconds from the start of a command to the end of its first epoch, which has one step."""
        begin, before = time.time(), metrics.stat().st_size if metrics.exists() else 0
        process = start(*command)
        while not (metrics.exists() and metrics.stat().st_mtime > begin and metrics.stat().st_size > before):
            assert process.poll() in (None, 0), process.communicate()[0]
            time.sleep(0.01)
        passed = time.time() - begin
        output, _ = process.communicate()
        assert process.returncode == 0, output
        return passed

    def changed() -> float:
        tree.config["plans"]["years"]["settings"]["optimizer"] = {"kind": "adam", "lr": 1e-4 * next(numbers)}
        tree.write()
        metrics = results / "plans/years/vit/metrics.jsonl"
        metrics.unlink(missing_ok=True)
        return until_an_epoch(metrics, *snakemake)

    def resumed() -> float:
        return until_an_epoch(long / "metrics.jsonl", *train_until(epochs + next(numbers)))

    contestants = {
        "graph": lambda: seconds(lambda: call(*snakemake, "-n", "--quiet", "--", "plan_many")),
        "nothing": lambda: seconds(nothing),
        "typed": lambda: seconds(lambda: call(*typed, f"optimizer.lr={1e-5 * next(numbers)}", "-n", "--cores", "2")),
        "changed": changed,
        "resumed": resumed,
        "with torch": lambda: seconds(lambda: call("-P", "-c", AS_STAGES + "import dlscale.train.train")),
        "PyTorch": lambda: seconds(lambda: call("-P", "-c", AS_STAGES + FIRST_STEP)),
        "without": lambda: seconds(
            lambda: call("-m", "dlscale", "configure", "--settings", "{}", "--out", str(options.folder / "x.yaml"))
        ),
        "help": lambda: seconds(lambda: call("-m", "dlscale", "train", "--help")),
    }
    found = in_turns(options.repetitions, contestants)

    def row(name: str, what: str, limit: float, **counted: float) -> Row:
        return Row(name, "s", found[what], "the limit", [limit] * len(found[what]), counted, target=1.0)

    return [
        row(f"graph of {RUNS} runs", "graph", GRAPH, runs=RUNS),
        row("snakemake -n, nothing to do", "nothing", NOTHING),
        row("dlscale run PLAN KEY=VALUE -n", "typed", TYPED),
        row("another learning rate, until its first epoch of one step", "changed", CHANGED),
        row(f"a training after {epochs} epochs, until the next", "resumed", RESUMED, epochs=epochs),
        Row(
            "what a training imports",
            "s",
            found["with torch"],
            "PyTorch's first step",
            found["PyTorch"],
            {},
            target=1.25,
        ),
        row("a stage without PyTorch", "without", WITHOUT),
        row("dlscale train --help", "help", HELP),
    ]
