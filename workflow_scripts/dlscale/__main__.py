"""Command line `python -m dlscale COMMAND ...`."""

import os
import sys


def main() -> int:
    """Run one command or stage in this process, and return its exit status."""
    from dlscale.core import interrupt

    # Jobs have --log; there, Snakemake prints the message.
    name = "" if "--log" in sys.argv else " ".join(["dlscale", *(word for word in sys.argv[1:2] if word[:1] != "-")])
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
    try:
        sys.exit(main())
    except (MemoryError, ImportError) as error:
        sys.exit(f"dlscale cannot load its libraries ({error!r}). Close other programs, or install dlscale again")
