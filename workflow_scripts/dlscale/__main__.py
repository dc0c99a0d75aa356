"""`python -m dlscale STAGE ...`."""

import os
import sys

from dlscale import cli


def main() -> int:
    """Run one stage in this process."""
    os.environ["PYTHONSAFEPATH"] = "1"  # what it starts imports nothing from the working folder either
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
