"""Network that NCCL uses between nodes, read from NCCL's log.

Without a plug-in for the site's network, NCCL exchanges gradients over TCP (network `Socket`), which is many times
slower. NCCL reports this only in its log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.machine import FABRIC

#: Environment variables that configure NCCL's log.
VARIABLES = {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"}

TCP = "Socket"  #: NCCL's name for TCP, which NCCL uses if it has neither a plug-in nor InfiniBand.
#: Names for TCP in libfabric, which NCCL's plug-in for Slingshot uses.
TCP_PROVIDERS = {"tcp", "sockets", "udp", "net"}


@contextlib.contextmanager
def nccl_log() -> Iterator[Path | None]:
    """Yield a temporary file to which NCCL writes its log; None if `VARIABLES` already configure this log."""
    if VARIABLES & set(os.environ):
        yield None
        return
    with tempfile.NamedTemporaryFile(prefix="dlscale-nccl-") as file:
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=file.name)
        try:
            yield Path(file.name)
        finally:  # NCCL has read the variables; child processes must not log to this file
            for name in VARIABLES:
                os.environ.pop(name, None)


def read_network(log: str) -> str | None:
    """Return the network that NCCL's log names: `Socket`, `IB`, `AWS Libfabric: cxi`; None if missing.

    The word after a colon is the name of libfabric's provider.
    """
    networks = re.findall(r"NCCL INFO Using network ([^\n]+)", log)
    providers = re.findall(r"NET/OFI Selected provider is ([^\s,()]+)", log, re.IGNORECASE)
    if not networks:
        return None
    name = str(networks[-1]).strip()
    return f"{name}: {providers[-1]}" if providers and name != TCP else name


def is_tcp(network: str | None) -> bool:
    """Return whether a network is TCP, which libfabric also uses if it finds no device of a faster network."""
    name, _, provider = (network or "").partition(": ")
    return name == TCP or provider.partition(";")[0] in TCP_PROVIDERS


def check_network(network: str | None, logged: bool = True) -> None:
    """Raise `UserError` if NCCL uses TCP although the site declares a faster network (`site.fabric`).

    If the site declares a network, and NCCL wrote a log (`logged`) that does not name the network in use, log a
    warning.
    """
    fabric = os.environ.get(FABRIC)
    if fabric and logged and network is None:
        logging.warning(
            "NCCL's log does not name the network between nodes, so dlscale cannot check whether NCCL uses %s", fabric
        )
    if fabric and is_tcp(network):
        raise UserError(
            f"site.fabric: the site's network is {fabric}, but NCCL exchanges data between nodes over TCP (network "
            f"{network}), so timings would be worthless. Provide NCCL's plug-in for {fabric}: by site.modules with "
            "Shifter, in the image with other engines, without containers by NCCL_NET_PLUGIN in site.environment. To "
            "measure over TCP, set fabric: ethernet"
        )
