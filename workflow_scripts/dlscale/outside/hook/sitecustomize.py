"""Watches the steps of a PyTorch program that knows nothing of it: Python loads this file as it starts.

`dlscale measure` puts this folder first on PYTHONPATH. When the program imports PyTorch, two of its functions are
wrapped: each optimiser's step, and the next batch of each loader. A `sitecustomize` that this one hides is loaded as
well. For Python 3.8 and later.
"""

from __future__ import annotations

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
        module.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._log.step())

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
                    log.step()
                    return found

                step._dlscale = True  # type: ignore[attr-defined]
                type(self).step = step

        module.Optimizer.__init__ = made

    def _loaders(self, module: Any) -> None:
        clock, samples_of, iterator = self._timed.time.perf_counter, self._timed.samples_of, module._BaseDataLoaderIter
        original, note, numbers = iterator.__next__, self._log.batch, itertools.count()

        def following(self: Any) -> Any:
            begin = clock()
            batch = original(self)
            wait = clock() - begin
            if not hasattr(self, "_dlscale_number"):
                self._dlscale_number = next(numbers)
            note(self._dlscale_number, wait, samples_of(batch))
            return batch

        iterator.__next__ = following


def load_hidden() -> None:
    """Load the `sitecustomize` that this one hides."""
    path = [place for place in sys.path if Path(place).resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec and spec.origin:
        load("sitecustomize", spec.origin)


if os.environ.get("DLSCALE_STEPS"):
    sys.meta_path.insert(0, Watcher())
load_hidden()
