"""Print a table."""

from __future__ import annotations

from dlscale.report.figures import Table


def show(shown: Table) -> None:
    """Print a table as wide as the terminal; without a terminal, up to 1000 characters wide."""
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
