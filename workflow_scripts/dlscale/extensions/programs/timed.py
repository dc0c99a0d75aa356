"""Time the steps of any training loop: `for batch in timed(loader): ...`, and `dlscale measure -- python train.py`.

This file is for Python 3.8 and later, and has no dependencies: import `dlscale.timed`, or copy the file. Without a
measurement `timed` returns the loader unchanged. An error of the timing does not reach the program: the timing stops,
and writes the reason into the folder of steps.
"""

from __future__ import annotations

import atexit
import itertools
import math
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Lock, get_ident
from typing import Any

# Keep the original functions, because a program may replace them in their modules.
clock, computed, now_utc, getpid = time.perf_counter, time.process_time, time.time, os.getpid
open_file, write_file, close_file = os.open, os.write, os.close
#: Flags that refuse a link, and a pipe without a reader: another user may have created them in the folder of steps.
OWN = os.O_NOFOLLOW | os.O_NONBLOCK

#: Environment variable: folder into which measured processes write their steps.
FOLDER = "DLSCALE_STEPS"

#: Environment variable: seconds between two writes of steps.
EVERY = "DLSCALE_STEPS_EVERY"

#: Environment variables with the rank of a process: of torchrun, Slurm, Open MPI, and MPIs with PMI.
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

#: Largest valid number of samples per step.
MAX_SAMPLES = 10**9

#: Maximum number of a batch's parts (arrays, lists) whose lengths are compared with the loader's batch size.
MAX_PARTS = 32

#: Seconds between the first writes: the fraction FRACTION of the time since the first write, at least MIN_SECONDS, at
#: most SECONDS. Extensions measure memory at each write, and a run of a few seconds needs several measurements.
MIN_SECONDS, FRACTION = 0.05, 1 / 32

#: After MAX_NOTES notes, a process alternately writes notes for NOTED seconds and pauses. A pause lasts GAP times the
#: time since the first note, so that the file grows with the logarithm of the time.
MAX_NOTES, NOTED, GAP = 100_000, 1.0, 0.01


def variable(name: str) -> str:
    """Return the value of an environment variable; an empty text if the variable is missing."""
    try:
        return str(os.environ.get(name) or "")
    except Exception:  # the program may have replaced `os.environ`
        return ""


def _seconds() -> float:
    try:
        return min(max(float(variable(EVERY) or 1), 0.01), 60.0)
    except ValueError:
        return 1.0


SECONDS = _seconds()


class Log:
    """File `WAY.HOST.PID` with the batches that a process received, and the steps that the process ended.

    The first line has the time of day, the process's clock at that time, the process's rank, and the id of its parent
    process. Times are in seconds. In a long run there are gaps without notes; each gap has a line in the file.
    """

    # Adding a note must be little work, because the code and data for notes are rarely in the CPU's caches.

    def __init__(self, way: str) -> None:
        self._way, self._rank = way, rank()
        self.folder, self._host = variable(FOLDER), os.uname().nodename
        self._file: Any = None
        self._notes: list[Any] = []
        #: Functions of extensions that are called whenever notes are written; they must not raise.
        self.on_write: list[Callable[[], None]] = []
        self._forget()
        if self.folder and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Reset the log; a forked process must not write its parent's notes."""
        self._file, self._notes = None, []
        self.fetched = self.stepped = 0.0  # times of the last batch and of the last step; 0 if missing
        self._count, self._begin, self._since, self._due = 0, 0.0, 0.0, 0.0
        self._lock, self._thread, self._util = Lock(), 0, sys.modules.get("multiprocessing.util")
        self._until = 0.0 if self.folder else math.inf

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return rank(self._rank)

    def file(self, name: str) -> str:
        """Return the path of this process's file `NAME.HOST.PID` in the folder of steps."""
        return f"{self.folder}/{name}.{self._host}.{getpid()}"

    def append(self, name: str, text: str) -> None:
        """Append a text to this process's file `NAME.HOST.PID` in the folder of steps."""
        append(self.file(name), text)

    @property
    def on(self) -> bool:
        """Whether the steps of the process are noted."""
        return self._until != math.inf

    def batch(self, iterator: int, wait: float, samples: int) -> None:
        """Note that an iterator delivered a batch now, after `wait` seconds.

        `samples` is 0 if unknown, and negative if uncertain (see `short_of`). Batches that are requested without
        gradients, as in a validation, are marked.
        """
        now = self.fetched = clock()
        if now >= self._until:
            self._notes.append((get_ident(), now, iterator, wait, samples))
            if not has_gradients():
                self._notes.append(f"u {iterator}\n")
            if now >= self._due:
                self._write(now)

    def loop(self, number: int = 0, loader: int = 0) -> None:
        """Note that a loop begins now, so that its first step does not include the time before the loop."""
        if self.on:
            self._notes.append(f"l {clock():.6f} {number} {loader}\n")

    def fact(self, kind: str, *values: int) -> None:
        """Note the bytes of an optimiser's gradients (p), or facts about an iterator.

        c: number of processes that get copies of the iterator's batches. a: a library requests each batch before the
        library delivers the previous batch.
        """
        if self.on:
            self._notes.append(f"{kind} {' '.join(map(str, values))}\n")

    def span(self, kind: str, begin: float, end: float, iterator: int = 0) -> None:
        """Note the time in which a model was in evaluation mode (v), or an iterator started (i) or ended (e)."""
        if end >= self._until:
            self._notes.append(f"{kind} {begin:.6f} {end:.6f} {iterator}\n")

    def step(self, part: int = 0, loop: str = "") -> None:
        """Note that a step, or one optimiser's part of the step, ended now; also note the process's CPU time.

        `loop` is the number of the loop that made the step, and whether an optimiser made a step meanwhile.
        """
        now = self.stepped = clock()
        if now >= self._until:
            self._notes.append((get_ident(), now, computed(), f"{part}{loop}"))
            if now >= self._due:
                self._write(now)

    def stop(self, error: Exception) -> None:
        """Stop taking notes after an error, and write the error into the file `stopped.HOST.PID`."""
        if not self.on:
            return
        self._until = math.inf
        try:
            reason = f"{type(error).__name__}: {error}"[:200]
        except Exception:  # the error has no text
            reason = type(error).__name__
        try:  # on a full disk the file stays empty
            self.append("stopped", f"{self._way} {' '.join(reason.split())}\n")
        except Exception:  # the folder is gone, or belongs to another user
            return

    def _write(self, now: float) -> None:
        if not self._lock.acquire(False):  # another thread writes, or a signal handler interrupted a write
            return
        try:
            if self._file is None:
                self._open(now)
            self.notify()
            # Remove notes from the list instead of replacing it: another thread may be about to append to this list.
            notes = self._notes[:]
            del self._notes[: len(notes)]
            self._count += len(notes)
            self._due = now + min(SECONDS, max(MIN_SECONDS, FRACTION * (now - self._begin)))
            if self._count > MAX_NOTES and now - self._since >= NOTED:
                self._until = self._since = now + GAP * (now - self._begin)
                self._due = self._until + SECONDS
                notes.append(f"g {now:.6f} {self._until:.6f}\n")
            append(self._file, "".join(map(self._line, notes)))
        except Exception as error:
            self.stop(error)
        finally:
            self._lock.release()

    def notify(self) -> None:
        """Call the functions `on_write`, unless notes pause."""
        if self.on_write and clock() >= self._until:
            for function in self.on_write:
                function()

    def _open(self, now: float) -> None:
        self._file = self.file(self._way)
        self._begin = self._since = now
        self._notes.insert(0, f"begin {now_utc():.6f} {clock():.6f} {self.rank} {parent()}\n")
        atexit.register(self.write)
        for begin in hooked("begin"):
            begin(self)
        if util := sys.modules.get("multiprocessing.util", self._util):  # forked children end without `atexit`
            util.Finalize(None, self.write, exitpriority=0)

    def write(self) -> None:
        """Write the notes that are not yet in the file."""
        if self._file is not None and self.on:
            self._write(clock())

    def _line(self, note: Any) -> str:
        """Return the line of a note; if the thread has changed, first a line with the new thread."""
        if isinstance(note, str):
            return note
        last, self._thread = self._thread, note[0]
        line = "s {1:.6f} {2:.3f} {3}\n" if len(note) == 4 else "b {2} {1:.6f} {3:.6f} {4}\n"
        return (line if last == self._thread else "t {0}\n" + line).format(*note)


def append(file: str, text: str) -> None:
    """Append a text to a file.

    The file is opened for each text, because a program that becomes a daemon closes all files.
    """
    place, data = open_file(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | OWN, 0o666), text.encode()
    try:
        if write_file(place, data) < len(data):
            raise OSError("the disk is full")
    finally:
        close_file(place)


def rank(default: int = 0) -> int:
    """Return this process's rank, which torchrun, Slurm or MPI have set; otherwise `default`."""
    given = (variable(name) for name in RANKS)
    return int(next((each for each in given if each.isdecimal() and len(each) < 10), default))


def parent() -> int:
    """Return the id of the process that started this process."""
    try:  # with the start method forkserver, the system's parent is the server
        return int(sys.modules["multiprocessing.process"].parent_process().pid)
    except Exception:
        return os.getppid()


def has_gradients() -> bool:
    """Return whether PyTorch, if the program uses it, now computes gradients."""
    try:
        return bool(sys.modules["torch"].is_grad_enabled())
    except Exception:  # another library, or a part of PyTorch's import
        return True


def has_stepped(since: float) -> bool:
    """Return whether dlscale's hook has seen a step of an optimiser of PyTorch since a time."""
    watcher = getattr(sys.modules.get("sitecustomize"), "WATCHER", None)
    return watcher is not None and watcher.stepped >= since


def hooked(name: str) -> list[Any]:
    """Return the functions called `name` of the extensions that dlscale's hook has loaded in this process."""
    loaded = getattr(sys.modules.get("sitecustomize"), "EXTENSIONS", ())
    return [getattr(each, name) for each in loaded if hasattr(each, name)]


#: Log of all loops that `timed`, or `begun` and `ended`, measure in this process.
LOG = Log("timed")


def sample_count(samples: Any) -> int:
    """Return a number of samples as an integer; 0 for anything but a whole number from 1 to `MAX_SAMPLES`."""
    try:
        number = int(samples) if isinstance(samples, float) and samples.is_integer() else operator.index(samples)
    except Exception:
        return 0
    return number if number <= MAX_SAMPLES and number > 0 and not isinstance(samples, bool) else 0


def size_of(loader: Any) -> int:
    """Return the attribute `batch_size` of a loader; 0 if it is missing or invalid."""
    try:
        return sample_count(loader.batch_size)
    except Exception:
        return 0


def samples_of(batch: Any, size: int) -> int:
    """Return the loader's batch `size` if the batch, or an array or list in the batch, has this length; otherwise 0.

    Another length of the first axis does not count: the axis may be time, channels, or the nodes of several graphs. A
    `size` of 1 does not count if the batch may have several samples (see `is_several`).
    """
    try:
        known = size in map(_length, itertools.chain([batch], _parts(batch)))
        return size if known and not (size == 1 and is_several(batch)) else 0
    except Exception:
        return 0


def short_of(batch: Any, size: int) -> int:
    """Return minus the common length of the arrays and lists in a short batch, such as the last of an epoch; else 0.

    The length is the number of samples only if most batches of the loader have `size` samples.
    """
    try:
        lengths = {_length(part) for part in ([batch] if hasattr(batch, "shape") else _parts(batch))} - {0}
        return -lengths.pop() if len(lengths) == 1 and is_short(batch, size) else 0
    except Exception:
        return 0


def is_several(batch: Any) -> bool:
    """Return whether a batch of one item may have several samples.

    The dataset may yield batches, to which a loader with `batch_size=1` adds an axis of length 1. Therefore only arrays
    and lists with at most one entry in the first two axes have one sample for certain.
    """
    try:
        parts = [batch, *_parts(batch)] if hasattr(batch, "shape") else _parts(batch)
        return any(length > 1 for part in parts for length in _axes(part)[:2])
    except Exception:
        return False


def _axes(part: Any) -> tuple[int, ...]:
    """Return the lengths of the axes of an array, or of a list and the first array in the list."""
    inner = _shape(part[0]) if isinstance(part, (list, tuple)) and part else ()
    return _shape(part) + inner


def _parts(batch: Any) -> Iterable[Any]:
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return itertools.islice(parts, MAX_PARTS)


def is_short(batch: Any, size: int) -> bool:
    """Return whether all arrays and lists in a batch are shorter than `size`.

    `size` is the number of samples that were drawn, or the loader's batch size. In a short batch, `collate_fn` dropped
    samples, or an epoch had no further samples. A batch with any axis of length `size`, such as time-major arrays, is
    not short.
    """
    try:
        inside = list(_parts(batch))
        whole, shapes = _shape(batch), [shape for shape in map(_shape, inside) if shape]
        shapes += [whole] if whole and hasattr(batch, "shape") else []
        return bool(shapes) and size not in whole and all(shape[0] < size and size not in shape for shape in shapes)
    except Exception:
        return False


def _shape(part: Any) -> tuple[int, ...]:
    shape = getattr(part, "shape", None)
    if isinstance(shape, tuple):
        return tuple(map(int, shape))
    return (len(part),) if isinstance(part, (list, tuple)) else ()


def _length(part: Any) -> int:
    try:
        shape = getattr(part, "shape", None)
        if isinstance(shape, tuple):
            return sample_count(shape[0]) if shape else 0
        return len(part) if isinstance(part, (list, tuple)) else 0
    except Exception:  # for example, a nested tensor has no such shape
        return 0


_ended, _loops = 0.0, itertools.count(1)


def begun(samples: Any = 0) -> None:
    """Note that a step with `samples` samples begins; call this function in a callback.

    The time since the last call of `ended` counts as waiting for the step's batch.
    """
    now = clock()
    LOG.batch(0, now - _ended if _ended else 0.0, sample_count(samples))


def ended() -> None:
    """Note that a step has ended; call this function in a callback."""
    global _ended
    _ended = clock()
    LOG.step()


def timed(loader: Iterable[Any]) -> Any:
    """Return a loader whose steps are timed: a step lasts until the loop requests the next batch.

    The result can be iterated as often as `loader`, and has the same length and attributes. For a PyTorch `DataLoader`,
    the result is an instance of a subclass of the loader's class, so that libraries shard or rebuild the result like
    the loader. Without a measurement, `loader` itself is returned.
    """
    if not LOG.on:
        return loader
    data = sys.modules.get("torch.utils.data")
    try:
        return _timed_copy(loader) if data is not None and isinstance(loader, data.DataLoader) else _Timed(loader)
    except Exception:  # the loader's class refuses subclasses
        return _Timed(loader)


def _timed_copy(loader: Any) -> Any:
    """Return an object of a subclass of the loader's class, which shares all attributes with the loader."""
    base: Any = type(loader)

    def reduce(self: Any, protocol: int) -> Any:  # the subclass has no name by which pickle could find it
        function, given, *rest = base.__reduce_ex__(self, max(protocol, 2))
        return (_restored, (base, *given[1:]), *rest) if given[0] is type(self) else (function, given, *rest)

    own: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__iter__": lambda self: _iterate(lambda: base.__iter__(self), size_of(self), id(self.dataset)),
        "__reduce_ex__": reduce,
        "__del__": lambda self, loader=loader: None,  # the kept loader releases the shared attributes itself
    }
    copied: Any = object.__new__(type(base.__name__, (base,), own))
    object.__setattr__(copied, "__dict__", loader.__dict__)
    return copied


def _restored(base: Any, *given: Any) -> Any:
    return timed(base.__new__(base, *given))


def _iterate(begin: Callable[[], Iterator[Any]], size: int, loader: int) -> Iterator[Any]:
    """Begin a loop over a loader's batches of `size` samples (0: unknown), and return its batches."""
    number = next(_loops)
    LOG.loop(number, loader)
    since, batches = clock(), begin()
    LOG.span("i", since, clock(), number)
    return _noted(batches, size, number)


def _noted(batches: Iterator[Any], size: int, loop: int) -> Iterator[Any]:
    """Yield the batches of a loop; note each batch, the end of each step, and the time in which the loader ends."""
    while True:
        begin = clock()
        try:
            batch = next(batches)
        except StopIteration:
            LOG.span("e", begin, clock(), loop)
            return
        now = clock()
        LOG.batch(loop, now - begin, (samples_of(batch, size) or short_of(batch, size)) if size else 0)
        yield batch
        LOG.step(loop=f" {loop} {int(has_stepped(now))}")


class _Timed:
    def __init__(self, loader: Any) -> None:
        self._loader: Any = loader
        self._batches: Any = None

    def __iter__(self) -> Iterator[Any]:
        batches, size = self._loader, size_of(self._loader)
        for loop in hooked("loop"):
            batches = loop(batches)
        return _iterate(lambda: iter(batches), size, id(self._loader))

    def __next__(self) -> Any:
        self._batches = self._batches or iter(self)
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(object.__getattribute__(self, "_loader"), name)
