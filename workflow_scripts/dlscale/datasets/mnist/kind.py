"""`mnist`: images of digits with their labels. Settings, files, parts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from dlscale.config.dataset import SPLITS, DatasetSettings, Path, Sha256, Shares, Split, check_digests, refuse_changed
from dlscale.core.schema import NonNegativeInt, PositiveInt, Seed, Strict
from dlscale.data.kind import DatasetKind, Outline, Part, RawFile, name_files

#: Pixels along an edge of a simulated digit.
EDGE = 28
#: Classes.
DIGITS = 10


class IdxFiles(Strict):
    """Two IDX files that belong together: images uint8 [N, H, W] and labels uint8 [N]; gzipped or not."""

    images: Path = Field(description="File of the images.")
    labels: Path = Field(description="File of the labels.")


class MnistFiles(Strict):
    """IDX files, as paths or http(s) URLs: those of each split, or `all` with `shares` of them."""

    kind: Literal["files"]
    train: IdxFiles | None = Field(None, description="Files of the training part.")
    valid: IdxFiles | None = Field(None, description="Files of the validation part.")
    test: IdxFiles | None = Field(None, description="Files of the test part.")
    all: IdxFiles | None = Field(None, description="Files of all parts, of which shares says which rows each has.")
    shares: Shares | None = Field(None, description="Of all: the share of each part.")
    sha256: dict[str, Sha256] = Field({}, description="Expected digests by file name (the part after the last '/').")

    @model_validator(mode="after")
    def _one_form(self) -> MnistFiles:
        by_split = self.train is not None and self.valid is not None
        by_share = self.all is not None and self.shares is not None
        if by_split == by_share or (by_share and (self.train or self.valid or self.test)):
            raise ValueError("give either train and valid (and test), or all with shares")
        origins = [
            origin for files in (self.train, self.valid, self.test, self.all) if files for origin in _both(files)
        ]
        repeated = sorted({origin for origin in origins if origins.count(origin) > 1})
        if repeated:
            raise ValueError(f"'{repeated[0]}' stands twice: each split has images and labels of its own")
        check_digests(self.sha256, origins)
        return self


class MnistSimulated(Strict):
    """Digits as a pocket calculator shows them, shifted, slanted and blurred at random: they can be learnt."""

    kind: Literal["simulated"]
    train: PositiveInt = Field(2000, description="Digits of the training part.")
    valid: PositiveInt = Field(500, description="Digits of the validation part.")
    test: NonNegativeInt = Field(0, description="Digits of the test part.")
    seed: Seed = Field(0, description="Of all digits.")


class MnistDataset(DatasetSettings):
    """Images of digits, stored as they are."""

    kind: Literal["mnist"]
    source: MnistSimulated | MnistFiles = Field(discriminator="kind")

    @model_validator(mode="after")
    def _as_it_is(self) -> MnistDataset:
        refuse_changed(self, "downsample", "storage")
        return self


class Mnist(DatasetKind):
    """See the module."""

    name = "mnist"
    Settings = MnistDataset
    selection = frozenset({*SPLITS, "all", "shares"})

    def parts(self, dataset: MnistDataset) -> list[Part]:
        """One part for each split."""
        source = dataset.source
        if isinstance(source, MnistSimulated):
            return [
                Part(
                    split,
                    split,
                    tuple(RawFile(f"{split}-{what}.idx", "simulated", n) for what in IdxFiles.model_fields),
                )
                for n, split in enumerate(SPLITS)
                if getattr(source, split)
            ]
        splits: dict[Split, IdxFiles] = {split: files for split in SPLITS if (files := getattr(source, split))}
        named = name_files([origin for files in [source.all, *splits.values()] if files for origin in _both(files)])
        if source.all is None or source.shares is None:
            return [Part(split, split, tuple(named[o] for o in _both(files))) for split, files in splits.items()]
        raws = tuple(named[origin] for origin in _both(source.all))
        return [Part(split, split, raws, fraction=share) for split, share in source.shares.ranges()]

    def acquirer(self, dataset: MnistDataset) -> str | None:
        return "simulator" if isinstance(dataset.source, MnistSimulated) else None

    def outline(self, dataset: MnistDataset) -> Outline | None:
        if not isinstance(dataset.source, MnistSimulated):
            return None
        rows = {split: [count] for split in SPLITS if (count := getattr(dataset.source, split))}
        fields = {"images": (1, (EDGE, EDGE)), "labels": (1, ())}
        return Outline(fields, rows, (EDGE**2 + 1) * sum(map(sum, rows.values())), {"labels": DIGITS})

    def raw_settings(self, dataset: MnistDataset, raw: RawFile) -> dict[str, Any]:
        simulated = isinstance(dataset.source, MnistSimulated)
        count = getattr(dataset.source, SPLITS[raw.index]) if simulated else None
        return {**super().raw_settings(dataset, raw), "name": raw.name, "count": count}


def _both(files: IdxFiles) -> tuple[str, str]:
    return files.images, files.labels


KIND = Mnist()
