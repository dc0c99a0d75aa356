"""The peaks of a plan's devices: one rate of copies for each device, one of arithmetic for each device and format.

Each run measures them in its own process, at a moment of its own: on a machine that is not quiet they differ by a
multiple. What a device reached once it can reach, and a copy does not depend on the format that products are computed
in. So the greatest of all counts for all runs, or two runs of one device would have shares (MFU, MBU) that contradict
their speeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlscale.measure.records import Throughput
from dlscale.parallel.records import Device


@dataclass(frozen=True)
class Roof:
    """What bounds a computation in one format on one device."""

    device: Device
    nranks: int  #: That share it: those of a CPU share its memory, while each GPU has its own.
    dtype: str
    flops: float  #: FLOP/s of a matrix product.
    bytes_per_second: float  #: Of a copy.


def roofs(measured: Iterable[Throughput]) -> list[Roof]:
    """Return the roofs of all devices and formats, in the order in which they first come."""
    found = [(*_device(each), each.peaks) for each in measured if each.peaks]
    flops: dict[tuple[Device, int, str], float] = {}
    copies: dict[tuple[Device, int], float] = {}
    for device, nranks, peaks in found:
        key = device, nranks, peaks.dtype
        flops[key] = max(peaks.flops, flops.get(key, 0.0))
        copies[device, nranks] = max(peaks.bytes_per_second, copies.get((device, nranks), 0.0))
    return [
        Roof(device, nranks, dtype, rate, copies[device, nranks]) for (device, nranks, dtype), rate in flops.items()
    ]


def shared(measured: Iterable[Throughput]) -> list[Throughput]:
    """Return measurements of one plan, each with the peaks that they all share."""
    measured = list(measured)
    found = {(roof.device, roof.nranks, roof.dtype): roof for roof in roofs(measured)}

    def with_peaks(one: Throughput) -> Throughput:
        if one.peaks is None:
            return one
        roof = found[*_device(one), one.peaks.dtype]
        best = one.peaks.model_copy(update={"flops": roof.flops, "bytes_per_second": roof.bytes_per_second})
        return one.model_copy(update={"peaks": best})

    return [with_peaks(one) for one in measured]


def _device(measured: Throughput) -> tuple[Device, int]:
    """Return the device, and how many ranks share it."""
    return measured.device, 1 if measured.device.kind == "cuda" else measured.nranks
