"""Files, parameters and command-line arguments of jobs that make data, computed from wildcards."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlscale.core.errors import UserError
from dlscale.core.files import read_json, stamp
from dlscale.core.fingerprint import data_modules
from dlscale.data import parts
from dlscale.data.kind import DatasetKind
from dlscale.preflight.probe import Finding, probe_raw
from dlscale.rules.context import Commands, Context, Params, Wildcards


@dataclass
class Datasets:
    """Jobs that make data."""

    context: Context
    commands: Commands
    #: `stamp`, computed once for each path.
    _stamp_of: Callable[[Path], tuple[int, int]] = field(default_factory=lambda: functools.cache(stamp))
    _broken: dict[str, str] = field(default_factory=dict)  #: Error messages on broken datasets, by name.

    def raw_path(self, name: str, raw: Any) -> str:
        acquired = parts.acquired(self.context.datasets[name], raw)
        return self.context.paths.raw_file(raw.name, name) if acquired else str(raw.origin)

    def _look_for_raw_files(self, name: str) -> None:
        """Report missing raw files of a dataset once, with a remedy.

        Snakemake regards results as up to date even if their raw files are missing.
        """
        if name not in self.context.looked and (
            found := probe_raw(name, self.context.datasets[name], Path(self.context.paths.folder))
        ):
            self._say(found)
        self.context.looked.add(name)

    def _say(self, found: Finding) -> None:
        """Print a finding about a dataset; FAIL ends the call, unless the call has --keep-going."""
        self.context.say(
            replace(found, status="warn") if self.context.keep_going() and found.status == "FAIL" else found
        )

    def existing(self, files: Iterable[str]) -> list[str]:
        """Return `files` as inputs; with --keep-going, omit missing files that no rule makes.

        Snakemake would end the call because of such a file.
        """
        return [file for file in files if not self.context.keep_going() or os.access(file, os.F_OK) or self.makes(file)]

    def makes(self, file: str) -> bool:
        return Path(file).is_relative_to(self.context.paths.folder)

    def part(self, wildcards: Wildcards) -> Any:
        return parts.part(self.context.dataset(wildcards), f"{wildcards.split}/{wildcards.part}")

    def part_sources(self, wildcards: Wildcards) -> list[str]:
        self._look_for_raw_files(wildcards.dataset)
        return self.existing(self._raw_paths(wildcards))

    def _raw_paths(self, wildcards: Wildcards) -> list[str]:
        return [self.raw_path(wildcards.dataset, raw) for raw in self.part(wildcards).raws]

    def source_words(self, wildcards: Wildcards) -> list[str]:
        return ["--source", *self._raw_paths(wildcards)]

    def part_pieces(self, wildcards: Wildcards) -> list[str]:
        part, paths = f"{wildcards.split}/{wildcards.part}", self.context.paths
        return [paths.piece(part, k, wildcards.dataset) for k in range(self.context.dataset(wildcards).pieces)]

    def files_of(self, name: str) -> list[str]:
        return self.existing(self._files_of(name))

    def _files_of(self, name: str) -> list[str]:
        dataset = self.context.datasets[name]
        kind = parts.kind_of(dataset)
        if not kind.prepared(dataset):
            return [self.context.paths.part(part.label, name) for part in parts.parts(dataset)]
        self._look_for_raw_files(name)
        if raws := parts.raws(dataset).values():
            return [self.raw_path(name, raw) for raw in raws]
        try:
            return kind.prepared_files(dataset)
        except UserError:  # this error was printed already, and the dataset's jobs report it again
            return kind.origins(dataset)

    def files(self, wildcards: Wildcards) -> list[str]:
        return self.files_of(wildcards.dataset)

    def prepared_sources(self, wildcards: Wildcards) -> list[str]:
        prepared = parts.kind_of(dataset := self.context.dataset(wildcards)).prepared(dataset)
        return ["--source", *self._files_of(wildcards.dataset)] if prepared else []

    def settings(self, wildcards: Wildcards, input: Any) -> str:
        return self.context.dataset(wildcards).model_dump_json()

    def acquire_params(self, wildcards: Wildcards) -> Params:
        dataset = self.context.dataset(wildcards)
        kind, settings = parts.kind_of(dataset), None
        if raw := parts.raws(dataset).get(wildcards.file):
            seen = self._seen(wildcards.dataset, raw)
            settings = {**kind.raw_settings(dataset, raw), **({"files": seen} if seen else {})}
        return self.context.params(data_modules("acquire", dataset.kind, kind.maker(dataset)), settings)

    def _seen(self, name: str, raw: Any) -> Any:
        """Return the state of a raw file's origin, or an error message if the origin is broken.

        The job that makes the raw file reports this error.
        """
        dataset = self.context.datasets[name]
        kind = parts.kind_of(dataset)
        if type(kind).look is DatasetKind.look:
            return self._stamp(name, raw)
        try:
            return self._broken.get(name) or kind.look(dataset, raw, Path(self.raw_path(name, raw)))
        except UserError as error:
            self._broken[name] = str(error)
            self._say(Finding(f"data {name}", "FAIL", str(error)))
        return self._broken[name]

    def _stamp(self, name: str, raw: Any) -> list[int] | None:
        """Return the stamp of a user's file or folder; for a missing file or folder, the stamp in the manifest.

        Return None if the manifest has no stamp, and for an origin that is not a file or folder of the user.
        """
        if raw.origin == "simulated" or "://" in raw.origin or self.makes(raw.origin):
            return None
        if os.access(path := Path(raw.origin), os.F_OK):
            return list(self._stamp_of(path))
        manifest = Path(self.context.paths.manifest(name))
        known = read_json(manifest) if manifest.is_file() else {}
        # The manifest may be damaged.
        made = known.get("provenance") if isinstance(known, dict) else None
        raws = made.get("raws") if isinstance(made, dict) else None
        return raws.get(raw.origin) if isinstance(raws, dict) else None

    def preprocess_params(self, wildcards: Wildcards) -> Params:
        dataset = self.context.dataset(wildcards)
        part = self.part(wildcards)
        settings = parts.kind_of(dataset).part_settings(dataset, part)
        # A user may replace a file with an older file, which Snakemake's comparison of times does not notice.
        raws = [raw for raw in part.raws if not parts.acquired(dataset, raw)]
        if files := {raw.origin: seen for raw in raws if (seen := self._stamp(wildcards.dataset, raw))}:
            settings = {**settings, "files": files}
        return self.context.params(data_modules("preprocess", dataset.kind), settings)

    def assemble_params(self, wildcards: Wildcards) -> Params:
        dataset = self.context.dataset(wildcards)
        return self.context.own_params("assemble", {"storage": dataset.storage.model_dump(), "pieces": dataset.pieces})

    def describe_params(self, wildcards: Wildcards) -> Params:
        dataset = self.context.dataset(wildcards)
        settings: Params = {"parts": [part.label for part in parts.parts(dataset)]}
        if parts.kind_of(dataset).prepared(dataset):
            settings["dataset"] = dataset.model_dump(mode="json")
            # A user may replace a file with an older file, which Snakemake's comparison of times does not notice.
            files = [Path(file) for file in self.files_of(wildcards.dataset)]
            settings["files"] = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.exists()]
        return self.context.params(data_modules("describe", dataset.kind), settings)

    def preview_params(self, wildcards: Wildcards) -> Params:
        return self.context.params(data_modules("preview", self.context.dataset(wildcards).kind), None)

    def samples(self, dataset: str) -> list[str]:
        """Return a dataset's files, and its statistics, which loaders need to normalise samples."""
        return [*self.files_of(dataset), self.context.paths.stats(dataset)]

    def acquire_launch(self, wildcards: Wildcards, input: Any) -> list[str]:
        dataset = self.context.dataset(wildcards)
        raw = parts.raws(dataset).get(wildcards.file)
        there = [raw.origin] if raw and Path(raw.origin).exists() else []
        return self.commands.start(there, secrets=parts.fetched(dataset))
