"""The channels of cosmological volumes: names, units, transforms, in the published order, and their files."""

from __future__ import annotations

import h5py
import numpy as np

from dlscale.core.errors import UserError
from dlscale.data import store
from dlscale.data.manifest import Transform

#: The published form: densities (relative to the mean) as ln(x)/14. Cells without particles are exactly 0; the floor, a
#: thousandth of the mean, keeps them near the other values.
DENSITY = Transform("log", 0.0, 14.0, 1e-3)
#: Peculiar velocities in km/s; 1000 km/s bounds what boxes of ~100 Mpc/h hold.
VELOCITY = Transform("linear", 0.0, 1000.0)
#: Temperatures in K: 10^2 ... 10^8 K fill (-1, 1).
TEMPERATURE = Transform("log", 5 * float(np.log(10)), 3 * float(np.log(10)))

#: (channels, units, transforms) of both fields. Component x, y, z of a vector belongs to grid axis D, H, W.
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
