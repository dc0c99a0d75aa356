"""Watch PyTorch's loaders, and reads of HDF5 and Zarr, in a program of `dlscale measure --loader`.

The hook of `dlscale measure` loads this file into each process of the program, also into loader workers. Each process
keeps sums, and writes the sums once a second into the file `loader.HOST.PID` in the folder of steps. An error does not
reach the program: the watch stops, and writes the reason. For Python 3.8 and later.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

# Keep the original functions, because a program may replace them in their modules.
clock, computed, open_file, read_file, write_file = time.perf_counter, time.process_time, os.open, os.read, os.write

#: Folder of steps, into which the processes write.
FOLDER = os.environ.get("DLSCALE_STEPS", "")

#: Seconds between two writes of a process.
SECONDS = 1.0

#: Maximum numbers of entries in a process's file: loaders, arrays, regions of an array, names of transforms, times
#: between batches, iterators of a loader, and files of an array.
MAX_LOADERS, MAX_ARRAYS, MAX_REGIONS, MAX_NAMES, MAX_TIMES, MAX_SEEDS, MAX_FILES = 16, 32, 8, 4, 256, 1000, 1000

#: Maximum number of files in the folder of steps, since each epoch may start workers. Further processes do not write.
MAX_PROCESSES = 1000

#: Requests to HDF5 and batches whose bytes are measured: the first ALWAYS, then every EVERY-th.
ALWAYS, EVERY = 200, 16

#: Attributes of a dataset that transform its samples (torchvision), and attributes with the datasets that it wraps.
TRANSFORMS, WRAPPED = ("transform", "target_transform", "transforms"), ("dataset", "datasets")

#: Maximum number of nested datasets that are searched for transforms.
MAX_DATASETS = 16

#: Modules of PIL → class whose method `load` decodes an image.
DECODERS = {
    "PIL.ImageFile": "ImageFile",
    "PIL.WebPImagePlugin": "WebPImageFile",
    "PIL.AvifImagePlugin": "AvifImageFile",
}

#: Beginnings of the paths of Python's own files, and parts of the paths of installed packages.
STANDARD, INSTALLED = ("<", os.path.dirname(os.__file__) + os.sep), ("/site-packages/", "/dist-packages/")  # noqa: PTH120

FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


class ProcessSums:
    """Sums of one process, and the wrapped functions that add to the sums."""

    def __init__(self) -> None:
        self._classes: set[type] = set()
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Reset the sums; a forked process must not write its parent's sums."""
        self._file, self._due, self._lock, self._local = "", 0.0, threading.Lock(), threading.local()
        self._loaders: dict[Any, dict[str, Any]] = {}
        self._datasets: dict[Any, list[Any]] = {}
        self._arrays: dict[Any, dict[str, Any]] = {}
        self._worker: dict[str, Any] = {}
        self._device, self._stopped, self._batches = "", "", 0
        self.on = bool(FOLDER)

    # ---- writing

    def stop(self, error: BaseException) -> None:
        """Stop the watch after an error; the program continues."""
        self._stopped = repr(error)[:200]
        self.write()
        self.on = False

    def guarded(self, wrap: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a function that wraps a module's functions; an error stops the watch, but not the program."""

        def after(module: Any) -> None:
            try:
                wrap(module)
            except Exception as error:  # for example with an unknown version of the library
                self.stop(error)

        return after

    def write_if_due(self, now: float) -> None:
        """Write the sums if the last write is longer ago than `SECONDS`.

        The first write is immediate: it also registers the write at exit, and a worker may live for less than a second.
        """
        if now >= self._due:
            self._due = now + SECONDS
            self.write()

    def write(self) -> None:
        """Write the sums into the process's file."""
        if not (self._loaders or self._worker or self._arrays or self._stopped) or not self._lock.acquire(False):
            return
        try:
            if not self._file:
                self._begin()
            content = {
                "host": os.uname().nodename,
                "pid": os.getpid(),
                "parent": os.getppid(),
                "device": self._device,
                "cores": len(os.sched_getaffinity(0)),
                "stopped": self._stopped,
                "worker": self._worker or None,
                "loaders": list(self._loaders.values()),
                "arrays": [{**each, "files": len(each["files"])} for each in list(self._arrays.values())],
            }
            # Refuse a link, and a pipe without a reader, because another user may have created them.
            own = os.O_NOFOLLOW | os.O_NONBLOCK
            place = open_file(self._file + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | own, 0o666)
            try:
                write_file(place, json.dumps(content).encode())
            finally:
                os.close(place)
            os.replace(self._file + ".new", self._file)
        except Exception:  # a full disk, a removed folder, or too many processes
            self.on = False
        finally:
            self._lock.release()

    def _begin(self) -> None:
        if len(os.listdir(FOLDER)) > MAX_PROCESSES:  # noqa: PTH208 - a list of names is faster
            raise OSError("too many processes")
        self._file = f"{FOLDER}/loader.{os.uname().nodename}.{os.getpid()}"
        atexit.register(self._end, os.getpid())
        if "multiprocessing.util" in sys.modules:  # forked children end without `atexit`
            sys.modules["multiprocessing.util"].Finalize(None, self._end, (os.getpid(),), exitpriority=0)

    def _end(self, pid: int) -> None:
        if self.on and pid == os.getpid():
            self.write()

    # ---- times of nested functions

    def timed(self, part: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and add its duration to a part of the fetch.

        The duration does not include timed functions that the function calls.
        """
        own = self._local.__dict__
        inner, begin = own.setdefault("inner", []), clock()
        inner.append(0.0)
        try:
            return function(*args, **kwargs)
        finally:
            lasted, within = clock() - begin, inner.pop()
            own["lasted"] = lasted
            if inner:
                inner[-1] += lasted
            spent = own.get("spent")
            if spent is not None:
                spent[part] = spent.get(part, 0.0) + lasted - within

    def wrapped(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose duration counts for a part of the fetch."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.timed(part, function, *args, **kwargs)

        with contextlib.suppress(Exception):
            functools.update_wrapper(call, function)
        call._dlscale = True  # type: ignore[attr-defined]
        return call

    # ---- fetching a batch, in a worker or in the training process

    def fetchers(self, module: Any) -> None:
        """Wrap the functions that fetch a batch's samples and collate them."""
        for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
            kind = getattr(module, name)
            kind.fetch = self._fetching(kind.fetch)

    def _fetching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fetch(fetcher: Any, index: Any) -> Any:
            if not self.on:
                return original(fetcher, index)
            swapped: list[tuple[dict[str, Any], str, Any]] = []
            names: list[str] = []
            try:
                self._time_decoders()
                self._swap(fetcher, swapped, names)
            except Exception as error:
                self.stop(error)
            spent = self._local.spent = {}
            begin, cpu = clock(), computed()
            try:
                batch = original(fetcher, index)
            finally:
                now = clock()
                self._local.spent = None
                for own, name, before in reversed(swapped):
                    if before is None:
                        own.pop(name, None)
                    else:
                        own[name] = before
            try:
                self._note_fetch(fetcher, now - begin, computed() - cpu, spent, names)
                self.write_if_due(now)
            except Exception as error:
                self.stop(error)
            return batch

        return fetch

    def _swap(self, fetcher: Any, swapped: list[Any], names: list[str]) -> None:
        """Replace the collating function and the dataset's transforms by timed ones, for the duration of a fetch.

        `swapped` receives the values to restore: namespace, name, and value (None: remove the name).
        """
        if not hasattr(fetcher.collate_fn, "_dlscale"):
            swapped.append((vars(fetcher), "collate_fn", fetcher.collate_fn))
            fetcher.collate_fn = self.wrapped("collate", fetcher.collate_fn)
        datasets = [fetcher.dataset]
        for dataset in datasets:  # the loop also reaches the datasets that it adds
            own = getattr(dataset, "__dict__", {})
            for name in TRANSFORMS:
                if callable(value := own.get(name)):
                    names.append(getattr(value, "__name__", type(value).__name__))
                    self._time_transform(own, name, value, swapped)
            for name in WRAPPED:
                inside = own.get(name)
                if inside is not None and len(datasets) < MAX_DATASETS:
                    datasets += inside[:MAX_DATASETS] if isinstance(inside, (list, tuple)) else [inside]

    def _time_decoders(self) -> None:
        """Time PIL's functions that decode an image, which PIL calls when the image is first used."""
        for module, name in DECODERS.items():
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None and not hasattr(kind.load, "_dlscale"):
                kind.load = self.wrapped("decode", kind.load)

    def _time_transform(self, own: dict[str, Any], name: str, value: Any, swapped: list[Any]) -> None:
        if isinstance(value, FUNCTIONS):
            if not hasattr(value, "_dlscale"):  # otherwise another thread has wrapped the function
                swapped.append((own, name, value))
                own[name] = self.wrapped("transform", value)
        elif "_modules" in getattr(value, "__dict__", {}) and hasattr(value, "forward"):  # torch.nn.Module
            if not hasattr(value.forward, "_dlscale"):
                swapped.append((vars(value), "forward", vars(value).get("forward")))
                vars(value)["forward"] = self.wrapped("transform", value.forward)
        elif type(value) not in self._classes:
            # The class is wrapped instead of the object, so that the object keeps its type.
            self._classes.add(type(value))
            with contextlib.suppress(AttributeError, TypeError):  # a class in C cannot be wrapped
                type(value).__call__ = self.wrapped("transform", type(value).__call__)

    def _note_fetch(self, fetcher: Any, seconds: float, cpu: float, spent: dict[str, float], names: list[str]) -> None:
        worker = sys.modules.get("torch.utils.data._utils.worker")
        info = worker.get_worker_info() if worker else None
        if info:
            sums = self._worker
            # The difference is the seed of the iterator, which the training process also records.
            sums.setdefault("seed", info.seed - info.id)
        else:
            loader = self._local.__dict__.get("loader")
            if loader is None:  # another loader uses PyTorch's functions
                return
            sums = loader["fetch"]
        if "first" not in sums:  # the first batch is separate, because it may open files
            sums.update(first=seconds, batches=0, seconds=0.0, cpu=0.0, parts={}, transforms=names[:MAX_NAMES])
            return
        sums["batches"] += 1
        sums["seconds"] += seconds
        sums["cpu"] += cpu
        for name, part in spent.items():
            sums["parts"][name] = sums["parts"].get(name, 0.0) + part

    # ---- batches in the training process

    def loaders(self, module: Any) -> None:
        """Wrap the functions that create a loader, begin an epoch, and deliver a batch."""
        kind, loader = module._BaseDataLoaderIter, module.DataLoader
        reset, original, make, begin_epochs = kind._reset, kind.__next__, loader.__init__, kind.__init__

        @functools.wraps(make)
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
            make(made, *args, **kwargs)
            with contextlib.suppress(Exception):
                made.__dict__["_dlscale_made"] = place_of_caller(made)

        @functools.wraps(begin_epochs)
        def begin(iterator: Any, made: Any, *args: Any, **kwargs: Any) -> None:
            with contextlib.suppress(Exception):
                iterator.__dict__["_dlscale_made"] = made.__dict__.get("_dlscale_made", "")
            begin_epochs(iterator, made, *args, **kwargs)

        @functools.wraps(reset)
        def _reset(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            iterator.__dict__.pop("_dlscale_end", None)  # the time between epochs is not a step
            return reset(iterator, *args, **kwargs)

        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            if not self.on:
                return original(iterator)
            try:
                if "_dlscale_loader" not in iterator.__dict__:
                    iterator.__dict__["_dlscale_loader"] = self._loader(iterator, module._DatasetKind.Map)
                ready, self._local.loader = _ready(iterator), iterator.__dict__["_dlscale_loader"]
            except Exception as error:
                self.stop(error)
                return original(iterator)
            begin = clock()
            batch = original(iterator)
            now = clock()
            try:
                self._note_batch(iterator, batch, begin, now, ready)
                self.write_if_due(now)
            except Exception as error:
                self.stop(error)
            iterator.__dict__["_dlscale_end"] = clock()
            return batch

        kind._reset, kind.__next__, loader.__init__, kind.__init__ = _reset, __next__, __init__, begin

    def _loader(self, iterator: Any, mapped: Any) -> dict[str, Any] | None:
        """Return the record of an iterator's loader.

        Loaders with equal settings have one record if they are made in the same line, for the same dataset. A dataset
        that replaces a deleted dataset counts as the same.
        """
        dataset, workers = iterator._dataset, iterator._num_workers
        known = {
            "dataset": type(dataset).__name__,
            # `len` is safe for a map-style dataset, because PyTorch's samplers also call it.
            "length": len(dataset) if iterator._dataset_kind == mapped and hasattr(dataset, "__len__") else None,
            "workers": workers,
            "batch_size": getattr(iterator._index_sampler, "batch_size", None),
            "pin_memory": bool(iterator._pin_memory),
            "prefetch": getattr(iterator, "_prefetch_factor", None) if workers else None,
            "persistent": bool(getattr(iterator, "_persistent_workers", False)),
        }
        made = known["made"] = iterator.__dict__.get("_dlscale_made", "")
        known["order"] = self._order((*known.values(), made), dataset)
        key = tuple(known.values())
        if key not in self._loaders and len(self._loaders) < MAX_LOADERS:
            self._loaders[key] = {
                **known,
                **{"seeds": [], "batches": 0, "waited": 0.0, "firsts": 0, "first_waited": 0.0, "between": []},
                **{"requests": 0, "ready": 0, "empty": 0, "sized": 0, "bytes": 0, "pinned": 0, "fetch": {}},
            }
        record = self._loaders.get(key)
        if record and len(record["seeds"]) < MAX_SEEDS:
            record["seeds"].append(iterator._base_seed)
        return record

    def _order(self, key: Any, dataset: Any) -> int:
        """Return the number of a dataset among the datasets whose loaders have the same settings."""
        try:
            reference = weakref.ref(dataset)
        except TypeError:  # a list, for example, has no weak references
            return 0
        known = self._datasets.setdefault(key, [])
        found = [each() for each in known]
        order = next((number for number, each in enumerate(found) if each is dataset), -1)
        if order < 0:
            order = next((number for number, each in enumerate(found) if each is None), len(known))
            known[order : order + 1] = [reference]
        return order

    def _note_batch(self, iterator: Any, batch: Any, begin: float, now: float, ready: int | None) -> None:
        record, end = iterator.__dict__["_dlscale_loader"], iterator.__dict__.get("_dlscale_end")
        if record is None:
            return
        if end is None:
            record["firsts"] += 1
            record["first_waited"] += now - begin
        else:
            record["between"].append(round(begin - end, 6))
            if len(record["between"]) > MAX_TIMES:
                del record["between"][0]
            record["batches"] += 1
            record["waited"] += now - begin
            if ready is not None:
                record["requests"] += 1
                record["ready"] += ready
                record["empty"] += not ready
        self._batches += 1
        if self._device not in ("", "cpu") and (self._batches <= ALWAYS or self._batches % EVERY == 0):
            record["sized"] += 1
            for each in _tensors(batch):
                if each.device.type == "cpu":
                    size = each.numel() * each.element_size()
                    record["bytes"] += size
                    record["pinned"] += size if each.is_pinned() else 0

    def optimizers(self, module: Any) -> None:
        """Record the device of the weights that the first optimiser updates."""
        torch = sys.modules["torch"]

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._device or getattr(getattr(torch, "compiler", None), "is_compiling", bool)():
                return
            try:
                self._device = next(p.device.type for group in optimizer.param_groups for p in group["params"])
            except Exception as error:
                self.stop(error)

        if hasattr(module, "register_optimizer_step_post_hook"):  # missing in PyTorch 1
            module.register_optimizer_step_post_hook(stepped)

    # ---- reads of HDF5 and Zarr

    def h5py(self, module: Any) -> None:
        """Wrap the functions that read from an HDF5 dataset."""
        kind = module.Dataset
        kind.__getitem__ = self._reading(kind.__getitem__, "HDF5", _hdf5)
        kind.read_direct = self._reading(kind.read_direct, "HDF5", _hdf5, 1, "source_sel")

    def zarr(self, module: Any) -> None:
        """Wrap the functions that read from a Zarr array, of versions 2 and 3."""
        for name in ("__getitem__", "get_basic_selection", "get_orthogonal_selection"):
            setattr(module.Array, name, self._reading(getattr(module.Array, name), "Zarr", _zarr))

    def _reading(
        self, original: Callable[..., Any], kind: str, describe: Any, place: int = 0, keyword: str = "selection"
    ) -> Callable[..., Any]:
        """Wrap a function that reads a selection of an array.

        After the array, the selection is the positional argument number `place`, or the argument `keyword`.
        """

        @functools.wraps(original)
        def read(array: Any, *args: Any, **kwargs: Any) -> Any:
            own = self._local.__dict__
            if not self.on or own.get("reading"):  # a wrapped function called by another wrapped function
                return original(array, *args, **kwargs)
            record, before = None, None
            try:
                record = self._array(kind, array, describe)
                record["requests"] += 1
                if kind == "HDF5" and (record["requests"] <= ALWAYS or record["requests"] % EVERY == 0):
                    before = _bytes_read()
            except Exception as error:
                self.stop(error)
            own["reading"] = True
            try:
                values = self.timed("read", original, array, *args, **kwargs)
            finally:
                own["reading"] = False
            try:
                if record:
                    record["seconds"] += own["lasted"]
                    after = _bytes_read() if before is not None else None
                    selection = args[place] if len(args) > place else kwargs.get(keyword, ())
                    requested = self._note_request(record, array, selection)
                    used = int(getattr(values, "nbytes", requested))
                    if used and before is not None and after is not None:
                        record["measured_used"] += used
                        record["measured_read"] += after - before
                    self.write_if_due(clock())
            except Exception as error:
                self.stop(error)
            return values

        return read

    def _array(self, kind: str, array: Any, describe: Any) -> dict[str, Any]:
        """Return the record of an array; arrays of several files with equal names and layouts have one record."""
        own = vars(array) if kind == "HDF5" else {}
        sums, record = own.get("_dlscale", (None, None))
        if sums is not self._arrays:  # the array is new, or a parent process has opened it
            name, file, layout = describe(array)
            key = (kind, name, layout["dtype"], str(layout["chunks"]), layout["compression"])
            if key not in self._arrays and len(self._arrays) >= MAX_ARRAYS:
                key = next(iter(self._arrays))
            if key not in self._arrays:
                self._arrays[key] = {
                    **{"kind": kind, "name": name, "file": file, "files": set(), **layout, "regions": {}},
                    **{"opens": 0, "requests": 0, "seconds": 0.0, "requested": 0, "touched": 0},
                    **{"measured_used": 0, "measured_read": 0},
                }
            record = self._arrays[key]
            record["opens"] += 1
            if len(record["files"]) < MAX_FILES:
                record["files"].add(file)
            own["_dlscale"] = (self._arrays, record)
        return record

    def _note_request(self, record: dict[str, Any], array: Any, selection: Any) -> int:
        """Add the bytes of a request, and of the chunks that it touches; return the bytes of the request."""
        found = spans(tuple(array.shape), selection)
        if not found:
            return 0
        counts, size, chunks = [count for _, _, count in found], record["itemsize"], record["chunks"]
        requested = int(math.prod(counts) * size)
        record["requested"] += requested
        if chunks:
            along = [last // chunks[axis] - first // chunks[axis] + 1 for axis, (first, last, _) in enumerate(found)]
            touched = math.prod(min(each, counts[axis]) for axis, each in enumerate(along))
            record["touched"] += touched * math.prod(chunks) * size
        region = " × ".join(map(str, counts))
        if region in record["regions"] or len(record["regions"]) < MAX_REGIONS:
            record["regions"][region] = record["regions"].get(region, 0) + 1
        return requested


def spans(shape: tuple[int, ...], selection: Any) -> list[tuple[int, int, int]]:
    """Return the first index, last index and number of indices that a selection takes along each axis.

    Return an empty list for an empty selection, and for selections other than integers, slices and `...`.
    """
    parts = list(selection) if isinstance(selection, tuple) else [selection]
    whole = [number for number, part in enumerate(parts) if part is Ellipsis]
    known = all(isinstance(p, slice) or p is Ellipsis or (hasattr(p, "__index__") and not _has_axes(p)) for p in parts)
    if not known or len(whole) > 1:
        return []
    place = whole[0] if whole else len(parts)
    parts[place : place + 1] = [slice(None)] * (len(shape) - len(parts) + len(whole))
    found = []
    for part, size in zip(parts, shape):  # noqa: B905 - Python 3.8 has no `strict`
        indices = range(*part.indices(size)) if isinstance(part, slice) else [int(part) % max(size, 1)]
        if not indices:
            return []
        found.append((min(indices[0], indices[-1]), max(indices[0], indices[-1]), len(indices)))
    return found if len(parts) == len(shape) else []


def _has_axes(part: Any) -> bool:
    return bool(getattr(part, "shape", ()))


def place_of_caller(made: Any = None) -> str:
    """Return the innermost calling line outside of packages, as `FILE:LINE`; empty if unknown.

    Without such a line, return the innermost line outside of torch. Lines in methods of the object `made` do not count,
    such as in `__init__` of a program's own class of loaders.
    """
    torch = os.path.dirname(str(sys.modules["torch"].__file__))  # noqa: PTH120
    frame: Any = sys._getframe(1)
    places = []
    while frame:
        file = frame.f_code.co_filename
        own = made is not None and frame.f_code.co_argcount and frame.f_locals.get(frame.f_code.co_varnames[0]) is made
        if not own and file != __file__ and (not file.startswith(STANDARD) or any(part in file for part in INSTALLED)):
            places.append((file, frame.f_lineno))
        frame = frame.f_back
    # Leave out the line of a command in `bin` that only starts the program, which is then a package.
    apart = (*INSTALLED, f"{torch}{os.sep}", f"{os.path.dirname(sys.executable)}{os.sep}")  # noqa: PTH120
    outside = [each for each in places if not any(part in each[0] for part in apart)]
    file, line = next(iter(outside or [each for each in places if not each[0].startswith(torch)]), ("", 0))
    here = os.getcwd() + os.sep  # noqa: PTH109
    return f"{file[len(here) :] if file.startswith(here) else file}:{line}" if file else ""


def _ready(iterator: Any) -> int | None:
    """Return the number of batches that wait for the training process; None without workers."""
    try:
        queued = iterator._data_queue.qsize()
        return int(queued + sum(len(info) == 2 for info in iterator._task_info.values()))
    except Exception:
        return None


def _tensors(batch: Any, depth: int = 3) -> list[Any]:
    """Return the tensors in a batch of nested lists and dictionaries."""
    if hasattr(batch, "is_pinned") and hasattr(batch, "element_size"):
        return [batch]
    parts = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else []
    return [each for part in parts[:32] for each in _tensors(part, depth - 1)] if depth else []


def _bytes_read() -> int | None:
    """Return the bytes that read calls of this thread have returned, also from the page cache; None if unknown."""
    try:
        place = open_file("/proc/thread-self/io", os.O_RDONLY)
    except OSError:  # the system may forbid access
        return None
    try:
        return int(read_file(place, 64).split()[1])
    finally:
        os.close(place)


def _hdf5(dataset: Any) -> tuple[str, str, dict[str, Any]]:
    """Return the name, the file and the layout of an HDF5 dataset."""
    chunks, stored, filters = dataset.chunks, 1.0, dataset.id.get_create_plist().get_nfilters()
    if filters and dataset.size:
        stored = dataset.id.get_storage_size() / (dataset.size * dataset.dtype.itemsize)
    cache = dataset.id.get_access_plist().get_chunk_cache()[1] if chunks else 0
    compression = dataset.compression or ("filters" if filters else "")
    return dataset.name or "", dataset.file.filename, _layout(dataset, chunks, compression, cache, stored)


def _zarr(array: Any) -> tuple[str, str, dict[str, Any]]:
    """Return the name, the folder or URL, and the layout of a Zarr array; its chunks are those inside shards."""
    if hasattr(array, "compressors"):
        compression = ", ".join(type(each).__name__ for each in array.compressors)
    else:  # Zarr 2
        compression = getattr(array.compressor, "codec_id", "")
    place = getattr(array.store, "root", None) or getattr(array.store, "path", "")
    name = (array.name or "").strip("/") or os.path.basename(str(place).rstrip("/"))  # noqa: PTH119 - may be a URL
    return name, str(place), _layout(array, array.chunks, compression, 0, 1.0)


def _layout(array: Any, chunks: Any, compression: str, cache: int, stored: float) -> dict[str, Any]:
    return {
        **{"dtype": str(array.dtype), "itemsize": int(array.dtype.itemsize), "compression": compression},
        **{"chunks": list(chunks) if chunks else None, "cache": cache, "stored": round(stored, 4)},
    }


def start(log: Any) -> dict[str, Callable[[Any], None]]:
    """Return the functions that dlscale's hook calls after the imports of modules."""
    watch = ProcessSums()
    wraps = {
        "torch.optim.optimizer": watch.optimizers,
        "torch.utils.data._utils.fetch": watch.fetchers,
        "torch.utils.data.dataloader": watch.loaders,
        "h5py": watch.h5py,
        "zarr": watch.zarr,
    }
    return {name: watch.guarded(wrap) for name, wrap in wraps.items()}
