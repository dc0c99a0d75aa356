"""Watch the steps of an unchanged PyTorch program: Python loads this file when it starts.

dlscale puts this folder first on the program's PYTHONPATH. When the program imports PyTorch, the hook wraps functions
of PyTorch: the step of each optimiser, and the functions that deliver a loader's batches. If this file hides another
`sitecustomize`, the hook loads the other file as well. The environment is read once, when this file is loaded. An error
of the hook does not reach the program: the hook stops, and writes the reason into the folder of steps. For Python 3.8
and later.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import sys
import weakref
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

#: Folder into which steps are written, and process id of `dlscale measure --profile`; empty texts if not requested.
STEPS, PROFILED = os.environ.get("DLSCALE_STEPS", ""), os.environ.get("DLSCALE_PROFILE", "")

#: Whether dlscale reads the program's output, and needs complete lines.
READ = bool(os.environ.get("DLSCALE_READ"))

#: Files of extensions, separated by colons: absolute paths, or paths relative to the folder of extensions. A file has a
#: function `start(log)`; `log` has the steps. The function returns a table: module → function that wraps functions of
#: the module after its import.
HOOKS = os.environ.get("DLSCALE_HOOKS", "")

#: Module whose loaders request each batch before they deliver the previous batch.
READS_AHEAD = "accelerate.data_loader"

#: Maximum number of models in evaluation mode whose return to training is awaited.
MAX_MODELS = 16

#: Loaded files of extensions, in which `timed.py` looks for the functions `begin` and `loop`.
EXTENSIONS: list[Any] = []

#: Object that watches this process; None without a measurement.
WATCHER: Any = None


def load(name: str, place: str | Path) -> Any:
    """Load a module from a file."""
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Watcher:
    """Wrap functions of PyTorch's modules when the modules are imported."""

    def __init__(self) -> None:
        self._timed = load("dlscale_timed", HERE.parent / "timed.py")
        self._log = self._timed.Log("seen")
        with contextlib.suppress(OSError):  # the program may have removed the folder
            Path(STEPS, "hook").touch()
            Path(STEPS, f"python.{os.uname().nodename}.{os.getpid()}").touch()
        self._window: Any = None
        self._known: dict[int, tuple[int, Any]] = {}
        self._numbers = itertools.count(1)
        self._after = {
            "torch.optim.optimizer": [self._optimizers],
            "torch.utils.data.dataloader": [self._loaders],
            "torch.nn.modules.module": [self._modes],
        }
        for file in filter(None, HOOKS.split(os.pathsep)):
            with contextlib.suppress(Exception):  # the steps are noted without the extension
                module = load(f"dlscale_{Path(file).parent.name}", HERE.parents[1] / file)
                for name, then in module.start(self._log).items():
                    self._after.setdefault(name, []).append(then)
                EXTENSIONS.append(module)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module as Python would, and wrap its functions after it is executed."""
        then = self._after.get(name)
        if not then:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec and spec.loader:
            make = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                make(module)
                try:
                    for wrap in then:
                        wrap(module)
                except Exception as error:  # for example with an unknown version of PyTorch
                    self._log.stop(error)

            with contextlib.suppress(AttributeError):  # a module loader with `__slots__` cannot be wrapped
                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    @property
    def stepped(self) -> float:
        """Time of the process's last step."""
        return float(self._log.stepped)

    def _modes(self, module: Any) -> None:
        """Note the times from a model's `eval()` until its `train()`, in which programs validate."""
        evaluated: dict[int, tuple[float, Any]] = {}
        log, clock, original, within = self._log, self._timed.clock, module.Module.train, False

        @functools.wraps(original)
        def train(model: Any, mode: bool = True) -> Any:
            nonlocal within
            if within:  # a part of the model
                return original(model, mode)
            within = True
            try:
                found = original(model, mode)
            finally:
                within = False
            with contextlib.suppress(Exception):  # another thread changed the table
                begin, own = evaluated.get(id(model), (0.0, None))
                if own is None or own() is not model:
                    if not mode:
                        evaluated[id(model)] = clock(), weakref.ref(model)
                        if len(evaluated) > MAX_MODELS:
                            del evaluated[next(iter(evaluated))]
                elif mode:
                    del evaluated[id(model)]
                    log.span("v", begin, clock())
            return found

        module.Module.train = train

    def _optimizers(self, module: Any) -> None:
        with contextlib.suppress(OSError):
            Path(STEPS, "pytorch").touch()
        if not hasattr(module, "register_optimizer_step_post_hook"):
            self._optimizers_of_pytorch_1(module)
            return
        torch, log = sys.modules["torch"], self._log

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            try:
                # A compiled step cannot be noted. PyTorch 2.0 lacks `is_compiling`: use `bool()`, which is False.
                if getattr(getattr(torch, "compiler", None), "is_compiling", bool)():
                    return
                self._step(optimizer)
            except Exception as error:
                log.stop(error)

        module.register_optimizer_step_post_hook(stepped)
        if PROFILED and not self._timed.rank():
            window = load("dlscale_window", HERE.parent / "window.py").Window(STEPS)
            module.register_optimizer_step_pre_hook(
                lambda optimizer, args, kwargs: window.optimizing((*args[1:], *kwargs.values()))
            )
            module.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: window.step())
            self._window = window

    def _step(self, optimizer: Any) -> None:
        """Note an optimiser's step, except in a loader's worker, whose optimiser only helps to make a sample."""
        if getattr(sys.modules.get("torch.utils.data._utils.worker"), "_worker_info", None) is None:
            self._log.step(self._number(optimizer))

    def _number(self, optimizer: Any) -> int:
        """Return an optimiser's number.

        An address does not identify an optimiser: a new optimiser may have the address of a deleted optimiser.
        """
        number, own = self._known.get(id(optimizer), (0, None))
        if own is None or own() is not optimizer:
            try:
                number, own = next(self._numbers), weakref.ref(optimizer)
            except TypeError:  # an optimiser with `__slots__` has no weak references
                return id(optimizer)
            self._known[id(optimizer)] = number, own
            self._log.fact("p", followed(optimizer))
        return number

    def _optimizers_of_pytorch_1(self, module: Any) -> None:
        """Wrap the step of each optimiser class when its first instance is made.

        PyTorch 1 lacks a hook for all classes.
        """
        make, log = module.Optimizer.__init__, self._log

        note = self._step

        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            original = getattr(type(self), "step", None)
            if original and not hasattr(original, "_dlscale"):

                @functools.wraps(original)
                def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                    found = original(self, *args, **kwargs)
                    try:
                        note(self)
                    except Exception as error:
                        log.stop(error)
                    return found

                step._dlscale = True  # type: ignore[attr-defined]
                type(self).step = step

        module.Optimizer.__init__ = made

    def _loaders(self, module: Any) -> None:
        clock, samples_of, iterator = self._timed.clock, self._timed.samples_of, module._BaseDataLoaderIter
        is_short, is_several, short_of = self._timed.is_short, self._timed.is_several, self._timed.short_of
        original, next_index, reset = iterator.__next__, iterator._next_index, iterator._reset
        make, several = module.DataLoader.__iter__, module._MultiProcessingDataLoaderIter
        shut_down = several._shutdown_workers
        log, note, numbers = self._log, self._log.batch, itertools.count()

        def index_of_next(loader: Any) -> Any:
            index = next_index(loader)
            try:
                own = loader.__dict__
                if loader._auto_collation and loader._dataset_kind == module._DatasetKind.Map:
                    own.setdefault("_dlscale_samples", []).append(length(index))
                    own["_dlscale_largest"] = max(own.get("_dlscale_largest", 0), length(index))
                elif loader._auto_collation:
                    own["_dlscale_size"] = length(index)
            except Exception as error:
                log.stop(error)
            return index

        def begin_anew(loader: Any, *args: Any, **kwargs: Any) -> Any:
            loader.__dict__.pop("_dlscale_samples", None)  # drop sizes of batches that the last epoch did not use
            # With persistent workers, an iterator is used again: count each loop as another iterator.
            if loader.__dict__.pop("_dlscale_number", None) is not None:
                log.notify()
            return reset(loader, *args, **kwargs)

        def following(loader: Any) -> Any:
            begin, window = clock(), self._window
            try:
                if window is None or not window.open:
                    batch = original(loader)
                else:
                    with window.range("data"):
                        batch = original(loader)
            except BaseException as error:
                if drawn := loader.__dict__.get("_dlscale_samples"):  # drop the size of the failed batch
                    drawn.pop(0)
                if isinstance(error, StopIteration):
                    end(loader, begin)
                raise
            try:
                wait, own = clock() - begin, loader.__dict__
                if "_dlscale_number" not in own:
                    own["_dlscale_number"] = next(numbers)
                    if (count := copies(loader)) > 1:
                        log.fact("c", own["_dlscale_number"], count)
                    if sys._getframe(1).f_globals.get("__name__") == READS_AHEAD:
                        log.fact("a", own["_dlscale_number"])
                    log.notify()
                drawn = own.get("_dlscale_samples")  # the sampler's counts do not depend on the type of batch
                if drawn:
                    samples = drawn.pop(0)
                    short = samples > 1 and not samples_of(batch, samples) and is_short(batch, samples)
                    if short or (own["_dlscale_largest"] == 1 and is_several(batch)):
                        samples = 0
                else:
                    size = own.get("_dlscale_size", 0)
                    samples = samples_of(batch, size) or short_of(batch, size)
                if span := own.pop("_dlscale_started", ()):
                    log.span("i", *span, own["_dlscale_number"])
                note(own["_dlscale_number"], wait, samples)
            except Exception as error:
                log.stop(error)
            return batch

        def started(loader: Any) -> Any:
            begin, made = clock(), make(loader)
            with contextlib.suppress(Exception):  # the iterator of another class
                made.__dict__["_dlscale_started"] = begin, clock()
            return made

        def ended(loader: Any) -> None:
            begin = clock()
            shut_down(loader)
            end(loader, begin)

        def end(loader: Any, begin: float) -> None:
            with contextlib.suppress(Exception):  # at the end of the process
                if (number := loader.__dict__.get("_dlscale_number")) is not None:
                    log.span("e", begin, clock(), number)

        iterator.__next__, iterator._next_index, iterator._reset = following, index_of_next, begin_anew
        module.DataLoader.__iter__, several._shutdown_workers = started, ended


def copies(loader: Any) -> int:
    """Return the number of processes that get the same batches from `DistributedSampler`; 1 for other samplers."""
    try:
        sampler = loader._index_sampler
        return int(
            sys.modules["torch.distributed"].get_world_size() // getattr(sampler, "sampler", sampler).num_replicas
        )
    except Exception:  # another sampler, or a single process
        return 1


def length(index: Any) -> int:
    """Return the number of samples that a sampler chose for a batch; 0 if the number is unknown.

    The number is unknown if each index is itself a list of indices, such as from a `BatchSampler` passed as `sampler`,
    and if indices are a part of a request, such as {"ids": [3, 5], "size": 224} or (224, [3, 5]).
    """
    try:
        number = len(index)  # raises for an iterator, whose first item `next` would consume
        first = next(iter(index), None)
        several = isinstance(first, (list, set, range, slice)) or bool(getattr(first, "shape", ()))
        mixed = isinstance(index, dict) or (isinstance(index, (list, tuple)) and type(index[0]) is not type(index[-1]))
        return 0 if several or mixed else number
    except Exception:
        return 0


def followed(optimizer: Any) -> int:
    """Return the bytes of the gradients that an optimiser uses; 0 if the size is unknown."""
    try:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        return sum(each.numel() * each.element_size() for each in weights if each.requires_grad)
    except Exception:  # an unusual optimiser: the program continues
        return 0


def hidden() -> str | None:
    """Return the file of another `sitecustomize` that this file hides; None without such a file."""
    try:
        path = [place for place in sys.path if Path(place).resolve() != HERE]
        spec = PathFinder.find_spec("sitecustomize", path)
    except Exception:
        return None
    return spec.origin if spec else None


def let_look() -> None:
    """Allow `dlscale measure` and its children, such as py-spy, to read this process.

    Without this permission, Linux (Yama) may allow only ancestors to read a process.
    """
    import ctypes

    ctypes.CDLL(None).prctl(0x59616D61, int(PROFILED), 0, 0, 0)  # PR_SET_PTRACER


def write_whole_lines() -> None:
    """Make this process write complete lines if dlscale reads the lines, or if the program has several processes.

    Parts of lines of several processes would mix in a shared log. A terminal's stream does not change. An unbuffered
    stream (`python -u`, PYTHONUNBUFFERED) loses no output at a kill. Such a stream changes only if dlscale reads the
    lines: then dlscale has set PYTHONUNBUFFERED itself, and forked processes would write parts of lines.
    """
    sizes = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
    if not READ and all(os.environ.get(name, "1") in ("", "1") for name in sizes):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the stream is closed, or was replaced
            if not stream.isatty() and (READ or not stream.write_through):  # type: ignore[union-attr]
                stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def start() -> None:
    """Watch this process if the environment requests steps or a profile."""
    global WATCHER
    if PROFILED:
        with contextlib.suppress(Exception):  # Python may lack ctypes
            let_look()
            os.register_at_fork(after_in_child=let_look)
    if STEPS:
        try:
            write_whole_lines()
            WATCHER = Watcher()
            sys.meta_path.insert(0, WATCHER)
        except Exception as error:
            with contextlib.suppress(Exception):
                Path(STEPS, f"stopped.{os.uname().nodename}.{os.getpid()}").write_text(f"seen {error!r}\n")


start()
if found := hidden():
    load("sitecustomize", found)
