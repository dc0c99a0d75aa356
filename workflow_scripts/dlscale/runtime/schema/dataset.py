"""What a dataset is, where it comes from, and how it is preprocessed."""

from __future__ import annotations

import datetime as dt
import itertools
import posixpath
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, model_validator

from dlscale.runtime.errors import nearest
from dlscale.runtime.schema.base import Strict

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Year = Annotated[int, Field(ge=1, le=9999)]
Path = Annotated[str, StringConstraints(min_length=1)]


class Storage(Strict):
    """How preprocessed fields are stored on disk."""

    dtype: Literal["float32", "float16"] = Field(
        "float32",
        description="float16 stores (x - offset) / scale per channel; the greatest error is measured and recorded.",
    )
    chunk: PositiveInt | None = Field(
        32,
        description="Edge of an HDF5 chunk in cells (cosmo: a cube with all channels; null: none, rows of the whole "
        "volume; era5: unused, the times lie one after the other).",
    )
    channels: Literal["first", "last"] = Field(
        "first",
        description="first: [C, D, H, W], the published layout; last: [D, H, W, C], whose rows are C times longer and "
        "which loaders read faster (cosmo only).",
    )


class Preprocessing(Strict):
    """Keys that every dataset has."""

    downsample: PositiveInt = Field(1, description="Block-average this many cells along each spatial axis.")
    storage: Storage = Storage()
    pieces: PositiveInt = Field(1, description="Each file is preprocessed in this many independent, parallel pieces.")
    memory_mb: PositiveInt = Field(512, description="Bound on the memory of a piece's buffers, in MB (10^6 bytes).")


class Counts(Strict):
    """How many independent simulated boxes each split gets."""

    train: PositiveInt = 2
    valid: PositiveInt = 1
    test: int = Field(0, ge=0)


class Fractions(Strict):
    """Shares of each file, cut along its first axis in this order, with `gap` cells dropped at each cut."""

    train: float = Field(gt=0, lt=1)
    valid: float = Field(gt=0, lt=1)
    test: float = Field(0, ge=0, lt=1)
    gap: int = Field(0, ge=0, description="Rows (after downsampling) dropped between two splits, against leakage.")

    @model_validator(mode="after")
    def _sum(self) -> Fractions:
        if self.train + self.valid + self.test > 1 + 1e-9:
            raise ValueError(f"the fractions add up to {self.train + self.valid + self.test:g}, expected at most 1")
        return self


class CosmoSimulated(Strict):
    """Boxes made by the built-in simulator, one independent realisation each."""

    kind: Literal["simulated"]
    grid: int = Field(128, ge=16, multiple_of=2, description="Cells and particles along an edge of a box.")
    box_mpc_h: PositiveFloat = Field(64.0, description="Edge of a box in Mpc/h (comoving).")
    redshift: float = Field(2.0, ge=0)
    boxes: Counts = Counts()
    seed: int = Field(0, ge=0)


def _check_digests(sha256: dict[str, str], origins: list[str]) -> None:
    """Refuse a digest of no file, or of one that is read where it lies: nothing would check it."""
    fetched = {urlsplit(origin).path.rsplit("/", 1)[-1] for origin in origins if origin.startswith(("http:", "https:"))}
    for name in sha256:
        if name not in fetched:
            raise ValueError(
                f"sha256: no file called '{name}' is fetched{nearest(name, fetched)}; digests are of URLs, by the part "
                "after the last '/'"
            )


def _refuse_shared(*splits: list[str]) -> None:
    files = [file if "://" in file else posixpath.normpath(file) for split in splits for file in split]
    repeated = sorted({file for file in files if files.count(file) > 1})
    if repeated:
        raise ValueError(f"'{repeated[0]}' stands in two splits: validation would see training data")


class CosmoFiles(Strict):
    """HDF5 files with `Nbody` [4, D, H, W] and `Hydro` [5, D, H, W] in physical units; paths or http(s) URLs.

    Give either files per split, or `paths` with `fractions` of each file.
    """

    kind: Literal["files"]
    train: list[Path] = []
    valid: list[Path] = []
    test: list[Path] = []
    paths: list[Path] = []
    fractions: Fractions | None = None
    sha256: dict[str, Sha256] = Field({}, description="Expected digests by file name (the part after the last '/').")

    @model_validator(mode="after")
    def _one_form(self) -> CosmoFiles:
        by_split, by_fraction = bool(self.train or self.valid or self.test), bool(self.paths or self.fractions)
        if by_split == by_fraction:
            raise ValueError("give either files per split (train, valid, test) or paths with fractions")
        if by_split and not (self.train and self.valid):
            raise ValueError("train and valid need at least one file each")
        if by_fraction and not (self.paths and self.fractions):
            raise ValueError("paths and fractions go together")
        _refuse_shared(self.train, self.valid, self.test)
        _check_digests(self.sha256, [*self.train, *self.valid, *self.test, *self.paths])
        return self


class CosmoPrepared(Strict):
    """HDF5 files in the published layout (`Nbody`, `Hydro`, already transformed), used as they are."""

    kind: Literal["prepared"]
    train: list[Path] = Field(min_length=1)
    valid: list[Path] = Field(min_length=1)
    test: list[Path] = []
    sha256: dict[str, Sha256] = {}

    @model_validator(mode="after")
    def _disjoint(self) -> CosmoPrepared:
        _refuse_shared(self.train, self.valid, self.test)
        _check_digests(self.sha256, [*self.train, *self.valid, *self.test])
        return self


def _refuse_changed(dataset: Preprocessing, *keys: str) -> None:
    for key in keys:
        if getattr(dataset, key) != type(dataset).model_fields[key].default:
            raise ValueError(f"{key}: prepared files are used as they are; leave it out")


class CosmoDataset(Preprocessing):
    """N-body to hydrodynamics cubes."""

    kind: Literal["cosmo"]
    source: CosmoSimulated | CosmoFiles | CosmoPrepared = Field(discriminator="kind")
    transform: Literal["published", "none"] = Field(
        "published",
        description="published: densities ln(x)/14, velocities and temperature scaled to (-1, 1); none: as they are.",
    )

    @model_validator(mode="after")
    def _divides(self) -> CosmoDataset:
        if isinstance(self.source, CosmoSimulated) and self.source.grid % self.downsample:
            raise ValueError(f"downsample {self.downsample} does not divide source.grid {self.source.grid}")
        if isinstance(self.source, CosmoPrepared):
            _refuse_changed(self, "downsample", "storage", "pieces", "transform")
        return self


class Era5Simulated(Strict):
    """Years of a barotropic-vorticity atmosphere made by the built-in simulator, each its own trajectory."""

    kind: Literal["simulated"]
    latitudes: int = Field(32, ge=8)
    longitudes: int = Field(64, ge=16)
    days: PositiveInt | None = Field(None, le=366, description="Days a year; the whole year if absent.")
    train: list[Year] = Field(min_length=1)
    valid: list[Year] = Field(min_length=1)
    test: list[Year] = []
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _disjoint(self) -> Era5Simulated:
        years = [*self.train, *self.valid, *self.test]
        repeated = sorted({year for year in years if years.count(year) > 1})
        if repeated:
            raise ValueError(f"year {repeated[0]} stands twice: splits must be disjoint periods")
        return self


class Era5Files(Strict):
    """GRIB or NetCDF files (paths or http(s) URLs); together they hold all channels at all times."""

    kind: Literal["files"]
    paths: list[Path] = Field(min_length=1)
    sha256: dict[str, Sha256] = Field({}, description="Expected digests by file name (the part after the last '/').")

    @model_validator(mode="after")
    def _digests(self) -> Era5Files:
        _check_digests(self.sha256, self.paths)
        return self


class Era5Zarr(Strict):
    """Any Zarr store that xarray can open: a folder or a URL."""

    kind: Literal["zarr"]
    store: Path


class Era5Prepared(Strict):
    """The published layout used as it is: `train/`, `valid/`, `test/` with `YYYY.h5`, and `stats/*.npy`."""

    kind: Literal["prepared"]
    path: Path = Field(description="The folder that holds train/, valid/, test/ (optional) and stats/.")
    step_hours: PositiveInt = Field(6, description="Hours between the times in the files.")


class Periods(Strict):
    """First and last day (inclusive) of each split."""

    train: tuple[dt.date, dt.date]
    valid: tuple[dt.date, dt.date]
    test: tuple[dt.date, dt.date] | None = None

    @model_validator(mode="after")
    def _disjoint(self) -> Periods:
        periods = sorted((*period, split) for split in SPLITS if (period := getattr(self, split)))
        for first, last, split in periods:
            if last < first:
                raise ValueError(f"{split} ends ({last}) before it begins ({first})")
        for (_, last, one), (first, _, other) in itertools.pairwise(periods):
            if first <= last:
                raise ValueError(f"{one} and {other} overlap at {first}: splits must be disjoint periods")
        return self


class Era5Dataset(Preprocessing):
    """Pairs of atmospheric states."""

    kind: Literal["era5"]
    source: Era5Simulated | Era5Files | Era5Zarr | Era5Prepared = Field(discriminator="kind")
    channels: list[str] = Field(
        [], description="Variables in order, `name` or `name@level`; those of the simulator if absent."
    )
    split: Periods | None = Field(None, description="Days of each split (files and zarr).")
    step_hours: PositiveInt | None = Field(None, description="Keep times at this interval; all times if absent.")
    crop: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="Rows and columns kept from the north-west, before downsampling (published: 360, 720)."
    )

    @model_validator(mode="after")
    def _complete(self) -> Era5Dataset:
        if isinstance(self.source, Era5Files | Era5Zarr):
            if self.split is None:
                raise ValueError("split is missing: give the first and last day of train, valid (and test)")
            if not self.channels:
                raise ValueError("channels is missing: name at least one variable")
        elif self.split is not None:
            raise ValueError(f"split goes with source kinds files and zarr, not with {self.source.kind}")
        if isinstance(self.source, Era5Prepared):
            _refuse_changed(self, "downsample", "storage", "pieces", "step_hours")
        for key in ("channels", "chunk"):
            if getattr(self.storage, key) != Storage.model_fields[key].default:
                raise ValueError(f"storage.{key}: the times of a series are stored one after the other; leave it out")
        if len(set(self.channels)) != len(self.channels):
            raise ValueError("a channel stands twice in channels")
        return self


Dataset = Annotated[CosmoDataset | Era5Dataset, Field(discriminator="kind")]
