"""From raw files to a described dataset: values compared with slow loops, memory, metadata, and disjoint splits."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from dlscale.config import resolve as config
from dlscale.core.errors import UserError
from dlscale.data import parts, store
from dlscale.data.describe import check_disjoint, describe_own
from dlscale.data.kind import name_files, stem
from dlscale.data.manifest import IDENTITY, FieldInfo, File, Manifest, Transform
from dlscale.data.reads import load_dataset
from dlscale.data.source import block_average
from dlscale.data.store import Moments, Reader
from dlscale.extensions.cosmo_unet.cosmo.channels import CHANNELS, DENSITY, TEMPERATURE, VELOCITY
from dlscale.extensions.cosmo_unet.cosmo.kind import CropSamples
from dlscale.extensions.cosmo_unet.cosmo.samples import Crops
from dlscale.extensions.era5_vit.era5.extra import Extra
from dlscale.extensions.era5_vit.era5.kind import PairSamples
from dlscale.extensions.era5_vit.era5.samples import Pairs
from tests.conftest import COSMO, ERA5, make_dataset, make_parts, variables
from tests.raw_files import CHANNELS_OF, cosmo, era5, published, volume, write_volume, write_years

# ---- arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 5, 7])
def test_block_average_equals_a_slow_loop(factor: int) -> None:
    """If the factor does not divide a size, the last cells are dropped. Axes that are not averaged are unchanged."""
    values = np.random.default_rng(factor).normal(5, 3, (2, 7, 9, 12)).astype(np.float32)
    found = block_average(values, factor, (1, 2, 3))
    assert (found.dtype, found.shape) == (np.float32, (2, *(size // factor for size in values.shape[1:])))
    for channel, *cell in np.ndindex(found.shape):
        block = values[(channel, *(slice(i * factor, (i + 1) * factor) for i in cell))]
        assert found[(channel, *cell)] == pytest.approx(block.astype(np.float64).mean(), rel=1e-6, abs=1e-5)
    assert block_average(values, factor, (2, 3)).shape[:2] == values.shape[:2]


@pytest.mark.parametrize("transform", [IDENTITY, DENSITY, VELOCITY, TEMPERATURE, Transform("linear", 280.0, 15.0)])
def test_transforms_invert(transform: Transform) -> None:
    rng = np.random.default_rng(0)
    physical = rng.normal(0, 500, 1000) if transform.kind == "linear" else 10 ** rng.uniform(-2.5, 7, 1000)
    physical = physical.astype(np.float32)
    model = transform.forward(physical)
    assert model.dtype == np.float32
    exact = np.log(physical.astype(np.float64)) if transform.kind == "log" else physical.astype(np.float64)
    np.testing.assert_allclose(model, (exact - transform.offset) / transform.scale, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(transform.inverse(model), physical, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(transform.inverse(torch.from_numpy(model)).numpy(), transform.inverse(model), rtol=1e-6)
    assert Transform(**json.loads(json.dumps(asdict(transform)))) == transform


def test_merged_moments_equal_moments_of_all_values() -> None:
    """Merged moments of pieces, in any order and with empty moments between, equal the moments of all values.

    The first channel's mean is a million times its standard deviation, so a sum of squares would lose the variance.
    """
    rng = np.random.default_rng(1)
    values = np.stack([rng.normal(1e6, 1, 600), rng.exponential(1e-3, 600), rng.normal(0, 1e4, 600)])
    for trial in range(20):
        cuts = np.sort(rng.integers(0, 601, trial))
        merged = Moments.empty(3)
        pieces = [Moments.of(piece, 0) for piece in np.split(values, cuts, axis=1) if piece.size]
        rng.shuffle(pieces)  # type: ignore[arg-type]
        for piece in pieces:
            merged = merged.merged(Moments.from_json(piece.to_json())).merged(Moments.empty(3))
        assert merged.count == 600
        np.testing.assert_allclose(merged.mean, values.mean(axis=1), rtol=1e-12)
        np.testing.assert_allclose(merged.std, values.std(axis=1), rtol=1e-9)
        np.testing.assert_array_equal(merged.minimum, values.min(axis=1))
        np.testing.assert_array_equal(merged.maximum, values.max(axis=1))
    assert Moments.of(np.full((1, 99_999), 0.1, np.float32), 0).std == [0.0]


# ---- preprocessing -------------------------------------------------------------------------------------


def stored(path: Path, name: str) -> np.ndarray:
    """Return a complete field, as a reader reads it."""
    return Reader(path, name)[(slice(None),) * 4]


def slow(fields: dict[str, np.ndarray], factor: int) -> dict[str, np.ndarray]:
    """Return block means with SC22's transform, cell by cell in float64."""
    found = {}
    for name, values in fields.items():
        size = [edge // factor for edge in values.shape[1:]]
        means = np.empty((len(values), *size))
        for channel, *cell in np.ndindex(means.shape):
            means[(channel, *cell)] = values[
                (channel, *(slice(i * factor, (i + 1) * factor) for i in cell))
            ].mean(dtype=np.float64)  # fmt: skip
        for channel, transform in enumerate(CHANNELS[name][2]):
            x = np.log(np.maximum(means[channel], transform.floor)) if transform.kind == "log" else means[channel]
            means[channel] = (x - transform.offset) / transform.scale
        found[name] = means
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "dtype"),
    [
        *((None, "float32"), (5, "float16")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((None, "float16"), (5, "float32"))),
    ],
)
def test_channels_last_is_another_order_of_the_same(tmp_path: Path, chunk: int | None, dtype: str) -> None:
    """Files with channels last, [D, H, W, C], are read exactly like files with channels first, [C, D, H, W].

    The equality holds for readers, samples and the manifest.
    """
    found = {}
    for order in ("first", "last"):
        settings = {**COSMO, "storage": {"channels": order, "chunk": chunk, "dtype": dtype}, "pieces": 3}
        manifest = Manifest.read(make_dataset(tmp_path / order, settings) / "manifest.json")
        path = manifest.path(manifest.files("train")[0])
        with h5py.File(path) as file:
            channels, grid = len(manifest.fields["Hydro"].channels), (32, 32, 32)
            shape = (channels, *grid) if order == "first" else (*grid, channels)
            edge = chunk and (5, 5, 5)
            assert file["Hydro"].shape == shape and file["Hydro"].dtype == dtype
            assert file["Hydro"].chunks == (edge and ((channels, *edge) if order == "first" else (*edge, channels)))
        crops = Crops(manifest, "train", CropSamples(kind="crops", crop=12, train=5), seed=1)
        found[order] = [stored(path, "Nbody"), stored(path, "Hydro"), *(a for i in range(5) for a in crops.read(0, i))]
        found[order] += [np.array([getattr(info, key) for key in ("mean", "std")]) for info in manifest.fields.values()]
    for first, last in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(first, last)


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_preprocessing_against_a_slow_loop(factor: int, tmp_path: Path) -> None:
    fields = volume((14, 15, 17), seed=factor)  # not a cube, and not every size is a multiple of 2 or 3
    paths = [
        write_volume(tmp_path / name, values) for name, values in (("a.h5", fields), ("b.h5", volume((14, 15, 17), 9)))
    ]
    folder = make_dataset(tmp_path / "data", cosmo(paths[:1], paths[1:], downsample=factor))
    for name, expected in slow(fields, factor).items():
        found = stored(folder / "train" / "a.h5", name)
        assert found.shape == expected.shape and found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
        info = Manifest.read(folder / "manifest.json").fields[name]
        assert info.stored == "model"
        np.testing.assert_allclose(info.mean, expected.mean(axis=(1, 2, 3)), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(info.std, expected.std(axis=(1, 2, 3)), rtol=1e-4)
        np.testing.assert_allclose(info.maximum, expected.max(axis=(1, 2, 3)), rtol=1e-4)


def comparable(folder: Path, part: str) -> dict[str, np.ndarray]:
    """Return the fields and times of a part's file."""
    with h5py.File(folder / f"{part}.h5") as file:
        return {name: file[name][()] for name in ("Nbody", "Hydro", "fields", "time") if name in file}


def test_pieces_and_blocks_do_not_change_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Volumes are bitwise equal if made in one piece, in three pieces, or in small blocks with a remainder."""
    paths = [write_volume(tmp_path / name, volume((46, 64, 64), seed)) for seed, name in enumerate(("a.h5", "b.h5"))]
    settings = cosmo(paths[:1], paths[1:], downsample=2)
    for name, change in {"whole": {}, "pieces": {"pieces": 3}, "blocks": {}}.items():
        monkeypatch.setattr(store, "MEMORY", 2_000_000 if name == "blocks" else 512_000_000)
        make_parts(tmp_path / name, {**settings, **change})
    dataset = load_dataset(tmp_path / "blocks" / "config.yaml")
    source = parts.needed(dataset, "source", "open_source")(dataset, parts.part(dataset, "train/a"), paths[:1])
    rows, block = source.fields[0].rows, 2_000_000 // source.bytes_per_row
    source.close()
    assert 1 < block < rows and rows % block, "the last block must be partial; choose another size"
    for part in ("train/a", "valid/b"):
        expected = comparable(tmp_path / "whole", part)
        assert set(expected) == set(CHANNELS_OF)
        for variant in ("pieces", "blocks"):
            found = comparable(tmp_path / variant, part)
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values)
                moments = [moments_of(tmp_path / each / f"{part}.h5", name) for each in ("whole", variant)]
                for key in ("mean", "std", "minimum", "maximum"):
                    a, b = (getattr(each, key) for each in moments)
                    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def moments_of(path: Path, name: str) -> Moments:
    with h5py.File(path) as file:
        return Moments.from_json(file[name].attrs["moments"])


def test_piece_rows_cover_every_row_once() -> None:
    for rows in (1, 2, 7, 31, 32):
        for pieces in (1, 2, 3, 7):
            ranges = [parts.piece_rows(rows, piece, pieces) for piece in range(pieces)]
            assert [row for first, last in ranges for row in range(first, last)] == list(range(rows))
            lengths = [last - first for first, last in ranges]
            assert max(lengths) - min(lengths) <= 1


MEMORY = """
import json, sys
from pathlib import Path
from dlscale import cli
from dlscale.data import store

store.MEMORY = int(sys.argv[2])

def stage(*arguments):
    assert cli.main([str(argument) for argument in arguments]) == 0

def peak():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

def measured(*arguments):
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark of this process starts anew
    before = peak()
    stage(*arguments)
    return peak() - before

folder, grown = Path(sys.argv[1]), {}
for size in ("small", "big"):  # only "big" is measured; "small" imports all modules before
    raw, config, piece = folder / f"{size}.h5", folder / "config.yaml", folder / "piece.h5"
    measure = measured if size == "big" else stage
    cut = ["--config", config, "--part", f"train/{size}", "--source", raw, "--out", piece]
    grown["preprocess"] = measure("preprocess", *cut)
    grown["assemble"] = measure("assemble", "--config", config, "--pieces", piece, "--out", folder / "final.h5")
    products = ["--manifest", folder / "m.json", "--stats", folder / "stats"]
    both = ["--source", raw, folder / "valid.h5"]
    grown["describe"] = measure("describe", "--config", folder / f"prepared-{size}.yaml", *both, *products)
print(json.dumps(grown))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peak memory is measured through /proc")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_is_bounded_whatever_the_input(tmp_path: Path, dtype: str) -> None:
    """Peak memory is bounded by the block size, not by the input.

    With 121 MB of input and blocks of 16 MB, the process grows by at most 24 MB: a block, and 8 MB that libraries keep.
    """

    def positive(shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
        """Return fields that both source kinds, `prepared` and `files`, accept."""
        return {name: abs(values) for name, values in published(volume(shape)).items()}

    edge, bound = 150, 16
    big = tmp_path / "big.h5"
    with h5py.File(big, "w") as file:
        for name, values in positive((10, edge, edge)).items():
            data = file.create_dataset(name, (len(values), edge, edge, edge), np.float32)
            for first in range(0, edge, 10):
                data[:, first : first + 10] = values
    assert big.stat().st_size > 7 * bound * 1e6
    for name in ("small.h5", "valid.h5"):
        write_volume(tmp_path / name, positive((8, 8, 8)))
    settings = {
        "config": cosmo([tmp_path / "small.h5", big], [tmp_path / "valid.h5"], storage={"dtype": dtype}),
        "prepared-small": cosmo([tmp_path / "small.h5"], [tmp_path / "valid.h5"], "prepared"),
        "prepared-big": cosmo([big], [tmp_path / "valid.h5"], "prepared"),
    }
    for name, values in settings.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(values))
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(bound * 10**6)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables(), timeout=300)
    assert done.returncode == 0, done.stderr
    grown = {name: size / 1e6 for name, size in json.loads(done.stdout).items()}
    assert all(size < bound + 8 for size in grown.values()), grown
    assert stored(tmp_path / "final.h5", "Nbody").shape == (4, edge, edge, edge)


# ---- storage -------------------------------------------------------------------------------------------


def test_float16_values_are_within_the_recorded_error(tmp_path: Path) -> None:
    """Each value differs by at most the recorded error, and by about 2^-11 of its distance from the mean."""
    paths = [write_volume(tmp_path / "a.h5", volume((24,) * 3)), write_volume(tmp_path / "b.h5", volume((8,) * 3, 1))]
    for dtype in ("float32", "float16"):
        make_parts(tmp_path / dtype, cosmo(paths[:1], paths[1:], storage={"dtype": dtype, "chunk": 16}))
    exact, half = (tmp_path / dtype / "train" / "a.h5" for dtype in ("float32", "float16"))
    for name, channels in CHANNELS_OF.items():
        x, y = (stored(path, name).astype(np.float64) for path in (exact, half))
        gap = abs(x - y)
        mean, std = x.mean(axis=(1, 2, 3), keepdims=True), x.std(axis=(1, 2, 3), keepdims=True)
        rounding = 4 * np.spacing(abs(x).max(axis=(1, 2, 3), keepdims=True).astype(np.float32))  # rounding of float32
        assert (gap <= 2.0**-11 * abs(x - mean) + 2.0**-24 * std + rounding).all()
        with h5py.File(half) as file:
            data = file[name]
            assert (data.dtype, data.chunks) == (np.float16, (len(channels), 16, 16, 16))
            recorded = data.attrs["float16_max_error"]
            np.testing.assert_allclose(recorded, gap.max(axis=(1, 2, 3)), rtol=1e-6)
            assert (recorded > 0).all()
        with h5py.File(exact) as file:
            assert file[name].dtype == np.float32
            assert not {"float16_max_error", "scale", "offset"} & set(file[name].attrs)
        # Statistics are computed before values are rounded to float16.
        assert moments_of(exact, name).to_json() == moments_of(half, name).to_json()


# ---- metadata ------------------------------------------------------------------------------------------


def test_series_carry_names_units_coordinates_and_provenance(era5_data: Path) -> None:
    manifest = Manifest.read(era5_data / "manifest.json")
    info, extra = manifest.fields["fields"], Extra.of(manifest)
    assert (manifest.kind, extra.step_hours, info.grid, info.stored) == ("era5", 6.0, [16, 32], "physical")
    with h5py.File(era5_data / "train" / "2001.h5") as file, h5py.File(era5_data / "source" / "2001.nc") as raw:
        assert list(file["fields"].attrs["channels"]) == info.channels
        for index, (channel, unit) in enumerate(zip(info.channels, info.units, strict=True)):
            assert raw[channel].attrs["units"] in (unit, unit.encode())
            np.testing.assert_array_equal(file["fields"][:, index], raw[channel][()])
        np.testing.assert_allclose(extra.latitude, raw["latitude"][()])
        np.testing.assert_allclose(extra.longitude, raw["longitude"][()])
        hours = file["time"][()]
        assert len(hours) == 4 * 5 and (np.diff(hours) == 6).all()
        np.testing.assert_allclose(file["sum/fields"], file["fields"][()].sum(axis=0, dtype=float), rtol=1e-12)
        assert np.datetime64("1970-01-01T00") + np.timedelta64(int(hours[0]), "h") == np.datetime64("2001-01-01T00")
        assert file["fields"].chunks is None  # not chunked: the fields of a time are contiguous
        assert json.loads(file.attrs["source"])["source_files"] == [str(era5_data / "source" / "2001.nc")]
        assert json.loads(file.attrs["settings"]).items() <= manifest.provenance["settings"].items()
    both = np.concatenate([stored(era5_data / "train" / f"{year}.h5", "fields") for year in (2001, 2002)])
    np.testing.assert_allclose(np.load(era5_data / "stats" / "time_means.npy")[0], both.mean(axis=0), rtol=1e-4)
    means, stds = (np.load(era5_data / "stats" / f"global_{name}.npy") for name in ("means", "stds"))
    assert means.shape == stds.shape == (1, len(info.channels), 1, 1)
    exact = both.astype(np.float64)
    np.testing.assert_allclose(means.ravel(), exact.mean(axis=(0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(stds.ravel(), exact.std(axis=(0, 2, 3)), rtol=1e-6)
    assert [(t.offset, t.scale) for t in info.transforms] == list(zip(info.mean, info.std, strict=True))
    assert manifest.path(extra.climatology or "") == (era5_data / "stats" / "time_means.npy").resolve()


def test_the_same_settings_make_the_same_files(cosmo_data: Path, tmp_path: Path) -> None:
    make_parts(tmp_path, COSMO)
    paths = [path.relative_to(cosmo_data) for path in sorted(cosmo_data.rglob("*.h5"))]
    assert len(paths) == 3 * 4  # raw, in pieces, and final
    for path in paths:
        assert (tmp_path / path).read_bytes() == (cosmo_data / path).read_bytes(), path


def test_a_file_of_another_split_is_refused(cosmo_data: Path, tmp_path: Path) -> None:
    """The workflow describes a file again after its time changed. A file of another split must not count then."""
    folder = shutil.copytree(cosmo_data, tmp_path / "data")
    shutil.copy(cosmo_data / "valid/box002.h5", folder / "train/box001.h5")
    with pytest.raises(UserError, match=r"box001\.h5: has the data of valid/box002; delete this file and run"):
        describe_own(load_dataset(folder / "config.yaml"), folder)


# ---- splits share no data ------------------------------------------------------------------------------


def numbered(rows: int) -> dict[str, np.ndarray]:
    """Return a volume whose cells contain the number of their row."""
    row = np.arange(rows, dtype=np.float32)[:, None, None] * np.ones((rows, 4, 4), np.float32)
    return {name: np.stack([row] * len(channels)) for name, channels in CHANNELS_OF.items()}


@pytest.mark.parametrize(
    ("fractions", "factor", "expected"),
    [
        ({"train": 0.5, "valid": 0.25, "test": 0.25, "gap": 3}, 1, [(0, 20), (23, 30), (33, 40)]),
        ({"train": 0.5, "valid": 0.25, "test": 0.25}, 1, [(0, 20), (20, 30), (30, 40)]),
        ({"train": 0.7, "valid": 0.2, "gap": 1}, 2, [(0, 14), (15, 18)]),
        ({"train": 0.33, "valid": 0.33, "test": 0.33}, 1, [(0, 13), (14, 26), (27, 39)]),
    ],
)
def test_fractions_are_disjoint_volumes(
    tmp_path: Path, fractions: dict[str, Any], factor: int, expected: list[tuple[int, int]]
) -> None:
    path = write_volume(tmp_path / "box.h5", numbered(40))
    source = {"kind": "files", "paths": [str(path)], "fractions": fractions}
    make_parts(tmp_path, {"kind": "cosmo", "source": source, "downsample": factor})
    for split, (first, last) in zip(("train", "valid", "test"), expected, strict=False):
        rows = VELOCITY.inverse(stored(tmp_path / split / "box.h5", "Hydro")[1, :, 0, 0])
        centres = (np.arange(first, last) + 0.5) * factor - 0.5  # the mean of the row numbers that a block averages
        np.testing.assert_allclose(rows, centres, rtol=1e-5, err_msg=split)
    assert len(list(tmp_path.glob("*/box.h5"))) == len(expected)


@pytest.mark.slow
def test_periods_are_disjoint_times(tmp_path: Path, era5_data: Path) -> None:
    """Every time is in its own split exactly once, even if a split covers days of two files."""
    channels = Manifest.read(era5_data / "manifest.json").fields["fields"].channels
    paths = [str(era5_data / "source" / f"{year}.nc") for year in (2001, 2002)]
    settings = {
        "kind": "era5",
        "source": {"kind": "files", "paths": paths},
        "channels": channels[:1],
        "split": {
            "train": ["2001-01-03", "2002-01-02"],
            "valid": ["2002-01-03", "2002-01-04"],
            "test": ["2001-01-01", "2001-01-02"],
        },
    }
    manifest = Manifest.read(make_dataset(tmp_path / "data", settings) / "manifest.json")
    found: dict[str, list[str]] = {}
    for split, files in manifest.splits.items():
        for file in files:
            with h5py.File(manifest.path(file)) as opened:
                hours = opened["time"][()].astype("timedelta64[h]") + np.datetime64("1970-01-01T00")
            assert {str(hour)[:4] for hour in hours} == {Path(file.path).stem}  # one file per year
            found.setdefault(split, []).extend(str(hour)[:10] for hour in hours)
    assert {split: dict(Counter(days)) for split, days in found.items()} == {
        "train": {f"2001-01-0{day}": 4 for day in (3, 4, 5)} | {f"2002-01-0{day}": 4 for day in (1, 2)},
        "valid": {f"2002-01-0{day}": 4 for day in (3, 4)},
        "test": {f"2001-01-0{day}": 4 for day in (1, 2)},
    }


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (cosmo([Path("a.h5")], [Path("a.h5")]), "'a.h5' is listed in two splits"),
        (cosmo([Path("a.h5")], [Path("a.h5")], "prepared"), "'a.h5' is listed in two splits"),
        (cosmo([Path("a.h5")], [Path("b/../a.h5")], "prepared"), "is listed in two splits"),
        ({**ERA5, "source": {**ERA5["source"], "valid": [2002]}}, "'2002' is listed in two splits"),
        (
            {
                "kind": "era5",
                "source": {"kind": "files", "paths": ["a.nc"]},
                "channels": ["t2m"],
                "split": {"train": ["2001-01-01", "2001-03-01"], "valid": ["2001-03-01", "2001-04-01"]},
            },
            "train and valid overlap at 2001-03-01",
        ),
        (
            {
                "kind": "era5",
                "source": {"kind": "files", "paths": ["a.nc"]},
                "channels": ["t2m"],
                "split": {"train": ["2001-03-01", "2001-01-01"], "valid": ["2001-04-01", "2001-05-01"]},
            },
            "train ends (2001-01-01) before it begins (2001-03-01)",
        ),
        (
            {
                "kind": "cosmo",
                "source": {"kind": "files", "paths": ["a.h5"], "fractions": {"train": 0.7, "valid": 0.5}},
            },
            "add up to 1.2",
        ),
    ],
)
def test_shared_data_is_refused(dataset: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        config.load({"targets": ["era5_uk"], "datasets": {"mine": dataset}})
    assert "datasets.mine" in str(caught.value)


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    """A link to a training file is refused as validation data."""
    (tmp_path / "b.h5").symlink_to(write_volume(tmp_path / "a.h5", published(volume((8, 8, 8)))))
    splits = {
        split: [File.of(tmp_path / f"{name}.h5", tmp_path, 8)] for split, name in (("train", "a"), ("valid", "b"))
    }
    with pytest.raises(UserError, match="the same file is in train and valid"):
        check_disjoint(Manifest(kind="cosmo", fields={}, splits=splits))


def test_files_with_equal_names_get_different_names() -> None:
    """`train/box.h5` and `valid/box.h5` are two files, and so are `a.b.h5` and `a b.h5`.

    Special characters are replaced.
    """
    urls = ["https://example.org/one/box.h5", "https://example.org/two/box.h5?version=3"]
    named = name_files(["train/box.h5", "valid/box.h5", "more/box.hdf5", "a.b.h5", "a b.h5", *urls]).values()
    assert [raw.origin for raw in named][-2:] == urls
    assert len({stem(raw) for raw in named}) == len(named) == 7
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", raw.name) for raw in named)


@pytest.mark.parametrize("kind", ["files", pytest.param("prepared", marks=pytest.mark.slow)])
def test_statistics_use_only_the_training_part(tmp_path: Path, kind: str) -> None:
    def described(valid: dict[str, np.ndarray]) -> tuple[dict[str, bytes], dict[str, FieldInfo]]:
        write_volume(tmp_path / "b.h5", valid)
        folder = make_dataset(tmp_path / "data", cosmo([tmp_path / "a.h5"], [tmp_path / "b.h5"], kind))
        stats = {path.name: path.read_bytes() for path in (folder / "stats").iterdir()}
        return stats, Manifest.read(folder / "manifest.json").fields

    form = published if kind == "prepared" else dict
    write_volume(tmp_path / "a.h5", form(volume((8, 8, 8), 1)))
    other = {name: values * 3 + 0.5 for name, values in form(volume((12, 10, 8), 2)).items()}
    assert described(form(volume((8, 8, 8), 3))) == described(other)


# ---- every pair, once ------------------------------------------------------------------------------------


def pair_folder(tmp_path: Path, years: dict[int, int]) -> Manifest:
    """Write a folder in SC23's layout, on 2 x 4 points; return its manifest. Values are 10000 (year - 2000) + time."""
    root = write_years(tmp_path / "raw", {"train": years, "valid": {2009: 9}}, channels=1, shape=(2, 4))
    for year, times in years.items():
        with h5py.File(root / "train" / f"{year}.h5", "w") as file:
            values = 10_000.0 * (year - 2000) + np.arange(times)
            file.create_dataset("fields", data=np.tile(values[:, None, None, None], (1, 1, 2, 4)), dtype=np.float32)
    for name, value in (("means", 0.0), ("stds", 1.0)):
        np.save(root / "stats" / f"global_{name}.npy", np.full((1, 1, 1, 1), value, np.float32))
    return Manifest.read(make_dataset(tmp_path / "data", era5(root)) / "manifest.json")


@pytest.mark.parametrize("dt", [1, 4])
def test_every_pair_is_used_once_an_epoch_whatever_the_files_lengths(tmp_path: Path, dt: int) -> None:
    """A leap year is between two other years, and one file is too short for a pair.

    SC23's loader assumed that every file is as long as the first file, never used sample 0, and used sample 1 three
    times.
    """
    years = {2003: 1460, 2004: 1464, 2005: 1460, 2006: dt}
    pairs = Pairs(pair_folder(tmp_path, years), "train", PairSamples(kind="pairs", dt=dt), seed=0)
    expected = {(file, row) for file, times in enumerate(years.values()) for row in range(times - dt)}
    assert pairs.size == len(expected) == 1460 + 1464 + 1460 - 3 * dt
    orders = []
    for epoch in range(3):
        places = pairs.boxes(epoch)
        found = list(zip(places.file.tolist(), places.input[:, 0].tolist(), strict=True))
        assert len(found) == len(expected) and set(found) == expected
        orders.append(found)
    assert orders[0] != orders[1] != orders[2] and orders[0] != sorted(orders[0])
