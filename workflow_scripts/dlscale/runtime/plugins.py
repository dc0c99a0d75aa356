"""Parts that only some datasets or runs need: a simulator, a study, a loader.

They are imported by name, and `dlscale.runtime.stages` tells the fingerprint the same names. So
editing the vision transformer leaves the U-Net's results alone. (Plain names, not settings, are the
arguments: whoever imports this module shall not depend on all schemas.)
"""

from __future__ import annotations

import importlib
from types import ModuleType


def plugin(module: str) -> ModuleType:
    """Import a module that a function of this module names."""
    return importlib.import_module(module)


def acquisition(kind: str, source: str) -> str | None:
    """Return the module that acquires raw files of a kind of dataset, if they are not simply there or fetched."""
    if source == "simulated":
        return f"dlscale.data.{kind}_simulator"
    if source == "zarr":
        return "dlscale.data.era5_zarr"
    return None


def reader(kind: str) -> str:
    """Return the module that reads raw files of a kind of dataset."""
    return f"dlscale.data.{kind}"


def study(name: str) -> str:
    """Return the module of a study."""
    return f"dlscale.studies.{name}"


def loader(kind: str) -> str:
    """Return the module of a kind of loader."""
    return f"dlscale.data.loaders.{kind}_loader"
