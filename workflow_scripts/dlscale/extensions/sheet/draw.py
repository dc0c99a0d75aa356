"""Draw the parts of the sheet: as a page (HTML), and on two A4 pages (PDF, with Matplotlib).

Matplotlib makes the PDF, because dlscale needs it anyway, and login nodes have no browser.
"""

from __future__ import annotations

import functools
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dlscale.core.text import many
from dlscale.extensions.sheet.parts import Basis, Curve, Fact, Grid, Part, Row

#: Size of a page and of its margins, mm.
WIDTH, HEIGHT, MARGIN = 210.0, 297.0, 12.0
#: Sizes of text, points. A page uses the largest size with which its content fits.
SIZES = (8.0, 7.6, 7.2, 6.8, 6.4, 6.0, 5.6, 5.2)
MM = 72 / 25.4  #: Points per mm.
#: Origin → colour of text and mark, background colour, slant, mark. In print without colours, the marks differ.
STYLES: dict[Basis, tuple[str, str, str, str]] = {
    "measured": ("#111111", "#ffffff", "normal", "■"),
    "predicted": ("#1a4f9c", "#e8f0fb", "italic", "◇"),
    "setting": ("#444444", "#ffffff", "normal", "·"),
    "open": ("#9a3412", "#fdf1e7", "normal", "□"),
}
#: Text of the legend.
LEGEND = "■ measured   ◇ predicted   · setting   □ open, with the remedy"

Answers = Mapping[str, Sequence[Mapping[str, Any]]]


def summary(asked: Sequence[Mapping[str, Any]]) -> str:
    """Return how many questions of a form the sheet answers."""
    done = sum(not each["open"] for each in asked)
    partly = sum(bool(each["open"] and each["parts"]) for each in asked)
    return f"{many(len(asked), 'question')}: {done} answered, {partly} partly, {len(asked) - done - partly} open"


# ---- HTML --------------------------------------------------------------------------------------------


def html(title: str, pages: Sequence[Sequence[Part]], found: Mapping[Basis, int], answers: Answers) -> str:
    """Return the sheet as a page without scripts, which prints on two A4 pages."""
    import jinja2
    from markupsafe import Markup

    text = (resources.files(__package__) / "sheet.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["chart"] = lambda curves: Markup(_svg(curves))
    environment.filters["summary"] = summary
    marks = {basis: look[3] for basis, look in STYLES.items()}
    return environment.from_string(text).render(
        title=title, pages=pages, counts=found, answers=answers, marks=marks, legend=LEGEND
    )


def _svg(curves: Sequence[Curve]) -> str:
    from matplotlib.figure import Figure

    figure, made = Figure(figsize=(7.2, 1.7), layout="constrained"), io.StringIO()
    with _style():
        for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
            _draw(axes, curve, 7.0)
        figure.savefig(made, format="svg", metadata={"Date": None})
    return "<svg" + made.getvalue().partition("<svg")[2]


# ---- charts ------------------------------------------------------------------------------------------


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it logs each step of embedding a font
    style: dict[Any, Any] = {"svg.hashsalt": "dlscale", "svg.fonttype": "none", "pdf.fonttype": 42}
    with matplotlib.rc_context(style | {"text.parse_math": False}):  # draw `$` as text
        yield


def _draw(axes: Any, curve: Curve, points: float) -> None:
    """Draw the efficiency over devices: measured with error bars, predicted dashed with its band."""
    if curve.measured:
        devices, values, low, high = zip(*curve.measured, strict=True)
        bars = [
            [value - end for value, end in zip(values, low, strict=True)],
            [end - value for value, end in zip(values, high, strict=True)],
        ]
        axes.errorbar(
            devices, values, bars, color="#111111", marker="s", markersize=3, linewidth=1, capsize=2, label="measured"
        )
    if curve.predicted:
        devices, values, low, high = zip(*[*curve.measured[-1:], *curve.predicted], strict=True)
        axes.plot(
            devices,
            values,
            "--D",
            color="#1a4f9c",
            markerfacecolor="white",
            markersize=3,
            linewidth=1,
            label="predicted",
            zorder=1,
        )
        axes.fill_between(devices, low, high, color="#1a4f9c", alpha=0.12, linewidth=0)
    ticks = sorted({each[0] for each in (*curve.measured, *curve.predicted)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.axhline(1, color="#999999", linewidth=0.6, zorder=0)
    axes.set_ylim(0, max(1.25, *(each[3] for each in (*curve.measured, *curve.predicted))) if ticks else 1.25)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_title(f"{curve.label}: efficiency over devices", fontsize=points, loc="left")
    axes.tick_params(labelsize=points - 1, length=2)
    axes.legend(fontsize=points - 1, frameon=False, loc="lower left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# ---- PDF ---------------------------------------------------------------------------------------------


def pdf(path: Path, title: str, pages: Sequence[Sequence[Part]], found: Mapping[Basis, int], answers: Answers) -> bool:
    """Write the sheet as a PDF file with a page for each list of parts.

    The text of a page is as large as the page allows (`SIZES`). Return whether the smallest text fits on each page.
    """
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    fits = True
    with _style(), PdfPages(path, metadata={"Title": f"Evidence: {title}", "CreationDate": None}) as file:
        for number, shown in enumerate(pages, 1):
            for points in SIZES:
                page = _Page(Figure(figsize=(WIDTH / 25.4, HEIGHT / 25.4)), points)
                page.head(title, number, found)
                for part in shown:
                    page.part(part)
                if number == len(pages):
                    page.forms(answers)
                if page.y <= HEIGHT - MARGIN:
                    break
            file.savefig(page.figure)
            fits = fits and page.y <= HEIGHT - MARGIN
    return fits


@functools.cache
def _width(text: str, **font: str) -> float:
    """Return a text's width at a size of one point, mm."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    properties = FontProperties(size=100, **font)  # type: ignore[arg-type]
    return float(text_to_path.get_text_width_height_descent(text, properties, False)[0]) / 100 / MM if text else 0.0


@dataclass
class _Page:
    """A page that is filled from top to bottom."""

    figure: Any
    points: float  #: Size of text.
    y: float = MARGIN  #: Next free position, mm from the top.

    @property
    def line(self) -> float:
        """Height of a line, mm."""
        return 1.28 * self.points / MM

    def width(self, text: str, size: float | None = None, **font: str) -> float:
        """Return the width of a text, mm."""
        return (size or self.points) * sum(_width(word, **font) for word in re.split("( )", text))

    def wrapped(self, text: str, width: float, **font: Any) -> list[str]:
        """Split a text into lines of at most `width` mm; a longer word is split, too."""
        lines, now = list[str](), ""
        for word in text.split(" "):
            longer = f"{now} {word}" if now else word
            if self.width(longer, **font) <= width:
                now = longer
                continue
            lines += [now] if now else []
            while self.width(word, **font) > width:
                fits = next(n for n in range(len(word), 0, -1) if n == 1 or self.width(word[:n], **font) <= width)
                lines, word = [*lines, word[:fits]], word[fits:]
            now = word
        return [*lines, now]

    def write(self, x: float, text: str, basis: Basis = "measured", **font: Any) -> None:
        """Write one line at `x` mm; the line's top is `y`."""
        look = {"color": STYLES[basis][0], "style": STYLES[basis][2], "size": self.points, **font}
        self.figure.text(
            x / WIDTH, 1 - (self.y + 0.78 * self.line) / HEIGHT, text, parse_math=False, va="baseline", **look
        )

    def box(self, height: float, colour: str, x: float = MARGIN, width: float = WIDTH - 2 * MARGIN) -> None:
        """Fill a rectangle whose top is `y`."""
        from matplotlib.patches import Rectangle

        corner = x / WIDTH, 1 - (self.y + height) / HEIGHT
        ground = Rectangle(corner, width / WIDTH, height / HEIGHT, facecolor=colour, linewidth=0, zorder=-1)
        self.figure.add_artist(ground)

    def cells(self, cells: Sequence[tuple[str, float, dict[str, Any]]], basis: Basis, x: float = MARGIN) -> None:
        """Write cells (text, width in mm, font) next to each other, as high as the longest text needs."""
        split = [self.wrapped(text, width - 1.5, **font) for text, width, font in cells]
        high = max(map(len, split))
        if STYLES[basis][1] != "#ffffff":
            self.box(high * self.line, STYLES[basis][1])
        top = self.y
        for lines, (_, width, font) in zip(split, cells, strict=True):
            for line in lines:
                self.write(x, line, basis, **font)
                self.y += self.line
            x, self.y = x + width, top
        self.y += high * self.line

    def head(self, title: str, number: int, found: Mapping[Basis, int]) -> None:
        """Write the title, the legend and the number of the page."""
        big = self.points + 4
        self.write(MARGIN, f"Evidence for computing time: {title}"[:90], size=big, weight="bold")
        self.y += 1.4 * big / MM
        total = ", ".join(f"{count} {basis}" for basis, count in found.items())
        self.write(MARGIN, f"{LEGEND}   (page {number} of 2: {total})", "setting", size=self.points - 1)
        self.y += self.line

    def part(self, part: Part) -> None:
        """Write a part: its heading, facts, tables, charts and commands."""
        self.heading(part.title)
        for fact in part.facts:
            self.fact(fact)
        for grid in part.grids:
            self.grid(grid)
        if part.curves:
            self.charts(part.curves)
        for command in part.commands:
            self.cells(
                [(command, WIDTH - 2 * MARGIN, {"family": "DejaVu Sans Mono", "size": self.points - 0.8})], "measured"
            )

    def heading(self, title: str) -> None:
        self.y += 0.5 * self.line
        self.box(1.15 * self.line, "#e3e6ea")
        self.write(MARGIN + 1, title, weight="bold", size=self.points + 0.4)
        self.y += 1.3 * self.line

    def fact(self, fact: Fact) -> None:
        small = {"size": self.points - 0.6}
        bold: dict[str, Any] = {"weight": "bold"} if fact.basis == "open" else {}
        rest = WIDTH - 2 * MARGIN - 5 - 42 - 60
        texts: list[tuple[str, float, dict[str, Any]]] = [
            (STYLES[fact.basis][3], 5.0, {}),
            (fact.label, 42.0, {}),
            (fact.text, 60.0, bold),
            (fact.note, rest, small),
        ]
        self.cells(texts, fact.basis)

    def grid(self, grid: Grid) -> None:
        small: dict[str, Any] = {"size": self.points - 0.6}
        self.y += 0.2 * self.line
        self.cells([(grid.title, WIDTH - 2 * MARGIN, {"weight": "bold"})], "measured")
        heads = Row(grid.columns, "setting")
        table = [("" if row is heads else STYLES[row.basis][3], *row.cells) for row in (heads, *grid.rows)]
        natural = [max(self.width(text, **small) for text in column) + 3 for column in zip(*table, strict=True)]
        scale = min(1.5, (WIDTH - 2 * MARGIN) / sum(natural))
        for row, texts in zip((heads, *grid.rows), table, strict=True):
            font = small | ({"weight": "bold"} if row is heads else {})
            self.cells([(text, scale * width, font) for text, width in zip(texts, natural, strict=True)], row.basis)
        if grid.note:
            self.cells([(grid.note, WIDTH - 2 * MARGIN, small)], "setting")

    def charts(self, curves: Sequence[Curve]) -> None:
        """Draw all charts of a part side by side."""
        high, wide = 30.0, (WIDTH - 2 * MARGIN) / max(2, len(curves))
        self.y += 5
        for place, curve in enumerate(curves):
            left, bottom = MARGIN + place * wide + 8, HEIGHT - self.y - high
            axes = self.figure.add_axes((left / WIDTH, bottom / HEIGHT, (wide - 12) / WIDTH, high / HEIGHT))
            _draw(axes, curve, self.points - 0.6)
        self.y += high + 5

    def forms(self, answers: Answers) -> None:
        """Write how many questions of each form the sheet answers, and which only the applicant can answer."""
        self.heading("Questions of public forms")
        for form, asked in answers.items():
            applicant = [each["ask"] for each in asked if not each["parts"]]
            words = f"{summary(asked)}. Left to the applicant: {'; '.join(applicant) or 'nothing'}"
            self.cells([(form, 41.0, {}), (words, WIDTH - 2 * MARGIN - 41, {"size": self.points - 0.6})], "setting")
