"""Kinds of datasets: how a kind describes itself to the workflow, which asks while it builds its graph.

This is pure and quick. The work is done by functions in modules beside a kind (`dlscale.core.registry.module_of`), so
that a stage depends on no more than it uses; a single module from outside holds them all.

(`acquirer`)
    `acquire(dataset, raw, out, progress)` makes a raw file. Without it files are read where they lie, or fetched.
`source`
    `open_source(dataset, part, paths) -> Source` reads a part. Only prepared datasets do without.
`samples`
    `open_samples(manifest, split, settings, seed)`; by default rows are samples.
`describe`
    `describe_prepared(dataset, sources, folder) -> Manifest` describes prepared files. Optional:
    `complete(dataset, manifest, stats, name) -> Manifest` adds to a manifest, may write into the folder `stats`, whose
    name beside the manifest is `name`, and may refuse the data.
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

    name: str  # in the dataset's `source/` folder, if it is acquired
    origin: str  # a path, a URL, a store, or `simulated`
    index: int = 0  # number of a simulated box or year
    period: tuple[dt.date, dt.date] | None = None  # first and last day (inclusive) to take from a store


@dataclass(frozen=True)
class Part:
    """One preprocessed file, `SPLIT/NAME.h5`."""

    split: Split
    name: str
    raws: tuple[RawFile, ...] = ()  # its inputs; none where it is made in memory
    fraction: tuple[float, float] = (0.0, 1.0)  # share (from, to) of the raw file's rows
    period: tuple[dt.date, dt.date] | None = None  # first and last day (inclusive) that it holds

    @property
    def label(self) -> str:
        return f"{self.split}/{self.name}"


@dataclass(frozen=True)
class Outline:
    """Content of a dataset whose settings alone decide it, as those of simulated ones do."""

    fields: dict[str, tuple[int, tuple[int, ...]]]  # number of channels, and grid, as in `FieldInfo`
    rows: dict[Split, list[int]]  # of each file
    values: int  # simulated numbers in all
    classes: dict[str, int] = field(default_factory=dict)  # of label fields


def is_url(origin: str) -> bool:
    """Return whether `origin` is fetched over the network."""
    return urlsplit(origin).scheme in ("http", "https")


def file_name(origin: str) -> str:
    """Return the last part of a path or URL."""
    return PurePosixPath(urlsplit(origin).path if is_url(origin) else origin).name


def name_files(origins: list[str]) -> dict[str, RawFile]:
    """Name raw files after their origins, in safe characters; of equal stems all but the first get a number."""
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
    """Return a raw file's name without its last suffix, as parts are called."""
    return PurePosixPath(raw.name).stem.replace(".", "_")


class RowSamples(Strict):
    """Samples that are rows of the files: see `dlscale.data.samples`."""

    kind: Literal["rows"]
    input: str = Field(description="Field of the dataset that is the model's input.")
    target: str = Field(description="Field that the model is to predict.")
    train: PositiveInt | None = Field(None, description="At most this many training samples an epoch; all if absent.")
    valid: PositiveInt | None = Field(None, description="At most this many, evenly spaced; all if absent.")


class DatasetKind(ABC):
    """A kind of dataset; a folder's `kind.py` has one as `KIND`, a module from outside lists its own in `KINDS`."""

    name: ClassVar[str]  # value of a dataset's key `kind`
    Settings: ClassVar[type[DatasetSettings]]
    Samples: ClassVar[type[Strict]] = RowSamples  # class of a run's key `samples`
    rows: ClassVar[str] = "samples"  # name for the rows of a file
    standardised: ClassVar[bool] = False  # whether each channel is standardised, by its statistics, when it is read
    #: Keys of the dataset and its source that only select parts and raw files, whose content does not depend on them.
    selection: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def parts(self, dataset: Any) -> list[Part]:
        """Return the files that preprocessing makes, in order; for a prepared dataset, its files."""

    def acquirer(self, dataset: Any) -> str | None:
        """Return the module (see `dlscale.core.registry.module_of`) that makes raw files; None where none is made."""
        return None

    def maker(self, dataset: Any) -> str | None:
        """Return the acquirer if an edit of its code makes the files again; None where they are fetched."""
        return self.acquirer(dataset)

    def prepared(self, dataset: Any) -> bool:
        """Return whether the files are used as they are, without preprocessing."""
        return getattr(dataset.source, "kind", None) == "prepared"

    def origins(self, dataset: Any) -> list[str]:
        """Return a dataset's paths, URLs or store; nothing for a simulated one."""
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
        """Return a digest of the origin of an acquired file, which is read anew when that changes; None: never.

        `made` is the file: where its origin is gone, it stays if it holds that digest.
        """
        return None

    def part_settings(self, dataset: Any, part: Part) -> dict[str, Any]:
        """Return the settings that decide the content of a part's pieces, given its raw files."""
        left_out = {"storage", *self.selection} | ({"source"} if part.raws else set())
        settings = dataset.model_dump(mode="json", exclude=left_out)
        return {**settings, "fraction": part.fraction, "period": _days(part.period)}

    def grid(self, dataset: Any) -> tuple[int, ...] | None:
        """Return the grid of the stored fields where the settings alone decide it, else None."""
        return None

    def outline(self, dataset: Any) -> Outline | None:
        """Return the dataset's content, for costs and time limits; None where only its files tell."""
        return None

    def available(self, samples: Any, rows: list[int]) -> int | None:
        """Return the number of samples in files of so many rows; None where rows do not tell."""
        return sum(rows)


def _days(period: tuple[dt.date, dt.date] | None) -> list[str] | None:
    return [str(day) for day in period] if period else None


# ---- datasets whose samples lie in two files that belong together, such as images and labels

Both = TypeVar("Both", bound=Strict)  # whose fields are paths or URLs, in the order in which readers take them


class Paired(Strict, Generic[Both]):
    """Two files that belong together, such as images and labels: those of each split, or `all` with `shares`."""

    train: Both | None = Field(None, description="Files of the training part.")
    valid: Both | None = Field(None, description="Files of the validation part.")
    test: Both | None = Field(None, description="Files of the test part.")
    all: Both | None = Field(None, description="Files that `shares` divides among the parts.")
    shares: Shares | None = Field(None, description="Share of each part of `all`.")
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
    """Return first row and number of rows of a part's share of a file, `gap` rows after the share before."""
    low, high = part.fraction
    first = math.ceil(low * rows - 1e-9) + (gap if low > 0 else 0)
    own = math.floor(high * rows + 1e-9) - first
    if own < 1:
        raise UserError(
            f"{path}: split '{part.split}' is empty: {rows} rows, shares {low:g} to {high:g}, gap {gap}; choose a "
            "larger share or a smaller gap"
        )
    return first, own
