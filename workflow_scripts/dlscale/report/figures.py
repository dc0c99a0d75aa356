"""What the page is made of: tables, legends and sections; and figures, as inline SVG in colours of the page's CSS.

The same input gives the same bytes. Identifiers are made of `name`, which is unique in the page.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dlscale.core.text import NONE, number, shorten
from dlscale.measure.records import MODES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dlscale.report.results import PlanResult, RunResult

#: Markers of the runs' lines, so that colour does not stand alone: matplotlib's name and a character for legends.
MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("*", "★"), ("P", "✚"), ("X", "✖"))

#: How lines are dashed: lengths of dashes and gaps, for figures and legends.
SOLID, DASHED, DOTTED = "", "3 2", "1 1.5"
DASHES = (DOTTED, "5 2", "5 1.5 1 1.5", "9 2")

#: Stand-ins for `currentColor` and the CSS variables in `PAINT`, so that figures follow the theme.
INK, MUTED, GRID = "#010101", "#010102", "#010103"
RUN_COLOURS = [f"#0102{index:02x}" for index in range(len(MARKERS))]
MODE_COLOURS = {mode: f"#0103{index:02x}" for index, mode in enumerate(MODES)}
PAINT = (
    {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--grid)"}
    | {colour: f"var(--s{index})" for index, colour in enumerate(RUN_COLOURS)}
    | {colour: f"var(--{mode.lower()})" for mode, colour in MODE_COLOURS.items()}
)

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
    "text.color": INK,
    "text.parse_math": False,  # labels are the user's: a $ is a $
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
}

#: Width of a figure, inches.
WIDTH = 3.9

#: Seconds beyond which times are told in minutes, and minutes in hours.
UNITS = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))


def svg(name: str, draw: Callable[[Axes], None], inches: tuple[float, float]) -> str:
    """Return the SVG element, for an HTML page, of the axes that `draw` fills."""
    import matplotlib
    from matplotlib.figure import Figure

    text = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # whatever the user's matplotlibrc says
        matplotlib.rcParams.update({**_STYLE, "svg.hashsalt": name})  # of which identifiers are made that are used
        # The browser draws the text; it has more letters than matplotlib's font.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure.subplots())
        figure.savefig(
            text, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    drawn = text.getvalue()
    drawn = re.sub(r"<(metadata|style).*?</\1>", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    drawn = re.sub(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', r'<svg aria-hidden="true" \1>', drawn)  # the figure tells it
    drawn = re.sub(r' id="[\w.]+_\d+"|font-family: [^;"]*;? ?', "", drawn).replace("xlink:", "")
    drawn = re.sub(r"\n\s*", " ", drawn).strip()
    return re.sub("|".join(PAINT), lambda colour: PAINT[colour[0]], drawn)


# ---- lines -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line, without unknown values."""

    points: Sequence[tuple[float, float | None]]
    colour: str
    marker: str = ""  #: One of `MARKERS`.
    dashes: str = SOLID  #: Lengths of dashes and gaps, as in SVG.
    width: float = 1.8
    band: Sequence[tuple[float, float]] = ()  #: Least and greatest value at each point.
    whiskers: Sequence[float] = ()  #: Half length at each point.


def run_line(style: int, points: Sequence[tuple[float, float | None]], **more: Any) -> Line:
    """Return the line of a run, in the colour and with the marker of its `style`."""
    return Line(points, RUN_COLOURS[style], MARKERS[style][0], **more)


def lines(
    name: str,
    drawn: Sequence[Line],
    axis: str,
    label: str,
    *,
    time: bool = False,
    whole: bool = False,
    x: Literal["from zero", "doubling", "wide"] = "from zero",
    y: Literal["auto", "zero", "log"] = "auto",
    levels: Sequence[tuple[float, str]] = (),
    ticks: Sequence[int] = (),
    height: float = 2.8,
) -> str:
    """Draw lines over `axis`: seconds, if it is a `time`, and without fractions, if it is `whole`.

    Parameters
    ----------
    x
        `wide` is logarithmic where one line is twenty times as long as another; `doubling` has the base two.
    y
        `auto` is logarithmic for positive values that span a factor of ten.
    levels
        Values to compare with, and their names.
    ticks
        The only numbers along the axis.
    """

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        known = [[(place, value) for place, value in line.points if value is not None] for line in drawn]
        lengths = [points[-1][0] for points in known if points]
        logarithmic = x == "wide" and max(lengths) > 20 * min(lengths)
        plain = (1.0, "s") if logarithmic else _time_unit(max(lengths, default=0.0))
        scale, unit = plain if time else (1.0, "")
        for line, points in zip(drawn, known, strict=True):
            _line(axes, line, [(place / scale, value) for place, value in points if place > 0 or not logarithmic])
        for level, words in levels:
            axes.axhline(level, color=MUTED, linewidth=1)
            place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "left", "va": "bottom"}
            axes.text(0.01, level, words, fontsize=8, color=MUTED, **place)
        axes.set_xlabel(f"{axis}{f' ({unit})' * time}")
        axes.set_ylabel(label)
        if logarithmic:
            _logarithmic(axes, "x")
        elif x == "doubling":
            axes.set_xscale("log", base=2)
            axes.margins(x=0.08)
        else:
            axes.set_xlim(left=0)
        if whole:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        if ticks:
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
        values = [value for points in known for _, value in points if math.isfinite(value)]
        values += [level for level, _ in levels]
        values += [end for line in drawn for ends in line.band for end in ends]
        wide = bool(values) and min(values) > 0 and max(values) > 10 * min(values)
        if y == "log" or (y == "auto" and wide):
            _logarithmic(axes, "y")
        elif y == "zero":
            axes.set_ylim(0, 1.1 * max(values, default=1.0) or 1.0)

    return svg(name, draw, (WIDTH, height))


def _line(axes: Axes, line: Line, points: Sequence[tuple[float, float]]) -> None:
    places, values = [place for place, _ in points], [value for _, value in points]
    if any(least < greatest for least, greatest in line.band):
        low, high = zip(*line.band, strict=True)
        axes.fill_between(places, low, high, color=line.colour, alpha=0.2, linewidth=0)
    marker = line.marker or ("_" if len(points) == 1 else "")
    (drawn,) = axes.plot(places, values, color=line.colour, linewidth=line.width, marker=marker, markersize=5)
    drawn.set_markevery(max(1, len(points) // 12))
    if line.dashes:
        drawn.set_dashes([float(length) for length in line.dashes.split()])
    if line.whiskers:
        axes.errorbar(places, values, yerr=line.whiskers, fmt="none", ecolor=line.colour, elinewidth=1, capsize=2)


def _time_unit(greatest: float) -> tuple[float, str]:
    """Return seconds and name of the unit for times up to `greatest` seconds."""
    return next((seconds, unit) for least, seconds, unit in UNITS if greatest >= least)


def _logarithmic(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with plain numbers where matplotlib has mathematical text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = axis.get_data_interval()
    room = which == "y" or 0 < low <= high < 100 * low  # along x the numbers stand beside each other
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if room else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


# ---- bars --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A bar of stacked parts."""

    parts: Sequence[tuple[float, str]]  #: Lengths and colours.
    said: str  #: Words at its end.
    name: str = ""  #: Words at its left.
    error: float = 0.0  #: Half length of the whisker at its end.
    mark: float | None = None  #: Place of an upright line.

    @property
    def end(self) -> float:
        return max(sum(length for length, _ in self.parts) + self.error, self.mark or 0.0)


def bars(name: str, groups: Sequence[tuple[str, Sequence[Bar]]], label: str) -> str:
    """Draw bars in groups, each below its name.

    Bars of one part that differ by a factor of thirty are drawn over a logarithmic axis.
    """

    def draw(axes: Axes) -> None:
        drawn = [bar for _, each in groups for bar in each if bar.end > 0]
        ends = [bar.end for bar in drawn]
        wide = bool(ends) and max(ends) > 30 * min(ends) and all(len(bar.parts) == 1 for bar in drawn)
        if wide:
            _logarithmic(axes, "x")
        axes.set_xlim(min(ends) / 3 if wide else 0, max(ends, default=1.0) * (6 if wide else 1.3))
        top, places = 0.0, list[tuple[float, str]]()
        for title, each in groups:
            left: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "fontweight": "bold"}
            axes.text(0, top, shorten(title, 40), **left)
            for bar in each:
                top += 0.95
                places.append((top, bar.name))
                begin = 0.0
                for length, colour in bar.parts:
                    axes.barh(top, length, left=begin, height=0.8, color=colour)
                    begin += length
                if bar.error:
                    axes.errorbar(begin, top, xerr=bar.error, color=INK, linewidth=1, capsize=2)
                if bar.mark is not None:
                    axes.plot([bar.mark] * 2, [top - 0.5, top + 0.5], color=INK, linewidth=1.6)
                axes.annotate(bar.said, (bar.end, top), (4, 0), textcoords="offset points", va="center", fontsize=8)
            top += 1.1
        named = [place for place in places if place[1]]
        axes.set_yticks([place for place, _ in named], [words for _, words in named], fontsize=8)
        axes.set_ylim(top - 0.5, -0.7)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlabel(label + ", logarithmic" * wide)

    rows = sum(1.1 + 0.95 * len(each) for _, each in groups)
    return svg(name, draw, (4.6, 0.6 + 0.21 * rows))


# ---- strips ------------------------------------------------------------------------------------------

#: A quantity over time: name with unit, seconds from the begin, values, end of its axis (None: the greatest value).
Strip = tuple[str, Sequence[float], Sequence[float], float | None]


def strips(name: str, series: Sequence[Strip]) -> str:
    """Draw quantities over time, one strip each, from 0 to the value at its right."""

    def draw(axes: Axes) -> None:
        last = max(max(seconds, default=0.0) for _, seconds, _, _ in series)
        scale, unit = _time_unit(last)
        for row, (label, seconds, values, top) in enumerate(series):
            colour, base, greatest = RUN_COLOURS[row % len(RUN_COLOURS)], -1.5 * row, top or max(values) or 1.0
            places, heights = [s / scale for s in seconds], [base + min(value / greatest, 1.0) for value in values]
            axes.fill_between(places, base, heights, color=colour, alpha=0.25, linewidth=0)
            axes.plot(places, heights, color=colour, linewidth=1.2)
            axes.axhline(base, color=GRID, linewidth=0.7)
            edge: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "va": "bottom"}
            axes.text(0, base + 1.02, label, **edge)
            axes.text(1, base + 1.02, f"0 to {number(greatest)}", ha="right", **edge)
        axes.set_xlim(0, last / scale or 1.0)
        axes.set_ylim(-1.5 * (len(series) - 1) - 0.05, 1.3)
        axes.set_yticks([])
        axes.set_xlabel(f"time ({unit})")

    return svg(name, draw, (4.6, 0.5 + 0.45 * len(series)))


# ---- tables and sections -----------------------------------------------------------------------------

#: Values for the template.
View = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A table's cell."""

    text: str = NONE
    key: float | str = ""  #: Value to sort by; empty where nothing is known.
    note: str = ""  #: A second line.
    link: str = ""  #: Anchor.


def cell(value: Any, text: Callable[[Any], str] = number, note: str = "", link: str = "") -> Cell:
    """Return the cell of a value: a number, words, or None."""
    if value is None:
        return Cell()
    if isinstance(value, str):
        return Cell(value or NONE, value, note, link)
    return Cell(text(value), value, note, link) if math.isfinite(value) else Cell(number(value))


def heading(plan: PlanResult, run: RunResult, place: int) -> Cell:
    """Return the first cell of a run's row."""
    return Cell(run.name, place, "" if run.label == run.name else run.label, plan.anchor(run))


@dataclass(frozen=True)
class Table:
    """Columns in groups, and rows of cells; the first cell of a row is its heading."""

    groups: list[tuple[str, int]]  #: Names and widths; one without a name is no row of headings.
    columns: list[tuple[str, bool]]  #: Headings, and whether they are of words.
    rows: list[tuple[Cell, ...]]
    caption: str = ""
    about: str = ""  #: Caption for screen readers.
    sortable: bool = True
    note: str = ""  #: Text below it.
    title: str = ""  #: Title, if it is folded away.
    meaning: str = ""  #: Text beside the title.
    style: str = ""  #: Class in CSS.


def table(columns: Iterable[tuple[str, str, Sequence[Cell]]], caption: str = "", about: str = "", **more: Any) -> Table:
    """Return a table of columns (group, heading, cells), without empty ones."""
    filled = [column for column in columns if any(each.text != NONE for each in column[2])]
    groups = list(Counter(group for group, _, _ in filled).items())
    headings = [
        (heading, any(isinstance(each.key, str) and each.key for each in cells)) for _, heading, cells in filled
    ]
    return Table(groups, headings, list(zip(*(cells for _, _, cells in filled), strict=True)), caption, about, **more)


def show(shown: Table) -> None:
    """Print a table: as wide as the terminal, elsewhere on whole lines."""
    import sys

    import rich.box
    from rich.console import Console
    from rich.table import Table as Terminal
    from rich.text import Text

    printed = Terminal(box=rich.box.SIMPLE_HEAD, title=shown.caption or None, title_justify="left", title_style="bold")
    for heading, words in shown.columns:
        printed.add_column(Text(heading), justify="left" if words else "right", overflow="fold")
    for row in shown.rows:
        printed.add_row(*(Text(_printable(f"{each.text} {each.note}".strip())) for each in row))
    Console(width=None if sys.stdout.isatty() else 1000, highlight=False, soft_wrap=False).print(printed)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text.replace("\u00a0", " "))


@dataclass(frozen=True)
class Entry:
    """An entry of a legend: a marker in a colour, or a stroke."""

    label: str
    colour: str = ""  #: One of `PAINT`.
    marker: str = ""  #: A character; none for a stroke.
    dashes: str = ""
    width: float | None = None
    note: str = ""


def entry(style: int, label: str, note: str = "") -> Entry:
    """Return the entry of a run, with the colour and marker of its `style`."""
    return Entry(label, RUN_COLOURS[style], MARKERS[style][1], note=note)


@dataclass(frozen=True)
class Section:
    """A section of a plan."""

    title: str
    about: str = ""
    legend: Sequence[Entry] = ()
    plots: Sequence[tuple[str, str]] = ()  #: SVG and caption.
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    form: str = ""  #: Macro of the template for `own`.
    own: Any = None  #: Content that only this section has.
    few: bool = False  #: Whether its figures are wide, and few.


def some(shown: int, of: int, what: str, rest: str) -> list[str]:
    """Return a note, in a list, on how many of all are shown; an empty list where all are."""
    return [f"{shown} of {of} {what}: {rest}"] if shown < of else []


def joules(value: float | None) -> str:
    """Return an energy in words."""
    if value is None:
        return NONE
    if value < 3600:
        return f"{number(value)} J"
    return f"{number(value / 3600)} Wh" if value < 3.6e6 else f"{number(value / 3.6e6)} kWh"
