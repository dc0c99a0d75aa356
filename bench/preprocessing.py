"""Speed, MB/s, and peak memory of the preprocess stage, compared with reading the same file."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

from bench.loading import cosmo_fields, write
from bench.measure import Options, Row, in_turns, seconds
from dlscale.data import preprocess, store
from dlscale.extensions.cosmo_unet.cosmo.channels import CHANNELS
from tests.conftest import ROOT

#: Bytes of the stage's buffers: less than the default, so that the stage must read a file in several blocks.
MEMORY = 64_000_000


def read(path: Path, rows: int = 4) -> None:
    """Read a complete volume, a few rows at a time, into one buffer."""
    with h5py.File(path) as file:
        for name in CHANNELS:
            found = file[name]
            buffer = np.empty((found.shape[0], rows, *found.shape[2:]), found.dtype)
            for first in range(0, found.shape[1], rows):
                found.read_direct(buffer, np.s_[:, first : first + rows])


PEAK = """
import sys
from pathlib import Path
import dlscale.extensions.cosmo_unet.cosmo.source, dlscale.data.preprocess
from dlscale.cli import main
from dlscale.data import store
store.MEMORY = int(sys.argv.pop(1))
assert not sys.argv[1:] or main(sys.argv[1:]) == 0
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(status["VmHWM"].split()[0])
"""


def peak_mb(*arguments: str) -> float:
    """Return the peak resident memory of a stage, MB; without arguments, the peak of its imports."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts")}
    command = [sys.executable, "-c", PEAK, str(MEMORY), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024 / 1e6


def volumes(options: Options) -> list[Row]:
    """Downsample a volume by 2; the peak memory should not grow if the volume's edge doubles."""
    store.MEMORY = MEMORY
    paths = [options.folder / f"raw{edge}.h5" for edge in ((64, 128) if options.quick else (128, 256))]
    for path in paths:
        write(path, cosmo_fields(int(path.stem.removeprefix("raw"))))
    small, large = paths
    megabytes = large.stat().st_size / 1e6
    source = {"kind": "files", "train": [str(large)], "valid": [str(small)]}
    settings = json.dumps({"kind": "cosmo", "source": source, "downsample": 2})
    out = options.folder / "piece.h5"

    def stage() -> None:
        part = f"train/{large.stem}"
        preprocess.main(argparse.Namespace(config=settings, part=part, piece=0, source=[str(large)], out=str(out)))

    def rate() -> float:
        out.unlink(missing_ok=True)  # delete the previous output outside the timing, because this takes time
        return megabytes / seconds(stage)

    found = in_turns(
        options.repetitions,
        {"stage": rate, "read": lambda: megabytes / seconds(lambda: read(large))},
    )
    counted = {"bytes read": megabytes * 1e6, "bytes written": float(out.stat().st_size)}

    def peak(path: Path, split: str) -> float:
        which = ["--config", settings, "--part", f"{split}/{path.stem}", "--source", str(path)]
        return peak_mb("preprocess", *which, "--out", str(out))

    return [
        Row("preprocess, downsample 2", "MB/s", found["stage"], "reading the file", found["read"], counted, target=0.3),
        Row(
            f"preprocess, peak memory, {figure(large)} input",
            "MB",
            [peak(large, "train")],
            f"a {figure(small)} input",
            [peak(small, "valid")],
            {"buffers, MB": MEMORY / 1e6, "imports alone, MB": peak_mb()},
        ),
    ]


def states(options: Options) -> list[Row]:
    """Downsample states from a NetCDF file by 2, compared with plain reads and with reads through xarray."""
    import xarray as xr

    store.MEMORY = MEMORY
    names, days, height, width = ("u10", "v10", "t2m"), 8 if options.quick else 120, 181, 360
    path, out = options.folder / "states.nc", options.folder / "states.h5"
    random = np.random.default_rng(0)
    times = np.datetime64("2001-01-01", "ns") + np.arange(4 * days) * np.timedelta64(6, "h")
    axes = {"time": times, "latitude": np.linspace(90, -90, height), "longitude": np.arange(width) * 1.0}
    values = {name: (list(axes), random.standard_normal((4 * days, height, width), np.float32)) for name in names}
    made = xr.Dataset(values, axes)
    for name in names:
        made[name].attrs["units"] = "1"
    made.to_netcdf(path, engine="h5netcdf")
    megabytes = path.stat().st_size / 1e6
    split = {"train": ["2001-01-01", str(times[-1])[:10]], "valid": ["2002-01-01", "2002-01-02"]}
    source = {"kind": "files", "paths": [str(path)]}
    given = {"kind": "era5", "source": source, "channels": list(names), "split": split, "downsample": 2}
    settings = json.dumps(given)

    def stage() -> None:
        which = {"part": "train/2001", "piece": 0, "source": [str(path)]}
        preprocess.main(argparse.Namespace(config=settings, out=str(out), **which))

    def rate() -> float:
        out.unlink(missing_ok=True)
        return megabytes / seconds(stage)

    def library(rows: int = 16) -> None:
        with xr.open_dataset(path, engine="h5netcdf", cache=False) as opened:
            for first in range(0, 4 * days, rows):
                for name in names:
                    opened[name].variable[first : first + rows].load()

    def plainly(rows: int = 16) -> None:
        buffer = np.empty((rows, height, width), np.float32)
        with h5py.File(path) as file:
            for first in range(0, 4 * days, rows):
                for name in names:
                    file[name].read_direct(buffer, np.s_[first : first + rows])

    turns = {
        "stage": rate,
        "xarray": lambda: megabytes / seconds(library),
        "plain": lambda: megabytes / seconds(plainly),
    }
    found = in_turns(options.repetitions, turns)
    counted = {"bytes read": megabytes * 1e6, "bytes written": float(out.stat().st_size)}
    name = "preprocess, NetCDF, downsample 2"
    return [
        Row(name, "MB/s", found["stage"], "reading the file", found["plain"], counted),
        Row(name, "MB/s", found["stage"], "reading the file with xarray", found["xarray"], counted, target=0.3),
    ]


def figure(path: Path) -> str:
    """Return a file's size in MB, for a label."""
    return f"{path.stat().st_size / 1e6:.0f} MB"
