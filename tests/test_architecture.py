"""Architecture: layers, models in plain PyTorch, study names only in their folders, fingerprints of all imports."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dlscale.config import resolve
from dlscale.core import registry
from dlscale.core.fingerprint import GUARDS, _file, _source, data_modules, reachable, run_modules
from dlscale.core.fingerprint import ROOT as PACKAGE
from dlscale.core.settings import read_yaml
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.data import parts
from dlscale.data.loaders import LOADERS as LOADER_SETTINGS
from dlscale.extensions.scaffold.new_study import TEMPLATE
from tests.conftest import ROOT, TINY

MODULES = {
    ".".join(["dlscale", *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}
#: Module of each study that has its own model, by name of the study.
STUDIES = {name: study.module for name, study in registry.studies().items() if not registry.study(name).programs}
KINDS = registry.kinds()
LOADERS = [settings.model_fields["kind"].annotation.__args__[0] for settings in LOADER_SETTINGS]
#: Modules that define a model; they use only plain PyTorch.
MODELS = {module for study in STUDIES.values() if (module := study.removesuffix("study") + "model") in MODULES}
#: All shipped datasets and the tiny datasets, by name.
DATASETS = resolve.load(
    resolve.merge(
        read_yaml(ROOT / "config.yaml"),
        {"datasets": {f"tiny_{study}": tiny["dataset"] for study, tiny in TINY.items()}},
    )
).workflow.datasets


def imports(file: Path) -> set[str]:
    """Return the full names of all imports of a file; relative imports begin with a dot."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def below(package: str, modules: list[str]) -> set[str]:
    """Return the modules inside a package; the package itself does not count."""
    return {module for module in modules if module.startswith(f"dlscale.{package}.")}


def of_kinds(modules: list[str]) -> dict[str, str]:
    """Return the kind of dataset of each module that belongs to a kind."""
    packages = {f"{package}.": kind for kind, package in KINDS.items()}
    return {
        f"{module}.": kind
        for package, kind in packages.items()
        for module in modules
        if f"{module}.".startswith(package)
    }


# ---- the code ---------------------------------------------------------------------------------------


def test_extensions_declare_the_extensions_that_they_import() -> None:
    """`USES` lists the imports that pyproject.toml allows between extensions, and `tune` for `mnist_cnn`'s sweep."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (ignored,) = (contract["ignore_imports"] for contract in contracts if contract["type"] == "independence")
    allowed = {tuple(part.split(".")[2] for part in each.split(" -> ")) for each in ignored}
    modules = registry.extensions()
    declared = {(name, used) for name in modules for used in getattr(modules[name], "USES", ())}
    assert declared == allowed | {("mnist_cnn", "tune")}


def test_layers() -> None:
    """The import contracts in pyproject.toml hold: layers, models in plain PyTorch, no Snakemake in a stage."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_computed_imports_are_in_one_place() -> None:
    """Stages import modules by computed names only through the registry and the command line.

    The fingerprint cannot follow such imports. Instead, the registry names the modules of studies, and the command line
    names the modules of stages.
    """
    computed = re.compile("import_module|__import__|spec_from_file")
    assert {module for module, file in MODULES.items() if computed.search(file.read_text())} == {
        "dlscale.core.registry",
        "dlscale.cli",
        "dlscale.extensions.programs.hook.sitecustomize",  # runs in external programs, without dlscale
        "dlscale.outside.timed",  # the old path of a module
    }


def test_no_study_or_kind_is_named_outside_of_its_own_files() -> None:
    """Shared files name no study and no kind of dataset, not even in a comment."""
    words = {
        "cosmo",
        "era5",
        "unet",
        "vit",
        "crops",
        *(kind for kind in KINDS if kind != "files"),  # «files» is also an everyday word
        *(word for name in STUDIES for word in name.split("_")),
    }
    words = words - {"starter"} | {"starter_cnn"}  # «starter» also names a program that starts processes
    # Match only at the beginning of a word or name, so «activity» does not match «vit».
    pattern = re.compile(rf"(?<![a-zA-Z])({'|'.join(sorted(words))})", re.IGNORECASE)
    tutorials = [file.parent for file in PACKAGE.glob("extensions/*/study.py")]
    rooms = [PACKAGE / "studies", PACKAGE / "datasets", PACKAGE / "extensions/scaffold", *tutorials]
    # Skip a generated file and a link to the user's file.
    written = [PACKAGE / "config/config.schema.json", PACKAGE / "workflow/config.yaml"]
    files = [*PACKAGE.rglob("*"), *(ROOT / "rules").glob("*.smk"), ROOT / "Snakefile"]
    named = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sorted(files)
        if file.is_file() and "__pycache__" not in file.parts and file not in written
        if not any(file.is_relative_to(room) for room in rooms)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not named, "\n" + "\n".join(named)


# ---- the registry -----------------------------------------------------------------------------


def test_every_study_has_a_tiny_run() -> None:
    """`tests/tiny` has a file for each study, so tests that loop over studies cover the study."""
    assert set(TINY) == set(STUDIES)


@pytest.mark.parametrize("study", STUDIES)
def test_study_resolves(study: str) -> None:
    """A study's kind of dataset is registered, and its tiny run is valid."""
    assert STUDIES[study] in MODULES
    assert registry.study(study).dataset in KINDS
    plan = {"study": study, "settings": {**TINY[study]["run"], "dataset": "tiny"}, "runs": {"run": {}}}
    raw = {"targets": ["tiny"], "datasets": {"tiny": TINY[study]["dataset"]}, "plans": {"tiny": plan}}
    run = resolve.load(raw).plans["tiny"]["run"].run
    assert run.study == study
    for stage in RUN_STAGES:
        assert set(run_modules(stage, study, run.loader.kind)) <= set(MODULES)


@pytest.mark.parametrize("kind", KINDS)
def test_kind_resolves(kind: str) -> None:
    """The modules of a kind define the functions of their roles, and a test dataset has this kind."""
    assert registry.kind(kind).name == kind
    for role, functions in registry.ROLES.items():
        if module := registry.module_of(kind, role):
            assert any(hasattr(importlib.import_module(module), function) for function in functions), role
    mine = [dataset for dataset in DATASETS.values() if dataset.kind == kind]
    assert mine
    for acquirer in {parts.kind_of(dataset).acquirer(dataset) for dataset in mine} - {None}:
        module = registry.module_of(kind, acquirer)
        assert module and hasattr(importlib.import_module(module), "acquire")


# ---- modules that a stage imports -------------------------------------------------------------------


@pytest.mark.parametrize("stage", RUN_STAGES)
@pytest.mark.parametrize("study", STUDIES)
def test_a_run_imports_only_the_modules_of_one_study(stage: str, study: str) -> None:
    reached = reachable(run_modules(stage, study, LOADERS[0]))
    samples = registry.module_of(registry.study(study).dataset, "samples")
    own = reachable([module for module in (STUDIES[study], samples) if module])
    assert STUDIES[study] in reached and (samples is None or samples in reached)
    assert not {module for name, module in STUDIES.items() if name != study} & set(reached)
    # Code that all studies use imports neither a model nor a kind of dataset.
    assert MODELS & set(reached) == MODELS & set(own) != set()
    assert of_kinds(reached) == of_kinds(own)
    assert {*of_kinds(reached).values()} <= {registry.study(study).dataset}
    if stage not in ("program", "headroom"):  # stages of external programs
        assert not {*registry.provider("Program")} & set(reached)
    assert not {f"{KINDS[kind]}.{role}" for kind in KINDS for role in ("source", "preview", "describe")} & set(reached)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_run_imports_only_the_modules_of_one_loader(loader: str) -> None:
    reached = reachable(run_modules("train", next(iter(STUDIES)), loader))
    assert {name for name in LOADERS if registry.loader(name) in reached} == {loader}


@pytest.mark.parametrize("stage", RUN_STAGES)
def test_a_stage_reaches_no_other(stage: str) -> None:
    """A stage imports no other stage, neither report nor preflight, and not the command line."""
    reached = reachable(run_modules(stage, next(iter(STUDIES)), LOADERS[0]))
    assert {name for name in STAGES if STAGES[name].decides in reached} == {stage}
    assert not below("report", reached) | below("preflight", reached) and "dlscale.cli" not in reached


#: Calls that change weights, gradients or random generators. Guards must not contain these calls.
TOUCHING = {
    *("backward", "zero_grad", "requires_grad_", "load_state_dict", "copy_", "fill_", "set_", "register_hook"),
    *("register_forward_hook", "register_forward_pre_hook", "clip_grad_norm_"),
    *("manual_seed", "seed", "set_rng_state", "fork_rng", "default_rng", "Generator", "shuffle", "random"),
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal_", "uniform_", "bernoulli_"),
    *("set_default_dtype", "set_num_threads", "use_deterministic_algorithms", "set_grad_enabled", "autocast"),
}


#: Modules around a training: the command line and the stage use them; training code does not import them.
AROUND = {
    *("dlscale.cli", "dlscale.core.process", "dlscale.core.progress"),
    *("dlscale.core.telemetry", "dlscale.core.board", "dlscale.parallel.rendezvous"),
    *("dlscale.extensions.selftest.selftest",),
    *("dlscale.parallel.watchdog", "dlscale.train.around", "dlscale.train.logs"),
    *("dlscale.train.memory", "dlscale.train.provenance", "dlscale.train.train"),
}


@pytest.mark.parametrize("study", STUDIES)
def test_a_training_does_not_import_the_modules_around_training(study: str) -> None:
    assert MODULES.keys() >= AROUND
    assert not AROUND & set(reachable(run_modules("train", study, *LOADERS), whole=True))


@pytest.mark.parametrize("module", GUARDS)
def test_a_guard_decides_no_result(module: str) -> None:
    """A guard, a module that fingerprints of runs leave out, does not affect results.

    A guard uses no layer, optimiser or random number, and changes no tensor.
    """
    for stage in RUN_STAGES:
        assert module not in reachable(run_modules(stage, next(iter(STUDIES)), LOADERS[0]))
    forbidden = ("torch.nn", "torch.optim", "torch.random", "random", "numpy.random", "dlscale.studies")
    assert not {name for name in imports(MODULES[module]) if f"{name}.".startswith(tuple(f"{f}." for f in forbidden))}
    assert "dlscale.train.step" not in imports(MODULES[module])
    nodes = [*ast.walk(ast.parse(MODULES[module].read_text()))]
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    names = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in called}
    assert not names & TOUCHING
    written = [node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    assert not {"grad", "data", "requires_grad", "deterministic", "benchmark"} & set(written)


def test_a_guard_counts_where_pages_are_made() -> None:
    """The report's fingerprint includes the guard `core.text`, because the format of numbers changes pages."""
    assert "dlscale.core.text" in reachable(["dlscale.report.report"])


def test_measuring_needs_no_trainer() -> None:
    """A measurement does not depend on modules that only a training needs."""
    trainer = {"dlscale.train.trainer", "dlscale.train.checkpoint"}
    assert trainer <= set(reachable(run_modules("train", next(iter(STUDIES)), LOADERS[0])))
    assert not trainer & set(reachable(run_modules("throughput", next(iter(STUDIES)), LOADERS[0])))


@pytest.mark.parametrize("stage", ["preprocess", "describe", "preview"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_data_stage_imports_only_the_modules_of_one_kind(stage: str, kind: str) -> None:
    reached = reachable(data_modules(stage, kind))
    assert STAGES[stage].module in reached
    assert {*of_kinds(reached).values()} <= {kind}
    assert not below("studies", reached) | below("train", reached)
    assert not (MODELS | {*STUDIES.values()}) & set(reached)
    acquirers = {parts.kind_of(dataset).acquirer(dataset) for dataset in DATASETS.values() if dataset.kind == kind}
    assert not {registry.module_of(kind, acquirer) for acquirer in acquirers - {None}} & set(reached)


@pytest.mark.parametrize("name", DATASETS)
def test_a_raw_file_depends_only_on_the_simulator(name: str) -> None:
    """Changes of the download code do not affect downloaded files."""
    dataset = DATASETS[name]
    maker = parts.kind_of(dataset).maker(dataset)
    reached = reachable(data_modules("acquire", dataset.kind, maker))
    if maker is None:
        assert reached == []
        return
    assert registry.module_of(dataset.kind, maker) in reached
    assert {*of_kinds(reached).values()} == {dataset.kind}
    readers = {registry.module_of(dataset.kind, role) for role in registry.ROLES}
    assert not (readers | {"dlscale.data.acquire"}) & set(reached)


# ---- the fingerprint, for a package that the test writes ---------------------------------------------

PROBE = """
import sys
from pathlib import Path
from dlscale.core import fingerprint as f
f.ROOT = Path(sys.argv[1])
print(*f.reachable([sys.argv[2]]))
print(f.fingerprint([sys.argv[2]], [Path(file) for file in sys.argv[3:]]))
"""
FILES = {
    "__init__.py": "",
    "entry.py": "import os\nimport dlscale.plain\nfrom dlscale import sibling\nfrom dlscale.folder.deep import name\n",
    "plain.py": "def late():\n    from dlscale.lazy import x\n    return x\n",
    "sibling.py": "if False:\n    import dlscale.typing_only as t\n",
    "lazy.py": "from dlscale import entry\nif TYPE_CHECKING:\n    import dlscale.types\nelse:\n    import dlscale.run",
    "types.py": "",
    "run.py": "",
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


def probe(package: Path, *files: Path, module: str = "dlscale.entry") -> tuple[set[str], str]:
    """Return the modules that an entry module of the package reaches, and the fingerprint of the modules."""
    command = [sys.executable, "-c", PROBE, str(package), module, *map(str, files)]
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    reached, digest = output.splitlines()
    return {name.removeprefix("dlscale.") for name in reached.split()}, digest


def test_reach(package: Path) -> None:
    """The fingerprint follows imports in functions, imports of siblings, cycles, and parent packages.

    The fingerprint does not follow names in strings, or imports that are only for types.
    """
    expected = {
        "dlscale",
        "entry",
        "plain",
        "lazy",
        "sibling",
        "typing_only",
        "run",
        "folder",
        "folder.deep",
        "folder.initial",
    }
    assert probe(package)[0] == expected


def test_the_digest_depends_only_on_content(package: Path) -> None:
    """The content of every reached file counts, but its time does not. Other files do not count."""
    style = package / "style.css"
    style.write_text("a {}")
    _, before = probe(package, style)
    assert probe(package)[1] != before
    for name in FILES:
        file = package / name
        text = file.read_text()
        file.write_text(text + "\nedited = 1\n")
        assert (probe(package, style)[1] != before) == (name not in ("stranger.py", "types.py")), name
        file.write_text(text)
    assert probe(package, style)[1] == before
    style.write_text("b {}")
    assert probe(package, style)[1] != before


BEFORE = """
class Scale:
    def by(self, x, *, factor=2.0, **others):
        if x is None:
            return u'none'
        return f"{x * factor:.1f}" + 'b' "c"
"""
SAME = '''"""What it is for."""
# A comment.


class Scale:
    """A docstring."""

    def by(
        self, x, *, factor=2.0, **others
    ):
        """Another."""
        if x is None: return "none"  # one line
        return (f"{x * factor:.1f}" + "bc")
'''


def test_comments_do_not_change_the_fingerprint(package: Path) -> None:
    """Comments, docstrings and formatting do not change the fingerprint; any other change does."""
    file = package / "folder/deep.py"
    file.write_text(BEFORE)
    _, before = probe(package)
    file.write_text(SAME)
    assert probe(package)[1] == before
    for old, new in (
        *(("2.0", "2"), ("2.0", "True"), ("x *", "x +"), (".1f", ".2f"), ("None", "0"), ('"c"', '"d"')),
        *(("*, ", ""), ("**others", "**other"), ("is", "is not"), ("Scale", "Scales"), ("u'none'", "None")),
    ):
        assert old in BEFORE
        file.write_text(BEFORE.replace(old, new, 1))
        assert probe(package)[1] != before, (old, new)


WORDED = """
class Settings(Model):
    rate: float = Field(1.5, gt=0, description="A rate.")
    size = Field(4, description="A size.", alias="length")

def check(x):
    logging.info("seen %d", x)
    assert x is not None, "none"
    if x < 0:
        raise UserError(f"{x}: negative; expected more")
    return f"{x} of" if x else [TypeError("a" + str(x))]
"""


def test_words_make_only_pages_again(package: Path) -> None:
    """Changes of descriptions, messages and log lines affect only pages.

    Changes of names, defaults, bounds, conditions and logged values also affect stages.
    """
    file = package / "folder/deep.py"
    (package / "report").mkdir()
    (package / "report/__init__.py").touch()
    (package / "report/page.py").write_text("import dlscale.folder.deep\n")

    def digests(text: str) -> list[str]:
        file.write_text(text)
        return [probe(package)[1], probe(package, module="dlscale.report.page")[1]]

    before = digests(WORDED)
    for old, new in (
        *(("A rate.", "Rate."), ('"A size."', 'f"{2} sizes"'), ("seen %d", "%d seen"), ('"none"', 'f"no {x}"')),
        *((" negative; expected more", " below 0"), ('"a"', '"b"')),
    ):
        assert old in WORDED
        edited = digests(WORDED.replace(old, new, 1))
        assert edited[0] == before[0] and edited[1] != before[1], old
    for old, new in (
        *(("1.5", "2.5"), ("gt=0", "ge=0"), ("x < 0", "x < 1"), ("UserError", "ValueError"), ('"length"', '"size"')),
        *(("} of", "} from"), ("logging.info", "print"), ("is not None", "is None")),
    ):
        assert old in WORDED
        assert digests(WORDED.replace(old, new, 1))[0] != before[0], old


def test_two_modules_that_swap_their_contents_are_seen(package: Path) -> None:
    _, before = probe(package)
    one, other = package / "folder/deep.py", package / "folder/initial.py"
    (one_text, other_text) = one.read_text(), other.read_text()
    one.write_text(other_text)
    other.write_text(one_text)
    assert probe(package)[1] != before


def test_data_of_an_external_study_depend_only_on_the_data_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of an external study depend on the study's data module, but not on its model or on `dlscale.studies`."""
    monkeypatch.setattr(registry, "_added", {})
    monkeypatch.syspath_prepend(TEMPLATE)
    registry.add("waves", TEMPLATE / "waves.py")
    for stage in ("preprocess", "describe"):
        reached = reachable(data_modules(stage, "waves"))
        assert {"waves_data", "dlscale.data.source"} <= set(reached) and not below("studies", reached)
        assert "waves" not in reached
    assert {"waves", "dlscale.studies.base"} <= set(reachable(run_modules("train", "waves")))
    _file.cache_clear()
    _source.cache_clear()
