"""What the site has beside the files in docs/: the commands' own help, and pages that lie elsewhere in the repository.

MkDocs calls the functions by their names (`hooks` of mkdocs.yml).
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
#: Pages that lie where their readers on GitHub look for them; the site has them under the same paths.
ELSEWHERE = ["CHANGELOG.md", "CONTRIBUTING.md", "results/README.md", "tests/DEFECTS.md"]
ELSEWHERE += [f"profiles/{name}/README.md" for name in ("docker", "local", "perlmutter", "slurm")]
LINK = re.compile(r"(\]\()([^)#\s]*)(#[^)\s]*)?\)")


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
    """Make links between files of the repository links of the site, or to the file in the public repository."""
    here = Path(page.file.src_uri)
    folder = (ROOT / here if page.file.src_uri in ELSEWHERE else ROOT / "docs" / here).parent

    def moved(found: re.Match[str]) -> str:
        before, target, anchor = found[1], found[2], found[3] or ""
        file = Path(os.path.normpath(folder / target))
        if not target or ":" in target or not file.exists():
            return found[0]  # MkDocs says what is not there
        name = str(file.relative_to(ROOT))
        name = name.removeprefix("docs/") if name not in ELSEWHERE else name
        if file.is_dir() and f"{name}/README.md" in ELSEWHERE:
            name += "/README.md"
        if files.get_file_from_path(name):
            return f"{before}{os.path.relpath(name, here.parent)}{anchor})"
        return f"{before}{config.extra['repository']}/blob/main/{file.relative_to(ROOT)}{anchor})"

    return LINK.sub(moved, markdown)


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
