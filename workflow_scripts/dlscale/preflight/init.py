"""`dlscale init FOLDER`: a folder of one's own, whose Snakefile includes the workflow that the package brings along."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.files import remove, write_text
from dlscale.core.fingerprint import DOCS, ROOT, WORKFLOW

SNAKEFILE = """\
# The workflow of dlscale, from where that is installed; config.yaml says what it runs. Rules of your own may follow.
from importlib.resources import files


include: str(files("dlscale") / "workflow/Snakefile")


rule default:
    default_target: True
    input:
        rules.all.input,
"""

NEXT = {
    "dlscale run -n": "what would run, and how long it takes",
    "dlscale run": "the targets of config.yaml, and their page",
    "dlscale run PLAN": "one plan, and its page",
    "dlscale new-study NAME": "a study of your own model",
}


def main(args: argparse.Namespace, configuration: object = None) -> int:
    """Write the folder `args.folder`, and say what to do next."""
    folder = Path(args.folder)
    write(folder)
    print(f"{folder}: Snakefile, config.yaml, profiles", "", "Next:", sep="\n")
    if folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(args.folder)}")
    print(*(f"  {call:<24}# {what}" for call, what in NEXT.items()), sep="\n")
    return 0


def write(folder: Path) -> None:
    """Write Snakefile, configuration and profiles into `folder`, over nothing that is there."""
    made = [folder / name for name in ("Snakefile", "config.yaml", "profiles")]
    for path in made:
        if os.path.lexists(path):
            raise UserError(f"{path}: is there already, and nothing was written; choose another folder")
    try:
        _fill(folder)
    except BaseException:  # the next call would find a part there
        for path in made:
            remove(path)
        raise


def _fill(folder: Path) -> None:
    shipped = [WORKFLOW / "config.yaml", *WORKFLOW.glob("profiles/*/*")]
    for file in sorted(file for file in shipped if file.parent.name != "default"):
        text = file.read_text(encoding="utf-8").replace("workflow_scripts/dlscale", str(ROOT))
        write_text(folder / file.relative_to(WORKFLOW), text.replace("../../docs/", DOCS))
    (folder / "profiles/default").symlink_to("local")  # which Snakemake reads by itself
    write_text(folder / "Snakefile", SNAKEFILE)
