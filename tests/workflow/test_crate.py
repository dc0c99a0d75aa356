"""Test `dlscale crate`: the archive is valid and reproducible, and the packed files equal the results."""

from __future__ import annotations

import json
import shlex
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dlscale.core.files import sha256
from dlscale.core.settings import read_yaml
from dlscale.data.manifest import Manifest
from dlscale.report.collect import summary_csv
from dlscale.results import read_plan
from tests.workflow.conftest import Outcome, Tree

CITATION = {
    "cff-version": "1.2.0",
    "title": "Measured",
    "license": "CC-BY-4.0",
    "authors": [
        {
            "given-names": "Ada",
            "family-names": "Lovelace",
            "orcid": "https://orcid.org/0000-0000-0000-0001",
            "affiliation": "A University",
        }
    ],
}

#: Recommendations of RO-Crate's profiles that crates may not follow; comments have the reasons of most.
LACKING = {
    "The Application SHOULD have a url",  # this repository has no url
    "The SoftwareApplication id SHOULD be an absolute URI",  # the commands have no pages
    "The Action SHOULD have an endTime in ISO 8601 format",  # records lack the end times of data, tables and pages
    "The Main Workflow SHOULD comply with Bioschemas ComputationalWorkflow profile version 1.0 or later",
    "The README.md SHOULD be about the crate",  # crates have no README
    "The README.md SHOULD have text/markdown as its encodingFormat",
    "The `publisher` property of a `Root Data Entity` SHOULD be an `Organization`",  # the packing person is unknown
    "The organization SHOULD have a URL.",  # CITATION.cff has no URL of an affiliation
    "The minimum recommended properties for a `CreativeWork Author` are `name` and `affiliation`.",
}


def pack(tree: Tree, plan: str, file: Path, *more: str) -> Any:
    """Pack a plan of the tree as a ZIP archive with the citation file next to the archive."""
    (citation := file.with_name("CITATION.cff")).write_text(yaml.safe_dump(CITATION))
    words = ["python", "-P", "-m", "dlscale", "crate", "--configfile", "tiny.yaml", plan, "--citation", str(citation)]
    return tree.shell(shlex.join([*words, "--zip", str(file), *more]))


@pytest.fixture(scope="module")
def crate(finished: tuple[Tree, Outcome], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unpacked crate of the plan `cosmo`."""
    tree, folder = finished[0], tmp_path_factory.mktemp("crate")
    for file in (folder / "one.zip", folder / "other.zip"):
        done = pack(tree, "cosmo", file)
        assert done.returncode == 0, done.stderr
    assert (folder / "one.zip").read_bytes() == (folder / "other.zip").read_bytes(), (
        "packing the same plan twice must give the same archive"
    )
    with zipfile.ZipFile(folder / "one.zip") as archive:
        archive.extractall(folder / "crate")
    return folder / "crate"


def entities(crate: Path) -> dict[str, Any]:
    return {entity["@id"]: entity for entity in json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]}


def test_a_validator_accepts_the_crate(crate: Path, tmp_path: Path) -> None:
    """A validator accepts the crate without a network: the test lists the terms that the crate's context refers to."""
    from rocrate import vocabs
    from rocrate_validator import models, services

    bioschemas, run = "https://bioschemas.org", "https://w3id.org/ro/terms/workflow-run#"
    own = {name: f"{bioschemas}/{name}" for name in ("ComputationalWorkflow", "FormalParameter")}
    own |= {name: f"{bioschemas}/ComputationalWorkflow#{name}" for name in ("input", "output")}
    own |= {
        name: run + name for name in ("environment", "containerImage", "ContainerImage", "registry", "tag", "sha256")
    }
    shutil.copytree(crate, tmp_path / "crate")
    file = tmp_path / "crate/ro-crate-metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "@context": {**vocabs.RO_CRATE["@context"], **own}}))
    asked = services.ValidationSettings(
        rocrate_uri=str(tmp_path / "crate"),
        profile_identifier="provenance-run-crate",
        requirement_severity=models.Severity.RECOMMENDED,
        offline=True,
        cache_path=tmp_path / "cache",
    )
    found = services.validate(asked).get_issues()
    assert [issue.message for issue in found if issue.severity == models.Severity.REQUIRED] == []
    assert {issue.message for issue in found} <= LACKING


def test_the_crate_contains_the_files_of_the_results(crate: Path, finished: tuple[Tree, Outcome]) -> None:
    results, known = finished[0].results, entities(crate)
    files = {name: entity for name, entity in known.items() if "sha256" in entity and entity["@type"] == "File"}
    assert {
        f"plans/cosmo/unet/{name}" for name in ("config.yaml", "throughput.json", "provenance.json")
    } <= files.keys()
    for name, entity in files.items():
        assert entity["sha256"] == sha256(crate / name) == sha256(results / name)
    packed = read_plan(crate / "plans/cosmo/plan.yaml")
    for name, entity in known.items():
        if name.startswith("data/") and name.endswith("/"):
            splits = Manifest.read(results / name / "manifest.json").splits.values()
            there = [(results / name / file.path).stat().st_size for files in splits for file in files]
            assert entity["contentSize"] == str(sum(there)), "sizes must be in bytes"
    assert summary_csv(packed) == (results / "plans/cosmo/summary.csv").read_text(), (
        "the crate must be a valid results folder"
    )
    assert "default-src 'none'" in (crate / "ro-crate-preview.html").read_text(), "a title must not run code"


def test_the_crate_records_agent_time_and_machine_of_each_stage(crate: Path, finished: tuple[Tree, Outcome]) -> None:
    known, results = entities(crate), finished[0].results
    made = json.loads((results / "plans/cosmo/unet/provenance.json").read_text())
    trained = known["#train/cosmo.unet"]
    assert (trained["startTime"], trained["endTime"]) == (made["started"], made["finished"])
    assert known[trained["agent"]["@id"]]["name"] == "Ada Lovelace"
    told = {known[each["@id"]]["name"]: known[each["@id"]]["value"] for each in trained["environment"]}
    assert told["host"] == made["host"] and told["versions.torch"] == torch.__version__
    assert told["device.name"] == made["device"]["name"]
    timed = known["#throughput/cosmo.unet"]
    assert timed["startTime"] <= timed["endTime"] <= known["./"]["datePublished"]
    ran = known["#plan_cosmo"]
    stages = [each for each in known.values() if each is not ran and "startTime" in each]
    assert len({each["startTime"] for each in stages}) > 1, "start times of stages must differ"
    assert ran["startTime"] == min(each["startTime"] for each in stages)
    assert ran["endTime"] == max(each["endTime"] for each in stages)
    assert known["./"]["license"]["@id"].endswith("CC-BY-4.0")
    assert known["Snakefile"]["license"]["@id"].endswith("BSD-3-Clause"), "the workflow must keep its own licence"


def test_authors_and_licence_of_results_are_the_users(crate: Path) -> None:
    """The results have the user's authors and licence; the workflow's own files keep their licence."""
    known = entities(crate)
    root, workflow = known["./"], known["Snakefile"]
    assert root["license"] == {"@id": "https://spdx.org/licenses/CC-BY-4.0"}
    assert root["author"] == {"@id": CITATION["authors"][0]["orcid"]}
    ours = {each["@id"] for each in (workflow["license"], workflow["author"])}
    holders = {name for name, each in known.items() if ours & {one["@id"] for one in _references(each)}}
    assert holders == {"Snakefile"}


def _references(entity: dict[str, Any]) -> list[dict[str, str]]:
    values = [one for value in entity.values() for one in (value if isinstance(value, list) else [value])]
    return [value for value in values if isinstance(value, dict)]


def test_without_a_citation_nothing_is_packed(finished: tuple[Tree, Outcome], tmp_path: Path) -> None:
    file = tmp_path / "crate.zip"
    refused = finished[0].shell(f"python -P -m dlscale crate cosmo --configfile tiny.yaml --zip {file}")
    (line,) = refused.stderr.splitlines()
    assert refused.returncode == 2 and "your `authors` and `license`" in line and "--citation" in line
    assert not file.exists()


def test_croissant_describes_the_data_of_the_crate(crate: Path, finished: tuple[Tree, Outcome]) -> None:
    import mlcroissant

    folder = finished[0].results / "data/boxes"
    described = mlcroissant.Dataset(jsonld=str(crate / "data/boxes/croissant.json")).metadata
    manifest = Manifest.read(folder / "manifest.json")
    assert {file.content_url: file.sha256 for file in described.distribution} == {
        file.path: sha256(folder / file.path) for files in manifest.splits.values() for file in files
    }
    assert {(split.name, each.name) for split in described.record_sets for each in split.fields} == {
        (split, key) for split, files in manifest.splits.items() for key in manifest.fields if files
    }


@pytest.fixture
def kept(finished: tuple[Tree, Outcome], tmp_path: Path) -> Path:
    """Return a folder with a copy of the results of the plan mnist_cnn, which a test may change."""
    for place in ("plans/mnist_cnn", "data/mnist_cnn"):
        shutil.copytree(finished[0].results / place, tmp_path / "results" / place)
    return tmp_path / "results"


def test_large_files_and_images_are_named_by_digest(kept: Path, finished: tuple[Tree, Outcome], tmp_path: Path) -> None:
    run, file = kept / "plans/mnist_cnn/tiny", tmp_path / "crate.zip"
    (run / "model.pt").write_bytes(bytes(11_000_000))
    image = {"engine": "podman-hpc", "name": "ghcr.io/dlscale/dlscale:gpu-0.1.0", "identity": f"sha256:{'ab' * 32}"}
    met = json.loads((run / "telemetry/train.json").read_text())
    (run / "telemetry/train.json").write_text(json.dumps({**met, "image": image}))
    assert pack(finished[0], "mnist_cnn", file, "--config", f"results={kept}").returncode == 0
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "crate")
    known = entities(tmp_path / "crate")
    (large,) = [entity for name, entity in known.items() if name.startswith("ni:")]
    assert large["sha256"] == sha256(run / "model.pt") and large["name"] == "plans/mnist_cnn/tiny/model.pt"
    assert not (tmp_path / "crate/plans/mnist_cnn/tiny/model.pt").exists()
    trained = known["#train/mnist_cnn.tiny"]
    assert {"@id": large["@id"]} in trained["result"]
    held = known[trained["containerImage"]["@id"]]
    assert [held[key] for key in ("registry", "name", "tag")] == ["ghcr.io", "dlscale/dlscale", "gpu-0.1.0"]
    assert held["sha256"] == "ab" * 32


@pytest.mark.slow
def test_an_address_with_a_login_is_not_packed(kept: Path, finished: tuple[Tree, Outcome], tmp_path: Path) -> None:
    """`crate` refuses records with a login or another secret, and records whose dataset is a path instead of a name.

    The workflow redacts secrets, but stages run by hand may record secrets.
    """
    settings, file = kept / "plans/mnist_cnn/tiny/config.yaml", tmp_path / "crate.zip"
    settings.write_text(settings.read_text() + "from: https://me:pa55@example.org/images?sig=t0ken\n")
    refused = pack(finished[0], "mnist_cnn", file, "--config", f"results={kept}")
    assert (
        refused.returncode == 2
        and "plans/mnist_cnn/tiny/config.yaml: contains an address with a login" in refused.stderr
    )
    assert not file.exists() and "pa55" not in refused.stderr
    settings.write_text(settings.read_text().replace("me:pa55@", "").replace("t0ken", "***"))
    assert pack(finished[0], "mnist_cnn", file, "--config", f"results={kept}").returncode == 0
    settings.write_text(settings.read_text().replace("dataset: ", "dataset: ../data/"))
    refused = pack(finished[0], "mnist_cnn", file, "--config", f"results={kept}")
    assert refused.returncode == 2 and "dataset: ../data/mnist_cnn: expected" in refused.stderr
    settings.write_text(settings.read_text().replace("dataset: ../data/", "dataset: "))
    record = read_yaml(settings) | {"program": {"command": ["train", "--token", "t0ken"]}}
    settings.write_text(yaml.safe_dump(record))
    refused = pack(finished[0], "mnist_cnn", file, "--config", f"results={kept}")
    assert refused.returncode == 2 and "or a program's secret" in refused.stderr and "t0ken" not in refused.stderr
