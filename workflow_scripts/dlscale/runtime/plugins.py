"""Parts that only some datasets or runs need: a simulator, a study, a loader.

They are imported by name, and `dlscale.runtime.stages` tells the fingerprint the same names. So
editing the vision transformer leaves the U-Net's results alone.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from dlscale.runtime.schema.dataset import Dataset
from dlscale.runtime.schema.run import RunCore


def plugin(module: str) -> ModuleType:
    """Import a module that a function of this module names."""
    return importlib.import_module(module)


def acquisition(dataset: Dataset) -> str | None:
    """Return the module that acquires this dataset's raw files, if they are not simply there."""
    if dataset.source.kind == "simulated":
        return f"dlscale.data.{dataset.kind}_simulator"
    if dataset.source.kind == "zarr":
        return "dlscale.data.era5_zarr"
    return None


def kind(dataset: Dataset) -> str:
    """Return the module that reads this kind of dataset's raw files."""
    return f"dlscale.data.{dataset.kind}"


def study(run: RunCore) -> str:
    """Return the module of the run's study."""
    return f"dlscale.studies.{run.study}"


def loader(run: RunCore) -> str:
    """Return the module of the run's loader."""
    return f"dlscale.data.loaders.{run.loader.kind}_loader"
