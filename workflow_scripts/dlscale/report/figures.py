"""Parts of the page: charts in Vega-Lite, tables, and sections that contain them.

The page draws the charts, and `Chart.write` exports them. If a reader chooses other fields, scales or runs, the page's
script changes the first layer of the chart.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlscale.core.files import atomic_write, write_text
from dlscale.core.text import NONE, escape_formula, number
from dlscale.measure.records import MODES

if TYPE_CHECKING:
    from dlscale.results import PlanResult, RunResult


#: Variables of the page's template, or a part of a Vega-Lite specification.
View = dict[str, Any]

#: Colours of runs are variables of style.css, so that charts follow the theme. Shapes also distinguish the runs.
COLOURS = [f"var(--s{index})" for index in range(8)]
SHAPES = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right", "triangle-left"]
MODE_COLOURS = {mode: f"var(--{mode.lower()})" for mode in MODES}
INK, MUTED, GRID, WORSE = "var(--ink)", "var(--muted)", "var(--grid)", "var(--worse)"

#: Dash patterns of lines: lengths of dashes and gaps, pixels.
DASHES = [[1, 0], [4, 3], [1, 2], [8, 3]]

#: Units of time: (shortest time that is shown in the unit, s; length of the unit, s; name of the unit).
UNITS = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))

#: Ratio of the longest to the shortest bar above which bars have a logarithmic axis, unless they are stacked.
MAX_LINEAR_RATIO = 50.0

#: Widths of the first and the last line, pixels. Later lines are thinner, so an equal line drawn earlier stays visible.
WIDTHS = (5.0, 1.5)

#: Pixels between the marks and the frame, so that no point is cut.
PADDING = 6

#: Sizing of a line chart: it fills the available width, axes and legend included.
FIT = {"type": "fit", "contains": "padding"}

#: Configuration of all charts.
CONFIG: View = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **{"gridColor": GRID, "domainColor": GRID, "tickColor": GRID, "labelColor": MUTED, "titleColor": INK},
        "titleFontWeight": "normal",
    },
    "axisX": {"titleLimit": {"expr": "width"}},
    "axisY": {"titleLimit": {"expr": "height"}},
    "legend": {
        **{"labelColor": INK, "titleColor": INK, "title": None, "orient": "bottom", "columns": 3, "labelLimit": 200},
        "layout": {"bottom": {"anchor": "start", "direction": "vertical"}},
        "symbolLimit": 100,
    },
    "text": {"color": INK},
    "rule": {"color": INK},
    "tick": {"color": INK},
}


@dataclass(frozen=True)
class Chart:
    """A chart, with the fields, scales and runs that a reader can choose."""

    name: str  #: Name of the chart and of its files, unique in the page.
    about: str  #: Caption.
    spec: View  #: Specification in Vega-Lite; its first layer has rows and encoding.
    x: Mapping[str, str] = field(default_factory=dict)  #: Field along x → its title; initially the first field.
    y: Mapping[str, str] = field(default_factory=dict)
    scale: str = ""  #: Initial scale of y, linear or log; empty if the reader cannot choose the scale.
    runs: Sequence[str] = ()  #: Runs that the reader can show or hide.

    @property
    def rows(self) -> list[View]:
        found: list[View] = self.spec["layer"][0]["data"]["values"]
        return found

    @property
    def titles(self) -> dict[str, str]:
        """Field → its title with the unit."""
        return {each["field"]: each["title"] for each in self.spec["layer"][0]["encoding"]["tooltip"]}

    @property
    def text(self) -> str:
        """The chart as JSON, safe inside HTML."""
        return json.dumps(self.spec, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")

    def of(self, runs: Collection[str]) -> View:
        """Return the specification with only the given runs, filtered as in the page's script."""
        spec: View = json.loads(json.dumps(self.spec))
        main = spec["layer"][0]
        main["data"]["values"] = [row for row in self.rows if row.get("run") in (None, *runs)]
        for each in main["encoding"].values():
            if isinstance(each, dict) and each.get("field") == "run" and "scale" in each:
                kept = [pair for pair in zip(*each["scale"].values(), strict=True) if pair[0] in runs]
                each["scale"] = {"domain": [run for run, _ in kept], "range": [look for _, look in kept]}
        return spec

    def write(self, folder: Path, runs: Collection[str]) -> None:
        """Write the chart of the given runs as SVG and PDF, in the light theme's colours, and all rows as CSV."""
        import pandas as pd
        import vl_convert

        spec = json.dumps({**self.of(runs), "width": 360, "config": CONFIG})
        spec = re.sub(r"var\(--(\w+)\)", lambda name: light().get(name[1], name[0]), spec)
        write_text(folder / f"{self.name}.svg", vl_convert.vegalite_to_svg(spec))
        with atomic_write(folder / f"{self.name}.pdf") as temporary:
            temporary.write_bytes(vl_convert.vegalite_to_pdf(spec))
        table = pd.DataFrame(self.rows).rename(columns=self.titles).rename(columns=escape_formula).map(escape_formula)
        write_text(folder / f"{self.name}.csv", table.to_csv(index=False, lineterminator="\n"))


@cache
def light() -> dict[str, str]:
    """Return the colours of the light theme: name of the variable → colour."""
    style = (resources.files("dlscale.report") / "templates/style.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--(\w+): light-dark\((#\w+),", style))


def library() -> str:
    """Return Vega-Lite, Vega and vega-embed as one script that loads no other files."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def rounded(rows: Iterable[Mapping[str, Any]]) -> list[View]:
    """Remove None and non-finite numbers from rows, and round other numbers to six digits."""
    real = [[(key, value) for key, value in row.items() if _real(value)] for row in rows]
    return [{key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row} for row in real]


def _real(value: Any) -> bool:
    return value is not None and (not isinstance(value, float) or math.isfinite(value))


def time_unit(greatest: float) -> tuple[float, str]:
    """Return (length in seconds, name) of the unit for times up to `greatest` seconds."""
    return next((seconds, unit) for least, seconds, unit in UNITS if greatest >= least)


def styles(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return name → (colour, shape); after every eight names the shapes shift by one."""
    looks = ((COLOURS[n % 8], SHAPES[(n + n // 8) % 8]) for n in range(10**6))
    return dict(zip(dict.fromkeys(names), looks, strict=False))


def scale_of(values: Mapping[str, Any]) -> View:
    """Return a scale from a table: name → colour, shape or width."""
    return {"domain": list(values), "range": list(values.values())}


def _facts(facts: Mapping[str, str]) -> list[View]:
    """Return the Vega-Lite transform that adds each run's settings (`facts`) to its rows; empty without facts."""
    rows = [{"run": run, "settings": words} for run, words in facts.items()]
    return [{"lookup": "run", "from": {"data": {"values": rows}, "key": "run", "fields": ["settings"]}}] * bool(rows)


def tooltip(rows: Sequence[View], fields: Mapping[str, str]) -> list[View]:
    """Return the tooltip of a mark, from `fields`: field → title."""
    numbers = {key for row in rows for key, value in row.items() if isinstance(value, float)}
    digits = {key: {"format": ",.4~g"} for key in numbers}
    return [{"field": key, "title": words, **digits.get(key, {})} for key, words in fields.items()]


def lines(
    name: str,
    about: str,
    rows: Sequence[View],
    x: Mapping[str, str],
    y: Mapping[str, str],
    *,
    by: str = "run",
    looks: Mapping[str, tuple[str, str]] | None = None,
    dashes: Sequence[str] = (),
    levels: Sequence[tuple[float, str]] = (),
    facts: Mapping[str, str] | None = None,
    doubling: bool = False,
    zero: bool = False,
    logarithmic: bool | None = None,
    height: int = 240,
) -> Chart:
    """Return a line chart of fields `y` over fields `x`, with a line for each pair of values of `by` and "what".

    Parameters
    ----------
    looks
        Colour and shape by value of `by`.
    dashes
        Values of "what"; the first value has solid lines.
    levels
        (Value, name) of horizontal reference lines.
    facts
        Run → its settings as text, for the tooltip.
    doubling
        Whether x is logarithmic, with base two.
    logarithmic
        Whether y is logarithmic initially. None: only if the values span more than a factor of ten. With a zero or
        negative value, y is linear.
    """
    kept = rounded(rows)
    looks = looks or styles(row[by] for row in kept)
    fields = [[row[key] for row in kept if key in row] + [level for level, _ in levels] for key in y]
    positive = any(fields) and min(map(min, filter(None, fields))) > 0
    wide = positive and any(max(values) > 10 * min(values) for values in fields if values)
    logarithmic = positive and (wide if logarithmic is None else logarithmic)
    # A title of several lines fits next to the axis, which is short above a long legend.
    first_x, first_y = (
        next(iter(x.items())),
        next((key, re.sub("(.{12,24}) ", r"\1\n", title).split("\n")) for key, title in y.items()),
    )
    pair = {"field": by, "type": "nominal"}
    shown = {by: by, "what": "what", "settings": "settings", **x, **y, "low": "from", "high": "to"}
    there = {*(key for row in kept for key in row), *(["settings"] if facts else [])}
    chosen = {"condition": {"param": "chosen", "value": 1}, "value": 0.12}
    encoding: View = {
        "x": {
            "field": first_x[0],
            "title": first_x[1],
            "type": "quantitative",
            "scale": {"nice": False, "padding": PADDING},
        },
        "y": {
            **{"field": first_y[0], "title": first_y[1], "type": "quantitative"},
            "scale": {"zero": zero, "padding": PADDING},
        },
        "color": {**pair, "scale": scale_of({key: colour for key, (colour, _) in looks.items()})},
        "shape": {**pair, "scale": scale_of({key: shape for key, (_, shape) in looks.items()})},
        "opacity": chosen,
        "tooltip": tooltip(kept, {key: words for key, words in shown.items() if key in there}),
    }
    if doubling:
        encoding["x"] |= {
            "scale": {"type": "log", "base": 2, "nice": False, "padding": PADDING},
            "axis": {"values": sorted({row[first_x[0]] for row in kept}), "format": ","},
        }
    if logarithmic:
        encoding["y"]["scale"] = {"type": "log", "padding": PADDING}
    if dashes:
        dashed = {"scale": {"domain": list(dashes), "range": DASHES[: len(dashes)]}, "legend": {"symbolType": "stroke"}}
        encoding["strokeDash"] = {"field": "what", "type": "nominal", **dashed}
    size: View = {"value": 36}
    if dashes:
        size = {"condition": {"test": {"field": "what", "equal": dashes[0]}, "value": 36}, "value": 8}
    params = [
        {"name": "chosen", "select": {"type": "point", "fields": [by]}, "bind": "legend"},
        {"name": "view", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"},
    ]
    width: View = {"value": 2}
    if len(looks) > 1 and not dashes:
        step = (WIDTHS[0] - WIDTHS[1]) / (len(looks) - 1)
        widths = {key: round(WIDTHS[0] - place * step, 2) for place, key in enumerate(looks)}
        width = {**pair, "scale": scale_of(widths), "legend": None}
    layer: list[View] = [
        {"mark": {"type": "line", "clip": True}, "params": params, "encoding": {"strokeWidth": width}},
        {"mark": {"type": "point", "filled": True, "clip": True}, "encoding": {"size": size}},
    ]
    if "low" in there:
        ends = {"y": {"field": "low", "title": first_y[1]}, "y2": {"field": "high"}, "tooltip": {"value": None}}
        layer.append({"mark": {"type": "rule"}, "encoding": ends})
    main = {"data": {"values": kept}, "transform": _facts(facts or {}), "encoding": encoding, "layer": layer}
    marks = [
        {
            "data": {"values": [{"level": level, "words": words}]},
            "encoding": {"y": {"field": "level", "type": "quantitative"}},
            "layer": [
                {"mark": {"type": "rule", "color": MUTED}},
                {
                    "mark": {"type": "text", "x": 4, "dy": -6, "align": "left", "color": MUTED},
                    "encoding": {"text": {"field": "words"}},
                },
            ],
        }
        for level, words in levels
    ]
    spec = {"description": about, "width": "container", "height": height, "autosize": FIT, "layer": [main, *marks]}
    scale = ("log" if logarithmic else "linear") if positive else ""
    return Chart(name, about, spec, x, y, scale, list(looks) if by == "run" else ())


def bars(
    name: str,
    about: str,
    rows: Sequence[View],
    length: str,
    *,
    colours: Mapping[str, str],
    by: str,
    stacked: bool = False,
    facts: Mapping[str, str] | None = None,
    marked: str = "",
    shown: Mapping[str, str],
    room: float = 1.15,
) -> Chart:
    """Return a bar chart by run: grouped or `stacked` bars, coloured by the values of `by`.

    A row has the ends of a bar, "from" and "to". A row may also have the ends of an interval, "low" and "high", and a
    text, "said", that is written at position "end".

    Parameters
    ----------
    length
        Title of the axis of lengths.
    marked
        Field with the position of a vertical line.
    shown
        Field of the tooltip → its title.
    room
        Length of the axis / greatest end of a bar, to leave space for texts.
    """
    kept = rounded(rows)
    runs = list(dict.fromkeys(row["run"] for row in kept))
    parts = [each for each in colours if any(row[by] == each for row in kept)]
    place: View = {"y": {"field": "run", "type": "nominal", "sort": runs, "title": None, "axis": {"labelLimit": 180}}}
    if not stacked and len(parts) > 1:
        place["yOffset"] = {"field": by, "sort": parts}
    greatest = max(row.get(key, 0.0) for row in kept for key in ("to", "high", marked or "to"))
    least = min((row["to"] for row in kept if row["to"] > 0), default=greatest)
    axis: View = {"field": "from", "type": "quantitative", "title": length, "axis": {"tickCount": 8}}
    axis["scale"] = {"domain": [0, room * greatest]}
    if not stacked and greatest > MAX_LINEAR_RATIO * least:  # on a linear axis, the shortest bar would be invisible
        start = least / 4
        kept = [{**row, **{key: max(row[key], start) for key in ("from", "low") if key in row}} for row in kept]
        axis["title"] = f"{length}, logarithmic"
        axis["scale"] = {"type": "log", "domain": [start, greatest * (greatest / start) ** (room - 1)], "nice": False}
    ends = {"x": axis, "x2": {"field": "to"}}
    encoding = {
        **place,
        "tooltip": tooltip(kept, {"run": "run", by: by, **shown, **({"settings": "settings"} if facts else {})}),
    }
    legend = {"color": {"field": by, "type": "nominal", "scale": scale_of({part: colours[part] for part in parts})}}
    layer: list[View] = [
        {
            "mark": "bar",
            "params": [{"name": "chosen", "select": {"type": "point", "fields": [by]}, "bind": "legend"}],
            "encoding": {**ends, **legend, "opacity": {"condition": {"param": "chosen", "value": 1}, "value": 0.15}},
        }
    ]
    if any("low" in row for row in kept):
        interval = {"x": {"field": "low", "type": "quantitative", "title": axis["title"]}, "x2": {"field": "high"}}
        layer.append({"mark": "rule", "encoding": interval})
    if marked:
        layer.append(
            {"mark": {"type": "tick", "thickness": 2}, "encoding": {"x": {"field": marked, "type": "quantitative"}}}
        )
    if any("said" in row for row in kept):
        at = {"x": {"field": "end", "type": "quantitative"}, "text": {"field": "said"}}
        limit = {"expr": "max(60, width - scale('x', datum.end))"}  # in a narrow window the text ends with "…"
        layer.append({"mark": {"type": "text", "align": "left", "dx": 5, "limit": limit}, "encoding": at})
    main = {"data": {"values": kept}, "transform": _facts(facts or {}), "encoding": encoding, "layer": layer}
    spec = {
        "description": about,
        "width": "container",
        "height": {"step": 15 if "yOffset" in place else 24},
        "autosize": {**FIT, "type": "fit-x"},
        "layer": [main],
    }
    return Chart(name, about, spec, runs=runs)


# ---- tables and sections ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str = NONE
    key: float | str = ""  #: Value to sort by; empty if unknown.
    note: str = ""  #: Second line of the cell.
    link: str = ""  #: Anchor, on the same page, that the cell links to; empty without a link.


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

    groups: list[tuple[str, int]]  #: (Name, number of columns) of each group; an unnamed group has no heading.
    columns: list[tuple[str, bool]]  #: (Heading, whether its cells are text) of each column.
    rows: list[tuple[Cell, ...]]
    caption: str = ""
    about: str = ""  #: Caption for screen readers.
    sortable: bool = True
    note: str = ""  #: Text below the table.
    title: str = ""  #: Title of the fold that contains the table; empty if the table is always open.
    meaning: str = ""  #: Text next to the title.
    style: str = ""  #: CSS class.


def table(columns: Iterable[tuple[str, str, Sequence[Cell]]], caption: str = "", about: str = "", **more: Any) -> Table:
    """Return a table of columns (group, heading, cells), without empty columns."""
    filled = [column for column in columns if any(each.text != NONE for each in column[2])]
    groups = list(Counter(group for group, _, _ in filled).items())
    headings = [
        (heading, any(isinstance(each.key, str) and each.key for each in cells)) for _, heading, cells in filled
    ]
    return Table(groups, headings, list(zip(*(cells for _, _, cells in filled), strict=True)), caption, about, **more)


@dataclass(frozen=True)
class Link:
    """A text with the address that it links to."""

    text: str
    href: str


@dataclass(frozen=True)
class Item:
    """An item of a list: a name, a text, and links."""

    name: str
    text: str
    links: Sequence[Link] = ()


@dataclass(frozen=True)
class Fold:
    """A foldable part of the page with results; `before` and `after` are paragraphs around the tables."""

    title: Link
    aside: str | Link = ""
    before: Sequence[str] = ()
    tables: Sequence[Table] = ()
    after: Sequence[str] = ()
    items: Sequence[Item] = ()
    open: bool = False  #: Whether the fold is open at first.


@dataclass(frozen=True)
class Section:
    """A section of a plan."""

    title: str
    about: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    form: str = ""  #: Name of the template's macro that shows `own`.
    own: Any = None  #: Content that only this section has.
    folds: Sequence[Fold] = ()


def some(shown: int, of: int, what: str, rest: str) -> list[str]:
    """Return a list with a note such as `8 of 20 runs: …`; empty if all items are shown."""
    return [f"{shown} of {of} {what}: {rest}"] if shown < of else []


def grams(value: float | None, per_kwh: float | None) -> str:
    """Return the mass of CO₂ as text for an energy in joules, at `per_kwh` grams of CO₂ per kWh."""
    if value is None or per_kwh is None:
        return NONE
    mass = value / 3.6e6 * per_kwh
    return f"{number(mass)} g" if mass < 1000 else f"{number(mass / 1000)} kg"


def joules(value: float | None) -> str:
    """Return an energy in joules as text."""
    if value is None:
        return NONE
    if value < 3600:
        return f"{number(value)} J"
    return f"{number(value / 3600)} Wh" if value < 3.6e6 else f"{number(value / 3.6e6)} kWh"
