"""What the workflow would run and why, as Snakemake itself says: a dry run in a process of its own.

dlscale never imports Snakemake. A command that asks names a file in the environment; at the end of the dry run the
rules write the answer into it (rules/preflight.smk).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlscale.core.files import read_json, write_json

#: Names the file to which a dry run, of a process of its own, writes its answer.
ASKED = "DLSCALE_ASKED"
#: Options of Snakemake with which it makes nothing.
LOOKING = r"-\w*n\w*|--(dry-?run|unlock|lint|report|summary|detailed-summary|list.*|.*dag|rulegraph|filegraph)"
#: Options that say how much it says.
LOUD = r"-\w*[pq]\w*|--(printshellcmds|quiet|verbose|debug-dag)(=.*)?"


@dataclass(frozen=True)
class Answer:
    """What a dry run answered: `works` and `reasons`, as plain values; without success nothing but what it `said`."""

    status: int  #: Of the process.
    said: str
    works: Sequence[dict[str, Any]] = ()
    reasons: Any = None


def ask(targets: Sequence[str], args: argparse.Namespace) -> Answer:
    """Have Snakemake look what it would run for `targets`, with the profile and the settings that `args` names."""
    command = [sys.executable, "-m", "snakemake", "--dry-run", *site(args.profile)]
    for option in ("configfile", "config"):
        command += [f"--{option}", *given] if (given := getattr(args, option)) else []
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        done = subprocess.run(
            [*command, "--", *targets],
            env={**os.environ, ASKED: str(answer)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        said = done.stdout.rpartition("Building DAG of jobs...\n")[2].strip()
        said = "\n".join(line for line in said.splitlines() if not line.startswith("Using "))
        return Answer(done.returncode, said, **({} if done.returncode else read_json(answer)))


def site(profile: str | None) -> list[str]:
    """Return the words that name a site to Snakemake; it may be the path of a folder or of its `site.yaml`, too."""
    if not profile:
        return []
    folder = Path(profile if "/" in profile else f"profiles/{profile}")
    folder = folder.parent if folder.suffix == ".yaml" else folder
    if (folder / "profile.yaml").is_file():
        return ["--workflow-profile", str(folder)]
    return ["--default-resources", f"site={profile!r}"]


def asked() -> bool:
    """Whether this process is a dry run that has to answer."""
    return ASKED in os.environ


def answer(works: Sequence[dict[str, Any]], reasons: Any) -> None:
    """Write the answer for the process that asked."""
    write_json(os.environ[ASKED], {"works": works, "reasons": reasons})
