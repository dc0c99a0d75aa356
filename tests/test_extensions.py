"""Extensions are removable: without one extension, or without all of them, everything else works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dlscale.cli import QUERIES
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.core.stages import STAGES, stage_of
from tests.conftest import ROOT

EXTENSIONS = registry.extensions()
NAMES = [*EXTENSIONS]
COMMANDS = {name: [*getattr(module, "COMMANDS", [])] for name, module in registry.extensions().items()}
#: Extensions to remove: all of them, or a single one.
REMOVED = [pytest.param(NAMES, id="all"), *(pytest.param([name], id=name, marks=pytest.mark.slow) for name in NAMES)]


def absent(removed: list[str]) -> list[str]:
    """Return removed extensions, and the extensions that use them, directly or not."""
    uses = {name: getattr(module, "USES", ()) for name, module in registry.extensions().items()}
    gone = [name for name in NAMES if {name, *uses[name]} & {*removed}]
    return gone if gone == removed else absent(gone)


def called(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the package in `folder`; return the completed process."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "workflow_scripts")}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path: Path, removed: list[str]) -> Path:
    """Return a copy of the repository without some extensions."""
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.splitlines():
        if not name.startswith(tuple(f"workflow_scripts/dlscale/extensions/{each}/" for each in removed)):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name, follow_symlinks=False)
    return tmp_path


@pytest.mark.parametrize("removed", REMOVED)
def test_commands_of_a_removed_extension_are_gone(repository: Path, removed: list[str]) -> None:
    done = called(repository, "-m", "dlscale", "--help")
    listed = {name for name in ("run", *QUERIES) if f"\n    {name} " in done.stdout}
    gone = {command for name in absent(removed) for command in COMMANDS[name]}
    kept = {command for name in NAMES for command in COMMANDS[name]} - gone
    assert done.returncode == 0 and kept < listed and not gone & listed, done.stderr
    modules = "dlscale.rules.calls, dlscale.report.report, dlscale.measure.throughput"
    assert called(repository, "-c", f"import dlscale.train.train, {modules}").returncode == 0
    for command in sorted(gone)[:1]:
        refused = called(repository, "-m", "dlscale", command)
        assert refused.returncode == 2 and f"no command is called '{command}'" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("removed", REMOVED)
def test_plans_run_without_an_extension(repository: Path, removed: list[str]) -> None:
    """Without an extension, a dry run of all the demo's plans succeeds; the extension `why` adds the reasons."""
    done = called(repository, "-m", "snakemake", "--dry-run")
    assert done.returncode == 0 and "; duration unknown" in done.stderr, done.stderr
    assert ("starter_demo.single (train): never made" in done.stderr) == ("why" not in removed)


@pytest.mark.long
@pytest.mark.parametrize("removed", [pytest.param(NAMES, id="all")])
def test_the_core_alone_trains_measures_and_reports(repository: Path, removed: list[str]) -> None:
    """Without extensions, the smallest study and an external study run up to their pages."""
    new = [sys.executable, "-m", "dlscale", "new-study", "waves"]
    assert subprocess.run(new, cwd=repository).returncode == 0  # without `called`: with all extensions
    for words in (["starter_demo"], ["waves_ladder", "--configfile", "waves/waves_run.yaml"]):
        done = called(repository, "-m", "dlscale", "run", *words)
        assert done.returncode == 0, done.stderr
        page = done.stderr.splitlines()[-1].removeprefix("Report: ")
        assert "samples/s" in Path(page).read_text(encoding="utf-8")


@pytest.mark.parametrize(("table", "name"), [("STAGES", "train"), ("LOADERS", "torch"), ("COMMANDS", "explain")])
def test_an_extension_cannot_take_a_name_that_exists(monkeypatch: pytest.MonkeyPatch, table: str, name: str) -> None:
    """A row with the name of a core stage, a core loader, or another extension's command is refused."""
    module = ModuleType("mine.extension")
    setattr(module, table, {name: object()})
    monkeypatch.setattr(registry, "extensions", lambda: {**EXTENSIONS, "mine": module})
    tables = {
        "STAGES": lambda: registry.table("STAGES", ["train"]),
        "LOADERS": registry.loader_settings,
        "COMMANDS": lambda: registry.table("COMMANDS"),
    }
    with pytest.raises(UserError, match=f"extension mine: {table}: '{name}' exists already; rename it"):
        tables[table]()


def test_the_stage_of_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules of the core may have a stage's name and a suffix; a stage's name may contain underscores."""
    monkeypatch.setitem(STAGES, "weights_summary", STAGES["train"])
    assert [stage_of(rule) for rule in ("train", "report_plan", "fetch", "weights_summary")] == [
        *("train", "report", "acquire", "weights_summary")
    ]
