"""Writes simulated boxes; `dlscale.datasets.cosmo.dynamics` says what is in them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from pydantic import Field, PositiveFloat

from dlscale.core.files import whole
from dlscale.core.settings import validate
from dlscale.datasets.cosmo.channels import CHANNELS
from dlscale.datasets.cosmo.dynamics import Physics, evolve, gaussian_field, power_spectrum


class Box(Physics):
    """A box, and what is simulated in it."""

    grid: int = Field(ge=8, multiple_of=2)  # N, cells a side
    box_mpc_h: PositiveFloat  # side of the periodic box, Mpc/h
    seed: int = Field(ge=0, lt=2**64)  # which universe
    index: int = Field(ge=0, lt=2**64)  # which box of the universe


def simulate_box(
    path: str | os.PathLike[str], *, progress: Callable[[str], None] | None = None, **settings: float
) -> None:
    """Simulate one box and write it to `path` (HDF5), whole or not at all.

    `/Nbody` [4, N, N, N] and `/Hydro` [5, N, N, N] are float32, contiguous, and carry `channels` and `units`
    (see `CHANNELS`). The file's attributes are the values of `Box`.

    The box is a pure function of the settings: with the same libraries on the same kind of processor, bit by bit.
    Every (seed, index) is the key of a counter-based generator, so boxes are independent, and any one can be made
    without the others. Memory peaks at about 65 bytes a voxel (9 GB at 512³); one core takes about 1 µs a voxel.

    Parameters
    ----------
    path
        The file to write.
    progress
        Called with the name of each phase as it begins.
    **settings
        Fields of `Box` by name.

    Raises
    ------
    UserError
        A bad setting, or nowhere to write.
    """
    box = validate(Box, settings, "simulated box")
    tell = progress or (lambda phase: None)
    with whole(path) as temporary, h5py.File(temporary, "w") as file:
        file.attrs.update({name: np.uint64(v) if name in ("seed", "index") else v for name, v in box})
        for name, (channels, units, _) in CHANNELS.items():
            dataset = file.create_dataset(name, (len(channels), *[box.grid] * 3), np.float32, track_times=False)
            dataset.attrs["channels"], dataset.attrs["units"] = channels, units
        tell("initial field")
        rng = np.random.Generator(np.random.Philox(key=np.array([box.seed, box.index], dtype=np.uint64)))
        delta = gaussian_field(box.grid, box.box_mpc_h, lambda k: power_spectrum(k, box), rng)
        for name, channel, values in evolve(delta, box.box_mpc_h, box, tell):
            file[name][CHANNELS[name][0].index(channel)] = values


def acquire(dataset: Any, raw: Any, out: Path, progress: Callable[[int, int | None], None]) -> None:
    """Simulate the box of a raw file."""
    phases = itertools.count(1)
    settings = {key: getattr(dataset.source, key) for key in ("grid", "box_mpc_h", "seed", "redshift")}
    simulate_box(out, index=raw.index, progress=lambda phase: progress(next(phases), 7), **settings)
