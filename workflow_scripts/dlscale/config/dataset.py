"""Settings that all datasets have in common; a kind's module `kind.py` adds the settings of the kind."""

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
    """String from a settings file, with the folder of that file."""

    folder: pathlib.Path


def seen(text: Any) -> Any:
    """Convert a path relative to its settings file into a path relative to the working folder.

    A path outside of the working folder becomes absolute. URLs, paths with `~` and values that are not from a settings
    file do not change.
    """
    here = pathlib.Path.cwd()
    if not isinstance(text, Written) or text.folder == here or "://" in text or text.startswith("~") or not text:
        return text
    path = pathlib.Path(os.path.normpath(text.folder / text))
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


#: Path of a file or folder, or a URL.
Path = Annotated[str, BeforeValidator(seen), StringConstraints(min_length=1)]


class Storage(Strict):
    """Storage of preprocessed fields on disk (not for prepared files, and only for kinds that preprocess fields)."""

    dtype: Literal["float32", "float16"] = Field(
        "float32",
        description="Number format of floating-point values on disk. float16: store (x - offset) / scale, with an "
        "offset and a scale per channel, and record the measured maximum error.",
    )
    chunk: Extent | None = Field(
        32,
        description="Only for volumes: edge length of an HDF5 chunk, cells. A chunk is a cube with all channels. null: "
        "no chunks; the rows of the volume are stored one after the other.",
    )
    channels: Literal["first", "last"] = Field(
        "first",
        description="Position of the channel axis. first: [C, D, H, W]. last (only for volumes): [D, H, W, C], which "
        "loaders read faster because rows are C times longer.",
    )


class Shares(Strict):
    """Fractions of each file's rows for the splits; the splits take rows in the order train, valid, test."""

    train: float = Field(gt=0, lt=1, description="Fraction of rows for training.")
    valid: float = Field(gt=0, lt=1, description="Fraction of rows for validation.")
    test: float = Field(0, ge=0, lt=1, description="Fraction of rows for testing.")

    @model_validator(mode="after")
    def _sum(self) -> Shares:
        if self.train + self.valid + self.test > 1 + 1e-9:
            raise ValueError(f"the fractions add up to {self.train + self.valid + self.test:g}, expected at most 1")
        return self

    def ranges(self) -> list[tuple[Split, tuple[float, float]]]:
        """Return the non-empty splits, each with its range of fractions (from, to)."""
        cuts = itertools.pairwise([0.0, *itertools.accumulate(getattr(self, split) for split in SPLITS)])
        return [(split, cut) for split, cut in zip(SPLITS, cuts, strict=True) if cut[1] > cut[0]]


class DatasetSettings(Strict):
    """Settings that every dataset has.

    The subclass for a kind defines the key `kind` as a Literal, and the key `source`.
    """

    kind: str
    source: Any = None

    downsample: Extent = Field(
        1,
        description="Edge length, cells, of blocks averaged to one cell. Not for prepared files; only for grids.",
    )
    storage: Storage = Storage()
    pieces: Files = Field(1, description="Number of pieces per file; parallel jobs preprocess the pieces.")


def check_digests(sha256: dict[str, str], origins: list[str]) -> None:
    """Refuse a SHA-256 digest for a file that is not fetched."""
    fetched = {urlsplit(origin).path.rsplit("/", 1)[-1] for origin in origins if origin.startswith(("http:", "https:"))}
    if wrong := [name for name in sha256 if name not in fetched]:
        raise ValueError(
            f"sha256: no file called '{wrong[0]}' is fetched{nearest(wrong[0], fetched)}; expected the part of a URL "
            "after its last '/'"
        )


def refuse_shared(*splits: list[str]) -> None:
    """Refuse a file that is listed in two splits."""
    files = [file if "://" in file else posixpath.normpath(file) for split in splits for file in split]
    if repeated := sorted(file for file, times in Counter(files).items() if times > 1):
        raise ValueError(
            f"'{repeated[0]}' is listed in two splits, so validation would use training data; list it only once"
        )


def refuse_changed(dataset: DatasetSettings, *keys: str) -> None:
    """Refuse values other than the defaults for preprocessing keys that a dataset does not support."""
    for key in keys:
        if getattr(dataset, key) != type(dataset).model_fields[key].default:
            raise ValueError(
                f"{key}: not supported by datasets of kind {dataset.kind} with this source; remove this key"
            )


def dataset_type() -> Any:
    """Return the union of the settings of all kinds of datasets that are registered now."""
    known: Any = tuple(registry.kind(name).Settings for name in registry.kinds())
    return Annotated[Union[known], Field(discriminator="kind")]  # noqa: UP007
