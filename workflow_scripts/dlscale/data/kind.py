"""Kinds of datasets: how a kind describes its files to the workflow.

The workflow calls a kind's methods while it builds its graph, so they are pure and quick. The work is done by functions
in the kind's other modules (`dlscale.core.registry.module_of`), so that a stage depends only on code that it uses. A
kind that dlscale does not ship has all functions in one module.

(`acquirer`)
    `acquire(dataset, raw, out, progress)` makes a raw file. Without it, users' files are read directly, URLs fetched.
`source`
    `open_source(dataset, part, paths) -> Source` reads a part. Only prepared datasets do not need it.
`samples`
    `open_samples(manifest, split, settings, seed)`; by default each row is a sample.
`describe`
    `describe_prepared(dataset, sources, folder) -> Manifest` describes prepared files. Optional:
    `complete(dataset, manifest, stats, name) -> Manifest` adds to a manifest and may refuse the data. It may write into
    the folder `stats`, which later lies next to the manifest under the name `name`.
`preview`
    `preview(manifest)` yields `dlscale.data.preview.Panel`s; by default the first rows are drawn.
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

    name: str  # file name, in the dataset's `source/` folder if it is acquired
    origin: str  # a path, a URL, a store, or `simulated`
    index: int = 0  # number of a simulated box or year
    period: tuple[dt.date, dt.date] | None = None  # first and last day (inclusive) to take from a store


@dataclass(frozen=True)
class Part:
    """One preprocessed file, `SPLIT/NAME.h5`."""

    split: Split
    name: str
    raws: tuple[RawFile, ...] = ()  # its inputs; empty if it is made in memory
    fraction: tuple[float, float] = (0.0, 1.0)  # fraction (from, to) of the raw file's rows
    period: tuple[dt.date, dt.date] | None = None  # first and last day (inclusive) that it holds

    @property
    def label(self) -> str:
        return f"{self.split}/{self.name}"


@dataclass(frozen=True)
class Outline:
    """Content of a dataset that follows from its settings alone, such as a simulated one."""

    fields: dict[str, tuple[int, tuple[int, ...]]]  # number of channels, and grid, as in `FieldInfo`
    rows: dict[Split, list[int]]  # number of rows of each file
    values: int  # total number of simulated values
    classes: dict[str, int] = field(default_factory=dict)  # number of classes of each label field


def is_url(origin: str) -> bool:
    """Return whether `origin` is fetched over the network."""
    return urlsplit(origin).scheme in ("http", "https")


def file_name(origin: str) -> str:
    """Return the last part of a path or URL."""
    return PurePosixPath(urlsplit(origin).path if is_url(origin) else origin).name


def name_files(origins: list[str]) -> dict[str, RawFile]:
    """Return a raw file for each origin, named after it in safe characters; a repeated stem gets a number."""
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
    """Return a raw file's name without its last suffix, dots replaced: the name of its part."""
    return PurePosixPath(raw.name).stem.replace(".", "_")


class RowSamples(Strict):
    """Samples that are rows of the files: see `dlscale.data.samples`."""

    kind: Literal["rows"]
    input: str = Field(description="Field of the dataset that is the model's input.")
    target: str = Field(description="Field that the model is to predict.")
    train: PositiveInt | None = Field(None, description="At most this many training samples an epoch; all if absent.")
    valid: PositiveInt | None = Field(None, description="At most this many, evenly spaced; all if absent.")


class DatasetKind(ABC):
    """A kind of dataset: `KIND` in a folder's `kind.py`, or an item of `KINDS` in a module outside dlscale."""

    name: ClassVar[str]  # value of a dataset's key `kind`
    Settings: ClassVar[type[DatasetSettings]]
    Samples: ClassVar[type[Strict]] = RowSamples  # class of a run's key `samples`
    rows: ClassVar[str] = "samples"  # name for the rows of a file
    standardised: ClassVar[bool] = False  # whether readers standardise each channel by its statistics
    #: Keys of the dataset and its source that select parts and raw files without changing their content.
    selection: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def parts(self, dataset: Any) -> list[Part]:
        """Return the files that preprocessing makes, in order; for a prepared dataset, its files."""

    def acquirer(self, dataset: Any) -> str | None:
        """Return the module (see `dlscale.core.registry.module_of`) that makes raw files; None if missing."""
        return None

    def maker(self, dataset: Any) -> str | None:
        """Return the acquirer if a change of its code makes the files again; None if they are fetched."""
        return self.acquirer(dataset)

    def prepared(self, dataset: Any) -> bool:
        """Return whether the files are used as they are, without preprocessing."""
        return getattr(dataset.source, "kind", None) == "prepared"

    def origins(self, dataset: Any) -> list[str]:
        """Return a dataset's paths, URLs or store; an empty list for a simulated dataset."""
        origins = (raw.origin for part in self.parts(dataset) for raw in part.raws)
        return list(dict.fromkeys(origin for origin in origins if origin != "simulated"))

    def prepared_files(self, dataset: Any) -> list[str]:
        """Return the files of a prepared dataset, missing ones included; `*` stands for unknown names."""
        return [raw.origin for part in self.parts(dataset) for raw in part.raws]

    def raw_settings(self, dataset: Any, raw: RawFile) -> dict[str, Any]:
        source = dataset.source.model_dump(mode="json", exclude={*self.selection, "sha256"}) if dataset.source else {}
        digest = getattr(dataset.source, "sha256", {}).get(file_name(raw.origin))
        return {**source, "origin": raw.origin, "index": raw.index, "period": _days(raw.period), "sha256": digest}

    def look(self, dataset: Any, raw: RawFile, made: Path) -> str | None:
        """Return a digest of the state of an acquired file's origin; None if the state is unknown.

        The file is acquired again when the digest changes. `made` is the path of the acquired file: a kind whose origin
        is missing may return the digest that this file contains.
        """
        return None

    def part_settings(self, dataset: Any, part: Part) -> dict[str, Any]:
        """Return the settings that decide the content of a part's pieces, given its raw files."""
        left_out = {"storage", *self.selection} | ({"source"} if part.raws else set())
        settings = dataset.model_dump(mode="json", exclude=left_out)
        return {**settings, "fraction": part.fraction, "period": _days(part.period)}

    def grid(self, dataset: Any) -> tuple[int, ...] | None:
        """Return the grid of the stored fields if the settings alone decide it, else None."""
        return None

    def outline(self, dataset: Any) -> Outline | None:
        """Return the dataset's content, for costs and time limits; None if it depends on the files."""
        return None

    def available(self, samples: Any, rows: list[int]) -> int | None:
        """Return the number of samples in files with these numbers of rows; None if rows do not determine it."""
        return sum(rows)


def _days(period: tuple[dt.date, dt.date] | None) -> list[str] | None:
    return [str(day) for day in period] if period else None


# ---- datasets whose samples lie in two files that belong together, such as images and labels

Both = TypeVar("Both", bound=Strict)  # fields: paths or URLs, in the order in which readers take them


class Paired(Strict, Generic[Both]):
    """Pairs of files that belong together, such as images and labels: one for each split, or `all` with `shares`."""

    train: Both | None = Field(None, description="Files of the training part.")
    valid: Both | None = Field(None, description="Files of the validation part.")
    test: Both | None = Field(None, description="Files of the test part.")
    all: Both | None = Field(None, description="Files that `shares` divides among the parts.")
    shares: Shares | None = Field(None, description="Fraction of `all` that each part gets.")
    sha256: dict[str, Sha256] = Field({}, description="Expected digests by file name (the part after the last '/').")

    @model_validator(mode="after")
    def _one_form(self) -> Paired[Both]:
        own = self._own()
        by_split = {"train", "valid"} <= own.keys() and not (self.all or self.shares)
        by_share = self.all and self.shares and not own
        if not (by_split or by_share):
            raise ValueError("give either train and valid (and test), or all with shares")
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
    """Return first row and number of rows of a part's fraction of a file, `gap` rows after the fraction before."""
    low, high = part.fraction
    first = math.ceil(low * rows - 1e-9) + (gap if low > 0 else 0)
    own = math.floor(high * rows + 1e-9) - first
    if own < 1:
        raise UserError(
            f"{path}: split '{part.split}' is empty: {rows} rows, shares {low:g} to {high:g}, gap {gap}; choose a "
            "larger share or a smaller gap"
        )
    return first, own
