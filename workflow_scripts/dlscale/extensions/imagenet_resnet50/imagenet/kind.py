"""`imagenet`: images of any size in folders of classes, with the class as label. Settings, files, parts.

Each part is a *pack* of images, an HDF5 file that is used without preprocessing.
"""

from __future__ import annotations

import pathlib
from typing import Any, Literal

from pydantic import Field, model_validator

from dlscale.config.dataset import DatasetSettings, Path, Split, refuse_changed, refuse_shared
from dlscale.core import registry
from dlscale.core.schema import Extent, Files, PositiveFloat, PositiveInt, Seed, Strict
from dlscale.data.kind import DatasetKind, Outline, Part, RawFile

#: Splits of this kind of dataset.
PACKED: tuple[Split, ...] = ("train", "valid")


class ImageFolders(Strict):
    """Folders CLASS/*.jpg (jpeg, png, webp, …) of each split; a label is the index of its class in sorted order."""

    kind: Literal["folder"]
    train: Path = Field(description="Folder of the training part.")
    valid: Path = Field(description="Folder of the validation part.")

    @model_validator(mode="after")
    def _disjoint(self) -> ImageFolders:
        refuse_shared([self.train], [self.valid])
        return self


class SimulatedImages(Strict):
    """JPEGs of ten textures at random position, size and colour; a network can learn the classes."""

    kind: Literal["simulated"]
    train: PositiveInt = Field(2000, description="Number of images of the training part.")
    valid: PositiveInt = Field(500, description="Number of images of the validation part.")
    edges: tuple[Extent, Extent] = Field((72, 112), description="Smallest and largest edge, in pixels.")
    seed: Seed = Field(0, description="Seed of all images.")

    @model_validator(mode="after")
    def _edges(self) -> SimulatedImages:
        if not 16 <= self.edges[0] <= self.edges[1]:
            raise ValueError(f"edges {list(self.edges)}: expected [smallest, largest] in pixels, smallest at least 16")
        return self


class Shards(Strict):
    """Number of packs (files of images) per split, made in parallel."""

    train: Files = Field(1, description="Number of packs of the training part.")
    valid: Files = Field(1, description="Number of packs of the validation part.")


class ImagenetDataset(DatasetSettings):
    """Images of any size and their classes."""

    kind: Literal["imagenet"]
    source: SimulatedImages | ImageFolders = Field(discriminator="kind")
    form: Literal["encoded", "decoded"] = Field(
        "encoded",
        description="Stored form of the images. encoded: the bytes of the files, which loaders decode. decoded: "
        "pixels, which need no decoding but several times the space; a shorter edge above 256 is reduced to 256.",
    )
    shards: Shards = Shards()

    @model_validator(mode="after")
    def _as_it_is(self) -> ImagenetDataset:
        refuse_changed(self, "downsample", "storage", "pieces")
        return self


class ImageSamples(Strict):
    """Crops of images: random in size, shape and position for training, central for validation."""

    kind: Literal["images"]
    size: Extent = Field(224, description="Edge of the model's input, in pixels.")
    resize: Extent = Field(
        256,
        description="For validation, the shorter edge of an image is resized to this number of pixels, then the image "
        "is cropped.",
    )
    scale: tuple[PositiveFloat, PositiveFloat] = Field(
        (0.08, 1.0), description="Smallest and largest fraction of the image's area in a training crop."
    )
    train: PositiveInt | None = Field(
        None, description="Largest number of training samples per epoch. Absent: all samples."
    )
    valid: PositiveInt | None = Field(
        None,
        description="Largest number of validation samples, evenly spaced. Absent: all samples.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> ImageSamples:
        low, high = self.scale
        if not low <= high <= 1:
            raise ValueError(
                f"scale [{low:g}, {high:g}]: expected [smallest, largest], at most 1: a crop cannot exceed its image"
            )
        if self.resize < self.size:
            raise ValueError(
                f"resize {self.resize} is less than size {self.size}: the crop would exceed the image; increase resize"
            )
        return self


class Imagenet(DatasetKind):
    """The kind of dataset `imagenet`."""

    name = "imagenet"
    Settings = ImagenetDataset
    Samples = ImageSamples
    rows = "images"

    def parts(self, dataset: ImagenetDataset) -> list[Part]:
        """Return one part for each pack."""
        source, found = dataset.source, []
        for split in PACKED:
            origin = getattr(source, split) if isinstance(source, ImageFolders) else "simulated"
            for shard in range(getattr(dataset.shards, split)):
                name = f"{split}-{shard:04d}"
                found.append(Part(split, name, (RawFile(f"{name}.h5", origin, shard),)))
        return found

    def acquirer(self, dataset: ImagenetDataset) -> str | None:
        return "simulator" if isinstance(dataset.source, SimulatedImages) else "folder"

    def prepared(self, dataset: ImagenetDataset) -> bool:
        """Return True: packs need no preprocessing."""
        return True

    def prepared_files(self, dataset: ImagenetDataset) -> list[str]:
        return self.origins(dataset)

    def raw_settings(self, dataset: ImagenetDataset, raw: RawFile) -> dict[str, Any]:
        """Return the settings on which the content of a pack depends, without settings of the other split."""
        split = raw.name.partition("-")[0]
        source = dataset.source.model_dump(mode="json", exclude=set[str](PACKED))
        images, shards = getattr(dataset.source, split), getattr(dataset.shards, split)
        return {**source, "form": dataset.form, "name": raw.name, "images": images, "shards": shards}

    def outline(self, dataset: ImagenetDataset) -> Outline | None:
        source = dataset.source
        if not isinstance(source, SimulatedImages):
            return None
        rows: dict[Split, list[int]] = {}
        for split in PACKED:
            shards = getattr(dataset.shards, split)
            rows[split] = [len(range(shard, getattr(source, split), shards)) for shard in range(shards)]
        numbers = 3 * (sum(source.edges) // 2) ** 2 * (source.train + source.valid)  # for images of the mean size
        return Outline({"labels": (1, ())}, rows, numbers, {"labels": 10})

    def look(self, dataset: ImagenetDataset, raw: RawFile, made: pathlib.Path) -> str | None:
        """Return a digest of the names, sizes and times of a pack's images; None for simulated images.

        If the folder of images is missing, return the digest in the existing pack.
        """
        source = dataset.source
        if not isinstance(source, ImageFolders):
            return None
        folder = registry.load(
            "dlscale.extensions.imagenet_resnet50.imagenet.folder"
        )  # loaded by name, so that fingerprints of stages omit this module: no stage calls `look`
        digest: str | None
        if pathlib.Path(raw.origin).exists():
            if pathlib.Path(source.train).exists() and pathlib.Path(source.valid).exists():
                folder.check_classes(source.train, source.valid)
            digest = folder.shard_digests(raw.origin, getattr(dataset.shards, raw.name.partition("-")[0]))[raw.index]
        else:  # if the pack is missing as well, the stage reports the missing folder
            digest = folder.packed(made)
        return digest


KIND = Imagenet()
