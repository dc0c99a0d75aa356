"""`dlscale batch RUN --step N`: read the batch of a training step again, and show its samples and tensors."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from dlscale.config.places import run_folder
from dlscale.config.run import Run, load_run
from dlscale.core.errors import UserError
from dlscale.core.files import atomic_write
from dlscale.core.record import Number, Record
from dlscale.core.text import number
from dlscale.data.loaders.base import Share, open_samples, read_batch
from dlscale.data.manifest import Manifest
from dlscale.data.samples import GridSamples, Samples

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration


class SampleInfo(Record):
    """Sample of a batch."""

    index: int  #: Index within the epoch, from 0.
    source: str  #: File and position in the file; empty if unknown.
    bad: int  #: Number of NaN and infinite values in the sample's rows of float tensors.


class TensorInfo(Record):
    """Tensor of a batch."""

    name: str  #: `input` or `target`, with the path in a tree of tensors.
    shape: list[int]
    dtype: str
    minimum: Number  #: Least finite value; NaN if all values are NaN or infinite.
    maximum: Number  #: Greatest finite value; NaN if all values are NaN or infinite.
    nan: int
    infinite: int


class BatchInfo(Record):
    """Result of `dlscale batch`."""

    step: int  #: Number of the step, from 1.
    seed: int
    epoch: int  #: Number of the epoch, from 1.
    samples: list[SampleInfo]
    tensors: list[TensorInfo]


def main(args: argparse.Namespace, configuration: Configuration | None) -> int:
    """Print the batch of the step `args.step`; write its tensors to `args.out`, if set."""
    path = run_folder(args.run, configuration)
    run: Run = load_run(path / "config.yaml", "train")
    above = path.resolve().parents
    manifest = args.manifest or above[min(2, len(above) - 1)] / "data" / run.dataset / "manifest.json"
    info, batch = find_batch(run, manifest, args.step)
    if args.out:
        with atomic_write(Path(args.out)) as temporary, open(temporary, "wb") as opened:
            np.savez(opened, **batch)  # type: ignore[arg-type]
    print(info.text() if args.json else "\n".join(lines(info)))
    return 0


def find_batch(run: Run, manifest: str | Path, step: int) -> tuple[BatchInfo, dict[str, np.ndarray]]:
    """Return the description and the tensors of the global batch of a step, which is numbered from 1."""
    if run.loader.kind == "synthetic":
        raise UserError("loader.kind: synthetic delivers random numbers, which are not kept. Name another run")
    data = Manifest.read(manifest)
    data.check_files()
    samples, share = open_samples(run, data, "train"), Share(run.batch_size)
    steps = share.steps(samples.size)
    last = run.training.steps or steps * (run.training.epochs or 0)
    if not 1 <= step <= last:
        raise UserError(f"--step {step}: this training has the steps 1 to {last}")
    epoch, batch_number = divmod(step - 1, steps)
    indices = share.indices(batch_number, samples.size)
    x, y = read_batch(samples, epoch, indices)
    tensors: dict[str, torch.Tensor] = {}
    for root, tree in (("input", x), ("target", y)):
        tensors |= {root + keystr(path): tensor for path, tensor in tree_flatten_with_path(tree)[0]}
    bad = _bad(tensors.values(), len(indices))
    names = [file.path for file in data.files("train")]
    info = BatchInfo(
        step=step,
        seed=run.seed,
        epoch=epoch + 1,
        samples=[
            SampleInfo(index=index, source=source, bad=count)
            for index, source, count in zip(indices, sources(samples, epoch, indices, names), bad, strict=True)
        ],
        tensors=[_tensor_info(name, tensor) for name, tensor in tensors.items()],
    )
    return info, {name: _numpy(tensor) for name, tensor in tensors.items()}


def _bad(tensors: Any, count: int) -> list[int]:
    """Return each sample's number of NaN and infinite values, over the float tensors with a row per sample."""
    rows = [tensor for tensor in tensors if tensor.shape[:1] == (count,) and tensor.is_floating_point()]
    wrong = [tensor.isfinite().logical_not().reshape(count, -1).sum(dim=1) for tensor in rows]
    return [int(value) for value in sum(wrong, torch.zeros(count, dtype=torch.int64))]


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _tensor_info(name: str, tensor: torch.Tensor) -> TensorInfo:
    values = _numpy(tensor)
    finite = values[np.isfinite(values)]
    return TensorInfo(
        name=name,
        shape=list(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        minimum=float(finite.min()) if finite.size else math.nan,
        maximum=float(finite.max()) if finite.size else math.nan,
        nan=int(np.isnan(values).sum()),
        infinite=int(np.isinf(values).sum()),
    )


def sources(samples: Samples, epoch: int, indices: range, files: Sequence[str]) -> list[str]:
    """Return file and position of each sample; empty strings if the class of the samples does not provide them."""
    boxes: Any = getattr(samples, "boxes", None)
    inner: Any = boxes if isinstance(boxes, GridSamples) else samples
    if rows := getattr(inner, "places", None) or getattr(getattr(inner, "visits", None), "rows", None):
        file, row = rows(epoch)
        return [f"{files[file[index]]}, row {row[index]}" for index in indices]
    if isinstance(inner, GridSamples):
        found = inner.boxes(epoch).take(indices)
        return [
            f"{files[file]}, box at {', '.join(map(str, start.tolist()))}"
            for file, start in zip(found.file, found.input, strict=True)
        ]
    return [""] * len(indices)


def lines(info: BatchInfo) -> list[str]:
    """Return the description of a batch as lines of text."""
    first, last = info.samples[0].index, info.samples[-1].index
    text = [f"step {info.step}: seed {info.seed}, epoch {info.epoch}, samples {first} to {last}"]
    for sample in info.samples:
        bad = f"  {sample.bad} values are NaN or infinite" if sample.bad else ""
        text.append(f"  sample {sample.index}: {sample.source or 'file unknown'}{bad}")
    for each in info.tensors:
        text.append(
            f"  {each.name} {each.dtype} {each.shape}: {number(each.minimum, 6)} to {number(each.maximum, 6)}, "
            f"{each.nan} NaN, {each.infinite} infinite"
        )
    return text
