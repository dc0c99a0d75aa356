"""Fast dry runs without repeated imports of Snakemake: the process forks for every line of standard input.

An input line is a JSON list of Snakemake's arguments. The reply is a JSON line with [exit status, output]. Only the
forked process imports the package `dlscale`, so edits of the package take effect.
"""

import json
import os
import sys
import tempfile

import jinja2  # noqa: F401 - dlscale and Snakemake's parser of workflows import these packages
import numpy  # noqa: F401
import PIL.Image  # noqa: F401
import pydantic  # noqa: F401
import pynvml  # noqa: F401
import requests  # noqa: F401
import snakemake.cli
import snakemake.dag
import yaml  # noqa: F401

snakemake.cli.get_argument_parser()  # the parser imports the plugins


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
