"""Watches the steps of a PyTorch program that knows nothing of it: Python loads this file as it starts.

`dlscale measure` puts this folder first on PYTHONPATH. When the program imports PyTorch, two of its functions are
wrapped: each optimiser's step, and the next batch of each loader. A `sitecustomize` that this one hides is loaded as
well. For Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def load(name: str, place: str | Path) -> Any:
    """Return the module in a file."""
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Watcher:
    """Wraps functions of PyTorch's modules when these are imported."""

    def __init__(self) -> None:
        self._timed = load("dlscale_timed", HERE.parent / "timed.py")
        self._log = self._timed.Log("seen")
        with contextlib.suppress(OSError):  # a program that removed the folder runs all the same
            Path(os.environ["DLSCALE_STEPS"], "hook").touch()
        self._window: Any = None
        self._after = {"torch.optim.optimizer": self._optimizers, "torch.utils.data.dataloader": self._loaders}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module as Python would, and have its functions wrapped when it was made."""
        then = self._after.pop(name, None)
        spec = PathFinder.find_spec(name, path, target) if then else None
        if then and spec and spec.loader:
            make = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                make(module)
                try:
                    then(module)
                except Exception as error:  # of another version of PyTorch: the program runs all the same
                    print(f"dlscale measure: steps are not seen: {error!r}", file=sys.stderr)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _optimizers(self, module: Any) -> None:
        if not hasattr(module, "register_optimizer_step_post_hook"):
            self._optimizers_of_pytorch_1(module)
            return
        torch, known = sys.modules["torch"], set()

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            # In a step that is compiled nothing can be noted; PyTorch 2.0 has no such function, and `bool()` is False.
            if getattr(getattr(torch, "compiler", None), "is_compiling", bool)():
                return
            if id(optimizer) not in known:
                known.add(id(optimizer))
                self._log.gradients(followed(optimizer))
            self._log.step(id(optimizer))

        module.register_optimizer_step_post_hook(stepped)
        if os.environ.get("DLSCALE_PROFILE") and not self._timed.rank():
            window = load("dlscale_window", HERE.parent / "window.py").Window(os.environ["DLSCALE_STEPS"])
            module.register_optimizer_step_pre_hook(
                lambda optimizer, args, kwargs: window.optimizing(any(map(callable, [*args[1:], *kwargs.values()])))
            )
            module.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: window.step())
            self._window = window

    def _optimizers_of_pytorch_1(self, module: Any) -> None:
        """Wrap the step of each class of optimizers when the first one is made: there is no hook for all."""
        make, log = module.Optimizer.__init__, self._log

        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            original = type(self).step
            if not hasattr(original, "_dlscale"):

                @functools.wraps(original)
                def step(self: Any, *args: Any, **kwargs: Any) -> Any:
                    found = original(self, *args, **kwargs)
                    log.step(id(self))
                    return found

                step._dlscale = True  # type: ignore[attr-defined]
                type(self).step = step

        module.Optimizer.__init__ = made

    def _loaders(self, module: Any) -> None:
        clock, samples_of, iterator = self._timed.clock, self._timed.samples_of, module._BaseDataLoaderIter
        original, note, numbers = iterator.__next__, self._log.batch, itertools.count()
        next_index = iterator._next_index

        def index_of_next(self: Any) -> Any:
            index = next_index(self)
            if self._auto_collation and self._dataset_kind == module._DatasetKind.Map and hasattr(index, "__len__"):
                self.__dict__.setdefault("_dlscale_samples", []).append(len(index))
            return index

        def following(loader: Any) -> Any:
            begin = clock()
            if self._window is None or not self._window.open:
                batch = original(loader)
            else:
                with self._window.range("data"):
                    batch = original(loader)
            wait = clock() - begin
            own = loader.__dict__
            if "_dlscale_number" not in own:
                own["_dlscale_number"] = next(numbers)
            drawn = own.get("_dlscale_samples")  # whatever batches are made of
            note(own["_dlscale_number"], wait, drawn.pop(0) if drawn else samples_of(batch))
            return batch

        iterator.__next__, iterator._next_index = following, index_of_next


def followed(optimizer: Any) -> int:
    """Return the bytes of the gradients that an optimiser follows; 0 of one that does not tell."""
    try:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        return sum(each.numel() * each.element_size() for each in weights if each.requires_grad)
    except Exception:  # of another form: the program goes on
        return 0


def load_hidden() -> None:
    """Load the `sitecustomize` that this one hides."""
    path = [place for place in sys.path if Path(place).resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec and spec.origin:
        load("sitecustomize", spec.origin)


def let_look() -> None:
    """Let who profiles, and its children, look into this process, where Linux lets none but ancestors (Yama)."""
    import ctypes

    ctypes.CDLL(None).prctl(0x59616D61, int(os.environ["DLSCALE_PROFILE"]), 0, 0, 0)  # PR_SET_PTRACER


def write_whole_lines() -> None:
    """Let a process of several write each line at once: they share a log, in which parts of lines would mix."""
    sizes = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
    if all(os.environ.get(name, "1") in ("", "1") for name in sizes):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced
            if not stream.isatty():
                stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


if os.environ.get("DLSCALE_STEPS"):
    write_whole_lines()
if os.environ.get("DLSCALE_PROFILE"):
    let_look()
    os.register_at_fork(after_in_child=let_look)
if os.environ.get("DLSCALE_STEPS"):
    sys.meta_path.insert(0, Watcher())
load_hidden()
