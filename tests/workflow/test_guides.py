"""Guides and tables of docs/, compared with the workflow; a new kind of dataset in the package."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable

import pytest

from tests.conftest import ROOT
from tests.workflow.conftest import Tree

EXTENSION = re.findall(
    r"^```(?:toml|python|yaml)\n# (\S+)\n(.*?)^```", (ROOT / "docs/adding.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.slow
@pytest.mark.long
def test_an_external_extension(clone: Tree) -> None:
    """The package in docs/adding.md adds a stage, a loader and a command; no other stage reruns."""
    files = dict(EXTENSION)
    entries = tomllib.loads(files.pop("pyproject.toml"))["project"]
    path = clone.path / "workflow_scripts"  # this folder is on Python's path, like the folder of installed packages
    files.pop("plans/counted.yaml")  # the test's tree has its own plan
    (path / "dlscale_sizes-0.1.dist-info").mkdir()
    (path / "dlscale_sizes-0.1.dist-info/METADATA").write_text(f"Name: {entries['name']}\nVersion: 0.1\n")
    (path / "dlscale_sizes-0.1.dist-info/entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in rows.items())
            for group, rows in entries["entry-points"].items()
        )
    )
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    assert clone.planned().names == []
    assert "Count the samples" in clone.shell("python -m dlscale sizes --help").stdout
    run = clone.config["plans"]["cosmo"]["settings"]
    loaders = {"plain": {"loader": {"kind": "plain"}}, "torch": {"loader": {"kind": "torch", "workers": 0}}}
    clone.config["plans"]["counted"] = {
        **clone.config["plans"]["cosmo"],
        "measure": ["train", "sizes"],
        "only": {},
        "runs": loaders,
    }
    clone.write()
    outcome = clone.snakemake("--cores", "2", "--", "plan_counted")
    assert outcome.status == 0, outcome.output[-3000:]
    assert {"sizes counted plain", "train counted plain"} <= {*outcome.names}
    folders = [clone.results / "plans/counted" / name for name in loaders]
    sizes = [json.loads((folder / "sizes.json").read_text())["sizes"] for folder in folders]
    assert sizes == [[run["batch_size"]] * 3] * 2
    losses = [
        [json.loads(line)["train_loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in folders
    ]
    assert losses[0] and losses[0] == losses[1]
    printed = clone.shell(f"python -m dlscale sizes-of counted.plain --configfile '{clone.path / 'tiny.yaml'}'")
    assert printed.stdout.split() == ["counted.plain", *map(str, sizes[0])], printed.stderr
    # The stage depends on the extension's code.
    module = path / "dlscale_sizes/stage.py"
    module.write_text(module.read_text().replace("epoch(0)", "epoch(1)"))
    again = clone.snakemake("--cores", "2", "--dry-run", "--", "plan_counted")
    assert {"sizes counted plain", "sizes counted torch"} <= {*again.names}
    assert not any(name.startswith("train") for name in again.names)


KIND = '''"""Kind `pulses`: bell curves of random heights."""

from typing import Any, Literal

from dlscale import DatasetKind, DatasetSettings, Part, RowSamples


class PulsesDataset(DatasetSettings):
    """How many pulses each split has."""

    kind: Literal["pulses"]
    train: int = 6
    valid: int = 2


class Pulses(DatasetKind):
    """One file a split, made in memory."""

    name, Settings, Samples = "pulses", PulsesDataset, RowSamples

    def parts(self, dataset: Any) -> list[Part]:
        return [Part("train", "pulses"), Part("valid", "pulses")]


KIND = Pulses()
'''
SOURCE = '''"""Pulses of a part."""

from pathlib import Path
from typing import Any

import numpy as np

from dlscale.data.kind import Part
from dlscale.data.source import ArraySource


def open_source(dataset: Any, part: Part, paths: list[Path]) -> ArraySource:
    """Make pulses [N, 16] and their heights [N]."""
    height = np.random.default_rng(part.split == "valid").uniform(1, 2, getattr(dataset, part.split))
    return ArraySource({"pulse": height[:, None] * np.exp(-(np.linspace(-3, 3, 16) ** 2)), "height": height})
'''


@pytest.mark.slow
@pytest.mark.long
def test_a_kind_of_dataset_inside(clone: Tree) -> None:
    """Two modules in a new folder suffice: the data stages use the new kind, and no other job reruns."""
    folder = clone.path / "workflow_scripts/dlscale/datasets/pulses"
    folder.mkdir()
    for name, text in {"__init__": "", "kind": KIND, "source": SOURCE}.items():
        (folder / f"{name}.py").write_text(text)
    assert clone.planned().names == []
    options = """--config '{"kind": "pulses"}' --part train/pulses --out piece.h5"""
    done = clone.shell(f"python -m dlscale preprocess {options}")
    assert done.returncode == 0 and (clone.path / "piece.h5").exists(), done.stderr
    clone.config["datasets"]["pulses"] = {"kind": "pulses", "train": 10}
    clone.write()
    outcome = clone.snakemake("--cores", "2", "--", "data_pulses")
    assert outcome.status == 0, outcome.output[-3000:]
    manifest = json.loads((clone.results / "data/pulses/manifest.json").read_text())
    assert [sum(file["rows"] for file in manifest["splits"][split]) for split in ("train", "valid")] == [10, 2]
    assert (clone.results / "data/pulses/preview.png").exists()


# ---- docs/fingerprints.md: the table of rules ----------------------------------------------------------


Edges = set[tuple[str, str]]


def told(text: str) -> Edges:
    """Return the edges in a page's table of rules, each as (needed rule, rule that needs it)."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|([^|]*)\|$", text, re.MULTILINE)
    return {(before, after) for after, needs in rows for before in re.findall(r"\w+", needs)}


def of_snakemake(text: str) -> Edges:
    names = dict(re.findall(r"(id\d+)\[(\w+)\]", text))
    return {(names[before], names[after]) for before, after in re.findall(r"(id\d+) --> (id\d+)", text)}


@pytest.mark.slow
def test_the_graph_of_rules(make_tree: Callable[..., Tree]) -> None:
    """The edges in docs/fingerprints.md equal Snakemake's rule graph without `all` and `configure_*`."""
    done = make_tree().shell("snakemake --rulegraph mermaid-js")
    assert done.returncode == 0, done.stderr
    edges = of_snakemake(done.stdout)
    rules = {(before, after) for before, after in edges if after != "all" and not before.startswith("configure_")}
    assert len(rules) < len(edges) and ("train", "report") in rules
    assert told((ROOT / "docs/fingerprints.md").read_text()) == rules


# ---- docs/first_hour.md --------------------------------------------------------------------------------


PAGE = (ROOT / "docs/first_hour.md").read_text()
FILES = re.findall(r"^```(?:yaml|python)\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.join(shlex.split(line, comments=True)) for block in BLOCKS for line in block.splitlines()]


def written(tree: Tree) -> Tree:
    for name, text in FILES:
        (tree.path / name).write_text(text)
    return tree


@pytest.mark.slow
def test_the_run_commands_of_each_guide_are_valid(make_tree: Callable[..., Tree]) -> None:
    """The `run`, `why` and `python` commands of docs/first_hour.md work in order; `dlscale run` only as a dry run."""
    tree = written(make_tree())
    assert [name for name, _ in FILES] == ["mine.yaml", "fields.py", "own.yaml"]
    for command in [command for command in COMMANDS if command.startswith(("dlscale run", "dlscale why", "python "))]:
        shown = command if not command.startswith("dlscale run") or "-n" in command.split() else f"{command} -n"
        done = tree.shell(shown.replace("dlscale ", "python -P -m dlscale ", 1))
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        if "mine.yaml" in command and " run " in command:
            assert "rates.slow (train): never made" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_for_own_arrays_work(make_tree: Callable[..., Tree]) -> None:
    """The commands of docs/first_hour.md for own arrays work one after the other."""
    tree = written(make_tree())
    for command in [command for command in COMMANDS if "own.yaml" in command or "fields.py" in command]:
        done = tree.shell(command.replace("dlscale ", "python -P -m dlscale ", 1))
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert (tree.path / "results/data/fields/preview.png").exists()
    assert (tree.path / "results/report/squares.html").exists()
