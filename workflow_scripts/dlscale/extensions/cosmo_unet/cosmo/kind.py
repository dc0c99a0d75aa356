"""`cosmo`: N-body and hydrodynamics volumes. Settings, files, parts."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dlscale.config.dataset import (
    SPLITS,
    DatasetSettings,
    Path,
    Sha256,
    Shares,
    check_digests,
    refuse_changed,
    refuse_shared,
)
from dlscale.core.schema import Extent, Files, NonNegativeInt, PositiveFloat, PositiveInt, Seed, Strict
from dlscale.data.kind import DatasetKind, Outline, Part, RawFile, name_files, stem

#: Number of channels of each volume.
CHANNELS = {"Nbody": 4, "Hydro": 5}


class Counts(Strict):
    """Number of independent simulated boxes of each split."""

    train: Files = Field(2, description="Number of boxes of the training part.")
    valid: Files = Field(1, description="Number of boxes of the validation part.")
    test: int = Field(0, ge=0, le=10_000, description="Number of boxes of the test part.")


class Fractions(Shares):
    """Fractions of each file's rows (planes along D) in the order train, valid, test; each cut drops `gap` rows."""

    gap: NonNegativeInt = Field(0, description="Rows (after downsampling) dropped between two splits, against leakage.")


class CosmoSimulated(Strict):
    """Boxes made by the built-in simulator, one independent realisation each."""

    kind: Literal["simulated"]
    grid: Annotated[Extent, Field(le=4_096)] = Field(
        128, ge=16, multiple_of=2, description="Cells and particles along an edge of a box."
    )
    box_mpc_h: PositiveFloat = Field(64.0, description="Edge of a box in Mpc/h (comoving).")
    boxes: Counts = Field(Counts(), description="Number of boxes of each split.")
    seed: Seed = Field(0, description="Seed of all boxes.")


class CosmoFiles(Strict):
    """HDF5 files with `Nbody` [4, D, H, W] and `Hydro` [5, D, H, W] in physical units; paths or http(s) URLs.

    Give either files per split, or `paths` with `fractions` of each file.
    """

    kind: Literal["files"]
    train: list[Path] = Field([], description="Files of the training part.")
    valid: list[Path] = Field([], description="Files of the validation part.")
    test: list[Path] = Field([], description="Files of the test part.")
    paths: list[Path] = Field([], description="Files that `fractions` divides among train, valid and test.")
    fractions: Fractions | None = Field(
        None, description="Fractions of each file in `paths` for train, valid and test."
    )
    sha256: dict[str, Sha256] = Field({}, description="Expected digests by file name (the part after the last '/').")

    @model_validator(mode="after")
    def _one_form(self) -> CosmoFiles:
        by_split = self.train and self.valid and not (self.paths or self.fractions)
        by_fraction = self.paths and self.fractions and not (self.train or self.valid or self.test)
        if not (by_split or by_fraction):
            raise ValueError("give either files per split (train, valid, optionally test) or paths with fractions")
        refuse_shared(self.train, self.valid, self.test)
        check_digests(self.sha256, [*self.train, *self.valid, *self.test, *self.paths])
        return self


class CosmoPrepared(Strict):
    """HDF5 files in the published layout (`Nbody`, `Hydro`, already transformed), used unchanged."""

    kind: Literal["prepared"]
    train: list[Path] = Field(min_length=1, description="Files of the training part.")
    valid: list[Path] = Field(min_length=1, description="Files of the validation part.")
    test: list[Path] = Field([], description="Files of the test part.")
    sha256: dict[str, Sha256] = Field({}, description="Expected digests by file name (the part after the last '/').")

    @model_validator(mode="after")
    def _disjoint(self) -> CosmoPrepared:
        refuse_shared(self.train, self.valid, self.test)
        check_digests(self.sha256, [*self.train, *self.valid, *self.test])
        return self


class CosmoDataset(DatasetSettings):
    """Cubes of dark matter and gas."""

    kind: Literal["cosmo"]
    source: CosmoSimulated | CosmoFiles | CosmoPrepared = Field(discriminator="kind")

    @model_validator(mode="after")
    def _divides(self) -> CosmoDataset:
        if isinstance(self.source, CosmoSimulated) and self.source.grid % self.downsample:
            raise ValueError(f"downsample {self.downsample} does not divide source.grid {self.source.grid}")
        if isinstance(self.source, CosmoPrepared):
            refuse_changed(self, "downsample", "storage", "pieces")
        return self


class CropSamples(Strict):
    """Random crops of volumes."""

    kind: Literal["crops"]
    crop: Extent = Field(64, description="Edge of a crop, cells.")
    symmetry: Literal["none", "rotations", "full", "published", "published_dali"] = Field(
        "full",
        description="Random symmetries of training crops. none: no symmetry. rotations: the 24 rotations. full: the 48 "
        "rotations and reflections. published: 16 rotations and 8 reflections, as in SC22's program. published_dali: "
        "each of the last two axes is reversed or not, as in SC22's DALI loader. `rotations` and `full` turn vectors "
        "with the grid; `published` and `published_dali` do not.",
    )
    train: PositiveInt = Field(65536, description="Samples in a training epoch.")
    valid: PositiveInt = Field(
        8192, description="Number of fixed validation crops, and of test crops (fewer if the volumes contain fewer)."
    )


class Cosmo(DatasetKind):
    """The kind of dataset `cosmo`."""

    name = "cosmo"
    Settings = CosmoDataset
    Samples = CropSamples
    rows = "planes"
    selection = frozenset({*SPLITS, "boxes", "paths", "fractions"})

    def parts(self, dataset: CosmoDataset) -> list[Part]:
        """Return one part for each box, or for each file and split."""
        source = dataset.source
        if isinstance(source, CosmoSimulated):
            numbers = itertools.count()
            boxes = [(split, next(numbers)) for split in SPLITS for _ in range(getattr(source.boxes, split))]
            return [Part(split, f"box{n:03d}", (RawFile(f"box{n:03d}.h5", "simulated", n),)) for split, n in boxes]
        if isinstance(source, CosmoPrepared) or not source.paths:
            files = [(split, origin) for split in SPLITS for origin in getattr(source, split)]
            named = name_files([origin for _, origin in files])
            return [Part(split, stem(named[origin]), (named[origin],)) for split, origin in files]
        assert source.fractions is not None
        raws = name_files(source.paths).values()
        return [
            Part(split, stem(raw), (raw,), fraction=share) for split, share in source.fractions.ranges() for raw in raws
        ]

    def acquirer(self, dataset: CosmoDataset) -> str | None:
        return "simulator" if isinstance(dataset.source, CosmoSimulated) else None

    def part_settings(self, dataset: CosmoDataset, part: Part) -> dict[str, Any]:
        return {**super().part_settings(dataset, part), "gap": gap(dataset)}

    def grid(self, dataset: CosmoDataset) -> tuple[int, ...] | None:
        # The grid of files is known only after the files have been read.
        source = dataset.source
        return (source.grid // dataset.downsample,) * 3 if isinstance(source, CosmoSimulated) else None

    def outline(self, dataset: CosmoDataset) -> Outline | None:
        source = dataset.source
        if not isinstance(source, CosmoSimulated):
            return None
        edge = source.grid // dataset.downsample
        rows = {split: [edge] * getattr(source.boxes, split) for split in SPLITS}
        values = sum(map(len, rows.values())) * sum(CHANNELS.values()) * source.grid**3
        return Outline({name: (count, (edge,) * 3) for name, count in CHANNELS.items()}, rows, values)

    def available(self, samples: CropSamples, rows: list[int]) -> int | None:
        return None  # training draws any number of crops; for validation, the number also depends on the grid


def gap(dataset: CosmoDataset) -> int:
    """Return the number of rows dropped between two splits of a file."""
    fractions = getattr(dataset.source, "fractions", None)
    return fractions.gap if fractions else 0


KIND = Cosmo()
