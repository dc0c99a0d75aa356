"""Stage `preview`: a first look at a dataset, one picture a channel and how its values are distributed."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from dlscale.core.files import whole
from dlscale.data.manifest import FieldInfo, Manifest
from dlscale.data.store import Reader


def main(args: argparse.Namespace) -> None:
    """Draw the dataset of `args.manifest` to `args.out`."""
    draw_preview(Manifest.read(args.manifest), Path(args.out))


def first_fields(manifest: Manifest, split: str = "train") -> list[tuple[FieldInfo, np.ndarray]]:
    """Return each field's first horizontal slice [C, H, W] in model units, from the first file of `split`."""
    file = manifest.files(split)[0]
    found = []
    for name, info in manifest.fields.items():
        reader = Reader(manifest.path(file), name)
        if manifest.kind == "cosmo":
            middle = reader.shape[1] // 2
            values = reader[:, middle : middle + 1, :, :][:, 0]
        else:
            values = reader[0:1, :, : info.grid[0], : info.grid[1]][0]
        if info.stored == "physical":
            values = np.stack([t.forward(channel) for t, channel in zip(info.transforms, values, strict=True)])
        found.append((info, values))
    return found


def draw_preview(manifest: Manifest, path: Path) -> None:
    """Draw every channel (at most 10) as a picture above its histogram, in physical units, to a PNG file."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    panels = [
        (channel, unit, transform, values[index])
        for info, values in first_fields(manifest)
        for index, (channel, unit, transform) in enumerate(zip(info.channels, info.units, info.transforms, strict=True))
    ][:10]
    latitude, longitude = (manifest.extra.get(key) for key in ("latitude", "longitude"))
    geographic = bool(latitude and longitude)
    extent = (longitude[0], longitude[-1], latitude[-1], latitude[0]) if geographic else None
    columns = min(len(panels), 5)
    bands = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        2 * bands,
        columns,
        figsize=(3.2 * columns, 4.6 * bands),
        squeeze=False,
        height_ratios=(2, 1) * bands,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set_visible(False)
    for number, (channel, unit, transform, values) in enumerate(panels):
        physical = transform.inverse(values)
        shown = physical
        if transform.kind == "log":
            shown, unit = np.log10(physical), f"log10({unit})"
        band, column = divmod(number, columns)
        top, bottom = axes[2 * band, column], axes[2 * band + 1, column]
        top.set_visible(True)
        bottom.set_visible(True)
        image = top.imshow(shown, extent=extent, aspect="auto" if geographic else "equal", cmap="viridis")
        top.set_title(channel, fontsize=9)
        top.set_xlabel("longitude (degrees)" if geographic else "z (cells)", fontsize=8)
        top.set_ylabel("latitude (degrees)" if geographic else "y (cells)", fontsize=8)
        figure.colorbar(image, ax=top, label=unit, shrink=0.8)
        bottom.hist(shown.ravel(), bins=60)
        bottom.set_xlabel(f"{channel} ({unit})", fontsize=8)
        bottom.set_ylabel("points", fontsize=8)
        for axis in (top, bottom):
            axis.tick_params(labelsize=7)
    figure.suptitle(f"{manifest.folder.name}: first training file", fontsize=10)
    with whole(path) as temporary:
        figure.savefig(temporary, dpi=90, format="png")
    plt.close(figure)
