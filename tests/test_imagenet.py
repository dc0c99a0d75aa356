"""Images: packs of image folders, torchvision's crops, and the study that classifies images."""

from __future__ import annotations

import io
import itertools
import json
import math
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageCms

from bench import published
from bench.images import photograph
from dlscale.config import resolve
from dlscale.config.run import load_run, run_class
from dlscale.core import registry
from dlscale.core.errors import UserError
from dlscale.data import parts, reads, sampling
from dlscale.data.loaders import DirectLoader
from dlscale.data.loaders.base import Share
from dlscale.data.loaders.direct_loader import build as build_direct
from dlscale.data.manifest import Manifest
from dlscale.extensions.dali.loader import build as build_dali
from dlscale.extensions.dali.settings import DaliLoader
from dlscale.extensions.imagenet_resnet50.imagenet import folder as image_folders
from dlscale.extensions.imagenet_resnet50.imagenet import jpeg
from dlscale.extensions.imagenet_resnet50.imagenet import pack as packs_module
from dlscale.extensions.imagenet_resnet50.imagenet.kind import ImagenetDataset, ImageSamples
from dlscale.extensions.imagenet_resnet50.imagenet.pack import Pack
from dlscale.extensions.imagenet_resnet50.imagenet.resize import resize
from dlscale.extensions.imagenet_resnet50.imagenet.samples import RATIO, Images, random_crops
from dlscale.extensions.imagenet_resnet50.study import ImagenetMetrics
from dlscale.parallel.world import World
from dlscale.train.build import open_session
from dlscale.train.trainer import learning_rate, peak_rate
from tests.conftest import TINY, make_dataset, make_run, records, stage, train
from tests.waiting import PATIENCE

CLASSES = ["ape", "bee", "cat"]
BILINEAR = Image.Resampling.BILINEAR


def picture(seed: int, height: int, width: int) -> Image.Image:
    """Return a smooth colour image, which JPEG changes little, like a photograph."""
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """Return folders of 3 classes, each with 4 training images and 2 validation images.

    Sizes, suffixes and colour modes vary.
    """
    for split, count in (("train", 4), ("valid", 2)):
        for label, name in enumerate(CLASSES):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            (folder / "notes.txt").write_text("no image")
            for number in range(count):
                seed = 100 * label + 10 * number + (split == "valid")
                image = picture(seed, 40 + 9 * number + label, 90 - 12 * number)
                if number == 1:
                    image = image.convert("L")
                if number == 2:
                    image = image.convert("CMYK")
                suffix = "png" if number == 3 else ("JPEG", "jpg", "jpeg")[label]
                image.save(folder / f"{number}.{suffix}")
        (tmp_path / split / ".hidden").mkdir()
    return {"kind": "folder", "train": str(tmp_path / "train"), "valid": str(tmp_path / "valid")}


def image_files(folder: str) -> list[Path]:
    return [path for path in sorted(Path(folder).glob("*/*")) if path.suffix != ".txt"]


def settings(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"kind": "imagenet", "source": source, **more}


def samples(folder: Path, split: str, **more: Any) -> Images:
    chosen = ImageSamples(**{"kind": "images", "size": 24, "resize": 32, **more})
    return Images(Manifest.read(folder / "manifest.json"), split, chosen, seed=5)


# ---- packs -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
def test_a_pack_holds_the_files_as_they_are(tmp_path: Path, folders: dict[str, str], shards: int) -> None:
    """For any number of packs, packs contain all files unchanged, class by class in sorted order."""
    data = make_dataset(tmp_path / "data", settings(folders, shards={"train": shards}))
    manifest = Manifest.read(data / "manifest.json")
    assert manifest.extra["classes"] == CLASSES and manifest.fields["labels"].classes == 3
    for split in ("train", "valid"):
        files = image_files(folders[split])
        packs = [Pack(manifest.path(file)) for file in manifest.files(split)]
        assert len(packs) == (shards if split == "train" else 1)
        found = [(pack, row) for pack in packs for row in range(len(pack.labels))]
        assert len(found) == len(files) == sum(file.rows for file in manifest.files(split))
        for (pack, row), path in zip(found, files, strict=True):
            first, count, height, width = pack.index[row]
            assert pack.bytes[first : first + count].tobytes() == path.read_bytes()
            assert CLASSES[pack.labels[row]] == path.parent.name
            with Image.open(path) as image:
                assert (width, height) == image.size
                assert np.array_equal(pack.image(row), image.convert("RGB"))


def test_decoded_images_are_reduced_to_the_edge(
    tmp_path: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow's bilinear filter reduces the shorter edge of decoded images; smaller images are not enlarged."""
    monkeypatch.setattr(packs_module, "EDGE", 50)
    data = make_dataset(tmp_path / "data", settings(folders, form="decoded"))
    for split in ("train", "valid"):
        pack, edges = Pack(data / "source" / f"{split}-0000.h5"), set()
        for row, path in enumerate(image_files(folders[split])):
            with Image.open(path) as image:
                truth = image.convert("RGB")
            width, height = truth.size
            if min(width, height) > 50:
                size = (50, int(50 * height / width)) if width < height else (int(50 * width / height), 50)
                truth = truth.resize(size, BILINEAR)
            edges.add(min(truth.size))
            assert np.array_equal(pack.image(row), truth)
        assert max(edges) == 50 and min(edges) < 50


def flipped(image: Path) -> None:
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 0xFF
    image.write_bytes(data)


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


BAD = "not a readable image"
#: Damaged path, function that causes the damage, and words of the message, by kind of damage.
BROKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "truncated": ("train/bee/0.jpg", lambda file: file.write_bytes(file.read_bytes()[:-300]), f"bee/0.jpg: {BAD}"),
    "no image": ("train/bee/0.jpg", lambda file: file.write_text("no image"), f"bee/0.jpg: {BAD}"),
    "empty": ("train/bee/0.jpg", lambda file: file.write_bytes(b""), f"bee/0.jpg: {BAD}"),
    "png": ("train/bee/3.png", flipped, f"bee/3.png: {BAD}"),
    "classes": (
        "valid/bee",
        lambda folder: folder.rename(folder.with_name("fox")),
        "differ in their classes: .*valid has no bee; .*train has no fox",
    ),
    "a class in two Unicode forms": (
        "valid/bee",
        lambda folder: [
            folder.rename(folder.with_name("ka\u0308se")),
            (folder.parents[1] / "train/bee").rename(folder.parents[1] / "train/k\u00e4se"),
        ],
        "differ in their classes: .*these names differ only in Unicode normalisation",
    ),
    "a class in one split": (
        "valid/bee",
        shutil.rmtree,
        "valid has no bee; give each class a folder",
    ),
    "no images": (
        "train/bee",
        emptied,
        r"train/bee: no images in this folder \(.jpg, ",
    ),
    "no known format": (
        "train/bee",
        lambda folder: [path.rename(path.with_suffix(".heic")) for path in folder.iterdir()],
        "train/bee: no images in this folder; 5 files skipped: 5 format .heic",
    ),
    "one class": (
        ".",
        lambda folder: [
            shutil.rmtree(folder / split / name) for split in ("train", "valid") for name in ("ape", "bee")
        ],
        "train: contains only the folder cat",
    ),
    "pipe": ("train/bee/x.jpg", os.mkfifo, f"bee/x.jpg: {BAD} .*a pipe or a device; expected an image"),
    "no classes": ("train", emptied, "train: contains no folders"),
    "no folder": ("train", shutil.rmtree, "train: cannot read this folder"),
}


@pytest.mark.parametrize("form", ["encoded", "decoded"])
@pytest.mark.parametrize("how", BROKEN)
def test_broken_input_gives_one_message(tmp_path: Path, folders: dict[str, str], how: str, form: str) -> None:
    place, damage, words = BROKEN[how]
    damage(tmp_path / place)
    with pytest.raises(UserError, match=words):
        _acquire(tmp_path / "data", settings(folders, form=form))
    assert not list((tmp_path / "data").rglob("*.h5*"))


def test_every_format_is_packed_and_every_skipped_file_counted(
    tmp_path: Path, folders: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """All formats in docs/data.md are packed, even from nested folders; skipped files are counted by reason."""
    ape, images = tmp_path / "train/ape", picture(3, 20, 30)
    wanted = ["w.webp", "t.tif", "t2.TIFF", "b.bmp", "g.gif", "j.jp2", "p.ppm", "q.JFIF", "more/deep/1.jpg", "link.png"]
    for name in wanted[:-1]:
        (ape / name).parent.mkdir(parents=True, exist_ok=True)
        images.save(ape / name, "JPEG" if name.endswith("JFIF") else None)
    (ape / "link.png").symlink_to(ape / "b.bmp")
    for name in ("._0.jpg", ".DS_Store", "Thumbs.db", "desktop.ini", "../desktop.ini", "../.DS_Store", "more/._1.jpg"):
        (ape / name).write_bytes(b"\0\5\x16\7")
    for name in (".h.jpg", "x.heic", "raw", "../loose.jpg", ".ipynb_checkpoints/0.jpg", "../.trash/1.jpg"):
        (ape / name).parent.mkdir(exist_ok=True)
        images.save(ape / name, "JPEG")
    (ape / "linked").symlink_to(tmp_path / "valid/cat")
    with caplog.at_level("INFO"):
        data = make_dataset(tmp_path / "data", settings(folders, shards={"train": 2}))
    manifest = Manifest.read(data / "manifest.json")
    assert sum(file.rows for file in manifest.files("train")) == 12 + len(wanted)
    # Each split has three files notes.txt, one per class.
    counts = "3 hidden, 3 format .txt, 1 not in a class folder, 1 link to a folder, 1 no suffix, 1 format .heic"
    assert manifest.facts[2:] == [f"train: 10 files skipped ({counts})", "valid: 3 files skipped (3 format .txt)"]
    assert f"{tmp_path}/train: 10 files skipped: {counts}" in caplog.text
    assert "skipped, hidden: .trash/1.jpg, ape/.h.jpg, ape/.ipynb_checkpoints/0.jpg" in caplog.text
    assert caplog.text.count("train: 10 files skipped") == 1, "the warning must appear once per split"


@pytest.mark.parametrize("form", ["encoded", "decoded"])
@pytest.mark.parametrize(("numbers", "file"), [("u2", "PNG"), (">u2", "TIFF"), ("f4", "TIFF")])
def test_deep_grey_is_refused(tmp_path: Path, folders: dict[str, str], numbers: str, file: str, form: str) -> None:
    """Grey images of more than 8 bits are refused, whatever the suffix: Pillow would make them nearly white."""
    image = Image.fromarray(np.linspace(0, 65_535, 40 * 50).reshape(40, 50).astype(numbers))
    image.save(tmp_path / "train/ape/+.jpg", file)
    with pytest.raises(UserError, match=r"ape/\+.jpg: not a readable image \(grey of more than 8 bits"):
        _acquire(tmp_path / "data", settings(folders, form=form))


@pytest.mark.parametrize("form", ["encoded", "decoded"])
def test_a_png_with_a_wrong_checksum_is_refused(tmp_path: Path, folders: dict[str, str], form: str) -> None:
    """A PNG whose pixels changed, for example on a failing disk, is refused; Pillow decodes other pixels silently."""
    path = tmp_path / "train/ape/+.png"
    Image.fromarray(np.arange(40 * 50 * 3, dtype=np.uint8).reshape(40, 50, 3)).save(path)
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") + 20] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"ape/\+.png: not a readable image \(broken PNG file"):
        _acquire(tmp_path / "data", settings(folders, form=form))


def _acquire(folder: Path, settings: dict[str, Any]) -> None:
    """Make the first training pack of a dataset."""
    config, out = folder / "config.yaml", folder / "source/train-0000.h5"
    assert stage("configure", "--settings", json.dumps(settings), "--out", config) == 0
    dataset = reads.load_dataset(config)
    raw = parts.raws(dataset)[out.name]
    acquire = parts.needed(dataset, parts.kind_of(dataset).acquirer(dataset) or "", "acquire")
    acquire(dataset, raw, out, lambda done, total: None)


def pack_states(source: dict[str, Any], made: Path = Path("nowhere"), **more: Any) -> dict[str, Any]:
    """Return the settings of each pack and the state of its files, as a new call of the workflow sees both.

    A change of the settings or of the files makes the pack again. `made` is the folder of an existing dataset.
    """
    image_folders.shard_digests.cache_clear()
    dataset = ImagenetDataset.model_validate(settings(source, shards={"train": 3}, **more))
    kind = parts.kind_of(dataset)
    return {
        name: (kind.raw_settings(dataset, raw), kind.look(dataset, raw, made / "source" / name))
        for name, raw in parts.raws(dataset).items()
    }


def test_packs_are_made_again_where_their_files_changed(tmp_path: Path, folders: dict[str, str]) -> None:
    """Only packs whose files changed are made again; a restored file counts as unchanged."""
    before = pack_states(folders)
    (tmp_path / "train/ape/notes.txt").write_text("other notes")
    assert pack_states(folders) == before

    def changed() -> set[str]:
        return {name.removesuffix(".h5") for name, what in pack_states(folders).items() if what != before[name]}

    image = tmp_path / "train/bee/2.jpg"  # the seventh of twelve images; each pack has four
    content, stat = image.read_bytes(), image.stat()
    image.write_bytes(content)  # changes the file's time but not the folder's time
    assert changed() == {"train-0001"}
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert changed() == set()
    image.write_bytes(content + b"more")
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert changed() == {"train-0001"}
    image.write_bytes(content)
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    shutil.copy2(tmp_path / "valid/cat/0.jpeg", tmp_path / "valid/cat/new.jpeg")
    assert changed() == {"valid-0000"}
    (tmp_path / "valid/cat/new.jpeg").unlink()
    (link := tmp_path / "train/bee/x.jpg").symlink_to("nowhere")
    with pytest.raises(UserError, match=f"{link}: cannot read this file's size and time .No such file"):
        changed()
    link.unlink()
    for split in ("train", "valid"):
        (tmp_path / split / "ape").rename(tmp_path / split / "dog")  # a renamed class changes the labels of all images
    assert changed() == {"train-0000", "train-0001", "train-0002", "valid-0000"}


@pytest.mark.slow
def test_packs_of_deleted_folders_are_kept(tmp_path: Path, folders: dict[str, str]) -> None:
    """Packs are kept after their folders were deleted, because a pack records the state of its files."""
    data = make_dataset(tmp_path / "made", settings(folders, shards={"train": 3}))
    before = pack_states(folders, data)
    assert len({look for _, look in before.values()}) == 4
    for split in ("valid", "train"):
        shutil.rmtree(tmp_path / split)
        assert pack_states(folders, data) == before
    assert pack_states(folders, data, form="decoded").keys() == before.keys()
    assert all(look is None for _, look in pack_states(folders).values()), (
        "without a pack, the state of deleted folders is unknown"
    )


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_pack_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pack.h5")
    with pytest.raises(UserError, match=r"pack\.h5: a pipe"):
        image_folders.packed(tmp_path / "pack.h5")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": {"kind": "folder", "train": "a", "valid": "a/"}}, "is listed in two splits"),
        (
            {"source": {"kind": "simulated", "edges": [40, 30]}},
            r"edges \[40, 30\]: expected .*at least 16",
        ),
        ({"source": {"kind": "simulated"}, "downsample": 2}, "downsample: not supported"),
    ],
)
def test_bad_datasets_are_one_message(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve.load({"targets": ["imagenet_simulated"], "datasets": {"d": {"kind": "imagenet", **changes}}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": {"size": 32}}, "samples.size 32: the network halves images five times"),
        ({"samples": {"size": 80}}, "resize 72 is less than size 80"),
        ({"samples": {"scale": [0.5, 1.2]}}, r"scale \[0.5, 1.2\]: expected \[smallest, largest\], at most 1"),
        ({"model": {"depth": 42}}, "expected one of: 18, 34, 50, 101|18, 34, 50 or 101"),
    ],
)
def test_bad_runs_are_one_message(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve.load({"targets": ["imagenet_simulated"], "plans": {"imagenet_simulated": {"settings": changes}}})


def test_a_folder_is_packed_where_jobs_run() -> None:
    """A folder is packed in a job, which needs no network. The doctor looks for folders, not for packs."""
    datasets = resolve.load({"targets": ["imagenet_published"]}).workflow.datasets
    expected: dict[str, list[str]] = {"published": ["data/imagenet/train", "data/imagenet/val"], "simulated": []}
    for name, files in expected.items():
        dataset = datasets[f"imagenet_{name}"]
        assert parts.kind_of(dataset).prepared_files(dataset) == files and not parts.fetched(dataset)
    assert len(parts.raws(datasets["imagenet_published"])) == 68


# ---- samples -----------------------------------------------------------------------------------------


def get_params(draws: Any, height: int, width: int, scale: Any, ratio: Any) -> tuple[int, int, int, int]:
    """`RandomResizedCrop.get_params` of torchvision 0.20, restated; `draws` gives its random numbers in order."""
    area = height * width
    log_ratio = [math.log(each) for each in ratio]
    for _ in range(10):
        target_area = area * draws.uniform(scale[0], scale[1])
        aspect_ratio = math.exp(draws.uniform(log_ratio[0], log_ratio[1]))
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            return draws.below(0, height - h + 1), draws.below(1, width - w + 1), h, w
    in_ratio = float(width) / float(height)
    if in_ratio < min(ratio):
        w = width
        h = round(w / min(ratio))
    elif in_ratio > max(ratio):
        h = height
        w = round(h * max(ratio))
    else:
        w = width
        h = height
    return (height - h) // 2, (width - w) // 2, h, w


class Draws:
    """Random numbers of one sample, taken one at a time from the counter-based words."""

    def __init__(self, seed: int, epoch: int, index: int) -> None:
        def words(stream: str) -> list[int]:
            return [int(word) for word in sampling.words(seed, epoch, stream, 1, index)[0]]

        self._shapes = [word for number in range(5) for word in words(f"shape{number}")]
        self._place = words("place")

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * (self._shapes.pop(0) >> 11) / 2**53

    def below(self, axis: int, bound: int) -> int:
        return (self._place[axis] >> 32) * bound >> 32


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.9, 1.0), (1.0, 1.0)])
def test_random_crops_are_torchvisions(scale: tuple[float, float]) -> None:
    """Random crops equal torchvision's, for one image or for many images at once.

    After ten failed tries torchvision uses the centre. Some images are portraits, others are landscapes.
    """
    edges = np.array([(37, 50), (50, 37), (200, 20), (20, 200), (64, 64), (1, 9), (300, 299)] * 40)
    found = random_crops(3, 2, 11, edges, scale)
    for number, (height, width) in enumerate(edges.tolist()):
        crop = get_params(Draws(3, 2, 11 + number), height, width, scale, RATIO)
        assert tuple(found[number]) == crop, (height, width)
        assert tuple(random_crops(3, 2, 11 + number, edges[number : number + 1], scale)[0]) == crop
        top, left, rows, columns = crop
        assert top >= 0 and left >= 0 and rows > 0 and columns > 0
        assert top + rows <= height and left + columns <= width


def in_two_passes(image: Image.Image, columns: int, rows: int) -> Image.Image:
    """Return Pillow's resized image, with the horizontal pass first; Pillow 13 chooses the order of the passes."""
    return image.resize((columns, image.height), BILINEAR).resize((columns, rows), BILINEAR)


def test_resize_equals_pillow() -> None:
    """A window of a resized box of an image equals that of Pillow, for any sizes, mirrored or not."""
    rng = np.random.default_rng(0)
    for number in range(300):
        height, width = rng.integers(1, 300, 2).tolist()
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        pixels.setflags(write=number % 2 == 0)  # mapped pixels are read-only
        rows, columns = (int(rng.integers(1, edge + 1)) for edge in (height, width))
        top, left = int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1))
        shape = rng.integers(1, 200, 2).tolist()
        size = [int(rng.integers(1, edge + 1)) for edge in shape]
        corner = [int(rng.integers(edge - part + 1)) for edge, part in zip(shape, size, strict=True)]
        out = np.empty((3, *size), np.uint8)
        resize(pixels, (top, left, rows, columns), tuple(shape), tuple(corner), number % 3 == 0, out)
        image = Image.fromarray(pixels).crop((left, top, left + columns, top + rows))
        window = np.s_[corner[0] : corner[0] + size[0], corner[1] : corner[1] + size[1]]
        truth = np.asarray(in_two_passes(image, shape[1], shape[0]))[window]
        truth = truth[:, ::-1] if number % 3 == 0 else truth
        assert np.array_equal(out, truth.transpose(2, 0, 1)), (height, width, rows, columns, shape, size, corner)
        at_once = np.asarray(image.resize((shape[1], shape[0]), BILINEAR))[window].astype(int)
        at_once = at_once[:, ::-1] if number % 3 == 0 else at_once
        assert np.abs(at_once.transpose(2, 0, 1) - out).max() <= 1


#: Ways to save a JPEG: a mode of Pillow and options.
JPEGS: dict[str, tuple[str, dict[str, Any]]] = {
    "4:2:0": ("RGB", {"subsampling": 2}),
    "4:2:2": ("RGB", {"subsampling": 1, "quality": 90}),
    "4:4:4": ("RGB", {"subsampling": 0, "quality": 100}),
    "progressive": ("RGB", {"progressive": True, "quality": 30}),
    "restart markers": ("RGB", {"restart_marker_rows": 1}),
    "RGB inside": ("RGB", {"keep_rgb": True}),
    "grey": ("L", {}),
    "rotated by EXIF": ("RGB", {"exif": b"Exif\0\0MM\0*\0\0\0\b\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"}),
}


@pytest.mark.parametrize("kind", JPEGS)
def test_part_of_a_jpeg_equals_pillow(kind: str) -> None:
    """`jpeg.decode_box` returns Pillow's pixels, in several threads; None for progressive files."""
    pytest.importorskip("nvidia.nvimgcodec", reason="nvImageCodec is not installed: pip install 'dlscale[dali]'")
    mode, options = JPEGS[kind]
    saved = io.BytesIO()
    Image.open(io.BytesIO(photograph(1))).convert(mode).save(saved, "JPEG", **options)
    if kind == "rotated by EXIF":
        assert Image.open(saved).getexif()[0x112] == 6
    truth, file = np.asarray(Image.open(saved).convert("RGB")), np.frombuffer(saved.getvalue(), np.uint8)
    if kind == "progressive":  # Pillow decodes these files
        assert jpeg.decode_box(file, (0, 0, 50, 50)) is None
        return
    rng = np.random.default_rng(2)

    def compare(number: int) -> None:
        rows, columns = (int(rng.integers(2, edge + 1)) for edge in truth.shape[:2])
        top, left = int(rng.integers(truth.shape[0] - rows + 1)), int(rng.integers(truth.shape[1] - columns + 1))
        part = jpeg.decode_box(file, (top, left, rows, columns))
        assert part is not None
        assert np.array_equal(part, truth[top : top + rows, left : left + columns]), (top, left, rows, columns)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(compare, range(30)))


def test_other_and_damaged_files_are_left_to_pillow() -> None:
    image = Image.open(io.BytesIO(photograph(1)))
    files = [photograph(1)[:30_000], bytes(1000), b""]
    for mode, form in (("RGB", "PNG"), ("1", "TIFF"), ("CMYK", "JPEG")):
        image.convert(mode).save(saved := io.BytesIO(), form)
        files.append(saved.getvalue())
    for file in files:
        assert jpeg.decode_box(np.frombuffer(file, np.uint8), (0, 0, 300, 300)) is None


def damaged(number: int, rng: np.random.Generator) -> bytes:
    """Return a JPEG that is damaged in one of eight ways behind its first quarter; `number` chooses the way."""
    options = {"subsampling": int(rng.integers(3)), "progressive": number % 3 == 0, "restart_marker_rows": number % 2}
    picture(number, 90, 120).save(saved := io.BytesIO(), "JPEG", quality=95, **options)
    file, size = bytearray(saved.getvalue()), len(saved.getvalue())
    at, end = int(rng.integers(size // 4, size)), b"\xff\xd9"
    changes: list[tuple[slice, bytes]] = [
        (slice(at, size), b""),
        (slice(at, size), end),
        (slice(at, at + 2), end),
        (slice(at, at + 30), b""),
        (slice(at, at + 1), b"\xff"),
        (slice(size - 1 - at % 10, size), b""),
        (slice(at, size), bytes(size - at)),
        (slice(at, at + 30), rng.bytes(30)),
    ]
    where, content = changes[number % 8]
    file[where] = content
    return bytes(file)


def test_a_part_of_a_damaged_jpeg_is_refused_or_equals_pillow() -> None:
    """A damaged JPEG has the same pixels with nvImageCodec as with Pillow, and is refused if Pillow refuses it."""
    pytest.importorskip("nvidia.nvimgcodec", reason="nvImageCodec is not installed: pip install 'dlscale[dali]'")
    rng, decoded = np.random.default_rng(4), 0
    for number in range(240):
        file = damaged(number, rng)
        part = jpeg.decode_box(np.frombuffer(file, np.uint8), (0, 7, 40, 50))
        if part is not None:
            decoded += 1
            truth = Image.open(io.BytesIO(file)).convert("RGB")  # raises an error if Pillow refuses the file
            assert np.array_equal(part, np.asarray(truth)[:40, 7:57]), number
    assert decoded > 10


@pytest.mark.parametrize("loader", ["with nvImageCodec", "with Pillow", "dali"])
def test_a_truncated_jpeg_in_a_pack_is_refused_whatever_the_crop(
    tmp_path: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, loader: str
) -> None:
    """A JPEG whose second half was lost is refused, even if a crop has only pixels of the first half."""
    picture(1, 200, 90).save(tmp_path / "train/ape/0.JPEG", quality=95)
    data = make_dataset(tmp_path / "data", settings(folders))
    with h5py.File(data / "source/train-0000.h5", "r+") as file:
        first, count = file["index"][0, :2].tolist()
        file["bytes"][first + count // 2 : first + count] = 0
    if loader == "with Pillow":
        monkeypatch.setattr(jpeg, "nvimgcodec", None)
    read, words = samples(data, "train", scale=(0.01, 0.02)), "image 0 cannot be decoded .image file is truncated"
    [index] = [at for at, (_, row) in enumerate(read._rows(0, range(read.size))) if row == 0]
    windows = read.windows
    monkeypatch.setattr(read, "windows", lambda *args: replace(found := windows(*args), corner=found.corner * 0))
    if loader == "dali":
        with closing(dali(read, Share(4))) as batches, pytest.raises(UserError, match=f"^.*train-0000.h5: {words}"):
            list(batches.epoch(0))
    else:
        with pytest.raises(UserError, match=words):
            read.read(0, index)


def test_forks_decode_jpegs_and_failures_of_cuda_leave_them_to_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork decodes although its parent has decoders; if nvImageCodec raises CUDA's errors, Pillow decodes."""
    pytest.importorskip("nvidia.nvimgcodec", reason="nvImageCodec is not installed: pip install 'dlscale[dali]'")
    file, box = np.frombuffer(photograph(1), np.uint8), (10, 20, 40, 50)
    truth = np.asarray(Image.open(io.BytesIO(photograph(1))))[10:50, 20:70]

    def equals_truth() -> bool:
        return np.array_equal(jpeg.decode_box(file, box), truth)  # type: ignore[arg-type]

    assert equals_truth()
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not equals_truth()))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0

    def fail(*args: int) -> None:
        raise RuntimeError("CUDA Runtime failure: '#3'")

    monkeypatch.setattr(jpeg, "_decoder", fail)
    assert jpeg.decode_box(file, box) is None


def test_images_that_nvimagecodec_decodes_otherwise_equal_pillow(tmp_path: Path, folders: dict[str, str]) -> None:
    """Single columns, and CMYK images with and without Adobe's marker, equal Pillow's pixels."""
    for split in ("train", "valid"):
        for label, name in enumerate(CLASSES):
            for number in range(7, 12):
                picture(label + number, 60, 5).save(tmp_path / split / name / f"{number}.jpg")
            picture(label, 40, 60).convert("CMYK").save(saved := io.BytesIO(), "JPEG", quality=5)
            file = saved.getvalue()
            marker = file.index(b"\xff\xee")
            plain = file[:marker] + file[marker + 2 + int.from_bytes(file[marker + 2 : marker + 4], "big") :]
            (tmp_path / split / name / "5.jpg").write_bytes(file)
            (tmp_path / split / name / "6.jpg").write_bytes(plain)
    data = make_dataset(tmp_path / "data", settings(folders))
    found = samples(data, "train", scale=(1e-3, 0.02))
    columns = set[int]()
    for index in range(found.size):
        windows = found.windows(1, range(index, index + 1))
        (top, left), (height, width) = windows.corner[0].tolist(), windows.extent[0].tolist()
        image = Image.open(io.BytesIO(windows.images[0].tobytes())).convert("RGB")
        image = in_two_passes(image.crop((left, top, left + width, top + height)), 24, 24)
        truth = np.asarray(image)[:, ::-1] if windows.flip[0] else np.asarray(image)
        assert np.array_equal(found.read(1, index)[0], truth.transpose(2, 0, 1)), (index, left, width)
        columns.add(width)
    assert 1 in columns


def test_samples_are_the_same_without_nvimagecodec(
    tmp_path: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nvidia.nvimgcodec", reason="nvImageCodec is not installed: pip install 'dlscale[dali]'")
    data = make_dataset(tmp_path / "data", settings(folders))
    for split in ("train", "valid"):
        read = samples(data, split)
        found = [read.read(1, index)[0] for index in range(read.size)]
        with monkeypatch.context() as patch:
            patch.setattr(jpeg, "nvimgcodec", None)
            assert all(np.array_equal(read.read(1, index)[0], x) for index, x in enumerate(found))


def test_an_index_with_larger_images_is_refused(
    tmp_path: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack whose index states larger images than it has gives one message, instead of values of other memory."""
    read = samples(make_dataset(tmp_path / "data", settings(folders)), "valid")
    read.packs[0].index[:, 2:] += 100
    for installed in (jpeg.nvimgcodec, None):
        monkeypatch.setattr(jpeg, "nvimgcodec", installed)
        with pytest.raises(UserError, match="image 0 is smaller than the index states; the pack is damaged: delete it"):
            read.read(0, 0)


@pytest.mark.parametrize("form", ["encoded", "decoded"])
def test_training_samples_are_resized_crops(tmp_path: Path, folders: dict[str, str], form: str) -> None:
    """Training samples equal Pillow's crop, resize and mirror, in this order.

    Each image is used once per epoch, in a different order in each epoch.
    """
    data = make_dataset(tmp_path / "data", settings(folders, form=form, shards={"train": 2}))
    train_samples = samples(data, "train")
    packs = train_samples.packs
    mirrored, orders = set(), []
    for epoch in (0, 1):
        orders.append(list(zip(*(each.tolist() for each in train_samples.visits.rows(epoch)), strict=True)))
        assert sorted(orders[-1]) == [(pack, row) for pack in (0, 1) for row in range(6)]
        for index, (pack, row) in enumerate(orders[-1]):
            image = packs[pack].image(row)
            draws = Draws(5, epoch, index)
            top, left, height, width = get_params(draws, image.height, image.width, (0.08, 1.0), RATIO)
            truth = np.asarray(in_two_passes(image.crop((left, top, left + width, top + height)), 24, 24))
            flip = (int(sampling.words(5, epoch, "place", 1, index)[0, 2]) >> 11) / 2**53 < 0.5
            mirrored.add(flip)
            truth = truth[:, ::-1] if flip else truth
            x, y = train_samples.read(epoch, index)
            assert np.array_equal(x, truth.transpose(2, 0, 1)) and x.flags.c_contiguous
            assert y.shape == () and y == packs[pack].labels[row]
    assert mirrored == {True, False} and orders[0] != orders[1]
    assert samples(data, "train", train=5).size == 5


@pytest.mark.parametrize("resize", [32, 35])
def test_validation_samples_are_the_middle(tmp_path: Path, folders: dict[str, str], resize: int) -> None:
    """Validation samples equal the result of torchvision's Resize and CenterCrop, in each epoch and in file order.

    The middle 24 of 35 rows would begin at row 5.5, which is rounded to 6.
    """
    for path in sorted(tmp_path.glob("valid/*/1.*")):  # some images are portraits, others are landscapes
        with Image.open(path) as image:
            image.rotate(90, expand=True).save(path)
    data = make_dataset(tmp_path / "data", settings(folders))
    valid = samples(data, "valid", resize=resize)
    for index in range(valid.size):
        image = valid.packs[0].image(index)
        short, long = sorted(image.size)
        new_long = int(resize * long / short)
        edges = (resize, new_long) if image.width <= image.height else (new_long, resize)
        image = in_two_passes(image, *edges)
        left, top = round((image.width - 24) / 2.0), round((image.height - 24) / 2.0)
        truth = np.asarray(image.crop((left, top, left + 24, top + 24)))
        for epoch in (0, 3):
            x, y = valid.read(epoch, index)
            assert np.array_equal(x, truth.transpose(2, 0, 1)) and y == index // 2
    assert [int(samples(data, "valid", valid=3).read(0, index)[1]) for index in range(3)] == [0, 1, 2]


def dali(samples: Images, share: Share, workers: int = 2) -> Any:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install 'dlscale[dali]'")
    return build_dali(samples, DaliLoader(kind="dali", workers=workers), share, torch.device("cpu"))


def direct(samples: Images, share: Share, workers: int = 2) -> Any:
    return build_direct(samples, DirectLoader(kind="direct", workers=workers), share, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "most", "mean"),
    [(partial(direct, workers=0), 0, 0), (partial(direct, workers=3), 0, 0), (dali, 2, 0.5)],
    ids=["direct", "direct by threads", "dali"],
)
@pytest.mark.parametrize("form", ["encoded", "decoded"])
def test_loaders_deliver_the_same_samples(
    tmp_path: Path, folders: dict[str, Any], form: str, build: Callable[[Images, Share], Any], most: int, mean: float
) -> None:
    """All loaders deliver the same samples, on any rank, from any step, and after an abandoned epoch.

    DALI's samples differ by rounding, because DALI has another decoder and another filter.
    """
    data = make_dataset(tmp_path / "data", settings(folders, form=form, shards={"train": 2}))
    for split, rank in itertools.product(("train", "valid"), (0, 1)):
        truth, share = samples(data, split), Share(5, rank, 2)
        with closing(build(samples(data, split), share)) as loader:
            next(loader.epoch(3))
            for epoch, start in ((0, 0), (1, 1), (0, 0)):
                for step, (x, y) in enumerate(loader.epoch(epoch, start), start):
                    expected = [truth.read(epoch, index) for index in share.indices(step, truth.size)]
                    assert len(x) == len(y) == len(expected) and (x.dtype, y.dtype) == (torch.uint8, torch.int64)
                    for number, (image, label) in enumerate(expected):
                        off = np.abs(x[number].numpy().astype(int) - image)
                        assert y[number] == int(label)
                        assert off.max() <= most and off.mean() <= mean, (split, epoch, step, number)


def test_dali_has_pillows_pixels_of_every_format(tmp_path: Path, folders: dict[str, Any]) -> None:
    """DALI alone ignores the orientation of a TIFF, the largest value of a PGM, and colours of LAB and JPEG 2000."""
    for turn in (2, 3, 6, 8):
        (exif := Image.Exif())[0x112] = turn
        picture(turn, 40, 60).save(tmp_path / f"valid/ape/{turn}.tiff", exif=exif)
    grey = np.asarray(picture(9, 40, 60).convert("L")) // 3
    (tmp_path / "valid/bee/dark.pgm").write_bytes(b"P5 60 40 100\n" + np.minimum(grey, 100).tobytes())
    picture(10, 40, 60).save(tmp_path / "valid/bee/palette.gif")
    ImageCms.profileToProfile(
        picture(11, 40, 60), ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    ).save(tmp_path / "valid/cat/lab.tiff")  # type: ignore[union-attr]
    picture(12, 40, 60).convert("YCbCr").save(tmp_path / "valid/cat/colours.jp2")
    data = make_dataset(tmp_path / "data", settings(folders))
    truth = samples(data, "valid")
    with closing(dali(samples(data, "valid"), Share(truth.size))) as loader:
        [(x, _)] = loader.epoch(0)
    for number in range(truth.size):
        off = np.abs(x[number].numpy().astype(int) - truth.read(0, number)[0])
        assert off.max() <= 2 and off.mean() <= 0.5, number
    assert truth.size == 6 + 8


def test_dali_serves_ranks_that_have_nothing(tmp_path: Path, folders: dict[str, Any]) -> None:
    """DALI gives an empty batch to a rank without samples.

    With twelve images in batches of five, the last batch has two images, so the first of three ranks gets none.
    """
    data = make_dataset(tmp_path / "data", settings(folders))
    with closing(dali(samples(data, "train"), Share(5, 0, 3))) as loader:
        batches = list(loader.epoch(0))
    assert [len(x) for x, _ in batches] == [1, 1, 0]
    assert all((x.shape[1:], x.dtype, y.dtype) == ((3, 24, 24), torch.uint8, torch.int64) for x, y in batches)


def blank(pack: Path, row: int) -> None:
    """Overwrite the beginning of an image in a pack with zeros."""
    stored, first = bytearray(pack.read_bytes()), Pack(pack).index[row, 0]
    start = stored.find(Pack(pack).bytes[first : first + 64].tobytes())
    stored[start : start + 64] = bytes(64)
    pack.write_bytes(stored)


def test_a_damaged_image_is_one_message_from_dali(tmp_path: Path, folders: dict[str, str]) -> None:
    data = make_dataset(tmp_path / "data", settings(folders))
    blank(data / "source/train-0000.h5", 3)
    with (
        closing(dali(samples(data, "train"), Share(4))) as loader,
        pytest.raises(UserError, match=r"train-0000.h5: image 3 cannot be decoded"),
    ):
        list(loader.epoch(0))


def test_the_published_loader_restated_makes_such_samples(tmp_path: Path, folders: dict[str, str]) -> None:
    """The benchmark's restatement of Apex's loader delivers bytes [B, C, H, W] and labels."""
    (Path(folders["train"]) / ".hidden").rmdir()
    torch.manual_seed(0)
    loader = published.image_loader(Path(folders["train"]), 24, 5, 0)
    ours = make_dataset(tmp_path / "data", settings(folders))
    loader.dataset.files = [pair for pair in loader.dataset.files if pair[0].suffix != ".txt"]  # type: ignore[attr-defined]
    assert [path for path, _ in loader.dataset.files] == image_files(folders["train"])  # type: ignore[attr-defined]
    batches, theirs = list(loader), samples(ours, "train")
    assert [x.shape for x, _ in batches] == [(5, 3, 24, 24), (5, 3, 24, 24), (2, 3, 24, 24)]
    assert all(x.dtype == torch.uint8 and y.dtype == torch.int64 for x, y in batches)
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == sorted(int(theirs.read(0, i)[1]) for i in range(12))


def test_a_damaged_pack_is_one_message(tmp_path: Path, folders: dict[str, str]) -> None:
    data = make_dataset(tmp_path / "data", settings(folders))
    pack = data / "source/valid-0000.h5"
    blank(pack, 0)
    with pytest.raises(UserError, match=r"valid-0000.h5: image 0 cannot be decoded"):
        samples(data, "valid").read(0, 0)
    with h5py.File(pack, "a") as file:
        file.attrs["form"] = "decoded"
    with pytest.raises(UserError, match="the index of the images does not fit the file"):
        samples(data, "valid").read(0, 0)
    pack.write_bytes((data / "config.yaml").read_bytes())
    with pytest.raises(UserError, match="not a readable HDF5 file"):
        samples(data, "valid").read(0, 0)


# ---- the study ---------------------------------------------------------------------------------------


def run_of(**over: Any) -> Any:
    return resolve.load({"targets": ["imagenet_published"], "plans": {"imagenet_published": {"settings": over}}}).plans[
        "imagenet_published"
    ]


def test_the_published_plan_has_the_settings_of_the_program() -> None:
    plan = run_of()
    assert [(run.run.geometry.world_size, run.run.batch_size) for run in plan.values()] == [
        (gpus, 208 * gpus) for gpus in (2, 4, 8, 16, 32, 64)
    ]
    run = plan["gpu64"].run
    assert (run.model.depth, run.model.width, run.precision, run.training.epochs) == (50, 64, "fp16_master", 90)
    assert (run.optimizer.kind, run.optimizer.lr, run.optimizer.momentum) == ("sgd", 0.1, 0.9)
    assert run.optimizer.weight_decay == 1e-4
    assert (run.samples.size, run.samples.resize, run.samples.scale) == (224, 256, (0.08, 1.0))
    # Learning rates in the log of the run on 64 GPUs: 5.2 after warm-up, 0.0052 at the end.
    peak = peak_rate(run.schedule, run.optimizer.lr, run.batch_size)
    steps = -(-1_281_167 // run.batch_size)
    rates = [learning_rate(run.schedule, peak, epoch * steps, 90 * steps, steps) for epoch in (5, 30, 60, 80, 89)]
    np.testing.assert_allclose(rates, [5.2, 0.52, 0.052, 0.0052, 0.0052], rtol=1e-12)
    # The programs without Apex begin at 0.1, for any batch, and divide by 10 every 30 epochs.
    ladder = resolve.load({"targets": ["imagenet_published_ladder"]}).plans["imagenet_published_ladder"]
    # `--workers`: by default 4, which imagenet_ddp.py divides by the four GPUs of a node; 20 in the Apex command.
    workers = {name: each.run.loader.workers for name, each in ladder.items() if each.run.loader.kind == "torch"}
    assert workers == {"single": 4, "dp": 4, "ddp": 1} | dict.fromkeys(
        ["o0", "o1", "o3", "o2", "nodes2", "channels_last"], 20
    )
    plain = ladder["ddp"].run
    peak = peak_rate(plain.schedule, plain.optimizer.lr, plain.batch_size)
    rates = [learning_rate(plain.schedule, peak, epoch * 7, 90 * 7, 7) for epoch in (0, 29, 30, 60, 89)]
    np.testing.assert_allclose(rates, [0.1, 0.1, 0.01, 0.001, 0.001], rtol=1e-12)


def test_weak_scaling_has_the_runs_of_the_published_throughput() -> None:
    """Each run has the settings of the published run on as many GPUs, and this run's published throughput."""
    weak, full = resolve.load({"targets": ["imagenet_weak"]}).plans["imagenet_weak"], run_of()
    published = resolve.study_files()["imagenet_resnet50"].published
    rates = {2: 1582, 4: 3003, 8: 5819, 16: 11257, 32: 19490, 64: 32619}
    assert list(weak) == [f"b208_ddp_{gpus}" for gpus in rates]
    for (name, own), (gpus, rate) in zip(weak.items(), rates.items(), strict=True):
        assert own.run.model_dump(exclude={"label"}) == full[f"gpu{gpus}"].run.model_dump(exclude={"label"})
        assert [each.speed for each in published if f"imagenet_weak.{name}" in each.runs] == [rate]


def test_metrics_are_fractions_of_correct_answers(tmp_path: Path) -> None:
    """Metrics equal counted fractions of correct predictions, also for the answer "most frequent training classes"."""
    dataset = settings({"kind": "simulated", "train": 60, "valid": 37, "edges": [34, 48]})
    folder = make_dataset(tmp_path / "data", dataset)
    over = {
        "batch_size": 16,
        "model": {"depth": 18, "width": 4},
        "samples": {"size": 34, "resize": 34},
        "loader": {"workers": 0},
        "training": {"epochs": 2},
        "precision": "fp32",
    }
    config = make_run(tmp_path / "run", "imagenet_resnet50", over, dataset)
    assert train(tmp_path / "run", folder / "manifest.json") == 0
    run = run_class("imagenet_resnet50")(**yaml.safe_load(config.read_text()))
    manifest = Manifest.read(folder / "manifest.json")
    model = registry.study("imagenet_resnet50").model(run, manifest).eval()
    model.load_state_dict(torch.load(tmp_path / "run/model.pt", weights_only=True))
    valid = Images(manifest, "valid", run.samples, 0)
    pairs = [valid.read(0, index) for index in range(37)]
    with torch.no_grad():
        logits = model(torch.from_numpy(np.stack([x for x, _ in pairs])).float())
    labels = np.array([y for _, y in pairs])
    best = logits.argsort(dim=1, descending=True).numpy()
    often = np.argsort(-np.bincount(Pack(folder / "source/train-0000.h5").labels, minlength=10), kind="stable")[:5]
    expected = {
        "top1": (best[:, 0] == labels).mean(),
        "top5": (best[:, :5] == labels[:, None]).any(axis=1).mean(),
        "top1_of_most_frequent": (labels == often[0]).mean(),
        "top5_of_most_frequent": np.isin(labels, often).mean(),
    }
    metrics = records(tmp_path / "run")[-1]["metrics"]
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("contiguous", [True, False])
def test_top5_of_answers_in_any_order_in_memory(contiguous: bool) -> None:
    """Top-5 accuracy equals the result of sorting, for any memory layout.

    The ImageNet tutorial's program fails on logits that are not contiguous.
    """
    metrics = ImagenetMetrics.__new__(ImagenetMetrics)
    metrics.most, metrics.frequent = {"top1": 1, "top5": 5}, torch.arange(5)
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 12), torch.randint(0, 12, (40,))
    found = metrics.per_sample(torch.empty(40), labels, logits if contiguous else logits.t().contiguous().t())
    order = np.argsort(-logits.numpy(), axis=1)
    assert found["top1"].tolist() == (order[:, 0] == labels.numpy()).tolist()
    assert found["top5"].tolist() == (order[:, :5] == labels.numpy()[:, None]).any(axis=1).tolist()


#: Precision in dlscale for each of Apex's optimisation levels.
APEX = {"O0": "fp32", "O1": "fp16", "O2": "fp16_master", "O3": "fp16_pure"}


def test_training_accuracy_is_that_of_the_batches_before_they_are_learnt(
    tmp_path: Path, tiny_data: Callable[[str], Path]
) -> None:
    """Training accuracy of a one-batch epoch belongs to the initial weights and the batch's own statistics."""
    over = {**TINY["imagenet_resnet50"]["run"], "batch_size": 40, "training": {"epochs": 1}}
    config = make_run(tmp_path / "run", "imagenet_resnet50", over, TINY["imagenet_resnet50"]["dataset"])
    manifest = tiny_data("imagenet_resnet50") / "manifest.json"
    assert train(tmp_path / "run", manifest) == 0
    session = open_session(load_run(config, "train"), manifest, World())
    with closing(session.loader("train")) as own:
        x, y = next(own.epoch(0))
        best = session.step.network.train().predict(x).argsort(dim=1, descending=True)
    expected = {f"top{n}": (best[:, :n] == y[:, None]).any(1).double().mean().item() for n in (1, 5)}
    (record,) = records(tmp_path / "run")
    assert record["train_metrics"] == pytest.approx(expected) and 0 < expected["top5"] < 1
    assert record["valid_samples"] == 20 and record["valid_steps"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("level", APEX)
def test_apex_levels_train(tmp_path: Path, tiny_data: Callable[[str], Path], level: str) -> None:
    """Each level trains in its number formats, channels last, to a lower loss; a smaller last batch also counts."""
    over = {
        **TINY["imagenet_resnet50"]["run"],
        "precision": APEX[level],
        "batch_size": 16,  # with 40 images, the last batch has 8
        "model": {"depth": 18, "width": 16},  # narrower models are refused in channels-last memory
        "memory_format": "channels_last",
        "training": {"epochs": 3},
    }
    config = make_run(tmp_path / "run", "imagenet_resnet50", over, TINY["imagenet_resnet50"]["dataset"])
    assert load_run(config, "train").precision == APEX[level]
    assert train(tmp_path / "run", tiny_data("imagenet_resnet50") / "manifest.json") == 0
    losses = [record["train_loss"] for record in records(tmp_path / "run")]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    state = torch.load(tmp_path / "run/model.pt", weights_only=True)
    assert {str(value.dtype) for value in state.values() if value.is_floating_point()} == {"torch.float32"}


@pytest.mark.slow
@pytest.mark.parametrize("depth", [34, 50, 101])
def test_every_depth_trains(tmp_path: Path, tiny_data: Callable[[str], Path], depth: int) -> None:
    over = {**TINY["imagenet_resnet50"]["run"], "model": {"depth": depth, "width": 4}, "training": {"epochs": 1}}
    make_run(tmp_path / "run", "imagenet_resnet50", over, TINY["imagenet_resnet50"]["dataset"])
    assert train(tmp_path / "run", tiny_data("imagenet_resnet50") / "manifest.json") == 0
    assert math.isfinite(records(tmp_path / "run")[-1]["train_loss"])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("plan", ["imagenet_simulated", "imagenet_demo"])
def test_shipped_plans_classify_ten_textures(tmp_path: Path, plan: str) -> None:
    """The shipped plans classify at least 95 % of the validation images correctly."""
    loaded = resolve.load({"targets": [plan]})
    run = loaded.plans[plan]["resnet18"].run
    data = make_dataset(tmp_path / "data", loaded.workflow.datasets[plan].model_dump(mode="json"))
    assert stage("configure", "--settings", run.model_dump_json(), "--out", tmp_path / "config.yaml") == 0
    assert train(tmp_path, data / "manifest.json", "--threads", 2) == 0
    assert records(tmp_path)[-1]["metrics"]["top1"] >= 0.95
