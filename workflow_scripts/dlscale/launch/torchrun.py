"""torchrun without its tracebacks: `python -m dlscale.launch.torchrun --nproc-per-node=4 -m -- dlscale train ...`.

When a process fails, or a signal asks for the end, torchrun ends all and raises an exception of its own, which shows
where torchrun was. Why a process failed it has said itself, and which one was killed the others have said.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(words: Sequence[str]) -> int:
    """Run torchrun; the exit status is that of the process that failed first, of one that was killed as shells say."""
    try:
        torchrun(list(words))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as asked:
        return 128 + int(asked.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
