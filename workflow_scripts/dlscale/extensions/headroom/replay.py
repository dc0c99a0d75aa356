"""Replay the batches of a program's training loader, for `dlscale measure --replay` and the stage `headroom`.

dlscale's hook loads this file. The first batches are kept. Then turns alternate: in a plain turn the loader loads as
always; in a replayed turn a kept batch is returned at once. `dlscale` writes the schedule of the turns into the file
`schedule` of the folder of steps, because all processes must change turns at the same batch. Each process writes its
turns into `turns.HOST.PID`. The training's losses are meaningless. The training's loader begins again after its last
batch, unless the loader is a generator. For Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

clock = time.perf_counter

#: Environment variables: maximum number and bytes of a process's kept batches, as `N BYTES`; mount namespace of the
#: scratch copy.
REPLAY, SCRATCH = "DLSCALE_REPLAY", "DLSCALE_SCRATCH"

#: Files in the folder of steps: reason why the program has no scratch copy; reason why batches cannot be replayed.
REASON, UNSUPPORTED = "refused", "unsupported"

#: Time between two reads of the schedule, s.
LOOK = 0.1

#: Exit status of a process that does not run in the scratch copy.
REFUSED = 125

#: The replay of this process; None in programs that are not replayed.
CURRENT: Replay | None = None


class Kept:
    """Kept batch, whose replays share its tensors and copy all other objects.

    After the program has changed a tensor in place, replays also copy the tensors.
    """

    def __init__(self, batch: Any) -> None:
        self._batch, self._shared = _copied(batch)
        self.bytes = sum(_size(part) for part in self._shared)
        self._versions = [_version(part) for part in self._shared]
        self.changed = False  #: Whether the program changed a tensor of the batch in place.

    def again(self) -> Any:
        if not self.changed and self._versions != [_version(part) for part in self._shared]:
            self.changed = True
        if self.changed:
            return _copied(self._batch)[0]
        return copy.deepcopy(self._batch, {id(part): part for part in self._shared})


def _copied(batch: Any) -> tuple[Any, list[Any]]:
    """Return a copy of a batch, and the tensors of the copy; copies of pinned tensors are pinned."""
    memo: dict[int, Any] = {}
    found = copy.deepcopy(batch, memo)
    originals = memo.get(id(memo), [])  # `copy.deepcopy` keeps the originals alive here
    pinned = {id(part): memo[id(part)].pin_memory() for part in originals if _is_tensor(part) and part.is_pinned()}
    if pinned:
        memo = pinned
        found = copy.deepcopy(batch, memo)
    return found, [part for part in memo.values() if _is_tensor(part)]


def _is_tensor(part: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(part, torch.Tensor)


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _version(tensor: Any) -> int:
    try:
        return int(tensor._version)
    except RuntimeError:  # a tensor made in inference mode
        return 0


class Replay:
    """Turns of one process: `next` returns the loader's own batches or kept batches."""

    def __init__(self, folder: str) -> None:
        count, size = os.environ[REPLAY].split()
        self._count, self._free = int(count), int(size)
        self._folder, self._file = folder, f"{folder}/turns.{os.uname().nodename}.{os.getpid()}"
        self._kept: list[Kept] = []
        self._full = False
        self._training: Any = None  # key of the training's loader: the last loader before the first step
        self._last: Any = None
        self._others = False
        self._number = 0  # batches of the training's loader so far
        self._schedule: list[tuple[int, int, int]] = []  # first batch, batches of a plain turn and of a replayed turn
        self._looked, self._read = 0.0, 0
        self._turn: tuple[int, int, int] | None = None  # schedule's first batch, turn number, batch number in the turn
        self._begin = self._copying = 0.0
        self._timed = 0

    def step(self) -> None:
        """Record a step of the optimiser: the loader used last before the first step is the training's."""
        if self._training is None:
            self._training = self._last

    def next(self, key: Any, fetch: Callable[[], Any], ahead: int = 0, workers: int = 0) -> Any:
        """Return a loader's next batch.

        Parameters
        ----------
        key
            Identity of the loader.
        fetch
            Function that returns the loader's next batch. For the training's loader, it starts a new epoch after the
            last batch.
        ahead, workers
            Number of batches that the workers load in advance, and number of workers.
        """
        self._last = key
        if self._training is None or key != self._training:
            self._others |= self._training is not None
            return fetch()
        self._look()
        replayed = self._enter(fetch, ahead, workers)
        self._number += 1
        if replayed:
            begin = clock()
            kept = self._kept[self._number % len(self._kept)]
            batch = kept.again()
            if kept.changed:  # the copy is not timed, because a real loader makes new batches
                self._copying += clock() - begin
            return batch
        batch = fetch()
        self._keep(batch)
        return batch

    def _enter(self, fetch: Callable[[], Any], ahead: int, workers: int) -> bool:
        """Enter the turn of the next batch; return whether the batch is replayed."""
        plan = next((plan for plan in reversed(self._schedule) if plan[0] <= self._number), None)
        if plan is None or not self._kept:
            return False
        first, *lengths = plan
        # The first batches of a turn are not timed, because workers still load batches of the previous turn.
        settling = workers + 1
        plain, whole = settling + lengths[0], 2 * settling + sum(lengths)
        cycle, place = divmod(self._number - first, whole)
        replayed = place >= plain
        turn = (first, 2 * cycle + replayed, place - plain if replayed else place)
        if self._turn is None or self._turn[:2] != turn[:2]:
            self._leave()
            self._turn = turn
            # Drop the batches that workers have queued during the replayed turn, because these batches cost nothing.
            for _ in range(0 if replayed else ahead):
                fetch()
        if turn[2] == settling:
            _synchronize()
            self._begin, self._copying, self._timed = clock(), 0.0, lengths[replayed]
        return bool(replayed)

    def _leave(self) -> None:
        """Append the turn that ends now to the file of this process."""
        if self._turn is None or not self._timed:
            return
        _synchronize()
        seconds, self._timed, timed = clock() - self._begin - self._copying, 0, self._timed
        first, number, _ = self._turn
        changed = any(kept.changed for kept in self._kept)
        with contextlib.suppress(OSError), open(self._file, "a") as file:
            file.write(
                f"{first} {number} {timed} {seconds:.6f} {len(self._kept)} {sum(kept.bytes for kept in self._kept)} "
                f"{int(changed)} {int(self._others)}\n"
            )

    def _look(self) -> None:
        """Read the schedule, and write this process's number of batches."""
        now = clock()
        if now - self._looked < LOOK:
            return
        self._looked = now
        with contextlib.suppress(OSError):
            text = ""
            if Path(self._folder, "schedule").stat().st_size != self._read:
                with open(f"{self._folder}/schedule") as file:
                    text = file.read()
            if text.endswith("\n"):
                self._read = len(text)
                self._schedule = [tuple(map(int, line.split())) for line in text.splitlines()]  # type: ignore[misc]
        with contextlib.suppress(OSError):  # replaced atomically, because dlscale reads the file at any time
            Path(f"{self._file}.new").write_text(f"{self._number} {len(self._kept)}\n")
            os.replace(f"{self._file}.new", f"{self._file}.now")

    def _keep(self, batch: Any) -> None:
        if self._full or len(self._kept) == self._count:
            return
        kept = Kept(batch)
        if kept.bytes > self._free:
            self._full = True
            if not self._kept:
                reason = f"one batch has {kept.bytes} bytes, more than the {self._free} bytes that may be kept"
                _note(f"{self._folder}/{UNSUPPORTED}", reason)
            return
        self._free -= kept.bytes
        self._kept.append(kept)


def _synchronize() -> None:
    """Wait for the GPU, if the program uses one: a turn ends when its work on the GPU ends."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _note(file: str, reason: str) -> None:
    """Write a reason into a file atomically."""
    with contextlib.suppress(OSError):
        Path(f"{file}.part").write_text(reason)
        os.replace(f"{file}.part", file)


def optimizers(module: Any) -> None:
    """Record the steps of PyTorch's optimisers; `module` is `torch.optim.optimizer`."""
    if CURRENT is not None:
        step = CURRENT.step
        module.register_optimizer_step_post_hook(lambda *arguments: step())


def watch(module: Any) -> None:
    """Replay the batches of PyTorch's loaders; `module` is `torch.utils.data.dataloader`."""
    iterator, loader = module._BaseDataLoaderIter, module.DataLoader
    original, begin = iterator.__next__, loader.__iter__

    def begun(self: Any) -> Any:
        made = begin(self)
        made.__dict__["_dlscale_loader"] = self
        return made

    def following(self: Any) -> Any:
        replay, own = CURRENT, self.__dict__
        if replay is None or "_dlscale_loader" not in own:
            return original(self)

        def fetch() -> Any:
            try:
                return original(own.get("_dlscale_rest", self))
            except StopIteration:
                if replay._training is None:
                    raise
            own["_dlscale_rest"] = begin(own["_dlscale_loader"])
            return original(own["_dlscale_rest"])

        workers = getattr(self, "_num_workers", 0)
        ahead = workers * (getattr(self, "_prefetch_factor", 0) or 0)
        return replay.next(id(own["_dlscale_loader"].dataset), fetch, ahead, workers)

    iterator.__next__, loader.__iter__ = following, begun


def loop(loader: Any) -> Iterator[Any]:
    """Iterate over a loader of `dlscale.timed`, with replayed turns; `watch` replays PyTorch's loaders."""
    data = sys.modules.get("torch.utils.data")
    if CURRENT is None or (data is not None and isinstance(loader, data.DataLoader)):
        yield from loader
        return
    batches = iter(loader)
    replay = CURRENT

    def fetch() -> Any:
        nonlocal batches
        try:
            return next(batches)
        except StopIteration:
            if replay._training is None or iter(loader) is loader:  # a generator cannot start again
                raise
        batches = iter(loader)
        return next(batches)

    while True:
        try:
            batch = replay.next(id(loader), fetch)
        except StopIteration:
            return
        yield batch
        replay.step()


def start(log: Any) -> dict[str, Callable[[Any], None]]:
    """Replay batches in this process; end the process if it should run in a scratch copy, but does not.

    Return the functions that dlscale's hook calls after the imports of modules.
    """
    global CURRENT
    folder = log.folder
    if (place := os.environ.get(SCRATCH, "")) and place != str(Path("/proc/self/ns/mnt").stat().st_ino):
        _note(f"{folder}/{REASON}", "a process of the program does not run in the scratch copy")
        os._exit(REFUSED)
    CURRENT = Replay(folder)
    return {"torch.optim.optimizer": optimizers, "torch.utils.data.dataloader": watch}
