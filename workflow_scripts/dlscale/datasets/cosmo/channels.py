"""The channels of cosmological volumes, in the published order."""

from __future__ import annotations

from dlscale.data.transforms import DENSITY, TEMPERATURE, VELOCITY, Transform

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
