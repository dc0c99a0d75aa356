"""The workflow's own word on what it would run, and why: a dry run of Snakemake in a process of its own.

dlscale never imports Snakemake. A command that asks names a file in the environment; at the end of the dry run the
rules write the answer into it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlscale.core.files import read_json, write_json

#: Names the file to which a dry run, of a process of its own, writes its answer.
ASKED = "DLSCALE_ASKED"
#: Options of Snakemake with which it makes nothing.
LOOKING = r"-\w*n\w*|--(dry-?run|unlock|lint|report|summary|detailed-summary|list.*|.*dag|rulegraph|filegraph)"
#: Options that say how much it says.
LOUD = r"-\w*[pq]\w*|--(printshellcmds|quiet|verbose|debug-dag)(=.*)?"


def ask(targets: Sequence[str], args: argparse.Namespace) -> tuple[int, str, Any]:
    """Return status, words and answer of a dry run for `targets`, with the profile and settings that `args` names.

    Without success there is no answer.
    """
    command = [sys.executable, "-m", "snakemake", "--dry-run", *site(args.profile)]
    for option in ("configfile", "config"):
        command += [f"--{option}", *given] if (given := getattr(args, option)) else []
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        pipe = subprocess.PIPE
        environment = {**os.environ, ASKED: str(answer)}
        done = subprocess.run(
            [*command, "--", *targets], env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False
        )
        said = done.stdout.rpartition("Building DAG of jobs...\n")[2].strip()
        said = "\n".join(line for line in said.splitlines() if not line.startswith("Using "))
        return done.returncode, said, None if done.returncode else read_json(answer)


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


def answer(reasons: Any) -> None:
    """Write the answer for the process that asked."""
    write_json(os.environ[ASKED], reasons)
