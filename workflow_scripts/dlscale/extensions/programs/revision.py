"""Check out a revision of an external program's repository, without running any of its code."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from dlscale.core.errors import UserError, cut
from dlscale.core.urls import hidden_in
from dlscale.extensions.programs.keeper import temporary_folder

#: Git settings for untrusted repositories: only https and local files; no password prompts, lazy fetches or
#: configuration of the user or machine.
SAFE = {
    "GIT_ALLOW_PROTOCOL": "https:file",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_LAZY_FETCH": "1",
}

#: Prefixes of the caller's variables that a fetch by https may need.
KEPT = ("GIT_SSL", "GIT_HTTP", "GIT_CURL", "GIT_TRACE")

#: First bytes of a pointer file of Git LFS, and maximum size of such a file, bytes.
LFS, MAX_POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024


def fetch(repository: str, revision: str, folder: Path, where: str) -> None:
    """Check a commit out into a new folder, with its files exactly as committed.

    If the repository is on this machine, only its objects are read; its configuration, hooks, filters, index and work
    tree are ignored. Error messages begin with `where`.
    """
    if not shutil.which("git"):
        raise UserError(f"{where}: git is missing on this machine. Install it")
    folder.mkdir(parents=True)
    with temporary_folder("dlscale-git") as lender:
        if (local := repository.removeprefix("file://")).startswith("/"):
            _git(Path(lender), where, revision, "init", "--quiet", "--bare", "--template=")
            Path(lender, "objects/info").mkdir(exist_ok=True)
            Path(lender, "objects/info/alternates").write_text(f"{_objects(Path(local), where, revision)}\n")
            repository = lender
        _git(folder, where, revision, "init", "--quiet", "--template=")
        _git(folder, where, revision, "fetch", "--quiet", "--depth=1", repository, revision)
    _git(folder, where, revision, "checkout", "--quiet", "--detach", revision)
    there = _git(folder, where, revision, "rev-parse", "HEAD").strip()
    if there != revision:
        raise UserError(f"{where}: expected commit {revision}, fetched {there}")
    Path(folder, ".git/FETCH_HEAD").unlink(missing_ok=True)
    _check_complete(folder, where, revision)


def fresh(folder: str, revision: str, fetched: bool, checkout: Path) -> str:
    """Check out a commit of the repository that contains `folder` into `checkout`; return the path of `folder` there.

    `fetched`: whether the workflow's stage `checkout` cloned the repository (`program.repository`). Only such a
    repository can be copied on a machine without git.
    """
    if checkout.is_symlink():
        checkout.unlink()
    shutil.rmtree(checkout, ignore_errors=True)
    there = Path(folder).resolve()
    top = next((each for each in (there, *there.parents) if Path(each, ".git").exists()), None)
    if top is None:
        raise UserError(f"program.revision: {folder} is not in a git repository")
    if shutil.which("git"):
        fetch(str(top), revision, checkout, f"program.revision: {folder}")
    elif fetched:
        shutil.copytree(top, checkout, symlinks=True)
    else:
        raise UserError(
            "program.revision: git is missing on this machine, so the revision cannot be fetched. Install git, or set "
            "program.repository"
        )
    own = Path(checkout, there.relative_to(top))
    if not own.is_dir():
        raise UserError(f"program.folder: {folder}: no such folder in commit {revision}")
    return str(own)


def _git(folder: Path, where: str, revision: str, *words: str) -> str:
    """Run git in one of dlscale's own repositories; return its output."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GIT_") or name.startswith(KEPT)}
    command = ["git", "-c", "gc.auto=0", "-c", "maintenance.auto=false", *words]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, **SAFE},
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",  # file names may have any bytes
        check=False,
    )
    if done.returncode:
        what = cut(" ".join(done.stderr.split()), 300)
        raise UserError(f"{where}: git {words[0]} of {revision} failed: {hidden_in(what)}")
    return done.stdout


def _objects(repository: Path, where: str, revision: str) -> Path:
    """Return the folder of git objects of a repository, which may be bare or a linked work tree."""
    git = repository / ".git" if (repository / ".git").exists() else repository
    if git.is_file():
        git = repository / git.read_text().partition("gitdir:")[2].strip()
    if (common := git / "commondir").is_file():
        git /= common.read_text().strip()
    if not (git / "objects").is_dir():
        raise UserError(f"{where}: git fetch of {revision} failed: {repository} is not a git repository")
    return (git / "objects").resolve()


def _check_complete(folder: Path, where: str, revision: str) -> None:
    """Refuse a commit with submodules or Git LFS files, because their contents are not in the commit."""
    entries = [entry.partition("\t") for entry in _git(folder, where, revision, "ls-files", "-sz").split("\0") if entry]
    modules = [name for mode, _, name in entries if mode.startswith("160000")]
    files = [name for mode, _, name in entries if mode.startswith("100") and _is_pointer(folder / name)]
    for what, names in (("submodules", modules), ("files in Git LFS", files)):
        if names:
            raise UserError(
                f"{where}: commit {revision} has {what}, which are not fetched: {cut(', '.join(names), 300)}. Name a "
                f"commit without {what}, or omit program.revision and program.repository, and prepare program.folder "
                "yourself"
            )


def _is_pointer(file: Path) -> bool:
    if file.stat().st_size > MAX_POINTER_BYTES:
        return False
    with file.open("rb") as opened:
        return opened.read(len(LFS)) == LFS
