"""Loading speed, images/s: random crops of JPEGs, decoded, resized to 224 x 224 and mirrored, in batches of 16.

The reference is the loader of Apex's ImageNet example (image folders, PyTorch's DataLoader, fast collate), restated
operation by operation in `bench.published`, with its best number of workers. A second reference is the pipeline of
DALI's example, a third is Pillow's decoding without any other work.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from PIL import Image

from bench import published
from bench.loading import CPU, PROGRAM, THREADS, WORKERS, Contestants, best_of, rate, steady_rate
from bench.measure import Options, Row, in_turns
from dlscale.core.errors import UserError
from dlscale.data.loaders import DirectLoader, TorchLoader, direct_loader, torch_loader
from dlscale.data.loaders.base import Share
from dlscale.data.manifest import Manifest
from dlscale.extensions.dali import loader as dali_loader
from dlscale.extensions.dali.settings import DaliLoader
from dlscale.extensions.imagenet_resnet50.imagenet import describe, folder
from dlscale.extensions.imagenet_resnet50.imagenet.kind import ImagenetDataset, ImageSamples
from dlscale.extensions.imagenet_resnet50.imagenet.samples import Images

SIZE, BATCH = 224, 16
#: Size of most photographs in ImageNet; size of photographs for which libjpeg may decode fewer pixels.
(HEIGHT, WIDTH), LARGE = (375, 500), (1024, 1536)
DECODING, EXAMPLE = "Pillow's decoding alone", "DALI's example"
LARGER, SCALED = "large photographs, decoding alone", "large photographs, scaled decoding alone"
#: Minimum ratio of each loader's speed to the speed of Apex's example with the best number of workers. Images that were
#: decoded in advance are still resized.
TARGETS = {"torch loader's best": 0.95, "direct": 1.5, "direct, decoded": 2.5, "DALI": 1.1}
#: Minimum ratio of the speed of the loader `direct` to the speed of Pillow's decoding alone.
OF_DECODING = 0.85


def photograph(seed: int, shape: tuple[int, int] = (HEIGHT, WIDTH)) -> bytes:
    """Return a JPEG of noise with a photograph's size and spectrum (amplitudes fall as 1/f)."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(shape[0])[:, None], np.fft.rfftfreq(shape[1])[None])
    frequency[0, 0] = 1.0
    noise = np.fft.rfft2(rng.standard_normal((3, *shape))) / frequency
    grey = np.fft.irfft2(noise[0] + 0.3 * noise, shape)  # correlate the colours
    pixels = np.clip(128 + 50 * grey / grey.std(), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "JPEG", quality=90)
    return file.getvalue()


def write(where: Path, count: int) -> dict[str, str]:
    """Write image folders of two classes; return the dataset's source settings."""
    for split, images in (("train", count), ("valid", 2)):
        for number in range(images):
            path = where / split / "ab"[number % 2] / f"{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photograph(number))
    return {"kind": "folder", "train": str(where / "train"), "valid": str(where / "valid")}


def packed(source: dict[str, str], form: str, where: Path) -> Images:
    """Pack the folders, as the stages do; return the training samples."""
    dataset = ImagenetDataset.model_validate({"kind": "imagenet", "source": source, "form": form})
    packs = []
    for split in ("train", "valid"):
        packs.append(where / form / f"{split}-0000.h5")
        packs[-1].parent.mkdir(exist_ok=True)
        raw = SimpleNamespace(name=packs[-1].name, origin=source[split], index=0)
        folder.acquire(dataset, raw, packs[-1], lambda done, total: None)
    manifest = describe.describe_prepared(dataset, packs, where / form)
    manifest.write(where / form / "manifest.json")
    samples = ImageSamples(kind="images", size=SIZE)
    return Images(Manifest.read(where / form / "manifest.json"), "train", samples, seed=0)


def torch_rate(stack: ExitStack, samples: Images, workers: int) -> Callable[[], float]:
    """Return a function that delivers an epoch and returns images/s, without the first batch of each worker."""
    settings = TorchLoader(kind="torch", workers=workers)
    loader = stack.enter_context(closing(torch_loader.build(samples, settings, Share(BATCH), CPU)))
    epochs = iter(range(10**9))
    return steady_rate(lambda: loader.epoch(next(epochs)), workers)


def program_rate(stack: ExitStack, source: dict[str, str], workers: int) -> Callable[[], float]:
    """Return a function that measures the loader of Apex's example in the same way as `torch_rate`."""
    loader = published.image_loader(Path(source["train"]), SIZE, BATCH, workers)
    stack.callback(setattr, loader, "_iterator", None)  # end the worker processes
    return steady_rate(lambda: loader, workers)


def example_rate(source: dict[str, str], count: int) -> Callable[[], float]:
    """Return a function that measures images/s of the pipeline of DALI's example."""
    pipeline = published.dali_pipeline(Path(source["train"]), SIZE, BATCH, THREADS)

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(count // BATCH):
            pipeline.run()
        return BATCH * (count // BATCH) / (time.perf_counter() - start)

    return measure


def decoding(stack: ExitStack, files: list[bytes], scaled: bool = False) -> Callable[[], float]:
    """Return a function that decodes all files in threads and returns images/s; `scaled` lets libjpeg halve sizes.

    libjpeg may halve an image's edges while both are at least twice `SIZE`.
    """
    pool = stack.enter_context(ThreadPoolExecutor(THREADS))

    def decode(file: bytes) -> None:
        image = Image.open(io.BytesIO(file))
        if scaled:
            image.draft("RGB", (SIZE, SIZE))
        image.load()

    def measure() -> float:
        start = time.perf_counter()
        list(pool.map(decode, files))
        return len(files) / (time.perf_counter() - start)

    return measure


def ours(stack: ExitStack, samples: dict[str, Images], source: dict[str, str]) -> Contestants:
    """Return the contestants that use threads: the direct loader, DALI and DALI's example."""
    direct = DirectLoader(kind="direct", workers=THREADS)
    found = {
        name: rate(stack, direct_loader.build(samples[form], direct, Share(BATCH), CPU))
        for name, form in (("direct", "encoded"), ("direct, decoded", "decoded"))
    }
    dali = DaliLoader(kind="dali", workers=THREADS)
    try:
        for name, form in (("DALI", "encoded"), ("DALI, decoded", "decoded")):
            found[name] = rate(stack, dali_loader.build(samples[form], dali, Share(BATCH), CPU))
    except UserError as error:
        print(f"skipped: {error}")
        return found
    return {EXAMPLE: example_rate(source, samples["encoded"].size), **found}


def images(options: Options) -> list[Row]:
    """Measure the loading of training samples from JPEGs and from decoded images."""
    source = write(options.folder, 64 if options.quick else 256)
    samples = {form: packed(source, form, options.folder) for form in ("encoded", "decoded")}
    with ExitStack() as stack:
        found = in_turns(
            options.repetitions,
            {
                **{PROGRAM.format(workers): program_rate(stack, source, workers) for workers in WORKERS},
                **{f"torch, {workers} workers": torch_rate(stack, samples["encoded"], workers) for workers in WORKERS},
                **ours(stack, samples, source),
                DECODING: decoding(stack, [path.read_bytes() for path in sorted(Path(source["train"]).glob("*/*"))]),
                LARGER: decoding(stack, large := [photograph(number, LARGE) for number in range(8)]),
                SCALED: decoding(stack, large, scaled=True),
            },
        )
    floor, reference = found.pop(DECODING), "published loader's best"
    best = best_of([found[PROGRAM.format(workers)] for workers in WORKERS])
    found["torch loader's best"] = best_of([found[f"torch, {workers} workers"] for workers in WORKERS])
    sizes = {form: int(each.packs[0].index[:, 1].sum()) / each.size for form, each in samples.items()}
    rows = [Row(f"images, {SCALED}", "samples/s", found.pop(SCALED), LARGER, found.pop(LARGER), {"batch": BATCH})]
    for name, rates in found.items():
        counted = {"batch": BATCH, "stored": sizes["decoded" if "decoded" in name else "encoded"]}
        target = OF_DECODING if name == "direct" else None
        rows.append(Row(f"images, {name}", "samples/s", rates, DECODING, floor, counted, target=target))
        if name in TARGETS:
            rows.append(Row(f"images, {name}", "samples/s", rates, reference, best, counted, target=TARGETS[name]))
    if EXAMPLE in found:
        rows.append(Row("images, DALI", "samples/s", found["DALI"], EXAMPLE, found[EXAMPLE], counted, target=0.9))
    return rows
