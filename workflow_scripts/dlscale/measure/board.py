"""TensorBoard's scalars of what was measured of a run, beside those of its training: a folder for each stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dlscale.core import telemetry
from dlscale.core.records import MODES, Profile, Throughput


def write_throughput(folder: Path, results: Throughput) -> None:
    """Show samples/s, MFU, MBU and memory; what was not measured has no scalar."""
    modes = {f"throughput/{mode.lower()}": results.mode(mode) for mode in MODES}
    scalars = {name: trials.mean for name, trials in modes.items() if trials}
    others = {"mfu": results.mfu(), "mbu": results.mbu(), "peak_memory_bytes": results.peak_memory_bytes}
    _write(folder, {**scalars, **others})


def write_profile(folder: Path, profile: Profile) -> None:
    """Show what each profiler saw of the ranges of a step, ms a step on the host and of the device's work."""
    scalars = dict[str, float | None]()
    for tool in profile.tools:
        for name, time in tool.ranges.items():
            scalars[f"profile_{tool.name}_ms/{name}"] = 1e3 * time.seconds
            if time.device_seconds is not None:
                scalars[f"profile_{tool.name}_device_ms/{name}"] = 1e3 * time.device_seconds
    _write(folder, scalars)


def write_telemetry(folder: Path, file: Path) -> None:
    """Show what the first node did while a stage ran, from its telemetry: means over time, energy, time held back."""
    found = telemetry.summary(telemetry.read(file))
    scalars = {f"telemetry/{name}": value for name, value in found.means.items()}
    others = {"seconds": found.seconds, "joules": found.energy.total, "throttled_seconds": found.throttled_seconds}
    _write(folder, {**scalars, **{f"telemetry/{name}": value for name, value in others.items()}})


def _write(folder: Path, scalars: Mapping[str, float | None]) -> None:
    """Write an event file of the scalars that are not None into `folder`, whose older ones are removed."""
    from torch.utils.tensorboard import SummaryWriter

    for events in folder.glob("events.out.tfevents.*"):
        events.unlink()
    # From step 0: a TensorBoard that is open forgets the points of the file that was removed.
    with SummaryWriter(str(folder), purge_step=0) as board:
        for name, value in scalars.items():
            if value is not None:
                board.add_scalar(name, value, 0)
