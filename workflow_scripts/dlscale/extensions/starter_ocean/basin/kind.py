"""Kind of dataset `basin`: settings and parts. A sample has several arrays, which are fields of the files."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dlscale.config.dataset import SPLITS, DatasetSettings
from dlscale.core.schema import Extent, NonNegativeInt, PositiveInt, Seed, Strict
from dlscale.data.kind import DatasetKind, Outline, Part


class BasinSource(Strict):
    """Simulated square basins with coasts."""

    kind: Literal["simulated"]
    train: PositiveInt = Field(512, description="Samples of the training part.")
    valid: PositiveInt = Field(128, description="Samples of the validation part.")
    test: NonNegativeInt = Field(0, description="Samples of the test part.")
    size: Extent = Field(16, ge=4, description="Cells along an edge.")
    seed: Seed = Field(0, description="Seed of all samples.")


class BasinDataset(DatasetSettings):
    """Simulated basins."""

    kind: Literal["basin"]
    source: BasinSource


class Basin(DatasetKind):
    """The kind of dataset `basin`; its samples are rows, the default."""

    name, Settings = "basin", BasinDataset

    def parts(self, dataset: BasinDataset) -> list[Part]:
        """Return one part for each split."""
        return [Part(split, split) for split in SPLITS if getattr(dataset.source, split)]

    def outline(self, dataset: BasinDataset) -> Outline:
        source = dataset.source
        grid = (source.size, source.size)
        rows = {split: [count] for split in SPLITS if (count := getattr(source, split))}
        fields = {"before": (1, grid), "after": (1, grid), "sea": (1, grid), "mixing": (1, ())}
        return Outline(fields, rows, (3 * source.size**2 + 1) * sum(map(sum, rows.values())))

    def part_settings(self, dataset: BasinDataset, part: Part) -> dict[str, Any]:
        """Return the settings of a part, without the sizes of the other parts."""
        own = dataset.source.model_dump(mode="json", include={"size", "seed"})
        return {**super().part_settings(dataset, part), "source": own, "count": getattr(dataset.source, part.split)}


KIND = Basin()
