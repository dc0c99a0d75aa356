"""The documentation's site: searches that readers type find the page with the answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]
#: Page that must be the first result, by search.
SEARCHES = {
    "my model": "from_notebook",
    "own model": "from_notebook",
    "bring my model": "from_notebook",
    "use your own data": "data",
    "own data": "data",
    "my data": "data",
    "measure any training script": "any_program",
    "slurm cluster": "slurm",
    "why does it run again": "fingerprints",
    "±": "words",
    "what does ± mean": "words",
    "university": "slurm",
    "university cluster": "slurm",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Build the site; return the pages that the site's own search finds for each text, best first."""
    pytest.importorskip("mkdocs", reason="needs the extra `docs`, which `make docs` installs")
    node = shutil.which("node")
    if not node:
        pytest.skip("needs node, which runs the site's search")
    site = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
    script = Path(__file__).with_name("site_search.js")
    command = [node, str(script), str(site / "search/search_index.json"), str(worker), *SEARCHES]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(("words", "page"), SEARCHES.items(), ids=SEARCHES)
def test_a_search_finds_the_page(found: dict[str, list[str]], words: str, page: str) -> None:
    pages = list(dict.fromkeys(location.partition("#")[0] for location in found[words]))
    assert f"{page}.html" == pages[0], pages[:6]
