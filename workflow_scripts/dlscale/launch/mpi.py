"""Call what starts the ranks of a run by MPI: `python -m dlscale.launch.mpi mpirun -n 8 env MASTER_ADDR={host} ...`.

MPI tells its processes their ranks, but not where they meet. That is here, on the node where mpirun is called: the
first of a job, where rank 0 is. Runs on the same machine meet at different ports.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence


def main(command: Sequence[str]) -> int:
    """Become `command`, with `{host}` and `{port}` put in."""
    here = {"{host}": socket.gethostname(), "{port}": str(20000 + os.getpid() % 20000)}
    words = list(command)
    for name, value in here.items():
        words = [word.replace(name, value) if word.startswith("MASTER_") else word for word in words]
    if not shutil.which(words[0]):
        print(f"{words[0]}: no such command; load a module with MPI, or name another in site.start", file=sys.stderr)
        return 127
    os.execvp(words[0], words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
