"""Manifests of files that are used without preprocessing."""

from __future__ import annotations

from pathlib import Path

from dlscale.core.files import sha256
from dlscale.core.progress import tracked
from dlscale.data.describe import new_manifest
from dlscale.data.manifest import File, Manifest
from dlscale.extensions.programs.files.kind import KIND, FilesDataset


def describe_prepared(dataset: FilesDataset, sources: list[Path], folder: Path) -> Manifest:
    """Describe files by their digests, all as split `train`, because only the program knows its training files."""
    if any(path.is_dir() for path in sources):
        sources = [*map(Path, KIND.prepared_files(dataset))]
    files = [
        File.of(path, folder, 1, sha256(path), True) for path in tracked(sources, "describing", len(sources), "files")
    ]
    return new_manifest(dataset, {}, {"train": files}, folder)
