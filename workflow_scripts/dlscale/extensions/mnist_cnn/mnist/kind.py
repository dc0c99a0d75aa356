"""`mnist`: images of digits with their labels. Settings, files, parts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from dlscale.config.dataset import SPLITS, DatasetSettings, Path, refuse_changed
from dlscale.core.schema import NonNegativeInt, PositiveInt, Seed, Strict
from dlscale.data.kind import DatasetKind, Outline, Paired, Part, RawFile


class IdxFiles(Strict):
    """Two IDX files that belong together: images uint8 [N, H, W] and labels uint8 [N]; gzipped or not."""

    images: Path = Field(description="File of the images.")
    labels: Path = Field(description="File of the labels.")


class MnistFiles(Paired[IdxFiles]):
    """IDX files as paths or http(s) URLs: one pair per split, or the pair `all`, divided by `shares`."""

    kind: Literal["files"]


class MnistSimulated(Strict):
    """Digits as on a pocket calculator, shifted, slanted and blurred at random; a network can learn them."""

    kind: Literal["simulated"]
    train: PositiveInt = Field(2000, description="Number of digits of the training part.")
    valid: PositiveInt = Field(500, description="Number of digits of the validation part.")
    test: NonNegativeInt = Field(0, description="Number of digits of the test part.")
    seed: Seed = Field(0, description="Seed of all digits.")


class MnistDataset(DatasetSettings):
    """Images of digits, stored unchanged."""

    kind: Literal["mnist"]
    source: MnistSimulated | MnistFiles = Field(discriminator="kind")

    @model_validator(mode="after")
    def _as_it_is(self) -> MnistDataset:
        refuse_changed(self, "downsample", "storage")
        return self


class Mnist(DatasetKind):
    """The kind of dataset `mnist`."""

    name = "mnist"
    Settings = MnistDataset
    selection = frozenset({*SPLITS, "all", "shares"})

    def parts(self, dataset: MnistDataset) -> list[Part]:
        """Return one part for each split."""
        source = dataset.source
        if isinstance(source, MnistSimulated):
            splits = [(n, split) for n, split in enumerate(SPLITS) if getattr(source, split)]
            raws = {
                n: [RawFile(f"{split}-{kind}.idx", "simulated", n) for kind in IdxFiles.model_fields]
                for n, split in splits
            }
            return [Part(split, split, tuple(raws[n])) for n, split in splits]
        return source.parts()

    def acquirer(self, dataset: MnistDataset) -> str | None:
        return "simulator" if isinstance(dataset.source, MnistSimulated) else None

    def outline(self, dataset: MnistDataset) -> Outline | None:
        if not isinstance(dataset.source, MnistSimulated):
            return None
        rows = {split: [count] for split in SPLITS if (count := getattr(dataset.source, split))}
        fields = {"images": (1, (28, 28)), "labels": (1, ())}
        return Outline(fields, rows, (28**2 + 1) * sum(map(sum, rows.values())), {"labels": 10})

    def raw_settings(self, dataset: MnistDataset, raw: RawFile) -> dict[str, Any]:
        simulated = isinstance(dataset.source, MnistSimulated)
        count = getattr(dataset.source, SPLITS[raw.index]) if simulated else None
        return {**super().raw_settings(dataset, raw), "name": raw.name, "count": count}


KIND = Mnist()
