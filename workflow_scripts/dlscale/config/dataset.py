"""What all datasets have in common. Each kind brings the settings of its own: `dlscale/datasets/KIND/kind.py`."""

from __future__ import annotations

import itertools
import os
import pathlib
import posixpath
from collections import Counter
from typing import Annotated, Any, Literal, Union
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from dlscale.core import registry
from dlscale.core.errors import nearest
from dlscale.core.schema import Extent, Files, Strict

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Written(str):
    """A text in a file of settings, with the folder of that file."""

    folder: pathlib.Path


def seen(text: Any) -> Any:
    """Return a path that counts from the folder it was written in as it is called here; any other value as it is.

    It is a path from the working folder, if it leads there, and else absolute.
    """
    here = pathlib.Path.cwd()
    if not isinstance(text, Written) or text.folder == here or "://" in text or text.startswith("~") or not text:
        return text
    path = pathlib.Path(os.path.normpath(text.folder / text))
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


#: A file, a folder or a URL.
Path = Annotated[str, BeforeValidator(seen), StringConstraints(min_length=1)]


class Storage(Strict):
    """How preprocessed fields are stored on disk; prepared files stay as they are."""

    dtype: Literal["float32", "float16"] = Field(
        "float32",
        description="float16 stores (x - offset) / scale per channel; the greatest error is measured and recorded.",
    )
    chunk: Extent | None = Field(
        32,
        description="Edge of an HDF5 chunk in cells (volumes: a cube with all channels; null: none, rows of the whole "
        "volume; rows lie one after the other).",
    )
    channels: Literal["first", "last"] = Field(
        "first",
        description="first: [C, D, H, W], the published layout; last: [D, H, W, C], whose rows are C times longer and "
        "which loaders read faster (volumes only).",
    )


class Shares(Strict):
    """Shares of the rows of each file, cut in this order."""

    train: float = Field(gt=0, lt=1, description="Share of the training part.")
    valid: float = Field(gt=0, lt=1, description="Share of the validation part.")
    test: float = Field(0, ge=0, lt=1, description="Share of the test part.")

    @model_validator(mode="after")
    def _sum(self) -> Shares:
        if self.train + self.valid + self.test > 1 + 1e-9:
            raise ValueError(f"the shares add up to {self.train + self.valid + self.test:g}, expected at most 1")
        return self

    def ranges(self) -> list[tuple[Split, tuple[float, float]]]:
        """Return the splits that get anything, each with its share (from, to)."""
        cuts = itertools.pairwise([0.0, *itertools.accumulate(getattr(self, split) for split in SPLITS)])
        return [(split, cut) for split, cut in zip(SPLITS, cuts, strict=True) if cut[1] > cut[0]]


class DatasetSettings(Strict):
    """Keys that every dataset has. A kind's own settings add `kind`, a Literal, and their `source`."""

    kind: str
    source: Any = None

    downsample: Extent = Field(1, description="Average blocks of so many cells along each axis; not of prepared files.")
    storage: Storage = Storage()
    pieces: Files = Field(1, description="Each file is preprocessed in this many independent, parallel pieces.")


def check_digests(sha256: dict[str, str], origins: list[str]) -> None:
    """Refuse a digest of a file that is not fetched."""
    fetched = {urlsplit(origin).path.rsplit("/", 1)[-1] for origin in origins if origin.startswith(("http:", "https:"))}
    if wrong := [name for name in sha256 if name not in fetched]:
        raise ValueError(
            f"sha256: no file called '{wrong[0]}' is fetched{nearest(wrong[0], fetched)}; digests are of URLs, by the "
            "part after the last '/'"
        )


def refuse_shared(*splits: list[str]) -> None:
    """Refuse a file that stands in two splits."""
    files = [file if "://" in file else posixpath.normpath(file) for split in splits for file in split]
    if repeated := sorted(file for file, times in Counter(files).items() if times > 1):
        raise ValueError(f"'{repeated[0]}' stands in two splits: validation would see training data")


def refuse_changed(dataset: DatasetSettings, *keys: str) -> None:
    """Refuse keys that decide how files are prepared, of prepared ones."""
    for key in keys:
        if getattr(dataset, key) != type(dataset).model_fields[key].default:
            raise ValueError(f"{key}: prepared files are used as they are; leave it out")


def dataset_type() -> Any:
    """Return the union of the settings of all kinds of datasets that are registered now."""
    known: Any = tuple(registry.kind(name).Settings for name in registry.kinds())
    return Annotated[Union[known], Field(discriminator="kind")]  # noqa: UP007
