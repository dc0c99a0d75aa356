"""Pictures inside of the page: inline SVG, coloured by the page's CSS so that it follows the theme, and PNG files.

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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlscale.core.errors import UserError
from dlscale.measure.records import MODES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Markers of the runs' lines, so that colour does not stand alone: matplotlib's name and a character for legends.
MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("*", "★"), ("P", "✚"), ("X", "✖"))

#: How lines are dashed: lengths of dashes and gaps, for figures and legends.
DASHED, DOTTED = "3 2", "1 1.5"

INK, MUTED, GRID = "#010101", "#010102", "#010103"
RUN_COLOURS = [f"#0102{index:02x}" for index in range(len(MARKERS))]
MODE_COLOURS = {mode: f"#0103{index:02x}" for index, mode in enumerate(MODES)}
#: Parts of a step: loading as IO, computing in the colours of runs, which stand in other figures.
PART_COLOURS = {
    "data": MODE_COLOURS["IO"],
    "copy": RUN_COLOURS[6],
    "forward": MODE_COLOURS["SYNTHETIC"],
    "backward": RUN_COLOURS[3],
    "optimizer": RUN_COLOURS[5],
    "compute": RUN_COLOURS[4],
    "other": GRID,
    "unexplained": MUTED,
}
PAINT = (
    {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--grid)"}
    | {colour: f"var(--s{index})" for index, colour in enumerate(RUN_COLOURS)}
    | {colour: f"var(--{mode.lower()})" for mode, colour in MODE_COLOURS.items()}
)

#: Matplotlib types its settings one by one, hence Any.
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",  # matplotlib brings it: the layout is the same on every machine
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "dlscale",
    "text.color": INK,
    "text.parse_math": False,  # labels are the user's: a $ is a $
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
}


def svg(name: str, draw: Callable[[Axes], None], inches: tuple[float, float]) -> str:
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
    return _inlined(text.getvalue(), name)


def _inlined(text: str, name: str) -> str:
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
                value = _restyled(value)
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


def _restyled(text: str) -> str:
    properties = [part.strip() for part in text.split(";")]
    kept = [part for part in properties if part and not part.startswith("font-family")]
    return "; ".join(": ".join(PAINT.get(word, word) for word in part.split(": ", 1)) for part in kept)


def _uncover(axes: Axes) -> None:
    """Widen each line that later ones cover, so that lines which coincide all stay visible."""
    drawn = [line.get_xydata() for line in axes.lines]
    covers = [
        sum(np.array_equal(data, other, equal_nan=True) for other in drawn[i + 1 :]) for i, data in enumerate(drawn)
    ]
    step = min(2.0, 5 / max([1, *covers]))
    for line, covering in zip(axes.lines, covers, strict=True):
        line.set_linewidth(line.get_linewidth() + step * covering)
        line.set_markersize(line.get_markersize() + step * covering)


def picture(path: Path) -> dict[str, int | str]:
    """Return a PNG file's `width` and `height` in pixels and its content, `data`, in base 64.

    A `UserError` is raised for a file that is missing, or not a whole PNG file.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run the stage that writes it first") from None
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[-8:-4] != b"IEND":
        raise UserError(f"{path}: not a whole PNG file; delete it and run its stage again")
    width, height = struct.unpack(">II", content[16:24])
    return {"width": width, "height": height, "data": base64.b64encode(content).decode()}
