"""`dlscale crate PLAN`: pack a plan's results and their provenance as a Workflow Run RO-Crate (docs/crate.md)."""

from __future__ import annotations

import argparse
import base64
import datetime as dt
import hashlib
import html
import json
import re
import tempfile
import warnings
import zipfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from dlscale.config.places import check_plans, results_of
from dlscale.core.environment import Environment
from dlscale.core.errors import UserError
from dlscale.core.files import atomic_write, irregular, read_json, sha256
from dlscale.core.fingerprint import WORKFLOW
from dlscale.core.paths import Results
from dlscale.core.record import Record
from dlscale.core.redact import redact, redact_programs
from dlscale.core.schema import NAME, NAME_IN_WORDS
from dlscale.core.settings import Raw, flat, read_yaml, validate
from dlscale.core.stages import DATA_STAGES, RUN_STAGES, STAGES
from dlscale.core.telemetry import begin
from dlscale.core.text import many
from dlscale.core.urls import has_secret, hidden_in
from dlscale.data.manifest import FieldInfo, Manifest
from dlscale.results import PlanResult, RunResult, read_plan, read_run

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

#: Versions of RO-Crate and of the profiles: the newest that roc-validator 0.13 can check. Version 0.6 of the profiles
#: is for RO-Crate 1.3, and renames terms.
RO_CRATE, PROFILE_VERSION = "1.1", "0.5"
PROFILES = {
    f"https://w3id.org/ro/wfrun/process/{PROFILE_VERSION}": "Process Run Crate",
    f"https://w3id.org/ro/wfrun/workflow/{PROFILE_VERSION}": "Workflow Run Crate",
    f"https://w3id.org/ro/wfrun/provenance/{PROFILE_VERSION}": "Provenance Run Crate",
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": "Workflow RO-Crate",
}
TERMS = "https://w3id.org/ro/terms/workflow-run"
#: Keys of records whose values are commands or environment variables.
RECORDED = ("command", "variables", "environment")

#: Version of Croissant, the format of descriptions of data (https://docs.mlcommons.org/croissant).
CROISSANT = "http://mlcommons.org/croissant/1.1"
HDF5 = ["application/x-hdf5"]

#: Maximum size of a file that is copied, bytes. For a larger file the crate has only name, size and digest.
COPIED = 10_000_000

#: Keys of a stage's record that describe the stage's machine. `Environment` has further properties of the machine, and
#: the software.
MACHINE = ("host", "slurm", "device", "cores", "memory_bytes")

#: Start of the HTML head of the preview; the security policy forbids scripts, and loading of other files.
PREVIEW = (
    '<head><meta charset="utf-8">'
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
)

FORMATS = {
    ".csv": "text/csv",
    ".html": "text/html",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".png": "image/png",
    ".pt": "application/octet-stream",
    ".yaml": "application/yaml",
}


class _Cff(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=lambda name: name.replace("_", "-"))


class Author(_Cff):
    """Author: an organisation if `name` is set, otherwise a person."""

    name: str = ""
    given_names: str = ""
    family_names: str = ""
    orcid: str | None = None
    website: str | None = None
    affiliation: str | None = None


class Citation(_Cff):
    """Keys of a CITATION.cff that the crate uses (https://citation-file-format.github.io)."""

    authors: list[Author] = Field(min_length=1)
    license: str  #: SPDX identifier.
    repository_code: str | None = None


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Write the crate of `args.plan` into the results folder, or as the file `args.zip`."""
    try:
        import mlcroissant  # noqa: F401
        import rocrate  # noqa: F401
    except ImportError as error:
        raise UserError(f"crates cannot be written ({error}); pip install 'dlscale[crate]'") from None
    if not args.citation:
        raise UserError(
            "--citation: missing. The records lack the authors and the licence of the results. Write a CITATION.cff "
            "with your `authors` and `license` (example: docs/crate.md), and name the file with --citation"
        )
    (name,), results = check_plans([args.plan], configuration), results_of(configuration)
    record = Path(Results(results).plan(name))
    if not record.exists():
        raise UserError(f"{name} has no results yet. Run dlscale run {name}")
    made = Crate(results, read_plan(record), Path(args.citation))
    made.fill()
    if args.zip:
        with tempfile.TemporaryDirectory() as folder, atomic_write(target := Path(args.zip)) as temporary:
            made.write(Path(folder))
            _pack(Path(folder), temporary)
    else:
        with atomic_write(target := results / "crates" / name) as temporary:
            made.write(temporary)
    print(json.dumps({"crate": str(target)}) if args.json else f"Crate: {target.resolve()}")
    return 0


class Crate:
    """Crate of a plan: the plan's results, in the same folders as in the results folder, and the workflow's files."""

    def __init__(self, results: Path, plan: PlanResult, citation: Path) -> None:
        """Start a crate; `citation` is the path of the CITATION.cff with the authors and the licence of the results."""
        from rocrate.rocrate import ROCrate

        self.results, self.plan = results, plan
        self.crate = ROCrate(gen_preview=True, version=RO_CRATE)
        self.crate.metadata.extra_contexts.append(f"{TERMS}/context")
        self.software = _read_citation(WORKFLOW / "CITATION.cff")
        self.citation = _read_citation(citation)
        self.authors = self._authors(self.citation)
        self.times = list[tuple[str, str]]()  #: Start and end of each stage for which both times are known.
        self.actions, self.controls = list[Any](), list[Any]()
        self.tools, self.steps = dict[str, Any](), dict[str, Any]()

    def write(self, folder: Path) -> None:
        """Write the crate's files; raise `UserError` if a file contains a secret."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rocrate warns about entities without a file
            self.crate.write(folder)
        root = self.crate.root_dataset  # rocrate's preview does not escape texts
        root["name"], root["description"] = (html.escape(root[key]) for key in ("name", "description"))
        preview = self.crate.preview.generate_html().replace("<head>", PREVIEW, 1)
        (folder / "ro-crate-preview.html").write_text(preview, encoding="utf-8")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            if path.suffix in (".png", ".pt"):
                continue
            record = read_yaml(path) if path.name == "config.yaml" else {}
            recorded = _recorded(read_json(path)) if path.suffix == ".json" else []
            secret = redact_programs(record) != record or redact(recorded) != recorded
            if secret or has_secret(path.read_text(encoding="utf-8", errors="replace")):
                raise UserError(
                    f"{path.relative_to(folder)}: contains an address with a login or a signature, or a program's "
                    "secret, which a crate would publish. Make the results again with the workflow, which redacts "
                    "secrets"
                )

    # ---- entities ------------------------------------------------------------------------------------

    def add(self, identifier: str, type: str, **properties: Any) -> Any:
        """Add an entity without a file; skip empty properties, and replace a list of a single value with the value."""
        from rocrate.model.contextentity import ContextEntity

        known = {key: _one(value) for key, value in properties.items() if value not in (None, "", [])}
        return self.crate.add(ContextEntity(self.crate, identifier, properties={"@type": type, **known}))

    def file(self, path: Path) -> Any:
        """Add a file of the results.

        A file larger than `COPIED` is not copied: its identifier is made from its digest (RFC 6920). A link is refused,
        because another user of the results folder may have linked a private file, which the crate would publish.
        """
        if path.is_symlink():
            raise irregular(path)
        place, digest = path.relative_to(self.results).as_posix(), sha256(path)
        known = {
            "name": place,
            "encodingFormat": FORMATS.get(path.suffix, "text/plain"),
            "contentSize": str(path.stat().st_size),
            "sha256": digest,
        }
        if path.stat().st_size <= COPIED:
            return self.crate.get(quote(place)) or self.crate.add_file(path, place, properties=known)
        known["description"] = "Not in the crate: the file is in the results folder."
        named = base64.urlsafe_b64encode(bytes.fromhex(digest)).decode().rstrip("=")
        return self.crate.add_file(f"ni:///sha-256;{named}", properties=known)

    def files(self, folder: Path, names: Iterable[str]) -> list[Any]:
        """Add the named files that exist in a folder."""
        return [self.file(folder / name) for name in names if (folder / name).is_file()]

    def _authors(self, citation: Citation) -> list[Any]:
        return [self._author(author) for author in citation.authors]

    def _licence(self, citation: Citation) -> Any:
        return self.add(f"https://spdx.org/licenses/{citation.license}", "CreativeWork", name=citation.license)

    def _author(self, author: Author) -> Any:
        name = author.name or f"{author.given_names} {author.family_names}".strip()
        affiliation = author.affiliation and self.add(
            f"#{quote(author.affiliation)}", "Organization", name=author.affiliation
        )
        kind = "Organization" if author.name else "Person"
        place = author.orcid or f"#{quote(name)}"
        return self.add(place, kind, name=name, url=author.website, affiliation=affiliation)

    # ---- actions -------------------------------------------------------------------------------------

    def action(
        self,
        stage: str,
        what: str,
        objects: list[Any],
        results: list[Any],
        record: Record | None = None,
        times: tuple[str, str] | None = None,
        met: Environment | None = None,
    ) -> None:
        """Add the execution of a stage, with the step of the workflow and the facts from the stage's records.

        A stage without results is skipped.
        """
        if not results:
            return
        told = record.model_dump(mode="json") if record else {}
        begun, ended = times or (None, None)
        action = self.add(
            f"#{stage}/{quote(what)}",
            "CreateAction",
            name=f"{stage} {what}",
            description=redact(hidden_in(told.get("command") or STAGES[stage].text)),
            instrument=self._tool(stage),
            object=objects,
            result=results,
            startTime=begun,
            endTime=ended,
            agent=self.authors,
            environment=[self._value(key, value) for key, value in flat(_environment(told, met)).items()],
            containerImage=self._image(met.image if met else None),
        )
        self.times += [times] if times else []
        self.actions.append(action)
        of_it = {"name": f"orchestrate {stage} {what}", "instrument": self.steps[stage], "object": action}
        self.controls.append(self.add(f"#control/{stage}/{quote(what)}", "ControlAction", **of_it))

    def _tool(self, stage: str) -> Any:
        if stage not in self.tools:
            about = {"name": f"dlscale {stage}", "description": STAGES[stage].text}
            at = {"url": self.software.repository_code, "softwareVersion": version("dlscale")}
            self.tools[stage] = self.add(f"#dlscale-{stage}", "SoftwareApplication", **about, **at)
            self.steps[stage] = self.add(
                f"#step-{stage}",
                "HowToStep",
                name=stage,
                position=str(list(STAGES).index(stage)),
                workExample=self.tools[stage],
            )
        return self.tools[stage]

    def _value(self, key: str, value: Any) -> Any:
        text = redact({key: hidden_in(value if isinstance(value, str) else json.dumps(value))})[key]
        digest = hashlib.sha256(f"{key}={text}".encode()).hexdigest()[:12]
        return self.add(f"#environment-{digest}", "PropertyValue", name=key, value=text)

    def _image(self, image: dict[str, str] | None) -> Any:
        if not image:
            return None
        known, digest = image["name"], image["identity"].removeprefix("sha256:")
        file, (host, _, rest) = image["engine"] in ("apptainer", "enroot"), known.partition("/")
        # As in Docker, the first part of an image's name is a registry if the part can be the name of a host.
        registry = host if rest and not file and (host == "localhost" or set(host) & set(".:")) else ""
        name, _, tag = (known, "", "") if file else known.removeprefix(f"{registry}/").partition("@")[0].partition(":")
        return self.add(
            f"#image-{digest[:12]}",
            "ContainerImage",
            # The vocabulary has no term for enroot's files.
            additionalType={"@id": f"{TERMS}#{'SIFImage' if file else 'DockerImage'}"}
            if image["engine"] != "enroot"
            else None,
            name=name,
            registry=registry,
            tag=tag,
            sha256=digest,
        )

    # ---- the plan ------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Add the workflow, the data, the runs and the results of the plan."""
        plan, folder = self.plan, Path(Results(self.results).plan(self.plan.name)).parent
        rungs = sorted(path.name for path in folder.glob("rung*.json"))
        lists = self.files(folder, ["plan.yaml", *rungs])
        self.action("configure", plan.name, [], lists[:1])
        self.action("promote", plan.name, lists[:1], lists[1:])
        runs = [each for run in plan.runs for each in (run, *self._repeats(run))]
        data = {name: self._dataset(name) for name in dict.fromkeys(map(_dataset_of, runs))}
        settings, records = list[Any](), list[Any]()
        for run in {run.owner: run for run in runs}.values():
            own = self.file(run.folder / "config.yaml")
            settings.append(own)
            for stage, record in _records(run).items():
                found = self.files(run.folder, [*STAGES[stage].outputs, f"telemetry/{stage}.json"])
                dataset = data[_dataset_of(run)]
                times, met = _times(run, stage), run.environments.get(stage)
                self.action(stage, run.owner.replace("/", "."), [own, dataset], found, record, times, met)
                records += found
        summary = self.files(folder, ["summary.csv"])
        page = self.files(folder, ["report.html"])
        self.action("collect", plan.name, [*lists, *records], summary)
        self.action("report", plan.name, [*lists, *records, *data.values()], page)
        self._workflow([*data.values(), *settings], [*records, *summary, *page])

    def _repeats(self, run: RunResult) -> list[RunResult]:
        references = {reference.name: reference for reference in self.plan.record.runs}
        return [read_run(run.folder.parent / name) for name in references[run.name].repeats]

    def _dataset(self, name: str) -> Any:
        folder = Path(Results(self.results).manifest(name)).parent
        manifest = Manifest.read(folder / "manifest.json")
        parts = self.files(folder, ["manifest.json", "config.yaml", "preview.png"])
        size = sum(file.bytes for files in manifest.splits.values() for file in files)
        dataset = self.crate.add_dataset(
            dest_path=f"data/{name}",
            properties={
                "name": name,
                "description": "; ".join([f"Data of kind {manifest.kind}", *manifest.facts])
                + ". The crate has a description of the data, not the data's files: manifest.json has the path, size "
                "and digest of each file.",
                "identifier": f"sha256:{manifest.own}",  # digest of the manifest's content
                "contentSize": str(size),
                "hasPart": parts,
            },
        )
        if _fits(manifest):
            from io import StringIO

            text = json.dumps(_croissant(name, manifest), indent=2, ensure_ascii=False) + "\n"
            about = {"name": f"Croissant of {name}", "encodingFormat": "application/ld+json", "about": dataset}
            described = self.crate.add_file(StringIO(text), f"data/{name}/croissant.json", properties=about)
            dataset.append_to("hasPart", described)
            dataset["subjectOf"] = described
        own = [part for part in parts if part.id.endswith("config.yaml")]
        for stage in DATA_STAGES:  # data stages do not record their time; a log shows that a stage ran
            if stage == "describe" or (self.results / "logs" / stage / name).exists():
                self.action(stage, name, own, [dataset])
        return dataset

    def _workflow(self, objects: list[Any], results: list[Any]) -> None:
        """Add the workflow and its execution, and set the properties of the crate itself."""
        if not self.times:
            raise UserError(f"{self.plan.name}: the records do not contain the time of any stage. Run the plan again")
        begun, ended = min(first for first, _ in self.times), max(last for _, last in self.times)
        for path in sorted(WORKFLOW.glob("rules/*.smk")):
            place = str(path.relative_to(WORKFLOW))
            self.crate.add_file(path, place, properties={"name": place, "encodingFormat": "text/plain"})
        at = {"url": self.software.repository_code} if self.software.repository_code else {}
        about = {
            "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow", "HowTo"],
            "name": "dlscale",
            "version": version("dlscale"),
            "license": self._licence(self.software),
            "author": _one(self._authors(self.software)),
            "encodingFormat": "text/plain",
            "hasPart": list(self.tools.values()),
            "step": list(self.steps.values()),
            **at,
        }
        workflow = self.crate.add_workflow(
            WORKFLOW / "Snakefile", "Snakefile", main=True, lang="snakemake", properties=about
        )
        done = self.add(
            f"#plan_{self.plan.name}",
            "CreateAction",
            name=f"plan {self.plan.name}",
            description=f"snakemake plan_{self.plan.name}",
            instrument=workflow,
            object=objects,
            result=results,
            startTime=begun,
            endTime=ended,
            agent=self.authors,
        )
        packages = [package for run in self.plan.runs if run.environment for package in run.environment.packages]
        engine = next((each.partition("==")[2] for each in packages if each.startswith("snakemake==")), None)
        home = "https://snakemake.github.io"
        snakemake = self.add(home, "SoftwareApplication", name="Snakemake", url=home, softwareVersion=engine)
        about = {"name": f"Snakemake, plan {self.plan.name}", "instrument": snakemake, "agent": self.authors}
        self.add("#snakemake-run", "OrganizeAction", **about, object=self.controls, result=done)
        root = self.crate.root_dataset
        root["name"] = self.plan.title
        root["description"] = (
            f"{many(len(self.plan.runs), 'run')} of plan {self.plan.name}, study {self.plan.record.study}: settings, "
            "records and tables, and a description of the data."
        )
        root["datePublished"], root["license"] = ended, self._licence(self.citation)
        root["author"] = _one(self.authors)
        root["mentions"] = [done, *self.actions]
        root["conformsTo"] = [
            self.add(place, "CreativeWork", name=name, version=place.rpartition("/")[2])
            for place, name in PROFILES.items()
        ]


def _recorded(value: Any) -> list[Any]:
    """Return all commands and environment variables in a record."""
    if isinstance(value, dict):
        return [found for key, each in value.items() for found in ([each] if key in RECORDED else _recorded(each))]
    return [found for each in value for found in _recorded(each)] if isinstance(value, list) else []


def _one(value: Any) -> Any:
    """Replace a list of a single value by the value, as RO-Crate 1.1 requires; return other values unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _read_citation(path: Path) -> Citation:
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a CITATION.cff with authors and a licence")
    return validate(Citation, read_yaml(path), str(path))


def _records(run: RunResult) -> dict[str, Record]:
    """Return the records of a run by stage, in the order of stages."""
    known = {
        "train": run.provenance,
        "program": run.program,
        "throughput": run.throughput,
        "profile": run.profile,
        **run.records,
    }
    return {stage: record for stage in RUN_STAGES if (record := known.get(stage))}


def _dataset_of(run: RunResult) -> str:
    name = str(run.settings.get("dataset"))
    if not re.fullmatch(NAME, name):  # the name also becomes the name of a folder in the crate
        raise UserError(f"{run.folder / 'config.yaml'}: dataset: {name}: expected {NAME_IN_WORDS}; run the plan again")
    return name


def _environment(told: Raw, met: Environment | None) -> Raw:
    known = {key: told[key] for key in MACHINE if key in told}
    known |= met.model_dump(mode="json", exclude={"time", "image"}) if met else {}
    return {key: value for key, value in known.items() if value not in (None, "", {}, [])}


def _times(run: RunResult, stage: str) -> tuple[str, str] | None:
    """Return the start and the end of a run's stage; None if unknown.

    The times are from the provenance of the training, or from the stage's telemetry.
    """
    made = run.provenance if stage == "train" else None
    if made and made.started and made.finished:
        return made.started, made.finished
    nodes = run.telemetry.get(stage)
    return (_utc(begin(nodes[0])), _utc(max(samples[-1].time for samples in nodes))) if nodes else None


def _utc(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="seconds")


def _pack(folder: Path, file: Path) -> None:
    """Write the files of a folder as a ZIP archive; the same files always give the same bytes."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            member = zipfile.ZipInfo(path.relative_to(folder).as_posix())  # with the default time stamp, in 1980
            member.external_attr = 0o644 << 16
            archive.writestr(member, path.read_bytes(), zipfile.ZIP_DEFLATED)


# ---- Croissant description of the data ---------------------------------------------------------------


def _fits(manifest: Manifest) -> bool:
    """Return whether Croissant can describe a dataset, which requires the SHA-256 of the bytes of each file."""
    return all(file.verifiable for files in manifest.splits.values() for file in files)


def _croissant(name: str, manifest: Manifest) -> Raw:
    """Return the Croissant description of a dataset.

    The description has a file object for each file, and a record set with the manifest's fields for each split. A
    file's address is the path in the manifest: absolute, or relative to the dataset's folder.
    """
    import mlcroissant as mlc

    distribution, record_sets = list[Any](), list[Any]()
    for split, files in manifest.splits.items():
        if not files:
            continue
        # Identifiers have numbers in place of paths, since a path may have spaces, which are invalid in identifiers.
        objects = [
            mlc.FileObject(
                id=f"{split}-file-{number}",
                name=file.path,
                content_url=file.path,
                content_size=f"{file.bytes} B",
                encoding_formats=HDF5,
                sha256=file.digest,
            )
            for number, file in enumerate(files)
        ]
        source = {"file_object": objects[0].id}
        if len(files) > 1:
            objects.append(
                mlc.FileSet(id=f"{split}-files", includes=[file.path for file in files], encoding_formats=HDF5)
            )
            source = {"file_set": objects[-1].id}
        distribution += objects
        fields = [
            mlc.Field(
                id=f"{split}/{key}",
                name=key,
                description=", ".join(
                    f"{channel} ({unit or 1})" for channel, unit in zip(info.channels, info.units, strict=True)
                ),
                data_types=[getattr(mlc.DataType, info.dtype.upper())],
                source=mlc.Source(extract=mlc.Extract(column=key), **source),
                **_shape(info),
            )
            for key, info in manifest.fields.items()
        ]
        rows = sum(file.rows for file in files)
        record_sets.append(mlc.RecordSet(id=split, name=split, description=f"{rows} {manifest.rows}", fields=fields))
    context = mlc.Context(conforms_to=CROISSANT)
    facts = "; ".join([f"Data of kind {manifest.kind}", *manifest.facts])
    described = mlc.Metadata(
        ctx=context, name=name, description=facts, url="./", distribution=distribution, record_sets=record_sets
    )
    found: Raw = described.to_json()
    return found


def _shape(info: FieldInfo) -> Raw:
    """Return the shape of a record's values; the sizes of a volume's grid are -1, since they differ between files."""
    shape = (len(info.channels), *(-1 for _ in info.grid)) if info.channel_axis == 0 else info.row_shape
    return {"is_array": True, "array_shape": ",".join(map(str, shape))} if shape else {}
