"""Command line `python -m dlscale COMMAND ...`."""

import os
import sys


def main() -> int:
    """Run one command or stage in this process, and return its exit status."""
    from dlscale.core import interrupt

    name = f"dlscale {sys.argv[1]}" if sys.argv[1:] and not sys.argv[1].startswith("-") else "dlscale"
    name = "" if "--log" in sys.argv else name  # jobs have --log; there, Snakemake prints the message
    interrupt.end_at_once(name)
    import gc

    from dlscale import cli
    from dlscale.core import machine

    machine.GIVEN |= machine.first_environment()
    # Like this process, child processes must not import from the working folder. External programs are an
    # exception: they get the environment in `machine.GIVEN`.
    os.environ["PYTHONSAFEPATH"] = "1"
    status = cli.main()
    interrupt.end_at_once(name)
    gc.freeze()  # skips the garbage collection at exit, which takes a second if PyTorch was imported
    return status


if __name__ == "__main__":
    sys.exit(main())
