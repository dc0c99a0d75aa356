"""The channels of the published files, whose order is all that names them."""

from __future__ import annotations

#: Name and unit, in the order of FourCastNet (Pathak et al. 2022, arXiv:2202.11214; `parallel_copy_small_set.py` of its
#: code): what the tutorials call u10m is channel 0, their figure's t2m channel 2.
CHANNELS = {
    "u10": "m s**-1",
    "v10": "m s**-1",
    "t2m": "K",
    "sp": "Pa",
    "msl": "Pa",
    "t@850": "K",
    "u@1000": "m s**-1",
    "v@1000": "m s**-1",
    "z@1000": "m**2 s**-2",
    "u@850": "m s**-1",
    "v@850": "m s**-1",
    "z@850": "m**2 s**-2",
    "u@500": "m s**-1",
    "v@500": "m s**-1",
    "z@500": "m**2 s**-2",
    "t@500": "K",
    "z@50": "m**2 s**-2",
    "r@500": "%",
    "r@850": "%",
    "tcwv": "kg m**-2",
}
