"""`python -m dlscale STAGE ...`."""

import gc
import os
import sys

from dlscale import cli
from dlscale.core import machine


def main() -> int:
    """Run one stage in this process."""
    machine.GIVEN |= machine.first_environment()
    # What it starts imports nothing from the working folder either, but for programs.
    os.environ["PYTHONSAFEPATH"] = "1"
    status = cli.main()
    gc.freeze()  # as it ends Python looks for garbage among all that was imported: a second, with PyTorch
    return status


if __name__ == "__main__":
    sys.exit(main())
