"""Layout of stored data: chunks, compression and striping, compared with the regions that samples need."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from dlscale.config.resolve import Configuration
from dlscale.config.run import Run
from dlscale.core import machine, registry
from dlscale.core.paths import Results
from dlscale.core.text import number
from dlscale.data.manifest import Manifest
from dlscale.data.samples import GridSamples, Rows, tree_leaves
from dlscale.data.store import Reader, channels_first
from dlscale.extensions.loading.striping import striping
from dlscale.preflight.probe import Finding

#: Size of a page, the smallest part of a mapped file that is read, bytes.
PAGE = 4096

#: Bytes read per byte used above which `dlscale doctor` warns.
MAX_RATIO = 2.0

#: Timeout of the check of all datasets, seconds.
PROBE_SECONDS = 60.0


def chunk_ratio(shape: Sequence[int], chunks: Sequence[int], region: Sequence[int]) -> float:
    """Return the expected bytes of touched chunks per byte of a region at a random position.

    All arguments have one number for each axis.
    """
    touched = 1.0
    for length, edge, extent in zip(shape, chunks, region, strict=True):
        most = math.ceil(length / edge)
        touched *= most if extent >= length else min(most, 1 + (extent - 1) / edge)
    return touched * math.prod(chunks) / math.prod(region)


def page_ratio(shape: Sequence[int], region: Sequence[int], itemsize: int) -> float:
    """Return the expected bytes of touched pages per byte of a region at a random position in a contiguous array."""
    piece, pieces = itemsize, math.prod(region)
    for length, extent in zip(reversed(shape), reversed(region), strict=True):
        piece, pieces = piece * extent, pieces // extent
        if extent < length:
            break
    # A page that several pieces share counts once. So the pages cover at most the region from its first to its last
    # value, and one page more.
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    span = itemsize * (1 + sum((extent - 1) * stride for extent, stride in zip(region, strides, strict=True)))
    touched = pieces * (piece + PAGE - 1)
    return min(touched, span + PAGE) / (math.prod(region) * itemsize)


# ---- `dlscale doctor` --------------------------------------------------------------------------------


def probe_layouts(configuration: Configuration, plans: Collection[str] | None = None) -> list[Finding]:
    """Report chunks, compression and striping of each prepared dataset of plans (default: the targets)."""
    names = configuration.workflow.targets if plans is None else plans
    runs = [resolved.run for plan in names for resolved in configuration.plans[plan].values()]
    results, found = Results(configuration.workflow.results), dict[str, Finding]()

    def probe() -> None:
        for run in runs:
            if not run.program and Path(results.manifest(run.dataset)).exists():
                for finding in _probe(run, Path(results.manifest(run.dataset))):
                    if finding.status == "warn" or finding.name not in found:
                        found[finding.name] = finding

    # A daemon thread, so that a hanging file system cannot keep this process alive.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if thread.is_alive():
        text = f"no answer within {PROBE_SECONDS:.0f} s; a file system may hang"
        return [Finding("layout", "warn", text, "check that the datasets' files can be read")]
    return list(found.values())


def _probe(run: Run, file: Path) -> list[Finding]:
    """Return a finding for each field that a run reads; empty if it is unknown which parts of a field samples read."""
    try:
        manifest = Manifest.read(file)
        fits = sum(each.bytes for files in manifest.splits.values() for each in files) < machine.free_memory()
        return [
            _judge(f"layout {run.dataset}.{reader.name}", reader, region, fits)
            for reader, region in _regions(run, manifest)
        ]
    except Exception as error:  # another check reports the problem
        return [Finding(f"layout {run.dataset}", "skip", f"not checked: {error}")]


def _regions(run: Run, manifest: Manifest) -> list[tuple[Reader, tuple[int, ...]]]:
    """Return a reader of the first training file for each field of a sample, and the sample's shape, channels first."""
    module = registry.module_of(registry.study(run.study).dataset, "samples")
    samples: Any = registry.load(str(module)).open_samples(manifest, "train", run.samples, run.seed)
    if not isinstance(samples, GridSamples):
        samples = getattr(samples, "boxes", samples)  # samples that are computed from boxes
    if isinstance(samples, GridSamples):
        found = list[tuple[Reader, tuple[int, ...]]]()
        for field in (samples.input, samples.target):
            region = list(field.extent)
            region.insert(field.channel_axis, field.shape[0])
            found.append((field.readers[0], tuple(region)))
        return list({reader.name: (reader, region) for reader, region in reversed(found)}.values())
    if isinstance(samples, Rows):
        settings: Any = run.samples
        path = manifest.path(manifest.files("train")[0])
        names = dict.fromkeys([*tree_leaves(settings.input), *tree_leaves(settings.target)])
        readers = [Reader(path, name) for name in names]
        return [(reader, (1, *reader.shape[1:])) for reader in readers]
    return []


def _judge(name: str, reader: Reader, region: tuple[int, ...], fits: bool) -> Finding:
    """Compare a field's layout with the region of a sample; `fits`: whether the dataset fits into free memory."""
    dataset, stripes = reader.dataset, striping(reader.path)
    chunks = channels_first(dataset, dataset.chunks) if dataset.chunks else None
    # dlscale maps files without filters, so that a sample reads pages instead of chunks.
    if filtered := bool(chunks and dataset.id.get_create_plist().get_nfilters()):
        assert chunks
        ratio = chunk_ratio(reader.shape, chunks, region)
    else:
        whole, part = [(chunks or reader.shape)[axis] for axis in reader.order], [region[axis] for axis in reader.order]
        ratio = page_ratio(whole, [min(each) for each in zip(whole, part, strict=True)], dataset.dtype.itemsize)
    shapes = [" × ".join(map(str, each)) for each in (chunks or (), region)]
    text = f"{f'chunks {shapes[0]}' if chunks else 'contiguous'} {dataset.dtype}, a sample reads {shapes[1]}, "
    # Pages give an upper bound: a page may already be in memory, and neighbouring samples use the same page.
    text += (
        f"{number(ratio)} bytes read per byte used"
        if filtered
        else f"at most {number(ratio)} times its size, because disks read complete pages"
    )
    text += f", {dataset.compression or ('filters' if filtered else 'not compressed')}{stripes and f', {stripes}'}"
    remedy = "store chunks of the shape of a sample" + (", without compression" if filtered else " (storage.chunk)")
    return Finding(name, "warn" if ratio > MAX_RATIO and (filtered or not fits) else "ok", text, remedy)
