"""`imagenet`: images of any size in folders of classes, with the class as label. Settings, files, parts.

Files of any size are no rows of one array. So the acquire stage packs them: each part is a *pack* of images, one HDF5
file, which is read as it is (see `dlscale.datasets.imagenet.pack`).
"""

from __future__ import annotations

import pathlib
from typing import Any, Literal

from pydantic import Field, model_validator

from dlscale.config.dataset import DatasetSettings, Path, Split, refuse_changed, refuse_shared
from dlscale.core import registry
from dlscale.core.schema import Extent, Files, PositiveFloat, PositiveInt, Seed, Strict
from dlscale.data.kind import DatasetKind, Outline, Part, RawFile

#: Splits that there are.
PACKED: tuple[Split, ...] = ("train", "valid")
#: Classes of simulated images.
TEXTURES = 10


class ImageFolders(Strict):
    """Folders CLASS/*.jpg (jpeg, png) of each split; the labels are the classes' places in sorted order."""

    kind: Literal["folder"]
    train: Path = Field(description="Folder of the training part.")
    valid: Path = Field(description="Folder of the validation part.")
    watch: bool = Field(
        True,
        description="Pack again what has changed: every call of the workflow looks at names, sizes and times of all "
        "files, a million in seconds. false: where that is slow. Packs of a folder that is gone stay as they are.",
    )

    @model_validator(mode="after")
    def _disjoint(self) -> ImageFolders:
        refuse_shared([self.train], [self.valid])
        return self


class SimulatedImages(Strict):
    """JPEGs of ten textures at random place, size and colour: classes that can be learnt."""

    kind: Literal["simulated"]
    train: PositiveInt = Field(2000, description="Images of the training part.")
    valid: PositiveInt = Field(500, description="Images of the validation part.")
    edges: tuple[Extent, Extent] = Field((72, 112), description="Least and greatest edge, in pixels.")
    seed: Seed = Field(0, description="Of all images.")

    @model_validator(mode="after")
    def _edges(self) -> SimulatedImages:
        if not 16 <= self.edges[0] <= self.edges[1]:
            raise ValueError(f"edges {list(self.edges)}: the least, at least 16, comes first")
        return self


class Shards(Strict):
    """Into how many packs each split goes; they are made in parallel."""

    train: Files = Field(1, description="Packs of the training part.")
    valid: Files = Field(1, description="Packs of the validation part.")


class ImagenetDataset(DatasetSettings):
    """Images of any size and their classes."""

    kind: Literal["imagenet"]
    source: SimulatedImages | ImageFolders = Field(discriminator="kind")
    form: Literal["encoded", "decoded"] = Field(
        "encoded",
        description="encoded: the files' own bytes, which loaders decode; decoded: pixels, reduced to `edge`: several "
        "times the bytes, and no decoding.",
    )
    edge: Extent = Field(256, description="Of decoded: the shorter edge of what is larger, in pixels.")
    shards: Shards = Shards()

    @model_validator(mode="after")
    def _as_it_is(self) -> ImagenetDataset:
        refuse_changed(self, "downsample", "storage", "pieces")
        return self


class ImageSamples(Strict):
    """Crops of images: at random in size, shape and place for training, the middle for validation."""

    kind: Literal["images"]
    size: Extent = Field(224, description="Edge of what the model is given, in pixels.")
    resize: Extent = Field(256, description="Validation: the shorter edge is resized to this, then cropped.")
    scale: tuple[PositiveFloat, PositiveFloat] = Field(
        (0.08, 1.0), description="Least and greatest share of the image's area in a training crop."
    )
    ratio: tuple[PositiveFloat, PositiveFloat] = Field(
        (3 / 4, 4 / 3), description="Least and greatest width of a training crop by its height."
    )
    flip: float = Field(0.5, ge=0, le=1, description="Share of the training crops that are mirrored, left to right.")
    train: PositiveInt | None = Field(None, description="At most this many training samples an epoch; all if absent.")
    valid: PositiveInt | None = Field(None, description="At most this many, evenly spaced; all if absent.")

    @model_validator(mode="after")
    def _ordered(self) -> ImageSamples:
        for key in ("scale", "ratio"):
            low, high = getattr(self, key)
            if low > high or (key == "scale" and high > 1):
                raise ValueError(f"{key} [{low:g}, {high:g}]: the least comes first, and no crop exceeds its image")
        if self.resize < self.size:
            raise ValueError(f"resize {self.resize} is less than size {self.size}: the crop would exceed the image")
        return self


class Imagenet(DatasetKind):
    """See the module."""

    name = "imagenet"
    Settings = ImagenetDataset
    Samples = ImageSamples
    rows = "images"

    def parts(self, dataset: ImagenetDataset) -> list[Part]:
        """One part for each pack."""
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
        """Packs are used as they are."""
        return True

    def prepared_files(self, dataset: ImagenetDataset) -> list[str]:
        return self.origins(dataset)

    def raw_settings(self, dataset: ImagenetDataset, raw: RawFile) -> dict[str, Any]:
        """Return what decides the content of a pack, the other split left out."""
        split = raw.name.partition("-")[0]
        left_out = {*PACKED, "watch"}
        source = {key: value for key, value in dataset.source.model_dump(mode="json").items() if key not in left_out}
        images, shards = getattr(dataset.source, split), getattr(dataset.shards, split)
        form = {"form": dataset.form, **({"edge": dataset.edge} if dataset.form == "decoded" else {})}
        return {**source, **form, "name": raw.name, "images": images, "shards": shards}

    def outline(self, dataset: ImagenetDataset) -> Outline | None:
        source = dataset.source
        if not isinstance(source, SimulatedImages):
            return None
        rows: dict[Split, list[int]] = {}
        for split in PACKED:
            shards = getattr(dataset.shards, split)
            rows[split] = [len(range(shard, getattr(source, split), shards)) for shard in range(shards)]
        numbers = 3 * (sum(source.edges) // 2) ** 2 * (source.train + source.valid)  # of images of the middle size
        return Outline({"labels": (1, ())}, rows, numbers, {"labels": TEXTURES})

    def look(self, dataset: ImagenetDataset, raw: RawFile, made: pathlib.Path) -> str | None:
        """Return a digest of how a pack's images look: names, sizes, times."""
        if not (isinstance(dataset.source, ImageFolders) and dataset.source.watch):
            return None
        listing = registry.load("dlscale.datasets.imagenet.listing")  # in no fingerprint: no stage looks
        found: str | None
        if pathlib.Path(raw.origin).exists():
            found = listing.looks(raw.origin, getattr(dataset.shards, raw.name.partition("-")[0]))[raw.index]
        else:  # which the stage will meet, and say, if there is no pack
            found = listing.packed(made)
        return found


KIND = Imagenet()
