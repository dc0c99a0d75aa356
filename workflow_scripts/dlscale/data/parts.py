"""Which files a dataset consists of: raw ones, the parts made from them, and the pieces of a part.

Pure and quick: the workflow calls it for every dataset when it builds its graph.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from dlscale.runtime.errors import UserError
from dlscale.runtime.schema.dataset import (
    SPLITS,
    CosmoDataset,
    CosmoFiles,
    CosmoPrepared,
    CosmoSimulated,
    Dataset,
    Era5Files,
    Era5Prepared,
    Era5Simulated,
    Era5Zarr,
    Split,
)
from dlscale.runtime.settings import explain, read_settings


@dataclass(frozen=True)
class Raw:
    """A raw file.

    Attributes
    ----------
    name
        Its file name in the dataset's `source/` folder, if it is acquired.
    origin
        Where it comes from: a path, a URL, a store, or `simulated`.
    index
        Number of a simulated box, or a simulated year.
    period
        First and last day (inclusive) to take from a store.
    """

    name: str
    origin: str
    index: int = 0
    period: tuple[dt.date, dt.date] | None = None

    @property
    def acquired(self) -> bool:
        """Whether the acquire stage makes it (otherwise it is read where it lies)."""
        return self.period is not None or self.origin == "simulated" or is_url(self.origin)

    @property
    def file_name(self) -> str:
        """What the file is called where it comes from."""
        return file_name(self.origin)


@dataclass(frozen=True)
class Part:
    """One preprocessed file, `SPLIT/NAME.h5`.

    Attributes
    ----------
    raws
        The raw files that it is made from.
    fraction
        Share (from, to) of the raw file's rows (volumes cut by fractions).
    period
        First and last day (inclusive) that it holds (time series).
    """

    split: Split
    name: str
    raws: tuple[Raw, ...]
    fraction: tuple[float, float] = (0.0, 1.0)
    period: tuple[dt.date, dt.date] | None = None


def load_dataset(config: str | Path) -> Dataset:
    """Read a dataset's settings: `config.yaml`, or JSON itself."""
    raw, where = read_settings(config)
    try:
        return TypeAdapter(Dataset).validate_python(raw)
    except ValidationError as error:
        raise UserError(explain(error, raw, where)) from None


def is_url(origin: str) -> bool:
    """Whether `origin` is fetched over the network."""
    return urlsplit(origin).scheme in ("http", "https")


def file_name(origin: str) -> str:
    """Return the last part of a path or URL."""
    return PurePosixPath(urlsplit(origin).path if is_url(origin) else origin).name


def prepared(dataset: Dataset) -> bool:
    """Whether the files are used as they are, without preprocessing."""
    return isinstance(dataset.source, CosmoPrepared | Era5Prepared)


def fetched(dataset: Dataset) -> bool:
    """Whether some raw file comes over the network, or from a store, and not from a simulator."""
    return any(raw.acquired and raw.origin != "simulated" for raw in raws(dataset).values())


def parts(dataset: Dataset) -> list[Part]:
    """Return the files that preprocessing makes, in order; none for a prepared folder (ERA5)."""
    source = dataset.source
    if isinstance(source, CosmoSimulated):
        found, index = [], 0
        for split in SPLITS:
            for _ in range(getattr(source.boxes, split)):
                raw = Raw(f"box{index:03d}.h5", "simulated", index)
                found.append(Part(split, f"box{index:03d}", (raw,)))
                index += 1
        return found
    if isinstance(source, CosmoPrepared) or (isinstance(source, CosmoFiles) and not source.paths):
        named = _named([origin for split in SPLITS for origin in getattr(source, split)])
        return [
            Part(split, _stem(named[origin]), (named[origin],)) for split in SPLITS for origin in getattr(source, split)
        ]
    if isinstance(source, CosmoFiles):
        assert source.fractions is not None
        cuts = [0.0]
        for split in SPLITS:
            cuts.append(cuts[-1] + getattr(source.fractions, split))
        return [
            Part(split, _stem(raw), (raw,), fraction=(cuts[i], cuts[i + 1]))
            for i, split in enumerate(SPLITS)
            if cuts[i + 1] > cuts[i]
            for raw in _named(source.paths).values()
        ]
    if isinstance(source, Era5Simulated):
        return [
            Part(split, f"{year:04d}", (Raw(f"{year:04d}.nc", "simulated", year),))
            for split in SPLITS
            for year in getattr(source, split)
        ]
    if isinstance(source, Era5Files | Era5Zarr):
        assert not isinstance(dataset, CosmoDataset) and dataset.split is not None
        found = []
        for split in SPLITS:
            for period in _years(getattr(dataset.split, split)):
                name = f"{period[0].year:04d}"
                if isinstance(source, Era5Zarr):
                    raws: tuple[Raw, ...] = (Raw(f"{split}-{name}.nc", source.store, period=period),)
                else:
                    raws = tuple(_named(source.paths).values())
                found.append(Part(split, name, raws, period=period))
        return found
    return []


def part(dataset: Dataset, label: str) -> Part:
    """Return the part called `SPLIT/NAME`."""
    found = {f"{p.split}/{p.name}": p for p in parts(dataset)}
    if label not in found:
        raise UserError(f"--part {label}: no such part; there are: {', '.join(found)}")
    return found[label]


def raws(dataset: Dataset) -> dict[str, Raw]:
    """Return all raw files of a dataset by name."""
    return {raw.name: raw for p in parts(dataset) for raw in p.raws}


def origins(dataset: Dataset) -> list[str]:
    """Return where a dataset's raw files come from: paths, URLs, a store; nothing for a simulated one."""
    if isinstance(dataset.source, Era5Prepared):
        return [dataset.source.path]
    return list(dict.fromkeys(raw.origin for raw in raws(dataset).values() if raw.origin != "simulated"))


def prepared_files(source: Era5Prepared) -> list[str]:
    """Return the files of a folder of years; the statistics that it has to have, even where they are missing."""
    root = Path(source.path)
    means = [str(path) for path in [root / "stats/time_means.npy"] if path.exists()]
    return [
        *sorted(str(path) for path in root.glob("*/*.h5")),
        str(root / "stats/global_means.npy"),
        str(root / "stats/global_stds.npy"),
        *means,
    ]


def raw_settings(dataset: Dataset, raw: Raw) -> dict[str, Any]:
    """Return the settings that decide the content of an acquired file: what makes acquisition run again."""
    settings = {
        **dataset.source.model_dump(mode="json", exclude={"boxes", *SPLITS, "paths", "fractions", "sha256"}),
        "origin": raw.origin,
        "index": raw.index,
        "sha256": getattr(dataset.source, "sha256", {}).get(raw.file_name),
    }
    if raw.period and not isinstance(dataset, CosmoDataset):
        # Out of a store only the asked channels and times are read.
        settings |= {"period": [str(day) for day in raw.period]}
        settings |= {"channels": dataset.channels, "step_hours": dataset.step_hours}
    return settings


def part_settings(dataset: Dataset, part: Part) -> dict[str, Any]:
    """Return the settings that decide the content of a part's pieces."""
    settings = dataset.model_dump(mode="json", exclude={"source", "split", "storage", "memory_mb"})
    period = [str(day) for day in part.period] if part.period else None
    fractions = getattr(dataset.source, "fractions", None)
    return {**settings, "fraction": part.fraction, "gap": fractions.gap if fractions else 0, "period": period}


def piece_rows(rows: int, piece: int, pieces: int) -> tuple[int, int]:
    """Return the rows [start, stop) of piece `piece` of `pieces`: contiguous, disjoint, complete."""
    return rows * piece // pieces, rows * (piece + 1) // pieces


def _named(origins: list[str]) -> dict[str, Raw]:
    """Name raw files after their origins, harmlessly; of those with equal stems all but the first get a number."""
    found: dict[str, Raw] = {}
    taken: set[str] = set()
    for origin in origins:
        name = PurePosixPath(re.sub(r"[^A-Za-z0-9._-]", "_", file_name(origin)).lstrip(".-") or "file")
        raw, number = Raw(name.name, origin), 1
        while _stem(raw) in taken:
            number += 1
            raw = Raw(f"{name.stem}-{number}{name.suffix}", origin)
        taken.add(_stem(raw))
        found[origin] = raw
    return found


def _stem(raw: Raw) -> str:
    return PurePosixPath(raw.name).stem.replace(".", "_")


def _years(period: tuple[dt.date, dt.date] | None) -> list[tuple[dt.date, dt.date]]:
    """Cut a period at the ends of calendar years, as the published files are."""
    if period is None:
        return []
    first, last = period
    return [
        (max(first, dt.date(year, 1, 1)), min(last, dt.date(year, 12, 31))) for year in range(first.year, last.year + 1)
    ]
