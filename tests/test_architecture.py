"""The house: layers, pure models, and a fingerprint that follows every import and no more."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from dlscale.config import resolve as config
from dlscale.config.dataset import DatasetSettings, dataset_type
from dlscale.config.run import Run
from dlscale.core import registry as plugins
from dlscale.core import stages
from dlscale.core.fingerprint import ROOT as PACKAGE
from dlscale.core.fingerprint import fingerprint, reachable
from tests.conftest import COSMO, COSMO_RUN, ERA5, ERA5_RUN, ROOT

MODULES = {
    ".".join(["dlscale", *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


def imports(file: Path) -> set[str]:
    """Return all that a file imports, by full name; relative imports begin with a dot."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def run(name: str) -> Run:
    """Return the resolved run of a study, on simulated data."""
    study, data, settings = {
        "cosmo": ("cosmo_unet", COSMO, COSMO_RUN),
        "era5": ("era5_vit", ERA5, ERA5_RUN),
        "synthetic": ("cosmo_unet", COSMO, {**COSMO_RUN, "loader": {"kind": "synthetic"}}),
    }[name]
    raw = {
        "targets": ["plan"],
        "datasets": {"data": data},
        "plans": {"plan": {"study": study, "settings": {"dataset": "data"}, "runs": {"run": settings}}},
    }
    return config.load(raw).plans["plan"]["run"].run


def dataset(settings: dict) -> DatasetSettings:
    return TypeAdapter(dataset_type()).validate_python(settings)


def test_layers() -> None:
    """The contracts in pyproject.toml: layers, pure models, no Snakemake in a stage."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_relative_imports() -> None:
    """The fingerprint does not follow them."""
    assert not {module for module, file in MODULES.items() if any(name[0] == "." for name in imports(file))}


def test_models_are_pure() -> None:
    """PyTorch, the standard library, and each other."""
    allowed = {"torch", *sys.stdlib_module_names}
    for module, file in MODULES.items():
        if module.startswith("dlscale.models"):
            foreign = {name for name in imports(file) if name.split(".")[0] not in allowed}
            assert all(name.startswith("dlscale.models") for name in foreign), module


def test_computed_imports_are_in_one_place() -> None:
    """The fingerprint cannot see them: `dlscale.core.registry` names the modules, the command line the stages'."""
    found = {module for module, file in MODULES.items() if re.search("import_module|__import__", file.read_text())}
    assert found == {"dlscale.core.registry", "dlscale.cli"}


def test_stages_and_plugins_are_modules() -> None:
    assert set(stages.STAGES.values()) <= set(MODULES)
    for settings in (COSMO, ERA5):
        assert set(stages.modules("acquire", dataset(settings))) <= set(MODULES)
        assert set(stages.modules("preprocess", dataset(settings))) <= set(MODULES)
    for name in ("cosmo", "era5", "synthetic"):
        assert set(stages.modules("train", run(name))) <= set(MODULES)
    for study in config.shipped_studies():
        assert f"dlscale.studies.{study}" in MODULES


@pytest.mark.parametrize(
    ("stage", "subject", "there", "absent"),
    [
        ("train", "cosmo", ["models.unet3d", "data.crops", "studies.cosmo_unet"], ["models.vit", "data.pairs"]),
        ("train", "era5", ["models.vit", "data.pairs", "studies.era5_vit"], ["models.unet3d", "data.crops"]),
        ("train", "cosmo", ["train.trainer", "data.loaders.torch_loader"], ["data.loaders.synthetic_loader"]),
        ("train", "synthetic", ["data.loaders.synthetic_loader"], ["data.loaders.torch_loader"]),
        ("train", "era5", ["train.checkpoint"], ["measure.throughput", "report.report", "data.preprocess", "cli"]),
        ("throughput", "era5", ["train.step", "models.vit"], ["train.trainer", "train.checkpoint", "report.report"]),
    ],
)
def test_reach_of_runs(stage: str, subject: str, there: list[str], absent: list[str]) -> None:
    found = reachable(stages.modules(stage, run(subject)))
    assert {f"dlscale.{name}" for name in there} <= set(found)
    assert not {f"dlscale.{name}" for name in absent} & set(found)


@pytest.mark.parametrize(
    ("stage", "settings", "there", "absent"),
    [
        ("acquire", COSMO, ["data.cosmo_simulator"], ["data.era5_simulator", "data.download", "data.cosmo"]),
        ("acquire", ERA5, ["data.era5_simulator"], ["data.cosmo_simulator", "data.download", "data.era5"]),
        ("preprocess", COSMO, ["data.cosmo", "data.store"], ["data.cosmo_simulator", "data.era5", "models.unet3d"]),
        ("preprocess", ERA5, ["data.era5", "data.store"], ["data.era5_simulator", "data.cosmo", "data.era5_zarr"]),
    ],
)
def test_reach_of_data(stage: str, settings: dict, there: list[str], absent: list[str]) -> None:
    found = reachable(stages.modules(stage, dataset(settings)))
    assert {f"dlscale.{name}" for name in there} <= set(found)
    assert not {f"dlscale.{name}" for name in absent} & set(found)


def test_fetched_files_depend_on_no_source() -> None:
    """What was fetched does not change with the code that fetched it."""
    files = {"kind": "files", "train": ["https://example.org/a.h5"], "valid": ["https://example.org/b.h5"]}
    assert stages.modules("acquire", dataset({"kind": "cosmo", "source": files})) == []


# ---- the fingerprint itself, on a package made for it ------------------------------------------------

PROBE = """
import sys
from pathlib import Path
from dlscale.core import fingerprint as f
f.ROOT = Path(sys.argv[1])
print(*f.reachable(["dlscale.entry"]))
print(f.fingerprint(["dlscale.entry"], [Path(file) for file in sys.argv[2:]]))
"""
FILES = {
    "__init__.py": "",
    "entry.py": "import os\nimport dlscale.plain\nfrom dlscale import sibling\nfrom dlscale.folder.deep import name\n",
    "plain.py": "def late():\n    from dlscale.lazy import x\n    return x\n",
    "sibling.py": "if False:\n    import dlscale.typing_only as t\n",
    "lazy.py": "from dlscale import entry\n",  # a circle
    "typing_only.py": "",
    "folder/__init__.py": "from dlscale.folder import initial\n",
    "folder/initial.py": "",
    "folder/deep.py": "name = 'dlscale.stranger'\n",
    "stranger.py": "",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "dlscale" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dlscale" / name).write_text(text)
    return tmp_path / "dlscale"


def probe(package: Path, *files: Path) -> tuple[set[str], str]:
    """Return what `dlscale.entry` reaches there, and its fingerprint."""
    command = [sys.executable, "-c", PROBE, str(package), *map(str, files)]
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    reached, digest = output.splitlines()
    return {name.removeprefix("dlscale.") for name in reached.split()}, digest


def test_reach(package: Path) -> None:
    """Imports in functions and of siblings, packages on the way, circles; not what is only named in a string."""
    expected = {
        "dlscale",
        "entry",
        "plain",
        "lazy",
        "sibling",
        "typing_only",
        "folder",
        "folder.deep",
        "folder.initial",
    }
    assert probe(package)[0] == expected


def test_digest_is_of_content(package: Path) -> None:
    """Every reached file counts, with its content and not with its time; others do not."""
    style = package / "style.css"
    style.write_text("a {}")
    _, before = probe(package, style)
    assert probe(package)[1] != before
    for name in FILES:
        file = package / name
        text = file.read_text()
        file.write_text(text + "# edited\n")
        assert (probe(package, style)[1] != before) == (name != "stranger.py"), name
        file.write_text(text)
    assert probe(package, style)[1] == before
    style.write_text("b {}")
    assert probe(package, style)[1] != before


def test_two_modules_that_swap_their_contents_are_seen(package: Path) -> None:
    _, before = probe(package)
    one, other = package / "folder/deep.py", package / "folder/initial.py"
    (one_text, other_text) = one.read_text(), other.read_text()
    one.write_text(other_text)
    other.write_text(one_text)
    assert probe(package)[1] != before


def test_fingerprints_differ_by_study() -> None:
    digests = {fingerprint(stages.modules("train", run(name))) for name in ("cosmo", "era5", "synthetic")}
    assert len(digests) == 3 and all(len(digest) == 64 for digest in digests)
    assert plugins.study(run("cosmo").study) == "dlscale.studies.cosmo_unet"
