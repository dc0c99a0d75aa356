"""Threats and guards: docs/security.md names existing tests; records from others run nothing; dependencies are pinned.

The other tests named in docs/security.md are next to the tests of the same code.
"""

from __future__ import annotations

import argparse
import ast
import base64
import csv
import datetime as dt
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
import torch.distributed as dist
import yaml

from dlscale.config import resolve as config
from dlscale.core.errors import UserError
from dlscale.core.files import write_json
from dlscale.data import preview, staging
from dlscale.data.manifest import File, Manifest
from dlscale.extensions.crate.crate import Crate
from dlscale.extensions.logs.reference import Reference
from dlscale.extensions.sheet import sheet as sheets
from dlscale.parallel import rendezvous
from dlscale.report import report, sections
from dlscale.results import read_plan
from tests.conftest import ROOT, TINY
from tests.test_report import DATASETS, Page, Results, profiled
from tests.test_starters import free_port
from tests.waiting import PATIENCE

SCRIPT = '"><script>alert(1)</script><img src=x onerror=alert(1)><meta http-equiv=refresh content=0>'
#: Prefixes planted in the texts of records: a spreadsheet would run FORMULA, a browser ADDRESS.
FORMULA, ADDRESS = f"=cmd(){SCRIPT}", f"javascript:alert(1)//{SCRIPT}"
#: Keys of records that decide which parts the page shows, and are therefore not changed.
KEPT = {"measure", "study", "own"}


# ---- the page of docs/security.md ------------------------------------------------------------------


def test_each_named_test_exists() -> None:
    page = (ROOT / "docs/security.md").read_text()
    named = re.findall(r"`((?:\w+/)?test_\w+)::(test_\w+)`", page)
    assert len(named) == page.count("::test_") > 40
    for file, test in named:
        tree = ast.parse((ROOT / f"tests/{file}.py").read_text())
        assert test in {getattr(node, "name", "") for node in tree.body}, (file, test)


# ---- dependencies ----------------------------------------------------------------------------------


def test_actions_are_pinned_by_commit_and_packages_by_hash() -> None:
    workflows = [*(ROOT / ".github/workflows").glob("*.yml")]
    used = [line for path in workflows for line in re.findall(r"uses: (?!\./)(.+)", path.read_text())]
    assert len(used) > 30
    assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line)] == []
    versions = {tuple(re.split("@|  # ", line)) for line in used}
    assert len(versions) == len({action for action, _, _ in versions}), "an action must have a single version"
    locks = [*(ROOT / "docker").glob("requirements-*.txt")]
    assert len(locks) == 3
    for lock in locks:
        lines = [line for line in lock.read_text().replace("\\\n", "").splitlines() if not line.startswith("#")]
        assert len(lines) > 50
        assert [line for line in lines if not re.fullmatch(r"[\w.-]+==\S+( +--hash=sha256:[0-9a-f]{64})+", line)] == []
    assert "--require-hashes" in (ROOT / "docker/Dockerfile").read_text()


def test_no_module_unpacks_archives_or_runs_text() -> None:
    """dlscale calls no function that writes an archive's members, runs a text as code, or reads a pickle's objects."""
    banned = {"extractall", "extract", "unpack_archive", "eval", "exec", "unsafe_load", "full_load"}
    safe = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
    found = list[str]()
    for path in (ROOT / "workflow_scripts/dlscale").rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            given = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
            key, value = safe.get(name, ("shell", given.get("shell") or False))
            own = path.name == "inside.py" and name == "pickle.loads"  # written by PyTorch in the same process
            bare = name.rpartition(".")[2]
            if (bare in banned and name not in ("model.eval", "self.model.eval")) or (
                name.startswith("pickle.load") and not own
            ):
                found.append(f"{path.name}:{call.lineno}: {name}")
            elif given.get(key, False) is not value:
                found.append(f"{path.name}:{call.lineno}: {name}, {key}")
    assert found == []


# ---- networks --------------------------------------------------------------------------------------


def test_the_store_of_several_nodes_listens_only_at_the_first_nodes_address() -> None:
    """PyTorch's own store would listen at all addresses of the node."""
    listener = rendezvous._listen("127.0.0.2", port := free_port())
    timeout = dt.timedelta(seconds=PATIENCE)
    store = dist.TCPStore("127.0.0.2", port, 1, True, timeout, master_listen_fd=listener)
    store.set("met", "yes")
    mine = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"]
    assert {address.ip for address in mine if address.port == port} == {"127.0.0.2"}


# ---- data of others --------------------------------------------------------------------------------


@pytest.mark.parametrize("outside", ["absolute", "relative"])
def test_a_manifest_shows_no_content_of_a_file_outside_of_its_folder(tmp_path: Path, outside: str) -> None:
    """Paths of a manifest may lead anywhere; a file that is not data ends in messages without the file's content."""
    (folder := tmp_path / "data").mkdir()
    (private := tmp_path / "key").write_text("BEGIN-PRIVATE-KEY\n" * 9)
    name, size = str(private) if outside == "absolute" else "../key", private.stat().st_size
    file = File(path=name, rows=1, bytes=size, digest="0" * 64, verifiable=True)
    foreign = DATASETS["demo_volumes"].model_copy(update={"splits": {"train": [file]}})
    foreign.write(folder / "manifest.json")
    manifest = Manifest.read(folder / "manifest.json")
    manifest.check_files()
    with pytest.raises(UserError) as refused:
        list(preview.first_rows(manifest))
    messages = [str(refused.value), *staging.damaged(manifest, [file])]
    assert len(messages) == 2 and [text for text in messages if "key: " not in text or "PRIVATE" in text] == []
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]


# ---- records from others ---------------------------------------------------------------------------


def _texts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Callable[[], None]]]:
    """Yield the path of each text in a record, and a function that plants `ADDRESS` or `FORMULA` before it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(items):
        at = (*path, "*" if isinstance(value, list) else str(key))
        if key in KEPT:
            continue
        if isinstance(each, str):
            text = (ADDRESS if {"files", "path"} & set(at) else FORMULA) + each
            yield at, partial(value.__setitem__, key, text)
        else:
            yield from _texts(each, at)


def _plant(results: Results) -> set[str]:
    """Plant code into each text of all records, if the record stays valid; return the paths of these texts."""
    kept = set[str]()

    def readable() -> bool:
        try:
            for plan in results.plans:
                sections.plan_view(read_plan(plan), sections.Page(results.root, references=results.references))
        except (UserError, ValueError, KeyError, LookupError):
            return False
        return True

    for file in sorted(path for path in results.root.rglob("*") if path.suffix in (".yaml", ".json", ".jsonl")):
        before = file.read_text()
        parse: Callable[[str], Any] = yaml.safe_load if file.suffix == ".yaml" else json.loads
        parts = before.splitlines() if file.suffix == ".jsonl" else [before]
        names = dict.fromkeys(at for at, _ in itertools.chain(*(_texts(parse(part)) for part in parts)))
        for name in names:
            now, records = file.read_text(), list[Any]()
            for part in now.splitlines() if file.suffix == ".jsonl" else [now]:
                records.append(parse(part))
                for at, put in _texts(records[-1]):
                    if at == name:
                        put()
            if file.name == "manifest.json":
                try:
                    Manifest.model_validate(records[0]).write(file)
                except ValueError:
                    continue
            else:
                file.write_text("\n".join(json.dumps(record) for record in records))
            if readable():
                kept.add(f"{file.name}:{'.'.join(name)}")
            else:
                file.write_text(now)
    return kept


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return results with runs, a profile, a dataset and an imported log."""
    results = Results(tmp_path_factory.mktemp("shared") / "results")
    for name, final in (("base", 0.6), ("once", 0.9)):
        profiled(results.run("gas", name, study="gas", final=final), "aten::mm", 0.1, {"trace": "rank0.json.gz"})
    runs = {"base": "Base", "once": "Once"}
    results.plan("gas", runs, "gas", "Gas", "set", ("train", "throughput", "profile"))
    results.dataset("demo_volumes")
    reference = results.root / "references/log/reference.json"
    Reference(
        name="log", label="Log", study="gas", files={"events.out": "0" * 64}, curves={"loss/valid": [(1, 1.0, 0.5)]}
    ).write(reference)
    results.references.append(reference)
    return results


def _sheet(root: Path) -> Page:
    """Write and read the evidence sheet of the plan `gas`; the plan's configuration is of another study."""
    plan = {"study": "starter_cnn", "settings": {**TINY["starter_cnn"]["run"], "dataset": "tiny"}}
    datasets = {"tiny": TINY["starter_cnn"]["dataset"]}
    raw = {"datasets": datasets, "plans": {"gas": {**plan, "runs": {"base": {}, "once": {}}}}, "results": str(root)}
    unset = dict.fromkeys(("production", "machine", "json", "profile", "configfile", "config"))
    options = argparse.Namespace(plans=["gas"], trainings=1, devices=[], **unset)
    assert sheets.main(options, config.load({"targets": ["gas"], **raw})) == 0
    return Page((root / "plans/gas/sheet.html").read_text())


@pytest.mark.slow
def test_texts_of_records_run_nothing(shared: Results, tmp_path: Path) -> None:
    """Code planted in records is shown as text on the page, on the sheet, in figures and in tables."""
    results = Results(tmp_path / "results")
    shutil.copytree(shared.root, results.root)
    for name in ("plans", "datasets", "references"):
        getattr(results, name).extend(results.root / path.relative_to(shared.root) for path in getattr(shared, name))
    planted = _plant(results)
    assert len(planted) > 50 and {"plan.yaml:title", "plan.yaml:runs.*.label", "reference.json:label"} < planted
    plain, html = Page(shared.report()), results.report(title=FORMULA)
    page = Page(html)
    assert page.text.count("<script>alert(1)</script>") > 20
    tags = {tag for tag, _, _ in plain.attributes}
    assert {tag for tag, _, _ in page.attributes} <= tags
    assert not [each for each in page.attributes if each[1].startswith("on") or each[1] == "srcdoc"]
    links = [value for _, key, value in page.attributes if key in ("href", "src", "action", "formaction", "data")]
    assert not [link for link in links if not re.match(r"#|data:(image|text/csv|,)|(\.\./)*[\w.-]+(/|$)", link)]
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == html.count("<script") == html.count("</script") > 5
    for kind, script in scripts:
        known = hashlib.sha256(script.encode()).digest()
        assert json.loads(script) if "application/json" in kind else base64.b64encode(known).decode() in html
    sheet = _sheet(results.root)
    assert sheet.text.count("<script>alert(1)</script>") > 3
    assert not {"script", "img", "a", "iframe", "object"} & {tag for tag, _, _ in sheet.attributes}
    assert not [each for each in sheet.attributes if each[1].startswith(("on", "srcdoc", "href")) or "refresh" in each]
    for svg in (results.root / "report/figures").glob("*.svg"):
        for element in ElementTree.parse(svg).iter():
            assert element.tag.rpartition("}")[2] not in ("script", "foreignObject", "image", "a"), svg
            assert not [key for key in element.attrib if key.startswith("on") or key.endswith("href")], svg
    for plan in results.plans:
        results.collect(plan)
    tables = [*results.root.rglob("*.csv")]
    assert len(tables) > 5
    for table in tables:
        for cell in itertools.chain(*csv.reader(table.open(newline=""))):
            assert not re.match(r"[=+@\t\r]|-(?![\d.]|nan|inf)", cell), (table, cell)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("trap", [os.mkfifo, lambda file: file.symlink_to(file.with_name("private"))])
def test_a_pipe_or_link_among_the_records_is_refused(
    shared: Results, tmp_path: Path, trap: Callable[[Path], Any]
) -> None:
    """Reading a pipe would never end. A link may lead to a private file, which the page would show."""
    root = tmp_path / "results"
    shutil.copytree(shared.root, root)
    run, data = root / "plans/gas/base", root / "data/demo_volumes"
    plan, reference, log = run.parent / "plan.yaml", root / "references/log/reference.json", run / "telemetry/train.csv"
    shown = sections.Page(root, references=[reference])
    records = [path for path in run.rglob("*") if path.is_file() and path.suffix != ".csv"]
    assert len(records) > 5
    for file in [plan, reference, log, *records, *data.iterdir()]:
        content = file.read_bytes() if file.exists() else b""
        file.with_name("private").write_bytes(content)
        file.unlink(missing_ok=True)
        trap(file)
        with pytest.raises(UserError, match=f"{file}: a (link, pipe or|pipe or a) device"):
            report.dataset(data, "demo") if file.parent == data else sections.plan_view(read_plan(plan), shown)
        file.unlink()
        file.write_bytes(content)


@pytest.mark.parametrize(
    "record",
    [
        {"outside": {"command": ["python", "train.py", "--api-key", "t0psecret"]}},
        {"variables": {"NCCL_TOKEN": "t0psecret"}},
    ],
)
def test_a_crate_with_a_secret_in_a_record_is_refused(shared: Results, tmp_path: Path, record: dict[str, Any]) -> None:
    """Earlier versions did not redact the command and the variables in records."""
    pytest.importorskip("rocrate")
    made = Crate(shared.root, read_plan(shared.plans[0]), ROOT / "CITATION.cff")
    write_json(path := shared.root / "plans/gas/base/program.json", record)
    made.file(path)
    made._value("variables.NCCL_TOKEN", "t0psecret")
    made.crate.root_dataset["name"] = made.crate.root_dataset["description"] = "a crate"
    with pytest.raises(UserError, match=r"program\.json: contains .* a program's secret") as refused:
        made.write(tmp_path / "crate")
    path.unlink()
    assert "t0psecret" not in str(refused.value) + (tmp_path / "crate/ro-crate-metadata.json").read_text()


def test_a_crate_escapes_texts_and_refuses_links(shared: Results, tmp_path: Path) -> None:
    """The preview shows a title as text. A link in the results is refused, because it may lead to a private file."""
    pytest.importorskip("rocrate")
    citation = ROOT / "CITATION.cff"
    made = Crate(shared.root, read_plan(shared.plans[0]), citation)
    made.crate.root_dataset["name"], made.crate.root_dataset["description"] = f"</title>{SCRIPT}", SCRIPT
    made.file(shared.root / "plans/gas/plan.yaml")
    made.write(tmp_path / "crate")
    preview = Page((tmp_path / "crate/ro-crate-preview.html").read_text())
    assert preview.text.count("<script>alert(1)</script>") == 3 and "default-src 'none'" in str(preview.attributes)
    assert not [tag for tag, key, value in preview.attributes if tag in ("script", "img") or value == "refresh"]
    metadata = json.loads((tmp_path / "crate/ro-crate-metadata.json").read_text())
    assert f"</title>{SCRIPT}" in [entity.get("name") for entity in metadata["@graph"]]
    (link := shared.root / "plans/gas/once/model.pt").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"model\.pt: a link"):
        made.file(link)
    link.unlink()
