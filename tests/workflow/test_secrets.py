"""Secrets of datasets (logins, signed addresses) and of programs reach only the processes that need them, no files."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import TINY, served
from tests.test_mnist import files
from tests.test_redact import SECRETS, S
from tests.workflow.conftest import Tree

PASSWORD, TOKEN, OTHER = "pa55-of-a-user", "t0ken-of-a-user", "an0ther-value"
#: First part of the secrets in `kinds`.
KIND = "0ne-kind-"
LOGIN = f"Basic {base64.b64encode(f'me:{PASSWORD}'.encode()).decode()}"


class _Guarded(http.server.SimpleHTTPRequestHandler):
    """Server that requires the right password and the complete query before it sends a file."""

    asked: list[str]

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if (self.headers.get("Authorization"), query) != (LOGIN, f"sig={TOKEN}&at={OTHER}"):
            self.send_error(403)
            return
        self.asked.append(path)
        self.path = path
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a folder with digits, and the list of files that the server has sent."""
    rng, folder = np.random.default_rng(5), tmp_path / "served"
    folder.mkdir()
    files(folder, (rng.integers(0, 256, (48, 28, 28), dtype=np.uint8), rng.integers(0, 10, 48, dtype=np.uint8)))
    asked: list[str] = []
    with served(functools.partial(type("Bound", (_Guarded,), {"asked": asked}), directory=str(folder))) as place:
        yield place, asked


def _with_secrets(text: bytes) -> bool:
    return any(word.encode() in text for word in (PASSWORD, TOKEN, OTHER, LOGIN.split()[1], KIND))


def _files_with_secrets(tree: Tree) -> list[Path]:
    """Return the files that contain a secret, except the user's own configuration file."""
    found = [path for path in tree.path.rglob("*") if path.is_file() and _with_secrets(path.read_bytes())]
    return [path for path in found if path.name != "tiny.yaml"]


@contextlib.contextmanager
def _watched() -> Iterator[tuple[set[str], set[str]]]:
    """Collect the command lines with a secret, and the command lines of processes whose environment has a secret."""
    lines, environments, over = set[str](), set[str](), threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    line = (process / "cmdline").read_bytes()
                    lines.update([line.decode()] if _with_secrets(line) else [])
                    if _with_secrets((process / "environ").read_bytes()):
                        environments.add(line.decode().replace("\0", " "))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lines, environments
    finally:
        over.set()
        thread.join()


@pytest.mark.slow  # test_config covers the parts of this test
def test_only_downloads_get_secrets(make_tree: Callable[..., Tree], guarded: tuple[str, list[str]]) -> None:
    host, asked = guarded

    def config(token: str) -> dict[str, Any]:
        at = {
            what: f"http://me:{PASSWORD}@{host}/{what}-idx{axes}-ubyte?sig={token}&at={OTHER}"
            for what, axes in (("images", 3), ("labels", 1))
        }
        source = {"kind": "files", "all": at, "shares": {"train": 0.5, "valid": 0.5}}
        run = {**TINY["mnist_cnn"]["run"], "dataset": "fetched"}
        plan = {"study": "mnist_cnn", "settings": run, "measure": ["train"], "runs": {"one": {}}}
        fetched = {"kind": "mnist", "source": source}
        return {"results": "results", "targets": ["p"], "datasets": {"fetched": fetched}, "plans": {"p": plan}}

    tree = make_tree(config("wr0ng" + TOKEN))
    refused = tree.snakemake("--cores", "2", "--printshellcmds", "--", "data_fetched")
    assert refused.status == 1 and "HTTP status 403" in refused.output
    assert not _with_secrets(refused.output.encode()) and _files_with_secrets(tree) == []

    tree.config = config(TOKEN)
    tree.write()
    with _watched() as (lines, environments):
        done = tree.snakemake("--cores", "2", "--printshellcmds", "--", "all")
    assert done.status == 0, done.output[-3000:]
    assert len(asked) == 2
    crate = tree.shell("python -P -m dlscale crate p --configfile tiny.yaml --citation CITATION.cff")
    assert crate.returncode == 0, crate.stderr
    assert not _with_secrets(done.output.encode()) and _files_with_secrets(tree) == []
    assert host in (tree.results / "report/p.html").read_text(), "the page must name the origin of the data"
    assert lines == set()
    assert environments, "no process with a secret was seen"
    # the other processes are shells, whose command removes the secrets with `env -u` before it starts the stage
    stages = {line for line in environments if line.startswith("python")}
    assert all(" dlscale acquire " in line for line in stages), "only `acquire` may get the secrets"

    tree.config = config("a-new-" + TOKEN)
    tree.write()
    assert tree.planned(targets=["all"]).names == [], "a new token must not fetch the files again"
    told = tree.snakemake("-n", "--cores", "1", "--config", f"datasets={tree.config['datasets']}", "--", "all")
    assert told.status == 2 and "--config: a secret, or an address with a login" in told.output
    for log in (tree.path / ".snakemake/log").iterdir():  # contains the last command line, with its secrets
        log.unlink()
    report = tree.snakemake("--report", "report.html", "--", "all")
    assert report.status == 0, report.output[-3000:]
    assert _files_with_secrets(tree) == []


def kinds() -> tuple[list[str], dict[str, str], dict[str, Any]]:
    """Return words, variables and values with all kinds of `SECRETS`; each kind has a secret of its own."""
    words, variables, values = list[str](), dict[str, str](), dict[str, Any]()
    for number, given in enumerate(SECRETS.values()):
        own = json.loads(json.dumps(given).replace(S, f"{KIND}{number}"))
        if isinstance(own, list):
            words += own
        elif "values" in own:
            values |= own["values"]
        else:
            variables |= own
    return [*words, *(f"{{{name}}}" for name in values)], variables, values


#: Program that trains only if it gets its secrets.
NEEDY = """
import json, os, sys
token, at = sys.argv[2:4]
words, variables = json.loads({3!r})
assert sys.argv[4:] == words and variables.items() <= os.environ.items()
assert (os.environ["WANDB_API_KEY"], token, at.partition("//")[2]) == ("{0}", "{1}", "me:{0}@h.example/x?sig={1}")
assert "{2}" in os.environ["NOTES"] and not [name for name in os.environ if name.startswith("DLSCALE_U")]
for k in range(9):
    print("avg", 100 + k, "samples/sec", flush=True)
print("val loss 0.25")
"""


@pytest.mark.slow  # test_redact and test_config cover the parts of this test
def test_secrets_of_a_program_reach_it_and_no_file(make_tree: Callable[..., Tree], tmp_path: Path) -> None:
    script = tmp_path / "needy.py"
    words, variables, values = kinds()
    given = [str(each) for value in values.values() for each in (value if isinstance(value, list) else [value])]
    known = {name: text for name, text in variables.items() if name != "WANDB_API_KEY"}
    assert len(SECRETS) > 30 and len(known) == 10
    script.write_text(NEEDY.format(PASSWORD, TOKEN, OTHER, json.dumps([[*words[: -len(values)], *given], known])))

    def config(password: str) -> dict[str, Any]:
        program = {
            "command": [
                "python",
                str(script),
                "--token",
                "{tok}",
                f"https://me:{password}@h.example/x?sig={TOKEN}",
                *words,
            ],
            "environment": {**known, "WANDB_API_KEY": password, "NOTES": f"password={OTHER}"},
            "values": {"tok": TOKEN, **values},
            "rate": "nersc",
            "losses": {r"val loss (\S+)": "loss/valid"},
        }
        settings = {"program": program, "throughput": {"beside": 0, "trials": 2}}
        plan = {"study": "program", "settings": settings, "runs": {"one": {}}}
        return {"results": "results", "targets": ["p"], "plans": {"p": plan}}

    tree = make_tree(config(PASSWORD))
    with _watched() as (lines, environments):
        done = tree.snakemake("--cores", "2", "--printshellcmds", "--", "all")
    assert done.status == 0, done.output[-3000:]
    crate = tree.shell("python -P -m dlscale crate p --configfile tiny.yaml --citation CITATION.cff")
    assert crate.returncode == 0, crate.stderr
    assert _files_with_secrets(tree) == [] and not _with_secrets(done.output.encode())
    assert lines and all(str(script) in line and "dlscale" not in line for line in lines), (
        "only the program's own command line may contain secrets"
    )
    stages = [line for line in environments if " -m dlscale " in line and line.split()[0].endswith("python")]
    wrong = [line for line in stages if " dlscale program " not in line and " dlscale throughput " not in line]
    assert stages and not wrong, wrong
    record = (tree.results / "plans/p/one/config.yaml").read_text()
    assert "***secret.WANDB_API_KEY***" in record and "--token\n  - '***secret.tok***'" in record
    assert "***secret.WANDB_API_KEY***" in (tree.path / ".snakemake/called.json").read_text()

    tree.config = config("a-new-" + PASSWORD)
    tree.write()
    assert tree.planned(targets=["all"]).names == [], "a new token must not rerun the program"
    told = tree.snakemake("-n", "--cores", "1", "--config", f"plans={json.dumps(tree.config['plans'])}", "--", "all")
    assert told.status == 2 and "--config: a secret" in told.output
