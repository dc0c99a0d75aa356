"""Loading speed, images/s, of the same photographs in packs of dlscale, WebDataset and LitData.

Each loader makes random crops, resized to 224 x 224 and mirrored, in batches of 16, as in `bench.images`. WebDataset
and LitData decode with Pillow in processes of PyTorch's DataLoader. `pip install webdataset litdata` installs them.
"""

from __future__ import annotations

import importlib.util
import io
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import DataLoader

from bench.images import BATCH, SIZE, decoding, ours, packed, torch_rate, write
from bench.loading import WORKERS, Contestants, best_of, steady_rate
from bench.measure import Options, Row, in_turns
from bench.published import Photographs, fast_collate

#: Photographs per shard.
SHARD = 32
#: Minimum ratio of the speed of dlscale's `direct` loader to the speed of each of the two packages.
TARGET = 1.0


def decoded(photographs: Photographs, item: dict[str, Any]) -> tuple[Image.Image, int]:
    """Return the augmented image and the label of an item with a JPEG `jpg` and a label `cls`."""
    image = Image.open(io.BytesIO(item["jpg"])).convert("RGB")
    return photographs.augmented(image), int(item["cls"])


def item(file: tuple[Path, int]) -> dict[str, Any]:
    """Return an item with the bytes of a file and its label."""
    path, label = file
    return {"jpg": path.read_bytes(), "cls": label}


def webdataset(photographs: Photographs, where: Path, workers: int) -> DataLoader[Any]:
    """Write shards, unless they exist, and return WebDataset's loader with shuffled shards and samples."""
    import webdataset as wds

    if not where.exists():
        where.mkdir()
        with wds.ShardWriter(f"{where}/%04d.tar", maxcount=SHARD, verbose=0) as shards:
            for number, file in enumerate(photographs.files):
                shards.write({"__key__": f"{number:06d}", **item(file)})
    files = sorted(map(str, where.glob("*.tar")))
    data = wds.WebDataset(files, shardshuffle=len(files), empty_check=False).shuffle(SHARD)
    return _loader(data.map(partial(decoded, photographs)), workers)


def litdata(photographs: Photographs, where: Path, workers: int) -> DataLoader[Any]:
    """Write chunks, unless they exist, and return LitData's loader with shuffled chunks and samples."""
    import litdata as lit

    if not where.exists():
        size = SHARD * photographs.files[0][0].stat().st_size
        with redirect_stdout(io.StringIO()):
            lit.optimize(item, photographs.files, str(where), chunk_bytes=size, num_workers=1, start_method="fork")
    data = lit.StreamingDataset(str(where), shuffle=True, transform=partial(decoded, photographs))
    return _loader(data, workers, lit.StreamingDataLoader)


def _loader(data: Any, workers: int, kind: Any = DataLoader) -> DataLoader[Any]:
    found: DataLoader[Any] = kind(
        data, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0, collate_fn=fast_collate
    )
    return found


def packs(options: Options) -> list[Row]:
    """Measure the loading of training samples from packs."""
    source = write(options.folder, 64 if options.quick else 256)
    photographs, samples = (
        Photographs(Path(source["train"]), SIZE),
        {form: packed(source, form, options.folder) for form in ("encoded", "decoded")},
    )
    makers = {"WebDataset": webdataset, "LitData": litdata}
    installed = {name: make for name, make in makers.items() if importlib.util.find_spec(name.lower())}
    with ExitStack() as stack:
        contestants: Contestants = {
            f"{name}, {workers} workers": steady_rate(
                partial(iter, make(photographs, options.folder / name, workers)), workers
            )
            for name, make in installed.items()
            for workers in WORKERS
        }
        contestants |= {
            f"torch, {workers} workers": torch_rate(stack, samples["encoded"], workers) for workers in WORKERS
        }
        files = [path.read_bytes() for path, _ in photographs.files]
        contestants |= {"direct": ours(stack, samples, source)["direct"], "decoding": decoding(stack, files)}
        found = in_turns(options.repetitions, contestants)
    floor, direct = found.pop("decoding"), found.pop("direct")
    best = {
        name: best_of([found[f"{name}, {workers} workers"] for workers in WORKERS]) for name in (*installed, "torch")
    }
    counted = {"batch": BATCH}
    rows = [Row(f"packs, {name}", "samples/s", rates, "decoding", floor, counted) for name, rates in best.items()]
    rows += [
        Row(
            "packs, direct",
            "samples/s",
            direct,
            name,
            best[name],
            counted,
            target=TARGET if name in installed else None,
        )
        for name in best
    ]
    if not installed:
        print("skipped: WebDataset and LitData; pip install webdataset litdata")
    return rows
