"""What a kind of dataset says of itself. It is pure and quick: the workflow asks it when it builds its graph.

The work is done by functions in modules beside it (`dlscale.core.registry.module_of` finds them), so that a stage
depends on no more than it uses. In a single module from outside they all stand in that module.

(`acquirer`)
    `acquire(dataset, raw, out, progress)` makes a raw file. Without it files are read where they lie, or fetched.
`source`
    `open_source(dataset, part, paths) -> Source` reads a part. Only prepared datasets do without.
`samples`
    `open_samples(manifest, split, settings, seed)`. Without it a sample is a row: `dlscale.data.rows`.
`describe`
    `describe_prepared(dataset, sources, folder) -> Manifest` for prepared datasets; other files are described by
    `dlscale.data.describe`. `complete(dataset, manifest, stats, name) -> Manifest`, which may be absent, returns every
    manifest with what the kind adds: `extra`, `facts`, normalisation. It may write into the folder `stats`, whose name
    beside the manifest will be `name`, and refuse the data.
`preview`
    `preview(manifest)` yields `dlscale.data.preview.Panel`s. Without it the first rows are drawn.
"""

from __future__ import annotations

import datetime as dt
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from dlscale.config.dataset import DatasetSettings, Split
from dlscale.core.schema import PositiveInt, Strict


@dataclass(frozen=True)
class RawFile:
    """A raw file."""

    name: str  # in the dataset's `source/` folder, if it is acquired
    origin: str  # a path, a URL, a store, or `simulated`
    index: int = 0  # number of what is simulated: a box, a year
    period: tuple[dt.date, dt.date] | None = None  # first and last day (inclusive) to take from a store


@dataclass(frozen=True)
class Part:
    """One preprocessed file, `SPLIT/NAME.h5`."""

    split: Split
    name: str
    raws: tuple[RawFile, ...] = ()  # that it is made from; none for what is made in memory
    fraction: tuple[float, float] = (0.0, 1.0)  # share (from, to) of the raw file's rows
    period: tuple[dt.date, dt.date] | None = None  # first and last day (inclusive) that it holds

    @property
    def label(self) -> str:
        return f"{self.split}/{self.name}"


@dataclass(frozen=True)
class Outline:
    """What a dataset will hold whose settings alone decide it, as those of simulated ones do."""

    fields: dict[str, tuple[int, tuple[int, ...]]]  # number of channels, and grid, as `FieldInfo` has them
    rows: dict[Split, list[int]]  # of each file
    values: int  # numbers that are simulated in all
    classes: dict[str, int] = field(default_factory=dict)  # of fields that are labels


def is_url(origin: str) -> bool:
    """Whether `origin` is fetched over the network."""
    return urlsplit(origin).scheme in ("http", "https")


def file_name(origin: str) -> str:
    """Return the last part of a path or URL."""
    return PurePosixPath(urlsplit(origin).path if is_url(origin) else origin).name


def name_files(origins: list[str]) -> dict[str, RawFile]:
    """Name raw files after their origins, harmlessly; of those with equal stems all but the first get a number."""
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
    """Samples that are rows of the files: see `dlscale.data.rows`."""

    kind: Literal["rows"]
    input: str = Field(description="Field of the dataset that the model is given.")
    target: str = Field(description="Field that the model is to answer.")
    train: PositiveInt | None = Field(None, description="At most this many training samples an epoch; all if absent.")
    valid: PositiveInt | None = Field(None, description="At most this many, evenly spaced; all if absent.")


class DatasetKind(ABC):
    """See the module. A folder's `kind.py` has one as `KIND`; a module from outside lists its own in `KINDS`."""

    name: ClassVar[str]  # what a dataset's key `kind` says
    Settings: ClassVar[type[DatasetSettings]]  # of a dataset of this kind
    Samples: ClassVar[type[Strict]] = RowSamples  # a run's settings of its samples (key `samples`)
    rows: ClassVar[str] = "samples"  # what the rows of a file are called
    #: Keys of the dataset and its source that only say which parts and raw files there are: what these hold does not
    #: depend on them.
    selection: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def parts(self, dataset: Any) -> list[Part]:
        """Return the files that preprocessing makes, in order; of a prepared dataset, the files that it is."""

    def acquirer(self, dataset: Any) -> str | None:
        """Return the module (see `dlscale.core.registry.module_of`) that makes raw files; None where none is made."""
        return None

    def maker(self, dataset: Any) -> str | None:
        """Return the acquirer if an edit of its code is to make the files again; None where they are fetched."""
        return self.acquirer(dataset)

    def prepared(self, dataset: Any) -> bool:
        """Return whether the files are used as they are, without preprocessing."""
        return getattr(dataset.source, "kind", None) == "prepared"

    def origins(self, dataset: Any) -> list[str]:
        """Return where a dataset comes from: paths, URLs, a store; nothing for a simulated one."""
        origins = (raw.origin for part in self.parts(dataset) for raw in part.raws)
        return list(dict.fromkeys(origin for origin in origins if origin != "simulated"))

    def prepared_files(self, dataset: Any) -> list[str]:
        """Return the files of a prepared dataset, even those that are missing; `*` stands for names nobody knows."""
        return [raw.origin for part in self.parts(dataset) for raw in part.raws]

    def raw_settings(self, dataset: Any, raw: RawFile) -> dict[str, Any]:
        """Return the settings that decide the content of an acquired file: what makes acquisition run again."""
        source = dataset.source.model_dump(mode="json", exclude={*self.selection, "sha256"}) if dataset.source else {}
        digest = getattr(dataset.source, "sha256", {}).get(file_name(raw.origin))
        return {**source, "origin": raw.origin, "index": raw.index, "period": _days(raw.period), "sha256": digest}

    def look(self, dataset: Any, raw: RawFile, made: Path) -> str | None:
        """Return what tells how the origin of an acquired file looks, which is read anew when that changes.

        None: nobody looks. `made` is the file, which may be there: where its origin is gone, it stays as it is if it
        tells how that looked.
        """
        return None

    def part_settings(self, dataset: Any, part: Part) -> dict[str, Any]:
        """Return the settings that decide the content of a part's pieces, given its raw files."""
        left_out = {"storage", "memory_mb", *self.selection} | ({"source"} if part.raws else set())
        settings = dataset.model_dump(mode="json", exclude=left_out)
        return {**settings, "fraction": part.fraction, "period": _days(part.period)}

    def grid(self, dataset: Any) -> tuple[int, ...] | None:
        """Return the grid of the stored fields where the settings alone decide it, else None."""
        return None

    def outline(self, dataset: Any) -> Outline | None:
        """Return what the dataset will hold, for costs and time limits; None where only its files tell."""
        return None

    def available(self, samples: Any, rows: list[int]) -> int | None:
        """Return how many samples files of so many rows hold; None where rows do not tell, or any number is drawn."""
        return sum(rows)


def _days(period: tuple[dt.date, dt.date] | None) -> list[str] | None:
    return [str(day) for day in period] if period else None
