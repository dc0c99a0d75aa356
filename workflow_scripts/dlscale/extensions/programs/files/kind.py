"""Kind of dataset `files`: the files that an external program reads, including its code."""

from __future__ import annotations

import pathlib
from typing import Any, Literal

from pydantic import Field, model_validator

from dlscale.config.dataset import DatasetSettings, Path, refuse_changed
from dlscale.core.errors import UserError
from dlscale.core.schema import Strict
from dlscale.data.kind import DatasetKind, Part, is_url

#: Maximum number of files of a dataset; more files are refused. Hidden files and Python's caches do not count.
MAX_FILES = 10_000


class FileSource(Strict):
    """Files and folders; all files in a folder count, except hidden files and Python's caches."""

    kind: Literal["files"] = "files"
    paths: list[Path] = Field([], description="Files and folders.")

    @model_validator(mode="after")
    def _local(self) -> FileSource:
        if wrong := [path for path in self.paths if is_url(path)]:
            raise ValueError(f"paths: {wrong[0]}: is a URL; download the file, and give its path")
        return self


class FilesDataset(DatasetSettings):
    """Files that an external program reads; the program runs again if one of these files changes."""

    kind: Literal["files"]
    source: FileSource = FileSource()

    @model_validator(mode="after")
    def _as_it_is(self) -> FilesDataset:
        refuse_changed(self, "downsample", "storage", "pieces")
        return self


class ItsOwnSamples(Strict):
    """Samples of an external program; dlscale does not configure them."""

    kind: Literal["its_own"] = "its_own"


class Files(DatasetKind):
    """The kind of dataset `files`."""

    name = "files"
    rows = "files"
    Settings = FilesDataset
    Samples = ItsOwnSamples
    standardised = False

    def prepared(self, dataset: FilesDataset) -> bool:
        return True

    def parts(self, dataset: FilesDataset) -> list[Part]:
        return []

    def origins(self, dataset: FilesDataset) -> list[str]:
        return dataset.source.paths

    def prepared_files(self, dataset: FilesDataset) -> list[str]:
        found = list[str]()
        for path in map(pathlib.Path, dataset.source.paths):
            inside = path.rglob("*") if path.is_dir() else [path]
            for file in inside:
                shown = not any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(path).parts)
                if not path.is_dir() or (file.is_file() and shown):
                    found.append(str(file))
                if len(found) > MAX_FILES:
                    raise UserError(f"{path}: more than {MAX_FILES:,} files; name only files that affect the results")
        return sorted(found)

    def available(self, samples: Any, rows: list[int]) -> int | None:
        return None


KIND = Files()
