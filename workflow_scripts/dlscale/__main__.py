"""`python -m dlscale STAGE ...`."""

import os
import sys


def main() -> int:
    """Run one stage in this process."""
    from dlscale.core import interrupt

    name = f"dlscale {sys.argv[1]}" if sys.argv[1:] and not sys.argv[1].startswith("-") else "dlscale"
    name = "" if "--log" in sys.argv else name  # a job prints nothing on Ctrl-C, since Snakemake does
    interrupt.end_at_once(name)
    import gc

    from dlscale import cli
    from dlscale.core import machine

    machine.GIVEN |= machine.first_environment()
    # Child processes must not import from the working folder, either; external programs get the first environment.
    os.environ["PYTHONSAFEPATH"] = "1"
    status = cli.main()
    interrupt.end_at_once(name)
    gc.freeze()  # saves the garbage collection at exit, which takes a second after importing PyTorch
    return status


if __name__ == "__main__":
    sys.exit(main())
