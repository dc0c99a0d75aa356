"""Installation of dlscale: version ranges, the lock file, environments with their own PyTorch, images and wheels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from importlib.metadata import distribution
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from dlscale.config.resolve import load_files
from dlscale.config.site import Site
from dlscale.core.errors import UserError
from dlscale.core.fingerprint import DOCS
from dlscale.core.fingerprint import ROOT as PACKAGE
from dlscale.core.settings import read_yaml
from dlscale.extensions.doctor.doctor import MIN_VERSIONS
from dlscale.extensions.scaffold import init
from dlscale.launch import launcher
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(line) for lines in [PROJECT["dependencies"], *EXTRAS.values()] for line in lines]
LOCK = dict(re.findall(r"^(\S+)==(\S+)  # via", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
CORE = {Requirement(line).name for line in PROJECT["dependencies"]}


def test_pyproject_pins_nothing_and_the_lock_all() -> None:
    for each in REQUIREMENTS:
        assert not re.search(r"==|~=|@", str(each.specifier)), f"{each}: exact versions belong only in the lock"
        locked = LOCK.get(canonicalize_name(each.name))
        assert locked is None or each.specifier.contains(locked, prereleases=True), f"{each}: the lock has {locked}"
        assert each.name not in CORE or (locked and ">=" in str(each.specifier)), f"{each} has no minimum version"
    wanted = [*EXTRAS["dev"], *EXTRAS["dali"], *EXTRAS["trackers"]]
    assert {canonicalize_name(Requirement(line).name) for line in wanted} - {"dlscale"} <= LOCK.keys()


def test_doctor_asks_for_the_same_versions() -> None:
    ranges = {each.name: each.specifier for each in REQUIREMENTS if each.name in MIN_VERSIONS}
    ranges["python"] = SpecifierSet(PROJECT["requires-python"])
    assert {name: f">={'.'.join(map(str, least))}" for name, least in MIN_VERSIONS.items()} == {
        name: str(specifier) for name, specifier in ranges.items()
    }


def test_the_workflow_asks_for_the_same_snakemake() -> None:
    (least,) = re.findall(r'^min_version\("(.*)"\)$', (ROOT / "Snakefile").read_text(), re.MULTILINE)
    assert f"snakemake>={least},<10" in PROJECT["dependencies"]


@pytest.mark.parametrize("major", ["12", "13"])
def test_one_cuda_in_the_gpu_image(major: str) -> None:
    """Base image, PyTorch's index, Nsight Systems and all locked NVIDIA libraries have the same version of CUDA."""
    text = (ROOT / "docker/Dockerfile").read_text()
    (base, settings) = re.findall(rf"^FROM (\S+) AS cuda{major}\nENV (.+)$", text, re.MULTILINE)[0]
    assert re.search(rf"/cuda:{major}\.\d+\.\d+-base-\S+@sha256:[0-9a-f]{{64}}$", base)
    assert re.search(rf"whl/cu{major}\d ", settings) and f"nsight-systems-{major}-" in settings
    locked = (ROOT / f"docker/requirements-gpu-cuda{major}.txt").read_text()
    assert re.findall(r"nvidia-dali-cuda(\d+)0==", locked) == [major]
    assert set(re.findall(r"^nvidia-\S+-cu(\d+)==", locked, re.MULTILINE)) == {major}
    assert "numpy==" in locked and not re.search("^(torch|triton)==", locked, re.MULTILINE)


def test_cuda_12_is_the_default() -> None:
    assert "\nARG CUDA=12\n" in (ROOT / "docker/Dockerfile").read_text()
    assert EXTRAS["dali"] == ["nvidia-dali-cuda120>=2.0"]


def test_the_version_is_copied_to_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files have the version of pyproject.toml. `make release-check` names files with another version."""
    spec = spec_from_file_location("release", ROOT / ".ci/release.py")
    release = module_from_spec(spec)
    spec.loader.exec_module(release)
    assert list(release.wrong(None)) == []
    assert [line.split(":")[0] for line in release.wrong("v9.9.9")][:1] == ["tag v9.9.9"]
    monkeypatch.setattr(release, "VERSION", "9.9.9")
    assert {line.split(":")[0] for line in release.wrong(None)} == {*release.PLACES, "CHANGELOG.md"}


def test_the_source_distribution_contains_all_tracked_files() -> None:
    """MANIFEST.in names all top-level files and folders except hidden ones and those that are included by default."""
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    listed = {word.partition("/")[0] for word in (ROOT / "MANIFEST.in").read_text().split()}
    added = {"README.md", "LICENSE", "MANIFEST.in", "pyproject.toml", "workflow_scripts"}
    assert {name.partition("/")[0] for name in git if not name.startswith(".")} - listed - added == set()


def test_the_two_images_have_tags_of_their_own() -> None:
    """The tag `type=sha` has a prefix with the image's name; without it, both images would have the same tag."""
    (step,) = [
        step
        for job in read_yaml(ROOT / ".github/workflows/images.yml")["jobs"].values()
        for step in job["steps"]
        if step.get("uses", "").startswith("docker/metadata-action")
    ]
    (sha,) = [tag for tag in step["with"]["tags"].splitlines() if tag.startswith("type=sha")]
    assert sha == "type=sha,prefix=${{ matrix.target }}-sha-"


@pytest.mark.slow
def test_an_environments_own_pytorch_stays(tmp_path: Path) -> None:
    """`make install` keeps the PyTorch of an environment, even if the lock has another version."""
    for name in ("Makefile", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tmp_path)
    # The lock names only PyTorch, so all other packages keep their installed versions.
    (tmp_path / "requirements.lock").write_text(f"torch=={LOCK['torch']}\n")
    shutil.copytree(ROOT / "workflow_scripts/dlscale/core", tmp_path / "workflow_scripts/dlscale")
    words = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages"]  # the system has pip
    subprocess.run([*words, tmp_path / ".venv"], check=True)
    # The new environment has the packages of the tests' environment, but an older pre-release of PyTorch.
    theirs = tmp_path / "theirs/torch-2.12.0a0+site.dist-info"
    theirs.mkdir(parents=True)
    metadata = str(distribution("torch").read_text("METADATA"))
    (theirs / "METADATA").write_text(re.sub(r"^Version: .*", "Version: 2.12.0a0+site", metadata, flags=re.MULTILINE))
    (theirs / "INSTALLER").write_text("site\n")
    (packages,) = (tmp_path / ".venv/lib").glob("python*/site-packages")
    (packages / "site.pth").write_text(f"{theirs.parent}\n{sysconfig.get_path('purelib')}\n")

    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        ["make", "-C", tmp_path, "install"], env={**environment, **offline}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = (tmp_path / ".venv/install.log").read_text()
    assert re.findall(r"^Successfully installed (.*)$", said, re.MULTILINE) == [f"dlscale-{PROJECT['version']}"]


# ---- an installed wheel ------------------------------------------------------------------------------

#: Program that prints the path of the package and the fingerprints of two stages.
LOOK = """
import json, dlscale
from dlscale.core.fingerprint import data_modules, fingerprint, run_modules
digests = [fingerprint(run_modules("train", "starter_cnn", "torch")), fingerprint(data_modules("describe", "era5"))]
print(json.dumps([dlscale.__file__, *digests]))
"""


@dataclass(frozen=True)
class Installed:
    """An environment with the installed wheel, and a folder made by `dlscale init`."""

    place: Path
    study: Path

    @property
    def packages(self) -> Path:
        (folder,) = (self.place / "lib").glob("python*/site-packages")
        return folder

    def files(self) -> set[Path]:
        """Return all paths in the environment, without compiled code."""
        return {path for path in self.place.rglob("*") if "__pycache__" not in path.parts}

    def call(self, *words: str, status: int = 0, folder: Path | None = None) -> str:
        """Run a command in the study's folder, without access to a checkout; return the command's output."""
        kept = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
        environment = {**kept, "PATH": f"{self.place / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            words, cwd=folder or self.study, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build the wheel, install it next to the existing packages, and make the folder of a study."""
    base = tmp_path_factory.mktemp("installed")
    source, made = base / "source", Installed(base / "environment", base / "work/a study")
    source.mkdir()
    for name in ("Snakefile", "config.yaml", "CITATION.cff", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    for name in ("rules", "profiles", "workflow_scripts"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made.place], check=True)
    (made.packages / "site.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # omits the editable dlscale
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    words = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", base, source]
    subprocess.run([*pip, "wheel", *words], check=True)
    words = ["--no-deps", "--no-index", "--ignore-installed", *base.glob("dlscale-*.whl")]
    subprocess.run([*pip, "--python", made.place / "bin/python", "install", *words], check=True)
    shutil.rmtree(source)
    made.study.parent.mkdir()
    told = made.call("dlscale", "init", made.study.name, folder=made.study.parent)
    assert f"cd '{made.study.name}'" in told and "dlscale run -n" in told
    return made


def test_init_writes_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiles").symlink_to("nowhere")
    with pytest.raises(UserError, match="profiles: already exists"):
        init.write(tmp_path)
    (tmp_path / "profiles").unlink()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(Path, "symlink_to", Mock(side_effect=OSError("full")))
        init.write(tmp_path)
    assert not list(tmp_path.iterdir())
    init.write(tmp_path)
    assert (tmp_path / "profiles/default/profile.yaml").is_file()


def test_a_wheel_brings_the_workflow_along(installed: Installed) -> None:
    """The folder made by `dlscale init` is complete, and the installed stages have the fingerprints of a checkout."""
    file, *digests = json.loads(installed.call("python", "-P", "-c", LOOK))
    assert Path(file).is_relative_to(installed.packages)
    done = subprocess.run([sys.executable, "-P", "-c", LOOK], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[1:] == digests, "the installed code must have the fingerprints of a checkout"

    laid = {path: path.read_text() for path in installed.study.rglob("*") if path.is_file()}
    assert "Snakefile: already exists, and nothing was written" in installed.call("dlscale", "init", ".", status=2)
    assert laid == {path: path.read_text() for path in laid}
    links = [(path, link) for path, text in laid.items() for link in re.findall(r"\]\((\.[^)]*)\)", text)]
    assert links and not [link for path, link in links if not (path.parent / link).exists()]

    assert (installed.packages / "dlscale/workflow/CITATION.cff").is_file(), (
        "crates need this file to cite the software"
    )
    told = installed.call("dlscale", "new-study", "ripples")
    assert "make " not in told and f"read {DOCS}adding.md" in told
    would = installed.call("dlscale", "run", "-n")
    assert all(target in would for target in load_files(ROOT / "config.yaml").workflow.targets)


@pytest.mark.long
def test_the_commands_of_agents_md_work(installed: Installed, tmp_path: Path) -> None:
    """The commands of AGENTS.md work with a wheel and without a clone; they write only to the user's folder."""
    before = installed.files()
    (commands,) = re.findall(
        r"^```bash\npip install .*\n((?:.*\n)*?)```", (ROOT / "AGENTS.md").read_text(), re.MULTILINE
    )
    said = installed.call("bash", "-ec", commands, folder=tmp_path)
    results = tmp_path / "work/results/my_study"
    assert (results / "report/index.html").is_file()
    assert "my_study_ladder.baseline: " in said
    for name in ("config.yaml", "metrics.jsonl", "throughput.json", "provenance.json"):
        assert (results / "plans/my_study_ladder/baseline" / name).is_file()
    assert (results / "logs/train/my_study_ladder/baseline.log").is_file()
    assert installed.files() == before


def test_the_package_alone_is_mounted_in_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the package dlscale is mounted, because the host's other packages would hide the image's packages."""
    monkeypatch.chdir(tmp_path)
    assert launcher.sources(Site(engine="podman", image="any")) == PACKAGE.parent
    monkeypatch.setattr(launcher, "CHECKOUT", None)
    assert launcher.sources(Site(engine="none")) == PACKAGE.parent
    for _ in range(2):
        folder = launcher.sources(Site(engine="podman", image="any"))
        assert [path.resolve() for path in folder.iterdir()] == [PACKAGE] and folder.is_relative_to(tmp_path)
        assert launcher.outside([folder / "dlscale"], tmp_path) == (str(PACKAGE),)
