"""Bad input and folders without write access give one clear message and exit status 2, and leave no partial files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dlscale import cli
from dlscale.core.errors import UserError
from dlscale.core.files import read_json, write_json
from dlscale.core.settings import read_settings, read_yaml
from dlscale.data import source as data_source
from dlscale.data.manifest import Manifest
from dlscale.data.store import Reader, map_chunks
from dlscale.extensions.compare.compare import read_rows
from dlscale.train.weight_files import read_weights
from tests.conftest import stage
from tests.raw_files import cosmo, era5, published, volume, write_volume, write_years

Check = Callable[..., str]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of a folder's files by path, including hidden files but without lock files and logs."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith((".lock", ".log"))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Check:
    """Return a function that runs a stage and returns the stage's message.

    The function asserts that the stage is refused and leaves no file behind.
    """

    def run(*arguments: object, folder: Path = tmp_path) -> str:
        before = contents(folder)
        capfd.readouterr()
        assert stage(*arguments) == cli.USER_ERROR
        error, name = capfd.readouterr().err, f"dlscale {arguments[0]}: "
        assert error.startswith(name) and error.count("\n") == 1 and error.endswith("\n"), error
        assert "Traceback" not in error and "Error" not in error, error
        assert contents(folder) == before
        return error.removeprefix(name).strip()

    return run


def configured(folder: Path, settings: dict[str, Any]) -> list[object]:
    """Write a dataset's settings; return the stage arguments that name the file."""
    assert stage("configure", "--settings", json.dumps(settings), "--out", folder / "config.yaml") == 0
    return ["--config", folder / "config.yaml"]


def preprocess(folder: Path, settings: dict[str, Any], *raw: Path, part: str = "train/a") -> list[object]:
    """Return the command that preprocesses a part."""
    options = ["--part", part, "--source", *raw, "--out", folder / "piece.h5"]
    return ["preprocess", *configured(folder, settings), *options]


def describe(folder: Path, settings: dict[str, Any], *raw: Path) -> list[object]:
    """Return the command that describes a dataset."""
    products = ["--manifest", folder / "manifest.json", "--stats", folder / "stats"]
    return ["describe", *configured(folder, settings), *(["--source", *raw] if raw else []), *products]


def damaged(folder: Path, change: Callable[[dict[str, Any]], object] = lambda fields: None) -> Path:
    """Write a volume whose fields `change` has modified; return the file's path."""
    fields: dict[str, Any] = volume((8, 8, 8))
    change(fields)
    return write_volume(folder / "a.h5", fields)


# ---- raw volumes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["files", "prepared"])
def test_a_file_that_makes_hdf5_loop(
    tmp_path: Path, refused: Check, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HDF5 loops on a text attribute that points to a heap object whose size overflows to zero.

    The stage stops after its time limit and names the file.
    """
    monkeypatch.setattr("dlscale.data.source.MAX_STRUCTURE_SECONDS", 1)
    path, good = damaged(tmp_path), write_volume(tmp_path / "b.h5", volume((8, 8, 8), 1))
    with h5py.File(path, "a") as file:
        file["Nbody"].attrs["names"] = ["a", "b"]
    content = bytearray(path.read_bytes())
    size = content.index(b"GCOL") + 16 + 8  # position of the first object's size
    content[size : size + 8] = (2**64 - 16).to_bytes(8, "little")
    path.write_bytes(content)
    settings = cosmo([path], [good], kind)
    raw = kind == "files"
    text = refused(*(preprocess(tmp_path, settings, path) if raw else describe(tmp_path, settings, path, good)))
    assert f"{path}: HDF5 loops" in text and "again" in text


def test_a_killed_reader_is_not_reported_as_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the reading process is killed, as by Linux for lack of memory, the message does not blame the file."""
    monkeypatch.setattr(data_source, "_walk_and_exit", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match="was killed; request more memory"):
        data_source.check_structure([write_volume(tmp_path / "a.h5", volume((8, 8, 8), 1))])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_file(tmp_path: Path, refused: Check, share: float) -> None:
    path = damaged(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    text = refused(*preprocess(tmp_path, cosmo([path], [path.with_name("b.h5")]), path))
    assert str(path) in text and "truncated" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.update(NBody=f.pop("Nbody")), ("no dataset 'Nbody'", "NBody")),
        (lambda f: f.update(Nbody=f["Nbody"][:3]), ("Nbody", "4 channels first", "(3, 8, 8, 8)")),
        (lambda f: f.update(Hydro=f["Hydro"][0]), ("Hydro", "4 axes", "(8, 8, 8)")),
        (lambda f: f.update(Hydro=f["Hydro"].astype(np.int32)), ("Hydro", "floating-point", "int32")),
        (lambda f: f.update(Hydro=f["Hydro"][:, :7]), ("differ in size", "(8, 8, 8)", "(7, 8, 8)")),
    ],
    ids=["name", "channels", "axes", "type", "grids"],
)
def test_other_names_and_shapes(tmp_path: Path, refused: Check, change: Any, words: tuple[str, ...]) -> None:
    path = damaged(tmp_path, change)
    text = refused(*preprocess(tmp_path, cosmo([path], [tmp_path / "b.h5"]), path))
    assert str(path) in text and all(word in text for word in words), text
    other = write_volume(tmp_path / "b.h5", published(volume((8, 8, 8))))
    text = refused(*describe(tmp_path, cosmo([path], [other], "prepared"), path, other))
    assert str(path) in text and all(word in text for word in words), text


@pytest.mark.parametrize(("value", "factor"), [(np.nan, 1), (np.inf, 1), (-np.inf, 2)])
def test_values_that_are_not_finite(tmp_path: Path, refused: Check, value: float, factor: int) -> None:
    """The message names the file, field, channel and row of the first value that is not finite.

    Non-finite densities are refused, too, although their logarithm has a floor.
    """

    def change(fields: dict[str, np.ndarray]) -> None:
        fields["Hydro"][0, 5, 1, 2] = fields["Hydro"][3, 6, 0, 0] = value

    path = damaged(tmp_path, change)
    text = refused(*preprocess(tmp_path, cosmo([path], [tmp_path / "b.h5"], downsample=factor), path))
    assert f"{path}: Hydro: channel 'gas_density' is not finite at row 5 " in text
    other = write_volume(tmp_path / "b.h5", published(volume((8, 8, 8))))
    text = refused(*describe(tmp_path, cosmo([path], [other], "prepared"), path, other))
    assert f"{path}: Hydro: channel 'gas_density' is not finite at row 5 " in text


def test_an_overdensity_is_refused(tmp_path: Path, refused: Check) -> None:
    """An overdensity is refused as a density.

    Otherwise the logarithm's floor would silently raise its negative values.
    """

    def change(fields: dict[str, np.ndarray]) -> None:
        fields["Nbody"][0] = fields["Nbody"][0] / fields["Nbody"][0].mean() - 1

    path = damaged(tmp_path, change)
    for factor in (1, 2):
        text = refused(*preprocess(tmp_path, cosmo([path], [tmp_path / "b.h5"], downsample=factor), path))
        assert f"{path}: Nbody: channel 'dm_density': " in text and "are negative (down to -" in text
        assert "at least 0" in text and "add 1 to" in text


@pytest.mark.parametrize("reader", [read_weights, read_rows, read_yaml])
def test_nothing_waits_for_a_pipe(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    os.mkfifo(pipe := tmp_path / "events.out.tfevents.1")
    with pytest.raises(UserError, match="a pipe or a device; expected"):
        reader(pipe)


def test_a_channel_that_does_not_vary(tmp_path: Path, refused: Check) -> None:
    def change(fields: dict[str, np.ndarray]) -> None:
        fields["Nbody"][2] = 0.1

    path, other = damaged(tmp_path, change), write_volume(tmp_path / "b.h5", volume((8, 8, 8), 1))
    text = refused(*describe(tmp_path, cosmo([path], [other], "prepared"), path, other))
    assert "Nbody: channel 'dm_velocity_y' is constant" in text


def test_a_series_of_one_time(tmp_path: Path, refused: Check) -> None:
    """A series needs two times in one file (of a year), because a pair consists of two times."""
    years = write_years(tmp_path / "years", {"train": {2000: 4}, "valid": {2001: 1, 2002: 1}})
    text = refused(*describe(tmp_path, era5(years), *sorted(years.glob("*/*.h5"))))
    assert "valid: each file" in text and "fewer than two times" in text


def test_prepared_files_that_were_not_prepared(tmp_path: Path, refused: Check) -> None:
    """Prepared files with physical densities are refused, and the message names the right source kind.

    Values near 1e3 would overflow if they were used as logarithms.
    """
    paths = [write_volume(tmp_path / name, volume((8, 8, 8), seed)) for seed, name in enumerate(("a.h5", "b.h5"))]
    text = refused(*describe(tmp_path, cosmo(paths[:1], paths[1:], "prepared"), *paths))
    assert "Nbody: channel 'dm_density'" in text and "source kind files" in text


def test_pieces_splits_and_factors_that_leave_nothing(tmp_path: Path, refused: Check) -> None:
    path = damaged(tmp_path)
    text = refused(*preprocess(tmp_path, cosmo([path], [tmp_path / "b.h5"], pieces=9), path))
    assert "train/a: 8 rows do not fill 9 pieces" in text and "`pieces`" in text
    text = refused(*preprocess(tmp_path, cosmo([path], [tmp_path / "b.h5"], downsample=9), path))
    assert "downsample 9 " in text and "(8, 8, 8)" in text
    source = {"kind": "files", "paths": [str(path)], "fractions": {"train": 0.5, "valid": 0.1, "gap": 1}}
    text = refused(*preprocess(tmp_path, {"kind": "cosmo", "source": source}, path, part="valid/a"))
    assert "split 'valid' is empty" in text and "without its first 1 rows (the gap)" in text


def test_missing_names_are_refused(tmp_path: Path, refused: Check, cosmo_data: Path) -> None:
    options = ["--config", cosmo_data / "config.yaml"]
    text = refused("acquire", *options, "--file", "box00.h5", "--out", tmp_path / "x")
    assert "did you mean 'box00" in text
    text = refused("preprocess", *options, "--part", "train/box9", "--source", "x", "--out", tmp_path / "x")
    assert "--part train/box9: no such part" in text and "train/box000" in text


# ---- series ----------------------------------------------------------------------------------------------


def test_a_missing_channel_is_refused(tmp_path: Path, refused: Check, era5_data: Path) -> None:
    raw = era5_data / "source" / "2001.nc"
    settings = {
        "kind": "era5",
        "source": {"kind": "files", "paths": [str(raw)]},
        "channels": ["u11"],
        "split": {"train": ["2001-01-01", "2001-01-03"], "valid": ["2001-01-04", "2001-01-05"]},
    }
    text = refused(*preprocess(tmp_path, settings, raw, part="train/2001"))
    assert "channel 'u11'" in text and "did you mean 'u10'?" in text
    settings |= {"channels": ["u10"], "crop": [99, 99]}
    assert "crop 99 x 99" in refused(*preprocess(tmp_path, settings, raw, part="train/2001"))


YEARS = {"train": {2001: 6}, "valid": {2002: 6}}


def rewrite(path: Path, change: Callable[[np.ndarray], np.ndarray], name: str = "fields") -> None:
    with h5py.File(path) as file:
        values = file["fields"][()]
    with h5py.File(path, "w") as file:
        file.create_dataset(name, data=change(values))


def describe_fields(path: Path, **attributes: Any) -> None:
    with h5py.File(path, "r+") as file:
        file["fields"].attrs.update(attributes)


PREPARED: dict[str, tuple[Callable[[Path], object], dict[str, Any], tuple[str, ...]]] = {
    "no training files": (lambda root: shutil.rmtree(root / "train"), {}, ("train", "no *.h5 files")),
    "no statistics": (lambda root: (root / "stats/global_stds.npy").unlink(), {}, ("global_stds.npy: no such file",)),
    "empty statistics": (lambda root: (root / "stats/global_means.npy").write_bytes(b""), {}, ("global_means.npy",)),
    "torn statistics": (
        lambda root: (root / "stats/global_means.npy").write_bytes((root / "stats/global_means.npy").read_bytes()[:-3]),
        {},
        ("global_means.npy: cannot be read (",),
    ),
    "statistics of fewer channels": (
        lambda root: np.save(root / "stats/global_means.npy", np.zeros((1, 2, 1, 1))),
        {},
        ("global_means.npy: expected finite numbers for the 3 channels", "(1, 2, 1, 1)"),
    ),
    "zero variance": (
        lambda root: np.save(root / "stats/global_stds.npy", np.array([1.0, 0.0, 1.0]).reshape(1, 3, 1, 1)),
        {"channels": ["u10", "v10", "t2m"]},
        ("channel 'v10' is constant",),
    ),
    "NaN in statistics": (
        lambda root: np.save(root / "stats/global_means.npy", np.full((1, 3, 1, 1), np.nan)),
        {},
        ("global_means.npy: expected finite numbers",),
    ),
    "complex statistics": (
        lambda root: np.save(root / "stats/global_means.npy", np.full((1, 3, 1, 1), 1j)),
        {},
        ("global_means.npy: expected finite numbers", "complex128"),
    ),
    "torn climatology": (
        lambda root: (root / "stats/time_means.npy").write_bytes(b"\x93NUMPY\x01"),
        {},
        ("time_means.npy: cannot be read (",),
    ),
    "climatology of another grid": (
        lambda root: np.save(root / "stats/time_means.npy", np.zeros((1, 3, 8, 16))),
        {},
        ("time_means.npy: expected finite numbers", "(1, 3, 9, 16)", "(1, 3, 8, 16)"),
    ),
    "too few names": (lambda root: None, {"channels": ["u10"]}, ("3 channels", "1 channel names")),
    "fewer units": (
        lambda root: describe_fields(root / "valid/2002.h5", units=["K", "m"]),
        {},
        ("files name 2 units, ", " 3 channels of 9 x 16 points"),
    ),
    "crop too large": (lambda root: None, {"crop": [10, 16]}, ("crop is 10 x 16", "9 x 16")),
    "another dataset": (
        lambda root: rewrite(root / "train/2001.h5", lambda v: v, "Fields"),
        {},
        ("2001.h5: no dataset 'fields'; it holds: Fields",),
    ),
    "another shape": (
        lambda root: rewrite(root / "valid/2002.h5", lambda v: v[:, :, :8]),
        {},
        ("2002.h5", "(3, 8, 16) per time", "(3, 9, 16)"),
    ),
    "a truncated year": (
        lambda root: (root / "valid/2002.h5").write_bytes((root / "valid/2002.h5").read_bytes()[:-50]),
        {},
        ("2002.h5: incomplete or still being written (truncated file)", "fetch the file again"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PREPARED)
def test_damaged_published_folders(tmp_path: Path, refused: Check, case: str) -> None:
    damage, more, words = PREPARED[case]
    root = write_years(tmp_path / "raw", YEARS)
    damage(root)
    text = refused(*describe(tmp_path / "data", era5(root, **more)))
    assert str(root) in text and all(word in text for word in words), text


# ---- training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        *("", '{"kind": "cosmo", "fie', "null", "[]", '"text"', "{}", '{"kind": 1, "fields": []}'),
        '{"kind": "\\ud800", "fields": {}, "splits": {}}',
    ],
)
def test_a_torn_manifest(tmp_path: Path, content: str) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text(content)
    with pytest.raises(UserError, match=rf"^{manifest}: .*delete "):
        Manifest.read(manifest)


@pytest.mark.parametrize("content", [b'{"a": NaN}', b"[-Infinity]", b"[1e999]", b'{"a": "\xff"}', b"[" * 100_000, b"{"])
def test_invalid_json_is_refused(tmp_path: Path, content: bytes) -> None:
    """Text that is not valid JSON is refused, even if Python's reader would accept the text."""
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json: not valid JSON \(.*\); delete the file"):
        read_json(tmp_path / "a.json")


def test_a_name_that_is_not_utf8_is_written_and_read(tmp_path: Path) -> None:
    """Python's name of a file in Latin-1 contains a surrogate, which UTF-8 cannot encode."""
    write_json(tmp_path / "a.json", found := {"command": os.fsdecode(b"caf\xe9.py")})
    assert read_json(tmp_path / "a.json") == found


@pytest.mark.parametrize(
    "text", ['{"a": ' + "[" * 100_000, f'{{"a": {"9" * 5000}}}', "{"], ids=["brackets", "digits", "torn"]
)
def test_settings_that_are_not_valid_json(text: str) -> None:
    with pytest.raises(UserError, match=r"^--config: not valid JSON \(.*\); .*YAML file"):
        read_settings(text)


def test_missing_or_truncated_data_files_are_detected(era5_data: Path, tmp_path: Path) -> None:
    """A scratch file system may delete files that the manifest lists."""
    manifest = Manifest.read(shutil.copytree(era5_data, tmp_path / "data") / "manifest.json")
    data = manifest.path(manifest.files("train")[0])
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(UserError, match=rf"{data}: \d+ bytes, expected \d+ bytes: .*changed"):
        manifest.check_files()
    data.unlink()
    with pytest.raises(UserError, match=f"{data}: no such file"):
        manifest.check_files()
    with pytest.raises(UserError, match=r"no\.json: no such file; run the stage that writes it first"):
        Manifest.read(tmp_path / "no.json")


# ---- full disks ------------------------------------------------------------------------------------------


def test_a_full_disk(full_disk: Path, refused: Check, cosmo_data: Path) -> None:
    """On a full disk, acquire, preprocess and assemble give one message, and leave the free space unchanged."""
    free = shutil.disk_usage(full_disk).free
    raw = cosmo_data / "source" / "box000.h5"
    piece = cosmo_data / "pieces" / "train" / "box000-0.h5"
    assert min(raw.stat().st_size, piece.stat().st_size) > free
    options = ["--config", cosmo_data / "config.yaml"]
    out = full_disk / "deep" / "out.h5"
    for command in (
        ["acquire", *options, "--file", "box000.h5", "--out", out],
        ["preprocess", *options, "--part", "train/box000", "--source", raw, "--out", out],
        ["assemble", *options, "--pieces", piece, "--out", out],
    ):
        text = refused(*command, folder=full_disk)
        assert text.startswith(f"{out}: no space left"), text
        assert shutil.disk_usage(full_disk).free >= free - 8192


# ---- folders without write access ----------------------------------------------------------------------------


@contextlib.contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """Remove the right to write in `folder`. As root, also become another user, because root may write everywhere."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    root = os.geteuid() == 0
    if root:
        os.setegid(65534)
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
            os.setegid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_no_write_permission(refused: Check, cosmo_data: Path) -> None:
    """Without write permission, stages refuse to write new files, new folders, existing files and logs."""
    with tempfile.TemporaryDirectory() as name:  # not below tmp_path, which other users cannot read
        place = Path(name)
        shutil.copytree(cosmo_data, place / "data")
        piece, log = place / "data/pieces/train/box000-0.h5", place / "data/logs/x.log"
        options = ["--config", place / "data/config.yaml", "--pieces", piece]
        with without_rights(place):
            for out in (place / "data/new/out.h5", place / "data/train/box000.h5"):
                text = refused("assemble", *options, "--out", out, folder=place)
                assert text.startswith(f"{out}: no permission to read or write"), text
            text = refused("assemble", *options, "--out", place / "x", "--log", log, folder=place)
            assert text.startswith(f"{log}: no permission to read or write")


# ---- damaged files and lack of memory ----------------------------------------------------------------------------


def test_values_beyond_the_end_of_a_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        place = file.create_dataset("x", data=np.arange(1000.0), chunks=(1000,)).id.get_chunk_info(0).byte_offset
    content = path.read_bytes()
    told = content.rfind(struct.pack("<Q", place), 0, place)  # an entry in the tree of chunks, which has no checksum
    path.write_bytes(content[:told] + struct.pack("<Q", len(content) - 80) + content[told + 8 :])
    with (
        h5py.File(path) as file,
        pytest.raises(UserError, match=r"a.h5: .*'/x' .*beyond the file's end"),
    ):
        map_chunks(file["x"])


@pytest.mark.parametrize("stored", ["bfloat16", "12 bits", "f2", "f4", "u1", "i8"])
def test_types_that_numpy_lacks_are_converted(tmp_path: Path, stored: str) -> None:
    """HDF5 converts other types, such as bfloat16; their bytes must not be mapped."""
    is_plain = len(stored) < 3
    values = np.array([1.5, 2.0, 200.0, 0.25], stored if is_plain else "f4")
    kind = h5py.h5t.py_create(values.dtype, logical=True).copy()
    if stored == "bfloat16":
        kind.set_fields(15, 7, 8, 0, 7)
        kind.set_size(2)
    elif stored == "12 bits":
        kind, values = h5py.h5t.STD_I16LE.copy(), np.int16([1, -2, 300, 4])
        kind.set_precision(12)
        kind.set_offset(4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((4,)))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, values)
        file["y"] = np.zeros(1000)  # more values, so that no value of `x` is beyond the file's end
    read, out = Reader(tmp_path / "a.h5", "x"), np.empty(4, values.dtype)
    read.copy((slice(0, 4),), out)
    np.testing.assert_array_equal(out, values)
    assert (read.mapped is not None) == is_plain
