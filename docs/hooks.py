"""What the site has beside the files in docs/: the commands' own help, and pages that lie elsewhere in the repository.

MkDocs calls the functions by their names (`hooks` of mkdocs.yml).
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
#: Pages that lie where their readers on GitHub look for them; the site has them under the same paths.
ELSEWHERE = ["CHANGELOG.md", "CONTRIBUTING.md", "results/README.md", "tests/DEFECTS.md"]
ELSEWHERE += [f"profiles/{name}/README.md" for name in ("docker", "local", "perlmutter", "slurm")]
#: The end of a link with its target; with all of its text where that is a file's name.
LINK = re.compile(r"(\[[\w/.]+\.md)?\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_config(config: Any) -> None:
    """Show a choice of versions where mike makes one of them."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for name in ELSEWHERE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "commands.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make links between files of the repository links of the site, or to the file in the public repository.

    A link whose text is the file's name gets the page's name in the navigation.
    """
    here, titles = page.file.src_uri, dict(named(config.nav))
    folder = (ROOT / here if here in ELSEWHERE else ROOT / "docs" / here).parent

    def moved(found: re.Match[str]) -> str:
        text, target, anchor = found[1] or "", found[2], found[3] or ""
        file = Path(os.path.normpath(folder / target))
        if not target or ":" in target or not file.exists():
            return found[0]  # MkDocs reports missing pages
        path = str(file.relative_to(ROOT))
        name = path if path in ELSEWHERE else path.removeprefix("docs/")
        name += "/README.md" if f"{name}/README.md" in ELSEWHERE else ""
        if not files.get_file_from_path(name):
            return f"{text}]({config.extra['repository']}/blob/main/{path}{anchor})"
        text = text and f"[{titles.get(name, text[1:])}"
        return f"{text}]({os.path.relpath(name, Path(here).parent)}{anchor})"

    return LINK.sub(moved, markdown)


def named(nav: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield pages of a navigation and their names there."""
    for each in nav:
        for title, value in each.items():
            if isinstance(value, str):
                yield value, re.sub(r"^\d\. ", "", title)
            else:
                yield from named(value)


def commands() -> str:
    """Return the page of all commands, as their `--help` has them."""
    os.environ["COLUMNS"] = "78"
    from dlscale import cli

    parser = cli.parser()
    (every,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    queries = [name for name in every.choices if name in {"run", "new-study", *cli.QUERIES}]
    stages = [name for name in every.choices if name not in queries]
    lines = [
        "# Commands",
        "",
        "What `dlscale --help` and `dlscale COMMAND --help` say, of this version.",
        "",
        *shown(parser),
    ]
    for title, names in (("For users", queries), ("Stages, which the workflow calls", stages)):
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"### `dlscale {name}`", "", *shown(every.choices[name])]
    return "\n".join(lines) + "\n"


def shown(parser: argparse.ArgumentParser) -> list[str]:
    """Return lines with a parser's help."""
    return ["```text", parser.format_help().rstrip(), "```"]
