"""Stage `preview`: draw some values of a dataset, with histograms."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlscale.core.files import save_png
from dlscale.data import parts
from dlscale.data.manifest import FieldInfo, Manifest
from dlscale.data.store import Reader

STRIP = 4  # images along each edge of the mosaic
MIN_EDGE = 5  # shortest edge of an image in the mosaic, and shortest curve that is drawn
BARS = 30_000  # largest number of classes with a bar each, because labels may be counts up to millions


@dataclass(frozen=True)
class Panel:
    """One picture, if any, above the histogram of its values."""

    title: str
    unit: str
    values: np.ndarray  # [H, W], or uint8 [H, W, 3], for a picture and its histogram; [N] for only a histogram
    labels: tuple[str, str] = ("", "")  # labels of the picture's axes, x and y
    classes: int | None = None  # number of classes if the values are labels; up to `BARS`, each class has a bar


def main(args: argparse.Namespace) -> None:
    """Draw at most ten panels of the dataset of `args.manifest`, and write the picture to `args.out`."""
    import matplotlib
    from matplotlib.figure import Figure

    manifest = Manifest.read(args.manifest)
    panels = list((parts.role(manifest.kind, "preview", "preview") or first_rows)(manifest))[:10]
    columns = min(len(panels), 5)
    bands = -(-len(panels) // columns)
    style: Any = {
        "text.parse_math": False,
        "axes.titlesize": 9,
        "axes.labelsize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
    }
    with matplotlib.rc_context(style):  # also while saving, because saving makes the tick labels
        figure = Figure(figsize=(3.2 * columns, 4.6 * bands), layout="constrained")
        grid = figure.add_gridspec(2 * bands, columns, height_ratios=(2, 1) * bands)
        for number, panel in enumerate(panels):
            band, column = divmod(number, columns)
            if panel.values.ndim > 1:
                top = figure.add_subplot(grid[2 * band, column])
                image = top.imshow(
                    panel.values,
                    cmap="viridis",
                    aspect="equal" if 0.25 <= panel.values.shape[0] / panel.values.shape[1] <= 4 else "auto",
                )
                top.set(title=panel.title, xlabel=panel.labels[0], ylabel=panel.labels[1])
                if panel.values.ndim == 2:
                    figure.colorbar(image, ax=top, label=panel.unit, shrink=0.8)
            # Without a picture, the histogram takes the height of both.
            bottom = figure.add_subplot(grid[2 * band + (panel.values.ndim > 1) : 2 * band + 2, column])
            several = panel.classes is not None and panel.classes <= BARS
            bins: Any = np.arange((panel.classes or 0) + 1) - 0.5 if several else 60
            bottom.hist(panel.values.ravel(), bins=bins)
            bottom.set(xlabel=f"{panel.title} ({panel.unit})", ylabel="values")
        figure.suptitle(f"{manifest.folder.name}: first training file", fontsize=10)
        save_png(figure, Path(args.out), dpi=90)


def channel_panels(info: FieldInfo, values: np.ndarray, labels: tuple[str, str]) -> Iterator[Panel]:
    """Yield a panel for each channel of a slice [C, H, W] in stored units.

    Panels show physical values, or the log10 of these values if the channel's transform is a logarithm.
    """
    for channel, unit, transform, picture in zip(info.channels, info.units, info.transforms, values, strict=True):
        physical = transform.inverse(picture) if info.stored == "model" else picture
        if transform.kind == "log":
            physical, unit = np.log10(physical), f"log10({unit})"
        yield Panel(channel, unit, physical, labels)


def first_rows(manifest: Manifest) -> Iterator[Panel]:
    """Yield panels of the first training file: its first rows, or the middle plane of a volume."""
    file = manifest.files("train")[0]
    for name, info in manifest.fields.items():
        if info.channel_axis == 0:
            middle = slice(file.rows // 2, file.rows // 2 + 1)
            plane = Reader(manifest.path(file), name)[:, middle, :, :][:, 0]
            yield from channel_panels(info, plane, ("z (cells)", "y (cells)"))
            continue
        rows = max(1, min(file.rows, 1_000_000 // max(1, int(np.prod(info.row_shape)))))
        values = Reader(manifest.path(file), name)[(slice(rows),)]
        if info.channel_axis is None:
            values = values[:, None]
        for index, (channel, unit) in enumerate(zip(info.channels, info.units, strict=True)):
            of_channel = values[:, index]
            shown, labels = (
                (mosaic(of_channel), ("", ""))
                if len(info.grid) == 2 and min(info.grid) >= MIN_EDGE
                else (of_channel.reshape(rows, -1)[:64], ("position in the row", "row"))
                if int(np.prod(info.grid)) >= MIN_EDGE
                else (of_channel.ravel(), ("", ""))
            )
            yield Panel(channel, unit, shown, labels, info.classes)


def mosaic(images: np.ndarray) -> np.ndarray:
    """Lay the first STRIP^2 images [N, H, W, ...] side by side: [STRIP * H, STRIP * W, ...].

    Fewer images form one row.
    """
    down, across = (STRIP, STRIP) if len(images) >= STRIP**2 else (1, len(images))
    bands = [np.concatenate(list(images[row * across : (row + 1) * across]), axis=1) for row in range(down)]
    return np.concatenate(bands)
