"""Files that hold several fields at one time, forecasts, means over months, and points in any order.

Every file is small, and made here with the trait that a test is about.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from dlscale.config import resolve
from dlscale.core.errors import Refused, UserError
from dlscale.data import parts
from dlscale.data.kind import Part, RawFile
from dlscale.data.manifest import Manifest
from dlscale.datasets.era5.extra import Extra
from dlscale.datasets.era5.kind import Era5Dataset, PairSamples
from dlscale.datasets.era5.months import months_apart
from dlscale.datasets.era5.source import open_source
from dlscale.datasets.era5.zarr import acquire
from dlscale.preflight.data import probe_data
from tests.conftest import ERA5_RUN, make_dataset, make_parts, stage
from tests.raw_files import write_years
from tests.test_era5_sources import atmosphere, days, fields, part, write_grib

DAYS = {"train": ["2000-01-01", "2000-01-02"], "valid": ["2001-01-01", "2001-01-02"]}
SURFACE = {"productDefinitionTemplateNumber": 8, "typeOfStatisticalProcessing": 1}


def chosen(select: dict[str, Any], channels: tuple[str, ...] = ("t2m",), **keys: Any) -> Era5Dataset:
    source = {"kind": "files", "paths": ["unused"], "select": select}
    settings = {"kind": "era5", "source": source, "channels": channels, "split": DAYS, **keys}
    return Era5Dataset.model_validate(settings)


def read(paths: Path | list[Path], select: dict[str, Any] | None = None, **keys: Any) -> np.ndarray:
    """Return all fields that a selection takes, [T, C, H, W]."""
    source = open_source(chosen(select or {}, **keys), part(), paths if isinstance(paths, list) else [paths])
    return fields(source)


def refused(paths: Path | list[Path], select: dict[str, Any] | None = None, **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(paths, select, **keys)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    return message


@pytest.fixture
def states() -> xr.Dataset:
    return atmosphere(names=("t2m",), hours=48)


def shifted(states: xr.Dataset, number: int) -> xr.Dataset:
    return xr.Dataset({"t2m": (states.t2m.dims, states.t2m.values + number, states.t2m.attrs)}, states.coords)


def ensemble(path: Path, states: xr.Dataset, form: str, members: tuple[int, ...] = (0, 1, 2)) -> Path:
    """Write members, each warmer by its number."""
    if form == "grib":
        for number in members:
            keys = {"productDefinitionTemplateNumber": 1, "number": number}
            write_grib(shifted(states, number), path, "ab", **keys)
    else:
        every = xr.concat([shifted(states, number) for number in members], "number").assign_coords(number=[*members])
        order = ("time", "number", ...) if form == "inner" else ("number", "time", ...)
        every.transpose(*order).to_netcdf(path, engine="h5netcdf")
    return path


# ---------------------------------------------------------------------------------------------------- members


@pytest.mark.slow
@pytest.mark.parametrize("form", ["grib", "outer", "inner"])
def test_a_member_is_chosen(tmp_path: Path, states: xr.Dataset, form: str) -> None:
    path = ensemble(tmp_path / "all", states, form)
    message = refused(path)
    assert "'t2m' has the members 0, 1 and 2; choose one: source: {select: {number: 0}}" in message
    for number in (0, 2):
        np.testing.assert_array_equal(read(path, {"number": number})[:, 0], states.t2m + np.float32(number))
    assert "'t2m': no field has number 7 (source.select); there are: 0, 1 and 2" in refused(path, {"number": 7})
    assert "no field has the key 'nummer' (did you mean 'number'?)" in refused(path, {"nummer": 0})
    assert "'t2m' has the members 0 and 2" in refused(path, {"number": [0, 2]})


@pytest.mark.slow
def test_members_in_files_of_their_own(tmp_path: Path, states: xr.Dataset) -> None:
    """Even where they share no time: a series of two members is none."""
    one, other = states.isel(time=slice(0, 4)), states.isel(time=slice(4, 8))
    paths = [
        ensemble(tmp_path / "0.nc", one, "outer", (0,)),
        ensemble(tmp_path / "1.grib", other, "grib", (1,)),
    ]
    assert "has the members 0 and 1" in refused(paths)
    assert read(paths, {"number": 1}).shape == (4, 1, 9, 12)


def test_a_member_and_fields_of_none_are_no_series(tmp_path: Path, states: xr.Dataset) -> None:
    """Unless it is member 0, which other files leave without a number."""
    one, other = states.isel(time=slice(0, 4)), states.isel(time=slice(4, 8))
    one.to_netcdf(tmp_path / "plain.nc", engine="h5netcdf")
    paths = [tmp_path / "plain.nc", ensemble(tmp_path / "3.grib", other, "grib", (3,))]
    for select in ({}, {"number": 3}):
        assert "'t2m' has fields of member 3 and fields of none; choose by another key" in refused(paths, select)
    assert read([paths[0], ensemble(tmp_path / "0.grib", other, "grib", (0,))]).shape == (8, 1, 9, 12)


def test_a_dimension_without_values_is_chosen_by_number(tmp_path: Path, states: xr.Dataset) -> None:
    every = xr.concat([shifted(states, 0), shifted(states, 5)], "version")
    every.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert "two fields of 't2m' at 2020-02-27 00:00: version 0 and 1" in refused(tmp_path / "a.nc")
    np.testing.assert_array_equal(read(tmp_path / "a.nc", {"version": 1})[:, 0], states.t2m + np.float32(5))


def test_words_are_chosen_too(tmp_path: Path, states: xr.Dataset) -> None:
    """`expver` 0001 and 0005, as the climate data store has them; YAML reads the one as a number."""
    both = xr.concat([shifted(states, 0), shifted(states, 5)], "expver").assign_coords(expver=["0001", "0005"])
    both.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert "versions 0001 and 0005" in refused(tmp_path / "a.nc")
    for version in (5, "0005"):
        np.testing.assert_array_equal(read(tmp_path / "a.nc", {"expver": version})[:, 0], states.t2m + np.float32(5))


def test_only_the_chosen_member_is_read(tmp_path: Path, states: xr.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ensemble(tmp_path / "all.grib", states, "grib")
    source = open_source(chosen({"number": 1}), part(), [path])
    from cfgrib import messages

    read_one, offsets = messages.Message.from_file, []
    monkeypatch.setattr(messages.Message, "from_file", lambda *a, **k: offsets.append(1) or read_one(*a, **k))
    source.read(0, 8)
    assert len(offsets) == 8


def test_a_member_out_of_a_store(tmp_path: Path, states: xr.Dataset) -> None:
    """What was fetched is selected already."""
    every = xr.concat([shifted(states, number) for number in (0, 1)], "number").assign_coords(number=[0, 1])
    every.to_zarr(tmp_path / "store", consolidated=False, encoding={"t2m": {"chunks": (1, 3, 9, 12)}})
    base = chosen({})
    source = {"kind": "zarr", "store": str(tmp_path / "store"), "select": {"number": 1}}
    dataset = Era5Dataset.model_validate({**base.model_dump(mode="json"), "source": source})
    out = tmp_path / "train-2020.nc"
    acquire(dataset, days("2020-02-27", "2020-02-28", tmp_path / "store"), out)
    found = fields(open_source(dataset, part("2020-02-27", "2020-02-28"), [out]))
    np.testing.assert_array_equal(found[:, 0], states.t2m + np.float32(1))


def test_a_selection_is_part_of_what_was_made() -> None:
    """Pieces are made again, fetched files are not; of a store they are, and nothing changes for those without."""
    kind, raw = parts.kind_of(chosen({})), RawFile("a.grib", "https://host/a.grib")
    piece = Part("train", "2000", (raw,))
    assert kind.part_settings(chosen({"number": 1}), piece) != kind.part_settings(chosen({}), piece)
    assert kind.raw_settings(chosen({"number": 1}), raw) == kind.raw_settings(chosen({}), raw)
    stores = [
        Era5Dataset.model_validate({"kind": "era5", "source": source, "channels": ["t2m"], "split": DAYS})
        for source in ({"kind": "zarr", "store": "s", "select": select} for select in ({}, {"number": 1}))
    ]
    fetched = [kind.raw_settings(store, days("2000-01-01", "2000-01-02", "s")) for store in stores]
    assert fetched[0] != fetched[1] and "select" not in fetched[0]


# -------------------------------------------------------------------------------------------- levels and kinds


def test_types_of_levels_are_told_and_chosen(tmp_path: Path) -> None:
    states = atmosphere(names=("t",), hours=48).isel(level=[0]).assign_coords(level=[1])
    for kind, warmer in (("surface", 0), ("tropopause", 5)):
        write_grib(states + warmer, tmp_path / "a.grib", "ab", typeOfLevel=kind)
    message = refused(tmp_path / "a.grib", channels=("t",))
    assert "two fields of 't' at 2020-02-27 00:00: types of levels surface and tropopause" in message
    assert "source: {select: {typeOfLevel: surface}}" in message
    found = read(tmp_path / "a.grib", {"typeOfLevel": "tropopause"}, channels=("t",))
    np.testing.assert_array_equal(found[:, 0], states.t[:, 0] + np.float32(5))


def accumulated(path: Path, states: xr.Dataset, ranges: tuple[str, ...], **keys: Any) -> Path:
    """Write ranges of steps from the first time on, each with the values of one time."""
    for number, steps in enumerate(ranges):
        one = states.isel(time=[number]).assign_coords(time=states.time.values[:1])
        write_grib(one, path, "ab", **SURFACE, **keys, stepRange=steps)
    return path


def test_ranges_of_time_are_told_and_chosen(tmp_path: Path, states: xr.Dataset) -> None:
    """Sums since the beginning of a forecast are no series; equally long ones are."""
    growing = accumulated(tmp_path / "a.grib", states, ("0-6", "0-12", "0-18"))
    message = refused(growing)
    assert "is of several kinds: accumulated over 6 h, accumulated over 12 h, accumulated over 18 h" in message
    assert "source: {select: {stepRange: 0-6}}" in message
    np.testing.assert_array_equal(read(growing, {"stepRange": "0-6"})[0, 0], states.t2m[0])
    equal = accumulated(tmp_path / "b.grib", states, ("0-6", "6-12", "12-18"))
    np.testing.assert_array_equal(read(equal)[:, 0], states.t2m[:3])


def test_sums_and_instants_are_told_and_chosen(tmp_path: Path, states: xr.Dataset) -> None:
    path = accumulated(tmp_path / "a.grib", states, ("0-6",))
    write_grib(states.isel(time=slice(1, 2)) + 5, path, "ab")
    message = refused(path)
    assert "accumulated over 6 h, instantaneous" in message and "{select: {stepType: accum}}" in message
    np.testing.assert_array_equal(read(path, {"stepType": "instant"})[:, 0], states.t2m[1:2] + np.float32(5))
    np.testing.assert_array_equal(read(path, {"stepType": "accum"})[:, 0], states.t2m[:1])


# -------------------------------------------------------------------------------------------------- forecasts


def forecasts(path: Path, form: str) -> tuple[Path, xr.Dataset]:
    """Write two forecasts a day apart, 6 to 30 h ahead: valid twice at 06:00."""
    states = atmosphere(names=("t2m",), hours=72)
    base, ahead = states.time.values[[0, 4]], np.arange(1, 6)
    values = np.stack([states.t2m.values[4 * b + ahead] + 10 * b for b in (0, 1)]).astype(np.float32)
    dims = ("time", "step", "latitude", "longitude")
    grid = {"latitude": states.latitude, "longitude": states.longitude}
    every = xr.Dataset({"t2m": (dims, values, {"units": "K"})}, {"time": base, **grid})
    steps = ahead * np.timedelta64(6, "h").astype("timedelta64[ns]")
    if form == "grib":
        for b, a in np.ndindex(2, 5):
            one = every.isel(time=[b], step=a)
            write_grib(one, path, "ab", forecastTime=6 * int(ahead[a]))
        return path, states
    every = every.assign_coords(step=steps)
    if form == "valid times":
        every = every.assign_coords(valid_time=every.time + every.step)
        every = every.rename(time="forecast_reference_time", step="forecast_period")
    every.to_netcdf(path, engine="h5netcdf", encoding={} if form == "valid times" else {"step": {"dtype": "float64"}})
    return path, states


@pytest.mark.slow
@pytest.mark.parametrize("form", ["grib", "steps", "valid times"])
def test_forecasts_stand_at_the_time_they_are_valid(tmp_path: Path, form: str) -> None:
    path, states = forecasts(tmp_path / "forecast", form)
    key = "forecast_period" if form == "valid times" else "step"
    message = refused(path)
    assert "two fields of 't2m' at 2020-02-28 06:00" in message and "6 and 30" in message
    assert f"source: {{select: {{{key}: 6}}}}" in message
    source = open_source(chosen({key: [6, 12, 18, 24]}), part(), [path])
    np.testing.assert_array_equal(source.times, states.time.values[1:9].astype("datetime64[s]"))
    expected = states.t2m.values[1:9] + np.float32(10) * (np.arange(8) > 3)[:, None, None].astype(np.float32)
    np.testing.assert_array_equal(fields(source)[:, 0], expected)
    daily = open_source(chosen({key: 30}), part(), [path])
    np.testing.assert_array_equal(daily.times, states.time.values[[5, 9]].astype("datetime64[s]"))


def test_one_step_of_a_forecast_is_not_its_beginning(tmp_path: Path, states: xr.Dataset) -> None:
    """A single step is a value beside the time axis, which is that of the beginnings."""
    states.assign_coords(step=np.timedelta64(6, "h").astype("timedelta64[ns]")).to_netcdf(
        tmp_path / "a.nc", engine="h5netcdf"
    )
    source = open_source(chosen({}), part(), [tmp_path / "a.nc"])
    assert str(source.times[0]) == "2020-02-27T06:00:00"


def test_a_key_that_alone_tells_fields_apart_is_named_and_selects(tmp_path: Path, states: xr.Dataset) -> None:
    path = tmp_path / "twice.grib"
    write_grib(states, path)
    write_grib(states + np.float32(1), path, "ab", generatingProcessIdentifier=77)
    message = refused(path)
    assert "two fields of 't2m' at 2020-02-27 00:00: generatingProcessIdentifier " in message
    assert "choose one: source: {select: {generatingProcessIdentifier: " in message
    expected = (states + np.float32(1)).t2m
    np.testing.assert_array_equal(read(path, {"generatingProcessIdentifier": 77})[:, 0], expected)


# ------------------------------------------------------------------------------------------------------ months


def monthly(count: int = 24, stamp: str = "first") -> xr.Dataset:
    """Means of months from January 2003 on, stamped at the beginning, in the middle or on the last day."""
    begin = np.datetime64("2003-01", "M") + np.arange(count + 1)
    first, after = (months.astype("datetime64[ns]") for months in (begin[:-1], begin[1:]))
    stamps = {"first": first, "middle": first + (after - first) / 2, "last": after - np.timedelta64(1, "D")}
    states = atmosphere(names=("t2m",), hours=6 * count)
    return states.assign_coords(time=stamps[stamp].astype("datetime64[ns]"))


@pytest.mark.slow
@pytest.mark.parametrize("stamp", ["first", "middle", "last"])
def test_months_are_a_time_axis(tmp_path: Path, stamp: str) -> None:
    states = monthly(stamp=stamp)
    states.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    source = open_source(chosen({}), part("2003-01-01", "2003-12-31"), [tmp_path / "a.nc"])
    np.testing.assert_array_equal(source.times, (np.datetime64("2003-01", "M") + np.arange(12)).astype("datetime64[s]"))
    np.testing.assert_array_equal(fields(source)[:, 0], states.t2m[:12])
    assert source.attributes["step_months"] == 1 and "step_hours" not in source.attributes
    assert "calendar months, of no constant hours; leave step_hours out" in refused(tmp_path / "a.nc", step_hours=6)
    states.isel(time=[0, 1, 3, 4]).to_netcdf(tmp_path / "gap.nc", engine="h5netcdf")
    assert "is missing" in refused(tmp_path / "gap.nc")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nc", "grib"])
@pytest.mark.parametrize("stamp", ["first", "middle", "last"])
@pytest.mark.parametrize(
    ("period", "count"),
    [
        (("2003-01-16", "2004-12-16"), 24),  # by the stamps of CMIP
        (("2003-02-28", "2003-03-01"), 2),
        (("2003-05-16", "2003-05-20"), 1),
    ],
)
def test_a_split_within_months_has_all_of_these(
    tmp_path: Path, form: str, stamp: str, period: tuple[str, str], count: int
) -> None:
    """The month of a split's first day was lost, and of one month nothing was left."""
    states, path = monthly(stamp=stamp), tmp_path / f"a.{form}"
    if form == "grib":
        write_grib(states, path)
    else:
        states.to_netcdf(path, engine="h5netcdf")
    source = open_source(chosen({}), part(*period), [path])
    months = np.datetime64(period[0], "M") + np.arange(count)
    np.testing.assert_array_equal(source.times, months.astype("datetime64[s]"))
    first = int((months[0] - np.datetime64("2003-01", "M")).astype(int))
    np.testing.assert_array_equal(fields(source)[:, 0], states.t2m[first : first + count])


def test_a_month_is_in_one_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monthly().to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    split = {"train": ["2003-01-01", "2004-01-15"], "valid": ["2004-01-16", "2004-12-31"]}
    source = {"kind": "files", "paths": [str(tmp_path / "a.nc")]}
    folder, settings = tmp_path / "data", {"kind": "era5", "source": source, "channels": ["t2m"], "split": split}
    make_parts(folder, settings)
    outputs = ["--manifest", folder / "manifest.json", "--stats", folder / "stats"]
    capsys.readouterr()
    assert stage("describe", "--config", folder / "config.yaml", *outputs) == 2
    assert "2004-01-01T00:00:00 is in train and valid: of months, let a split begin" in capsys.readouterr().err


def test_where_no_time_is_left_the_period_is_told(tmp_path: Path) -> None:
    """It said that none was a multiple of step_hours (None)."""
    states = atmosphere(names=("t2m",), hours=240, step=24).isel(time=[0, 1, 2, 8, 9])
    states.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with pytest.raises(UserError, match="no time is left: none lies in 2020-03-02 to 2020-03-03; set `split`"):
        open_source(chosen({}), part("2020-03-02", "2020-03-03"), [tmp_path / "a.nc"])


def test_grib_without_its_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo needs none of its 180 MB."""
    monkeypatch.setitem(sys.modules, "cfgrib", None)
    (tmp_path / "a.grib").write_bytes(b"GRIB" + bytes(100))
    with pytest.raises(UserError, match=r"a\.grib: GRIB is not installed .*pip install 'dlscale\[grib\]'"):
        open_source(chosen({}), part("2020-03-02", "2020-03-03"), [tmp_path / "a.grib"])


@pytest.mark.parametrize("kind", ["CAMS", "seasonal"])
def test_a_monthly_mean_of_grib_has_its_month(tmp_path: Path, kind: str) -> None:
    """Of a forecast 24 h ahead the valid time is on the second day of the month; of a seasonal one, when it is over."""
    eccodes = pytest.importorskip("eccodes")
    states, path = monthly(3), tmp_path / "a.grib"
    first, after = (f"2003{month}01" for month in ("01", "02"))
    with open(path, "wb") as file:
        for number, hours in enumerate((744, 672, 744)):
            message = eccodes.codes_grib_new_from_samples("regular_ll_pl_grib1")
            grid = {"Ni": 12, "Nj": 9, "latitudeOfFirstGridPointInDegrees": 60, "latitudeOfLastGridPointInDegrees": 40}
            grid |= {"longitudeOfFirstGridPointInDegrees": 0, "longitudeOfLastGridPointInDegrees": 27.5}
            grid |= {"iDirectionIncrementInDegrees": 2.5, "jDirectionIncrementInDegrees": 2.5}
            keys = {"indicatorOfTypeOfLevel": 1, "level": 0, "indicatorOfParameter": 167}
            keys |= {"dataDate": int(first) + 100 * number, "dataTime": 0}
            if kind == "CAMS":
                keys |= {"stream": "moda", "timeRangeIndicator": 113, "P1": 24, "P2": 24}
            else:
                keys |= {"localDefinitionNumber": 16, "stream": "msmm", "type": "fcmean", "timeRangeIndicator": 10}
                keys |= {"verifyingMonth": 200301 + number, "stepRange": hours}
            for key, value in {**keys, **grid, "packingType": "grid_ieee"}.items():
                eccodes.codes_set(message, key, value)
            eccodes.codes_set_values(message, states.t2m.values[number].astype(float).ravel())
            valid = int(first) + 1 if kind == "CAMS" else int(after)
            assert eccodes.codes_get(message, "validityDate") == valid + 100 * number
            eccodes.codes_write(message, file)
            eccodes.codes_release(message)
    source = open_source(chosen({}), part("2003-01-01", "2003-03-31"), [path])
    np.testing.assert_array_equal(source.times.astype("datetime64[D]"), states.time.values.astype("datetime64[D]"))
    np.testing.assert_array_equal(fields(source)[:, 0], states.t2m)


def test_hours_of_the_day_of_each_month_are_no_series(tmp_path: Path) -> None:
    begin = (np.datetime64("2003-01", "M") + np.arange(4)).astype("datetime64[ns]")
    times = (begin[:, None] + np.arange(0, 24, 6) * np.timedelta64(1, "h")).ravel()
    atmosphere(names=("t2m",), hours=96).assign_coords(time=times).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert "hours of one day in each month, as means by hour of day have them" in refused(tmp_path / "a.nc")


def test_what_a_month_is() -> None:
    day = np.datetime64("2003-01-01", "s")
    assert months_apart(np.array(["2003-07-01", "2003-08-01", "2003-09-01"], "datetime64[s]")) == 1
    assert months_apart(np.array(["2003-01-01", "2003-04-01", "2003-07-01"], "datetime64[s]")) == 3
    assert months_apart(day + np.arange(5) * np.timedelta64(31, "D")) is None
    assert months_apart(day + np.arange(5) * np.timedelta64(1, "D")) is None
    assert months_apart(day[None]) is None


def test_a_dataset_of_months(tmp_path: Path) -> None:
    """Its manifest tells months, and when each begins; one year follows the other."""
    monthly().to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    split = {"train": ["2003-01-01", "2003-12-31"], "valid": ["2004-01-01", "2004-12-31"]}
    source = {"kind": "files", "paths": [str(tmp_path / "a.nc")]}
    settings = {"kind": "era5", "source": source, "channels": ["t2m"], "split": split}
    manifest = Manifest.read(make_dataset(tmp_path / "data", settings) / "manifest.json")
    extra, file = Extra.of(manifest), manifest.files("valid")[0]
    assert (extra.step_hours, extra.step_months, extra.ahead(1), extra.ahead(3)) == (None, 1, "1 month", "3 months")
    months = (extra.hours(file, np.arange(12)) * 3600).astype("datetime64[s]")
    np.testing.assert_array_equal(months, (np.datetime64("2004-01", "M") + np.arange(12)).astype("datetime64[s]"))
    assert extra.before[file.digest] == manifest.files("train")[0].digest
    assert "a state every 1 month" in manifest.facts


# ------------------------------------------------------------------------------------------------------- points


@pytest.mark.slow
@pytest.mark.parametrize("turning", [0, 1])
@pytest.mark.parametrize("down", [0, 1])
@pytest.mark.parametrize("north", [0, 1])
@pytest.mark.parametrize("west", [0, 1])
def test_every_order_of_points(tmp_path: Path, west: int, north: int, down: int, turning: int) -> None:
    """Points are written one by one, by what the four flags say; across the meridian, too."""
    eccodes = pytest.importorskip("eccodes")
    truth = atmosphere(names=("t2m",), hours=6).t2m.values[0].astype(float)
    height, width = truth.shape
    latitude, longitude = 60 - 2.5 * np.arange(height), 350 + 2.5 * np.arange(width)
    rows, columns = [*range(height)][:: -1 if north else 1], [*range(width)][:: -1 if west else 1]
    values = []
    for number, line in enumerate(columns if down else rows):
        across = rows if down else columns
        for place in across[::-1] if turning and number % 2 else across:
            values.append(truth[(place, line) if down else (line, place)])
    keys = {
        **{"Ni": width, "Nj": height, "shortName": "2t", "iDirectionIncrementInDegrees": 2.5},
        **{"jDirectionIncrementInDegrees": 2.5, "iScansNegatively": west, "jScansPositively": north},
        **{"jPointsAreConsecutive": down, "alternativeRowScanning": turning, "packingType": "grid_ieee"},
        "latitudeOfFirstGridPointInDegrees": latitude[rows[0]],
        "latitudeOfLastGridPointInDegrees": latitude[rows[-1]],
        "longitudeOfFirstGridPointInDegrees": longitude[columns[0]] % 360,
        "longitudeOfLastGridPointInDegrees": longitude[columns[-1]] % 360,
    }
    message = eccodes.codes_grib_new_from_samples("regular_ll_pl_grib2")
    for key, value in keys.items():
        eccodes.codes_set(message, key, value)
    eccodes.codes_set_values(message, np.array(values))
    with open(tmp_path / "a.grib", "wb") as file:
        eccodes.codes_write(message, file)
    eccodes.codes_release(message)
    source = open_source(chosen({}), part(), [tmp_path / "a.grib"])
    np.testing.assert_array_equal(fields(source)[0, 0], truth.astype(np.float32))
    np.testing.assert_allclose(source.coordinates["latitude"], latitude)
    np.testing.assert_allclose(source.coordinates["longitude"] % 360, longitude % 360)
    assert (np.diff(source.coordinates["longitude"]) > 0).all()


# ------------------------------------------------------------------------------------------- no pair of states


def test_data_too_short_for_a_pair_are_refused_at_configuration() -> None:
    changes: dict[str, Any] = {"samples": {"dt": 8}}

    def said(source: dict[str, Any], **keys: Any) -> str:
        dataset = {"kind": "era5", "source": source, **keys}
        plans = {"p": {"study": "era5_vit", "settings": {**ERA5_RUN, "dataset": "mine"}, "runs": {"a": changes}}}
        with pytest.raises(UserError) as caught:
            resolve.load({"targets": ["p"], "datasets": {"mine": dataset}, "plans": plans})
        return str(caught.value)

    simulated = {"kind": "simulated", "latitudes": 16, "longitudes": 32, "days": 2, "train": [2000], "valid": [2001]}
    expected = "plans.p.runs.a.samples.dt: train has no pair of states 8 stored steps apart: its files"
    assert f"{expected} (of a year each) hold 8 times; choose a smaller dt" in said(simulated)
    files = {"kind": "files", "paths": ["a.grib"]}
    both = {"channels": ["t2m"], "crop": [16, 32], "split": DAYS}
    assert f"{expected} (of a year each) hold 8 times" in said(files, **both, step_hours=6)
    across = {"train": ["2000-12-31", "2001-01-01"], "valid": ["2002-01-01", "2002-01-02"]}
    assert "hold 4 times" in said(files, **both | {"split": across}, step_hours=6)
    changes["samples"] = {"dt": 4, "history": [4]}
    message = said(files, **both, step_hours=6)
    assert "4 stored steps apart with a history of 4 (samples.history)" in message


@pytest.mark.parametrize("hours", [1, 5, 6, 7, 24, 30])
def test_times_are_counted_as_they_are_kept(hours: int) -> None:
    """What is refused at configuration is what a year's file has none of, to the last time."""
    dataset = chosen({}, step_hours=hours, split={"train": ["1999-12-29", "1999-12-31"], "valid": DAYS["valid"]})
    kept = (np.datetime64("1999-12-29", "h") + np.arange(72)).astype(int) % hours == 0
    count, kind = int(kept.sum()), parts.kind_of(dataset)
    with pytest.raises(Refused, match=f"train has no .* hold {count} times"):
        kind.check_samples(dataset, PairSamples(kind="pairs", dt=count))
    with pytest.raises(Refused, match="valid has no"):  # which is shorter
        kind.check_samples(dataset, PairSamples(kind="pairs", dt=count - 1))


def test_doctor_says_that_a_run_has_no_samples(tmp_path: Path) -> None:
    settings = {"kind": "era5", "source": {"kind": "prepared", "path": str(tmp_path / "years")}}
    write_years(tmp_path / "years", {"train": {2000: 5}, "valid": {2001: 4}})
    make_dataset(tmp_path / "data" / "mine", settings)
    dataset = Era5Dataset.model_validate(settings)
    assert probe_data("mine", dataset, tmp_path, [PairSamples(kind="pairs", dt=3)]).status == "ok"
    found = probe_data("mine", dataset, tmp_path, [PairSamples(kind="pairs", dt=4)])
    assert found.status == "FAIL" and "valid: no sample" in found.text and "files of 4 times" in found.text


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e20])
def test_a_forecast_step_without_a_number_is_refused(tmp_path: Path, states: xr.Dataset, wrong: float) -> None:
    """Its field is not left out in silence, at the end least of all."""
    ahead = np.append(np.arange(7) * 6.0, wrong)
    start = ((), 0, {"units": "hours since 2020-02-27", "standard_name": "forecast_reference_time"})
    steps = ("step", ahead, {"units": "hours", "standard_name": "forecast_period"})
    forecast = states.drop_vars("time").rename(time="step").assign_coords(step=steps, time=start)
    forecast.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert f"a forecast step is {wrong:g} hours; expected numbers" in refused(tmp_path / "a.nc")
