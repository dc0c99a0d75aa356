"""Dry runs without importing Snakemake for each: a process that forks for every line of standard input.

A line is a JSON list of Snakemake's arguments; the answer, a line too, is [exit status, output]. The package
`dlscale` is imported by the forked process alone, so an edit of it counts.
"""

import json
import os
import sys
import tempfile

import pydantic  # noqa: F401 - dlscale needs it
import snakemake.cli
import yaml  # noqa: F401


def run(arguments: list[str], output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["snakemake", *arguments]
    status: object = 1
    try:
        snakemake.cli.main(arguments)
    except SystemExit as ended:
        status = ended.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


for line in sys.stdin:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            run(json.loads(line), output.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps([status, output.read().decode()]), flush=True)
