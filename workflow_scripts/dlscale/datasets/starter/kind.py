"""Kind of dataset `starter`: samples with an input and a target, simulated or from a user's arrays."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field, model_validator

from dlscale.config.dataset import SPLITS, DatasetSettings, Path, refuse_changed
from dlscale.core.schema import Extent, NonNegativeInt, PositiveInt, Seed, Strict
from dlscale.data.kind import DatasetKind, Outline, Paired, Part, file_name

HDF5 = (".h5", ".hdf5")
#: Suffixes of all files that arrays are read from.
SUFFIXES = (".npy", ".npz", *HDF5)


class Simulated(Strict):
    """Square images: smooth random fields with a learnable target, or pure noise."""

    kind: Literal["simulated"]
    train: PositiveInt = Field(128, description="Samples of the training part.")
    valid: PositiveInt = Field(32, description="Samples of the validation part.")
    test: NonNegativeInt = Field(0, description="Samples of the test part.")
    size: Extent = Field(128, ge=2, description="Pixels along an edge.")
    target: Literal["gradient", "noise"] = Field(
        "gradient",
        description="Target of a sample. gradient: steepness of the field at each pixel. noise: input and target are "
        "independent random numbers from 0 to 1, as in nersc-dl-multigpu, so nothing can be learnt.",
    )
    seed: Seed = Field(0, description="Seed of all samples.")


class Array(Strict):
    """Description of the array of inputs or of targets."""

    array: str | None = Field(
        None, min_length=1, description="Name of the array in .npz and HDF5 files. Absent: `input` or `target`."
    )
    channels: list[str] = Field([], description="Names of the channels. Absent: `input` or `target`, with numbers.")
    channel_axis: Literal["none", "first", "last", "new"] | None = Field(
        None,
        description="Channel axis of a sample. none: no channels. first, last: position of the channel axis in a "
        "sample. new: a sample is one channel, and an axis is added. Required if the shape does not show the axis.",
    )
    unit: str = Field("1", description="Unit of the values; `1` for a number without a unit.")


class ArrayFiles(Strict):
    """Files with the inputs and the targets of one split: .npy, .npz or HDF5; one file may hold both."""

    input: Path = Field(description="File of the inputs.")
    target: Path = Field(description="File of the targets.")

    @model_validator(mode="after")
    def _known(self) -> ArrayFiles:
        for key in ("input", "target"):
            path = getattr(self, key)
            if PurePosixPath(file_name(path)).suffix not in SUFFIXES:
                raise ValueError(f"{key}: {path}: expected a file of one of the types {', '.join(SUFFIXES)}")
        return self


class Arrays(Paired[ArrayFiles]):
    """Arrays with one sample per row, in files (paths or http(s) URLs): for each split, or `all`, divided by `shares`.

    By default, numbers [N] and vectors [N, K] have no channels, and up to 4 channels of images [N, C, H, W] are
    detected. Samples of other shapes need `channel_axis`, or `channels` with a name for each channel along the first
    axis of a sample. Models get channels first.
    """

    kind: Literal["arrays"]
    input: Array = Field(Array(), description="The array of inputs.")
    target: Array = Field(Array(), description="The array of targets.")


class StarterDataset(DatasetSettings):
    """Inputs and targets, stored unchanged."""

    kind: Literal["starter"]
    source: Simulated | Arrays = Field(discriminator="kind")

    @model_validator(mode="after")
    def _as_it_is(self) -> StarterDataset:
        refuse_changed(self, "downsample")
        return self


class Starter(DatasetKind):
    """The kind of dataset `starter`."""

    name = "starter"
    Settings = StarterDataset
    selection = frozenset({*SPLITS, "all", "shares", "input", "target"})

    def parts(self, dataset: StarterDataset) -> list[Part]:
        """Return one part for each split; for arrays, the first raw file has the inputs."""
        source = dataset.source
        if isinstance(source, Simulated):
            return [Part(split, split) for split in SPLITS if getattr(source, split)]
        return source.parts()

    def outline(self, dataset: StarterDataset) -> Outline | None:
        source = dataset.source
        if not isinstance(source, Simulated):
            return None
        rows = {split: [count] for split in SPLITS if (count := getattr(source, split))}
        image = (1, (source.size, source.size))
        return Outline({"input": image, "target": image}, rows, 2 * source.size**2 * sum(map(sum, rows.values())))

    def part_settings(self, dataset: StarterDataset, part: Part) -> dict[str, Any]:
        """Return the settings of a part: the number of simulated samples, or the arrays that are read."""
        source, settings = dataset.source, super().part_settings(dataset, part)
        if isinstance(source, Simulated):
            common = source.model_dump(mode="json", exclude={"train", "valid", "test"})
            own = {**common, "count": getattr(source, part.split)}
        else:
            own = {**source.model_dump(mode="json", include={"input", "target"}), "files": [r.name for r in part.raws]}
        return {**settings, "source": own}


KIND = Starter()
