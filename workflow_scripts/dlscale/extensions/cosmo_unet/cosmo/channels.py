"""Channels of cosmological volumes, in the published order: names, units and transforms; access to their files."""

from __future__ import annotations

import h5py
import numpy as np

from dlscale.core.errors import UserError
from dlscale.data import store
from dlscale.data.manifest import Transform

#: SC22's transform of densities x (relative to the mean): ln(x)/14. Cells without particles have density 0; the
#: floor, a thousandth of the mean, keeps the logarithms of these cells near the other values.
DENSITY = Transform("log", 0.0, 14.0, 1e-3)
#: Transform of peculiar velocities in km/s; in boxes of about 100 Mpc/h velocities are below 1000 km/s.
VELOCITY = Transform("linear", 0.0, 1000.0)
#: Transform of temperatures in K: 10^2 to 10^8 K become -1 to 1.
TEMPERATURE = Transform("log", 5 * float(np.log(10)), 3 * float(np.log(10)))

#: Field → channels, units and transforms. The components x, y and z of a vector belong to the grid axes D, H and W.
CHANNELS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[Transform, ...]]] = {
    "Nbody": (
        ("dm_density", "dm_velocity_x", "dm_velocity_y", "dm_velocity_z"),
        ("mean density", "km/s", "km/s", "km/s"),
        (DENSITY, VELOCITY, VELOCITY, VELOCITY),
    ),
    "Hydro": (
        ("gas_density", "gas_velocity_x", "gas_velocity_y", "gas_velocity_z", "gas_temperature"),
        ("mean density", "km/s", "km/s", "km/s", "K"),
        (DENSITY, VELOCITY, VELOCITY, VELOCITY, TEMPERATURE),
    ),
}


def open_volumes(file: h5py.File) -> dict[str, h5py.Dataset]:
    """Return both volumes [C, D, H, W] of an open file; raise `UserError` for other channels or sizes."""
    volumes = {name: store.dataset(file, name, len(spec[0]), ndim=4) for name, spec in CHANNELS.items()}
    sizes = [values.shape[1:] for values in volumes.values()]
    if len(set(sizes)) > 1:
        raise UserError(
            f"{file.filename}: {' and '.join(volumes)} differ in size ({', '.join(map(str, sizes))}); expected the "
            "same grid"
        )
    return volumes
