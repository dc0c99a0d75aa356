"""Datasets whose samples lie in two files that belong together, such as images and labels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import Field, model_validator

from dlscale.config.dataset import SPLITS, Sha256, Shares, Split, check_digests, refuse_shared
from dlscale.core.errors import UserError
from dlscale.core.schema import Strict
from dlscale.data.kind import Part, name_files

Both = TypeVar("Both", bound=Strict)  # whose fields are paths or URLs, in the order in which readers take them


class Paired(Strict, Generic[Both]):
    """Two files that belong together: those of each split, or `all` with `shares` of them."""

    train: Both | None = Field(None, description="Files of the training part.")
    valid: Both | None = Field(None, description="Files of the validation part.")
    test: Both | None = Field(None, description="Files of the test part.")
    all: Both | None = Field(None, description="Files of all parts, of which shares says which rows each has.")
    shares: Shares | None = Field(None, description="Of all: the share of each part.")
    sha256: dict[str, Sha256] = Field({}, description="Expected digests by file name (the part after the last '/').")

    @model_validator(mode="after")
    def _one_form(self) -> Paired[Both]:
        own = self._own()
        by_split = "train" in own and "valid" in own
        by_share = self.all is not None and self.shares is not None
        if by_split == by_share or (by_share and own):
            raise ValueError("give either train and valid (and test), or all with shares")
        refuse_shared(*(list(dict.fromkeys(files)) for files in own.values()))
        check_digests(self.sha256, [origin for files in (*own.values(), _origins(self.all)) for origin in files])
        return self

    def _own(self) -> dict[Split, list[str]]:
        """Return the files of the splits that have files of their own."""
        return {split: files for split in SPLITS if (files := _origins(getattr(self, split)))}

    def parts(self) -> list[Part]:
        """Return one part for each split."""
        own, whole = self._own(), _origins(self.all)
        named = name_files([origin for files in (whole, *own.values()) for origin in files])
        if self.shares is None:
            return [Part(split, split, tuple(named[o] for o in files)) for split, files in own.items()]
        raws = tuple(named[origin] for origin in whole)
        return [Part(split, split, raws, fraction=share) for split, share in self.shares.ranges()]


def _origins(files: Strict | None) -> list[str]:
    return list(files.model_dump().values()) if files else []


def share(rows: int, part: Part, path: Path, gap: int = 0) -> tuple[int, int]:
    """Return first row and number of rows of a part's share of a file, `gap` rows after the share before."""
    low, high = part.fraction
    first = math.ceil(low * rows - 1e-9) + (gap if low > 0 else 0)
    own = math.floor(high * rows + 1e-9) - first
    if own < 1:
        raise UserError(
            f"{path}: split '{part.split}' is empty: {rows} rows, shares {low:g} to {high:g}, gap {gap}; choose a "
            "larger share or a smaller gap"
        )
    return first, own
