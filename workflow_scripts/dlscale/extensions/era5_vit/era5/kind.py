"""`era5`: time series of atmospheric states. Settings, files, parts."""

from __future__ import annotations

import calendar
import datetime as dt
import itertools
import pathlib
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dlscale.config.dataset import (
    SPLITS,
    DatasetSettings,
    Path,
    Sha256,
    Split,
    check_digests,
    refuse_changed,
    refuse_shared,
)
from dlscale.core.schema import Extent, PositiveInt, Seed, Strict
from dlscale.data.kind import DatasetKind, Outline, Part, RawFile, name_files

#: Channels of a simulated state, and hours between successive states.
SIMULATED_CHANNELS, SIMULATED_HOURS = ("u10", "v10", "t2m", "vo", "z"), 6

Year = Annotated[int, Field(ge=1700, le=2200)]


class Era5Simulated(Strict):
    """Simulated years of a barotropic-vorticity atmosphere; each year is an independent trajectory."""

    kind: Literal["simulated"]
    latitudes: Extent = Field(32, ge=8, description="Number of latitudes, from pole to pole.")
    longitudes: Extent = Field(64, ge=16, description="Number of longitudes, round the globe.")
    truncation: int | None = Field(
        None,
        ge=17,
        le=511,
        description="Largest wavenumber of the model; the cost grows with its fourth power, and a smaller number "
        "gives smoother fields on the same grid. Absent: the largest wavenumber that the grid resolves, from 21 to "
        "127.",
    )
    days: PositiveInt | None = Field(None, le=366, description="Days per year. Absent: the full year.")
    train: list[Year] = Field(min_length=1, description="Years of the training part.")
    valid: list[Year] = Field(min_length=1, description="Years of the validation part.")
    test: list[Year] = Field([], description="Years of the test part.")
    seed: Seed = Field(0, description="Seed of all years.")

    @model_validator(mode="after")
    def _disjoint(self) -> Era5Simulated:
        refuse_shared(*([str(year) for year in getattr(self, split)] for split in SPLITS))
        return self


class Era5Files(Strict):
    """GRIB or NetCDF files (paths or http(s) URLs); together they contain all channels at all times."""

    kind: Literal["files"]
    paths: list[Path] = Field(min_length=1, description="Paths or http(s) URLs.")
    sha256: dict[str, Sha256] = Field({}, description="Expected digests by file name (the part after the last '/').")

    @model_validator(mode="after")
    def _digests(self) -> Era5Files:
        check_digests(self.sha256, self.paths)
        return self


class Era5Zarr(Strict):
    """Any Zarr store that xarray can open: a folder or a URL."""

    kind: Literal["zarr"]
    store: Path = Field(description="A folder or a URL.")


class Era5Prepared(Strict):
    """The published layout, used unchanged: `train/`, `valid/`, `test/` with `YYYY.h5`, and `stats/*.npy`."""

    kind: Literal["prepared"]
    path: Path = Field(description="Folder with the folders `train`, `valid`, `stats`, and optionally `test`.")
    step_hours: PositiveInt = Field(6, description="Hours between the times in the files.")


class Periods(Strict):
    """First and last day (inclusive) of each split."""

    train: tuple[dt.date, dt.date] = Field(description="First and last day of the training part.")
    valid: tuple[dt.date, dt.date] = Field(description="First and last day of the validation part.")
    test: tuple[dt.date, dt.date] | None = Field(None, description="First and last day of the test part.")

    @model_validator(mode="after")
    def _disjoint(self) -> Periods:
        periods = sorted((*period, split) for split in SPLITS if (period := getattr(self, split)))
        for first, last, split in periods:
            if last < first:
                raise ValueError(f"{split} ends ({last}) before it begins ({first})")
        for (_, last, one), (first, _, other) in itertools.pairwise(periods):
            if first <= last:
                raise ValueError(f"{one} and {other} overlap at {first}: splits must be disjoint periods")
        return self


class Era5Dataset(DatasetSettings):
    """Time series of atmospheric states."""

    kind: Literal["era5"]
    source: Era5Simulated | Era5Files | Era5Zarr | Era5Prepared = Field(discriminator="kind")
    channels: list[str] = Field(
        [],
        description="Variables in the order of the channels, `name` or `name@level`. Absent: the simulator's "
        "channels, or the names in the prepared files; 20 unnamed channels get the published names (u10, v10, t2m, …).",
    )
    split: Periods | None = Field(None, description="Days of each split; required for source kinds `files` and `zarr`.")
    step_hours: PositiveInt | None = Field(
        None, description="Hours between the times that are kept. Absent: all times are kept."
    )
    crop: tuple[Extent, Extent] | None = Field(
        None,
        description="Numbers of rows and columns kept from the north-west corner, before downsampling (published: 360, "
        "720).",
    )

    @model_validator(mode="after")
    def _complete(self) -> Era5Dataset:
        # Changes and missing chunks of a folder are found only if `store` is a path, so a folder's address is refused.
        if isinstance(self.source, Era5Zarr) and self.source.store.startswith(("file:", "local:")):
            raise ValueError(f"store {self.source.store}: the address of a folder; give the folder's path")
        if isinstance(self.source, Era5Files | Era5Zarr):
            if self.split is None:
                raise ValueError("split is missing: give the first and last day of train, valid (and test)")
            if not self.channels:
                raise ValueError("channels is missing: name at least one variable")
        elif self.split is not None:
            raise ValueError(f"split is only for source kinds files and zarr, not for {self.source.kind}; remove it")
        if isinstance(self.source, Era5Prepared):
            refuse_changed(self, "downsample", "storage", "pieces", "step_hours")
        if len(set(self.channels)) != len(self.channels):
            raise ValueError("channels contains a channel twice; name each channel once")
        return self


class PairSamples(Strict):
    """Pairs of states `dt` stored steps apart."""

    kind: Literal["pairs"]
    dt: PositiveInt = Field(1, description="Stored time steps between input and target.")
    history: list[PositiveInt] = Field(
        [],
        description="Earlier states as further inputs, by numbers of stored time steps before the input, such as "
        "[1, 2, 18, 24].",
    )
    clock: list[Literal["hour", "day"]] = Field(
        [],
        description="Further inputs. hour: sine and cosine of the hour of the day (UTC). day: sine and cosine of the "
        "day of the year.",
    )
    train: PositiveInt | None = Field(
        None, description="Largest number of training samples per epoch. Absent: all samples."
    )
    valid: PositiveInt | None = Field(
        None, description="Largest number of validation samples, and of test samples. Absent: all samples."
    )
    subset: Literal["spread", "first"] = Field(
        "spread",
        description="Choice of the pairs if `train` or `valid` limits their number. spread: in training a new random "
        "choice in each epoch, otherwise evenly spaced pairs. first: in each epoch the first pairs in time, like the "
        "published option `limit_nsamples`; training visits these pairs in random order.",
    )

    def channels(self, states: int) -> int:
        """Return the number of input channels for a number of state channels."""
        return states * (1 + len(self.history)) + 2 * len(self.clock)


class Era5(DatasetKind):
    """The kind of dataset `era5`."""

    name = "era5"
    Settings = Era5Dataset
    Samples = PairSamples
    rows = "times"
    standardised = True
    selection = frozenset({*SPLITS, "paths", "split"})

    def parts(self, dataset: Era5Dataset) -> list[Part]:
        """Return one part for each split and calendar year; none for a prepared folder."""
        source = dataset.source
        if isinstance(source, Era5Simulated):
            years = [(split, year) for split in SPLITS for year in getattr(source, split)]
            return [Part(split, f"{y:04d}", (RawFile(f"{y:04d}.nc", "simulated", y),)) for split, y in years]
        if isinstance(source, Era5Prepared):
            return []
        assert dataset.split is not None
        parts = []
        for split in SPLITS:
            for period in _years(getattr(dataset.split, split)):
                name = f"{period[0].year:04d}"
                if isinstance(source, Era5Zarr):
                    raws: tuple[RawFile, ...] = (RawFile(f"{split}-{name}.nc", source.store, period=period),)
                else:
                    raws = tuple(name_files(source.paths).values())
                parts.append(Part(split, name, raws, period=period))
        return parts

    def acquirer(self, dataset: Era5Dataset) -> str | None:
        return {"simulated": "simulator", "zarr": "zarr"}.get(dataset.source.kind)

    def maker(self, dataset: Era5Dataset) -> str | None:
        # Changes of the code do not cause years of a store to be fetched again, since fetching can take days.
        return None if isinstance(dataset.source, Era5Zarr) else self.acquirer(dataset)

    def origins(self, dataset: Era5Dataset) -> list[str]:
        return [dataset.source.path] if isinstance(dataset.source, Era5Prepared) else super().origins(dataset)

    def prepared_files(self, dataset: Era5Dataset) -> list[str]:
        """Return the files of the years in a prepared folder, and the files of statistics.

        The pattern `*.h5` stands for the missing files of a training or validation part.
        """
        assert isinstance(dataset.source, Era5Prepared)
        root = pathlib.Path(dataset.source.path)
        files = []
        for split in SPLITS:
            years = sorted((root / split).glob("*.h5"))
            files += years or ([] if split == "test" else [root / split / "*.h5"])
        files += [root / "stats" / f"global_{name}.npy" for name in ("means", "stds")]
        files += [path for path in [root / "stats/time_means.npy"] if path.exists()]
        return [str(path) for path in files]

    def raw_settings(self, dataset: Era5Dataset, raw: RawFile) -> dict[str, Any]:
        # Only the requested part of a store is fetched, so the content of a raw file depends on these settings.
        keys = ("channels", "step_hours", "crop", "downsample") if raw.period else ()
        return {**super().raw_settings(dataset, raw), **{key: getattr(dataset, key) for key in keys}}

    def grid(self, dataset: Era5Dataset) -> tuple[int, ...] | None:
        source = dataset.source
        size = dataset.crop or ((source.latitudes, source.longitudes) if isinstance(source, Era5Simulated) else None)
        return tuple(edge // dataset.downsample for edge in size) if size else None

    def outline(self, dataset: Era5Dataset) -> Outline | None:
        source, grid = dataset.source, self.grid(dataset)
        if not isinstance(source, Era5Simulated) or grid is None:
            return None
        step = dataset.step_hours or SIMULATED_HOURS
        made = {split: [_days(source, year) for year in getattr(source, split)] for split in SPLITS}
        rows: dict[Split, list[int]] = {split: [24 * days // step for days in each] for split, each in made.items()}
        states = 24 // SIMULATED_HOURS * sum(map(sum, made.values()))
        values = len(SIMULATED_CHANNELS) * states * source.latitudes * source.longitudes
        return Outline({"fields": (len(dataset.channels or SIMULATED_CHANNELS), grid)}, rows, values)

    def available(self, samples: PairSamples, rows: list[int]) -> int | None:
        # An upper bound: pairs with an incomplete history count here, although the samples leave them out.
        return sum(max(count - samples.dt, 0) for count in rows)


def _days(source: Era5Simulated, year: int) -> int:
    """Return the days of a simulated year."""
    whole = 365 + calendar.isleap(year)
    return min(source.days or whole, whole)


def _years(period: tuple[dt.date, dt.date] | None) -> list[tuple[dt.date, dt.date]]:
    """Split a period at the ends of calendar years, like the published files."""
    if period is None:
        return []
    first, last = period
    return [
        (max(first, dt.date(year, 1, 1)), min(last, dt.date(year, 12, 31))) for year in range(first.year, last.year + 1)
    ]


KIND = Era5()
