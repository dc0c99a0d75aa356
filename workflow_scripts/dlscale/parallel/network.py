"""Network between nodes that NCCL uses, as NCCL's own log names it.

Without its plug-in for the site's network, NCCL exchanges gradients over TCP (network `Socket`), many times slower, and
reports this only in its log.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.machine import FABRIC

#: Environment variables that configure NCCL's log.
VARIABLES = {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"}

TCP = "Socket"  #: NCCL's name of the network without a plug-in and without InfiniBand.


@contextlib.contextmanager
def nccl_log() -> Iterator[Path | None]:
    """Let NCCL write its log to a temporary file; None if the environment already configures this log."""
    if VARIABLES & set(os.environ):
        yield None
        return
    with tempfile.NamedTemporaryFile(prefix="dlscale-nccl-") as file:
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=file.name)
        try:
            yield Path(file.name)
        finally:  # NCCL has read the variables; child processes need their own file
            for name in VARIABLES:
                os.environ.pop(name, None)


def read_network(log: str) -> str | None:
    """Return the network in NCCL's log, such as `Socket`, `IB` or `AWS Libfabric`; None if the log has no network."""
    found = re.findall(r"NCCL INFO Using network ([^\n]+)", log)
    return found[-1].strip() if found else None


def check_network(network: str | None) -> None:
    """Raise `UserError` if NCCL uses TCP although the site declares a faster network (`site.fabric`)."""
    fabric = os.environ.get(FABRIC)
    if fabric and network == TCP:
        raise UserError(
            f"site.fabric: the site's network is {fabric}, but NCCL exchanges data between nodes over TCP (network "
            f"{TCP}), so timings would be worthless. Provide NCCL's plug-in for {fabric}: site.modules for containers, "
            "LD_LIBRARY_PATH and NCCL_NET in site.environment without containers. To measure over TCP: fabric: ethernet"
        )
