"""Stage `checkout`: a revision of another program's repository, in a folder of its own."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from dlscale.core.errors import UserError, cut
from dlscale.core.files import whole
from dlscale.core.urls import hidden_in

#: A fetch runs no helper of another protocol, asks for no password, and takes no configuration of its user's.
SAFE = {"GIT_ALLOW_PROTOCOL": "https:file", "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_GLOBAL": os.devnull}


def main(args: argparse.Namespace) -> None:
    """Fetch `args.revision` of `args.repository` into `args.out`."""
    if not shutil.which("git"):
        raise UserError("program.repository: there is no git here; install it")
    with whole(args.out) as folder:
        folder.mkdir()
        for words in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth=1", args.repository, args.revision],
            ["checkout", "--quiet", "--detach", args.revision],
        ):
            done = subprocess.run(
                ["git", *words], cwd=folder, env={**os.environ, **SAFE}, capture_output=True, text=True, check=False
            )
            if done.returncode:
                what = cut(" ".join(done.stderr.split()), 300)
                raise UserError(
                    f"program.repository {args.repository}: git {words[0]} of {args.revision}: {hidden_in(what)}"
                )
        there = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if there != args.revision:
            raise UserError(f"program.repository {args.repository}: expected commit {args.revision}, fetched {there}")
        Path(folder, ".git/FETCH_HEAD").unlink(missing_ok=True)
