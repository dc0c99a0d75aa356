"""Pictures of prediction against truth, shared by the studies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def comparison(
    rows: list[tuple[str, str, list[np.ndarray]]],
    columns: list[str],
    axes_labels: tuple[str, str],
    extent: tuple[float, float, float, float] | None = None,
    own_scale: bool = False,
) -> Figure:
    """Draw one row a channel: the given pictures, then prediction minus truth.

    Parameters
    ----------
    rows
        (name, unit, pictures [H, W]): the last two pictures are truth and prediction.
    columns
        Titles of the pictures.
    axes_labels
        Horizontal and vertical, with units.
    extent
        (left, right, bottom, top) of the axes; cells if None.
    own_scale
        Pictures before truth and prediction are of another quantity and get a colour scale of their own.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height, width = rows[0][2][0].shape
    count = len(columns) + 1
    panel = 2.6
    figure = Figure(figsize=(panel * 1.25 * count, (panel * height / width + 0.75) * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), count, squeeze=False)
    for line, (name, unit, pictures) in zip(axes, rows, strict=True):
        low, high = np.percentile(np.concatenate([picture.ravel() for picture in pictures[-2:]]), [0.5, 99.5])
        for place, (axis, picture, title) in enumerate(zip(line, pictures, columns, strict=False)):
            context = own_scale and place < len(pictures) - 2
            limits = np.percentile(picture, [0.5, 99.5]) if context else (low, high)
            image = axis.imshow(
                picture,
                vmin=limits[0],
                vmax=limits[1],
                cmap="viridis",
                extent=extent,
                aspect="auto" if extent else "equal",
            )
            axis.set_title(f"{title} (own scale)" if context else f"{name}: {title}", fontsize=8)
        figure.colorbar(image, ax=line[: count - 1].tolist(), label=unit, shrink=0.85, pad=0.01)
        difference = pictures[-1] - pictures[-2]
        bound = float(np.percentile(np.abs(difference), 99.5)) or 1.0
        image = line[-1].imshow(
            difference, vmin=-bound, vmax=bound, cmap="RdBu_r", extent=extent, aspect="auto" if extent else "equal"
        )
        line[-1].set_title(f"{name}: prediction - truth", fontsize=8)
        figure.colorbar(image, ax=line[-1], label=unit, shrink=0.85)
        for axis in line:
            axis.set_xlabel(axes_labels[0], fontsize=7)
            axis.set_ylabel(axes_labels[1], fontsize=7)
            axis.tick_params(labelsize=6)
    return figure


def values(target: np.ndarray, prediction: np.ndarray, count: int = 12) -> Figure:
    """Draw the first numbers of a sample's target and prediction, for studies without a figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 3))
    FigureCanvasAgg(figure)
    for place, (title, numbers) in enumerate({"target": target, "prediction": prediction}.items()):
        text = "\n".join([title, *(f"{number:.4g}" for number in np.ravel(numbers)[:count])])
        figure.text(0.1 + 0.5 * place, 0.95, text, verticalalignment="top")
    return figure
