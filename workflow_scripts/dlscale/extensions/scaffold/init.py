"""`dlscale init FOLDER`: write a folder for your studies, with a Snakefile that includes the installed workflow."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.files import remove, write_text
from dlscale.core.fingerprint import DOCS, ROOT, WORKFLOW

SNAKEFILE = """\
# dlscale's workflow, from the installed package. config.yaml selects the targets. You may add rules below.
from importlib.resources import files


include: str(files("dlscale") / "workflow/Snakefile")


rule default:
    default_target: True
    input:
        rules.all.input,
"""

NEXT = {
    "dlscale run -n": "list the jobs, and their expected time",
    "dlscale run": "run the targets of config.yaml, and write their page",
    "dlscale run PLAN": "run one plan, and write its page",
    "dlscale new-study NAME": "write a study for your own model",
}


def main(args: argparse.Namespace, configuration: object = None) -> int:
    """Write the folder `args.folder`, and print the next commands."""
    folder = Path(args.folder)
    write(folder)
    print(f"{folder}: Snakefile, config.yaml, profiles", "", "Next:", sep="\n")
    if folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(args.folder)}")
    print(*(f"  {call:<24}# {what}" for call, what in NEXT.items()), sep="\n")
    return 0


def write(folder: Path) -> None:
    """Write Snakefile, configuration and profiles into `folder`; refuse to overwrite any of these files."""
    made = [folder / name for name in ("Snakefile", "config.yaml", "profiles")]
    for path in made:
        if os.path.lexists(path):
            raise UserError(f"{path}: already exists, and nothing was written; choose another folder")
    try:
        _fill(folder)
    except BaseException:  # incomplete files would block the next call
        for path in made:
            remove(path)
        raise


def _fill(folder: Path) -> None:
    shipped = [WORKFLOW / "config.yaml", *WORKFLOW.glob("profiles/*/*")]
    for file in sorted(file for file in shipped if file.parent.name != "default"):
        text = file.read_text(encoding="utf-8").replace("workflow_scripts/dlscale", str(ROOT))
        write_text(folder / file.relative_to(WORKFLOW), text.replace("../../docs/", DOCS))
    (folder / "profiles/default").symlink_to("local")  # Snakemake's default profile
    write_text(folder / "Snakefile", SNAKEFILE)
