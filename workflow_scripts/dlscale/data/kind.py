"""Kinds of datasets: how a kind describes its files to the workflow.

The workflow calls a kind's methods while it builds its graph, so methods must be pure and quick. Functions in the
kind's other modules (`dlscale.core.registry.module_of`) do the work, so that each stage depends only on the code that
the stage uses. A kind outside dlscale has all functions in one module. The functions, by module:

the module that the method `acquirer` returns
    `acquire(dataset, raw, out, progress)` makes a raw file. Without an acquirer, users' files are read directly, and
    URLs are fetched.
`source`
    `open_source(dataset, part, paths) -> Source` opens a part's raw files. Prepared datasets do not need this function.
`samples`
    `open_samples(manifest, split, settings, seed)` opens the samples of a split. Without this function, each row is a
    sample.
`describe`
    `describe_prepared(dataset, sources, folder) -> Manifest` describes prepared files. The optional function
    `complete(dataset, manifest, stats, name) -> Manifest` adds to a manifest and may refuse the data. This function may
    write files into the folder `stats`, which is later moved next to the manifest and gets the name `name`.
`preview`
    `preview(manifest)` yields `dlscale.data.preview.Panel`s. Without this function, the first rows or the middle plane
    of a volume are drawn.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Generic, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from dlscale.config.dataset import SPLITS, DatasetSettings, Sha256, Shares, Split, check_digests, refuse_shared
from dlscale.core.errors import UserError
from dlscale.core.schema import PositiveInt, Strict


@dataclass(frozen=True)
class RawFile:
    """One input of preprocessing."""

    name: str  # file name; an acquired file is in the dataset's folder `source/`
    origin: str  # a path, a URL, a store, or `simulated`
    index: int = 0  # number of a simulated file, such as a box or a year
    period: tuple[dt.date, dt.date] | None = None  # first and last day (inclusive) to take from a store


@dataclass(frozen=True)
class Part:
    """One file that preprocessing makes, `SPLIT/NAME.h5`."""

    split: Split
    name: str
    raws: tuple[RawFile, ...] = ()  # raw files of the part; empty if the part is simulated in memory
    fraction: tuple[float, float] = (0.0, 1.0)  # range (from, to) of the raw file's rows, as fractions
    period: tuple[dt.date, dt.date] | None = None  # first and last day (inclusive) of the part

    @property
    def label(self) -> str:
        return f"{self.split}/{self.name}"


@dataclass(frozen=True)
class Outline:
    """Content of a dataset that follows from its settings alone, as for simulated data."""

    fields: dict[str, tuple[int, tuple[int, ...]]]  # field name → number of channels, and grid as in `FieldInfo`
    rows: dict[Split, list[int]]  # split → number of rows of each file
    values: int  # total number of simulated values
    classes: dict[str, int] = field(default_factory=dict)  # name of a label field → number of classes


def is_url(origin: str) -> bool:
    """Return whether `origin` is an HTTP address; without an acquirer, such a file is fetched."""
    return urlsplit(origin).scheme in ("http", "https")


def file_name(origin: str) -> str:
    """Return the last part of a path or URL."""
    return PurePosixPath(urlsplit(origin).path if is_url(origin) else origin).name


def name_files(origins: list[str]) -> dict[str, RawFile]:
    """Return the raw file of each origin, as origin → raw file.

    The name of a raw file is the last part of its origin, with unsafe characters replaced. If two names have the same
    stem, the second name gets a number.
    """
    named: dict[str, RawFile] = {}
    taken: set[str] = set()
    for origin in origins:
        name = PurePosixPath(re.sub(r"[^A-Za-z0-9._-]", "_", file_name(origin)).lstrip(".-") or "file")
        raw, number = RawFile(name.name, origin), len(taken) + 1
        while stem(raw) in taken:
            raw, number = RawFile(f"{name.stem}-{number}{name.suffix}", origin), number + 1
        taken.add(stem(raw))
        named[origin] = raw
    return named


def stem(raw: RawFile) -> str:
    """Return the name of the part made from a raw file: its name without the last suffix, with `_` for each dot."""
    return PurePosixPath(raw.name).stem.replace(".", "_")


#: Name of the field with a sample's array; a list or dict of names, if a sample has a tuple or dict of arrays.
Fields = str | tuple[str, ...] | dict[str, str]


class RowSamples(Strict):
    """Samples that are rows of the files: see `dlscale.data.samples`."""

    kind: Literal["rows"]
    input: Fields = Field(description="Field of the dataset, or several fields, that the model gets as input.")
    target: Fields = Field(description="Field of the dataset, or several fields, that the model predicts.")
    train: PositiveInt | None = Field(
        None, description="Largest number of training samples per epoch. Absent: all samples."
    )
    valid: PositiveInt | None = Field(
        None,
        description="Largest number of validation samples, and of test samples, evenly spaced. Absent: all samples.",
    )


class DatasetKind(ABC):
    """Base class of kinds of datasets.

    A kind is the object `KIND` in its folder's `kind.py`, or an item of the list `KINDS` in a module outside dlscale.
    """

    name: ClassVar[str]  # value of a dataset's key `kind`
    Settings: ClassVar[type[DatasetSettings]]
    Samples: ClassVar[type[Strict]] = RowSamples  # class of a run's key `samples`
    rows: ClassVar[str] = "samples"  # noun for a file's rows on the page, such as "images"
    standardised: ClassVar[bool] = False  # whether readers standardise each channel (mean 0, standard deviation 1)
    #: Keys of the dataset and its source that only select parts and raw files, and do not change the files' content.
    selection: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def parts(self, dataset: Any) -> list[Part]:
        """Return the parts that preprocessing makes, in the manifest's order.

        For a prepared dataset, return a part for each file, or an empty list if the kind overrides `prepared_files`.
        """

    def acquirer(self, dataset: Any) -> str | None:
        """Return the module that makes raw files (see `dlscale.core.registry.module_of`).

        Return None if raw files are read directly or fetched.
        """
        return None

    def maker(self, dataset: Any) -> str | None:
        """Return the acquirer if a change of its code changes the raw files; None if the files are fetched."""
        return self.acquirer(dataset)

    def prepared(self, dataset: Any) -> bool:
        """Return whether the dataset's files are used without preprocessing."""
        return getattr(dataset.source, "kind", None) == "prepared"

    def origins(self, dataset: Any) -> list[str]:
        """Return a dataset's paths, URLs or store; an empty list for a simulated dataset."""
        origins = (raw.origin for part in self.parts(dataset) for raw in part.raws)
        return list(dict.fromkeys(origin for origin in origins if origin != "simulated"))

    def prepared_files(self, dataset: Any) -> list[str]:
        """Return the paths of a prepared dataset's files, also of missing files; `*` stands for unknown names."""
        return [raw.origin for part in self.parts(dataset) for raw in part.raws]

    def raw_settings(self, dataset: Any, raw: RawFile) -> dict[str, Any]:
        source = dataset.source.model_dump(mode="json", exclude={*self.selection, "sha256"}) if dataset.source else {}
        digest = getattr(dataset.source, "sha256", {}).get(file_name(raw.origin))
        return {**source, "origin": raw.origin, "index": raw.index, "period": _days(raw.period), "sha256": digest}

    def look(self, dataset: Any, raw: RawFile, made: Path) -> str | None:
        """Return a digest of the current state of a raw file's origin; None if the state is unknown.

        The file is acquired again when this digest changes. `made` is the path of the acquired file. If the origin is
        missing, a kind may return the digest that the acquired file contains. For a kind without this method, the
        workflow compares the size and modification time (`stamp`) of a user's file.
        """
        return None

    def part_settings(self, dataset: Any, part: Part) -> dict[str, Any]:
        """Return the settings on which the content of a part depends, apart from the raw files."""
        left_out = {"storage", *self.selection} | ({"source"} if part.raws else set())
        settings = dataset.model_dump(mode="json", exclude=left_out)
        return {**settings, "fraction": part.fraction, "period": _days(part.period)}

    def grid(self, dataset: Any) -> tuple[int, ...] | None:
        """Return the grid of the stored fields if the settings alone determine the grid, else None."""
        return None

    def outline(self, dataset: Any) -> Outline | None:
        """Return the content of a dataset, to estimate costs and time limits; None if the content depends on files."""
        return None

    def available(self, samples: Any, rows: list[int]) -> int | None:
        """Return the number of samples in files with these numbers of rows; None if the rows do not determine it."""
        return sum(rows)


def _days(period: tuple[dt.date, dt.date] | None) -> list[str] | None:
    return [str(day) for day in period] if period else None


# ---- datasets whose samples lie in two files that belong together, such as images and labels

Both = TypeVar("Both", bound=Strict)  # paths or URLs of a pair's files, in the order for `open_source`


class Paired(Strict, Generic[Both]):
    """Pairs of files that belong together, such as images and labels.

    Either each split has its own pair, or `shares` divides the pair `all` among the splits.
    """

    train: Both | None = Field(None, description="Files of the training part.")
    valid: Both | None = Field(None, description="Files of the validation part.")
    test: Both | None = Field(None, description="Files of the test part.")
    all: Both | None = Field(None, description="Files whose rows `shares` divides among train, valid and test.")
    shares: Shares | None = Field(None, description="Fractions of the rows of `all` for train, valid and test.")
    sha256: dict[str, Sha256] = Field(
        {}, description="Expected digests of fetched files, by file name (the part of the URL after the last '/')."
    )

    @model_validator(mode="after")
    def _one_form(self) -> Paired[Both]:
        own = self._own()
        by_split = {"train", "valid"} <= own.keys() and not (self.all or self.shares)
        by_share = self.all and self.shares and not own
        if not (by_split or by_share):
            raise ValueError("give either `train` and `valid` (and optionally `test`), or `all` and `shares`")
        refuse_shared(*(list(dict.fromkeys(files)) for files in own.values()))
        check_digests(self.sha256, [origin for files in (*own.values(), _origins(self.all)) for origin in files])
        return self

    def _own(self) -> dict[Split, list[str]]:
        return {split: files for split in SPLITS if (files := _origins(getattr(self, split)))}

    def parts(self) -> list[Part]:
        own, whole = self._own(), _origins(self.all)
        named = name_files([origin for files in (whole, *own.values()) for origin in files])
        if self.shares is None:
            return [Part(split, split, tuple(named[o] for o in files)) for split, files in own.items()]
        raws = tuple(named[origin] for origin in whole)
        return [Part(split, split, raws, fraction=share) for split, share in self.shares.ranges()]


def _origins(files: Strict | None) -> list[str]:
    return list(files.model_dump().values()) if files else []


def share(rows: int, part: Part, path: Path, gap: int = 0) -> tuple[int, int]:
    """Return the first row and the number of rows that a part takes from a file of `rows` rows.

    Unless the part begins at the start of the file, it loses its first `gap` rows.
    """
    low, high = part.fraction
    first = math.ceil(low * rows - 1e-9) + (gap if low > 0 else 0)
    own = math.floor(high * rows + 1e-9) - first
    if own < 1:
        raise UserError(
            f"{path}: split '{part.split}' is empty: the file has {rows} rows, and the split takes the fraction from "
            f"{low:g} to {high:g} without its first {gap} rows (the gap); choose a larger fraction or a smaller gap"
        )
    return first, own
