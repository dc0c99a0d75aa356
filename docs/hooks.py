"""Hooks of MkDocs: add generated pages and pages outside docs/ to the site, and adapt links between files.

MkDocs calls the functions `on_…` by name (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
#: Pages outside docs/: readers on GitHub look for them next to the code. The site has them under the same paths.
ELSEWHERE = ["CHANGELOG.md", "CONTRIBUTING.md", "results/README.md", "tests/DEFECTS.md"]
ELSEWHERE += [f"profiles/{name}/README.md" for name in ("docker", "local", "perlmutter", "slurm")]
#: Pages for common questions, which the search ranks first.
BOOSTED = ("from_notebook.md", "data.md", "any_program.md", "slurm.md", "fingerprints.md", "words.md")
#: End of a Markdown link, `](target#anchor)`, with the preceding `[text` if the text is the path of a .md file.
LINK = re.compile(r"(\[[\w/.]+\.md)?\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_config(config: Any) -> None:
    """Show the menu of versions if mike, which publishes one site per version, builds the site."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/ and the generated pages to the site's files."""
    for name in ELSEWHERE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "commands.md", content=commands()))
    files.append(File.generated(config, "command_lines.md", content=command_lines()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let each link to a file lead to a page of the site, or to the public repository if the site lacks the file.

    If a link's text is the path of a .md file, the page's title in the navigation replaces the text. Also set the rank
    of the page in searches.
    """
    here, titles = page.file.src_uri, dict(titles_of(config.nav))
    if here in BOOSTED:
        page.meta["search"] = {"boost": 3}
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


def titles_of(nav: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield path and title, without its number, of each page of a navigation."""
    for each in nav:
        for title, value in each.items():
            if isinstance(value, str):
                yield value, re.sub(r"^\d\. ", "", title)
            else:
                yield from titles_of(value)


def commands() -> str:
    """Return the page with the `--help` text of every command."""
    os.environ["COLUMNS"] = "78"
    from dlscale import cli

    parser = cli.parser()
    (every,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    queries = [name for name in every.choices if name in {"run", "new-study", *cli.QUERIES}]
    stages = [name for name in every.choices if name not in queries]
    lines = [
        "# Commands",
        "",
        "Output of `dlscale --help` and `dlscale COMMAND --help` in this version.",
        "",
        *help_lines(parser),
    ]
    for title, names in (("For users", queries), ("Stages, which the workflow calls", stages)):
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"### `dlscale {name}`", "", *help_lines(every.choices[name])]
    return "\n".join(lines) + "\n"


def help_lines(parser: argparse.ArgumentParser) -> list[str]:
    """Return the lines of a parser's help as a block of Markdown."""
    return ["```text", parser.format_help().rstrip(), "```"]


#: Sections of command_lines.md: title, profile, and overrides of the site (file in the profile's folder, or settings).
SITES: list[tuple[str, str, str | dict[str, Any]]] = [
    ("perlmutter", "perlmutter", {}),
    ("perlmutter with native.yaml", "perlmutter", "native.yaml"),
    ("perlmutter with podman.yaml", "perlmutter", "podman.yaml"),
    ("slurm", "slurm", {}),
    ("slurm with apptainer", "slurm", {"engine": "apptainer", "image": "/shared/dlscale.sif"}),
    ("cloud", "cloud", {}),
    ("juwels", "juwels", {}),
    ("leonardo", "leonardo", {}),
    ("docker", "docker", {"engine": "docker", "gpu": False}),
    ("docker with podman", "docker", {"engine": "podman", "gpu": False}),
]


def command_lines() -> str:
    """Return the page with the commands that start typical jobs on each shipped site."""
    from dlscale.config.resolve import merge
    from dlscale.config.run import Geometry
    from dlscale.config.site import Site
    from dlscale.core.errors import UserError
    from dlscale.core.settings import read_yaml
    from dlscale.launch import launcher, slurm

    jobs: dict[str, Geometry | None] = {
        "Preprocess data": None,
        "Train on 1 GPU": Geometry(),
        "Train on 4 GPUs": Geometry(gpus_per_node=4),
        "Train on 2 nodes": Geometry(nodes=2, gpus_per_node=4),
    }
    place = launcher.ContainerMounts("/scratch/dlscale", "/scratch/dlscale/workflow_scripts", 1000, 1000)
    lines = [
        "# Command lines of each profile",
        "",
        "This page shows how the shipped profiles start typical jobs: the request to sbatch, then the command in the "
        "job. The page is generated from the code. `--env=RANK …` stands for all variables that are passed by name.",
    ]
    for title, profile, changes in SITES:
        folder = ROOT / "profiles" / profile
        layers = [read_yaml(folder / "site.yaml")]
        layers.append(changes if isinstance(changes, dict) else read_yaml(folder / changes)["site"])
        site = launcher.resolve(Site.model_validate(merge(*layers)))[0]
        lines += ["", f"## {title}"]
        for job, geometry in jobs.items():
            try:
                launcher.check(site, geometry or Geometry())
                words = launcher.launch(site, place, geometry)
            except UserError as error:
                lines += ["", f"**{job}**: refused. {error}"]
                continue
            stage = ["preprocess"] if geometry is None else ["train", f"--device={launcher.device(site)}"]
            shown = [*words, *stage, "…"]
            text = " ".join(word if re.fullmatch(r"[^\s;&|<>*?]+", word) else f"'{word}'" for word in shown)
            text = re.sub(r"(--env=[A-Z0-9_]+ )+", "--env=RANK … ", text).replace(sys.executable, "python")
            texts = [text.replace(f"HOME={os.environ.get('HOME')}", "HOME=$HOME")]
            if site.scheduler:
                scheduler = site.scheduler.model_copy(update={"account": "m1234"})
                asked = slurm.request(scheduler, "train" if geometry else "data", geometry)
                texts.insert(0, f"sbatch {slurm.words(asked)}")
            wrapped = [textwrap.wrap(each, 100, break_long_words=False, break_on_hyphens=False) for each in texts]
            lines += ["", f"**{job}**:", "", "```text", *(" \\\n    ".join(each) for each in wrapped), "```"]
    return "\n".join(lines) + "\n"
