"""The documentation: commands to copy are valid, links resolve, and pages with a length limit are short."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from dlscale.preflight import run
from tests import test_coverage
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "profiles").glob("*/README.md"))]
#: Placeholders for a reader's own names.
PLACEHOLDER = re.compile(r"\b(?:[A-Z]{3,}|mysite|my_study\w*|mine|m1234|unet|vit)\b|[$…]")


def commands(page: Path) -> list[str]:
    """Return the commands of dlscale and Snakemake in a page's bash blocks; a command may span several lines."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    text = re.sub(r"\\\n\s*", " ", "".join(blocks))
    return re.findall(r"^(?:dlscale|snakemake)\b(?:'[^']*'|[^'#\n])*", text, re.MULTILINE)


def names(nav: list) -> list[str]:
    """Return the names of all pages in a navigation."""
    return [
        name
        for each in nav
        for value in each.values()
        for name in ([value] if isinstance(value, str) else names(value))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_is_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command is accepted by its program's parser.

    Plans and runs exist, unless they are the reader's own.
    """
    monkeypatch.chdir(ROOT)
    parsers = {"dlscale": test_coverage.of_dlscale(), "snakemake": test_coverage.of_snakemake()}
    for command in commands(page):
        program, *words = shlex.split(command, comments=True)
        theirs = bool(PLACEHOLDER.search(shlex.join(words))) or "--configfile" in words
        if program == "dlscale" and words[0] == "run":
            call = run.sort(words[1:])
            assert theirs or run.configured(call)
        elif theirs:
            test_coverage.parsed(parsers[program], words)
        else:
            test_coverage.check(shlex.join([program, *words]))


def test_settings_files_in_the_pages_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each YAML block that begins with a file name is valid on top of config.yaml: its keys, plans and runs exist."""
    monkeypatch.chdir(ROOT)
    found = 0
    for page in PAGES:
        for name, text in re.findall(
            r"^```yaml\n# (\w+\.yaml)\b[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            (tmp_path / name).write_text(text)
            assert run.configured(run.sort(["--configfile", str(tmp_path / name)])), f"{page}: {name}"
            found += 1
    assert found > 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_table_follows_an_empty_line(page: Path) -> None:
    """A table follows an empty line, because the site would otherwise show the table as text."""
    lines = page.read_text().splitlines()
    glued = [line for before, line in pairwise(lines) if re.match(r"\|.*\|$", line) and before and before[0] != "|"]
    assert not glued


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files(page: Path) -> None:
    """Links to files resolve, and are inline, because the site's hook moves only inline links.

    The site's build checks anchors.
    """
    text = page.read_text()
    made = {"api.md", "commands.md", "command_lines.md"}  # pages that the site's build writes
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists() or target in made, target
    assert not re.search(r"^\[[^\]]+\]: ", text, re.MULTILINE)


def test_readme_and_home_page_are_short() -> None:
    readme, home = (ROOT / "README.md").read_text(), (ROOT / "docs/index.md").read_text()
    assert len(readme.splitlines()) <= 120 and len(readme.split()) <= 700
    assert len(home.splitlines()) <= 30


def test_the_pages_are_short() -> None:
    """The hand-written pages have at most 38,000 words, examples included; a word has a letter or a digit."""
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md") if page.name != "configuration.md"]
    assert sum(bool(re.search(r"\w", word)) for page in pages for word in page.split()) <= 38_000


def test_both_pages_install_alike_on_perlmutter() -> None:
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/slurm.md")]
    one, other = (re.findall(r"^(?:export UV_|module load python)[^#\n]*[^#\s]", page, re.MULTILINE) for page in pages)
    assert one == other and len(one) == 2


def test_the_site_has_all_pages() -> None:
    """Each page of docs/ is in the navigation exactly once, and no page hides the navigation."""
    nav = names(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(nav) == len(set(nav)) and {page.name for page in (ROOT / "docs").glob("*.md")} <= set(nav)
    assert not [page for page in PAGES if re.match(r"---\n(?:.*\n)*?hide:", page.read_text())]
