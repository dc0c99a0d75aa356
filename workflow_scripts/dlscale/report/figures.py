"""Figures for the page: inline SVG, coloured by the page's CSS so that it follows the theme, and PNG files.

Matplotlib draws with stand-in colours, which are then replaced by `currentColor` and CSS variables:
`--s0` … `--s7` for runs, `--io`, `--synthetic`, `--full` for the throughput modes, `--grid`, `--muted`.
The same input gives the same bytes.
"""

from __future__ import annotations

import base64
import io
import struct
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dlscale.core.errors import UserError
from dlscale.report.results import MODES, Epoch, RunResult
from dlscale.report.text import number, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Markers of the runs' lines, so that colour does not stand alone: matplotlib's name and a character for legends.
MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("*", "★"), ("P", "✚"), ("X", "✖"))

_INK, _MUTED, _GRID = "#010101", "#010102", "#010103"
_RUNS = [f"#0102{index:02x}" for index in range(len(MARKERS))]
_MODES = {mode: f"#0103{index:02x}" for index, mode in enumerate(MODES)}
_PAINT = (
    {_INK: "currentColor", _MUTED: "var(--muted)", _GRID: "var(--grid)"}
    | {colour: f"var(--s{index})" for index, colour in enumerate(_RUNS)}
    | {colour: f"var(--{mode.lower()})" for mode, colour in _MODES.items()}
)

#: Matplotlib types its settings one by one, hence Any.
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": _GRID,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",  # matplotlib brings it: the layout is the same on every machine
    "font.size": 9,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "dlscale",
    "text.color": _INK,
    "text.parse_math": False,  # labels are the user's: a $ is a $
    "xtick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.color": _GRID,
    "ytick.labelcolor": _MUTED,
}


@dataclass(frozen=True)
class Line:
    """A run as the figures of a plan draw it: `style` is the index of its colour and marker."""

    run: RunResult
    style: int


def loss(name: str, lines: Sequence[Line], over: Literal["epoch", "time"], unit: str) -> str:
    """Draw training (dashed) and validation loss over epochs, or over training time without validation.

    Parameters
    ----------
    name
        Unique in the page; a part of the SVG's identifiers.
    unit
        What the loss is, for the axis.
    """

    def draw(axes: Axes) -> None:
        greatest = max(line.run.training_seconds for line in lines)
        seconds, time_unit = next(((s, u) for s, u in ((3600, "h"), (60, "min")) if greatest >= 2 * s), (1, "s"))
        values = []
        for line in lines:
            epochs = line.run.epochs
            x = (
                [e.epoch for e in epochs]
                if over == "epoch"
                else [t / seconds for t in accumulate(e.epoch_seconds for e in epochs)]
            )
            trained, valid = [e.train_loss for e in epochs], [e.valid_loss for e in epochs]
            values += trained + valid
            _plot(axes, line, x, valid)
            axes.plot(
                x,
                trained,
                color=_RUNS[line.style],
                linewidth=1.1,
                dashes=(3, 2),
                marker="_" if len(x) == 1 else None,
            )
        axes.set_ylabel(unit)
        if over == "epoch":
            _epochs(axes)
        else:
            axes.set_xlim(left=0)
            axes.set_xlabel(f"training time without validation ({time_unit})")
        positive = [value for value in values if value > 0]
        if len(positive) == len(values) and max(positive) > 10 * min(positive):
            _logarithmic(axes, "y")

    return _svg(name, draw, (3.9, 3.0))


def learning_rate(name: str, lines: Sequence[Line]) -> str:
    """Draw the learning rate at the end of each epoch."""
    return _by_epoch(name, lines, lambda epoch: epoch.learning_rate, "learning rate", bottom=0.0)


def skill(name: str, lines: Sequence[Line]) -> str:
    """Draw the skill after each epoch; what lies below -1 is cut off."""

    def naive(axes: Axes) -> None:
        axes.axhline(0, color=_MUTED, linewidth=1)
        values = [e.skill for line in lines for e in line.run.epochs if e.skill is not None]
        axes.set_ylim(max(min([*values, -0.05]) * 1.1, -1.0), max([*values, 0.1]) * 1.1)
        axes.text(
            0.99,
            0,
            "naive answer",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=8,
            color=_MUTED,
        )

    return _by_epoch(name, lines, lambda epoch: epoch.skill, "skill", extra=naive)


def throughput(name: str, runs: Sequence[RunResult]) -> str:
    """Draw IO, SYNTHETIC and FULL of each run as bars, with the standard deviation over the trials."""

    def draw(axes: Axes) -> None:
        found = [trials for run in runs for mode in MODES if run.throughput and (trials := run.throughput.mode(mode))]
        means = [trials.mean for trials in found if trials.mean > 0]
        logarithmic = bool(means) and max(means) > 30 * min(means)
        if logarithmic:
            _logarithmic(axes, "x")
            axes.set_xlim(min(means) / 3, max(means) * 6)
        else:
            axes.set_xlim(0, 1.3 * max((t.mean + t.std for t in found), default=1.0) or 1.0)
        places, names = [], []
        for position, run in enumerate(runs):
            top = 4.5 * position
            axes.text(
                0, top, shorten(run.label, 40), transform=axes.get_yaxis_transform(), va="center", fontweight="bold"
            )
            for offset, mode in enumerate(MODES, 1):
                trials = run.throughput.mode(mode) if run.throughput else None
                places.append(top + offset)
                names.append(mode)
                if trials is None:
                    continue
                axes.barh(top + offset, trials.mean, height=0.78, color=_MODES[mode])
                axes.errorbar(trials.mean, top + offset, xerr=trials.std, color=_INK, linewidth=1, capsize=2)
                axes.annotate(
                    number(trials.mean),
                    (trials.mean + trials.std, top + offset),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
        axes.set_yticks(places, names, fontsize=8)
        axes.set_ylim(4.5 * len(runs) - 0.6, -0.8)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlabel("throughput (samples/s" + (", logarithmic)" if logarithmic else ")"))

    return _svg(name, draw, (4.6, 0.55 + 0.8 * len(runs)))


def picture(path: Path) -> dict[str, int | str]:
    """Return a PNG file's `width` and `height` in pixels and its content, `data`, in base 64.

    Raises
    ------
    UserError
        The file is missing, or not a whole PNG file.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the stage that writes it first") from None
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[-8:-4] != b"IEND":
        raise UserError(f"{path}: not a whole PNG file; delete it and run its stage again")
    width, height = struct.unpack(">II", content[16:24])
    return {"width": width, "height": height, "data": base64.b64encode(content).decode()}


def _by_epoch(
    name: str,
    lines: Sequence[Line],
    value: Callable[[Epoch], float | None],
    label: str,
    bottom: float | None = None,
    extra: Callable[[Axes], None] | None = None,
) -> str:
    def draw(axes: Axes) -> None:
        for line in lines:
            points = [(e.epoch, y) for e in line.run.epochs if (y := value(e)) is not None]
            _plot(axes, line, [x for x, _ in points], [y for _, y in points])
        axes.set_ylabel(label)
        _epochs(axes)
        if bottom is not None:
            axes.set_ylim(bottom=bottom)
        if extra:
            extra(axes)

    return _svg(name, draw, (3.9, 1.5))


def _plot(axes: Axes, line: Line, x: Sequence[float], y: Sequence[float]) -> None:
    marker, colour = MARKERS[line.style][0], _RUNS[line.style]
    axes.plot(x, y, color=colour, linewidth=1.8, marker=marker, markersize=5, markevery=max(1, len(x) // 12))


def _uncover(axes: Axes) -> None:
    """Widen each line that later ones cover, so that lines which coincide all stay visible."""
    drawn = [line.get_xydata() for line in axes.lines]
    covers = [
        sum(np.array_equal(data, other, equal_nan=True) for other in drawn[i + 1 :]) for i, data in enumerate(drawn)
    ]
    step = min(2.0, 5 / max(1, *covers))
    for line, covering in zip(axes.lines, covers, strict=True):
        line.set_linewidth(line.get_linewidth() + step * covering)
        line.set_markersize(line.get_markersize() + step * covering)


def _epochs(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(left=0)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def _logarithmic(axes: Axes, which: Literal["x", "y"]) -> None:
    """Set a logarithmic axis with plain numbers; matplotlib's own ones are mathematical text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if which == "y" else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _svg(name: str, draw: Callable[[Axes], None], inches: tuple[float, float]) -> str:
    """Return what `draw` draws as an SVG element for an HTML page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    text = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # whatever the user's matplotlibrc says
        matplotlib.rcParams.update(_STYLE)
        # The browser draws the text; it has more letters than matplotlib's font.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=inches, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        draw(axes)
        _uncover(axes)
        figure.savefig(
            text, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    return _inline(text.getvalue(), name)


def _inline(text: str, name: str) -> str:
    """Fit a matplotlib SVG into a page: its colours, its width, identifiers unique by `name`, nothing superfluous."""
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    referenced = set()
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            key = key.rpartition("}")[2]
            if key == "style":
                value = _style(value)
            elif key == "href":
                referenced.add(value[1:])
                value = f"#{name}-{value[1:]}"
            elif key == "clip-path":
                referenced.add(value[5:-1])
                value = f"url(#{name}-{value[5:-1]})"
            elif key == "d":
                value = " ".join(value.split())
            element.set(key, value)
    for element in root.iter():
        if (identifier := element.attrib.pop("id", None)) in referenced:
            element.set("id", f"{name}-{identifier}")
        if element.tag != "text":
            element.text = None
        element.tail = None
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("aria-hidden", "true")  # the figure around it has the description
    return ElementTree.tostring(root, encoding="unicode")


def _style(text: str) -> str:
    properties = [part.strip() for part in text.split(";")]
    kept = [part for part in properties if part and not part.startswith("font-family")]
    return "; ".join(": ".join(_PAINT.get(word, word) for word in part.split(": ", 1)) for part in kept)
