"""The sample stream: (seed, epoch, index) determine a sample for every loader, number of processes and resume point."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from dlscale.config.laws import check_fields
from dlscale.core.errors import UserError
from dlscale.data import sampling
from dlscale.data.kind import RowSamples
from dlscale.data.loaders import (
    DirectLoader,
    TorchLoader,
    direct_loader,
    torch_loader,
)
from dlscale.data.loaders.base import Loader, Share
from dlscale.data.manifest import File, Manifest, Transform
from dlscale.data.samples import ArraySpec, BoxIndex, Rows, Samples
from dlscale.data.store import Field
from dlscale.extensions.cosmo_unet.cosmo.channels import CHANNELS
from dlscale.extensions.cosmo_unet.cosmo.kind import CropSamples
from dlscale.extensions.cosmo_unet.cosmo.samples import CHOICES, SYMMETRIES, Crops, Symmetry, apply, line
from dlscale.extensions.era5_vit.era5.kind import PairSamples
from dlscale.extensions.era5_vit.era5.samples import InformedPairs, Pairs, open_samples
from tests.raw_files import CHANNELS_OF, manifest_of

CPU = torch.device("cpu")
#: Files with non-cubic volumes of different sizes, as (file, edges), by split.
VOLUMES = {"train": [("small", (6, 7, 8)), ("large", (9, 9, 10))], "valid": [("held-out", (9, 8, 13))]}
#: Files with their number of times, by split.
YEARS = {"train": [("2001", 9), ("2002", 14), ("2003", 2)], "valid": [("2004", 20)]}


def numbers(shape: tuple[int, ...], start: int) -> np.ndarray:
    """Return an array of unique float32 numbers, counted from `start`."""
    return (start + np.arange(np.prod(shape)).reshape(shape)).astype(np.float32)


def write(path: Path, name: str, values: np.ndarray) -> None:
    with h5py.File(path, "a") as file:
        file.create_dataset(name, data=values)


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Return the manifest of volumes in which each cell of each channel has a unique number."""
    folder = tmp_path_factory.mktemp("volumes")
    splits: dict[str, list[tuple[str, int]]] = {}
    for split, files in VOLUMES.items():
        for index, (name, edges) in enumerate(files):
            for field, channels in CHANNELS_OF.items():
                per_channel = [numbers(edges, 1 + 100_000 * c + 10_000 * index) for c in range(len(channels))]
                write(folder / f"{name}.h5", field, np.stack(per_channel))
            splits.setdefault(split, []).append((f"{name}.h5", edges[0]))
    fields = [Field(n, c, u, (len(c), 6, 7, 8), 0, t) for n, (c, u, t) in CHANNELS.items()]
    return manifest_of(folder, "cosmo", fields, splits)


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Return the manifest of series, 2 channels on 5 x 4 points (4 x 4 kept); values identify file and time."""
    folder = tmp_path_factory.mktemp("series")
    splits: dict[str, list[tuple[str, int]]] = {}
    for split, files in YEARS.items():
        for name, times in files:
            write(folder / f"{name}.h5", "fields", numbers((times, 2, 5, 4), 10_000 * (int(name) - 2000)))
            splits.setdefault(split, []).append((f"{name}.h5", times))
    transforms = Transform("linear", 5.0, 2.0), Transform("linear", -3.0, 4.0)
    field = Field("fields", ("u", "v"), ("m/s",) * 2, (9, 2, 5, 4), 1, transforms)
    return manifest_of(folder, "era5", [field], splits, grid=[4, 4], stored="physical")


#: Fields of a row, by name: channel axis, and a function that makes the stored values [N, ...] of N rows.
FIELDS: dict[str, tuple[int | None, Callable[[np.random.Generator, int], np.ndarray]]] = {
    "image": (1, lambda rng, n: rng.integers(0, 256, (n, 2, 6, 5), np.uint8)),
    "mask": (None, lambda rng, n: rng.integers(0, 2, (n, 6, 5), np.uint8)),
    "state": (1, lambda rng, n: rng.normal(5, 3, (n, 2, 4)).astype(np.float32)),
    "scaled": (1, lambda rng, n: rng.normal(size=(n, 2, 4)).astype(np.float16)),
    "label": (None, lambda rng, n: rng.permutation(n).astype(np.uint8)),
    "weight": (None, lambda rng, n: rng.normal(size=n).astype(np.float32)),
    "standard": (None, lambda rng, n: rng.normal(7, 2, n).astype(np.float32)),
    "grey": (1, lambda rng, n: rng.integers(0, 256, (n, 1, 3, 3), np.uint8)),
}
ROWS = {"train": [("a", 12), ("b", 1), ("c", 6)], "valid": [("d", 11)]}
#: By field: number of classes (LABELS), (mean, std) that readers remove, and (offset, scale) of stored values.
LABELS = {"label": 12}
STANDARDISED = {"standard": ([7.0], [2.0]), "grey": ([100.0], [50.0]), "state": ([5.0, 4.0], [3.0, 2.0])}
SCALED = {"scaled": ([1.0, -2.0], [3.0, 0.5])}


def truth(split: str, name: str) -> np.ndarray:
    """Return all rows of a field in a split, as the model gets them."""
    axis, make_values = FIELDS[name]
    stored = [make_values(np.random.default_rng([ord(file), len(name)]), rows) for file, rows in ROWS[split]]
    values = np.concatenate(stored)
    shape = [1 if a != axis else -1 for a in range(values.ndim)]
    if name in SCALED:
        offset, scale = (np.reshape(part, shape) for part in SCALED[name])
        return values.astype(np.float64) * scale + offset
    if name in STANDARDISED:
        mean, std = (np.reshape(part, shape) for part in STANDARDISED[name])
        return (values.astype(np.float64) - mean) / std
    return values.astype(np.int64) if name in LABELS else values


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Return the manifest of files with all kinds of fields; one file is compressed, so only HDF5 can read it."""
    folder = tmp_path_factory.mktemp("table")
    fields = []
    for name, (axis, make_values) in FIELDS.items():
        for file, rows in [*ROWS["train"], *ROWS["valid"]]:
            values = make_values(np.random.default_rng([ord(file), len(name)]), rows)
            with h5py.File(folder / f"{file}.h5", "a") as opened:
                made = opened.create_dataset(name, data=values, compression="gzip" if file == "c" else None)
                if axis is not None:
                    made.attrs["channel_axis"] = axis
                if name in SCALED:
                    made.attrs["offset"], made.attrs["scale"] = (np.float32(part) for part in SCALED[name])
                    made.attrs["transforms"] = "[]"
        channels = tuple(f"{name}{c}" for c in range(1 if axis is None else values.shape[1]))
        dtype = "uint8" if values.dtype == np.uint8 else "float32"
        fields.append(Field(name, channels, ("1",) * len(channels), values.shape, axis, (), dtype))
    splits = {split: [(f"{name}.h5", rows) for name, rows in files] for split, files in ROWS.items()}
    manifest = manifest_of(folder, "table", fields, splits)
    for name, count in LABELS.items():
        manifest.fields[name] = manifest.fields[name].model_copy(update={"classes": count})
    for name, (mean, std) in STANDARDISED.items():
        manifest.fields[name] = manifest.fields[name].model_copy(update={"mean": mean, "std": std}).standardised()
    return manifest


def rows(manifest: Manifest, split: str = "train", seed: int = 0, **settings: Any) -> Rows:
    return Rows(manifest, split, RowSamples(**{"kind": "rows", "input": "image", "target": "label", **settings}), seed)


def crops(manifest: Manifest, split: str = "train", seed: int = 0, **settings: Any) -> Crops:
    return Crops(
        manifest, split, CropSamples(**{"kind": "crops", "crop": 4, "train": 40, "valid": 100, **settings}), seed
    )


def pairs(manifest: Manifest, split: str = "train", seed: int = 0, **settings: Any) -> Pairs:
    return Pairs(manifest, split, PairSamples(kind="pairs", **settings), seed)


def found(places: BoxIndex) -> list[tuple[int, ...]]:
    """Return (file, first cell of the input) of each sample."""
    return [(int(file), *map(int, start)) for file, start in zip(places.file, places.input, strict=True)]


def digest(x: Any, y: Any) -> str:
    """Return a hash that identifies a sample."""
    return hashlib.sha256(np.asarray(x).tobytes() + np.asarray(y).tobytes()).hexdigest()


def epoch_of(loader: Loader, epoch: int, start: int = 0) -> list[list[str]]:
    """Return the digests of an epoch's samples, batch by batch."""
    return [[digest(a, b) for a, b in zip(x, y, strict=True)] for x, y in loader.epoch(epoch, start)]


def flat(batches: list[list[Any]]) -> list[Any]:
    return [sample for batch in batches for sample in batch]


def torch_loader_of(samples: Samples, batch: int = 8, workers: int = 0, rank: int = 0, ranks: int = 1) -> Loader:
    return torch_loader.build(samples, TorchLoader(kind="torch", workers=workers), Share(batch, rank, ranks), CPU)


# ---- random words ----------------------------------------------------------------------------------------


def test_words_one_by_one_are_those_in_bulk() -> None:
    bulk = sampling.words(3, 5, "crops", 50)
    assert bulk.shape == (50, 4) and bulk.dtype == np.uint64
    np.testing.assert_array_equal(np.concatenate([sampling.words(3, 5, "crops", 1, i) for i in range(50)]), bulk)
    np.testing.assert_array_equal(sampling.words(3, 5, "crops", 7, 13), bulk[13:20])
    assert not (sampling.words(3, 5, "crops", 1, 10**12) == bulk).any()


def test_words_never_change() -> None:
    """Random words never change, because repeating an earlier result needs the same samples."""
    assert [hex(word) for word in sampling.words(1, 2, "crops", 1).ravel().tolist()] == [
        "0xc3001e3880c0b47d",
        "0xc3babb2f0d62ff4c",
        "0x9d5455142ac1ec35",
        "0x9d77fb08e9d971df",
    ]


def test_seeds_epochs_and_streams_are_independent() -> None:
    keys = list(itertools.product((0, 1, 12345, 2**40), (0, 1, 2), ("crops", "order", "spor")))
    tables = [sampling.words(seed, epoch, stream, 500) for seed, epoch, stream in keys]
    assert len({word for table in tables for word in table.ravel().tolist()}) == 500 * 4 * len(keys)
    correlation = np.corrcoef([table.ravel() / 2.0**64 - 0.5 for table in tables])
    np.fill_diagonal(correlation, 0)
    assert abs(correlation).max() < 5 / np.sqrt(2000)
    assert len({tuple(sampling.order(seed, epoch, 20).tolist()) for seed in range(5) for epoch in range(5)}) == 25


def test_order_is_a_permutation() -> None:
    for count in (1, 2, 100):
        assert sorted(sampling.order(1, 2, count).tolist()) == list(range(count))
    firsts = Counter(int(sampling.order(0, epoch, 4)[0]) for epoch in range(400))
    assert all(60 < firsts[i] < 140 for i in range(4))


# ---- the 48 symmetries -----------------------------------------------------------------------------------


def index_loop(symmetry: Symmetry, x: np.ndarray, vector: list[tuple[int, int, int]]) -> np.ndarray:
    """Transform cell by cell: find the origin of each cell, and transform the components of its vectors."""
    n = x.shape[1]
    result = np.empty_like(x)
    for cell in np.ndindex(n, n, n):
        source = [0, 0, 0]
        for axis, place in enumerate(cell):
            source[symmetry.axes[axis]] = n - 1 - place if symmetry.flips[axis] else place
        result[(slice(None), *cell)] = values = x[(slice(None), *source)].copy()
        for components in vector:
            for axis, channel in enumerate(components):
                sign = -1 if symmetry.flips[axis] else 1
                result[(channel, *cell)] = sign * values[components[symmetry.axes[axis]]]
    return result


def matrix(symmetry: Symmetry) -> np.ndarray:
    """Return the 3 x 3 matrix that transforms a vector's components."""
    found = np.zeros((3, 3))
    for axis in range(3):
        found[axis, symmetry.axes[axis]] = -1 if symmetry.flips[axis] else 1
    return found


def test_the_symmetries_are_the_group_of_the_cube() -> None:
    matrices = [matrix(symmetry) for symmetry in SYMMETRIES]
    keys = {m.tobytes() for m in matrices}
    assert len(SYMMETRIES) == len(keys) == len(CHOICES["full"]) == 48
    # the symmetries are closed under multiplication
    assert {(a @ b + 0.0).tobytes() for a in matrices for b in matrices} == keys
    assert all((m.T @ m == np.eye(3)).all() for m in matrices)
    determinants = [round(np.linalg.det(m)) for m in matrices]
    assert determinants == [symmetry.determinant for symmetry in SYMMETRIES]
    assert determinants == [1] * len(CHOICES["rotations"]) + [-1] * 24
    assert (matrices[0] == np.eye(3)).all() and CHOICES["none"] == SYMMETRIES[:1]


@pytest.mark.parametrize("number", range(48))
def test_apply_is_the_index_loop(number: int) -> None:
    """Rotations and flips are both applied; the tutorial's loader discards its rotations."""
    x = np.random.default_rng(0).normal(size=(9, 3, 3, 3)).astype(np.float32)
    components = [(1, 2, 3), (8, 6, 7)]  # the components of the second vector are not in order
    before = x.copy()
    found = apply(SYMMETRIES[number], x, components)
    np.testing.assert_array_equal(found, index_loop(SYMMETRIES[number], x, components))
    np.testing.assert_array_equal(x, before)
    assert not np.may_share_memory(found, x) and found.dtype == np.float32


@pytest.mark.parametrize("number", range(48))
def test_vectors_turn_with_the_grid(number: int) -> None:
    """The gradient of a turned potential is the turned gradient. If only the grid is turned, the field differs."""
    potential = np.random.default_rng(2).normal(size=(6, 6, 6))

    def field(p: np.ndarray) -> np.ndarray:
        return np.stack([p, *((np.roll(p, -1, axis) - np.roll(p, 1, axis)) / 2 for axis in range(3))])

    symmetry, vector = SYMMETRIES[number], [(1, 2, 3)]
    turned = apply(symmetry, field(potential), vector)
    np.testing.assert_allclose(turned, field(turned[0]), atol=1e-12)
    if number:
        assert not np.allclose(apply(symmetry, field(potential), []), field(turned[0]))


# ---- crops -------------------------------------------------------------------------------------------------


def content(manifest: Manifest, file: File, field: str) -> np.ndarray:
    with h5py.File(manifest.path(file)) as opened:
        return opened[field][()]


@pytest.mark.parametrize("epoch", [0, 7])
def test_input_and_target_are_the_same_cells(volumes: Manifest, epoch: int) -> None:
    """Input and target are the same cells of a volume with the same symmetry, which also turns vectors."""
    samples = crops(volumes, seed=5)
    assert (samples.input_spec.shape, samples.target_spec.shape) == ((4, 4, 4, 4), (5, 4, 4, 4))
    seen = set()
    for index in range(samples.size):
        places = samples.boxes(epoch)
        symmetry = int(places.symmetry[index])
        assert (places.input == places.target).all()
        box = (slice(None), *(slice(start, start + 4) for start in places.input[index]))
        for field, values in zip(("Nbody", "Hydro"), samples.read(epoch, index), strict=True):
            raw = content(volumes, volumes.files("train")[places.file[index]], field)[box]
            assert raw.shape[1:] == (4, 4, 4)
            np.testing.assert_array_equal(values, index_loop(SYMMETRIES[symmetry], raw, [(1, 2, 3)]))
            assert values.dtype == np.float32
        seen.add(symmetry)
    assert len(seen) > 15


def test_every_offset_of_every_volume_is_equally_likely(volumes: Manifest) -> None:
    """Every crop offset is equally likely, even the last, which the tutorial omits; larger volumes occur more often."""
    samples = crops(volumes, train=40_000)
    offsets = [[edge - 4 + 1 for edge in edges] for _, edges in VOLUMES["train"]]
    table = samples.table(0)
    counts_of = Counter(map(tuple, table[:, :4].tolist()))
    expected = {
        (volume, *place) for volume, counts in enumerate(offsets) for place in itertools.product(*map(range, counts))
    }
    assert set(counts_of) == expected
    mean = len(table) / len(expected)
    chi_square = sum((count - mean) ** 2 for count in counts_of.values()) / mean
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)
    turns = np.bincount(table[:, 4], minlength=48)
    assert len(turns) == 48 and abs(turns - len(table) / 48).max() < 5 * np.sqrt(len(table) / 48)
    # Boxes and symmetries are independent of each other.
    assert abs(np.corrcoef(table[table[:, 0] == 1][:, 1:].T) - np.eye(4)).max() < 5 / np.sqrt(len(table) / 2)


@pytest.mark.parametrize(
    ("symmetry", "count"), [("none", 1), ("rotations", 24), ("full", 48), ("published", 24), ("published_dali", 4)]
)
def test_all_symmetries_of_a_setting_are_equally_likely(volumes: Manifest, symmetry: str, count: int) -> None:
    times = np.bincount(crops(volumes, train=2000, symmetry=symmetry).table(0)[:, 4])
    assert len(times) == count and abs(times - 2000 / count).max() < 5 * np.sqrt(2000 / count)


def test_validation_crops_are_fixed_disjoint_and_not_turned(volumes: Manifest) -> None:
    """Validation crops are all boxes of a grid, equal for every epoch and seed, and contain the stored values."""
    samples = crops(volumes, "valid", seed=1)
    raw = content(volumes, volumes.files("valid")[0], "Nbody")
    expected = [
        (z, y, x) for z in range(0, 9 - 3, 4) for y in range(0, 8 - 3, 4) for x in range(0, 13 - 3, 4)
    ]  # fmt: skip
    assert samples.size == len(expected) == 2 * 2 * 3
    for index, (z, y, x) in enumerate(expected):
        values, _ = samples.read(0, index)
        np.testing.assert_array_equal(values, raw[:, z : z + 4, y : y + 4, x : x + 4])
    other = crops(volumes, "valid", seed=2)
    assert [digest(*samples.read(0, i)) for i in range(12)] == [digest(*other.read(9, i)) for i in range(12)]
    assert crops(volumes, "valid", valid=5).boxes(0).input.tolist() == [list(expected[i * 12 // 5]) for i in range(5)]


def test_the_line_is_fitted_to_volumes_of_any_size(volumes: Manifest) -> None:
    """The linear fit works although the manifest's grid, which is the first volume's, is larger than other volumes."""
    splits = {**volumes.splits, "train": volumes.splits["train"][::-1]}
    fields = {name: info.model_copy(update={"grid": [9, 9, 10]}) for name, info in volumes.fields.items()}
    fitted = line(volumes.model_copy(update={"splits": splits, "fields": fields}))
    assert fitted.shape == (5, 5) and np.isfinite(fitted).all()


def test_training_and_validation_do_not_share_their_choices(volumes: Manifest) -> None:
    """Training and validation choose different crops even of the same volumes; the tutorial has one seed for both."""
    same = Manifest(**{**vars(volumes), "splits": {split: volumes.splits["train"] for split in ("train", "valid")}})
    train, valid = crops(same, "train"), crops(same, "valid")
    first, second = (samples.boxes(0) for samples in (train, valid))
    assert found(first)[: valid.size] != found(second)
    assert set(second.symmetry) == {0} != set(first.symmetry)


# ---- pairs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dt", [1, 2, 5])
def test_pairs_differ_by_dt_within_a_file_and_are_standardised(series: Manifest, dt: int) -> None:
    samples = pairs(series, dt=dt)
    assert samples.input_spec.shape == samples.target_spec.shape == (2, 4, 4)
    assert samples.size == samples.available == sum(max(times - dt, 0) for _, times in YEARS["train"])
    mean, scale = np.array([5, -3])[:, None, None], np.array([2, 4])[:, None, None]
    for index in range(samples.size):
        places = samples.boxes(0)
        row = int(places.input[index, 0])
        assert places.target[index].tolist() == [row + dt, 0, 0]
        raw = content(series, series.files("train")[places.file[index]], "fields").astype(np.float64)
        for values, time in zip(samples.read(0, index), (row, row + dt), strict=True):
            np.testing.assert_allclose(values, (raw[time, :, :4, :4] - mean) / scale, rtol=1e-6)
            assert values.dtype == np.float32


def test_the_first_pairs_are_the_same_in_each_epoch(series: Manifest) -> None:
    """As with the tutorial's `limit_nsamples`, epochs have the first 10 of 8 + 13 + 1 pairs, shuffled in training."""
    samples = pairs(series, dt=1, train=10, subset="first")
    expected = [(0, row, 0, 0) for row in range(8)] + [(1, row, 0, 0) for row in range(2)]
    epochs = [found(samples.boxes(epoch)) for epoch in range(4)]
    assert (samples.size, samples.available) == (10, 22)
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    for wanted in (4, 99):
        valid = pairs(series, "valid", dt=2, valid=wanted, subset="first")
        assert found(valid.boxes(1)) == [(0, row, 0, 0) for row in range(min(wanted, 18))]
    whole = [found(pairs(series, dt=1, subset=subset).boxes(3)) for subset in ("first", "spread")]
    assert whole[0] == whole[1]


def informed(manifest: Manifest, split: str = "train", seed: int = 0, **settings: Any) -> InformedPairs:
    """Return samples with history. The validation file continues the last training file; states are 5 h apart."""
    names = [file.path for split in ("train", "valid") for file in manifest.files(split)]
    starts = {name: 24.0 * 365 * number + 7 for number, name in enumerate(names)}
    starts[names[-1]] = starts[names[-2]] + 5 * manifest.files("train")[-1].rows
    extra = {"starts": starts, "before": {names[-1]: names[-2]}, "step_hours": 5.0}
    samples = open_samples(
        manifest.model_copy(update={"extra": extra}), split, PairSamples(kind="pairs", **settings), seed
    )
    assert isinstance(samples, InformedPairs)
    return samples


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize(("history", "clock"), [([1], []), ([2, 1], ["hour"]), ([], ["day", "hour"])])
def test_inputs_hold_earlier_states_and_the_time(
    series: Manifest, split: str, history: list[int], clock: list[str]
) -> None:
    """Each pair has the values in the files; pairs without a complete history are omitted.

    The history of the first validation pairs is in the last training file.
    """
    samples = informed(series, split, dt=2, history=history, clock=clock)
    back, mean, scale = max(history, default=0), np.array([5, -3])[:, None, None], np.array([2, 4])[:, None, None]
    raw = [content(series, file, "fields").astype(np.float64) for file in series.files(split)]
    before = content(series, series.files("train")[-1], "fields").astype(np.float64)
    offset = len(before) if split == "valid" else 0
    if offset:
        raw = [np.concatenate([before, *raw])]
        assert 2 == len(before) >= back
    pairs_of = [range(offset or back, len(states) - 2) for states in raw]
    truth = {(file, row) for file, rows in enumerate(pairs_of) for row in rows}
    assert samples.size == len(truth)
    files = series.files(split)
    starts = [24 * 365 * number + 7 for number in range(3)] if split == "train" else [24 * 365 * 2 + 7]
    seen = set()
    for index, (file, row) in enumerate(zip(*samples.boxes.places(1), strict=True)):
        seen.add((int(file), int(row) + offset))
        x, y = samples.read(1, index)
        states = raw[file][:, :, :4, :4]
        wanted = [(states[row + offset - lag] - mean) / scale for lag in (0, *history)]
        hour = starts[file] + 5.0 * (row + offset)
        moment = np.datetime64("1970-01-01T00") + np.timedelta64(int(hour), "h")
        day = (moment - moment.astype("datetime64[Y]")) / np.timedelta64(1, "D")
        for hand in clock:
            angle = 2 * np.pi * ({"hour": hour % 24 / 24, "day": day / 365.25}[hand])
            wanted += [np.full((1, 4, 4), np.sin(angle)), np.full((1, 4, 4), np.cos(angle))]
        np.testing.assert_allclose(x, np.concatenate(wanted), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(y, (states[row + offset + 2] - mean) / scale, rtol=1e-6)
        assert x.dtype == np.float32 and x.shape == samples.input_spec.shape
    assert seen == truth and len(files) == len(raw)
    if split == "valid":  # the same pairs as without history, in the same order
        assert [int(row) for row in samples.boxes.places(0)[1]] == pairs(series, "valid", dt=2).places(0)[1].tolist()


# ---- rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIELDS)
def test_a_row_is_the_row_of_the_array(table: Manifest, name: str) -> None:
    """Rows may have any shape and dtype, as input and as target. Each row occurs once per epoch, in random order."""
    samples, wanted = rows(table, input=name, target="weight", seed=3), truth("train", name)
    dtype = "uint8" if name in ("image", "mask") else "int64" if name in LABELS else "float32"
    assert samples.input_spec == ArraySpec(wanted.shape[1:], dtype, LABELS.get(name))
    assert samples.size == 19
    for epoch in (0, 2):
        for index, row in enumerate(sampling.order(3, epoch, 19)):
            for values, all_rows in zip(samples.read(epoch, index), (wanted, truth("train", "weight")), strict=True):
                np.testing.assert_allclose(
                    values, all_rows[row], rtol=2e-6, atol=2e-6 if values.dtype.kind == "f" else 0
                )
            values, _ = samples.read(epoch, index)
            assert isinstance(values, np.ndarray) and (str(values.dtype), values.shape) == (dtype, wanted.shape[1:])


def test_validation_rows_are_in_order_and_evenly_spread(table: Manifest) -> None:
    for wanted, expected in ((None, list(range(11))), (4, [0, 2, 5, 8]), (99, list(range(11)))):
        samples = rows(table, "valid", valid=wanted)
        for epoch in (0, 3):
            labels = [int(samples.read(epoch, index)[1]) for index in range(samples.size)]
            assert labels == truth("valid", "label")[expected].tolist()


def test_unknown_fields_give_one_message(table: Manifest, volumes: Manifest) -> None:
    with pytest.raises(
        UserError, match=r"samples\.target: the dataset has no field 'lable' \(did you mean 'label'\?\)"
    ):
        rows(table, target="lable")
    with pytest.raises(UserError, match=r"samples\.input: field 'Nbody' holds volumes"):
        rows(volumes, input="Nbody", target="Hydro")


# ---- one stream for all readers ----------------------------------------------------------------------------


@pytest.fixture(params=["crops", "pairs", "informed", "rows"])
def make(request: pytest.FixtureRequest, volumes: Manifest, series: Manifest, table: Manifest) -> Any:
    """Return a function that makes training samples of a kind: 40 crops, 19 pairs or 19 rows."""
    makers: dict[str, Callable[..., Samples]] = {
        "crops": partial(crops, volumes),
        "pairs": partial(pairs, series, dt=2),  # the last batch of 8 has three samples
        "informed": partial(informed, series, dt=1, history=[1], clock=["hour"]),
        "rows": partial(rows, table),
    }
    return makers[request.param]


def stream(samples: Samples, epoch: int) -> list[str]:
    return [digest(*samples.read(epoch, index)) for index in range(samples.size)]


def test_a_sample_depends_on_seed_epoch_and_index_alone(make: Any) -> None:
    samples = make()
    first, second = stream(samples, 0), stream(samples, 1)
    assert first != second
    backwards = make()
    found = {(e, i): digest(*backwards.read(e, i)) for e in (1, 0, 3) for i in reversed(range(backwards.size))}
    assert [[found[epoch, i] for i in range(samples.size)] for epoch in (0, 1)] == [first, second]
    assert stream(pickle.loads(pickle.dumps(samples)), 1) == second
    assert stream(samples, 0) == first
    assert stream(make(seed=1), 0) != first
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_resume_and_abandoned_epochs_do_not_change_samples(make: Any, workers: int) -> None:
    samples = make()
    expected = {epoch: stream(samples, epoch) for epoch in range(3)}
    torch.manual_seed(99)
    state = torch.get_rng_state()
    loader, alive = torch_loader_of(make(), workers=workers), list[set[Any]]()
    assert (loader.samples, len(loader)) == (samples.size, -(-samples.size // 8))
    for epoch in (0, 2):
        batches = epoch_of(loader, epoch)
        assert [len(batch) for batch in batches] == [
            min(8, samples.size - first) for first in range(0, samples.size, 8)
        ]
        assert flat(batches) == expected[epoch]
        alive.append({process.pid for process in multiprocessing.active_children()})
    assert alive[0] == alive[1] and len(alive[0]) == workers, "workers must live for several epochs"
    next(loader.epoch(0))  # stop after one batch, while other batches are being loaded
    assert (flat(epoch_of(loader, 1, start=1)), flat(epoch_of(loader, 1))) == (expected[1][8:], expected[1])
    assert epoch_of(loader, 1, start=len(loader)) == []
    loader.close()
    assert torch.equal(torch.get_rng_state(), state)  # loading must not change the random state of the model
    assert not multiprocessing.active_children()


def test_slices_of_ranks_cover_every_batch_evenly() -> None:
    for size, batch, ranks in itertools.product(range(1, 25), range(1, 9), range(1, 5)):
        shares = [Share(batch, rank, ranks) for rank in range(ranks)]
        steps = {share.steps(size) for share in shares}
        assert steps == {-(-size // batch)}
        seen = []
        for step in range(steps.pop()):
            each = [list(share.indices(step, size)) for share in shares]
            assert max(map(len, each)) - min(map(len, each)) <= 1
            seen += flat(each)
        assert seen == list(range(size))


# ---- rows through the direct loader ------------------------------------------------------------------------


@pytest.mark.parametrize("input", FIELDS)
@pytest.mark.parametrize(("workers", "resident"), [(0, "auto"), (2, "auto"), (0, "always"), (2, "always")])
def test_direct_delivers_rows_bit_for_bit(table: Manifest, input: str, workers: int, resident: Any) -> None:
    """The direct loader's rows equal the torch loader's bit by bit, for all files and ranks, and after a resume."""
    samples = rows(table, input=input, train=13)
    settings = DirectLoader(kind="direct", workers=workers, resident=resident)
    for rank, start in ((0, 0), (1, 1)):
        with closing(direct_loader.build(samples, settings, Share(4, rank, 2), CPU)) as loader:
            assert (type(loader._backend).__name__ == "ResidentTable") == (resident == "always")
            truths = torch_loader_of(samples, 4, rank=rank, ranks=2)
            for epoch in (1, 2):
                assert epoch_of(loader, epoch, start) == epoch_of(truths, epoch, start)
    assert samples.bytes == sum(values.nbytes for values in samples.table())


def test_samples_of_an_own_class_need_no_fields() -> None:
    """A user's own samples may also have the kind `rows`; they need no keys `input` and `target`."""
    check_fields(SimpleNamespace(kind="rows"), ["x"])
