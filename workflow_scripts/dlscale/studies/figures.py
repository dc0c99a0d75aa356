"""Figures that compare predictions with the truth, for any study."""

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
    """Draw pictures of several channels, one row per channel: the given pictures, then prediction minus truth.

    Each row has a name, a unit and pictures [H, W], titled by `columns`; the last two pictures are truth and
    prediction. At most 20 rows are drawn. `extent` is (left, right, bottom, top) of the axes. With `own_scale`, the
    pictures before the last two have their own colour scales.
    """
    from matplotlib.figure import Figure

    def show(axis: Any, picture: np.ndarray, title: str, limits: Any, colours: str = "viridis") -> Any:
        axis.set_title(title, fontsize=8)
        axis.tick_params(labelsize=6)
        low, high = limits
        return axis.imshow(
            picture, vmin=low, vmax=high, cmap=colours, extent=extent, aspect="auto" if extent else "equal"
        )

    (height, width), rows = rows[0][2][0].shape, rows[:20]
    height = min(height, 8 * width)  # limits the number of pixels of the figure
    panel, count = 2.6, len(columns)  # inches; with fixed positions, drawing takes a fifth of the time
    size = (panel * (count + 1) + 2.6, (panel * height / width + 0.3) * len(rows) + 0.8)
    figure = Figure(figsize=size)
    edges = {"left": 0.6 / size[0], "right": 1 - 0.7 / size[0], "bottom": 0.5 / size[1], "top": 1 - 0.55 / size[1]}
    shares = [
        *[1.0] * count,
        0.04,
        0.3,
        1.0,
        0.04,
    ]  # pictures, colour bar, space for its labels, difference, colour bar
    grid = figure.add_gridspec(
        len(rows), len(shares), **edges, width_ratios=shares, wspace=0.08, hspace=0.3 / (panel * height / width)
    )
    for number, (name, unit, pictures) in enumerate(rows):
        line = [figure.add_subplot(grid[number, place]) for place in (*range(count), count + 2)]
        limits = np.percentile(pictures[-2:], [0.5, 99.5])
        for axis, picture, title in zip(line, pictures, columns, strict=False):
            if own_scale and title not in columns[-2:]:
                show(axis, picture, f"{title} (own scale)", np.percentile(picture, [0.5, 99.5]))
            else:
                image = show(axis, picture, f"{name}: {title}", limits)
        _colours(figure, image, grid[number, count], unit)
        difference = pictures[-1] - pictures[-2]
        bound = float(np.percentile(np.abs(difference), 99.5)) or 1.0
        image = show(line[-1], difference, f"{name}: prediction - truth", (-bound, bound), "RdBu_r")
        _colours(figure, image, grid[number, count + 3], unit)
        line[0].set_ylabel(axes_labels[1], fontsize=7)
        for axis in line:
            axis.tick_params(labelbottom=number == len(rows) - 1, labelleft=axis is line[0])
            if number == len(rows) - 1:
                axis.set_xlabel(axes_labels[0], fontsize=7)
    return figure


def beside_bars(
    picture: np.ndarray, title: str, classes: tuple[str, list[str]], probabilities: np.ndarray, right: str, **shown: Any
) -> Figure:
    """Draw an image next to the probabilities of `classes`, given as axis label and class names.

    The bar of the class `right` is green.
    """
    from matplotlib.figure import Figure

    noun, names = classes
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    image, bars = figure.subplots(1, 2)
    image.imshow(picture, **shown)
    image.set_title(title, fontsize=9)
    image.set(xlabel="column (pixels)", ylabel="row (pixels)")
    bars.barh(names, probabilities, color=["tab:green" if name == right else "tab:gray" for name in names])
    bars.invert_yaxis()
    bars.set(xlim=(0, 1), xlabel="probability", ylabel=noun)
    bars.set_title(f"prediction: {names[int(np.argmax(probabilities))]}", fontsize=9)
    return figure


def _colours(figure: Figure, image: Any, place: Any, unit: str) -> None:
    bar = figure.colorbar(image, cax=figure.add_subplot(place))
    bar.set_label(unit, fontsize=7)
    bar.ax.tick_params(labelsize=6)
    bar.ax.yaxis.get_offset_text().set_fontsize(6)


def values(target: np.ndarray, prediction: np.ndarray, count: int = 200) -> Figure:
    """Plot the first numbers of a sample's target and prediction, for studies without a figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axis = figure.subplots()
    for title, numbers, marker in (("target", target, "o"), ("prediction", prediction, "x")):
        axis.plot(np.ravel(numbers)[:count], marker, markersize=4, label=title)
    axis.set(xlabel=f"position in the first validation sample (first {count} numbers)", ylabel="value (model's units)")
    axis.legend(fontsize=7)
    return figure


def side_by_side(truth: np.ndarray, prediction: np.ndarray, rows: int = 360) -> np.ndarray:
    """Return truth and prediction [H, W] as one picture of at most `rows` rows, uint8, in the truth's colour scale."""
    from matplotlib import colormaps

    low, high = np.percentile(truth, [0.5, 99.5])
    gap = np.full((truth.shape[0], max(1, truth.shape[1] // 50)), np.nan)
    both = (np.hstack([truth, gap, prediction]).astype(np.float64) - low) / ((high - low) or 1.0)
    finer, coarser = max(1, rows // (2 * len(both))), -(-len(both) // rows)
    both = both[::coarser, ::coarser].repeat(finer, axis=0).repeat(finer, axis=1)
    pixels: np.ndarray = colormaps["turbo"].with_extremes(bad="white")(np.ma.masked_invalid(both), bytes=True)[..., :3]
    return pixels
