"""Pictures of prediction against truth, shared by the studies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    from matplotlib.figure import Figure

    def show(axis: Any, picture: np.ndarray, title: str, limits: Any, colours: str = "viridis") -> Any:
        axis.set_title(title, fontsize=8)
        axis.set_xlabel(axes_labels[0], fontsize=7)
        axis.set_ylabel(axes_labels[1], fontsize=7)
        axis.tick_params(labelsize=6)
        low, high = limits
        return axis.imshow(
            picture, vmin=low, vmax=high, cmap=colours, extent=extent, aspect="auto" if extent else "equal"
        )

    height, width = rows[0][2][0].shape
    count = len(columns) + 1
    panel = 2.6
    figure = Figure(figsize=(panel * 1.25 * count, (panel * height / width + 0.75) * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), count, squeeze=False)
    for line, (name, unit, pictures) in zip(axes, rows, strict=True):
        limits = np.percentile(pictures[-2:], [0.5, 99.5])
        for axis, picture, title in zip(line, pictures, columns, strict=False):
            if own_scale and title not in columns[-2:]:
                show(axis, picture, f"{title} (own scale)", np.percentile(picture, [0.5, 99.5]))
            else:
                image = show(axis, picture, f"{name}: {title}", limits)
        figure.colorbar(image, ax=line[:-1].tolist(), label=unit, shrink=0.85, pad=0.01)
        difference = pictures[-1] - pictures[-2]
        bound = float(np.percentile(np.abs(difference), 99.5)) or 1.0
        image = show(line[-1], difference, f"{name}: prediction - truth", (-bound, bound), "RdBu_r")
        figure.colorbar(image, ax=line[-1], label=unit, shrink=0.85)
    return figure


def values(target: np.ndarray, prediction: np.ndarray, count: int = 12) -> Figure:
    """Draw the first numbers of a sample's target and prediction, for studies without a figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 0.3 + 0.2 * min(count + 1, np.size(target) + 1)))
    for place, (title, numbers) in enumerate({"target": target, "prediction": prediction}.items()):
        text = "\n".join([title, *(f"{number:.4g}" for number in np.ravel(numbers)[:count])])
        figure.text(0.1 + 0.5 * place, 0.95, text, verticalalignment="top")
    return figure
