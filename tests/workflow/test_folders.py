"""Folders of images: what changed in them is packed again, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.workflow.conftest import Tree


@pytest.mark.slow
def test_a_changed_image_is_packed_again(make_tree: Callable[..., Tree], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "valid"):
        for name in ("ape", "bee"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(3):
                pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    source = {"kind": "folder", "train": str(tmp_path / "train"), "valid": str(tmp_path / "valid")}
    photos = {"kind": "imagenet", "source": source, "shards": {"train": 2}}
    tree = make_tree({"results": "results", "targets": ["imagenet_demo"], "datasets": {"photos": photos}, "plans": {}})
    done = tree.snakemake("--cores", "2", "--", "data_photos")
    assert done.status == 0, done.output[-3000:]
    assert tree.planned(targets=["data_photos"]).names == []

    image = tmp_path / "train/bee/1.png"
    content, stat = image.read_bytes(), image.stat()
    image.write_bytes(content)
    after = ["describe photos", "preview photos"]
    assert tree.planned(targets=["data_photos"]).names == ["acquire photos train-0001.h5", *after]
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert tree.planned(targets=["data_photos"]).names == []
    (tmp_path / "valid/ape/2.png").unlink()
    assert tree.planned(targets=["data_photos"]).names == ["acquire photos valid-0000.h5", *after]
    link = tmp_path / "train/ape/x.png"
    link.symlink_to("nowhere")
    dry = tree.snakemake("-n", "--", "data_photos")
    assert dry.status == 2 and "Traceback" not in dry.output
    assert f"\n{link}: cannot look at this file (No such file or directory); mend or remove it\n" in dry.output
    link.unlink()
    shutil.rmtree(tmp_path / "valid")
    shutil.rmtree(tmp_path / "train")
    gone = tree.planned(targets=["data_photos"])
    assert gone.names == []
    assert "train: no such file or folder; what was made of it stays as it is" in gone.output
