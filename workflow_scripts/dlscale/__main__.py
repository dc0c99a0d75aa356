"""`python -m dlscale STAGE ...`."""

import sys

from dlscale.cli import main

if __name__ == "__main__":
    sys.exit(main())
