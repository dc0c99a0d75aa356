"""From raw files to a described dataset: values against slow loops, memory, what is written beside the values,
and that no split sees another's data.
"""

from __future__ import annotations

import json
import math
import os
import re
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
from pydantic import TypeAdapter

from dlscale.config import resolve as config
from dlscale.config.dataset import dataset_type
from dlscale.core.errors import UserError
from dlscale.data import parts
from dlscale.data.loaders import torch_loader
from dlscale.data.loaders.base import Share
from dlscale.data.loaders.settings import TorchLoader
from dlscale.data.manifest import IDENTITY, FieldInfo, Manifest, Transform
from dlscale.data.parts import load_dataset
from dlscale.data.source import block_average
from dlscale.data.store import Moments, Reader
from dlscale.datasets.cosmo.channels import CHANNELS, DENSITY, TEMPERATURE, VELOCITY
from dlscale.datasets.cosmo.kind import CropSamples
from dlscale.datasets.cosmo.samples import Crops
from dlscale.datasets.era5.extra import Extra
from dlscale.datasets.era5.kind import PairSamples
from dlscale.datasets.era5.samples import Pairs
from tests.conftest import COSMO, ERA5, ROOT, make_dataset, make_parts, stage
from tests.raw_files import CHANNELS_OF, cosmo, era5, published, volume, write_volume, write_years

# ---- arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 5, 7])
def test_block_average_is_the_slow_loop(factor: int) -> None:
    """Sizes that a factor does not divide lose their last cells; other axes are left alone."""
    values = np.random.default_rng(factor).normal(5, 3, (2, 7, 9, 12)).astype(np.float32)
    found = block_average(values, factor, (1, 2, 3))
    assert found.dtype == np.float32
    assert found.shape == (2, *(size // factor for size in values.shape[1:]))
    for channel, *cell in np.ndindex(found.shape):
        block = values[(channel, *(slice(i * factor, (i + 1) * factor) for i in cell))]
        assert found[(channel, *cell)] == pytest.approx(block.astype(np.float64).mean(), rel=1e-6, abs=1e-5)
    planes = block_average(values, factor, (2, 3))
    assert planes.shape[:2] == values.shape[:2]


@pytest.mark.parametrize("factor", [16, 64])
def test_averages_of_many_cells_keep_their_digits(factor: int) -> None:
    """Equal values are the worst case: all roundings of a sum may go the same way."""
    values = np.full((1, factor, factor, 2 * factor), 0.1, np.float32)
    found = block_average(values, factor, (1, 2, 3))
    assert abs(found / values[0, 0, 0, 0] - 1).max() < 2e-7 * factor / 3


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


def test_published_transforms() -> None:
    """Densities are log/14; what is physical lies in (-1, 1); empty cells do not end in minus infinity."""
    e = np.float32(math.e)
    assert DENSITY.forward(np.array([1.0, e], np.float32)) == pytest.approx([0, 1 / 14])
    assert DENSITY.forward(np.array([0.0, -1.0, 1e-3], np.float32)) == pytest.approx([math.log(1e-3) / 14] * 3)
    assert TEMPERATURE.forward(np.array([1e2, 1e5, 1e8], np.float32)) == pytest.approx([-1, 0, 1], abs=1e-6)
    assert VELOCITY.forward(np.array([-1000, 500], np.float32)) == pytest.approx([-1, 0.5])


def test_moments_merge_to_those_of_all_values_in_any_split() -> None:
    """Means far from zero, where sums of squares would cancel; splits of any sizes, empty ones too."""
    rng = np.random.default_rng(1)
    values = np.stack([rng.normal(1e6, 1, 600), rng.exponential(1e-3, 600), rng.normal(0, 1e4, 600)])
    for trial in range(20):
        cuts = np.sort(rng.integers(0, 601, trial))
        merged = Moments.empty(3)
        pieces = [Moments.of(piece, 0) for piece in np.split(values, cuts, axis=1) if piece.size]
        rng.shuffle(pieces)  # type: ignore[arg-type]
        for piece in pieces:
            merged = merged.merged(Moments.from_json(piece.to_json()))
            merged = merged.merged(Moments.empty(3))
        assert merged.count == 600
        np.testing.assert_allclose(merged.mean, values.mean(axis=1), rtol=1e-12)
        np.testing.assert_allclose(merged.std, values.std(axis=1), rtol=1e-9)
        np.testing.assert_array_equal(merged.minimum, values.min(axis=1))
        np.testing.assert_array_equal(merged.maximum, values.max(axis=1))
    assert Moments.of(np.full((1, 99_999), 0.1, np.float32), 0).std == [0.0]


@pytest.mark.parametrize("shape", [(4, 5, 1111, 3), (300, 5, 7), (3, 2, 70_001)])
def test_moments_of_blocks_are_those_of_all_values(shape: tuple[int, ...]) -> None:
    """Of few large rows, of many small ones; with channels along either axis, or none."""
    values = (np.random.default_rng(2).normal(0, 3, shape) + 1e3).astype(np.float32)
    for axis in (None, 0, 1):
        found, rest = Moments.of(values, axis), tuple(a for a in range(len(shape)) if a != axis)
        exact = values.astype(np.float64)
        assert found.count == values.size / (shape[axis] if axis is not None else 1)
        for key, truth in (("mean", exact.mean), ("std", exact.std), ("minimum", exact.min), ("maximum", exact.max)):
            np.testing.assert_allclose(getattr(found, key), np.atleast_1d(truth(axis=rest)), rtol=1e-9, err_msg=key)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5000, -1])
def test_moments_of_what_is_not_finite_are_not(bad: float, place: int) -> None:
    """The vectors that sums are made in do not lose it."""
    values = np.random.default_rng(3).normal(size=(2, 9001)).astype(np.float32)
    assert Moments.of(values, 0).finite
    values[1, place] = bad
    assert not Moments.of(values, 0).finite


# ---- preprocessing -------------------------------------------------------------------------------------


def stored(path: Path, name: str) -> np.ndarray:
    """Return a whole dataset as a reader gives it."""
    return Reader(path, name)[(slice(None),) * 4]


def slow(fields: dict[str, np.ndarray], factor: int) -> dict[str, np.ndarray]:
    """Block means, then the published transform, cell by cell and in float64."""
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
    """On disk [D, H, W, C]; through readers, samples and the manifest as if it were [C, D, H, W]."""
    found = {}
    for order in ("first", "last"):
        settings = {**COSMO, "storage": {"channels": order, "chunk": chunk, "dtype": dtype}, "pieces": 3}
        folder = make_dataset(tmp_path / order, settings)
        manifest = Manifest.read(folder / "manifest.json")
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
    fields = volume((14, 15, 17), seed=factor)  # no cube, and not what 2 or 3 divide
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
    """Return all arrays of a part's file."""
    with h5py.File(folder / f"{part}.h5") as file:
        return {name: file[name][()] for name in ("Nbody", "Hydro", "fields", "time") if name in file}


def test_pieces_and_blocks_do_not_show_in_the_volume(tmp_path: Path) -> None:
    """In one piece and block, in three pieces, and in blocks of a few rows with some left over: bitwise the same."""
    paths = [write_volume(tmp_path / name, volume((46, 64, 64), seed)) for seed, name in enumerate(("a.h5", "b.h5"))]
    settings = cosmo(paths[:1], paths[1:], downsample=2)
    variants = {"whole": {}, "pieces": {"pieces": 3}, "blocks": {"memory_mb": 2}}
    for name, change in variants.items():
        make_parts(tmp_path / name, {**settings, **change})
    dataset = load_dataset(tmp_path / "blocks" / "config.yaml")
    source = store_source(dataset, "train/a", paths[0])
    rows, block = source.fields[0].rows, dataset.memory_mb * 1_000_000 // source.bytes_per_row
    source.close()
    assert 1 < block < rows and rows % block, "the last block is no partial one: choose another size"
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


def store_source(dataset: Any, label: str, path: Path) -> Any:
    return parts.needed(dataset, "source", "open_source")(dataset, parts.part(dataset, label), [path])


def test_pieces_and_blocks_do_not_show_in_the_series(tmp_path: Path, era5_data: Path) -> None:
    sources = {path.name: path for path in (era5_data / "source").iterdir()}
    folder = tmp_path / "pieces"
    settings = {**ERA5, "pieces": 3}
    assert stage("configure", "--settings", json.dumps(settings), "--out", folder / "config.yaml") == 0
    pieces = []
    for piece in range(3):
        pieces.append(folder / f"{piece}.h5")
        arguments = ["--part", "train/2001", "--piece", piece, "--source", sources["2001.nc"], "--out", pieces[-1]]
        assert stage("preprocess", "--config", folder / "config.yaml", *arguments) == 0
    out = folder / "train" / "2001.h5"
    assert stage("assemble", "--config", folder / "config.yaml", "--pieces", *pieces, "--out", out) == 0
    expected, found = comparable(era5_data, "train/2001"), comparable(folder, "train/2001")
    assert set(found) == {"fields", "time"}
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])
    with h5py.File(out) as file, h5py.File(era5_data / "train" / "2001.h5") as whole:
        np.testing.assert_allclose(file["sum/fields"][()], whole["sum/fields"][()], rtol=1e-12)
        np.testing.assert_allclose(whole["sum/fields"][()], whole["fields"][()].sum(axis=0, dtype=float), rtol=1e-12)


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
for size in ("small", "big"):  # the first imports everything
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
    """121 MB of input in stages of 16 MB: the process grows by no more than that and what libraries keep."""

    def positive(shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
        """What `prepared` expects, and `files` takes as well."""
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
    options = {"memory_mb": bound, "storage": {"dtype": dtype}}
    settings = {
        "config": cosmo([tmp_path / "small.h5", big], [tmp_path / "valid.h5"], **options),
        "prepared-small": cosmo([tmp_path / "small.h5"], [tmp_path / "valid.h5"], "prepared", memory_mb=bound),
        "prepared-big": cosmo([big], [tmp_path / "valid.h5"], "prepared", memory_mb=bound),
    }
    for name, values in settings.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(values))
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    grown = {name: size / 1e6 for name, size in json.loads(done.stdout).items()}
    assert all(size < bound + 8 for size in grown.values()), grown
    assert stored(tmp_path / "final.h5", "Nbody").shape == (4, edge, edge, edge)


# ---- storage -------------------------------------------------------------------------------------------


def test_float16_keeps_its_promise(tmp_path: Path) -> None:
    """Each value is off by at most the recorded error, and by 2^-11 of its distance from the mean."""
    paths = [write_volume(tmp_path / "a.h5", volume((24,) * 3)), write_volume(tmp_path / "b.h5", volume((8,) * 3, 1))]
    for dtype in ("float32", "float16"):
        make_parts(tmp_path / dtype, cosmo(paths[:1], paths[1:], storage={"dtype": dtype, "chunk": 16}))
    exact, half = (tmp_path / dtype / "train" / "a.h5" for dtype in ("float32", "float16"))
    for name, channels in CHANNELS_OF.items():
        x, y = (stored(path, name).astype(np.float64) for path in (exact, half))
        gap = abs(x - y)
        mean, std = x.mean(axis=(1, 2, 3), keepdims=True), x.std(axis=(1, 2, 3), keepdims=True)
        rounding = 4 * np.spacing(abs(x).max(axis=(1, 2, 3), keepdims=True).astype(np.float32))  # float32's own
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
        # Statistics are of the values before they are rounded.
        assert moments_of(exact, name).to_json() == moments_of(half, name).to_json()


def test_a_constant_channel_is_stored_exactly(tmp_path: Path) -> None:
    """In validation data a channel may be constant; half precision must not divide by its zero variance."""
    flat = volume((8, 8, 8))
    flat["Nbody"][1] = 123.4
    paths = [write_volume(tmp_path / "a.h5", volume((8, 8, 8), 1)), write_volume(tmp_path / "b.h5", flat)]
    make_parts(tmp_path, cosmo(paths[:1], paths[1:], storage={"dtype": "float16"}))
    expected = np.full((8, 8, 8), VELOCITY.forward(np.float32(123.4)))
    np.testing.assert_allclose(stored(tmp_path / "valid" / "b.h5", "Nbody")[1], expected, rtol=1e-6)


# ---- what stands beside the values ---------------------------------------------------------------------


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.endswith(b"IEND\xaeB`\x82")
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


def test_volumes_carry_names_units_and_provenance(cosmo_data: Path) -> None:
    manifest = Manifest.read(cosmo_data / "manifest.json")
    assert manifest.kind == "cosmo"
    assert list(manifest.splits) == ["train", "valid", "test"]
    assert [len(files) for files in manifest.splits.values()] == [2, 1, 1]
    with h5py.File(cosmo_data / "train" / "box000.h5") as file, h5py.File(cosmo_data / "source" / "box000.h5") as raw:
        for name, (channels, units, transforms) in CHANNELS.items():
            attributes = dict(file[name].attrs)
            assert list(attributes["channels"]) == list(channels)
            assert list(attributes["units"]) == list(units)
            assert [Transform(**values) for values in json.loads(attributes["transforms"])] == list(transforms)
            info = manifest.fields[name]
            assert (info.channels, info.units, info.transforms) == (list(channels), list(units), list(transforms))
            assert info.grid == [32, 32, 32]
        source = json.loads(file.attrs["source"])
        assert source.pop("raw_file") == "box000.h5"
        assert source and set(source) == set(raw.attrs)  # what the raw file says of itself
        settings = json.loads(file.attrs["settings"])
    everything = manifest.provenance["settings"]
    assert TypeAdapter(dataset_type()).validate_python(everything) == load_dataset(cosmo_data / "config.yaml")
    # What does not decide the values (a bound on memory, the other splits) must not make a file another one.
    assert settings == {k: v for k, v in everything.items() if k not in {"source", "split", "pieces", "memory_mb"}}
    width, height = png_size(cosmo_data / "preview.png")
    assert width > 400 and height > 400


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
        assert np.datetime64("1970-01-01T00") + np.timedelta64(int(hours[0]), "h") == np.datetime64("2001-01-01T00")
        assert file["fields"].chunks is None  # whole times lie together
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
    assert min(png_size(era5_data / "preview.png")) > 300


def test_the_manifest_says_which_files_and_their_content(cosmo_data: Path, tmp_path: Path) -> None:
    import hashlib

    manifest = Manifest.read(cosmo_data / "manifest.json")
    for files in manifest.splits.values():
        for file in files:
            content = manifest.path(file).read_bytes()
            assert (file.bytes, file.rows) == (len(content), 32)
            assert file.digest == hashlib.sha256(content).hexdigest()
            assert not Path(file.path).is_absolute()  # the folder can be moved
    manifest.write(tmp_path / "manifest.json")
    again = Manifest.read(tmp_path / "manifest.json")
    assert again.fields == manifest.fields and again.splits == manifest.splits
    assert again.provenance == manifest.provenance
    with pytest.raises(UserError, match=r"no valid2 part; its splits: train, valid, test"):
        manifest.files("valid2")


def test_the_same_settings_make_the_same_files(cosmo_data: Path, tmp_path: Path) -> None:
    make_parts(tmp_path, COSMO)
    paths = [path.relative_to(cosmo_data) for path in sorted(cosmo_data.rglob("*.h5"))]
    assert len(paths) == 3 * 4  # raw, in a piece, final
    for path in paths:
        assert (tmp_path / path).read_bytes() == (cosmo_data / path).read_bytes(), path


# ---- no split sees another's data ----------------------------------------------------------------------


def numbered(rows: int) -> dict[str, np.ndarray]:
    """Return a volume whose cells hold the number of their row (plus something, so that no channel is constant)."""
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
        centres = (np.arange(first, last) + 0.5) * factor - 0.5  # the mean of the averaged rows
        np.testing.assert_allclose(rows, centres, rtol=1e-5, err_msg=split)
    assert len(list(tmp_path.glob("*/box.h5"))) == len(expected)


@pytest.mark.slow
def test_periods_are_disjoint_times(tmp_path: Path, era5_data: Path) -> None:
    """Days of one file, cut between two splits of which one is in two years: every time in its own split, once."""
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
    folder = make_dataset(tmp_path / "data", settings)
    manifest = Manifest.read(folder / "manifest.json")
    found: dict[str, list[str]] = {}
    for split, files in manifest.splits.items():
        for file in files:
            with h5py.File(manifest.path(file)) as opened:
                hours = opened["time"][()].astype("timedelta64[h]") + np.datetime64("1970-01-01T00")
            assert {str(hour)[:4] for hour in hours} == {Path(file.path).stem}  # a file a year
            found.setdefault(split, []).extend(str(hour)[:10] for hour in hours)
    assert {split: dict(Counter(days)) for split, days in found.items()} == {
        "train": {f"2001-01-0{day}": 4 for day in (3, 4, 5)} | {f"2002-01-0{day}": 4 for day in (1, 2)},
        "valid": {f"2002-01-0{day}": 4 for day in (3, 4)},
        "test": {f"2001-01-0{day}": 4 for day in (1, 2)},
    }


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (cosmo([Path("a.h5")], [Path("a.h5")]), "'a.h5' stands in two splits"),
        (cosmo([Path("a.h5")], [Path("a.h5")], "prepared"), "'a.h5' stands in two splits"),
        (cosmo([Path("a.h5")], [Path("b/../a.h5")], "prepared"), "stands in two splits"),
        ({**ERA5, "source": {**ERA5["source"], "valid": [2002]}}, "year 2002 stands twice"),
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


def test_one_file_under_two_names_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A link to a training file, or a copy, is no validation data."""
    first = write_volume(tmp_path / "a.h5", published(volume((8, 8, 8))))
    (tmp_path / "b.h5").symlink_to(first)
    folder = tmp_path / "data"
    settings = cosmo([first], [tmp_path / "b.h5"], "prepared")
    assert stage("configure", "--settings", json.dumps(settings), "--out", folder / "config.yaml") == 0
    products = ["--manifest", folder / "m.json", "--stats", folder / "stats"]
    sources = ["--source", first, tmp_path / "b.h5"]
    assert stage("describe", "--config", folder / "config.yaml", *sources, *products) == 2
    error = capfd.readouterr().err
    assert "the same file is in train and valid" in error and error.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml"]


@pytest.mark.slow
def test_files_of_one_name_do_not_stand_in_for_each_other(tmp_path: Path) -> None:
    """`train/box.h5` and `valid/box.h5` are two files; so are `a.b.h5` and `a b.h5` once their names are harmless."""
    names = ["train/box.h5", "valid/box.h5", "more/box.hdf5", "a.b.h5", "a b.h5"]
    fields = [volume((8, 8, 8), seed) for seed, _ in enumerate(names)]
    for kind, form in (("files", dict), ("prepared", published)):
        paths = [write_volume(tmp_path / kind / name, form(values)) for name, values in zip(names, fields, strict=True)]
        settings = cosmo([paths[0], paths[2], paths[3], paths[4]], paths[1:2], kind)
        manifest = Manifest.read(make_dataset(tmp_path / kind / "data", settings) / "manifest.json")
        files = [*manifest.files("train"), *manifest.files("valid")]
        assert len({file.path for file in files}) == len({file.digest for file in files}) == 5
        for file, seed in zip(files, (0, 2, 3, 4, 1), strict=True):
            np.testing.assert_allclose(
                stored(manifest.path(file), "Nbody"), published(fields[seed])["Nbody"], rtol=1e-5
            )
    urls = ["https://example.org/one/box.h5", "https://example.org/two/box.h5?version=3"]
    source = {"kind": "files", "train": urls[:1], "valid": urls[1:]}
    named = parts.raws(TypeAdapter(dataset_type()).validate_python({"kind": "cosmo", "source": source}))
    assert [raw.origin for raw in named.values()] == urls
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in named)


@pytest.mark.parametrize("kind", ["files", pytest.param("prepared", marks=pytest.mark.slow)])
def test_statistics_are_of_the_training_part_alone(tmp_path: Path, kind: str) -> None:
    def described(valid: dict[str, np.ndarray]) -> tuple[dict[str, bytes], dict[str, FieldInfo]]:
        write_volume(tmp_path / "b.h5", valid)
        folder = make_dataset(tmp_path / "data", cosmo([tmp_path / "a.h5"], [tmp_path / "b.h5"], kind))
        stats = {path.name: path.read_bytes() for path in (folder / "stats").iterdir()}
        return stats, Manifest.read(folder / "manifest.json").fields

    form = published if kind == "prepared" else dict
    write_volume(tmp_path / "a.h5", form(volume((8, 8, 8), 1)))
    other = {name: values * 3 + 0.5 for name, values in form(volume((12, 10, 8), 2)).items()}
    assert described(form(volume((8, 8, 8), 3))) == described(other)


@pytest.mark.slow
def test_a_channel_that_is_constant_in_the_validation_part_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No skill can be told of it: a naive answer is exact."""
    write_volume(tmp_path / "a.h5", volume((8, 8, 8), 1))
    fields = volume((8, 8, 8), 2)
    fields["Hydro"][2] = 0.5
    write_volume(tmp_path / "b.h5", fields)
    make_dataset(tmp_path / "data", cosmo([tmp_path / "a.h5"], [tmp_path / "b.h5"]))
    assert re.findall(r"(\w+): channel '(\w+)' is constant over the validation part", caplog.text) == [
        ("Hydro", "gas_velocity_y")
    ]


def test_statistics_of_series_are_of_the_training_part_alone(tmp_path: Path, era5_data: Path) -> None:
    """Validation and test may be changed beyond recognition: neither statistics nor climatology move."""
    import shutil

    folder = tmp_path / "data"
    shutil.copytree(era5_data, folder, ignore=shutil.ignore_patterns("stats", "manifest.json", "pieces", "source"))
    with h5py.File(folder / "valid" / "2003.h5", "r+") as file:
        file["fields"][...] *= 7
        moments = json.loads(file["fields"].attrs["moments"])
        file["fields"].attrs["moments"] = json.dumps({**moments, "mean": [1e9] * len(moments["mean"])})
        file["sum/fields"][...] *= 7
    products = ["--manifest", folder / "manifest.json", "--stats", folder / "stats"]
    assert stage("describe", "--config", folder / "config.yaml", *products) == 0
    for path in (era5_data / "stats").iterdir():
        assert (folder / "stats" / path.name).read_bytes() == path.read_bytes(), path.name
    old, new = (Manifest.read(each / "manifest.json") for each in (era5_data, folder))
    assert old.fields == new.fields
    assert old.files("valid")[0].digest != new.files("valid")[0].digest


# ---- every pair, once ------------------------------------------------------------------------------------


def pair_folder(tmp_path: Path, years: dict[int, int]) -> Manifest:
    """Return a published folder whose training values are 10000 x year + time, in one channel of 2 x 4 points."""
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
    """A leap year between two others, and a file too short to hold a pair.

    The published loader took every file to be as long as the first, never used sample 0 and used sample 1 thrice.
    """
    years = {2003: 1460, 2004: 1464, 2005: 1460, 2006: dt}
    manifest = pair_folder(tmp_path, years)
    pairs = Pairs(manifest, "train", PairSamples(kind="pairs", dt=dt), seed=0)
    expected = {(file, row) for file, times in enumerate(years.values()) for row in range(times - dt)}
    assert pairs.size == len(expected) == 1460 + 1464 + 1460 - 3 * dt
    orders = []
    for epoch in range(3):
        places = pairs.boxes(epoch)
        found = list(zip(places.file.tolist(), places.input[:, 0].tolist(), strict=True))
        assert len(found) == len(expected) and set(found) == expected
        orders.append(found)
    assert orders[0] != orders[1] != orders[2] and orders[0] != sorted(orders[0])


def test_every_pair_reaches_the_model_once(tmp_path: Path) -> None:
    """Through the loader, with a last batch that is a partial one: the values themselves say which pair they are."""
    years = {2003: 12, 2004: 17, 2005: 5}
    manifest = pair_folder(tmp_path, years)
    pairs = Pairs(manifest, "train", PairSamples(kind="pairs", dt=2), seed=3)
    loader = torch_loader.build(pairs, TorchLoader(kind="torch", workers=0), Share(8), torch.device("cpu"))
    expected = sorted(10_000 * (year - 2000) + row for year, times in years.items() for row in range(times - 2))
    for epoch in range(2):
        batches = list(loader.epoch(epoch))
        assert [len(x) for x, _ in batches] == [8, 8, 8, 4]
        x, y = (torch.cat([batch[side] for batch in batches])[:, 0, 0, 0] for side in (0, 1))
        assert sorted(x.int().tolist()) == expected
        assert (y - x == 2).all()
